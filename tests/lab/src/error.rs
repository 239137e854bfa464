//! What can go wrong in the laboratory. Every message names the thing and says what to do about it.

use std::path::{Path, PathBuf};

/// The laboratory's result.
pub type Result<T> = std::result::Result<T, Error>;

/// Why the laboratory could not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Bad input: one line, exit code 2.
    #[error("{0}")]
    Usage(String),
    /// A program that Debian packages is not installed.
    #[error("{program} is missing: apt-get install {package}")]
    Missing {
        /// The program.
        program: String,
        /// Debian's package that has it.
        package: String,
    },
    /// A program ran and failed.
    #[error("`{line}` failed ({status}){}", tail(.output))]
    Failed {
        /// The command line.
        line: String,
        /// How it ended.
        status: String,
        /// The last lines of what it said.
        output: String,
    },
    /// The operating system refused.
    #[error("cannot {doing} {}: {source}", .path.display())]
    File {
        /// The verb: read, write, create.
        doing: &'static str,
        /// What it was about.
        path: PathBuf,
        /// The system's word.
        source: std::io::Error,
    },
    /// Not enough room for what is about to be made.
    #[error(
        "{} has {free_mib} MiB free and this needs {need_mib} MiB: free some, or set XDG_CACHE_HOME to a larger disk",
        .path.display()
    )]
    DiskFull {
        /// The cache.
        path: PathBuf,
        /// What is free.
        free_mib: u64,
        /// What is needed.
        need_mib: u64,
    },
    /// A package or a suite cannot be had.
    #[error("{0}")]
    Package(String),
    /// An emulated host did not do its job.
    #[error("{what}; the end of its serial log ({}):\n{tail}", .log.display())]
    Host {
        /// What happened.
        what: String,
        /// The whole log.
        log: PathBuf,
        /// Its last lines.
        tail: String,
        /// True where the time limit ended it.
        timed_out: bool,
    },
    /// A kernel series does not do what its directory promises.
    #[error("{0}")]
    Series(String),
    /// A signal asked to stop, and everything was put back.
    #[error("stopped by signal {0}")]
    Interrupted(i32),
    /// A figure cannot be trusted.
    #[error("{0}")]
    Refused(String),
}

impl Error {
    /// The exit code that this error ends the laboratory with; the same meanings as `vellum`'s own.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Usage(_) => 2,
            Error::Host { timed_out: true, .. } => 124,
            Error::Interrupted(signal) => u8::try_from(128 + signal).unwrap_or(1),
            _ => 1,
        }
    }

    /// For `map_err` on file operations.
    pub fn file(doing: &'static str, path: impl AsRef<Path>) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Error::File { doing, path: path.as_ref().to_owned(), source }
    }
}

fn tail(output: &str) -> String {
    if output.trim().is_empty() { String::new() } else { format!(":\n{}", output.trim_end()) }
}
