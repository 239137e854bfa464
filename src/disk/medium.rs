//! Syncing a file to its medium.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicI32, Ordering};

/// Syncs one file, and remembers a failure. Linux tells of pages that could not be written back once
/// for each open file, and then takes them for clean (errseq_t, Documentation/core-api/errseq.rst):
/// the next fdatasync(2) succeeds, and the data is lost. So after a failure each sync fails, and all
/// who sync a file share one of these.
#[derive(Debug, Default)]
pub struct Medium {
    /// The errno of the first failure, or 0.
    failure: AtomicI32,
}

impl Medium {
    /// Syncs what was written to `file` (fdatasync(2)).
    ///
    /// # Errors
    /// The first that there was.
    pub(crate) fn sync(&self, file: &File) -> io::Result<()> {
        self.remember(|| file.sync_data())
    }

    /// The same, with the file's times (fsync(2)).
    ///
    /// # Errors
    /// The first that there was.
    pub(crate) fn sync_all(&self, file: &File) -> io::Result<()> {
        self.remember(|| file.sync_all())
    }

    /// From now on each sync fails with `error`.
    pub(crate) fn fail(&self, error: &io::Error) {
        self.failure.store(error.raw_os_error().unwrap_or(libc::EIO), Ordering::Relaxed);
        tracing::error!(
            "a disk: the host could not write all of it: {error}; each flush fails from now on, until the machine is started anew"
        );
    }

    /// Whether some of what was written is lost.
    pub(crate) fn has_failed(&self) -> bool {
        self.failure.load(Ordering::Relaxed) != 0
    }

    fn remember(&self, sync: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let before = self.failure.load(Ordering::Relaxed);
        if before != 0 {
            return Err(io::Error::from_raw_os_error(before));
        }
        sync().inspect_err(|error| self.fail(error))
    }

    /// In tests, a medium that has failed.
    #[cfg(test)]
    pub(crate) fn failed() -> Self {
        Self { failure: AtomicI32::new(libc::EIO) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_failure_each_sync_fails() {
        let medium = Medium::default();
        assert!(medium.remember(|| Ok(())).is_ok());
        let failure = || io::Error::from_raw_os_error(libc::ENOSPC);
        assert_eq!(medium.remember(|| Err(failure())).unwrap_err().raw_os_error(), Some(libc::ENOSPC));
        // The kernel has told of it, and now says that all is written.
        assert_eq!(medium.remember(|| Ok(())).unwrap_err().raw_os_error(), Some(libc::ENOSPC));
        assert!(medium.sync(&File::open("/dev/null").unwrap()).is_err());
    }
}
