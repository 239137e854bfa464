//! Guest memory that is incomplete while its guest runs: which pages are missing, and how arriving
//! pages are placed. The thread of [`fetching`](super::fetching) resolves faults. The thread that
//! reads a page places it.
//!
//! Memory is counted in units, the pages of its backing. A unit has one or more pages. The kernel
//! places a huge page of a pool only as a whole, so its parts are gathered until all have arrived.
//! Present pages are never overwritten. A page may arrive twice, on two connections, and the guest
//! may have written to it before the second arrival.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use vmm_sys_util::eventfd::EventFd;

use super::bits::Bits;
use super::message::Waited;
use vellum_sys::mmap::{Mapping, PAGE_SIZE, host_page};
use vellum_sys::plant::{self, Mistake};
use vellum_sys::uffd::{Mode, Uffd};

/// The maximum number of waits whose durations are recorded.
const MAX_REMEMBERED: usize = 1 << 16;

/// A unit with some of its pages.
struct Gathered {
    bytes: Box<[u8]>,
    came: Bits,
    left: u64,
}

/// Which threads wait for which units, and past waits.
#[derive(Default)]
struct Waiting {
    /// Unit, thread, and start of the wait.
    now: Vec<(u64, u32, Instant)>,
    /// Total time per thread.
    total: HashMap<u32, Duration>,
    each: Vec<u64>,
    faults: u64,
}

/// The memory.
pub struct PostcopyMemory {
    uffd: Uffd,
    mapping: Arc<Mapping>,
    page: u64,
    unit: u64,
    missing: Bits,
    /// How many units are missing.
    left: AtomicU64,
    brought: AtomicU64,
    gathered: Mutex<HashMap<u64, Gathered>>,
    waiting: Mutex<Waiting>,
    /// Signalled once no unit is missing.
    whole: Arc<EventFd>,
}

impl std::fmt::Debug for PostcopyMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PostcopyMemory({} units missing)", self.left())
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PostcopyMemory {
    /// All of `mapping`, backed by pages of `page` bytes. `missing` has a bit per unit. `whole` is
    /// signalled once no unit is missing.
    pub(crate) fn new(
        uffd: Uffd,
        mapping: Arc<Mapping>,
        page: u64,
        missing: Bits,
        whole: Arc<EventFd>,
    ) -> Self {
        let left = AtomicU64::new(missing.count());
        let (gathered, waiting) = (Mutex::default(), Mutex::default());
        let (unit, brought) = (page / PAGE_SIZE, AtomicU64::new(0));
        Self { uffd, mapping, page, unit, missing, left, brought, gathered, waiting, whole }
    }

    /// The userfaultfd.
    pub fn uffd(&self) -> &Uffd {
        &self.uffd
    }

    /// The number of pages per unit.
    pub fn unit(&self) -> u64 {
        self.unit
    }

    /// The number of units.
    pub fn units(&self) -> u64 {
        self.mapping.len() / self.page
    }

    /// The missing units.
    pub(crate) fn missing(&self) -> &Bits {
        &self.missing
    }

    /// The number of missing units.
    pub fn left(&self) -> u64 {
        self.left.load(Ordering::Acquire)
    }

    /// The number of base pages that were fetched.
    pub fn brought(&self) -> u64 {
        self.brought.load(Ordering::Relaxed)
    }

    /// The unit of a host virtual address in the mapping.
    pub(crate) fn unit_at(&self, address: u64) -> u64 {
        (address - self.mapping.as_ptr() as u64) / self.page
    }

    /// Registers the memory for missing faults. It is incomplete from here on
    /// ([`Mapping::is_complete`]).
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn register(&self) -> Result<(), String> {
        self.mapping.set_complete(false);
        let registered = self.uffd.register(&self.mapping, 0, self.mapping.len(), Mode::Missing);
        registered.map_err(|error| {
            self.mapping.set_complete(true);
            format!("userfaultfd for the guest's memory: {error}")
        })
    }

    /// Unregisters the memory, which is complete. A thread that still waits for a page gets zeroes.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn unregister(&self) -> Result<(), String> {
        let done = self.uffd.unregister(&self.mapping, 0, self.mapping.len());
        done.map_err(|error| format!("UFFDIO_UNREGISTER: {error}"))?;
        self.mapping.set_complete(true);
        Ok(())
    }

    /// Unmaps the missing units, which may contain earlier data. In a file their pages must be
    /// punched out (MADV_REMOVE). After MADV_DONTNEED alone the file would still have them, so an
    /// access would find the old page without a fault. Call this after [`Self::register`]: the
    /// kernel does not collapse registered memory into huge pages.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn empty(&self, shared: bool) -> Result<(), String> {
        let advice = match shared && !plant::is(Mistake::KeptInCache) {
            true => libc::MADV_REMOVE,
            false => libc::MADV_DONTNEED,
        };
        let mut at = 0;
        while let Some(run) = self.missing.first_run(at..self.units()) {
            at = run.end;
            let (offset, len) = (run.start * self.page, (run.end - run.start) * self.page);
            let done = self.mapping.advise_range(offset, len, advice);
            done.map_err(|error| format!("emptying memory that follows: {error}"))?;
        }
        Ok(())
    }

    /// Takes arrived pages, numbered over the mapping. `data` has their content, or they are zero
    /// without it.
    ///
    /// # Errors
    /// The kernel refuses them.
    pub fn take(&self, pages: Range<u64>, data: Option<&[u8]>) -> Result<(), String> {
        let bytes = |run: &Range<u64>| {
            let [start, end] = [run.start, run.end].map(|page| ((page - pages.start) * PAGE_SIZE) as usize);
            data.map(|data| &data[start..end])
        };
        if self.unit == 1 {
            let mut at = pages.start;
            while let Some(run) = self.missing.first_run(at..pages.end) {
                at = run.end;
                match bytes(&run) {
                    Some(data) => self.put(run, data)?,
                    None => self.put_zeroes(run)?,
                }
            }
            return Ok(());
        }
        for page in pages.clone() {
            let unit = page / self.unit;
            if self.missing.first_run(unit..unit + 1).is_none() {
                continue;
            }
            if let Some(whole) = self.gather(unit, page % self.unit, bytes(&(page..page + 1))) {
                self.put_gathered(unit, &whole)?;
            }
        }
        Ok(())
    }

    /// Stores a page of a unit. Returns the whole unit when its last page has arrived. It must then
    /// be [placed](Self::put_gathered).
    fn gather(&self, unit: u64, page: u64, data: Option<&[u8]>) -> Option<Box<[u8]>> {
        let mut gathered = locked(&self.gathered);
        // Another thread may have placed it since the caller looked.
        self.missing.first_run(unit..unit + 1)?;
        let one = gathered.entry(unit).or_insert_with(|| Gathered {
            bytes: vec![0; self.page as usize].into(),
            came: Bits::new(self.unit),
            left: self.unit,
        });
        if one.came.first_run(page..page + 1).is_some() {
            return None;
        }
        one.came.set(page..page + 1);
        one.left -= 1;
        if let Some(data) = data {
            one.bytes[(page * PAGE_SIZE) as usize..][..PAGE_SIZE as usize].copy_from_slice(data);
        }
        (one.left == 0).then(|| std::mem::take(&mut one.bytes))
    }

    /// Places a unit whose pages have all arrived. Its entry stays until the unit is marked as
    /// present, so that a page that arrives twice does not begin another one.
    fn put_gathered(&self, unit: u64, whole: &[u8]) -> Result<(), String> {
        self.put(unit..unit + 1, whole)?;
        locked(&self.gathered).remove(&unit);
        Ok(())
    }

    /// Places `data` in the missing units `run`.
    ///
    /// # Errors
    /// The kernel refuses it.
    pub fn put(&self, run: Range<u64>, data: &[u8]) -> Result<(), String> {
        let data = if plant::is(Mistake::SmallCopy) { &data[..PAGE_SIZE as usize] } else { data };
        let copied = self.uffd.copy(&self.mapping, run.start * self.page, data, self.page);
        self.unless_whole(copied).map_err(|error| format!("UFFDIO_COPY: {error}"))?;
        self.is_there(run);
        Ok(())
    }

    /// Ignores ENOENT once no unit is missing. A page may arrive twice, on the connection for all
    /// pages and on that for faulting pages. If it was the last one, the other connection's thread
    /// may have unregistered the memory before this call.
    fn unless_whole(&self, result: io::Result<()>) -> io::Result<()> {
        match result {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) && self.left() == 0 => Ok(()),
            result => result,
        }
    }

    fn put_zeroes(&self, run: Range<u64>) -> Result<(), String> {
        self.zero(run.clone())?;
        self.is_there(run);
        Ok(())
    }

    /// Resolves faults on the units `run` with zeroes, because no content will arrive for them.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn zero(&self, run: Range<u64>) -> Result<(), String> {
        let (offset, len) = (run.start * self.page, (run.end - run.start) * self.page);
        let zeroed = if self.page == host_page() {
            self.uffd.zero(&self.mapping, offset, len, self.page)
        } else {
            self.uffd.copy(&self.mapping, offset, &vec![0; len as usize], self.page)
        };
        self.unless_whole(zeroed).map_err(|error| format!("UFFDIO_ZEROPAGE: {error}"))
    }

    /// Marks units as present. Call this after they are placed, because later faults on them are
    /// resolved with zeroes.
    fn is_there(&self, run: Range<u64>) {
        let taken = self.missing.take(run.clone());
        self.brought.fetch_add(taken * self.unit, Ordering::Relaxed);
        let mut waiting = locked(&self.waiting);
        let Waiting { now, total, each, .. } = &mut *waiting;
        now.retain(|(unit, thread, since)| {
            let waits = !run.contains(unit);
            if !waits {
                let took = since.elapsed();
                *total.entry(*thread).or_default() += took;
                if each.len() < MAX_REMEMBERED {
                    each.push(took.as_micros() as u64);
                }
            }
            waits
        });
        drop(waiting);
        if taken > 0 && self.left.fetch_sub(taken, Ordering::AcqRel) == taken {
            let _ = self.whole.write(1);
        }
    }

    /// Records that `thread` waits for `unit`. Returns whether it is the first to wait.
    pub fn waits(&self, unit: u64, thread: u32) -> bool {
        let mut waiting = locked(&self.waiting);
        waiting.faults += 1;
        let first = waiting.now.iter().all(|(other, ..)| *other != unit);
        if self.missing.first_run(unit..unit + 1).is_some() {
            waiting.now.push((unit, thread, Instant::now()));
        }
        first
    }

    /// The units that threads wait for.
    pub(crate) fn awaited(&self) -> Vec<u64> {
        let mut units: Vec<u64> = locked(&self.waiting).now.iter().map(|(unit, ..)| *unit).collect();
        units.sort_unstable();
        units.dedup();
        units
    }

    /// The waits so far. `vcpus` are the threads of the vCPUs.
    pub fn waited(&self, vcpus: &[u32]) -> Waited {
        let waiting = locked(&self.waiting);
        let mut each = waiting.each.clone();
        each.sort_unstable();
        let us = |thread: &u32| waiting.total.get(thread).map_or(0, |time| time.as_micros() as u64);
        Waited {
            vcpus_us: vcpus.iter().map(us).collect(),
            faults: waiting.faults,
            median_us: each.get(each.len() / 2).copied().unwrap_or(0),
            longest_us: each.last().copied().unwrap_or(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::threads;
    use vellum_sys::mmap::Source;

    /// A late page does not overwrite a present one, and a file's earlier content is not found.
    #[test]
    fn what_follows_is_put_where_nothing_is_and_once() {
        for (source, shared) in [(Source::Anonymous, false), (Source::SharedAnonymous, true)] {
            let Ok(uffd) = Uffd::new(Mode::Missing) else {
                eprintln!("needs a userfaultfd that sees KVM's faults (vellum doctor)");
                return;
            };
            let mapping = Arc::new(Mapping::new(8 * PAGE_SIZE, PAGE_SIZE, source).unwrap());
            let word = |page: u64| &mapping.words()[(page * PAGE_SIZE / 8) as usize];
            (0..8).for_each(|page| word(page).store(1, Ordering::Relaxed));
            let missing = Bits::new(8);
            missing.set(2..5);
            let postcopy =
                PostcopyMemory::new(uffd, mapping.clone(), PAGE_SIZE, missing, threads::event().unwrap());
            postcopy.register().unwrap();
            postcopy.empty(shared).unwrap();
            postcopy.take(1..5, Some(&[2; 4 * PAGE_SIZE as usize])).unwrap();
            assert_eq!((postcopy.left(), postcopy.brought()), (0, 3));
            postcopy.take(2..3, None).unwrap();
            postcopy.unregister().unwrap();
            // As placed by a thread that found the pages missing before another thread placed them.
            postcopy.put(3..4, &[3; PAGE_SIZE as usize]).unwrap();
            postcopy.put_zeroes(2..3).unwrap();
            let found: Vec<u64> = (0..8).map(|page| word(page).load(Ordering::Relaxed)).collect();
            let came = u64::from_ne_bytes([2; 8]);
            assert_eq!(found, [1, 1, came, came, came, 1, 1, 1]);
        }
    }

    /// A page arrives a second time while another thread places its unit. No buffer is left.
    #[test]
    fn a_page_that_arrives_while_its_unit_is_placed_begins_no_other() {
        let Ok(uffd) = Uffd::new(Mode::Missing) else {
            eprintln!("needs a userfaultfd that sees KVM's faults (vellum doctor)");
            return;
        };
        let unit = 2 * PAGE_SIZE;
        let mapping = Arc::new(Mapping::new(2 * unit, PAGE_SIZE, Source::Anonymous).unwrap());
        let missing = Bits::new(2);
        missing.set(0..2);
        let postcopy = PostcopyMemory::new(uffd, mapping, unit, missing, threads::event().unwrap());
        postcopy.register().unwrap();
        postcopy.empty(false).unwrap();
        postcopy.take(0..1, None).unwrap();
        let whole = postcopy.gather(0, 1, Some(&[2; PAGE_SIZE as usize])).unwrap();
        postcopy.take(0..1, None).unwrap();
        postcopy.put_gathered(0, &whole).unwrap();
        // This one had looked before the unit was marked as present.
        assert!(postcopy.gather(0, 1, None).is_none());
        assert!(locked(&postcopy.gathered).is_empty() && postcopy.left() == 1);
    }
}
