//! Runs other programs. The error of a missing program names its package, that of a failing one its
//! last output.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::{Error, Result};

/// Debian's package of each program that the laboratory runs. [`support::tools::TOOLS`] has those
/// that tests run.
const PACKAGES: [(&str, &str); 24] = [
    ("qemu-system-aarch64", "qemu-system-arm"),
    ("busybox", "busybox-static"),
    ("xz", "xz-utils"),
    ("tar", "tar"),
    ("make", "build-essential"),
    ("ld", "binutils"),
    ("ldd", "libc-bin"),
    ("objcopy", "binutils"),
    ("gcc", "build-essential"),
    ("g++", "build-essential"),
    ("perl", "perl"),
    ("flex", "flex"),
    ("bison", "bison"),
    ("bc", "bc"),
    ("apt-get", "apt"),
    ("apt-cache", "apt"),
    ("dpkg-deb", "dpkg"),
    ("gcc-12", "gcc-12"),
    ("aarch64-linux-gnu-gcc-12", "gcc-12-aarch64-linux-gnu"),
    ("aarch64-linux-gnu-ld", "binutils-aarch64-linux-gnu"),
    // Headers, for what must be compiled.
    ("/usr/aarch64-linux-gnu/include/stdio.h", "libc6-dev-arm64-cross"),
    ("/usr/include/libelf.h", "libelf-dev"),
    ("/usr/include/openssl/bio.h", "libssl-dev"),
    ("syslinux", "syslinux"),
];

/// The package that has `program`.
pub fn package_of(program: &str) -> &str {
    let rows = PACKAGES.iter().chain(support::tools::TOOLS);
    rows.clone().find(|(name, _)| *name == program).map_or(program, |(_, package)| package)
}

/// The path of `program` on the PATH. An absolute path is taken as it is.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    // Debian keeps some programs in sbin, which a user's PATH may lack.
    let system = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&path).chain(system).map(|dir| dir.join(program)).find(|file| file.is_file())
}

/// Like [`find`]. The error says how to get the program.
pub fn need(program: &str) -> Result<PathBuf> {
    find(program).ok_or_else(|| missing(program))
}

fn missing(program: &str) -> Error {
    Error::Missing { program: program.to_owned(), package: package_of(program).to_owned() }
}

/// The command as a person would type it.
pub fn line(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
}

/// Sends `signal` to `command` when the laboratory ends, however it ends.
pub fn bound(command: &mut Command, signal: libc::c_int) -> &mut Command {
    // SAFETY: prctl is async-signal-safe and takes no pointer here.
    unsafe {
        command.pre_exec(move || {
            libc::prctl(libc::PR_SET_PDEATHSIG, signal);
            Ok(())
        })
    }
}

/// Runs a command to its end and returns its standard output. The error quotes both streams.
pub fn output(command: &mut Command) -> Result<Vec<u8>> {
    fed(command, Stdio::null())
}

/// Like [`output`], with `input` as standard input.
pub fn fed(command: &mut Command, input: Stdio) -> Result<Vec<u8>> {
    // On SIGTERM, make and similar programs also stop their children.
    let out =
        bound(command, libc::SIGTERM).stdin(input).output().map_err(|error| cannot_start(command, error))?;
    if out.status.success() {
        return Ok(out.stdout);
    }
    let said = [out.stdout, out.stderr].concat();
    Err(failed(command, out.status.to_string(), &String::from_utf8_lossy(&said)))
}

/// Like [`output`], as text.
pub fn text(command: &mut Command) -> Result<String> {
    Ok(String::from_utf8_lossy(&output(command)?).into_owned())
}

/// Runs a command to its end and passes every line of both streams to `each`.
pub fn lines(command: &mut Command, each: impl FnMut(&str)) -> Result<()> {
    lines_of(command, |_| (), each)
}

/// Like [`lines`]. `started` first gets the process id.
pub fn lines_of(command: &mut Command, started: impl FnOnce(u32), mut each: impl FnMut(&str)) -> Result<()> {
    let (reader, writer) = std::io::pipe().map_err(Error::file("create a pipe for", "a child process"))?;
    let twin = writer.try_clone().map_err(Error::file("create a pipe for", "a child process"))?;
    let mut child = bound(command, libc::SIGTERM)
        .stdin(Stdio::null())
        .stdout(writer)
        .stderr(twin)
        .spawn()
        .map_err(|error| cannot_start(command, error))?;
    started(child.id());
    // `command` still holds the pipe's writing ends, so the reader would never see its end.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut last = Tail::default();
    for row in BufReader::new(reader).split(b'\n') {
        let row = match row {
            Ok(row) => String::from_utf8_lossy(&row).into_owned(),
            Err(error) => {
                let _ = child.kill().and_then(|()| child.wait());
                return Err(Error::file("read the output of", line(command))(error));
            }
        };
        each(&row);
        last.push(&row);
    }
    let status = child.wait().map_err(Error::file("wait for", line(command)))?;
    if status.success() { Ok(()) } else { Err(failed(command, status.to_string(), &last.text())) }
}

fn cannot_start(command: &Command, error: std::io::Error) -> Error {
    let program = command.get_program().to_string_lossy().into_owned();
    match error.kind() {
        std::io::ErrorKind::NotFound => missing(&program),
        _ => Error::File { doing: "start", path: program.into(), source: error },
    }
}

fn failed(command: &Command, status: String, said: &str) -> Error {
    let mut last = Tail::default();
    said.lines().for_each(|row| last.push(row));
    Error::Failed { line: line(command), status, output: last.text() }
}

/// The last lines of a log.
#[derive(Default)]
pub struct Tail(std::collections::VecDeque<String>);

impl Tail {
    /// Enough for a kernel's oops and what led to it.
    const LINES: usize = 60;

    /// Adds a line and drops the oldest.
    pub fn push(&mut self, line: &str) {
        if self.0.len() == Self::LINES {
            self.0.pop_front();
        }
        self.0.push_back(line.trim_end().to_owned());
    }

    /// The lines that are left.
    pub fn text(&self) -> String {
        self.0.iter().map(String::as_str).collect::<Vec<_>>().join("\n")
    }

    /// The last lines of a file. Empty if it cannot be read.
    pub fn of_file(path: &Path) -> String {
        let mut tail = Self::default();
        let bytes = std::fs::read(path).unwrap_or_default();
        String::from_utf8_lossy(&bytes).lines().for_each(|line| tail.push(line));
        tail.text()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_names_its_package() {
        let error = need("qemu-system-x86_64-which-is-not-there").unwrap_err();
        assert!(error.to_string().contains("apt-get install"), "{error}");
        assert_eq!(package_of("mcopy"), "mtools");
    }

    #[test]
    fn a_failing_program_is_quoted_with_its_last_lines() {
        let error =
            lines(Command::new("sh").args(["-c", "seq 100; echo why >&2; exit 3"]), |_| ()).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("why") && text.contains("100") && text.contains('3'), "{text}");
        assert!(!text.contains("\n10\n"), "{text}");
    }
}
