//! What `vellum live-update save` checks of the host and of each machine before anything is done to one.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::super::failure::Failure;
use super::super::output::say;
use super::{keeper, read_image};
use vellum_control::Status;
use vellum_devices::virtio::blk;
use vellum_host::live_update::Versions;
use vellum_launch::config::unpacked;
use vellum_machine::handoff;
use vellum_sys::file::{self, path_of};
use vellum_sys::host::kernel_release;

/// What is wrong. The exit status is that of the first.
pub(super) struct Wrong(pub Option<Failure>);

impl Wrong {
    pub fn note<T>(&mut self, result: Result<T, Failure>) -> Option<T> {
        match (result, self.0.take()) {
            (Ok(value), before) => {
                self.0 = before;
                return Some(value);
            }
            (Err(failed), None) => self.0 = Some(failed),
            (Err(failed), Some(before)) => {
                let message = format!("{}; {}", before.message, failed.message);
                self.0 = Some(Failure { message, ..before });
            }
        }
        None
    }
}

/// Fails if no kernel is loaded that a kexec would start.
pub(super) fn check_loaded() -> Result<(), Failure> {
    // A kernel without kexec has no such file, and no orchestrator.
    match std::fs::read_to_string("/sys/kernel/kexec_loaded") {
        Ok(text) if text.trim() == "0" => Err(Failure::usage(
            "no kernel is loaded that a kexec would start: load it first, by kexec --kexec-file-syscall --load, or save with --not-loaded",
        )),
        _ => Ok(()),
    }
}

/// Fails if a keeper has machines that have not run: its memory ends with this kernel.
pub(super) fn check_kept() -> Result<(), Failure> {
    let kept: Vec<String> = keeper::all()?
        .into_iter()
        .filter(|(_, machines)| !machines.is_empty())
        .map(|(session, machines)| format!("{} of session {session}", machines.join(", ")))
        .collect();
    match kept.is_empty() {
        true => Ok(()),
        false => Err(Failure::usage(format!(
            "a kexec would lose machines that were not restored yet: {}: restore them or give them up, or save with --lose-kept",
            kept.join("; ")
        ))),
    }
}

/// Compares the versions of the running kernel with those in the image `next`.
pub(super) fn check_kernel(next: &Path) -> Result<(), Failure> {
    let there = read_image(next).and_then(versions).map_err(Failure::usage)?;
    let mut here = Versions::running().map_err(|why| {
        Failure::host(format!(
            "what the running kernel hands over cannot be told ({why}); it takes CONFIG_KEXEC_HANDOVER_DEBUGFS, and debugfs mounted"
        ))
    })?;
    // debugfs tells the version of memfds only while one is preserved.
    let own = PathBuf::from(format!("/boot/vmlinuz-{}", kernel_release()));
    match read_image(&own).and_then(versions) {
        Ok(image) => here.fill(image),
        Err(why) => say(&format!(
            "--kernel: the version in which this kernel hands over memfds is not known: {}: {why}",
            own.display()
        )),
    }
    here.differences(&there).map_or(Ok(()), |differs| Err(Failure::usage(differs)))
}

/// The versions in a kernel's image, which may be compressed.
fn versions(image: Vec<u8>) -> Result<Versions, String> {
    // An ELF file, or Arm's Image (Documentation/arch/arm64/booting.rst).
    let is_plain = image.starts_with(b"\x7fELF") || image.get(0x38..0x3c) == Some(b"ARM\x64");
    match unpacked(&image) {
        Some(kernel) => Ok(Versions::within(&kernel)),
        None if is_plain => Ok(Versions::within(&image)),
        None => Err("it cannot be unpacked, or is no kernel; gzip, xz and zstd are known".into()),
    }
}

/// Fails if kernels do not preserve such memory.
pub(super) fn check_memory(name: &str, status: &Status) -> Result<(), Failure> {
    let backing = status.backing.as_deref().unwrap_or("unknown");
    if status.forked {
        return Err(Failure::usage(format!(
            "its memory was forked, and no descriptor has all of it; vellum ctl {name} upgrade {} copies it, and then it \
             can be saved",
            std::env::current_exe().map_or("vellum".into(), |path| path.display().to_string())
        )));
    }
    match backing {
        "memfd" => Ok(()),
        huge if huge.contains("hugetlb") => Err(Failure::usage(format!(
            "its memory is {huge}, which kernels do not preserve; start it with --memory SIZE,backing=memfd"
        ))),
        other => Err(Failure::usage(format!(
            "its memory is {other}, which belongs to its process; start it with --memory SIZE,backing=memfd"
        ))),
    }
}

/// Fails if a disk would be gone after the kexec.
pub(super) fn check_disks(list: &handoff::List, descriptors: &[OwnedFd]) -> Result<(), Failure> {
    let disks = list.devices.iter().filter(|device| device.kind == blk::KIND.key);
    for descriptor in disks.flat_map(|disk| &disk.descriptors).filter_map(|at| descriptors.get(*at)) {
        let opened = File::from(descriptor.try_clone().map_err(Failure::host)?);
        let about = opened.metadata().map_err(Failure::host)?;
        let path = std::fs::read_link(path_of(&opened)).unwrap_or_default();
        if about.is_file() && about.nlink() == 0 {
            return Err(Failure::usage(format!(
                "--disk: {}: the file has no name, and ends with its process",
                path.display()
            )));
        }
        if about.is_file() && file::is_in_memory(&opened).map_err(Failure::host)? {
            return Err(Failure::usage(format!(
                "--disk: {} is on a file system in memory, which a kexec ends: move it to a disk",
                path.display()
            )));
        }
    }
    Ok(())
}

/// Why memory with these bytes of holes, of swapped pages and in all cannot be preserved with what is
/// available, if it cannot.
pub(super) fn lacks_room(available: Option<u64>, [holes, swapped, all]: [u64; 3]) -> Option<String> {
    // The kernel lists each page, and cuts huge pages at the edges of its scratch area.
    let needed = holes + swapped + all / 100;
    let available = available.filter(|available| needed > *available)?;
    let [needed, holes, swapped, available] = [needed, holes, swapped, available].map(|bytes| bytes >> 20);
    Some(format!(
        "nothing is saved: {needed} MiB would be allocated, and {available} MiB are available; {holes} MiB of the machines' memory were \
         never written to, and {swapped} MiB are swapped"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use vellum_kvm::vm::lifecycle::Exit;

    #[test]
    fn all_that_is_wrong_is_told_with_the_status_of_the_first() {
        let mut wrong = Wrong(None);
        assert_eq!(wrong.note(Ok(1)), Some(1));
        assert_eq!(wrong.note::<()>(Err(Failure::host("a: one"))), None);
        assert_eq!(wrong.note(Ok(2)), Some(2));
        assert_eq!(wrong.note::<()>(Err(Failure::usage("b: two"))), None);
        let failed = wrong.0.unwrap();
        assert_eq!((failed.exit, failed.message.as_str()), (Exit::Error, "a: one; b: two"));
    }

    #[test]
    fn a_kernel_that_cannot_be_unpacked_is_not_said_to_take_nothing() {
        assert_eq!(versions(b"\x7fELF\0kho-v1\0".to_vec()).unwrap().0[0].as_deref(), Some("kho-v1"));
        assert!(versions(vec![0; 4096]).unwrap_err().contains("cannot be unpacked"));
        // A bzImage whose payload, after its setup code of one sector, is lz4's.
        let mut image = vec![0; 2048];
        image[0x1f1] = 1;
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x24c] = 64;
        image[1024..1028].copy_from_slice(&[0x02, 0x21, 0x4c, 0x18]);
        assert!(versions(image).unwrap_err().contains("cannot be unpacked"));
    }

    #[test]
    fn a_host_without_room_is_told() {
        const MIB: u64 = 1 << 20;
        assert_eq!(lacks_room(None, [1 << 40, 0, 1 << 40]), None);
        assert_eq!(lacks_room(Some(110 * MIB), [100 * MIB, 0, 1000 * MIB]), None);
        // Nothing available is not unknown.
        for (available, needs) in
            [(0, [MIB, 0, MIB]), (109, [100 * MIB, 0, 1000 * MIB]), (109, [0, 100 * MIB, 1000 * MIB])]
        {
            let why = lacks_room(Some(available * MIB), needs).expect("there is no room");
            assert!(why.contains(&format!("{available} MiB are available")), "{why}");
        }
    }
}
