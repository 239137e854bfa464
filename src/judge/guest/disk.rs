//! Disks whose sectors are functions of their number.
//!
//! The number of requests follows from the first processor's position. So does everything that
//! driver and device write: sectors, status, both rings and their indices. No counter in memory is
//! involved.
//!
//! An answer is collected only when the next request is due, 512 accesses or a phase later, so at
//! almost any time there is a request in flight. Each buffer is compared twice: when the answer is
//! collected, and seven requests later, before the buffer is used again.

use core::mem::{MaybeUninit, offset_of};
use core::sync::atomic::{AtomicBool, Ordering, fence};

use crate::arch::{load, store};
use crate::console::{Item, line};
use crate::report::{Kind, fault};
use crate::sectors::{SECTORS, WORDS, first, word};
use crate::virtio::{Device, Place, Rings, SIZE};
use crate::{Patience, Shared, words};

const MAX_DISKS: usize = 4;
/// The number of buffers. Each holds the data of one request.
const SLOTS: u64 = 8;
const BYTES: u32 = 4096;
/// VIRTQ_DESC_F_NEXT and VIRTQ_DESC_F_WRITE.
const NEXT: u16 = 1;
const WRITE: u16 = 2;
/// VIRTQ_AVAIL_F_NO_INTERRUPT: the image polls.
const NO_INTERRUPT: u16 = 1;
/// The value of a status until the device writes it.
const PENDING: u8 = 0xff;

#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C)]
struct Descriptor {
    address: u64,
    length: u32,
    flags: u16,
    next: u16,
}

/// The memory that driver and device share. The used ring is on the second page, as the legacy
/// layout requires.
#[repr(C, align(4096))]
struct Memory {
    descriptors: [Descriptor; SIZE as usize],
    avail_flags: u16,
    avail_index: u16,
    avail: [u16; SIZE as usize],
    rest: [u8; 4096 - 16 * SIZE as usize - 4 - 2 * SIZE as usize],
    used_flags: u16,
    used_index: u16,
    used: [[u32; 2]; SIZE as usize],
    unused: [u8; 1024],
    headers: [[u64; 2]; SLOTS as usize],
    status: [u8; SLOTS as usize],
    fill: [u8; 4096 - 4 - 8 * SIZE as usize - 1024 - 17 * SLOTS as usize],
    buffers: [[u8; BYTES as usize]; SLOTS as usize],
}

const NO_DESCRIPTOR: Descriptor = Descriptor { address: 0, length: 0, flags: 0, next: 0 };
const NO_MEMORY: Memory = Memory {
    descriptors: [NO_DESCRIPTOR; SIZE as usize],
    avail_flags: 0,
    avail_index: 0,
    avail: [0; SIZE as usize],
    rest: [0; 4096 - 16 * SIZE as usize - 4 - 2 * SIZE as usize],
    used_flags: 0,
    used_index: 0,
    used: [[0; 2]; SIZE as usize],
    unused: [0; 1024],
    headers: [[0; 2]; SLOTS as usize],
    status: [0; SLOTS as usize],
    fill: [0; 4096 - 4 - 8 * SIZE as usize - 1024 - 17 * SLOTS as usize],
    buffers: [[0; BYTES as usize]; SLOTS as usize],
};

static MEMORY: Shared<[Memory; MAX_DISKS]> = Shared::new([NO_MEMORY; MAX_DISKS]);
#[unsafe(link_section = ".bss.sealed")]
static DISKS: Shared<[MaybeUninit<Disk>; MAX_DISKS]> = Shared::new([const { MaybeUninit::zeroed() }; MAX_DISKS]);
/// The number of disks.
#[unsafe(link_section = ".bss.sealed")]
static COUNT: Shared<usize> = Shared::new(0);

/// Whether a disk is no longer used: its rings are wrong, or it does not answer.
#[unsafe(link_section = ".bss.live")]
static IS_OFF: [AtomicBool; MAX_DISKS] = [const { AtomicBool::new(false) }; MAX_DISKS];

#[derive(Clone, Copy)]
struct Disk {
    number: usize,
    device: Device,
    memory: u64,
    sectors: u64,
    seed: u64,
    /// The number of bytes that the device reports as written for a request.
    length: u32,
}

fn disks() -> &'static [Disk] {
    // SAFETY: only the first processor calls this and `add`, which has filled in this many.
    unsafe { core::slice::from_raw_parts(DISKS.get().cast(), *COUNT.get()) }
}

/// Starts the disk at `place`. A disk with other sectors is reported and not used.
pub(crate) fn add(place: Place, seed: u64) {
    let at = disks().len();
    if at == MAX_DISKS {
        return left_out(place.address(), "there are four already");
    }
    let memory = MEMORY.get().cast::<Memory>().wrapping_add(at) as u64;
    match Disk::start(at, place, seed, memory) {
        Ok(disk) => {
            line(&[
                Item::Text(words::DISK),
                Item::Number(at as u64),
                Item::Name(" "),
                Item::Text(place.name()),
                Item::Name(" at="),
                Item::Address(place.address()),
                Item::Name(" sectors="),
                Item::Number(disk.sectors),
            ]);
            // SAFETY: as in `disks`.
            unsafe {
                DISKS.get().cast::<Disk>().add(at).write(disk);
                *COUNT.get() = at + 1;
            }
        }
        Err(why) => left_out(place.address(), why),
    }
}

/// Reports a disk that is not used, with the reason.
pub(crate) fn left_out(address: u64, why: &str) {
    line(&[
        Item::Text(words::LEFT_OUT),
        Item::Address(address),
        Item::Name(" "),
        Item::Address(address),
        Item::Name(" a disk: "),
        Item::Text(why),
    ]);
}

/// Whether there is a disk.
pub(crate) fn any() -> bool {
    !disks().is_empty()
}

/// Waits for the answers to earlier requests, checks them, and makes request `number` of each disk.
/// Returns whether something was wrong.
pub(crate) fn request(number: u64) -> bool {
    let mut right = true;
    for disk in disks() {
        right &= disk.is_answered(number) && disk.is_right(number, number - 1);
        // The buffer is about to be used again.
        right &= number < SLOTS || disk.is_off() || disk.is_right(number, number - SLOTS);
        if !disk.is_off() {
            disk.make(number);
        }
    }
    !right
}

/// Checks the buffers of the last of `number` requests.
pub(crate) fn finish(number: u64) {
    for (at, disk) in disks().iter().enumerate() {
        let answered = disk.is_answered(number);
        for request in number - SLOTS.min(number)..number {
            if answered && !disk.is_off() {
                disk.is_right(number, request);
            }
        }
        line(&[
            Item::Text(words::REQUESTS),
            Item::Name("disk="),
            Item::Number(at as u64),
            Item::Name(" answered="),
            Item::Number(if answered { number } else { 0 }),
        ]);
        disk.device.reset();
    }
}

impl Disk {
    fn start(number: usize, place: Place, seed: u64, memory: u64) -> Result<Self, &'static str> {
        store(memory + offset_of!(Memory, avail_flags) as u64, NO_INTERRUPT);
        let rings = Rings {
            descriptors: memory,
            available: memory + offset_of!(Memory, avail_flags) as u64,
            used: memory + offset_of!(Memory, used_flags) as u64,
        };
        let (device, [low, high]) = place.start(0, &rings)?;
        let sectors = u64::from(low) | u64::from(high) << 32;
        let mut disk = Self { number, device, memory, sectors, seed, length: 0 };
        for slot in 0..SLOTS {
            for (at, descriptor) in disk.descriptors(slot).into_iter().enumerate() {
                store(memory + 16 * (3 * slot + at as u64), descriptor);
            }
        }
        // The frequency of the TSC is not known yet, so the polls are counted.
        disk.make(0);
        for _ in 0..200_000_000u32 {
            if disk.used_index() == 1 {
                break;
            }
            core::hint::spin_loop();
        }
        let status = load::<u8>(disk.status(0));
        let why = if disk.used_index() != 1 {
            "it does not answer"
        } else if status != 0 {
            "it cannot be read"
        } else if sectors < SECTORS || disk.wrong_word(0).is_some() {
            "it is not made by `vellum judge disk`"
        } else {
            disk.length = load::<[u32; 2]>(disk.used(0))[1];
            return Ok(disk);
        };
        device.reset();
        Err(why)
    }

    fn is_off(&self) -> bool {
        IS_OFF[self.number & 3].load(Ordering::Relaxed)
    }

    fn give_up(&self) {
        IS_OFF[self.number & 3].store(true, Ordering::Relaxed);
    }

    fn used_index(&self) -> u16 {
        let index = load(self.memory + offset_of!(Memory, used_index) as u64);
        fence(Ordering::SeqCst);
        index
    }

    /// The address of a request's entry in the used ring.
    fn used(&self, number: u64) -> u64 {
        self.memory + offset_of!(Memory, used) as u64 + 8 * (number % u64::from(SIZE))
    }

    fn available(&self, number: u64) -> u64 {
        self.memory + offset_of!(Memory, avail) as u64 + 2 * (number % u64::from(SIZE))
    }

    fn header(&self, slot: u64) -> u64 {
        self.memory + offset_of!(Memory, headers) as u64 + 16 * slot
    }

    fn status(&self, slot: u64) -> u64 {
        self.memory + offset_of!(Memory, status) as u64 + slot
    }

    fn buffer(&self, slot: u64) -> u64 {
        self.memory + offset_of!(Memory, buffers) as u64 + u64::from(BYTES) * slot
    }

    /// The three descriptors of a slot: header, buffer and status.
    fn descriptors(&self, slot: u64) -> [Descriptor; 3] {
        let next = 3 * slot as u16;
        [
            Descriptor { address: self.header(slot), length: 16, flags: NEXT, next: next + 1 },
            Descriptor { address: self.buffer(slot), length: BYTES, flags: NEXT | WRITE, next: next + 2 },
            Descriptor { address: self.status(slot), length: 1, flags: WRITE, next: 0 },
        ]
    }

    /// The first wrong word in a request's buffer: its address, the expected value and the value
    /// found.
    fn wrong_word(&self, number: u64) -> Option<(u64, u64, u64)> {
        let (sector, buffer) = (first(number, self.seed, self.sectors), self.buffer(number % SLOTS));
        (0..SECTORS * WORDS).find_map(|at| {
            let expected = word(sector + at / WORDS, at % WORDS);
            let found = load::<u64>(buffer + 8 * at);
            (found != expected).then_some((buffer + 8 * at, expected, found))
        })
    }

    fn make(&self, number: u64) {
        let slot = number % SLOTS;
        store(self.header(slot), [0, first(number, self.seed, self.sectors)]);
        store(self.status(slot), PENDING);
        store(self.available(number), 3 * slot as u16);
        fence(Ordering::SeqCst);
        store(self.memory + offset_of!(Memory, avail_index) as u64, number as u16 + 1);
        fence(Ordering::SeqCst);
        self.device.notify();
    }

    /// Waits until `number` requests have been answered.
    fn is_answered(&self, number: u64) -> bool {
        if self.is_off() {
            return false;
        }
        let expected = number as u16;
        let mut patience = Patience::NONE;
        loop {
            let found = self.used_index();
            let at = self.memory + offset_of!(Memory, used_index) as u64;
            if found == expected {
                return true;
            }
            let kind = if found != expected.wrapping_sub(1) {
                Kind::DiskRing
            } else if patience.is_over() {
                Kind::DiskLost
            } else {
                core::hint::spin_loop();
                continue;
            };
            fault(kind, 0, at, expected.into(), found.into());
            self.give_up();
            return false;
        }
    }

    /// Checks everything that a request has left in memory, after `made` requests.
    fn is_right(&self, made: u64, number: u64) -> bool {
        let slot = number % SLOTS;
        let head = 3 * slot;
        let index = self.memory + offset_of!(Memory, avail_index) as u64;
        let mut rings = [
            (index, made & 0xffff, u64::from(load::<u16>(index))),
            (self.available(number), head, load::<u16>(self.available(number)).into()),
            (self.used(number), head | u64::from(self.length) << 32, load(self.used(number))),
            (self.status(slot), 0, load::<u8>(self.status(slot)).into()),
            (self.header(slot), 0, load(self.header(slot))),
            (self.header(slot) + 8, first(number, self.seed, self.sectors), load(self.header(slot) + 8)),
            (0, 0, 0),
            (0, 0, 0),
            (0, 0, 0),
        ];
        for (at, descriptor) in self.descriptors(slot).into_iter().enumerate() {
            let place = self.memory + 16 * (head + at as u64);
            let found = load::<Descriptor>(place);
            if found != descriptor {
                rings[6 + at] = (place, descriptor.address, found.address);
            }
        }
        let wrong = rings.iter().find(|(_, expected, found)| expected != found);
        if let Some((at, expected, found)) = wrong {
            fault(Kind::DiskRing, 0, *at, *expected, *found);
            self.give_up();
        }
        let data = self.wrong_word(number);
        if let Some((at, expected, found)) = data {
            fault(Kind::DiskData, 0, at, expected, found);
        }
        wrong.is_none() && data.is_none()
    }
}
