//! The argument in `lib.rs` as a program: a machine with the same parts and the same comparisons.
//! Every proper subset of its parts is rolled back by one pass.

use std::collections::BTreeMap;

use crate::schedule::{Division, PAGE, PHASE, Range, Schedule, mix};

/// A page's first two words and its last.
type Page = [u64; 3];

/// The registers of a vCPU.
#[derive(Clone, Default)]
struct Registers {
    position: u64,
    /// The position at the last boundary, as in the XMM register and in the FS and GS bases.
    copy: u64,
    /// Segment and index of the next access.
    at: (usize, u64),
    seen: Vec<u32>,
    done: bool,
}

/// The memory that all vCPUs write.
#[derive(Clone, Default)]
struct Shared {
    pages: BTreeMap<u64, Page>,
    published: Vec<u32>,
}

#[derive(Clone)]
struct Machine {
    schedule: Schedule,
    division: Division,
    passes: u64,
    registers: Vec<Registers>,
    own: Vec<BTreeMap<u64, Page>>,
    shared: Shared,
    lost: Option<&'static str>,
}

fn publish(position: u64) -> u32 {
    (position >> 6) as u32
}

fn is_before(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) < 0
}

impl Machine {
    fn new(vcpus: u64, passes: u64, write: u64) -> Self {
        let mut schedule = Schedule { seed: mix(9), vcpus, shuffled: true, ..Schedule::default() };
        schedule.thresholds(write, None);
        let range = Range { start: 0x10_0000, end: 0x10_0000 + 80 * vcpus * PAGE };
        let division = schedule.divide(&[range]).unwrap();
        let registers = Registers { seen: vec![0; vcpus as usize], ..Registers::default() };
        Self {
            schedule,
            division,
            passes,
            registers: vec![registers; vcpus as usize],
            own: vec![BTreeMap::new(); vcpus as usize],
            shared: Shared { published: vec![0; vcpus as usize], ..Shared::default() },
            lost: None,
        }
    }

    fn fault(&mut self, kind: &'static str) {
        self.lost.get_or_insert(kind);
    }

    /// Performs the next step of vCPU `v`: one access, or one look at the others' positions.
    fn step(&mut self, v: usize) {
        if self.registers[v].done {
            return;
        }
        let phase = self.registers[v].position >> PHASE;
        // At the start of a phase a vCPU waits for all others.
        if self.registers[v].position & ((1 << PHASE) - 1) == 0 && self.registers[v].at == (0, 0) {
            self.look(v);
            let start = publish(phase << PHASE);
            if self.registers[v].seen.iter().any(|seen| is_before(*seen, start)) {
                return;
            }
        }
        let (pass, kind) = (phase / 4, phase % 4);
        let who = if kind == 0 { v } else { (v + 1) % self.registers.len() };
        let (segment, index) = self.registers[v].at;
        let segments = self.division.of(who);
        if kind > 1 || kind == 1 && pass == 0 || segment == segments.len() {
            if kind == 3 && pass == self.passes {
                self.registers[v].done = true;
                return;
            }
            let position = self.registers[v].position;
            self.check_copies(v, position & !63);
            self.registers[v].position = (phase + 1) << PHASE;
            self.registers[v].at = (0, 0);
            return self.store_copies(v);
        }
        let address = self.schedule.address(&segments[segment], who as u64, pass, index);
        let is_shared = segments[segment].shared == 1;
        self.registers[v].at =
            if index + 1 == segments[segment].count { (segment + 1, 0) } else { (segment, index + 1) };
        self.access(address, if is_shared { None } else { Some(who) }, pass, kind == 0);
        self.registers[v].position += 1;
        let position = self.registers[v].position;
        if position.is_multiple_of(64) {
            self.check_copies(v, position - 64);
            self.look(v);
            self.store_copies(v);
        }
    }

    fn access(&mut self, address: u64, owner: Option<usize>, pass: u64, writes: bool) {
        let schedule = self.schedule;
        let last = |pass| schedule.last_within(address, pass, &mut 0, u64::MAX).unwrap();
        let page = |pass| [address, pass, schedule.tail(address, pass)];
        let pages = match owner {
            Some(owner) => &mut self.own[owner],
            None => &mut self.shared.pages,
        };
        let writes = writes && schedule.writes(address, pass);
        let is_right = pass == 0 || {
            let expected = last(if writes { pass - 1 } else { pass });
            pages.get(&address) == Some(&page(expected))
        };
        if writes {
            pages.insert(address, page(pass));
        }
        if !is_right {
            self.fault("page");
        }
    }

    fn check_copies(&mut self, v: usize, expected: u64) {
        if self.registers[v].copy != expected || self.shared.published[v] != publish(expected) {
            self.fault("copies");
        }
    }

    fn store_copies(&mut self, v: usize) {
        self.registers[v].copy = self.registers[v].position;
        self.shared.published[v] = publish(self.registers[v].position);
    }

    fn look(&mut self, v: usize) {
        let limit = publish(((self.registers[v].position >> PHASE) + 2) << PHASE);
        let positions = self.shared.published.clone();
        let back = positions.iter().zip(&self.registers[v].seen).any(|(now, seen)| is_before(*now, *seen));
        if back || positions.iter().any(|now| !is_before(*now, limit)) {
            self.fault("position");
        }
        self.registers[v].seen = positions;
    }

    /// Runs all vCPUs in turn until the first is at `position`.
    fn run_to(&mut self, position: u64) {
        while self.registers[0].position < position {
            (0..self.registers.len()).for_each(|v| self.step(v));
        }
    }

    /// Runs to the end or to the first fault, which is returned.
    ///
    /// # Panics
    /// The machine hangs.
    fn finish(mut self) -> Option<&'static str> {
        for _ in 0..1 << 20 {
            (0..self.registers.len()).for_each(|v| self.step(v));
            if self.lost.is_some() {
                return self.lost;
            }
            if self.registers.iter().all(|registers| registers.done) {
                return None;
            }
        }
        panic!("it hangs");
    }

    /// The number of parts: registers and pages of each vCPU, and the shared memory.
    fn parts(&self) -> usize {
        2 * self.registers.len() + 1
    }

    /// This machine with the parts in `set` taken from `older`.
    fn with_parts_of(&self, older: &Self, set: u64) -> Self {
        let mut machine = self.clone();
        for v in 0..self.registers.len() {
            if set >> (2 * v) & 1 == 1 {
                machine.registers[v] = older.registers[v].clone();
            }
            if set >> (2 * v + 1) & 1 == 1 {
                machine.own[v] = older.own[v].clone();
            }
        }
        if set >> (2 * self.registers.len()) & 1 == 1 {
            machine.shared = older.shared.clone();
        }
        machine
    }
}

/// Calls `found` for each rollback by one pass, with the position, the set of parts and the fault.
fn roll_back(vcpus: u64, write: u64, mut found: impl FnMut(u64, u64, Option<&'static str>)) {
    const PASS: u64 = 2;
    // At the start of each phase, and in the middle of the accesses of the first two.
    for (phase, accesses) in
        [(0, 0), (0, 1), (0, 30), (0, 64), (0, 70), (1, 0), (1, 20), (1, 64), (2, 0), (3, 0)]
    {
        let at = |pass: u64| ((4 * pass + phase) << PHASE) + accesses;
        let mut older = Machine::new(vcpus, PASS + 3, write);
        older.run_to(at(PASS));
        let mut newer = older.clone();
        newer.run_to(at(PASS + 1));
        assert_eq!(newer.lost, None);
        for set in 0..1 << newer.parts() {
            found(at(PASS), set, newer.with_parts_of(&older, set).finish());
        }
    }
}

#[test]
fn each_proper_subset_of_the_parts_that_is_a_pass_old_is_found() {
    for (vcpus, write) in [(1, 100), (2, 100), (3, 100), (2, 50)] {
        let all = (1 << (2 * vcpus + 1)) - 1;
        let mut count = 0;
        roll_back(vcpus, write, |position, set, found| {
            let is_proper = set != 0 && set != all;
            assert_eq!(
                found.is_some(),
                is_proper,
                "{vcpus} vCPUs, {write} %, {position:#x}, parts {set:#b}: {found:?}"
            );
            count += u32::from(is_proper);
        });
        assert_eq!(count, 10 * (all - 1) as u32);
    }
}

#[test]
fn a_page_of_any_other_pass_differs() {
    let machine = Machine::new(1, 3, 100);
    let schedule = machine.schedule;
    for pass in 1..1000 {
        assert_ne!(schedule.tail(0x20_0000, pass), schedule.tail(0x20_0000, pass - 1));
        assert_ne!(schedule.tail(0x20_0000, pass), schedule.tail(0x20_1000, pass));
    }
}
