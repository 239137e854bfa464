//! The laboratory's errors. Every message names the thing and the remedy.

use std::path::{Path, PathBuf};

/// The laboratory's result.
pub type Result<T> = std::result::Result<T, Error>;

/// Why the laboratory failed.
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
        /// The Debian package that has it.
        package: String,
    },
    /// A program ran and failed.
    #[error("`{line}` failed ({status}){}", tail(.output))]
    Failed {
        /// The command line.
        line: String,
        /// Its exit status.
        status: String,
        /// The last lines of its output.
        output: String,
    },
    /// The operating system refused.
    #[error("cannot {doing} {}: {source}", .path.display())]
    File {
        /// The verb: read, write, create.
        doing: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The disk has too little free space.
    #[error(
        "{} has {free_mib} MiB free and this needs {need_mib} MiB: free some, or set XDG_CACHE_HOME to a larger disk",
        .path.display()
    )]
    DiskFull {
        /// The cache.
        path: PathBuf,
        /// Free space.
        free_mib: u64,
        /// Needed space.
        need_mib: u64,
    },
    /// A package or suite is not available.
    #[error("{0}")]
    Package(String),
    /// An emulated host failed.
    #[error("{what}; the end of its serial log ({}):\n{tail}", .log.display())]
    Host {
        /// What happened.
        what: String,
        /// The whole log.
        log: PathBuf,
        /// Its last lines.
        tail: String,
        /// Whether the time limit ended it.
        timed_out: bool,
    },
    /// A kernel series does not do what its directory says.
    #[error("{0}")]
    Series(String),
    /// A signal stopped the run, and everything was restored.
    #[error("stopped by signal {0}")]
    Interrupted(i32),
    /// A figure is not trustworthy.
    #[error("{0}")]
    Refused(String),
}

impl Error {
    /// The laboratory's exit code for this error. The codes mean the same as `vellum`'s.
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
