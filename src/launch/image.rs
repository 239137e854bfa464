//! The initramfs of a guest that runs one command: this program as PID 1, the kernel modules for
//! Vellum's devices, and optionally a static program of the host or the user's initrd.

use std::fs;
use std::path::Path;

use guest_agent::{Access, Mounts};

use super::config::{Board, SHARED, STREAMS, Symbol};
use super::initramfs::Initramfs;
use super::kernel::Kernel;
use super::modules::Named;
use super::{Error, config};
use vellum_sys::open;

/// The modules for Vellum's devices, without their dependencies.
const MODULES: &str = include_str!("../../resources/guest-image/modules");
/// Symbols that can be modules, and the modules' names.
const MODULE_OF: [(&str, &str); 6] = [
    ("VIRTIO_MMIO", "virtio_mmio"),
    ("VIRTIO_PCI", "virtio_pci"),
    ("VIRTIO_VSOCKETS", "vmw_vsock_virtio_transport"),
    ("VIRTIO_CONSOLE", "virtio_console"),
    ("VIRTIO_FS", "virtiofs"),
    ("OVERLAY_FS", "overlay"),
];

/// The module of a symbol.
fn module_of(symbol: &str) -> Option<&'static str> {
    MODULE_OF.iter().find(|(of, _)| *of == symbol).map(|(_, module)| *module)
}

/// The symbols needed to mount `mounts`.
fn shared(mounts: &Mounts) -> &'static [Symbol] {
    let overlays = mounts.shares.iter().any(|share| share.access == Access::Overlay);
    &SHARED[..if mounts.shares.is_empty() { 0 } else { 1 + usize::from(overlays) }]
}

/// The device that carries a command's standard streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// A vsock. The guest can also use it otherwise.
    Vsock,
    /// A console port, because there is no vsock.
    Port,
    /// Unknown. The guest prefers a vsock.
    Either,
}

/// The way that `kernel` supports, as far as its configuration tells. The user's initrd may have
/// its modules.
///
/// # Errors
/// The symbols that it lacks.
fn way(kernel: &Kernel, text: &str, initrd: bool) -> Result<Way, Error> {
    let [vsock, port] = STREAMS.map(|(symbol, ..)| {
        let is_module = config::is_module(text, symbol)?;
        let is_there = module_of(symbol).is_some_and(|module| kernel.has(module));
        Some(!is_module || is_there).filter(|sure| *sure || initrd && !kernel.has_modules())
    });
    match (vsock, port) {
        (Some(true), _) => Ok(Way::Vsock),
        (Some(false), _) => Ok(Way::Either),
        (None, Some(_)) => Ok(Way::Port),
        (None, None) => {
            let symbol = STREAMS[0].0;
            Err(match config::is_module(text, symbol) {
                Some(_) => no_modules(kernel, symbol),
                None => lacks(kernel, &[symbol]),
            })
        }
    }
}

fn lacks(kernel: &Kernel, symbols: &[&str]) -> Error {
    let lacks = symbols.iter().map(|symbol| format!("CONFIG_{symbol}")).collect::<Vec<_>>().join(", ");
    Error::Lacks { image: kernel.image.clone(), lacks }
}

fn no_modules(kernel: &Kernel, symbol: &str) -> Error {
    let symbol = format!("CONFIG_{symbol}");
    Error::NoModules { image: kernel.image.clone(), symbol, place: kernel.place.clone() }
}

/// Checks that a kernel can mount `mounts` on `board` and run a command, as far as its
/// configuration tells. Returns the way for the command's streams. With the user's initrd, a bare
/// image's modules may be in the initrd.
///
/// # Errors
/// The symbols that it lacks.
pub fn check(kernel: &Kernel, board: Board, mounts: &Mounts, initrd: bool) -> Result<Way, Error> {
    let Some(text) = &kernel.config else { return Ok(Way::Either) };
    let needed = || board.needed().chain(shared(mounts));
    let missing = config::lacks(text, needed());
    if !missing.is_empty() {
        return Err(lacks(kernel, &missing));
    }
    let way = way(kernel, text, initrd)?;
    if initrd && !kernel.has_modules() {
        return Ok(way);
    }
    for symbol in config::modules(text, needed()) {
        let module = module_of(symbol);
        if module.is_some_and(|module| !kernel.has(module)) {
            return Err(no_modules(kernel, symbol));
        }
    }
    Ok(way)
}

/// Packs the initramfs for `kernel`. If `command` is the path of a static program on this host and
/// the root is the initramfs, it is included. `modules` are the files for modprobe. `initrd` is the
/// user's own archive. If both have a file, this one's is used.
///
/// # Errors
/// Fails if a file cannot be read.
pub fn pack(
    kernel: &Kernel,
    initrd: Option<&Path>,
    mounts: &Mounts,
    modules: &[Named],
    command: Option<&str>,
) -> Result<Vec<u8>, Error> {
    let mut archive = match initrd {
        Some(path) => {
            open::read(path, u64::MAX).map_err(|source| Error::File { path: path.into(), source })?
        }
        None => Vec::new(),
    };
    // A following archive must start at a multiple of 4 bytes.
    archive.resize(archive.len().next_multiple_of(4), 0);
    let mut image = Initramfs::new();
    image.file("/init", 0o755, &this_program()?);
    image.file(guest_agent::LAUNCH, 0o644, &serde_json::to_vec(mounts).expect("plain data"));
    let own = MODULES.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let shared = if mounts.modules.is_some() { &SHARED[..1] } else { &[] }.iter().chain(shared(mounts));
    let names: Vec<&str> = own.chain(shared.filter_map(|(symbol, ..)| module_of(symbol))).collect();
    for (name, content) in modules {
        image.file(&format!("{}/{name}", guest_agent::MODULES), 0o644, content);
    }
    let mut order = String::new();
    for module in kernel.load(&names)? {
        image.file(&format!("/modules/{}.ko", module.name), 0o644, &module.content);
        order += &format!("{}\n", module.name);
    }
    // Without our own modules the user's archive may have a list.
    if !order.is_empty() {
        image.file("/modules/order", 0o644, order.as_bytes());
    }
    // Whether the initramfs is the guest's root.
    let is_root = !mounts.shares.iter().any(|share| share.place == "/");
    if initrd.is_none() && is_root {
        for path in ["/bin/busybox", "/usr/bin/busybox"] {
            if let Some(content) = static_program(Path::new(path)) {
                image.file("/bin/busybox", 0o755, &content);
                break;
            }
        }
    }
    if let Some(path) = command.filter(|path| is_root && path.starts_with('/'))
        && let Some(content) = static_program(Path::new(path))
    {
        image.file(path, 0o755, &content);
    }
    archive.extend(image.finish());
    Ok(archive)
}

/// A file of this host, if it is a static program.
fn static_program(path: &Path) -> Option<Vec<u8>> {
    let content = super::read(path).ok()?;
    stripped(&content).filter(|_| !is_dynamic(&content)).map(|_| content)
}

/// This program without its debugging data.
fn this_program() -> Result<Vec<u8>, Error> {
    let content = fs::read("/proc/self/exe").map_err(|error| Error::Host("/proc/self/exe", error))?;
    let name = std::env::current_exe().unwrap_or_default();
    match stripped(&content) {
        Some(program) if !is_dynamic(&content) => Ok(program),
        _ => Err(Error::NotStatic(name)),
    }
}

/// The program headers (type, offset, file size) of a 64-bit ELF file. Both architectures of Vellum
/// are little-endian.
fn segments(elf: &[u8]) -> Option<Vec<(u32, u64, u64)>> {
    let half = |at: usize| Some(u16::from_le_bytes(elf.get(at..at.checked_add(2)?)?.try_into().ok()?));
    let word = |at: usize| Some(u32::from_le_bytes(elf.get(at..at.checked_add(4)?)?.try_into().ok()?));
    let long = |at: usize| Some(u64::from_le_bytes(elf.get(at..at.checked_add(8)?)?.try_into().ok()?));
    // ELFCLASS64, ELFDATA2LSB
    if !elf.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let (start, size, count) = (usize::try_from(long(32)?).ok()?, half(54)?, half(56)?);
    (0..usize::from(count))
        .map(|nth| {
            let at = start.checked_add(nth * usize::from(size))?;
            Some((word(at)?, long(at.checked_add(8)?)?, long(at.checked_add(32)?)?))
        })
        .collect()
}

/// Whether a program has an interpreter (PT_INTERP) that loads libraries.
fn is_dynamic(elf: &[u8]) -> bool {
    segments(elf).is_none_or(|segments| segments.iter().any(|(kind, ..)| *kind == 3))
}

/// A program up to the end of its loaded data, without section headers.
fn stripped(elf: &[u8]) -> Option<Vec<u8>> {
    let ends = segments(elf)?.into_iter().map(|(_, offset, size)| offset.checked_add(size));
    let end = usize::try_from(ends.collect::<Option<Vec<_>>>()?.into_iter().max()?).ok()?;
    let mut program = elf.get(..end.max(64))?.to_vec();
    // e_shoff; e_shnum and e_shstrndx
    program[40..48].fill(0);
    program[60..64].fill(0);
    Some(program)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_program_is_static_and_smaller_without_its_symbols() {
        let whole = fs::metadata("/proc/self/exe").unwrap().len() as usize;
        let program = this_program().unwrap();
        assert!(program.len() < whole && segments(&program).is_some(), "{} of {whole}", program.len());
        assert_eq!(stripped(&program).as_deref(), Some(&program[..]));
    }

    #[test]
    fn streams_go_by_what_the_kernel_has() {
        let found =
            |text: &str, initrd| way(&Kernel::default(), text, initrd).map_err(|error| error.to_string());
        let (vsock, console) = ("CONFIG_VIRTIO_VSOCKETS=", "CONFIG_VIRTIO_CONSOLE=");
        assert_eq!(found(&format!("{vsock}y\n{console}y\n"), false), Ok(Way::Vsock));
        assert_eq!(found(&format!("{vsock}m\n{console}y\n"), false), Ok(Way::Port), "its module is missing");
        assert_eq!(found(&format!("{vsock}m\n"), true), Ok(Way::Either), "the archive may have its module");
        assert_eq!(found(&format!("{console}y\n"), false), Ok(Way::Port));
        assert!(found("", false).unwrap_err().contains("lacks CONFIG_VIRTIO_VSOCKETS"));
        assert!(found(&format!("{console}m\n"), false).unwrap_err().contains("lacks CONFIG_VIRTIO_VSOCKETS"));
        assert!(found(&format!("{vsock}m\n"), false).unwrap_err().contains("as a module"));
    }

    #[test]
    fn what_is_cut_or_no_program_is_none() {
        let program = this_program().unwrap();
        for end in [0, 5, 40, 63, 64, 100, program.len() - 1] {
            assert_eq!(stripped(&program[..end]), None, "{end}");
            assert!(is_dynamic(&program[..end]) || end >= 64 + 56, "{end}");
        }
        let mut wild = program[..4096].to_vec();
        wild[32..40].fill(0xff);
        assert_eq!(stripped(&wild), None);
    }
}
