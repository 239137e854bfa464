//! A host whose first process is systemd. This program makes the disk the root, becomes systemd, and
//! runs the job as a service. It does so after each boot, so the job's command runs again then.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// The argument of the service.
pub const SERVICE: &str = "service";

/// The service. It shows what it says of itself on the console.
const UNIT: &str = "[Unit]\nDescription=The job of an emulated host\n\
    [Service]\nExecStart=/init service\nStandardOutput=journal+console\nStandardError=journal+console\n";

/// Becomes systemd, with the job as a service. Returns only if that fails.
pub fn become_it() -> io::Result<()> {
    const UNITS: &str = "/etc/systemd/system";
    let wants = format!("{UNITS}/multi-user.target.wants");
    fs::create_dir_all(&wants)?;
    fs::write(format!("{UNITS}/bed.service"), UNIT)?;
    match symlink("../bed.service", format!("{wants}/bed.service")) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => (),
        linked => linked?,
    }
    Err(Command::new("/sbin/init").env_clear().env("TERM", "linux").exec())
}
