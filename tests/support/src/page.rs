//! Runs a page of the book as a test. The commands of its `console` blocks run in order in one
//! shell. The output of each is compared with the lines below it.
//!
//! `…` matches any text in a line, or any lines if it is alone on a line. Runs of blanks match each
//! other. A command that fails must be followed by `echo $?`. The command after one in the
//! background is repeated until its output matches.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::{Failed, LIMIT, Scratch, ensure, eventually};
use rustix::process::{Pid, Signal, kill_process_group};

/// The line that marks the end of a command's output. The status follows.
const END: &str = "end of command:";

/// A command and its expected output.
#[derive(Debug, PartialEq)]
struct Step<'a> {
    /// The line of the page.
    line: usize,
    command: &'a str,
    expected: Vec<&'a str>,
}

/// The commands of a page.
fn steps(page: &str) -> Vec<Step<'_>> {
    let mut steps: Vec<Step> = Vec::new();
    let mut inside = false;
    for (line, text) in (1..).zip(page.lines()) {
        if let Some(kind) = text.strip_prefix("```") {
            inside = !inside && kind == "console";
        } else if let Some(command) = text.strip_prefix("$ ").filter(|_| inside) {
            steps.push(Step { line, command, expected: Vec::new() });
        } else if inside && let Some(step) = steps.last_mut() {
            step.expected.push(text);
        }
    }
    steps
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

fn output_matches(expected: &[&str], output: &[String]) -> bool {
    matches(expected, output, |one| one.trim() == "…", |one, other| line_matches(one, other))
}

/// A shell in a directory of its own, and the processes that it started.
struct Shell {
    child: Child,
    output: BufReader<std::process::ChildStdout>,
    dir: Scratch,
}

impl Shell {
    fn new(vellum: &'static str) -> Result<Self, Failed> {
        let dir = Scratch::new()?;
        fs::create_dir(dir.path("bin"))?;
        symlink(vellum, dir.path("bin/vellum"))?;
        let path = format!("{}:{}", dir.path("bin").display(), std::env::var("PATH").unwrap_or_default());
        let mut shell = Command::new("sh");
        shell
            .current_dir(dir.dir())
            .env("PATH", path)
            .env("XDG_RUNTIME_DIR", dir.dir())
            .env_remove("VELLUM_PLANT");
        shell.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
        let mut child = shell.spawn()?;
        let output = BufReader::new(child.stdout.take().ok_or("no output")?);
        let mut shell = Self { child, output, dir };
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
        if let Some(group) = Pid::from_raw(self.child.id().cast_signed()) {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = self.child.wait();
    }
}

/// Runs the page `name` in a directory with the files that `prepare` creates.
pub fn run(
    name: &str,
    page: &str,
    vellum: &'static str,
    prepare: impl FnOnce(&Path) -> Result<(), Failed>,
) -> Result<(), Failed> {
    let steps = steps(page);
    ensure(!steps.is_empty(), || format!("{name} has no commands"))?;
    let mut shell = Shell::new(vellum)?;
    prepare(shell.dir.dir())?;
    let mut started = false;
    for (nth, Step { line, command, expected }) in (1..).zip(&steps) {
        let asks = steps.get(nth).is_some_and(|next: &Step| next.command == "echo $?");
        let is_right =
            |(output, status): &(Vec<String>, u8)| output_matches(expected, output) && (*status == 0 || asks);
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
            let expected = expected.join("\n");
            format!(
                "{name}, line {line}: $ {command}\n--- the page says\n{expected}\n--- it printed (status {status})\n{output}"
            )
        })?;
        started = command.ends_with('&');
    }
    Ok(())
}
