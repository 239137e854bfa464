//! The commit flag of a migration on one host: a word in shared memory. The first to change it
//! decides who has the guest. The other side can see the decision even if the link drops or a
//! process dies.
//!
//! | word | who stores it, and what it means |
//! |---|---|
//! | open | the source has the guest |
//! | committed | the source, before it sends COMMIT: the target may run the guest |
//! | ran | the target, before a vCPU enters the guest: the target keeps it |
//! | withdrawn | either, if the target has not run the guest: it never will |
//!
//! The word lies in a memfd that is sealed against shrinking (memfd_create(2)), so neither side can
//! make the other fault. The client creates the file, because the machine opens nothing. The source
//! passes it to the target with HELLO. It does not pass through a relay or a network. The target
//! says in WELCOME whether it has the flag.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use vellum_sys::mmap::{Mapping, PAGE_SIZE, Source, sealed_memfd, seals_hold};

/// The decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ownership {
    /// No decision yet: the source has the guest.
    Open,
    /// The target may run the guest.
    Committed,
    /// The target has the guest.
    Ran,
    /// The target never runs the guest.
    Withdrawn,
}

impl Ownership {
    const ALL: [Self; 4] = [Self::Open, Self::Committed, Self::Ran, Self::Withdrawn];
}

/// One side's mapping of the word.
#[derive(Debug)]
pub struct CommitFlag {
    file: File,
    mapping: Mapping,
}

impl CommitFlag {
    /// Creates the file of a new flag, for [`CommitFlag::new`].
    ///
    /// # Errors
    /// The kernel does not support sealed memfds.
    pub fn file() -> io::Result<File> {
        sealed_memfd(c"vellum-fence", PAGE_SIZE, None)
    }

    /// The flag in this file, which another process may have created.
    ///
    /// # Errors
    /// The file is not sealed against shrinking or has the wrong size, or it cannot be mapped.
    pub fn new(file: OwnedFd) -> io::Result<Self> {
        let file = File::from(file);
        if !seals_hold(&file)? || file.metadata()?.len() != PAGE_SIZE {
            return Err(io::Error::other("it is no sealed file of a page"));
        }
        let mapping = Mapping::new(PAGE_SIZE, PAGE_SIZE, Source::Shared(&file))?;
        Ok(Self { file, mapping })
    }

    /// The file, to be passed on.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn word(&self) -> &AtomicU64 {
        &self.mapping.words()[0]
    }

    /// Stores `to` if the word is `from`. Returns the resulting value.
    pub fn step(&self, from: Ownership, to: Ownership) -> Ownership {
        let stored = self.word().compare_exchange(from as u64, to as u64, Ordering::SeqCst, Ordering::SeqCst);
        match stored {
            Ok(_) => to,
            // An unknown word was not written by a Vellum. It counts as open, so nothing runs
            // because of it.
            Err(word) => {
                Ownership::ALL.into_iter().find(|known| *known as u64 == word).unwrap_or(Ownership::Open)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_decides_and_both_see_it() {
        let file = CommitFlag::file().unwrap();
        let [here, there] = [(); 2].map(|()| CommitFlag::new(file.try_clone().unwrap().into()).unwrap());
        assert_eq!(there.step(Ownership::Committed, Ownership::Ran), Ownership::Open);
        assert_eq!(here.step(Ownership::Open, Ownership::Committed), Ownership::Committed);
        assert_eq!(there.step(Ownership::Open, Ownership::Withdrawn), Ownership::Committed);
        let first = std::thread::scope(|scope| {
            let ran = scope.spawn(|| there.step(Ownership::Committed, Ownership::Ran));
            let withdrawn = here.step(Ownership::Committed, Ownership::Withdrawn);
            [ran.join().unwrap(), withdrawn]
        });
        assert!(first[0] == first[1] && first[0] != Ownership::Committed, "{first:?}");
    }

    #[test]
    fn a_file_that_could_shrink_is_none() {
        let plain = vellum_sys::mmap::memfd(c"vellum-test", PAGE_SIZE, None).unwrap();
        assert!(CommitFlag::new(plain.into()).is_err());
        let long = sealed_memfd(c"vellum-test", 2 * PAGE_SIZE, None).unwrap();
        assert!(CommitFlag::new(long.into()).is_err());
        assert!(CommitFlag::new(File::open("/dev/null").unwrap().into()).is_err());
        assert!(CommitFlag::file().unwrap().set_len(0).is_err());
    }
}
