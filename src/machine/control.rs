//! What a machine does when the control socket tells it to. The socket and its protocol are `control/`.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::time::Instant;

use serde_json::json;

use super::Machine;
use crate::control::{Do, Event, Status};
use crate::devices::console;
use crate::vm::vcpu;

impl Machine {
    /// Does it; true if the machine is to end.
    pub(super) fn obey(&mut self) -> bool {
        while let Ok(mut asked) = self.asked.try_recv() {
            let result = match asked.what {
                Do::Pause {} => self.pause().map_err(|error| error.to_string()),
                Do::Resume {} => {
                    self.resume();
                    Ok(json!({}))
                }
                Do::Status {} => Ok(serde_json::to_value(self.status()).expect("plain data")),
                Do::Balloon { bytes } => self.inflate(bytes),
                Do::Stop {} => {
                    asked.answer(Ok(json!({})));
                    return true;
                }
                Do::Events {} => Ok(json!({})),
                Do::Serial {} => self.lead_serial_to(std::mem::take(&mut asked.descriptors)),
            };
            asked.answer(result);
        }
        false
    }

    /// Stops vCPUs, then devices: afterwards nothing touches guest memory. In vain if it is paused already.
    pub fn pause(&mut self) -> Result<serde_json::Value, vcpu::Error> {
        let start = Instant::now();
        vcpu::pause_all(&self.vcpus)?;
        self.virtio.quiesce();
        let us = start.elapsed().as_micros() as u64;
        if !std::mem::replace(&mut self.paused, true) {
            self.listeners.tell(&Event::Paused { us });
        }
        Ok(json!({ "us": us }))
    }

    /// Lets devices, then vCPUs go on.
    pub fn resume(&mut self) {
        if std::mem::take(&mut self.paused) {
            self.virtio.resume();
            vcpu::resume_all(&self.vcpus);
            self.listeners.tell(&Event::Resumed {});
        }
    }

    fn status(&self) -> Status {
        Status {
            pid: std::process::id(),
            state: if self.paused { "paused" } else { "running" }.into(),
            vcpus: self.vcpus.len(),
            memory: self.vm.memory.config.size,
            balloon: self.virtio.balloon.as_ref().map(|(balloon, _)| balloon.actual()),
            vsock: self.virtio.vsock.as_ref().map(|path| path.display().to_string()),
        }
    }

    fn lead_serial_to(&self, mut descriptors: Vec<OwnedFd>) -> Result<serde_json::Value, String> {
        let file = File::from(descriptors.pop().ok_or("it takes a descriptor")?);
        console::check_output(&file).map_err(|error| error.to_string())?;
        let mut console = self.console.lock().expect("nobody panics with it");
        console.lead_to(file).map_err(|error| error.to_string())?;
        Ok(json!({}))
    }

    fn inflate(&self, bytes: u64) -> Result<serde_json::Value, String> {
        let (balloon, device) =
            self.virtio.balloon.as_ref().ok_or("this machine has no balloon: start it with --balloon")?;
        balloon.set_target(bytes, device);
        Ok(json!({}))
    }
}
