//! One machine of the test, from its memslots to its last collection.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{Config, Error, Rng, Tally};
use crate::oracle::judge::{self, Lost, Mode, Oracle, Place};
use vellum_guests::guest::{self, Guest, GuestConfig, Woke};
use vellum_guests::program::RAM_VA;
use vellum_guests::{Hot, Order, Region, WriteConfig};
use vellum_kvm::arch::layout::{RAM, RAM_START};
use vellum_kvm::dirty::{DirtyTracker, Method, SlotLog, tracker};
use vellum_kvm::memory::{Backing, Memory, MemoryConfig, Slot};
use vellum_kvm::vm::counters::Counters;
use vellum_kvm::vm::vcpu;
use vellum_sandbox as sandbox;
use vellum_sys::dirty::in_one;
use vellum_sys::mmap::PAGE_SIZE;

/// The chunks of the log that a collection clears.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pick {
    /// All.
    All,
    /// A random part of them, if the tracker supports it.
    Drawn,
    /// Those that end on the first page of a huge page, if the tracker supports it.
    Edges,
}

/// One machine of the test.
pub(super) struct SoakMachine<'a> {
    config: &'a Config,
    tally: &'a mut Tally,
    rng: Rng,
    // Must drop before the guest, whose vCPUs own the rings.
    tracker: Box<dyn DirtyTracker>,
    guest: Guest,
    oracle: Oracle,
    /// The pages of RAM that the guest writes to.
    tested: Range<u64>,
    /// The index of a log of the same memory at another address, through which nothing writes.
    alias: usize,
    /// The words of each log that are in the current collection.
    picked: Vec<Vec<bool>>,
    /// The VMM's own writes in words that are not in the collection.
    kept: Vec<Vec<u64>>,
    /// The number of collections since logging was enabled.
    age: u64,
    /// Pages whose bits were removed, and the number of collections since.
    victims: Vec<(Place, u64)>,
    backing: Backing,
    name: String,
}

impl<'a> SoakMachine<'a> {
    pub(super) fn build(
        kvm: &kvm_ioctls::Kvm,
        config: &'a Config,
        method: Method,
        backing: Backing,
        mut rng: Rng,
        tally: &'a mut Tally,
    ) -> Result<Self, Error> {
        let base = config.slot_base.unwrap_or(RAM_START);
        let (first, size) = crate::oracle::ram(base, config.size, backing);
        let mut memory = Memory::map(RAM, MemoryConfig { backing, ..MemoryConfig::new(size) })?;
        memory.start_at(first)?;
        let tested = (base - first) / PAGE_SIZE..size / PAGE_SIZE;
        let cuts =
            if config.slot_base.is_none() { draw_cuts(&mut rng, tested.end) } else { vec![tested.start] };
        memory.cut_at(&cuts.iter().map(|page| page * PAGE_SIZE).collect::<Vec<_>>())?;
        let within = |slot: &&Slot| slot.offset() / PAGE_SIZE >= tested.start;
        let slots: Vec<Slot> = memory.slots().iter().filter(within).cloned().collect();
        let dirty_ring = (method == Method::Ring).then_some(config.ring_entries);
        let mut guest = Guest::build(
            kvm,
            memory,
            GuestConfig {
                dirty_ring,
                enter: sandbox::each_vcpu(config.sandbox),
                ..GuestConfig::new(config.vcpus)
            },
        )?;
        let orders = [Order::Random, Order::Shuffled, Order::Sequential];
        let write = WriteConfig {
            order: orders[rng.below(3) as usize],
            hot: rng.chance(30).then_some(Hot { percent: 5.0, share: 50.0 }),
            shared: config.vcpus > 1 && rng.chance(40),
            passes: 0,
            seed: rng.next(),
            latency: false,
            ..WriteConfig::default()
        };
        let ram = (tested.end - tested.start) * PAGE_SIZE;
        let each = tested.end - tested.start;
        if each < 2 * config.vcpus as u64 {
            return Err(guest::Error::TooFewPages { pages: each, vcpus: config.vcpus }.into());
        }
        for (index, control) in guest.controls().enumerate() {
            let region = write.region(index, config.vcpus, ram);
            let region = Region { first: tested.start + region.first, ..region };
            write.program(control, index, region, RAM_VA, guest.tsc_hz);
        }
        let (vm, quiesced) = guest.quiesced()?;
        let mut tracker = tracker(method, vm, &quiesced, config.clear_chunk)?;
        slots.iter().try_for_each(|slot| tracker.track(slot.id()))?;
        let alias = slots[0].at(guest.slot.id() + 1, ELSEWHERE * 2 + slots[0].gpa())?;
        guest.vm.memslots().set(&alias, 0)?;
        tracker.track(alias.id())?;
        let name = format!(
            "{backing}, {} order{}, memslots at {}",
            write.order.name(),
            if write.shared { " shared" } else { "" },
            slots.iter().map(|slot| format!("{:#x}", slot.gpa())).collect::<Vec<_>>().join(" ")
        );
        let oracle = Oracle::new(tested.end, config.vcpus);
        let words = || tracker.logs().iter().map(|log| log.words.len());
        let (picked, kept) =
            (words().map(|n| vec![true; n]).collect(), words().map(|n| vec![0; n]).collect());
        let alias = slots.len();
        let (age, victims) = (0, Vec::new());
        Ok(Self {
            config,
            tally,
            rng,
            tracker,
            guest,
            oracle,
            tested,
            alias,
            picked,
            kept,
            age,
            victims,
            backing,
            name,
        })
    }

    /// Runs until `budget` events are checked or the time limit expires.
    pub(super) fn run(
        mut self,
        budget: u64,
        until: Option<Instant>,
        watch: &mut dyn FnMut(&Tally),
    ) -> Result<(), Error> {
        let counters = Counters::open(&self.guest.vm.fd, &self.guest.vcpus);
        self.guest.resume();
        // Writes all memory first, so that logging starts with huge pages if there are any.
        self.let_run(self.tested.end - self.tested.start)?;
        if let Some(large) = counters.ok().and_then(|c| c.read().ok()?.get("pages_2m").copied()) {
            self.tally.pages_2m = self.tally.pages_2m.max(Some(large));
        }
        self.switch_on()?;
        if self.config.clear_chunk.is_some() {
            self.edges()?;
        }
        let end = self.tally.events + budget;
        while self.tally.events < end
            && until.is_none_or(|until| Instant::now() < until)
            && (self.config.lose == 0 || self.tally.injected[0] < self.config.lose)
        {
            self.step()?;
            watch(self.tally);
        }
        // The last collection must leave nothing due.
        self.pick(Pick::All);
        self.collect(Mode::Quiesced)
    }

    /// Performs a random action.
    fn step(&mut self) -> Result<(), Error> {
        let pages = self.tested.end - self.tested.start;
        let accesses = self.rng.below(pages) / if self.config.lose > 0 { 8 } else { 1 };
        self.let_run(accesses)?;
        let mode = match self.config.mode {
            Some(mode) => mode,
            None if self.rng.chance(70) => Mode::Running,
            None => Mode::Quiesced,
        };
        self.pick(if self.config.clear_chunk.is_some() { Pick::Drawn } else { Pick::All });
        self.collect(mode)?;
        if self.config.lose > 0 {
            return Ok(());
        }
        match self.rng.below(100) {
            0..4 => self.toggle(),
            4..8 => self.recreate(),
            8..12 => self.shift(),
            _ => Ok(()),
        }
    }

    /// Lets the guest make `accesses` accesses, or fewer on a slow host.
    fn let_run(&mut self, accesses: u64) -> Result<(), Error> {
        let done = || self.guest.controls().map(|control| control.done.load(Ordering::Relaxed)).sum::<u64>();
        let (start, patience) = (done(), Instant::now() + Duration::from_secs(2));
        while done() - start < accesses && Instant::now() < patience {
            match self.guest.wait(Duration::from_millis(1))? {
                Woke::Timeout => {}
                Woke::Rung => return Err(Error::Stopped),
            }
        }
        Ok(())
    }

    /// First clears only the chunks that end on the first page of a huge page, while huge pages are
    /// whole. Then all memory is written and everything is cleared. Random actions would split most
    /// huge pages before this happens.
    fn edges(&mut self) -> Result<(), Error> {
        self.pick(Pick::Edges);
        self.collect(Mode::Quiesced)?;
        self.let_run(2 * (self.tested.end - self.tested.start))?;
        self.pick(Pick::All);
        self.collect(Mode::Quiesced)
    }

    /// Selects the chunks that the next collection clears.
    fn pick(&mut self, pick: Pick) {
        let chunk = self.config.clear_chunk.unwrap_or(64);
        let style = match pick {
            Pick::Drawn if self.tracker.method().is_manual() => self.rng.below(4),
            Pick::Edges if self.tracker.method().is_manual() => 4,
            _ => 0,
        };
        for (log, words) in self.tracker.logs().iter().zip(&mut self.picked) {
            let first = log.slot().gpa() / PAGE_SIZE;
            for (words, nth) in words.chunks_mut((chunk / 64) as usize).zip(1..) {
                let last = first + chunk * nth - 1;
                words.fill(match style {
                    0 => true,
                    1 => self.rng.chance(50),
                    2 => self.rng.chance(6),
                    // Chunks that reach into the next 2 MiB by one page: KVM must protect a huge
                    // page there too. Not all of them, because each also protects the block in
                    // which it begins.
                    3 => last.is_multiple_of(512) && self.rng.chance(50) || self.rng.chance(1),
                    _ => last.is_multiple_of(1024),
                });
            }
        }
    }

    /// Collects and checks the log once.
    fn collect(&mut self, mode: Mode) -> Result<(), Error> {
        match mode {
            Mode::Running => vcpu::flush_all(&self.guest.vcpus)?,
            Mode::Quiesced => drop(self.guest.pause()?),
        }
        self.judge(mode)?;
        if mode == Mode::Quiesced {
            self.guest.resume();
        }
        Ok(())
    }

    fn judge(&mut self, mode: Mode) -> Result<(), Error> {
        self.tracker.get()?;
        self.leave_unpicked();
        self.tracker.clear()?;
        self.keep_unpicked();
        self.take_out();
        let epoch = self.oracle.next_epoch();
        self.guest.controls().for_each(|control| control.epoch.store(epoch, Ordering::SeqCst));
        let (picked, alias, guest) = (&self.picked, self.alias, &self.guest);
        let verdict = self.oracle.judge(
            self.tracker.logs(),
            guest.vm.memory.mapping.words(),
            mode,
            |log, word| log != alias && picked[log][word],
            |vcpu| guest.controls().nth(vcpu).map_or(0, |control| control.pass.load(Ordering::Relaxed)),
        );
        let tally = &mut *self.tally;
        if verdict.checked > 0 && !tally.backings.contains(&self.backing) {
            tally.backings.push(self.backing);
        }
        tally.collections[usize::from(mode == Mode::Quiesced)] += 1;
        tally.events += verdict.checked;
        tally.late += verdict.late;
        tally.explained += verdict.explained;
        tally.lost += verdict.lost.len() as u64;
        tally.lost_at_edges +=
            verdict.lost.iter().filter(|lost| lost.place.gfn.is_multiple_of(512)).count() as u64;
        tally.unexplained += verdict.unexplained.len() as u64;
        tally.misplaced += verdict.misplaced.len() as u64;
        for lost in &verdict.lost {
            tally.name(lost, &self.name);
        }
        for place in &verdict.unexplained {
            tally.name(format_args!("UNEXPLAINED bit of {place} in collection {}", epoch - 1), &self.name);
        }
        for (place, stamp) in &verdict.misplaced {
            tally.name(format_args!("MISPLACED {place} holds {stamp:?}"), &self.name);
        }
        // Nothing writes through the alias. With initially-set its first collection has all bits
        // set.
        let all_set = self.age == 0 && self.tracker.method() == Method::InitiallySet;
        let alias = &self.tracker.logs()[self.alias];
        if let Some(run) = alias.runs().next().filter(|_| !all_set && self.config.clear_chunk.is_none()) {
            tally.unexplained += run.end - run.start;
            tally.name(
                format_args!("UNEXPLAINED pages {run:?} of the idle memslot {}", alias.slot().id()),
                &self.name,
            );
        }
        self.age += 1;
        self.account(&verdict.lost);
        Ok(())
    }

    /// Hides the unselected words from `clear`, so that KVM keeps their bits.
    fn leave_unpicked(&mut self) {
        for (log, picked) in self.tracker.logs_mut().iter_mut().zip(&self.picked) {
            log.words.iter_mut().zip(picked).filter(|(_, picked)| !**picked).for_each(|(word, _)| *word = 0);
        }
    }

    /// Keeps the VMM's own writes, which `clear` merged in, until their words are selected.
    fn keep_unpicked(&mut self) {
        for ((log, picked), kept) in self.tracker.logs_mut().iter_mut().zip(&self.picked).zip(&mut self.kept)
        {
            for ((word, picked), kept) in log.words.iter_mut().zip(picked).zip(kept) {
                if *picked {
                    *word |= std::mem::take(kept);
                } else {
                    *kept |= std::mem::take(word);
                }
            }
        }
    }

    /// Removes bits of pages that were certainly written since the last collection, if requested.
    fn take_out(&mut self) {
        let wanted = self.config.lose.saturating_sub(self.tally.injected[0] + self.victims.len() as u64);
        if wanted == 0 || self.age == 0 {
            return;
        }
        let words = self.guest.vm.memory.mapping.words();
        let due: Vec<Place> = judge::places(self.tracker.logs())
            .filter(|place| place.slot != self.guest.slot.id() + 1 && self.oracle.is_due(words, place.page))
            .collect();
        if due.is_empty() {
            return;
        }
        for _ in 0..wanted.min(4) {
            let place = due[self.rng.below(due.len() as u64) as usize];
            if self.victims.iter().any(|(victim, _)| victim.page == place.page) {
                continue;
            }
            let holds = |log: &&mut SlotLog| log.slot().id() == place.slot;
            if let Some(log) = self.tracker.logs_mut().iter_mut().find(holds) {
                log.words[(place.in_slot / 64) as usize] &= !(1 << (place.in_slot % 64));
                self.victims.push((place, 0));
            }
        }
    }

    /// Determines what became of the removed bits.
    fn account(&mut self, lost: &[Lost]) {
        let (picked, logs, tally) = (&self.picked, self.tracker.logs(), &mut *self.tally);
        self.victims.retain_mut(|(place, age)| {
            let word = (place.in_slot / 64) as usize;
            let Some(index) = logs.iter().position(|log| log.slot().id() == place.slot) else { return false };
            if lost.iter().any(|lost| lost.place == *place) {
                tally.injected[0] += 1;
                tally.injected[1] += 1;
                return false;
            }
            if *age == 0 || !picked[index][word] {
                *age += 1;
                return true;
            }
            // Not written again before this collection: the oracle must have reported it.
            if logs[index].words[word] >> (place.in_slot % 64) & 1 == 0 {
                tally.injected[0] += 1;
                tally.name(format_args!("MISSED: the removed bit of {place} was not noticed"), &self.name);
            }
            false
        });
    }

    fn switch_on(&mut self) -> Result<(), Error> {
        let mode = if self.rng.chance(50) { Mode::Running } else { Mode::Quiesced };
        if mode == Mode::Quiesced {
            self.guest.pause()?;
        }
        self.tracker.enable(true)?;
        let all_set = self.tracker.method() == Method::InitiallySet;
        self.oracle.baseline(self.guest.vm.memory.mapping.words(), self.tested.clone(), mode, all_set);
        self.kept.iter_mut().for_each(|kept| kept.fill(0));
        self.age = 0;
        if mode == Mode::Quiesced {
            self.guest.resume();
        }
        Ok(())
    }

    /// Disables and enables the log, with writes in between that are not logged.
    fn toggle(&mut self) -> Result<(), Error> {
        self.tally.upheavals[0] += 1;
        self.pick(Pick::All);
        self.collect(Mode::Quiesced)?;
        self.tracker.enable(false)?;
        self.let_run(1000)?;
        if self.tracker.method() == Method::Ring {
            // Writes logged while the log was being disabled are still in the rings.
            vcpu::flush_all(&self.guest.vcpus)?;
            self.tracker.collect()?;
        }
        self.switch_on()
    }

    /// Deletes and recreates a memslot. In half of the cases the guest runs meanwhile and the VMM
    /// emulates its writes.
    fn recreate(&mut self) -> Result<(), Error> {
        self.tally.upheavals[1] += 1;
        // Deleting it discards its log.
        self.pick(Pick::All);
        self.guest.pause()?;
        self.judge(Mode::Quiesced)?;
        let slot = self.draw_slot();
        self.guest.vm.memslots().delete(slot.id())?;
        let absent = self.rng.chance(50);
        if absent {
            self.guest.resume();
            self.let_run(200)?;
        }
        self.guest.vm.memslots().set(&slot, kvm_bindings::KVM_MEM_LOG_DIRTY_PAGES)?;
        if self.tracker.method() == Method::InitiallySet {
            let pages = slot.range();
            self.oracle.allow(pages.start / PAGE_SIZE..pages.end / PAGE_SIZE);
        }
        if !absent {
            self.guest.resume();
        }
        Ok(())
    }

    /// Moves a memslot away and back, while the guest runs or is paused. Its log moves with it.
    fn shift(&mut self) -> Result<(), Error> {
        self.tally.upheavals[2] += 1;
        let slot = self.draw_slot();
        let away = slot.at(slot.id(), ELSEWHERE + slot.gpa())?;
        let running = self.rng.chance(50);
        if !running {
            self.guest.pause()?;
        }
        self.guest.vm.memslots().set(&away, kvm_bindings::KVM_MEM_LOG_DIRTY_PAGES)?;
        if running {
            self.let_run(200)?;
        } else {
            self.pick(Pick::All);
            self.judge(Mode::Quiesced)?;
        }
        self.guest.vm.memslots().set(&slot, kvm_bindings::KVM_MEM_LOG_DIRTY_PAGES)?;
        if !running {
            self.guest.resume();
        }
        Ok(())
    }

    fn draw_slot(&mut self) -> Slot {
        let index = self.rng.below(self.alias as u64) as usize;
        let id = self.tracker.logs()[index].slot().id();
        self.guest.vm.memslots().get(id).expect("every tracked memslot exists between steps")
    }
}

/// The address to which memslots move, above all RAM of a test.
const ELSEWHERE: u64 = 8 << 30;

/// The starts of memslots, mostly at odd pages. The first page after a multiple of 64 is the
/// hardest case.
fn draw_cuts(rng: &mut Rng, pages: u64) -> Vec<u64> {
    let mut cuts = vec![0];
    for _ in 0..rng.below(4) {
        let block = rng.below(pages) / 512 * 512;
        cuts.push(match rng.below(4) {
            0 => block,
            1 => block + 1,
            2 => block + rng.below(8) * 64 + 1,
            _ => rng.below(pages),
        });
    }
    // Memslots begin on a host page.
    cuts.iter_mut().for_each(|cut| *cut = *cut / in_one() * in_one());
    cuts.retain(|&cut| cut < pages);
    cuts.sort_unstable();
    cuts.dedup();
    cuts
}
