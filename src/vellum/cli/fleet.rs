//! `vellum fleet`: one plan on many hosts.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand, ValueEnum};

use super::failure::Failure;
use super::line::{CommandLine, VERSION};
use super::output::print;
use super::refusal;
use vellum_fleet::plan::{LARGEST, Plan, results};
use vellum_fleet::result::{SHARD, ended, place};
use vellum_fleet::{Error, merge, page, slurm, task};
use vellum_kvm::vm::lifecycle::{self, Exit};
use vellum_report::Status;
use vellum_report::output::{Kind, Writer};
use vellum_sys::{keyvalue, open, quote};

/// Run tests and benchmarks on many hosts: one plan, and the results merged
///
/// A plan is a TOML file (`cargo doc`: fleet::plan). `plan` checks it and copies it into a
/// directory that all hosts share. `submit` hands its tasks to Slurm, or `plan --commands` prints
/// them for other schedulers. Each host runs `task`. `merge` reads the results.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES, after_long_help = format!("{PLAN}{EXAMPLES}\n\n{}", lifecycle::HELP))]
pub(crate) struct FleetArgs {
    #[command(subcommand)]
    what: FleetCommand,
}

const PLAN: &str = "\
A plan, nightly.toml:
  name = \"nightly\"
  [[test]]
  name = \"oracle\"
  # or bench NAME; never a command
  run = \"test dirty-log\"
  # what a host needs, as vellum doctor
  # --slurm-features calls it
  features = [\"ept\", \"kernel_6_12\"]
  # from first_seed = 1 on, per_task = 1 of them
  # in a task, all of them times = 1
  seeds = 1000
  # the longest that a task may take
  minutes = 30
  [test.arguments]
  tracker = [\"manual-protect\", \"ring\"]
  duration = \"10s\"
";

const EXAMPLES: &str = "\
Examples:
  vellum fleet plan nightly.toml --into /shared/nightly
  vellum fleet submit /shared/nightly/plan.toml
  vellum fleet status /shared/nightly/plan.toml
  vellum fleet merge /shared/nightly/plan.toml --html nightly.html
  vellum fleet rerun /shared/nightly/plan.toml 471 --test oracle --times 100
Without Slurm:
  vellum fleet plan nightly.toml --into /shared/nightly --commands shell | parallel -S node1,node2 --jobs 1
  vellum fleet plan nightly.toml --into /shared/nightly --commands ssh | while read -r task; do eval \"ssh node1 $task\" </dev/null; done";

#[derive(Debug, Subcommand)]
enum FleetCommand {
    /// Check a plan, and copy it to a directory that all hosts share
    Plan {
        /// The plan, a TOML file
        file: PathBuf,
        /// The directory that all hosts share; the plan is copied to plan.toml there, and results
        /// are written beside it
        #[arg(long, value_name = "DIR")]
        into: Option<PathBuf>,
        /// Print the command of each task: shell, for a shell; ssh, as one word behind `ssh HOST`
        #[arg(long, value_name = "FOR", value_enum, requires = "into", hide_possible_values = true)]
        commands: Option<Where>,
    },
    /// Submit to Slurm the tasks that have no result and are not queued, as many as it has room for
    Submit {
        /// The plan in the shared directory
        plan: PathBuf,
        /// An option for sbatch, as in --option=--partition=metal; may be repeated
        #[arg(long, value_name = "OPTION", allow_hyphen_values = true)]
        option: Vec<String>,
    },
    /// Print how many tasks have a result, are queued or are neither
    Status {
        /// The plan in the shared directory
        plan: PathBuf,
    },
    /// Read all results: lost pages, missing results, tables by kernel and CPU; exits with 1 if a
    /// test failed, and with 4 if results are missing or nothing was tested
    Merge {
        /// The plan in the shared directory
        plan: PathBuf,
        /// Write one self-contained page instead; `-` is standard output
        #[arg(long, value_name = "OUT")]
        html: Option<PathBuf>,
    },
    /// Run one seed many times, to see how often each host and kernel loses pages with it. A seed
    /// repeats the choices and not the timing. The runs are a plan of their own, in a directory
    /// beside the plan
    Rerun {
        /// The plan in the shared directory
        plan: PathBuf,
        /// The seed
        seed: u64,
        /// The test, if several have this seed
        #[arg(long, value_name = "NAME")]
        test: Option<String>,
        /// The number of runs
        #[arg(long, value_name = "N", default_value_t = 100, value_parser = |text: &str| keyvalue::number(text, 1..=1_000_000u64))]
        times: u64,
        /// Only on this host, by its name in Slurm
        #[arg(long, value_name = "NAME", value_parser = host)]
        host: Option<String>,
        /// Run here and now, one after the other, instead of through Slurm
        #[arg(long, conflicts_with = "host")]
        here: bool,
    },
    /// Run one task on this host and write its result; batch systems call this
    Task {
        /// The plan in the shared directory
        plan: PathBuf,
        /// The task's number; in a Slurm array, the number of the array's first task, to which
        /// SLURM_ARRAY_TASK_ID is added
        index: u64,
    },
}

/// The number of bytes of commands that are printed at once.
const AT_ONCE: usize = 64 << 10;

/// The reader of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Where {
    Shell,
    Ssh,
}

/// Parses the name of a host. It may not contain anything that Slurm's host lists or a shell
/// interpret.
fn host(text: &str) -> Result<String, String> {
    let right = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    match !text.is_empty() && !text.starts_with('-') && text.chars().all(right) {
        true => Ok(text.into()),
        false => Err("letters, digits, `.`, `_` and `-` are what a host's name has".into()),
    }
}

fn failure(error: Error) -> Failure {
    Failure::of(&error, &[])
}

/// A failure of Slurm. If Slurm is missing, the message says how to run the tasks without it.
fn of_slurm(error: Error, plan: &Path) -> Failure {
    let missing = matches!(error, Error::NoSlurm(_));
    let mut failure = failure(error);
    if missing {
        let dir = plan.parent().unwrap_or(Path::new("/"));
        let [dir, plan] = [dir, plan].map(|path| quote::word(&path.to_string_lossy()));
        failure.message += &format!(
            "; or without Slurm: `vellum fleet plan {plan} --into {dir} --commands shell` prints the tasks as plain commands, with ssh \
             in place of shell for a loop over ssh"
        );
    }
    failure
}

/// Checks that a command line would be accepted. Returns the argument that takes a seed, if there
/// is one.
fn check(line: CommandLine, words: &[String]) -> Result<Option<String>, String> {
    let cli = (line.definition)();
    let command = cli.find_subcommand(&words[0]).and_then(|outer| outer.find_subcommand(&words[1]));
    let Some(command) =
        command.filter(|command| command.get_arguments().any(|arg| arg.get_long() == Some("heartbeat")))
    else {
        let outer = cli.find_subcommand(&words[0]).into_iter().flat_map(clap::Command::get_subcommands);
        let known: Vec<&str> =
            outer.map(clap::Command::get_name).filter(|name| !["startup", "help"].contains(name)).collect();
        return Err(format!(
            "run: there is no `{} {}`{}; there are {}",
            words[0],
            words[1],
            keyvalue::meant(&words[1], known.iter().copied()),
            known.join(", ")
        ));
    };
    let flags: Vec<&str> = command.get_arguments().filter_map(clap::Arg::get_long).collect();
    for word in &words[2..] {
        let flag = word.trim_start_matches("--").split('=').next().unwrap_or_default();
        if !flags.contains(&flag) {
            return Err(format!(
                "arguments: unknown key '{flag}'{}",
                keyvalue::meant(flag, flags.iter().copied())
            ));
        }
    }
    let whole = std::iter::once("vellum").chain(words.iter().map(String::as_str));
    (line.parse)(whole.map(Into::into).collect()).map_err(|error| refusal::one_line(line, words, &error))?;
    Ok(flags.contains(&"seed").then(|| "--seed".into()))
}

fn read(line: CommandLine, file: &Path) -> Result<(PathBuf, Plan), Failure> {
    let plan = Plan::read(file, &|words: &[String]| check(line, words)).map_err(failure)?;
    let whole = file.canonicalize().map_err(|error| Failure::host(format!("{}: {error}", file.display())))?;
    Ok((whole, plan))
}

/// Runs `vellum fleet`.
pub(super) fn run(line: CommandLine, args: &FleetArgs) -> Result<Exit, Failure> {
    match &args.what {
        FleetCommand::Plan { file, into, commands } => plan(line, file, into.as_deref(), *commands),
        FleetCommand::Submit { plan, option } => {
            let (file, plan) = read(line, plan)?;
            submit(&file, &plan, None, option)
        }
        FleetCommand::Status { plan } => {
            let (file, plan) = read(line, plan)?;
            let standing = slurm::standing(&file, &plan).map_err(|error| of_slurm(error, &file))?;
            let queued: Vec<String> =
                standing.queued.iter().map(|(state, n)| format!(", {n} {}", state.to_lowercase())).collect();
            let rest = match standing.nowhere {
                0 => String::new(),
                n => format!(", {n} neither in the queue nor with a result"),
            };
            let (ended, of) = (standing.ended, plan.len());
            print(format_args!(
                "{}: {ended} of {of} tasks have a result{}{rest}\n",
                plan.name,
                queued.concat()
            ))?;
            Ok(Exit::PowerOff)
        }
        FleetCommand::Merge { plan, html } => {
            let (file, plan) = read(line, plan)?;
            let writer = html
                .as_deref()
                .map(|out| Writer::open(out, Kind::Page))
                .transpose()
                .map_err(Failure::usage)?;
            let again = |test: &str, seed: u64, node: &str| again(&file, &plan, test, seed, node);
            let merged = merge::merge(&plan, &results(&file), &again);
            match writer {
                Some(writer) => writer.write(page::html(&merged).as_bytes()).map_err(Failure::host)?,
                None => drop(print(page::text(&merged))?),
            }
            Ok(exit(merged.status()))
        }
        FleetCommand::Rerun { plan, seed, test, times, host, here } => {
            let (file, plan) = read(line, plan)?;
            let test = plan.with_seed(*seed, test.as_deref()).map_err(failure)?;
            let dir = file.with_file_name(format!(
                "again-{}-{seed}-{times}{}",
                test.name,
                host.as_ref().map_or(String::new(), |host| format!("-{host}"))
            ));
            let text = test.again(&plan.name, *seed, *times);
            let file = keep(&text, &dir)?;
            let (file, plan) = read(line, &file)?;
            if !here {
                return submit(&file, &plan, host.as_deref(), &[]);
            }
            // As with Slurm, tasks that have a result are not run again.
            for number in 0..plan.len().div_ceil(SHARD) {
                let tried = ended(&results(&file), number);
                let range = number * SHARD..((number + 1) * SHARD).min(plan.len());
                for index in range.filter(|index| !tried.contains(index)) {
                    run_task(&file, &plan, index, 0)?;
                }
            }
            let merged = merge::merge(&plan, &results(&file), &|test, seed, node| {
                again(&file, &plan, test, seed, node)
            });
            print(page::text(&merged))?;
            Ok(exit(merged.status()))
        }
        FleetCommand::Task { plan, index } => {
            let (file, plan) = read(line, plan)?;
            let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
            let index = index.saturating_add(number("SLURM_ARRAY_TASK_ID").unwrap_or(0));
            run_task(&file, &plan, index, number("SLURM_RESTART_COUNT").unwrap_or(0)).map(exit)
        }
    }
}

/// The exit status for results with this status.
fn exit(status: Status) -> Exit {
    match status {
        Status::Pass => Exit::PowerOff,
        Status::Skip => Exit::NotRun,
        Status::Fail | Status::Timeout | Status::Crash => Exit::Error,
    }
}

fn plan(
    line: CommandLine,
    file: &Path,
    into: Option<&Path>,
    commands: Option<Where>,
) -> Result<Exit, Failure> {
    let plan = Plan::read(file, &|words: &[String]| check(line, words)).map_err(failure)?;
    let kept = match into {
        Some(dir) => {
            let text =
                open::read_text(file, LARGEST).map_err(|error| failure(Error::file("read", file)(error)))?;
            Some(keep(&text, dir)?)
        }
        None => None,
    };
    if let (Some(form), Some(kept)) = (commands, &kept) {
        let mut out = String::new();
        for index in 0..plan.len() {
            let words = ["vellum", "fleet", "task"].map(String::from).into_iter();
            let words: Vec<String> =
                words.chain([kept.to_string_lossy().into_owned(), index.to_string()]).collect();
            out += &match form {
                Where::Shell => quote::line(&words),
                Where::Ssh => quote::line_for_ssh(&words),
            };
            out.push('\n');
            // A plan may have millions of tasks.
            let ends = index + 1 == plan.len() || out.len() > AT_ONCE;
            if ends && !print(std::mem::take(&mut out))? {
                break;
            }
        }
        return Ok(Exit::PowerOff);
    }
    let mut out = format!(
        "{}: {} tasks of {} tests, digest {}\n",
        plan.name,
        plan.len(),
        plan.tests.len(),
        &plan.digest[..12]
    );
    for test in &plan.tests {
        let features: Vec<&str> = test.features.iter().map(String::as_str).collect();
        let on = if features.is_empty() { "any host".to_owned() } else { features.join(" and ") };
        out += &format!(
            "  {}: {} seeds from {} on, {} in a task, {} times, on {on}: vellum {}\n",
            test.name,
            test.seeds,
            test.first_seed,
            test.per_task,
            test.times,
            quote::line(&test.command(test.first_seed))
        );
    }
    if let Some(kept) = kept {
        out += &format!("next: vellum fleet submit {}\n", quote::word(&kept.to_string_lossy()));
    }
    print(out).map(|_| Exit::PowerOff)
}

/// Copies a plan into its directory, unless another plan is there.
fn keep(text: &str, dir: &Path) -> Result<PathBuf, Failure> {
    std::fs::create_dir_all(dir).map_err(|error| failure(Error::file("made", dir)(error)))?;
    let dir = dir.canonicalize().map_err(|error| failure(Error::file("found", dir)(error)))?;
    let kept = dir.join("plan.toml");
    match open::read_text(&kept, LARGEST) {
        Ok(there) if there == text => return Ok(kept),
        Ok(_) => {
            let shown = kept.display();
            return Err(Failure::usage(format!(
                "{shown}: there is another plan, whose results are beside it; name another directory"
            )));
        }
        Err(_) => {}
    }
    place(&kept, text.as_bytes()).map_err(failure)?;
    Ok(kept)
}

fn submit(file: &Path, plan: &Plan, node: Option<&str>, option: &[String]) -> Result<Exit, Failure> {
    let done = slurm::submit(file, plan, node, option).map_err(|error| of_slurm(error, file))?;
    let plural = |count| if count == 1 { "" } else { "s" };
    let (tasks, arrays) = (plural(done.tasks), plural(done.arrays));
    let mut out = format!("{}: {} task{tasks} in {} array{arrays}", plan.name, done.tasks, done.arrays);
    for (count, what) in [(done.ended, "have a result"), (done.there, "are in the queue already")] {
        if count > 0 {
            out += &format!("; {count} {what}");
        }
    }
    if done.left > 0 {
        out += &format!(
            "; {} are left, for which Slurm has no room (MaxJobCount): submit again later",
            done.left
        );
    }
    print(out + "\n").map(|_| Exit::PowerOff)
}

fn run_task(file: &Path, plan: &Plan, index: u64, attempt: u64) -> Result<Status, Failure> {
    let Some(task) = plan.task(index) else {
        return Err(Failure::usage(format!("task {index}: the plan has tasks 0 to {}", plan.len() - 1)));
    };
    let variable = |name: &str| std::env::var(name).ok().filter(|text| !text.is_empty());
    let own = || {
        std::fs::read_to_string("/proc/sys/kernel/hostname")
            .map_or("unknown".into(), |name| name.trim().to_owned())
    };
    let runner = task::Runner {
        attempt,
        job: variable("SLURM_JOB_ID"),
        // Several nodes of Slurm may be one host.
        node: variable("SLURMD_NODENAME").unwrap_or_else(own),
        vellum: VERSION,
        as_json: "--format=json",
    };
    task::run(file, plan, &task, &runner).map_err(failure)
}

/// The commands that try a seed again on the host of a result. The host's name comes from the
/// result and may be anything.
fn again(file: &Path, plan: &Plan, test: &str, seed: u64, node: &str) -> String {
    let mut words: Vec<String> = ["vellum", "fleet", "rerun"].map(String::from).into();
    words.push(file.to_string_lossy().into_owned());
    words.push(seed.to_string());
    words.extend(["--test".to_owned(), test.to_owned(), "--times".to_owned(), "100".to_owned()]);
    let test = plan.tests.iter().find(|known| known.name == test);
    let plain: Vec<String> = std::iter::once("vellum".to_owned())
        .chain(test.map(|test| test.command(seed)).unwrap_or_default())
        .collect();
    match host(node) {
        Ok(node) => {
            words.extend(["--host".to_owned(), node.clone()]);
            format!("{}\nssh {node} {}", quote::line(&words), quote::line_for_ssh(&plain))
        }
        Err(_) => quote::line(&plain),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The help may be wrapped for a narrow terminal.
    #[test]
    fn the_plan_in_the_help_parses_when_it_is_copied() {
        for width in [60, 80, 100] {
            let mut cli = crate::cli::command().term_width(width);
            let help = cli.find_subcommand_mut("fleet").unwrap().clone().term_width(width);
            let help = help.clone().render_long_help().to_string();
            let (_, text) = help.split_once("A plan, nightly.toml:\n").unwrap();
            let (text, _) = text.split_once("Examples:\n").unwrap();
            let plan = Plan::parse(text, &|words| check(crate::cli::LINE, words))
                .unwrap_or_else(|error| panic!("{width}: {error}\n{text}"));
            assert_eq!((plan.name.as_str(), plan.len(), plan.tests[0].minutes), ("nightly", 1000, 30));
        }
    }
}
