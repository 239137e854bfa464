//! Messages about a wrong command line: clap's paragraphs as one line. Where clap states only a
//! rule, the message has the reason and what would work.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{ArgMatches, Args};

use super::habits;
use super::kernel::KernelArgs;
use super::line::{CommandLine, word};
use super::output::say;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_report::output::allow_broken_pipe;
use vellum_sys::keyvalue;

/// Prints help as it is, and an error of the command line as one line. Returns the exit status, or
/// `None` if help was requested.
pub(super) fn refuse(line: CommandLine, error: &clap::Error) -> Option<Exit> {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => match allow_broken_pipe(error.print()) {
            Ok(()) => None,
            Err(why) => {
                say(&format!("standard output: {why}"));
                Some(Exit::Error)
            }
        },
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
            Some(Exit::Usage)
        }
        _ => {
            let words: Vec<String> = (1..).map_while(word).collect();
            say(&one_line(line, &words, error));
            Some(Exit::Usage)
        }
    }
}

/// Clap's paragraphs about `words` as one line, without the usage, which `--help` shows better.
pub(super) fn one_line(line: CommandLine, words: &[String], error: &clap::Error) -> String {
    let first = words.first().map(String::as_str);
    let text = error.to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    if let (ErrorKind::InvalidSubcommand, Some(ContextValue::String(typed))) =
        (error.kind(), error.get(ContextKind::InvalidSubcommand))
    {
        return unknown(line, typed, first);
    }
    if let (ErrorKind::UnknownArgument, Some(ContextValue::String(typed))) =
        (error.kind(), error.get(ContextKind::InvalidArg))
    {
        // Clap reads a negative value with a unit, as in `-5s`, as flags.
        if typed.strip_prefix('-').is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_digit()))
        {
            return format!("unexpected argument '{typed}': no value here is negative");
        }
        // Clap's guesses are often wrong, and it mistakes words of the guest's command for ours.
        let (path, command) = innermost(line, words);
        if typed.starts_with("--") {
            let longs: Vec<&str> = command.get_arguments().filter_map(clap::Arg::get_long).collect();
            let typed_word = typed.trim_start_matches('-');
            let meant = keyvalue::meant(typed_word, longs.iter().copied());
            let meant = meant.replace("'", "").replace("mean ", "mean --");
            return format!("unexpected argument '{typed}'{meant}; {path} --help lists all");
        }
        if typed.starts_with('-') {
            return format!("unexpected argument '{typed}'; {path} --help lists all");
        }
        if path == "vellum run" {
            return format!(
                "unexpected argument '{typed}': a disk image stands behind -d, a kernel behind -k, and a command for \
                 the guest behind --, as in vellum run -d IMAGE and vellum run -k KERNEL -- {typed}"
            );
        }
        // Behind an argument, as in `ctl NAME stpo`, clap does not look for subcommands.
        if let Some(first) = first
            && command.has_subcommands()
        {
            return unknown(line, typed, Some(first));
        }
    }
    if error.kind() == ErrorKind::InvalidUtf8
        && let Some(line) = not_text(line, &std::env::args_os().collect::<Vec<_>>())
    {
        return line;
    }
    if let Some(line) = excluded(error).or_else(|| missing(error)) {
        return line;
    }
    let paragraphs = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let wanted =
        paragraphs.take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more info"));
    let lines: Vec<_> = wanted.map(|line| line.strip_prefix("tip: ").unwrap_or(line)).collect();
    lines.join("; ").replace(":; ", ": ")
}

/// The message about the word that is refused because it is not UTF-8. Clap does not say which it
/// is. Some words, such as paths, may be any bytes.
fn not_text(line: CommandLine, words: &[OsString]) -> Option<String> {
    let strange = |at: &usize| words[*at].to_str().is_none();
    let refused = |at: &usize| {
        let shown = |(other, word): (usize, &OsString)| match other == *at {
            true => word.clone(),
            false => word.to_string_lossy().into_owned().into(),
        };
        let error = (line.parse)(words.iter().enumerate().map(shown).collect()).err();
        error.is_some_and(|error| error.kind() == ErrorKind::InvalidUtf8)
    };
    let all = || (1..words.len()).filter(strange);
    let at = all().find(refused).or_else(|| all().next())?;
    let (word, before) = (words[at].to_string_lossy(), words[at - 1].to_string_lossy());
    let flag = match word.split_once('=') {
        Some((flag, _)) if word.starts_with("--") => flag,
        _ if word.starts_with('-') => word.get(..2).unwrap_or("-"),
        _ if before.starts_with('-') => &before,
        _ => "argument",
    };
    Some(format!("{flag}: {:?} is not UTF-8; give it a name that is, or a link with such a name", words[at]))
}

/// The command that `words` name, with its path as typed.
fn innermost(line: CommandLine, words: &[String]) -> (String, clap::Command) {
    let (mut path, mut command) = ("vellum".to_owned(), (line.definition)());
    for word in words {
        let Some(inner) = command.find_subcommand(word) else { break };
        let inner = inner.clone();
        path = format!("{path} {word}");
        command = inner;
    }
    (path, command)
}

/// The message about an unknown subcommand. It lists the subcommands of `first` if that has any.
fn unknown(line: CommandLine, typed: &str, first: Option<&str>) -> String {
    let cli = (line.definition)();
    let outer = first.and_then(|first| cli.find_subcommand(first)).filter(|outer| outer.has_subcommands());
    let level = outer.unwrap_or(&cli);
    let shown = level.get_subcommands().filter(|command| !command.is_hide_set());
    let known: Vec<&str> = shown.map(clap::Command::get_name).collect();
    if let Some(ours) = habits::command(typed).filter(|_| outer.is_none()) {
        return format!("{typed}: another program's word; here it is vellum {ours}");
    }
    let meant = keyvalue::meant(typed, known.iter().copied());
    let after = outer.map_or(String::new(), |outer| format!(" of {}", outer.get_name()));
    format!("unknown command '{typed}'{after}{meant}: there are {}", known.join(", "))
}

const BOTH_SEEDS: &str = "both say what cloud-init does: leave out one of the two";
const NO_WORKLOAD: &str = "a guest that boots runs no workload: leave out one of the two; --timeout ends it";

/// Why an argument excludes others, and what would work.
const EXCLUSIONS: [(&str, &str); 12] = [
    ("--from", "a fork is like the machine that it is made of: leave out one of the two"),
    ("--zygote", "its forks run the commands, and it has the name: leave out one of the two"),
    (
        "--firmware",
        "a firmware is entered instead of a kernel, and runs no workload: leave out one of the two",
    ),
    (
        "--kernel",
        "a kernel is a guest of its own, which no workload runs in: leave out one of the two; --timeout ends it",
    ),
    ("--user-data", BOTH_SEEDS),
    ("--cloud-init", BOTH_SEEDS),
    ("--disk", NO_WORKLOAD),
    ("--no-manual-protect", "-g is short for --tracker bitmap: leave out one of the two"),
    ("--preset", "a preset goes over all that there are, or scales it to the host: leave out one of the two"),
    (
        "--lengths",
        "one table is timed for each length, so there are no others to make or drop: leave out one of the two",
    ),
    (
        "--together",
        "pages that are missing until every vCPU waits for them are only created, one backing at a time: leave out one of the two",
    ),
    ("--request", "a request takes the place of a command: leave out one of the two"),
];

fn excluded(error: &clap::Error) -> Option<String> {
    let (ErrorKind::ArgumentConflict, Some(ContextValue::String(one))) =
        (error.kind(), error.get(ContextKind::InvalidArg))
    else {
        return None;
    };
    let other = match error.get(ContextKind::PriorArg)? {
        ContextValue::String(other) => other.clone(),
        ContextValue::Strings(others) => others.join(" and "),
        _ => return None,
    };
    // Clap may name either of the two first.
    let is = |text: &str, flag: &str| text.split_whitespace().any(|word| word == flag);
    let (_, why) = EXCLUSIONS.iter().find(|(flag, _)| is(one, flag) || is(&other, flag))?;
    Some(if one == &other {
        format!("{one} is given twice")
    } else {
        format!("{one} excludes {other}: {why}")
    })
}

const NO_KERNEL: &str = "--kernel FILE or --disk IMAGE is missing: the built-in guest has no devices, console, initrd or \
    command line; name a kernel, or leave out the flags that are for one (vellum run --help)";

const NO_KERNEL_FOR_COMMAND: &str = "--kernel FILE is missing: name a kernel for the command's guest, as in \
    `vellum run -k vmlinuz -- uname -r`; in the system of a disk image, --login and `vellum ssh` run one";

/// Checks that flags for a guest with a kernel come with one. Clap checks it too, except if a flag
/// of the built-in guest is given: that excludes `--kernel`, and clap does not require what is
/// excluded.
pub(super) fn check(line: CommandLine, matches: &ArgMatches) -> Result<(), clap::Error> {
    const EXCLUDING: [&str; 5] = ["workload", "passes", "duration", "json", "format"];
    let run = match matches.subcommand() {
        Some(("run", run)) => run,
        Some(("test", test)) if test.subcommand_name() == Some("startup") => {
            test.subcommand_matches("startup").expect("it is its name")
        }
        _ => return Ok(()),
    };
    let typed = |id: &str| run.value_source(id) == Some(ValueSource::CommandLine);
    if ["kernel", "firmware", "disk"].into_iter().any(typed) || !EXCLUDING.into_iter().any(typed) {
        return Ok(());
    }
    let flags = KernelArgs::augment_args(clap::Command::new("run"));
    let given = flags.get_arguments().find(|flag| typed(flag.get_id().as_str()));
    match given {
        None => Ok(()),
        Some(flag) => {
            let named = flag.get_long().map_or("-- COMMAND".into(), |flag| format!("--{flag}"));
            let text = format!("{named}: {NO_KERNEL}");
            Err((line.definition)().error(ErrorKind::MissingRequiredArgument, text))
        }
    }
}

/// The message about a missing argument.
fn missing(error: &clap::Error) -> Option<String> {
    let (ErrorKind::MissingRequiredArgument, Some(ContextValue::Strings(wanted))) =
        (error.kind(), error.get(ContextKind::InvalidArg))
    else {
        return None;
    };
    match wanted.as_slice() {
        // A command in a guest needs both -- COMMAND and --kernel.
        wanted if wanted.iter().any(|flag| flag.contains("--disk")) => Some(NO_KERNEL.into()),
        wanted if wanted.iter().any(|flag| flag.contains("--kernel")) => Some(NO_KERNEL_FOR_COMMAND.into()),
        [command] if command.contains("COMMAND") => Some(
            "COMMAND is missing: give one behind --, as in `-- uname -a`, or to vellum exec --request JSON"
                .into(),
        ),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{LINE, read_from};

    #[test]
    fn an_argument_that_is_no_text_is_named() {
        use std::os::unix::ffi::OsStringExt;

        let cases: [(&[&[u8]], &str); 5] = [
            (&[b"run", b"-d/d\xff", b"-k", b"k"], "-d: \"-d/d\\xFF\" is"),
            (&[b"run", b"-k", b"k", b"--serial=file=\xff"], "--serial: \"--serial=file=\\xFF\" is"),
            (&[b"run", b"--gdb", b"\xff"], "--gdb: \"\\xFF\" is"),
            (&[b"migrate", b"m", b"--to", b"unix:\xff"], "--to: \"unix:\\xFF\" is"),
            // The first argument, a path, may be any bytes.
            (&[b"restore", b"/dir\xff", b"--serial", b"file=\xff"], "--serial: \"file=\\xFF\" is"),
        ];
        for (words, says) in cases {
            let words = [b"vellum"].into_iter().map(|word| &word[..]).chain(words.iter().copied());
            let words: Vec<_> = words.map(|word| OsString::from_vec(word.to_vec())).collect();
            let error = read_from(words.iter()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidUtf8, "{words:?}: {error}");
            let line = not_text(LINE, &words).unwrap();
            assert!(line.starts_with(says), "{line}");
        }
    }

    /// The message about a wrong line.
    fn said(words: &[&str]) -> String {
        let error = read_from(words).map(drop).expect_err("must be refused");
        let words: Vec<String> = words[1..].iter().map(|word| (*word).to_owned()).collect();
        one_line(LINE, &words, &error)
    }

    #[test]
    fn errors_are_one_line() {
        for (line, remedy) in [
            (&["vellum", "run", "--memory", "lots"][..], "512m"),
            (&["vellum", "run", "--memory", "1g,baking=thp"], "did you mean 'backing'"),
            (&["vellum", "run", "--cpus", "0"], "from 1 to"),
            (&["vellum", "run", "--workload", "wirte"], "did you mean 'write'"),
            (&["vellum", "rnu"], "did you mean 'run'"),
            (&["vellum", "run", "--memroy", "1g"], "--memory"),
            (&["vellum", "migrate", "m", "-v", "--to", "unix:x"], "'-v'; vellum migrate --help lists all"),
            (&["vellum", "run", "--timeout", "-5s"], "no value here is negative"),
            (&["vellum", "bench", "demand-paging", "-d", "-1"], "from 0 to"),
            (&["vellum", "run", "-k", "x", "--passes", "3"], "--timeout ends it"),
            (&["vellum", "run", "--rng"], "name a kernel"),
            (&["vellum", "run", "debian.qcow2"], "a disk image stands behind -d"),
            (&["vellum", "run", "-d", "x.img", "--passes", "3"], "leave out one of the two"),
            (&["vellum", "run", "-d", "x.img", "--ssh"], "--login"),
            (&["vellum", "run", "-d", "x.img", "--", "ls"], "--kernel FILE is missing"),
            (&["vellum", "exec", "x"], "behind --"),
            (&["vellum", "sotp", "x"], "did you mean 'stop'"),
            (&["vellum", "ctl", "x", "stpo"], "unknown command 'stpo' of ctl (did you mean 'stop'?)"),
            (&["vellum", "live-update", "status", "web"], "unexpected argument 'web'"),
            (&["vellum", "halt", "x"], "unknown command 'halt': there are doctor, run"),
            (&["vellum", "run", "-m", "1g,hugepages=on"], "backing=hugetlb-2m"),
            (&["vellum", "run", "-k", "x", "--vsock", "3"], "PATH,cid=3"),
        ] {
            let message = said(line);
            assert!(!message.contains('\n') && message.contains(remedy), "{message}");
        }
    }

    /// Clap forgets the requirement if another flag excludes the kernel.
    #[test]
    fn flags_of_a_guest_with_a_kernel_need_one() {
        let kernel = KernelArgs::augment_args(clap::Command::new("run"));
        // --kconfig and --from work without a kernel.
        let boots = ["kernel", "firmware", "disk", "kconfig", "from"];
        let flags = kernel.get_arguments().filter(|flag| !boots.contains(&flag.get_id().as_str()));
        let mut count = 0;
        for flag in flags {
            let value = match flag.get_id().as_str() {
                "protocol" => "pvh",
                "irqchip" => "split",
                "transport" => "pci",
                "uart" => "16550",
                "cr3_cache" => "on",
                "serial" | "console" => "null",
                "timeout" => "3s",
                "net" => "tap=tap0",
                "network" => "mode=none",
                "cloud-init" => "user-data=x",
                "on_panic" => "dump",
                "forward" => "80:80",
                _ => "x",
            };
            // A command for the guest comes behind all flags.
            let mut words = vec![flag.get_long().map_or("--".to_owned(), |flag| format!("--{flag}"))];
            words.extend(flag.get_action().takes_values().then(|| value.to_owned()));
            let built_in =
                [&["--passes", "1"][..], &["-w", "write"], &["--json", "o"], &["--duration", "1s"], &[]];
            for more in built_in {
                let words = words.iter().map(String::as_str);
                let words = ["vellum", "run"].into_iter().chain(more.iter().copied()).chain(words);
                let message = read_from(words).map(drop).map_err(|error| one_line(LINE, &[], &error));
                let message = message.expect_err(&format!("{:?} {more:?}", flag.get_long()));
                let names = ["--kernel FILE or --disk IMAGE is missing", "--kernel FILE is missing"];
                assert!(names.iter().any(|text| message.contains(text)), "{message}");
            }
            count += 1;
        }
        assert!(count > 10, "only {count} flags");
    }

    /// Every rule has a reason here. A new rule without one fails the test.
    #[test]
    fn arguments_that_exclude_each_other_are_told_why() {
        for line in [
            &["run", "-k", "x", "--json", "o"][..],
            &["run", "-k", "x", "--duration", "3s"],
            &["run", "-k", "x", "-w", "write"],
            &["run", "-d", "x", "-w", "write"],
            &["run", "-d", "x", "--login", "a", "--user-data", "f"],
            &["run", "-d", "x", "--firmware", "f", "-k", "k"],
            &["bench", "dirty-log", "-g", "--tracker", "ring"],
            &["bench", "dirty-log", "--tracker", "ring", "-g"],
            &["bench", "dirty-log", "--preset", "lazy", "-s", "thp"],
            &["bench", "dirty-log", "-g", "--preset", "lazy"],
            &["bench", "page-table", "--preset", "seed", "-b", "1g"],
            &["bench", "page-table", "--pin", "1", "--preset", "seed"],
            &["bench", "page-table", "--together", "--execute"],
            &["bench", "rmap-fork", "--lengths", "3", "--drop", "newest"],
            &["bench", "rmap-fork", "3", "--lengths", "3"],
            &["exec", "a", "--request", r#"{"do":"facts"}"#, "--", "ls"],
        ] {
            let message = said(&[&["vellum"], line].concat());
            assert!(message.contains(" excludes ") && message.contains("leave out"), "{line:?}: {message}");
        }
    }
}
