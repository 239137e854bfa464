//! The initramfs of an emulated host: our programs, busybox, the files and modules of its request,
//! and its job.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{HostKernel, Pace, Request};
use crate::architecture::Architecture;
use crate::artifacts::{self, Programs};
use crate::cache::Cache;
use crate::hosts::initramfs::{Initramfs, copy};
use crate::hosts::wire::{JOB_PATH, Job};
use crate::{Error, Result, tool};

/// Modules that a host has beside KVM's own.
const MODULES: [&str; 6] = ["bridge", "msr", "tun", "virtio_pci", "virtio_blk", "virtio_net"];

/// Those of a host whose root is on a disk, and which has a route to nowhere.
const ON_DISK: [&str; 2] = ["ext4", "dummy"];

/// The directory beside a bzImage that holds KVM's modules, where they are not built in.
const BESIDE: &str = "modules";

/// Debian has another busybox too, which needs a libc that no emulated host has.
pub fn busybox() -> Result<PathBuf> {
    const INTERPRETER: &[u8] = b"/ld-linux-x86-64.so.2\0";
    let path = tool::need("busybox")?;
    let image = fs::read(&path).map_err(Error::file("read", &path))?;
    if image.windows(INTERPRETER.len()).any(|window| window == INTERPRETER) {
        return Err(Error::Missing { program: "a static busybox".into(), package: "busybox-static".into() });
    }
    Ok(path)
}

/// Packs what the host sees. Our programs are in /bin, together with busybox's.
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
    for name in tool::text(Command::new(&busybox).arg("--list"))?.lines().filter(|name| *name != "busybox") {
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
            // All that it needs is built in.
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
        shell,
    }
}

/// What a host with a root on its disk has there of what it boots into: programs where it looks for
/// them, and whole directories.
fn shown(request: &Request) -> Vec<(String, String)> {
    let mut shown = vec![("/bin/vellum".to_owned(), "/usr/local/bin/vellum".to_owned())];
    let files = request.files.iter().map(|(_, to)| to);
    for path in request.directories.iter().chain(files) {
        let (from, to) = match path.strip_prefix("/bin/") {
            Some(name) => (path.clone(), format!("/usr/local/bin/{name}")),
            None => {
                let top = path.split('/').find(|part| !part.is_empty()).unwrap_or_default();
                (format!("/{top}"), format!("/{top}"))
            }
        };
        // What is below /tmp goes along with it.
        if to != "/tmp" && !shown.iter().any(|(known, _)| *known == from) {
            shown.push((from, to));
        }
    }
    shown
}
