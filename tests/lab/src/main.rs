//! `cargo lab`: the command line. Arguments only; the work is in the library. The flags of emulated
//! hosts are in [`host_args`].

mod host_args;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::LazyLock;
use std::time::Duration;

use clap::builder::PossibleValue;
use clap::{Args, Parser, Subcommand, ValueEnum};
use lab::architecture::Architecture;
use lab::artifacts::Programs;
use lab::cache::Cache;
use lab::compare::Processor;
use lab::compare::speed;
use lab::form::{self, Output};
use lab::hosts::doctor;
use lab::hosts::guest::Guest;
use lab::hosts::wire::Frame;
use lab::hosts::{self, Emulated, HOSTS, svm};
use lab::kernel::check::Step;
use lab::kernel::post::{self, Poster};
use lab::kernel::series::Series;
use lab::kernel::tree::Tree;
use lab::kernel::{Base, build, check, explore, series};
use lab::test::fresh::{self, Until};
use lab::test::kvm_unit_tests;
use lab::{Error, Result, artifacts, compare, debian, docs, history, release, test};
use vellum::cli::{Form, origin};

use host_args::{Host, has_pml, switch};

/// Vellum's laboratory: emulated hosts, kernels and their patches, and every test that this machine
/// can run.
#[derive(Parser)]
#[command(name = "lab", bin_name = "cargo lab", version)]
struct Cli {
    #[command(subcommand)]
    command: LabCommand,
}

/// What a table of `cargo lab explore` is of.
#[derive(Clone, Copy, ValueEnum)]
enum Table {
    /// The faults that series fix
    Faults,
    /// Their planted mistakes
    Planted,
}

#[derive(Subcommand)]
enum LabCommand {
    /// List this machine's beds, and how to get the missing ones
    Doctor,
    /// Run a command in an emulated host. Passes its exit code on and returns the files that it
    /// writes into its working directory
    Run {
        bed: Emulated,
        #[command(flatten)]
        host: Host,
        /// Where the returned files go
        #[arg(long, value_name = "DIR", default_value = ".")]
        out: PathBuf,
        /// The command: `vellum run …`, or a program of busybox
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
    /// Open a shell inside an emulated host
    Shell {
        bed: Emulated,
        #[command(flatten)]
        host: Host,
    },
    /// Run every test that this machine can run, and list those skipped with the reason and the
    /// remedy
    Test {
        /// One bed instead of all
        bed: Option<test::TestHost>,
        /// Install Debian packages (as root), and reserve huge pages during the tests
        #[arg(long)]
        setup: bool,
        /// Without a bed: also the slow tests, the series of kernel-patches, and each test with and
        /// without nested paging
        #[arg(long)]
        full: bool,
        /// Run each local test program this many times under load: four spinning processes and a
        /// build
        #[arg(long, value_name = "TIMES", value_parser = clap::value_parser!(u32).range(1..))]
        loaded: Option<u32>,
        /// With `metal`: a directory of prebuilt test programs
        #[arg(long, value_name = "DIR")]
        prebuilt: Option<PathBuf>,
        /// With emulated hosts: only with nested paging (1), or only without (0)
        #[arg(long, value_name = "0|1", value_parser = switch)]
        npt: Option<bool>,
        /// With `linux`: the guests' hosts [default: svm]
        #[arg(long = "bed", value_name = "BED")]
        hosts: Option<Emulated>,
        /// With `live-update`: only the kernel of this base, which replaces itself [default: 7.2 and
        /// 7.3 in turn]
        #[arg(long, value_name = "BASE")]
        base: Option<String>,
        /// With `fuzz`: how long all targets take together, as in 90s, 10m or 1h [default: 10m]
        #[arg(long, value_name = "TIME", value_parser = vellum_sys::keyvalue::duration)]
        time: Option<Duration>,
        #[command(flatten)]
        form: Formed,
        /// Arguments for the test programs as for `cargo test`: part of a name, `--exact`, `--skip
        /// NAME`
        #[arg(last = true, value_name = "ARGS")]
        arguments: Vec<String>,
    },
    /// Host kernels: pristine, or with series from kernel-patches/
    Kernel {
        #[command(subcommand)]
        command: KernelCommand,
    },
    /// List every series with its base, patches and claim, and when `cargo lab test --full` last
    /// passed here
    List,
    /// Measure a series on the pristine and the patched kernel, alternating A B A B, or compare two
    /// kernels of your own
    Compare {
        /// The series, as in `cargo lab list`
        #[arg(required_unless_present = "kernel")]
        series: Option<String>,
        /// Instead of a series: a bzImage (on arm64 an Image) or its build tree. Give it twice:
        /// before and after. KVM and the serial console must be built in
        #[arg(long, value_name = "IMAGE", conflicts_with_all = ["series", "on"])]
        kernel: Vec<PathBuf>,
        /// With --kernel: a command to measure, such as 'vellum bench dirty-log -b 64M --json
        /// {json}'; may be repeated [default: a dirty log, and faults on mapped memory]
        #[arg(long, value_name = "COMMAND", requires = "kernel")]
        run: Vec<String>,
        /// The hosts to measure on [default: svm, or arm64 for an arm64 series]
        #[arg(long)]
        bed: Option<Hosts>,
        /// On vmx: a processor with page-modification logging
        #[arg(long)]
        pml: bool,
        /// Instead of the patched kernel: Debian's unpatched kernel of another base, to see what
        /// mainline has of the idea
        #[arg(long, value_name = "BASE")]
        on: Option<String>,
        /// Where the table and the results go [default: the cache, for `cargo lab list`]
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
        #[command(flatten)]
        form: Formed,
    },
    /// Run the oracle, the judge and benchmarks on a kernel of each series that Debian packages, and
    /// write one table and one picture: what each kernel lost, and how many instructions it took. A
    /// stopped run continues
    History {
        /// The oldest series
        #[arg(long, value_name = "SERIES", default_value = "6.1")]
        from: String,
        /// The newest series
        #[arg(long, value_name = "SERIES", default_value = "7.3")]
        to: String,
        /// The emulated hosts: svm or vmx
        #[arg(long, default_value = "svm")]
        bed: Emulated,
        /// Where the table and the picture go [default: the cache]
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
        #[command(flatten)]
        form: Formed,
    },
    /// Measure a command in a guest, and its shared directories, in instructions on an emulated
    /// host, compared with a bare boot of the kernel and with the host's own files
    Speed,
    /// Check a series: it applies, checkpatch, warnings, other configurations, explore, boots, the
    /// oracle, selftests; and its base's stack as modules, and with lockdep and KASAN
    Check {
        series: Vec<String>,
        /// Only these steps
        #[arg(long, value_name = "STEP")]
        only: Vec<Step>,
        #[command(flatten)]
        form: Formed,
    },
    /// Run the kernel's KVM selftests on a base's pristine kernel and with its whole stack. The
    /// results must be the same; selftests that a series adds must fail on the first and pass on
    /// the second
    Selftests {
        /// 5.10, 6.12, 7.2 or 7.3
        base: String,
    },
    /// Run KVM's memory code of x86 or arm64 in user space under a scheduler that alternates between vCPUs and
    /// user space. The dirty log must have every page that the guest writes, and no TLB may map a
    /// page that the host has taken away. Prints KTAP
    Explore {
        /// 5.10, 6.12, 7.2 or 7.3
        base: String,
        /// Series to apply, in the order of the base's `series` file; `all` for all of them
        #[arg(long, value_name = "SERIES", num_args = 1..)]
        with: Vec<String>,
        /// A planted fault of one of these series, on top of it
        #[arg(long, value_name = "NAME", requires = "with")]
        planted: Option<String>,
        /// Whose code: x86 or arm64 [default: x86, or arm64 if all series change only files of arm64]
        #[arg(long, value_enum)]
        arch: Option<Architecture>,
        /// The time for all setups together: 90s, 10m or 1h
        #[arg(long, value_name = "TIME", value_parser = vellum_sys::keyvalue::duration)]
        time: Option<Duration>,
        /// The number of runs of each setup [default: 1000, with --time as many as it allows]
        #[arg(long, value_name = "N")]
        runs: Option<u64>,
        /// The seed of the first run; each later run has the next one
        #[arg(long, value_name = "N")]
        seed: Option<u64>,
        /// Only this setup, by its name in the output
        #[arg(long, value_name = "NAME")]
        setup: Option<String>,
        /// Print a table instead: for each fault that a series of the base fixes, the runs that find it
        /// and those that pass with the series; or for each planted mistake, those that find it
        #[arg(long, value_name = "WHAT", num_args = 0..=1, default_missing_value = "faults",
              conflicts_with_all = ["with", "planted", "arch", "time", "runs", "seed", "setup"])]
        table: Option<Table>,
    },
    /// Write a series as mails for `git send-email`: addressed by get_maintainer, with a cover
    /// letter and, given a clone, the base-commit. checkpatch must find nothing
    Post {
        /// The series, as in `cargo lab list`
        series: String,
        /// Who posts the series: the patches here have no author
        #[arg(long, value_name = "NAME <ADDRESS>")]
        from: String,
        /// Add their Signed-off-by, which certifies the kernel's Developer's Certificate of Origin
        #[arg(long)]
        sign_off: bool,
        /// Ask for comments: RFC PATCH in the subjects
        #[arg(long)]
        rfc: bool,
        /// The version of the series
        #[arg(short = 'v', long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
        reroll: u32,
        /// A kernel clone with the base's tag. The patches must apply there by `git am`
        #[arg(long, value_name = "DIR")]
        linux: Option<PathBuf>,
        /// Where the mails go: an empty or new directory
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
    },
    /// Make a Linux guest for `vellum run`: Debian's kernel, and an initramfs with the guest agent
    Guest {
        /// The kernel: 6.1 or 6.12
        #[arg(long, default_value = "6.1")]
        kernel: String,
        /// The architecture: x86, or arm64 for 64-bit Arm hosts
        #[arg(long, value_name = "ARCH", default_value = "x86")]
        arch: Architecture,
        /// Also write the ELF image, which the other two x86 boot methods need
        #[arg(long)]
        vmlinux: bool,
        /// Where the guest goes, as `vmlinuz`, `initrd` and `vmlinux`
        dir: PathBuf,
    },
    /// Run prebuilt x86 images of kvm-unit-tests under Vellum on an emulated host, with at least
    /// 4096 MiB and an hour
    KvmUnitTests {
        /// The directory with unittests.cfg and the .flat images: x86 of a built kvm-unit-tests
        dir: PathBuf,
        /// Only tests whose names contain one of these
        only: Vec<String>,
        /// The interrupt controller of tests that do not choose it themselves
        #[arg(long, value_enum, default_value_t = kvm_unit_tests::Irqchip::Kernel)]
        irqchip: kvm_unit_tests::Irqchip,
        #[command(flatten)]
        host: Host,
    },
    /// Make and test a release of the checked-out commit: two builds compared, licences, a list of
    /// its parts, and a Debian package that is installed in a fresh Debian and removed again. A
    /// step whose tool is missing is skipped
    Release {
        /// Install Debian packages (as root), and cargo-deb into the laboratory's cache
        #[arg(long)]
        setup: bool,
        /// A prebuilt static program to pack; nothing is built here
        #[arg(long, value_name = "FILE")]
        prebuilt: Option<PathBuf>,
        /// Where the package and the list go [default: target/package]
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
    },
    /// Build the book as HTML, with a page for each command, and check its links and spelling.
    /// Installs mdBook into the lab's cache
    Docs {
        /// Install Debian packages (as root)
        #[arg(long)]
        setup: bool,
        /// Where the book goes [default: target/book]
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
        /// Only take the screenshots in docs/src/images anew. Measures on this host's KVM
        #[arg(long, conflicts_with_all = ["setup", "out"])]
        images: bool,
    },
    /// Run the README's two commands, of the checked-out commit, on a fresh machine: a Debian 12 in
    /// a directory, with an empty rustup. Needs root and takes over an hour
    Fresh {
        /// The value of RUSTUP_AUTO_INSTALL [default: one machine with each]
        #[arg(long, value_name = "0|1", value_parser = switch)]
        auto_install: Option<bool>,
        /// The last command
        #[arg(long, value_enum, default_value_t)]
        until: Until,
    },
    /// Forget the recorded versions of Debian's packages; the next use asks again
    Update,
}

/// A report for other programs.
#[derive(Args)]
struct Formed {
    /// Print how each part ended in a format for other programs; everything else goes to standard
    /// error
    #[arg(long, value_name = "FORM", value_enum)]
    format: Option<Form>,
    /// The submitter's name in KCIDB, as agreed with its operators: a-z, 0-9 and _
    #[arg(long, value_name = "NAME", value_parser = origin, required_if_eq("format", "kcidb"))]
    origin: Option<String>,
}

impl Formed {
    /// Claims standard output if a format is wanted.
    fn output(&self) -> Result<Option<Output>> {
        self.format.map(|format| Output::claim(format.view(self.origin.as_deref()))).transpose()
    }
}

/// The hosts of a comparison.
#[derive(Clone, Copy)]
enum Hosts {
    Emulated(Emulated),
    Metal,
}

impl ValueEnum for Hosts {
    fn value_variants<'a>() -> &'a [Self] {
        static ALL: LazyLock<Vec<Hosts>> =
            LazyLock::new(|| HOSTS.into_iter().map(Hosts::Emulated).chain([Hosts::Metal]).collect());
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        match self {
            Hosts::Emulated(bed) => bed.to_possible_value(),
            Hosts::Metal => Some(
                PossibleValue::new("metal")
                    .help("This machine: makes packages of the kernels, then collects a boot a call"),
            ),
        }
    }
}

#[derive(Subcommand)]
enum KernelCommand {
    /// Apply series to a base's source tree, and print its path
    Source {
        /// 5.10, 6.12, 7.2 or 7.3
        base: String,
        /// Series to apply, in the order of the base's `series` file; `all` for all of them
        #[arg(long, value_name = "SERIES", num_args = 1..)]
        with: Vec<String>,
    },
    /// Build an image, and print its path
    Build {
        /// 5.10, 6.12, 7.2 or 7.3
        base: String,
        /// Series to apply, in the order of the base's `series` file; `all` for all of them
        #[arg(long, value_name = "SERIES", num_args = 1..)]
        with: Vec<String>,
        /// A configuration on top: debug, lock-stat, modules, preempt, on Arm pages-16k or
        /// pages-64k
        #[arg(long)]
        variant: Option<String>,
        /// The architecture [default: x86, or arm64 if all series change only files of arm64]
        #[arg(long, value_enum)]
        arch: Option<Architecture>,
        /// A planted fault of one of these series, on top of it
        #[arg(long, value_name = "NAME", requires = "with")]
        planted: Option<String>,
    },
}

fn main() -> ExitCode {
    match perform(Cli::parse().command) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("lab: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

fn perform(what: LabCommand) -> Result<u8> {
    let done = |result: Result<()>| result.map(|()| 0);
    match what {
        LabCommand::Doctor => Ok(doctor::print()),
        LabCommand::Guest { kernel, arch, vmlinux, dir } => done(make_guest(&kernel, arch, vmlinux, &dir)),
        LabCommand::Run { bed, host, out, command } => run(bed, host, &out, command),
        LabCommand::Shell { bed, host } => done(shell(bed, host)),
        LabCommand::Test { bed, setup, full, loaded, prebuilt, npt, hosts, base, time, form, arguments } => {
            test::run(test::Options {
                bed,
                setup,
                full,
                loaded,
                prebuilt,
                npt,
                hosts,
                base,
                time,
                arguments,
                form: form.output()?,
            })
        }
        LabCommand::Kernel { command: KernelCommand::Build { base, with, variant, arch, planted } } => {
            done(build_kernel(&base, &with, variant.as_deref(), arch, planted.as_deref()))
        }
        LabCommand::Kernel { command: KernelCommand::Source { base, with } } => {
            done(make_source(&base, &with))
        }
        LabCommand::List => done(list()),
        LabCommand::Compare { series, kernel, run, bed, pml, on, out, form } => {
            let output = form.output()?;
            let (kept, name) = match series {
                Some(series) => {
                    let kept = compare(&series, bed, pml, on.as_deref(), out)?;
                    (kept, format!("lab compare {series}"))
                }
                None => (compare_own(kernel, &run, bed, pml, out)?, "lab compare".into()),
            };
            done(output.map_or(Ok(()), |output| output.deliver(&compare::as_report(&kept, &name))))
        }
        LabCommand::History { from, to, bed, out, form } => {
            let (output, cache) = (form.output()?, Cache::open()?);
            let out = out.unwrap_or_else(|| cache.path("history"));
            let report = history::run(&cache, &history::Options { from, to, bed, out })?;
            done(output.map_or(Ok(()), |output| output.deliver(&report)))
        }
        LabCommand::Speed => done(speed::of_commands(&Cache::open()?, pass_on)),
        LabCommand::Check { series, only, form } => done(check_series(&series, &only, form.output()?)),
        LabCommand::Selftests { base } => {
            HOSTS[0].ready()?;
            done(check::selftests_of(&Cache::open()?, Base::named(&base)?, Architecture::X86))
        }
        LabCommand::Explore { base, table: Some(table), .. } => {
            explore::table(&Cache::open()?, Base::named(&base)?, matches!(table, Table::Planted))
                .map(|holds| u8::from(!holds))
        }
        LabCommand::Explore { base, with, planted, arch, time, runs, seed, setup, table: None } => {
            let base = Base::named(&base)?;
            let series = with_planted(series::of_base(base, &with)?, planted.as_deref())?;
            let options = explore::Options { architecture: arch, time, runs, seed, setup };
            explore::explore(&Cache::open()?, base, &series, &options)
        }
        LabCommand::Post { series, from, sign_off, rfc, reroll, linux, out } => {
            let poster = Poster { from: &from, sign_off, linux: linux.as_deref(), rfc, version: reroll };
            post::post(&Cache::open()?, &series::named(&series)?, &poster, &out).map(|()| 0)
        }
        LabCommand::KvmUnitTests { dir, only, irqchip, host } => {
            unit_tests_of_kvm(&dir, &only, irqchip, host)
        }
        LabCommand::Release { setup, prebuilt, out } => {
            let out = out.unwrap_or_else(|| artifacts::workspace().join("target/package"));
            release::run(&release::Options { setup, prebuilt, out })
        }
        LabCommand::Docs { images: true, .. } => done(docs::images()),
        LabCommand::Docs { setup, out, images: false } => {
            docs::run(setup, &out.unwrap_or_else(|| artifacts::workspace().join("target/book")))
        }
        LabCommand::Fresh { auto_install, until } => {
            let auto_install = auto_install.map_or_else(|| vec![false, true], |value| vec![value]);
            fresh::run(&fresh::Options { auto_install, until })
        }
        LabCommand::Update => done(debian::forget(&Cache::open()?)),
    }
}

fn make_guest(kernel: &str, arch: Architecture, vmlinux: bool, dir: &Path) -> Result<()> {
    if vmlinux && arch != Architecture::X86 {
        return Err(Error::Usage("--vmlinux: kernels of x86 alone boot as ELF images; leave it out".into()));
    }
    let guest = Guest::make(&Cache::open()?, arch, kernel, dir)?;
    if vmlinux {
        guest.unpack_vmlinux()?;
    }
    let (kernel, initrd) = (guest.kernel.display(), guest.initrd.display());
    println!("{}: vellum run --kernel {kernel} --initrd {initrd}", guest.package);
    Ok(())
}

fn run(bed: Emulated, host: Host, out: &Path, command: Vec<String>) -> Result<u8> {
    bed.ready()?;
    let cache = Cache::open()?;
    let mut request = host.request(&cache, bed)?;
    request.commands.push(command);
    let outcome =
        hosts::run(&cache, &Programs::build_for(bed.architecture())?, &request, pass_on).map_err(named)?;
    outcome.write_files(out)?;
    Ok(u8::try_from(outcome.code()).unwrap_or(1))
}

fn shell(bed: Emulated, host: Host) -> Result<()> {
    bed.ready()?;
    let cache = Cache::open()?;
    let request = host.request(&cache, bed)?;
    hosts::shell(&cache, &Programs::build_for(bed.architecture())?, &request)
}

fn build_kernel(
    base: &str,
    with: &[String],
    variant: Option<&str>,
    arch: Option<Architecture>,
    planted: Option<&str>,
) -> Result<()> {
    let base = Base::named(base)?;
    let series = with_planted(series::of_base(base, with)?, planted)?;
    let architecture = arch.map_or_else(|| series::architecture(&series), Ok)?;
    let image = build::build_for(&Cache::open()?, architecture, base, &series, variant)?;
    println!("{}", image.file().display());
    Ok(())
}

/// The series, one of them with its planted fault on top.
fn with_planted(mut series: Vec<Series>, planted: Option<&str>) -> Result<Vec<Series>> {
    let Some(name) = planted else {
        return Ok(series);
    };
    let mut having = series.iter_mut().filter(|series| series.has_planted(name));
    let (Some(one), None) = (having.next(), having.next()) else {
        return Err(Error::Usage(format!("--planted {name}: not a mistake of exactly one series of --with")));
    };
    *one = one.with_planted(name)?;
    Ok(series)
}

fn make_source(base: &str, with: &[String]) -> Result<()> {
    let (cache, base) = (Cache::open()?, Base::named(base)?);
    let tree = Tree::open(&cache, base)?;
    let _lock = cache.lock(&format!("kernel/{}", tree.package.version))?;
    tree.carry(&series::stacked(&series::of_base(base, with)?))?;
    println!("{}", tree.source.display());
    Ok(())
}

fn list() -> Result<()> {
    let cache = Cache::open()?;
    let list = compare::list(&cache)? + &test::last_full(&cache);
    // If the reader has gone away, it needs no more output.
    let _ = std::io::stdout().write_all(list.as_bytes());
    Ok(())
}

/// Compares, and returns where the results are kept.
fn compare(
    series: &str,
    hosts: Option<Hosts>,
    pml: bool,
    on: Option<&str>,
    out: Option<PathBuf>,
) -> Result<PathBuf> {
    let cache = Cache::open()?;
    let series = series::named(series)?;
    let other = on.map(Base::named).transpose()?;
    if other == Some(series.base) {
        return Err(Error::Usage(format!(
            "--on {}: the base of {} itself, which each comparison has as \"before\"; name another one",
            series.base.name, series.name
        )));
    }
    let architecture = series.architecture()?;
    match hosts.unwrap_or(Hosts::Emulated(Emulated::of(architecture))) {
        Hosts::Emulated(bed) => {
            has_pml(bed, pml)?;
            bed.ready()?;
            let processor = Processor { bed, pml };
            let out = out.unwrap_or_else(|| compare::kept(&cache, &series, other, processor));
            compare::compare(&cache, &series, other, processor, &out)?;
            Ok(out)
        }
        Hosts::Metal if pml => {
            Err(Error::Usage("--pml: metal has the processor that it has; leave it out".into()))
        }
        Hosts::Metal if other.is_some() => Err(Error::Usage(
            "--on: metal compares a series with its base alone; leave it out, or measure on svm".into(),
        )),
        Hosts::Metal if architecture != Architecture::X86 => Err(Error::Usage(
            "--bed metal: packages are made for x86-64 alone, and this series changes files of arm64; measure on arm64".into(),
        )),
        Hosts::Metal => {
            let out = out.unwrap_or_else(|| compare::kept_of_metal(&cache, &series));
            compare::metal::compare(&cache, &series, &out)?;
            Ok(out)
        }
    }
}

/// Compares two kernels that were built elsewhere.
fn compare_own(
    kernels: Vec<PathBuf>,
    commands: &[String],
    hosts: Option<Hosts>,
    pml: bool,
    out: Option<PathBuf>,
) -> Result<PathBuf> {
    let kernels: [PathBuf; 2] = kernels.try_into().map_err(|kernels: Vec<_>| {
        Error::Usage(format!("--kernel is given {} times; before and after make two", kernels.len()))
    })?;
    let (_, architecture) = compare::own::find(&kernels[0])?;
    let bed = match hosts {
        None => Emulated::of(architecture),
        Some(Hosts::Emulated(bed)) => bed,
        Some(Hosts::Metal) => {
            return Err(Error::Usage(
                "--kernel: metal boots packages of a series alone; leave --bed out".into(),
            ));
        }
    };
    has_pml(bed, pml)?;
    bed.ready()?;
    let (cache, processor) = (Cache::open()?, Processor { bed, pml });
    let out = out.map_or_else(|| compare::own::kept(&cache, &kernels, processor), Ok)?;
    compare::own::compare(&cache, &kernels, commands, processor, &out)?;
    Ok(out)
}

fn check_series(names: &[String], only: &[Step], output: Option<Output>) -> Result<()> {
    let cache = Cache::open()?;
    let mut report = form::report("lab check");
    let all = series::chosen(names)?;
    for series in &all {
        Emulated::of(series.architecture()?).ready()?;
    }
    let done = all.iter().try_for_each(|series| check::check(&cache, series, only, &mut report));
    // The report covers what was tried, even after an error.
    output.map_or(Ok(()), |output| output.deliver(&report))?;
    done
}

fn unit_tests_of_kvm(
    dir: &Path,
    only: &[String],
    irqchip: kvm_unit_tests::Irqchip,
    host: Host,
) -> Result<u8> {
    // The known results are for this bed only.
    let bed = svm::HOST;
    let cache = Cache::open()?;
    bed.ready()?;
    let host = kvm_unit_tests::host(host.request(&cache, bed)?);
    kvm_unit_tests::run(&cache, &host, dir, only, irqchip)
}

/// Adds the flag that set it to the error of a time limit.
fn named(error: Error) -> Error {
    match error {
        Error::Host { what, log, tail, timed_out: true } => {
            Error::Host { what: format!("{what} (--time-limit)"), log, tail, timed_out: true }
        }
        error => error,
    }
}

/// Prints the output of the host's command.
fn pass_on(frame: &Frame) {
    // If the reader has gone away, the host still runs: its exit code counts.
    let _ = match frame {
        Frame::Stdout(bytes) => std::io::stdout().write_all(bytes).and_then(|()| std::io::stdout().flush()),
        Frame::Stderr(bytes) => std::io::stderr().write_all(bytes),
        Frame::Boot(boot) => {
            boot.complaints.iter().for_each(|complaint| eprintln!("lab: in the host: {complaint}"));
            Ok(())
        }
        _ => Ok(()),
    };
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn pages_name_flags_that_exist() {
        support::book::check_flags("cargo lab", &mut super::Cli::command()).unwrap();
    }
}
