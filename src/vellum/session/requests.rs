//! Requests of control clients to a session. Those that concern only the machine go to the machine.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Instant;

use serde_json::{Value, json};

use super::{Cause, Session};
use vellum_control::operation::News;
use vellum_control::server::Heard;
use vellum_control::{Do, Event, Lending, Status};
use vellum_machine::{SessionMachine, handoff};
use vellum_sys::socket::MAX_DESCRIPTORS;

impl Session {
    /// Handles all pending requests. Returns a cause if the machine is to end.
    pub(super) fn obey<P: SessionMachine>(&mut self, machine: &mut P) -> Option<Cause> {
        let mut cause = None;
        while let Ok(heard) = self.heard.try_recv() {
            let mut asked = match heard {
                Heard::Asked(asked) => asked,
                Heard::Gone(connection) => {
                    machine.client_gone(connection);
                    continue;
                }
            };
            let by = asked.by;
            let descriptors = std::mem::take(&mut asked.descriptors);
            if let Do::Lend { from } = asked.what {
                match self.lend(machine, from) {
                    Ok((list, lent)) => asked.answer_with(Ok(list), &lent),
                    Err(error) => asked.answer(Err(error)),
                }
                continue;
            }
            if asked.what == (Do::ForkBase {}) {
                match machine.base() {
                    Ok((base, number)) => asked.answer_with(Ok(json!({ "base": number })), &[base]),
                    Err(error) => asked.answer(Err(error)),
                }
                continue;
            }
            if asked.what == (Do::LiveUpdateMemory {}) {
                match machine.preserved() {
                    Ok(ram) => asked.answer_with(Ok(json!({})), &[ram]),
                    Err(error) => asked.answer(Err(error)),
                }
                continue;
            }
            let answer = match &asked.what {
                Do::Pause {} => self.pause(machine, by.id).map(|us| json!({ "us": us })),
                Do::Resume { force: false } => {
                    self.resume(machine, Some(by.id));
                    Ok(json!({}))
                }
                Do::Status {} => Ok(serde_json::to_value(self.status(machine)).expect("plain data")),
                Do::Stop {} => machine.may_end().map(|()| {
                    cause = Some(Cause::Stop);
                    json!({})
                }),
                // The server handles this request itself.
                Do::Events {} => Ok(json!({})),
                what => machine.ask(by, what, descriptors),
            };
            asked.answer(answer);
        }
        cause
    }

    /// What another process needs to take over from this one: the list, and its descriptors from
    /// index `from` on.
    fn lend<P: SessionMachine>(&self, machine: &mut P, from: usize) -> Result<(Value, Vec<OwnedFd>), String> {
        if self.config.children.is_some() {
            return Err(
                "it waits for commands, and the process that takes it over would not; stop it, and start it \
                        with the other program"
                    .into(),
            );
        }
        let refused = |error: io::Error| format!("the host refuses a descriptor: {error}");
        let mut lent = handoff::HandoffFds::default();
        lent.list.version = handoff::VERSION;
        let standard = [lent.add_copy(io::stdin()), lent.add_copy(io::stdout()), lent.add_copy(io::stderr())];
        lent.list.standard = standard.into_iter().collect::<Result<_, _>>().map_err(refused)?;
        lent.list.sandbox = self.config.sandbox.to_string();
        lent.list.user = self.config.user.map(|user| (user.uid, user.gid));
        lent.list.limit_ms = self.left();
        lent.list.result = self.config.result.clone();
        if let (Some(control), Some(path)) = (&self.control, &self.config.control) {
            let socket = control.lock().expect("nobody panics with it").lend().map_err(refused)?;
            lent.list.control = Some(handoff::Socket { path: path.clone(), descriptor: lent.add(socket) });
        }
        if let Some(ours) = &self.config.lent {
            lent.list.supervisor = Some(lent.add_copy(&*ours.supervisor).map_err(refused)?);
        }
        machine.lend(&mut lent)?;
        let lending = Lending {
            list: serde_json::to_value(&lent.list).map_err(|error| error.to_string())?,
            descriptors: lent.descriptors.len(),
        };
        let part = lent.descriptors.into_iter().skip(from).take(MAX_DESCRIPTORS).collect();
        Ok((serde_json::to_value(lending).expect("plain data"), part))
    }

    /// Pauses the machine, if it is not paused. Returns the duration in microseconds.
    fn pause<P: SessionMachine>(&mut self, machine: &mut P, id: u64) -> Result<u64, String> {
        if machine.is_paused() {
            return Ok(0);
        }
        let start = Instant::now();
        machine.pause().map_err(|error| error.to_string())?;
        let us = start.elapsed().as_micros() as u64;
        self.listeners.tell(&News { id: Some(id), event: Event::Paused { us } });
        Ok(us)
    }

    pub(super) fn resume<P: SessionMachine>(&mut self, machine: &mut P, id: Option<u64>) {
        if machine.is_paused() {
            machine.resume();
            self.listeners.tell(&News { id, event: Event::Resumed {} });
        }
    }

    fn status<P: SessionMachine>(&self, machine: &P) -> Status {
        let outline = machine.info();
        Status {
            pid: std::process::id(),
            state: machine.state(),
            numbered: true,
            operation: machine.under_way(),
            vcpus: outline.vcpus,
            memory: outline.memory,
            backing: outline.backing.map(|backing| backing.to_string()),
            forked: outline.forked,
            forked_from: self.config.forked_from,
            done: machine.progress().map(|progress| progress.done),
            balloon: outline.balloon,
            vsock: outline.vsock.map(|path| path.display().to_string()),
            dirty_ring: outline.dirty_ring,
            cr3_cache: outline.cr3_cache,
            tracker: machine.tracker().map(str::to_owned),
            devices: outline.devices,
            disks: outline.disks,
            overlays: outline.overlays,
            stays: outline.stays,
            fork_stays: outline.fork_stays,
            children: self.config.children.clone(),
            limit_ms: self.left(),
        }
    }

    /// Milliseconds until the time limit, if there is one.
    fn left(&self) -> Option<u64> {
        let left = self.deadline?.saturating_duration_since(Instant::now());
        Some(left.as_millis() as u64)
    }
}
