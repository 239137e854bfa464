//! `vellum run -k KERNEL -- COMMAND`: one command in a guest, with its standard streams and its
//! exit status. `--zygote NAME` boots a guest that waits before its command, and `--from NAME` runs
//! a command in a fork of that.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use guest_agent::{Access, Argument, Fresh, Launch, Mount, Mounts, Request, Terminal};

use super::failure::Failure;
use super::fork;
use super::kernel::{self, KernelArgs, LaunchArgs, Ready};
use super::output::{print, say};
use super::run_flags::FLAGS;
use crate::session;
use vellum_control::{agent, names};
use vellum_devices::console::Target;
use vellum_devices::virtio::DeviceConfig;
use vellum_devices::virtio::console::PortConfig;
use vellum_devices::virtio::fs::{self as share, FsConfig};
use vellum_devices::virtio::rng::{self, RngConfig};
use vellum_devices::virtio::vsock::VsockConfig;
use vellum_kvm::memory::{Backing, MemoryConfig};
use vellum_kvm::vm::lifecycle::Exit;
use vellum_launch::client::{self, Guest, Heard};
use vellum_launch::image::Way;
use vellum_launch::kernel::Kernel;
use vellum_launch::modules::{self, Named};
use vellum_launch::streams::{Ended, Outcome, own_terminal};
use vellum_launch::{Error, config, image};
use vellum_linux as machine;
use vellum_sandbox::user::User;
use vellum_sandbox::{Mode, Sandbox};
use vellum_sys::file;
use vellum_sys::fork::{self as processes, Forked};
use vellum_sys::identity;
use vellum_sys::mmap::memfd;
use vellum_sys::open::{self, Kind};
use vellum_sys::random;

/// The tag of the modules' mount. Tags of --share contain no slash.
const MODULES_TAG: &str = "/lib/modules";
/// The user and group nobody, by Linux's numbers.
const NOBODY: User = User { uid: 65534, gid: 65534 };

/// Where the guest of a command mounts the host's directories.
const PLACE: &str = "/mnt";

/// What is decided before the machine is made.
pub(super) struct Plan {
    kernel: Kernel,
    initrd: OwnedFd,
    way: Way,
    modules: Option<FsConfig>,
    launch: Launch,
    status_file: Option<PathBuf>,
    /// The machine's name, if it waits for commands instead.
    zygote: Option<String>,
}

fn failure(error: Error) -> Failure {
    let mut failure = Failure::of(&error, FLAGS);
    if matches!(error, Error::Lacks { .. }) {
        failure.message += "; --kconfig prints the fragment to merge into it";
    }
    failure
}

/// The plan for a command with the kernel `named`. `None` if an image is only booted.
pub(super) fn plan(all: &KernelArgs, named: &Path) -> Result<Option<Plan>, Failure> {
    let args = &all.launch;
    let board = all.board();
    // A path that is neither a directory nor `host` is an image, or is refused as one.
    let is_image = !named.is_dir() && (named != Path::new("host") || named.exists());
    let has_root = all.devices.has(&share::ROOT);
    if args.command.is_empty() && args.zygote.is_none() && !has_root && is_image {
        return alone(args).map(|()| None);
    }
    guest_agent::check_arguments(&args.command)
        .map_err(|why| Failure::usage(format!("-- COMMAND: {why}")))?;
    let shares = all.devices.shares().map(mount).collect::<Result<_, _>>()?;
    let mut mounts = Mounts { shares, modules: None, waits: args.zygote.is_some() };
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let kernel = Kernel::find(named, release.trim()).map_err(failure)?;
    if let Some(symbol) = kernel.config.as_deref().and_then(config::ignores_command_line) {
        say(&format!(
            "--kernel {}: CONFIG_{symbol}=y: this kernel ignores the command line that it is given, --cmdline too",
            named.display()
        ));
    }
    let terminal = match &args.zygote {
        None if args.command.is_empty() => Some(terminal(has_root, named)?),
        _ => None,
    };
    let way = match (
        image::check(&kernel, board, &mounts, all.initrd.is_some()).map_err(failure)?,
        &args.zygote,
    ) {
        (Way::Port, Some(_)) => {
            return Err(Failure::usage(format!(
                "--zygote: kernel {} has no vsock (CONFIG_VIRTIO_VSOCKETS), by which its forks get their commands",
                kernel.image.display()
            )));
        }
        (_, Some(_)) => Way::Vsock,
        (way, None) => way,
    };
    let modules = modules(&kernel);
    mounts.modules = modules.as_ref().map(|(share, _)| share.tag.clone());
    let (modules, beside) = modules.unzip();
    let program = args.command.first().and_then(|word| word.to_str());
    let archive = image::pack(&kernel, all.initrd.as_deref(), &mounts, &beside.unwrap_or_default(), program)
        .map_err(failure)?;
    let initrd = memfd(c"vellum-initramfs", 0, None)
        .and_then(|mut file| file.write_all(&archive).map(|()| OwnedFd::from(file)));
    let initrd = initrd.map_err(|error| Failure::host(format!("a file in memory: {error}")))?;
    let launch = launch_of(args, terminal);
    let (status_file, zygote) = (args.status_file.clone(), args.zygote.clone());
    Ok(Some(Plan { kernel, initrd, way, modules, launch, status_file, zygote }))
}

fn launch_of(args: &LaunchArgs, terminal: Option<Terminal>) -> Launch {
    Launch {
        command: args.command.iter().map(Argument::from).collect(),
        directory: args.guest_dir.as_ref().map(Argument::from),
        user: args.guest_user.clone(),
        terminal,
        detached: false,
        fresh: None,
    }
}

/// The backing of the memory of a machine that waits for commands, where `asked` is what the user
/// asked for.
pub(super) fn backing(asked: Backing) -> Result<Backing, Failure> {
    match asked {
        Backing::Anonymous => Ok(Backing::Memfd),
        forked if forked.can_be_forked() => Ok(forked),
        other => Err(Failure::usage(format!(
            "--zygote: memory of backing {other} cannot be forked: {}",
            Backing::FORKED
        ))),
    }
}

/// The kernel's modules for the guest's modprobe, and the files to put beside them. `None` if the
/// kernel's configuration has no driver for shared directories, or if the server could not read the
/// modules.
fn modules(kernel: &Kernel) -> Option<(FsConfig, Vec<Named>)> {
    let lacks =
        kernel.config.as_ref().is_some_and(|text| !config::lacks(text, &config::SHARED[..1]).is_empty());
    if !kernel.has_modules() || lacks {
        return None;
    }
    let found = modules::of(kernel)?;
    let directory = fs::metadata(&found.directory).ok()?;
    let is_roots = identity::effective().0 == 0 && directory.uid() == 0;
    if is_roots && directory.mode() & 0o5 != 0o5 {
        say(&format!(
            "{}: nobody but root may read it: the guest's modprobe will find no modules",
            found.directory.display()
        ));
        return None;
    }
    // Modules are not secret. The server reads root's as nobody.
    let user = is_roots.then_some(NOBODY);
    let share = FsConfig { tag: MODULES_TAG.into(), user, ..FsConfig::new(found.directory) };
    Some((share, found.beside))
}

/// Refuses flags that an image without a command has no use for.
fn alone(args: &LaunchArgs) -> Result<(), Failure> {
    let given = [
        ("--guest-dir", args.guest_dir.is_some()),
        ("--guest-user", args.guest_user.is_some()),
        ("--status-file", args.status_file.is_some()),
    ];
    match given.iter().find(|(_, is_given)| *is_given) {
        Some((flag, _)) => Err(Failure::usage(format!("{flag} needs a command: -- COMMAND"))),
        None => Ok(()),
    }
}

/// The terminal for the shell of a guest without a command.
fn terminal(has_root: bool, named: &Path) -> Result<Terminal, Failure> {
    own_terminal().ok_or_else(|| {
        let named = named.display();
        let why = if has_root { "--root".into() } else { format!("--kernel {named}") };
        Failure::usage(format!("{why}: without a command it is for a terminal, and this is none: -- COMMAND"))
    })
}

/// Where the guest of a command mounts a directory: at a path named after its tag.
fn mount(share: &FsConfig) -> Result<Mount, Failure> {
    let FsConfig { tag, mode, root, .. } = share;
    if *root {
        return Ok(Mount { tag: tag.clone(), place: "/".into(), access: Access::Overlay });
    }
    if tag.contains('/') || [".", ".."].contains(&&tag[..]) {
        return Err(Failure::usage(format!(
            "--share: tag '{tag}' is no name for a directory, and {PLACE}/TAG is where the guest of a command has it: DIR:data"
        )));
    }
    let access = match mode {
        share::Mode::ReadOnly => Access::Ro,
        share::Mode::ReadWrite => Access::Rw,
        share::Mode::Overlay => Access::Overlay,
    };
    Ok(Mount { tag: tag.clone(), place: format!("{PLACE}/{tag}"), access })
}

/// Starts the machine in a process of its own, and runs the command.
pub(super) fn run(
    plan: Plan,
    mut args: KernelArgs,
    memory: MemoryConfig,
    config: machine::Config,
    process: session::Config,
) -> Result<Exit, Failure> {
    let host = |error: io::Error| Failure::host(format!("a pipe: {error}"));
    // Opened first, so that a path that cannot be written fails before anything runs.
    let status_file = plan.status_file.as_deref().map(open_status_file).transpose()?;
    let directory = names::make_directory().map_err(|error| Failure::of(&error, FLAGS))?;
    let vsock =
        (plan.way != Way::Port).then(|| directory.join(format!("launch-{}.vsock", std::process::id())));
    let ends = if plan.way == Way::Vsock { None } else { Some(UnixStream::pair().map_err(host)?) };
    let (port, end) = ends.unzip();
    let (console, output) = io::pipe().map_err(host)?;
    let (ready, word) = io::pipe().map_err(host)?;
    let (output, word) = (OwnedFd::from(output), OwnedFd::from(word));
    let mode = process.sandbox;
    match processes::fork(&output).map_err(|error| Failure::host(format!("fork: {error}")))? {
        Forked::Child => {
            drop((console, ready, output, port));
            args.initrd = Some(file::path_of(&plan.initrd));
            args.serial = Target::Terminal;
            let vsock = vsock
                .map(|path| Arc::new(VsockConfig { path, cid: 3, is_named: false }) as Arc<dyn DeviceConfig>);
            let mut devices: Vec<_> = vsock.into_iter().collect();
            if let Some(end) = end {
                let console = args.devices.take_console();
                devices.push(Arc::new(PortConfig { name: guest_agent::STREAM_NAME.into(), end, console }));
            }
            if !args.devices.has(&rng::KIND) {
                devices.push(Arc::new(RngConfig));
            }
            let modules = plan.modules.map(|share| FsConfig { sandbox: process.sandbox, ..share });
            devices.extend(modules.map(|share| Arc::new(share) as Arc<dyn DeviceConfig>));
            let told = Ready { word: Some(word), devices, waits: plan.zygote.is_some() };
            kernel::boot(args, plan.kernel.image, memory, config, process, told)
        }
        Forked::Parent(child) => {
            drop((output, word, end));
            Sandbox::client(mode).map_err(|error| Failure::of(&error, FLAGS))?;
            let console = File::from(OwnedFd::from(console));
            let ready = File::from(OwnedFd::from(ready));
            let guest = Guest { child, console, ready, vsock: vsock.as_deref(), port };
            if let Some(name) = plan.zygote {
                return wait(guest, &name);
            }
            let (ended, unwritten) = client::run(guest, &plan.launch).map_err(failure)?;
            write_status(status_file, &ended)?;
            Ok(tell(ended, unwritten))
        }
    }
}

fn open_status_file(path: &Path) -> Result<File, Failure> {
    open::open(path, File::options().write(true).create(true).truncate(true), Kind::Output)
        .map_err(|error| Failure::usage(format!("--status-file {}: {error}", path.display())))
}

fn write_status(file: Option<File>, ended: &Ended) -> Result<(), Failure> {
    let Some(mut file) = file else { return Ok(()) };
    let text = serde_json::to_string(ended).map_err(Failure::host)?;
    writeln!(file, "{text}").map_err(|error| Failure::host(format!("--status-file: {error}")))
}

/// Waits for the end of a machine that waits for commands.
fn wait(guest: Guest<'_>, name: &str) -> Result<Exit, Failure> {
    let up = || print(format_args!("{name} waits: vellum run --from {name} -- COMMAND\n")).map(drop);
    let (was_up, ended) = client::wait_for_children::<Up>(guest, || up().map_err(Up))?;
    match ended {
        // It was stopped.
        Ended::Machine { status: 0, .. } if was_up => Ok(Exit::PowerOff),
        ended => Ok(tell(ended, None)),
    }
}

/// Why [`wait`] failed.
struct Up(Failure);

impl From<Error> for Up {
    fn from(error: Error) -> Self {
        Self(failure(error))
    }
}

impl From<Up> for Failure {
    fn from(Up(failure): Up) -> Self {
        failure
    }
}

/// How long a machine without a connection to its agent may take to end by itself.
const ENDING: Duration = Duration::from_secs(10);

/// Runs a command in a fork of the machine `zygote`, which waits for that. The fork ends with the
/// command, with this process, or after `limit`.
pub(super) fn from(
    zygote: &str,
    args: &LaunchArgs,
    sandbox: Mode,
    limit: Option<Duration>,
) -> Result<Exit, Failure> {
    guest_agent::check_arguments(&args.command)
        .map_err(|why| Failure::usage(format!("-- COMMAND: {why}")))?;
    let terminal = match args.command.is_empty() {
        true => Some(own_terminal().ok_or_else(|| {
            Failure::usage("--from: without a command it is for a terminal, and this is none: -- COMMAND")
        })?),
        false => None,
    };
    let mut launch = launch_of(args, terminal);
    let status_file = args.status_file.as_deref().map(open_status_file).transpose()?;
    let directory = names::make_directory().map_err(|error| Failure::of(&error, FLAGS))?;
    let vsock = directory.join(format!("launch-{}.vsock", std::process::id()));
    let (mut child, console) = fork::for_command(zygote, &vsock, sandbox, limit)?;
    let streams = client::own_streams(&launch).map_err(failure)?;
    let heard = Heard::of(console);
    Sandbox::client(sandbox).map_err(|error| Failure::of(&error, FLAGS))?;
    let mut seed = vec![0; 64];
    random::fill(&mut seed).map_err(|error| Failure::host(format!("random bytes: {error}")))?;
    let stream = agent::connect(&vsock, agent::ANSWER_TIMEOUT).map_err(|error| Failure::of(&error, FLAGS));
    let outcome = stream.and_then(|stream| {
        // The guest may have taken long to accept the connection.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        launch.fresh = Some(Fresh { seed, realtime_ns: now.as_nanos() as u64 });
        let request = serde_json::to_string(&Request::Launch(launch)).map_err(Failure::host)?;
        streams.converse(stream, &request).map_err(|error| Failure::host(format!("the guest agent: {error}")))
    });
    let (Outcome { ended, unwritten }, status) = match outcome {
        Ok(outcome) => (outcome, child.wait()?),
        // If the machine has ended, its socket is gone, and its end says more.
        Err(failed) => (Outcome::default(), child.ends_within(ENDING)?.ok_or(failed)?),
    };
    let ended = ended.unwrap_or_else(|| heard.of_machine(status));
    write_status(status_file, &ended)?;
    Ok(tell(ended, unwritten))
}

/// Reports how the guest ended, unless its command ended by itself. Returns the exit status.
fn tell(ended: Ended, unwritten: Option<String>) -> Exit {
    let fails = unwritten.is_some();
    unwritten.iter().for_each(|why| say(why));
    match ended {
        Ended::Command { .. } if fails => Exit::Error,
        Ended::Command { status } => Exit::Guest(status),
        Ended::NotStarted { reason } => {
            say(&reason);
            Exit::AgentCommand
        }
        // The machine's process has reported it.
        Ended::Machine { status: status @ (1 | 2), .. } => Exit::Guest(status),
        Ended::Machine { status, reason, console } => {
            console.lines().for_each(|line| say(&format!("console: {line}")));
            let what = match status {
                0 => "it was switched off",
                10 => "it was reset",
                11 => "it panicked",
                124 => "the time of --timeout is over",
                _ => "its machine ended",
            };
            say(&format!("the guest has not run its command to the end: {what}; {reason}"));
            Exit::Guest(if status == 0 { 1 } else { status })
        }
    }
}
