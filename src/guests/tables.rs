//! Workloads on the guest's own page tables: many tables over the same frames are built, touched
//! through, cleared and freed as in `fork` and `exit`, and CR3 is switched among them.
//!
//! They run at CPL 0, and are only meaningful if KVM shadows guest page tables. [`Tables`] is the
//! layout of the control block. The code is `program/*/tables.rs`. The guest measures time itself,
//! with its TSC.

use std::mem::offset_of;
use std::sync::atomic::Ordering;

use super::guest::{self, Guest};
use crate::program::RAM_VA;
use vellum_kvm::arch::layout;
use vellum_sys::mmap::PAGE_SIZE;

/// A command. The guest executes it when resumed, and then rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Command {
    /// Writes every table: four levels of its own, the last with an entry for each frame.
    Build = 0,
    /// Loads each table in turn and writes to each frame through it.
    Touch = 1,
    /// Loads each table in turn, clears its last level, and loads it again, like the flush at a
    /// process's exit.
    Clear = 2,
    /// Zeroes every table's pages, like an allocator that reuses them.
    Free = 3,
    /// Loads one table after the other, for a given number of loads, and reads a given number of
    /// pages after each.
    Switch = 4,
    /// Like [`Command::Switch`] without the loads: the cost of the loop itself.
    Loop = 5,
    /// Registers the CR3 cache page with KVM.
    Register = 6,
    /// Like [`Command::Switch`], but loads the value in the CR3 cache page, if it has one. If that
    /// is rare, the guest does without the page for a while, see [`TRIAL`].
    SwitchCached = 7,
    /// Abuses the CR3 cache for [`Tables::switches`] steps drawn from [`Tables::seed`], among
    /// switches whose result is checked. KVM writes to the last table. The page is registered at
    /// the end.
    Misbehave = 8,
    /// Loads [`Tables::value`] into CR3 and continues, if that is possible.
    Load = 9,
}

/// The control block as the code reads it. All fields are words. The host writes while the vCPU
/// does not run.
#[repr(C)]
pub struct Tables {
    /// The [`Command`].
    pub command: u64,
    /// The guest-virtual address of the doorbell.
    pub doorbell: u64,
    /// The guest-virtual address of the first table. Each takes [`TABLE_BYTES`].
    pub tables_va: u64,
    /// Its guest-physical address.
    pub tables_gpa: u64,
    /// The number of tables; at least 1.
    pub count: u64,
    /// The first table of a command, below `count`. [`Command::Switch`] and [`Command::Loop`] begin
    /// with table 0.
    pub first: u64,
    /// The distance to the next table, modulo `count`; below `count`.
    pub step: u64,
    /// The number of tables that a command visits; at least 1.
    pub visits: u64,
    /// Frames that each table maps; from 1 to 512.
    pub pages: u64,
    /// The guest-physical address of the first frame.
    pub frames: u64,
    /// The address at which every table maps the frames.
    pub window: u64,
    /// The root entries common to all tables: the code's own memory, and RAM.
    pub shared: [u64; 2],
    /// The CR3 between commands.
    pub home: u64,
    /// The number of loads of [`Command::Switch`].
    pub switches: u64,
    /// The number of pages read after each load; at most `pages`.
    pub reads: u64,
    /// The guest-virtual address of the page that [`Command::Register`] registers.
    pub cache_va: u64,
    /// Its guest-physical address.
    pub cache_gpa: u64,
    /// Written by the guest: the command's duration in TSC ticks.
    pub ticks: u64,
    /// Written by the guest: KVM's answer to the registration.
    pub registered: u64,
    /// Written by the guest: how many of the last switches found their table in the page.
    pub hits: u64,
    /// Written by the guest: how many of the last switches used the page.
    pub looked_up: u64,
    /// The guest's own: the length of its last pause without the page, in switches.
    pub pause: u64,
    /// The state of [`Command::Misbehave`]'s generator, kept for the next time; not 0.
    pub seed: u64,
    /// Written by the guest: how many switches of [`Command::Misbehave`] ended in a wrong table.
    pub wrong: u64,
    /// The value that [`Command::Load`] loads.
    pub value: u64,
}

/// The sample size of switches through the CR3 cache page. Three eighths of them must find their
/// table there. If fewer do, the guest unregisters the page and does without it for [`MIN_PAUSE`]
/// switches. The pause doubles each time this happens again, up to [`LONGEST_PAUSE`], and halves
/// when it does not. The guest's series in `kernel-patches/` has the same numbers.
pub const TRIAL: u64 = 64;
/// The first pause without the page, in switches.
pub const MIN_PAUSE: u64 = 4096;
/// The longest pause without the page, in switches.
pub const LONGEST_PAUSE: u64 = 16384;

/// A root, a PDPT, a directory and a table.
pub const TABLE_BYTES: u64 = 4 * PAGE_SIZE;

/// The maximum number of pages that a last-level table maps.
pub const MAX_PAGES: u64 = 512;

/// The offset of the tables in RAM: after the frames.
const BEHIND_FRAMES: u64 = MAX_PAGES * PAGE_SIZE;

/// The third entry of the root, which is otherwise unused.
const WINDOW: u64 = 2 << 39;

/// The offset of the CR3 cache page in RAM: after the tables.
pub fn cache_offset(count: u64) -> u64 {
    BEHIND_FRAMES + count * TABLE_BYTES
}

/// The offset of a table's number in the first page that it maps: after the part of a CR3 cache
/// page that KVM writes, because any page may become one.
pub(crate) const NUMBER: u64 = 128;

/// The RAM needed for `count` tables.
pub fn ram(count: u64) -> u64 {
    (cache_offset(count) + PAGE_SIZE).next_multiple_of(2 << 20)
}

/// The number of shadow pages for `count` tables, such that KVM recycles none: each table's four,
/// and twice the mappings of RAM and the code.
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

/// Makes vCPU 0 register its CR3 cache page. Returns the number of address spaces among which it
/// can switch without an exit, or KVM's negative error.
pub fn register(guest: &Guest) -> Result<i64, guest::Error> {
    perform(guest, Command::Register)?;
    Ok(guest.block(0)[offset_of!(Tables, registered) / 8].load(Ordering::Relaxed) as i64)
}

/// How many loads of the last [`Command::SwitchCached`] found their table in the page.
pub fn hits(guest: &Guest) -> u64 {
    guest.block(0)[offset_of!(Tables, hits) / 8].load(Ordering::Relaxed)
}

/// How many loads of the last [`Command::SwitchCached`] used the page.
pub fn looked_up(guest: &Guest) -> u64 {
    guest.block(0)[offset_of!(Tables, looked_up) / 8].load(Ordering::Relaxed)
}

/// Makes the first page that each table maps hold the table's number, which [`Command::Misbehave`]
/// checks.
pub fn number(guest: &Guest, count: u64) {
    let words = guest.vm.memory.mapping.words();
    for table in 0..count {
        words[((table * PAGE_SIZE + NUMBER) / 8) as usize].store(table, Ordering::Relaxed);
        let first = &words[((BEHIND_FRAMES + table * TABLE_BYTES + 3 * PAGE_SIZE) / 8) as usize];
        // Each table maps the frames in order.
        first.store(first.load(Ordering::Relaxed) + table * PAGE_SIZE, Ordering::Relaxed);
    }
}

/// Makes vCPU 0 misbehave for this number of steps. Updates the generator's state. Returns how many
/// switches ended in a wrong table.
pub fn misbehave(guest: &Guest, seed: &mut u64, steps: u64) -> Result<u64, guest::Error> {
    let block = guest.block(0);
    let at = |offset: usize| &block[offset / 8];
    at(offset_of!(Tables, seed)).store(*seed, Ordering::Relaxed);
    at(offset_of!(Tables, switches)).store(steps, Ordering::Relaxed);
    perform(guest, Command::Misbehave)?;
    *seed = at(offset_of!(Tables, seed)).load(Ordering::Relaxed);
    Ok(at(offset_of!(Tables, wrong)).load(Ordering::Relaxed))
}

/// Makes vCPU 0 load `value` into CR3.
pub fn load(guest: &Guest, value: u64) -> Result<(), guest::Error> {
    guest.block(0)[offset_of!(Tables, value) / 8].store(value, Ordering::Relaxed);
    perform(guest, Command::Load).map(|_| ())
}

/// The tables that a command visits, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Visit {
    first: u64,
    step: u64,
    visits: u64,
}

impl Visit {
    /// All of `count`, in ascending order.
    pub fn all(count: u64) -> Self {
        Self { first: 0, step: 1 % count, visits: count }
    }

    /// All of `count`, in descending order.
    pub fn backwards(count: u64) -> Self {
        Self { first: count - 1, step: count - 1, visits: count }
    }

    /// All of `count`, each far from the previous: the step is the first number from the golden
    /// section on that visits all.
    pub fn scattered(count: u64) -> Self {
        let section = (count as f64 * 0.618_034) as u64;
        let step = (section..count).find(|&step| gcd(step, count) == 1).unwrap_or(1 % count);
        Self { first: count / 2, step, visits: count }
    }

    /// `visits` tables from `first` on.
    pub fn some(first: u64, visits: u64) -> Self {
        Self { first, step: 1, visits }
    }

    /// The tables' numbers in order.
    #[cfg(test)]
    fn numbers(self, count: u64) -> Vec<u64> {
        (0..self.visits).map(|i| (self.first + i * self.step) % count).collect()
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Sets the tables that commands visit.
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

/// Sets the number of loads of [`Command::Switch`] and [`Command::Loop`], and the pages read after
/// each.
pub fn set_switches(guest: &Guest, switches: u64, reads: u64) {
    let block = guest.block(0);
    block[offset_of!(Tables, switches) / 8].store(switches, Ordering::Relaxed);
    block[offset_of!(Tables, reads) / 8].store(reads, Ordering::Relaxed);
}

/// Makes vCPU 0 execute `command`. Returns its duration in seconds by the guest's TSC.
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
