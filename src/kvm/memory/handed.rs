//! Memory that another process on this host has created and hands over: a memfd that both processes
//! map. Nothing is copied.
//!
//! A process checks a foreign file before it maps it. If the file could shrink, an access would end
//! the process with SIGBUS.

use std::fs::File;
use std::sync::Arc;

use super::plan::Space;
use super::{Backing, Error, Memory, MemoryConfig, Slot, advise};
use vellum_sys::mmap::{Mapping, Source, huge_pages_of, seals_hold};

impl Backing {
    /// Whether such memory has a file that can be passed to another process.
    pub fn can_be_handed_over(self) -> bool {
        matches!(self, Self::Memfd | Self::SharedHugetlb(_))
    }

    /// The backing of memory that was handed over as `file`.
    ///
    /// # Errors
    /// It is not a memfd, or it could shrink.
    pub fn of_handed(file: &File) -> Result<Self, Error> {
        let unfit = |what: String| Error::Handed(what);
        match seals_hold(file) {
            Ok(true) => {}
            Ok(false) => return Err(unfit("could become shorter: it is not sealed".into())),
            Err(error) => return Err(unfit(format!("is no file in memory: {error}"))),
        }
        let huge = huge_pages_of(file).map_err(|error| unfit(error.to_string()))?;
        Ok(huge.map_or(Self::Memfd, Self::SharedHugetlb))
    }
}

impl Memory {
    /// RAM at `space` in `file`, with its current contents. `config` is as for [`Memory::map`],
    /// except that [`Backing::of_handed`] determines the backing.
    ///
    /// # Errors
    /// The file could shrink or has another size, and as [`Memory::map`].
    pub fn adopt(space: Space, config: MemoryConfig, file: File) -> Result<Self, Error> {
        let backing = Backing::of_handed(&file)?;
        Self::of_file(space, config, backing, file, |file| Source::Shared(file))
    }

    /// The same, with this backing, mapped as `source` says.
    pub(super) fn of_file(
        space: Space,
        config: MemoryConfig,
        backing: Backing,
        file: File,
        source: impl FnOnce(&File) -> Source<'_>,
    ) -> Result<Self, Error> {
        let size = config.size;
        let len = file.metadata().map_err(|error| Error::Handed(error.to_string()))?.len();
        if len != size {
            return Err(Error::Handed(format!("has {len} bytes, and the machine {size}")));
        }
        let most = space.most();
        if size > most {
            return Err(Error::TooLarge { size, most });
        }
        if !size.is_multiple_of(backing.page_size()) {
            return Err(Error::Unaligned { size, backing });
        }
        let mapping = Mapping::new(size, backing.alignment(), source(&file))
            .and_then(|mapping| advise(&mapping, backing).map(|()| mapping))
            .map_err(|source| Error::Map { size, backing, source })?;
        Self::lay(space, MemoryConfig { backing, ..config }, mapping, Some(file))
    }

    /// Whether `slot` is a part of this RAM, and not of the machine's other memory.
    pub fn holds(&self, slot: &Slot) -> bool {
        Arc::ptr_eq(slot.mapping(), &self.mapping)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use vellum_sys::mmap::{PAGE_SIZE, memfd, sealed_memfd};

    const SIZE: u64 = 4 << 20;
    const SPACE: Space = Space(&[0..1 << 21, 1 << 30..1 << 40]);

    #[test]
    fn both_see_the_same_memory_and_neither_can_shorten_it() {
        let config = MemoryConfig { backing: Backing::Memfd, ..MemoryConfig::new(SIZE) };
        let made = Memory::map(SPACE, config).unwrap();
        let file = made.shared_file().unwrap();
        assert!(file.set_len(PAGE_SIZE).is_err() && file.set_len(2 * SIZE).is_err());
        made.mapping.words()[700].store(5, Ordering::Relaxed);
        // The file determines the backing.
        let handed = Memory::adopt(SPACE, MemoryConfig::new(SIZE), file.try_clone().unwrap()).unwrap();
        assert_eq!((handed.config.backing, handed.slots().len()), (Backing::Memfd, made.slots().len()));
        assert_eq!(handed.mapping.words()[700].load(Ordering::Relaxed), 5);
        handed.mapping.words()[701].store(6, Ordering::Relaxed);
        assert_eq!(made.mapping.words()[701].load(Ordering::Relaxed), 6);
        assert!(handed.slots().iter().all(|slot| handed.holds(slot) && !made.holds(slot)));
    }

    #[test]
    fn what_is_no_machine_s_memory_is_refused() {
        let says = |file: File, size: u64| {
            Memory::adopt(SPACE, MemoryConfig::new(size), file).expect_err("it is none").to_string()
        };
        assert!(says(memfd(c"vellum-test", SIZE, None).unwrap(), SIZE).contains("not sealed"));
        let sealed = || sealed_memfd(c"vellum-test", SIZE, None).unwrap();
        assert!(says(sealed(), 2 * SIZE).contains("has 4194304 bytes, and the machine 8388608"));
        assert!(says(sealed(), SIZE / 2).contains("and the machine 2097152"));
        assert!(says(File::open("/dev/null").unwrap(), SIZE).contains("no file in memory"));
    }
}
