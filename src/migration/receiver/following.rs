//! Memory that arrives after its guest has started: which pages are missing, the connection that
//! requests faulting pages, and the messages of the thread that resolves faults.

use std::sync::Arc;

use super::{Receiving, Said};
use crate::bits::Bits;
use crate::fetching::{self, Following, Gate};
use crate::link::{self, Link};
use crate::message::Message;
use crate::postcopy_memory::PostcopyMemory;
use crate::target::Event;
use crate::threads::Orphaned;
use vellum_kvm::memory::Backing;
use vellum_sys::mmap::PAGE_SIZE;

impl Receiving {
    /// Handles messages of the thread that resolves faults.
    pub(super) fn fetched(&mut self) -> Result<Option<Event>, Orphaned> {
        let Some(fetching) = self.place.as_ref().and_then(|place| place.fetching.as_ref()) else {
            return Ok(None);
        };
        Ok(match fetching.heard() {
            Some(fetching::Said::Cut(why)) => {
                Some(self.cut(format!("the connection for pages that are wanted: {why}")))
            }
            Some(fetching::Said::Over(whole)) => {
                let fetching::Whole { fetched, waited, link } = *whole;
                self.faults = link;
                self.waited = waited.clone();
                // Pages that still arrive are present already and must not be overwritten.
                self.memory = Arc::default();
                self.machine.say(Said::Lacks(None))?;
                self.machine.say(Said::Waited(waited))?;
                self.machine.say(Said::Fetched(fetched))?;
                Some(Event::Whole)
            }
            _ => None,
        })
    }

    /// Takes the connection for faulting pages.
    pub(super) fn joined(&mut self, mut link: Link) {
        link.admit();
        link.set_liveness(self.liveness);
        if link.say(&Message::Joined {}).is_err() {
            return;
        }
        match (&self.postcopy, self.place.as_ref().and_then(|place| place.fetching.as_ref())) {
            (Some(_), Some(fetching)) => fetching.link(link),
            _ => self.faults = Some(link),
        }
    }

    /// Starts to resolve faults. The pages that the source has named, and all pages that share a
    /// huge page with them, are missing.
    pub(super) fn begin_to_land(&mut self, pages: u64) -> Result<(), String> {
        let place = self.place.as_mut().ok_or("nothing has been assembled")?;
        let fetching = place.fetching.as_mut().ok_or("nobody has asked for that")?;
        let named: u64 = self.lacking.iter().map(Bits::count).sum();
        if named != pages {
            return Err(format!("the map names {named} pages, and the source {pages}"));
        }
        let page = place.ram.config.backing.page_size();
        let unit = page / PAGE_SIZE;
        let missing = Bits::new(place.ram.mapping.len() / page);
        for (at, bits) in self.lacking.iter().enumerate() {
            let slot = &place.memory[at];
            let mut from = 0;
            while let Some(run) = bits.first_run(from..slot.pages()) {
                from = run.end;
                if !Arc::ptr_eq(slot.mapping(), &place.ram.mapping) {
                    return Err("pages that are no RAM are said to follow".into());
                }
                let first = slot.offset() / PAGE_SIZE;
                missing.set((first + run.start) / unit..(first + run.end).div_ceil(unit));
            }
        }
        self.lacking.clear();
        let mut link = self.faults.take().ok_or("the connection for pages that are wanted is not there")?;
        link.set_liveness(self.liveness);
        // Locked memory cannot be unmapped.
        if place.ram.config.lock {
            place.ram.mapping.unlock().map_err(|error| format!("unlocking memory: {error}"))?;
        }
        place.ram.mapping.keep(true);
        let mut will_be = Vec::new();
        let mut from = 0;
        while let Some(run) = missing.first_run(from..place.ram.mapping.len() / page) {
            from = run.end;
            will_be.push(run.start * page..run.end * page);
        }
        // Reports of touched memory include the pages that have not arrived yet.
        let _ = place.ram.shown.set(will_be);
        let uffd = fetching.take_uffd().ok_or("it has begun")?;
        let postcopy =
            Arc::new(PostcopyMemory::new(uffd, place.ram.mapping.clone(), page, missing, fetching.wake()));
        let gate = Arc::new(Gate::new(self.fence.clone()));
        let vcpus = place.vcpus.threads();
        let (ram, own) = (place.ram.clone(), gate.clone());
        fetching.follow(Following { postcopy: postcopy.clone(), ram, link, gate: own, vcpus })?;
        let shared =
            matches!(place.ram.config.backing, Backing::SharedHugetlb(_) | Backing::Shmem | Backing::Memfd);
        postcopy.empty(shared)?;
        for (slot, memory) in place.memory.iter().zip(self.memory.iter()) {
            if Arc::ptr_eq(slot.mapping(), &place.ram.mapping) {
                memory.divert_to(&postcopy);
            }
        }
        (self.postcopy, self.gate) = (Some(postcopy), Some(gate));
        Ok(())
    }

    /// Sends the map of missing pages.
    pub(super) fn lack(&mut self) -> Result<(), link::Error> {
        let (Some(postcopy), Some(place), Some(link)) = (&self.postcopy, &self.place, &mut self.link) else {
            return Ok(());
        };
        let mut pages = 0;
        for (region, slot) in (0u32..).zip(place.ram.slots()) {
            let bits = Bits::new(slot.pages());
            let first = slot.offset() / PAGE_SIZE;
            let unit = postcopy.unit();
            let units = first / unit..(first + slot.pages()).div_ceil(unit);
            let mut from = units.start;
            while let Some(run) = postcopy.missing().first_run(from..units.end) {
                from = run.end;
                let (start, end) =
                    ((run.start * unit).max(first), (run.end * unit).min(first + slot.pages()));
                bits.set(start - first..end - first);
            }
            pages += bits.count();
            link.send_map(region, &bits, slot.pages())?;
        }
        link.say(&Message::Lacking { pages })
    }
}
