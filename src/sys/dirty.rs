//! KVM's dirty log: the ioctls that kvm-ioctls lacks or that allocate there, and the dirty ring's
//! shared memory.
//!
//! KVM's logs count in host pages. This module converts them to pages of [`PAGE_SIZE`]. A host page
//! has [`in_one`] of these, and they are all dirty or all clean. The trackers (`dirty/`) decide
//! what to call when.

use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use kvm_bindings::{
    KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE, KVM_CAP_ARM_SUPPORTED_BLOCK_SIZES, KVM_CAP_DIRTY_LOG_RING,
    KVM_CAP_DIRTY_LOG_RING_ACQ_REL, KVM_CAP_DIRTY_LOG_RING_WITH_BITMAP, KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2,
    KVM_DIRTY_LOG_PAGE_OFFSET, kvm_clear_dirty_log, kvm_dirty_gfn, kvm_dirty_log, kvm_enable_cap,
};
use kvm_ioctls::{VcpuFd, VmFd};
use vmm_sys_util::ioctl::{ioctl, ioctl_with_mut_ref, ioctl_with_ref};

use super::kick::Alarm;
use super::mmap::{PAGE_SIZE, host_page};
use super::signal;
use numbers::*;

#[allow(
    missing_docs,
    reason = "the macros make functions that cannot be documented; include/uapi/linux/kvm.h does it"
)]
mod numbers {
    use kvm_bindings::{KVMIO, kvm_clear_dirty_log, kvm_dirty_log};
    use vmm_sys_util::{ioctl_io_nr, ioctl_iow_nr, ioctl_iowr_nr};

    ioctl_iow_nr!(KVM_GET_DIRTY_LOG, KVMIO, 0x42, kvm_dirty_log);
    ioctl_iowr_nr!(KVM_CLEAR_DIRTY_LOG, KVMIO, 0xc0, kvm_clear_dirty_log);
    ioctl_io_nr!(KVM_RESET_DIRTY_RINGS, KVMIO, 0xc7);
}

fn result(value: libc::c_int) -> io::Result<u32> {
    u32::try_from(value).map_err(|_| io::Error::last_os_error())
}

/// The bits of `KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE` and `KVM_DIRTY_LOG_INITIALLY_SET` that this
/// KVM supports; 0 for none.
pub fn manual_protect_bits(vm: &VmFd) -> u32 {
    vm.check_extension_raw(KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2.into()).max(0) as u32
}

/// Sets manual protection to `bits`; 0 turns it off.
pub fn set_manual_protect(vm: &VmFd, bits: u32) -> io::Result<()> {
    enable(vm, KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, bits)
}

fn enable(vm: &VmFd, cap: u32, argument: u32) -> io::Result<()> {
    let cap = kvm_enable_cap { cap, args: [argument.into(), 0, 0, 0], ..Default::default() };
    vm.enable_cap(&cap).map_err(|error| io::Error::from_raw_os_error(error.errno()))
}

/// The block sizes that Arm's KVM can split at a time, ORed together; 0 if they cannot be
/// configured.
pub fn block_sizes(vm: &VmFd) -> u64 {
    if vm.check_extension_raw(KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE.into()) < 0 {
        return 0;
    }
    // The extension returns an int whose bits are sizes up to 1 GiB (arch/arm64/kvm/arm.c).
    u64::from(vm.check_extension_raw(KVM_CAP_ARM_SUPPORTED_BLOCK_SIZES.into()).max(0).cast_unsigned())
}

/// Makes Arm's KVM split `bytes` bytes at a time as soon as they are logged. The VM must not have
/// memslots yet.
pub fn set_eager_split(vm: &VmFd, bytes: u64) -> io::Result<()> {
    let args = [bytes, 0, 0, 0];
    let cap = kvm_enable_cap { cap: KVM_CAP_ARM_EAGER_SPLIT_CHUNK_SIZE, args, ..Default::default() };
    vm.enable_cap(&cap).map_err(|error| io::Error::from_raw_os_error(error.errno()))
}

/// The number of pages of [`PAGE_SIZE`] in a host page: a power of two that divides 64.
pub fn in_one() -> u64 {
    (host_page() / PAGE_SIZE).min(64)
}

/// Expands each bit of `words`, one per host page, to `each` bits.
fn spread(words: &mut [u64], each: u64) {
    if each == 1 {
        return;
    }
    let held = 64 / each;
    // Backwards, because a word takes its bits from itself or from an earlier word.
    for index in (0..words.len()).rev() {
        let first = index as u64 * held;
        let bits = words[(first / 64) as usize] >> (first % 64);
        let dirty = (0..held).filter(|bit| bits >> bit & 1 == 1);
        words[index] = dirty.fold(0, |word, bit| word | u64::MAX >> (64 - each) << (bit * each));
    }
}

/// The inverse of `spread`: one bit per host page, set if any of its `each` bits in `words` is set.
/// `words` has at most `each` words.
fn gather(words: &[u64], each: u64) -> u64 {
    let held = 64 / each;
    let any = |word: u64, bit: u64| u64::from(word >> (bit * each) & (u64::MAX >> (64 - each)) != 0);
    let of_word = |word: u64| (0..held).fold(0, |bits, bit| bits | any(word, bit) << bit);
    words.iter().zip(0..).fold(0, |bits, (word, nth)| bits | of_word(*word) << (nth * held))
}

/// Copies the dirty bitmap of slot `id` into `words`, one bit per page. Unless protection is
/// manual, this also clears the log and protects the pages at once.
///
/// # Safety
///
/// KVM writes a word for each 64 host pages of the slot. `words` must have a bit for each page of
/// the slot as KVM has it.
pub unsafe fn get_log(vm: &VmFd, id: u32, words: &mut [u64]) -> io::Result<()> {
    let mut log = kvm_dirty_log { slot: id, ..Default::default() };
    log.__bindgen_anon_1.dirty_bitmap = words.as_mut_ptr().cast();
    // SAFETY: the kernel writes only to `words`, which is long enough (the caller's promise).
    result(unsafe { ioctl_with_ref(vm, KVM_GET_DIRTY_LOG(), &log) })?;
    spread(words, in_one());
    Ok(())
}

/// Clears and protects the pages whose bits are set in `words`. The range is the `pages` pages from
/// `first` on, and bit 0 is `first`.
///
/// `first` is a multiple of 64 host pages. `pages` is too, or reaches the slot's end.
pub fn clear_log(vm: &VmFd, id: u32, first: u64, pages: u32, words: &[u64]) -> io::Result<()> {
    let each = in_one();
    let Some(words) = words.get(..pages.div_ceil(64) as usize) else {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    };
    if each == 1 {
        return clear_of_host(vm, id, first, pages, words);
    }
    let (mut at, end) = (first / each, (first + u64::from(pages)).div_ceil(each));
    let mut gathered = [0; GATHERED];
    for part in words.chunks(GATHERED * each as usize) {
        let held = part
            .chunks(each as usize)
            .zip(&mut gathered)
            .map(|(words, to)| *to = gather(words, each))
            .count();
        let count = (end - at).min(64 * held as u64);
        clear_of_host(vm, id, at, count as u32, &gathered[..held])?;
        at += count;
    }
    Ok(())
}

/// Words of host-page bits that one call clears, if host pages are not [`PAGE_SIZE`].
const GATHERED: usize = 128;

/// Like `clear_log`, in host pages.
fn clear_of_host(vm: &VmFd, id: u32, first: u64, pages: u32, words: &[u64]) -> io::Result<()> {
    if words.len() < pages.div_ceil(64) as usize {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    let mut log = kvm_clear_dirty_log { slot: id, first_page: first, num_pages: pages, ..Default::default() };
    log.__bindgen_anon_1.dirty_bitmap = words.as_ptr().cast_mut().cast();
    // SAFETY: the kernel only reads the bitmap. It has one bit for each of `pages`, which `words`
    // holds (checked above).
    result(unsafe { ioctl_with_mut_ref(vm, KVM_CLEAR_DIRTY_LOG(), &mut log) }).map(drop)
}

/// Protects the pages of all harvested ring entries again and frees the entries. Returns the number
/// of entries.
///
/// Signals are blocked meanwhile. If one is pending, kvm_dirty_ring_reset() (virt/kvm/dirty_ring.c,
/// Linux 6.17 to at least 7.3) returns between two entries. It then frees the entries gathered so
/// far without protecting their pages, and the guest's next write to such a page is in no ring.
pub fn reset_rings(vm: &VmFd) -> io::Result<u32> {
    let _blocked = signal::Blocked::all();
    // SAFETY: the call has no argument.
    result(unsafe { ioctl(vm, KVM_RESET_DIRTY_RINGS()) })
}

/// Like [`reset_rings`], but a signal arrives after `delay` and is not blocked. This tests what KVM
/// does then. Returns 0 if the signal arrives before the first entry.
pub fn reset_rings_interrupted(vm: &VmFd, delay: Duration) -> io::Result<u32> {
    let alarm = Alarm::new()?;
    alarm.set(delay)?;
    // SAFETY: the call has no argument.
    match result(unsafe { ioctl(vm, KVM_RESET_DIRTY_RINGS()) }) {
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(0),
        other => other,
    }
}

/// The largest dirty ring, in entries, that this KVM offers; `None` if it offers none.
pub fn ring_entries(vm: &VmFd) -> Option<u32> {
    let offered =
        |cap: u32| u32::try_from(vm.check_extension_raw(cap.into())).ok().filter(|&bytes| bytes > 0);
    let bytes = offered(KVM_CAP_DIRTY_LOG_RING_ACQ_REL).or_else(|| offered(KVM_CAP_DIRTY_LOG_RING))?;
    Some(bytes / size_of::<kvm_dirty_gfn>() as u32)
}

/// Gives each future vCPU a dirty ring of `entries` (a power of two). The VM must not have vCPUs or
/// memslots yet. Returns whether KVM also keeps a bitmap, for writes that no vCPU makes.
pub fn enable_ring(vm: &VmFd, entries: u32) -> io::Result<bool> {
    let bytes = entries.saturating_mul(size_of::<kvm_dirty_gfn>() as u32);
    // The first capability promises acquire and release where the architecture needs them. On x86
    // both behave alike.
    enable(vm, KVM_CAP_DIRTY_LOG_RING_ACQ_REL, bytes)
        .or_else(|_| enable(vm, KVM_CAP_DIRTY_LOG_RING, bytes))?;
    let bitmap = vm.check_extension_raw(KVM_CAP_DIRTY_LOG_RING_WITH_BITMAP.into()) > 0;
    if bitmap {
        enable(vm, KVM_CAP_DIRTY_LOG_RING_WITH_BITMAP, 0)?;
    }
    Ok(bitmap)
}

/// Flags of an entry (`include/uapi/linux/kvm.h`, whose macros bindgen cannot follow). KVM sets
/// DIRTY, Vellum sets HARVESTED.
const DIRTY: u32 = 1 << 0;
const HARVESTED: u32 = 1 << 1;

/// The dirty ring of one vCPU.
#[derive(Debug)]
pub struct Ring {
    entries: NonNull<kvm_dirty_gfn>,
    len: u32,
    next: u32,
}

// SAFETY: the mapping belongs to the process and is only accessed as atomics.
unsafe impl Send for Ring {}

impl Ring {
    /// Maps the ring of `vcpu`. `len` is the number of entries given to [`enable_ring`].
    pub fn map(vcpu: &VcpuFd, len: u32) -> io::Result<Self> {
        if !len.is_power_of_two() {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let bytes = len as usize * size_of::<kvm_dirty_gfn>();
        // SAFETY: a new mapping at an address that the kernel chooses disturbs nothing.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                vcpu.as_raw_fd(),
                (u64::from(KVM_DIRTY_LOG_PAGE_OFFSET) * host_page()) as libc::off_t,
            )
        };
        match NonNull::new(address) {
            Some(entries) if address != libc::MAP_FAILED => {
                Ok(Self { entries: entries.cast(), len, next: 0 })
            }
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Calls `page` with each dirty page `(slot, page in the slot)`, in pages of [`PAGE_SIZE`], and
    /// marks its entry as harvested. Returns the number of entries. Bits 16 and up of the slot are
    /// the address space.
    pub fn harvest(&mut self, mut page: impl FnMut(u32, u64)) -> u32 {
        let (mut count, each) = (0, in_one());
        // At most one round, so that a vCPU that dirties pages faster than this loop cannot keep it
        // running.
        while count < self.len {
            // SAFETY: the length is a power of two (`Ring::map`), so the masked index lies inside
            // the mapping.
            let entry = unsafe { self.entries.as_ptr().add((self.next & (self.len - 1)) as usize) };
            // SAFETY: an aligned word inside the mapping. This process and the kernel access it as
            // an atomic.
            let flags = unsafe { AtomicU32::from_ptr(&raw mut (*entry).flags) };
            if flags.load(Ordering::Acquire) & (DIRTY | HARVESTED) != DIRTY {
                break;
            }
            // SAFETY: as above. KVM writes both before it sets DIRTY (the acquire above), and not
            // again until the entry is reset.
            let (slot, offset) = unsafe {
                (AtomicU32::from_ptr(&raw mut (*entry).slot), AtomicU64::from_ptr(&raw mut (*entry).offset))
            };
            let (slot, first) =
                (slot.load(Ordering::Relaxed), offset.load(Ordering::Relaxed).saturating_mul(each));
            (0..each).for_each(|nth| page(slot, first.saturating_add(nth)));
            flags.store(HARVESTED, Ordering::Release);
            self.next = self.next.wrapping_add(1);
            count += 1;
        }
        count
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and no reference into it outlives `harvest`.
        unsafe { libc::munmap(self.entries.as_ptr().cast(), self.len as usize * size_of::<kvm_dirty_gfn>()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_of_larger_pages_are_bits_of_all_their_pages() {
        for each in [1, 4, 16] {
            let pages = [0, 1, 5, 16, 17, 63, 64, 100, 127];
            let mut words = vec![0u64; 2 * each as usize];
            pages.iter().for_each(|page| words[page / 64] |= 1 << (page % 64));
            spread(&mut words, each);
            for page in 0..128 * each {
                let dirty = words[(page / 64) as usize] >> (page % 64) & 1 == 1;
                assert_eq!(dirty, pages.contains(&((page / each) as usize)), "{page} of {each} in one");
            }
            let back: Vec<u64> = words.chunks(each as usize).map(|words| gather(words, each)).collect();
            let host = |word: usize| {
                pages.iter().filter(|page| *page / 64 == word).fold(0, |bits, page| bits | 1 << (page % 64))
            };
            assert_eq!(back, [host(0), host(1)], "{each} in one");
            // One bit of a page is enough.
            assert_eq!(gather(&[1 << 63], each), 1 << (64 / each - 1));
        }
    }
}
