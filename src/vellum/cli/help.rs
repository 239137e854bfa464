//! The layout of the help. `-h` fits a screen: it has the most used options, each with the first
//! clause of its description, and examples. `--help` has everything.

use clap::builder::StyledStr;
use clap::{Arg, Command};

/// The groups of `vellum -h`, the most used first.
const COMMANDS: [(&str, &[&str]); 4] = [
    ("Guests", &["run", "list", "exec", "ssh", "stop", "pause", "resume", "status", "ctl"]),
    ("Move and save", &["migrate", "receive", "snapshot", "restore", "fork", "live-update", "dump"]),
    ("Test and measure", &["doctor", "test", "bench", "judge", "report", "fleet"]),
    ("Files", &["disk", "completions"]),
];

/// A heading and the options below it. Options without a heading come first.
type Group = (Option<&'static str>, &'static [&'static str]);

/// The options that `-h` shows, for commands with more options than a screen has lines.
const SHOWN: [(&str, &[Group]); 13] = [
    (
        "run",
        &[
            (None, &["kernel", "disk", "login", "cpus", "memory", "name"]),
            (Some("A guest with a kernel"), &["command", "initrd", "cmdline", "root", "serial", "gdb"]),
            (Some("Devices"), &["share", "net", "vsock"]),
            (
                Some("The built-in guest and its result"),
                &["workload", "passes", "duration", "verbose", "json", "format"],
            ),
        ],
    ),
    (
        "receive",
        &[
            (None, &["listen", "name", "memory", "insecure_network"]),
            (Some("Devices"), &["disk", "net", "share", "vsock"]),
            (Some("The machine"), &["serial", "user", "sandbox", "tsc_mismatch"]),
            (Some("Result"), &["verbose", "json"]),
        ],
    ),
    (
        "restore",
        &[
            (None, &["at", "name", "memory", "clock", "paused", "disk_changed"]),
            (Some("Devices"), &["disk", "net", "share", "vsock"]),
            (Some("The machine"), &["serial", "user", "sandbox"]),
            (Some("Result"), &["verbose", "json"]),
        ],
    ),
    (
        "fork",
        &[
            (None, &["name", "count", "paused", "disk_changed"]),
            (Some("Devices"), &["disk", "net", "share", "vsock"]),
            (Some("The machine"), &["serial", "user", "sandbox"]),
            (Some("Result"), &["verbose", "json"]),
        ],
    ),
    (
        "live-update restore",
        &[
            (None, &["session", "clock", "print", "give_up", "paused", "disk_changed"]),
            (Some("Devices"), &["disk", "net", "share", "vsock"]),
            (Some("The machine"), &["name", "serial", "tsc_mismatch"]),
        ],
    ),
    (
        "migrate",
        &[
            (None, &["to", "mode", "downtime", "timeout", "verify", "paused"]),
            (Some("A slow link or a busy guest"), &["throttle", "bandwidth", "connections", "compress"]),
            (Some("After a cut"), &["attach", "recover"]),
            (Some("Output"), &["json"]),
        ],
    ),
    (
        "bench dirty-log",
        &[
            (None, &["iterations", "bytes", "vcpus", "backing", "tracker", "repeat", "preset"]),
            (Some("The guest"), &["write_percent", "random", "overlap", "slots", "hot"]),
            (Some("The collection"), &["collect", "duration", "clear_chunk", "no_manual_protect"]),
            (Some("Result"), &["verbose", "json", "format"]),
        ],
    ),
    (
        "bench page-table",
        &[
            (None, &["bytes", "vcpus", "backing", "repeat", "preset"]),
            (Some("Result"), &["verbose", "json", "format"]),
        ],
    ),
    (
        "bench migration",
        &[
            (None, &["bytes", "vcpus", "dirty_rate", "mode", "downtime", "repeat", "preset"]),
            (Some("The guest and the link"), &["pattern", "backing", "bandwidth", "connections", "tracker"]),
            (Some("Result"), &["verbose", "json", "format"]),
        ],
    ),
    (
        "test dirty-log",
        &[
            (None, &["tracker", "backing", "duration", "events", "memory", "cpus", "seed"]),
            (Some("Other tests"), &["mode", "inject", "slot_base", "clear_chunk"]),
            (Some("Result"), &["verbose", "json", "format", "_exit", "heartbeat"]),
        ],
    ),
    (
        "test dirty-edges",
        &[
            (None, &["tracker", "backing", "memory"]),
            (Some("Other tests"), &["revoke", "race", "interrupt"]),
            (Some("Result"), &["verbose", "json", "format", "_exit"]),
        ],
    ),
    ("test startup", &[(None, &["cpus", "memory", "workload"])]),
    (
        "judge run",
        &[
            (None, &["vmm", "scenario", "times", "cpus", "memory", "cmdline", "limit", "logs"]),
            (Some("Result"), &["verbose", "json", "format", "_exit"]),
        ],
    ),
];

/// Examples of commands that have none beside their arguments.
const EXAMPLES: &[(&str, &str)] = &[
    ("doctor", "vellum doctor\n  vellum doctor --json"),
    ("list", "vellum list"),
    ("exec", "vellum exec web -- uname -r\n  vellum exec -t web                a shell in the guest"),
    ("ssh", "vellum ssh web\n  vellum ssh web -- uptime"),
    ("pause", "vellum pause web"),
    ("resume", "vellum resume web"),
    ("status", "vellum status web"),
    ("stop", "vellum stop web"),
    (
        "live-update status",
        "vellum live-update status\n  vellum live-update status --kernel vmlinuz --initrd initrd.img",
    ),
    ("completions", "vellum completions bash > ~/.local/share/bash-completion/completions/vellum"),
    ("ctl", "vellum ctl web status\n  vellum ctl web stop"),
    ("ctl pause", "vellum ctl web pause"),
    ("ctl resume", "vellum ctl web resume"),
    ("ctl status", "vellum ctl web status"),
    ("ctl stop", "vellum ctl web stop"),
    ("ctl balloon", "vellum ctl web balloon 512m"),
    ("ctl migrate-cancel", "vellum ctl web migrate-cancel"),
    ("ctl migrate-set", "vellum ctl web migrate-set --downtime 1s --bandwidth 1g"),
    ("ctl upgrade", "vellum ctl web upgrade ./vellum"),
    ("ctl nmi", "vellum ctl web nmi"),
    ("ctl sysrq", "vellum ctl web sysrq t"),
    ("ctl events", "vellum ctl web events"),
    ("ctl serial", "vellum ctl web serial file=web.log"),
    ("snapshot list", "vellum snapshot list web.snap"),
    ("snapshot end", "vellum snapshot end web"),
    ("snapshot merge", "vellum snapshot merge web.snap"),
    ("snapshot verify", "vellum snapshot verify web.snap"),
    ("fleet plan", "vellum fleet plan nightly.toml --into /shared/nightly"),
    ("fleet submit", "vellum fleet submit /shared/nightly/plan.toml"),
    ("fleet status", "vellum fleet status /shared/nightly/plan.toml"),
    ("fleet merge", "vellum fleet merge /shared/nightly/plan.toml --html nightly.html"),
    ("fleet rerun", "vellum fleet rerun /shared/nightly/plan.toml 471 --test oracle --times 100"),
    ("fleet task", "vellum fleet task /shared/nightly/plan.toml 17"),
    ("bench", "vellum bench dirty-log\n  vellum bench migration"),
    ("bench rmap-fork", "vellum bench rmap-fork 100 1000"),
    ("bench context-switch", "vellum bench context-switch 2 8"),
    ("disk", "vellum disk info debian-12.qcow2"),
    ("bench access-tracking", "vellum bench access-tracking -b 256m -v 2"),
    ("bench demand-paging", "vellum bench demand-paging -b 256m -v 2"),
    ("bench memslot", "vellum bench memslot --json memslot.json"),
    ("bench page-table", "vellum bench page-table -b 64m\n  vellum bench page-table --preset seed"),
    ("test startup", "vellum test startup"),
    ("judge", "vellum judge run --vmm qemu"),
];

/// The command line with its help laid out.
pub(super) fn shaped(command: Command) -> Command {
    let command = inner(command, "");
    let mut text = String::new();
    for (heading, names) in COMMANDS {
        text += &format!("{heading}:\n");
        for name in names {
            let about = command.find_subcommand(name).and_then(Command::get_about);
            let about = about.map_or(String::new(), |about| clause(&about.to_string()));
            text += &format!("  {name:<12} {about}\n");
        }
        text.push('\n');
    }
    command.help_template(format!(
        "{{about}}\n\n{{usage-heading}} {{usage}}\n\n{text}Options:\n{{options}}{{after-help}}"
    ))
}

fn inner(command: Command, path: &str) -> Command {
    let below = |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path} {name}") };
    let names: Vec<_> = command.get_subcommands().map(|inner| inner.get_name().to_owned()).collect();
    let command = names.into_iter().fold(command, |command, name| {
        let path = below(&name);
        command.mut_subcommand(name, |command| inner(command, &path))
    });
    footed(in_order(with_verbose(command), path), path)
}

/// Makes `-v` short for `--verbose`, unless `-v` is the number of vCPUs as in the kernel's
/// selftests.
fn with_verbose(command: Command) -> Command {
    let has = command.get_arguments().any(|arg| arg.get_id() == "verbose");
    let taken = command.get_arguments().any(|arg| arg.get_short() == Some('v'));
    if has && !taken { command.mut_arg("verbose", |arg| arg.short('v')) } else { command }
}

/// Puts options under their headings, and hides those that `-h` leaves out.
fn in_order(command: Command, path: &str) -> Command {
    let groups = SHOWN.iter().find(|(of, _)| *of == path).map_or(&[][..], |(_, groups)| groups);
    let place = |arg: &Arg| {
        let all = groups.iter().flat_map(|(heading, ids)| ids.iter().map(move |id| (*heading, *id)));
        all.enumerate().find(|(_, (_, id))| arg.get_id() == id).map(|(at, (heading, _))| (at, heading))
    };
    let mut next = 1000;
    command.mut_args(|arg| {
        let arg = in_short(arg);
        match place(&arg) {
            None if groups.is_empty() || arg.is_positional() => arg,
            Some((at, heading)) => arg.help_heading(heading).display_order(at),
            None => {
                next += 1;
                arg.display_order(next).hide_short_help(true)
            }
        }
    })
}

/// An option with the first clause of its description as short help.
fn in_short(arg: Arg) -> Arg {
    let Some(help) = arg.get_help().map(StyledStr::to_string) else { return arg };
    let short = clause(&help);
    if short == help {
        return arg;
    }
    let long = arg.get_long_help().map_or(help, StyledStr::to_string);
    arg.help(short).long_help(long)
}

/// The first clause of a description. It ends at a full stop, colon or semicolon outside of quotes
/// and parentheses. A default at the end is kept.
fn clause(text: &str) -> String {
    let default = |rest: &str| {
        let from = rest.find("[default: ")?;
        Some(format!(" {}", &rest[from..=from + rest[from..].find(']')?]))
    };
    let (mut quoted, mut depth) = (false, 0u32);
    let mut letters = text.char_indices().peekable();
    while let Some((at, letter)) = letters.next() {
        match letter {
            '`' => quoted = !quoted,
            '(' | '[' => depth += 1,
            ')' | ']' => depth = depth.saturating_sub(1),
            '.' | ':' | ';'
                if !quoted && depth == 0 && letters.peek().is_none_or(|(_, next)| *next == ' ') =>
            {
                let default = default(&text[at..]).unwrap_or_default();
                return text[..at].replace('`', "") + &default;
            }
            _ => {}
        }
    }
    text.replace('`', "")
}

/// Adds examples after the options. `-h` leaves out the sections that only `--help` has room for.
fn footed(command: Command, path: &str) -> Command {
    let own = command.get_after_help().map(StyledStr::to_string);
    let example = EXAMPLES.iter().find(|(of, _)| *of == path);
    let example = example.map(|(_, lines)| format!("Examples:\n  {lines}"));
    let long = [example, own].into_iter().flatten().collect::<Vec<_>>().join("\n\n");
    if long.is_empty() {
        return command;
    }
    let more_at_length = command.get_after_long_help().map(StyledStr::to_string);
    let short = long.split("\n\nExit status:").next().unwrap_or_default().to_owned();
    let hidden = command.get_arguments().any(Arg::is_hide_short_help_set);
    let more = if hidden { "\n\n--help has all options." } else { "" };
    command.after_long_help(more_at_length.unwrap_or(long)).after_help(short + more)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::command;

    /// All visible commands, with their paths.
    fn all() -> Vec<(String, Command)> {
        fn below(command: &Command, path: &str, found: &mut Vec<(String, Command)>) {
            for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set()) {
                let path = format!("{path} {}", inner.get_name());
                if inner.get_name() != "help" {
                    found.push((path.clone(), inner.clone()));
                    below(inner, &path, found);
                }
            }
        }
        let root = command();
        let mut found = vec![("vellum".to_owned(), root.clone())];
        below(&root, "vellum", &mut found);
        found
    }

    #[test]
    fn the_short_help_of_every_command_fits_a_screen_and_has_an_example() {
        let mut wrong = Vec::new();
        for (path, command) in all() {
            let text = command.bin_name(path.clone()).term_width(80).render_help().to_string();
            let (lines, columns) =
                (text.lines().count(), text.lines().map(|line| line.chars().count()).max().unwrap_or(0));
            if lines > 50 || columns > 80 {
                wrong.push(format!("{path}: {columns} columns, {lines} lines"));
            }
            if path != "vellum" && !text.contains("Example") {
                wrong.push(format!("{path}: no example"));
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }

    #[test]
    fn every_command_is_in_a_group_and_every_name_here_is_one() {
        let root = command();
        let shown = root.get_subcommands().filter(|inner| !inner.is_hide_set() && inner.get_name() != "help");
        let grouped: Vec<_> = COMMANDS.iter().flat_map(|(_, names)| names.iter().copied()).collect();
        let mut names: Vec<_> = shown.map(Command::get_name).collect();
        let mut sorted = grouped.clone();
        names.sort_unstable();
        sorted.sort_unstable();
        assert_eq!(names, sorted);
        let find =
            |path: &str| path.split(' ').try_fold(&root, |command, word| command.find_subcommand(word));
        for (path, groups) in SHOWN {
            let command = find(path).unwrap_or_else(|| panic!("{path} is no command"));
            for id in groups.iter().flat_map(|(_, ids)| *ids) {
                assert!(command.get_arguments().any(|arg| arg.get_id() == id), "{path}: {id}");
            }
        }
        for (path, _) in EXAMPLES {
            assert!(find(path).is_some(), "{path} is no command");
        }
    }

    #[test]
    fn the_long_help_has_what_the_short_one_leaves_out() {
        let root = command();
        let run = root.find_subcommand("run").unwrap().clone();
        let (short, long) =
            (run.clone().render_help().to_string(), run.clone().render_long_help().to_string());
        for arg in run.get_arguments().filter_map(Arg::get_long) {
            assert!(long.contains(&format!("--{arg}")), "{arg}");
        }
        assert!(!short.contains("--cpuid") && short.contains("--help has all options"), "{short}");
        assert!(long.contains("Exit status:") && !short.contains("Exit status:"));
    }

    #[test]
    fn a_clause_ends_outside_of_quotes_and_parentheses() {
        for (text, first) in [
            ("Guest memory: `SIZE[,lock]`; sizes take k", "Guest memory"),
            ("Where it listens: unix:PATH", "Where it listens"),
            ("As in `a: b` and so. More", "As in a: b and so"),
            ("The machine (its name; a path)", "The machine (its name; a path)"),
            ("vCPUs", "vCPUs"),
            ("vCPUs [default: 1]", "vCPUs [default: 1]"),
            ("How long; for ever [default: 5s: five]", "How long [default: 5s: five]"),
        ] {
            assert_eq!(clause(text), first);
        }
    }
}
