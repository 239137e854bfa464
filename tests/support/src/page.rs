//! Runs a page of the book as a test. Its commands run in order in one shell. They are the lines
//! after `$ ` in `console` blocks, and the lines of indented blocks.
//!
//! The output of a command in a `console` block is compared with the lines below it. `…` matches
//! any text in a line, or any lines if it is alone on a line. Runs of blanks match each other. A
//! command that fails must be followed by `echo $?`. The command after one in the background is
//! repeated until its output matches.
//!
//! [`crate::book`] lists the pages, and the commands that are not run.

use std::borrow::Cow;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::book::{Instead, Page};
use crate::{Failed, LIMIT, Scratch, ensure, eventually};
use rustix::process::{Pid, Signal, kill_process_group};

/// The line that marks the end of a command's output. The status follows.
const END: &str = "end of command:";

/// A command of a page.
#[derive(Debug, PartialEq)]
pub struct Step<'a> {
    /// The number of its line.
    pub line: usize,
    /// What a reader types.
    pub command: Cow<'a, str>,
    /// The expected output, if the page shows it.
    expected: Option<Vec<&'a str>>,
}

/// The commands of a page.
pub fn steps(page: &str) -> Vec<Step<'_>> {
    let mut steps: Vec<Step> = Vec::new();
    let (mut fence, mut continues) = (None, false);
    for (line, text) in (1..).zip(page.lines()) {
        if let Some(kind) = text.strip_prefix("```") {
            fence = if fence.is_none() { Some(kind) } else { None };
        } else if let Some(kind) = fence {
            if kind != "console" {
            } else if let Some(command) = text.strip_prefix("$ ") {
                steps.push(Step { line, command: command.into(), expected: Some(Vec::new()) });
            } else if let Some(expected) = steps.last_mut().and_then(|step| step.expected.as_mut()) {
                expected.push(text);
            }
        } else if text.starts_with("    ") {
            match steps.last_mut().filter(|_| continues) {
                Some(step) => step.command = format!("{}\n{}", step.command, text.trim()).into(),
                None => steps.push(Step { line, command: typed(text.trim()).into(), expected: None }),
            }
            continues = text.ends_with('\\');
        }
    }
    steps
}

/// The first block of `kind` in a page, as it stands.
pub fn block<'a>(page: &'a str, kind: &str) -> Option<&'a str> {
    page.split_once(&format!("\n```{kind}\n"))?.1.split_once("\n```").map(|(block, _)| block)
}

/// The commands of `program` in a page, in blocks and in its text.
pub fn commands(page: &str, program: &str) -> Vec<String> {
    let mut fenced = false;
    let prose = page.lines().filter(|line| {
        let is_fence = line.starts_with("```");
        fenced ^= is_fence;
        !fenced && !is_fence
    });
    let prose = prose.collect::<Vec<_>>().join(" ");
    let spans = prose.split('`').skip(1).step_by(2).map(str::to_owned);
    let typed = steps(page).into_iter().map(|step| step.command.replace("\\\n", ""));
    let is_one = |command: &String| command.starts_with(&format!("{program} "));
    spans.chain(typed).filter(is_one).collect()
}

/// The first flag in `command` that the command line `root` does not have.
pub fn unknown_flag<'a>(root: &clap::Command, command: &'a str) -> Option<&'a str> {
    let (mut at, mut quoted) = (root, false);
    let ends = |word: &&str| matches!(*word, "--" | "|" | ">" | "&" | "#" | "'--'");
    let words = command.split_whitespace().skip_while(|word| *word != root.get_name()).skip(1);
    for word in words.take_while(|word| !ends(word)) {
        // What stands in quotes is another command.
        let quotes = word.matches('\'').count();
        quoted ^= quotes % 2 == 1;
        if quoted || quotes > 0 {
            continue;
        }
        if let Some(inner) = at.find_subcommand(word) {
            at = inner;
        } else if let Some(flag) = word.trim_start_matches('[').strip_prefix("--") {
            let name = flag.split(|c: char| !c.is_ascii_alphanumeric() && c != '-').next().unwrap_or("");
            let knows = |arg: &clap::Arg| {
                arg.get_long() == Some(name) || arg.get_all_aliases().is_some_and(|all| all.contains(&name))
            };
            if !name.is_empty() && !at.get_arguments().any(knows) {
                return Some(word);
            }
        }
    }
    None
}

/// A line without its prompt: `host1$ vellum doctor`.
fn typed(line: &str) -> &str {
    let prompt = |text: &&str| text.chars().all(char::is_alphanumeric);
    line.split_once("$ ").filter(|(name, _)| prompt(name)).map_or(line, |(_, command)| command)
}

/// Whether `pattern` matches `items`. Elements of the pattern for which `is_any` is true match any
/// number of items.
fn matches<T, U>(
    pattern: &[T],
    items: &[U],
    is_any: impl Fn(&T) -> bool,
    same: impl Fn(&T, &U) -> bool,
) -> bool {
    let (mut p, mut i) = (0, 0);
    let mut back: Option<(usize, usize)> = None;
    while i < items.len() {
        if pattern.get(p).is_some_and(&is_any) {
            back = Some((p, i));
            p += 1;
        } else if pattern.get(p).is_some_and(|one| same(one, &items[i])) {
            (p, i) = (p + 1, i + 1);
        } else if let Some((any, from)) = back {
            (p, i) = (any + 1, from + 1);
            back = Some((any, i));
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(is_any)
}

fn line_matches(pattern: &str, line: &str) -> bool {
    let chars =
        |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ").chars().collect::<Vec<_>>();
    matches(&chars(pattern), &chars(line), |one| *one == '…', |one, other| one == other)
}

fn output_matches(expected: Option<&[&str]>, output: &[String]) -> bool {
    expected.is_none_or(|lines| {
        matches(lines, output, |one| one.trim() == "…", |one, other| line_matches(one, other))
    })
}

/// A shell in a directory of its own, and the processes that it started.
struct Shell {
    child: Child,
    output: BufReader<std::process::ChildStdout>,
    dir: Scratch,
    vellum: &'static str,
}

/// The runtime directory of the shell's machines, in its directory.
const RUNTIME: &str = "run";

impl Shell {
    fn new(vellum: &'static str) -> Result<Self, Failed> {
        let dir = Scratch::new()?;
        fs::create_dir(dir.path("bin"))?;
        symlink(vellum, dir.path("bin/vellum"))?;
        fs::create_dir(dir.path(RUNTIME))?;
        let path = format!("{}:{}", dir.path("bin").display(), std::env::var("PATH").unwrap_or_default());
        let mut shell = Command::new("sh");
        shell
            .current_dir(dir.dir())
            .env("PATH", path)
            .env("XDG_RUNTIME_DIR", dir.path(RUNTIME))
            .env_remove("VELLUM_PLANT");
        shell.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
        let mut child = shell.spawn()?;
        let output = BufReader::new(child.stdout.take().ok_or("no output")?);
        let mut shell = Self { child, output, dir, vellum };
        // If this process is killed, the shell reads end of file and ends its machines.
        shell.say("exec 2>&1; trap 'trap - TERM; kill 0' EXIT\n")?;
        Ok(shell)
    }

    fn say(&mut self, text: &str) -> Result<(), Failed> {
        Ok(self.child.stdin.as_mut().ok_or("no input")?.write_all(text.as_bytes())?)
    }

    /// Runs a command. Returns its output and status.
    fn run(&mut self, command: &str) -> Result<(Vec<String>, u8), Failed> {
        // The next command finds the status of this one in `$?`.
        let end = format!("status=$?; printf '\\n{END} %s\\n' $status; (exit $status)");
        self.say(&format!("{{ {command}\n}} </dev/null\n{end}\n"))?;
        let mut lines = Vec::new();
        loop {
            let mut line = Vec::new();
            ensure(self.output.read_until(b'\n', &mut line)? > 0, || {
                format!("the shell ended in {command}")
            })?;
            let line = String::from_utf8_lossy(&line).trim_end().to_owned();
            if let Some(status) = line.strip_prefix(END) {
                while lines.last().is_some_and(String::is_empty) {
                    lines.pop();
                }
                return Ok((lines, status.trim().parse()?));
            }
            lines.push(line);
        }
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        // Forked machines are in no process group of the shell.
        let sockets = fs::read_dir(self.dir.path(RUNTIME).join("vellum")).into_iter().flatten().flatten();
        for socket in sockets.filter(|entry| entry.path().extension().is_some_and(|kind| kind == "sock")) {
            let _ = Command::new(self.vellum).arg("stop").arg(socket.path()).output();
        }
        if let Some(group) = Pid::from_raw(self.child.id().cast_signed()) {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = self.child.wait();
    }
}

/// Runs `page` in a directory with the files that `prepare` creates.
pub fn run(
    page: &Page,
    vellum: &'static str,
    prepare: impl FnOnce(&Path) -> Result<(), Failed>,
) -> Result<(), Failed> {
    let steps = steps(page.text);
    let name = page.name;
    ensure(!steps.is_empty(), || format!("{name} has no commands"))?;
    let mut shell = Shell::new(vellum)?;
    prepare(shell.dir.dir())?;
    for command in page.before {
        let (output, status) = shell.run(command)?;
        ensure(status == 0, || format!("{name}, before: {command}: status {status}\n{}", output.join("\n")))?;
    }
    let mut started = page.before.iter().any(|command| command.ends_with('&'));
    for (nth, Step { line, command, expected }) in (1..).zip(&steps) {
        let command = match page.instead(command) {
            None => &**command,
            Some(Instead::Run(other, _)) => other,
            Some(Instead::Nothing(_)) => continue,
        };
        let asks = steps.get(nth).is_some_and(|next: &Step| next.command == "echo $?");
        let is_right = |(output, status): &(Vec<String>, u8)| {
            output_matches(expected.as_deref(), output) && (*status == 0 || asks)
        };
        let mut printed = shell.run(command)?;
        if started {
            // If the output never matches, the failure below shows the last one.
            let _ = eventually(LIMIT, command, || {
                if is_right(&printed) {
                    return Ok(Some(()));
                }
                printed = shell.run(command)?;
                Ok(None)
            });
        }
        ensure(is_right(&printed), || {
            let (output, status) = (printed.0.join("\n"), printed.1);
            let expected =
                expected.as_ref().map_or("anything, with status 0".into(), |lines| lines.join("\n"));
            format!(
                "{name}, line {line}: $ {command}\n--- the page says\n{expected}\n--- it printed (status {status})\n{output}"
            )
        })?;
        started = command.ends_with('&');
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_in_console_blocks_and_indented() {
        let page = "Text:\n\n    vellum a \\\n        --b\n    host1$ vellum c    # why\n\n```text\n$ no\n    no\n```\n\
                    ```console\n$ vellum d\nout\n```\n";
        let found = steps(page);
        let commands: Vec<&str> = found.iter().map(|step| &*step.command).collect();
        assert_eq!(commands, ["vellum a \\\n--b", "vellum c    # why", "vellum d"]);
        let expected: Vec<_> = found.iter().map(|step| step.expected.clone()).collect();
        assert_eq!(expected, [None, None, Some(vec!["out"])]);
    }
}
