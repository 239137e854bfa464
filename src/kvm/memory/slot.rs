//! Memslots in this program: a part of a mapping, and where the guest sees it.

use std::ops::Range;
use std::sync::Arc;

use super::Error;
use vellum_sys::mmap::{Mapping, PAGE_SIZE, host_page};

/// One memslot.
///
/// KVM accesses the host memory of a slot for as long as the slot is registered. A `Slot` is
/// therefore always a part of a mapping, which it keeps mapped. Only [`Slot::new`] creates one:
///
/// ```compile_fail,E0451
/// # use vellum_kvm::memory::{Memory, MemoryConfig, Slot};
/// # let memory = Memory::map(vellum_kvm::memory::plan::Space(&[0..1 << 30]), MemoryConfig::new(1 << 20)).unwrap();
/// let forged = Slot { len: 1 << 40, ..memory.slots()[0].clone() };
/// ```
#[derive(Clone, Debug)]
pub struct Slot {
    id: u32,
    gpa: u64,
    offset: u64,
    len: u64,
    mapping: Arc<Mapping>,
}

/// The maximum number of a slot. KVM interprets the bits above as the address space.
const MAX_ID: u32 = 0xffff;

impl Slot {
    /// The bytes `range` of `mapping` as memslot `id` at the guest physical address `gpa`.
    ///
    /// # Errors
    /// The range is empty or not inside the mapping, `id` is too large, an address or the range is
    /// not aligned to the host's page size, or the addresses wrap around.
    pub fn new(id: u32, gpa: u64, mapping: &Arc<Mapping>, range: Range<u64>) -> Result<Self, Error> {
        let refused = |what| Err(Error::Slot { id, what });
        let Range { start, end } = range;
        if id > MAX_ID {
            return refused("its number does not fit into 16 bits");
        }
        if start >= end || end > mapping.len() {
            return refused("it is not inside its mapping");
        }
        if ![gpa, start, end].into_iter().all(|at| at.is_multiple_of(host_page())) {
            return refused("it does not begin and end at a page");
        }
        let len = end - start;
        if gpa.checked_add(len).is_none() {
            return refused("it wraps around the guest-physical address space");
        }
        Ok(Self { id, gpa, offset: start, len, mapping: mapping.clone() })
    }

    /// The same memory as another slot at another address, or this slot moved.
    ///
    /// # Errors
    /// As [`Slot::new`].
    pub fn at(&self, id: u32, gpa: u64) -> Result<Self, Error> {
        Self::new(id, gpa, &self.mapping, self.range())
    }

    /// Whether `other` is the same memory at the same address with the same number.
    pub fn is(&self, other: &Self) -> bool {
        let Self { id, gpa, offset, len, mapping } = self;
        (*id, *gpa, *offset, *len) == (other.id, other.gpa, other.offset, other.len)
            && Arc::ptr_eq(mapping, &other.mapping)
    }

    /// KVM's number for it.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Its guest physical address.
    pub fn gpa(&self) -> u64 {
        self.gpa
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.len
    }

    /// Its size in pages of [`PAGE_SIZE`].
    pub fn pages(&self) -> u64 {
        self.len / PAGE_SIZE
    }

    /// The number of words in its bitmap, with a bit per page: as many as in KVM's own
    /// (`kvm_dirty_bitmap_bytes`, include/linux/kvm_host.h), or more if the host's pages are
    /// larger.
    pub fn bitmap_words(&self) -> usize {
        self.pages().div_ceil(64) as usize
    }

    /// The offset of its start in its mapping.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The bytes of its mapping that it covers.
    pub fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.len
    }

    /// Its host virtual address.
    pub fn hva(&self) -> u64 {
        self.mapping.as_ptr() as u64 + self.offset
    }

    /// The mapping that it is a part of.
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vellum_sys::mmap::Source;

    #[test]
    fn a_slot_is_inside_its_mapping_and_keeps_it() {
        let mapping = Arc::new(Mapping::new(4 * PAGE_SIZE, PAGE_SIZE, Source::Anonymous).unwrap());
        let page = PAGE_SIZE;
        let made = |id, gpa, range: Range<u64>| Slot::new(id, gpa, &mapping, range).is_ok();
        assert!(made(0, 0, 0..4 * page));
        for (id, gpa, range) in [
            (0, 0, 0..5 * page),
            (0, 0, 4 * page..5 * page),
            (0, 0, page..page),
            (0, 0, 2 * page..page),
            (0, 0, 8..page),
            (0, 0, 0..page + 8),
            (0, 8, 0..page),
            (0, u64::MAX - page + 1, 0..2 * page),
            (0x1_0000, 0, 0..page),
        ] {
            assert!(!made(id, gpa, range.clone()), "memslot {id} at {gpa:#x} of {range:?}");
        }
        let slot = Slot::new(3, 0, &mapping, page..3 * page).unwrap();
        let alias = slot.at(4, 1 << 32).unwrap();
        assert_eq!((alias.id(), alias.gpa(), alias.hva(), alias.pages()), (4, 1 << 32, slot.hva(), 2));
        let again = Slot::new(3, 0, &mapping, page..3 * page).unwrap();
        assert!(slot.is(&again) && !slot.is(&alias) && !slot.is(&slot.at(3, page).unwrap()));
        let base = mapping.as_ptr() as u64;
        drop((mapping, slot, again));
        assert_eq!(alias.mapping().as_ptr() as u64, base);
        assert_eq!(Arc::strong_count(alias.mapping()), 1);
    }

    #[test]
    fn a_bitmap_has_a_bit_for_each_page() {
        let mapping = Arc::new(Mapping::new(130 * PAGE_SIZE, PAGE_SIZE, Source::Anonymous).unwrap());
        let words = |pages: u64| Slot::new(0, 0, &mapping, 0..pages * PAGE_SIZE).unwrap().bitmap_words();
        assert_eq!([1, 64, 65, 128, 129].map(words), [1, 1, 2, 2, 3]);
    }
}
