//! The fence of a migration on one host: a word in memory that both processes have. Who changes it first decides what becomes of the
//! guest, and the other can see it, whatever becomes of the link or of the one who did it.
//!
//! | word | who stores it, and what it means |
//! |---|---|
//! | open | the source has the guest |
//! | committed | the source, before it says COMMIT: the target may run it |
//! | ran | the target, before a vCPU enters the guest: it is the target's for good |
//! | withdrawn | either, where the target has not run it: it never will |
//!
//! The word lies in a file in memory that is sealed against shrinking (memfd_create(2)): neither can make the other fault. The client
//! makes it, for the machine opens nothing, and the source hands it to the target with HELLO. Through a relay or a network it does not
//! come; the target says in WELCOME whether it has it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use vellum_sys::mmap::{Mapping, PAGE_SIZE, Source, sealed_memfd, seals_hold};

/// What has been decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ownership {
    /// Nothing yet: the source has the guest.
    Open,
    /// The target may run it.
    Committed,
    /// It is the target's.
    Ran,
    /// The target never runs it.
    Withdrawn,
}

impl Ownership {
    const ALL: [Self; 4] = [Self::Open, Self::Committed, Self::Ran, Self::Withdrawn];
}

/// The word, as one of both sides has it.
#[derive(Debug)]
pub struct CommitFlag {
    file: File,
    mapping: Mapping,
}

impl CommitFlag {
    /// A new one's file, for [`CommitFlag::new`].
    ///
    /// # Errors
    /// Where the kernel has no such files.
    pub fn file() -> io::Result<File> {
        sealed_memfd(c"vellum-fence", PAGE_SIZE, None)
    }

    /// The one in this file, which somebody else may have made.
    ///
    /// # Errors
    /// Where it is none: it could become shorter, or has not the size of one.
    pub fn new(file: OwnedFd) -> io::Result<Self> {
        let file = File::from(file);
        if !seals_hold(&file)? || file.metadata()?.len() != PAGE_SIZE {
            return Err(io::Error::other("it is no sealed file of a page"));
        }
        let mapping = Mapping::new(PAGE_SIZE, PAGE_SIZE, Source::Shared(&file))?;
        Ok(Self { file, mapping })
    }

    /// Its file, to be handed on.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn word(&self) -> &AtomicU64 {
        &self.mapping.words()[0]
    }

    /// Stores `to` where the word is `from`; what it is then.
    pub fn step(&self, from: Ownership, to: Ownership) -> Ownership {
        let stored = self.word().compare_exchange(from as u64, to as u64, Ordering::SeqCst, Ordering::SeqCst);
        match stored {
            Ok(_) => to,
            // What is none of the words was not written by a Vellum: nobody runs anything on account of it.
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
