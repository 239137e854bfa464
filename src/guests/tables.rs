//! Workloads on the guest's own page tables: many tables over the same frames, built, touched through, cleared and
//! freed as `fork` and `exit` do it, and CR3 switched among them.
//!
//! They run at CPL 0 and tell something only where KVM shadows guest page tables. [`Tables`] is the layout of the
//! control block; the code is `arch/*/tables.rs`; the timing is the guest's own, by TSC.

use std::mem::offset_of;
use std::sync::atomic::Ordering;

use super::guest::{self, Guest};
use crate::program::RAM_VA;
use vellum_kvm::arch::layout;
use vellum_sys::mmap::PAGE_SIZE;

/// What the guest does when it is resumed, and rings when it has done it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Command {
    /// Writes every table: four levels of its own, the last with an entry for each frame.
    Build = 0,
    /// Loads each table in turn and writes to each frame through it.
    Touch = 1,
    /// Loads each table in turn, clears its last level, and loads it again, as the end of a process flushes.
    Clear = 2,
    /// Zeroes every table's pages, as an allocator does that hands them out again.
    Free = 3,
    /// Loads one table after the other, so many times in all, and reads so many pages after each.
    Switch = 4,
    /// The same without the loads: what the loop itself costs.
    Loop = 5,
    /// Registers its page of the CR3 cache with KVM.
    Register = 6,
    /// As [`Command::Switch`], but loads what that page says, where it says anything. Where it hardly ever does, it does without for a
    /// while, by [`TRIAL`].
    SwitchCached = 7,
    /// So many steps as [`Tables::switches`] says of what a guest should not do with the CR3 cache, drawn from [`Tables::seed`], among
    /// switches, each of which it looks at. The last table is for KVM to write to. Ends registered.
    Misbehave = 8,
    /// Loads [`Tables::value`] into CR3 and goes on, if there is anything to go on with.
    Load = 9,
}

/// The control block as the code reads it. All words; the host writes while the vCPU does not run.
#[repr(C)]
pub struct Tables {
    /// [`Command`].
    pub command: u64,
    /// Guest-virtual address of the doorbell.
    pub doorbell: u64,
    /// Guest-virtual address of the first table; each takes [`TABLE_BYTES`].
    pub tables_va: u64,
    /// The same, guest-physical.
    pub tables_gpa: u64,
    /// How many tables; at least 1.
    pub count: u64,
    /// The table that a command begins with, below `count`. [`Command::Switch`] and [`Command::Loop`] begin with table 0.
    pub first: u64,
    /// How much further, modulo `count`, the next one is; below `count`.
    pub step: u64,
    /// How many tables a command visits; at least 1.
    pub visits: u64,
    /// Frames that each maps; from 1 to 512.
    pub pages: u64,
    /// Guest-physical address of the first frame.
    pub frames: u64,
    /// Where every table maps the frames.
    pub window: u64,
    /// The entries of the root that all tables share: the code's own memory, and RAM.
    pub shared: [u64; 2],
    /// The CR3 outside of all these.
    pub home: u64,
    /// How many loads [`Command::Switch`] does.
    pub switches: u64,
    /// How many pages it reads after each; at most `pages`.
    pub reads: u64,
    /// Guest-virtual address of the page that [`Command::Register`] registers.
    pub cache_va: u64,
    /// The same, guest-physical.
    pub cache_gpa: u64,
    /// Written by the guest: TSC ticks that the command took.
    pub ticks: u64,
    /// Written by the guest: what KVM answered to the registration.
    pub registered: u64,
    /// Written by the guest: how many of the last switches found their table in the page.
    pub hits: u64,
    /// Written by the guest: for how many of the last switches it looked into the page.
    pub looked_up: u64,
    /// The guest's own: for how many switches it last did without the page.
    pub pause: u64,
    /// What [`Command::Misbehave`] draws from, and goes on with the next time; not 0.
    pub seed: u64,
    /// Written by the guest: how many switches of [`Command::Misbehave`] ended in another table than they were to.
    pub wrong: u64,
    /// What [`Command::Load`] loads.
    pub value: u64,
}

/// Of so many switches by way of the page of the CR3 cache three eighths have to find their table there. If fewer do, the guest does without
/// the page, which it unregisters, for [`MIN_PAUSE`] switches, and for twice as many each time that this happens again, up to
/// [`LONGEST_PAUSE`]; for half as many next time where it does not. The same numbers as in the guest's series in `kernel-patches/`.
pub const TRIAL: u64 = 64;
/// How many switches it does without the page at first.
pub const MIN_PAUSE: u64 = 4096;
/// How many it does without it at most.
pub const LONGEST_PAUSE: u64 = 16384;

/// A root, a PDPT, a directory and a table.
pub const TABLE_BYTES: u64 = 4 * PAGE_SIZE;

/// What one last-level table maps at most.
pub const MAX_PAGES: u64 = 512;

/// Where the tables begin in RAM: behind the frames.
const BEHIND_FRAMES: u64 = MAX_PAGES * PAGE_SIZE;

/// The third entry of the root: nothing else is there.
const WINDOW: u64 = 2 << 39;

/// Where in RAM the page of the CR3 cache is: behind the tables.
pub fn cache_offset(count: u64) -> u64 {
    BEHIND_FRAMES + count * TABLE_BYTES
}

/// Where in the first page that a table maps its number is: behind what KVM writes to a page of the CR3 cache, which any may become.
pub(crate) const NUMBER: u64 = 128;

/// How much RAM `count` tables need.
pub fn ram(count: u64) -> u64 {
    (cache_offset(count) + PAGE_SIZE).next_multiple_of(2 << 20)
}

/// How many shadow pages KVM needs for `count` tables so that it recycles none: each table's four, and what RAM and the
/// code are mapped with, twice over.
pub fn shadow_pages(count: u64) -> u64 {
    4 * count + 2 * (ram(count) >> 21) + 512
}

/// Sets up vCPU 0 of `guest` for `count` tables over `pages` frames.
pub fn program(guest: &Guest, count: u64, pages: u64) {
    let block = guest.block(0);
    let set = |offset: usize, value: u64| block[offset / 8].store(value, Ordering::Relaxed);
    set(offset_of!(Tables, doorbell), layout::DOORBELL);
    set(offset_of!(Tables, tables_va), RAM_VA + BEHIND_FRAMES);
    set(offset_of!(Tables, tables_gpa), layout::RAM_START + BEHIND_FRAMES);
    set(offset_of!(Tables, count), count);
    visit(guest, Visit::all(count));
    set(offset_of!(Tables, pages), pages);
    set(offset_of!(Tables, frames), layout::RAM_START);
    set(offset_of!(Tables, window), WINDOW);
    for (index, entry) in guest.root_entries().into_iter().enumerate() {
        set(offset_of!(Tables, shared) + index * 8, entry);
    }
    set(offset_of!(Tables, home), guest.root);
    set(offset_of!(Tables, cache_va), RAM_VA + cache_offset(count));
    set(offset_of!(Tables, cache_gpa), layout::RAM_START + cache_offset(count));
}

/// Has vCPU 0 register its page of the CR3 cache: how many address spaces it can switch among without an exit, or KVM's error, negative.
pub fn register(guest: &Guest) -> Result<i64, guest::Error> {
    perform(guest, Command::Register)?;
    Ok(guest.block(0)[offset_of!(Tables, registered) / 8].load(Ordering::Relaxed) as i64)
}

/// How many loads of the last [`Command::SwitchCached`] found their table in the page.
pub fn hits(guest: &Guest) -> u64 {
    guest.block(0)[offset_of!(Tables, hits) / 8].load(Ordering::Relaxed)
}

/// For how many loads of the last [`Command::SwitchCached`] the guest looked into the page.
pub fn looked_up(guest: &Guest) -> u64 {
    guest.block(0)[offset_of!(Tables, looked_up) / 8].load(Ordering::Relaxed)
}

/// Has the first page that each table maps be one that holds the table's number, for [`Command::Misbehave`] to look at.
pub fn number(guest: &Guest, count: u64) {
    let words = guest.vm.memory.mapping.words();
    for table in 0..count {
        words[((table * PAGE_SIZE + NUMBER) / 8) as usize].store(table, Ordering::Relaxed);
        let first = &words[((BEHIND_FRAMES + table * TABLE_BYTES + 3 * PAGE_SIZE) / 8) as usize];
        // Each maps the frames in their order.
        first.store(first.load(Ordering::Relaxed) + table * PAGE_SIZE, Ordering::Relaxed);
    }
}

/// Has vCPU 0 misbehave for so many steps; the state to go on with from the next time. How many of its switches ended in another table than they
/// were to.
pub fn misbehave(guest: &Guest, seed: &mut u64, steps: u64) -> Result<u64, guest::Error> {
    let block = guest.block(0);
    let at = |offset: usize| &block[offset / 8];
    at(offset_of!(Tables, seed)).store(*seed, Ordering::Relaxed);
    at(offset_of!(Tables, switches)).store(steps, Ordering::Relaxed);
    perform(guest, Command::Misbehave)?;
    *seed = at(offset_of!(Tables, seed)).load(Ordering::Relaxed);
    Ok(at(offset_of!(Tables, wrong)).load(Ordering::Relaxed))
}

/// Has vCPU 0 load `value` into CR3.
pub fn load(guest: &Guest, value: u64) -> Result<(), guest::Error> {
    guest.block(0)[offset_of!(Tables, value) / 8].store(value, Ordering::Relaxed);
    perform(guest, Command::Load).map(|_| ())
}

/// Which tables a command visits, in which order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Visit {
    first: u64,
    step: u64,
    visits: u64,
}

impl Visit {
    /// All of `count`, in the order of their numbers.
    pub fn all(count: u64) -> Self {
        Self { first: 0, step: 1 % count, visits: count }
    }

    /// All of `count`, the last one first.
    pub fn backwards(count: u64) -> Self {
        Self { first: count - 1, step: count - 1, visits: count }
    }

    /// All of `count`, none near the one before: by the number nearest to the golden section that visits all.
    pub fn scattered(count: u64) -> Self {
        let section = (count as f64 * 0.618_034) as u64;
        let step = (section..count).find(|&step| gcd(step, count) == 1).unwrap_or(1 % count);
        Self { first: count / 2, step, visits: count }
    }

    /// `visits` tables from `first` on.
    pub fn some(first: u64, visits: u64) -> Self {
        Self { first, step: 1, visits }
    }

    /// The tables' numbers in their order.
    #[cfg(test)]
    fn numbers(self, count: u64) -> Vec<u64> {
        (0..self.visits).map(|i| (self.first + i * self.step) % count).collect()
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// From now on commands visit these tables.
pub fn visit(guest: &Guest, visit: Visit) {
    let block = guest.block(0);
    for (offset, value) in [
        (offset_of!(Tables, first), visit.first),
        (offset_of!(Tables, step), visit.step),
        (offset_of!(Tables, visits), visit.visits),
    ] {
        block[offset / 8].store(value, Ordering::Relaxed);
    }
}

/// How often [`Command::Switch`] and [`Command::Loop`] go round, and how many pages they read each time.
pub fn set_switches(guest: &Guest, switches: u64, reads: u64) {
    let block = guest.block(0);
    block[offset_of!(Tables, switches) / 8].store(switches, Ordering::Relaxed);
    block[offset_of!(Tables, reads) / 8].store(reads, Ordering::Relaxed);
}

/// Has vCPU 0 do `command`, and returns the seconds that it took by the guest's TSC.
pub fn perform(guest: &Guest, command: Command) -> Result<f64, guest::Error> {
    let block = guest.block(0);
    block[offset_of!(Tables, command) / 8].store(command as u64, Ordering::Relaxed);
    guest.resume();
    guest.wait_all_rung()?;
    Ok(block[offset_of!(Tables, ticks) / 8].load(Ordering::Relaxed) as f64 / guest.tsc_hz as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_order_visits_every_table_once() {
        for count in [1, 2, 3, 4, 15, 100, 500, 1001] {
            assert_eq!(Visit::all(count).numbers(count), (0..count).collect::<Vec<_>>());
            assert_eq!(Visit::backwards(count).numbers(count), (0..count).rev().collect::<Vec<_>>());
            let mut scattered = Visit::scattered(count).numbers(count);
            scattered.sort_unstable();
            assert_eq!(scattered, (0..count).collect::<Vec<_>>());
        }
        assert_eq!(Visit::some(3, 2).numbers(10), [3, 4]);
    }
}
