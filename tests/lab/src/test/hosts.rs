//! Tests on emulated hosts: the same programs as here, run by the same laboratory, as if that host were metal.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use harness::record::{self, Line};

use super::programs::{self, Place};
use super::tally::Tally;
use super::{Bed, HUGEPAGES, Options, debuggers, here, setup};
use crate::architecture::Architecture;
use crate::artifacts::{self, Executable, Kernel, Programs, files_below};
use crate::bed::{self, Emulated, HostKernel, Pace, Request, Wire, disk, svm};
use crate::cache::Cache;
use crate::guest::{self, Guest};
use crate::kernel::{self, build};
use crate::lanes::side_by_side;
use crate::wire::Frame;
use crate::{Error, Result};

/// The bed tests on emulated hosts: the same executables, run by the same laboratory, as if that host were metal.
pub fn emulated(bed: Emulated, options: &Options, tally: &mut Tally) -> Result<()> {
    // The laboratory's own promises come first: what follows relies on them.
    here::promises(bed, options, tally)?;
    let cache = Cache::open()?;
    let architecture = bed.architecture();
    let kernel = Kernel::debian_for(&cache, architecture, "6.1")?;
    let debuggers = match architecture {
        Architecture::X86 => brought(bed.name(), debuggers::programs(&cache), tally),
        Architecture::Arm => Vec::new(),
    };
    tally.lap(bed.name(), "fetching kernels and debuggers");
    let host = |npt| {
        let mut request = Request::new(HostKernel::Debian(kernel.clone()));
        request.files.extend(debuggers.iter().cloned());
        (request.bed, request.second_stage) = (bed, npt);
        // Time that counts instructions makes the tests' own time limits independent of how busy this machine is.
        request.memory_mib = 4096;
        request.hugepages = HUGEPAGES;
        request.time_limit = Duration::from_secs(30 * 60);
        (bed.mode(npt), request)
    };
    let hosts = modes(options).into_iter().map(host).collect();
    let tests = programs::built_on(architecture)?;
    tally.lap(bed.name(), "building the test programs");
    run(&cache, (bed.name(), hosts), &tests, &[], &options.arguments, tally)?;
    // Those of x86 have a bed of their own.
    match architecture {
        Architecture::X86 => Ok(()),
        Architecture::Arm => {
            linux_on_arm(&cache, bed, &kernel, options, tally)?;
            // Arguments name trials.
            let needs = [kernel::PROGRAMS, kernel::CROSS_PROGRAMS].concat();
            if options.arguments.is_empty() && setup::packages(&needs, options.setup, bed.name(), tally)? {
                larger_pages(&cache, bed, options, tally)?;
            }
            Ok(())
        }
    }
}

/// Linux guests on hosts with either interrupt controller, which their guests have too.
fn linux_on_arm(
    cache: &Cache,
    bed: Emulated,
    kernel: &Kernel,
    options: &Options,
    tally: &mut Tally,
) -> Result<()> {
    let host = |(npt, gicv2): (bool, bool)| {
        let mut request = Request::new(HostKernel::Debian(kernel.clone()));
        (request.bed, request.second_stage, request.gicv2) = (bed, npt, gicv2);
        // Guests that work for a time would have to count its instructions.
        (request.pace, request.memory_mib) = (Pace::Real, 4096);
        request.time_limit = Duration::from_secs(60 * 60);
        request.env.push(("VELLUM_LINUX".into(), "all".into()));
        (format!("{} GICv{}", bed.mode(npt), if gicv2 { 2 } else { 3 }), request)
    };
    let hosts = modes(options).into_iter().flat_map(|npt| [(npt, false), (npt, true)]).map(host).collect();
    let tests = programs::linux_on(bed.architecture())?;
    let guests = guests(cache, bed.architecture(), false)?;
    run(cache, (bed.name(), hosts), &tests, &guests, &options.arguments, tally)
}

/// What a run without a bed has of Arm's: the built-in guest, the oracle in short, and one migration.
const SHORT: [(&str, &str); 3] = [
    ("the built-in guest runs", "vellum run --memory 32m --passes 2"),
    ("the oracle loses nothing", "vellum test dirty-log --memory 8m --events 2k --seed 1"),
    (
        "a guest that writes moves",
        "vellum bench migration --bytes 16m --dirty-rate 1m --around 200ms --downtime 2s --repeat 1",
    ),
];

/// [`SHORT`] on one host of `bed`.
pub fn short(bed: Emulated, tally: &mut Tally) -> Result<()> {
    let cache = Cache::open()?;
    let kernel = Kernel::debian_for(&cache, bed.architecture(), "6.1")?;
    let request = Request { bed, memory_mib: 1024, ..Request::new(HostKernel::Debian(kernel)) };
    in_turn(&cache, &format!("{} {}", bed.name(), bed.mode(true)), request, &SHORT, tally)
}

/// Hosts whose pages are not of 4 KiB: the variant of their kernel, the processor (a Cortex-A72 has none of 16 KiB), a block, how many of
/// those are reserved, and the memory that it takes.
const LARGER: [(&str, bool, &str, u32, u32); 3] = [
    ("pages-16k", true, "32M", 8, 1024),
    ("pages-64k", true, "512M", 2, 4096),
    ("pages-64k", false, "512M", 2, 4096),
];

/// The base of their kernels: one with a dirty ring on Arm.
const LARGER_BASE: &str = "6.12";

/// What they run besides, in blocks of their own: the bits that KVM clears stand for more than a page.
const IN_BLOCKS: [(&str, &str); 3] = [
    (
        "the oracle loses nothing with each tracker",
        "vellum test dirty-log --memory 32m --events 20k --seed 2",
    ),
    (
        "nor where KVM clears a part at a time",
        "vellum test dirty-log --memory 32m --events 10k --seed 3 --clear-chunk 64 --tracker manual-protect",
    ),
    (
        "nor with blocks",
        "vellum test dirty-log --memory BLOCKS --backing hugetlb-BLOCK --events 10k --seed 4",
    ),
];

/// [`SHORT`] and [`IN_BLOCKS`] on hosts of `bed` with [`LARGER`] pages.
fn larger_pages(cache: &Cache, bed: Emulated, options: &Options, tally: &mut Tally) -> Result<()> {
    let base = kernel::Base::named(LARGER_BASE)?;
    for (variant, second_stage, block, reserved, memory_mib) in LARGER {
        if !modes(options).contains(&second_stage) {
            continue;
        }
        let name = format!("{} {} {variant}", bed.name(), bed.mode(second_stage));
        let image = match build::build_for(cache, bed.architecture(), base, &[], Some(variant)) {
            Ok(image) => image,
            Err(error) => {
                tally.stage(&name, "its kernel", Err(error));
                continue;
            }
        };
        let mut request = Request { bed, second_stage, memory_mib, ..image.host() };
        (request.hugepages, request.hugepage_size) = (reserved, block.to_owned());
        request.time_limit = Duration::from_secs(60 * 60);
        let size = block.to_lowercase();
        let blocks = if block == "512M" { "512m" } else { "128m" };
        let own =
            IN_BLOCKS.map(|(what, line)| (what, line.replace("BLOCKS", blocks).replace("BLOCK", &size)));
        let commands: Vec<_> =
            SHORT.into_iter().chain(own.iter().map(|(what, line)| (*what, line.as_str()))).collect();
        in_turn(cache, &name, request, &commands, tally)?;
    }
    Ok(())
}

/// Runs `commands`, each with what it shows, on the host `request`, which `name` names.
fn in_turn(
    cache: &Cache,
    name: &str,
    mut request: Request,
    commands: &[(&str, &str)],
    tally: &mut Tally,
) -> Result<()> {
    eprintln!("lab: {name}: {} commands on {}", commands.len(), request.kernel.image().display());
    request.commands =
        commands.iter().map(|(_, line)| line.split_whitespace().map(str::to_owned).collect()).collect();
    let programs = Programs::build_for(request.bed.architecture())?;
    tally.lap(name, "building");
    let ended = bed::run(cache, &programs, &request, |_| ());
    tally.lap(name, "the host");
    let outcome = match ended {
        Ok(outcome) => outcome,
        // The host is itself under test.
        Err(error) => {
            eprintln!("lab: {name}: {error}");
            tally.fail(name, "the emulated host did not finish");
            return Ok(());
        }
    };
    for ((what, line), ran) in commands.iter().zip(&outcome.ran) {
        let said = || String::from_utf8_lossy(&[ran.stdout.as_slice(), &ran.stderr].concat()).into_owned();
        let ended = match ran.exit.as_ref().map(|exit| exit.code) {
            Some(0) => Ok(()),
            code => Err(Error::Refused(format!("`{line}` ended with {}:\n{}", code.unwrap_or(-1), said()))),
        };
        tally.stage(name, what, ended);
    }
    Ok(())
}

/// Every test of a Linux guest, with both of Debian's kernels and their ELF images; where the bed was not asked for by name,
/// the older kernel with every device, one that moves, and one on the root of a host with a disk.
pub fn linux(options: &Options, tally: &mut Tally) -> Result<()> {
    let cache = Cache::open()?;
    let bed = options.hosts.unwrap_or(svm::BED);
    let whole = options.bed == Some(Bed::Linux);
    let kernel = Kernel::debian(&cache, "6.1")?;
    // A slice does without.
    let debuggers = if whole { brought("linux", debuggers::with_symbols(&cache), tally) } else { Vec::new() };
    // One test takes minutes; all of them, an hour, and on Bochs, where one with every device takes three minutes, perhaps two.
    let all = if bed == svm::BED { 120 } else { 240 };
    let limit = Duration::from_secs(if whole { all } else { 25 } * 60);
    let host = |npt| {
        let mut request = for_linux(bed, Request::new(HostKernel::Debian(kernel.clone())), npt);
        request.files.extend(debuggers.iter().cloned());
        request.time_limit = limit;
        if whole {
            request.env.push(("VELLUM_LINUX".into(), "all".into()));
        }
        let name = if bed == svm::BED { bed.mode(npt) } else { bed.label(npt, false) };
        (name, request)
    };
    let mut hosts: Vec<_> = modes(options).into_iter().map(host).collect();
    // A root on a disk is for hosts that have one.
    if bed == svm::BED && setup::packages(&disk::PROGRAMS, options.setup, "linux", tally)? {
        match disk::debian(&cache) {
            Ok(root) if whole => {
                let mut host = on_a_disk(&kernel, root, limit);
                host.env.push(("VELLUM_LINUX".into(), "root,all".into()));
                host.files.extend(packages(&cache)?);
                if setup::packages(kernel::PROGRAMS, options.setup, "linux", tally)? {
                    host.files.extend(tree(&cache)?);
                }
                match disk::cloud(&cache) {
                    Ok(cloud) => {
                        host.files.push((cloud.kernel, "/cloud/vmlinuz".into()));
                        host.files.push((cloud.initrd, "/cloud/initrd.img".into()));
                        host.disks.push(cloud.disk);
                    }
                    Err(error) => tally.lack("linux", "a cloud image", &error.to_string()),
                }
                hosts.extend(modes(options).into_iter().map(|npt| with_name(&host, npt)));
            }
            Ok(root) => {
                let mut host = on_a_disk(&kernel, root, limit);
                host.env.push(("VELLUM_LINUX".into(), "root".into()));
                hosts.push(with_name(&host, true));
            }
            Err(error) => tally.lack("linux", "hosts whose root is on a disk", &error.to_string()),
        }
    }
    let guests = guests(&cache, Architecture::X86, whole)?;
    tally.lap("linux", "making guests and disks");
    run(&cache, ("linux", hosts), &programs::built_for(Place::Linux)?, &guests, &options.arguments, tally)
}

/// A host with a root of its own, for those tests alone which need that.
fn on_a_disk(kernel: &Kernel, root: PathBuf, limit: Duration) -> Request {
    let mut request = for_linux(svm::BED, Request::new(HostKernel::Debian(kernel.clone())), true);
    request.root = Some(root);
    request.time_limit = limit;
    request
}

/// That host with nested paging or without, and its name.
fn with_name(host: &Request, npt: bool) -> (String, Request) {
    (format!("{} on a disk", svm::BED.mode(npt)), Request { second_stage: npt, ..host.clone() })
}

/// The modules of Debian's kernels that their guests use here: of the rest there are hundreds of megabytes.
const USED: [&str; 6] = ["virtiofs", "overlay", "dummy", "vfat", "virtio_pci", "virtio_rng"];
/// What is left out of the kernel for any machine even so: a command's streams go by a port of a virtio console then.
const LEFT_OUT: &str = "vmw_vsock_virtio_transport";
/// The base of which there is a guest in the tree in which it was built.
const BUILT: &str = "7.2";

/// The files of the guests' kernels as their packages have them, those of 6.12 packed.
fn packages(cache: &Cache) -> Result<Vec<(PathBuf, String)>> {
    let mut files = Vec::new();
    for version in Kernel::versions().chain([Kernel::GENERIC]) {
        let kernel = Kernel::debian(cache, version)?;
        let is_wanted = |name: &&str| version != Kernel::GENERIC || *name != LEFT_OUT;
        let names: Vec<&str> = guest::MODULES.lines().filter(is_wanted).chain(USED).collect();
        let used: Vec<String> = kernel.modules(&names)?.into_iter().map(|(name, _)| name).collect();
        let is_used = |name: &str| match name.split_once(".ko") {
            Some((module, _)) => used.contains(&module.replace('-', "_")),
            None => !name.starts_with("System.map"),
        };
        let package = kernel.package_dir();
        let found = files_below(&[package.join("boot"), package.join("lib/modules")], is_used)?;
        files.extend(placed(package, found, version, "package"));
    }
    Ok(files)
}

/// The files of a guest's kernel where it was built, which is done if need be.
fn tree(cache: &Cache) -> Result<Vec<(PathBuf, String)>> {
    let tree = build::build(cache, kernel::Base::named(BUILT)?, &[], Some(build::GUEST))?.tree();
    let found = files_below(std::slice::from_ref(&tree), |_| true)?;
    Ok(placed(&tree, found, BUILT, "tree").collect())
}

/// Where `files` of `dir` are in a host: as `what` of the guest called `name`.
fn placed(
    dir: &Path,
    files: Vec<PathBuf>,
    name: &str,
    what: &str,
) -> impl Iterator<Item = (PathBuf, String)> {
    files.into_iter().map(move |path| {
        let within = path.strip_prefix(dir).unwrap_or(&path).display().to_string();
        (path, format!("/guests/{name}/{what}/{within}"))
    })
}

/// What debuggers there are for a host: what cannot be had the trials name themselves.
fn brought(
    bed: &str,
    debuggers: Result<Vec<debuggers::Placed>>,
    tally: &mut Tally,
) -> Vec<debuggers::Placed> {
    debuggers.unwrap_or_else(|error| {
        tally.lack(bed, "debuggers for its hosts", &error.to_string());
        Vec::new()
    })
}

/// The processors of two hosts. What they share is the level x86-64-v2, as whose guests Linux moves between them.
const MODELS: [&str; 2] = ["EPYC", "Nehalem,vendor=AuthenticAMD"];

/// A Linux guest that goes from a host with the older kernel to one with the newer, which has another CPU too, and back, and one that goes
/// the other way round; and guests that see all of their host's CPU, and stay where that is more.
pub fn pair(options: &Options, tally: &mut Tally) -> Result<()> {
    let cache = Cache::open()?;
    let guests = guests(&cache, Architecture::X86, true)?;
    let tests = programs::built_for(Place::Linux)?;
    for npt in modes(options) {
        let dir = std::env::temp_dir().join(format!("vellum-wire-{}-{}", std::process::id(), u8::from(npt)));
        fs::create_dir_all(&dir).map_err(Error::file("create", &dir))?;
        let ends = ["0", "1"].map(|end| dir.join(end));
        let mut hosts = Vec::new();
        for (end, version) in Kernel::versions().enumerate() {
            let kernel = Kernel::debian(&cache, version)?;
            let name = format!("{} with {version}", svm::BED.mode(npt));
            let mut request = for_linux(svm::BED, Request::new(HostKernel::Debian(kernel)), npt);
            request.time_limit = Duration::from_secs(60 * 60);
            request.cpu = Some(MODELS[end].to_owned());
            request.wire = Some(Wire { ends: ends.clone(), end });
            request.env.push(("VELLUM_WIRE".into(), end.to_string()));
            hosts.push((name, request));
        }
        let arguments = ["between_hosts".to_owned()];
        let outcome = run(&cache, ("pair", hosts), &tests, &guests, &arguments, tally);
        // What is left of it is two sockets.
        let _ = fs::remove_dir_all(&dir);
        outcome?;
    }
    Ok(())
}

/// A guest for tests: its kernel's version, itself, and the ELF image that is in a bzImage.
type Made = (&'static str, Guest, Option<PathBuf>);

/// Those of every version, or of the oldest alone.
fn guests(cache: &Cache, architecture: Architecture, every: bool) -> Result<Vec<Made>> {
    let versions = Kernel::versions().take(if every { usize::MAX } else { 1 });
    let make = |version: &'static str| {
        let dir = match architecture {
            Architecture::X86 => guests_dir().join(version),
            other => guests_dir().join(other.debian()).join(version),
        };
        let guest = Guest::make(cache, architecture, version, &dir)?;
        let vmlinux = (architecture == Architecture::X86).then(|| guest.unpack_vmlinux()).transpose()?;
        Ok((version, guest, vmlinux))
    };
    versions.map(make).collect()
}

/// Where guests for tests are made: they hold this workspace's agent, so that they belong to its build.
fn guests_dir() -> PathBuf {
    artifacts::workspace().join("target/guests")
}

/// A host on which Linux guests run.
fn for_linux(bed: Emulated, request: Request, npt: bool) -> Request {
    // What Linux guests do wrong on QEMU's other hosts is the emulator's doing (`bed::svm`); Bochs has no others.
    let pace = if bed.has_pace(Pace::Real).is_ok() { Pace::Real } else { Pace::Counted };
    Request {
        bed,
        second_stage: npt,
        pace,
        memory_mib: 6144,
        // The largest guest on them has 1 GiB.
        hugepages: 512,
        ..request
    }
}

/// With nested paging and without, or what is wanted of it.
fn modes(options: &Options) -> Vec<bool> {
    [true, false].into_iter().filter(|&npt| options.npt.is_none_or(|wanted| wanted == npt)).collect()
}

/// Runs `tests` on `hosts` beside each other, each by its name, all of them hosts of the bed `bed`.
fn run(
    cache: &Cache,
    (bed, hosts): (&str, Vec<(String, Request)>),
    tests: &[Executable],
    guests: &[Made],
    arguments: &[String],
    tally: &mut Tally,
) -> Result<()> {
    let architecture = hosts.first().map_or(Architecture::X86, |(_, request)| request.bed.architecture());
    let programs = Programs::build_for(architecture)?;
    tally.lap(bed, "building for its hosts");
    let tally = Mutex::new(tally);
    // One host keeps one CPU busy.
    let done = side_by_side(&hosts, |(name, request)| {
        let bed = format!("{bed} {name}");
        if let HostKernel::Debian(kernel) = &request.kernel {
            eprintln!("lab: {bed}: {} test programs on {}", tests.len(), kernel.package);
        }
        let mut request = request.clone();
        request.files.push((programs.lab.clone(), "/bin/lab".into()));
        // The tests know vellum by the path at which cargo built it.
        request.files.push((programs.vellum.clone(), absolute(&programs.vellum)));
        for test in tests {
            // CARGO_TARGET_TMPDIR, as cargo told the tests when it built them: target/TRIPLE/tmp beside
            // target/TRIPLE/PROFILE/deps/TEST.
            let target = test.path.ancestors().nth(3).unwrap_or(Path::new("/"));
            request.directories.push(target.join("tmp").to_string_lossy().into_owned());
            request.files.push((test.path.clone(), format!("/tests/{}", test.name)));
        }
        if !guests.is_empty() {
            request.env.push(("VELLUM_GUESTS".into(), "/guests".into()));
        }
        for (version, guest, vmlinux) in guests {
            for file in [&guest.kernel, &guest.initrd].into_iter().chain(vmlinux) {
                let name = file.file_name().unwrap_or_default().to_string_lossy();
                request.files.push((file.clone(), format!("/guests/{version}/{name}")));
            }
        }
        let line = ["lab", "test", "metal", "--prebuilt", "/tests", "--"].map(str::to_owned);
        request.commands.push([&line[..], arguments].concat());
        // In there, standard output is the record, and what is said besides is for people.
        request.env.push((record::VARIABLE.into(), "/proc/self/fd/1".into()));
        let (mut rows, mut lines, mut complaints) = (Rows::default(), Vec::new(), Vec::new());
        let (mut records, mut spans) = (Rows::default(), Spans::start());
        let outcome = bed::run(cache, &programs, &request, |frame| match frame {
            Frame::Stdout(bytes) => {
                lines.extend_from_slice(bytes);
                records.push(bytes, |row| spans.line(row));
            }
            // The other host speaks between its lines.
            Frame::Stderr(bytes) => rows.push(bytes, |row| locked(&tally).show(&format!("{bed}: {row}"))),
            Frame::Boot(boot) => {
                spans.ended("boot");
                complaints.clone_from(&boot.complaints);
            }
            _ => (),
        });
        let (lines, mut tally) = (String::from_utf8_lossy(&lines), locked(&tally));
        spans.0.into_iter().for_each(|(what, passed)| tally.took(&bed, &what, passed));
        if !outcome.as_ref().is_ok_and(|outcome| outcome.code() == 0) {
            // What failed may have failed for want of that; and a host does without much of it.
            complaints.iter().for_each(|lacks| tally.show(&format!("{bed}: the host itself: {lacks}")));
        }
        match outcome {
            Ok(outcome) => tally.program(&bed, "", &lines, outcome.code() == 0),
            // The host is itself under test: one that dies is a failure, and the other one still has something to say.
            Err(error) => {
                eprintln!("lab: {bed}: {error}");
                // Cut off, as is to be expected.
                let _ = tally.lines(&bed, "", &lines);
                tally.fail(&bed, "the emulated host did not finish");
            }
        }
        Ok(())
    });
    locked(&tally).lap(bed, "the hosts");
    done.map(drop)
}

/// What a host spent its time on, as it is seen from here: its own clock may count instructions.
struct Spans(Vec<(String, Duration)>, Instant);

impl Spans {
    fn start() -> Self {
        Self(Vec::new(), Instant::now())
    }

    /// What has ended took the time since what ended before it; a program's tests are one.
    fn ended(&mut self, what: &str) {
        let passed = self.1.elapsed();
        self.1 += passed;
        match self.0.last_mut() {
            Some((last, sum)) if last == what => *sum += passed,
            _ => self.0.push((what.to_owned(), passed)),
        }
    }

    /// A line of the host's record.
    fn line(&mut self, row: &str) {
        if let (lines, Ok(())) = record::parse(row) {
            for line in lines {
                match line {
                    Line::Test { name, .. } => {
                        self.ended(name.split_once("::").map_or(&name, |(program, _)| program))
                    }
                    Line::End(_) => (),
                }
            }
        }
    }
}

/// A count that a lane which panicked has not left half done: it is made of whole lines.
fn locked<'a, T>(tally: &'a Mutex<T>) -> MutexGuard<'a, T> {
    tally.lock().unwrap_or_else(PoisonError::into_inner)
}

fn absolute(path: &Path) -> String {
    let path: OsString = path.canonicalize().unwrap_or_else(|_| path.to_owned()).into();
    path.to_string_lossy().into_owned()
}

/// Bytes as they come, cut into lines.
#[derive(Default)]
struct Rows(Vec<u8>);

impl Rows {
    fn push(&mut self, bytes: &[u8], mut each: impl FnMut(&str)) {
        self.0.extend_from_slice(bytes);
        while let Some(end) = self.0.iter().position(|&byte| byte == b'\n') {
            let row: Vec<u8> = self.0.drain(..=end).collect();
            each(String::from_utf8_lossy(&row).trim_end());
        }
    }
}
