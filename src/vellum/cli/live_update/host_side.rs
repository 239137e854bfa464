//! What a machine's process has of the host and its state lacks: the command line, what it writes to,
//! pins, devices as they were written.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use super::restore::STARTED_AS;
use vellum_control::ChildDevice;
use vellum_machine::handoff;
use vellum_migration::live_update::HostSide;
use vellum_sys::file::path_of;

/// The words with which a machine was started first, from the command line of its process.
pub(super) fn started_as(line: &[u8]) -> Vec<String> {
    let words = line.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned());
    let mut words: Vec<String> = words.collect();
    words.pop();
    let first = words.iter().find_map(|word| word.strip_prefix(STARTED_AS));
    first.and_then(|first| serde_json::from_str(first).ok()).unwrap_or(words)
}

/// The CPU to which each vCPU of process `pid` is pinned. None if they are not.
fn pins(pid: u32) -> Option<Vec<usize>> {
    let allowed = |directory: &Path| {
        let status = std::fs::read_to_string(directory.join("status")).ok()?;
        let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
        Some(list.trim().to_owned())
    };
    let process = PathBuf::from(format!("/proc/{pid}"));
    // The first thread is not pinned, unless the whole process is.
    let others = allowed(&process)?;
    let mut pins = Vec::new();
    for task in std::fs::read_dir(process.join("task")).ok()?.flatten() {
        let Ok(name) = std::fs::read_to_string(task.path().join("comm")) else { continue };
        let Some(Ok(vcpu)) = name.trim().strip_prefix("vcpu").map(str::parse::<usize>) else { continue };
        let own = allowed(&task.path())?;
        // A list of several CPUs is no pin.
        pins.push((vcpu, own.parse().ok().filter(|_| own != others)?));
    }
    pins.sort_unstable();
    (!pins.is_empty()).then(|| pins.into_iter().map(|(_, cpu)| cpu).collect())
}

/// What a machine's process has of the host.
pub(super) fn host_side(list: handoff::List, descriptors: &[OwnedFd], pid: u32) -> HostSide {
    let output = list.serial.as_ref().and_then(|serial| descriptors.get(serial.output?));
    let serial = match (output, list.serial.as_ref().is_some_and(|serial| serial.slave.is_some())) {
        (_, true) => "pty".to_owned(),
        (Some(output), false) => {
            let path = std::fs::read_link(path_of(output)).unwrap_or_default();
            let is_file = std::fs::metadata(&path).is_ok_and(|about| about.is_file());
            if is_file { format!("file={}", path.display()) } else { "null".into() }
        }
        (None, false) => "null".into(),
    };
    HostSide {
        serial,
        sandbox: list.sandbox,
        user: list.user,
        limit_ms: list.limit_ms,
        result: list.result,
        lock: list.lock,
        dirty_ring: list.dirty_ring,
        pins: pins(pid),
        devices: list
            .devices
            .into_iter()
            .map(|device| ChildDevice { kind: device.kind, config: device.written })
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_that_vcpus_are_pinned_to_are_found() {
        let cpus = vellum_sys::host::allowed_cpus().unwrap();
        assert_eq!(pins(std::process::id()), None);
        let (pinned, is_pinned) = std::sync::mpsc::channel();
        let (end, ends) = std::sync::mpsc::channel::<()>();
        let cpu = cpus[0];
        let body = move || {
            pinned.send(vellum_sys::affinity::pin(cpu)).unwrap();
            let _ = ends.recv();
        };
        let vcpu = std::thread::Builder::new().name("vcpu0".into()).spawn(body).unwrap();
        is_pinned.recv().unwrap().unwrap();
        // A process that may use one CPU has pinned nothing.
        assert_eq!(pins(std::process::id()), (cpus.len() > 1).then(|| vec![cpu]));
        drop(end);
        vcpu.join().unwrap();
    }

    #[test]
    fn the_first_command_line_is_carried_from_save_to_save() {
        let line = b"vellum\0live-update\0restore\0--name\0a\0--started-as=[\"vellum\",\"run\",\"a b\"]\0--child=13\0";
        assert_eq!(started_as(line), ["vellum", "run", "a b"]);
        assert_eq!(started_as(b"vellum\0run\0"), ["vellum", "run"]);
    }
}
