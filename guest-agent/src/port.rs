//! The way to the host if the guest's kernel has no vsock: a virtio console port called
//! [`STREAM_NAME`].

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::{GREETING, STREAM_NAME};

/// The kernel's directory of ports. Each has a name.
const PORTS: &str = "/sys/class/virtio-ports";
/// The kernel's directory of virtio devices. Each has a type.
const DEVICES: &str = "/sys/bus/virtio/devices";
/// The type of a console.
const CONSOLE: &str = "0x0003";
/// How long the driver may take to learn the device's ports.
const OPEN_TIMEOUT: Duration = Duration::from_secs(30);

/// Opens the port and sends the greeting, by which the host learns that this way is used.
pub fn open() -> io::Result<File> {
    let begun = Instant::now();
    let path = loop {
        if let Some(path) = named(Path::new(PORTS), STREAM_NAME) {
            break path;
        }
        // A console without a driver never gets a port. That cannot be detected here.
        if !has_console(Path::new(DEVICES)) || begun.elapsed() > OPEN_TIMEOUT {
            return Err(io::Error::other("no such port"));
        }
        // The kernel announces ports only by uevents, which would need an earlier subscription.
        sleep(Duration::from_millis(5));
    };
    let mut port = OpenOptions::new().read(true).write(true).open(path)?;
    // This write blocks until the kernel knows that the other end is open. A read before that would
    // return EOF.
    port.write_all(GREETING)?;
    Ok(port)
}

/// The device node of the port called `name` in the directory `ports`.
fn named(ports: &Path, name: &str) -> Option<PathBuf> {
    let is_it = |entry: &fs::DirEntry| {
        fs::read_to_string(entry.path().join("name")).is_ok_and(|text| text.trim_end() == name)
    };
    let found = fs::read_dir(ports).ok()?.flatten().find(is_it)?;
    Some(Path::new("/dev").join(found.file_name()))
}

fn has_console(devices: &Path) -> bool {
    let is_one = |entry: fs::DirEntry| {
        fs::read_to_string(entry.path().join("device")).is_ok_and(|text| text.trim_end() == CONSOLE)
    };
    fs::read_dir(devices).is_ok_and(|mut entries| entries.any(|entry| entry.is_ok_and(is_one)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_found_by_its_name_and_a_console_by_its_type() {
        let dir = std::env::temp_dir().join(format!("vellum-ports-{}", std::process::id()));
        for (entry, file, text) in
            [("vport0p0", "name", "other\n"), ("vport0p1", "name", "it\n"), ("virtio3", "device", "0x0003\n")]
        {
            fs::create_dir_all(dir.join(entry)).unwrap();
            fs::write(dir.join(entry).join(file), text).unwrap();
        }
        assert_eq!(named(&dir, "it"), Some("/dev/vport0p1".into()));
        assert_eq!((named(&dir, "i"), named(&dir.join("none"), "it")), (None, None));
        assert!(has_console(&dir) && !has_console(&dir.join("vport0p1")));
        fs::remove_dir_all(&dir).unwrap();
    }
}
