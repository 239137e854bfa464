//! The emulated hosts of a run and the work of each. A host runs the same test programs as this
//! machine, by the same laboratory, as its bed metal. [`super::pool`] boots the hosts.
//!
//! A run without a bed runs each Linux guest, and each program that needs KVM, on one emulated
//! host. Of programs that test Vellum more than KVM, it leaves out what has passed on this machine's
//! own KVM. Without nested paging, where KVM shadows page tables, it runs only the programs about
//! memory. `--full` runs everything in both modes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use support::hosts::EMULATED;
use support::record;

use super::pool::{self, Job, Made, Work};
use super::programs::{self, Place};
use super::tally::Tally;
use super::{HUGEPAGES, Options, TestHost, debuggers, here, setup};
use crate::architecture::Architecture;
use crate::artifacts::{self, Executable, Kernel, files_below};
use crate::cache::Cache;
use crate::hosts::guest::{self, Guest};
use crate::hosts::{Emulated, HOSTS, HostKernel, Pace, Request, Wire, arm64, cloud, disk, doctor, svm};
use crate::kernel::{self, build, variants};
use crate::{Error, Result};

/// The programs that take longest on an emulated host.
const LONGEST: [&str; 2] = ["bench", "migrate"];

/// These programs test what KVM does, so they run on each kind of KVM.
const OF_KVM: [&str; 7] = ["boot", "cr3_cache", "dirty_log", "interrupts", "run", "state", "workload"];

/// A run without a bed also runs these programs without nested paging.
const OF_MEMORY: [&str; 3] = ["cr3_cache", "dirty_log", "workload"];

/// A kind of emulated host, and what its test programs need.
struct Bed {
    kind: Emulated,
    kernel: Kernel,
    debuggers: Vec<debuggers::Placed>,
    /// The programs that run on any KVM.
    programs: Vec<Executable>,
}

impl Bed {
    fn new(kind: Emulated, cache: &Cache, tally: &mut Tally) -> Result<Self> {
        let architecture = kind.architecture();
        let kernel = Kernel::debian_for(cache, architecture, "6.1")?;
        let debuggers = match architecture {
            Architecture::X86 => brought(kind.name(), debuggers::programs(cache), tally),
            Architecture::Arm => Vec::new(),
        };
        tally.lap(kind.name(), "fetching kernels and debuggers");
        let programs = programs::built_on(architecture)?;
        tally.lap(kind.name(), "building the test programs");
        Ok(Self { kind, kernel, debuggers, programs })
    }

    /// A host that runs these of its programs, with variables for them.
    fn job(
        &self,
        npt: bool,
        programs: Vec<Executable>,
        env: &[(String, String)],
        arguments: &[String],
    ) -> Job {
        let mut request = Request::new(HostKernel::Debian(self.kernel.clone()));
        request.files.extend(self.debuggers.iter().cloned());
        (request.host, request.second_stage) = (self.kind, npt);
        // With a clock that counts instructions, the tests' own time limits do not depend on this
        // machine's load.
        request.memory_mib = 4096;
        request.hugepages = HUGEPAGES;
        request.time_limit = Duration::from_secs(30 * 60);
        request.env.extend_from_slice(env);
        let name = format!("{} {}", self.kind.name(), self.kind.mode(npt));
        Job {
            name,
            request,
            work: Work::Tests { programs, guests: Vec::new(), arguments: arguments.to_vec() },
        }
    }

    /// Its programs `longest` have a host of their own, so that no CPU idles while another works on
    /// one long list.
    fn jobs(&self, npt: bool, longest: &[&str], env: &[(String, String)], arguments: &[String]) -> Vec<Job> {
        let (longest, others): (Vec<_>, Vec<_>) =
            self.programs.iter().cloned().partition(|test| longest.contains(&test.name.as_str()));
        let shares = [longest, others].into_iter().filter(|programs| !programs.is_empty());
        shares.map(|programs| self.job(npt, programs, env, arguments)).collect()
    }
}

/// The hosts of a run without a bed that need no result of this machine: with each test, or in a
/// short run with those of KVM.
pub fn ahead(options: &Options, tally: &mut Tally) -> Result<Vec<Job>> {
    let mut jobs = Vec::new();
    // One kind of host alone, because each takes long.
    let host = HOSTS[0];
    // A Linux guest takes longest, so it comes first.
    let needs = [svm::HOST.programs(), &["lz4", "zstd"]].concat();
    if setup::packages(&needs, options.setup, "linux", tally)? {
        jobs.extend(linux(options, tally)?);
    }
    if setup::packages(host.programs(), options.setup, host.name(), tally)? {
        jobs.extend(if options.full { emulated(host, options, tally)? } else { of_kvm(host, tally)? });
    }
    // What a run without a bed has for the other architecture.
    if setup::packages(arm64::HOST.programs(), options.setup, "arm64", tally)? {
        jobs.push(short(arm64::HOST)?);
    }
    Ok(jobs)
}

/// The programs that test what KVM does, and without nested paging those about memory.
fn of_kvm(kind: Emulated, tally: &mut Tally) -> Result<Vec<Job>> {
    here::promises(kind, &[], tally)?;
    let bed = Bed::new(kind, &Cache::open()?, tally)?;
    let chosen = |names: &[&str]| -> Vec<Executable> {
        bed.programs.iter().filter(|test| names.contains(&test.name.as_str())).cloned().collect()
    };
    for left in bed.programs.iter().filter(|test| !OF_MEMORY.contains(&test.name.as_str())) {
        tally.skip(&format!("{} {}", kind.name(), kind.mode(false)), &left.name, LEFT_TO_FULL);
    }
    Ok(vec![bed.job(true, chosen(&OF_KVM), &[], &[]), bed.job(false, chosen(&OF_MEMORY), &[], &[])])
}

/// The tests of a short run that are more about Vellum than about KVM, and that have not passed on
/// this machine's own KVM: on one kind of host, with nested paging.
pub fn left(options: &Options, tally: &mut Tally) -> Result<Vec<Job>> {
    let kind = HOSTS[0];
    if options.full || !doctor::missing(kind.programs()).is_empty() {
        return Ok(Vec::new());
    }
    let mut bed = Bed::new(kind, &Cache::open()?, tally)?;
    bed.programs.retain(|test| !OF_KVM.contains(&test.name.as_str()));
    let programs: Vec<&str> = bed.programs.iter().map(|test| test.name.as_str()).collect();
    let is_theirs = |test: &str| test.split_once("::").is_some_and(|(name, _)| programs.contains(&name));
    let passed = tally.passed_here().iter().filter(|test| is_theirs(test));
    let passed = passed.map(String::as_str).collect::<Vec<_>>().join(" ");
    // After this machine's own KVM, little is left.
    let longest = if doctor::kvm().is_ok() { &[] } else { &LONGEST[..] };
    Ok(bed.jobs(true, longest, &[(record::PASSED.to_owned(), passed)], &[]))
}

/// The tests on emulated hosts.
pub fn emulated(kind: Emulated, options: &Options, tally: &mut Tally) -> Result<Vec<Job>> {
    // The laboratory's own promises come first, because the other tests rely on them.
    here::promises(kind, &options.arguments, tally)?;
    let cache = Cache::open()?;
    let bed = Bed::new(kind, &cache, tally)?;
    // The arguments may name a single test.
    let longest = if options.arguments.is_empty() { &LONGEST[..] } else { &[] };
    let all = [(EMULATED.to_owned(), "all".to_owned())];
    let mut jobs: Vec<Job> =
        modes(options).into_iter().flat_map(|npt| bed.jobs(npt, longest, &all, &options.arguments)).collect();
    // Linux guests on x86 have a bed of their own.
    if kind.architecture() == Architecture::Arm {
        let disk = match setup::packages(&cloud::PROGRAMS, options.setup, kind.name(), tally)? {
            true => Some(cloud::image_for_arm(&cache)?),
            false => None,
        };
        jobs.extend(linux_on_arm(&cache, kind, &bed.kernel, disk, options)?);
        // Arguments name tests, which these kernels do not have.
        let needs = [kernel::PROGRAMS, kernel::CROSS_PROGRAMS].concat();
        if options.arguments.is_empty() && setup::packages(&needs, options.setup, kind.name(), tally)? {
            jobs.extend(larger_pages(&cache, kind, options, tally));
        }
    }
    Ok(jobs)
}

/// Linux guests on hosts with either interrupt controller. A guest has its host's kind. `disk` is
/// an image as clouds have them.
fn linux_on_arm(
    cache: &Cache,
    bed: Emulated,
    kernel: &Kernel,
    disk: Option<PathBuf>,
    options: &Options,
) -> Result<Vec<Job>> {
    let tests = programs::linux_on(bed.architecture())?;
    let guests = guests(cache, bed.architecture(), false)?;
    let host = |(npt, gicv2): (bool, bool)| {
        let mut request = Request::new(HostKernel::Debian(kernel.clone()));
        (request.host, request.second_stage, request.gicv2) = (bed, npt, gicv2);
        request.disks.extend(disk.clone());
        // With a counting clock, guests that run for a fixed time would take too long.
        (request.pace, request.memory_mib) = (Pace::Real, 4096);
        request.time_limit = Duration::from_secs(60 * 60);
        request.env.push(("VELLUM_LINUX".into(), "all".into()));
        let name = format!("{} {} GICv{}", bed.name(), bed.mode(npt), if gicv2 { 2 } else { 3 });
        let (programs, guests) = (tests.clone(), guests.clone());
        Job { name, request, work: Work::Tests { programs, guests, arguments: options.arguments.clone() } }
    };
    Ok(modes(options).into_iter().flat_map(|npt| [(npt, false), (npt, true)]).map(host).collect())
}

/// The part for Arm in a run without a bed: the built-in guest, a short run of the oracle, and one
/// migration.
const SHORT: [(&str, &str); 3] = [
    ("the built-in guest runs", "vellum run --memory 32m --passes 2"),
    ("the oracle loses nothing", "vellum test dirty-log --memory 8m --events 2k --seed 1"),
    (
        "a guest that writes moves",
        "vellum bench migration --bytes 16m --dirty-rate 1m --around 200ms --downtime 2s --repeat 1",
    ),
];

/// [`SHORT`] on one host of `bed`.
fn short(host: Emulated) -> Result<Job> {
    let cache = Cache::open()?;
    let kernel = Kernel::debian_for(&cache, host.architecture(), "6.1")?;
    let request = Request { host, memory_mib: 1024, ..Request::new(HostKernel::Debian(kernel)) };
    let commands = SHORT.map(|(what, line)| (what.to_owned(), line.to_owned()));
    let name = format!("{} {}", host.name(), host.mode(true));
    Ok(Job { name, request, work: Work::Commands(commands.into()) })
}

/// Hosts with pages other than 4 KiB: the kernel's variant, the processor (a Cortex-A72 has no 16
/// KiB pages), a block's size, the number of reserved blocks, and the memory.
const LARGER: [(&str, bool, &str, u32, u32); 3] = [
    ("pages-16k", true, "32M", 8, 1024),
    ("pages-64k", true, "512M", 2, 4096),
    ("pages-64k", false, "512M", 2, 4096),
];

/// Their kernels' base, which has a dirty ring on Arm.
const LARGER_BASE: &str = "6.12";

/// Their additional commands, some with blocks. A bit that KVM clears then stands for more than 4
/// KiB.
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
fn larger_pages(cache: &Cache, bed: Emulated, options: &Options, tally: &mut Tally) -> Vec<Job> {
    let mut jobs = Vec::new();
    for (variant, second_stage, block, reserved, memory_mib) in LARGER {
        if !modes(options).contains(&second_stage) {
            continue;
        }
        let name = format!("{} {} {variant}", bed.name(), bed.mode(second_stage));
        let made = kernel::Base::named(LARGER_BASE)
            .and_then(|base| build::build_for(cache, bed.architecture(), base, &[], Some(variant)));
        let image = match made {
            Ok(image) => image,
            Err(error) => {
                tally.stage(&name, "its kernel", Err(error));
                continue;
            }
        };
        let mut request = Request { host: bed, second_stage, memory_mib, ..image.host() };
        (request.hugepages, request.hugepage_size) = (reserved, block.to_owned());
        request.time_limit = Duration::from_secs(60 * 60);
        let size = block.to_lowercase();
        let blocks = if block == "512M" { "512m" } else { "128m" };
        let fill = |line: &str| line.replace("BLOCKS", blocks).replace("BLOCK", &size);
        let commands = SHORT.iter().chain(&IN_BLOCKS);
        let commands = commands.map(|(what, line)| ((*what).to_owned(), fill(line))).collect();
        jobs.push(Job { name, request, work: Work::Commands(commands) });
    }
    jobs
}

/// The reason of tests that a run without a bed skips.
pub const LEFT_TO_FULL: &str = "is left to cargo lab test --full";

/// In a run without a bed, the host with nested paging runs this test, and the other host all other
/// tests.
const MOVES: &str = "moves_under_load";

/// Every test of a Linux guest, with both Debian kernels and their ELF images. In a run without a
/// bed only the older kernel: one guest that moves, one with every device, and one on a host with
/// its root on a disk.
pub fn linux(options: &Options, tally: &mut Tally) -> Result<Vec<Job>> {
    let cache = Cache::open()?;
    let bed = options.hosts.unwrap_or(svm::HOST);
    let whole = options.bed == Some(TestHost::Linux);
    let kernel = Kernel::debian(&cache, "6.1")?;
    // A short run needs no debuggers.
    let debuggers = if whole { brought("linux", debuggers::with_symbols(&cache), tally) } else { Vec::new() };
    // One test takes minutes, and all take an hour. On Bochs, where a guest with every device takes
    // three minutes, they may take two.
    let all = if bed == svm::HOST { 120 } else { 240 };
    let minutes = if whole { all } else { 25 + if options.full { 35 } else { 0 } };
    let limit = Duration::from_secs(minutes * 60);
    let host = |npt| {
        let mut request = for_linux(bed, Request::new(HostKernel::Debian(kernel.clone())), npt);
        request.files.extend(debuggers.iter().cloned());
        request.time_limit = limit;
        if whole {
            request.env.push(("VELLUM_LINUX".into(), "all".into()));
        }
        if options.full && npt {
            request.env.push((here::BOOK.into(), "all".into()));
        }
        let name = if bed == svm::HOST { bed.mode(npt) } else { bed.label(npt, false) };
        let arguments = match (options.is_short(), npt) {
            (true, true) => vec![MOVES.to_owned()],
            (true, false) => vec!["--skip".to_owned(), MOVES.to_owned()],
            (false, _) => options.arguments.clone(),
        };
        (name, request, arguments)
    };
    let mut hosts: Vec<_> = modes(options).into_iter().map(host).collect();
    // Only some hosts can have their root on a disk.
    if bed == svm::HOST && setup::packages(&disk::PROGRAMS, options.setup, "linux", tally)? {
        match disk::debian(&cache) {
            Ok(root) if whole => {
                let mut host = on_a_disk(&kernel, root, limit);
                host.env.push(("VELLUM_LINUX".into(), "root,all".into()));
                host.files.extend(packages(&cache)?);
                if setup::packages(kernel::PROGRAMS, options.setup, "linux", tally)? {
                    host.files.extend(tree(&cache)?);
                }
                if setup::packages(&cloud::PROGRAMS, options.setup, "linux", tally)? {
                    match cloud::images(&cache) {
                        Ok(images) => host.disks.extend(images),
                        Err(error) => tally.lack("linux", "images as clouds have them", &error.to_string()),
                    }
                }
                hosts.extend(modes(options).into_iter().map(|npt| with_name(&host, npt, &options.arguments)));
            }
            Ok(root) => {
                let mut host = on_a_disk(&kernel, root, limit);
                host.env.push(("VELLUM_LINUX".into(), "root".into()));
                hosts.push(with_name(&host, true, &options.arguments));
            }
            Err(error) => tally.lack("linux", "hosts whose root is on a disk", &error.to_string()),
        }
    }
    let guests = guests(&cache, Architecture::X86, whole)?;
    tally.lap("linux", "making guests and disks");
    let programs = programs::built_for(Place::Linux)?;
    tally.lap("linux", "building the test programs");
    if options.is_short() {
        for npt in modes(options) {
            let left = if npt { "each test but of a guest that moves" } else { MOVES };
            tally.skip(&format!("linux {}", svm::HOST.mode(npt)), left, LEFT_TO_FULL);
        }
    }
    let job = |(name, request, arguments)| {
        let (programs, guests) = (programs.clone(), guests.clone());
        let work = Work::Tests { programs, guests, arguments };
        Job { name: format!("linux {name}"), request, work }
    };
    Ok(hosts.into_iter().map(job).collect())
}

/// A host with its root on a disk, only for the tests that need it.
fn on_a_disk(kernel: &Kernel, root: PathBuf, limit: Duration) -> Request {
    let mut request = for_linux(svm::HOST, Request::new(HostKernel::Debian(kernel.clone())), true);
    request.root = Some(root);
    request.time_limit = limit;
    request
}

/// The host with or without nested paging, with its name.
fn with_name(host: &Request, npt: bool, arguments: &[String]) -> (String, Request, Vec<String>) {
    let name = format!("{} on a disk", svm::HOST.mode(npt));
    (name, Request { second_stage: npt, ..host.clone() }, arguments.to_vec())
}

/// The modules of Debian's kernels that the guests use here. The others have hundreds of megabytes.
const USED: [&str; 6] = ["virtiofs", "overlay", "dummy", "vfat", "virtio_pci", "virtio_rng"];
/// Left out of the generic kernel, so that a command's streams use a port of a virtio console.
const LEFT_OUT: &str = "vmw_vsock_virtio_transport";
/// The base whose kernel is also run from its build tree.
const BUILT: &str = "7.2";

/// The files of the guests' kernels as in their packages. Those of 6.12 are compressed.
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

/// The files of a guest's kernel in its build tree, built if need be.
fn tree(cache: &Cache) -> Result<Vec<(PathBuf, String)>> {
    let tree = build::build(cache, kernel::Base::named(BUILT)?, &[], Some(variants::GUEST))?.tree();
    let found = files_below(std::slice::from_ref(&tree), |_| true)?;
    Ok(placed(&tree, found, BUILT, "tree").collect())
}

/// The paths of `files` in a host: `what` of the guest `name`.
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

/// The debuggers for a host. Tests report what is missing.
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

/// The processors of the two hosts. Both have the level x86-64-v2, and guests of that level move
/// between them.
const MODELS: [&str; 2] = ["EPYC", "Nehalem,vendor=AuthenticAMD"];

/// Linux guests that migrate between a host with the older kernel and one with the newer and with
/// another CPU, in both directions and back. Guests that see all of their host's CPU stay if the
/// other host has less.
pub fn pair(options: &Options, tally: &mut Tally) -> Result<()> {
    let cache = Cache::open()?;
    let guests = guests(&cache, Architecture::X86, true)?;
    let tests = programs::built_for(Place::Linux)?;
    for npt in modes(options) {
        let dir = std::env::temp_dir().join(format!("vellum-wire-{}-{}", std::process::id(), u8::from(npt)));
        fs::create_dir_all(&dir).map_err(Error::file("create", &dir))?;
        let ends = ["0", "1"].map(|end| dir.join(end));
        let mut jobs = Vec::new();
        for (end, version) in Kernel::versions().enumerate() {
            let kernel = Kernel::debian(&cache, version)?;
            let name = format!("{} with {version}", svm::HOST.mode(npt));
            let mut request = for_linux(svm::HOST, Request::new(HostKernel::Debian(kernel)), npt);
            request.time_limit = Duration::from_secs(60 * 60);
            request.cpu = Some(MODELS[end].to_owned());
            request.wire = Some(Wire { ends: ends.clone(), end });
            request.env.push(("VELLUM_WIRE".into(), end.to_string()));
            let (programs, guests) = (tests.clone(), guests.clone());
            let work = Work::Tests { programs, guests, arguments: vec!["between_hosts".to_owned()] };
            jobs.push(Job { name: format!("pair {name}"), request, work });
        }
        let outcome = pool::run(jobs, tally);
        // Only two sockets are left.
        let _ = fs::remove_dir_all(&dir);
        outcome?;
    }
    Ok(())
}

/// The bases whose kernels replace each other in turn. A host boots the first.
pub const REPLACED: [&str; 2] = ["7.2", "7.3"];

/// A host for each test that goes on in another kernel.
pub fn live_update(options: &Options, tally: &mut Tally) -> Result<Vec<Job>> {
    const HOST: &str = "live-update";
    let cache = Cache::open()?;
    let mut next = Vec::new();
    for base in REPLACED.iter().filter(|base| options.base.as_ref().is_none_or(|asked| asked == *base)) {
        let image = build::build(&cache, kernel::Base::named(base)?, &[], Some(variants::LIVE_UPDATE))?;
        next.push(((*base).to_owned(), image.file()));
    }
    tally.lap(HOST, "building kernels");
    let guests = guests(&cache, Architecture::X86, true)?;
    tally.lap(HOST, "making guests");
    let mut tests = Vec::new();
    for program in programs::built_for(Place::Replaced)? {
        let names = here::list(Command::new(&program.path).args(&options.arguments))?;
        tests.extend(names.into_iter().map(|test| (program.clone(), test)));
    }
    tally.lap(HOST, "building the test programs");
    let (under_systemd, tests): (Vec<_>, Vec<_>) =
        tests.into_iter().partition(|(_, test)| test.starts_with(UNDER_SYSTEMD));
    let disks = match (under_systemd.is_empty(), options.arguments.is_empty()) {
        (true, _) => Vec::new(),
        (false, false) => disks_with_systemd(&cache, HOST, options, tally)?,
        (false, true) => {
            let why = format!("takes long: cargo lab test {HOST} -- {UNDER_SYSTEMD}");
            tally.skip(HOST, "hosts with systemd", &why);
            Vec::new()
        }
    };
    let with_systemd = |(suite, root): &(&str, PathBuf)| {
        let request = Request::new(HostKernel::Image(next[0].1.clone()));
        let npt = modes(options)[0];
        let mut request = Request { next: next.clone(), ..for_linux(svm::HOST, request, npt) };
        (request.root, request.systemd) = (Some(root.clone()), true);
        (request.memory_mib, request.hugepages) = (3072, 0);
        // systemd and D-Bus end what is late by their own limits, so the host's time must not depend on
        // this machine's load. Its guests are built in, and run at this pace.
        request.pace = Pace::Counted;
        request.time_limit = Duration::from_secs(60 * 60);
        let name = format!("{HOST} {} {suite}", svm::HOST.mode(npt));
        let job = move |(program, test): &(Executable, String)| {
            let work = Work::Test { program: program.clone(), test: test.clone(), guests: Vec::new() };
            Job { name: name.clone(), request: request.clone(), work }
        };
        under_systemd.iter().map(job).collect::<Vec<_>>()
    };
    let with_systemd: Vec<Job> = disks.iter().flat_map(with_systemd).collect();
    let job = |(npt, (program, test)): (bool, &(Executable, String))| {
        let request = Request::new(HostKernel::Image(next[0].1.clone()));
        let mut request = Request { next: next.clone(), ..for_linux(svm::HOST, request, npt) };
        // Enough for a test that they are refused.
        request.hugepages = 16;
        request.time_limit = Duration::from_secs(60 * 60);
        let work = Work::Test { program: program.clone(), test: test.clone(), guests: guests.clone() };
        Job { name: format!("{HOST} {}", svm::HOST.mode(npt)), request, work }
    };
    Ok(modes(options)
        .into_iter()
        .flat_map(|npt| tests.iter().map(move |test| (npt, test)))
        .map(job)
        .chain(with_systemd)
        .collect())
}

/// How the names of tests begin that run on hosts with systemd.
const UNDER_SYSTEMD: &str = "systemd_";

/// The roots of hosts with systemd, by their suites.
fn disks_with_systemd(
    cache: &Cache,
    host: &str,
    options: &Options,
    tally: &mut Tally,
) -> Result<Vec<(&'static str, PathBuf)>> {
    let name = format!("{host} with systemd");
    if !setup::packages(&disk::PROGRAMS, options.setup, &name, tally)? {
        return Ok(Vec::new());
    }
    let mut disks = Vec::new();
    for suite in disk::SYSTEMD {
        match disk::with_systemd(cache, suite) {
            Ok(root) => disks.push((suite, root)),
            Err(error) => tally.lack(&name, suite, &error.to_string()),
        }
    }
    tally.lap(host, "making disks with systemd");
    Ok(disks)
}

/// The guests of every version, or of the oldest only.
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

/// The directory of tests' guests. They contain this workspace's agent, so they belong to its build
/// directory.
fn guests_dir() -> PathBuf {
    artifacts::workspace().join("target/guests")
}

/// A host for Linux guests.
fn for_linux(bed: Emulated, request: Request, npt: bool) -> Request {
    // On QEMU's other hosts, Linux guests fail because of the emulator (`hosts::svm`). Bochs has
    // only one kind.
    let pace = if bed.has_pace(Pace::Real).is_ok() { Pace::Real } else { Pace::Counted };
    Request {
        host: bed,
        second_stage: npt,
        pace,
        memory_mib: 6144,
        // The largest guest on them has 1 GiB.
        hugepages: 512,
        ..request
    }
}

/// With and without nested paging, or only the mode that was asked for.
fn modes(options: &Options) -> Vec<bool> {
    [true, false].into_iter().filter(|&npt| options.npt.is_none_or(|wanted| wanted == npt)).collect()
}
