//! `vellum run --kernel`: a guest with a kernel of its own. The short options are kvmtool's, so
//! that scripts for `lkvm run` work.

mod image_args;
mod launch_args;

use std::any::Any;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::{ArgGroup, Args};

pub(super) use self::image_args::ImageArgs;
pub(super) use self::launch_args::LaunchArgs;
use super::devices::DeviceArgs;
use super::dump;
use super::failure::Failure;
use super::run_flags::failure;
use crate::session::{self, kernel::Outcome};
use vellum_control::ChildDevice;
use vellum_devices::console::Target;
use vellum_devices::virtio::blk::BlkConfig;
use vellum_devices::virtio::transport::Codec;
use vellum_devices::virtio::{DeviceConfig, vsock};
use vellum_disk::overlay::Place;
use vellum_kvm::arch::boot::default_cmdline;
use vellum_kvm::arch::fixed::Uart;
use vellum_kvm::arch::irqchip::Mode;
use vellum_kvm::arch::protocol::Protocol;
use vellum_kvm::memory::MemoryConfig;
use vellum_kvm::vm::cr3_cache;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_launch::config::Board;
use vellum_linux::virtio::Config;
use vellum_linux::{self as machine, BootConfig};
use vellum_machine::gdb;
use vellum_migration::migratable::OnPanic;
use vellum_sys::keyvalue;
use vellum_sys::open::{self, Kind};

/// A guest with a kernel.
#[derive(Debug, Args)]
#[command(next_help_heading = "A guest with a kernel")]
#[command(group = ArgGroup::new("guest").args(["kernel", "firmware", "disk"]).multiple(true)
    .conflicts_with_all(["workload", "passes", "duration", "json", "format"]))]
#[command(group = ArgGroup::new("timed").args(["kernel", "firmware", "disk", "from"]).multiple(true))]
pub(crate) struct KernelArgs {
    /// The kernel: a bzImage, an ELF vmlinux, a PVH or multiboot image; or a kernel tree with
    /// a built kernel (O= too), an unpacked linux-image package, or `host`, this host's kernel, which
    /// get a root with this host's busybox
    #[arg(short, long, value_name = "FILE|DIR|host")]
    pub kernel: Option<PathBuf>,

    /// The initial RAM disk, or a multiboot image's module
    #[arg(short, long, value_name = "FILE", requires = "guest")]
    pub(super) initrd: Option<PathBuf>,

    /// The kernel's command line, put after the defaults (console=ttyS0 reboot=k panic=-1)
    #[arg(short = 'p', long = "cmdline", visible_alias = "params", value_name = "TEXT", requires = "guest")]
    #[arg(allow_hyphen_values = true)]
    pub(super) cmdline: Vec<String>,

    /// Leave out the defaults of the command line
    #[arg(long, requires = "guest")]
    nodefaults: bool,

    /// The boot protocol, if the kernel supports several
    #[arg(long, value_name = "HOW", requires = "guest")]
    protocol: Option<Protocol>,

    /// The interrupt controller: split between KVM and Vellum, or all in KVM with an 8259 and a PIT
    /// [default: split; on Arm the newer one of those that this host has]
    #[arg(long, value_name = "WHERE", value_enum, requires = "guest")]
    pub(super) irqchip: Option<Mode>,

    /// How the guest reaches its virtio devices: mmio, a page of registers each, which the ACPI
    /// tables name; or pci, a bus that it enumerates, with an interrupt for each queue (MSI-X)
    /// [default: mmio; pci where the kernel is in the disk]
    #[arg(long, value_name = "HOW", requires = "guest")]
    pub(super) transport: Option<Codec>,

    /// The kind of serial port; a PL011 exists only on Arm
    #[arg(long, value_name = "KIND", value_enum, default_value_t, requires = "guest")]
    pub(super) uart: Uart,

    /// Where the serial port leads: terminal (Ctrl-a x ends the guest), file=PATH, pty or null
    #[arg(long, value_name = "WHERE", default_value = "terminal", requires = "guest")]
    pub(super) serial: Target,

    /// Leave out the VM generation ID, by which a guest notices that it was restored from a
    /// snapshot and reseeds its random numbers
    #[arg(long, requires = "guest")]
    no_vmgenid: bool,

    /// Let a guest on shadow paging load CR3 without an exit, as at context switches, if it
    /// supports that: on; auto, if this host can; off. The guest sees the addresses of its shadow
    /// page tables in the host's memory
    #[arg(
        long,
        value_name = "WHETHER",
        value_enum,
        default_value = "off",
        hide_possible_values = true,
        requires = "guest"
    )]
    cr3_cache: cr3_cache::Choice,

    /// End the guest after a time, as in 30s, with status 124; a guest of --from after that time
    /// from its fork
    #[arg(long, value_name = "TIME", requires = "timed", value_parser = keyvalue::duration)]
    pub(super) timeout: Option<Duration>,

    /// What to do when the guest panics, before it ends: dump[=FILE], write its memory into FILE as
    /// `vellum dump` does [default: vellum-PID.core]. If the kernel's pvpanic is a module, the
    /// panic is recognised on its serial port
    #[arg(long, value_name = "dump[=FILE]", value_parser = on_panic, requires = "guest")]
    on_panic: Option<PathBuf>,

    #[command(flatten)]
    pub(super) devices: DeviceArgs<true>,

    #[command(flatten)]
    pub(super) image: ImageArgs,

    #[command(flatten)]
    pub(super) launch: LaunchArgs,
}

impl KernelArgs {
    /// Whether the arguments name a guest that boots. Without one the built-in guest runs.
    pub(super) fn boots(&self) -> bool {
        self.kernel.is_some() || self.image.firmware.is_some() || self.devices.disk().is_some()
    }

    /// The parts of the board that the guest's kernel needs drivers for.
    pub(super) fn board(&self) -> Board {
        Board { pl011: self.uart == Uart::Pl011, pci: self.transport == Some(Codec::Pci) }
    }
}

/// What a machine gets besides its arguments. Dropping `word` closes it, which tells its reader
/// that the machine is ready. A machine that `waits` is forked for commands.
pub(super) struct Ready {
    pub word: Option<OwnedFd>,
    pub devices: Vec<Arc<dyn DeviceConfig>>,
    pub waits: bool,
}

impl Ready {
    /// No further devices, and no reader to tell.
    pub fn none() -> Self {
        Self { word: None, devices: Vec::new(), waits: false }
    }
}

/// Boots `kernel` on a machine of `memory` and `config`, with the remaining `args`, and waits for
/// its end. `told.word` is closed once the machine has all that it needs of the host.
pub(super) fn boot(
    args: KernelArgs,
    kernel: PathBuf,
    memory: MemoryConfig,
    config: machine::Config,
    process: session::Config,
    told: Ready,
) -> Result<Exit, Failure> {
    let KernelArgs {
        initrd,
        protocol,
        irqchip,
        transport,
        uart,
        serial,
        cr3_cache,
        timeout,
        mut devices,
        ..
    } = args;
    devices.confine(process.sandbox);
    let defaults = (!args.nodefaults).then(|| default_cmdline(uart));
    // A debugger expects symbols at their linked addresses. KASLR would move them.
    let fixed = process.gdb.as_ref().map(|_| "nokaslr");
    let parts: Vec<&str> =
        defaults.into_iter().chain(fixed).chain(args.cmdline.iter().map(String::as_str)).collect();
    let (cmdline, mut virtio) = (parts.join(" "), devices.config());
    virtio.0.extend(told.devices);
    let children = told.waits.then(|| of_children(&virtio)).transpose()?;
    let irqchip = irqchip.unwrap_or_else(Mode::of_host);
    let transport = transport.unwrap_or_default();
    let vmgenid = if args.no_vmgenid { None } else { config.vmgenid };
    let config = machine::Config { irqchip, transport, uart, serial, virtio, vmgenid, cr3_cache, ..config };
    if let Some(gdb) = &process.gdb {
        tracing::info!("{}", gdb::command(&gdb.socket, symbols(&kernel).as_deref()));
    }
    let boot = BootConfig { kernel, initrd, cmdline, protocol };
    // A guest that a debugger holds has no reason to print, and of one with a command the command
    // is heard.
    let tells_of_silence = process.gdb.is_none() && told.word.is_none();
    let process = session::Config { limit: timeout, tells_of_silence, children, ..process };
    let on_panic = args.on_panic.as_deref().map(|path| {
        let dump = dump::on_panic(path).map_err(|failure| failure.under("--on-panic dump="));
        dump.map(|(file, written, naming)| {
            (OnPanic { file, name: path.display().to_string(), written }, naming)
        })
    });
    let ready =
        session::kernel::ready(&process, memory, config, boot, on_panic.transpose()?).map_err(failure)?;
    drop(told.word);
    let outcome = ready.run().map_err(failure)?;
    tell(&outcome);
    Ok(outcome.exit)
}

/// The devices of `all` that each child of a machine opens for itself. Each gets another vsock.
fn of_children(all: &Config) -> Result<Vec<ChildDevice>, Failure> {
    let own = all.0.iter().filter(|device| device.kind().key != vsock::KIND.key);
    let written = own.map(|device| {
        let kind = device.kind().key;
        let disk = (&**device as &dyn Any).downcast_ref::<BlkConfig>();
        if let Some(disk) = disk.filter(|disk| !disk.readonly && disk.overlay != Some(Place::Discard)) {
            let path = disk.path.display();
            return Err(Failure::usage(format!(
                "--{kind} {path}: the forks of a machine cannot write to what it writes to: add overlay=discard or readonly"
            )));
        }
        let config = device.written().map_err(|error| {
            Failure::usage(format!("--{kind}: the forks of a machine cannot open it too: {error}"))
        })?;
        Ok(ChildDevice { kind: kind.to_owned(), config })
    });
    written.collect()
}

/// Parses `dump[=FILE]`.
fn on_panic(text: &str) -> Result<PathBuf, &'static str> {
    match text.split_once('=') {
        None if text == "dump" => Ok(format!("vellum-{}.core", std::process::id()).into()),
        Some(("dump", path)) if !path.is_empty() => Ok(path.into()),
        _ => Err("dump or dump=FILE is expected"),
    }
}

/// The file with the symbols of the kernel `image`: the image itself if it is an ELF, or the
/// vmlinux of the tree that it was built in.
fn symbols(image: &Path) -> Option<PathBuf> {
    let is_elf = |path: &Path| {
        let mut magic = [0; 4];
        open::for_reading(path, Kind::Regular).and_then(|mut file| file.read_exact(&mut magic)).is_ok()
            && magic == *b"\x7fELF"
    };
    // For example arch/x86/boot/bzImage, four levels below the tree.
    let beside = image.ancestors().skip(1).take(4).map(|directory| directory.join("vmlinux"));
    std::iter::once(image.to_owned()).chain(beside).find(|path| is_elf(path))
}

/// Logs how the guest ended, unless it ended as expected.
pub(super) fn tell(outcome: &Outcome) {
    if let Some((index, ended)) = &outcome.ended {
        let what = match ended.exit {
            Exit::Panic => Some("the guest has panicked".to_owned()),
            Exit::TripleFault => Some(format!("triple fault on vCPU {index}")),
            Exit::Kvm => Some(match ended.error {
                Some(error) => format!("KVM_RUN of vCPU {index}: {error}"),
                None => format!("KVM cannot go on with vCPU {index}; the last exit tells why"),
            }),
            _ => None,
        };
        if let (Some(what), Some(trace)) = (what, &ended.trace) {
            tracing::error!("{what}\n{trace}");
        }
    }
    if outcome.exit == Exit::Timeout {
        tracing::warn!("the time of --timeout is over: the guest was ended");
    }
    if outcome.lost_output > 0 {
        tracing::warn!("{} bytes of serial output were lost: they were not read", outcome.lost_output);
    }
    if outcome.unwritten_output > 0 {
        let lost = outcome.unwritten_output;
        tracing::warn!("{lost} bytes of serial output were lost: its file could not be written");
    }
    for (name, value) in outcome.counters.iter().flatten().filter(|(_, value)| **value != 0) {
        tracing::debug!("KVM's {name} {value}");
    }
    tracing::debug!("ended by {:?}, status {}", outcome.exit, outcome.exit.code());
}
