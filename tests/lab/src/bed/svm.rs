//! `svm`: QEMU emulates an AMD processor with SVM, so kvm-amd runs in there, with nested paging or without.
//!
//! What it emulates wrongly: VMRUN with an injected interrupt leaves that vector in QEMU's own `exception_index`
//! (target/i386/tcg/sysemu/svm_helper.c, 7.2), and a time slice that ends before the guest's next exit delivers it again,
//! interrupt flag or no. With an instruction-counting clock slices end at any place, and a Linux guest with two vCPUs hangs
//! now and then (with PV EOI, which leaves out the exit that would come next, always). Two CPUs in real time (`races`) are
//! interrupted by what exits from the guest, and do no harm: Linux guests belong there.
//!
//! Before QEMU 8.1, two CPUs at once: code that one patches while the other runs it stays as it was in the other's translation
//! (a host took breakpoints for ever at a static key in its scheduler), and processes of the host and whole guests end
//! without a reason of their own, a guest under load every ten minutes or so. Such hosts are emulated by a later QEMU,
//! fetched and not installed. Those that count instructions stay with the installed one, whose figures are on record.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::Request;
use crate::cache::Cache;
use crate::debian::{self, Archive};
use crate::{Error, Result, tool};

/// Where the host's console goes.
pub enum Console<'a> {
    /// Into a log; the results line is the emulator's standard output.
    File(&'a Path),
    /// To the terminal.
    Terminal,
}

/// The oldest QEMU that this bed was seen to work with.
const QEMU: (u32, u32) = (7, 2);

/// The oldest whose two CPUs can be trusted, and Debian's suite that has a later one which runs on bookworm.
const QEMU_FOR_RACES: (u32, u32) = (8, 1);
const SUITE: &[&str] = &["bookworm-backports"];
/// The program, its option ROMs, its BIOS.
const PACKAGES: [&str; 3] = ["qemu-system-x86", "qemu-system-data", "seabios"];

/// A QEMU.
pub struct Qemu {
    program: PathBuf,
    /// Where its firmware is, if not where it looks by itself.
    firmware: Vec<PathBuf>,
}

impl Qemu {
    /// The installed one, or how to get it.
    pub fn installed() -> Result<Self> {
        let program = tool::need("qemu-system-x86_64")?;
        let this = Self { program, firmware: Vec::new() };
        let said = this.said()?;
        match version(&said) {
            Some(version) if version >= QEMU => Ok(this),
            _ => Err(Error::Package(format!(
                "{} is {:?}; this bed needs QEMU {}.{} or later: apt-get install qemu-system-x86",
                this.program.display(),
                said.lines().next().unwrap_or_default(),
                QEMU.0,
                QEMU.1
            ))),
        }
    }

    /// The one for a host: of a later suite for two CPUs at once, where the installed one is too old for that.
    pub fn get(cache: &Cache, races: bool) -> Result<Self> {
        let installed = Self::installed()?;
        if !races || version(&installed.said()?) >= Some(QEMU_FOR_RACES) {
            return Ok(installed);
        }
        Self::fetched(cache).or_else(|error| {
            eprintln!(
                "lab: {error}\nlab: the installed QEMU emulates the two CPUs; guests may end for no reason of their own"
            );
            Ok(installed)
        })
    }

    fn fetched(cache: &Cache) -> Result<Self> {
        let resolve = |name: &str| {
            debian::recorded(cache, &format!("{name}-for-races"), || {
                Archive::open(cache, SUITE)?.resolve(name)
            })
        };
        let version = resolve(PACKAGES[0])?.version;
        let tree = cache.entry(&format!("qemu/{version}"), |out| {
            cache.need_mib(200)?;
            let archive = Archive::open(cache, SUITE)?;
            for name in PACKAGES {
                let deb = archive.download(&resolve(name)?, out)?;
                debian::unpack(&deb, out)?;
                fs::remove_file(&deb).map_err(Error::file("remove", &deb))?;
            }
            // Another distribution's libraries may not do.
            Self::unpacked(out).said().map(drop)
        })?;
        Ok(Self::unpacked(&tree))
    }

    fn unpacked(tree: &Path) -> Self {
        let firmware = ["qemu", "seabios"].map(|name| tree.join("usr/share").join(name)).to_vec();
        Self { program: tree.join("usr/bin/qemu-system-x86_64"), firmware }
    }

    fn said(&self) -> Result<String> {
        tool::text(Command::new(&self.program).arg("--version"))
    }
}

/// `QEMU emulator version 7.2.22 (…)`.
fn version(said: &str) -> Option<(u32, u32)> {
    let mut numbers = said.split("version ").nth(1)?.split(['.', ' ']);
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// The whole command line.
pub fn command(qemu: &Qemu, request: &Request, initrd: &Path, console: &Console) -> Command {
    let mut command = Command::new(&qemu.program);
    for dir in &qemu.firmware {
        command.arg("-L").arg(dir);
    }
    // 512 MiB of translated code: the default is flushed again and again by a kernel that runs a kernel.
    if request.races {
        command.args(["-accel", "tcg,tb-size=512,thread=multi", "-smp", "2"]);
    } else {
        // One instruction is 2 ns. Idle time is skipped, except where a person would see the clock run away.
        let sleep = if matches!(console, Console::Terminal) { "on" } else { "off" };
        command.args(["-accel", "tcg,tb-size=512", "-smp", "1"]);
        command.args(["-icount", &format!("shift=1,sleep={sleep}")]);
    }
    command
        .args(["-cpu", "EPYC,+svm,+npt", "-nodefaults", "-no-reboot", "-display", "none"])
        .args(["-m", &format!("{}M", request.memory_mib)])
        .arg("-kernel")
        .arg(request.kernel.image())
        .arg("-initrd")
        .arg(initrd);
    match console {
        Console::File(log) => {
            command.args(["-serial", &format!("file:{}", log.display()), "-serial", "stdio"]);
        }
        Console::Terminal => {
            command.args(["-serial", "mon:stdio"]);
        }
    }
    command.args(["-append", &request.command_line()]);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_qemu_is_told_from_a_new_one() {
        let said = |number| format!("QEMU emulator version {number} (Debian 1:7.2)\nCopyright");
        assert!(version(&said("7.1.0")).unwrap() < QEMU);
        assert!(version(&said("7.2.22")).unwrap() >= QEMU && version(&said("11.1.0")).unwrap() >= QEMU);
        assert_eq!(version("no number"), None);
    }
}
