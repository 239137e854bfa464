//! What is said of a command line that is wrong: clap's paragraphs as one line, with the reason and what would work where clap
//! knows only the rule.

use std::process::ExitCode;

use clap::CommandFactory;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use super::{Cli, keyvalue};
use crate::vm::lifecycle::Exit;

/// Prints help as it is, and an error of the command line as one line.
pub(super) fn refuse(error: &clap::Error) -> ExitCode {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            let _ = error.print();
            ExitCode::SUCCESS
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
            ExitCode::from(Exit::Usage.code())
        }
        _ => {
            eprintln!("vellum: {}", one_line(error));
            ExitCode::from(Exit::Usage.code())
        }
    }
}

/// Clap's paragraphs as one line, without the usage that `--help` shows better.
fn one_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    if let (ErrorKind::InvalidSubcommand, Some(ContextValue::String(typed))) =
        (error.kind(), error.get(ContextKind::InvalidSubcommand))
    {
        return unknown(typed, std::env::args().nth(1).as_deref());
    }
    if let (ErrorKind::UnknownArgument, Some(ContextValue::String(typed))) =
        (error.kind(), error.get(ContextKind::InvalidArg))
    {
        // A value with a unit, as in `-5s`, is taken for flags.
        if typed.strip_prefix('-').is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_digit()))
        {
            return format!("unexpected argument '{typed}': no value here is negative");
        }
        // Behind an argument, as in `ctl NAME stpo`, clap does not take a word for a command.
        if !typed.starts_with('-')
            && let Some(first) = std::env::args().nth(1)
            && Cli::command().find_subcommand(&first).is_some_and(clap::Command::has_subcommands)
        {
            return unknown(typed, Some(&first));
        }
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

/// What to say of a subcommand that there is not, at the level where it was typed: after `first`, if that has any.
fn unknown(typed: &str, first: Option<&str>) -> String {
    let cli = Cli::command();
    let outer = first.and_then(|first| cli.find_subcommand(first)).filter(|outer| outer.has_subcommands());
    let level = outer.unwrap_or(&cli);
    let known: Vec<&str> = level.get_subcommands().map(clap::Command::get_name).collect();
    let nearest = keyvalue::nearest(typed, known.iter().copied());
    let after = outer.map_or(String::new(), |outer| format!(" of {}", outer.get_name()));
    format!("unknown command '{typed}'{after}: did you mean '{nearest}'? There are {}", known.join(", "))
}

/// Why two arguments exclude each other, by the one that says so, and what would work.
const EXCLUSIONS: [(&str, &str); 5] = [
    (
        "--kernel",
        "a kernel is a guest of its own, which no workload runs in: leave out one of the two; --timeout ends it",
    ),
    ("--no-manual-protect", "-g is short for --tracker bitmap: leave out one of the two"),
    ("--preset", "a preset goes over all that there are, or scales it to the host: leave out one of the two"),
    (
        "--lengths",
        "one table is timed for each length, so there are no others to make or drop: leave out one of the two",
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
    // Either may be the one that was typed first.
    let is = |text: &str, flag: &str| text.split_whitespace().any(|word| word == flag);
    let (_, why) = EXCLUSIONS.iter().find(|(flag, _)| is(one, flag) || is(&other, flag))?;
    Some(if one == &other {
        format!("{one} is given twice")
    } else {
        format!("{one} excludes {other}: {why}")
    })
}

/// What to say where something else is needed too.
fn missing(error: &clap::Error) -> Option<String> {
    let (ErrorKind::MissingRequiredArgument, Some(ContextValue::Strings(wanted))) =
        (error.kind(), error.get(ContextKind::InvalidArg))
    else {
        return None;
    };
    match wanted.as_slice() {
        [kernel] if kernel.starts_with("--kernel") => Some(
            "--kernel FILE is missing: the built-in guest has no devices, console, initrd or command line; name a kernel, or \
             leave out the flags that are for one (vellum run --help)"
                .into(),
        ),
        [command] if command.contains("COMMAND") => {
            Some("COMMAND is missing: give one behind --, as in `-- uname -a`, or use --request JSON".into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[test]
    fn errors_are_one_line() {
        for (line, remedy) in [
            (&["vellum", "run", "--memory", "lots"][..], "512m"),
            (&["vellum", "run", "--memory", "1g,baking=thp"], "did you mean 'backing'"),
            (&["vellum", "run", "--cpus", "0"], "from 1 to"),
            (&["vellum", "run", "--workload", "wirte"], "did you mean 'write'"),
            (&["vellum", "rnu"], "did you mean 'run'"),
            (&["vellum", "run", "--memroy", "1g"], "--memory"),
            (&["vellum", "run", "--timeout", "-5s"], "no value here is negative"),
            (&["vellum", "bench", "demand-paging", "-d", "-1"], "from 0 to"),
            (&["vellum", "run", "-k", "x", "--passes", "3"], "--timeout ends it"),
            (&["vellum", "run", "-d", "x.img"], "name a kernel"),
            (&["vellum", "exec", "x"], "behind --"),
        ] {
            let error = Cli::try_parse_from(line).expect_err("must be refused");
            let message = one_line(&error);
            assert!(!message.contains('\n') && message.contains(remedy), "{message}");
        }
    }

    /// Every rule has its reason: a new one is not left to clap's words.
    #[test]
    fn arguments_that_exclude_each_other_are_told_why() {
        for line in [
            &["run", "-k", "x", "--json", "o"][..],
            &["run", "-k", "x", "--duration", "3s"],
            &["run", "-k", "x", "-w", "write"],
            &["bench", "dirty-log", "-g", "--tracker", "ring"],
            &["bench", "dirty-log", "--tracker", "ring", "-g"],
            &["bench", "dirty-log", "--preset", "lazy", "-s", "thp"],
            &["bench", "dirty-log", "-g", "--preset", "lazy"],
            &["bench", "page-table", "--preset", "seed", "-b", "1g"],
            &["bench", "page-table", "--pin", "1", "--preset", "seed"],
            &["bench", "rmap-fork", "--lengths", "3", "--drop", "newest"],
            &["bench", "rmap-fork", "3", "--lengths", "3"],
            &["exec", "a", "--request", r#"{"do":"facts"}"#, "--", "ls"],
        ] {
            let error = Cli::try_parse_from([&["vellum"], line].concat()).expect_err("must be refused");
            let message = one_line(&error);
            assert!(message.contains(" excludes ") && message.contains("leave out"), "{line:?}: {message}");
        }
    }
}
