//! The initramfs of an emulated host: our programs, busybox, the request's files and modules, and
//! its job.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use super::{HostKernel, Pace, Request, guest};
use crate::architecture::Architecture;
use crate::artifacts::{self, Programs};
use crate::cache::Cache;
use crate::hosts::initramfs::{Initramfs, copy};
use crate::hosts::kexec::{self, Replaced};
use crate::hosts::wire::{JOB_PATH, Job};
use crate::{Error, Result, tool};

/// Modules of a host besides KVM's.
const MODULES: [&str; 6] = ["bridge", "msr", "tun", "virtio_pci", "virtio_blk", "virtio_net"];

/// Further modules of a host with its root on a disk and a route that drops everything.
const ON_DISK: [&str; 2] = ["ext4", "dummy"];

/// The directory beside a bzImage with modules that are not built in.
const BESIDE: &str = "modules";

/// This machine's busybox, which must be static: emulated hosts have no libc. Debian has a dynamic
/// one too.
pub fn busybox() -> Result<PathBuf> {
    const INTERPRETER: &[u8] = b"/ld-linux-x86-64.so.2\0";
    let path = tool::need("busybox")?;
    let image = fs::read(&path).map_err(Error::file("read", &path))?;
    if image.windows(INTERPRETER.len()).any(|window| window == INTERPRETER) {
        return Err(Error::Missing { program: "a static busybox".into(), package: "busybox-static".into() });
    }
    Ok(path)
}

/// Packs the host's initramfs. Our programs are in /bin with busybox's.
pub fn pack(
    cache: &Cache,
    dir: &Path,
    programs: &Programs,
    request: &Request,
    shell: bool,
) -> Result<PathBuf> {
    let mut image = Initramfs::new();
    copy(&mut image, &programs.init, "/init")?;
    copy(&mut image, &programs.vellum, "/bin/vellum")?;
    let busybox = busybox()?;
    match request.host.architecture() {
        Architecture::X86 => copy(&mut image, &busybox, "/bin/busybox")?,
        other => copy(&mut image, &artifacts::busybox(cache, other)?, "/bin/busybox")?,
    }
    if !request.next.is_empty() {
        image.link(&format!("/bin/{}", kexec::PROGRAM), "../init");
    }
    for name in guest::applets()? {
        image.link(&format!("/bin/{name}"), "busybox");
    }
    image.file(
        "/etc/passwd",
        0o644,
        b"root:x:0:0:root:/tmp:/bin/sh\nnobody:x:65534:65534:nobody:/tmp:/bin/sh\n",
    );
    image.file("/etc/group", 0o644, b"root:x:0:\nnogroup:x:65534:\n");
    for path in &request.directories {
        image.directory(path);
    }
    for (from, to) in &request.files {
        copy(&mut image, from, to)?;
    }
    let mut job = job(request, shell);
    let on_disk: &[&str] = if request.root.is_some() { &ON_DISK } else { &[] };
    let names = [request.host.modules(), &MODULES, on_disk].concat();
    let modules = match &request.kernel {
        HostKernel::Debian(kernel) => kernel.modules(&names)?,
        HostKernel::Image(bzimage) => match bzimage.with_file_name(BESIDE) {
            beside if beside.is_dir() => artifacts::modules_in(&beside, &names)?,
            // The kernel has everything built in.
            _ => Vec::new(),
        },
    };
    for (name, module) in modules {
        let path = format!("/modules/{name}.ko");
        image.file(&path, 0o644, &module);
        job.modules.push(path);
    }
    image.file(JOB_PATH, 0o644, &serde_json::to_vec(&job).expect("a job is plain data"));
    let path = dir.join("initrd");
    let mut file = File::create(&path).map_err(Error::file("create", &path))?;
    file.write_all(&image.finish()).map_err(Error::file("write", &path))?;
    Ok(path)
}

fn job(request: &Request, shell: bool) -> Job {
    Job {
        bed: request.host.name().into(),
        console: request.host.ports().console.into(),
        results: request.host.ports().results.into(),
        modules: Vec::new(),
        parameters: request.all_parameters(),
        commands: request.commands.clone(),
        env: request.env.clone(),
        races: request.pace == Pace::Races,
        root: request.root.as_ref().map(|_| shown(request)),
        systemd: request.systemd,
        replaced: Replaced::of(request),
        shell,
    }
}

/// The paths in the initramfs that a host with its root on a disk shows there, with their new
/// paths: programs in a directory of PATH, and whole directories.
fn shown(request: &Request) -> Vec<(String, String)> {
    let always: &[(&str, &str)] = match request.systemd {
        // vellum is where its units look for it, and the service of the job has what it needs.
        true => &[("/bin/vellum", "/usr/bin/vellum"), ("/init", "/init"), (JOB_PATH, JOB_PATH)],
        false => &[("/bin/vellum", "/usr/local/bin/vellum")],
    };
    let mut shown: Vec<_> = always.iter().map(|(from, to)| ((*from).to_owned(), (*to).to_owned())).collect();
    let files = request.files.iter().map(|(_, to)| to);
    for path in request.directories.iter().chain(files) {
        let (from, to) = match path.strip_prefix("/bin/") {
            Some(name) => (path.clone(), format!("/usr/local/bin/{name}")),
            None => {
                let top = path.split('/').find(|part| !part.is_empty()).unwrap_or_default();
                (format!("/{top}"), format!("/{top}"))
            }
        };
        // /tmp is moved as a whole, with everything below it.
        if to != "/tmp" && !shown.iter().any(|(known, _)| *known == from) {
            shown.push((from, to));
        }
    }
    shown
}
