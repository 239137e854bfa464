//! Lists the test hosts that this machine has, and the command that installs what the others need.

use std::collections::BTreeSet;
use std::path::Path;

use crate::hosts::HOSTS;
use crate::{kernel, tool};

/// The packages that have the missing ones of `programs`.
pub fn missing<'a>(programs: &[&'a str]) -> BTreeSet<&'a str>
where
    'static: 'a,
{
    programs
        .iter()
        .filter(|program| tool::find(program).is_none())
        .map(|program| tool::package_of(program))
        .collect()
}

/// Whether this process can use /dev/kvm. The error has the reason and the remedy.
pub fn kvm() -> std::result::Result<(), String> {
    let path = Path::new("/dev/kvm");
    match std::fs::OpenOptions::new().read(true).write(true).open(path) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Err(
            "this machine has no /dev/kvm: load KVM's module, or use an emulated host: cargo lab test svm"
                .into(),
        ),
        Err(error) => Err(format!("/dev/kvm: {error}; `vellum doctor` says what to do")),
    }
}

/// Prints a line per test host. The exit code is 1 if something is missing.
pub fn print() -> u8 {
    let mut wanted = BTreeSet::new();
    match kvm() {
        Ok(()) => println!("metal    yes  this machine's own KVM"),
        Err(why) => println!("metal    no   {why}"),
    }
    let hosts = HOSTS.iter().map(|host| (host.name(), host.purpose(), host.programs()));
    let kernels = ("kernels", "building host kernels, pristine and patched", kernel::PROGRAMS);
    for (name, purpose, programs) in hosts.chain([kernels]) {
        let missing = missing(programs);
        let verdict = if missing.is_empty() { "yes" } else { "no " };
        println!("{name:8} {verdict}  {purpose}");
        wanted.extend(missing);
    }
    match install_line(&wanted) {
        None => 0,
        Some(line) => {
            println!("\nTo get what is missing: {line}");
            1
        }
    }
}

/// The command that installs `packages`. `None` if there are none.
pub fn install_line(packages: &BTreeSet<&str>) -> Option<String> {
    let names: Vec<&str> = packages.iter().copied().collect();
    (!names.is_empty()).then(|| format!("apt-get install --no-install-recommends {}", names.join(" ")))
}
