//! The Linux guest with the agent: start, requests, end.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::trace_point::TracePoint;
use crate::{COUNTED, Cli, said};

/// The guest's agent is asked this often, five times a second, before the boot counts as failed.
const MAX_TRIES: usize = 3000;
/// The guest's name.
const NAME: &str = "tasks";
/// The size of the guest's disk. For kexec the disk holds the kernel and the initramfs instead,
/// each in whole blocks.
const DISK_BYTES: u64 = 8 << 20;
pub const BLOCK: usize = 4096;

/// A Linux guest with the agent.
pub struct Guest(Child);

/// The counts during one request.
pub struct Counted {
    pub switches: f64,
    /// One for each of [`COUNTED`].
    pub times: Vec<f64>,
    pub ticks: f64,
}

impl Guest {
    pub fn start(cli: &Cli, cpus: u32, parameters: &str) -> io::Result<Self> {
        let disk = "/tmp/tasks-disk";
        let content = if cli.teardown {
            let mut images = images(cli)?;
            images.iter_mut().for_each(|image| image.resize(image.len().next_multiple_of(BLOCK), 0));
            images.concat()
        } else {
            vec![0; DISK_BYTES as usize]
        };
        fs::write(disk, content)?;
        let mut line = format!("{parameters} nokaslr pci=off noxsave quiet panic=-1 reboot=t");
        if cli.no_pcid {
            line += " nopcid";
        }
        let mut command = Command::new("/bin/vellum");
        command.arg("run").arg("--kernel").arg(cli.kernel.as_ref().ok_or_else(none)?);
        command.arg("--initrd").arg(cli.initrd.as_ref().ok_or_else(none)?);
        command.args(["--name", NAME, "--vsock", "/tmp/tasks-vsock", "--disk", disk, "--params", &line]);
        command.args(["--cpus", &cpus.to_string(), "--memory", &format!("{}m", cli.memory)]);
        command.args(["--serial", "file=/tmp/tasks-console"]);
        command.args(["--cr3-cache", if cli.cr3_cache { "on" } else { "off" }]);
        let mut guest = Self(command.stdin(Stdio::null()).spawn()?);
        guest.answers(r#"{"do":"facts"}"#, |_| true)?;
        // With little memory the kernel allows fewer tasks than five groups need.
        guest.shell("echo 2000 > /proc/sys/kernel/threads-max")?;
        Ok(guest)
    }

    /// Repeats `request` until the agent's answer is `wanted`.
    pub fn answers(&mut self, request: &str, wanted: impl Fn(&[Value]) -> bool) -> io::Result<()> {
        for _ in 0..MAX_TRIES {
            if self.asked(request).is_ok_and(|events| wanted(&events)) {
                return Ok(());
            }
            if let Some(status) = self.0.try_wait()? {
                return Err(io::Error::other(format!("the guest ended: {status}: {}", console())));
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        Err(io::Error::other(format!("no agent came up: {}", console())))
    }

    /// Runs a shell command that must succeed.
    pub fn shell(&self, line: &str) -> io::Result<()> {
        let request = serde_json::json!({"do": "exec", "command": ["sh", "-c", line]});
        let events = self.asked(&request.to_string())?;
        match events.iter().any(|event| event["event"] == "exit" && event["code"] == 0) {
            true => Ok(()),
            false => Err(io::Error::other(format!("`{line}`: {events:?}"))),
        }
    }

    pub fn asked(&self, request: &str) -> io::Result<Vec<Value>> {
        said(Command::new("/bin/vellum").args(["exec", NAME, "--request", request]))
    }

    /// Sends `request` and counts what the guest does meanwhile.
    pub fn counted(&self, request: &str) -> io::Result<Counted> {
        let before = self.seen()?;
        let points = COUNTED.iter().map(|(_, name, filter)| TracePoint::count(name, *filter));
        let points = points.collect::<io::Result<Vec<_>>>()?;
        self.asked(request)?;
        let times = points.iter().map(TracePoint::so_far).collect::<io::Result<_>>()?;
        drop(points);
        let after = self.seen()?;
        Ok(Counted { switches: after.0 - before.0, times, ticks: after.1 - before.1 })
    }

    /// The output of a command in the guest.
    pub fn text(&self, command: &[&str]) -> io::Result<String> {
        let events = self.asked(&serde_json::json!({"do": "exec", "command": command}).to_string())?;
        Ok(events.iter().filter_map(|event| event.get("text")?.as_str()).collect())
    }

    /// Context switches and timer interrupts of the guest since its boot.
    fn seen(&self) -> io::Result<(f64, f64)> {
        let text = self.text(&["cat", "/proc/stat", "/proc/interrupts"])?;
        let number = |word: &str| {
            let line = text.lines().find_map(|line| line.trim().strip_prefix(word))?;
            line.split_whitespace().next()?.parse::<f64>().ok()
        };
        number("ctxt")
            .zip(number("LOC:"))
            .ok_or_else(|| io::Error::other(format!("no ctxt or LOC in: {text}")))
    }

    pub fn end(mut self) -> io::Result<()> {
        self.asked(r#"{"do":"power-off"}"#).ok();
        let status = self.0.wait()?;
        if status.success() {
            Ok(())
        } else {
            Err(io::Error::other(format!("the guest ended: {status}: {}", console())))
        }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // After `end` the guest is gone and both calls fail.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The guest's kernel and its initramfs.
pub fn images(cli: &Cli) -> io::Result<[Vec<u8>; 2]> {
    let read = |path: &Option<PathBuf>| fs::read(path.as_ref().ok_or_else(none)?);
    Ok([read(&cli.kernel)?, read(&cli.initrd)?])
}

fn none() -> io::Error {
    io::Error::other("no guest was asked for")
}

fn console() -> String {
    fs::read_to_string("/tmp/tasks-console").unwrap_or_default()
}
