//! MSI-X (PCI 3.0, section 6.8.2): the message table of a function with a mask for each vector, and
//! the pending bits.
//!
//! A vector is a [`Line`]. KVM turns a signal of its eventfd into the message that KVM was last
//! told. The line holds the mask. KVM learns a message when the vector is unmasked, and is not told
//! when it is masked again. So a message in flight when the guest masks its vector still arrives,
//! as it may on a physical bus.

use std::sync::{Arc, Mutex, MutexGuard};

use serde::{Deserialize, Serialize};

use crate::line::Line;
use vellum_sys::plant::{self, Mistake};

/// The capability ID.
pub(crate) const CAPABILITY: u8 = 0x11;
/// Function mask, a bit of message control (2 bytes after the capability's start). Other fields are
/// [`ENABLE`] and the table size minus one.
pub(crate) const FUNCTION_MASK: u16 = 1 << 14;
/// MSI-X enable, a bit of message control.
pub const ENABLE: u16 = 1 << 15;
/// Bytes of a table entry: address, data, vector control.
pub const ENTRY: usize = 16;
/// Mask bit of vector control.
const MASKED: u32 = 1;

/// The message of a vector.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Message {
    /// The address of the write.
    pub address: u64,
    /// The data of the write.
    pub data: u32,
}

/// Tells KVM the message of a vector. From then on KVM sends it for each signal of that vector's
/// line.
pub type Route = Box<dyn Fn(usize, Message) + Send + Sync>;

/// The MSI-X table of a function.
pub(crate) struct Msix {
    lines: Arc<[Line]>,
    route: Route,
    table: Mutex<Table>,
}

struct Table {
    entries: Vec<Entry>,
    /// The enable and function mask bits of message control.
    control: u16,
    /// The message that KVM was last told for each vector.
    routed: Vec<Option<Message>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    message: Message,
    control: u32,
}

/// The state that a migration carries.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    entries: Vec<Entry>,
    control: u16,
    /// One bit a vector.
    pending: Vec<bool>,
}

impl Msix {
    /// A table whose vectors signal `lines`, all masked. `route` tells KVM a message.
    pub fn new(lines: Arc<[Line]>, route: Route) -> Self {
        let entries = vec![Entry { message: Message::default(), control: MASKED }; lines.len()];
        let table = Table { routed: vec![None; entries.len()], entries, control: 0 };
        Self { lines, route, table: Mutex::new(table) }
    }

    /// Handles a write to message control.
    pub(crate) fn set_control(&self, control: u16) {
        let mut table = self.lock();
        table.control = control & (ENABLE | FUNCTION_MASK);
        (0..self.lines.len()).for_each(|at| self.update(&mut table, at));
    }

    /// Handles a read of the table: 4 or 8 aligned bytes of entries (section 6.8.2). Other accesses
    /// return zero.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        let table = self.lock();
        for (at, part) in (0..).step_by(4).zip(data.chunks_mut(4)) {
            let place = place(offset.wrapping_add(at), part.len());
            let entry = place.and_then(|(vector, word)| Some((table.entries.get(vector)?, word)));
            match entry {
                Some((entry, word)) => part.copy_from_slice(&entry.words()[word].to_le_bytes()),
                None => part.fill(0),
            }
        }
    }

    /// Handles a write to the table. Accesses other than 4 or 8 aligned bytes are ignored.
    pub fn write(&self, offset: u64, data: &[u8]) {
        let mut table = self.lock();
        let places = (0..data.len() as u64).step_by(4).map(|at| place(offset.wrapping_add(at), 4));
        for (place, part) in places.clone().zip(data.chunks(4)) {
            let (Some((vector, word)), Ok(part)) = (place, part.try_into()) else { return };
            let Some(entry) = table.entries.get_mut(vector) else { return };
            entry.put(word, u32::from_le_bytes(part));
        }
        // Only after the whole write is stored: KVM must not see half a message.
        for (vector, _) in places.flatten() {
            self.update(&mut table, vector);
        }
    }

    /// Handles a read of the pending bit array. Bits beyond it are zero.
    pub(crate) fn read_pending(&self, offset: u64, data: &mut [u8]) {
        let bit = |at: u64| {
            let line = usize::try_from(at).ok().and_then(|at| self.lines.get(at));
            line.is_some_and(Line::is_pending)
        };
        for (at, byte) in (offset..).zip(data) {
            *byte = (0..8)
                .filter(|n| bit(at.saturating_mul(8).saturating_add(*n)))
                .fold(0, |byte, n| byte | 1 << n);
        }
    }

    /// Saves the state for [`Msix::restore`].
    pub fn save(&self) -> State {
        let table = self.lock();
        let pending = self.lines.iter().map(Line::is_pending).collect();
        State { entries: table.entries.clone(), control: table.control, pending }
    }

    /// Restores what [`Msix::save`] returned and tells KVM the messages of unmasked vectors.
    /// Returns false if the state is of a table of another size.
    pub fn restore(&self, state: &State) -> bool {
        let mut table = self.lock();
        if [state.entries.len(), state.pending.len()] != [self.lines.len(); 2] {
            return false;
        }
        table.control = state.control & (ENABLE | FUNCTION_MASK);
        for (at, (entry, pending)) in state.entries.iter().zip(&state.pending).enumerate() {
            let message = Message { address: entry.message.address & !3, ..entry.message };
            table.entries[at] = Entry { message, control: entry.control & MASKED };
            // Mask the line first. A pending signal must not be sent, and thereby lost, before KVM
            // knows its message.
            self.lines[at].set_masked(true);
            self.lines[at].set_pending(*pending && !plant::is(Mistake::PendingLeftOut));
            self.update(&mut table, at);
        }
        true
    }

    /// Updates a vector's line, and KVM, from the table.
    fn update(&self, table: &mut Table, at: usize) {
        let entry = table.entries[at];
        let open = table.control & (ENABLE | FUNCTION_MASK) == ENABLE && entry.control & MASKED == 0;
        if open && table.routed[at] != Some(entry.message) {
            (self.route)(at, entry.message);
            table.routed[at] = Some(entry.message);
        }
        self.lines[at].set_masked(!open);
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().expect("the lock is not poisoned")
    }
}

/// The vector, and the word within its entry, of a 4-byte access at `offset`.
fn place(offset: u64, len: usize) -> Option<(usize, usize)> {
    let offset = usize::try_from(offset).ok()?;
    (len == 4 && offset.is_multiple_of(4)).then_some((offset / ENTRY, offset % ENTRY / 4))
}

impl Entry {
    fn words(&self) -> [u32; 4] {
        [self.message.address as u32, (self.message.address >> 32) as u32, self.message.data, self.control]
    }

    fn put(&mut self, word: usize, value: u32) {
        let message = &mut self.message;
        match word {
            // A message is 4 bytes long, so its address is 4-byte aligned.
            0 => message.address = message.address & !0xffff_ffff | u64::from(value & !3),
            1 => message.address = message.address & 0xffff_ffff | u64::from(value) << 32,
            2 => message.data = value,
            _ => self.control = value & MASKED,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Routed = Arc<Mutex<Vec<(usize, Message)>>>;

    fn msix(vectors: usize) -> (Msix, Routed) {
        let lines: Arc<[Line]> = (0..vectors).map(|_| Line::new(true).unwrap()).collect();
        let routed = Routed::default();
        let heard = routed.clone();
        let route = move |vector, message| heard.lock().unwrap().push((vector, message));
        (Msix::new(lines, Box::new(route)), routed)
    }

    fn program(msix: &Msix, vector: u64, data: u32, control: u32) {
        let address = 0xfee0_1000u64;
        msix.write(16 * vector, &address.to_le_bytes());
        msix.write(16 * vector + 8, &(u64::from(control) << 32 | u64::from(data)).to_le_bytes());
    }

    fn pending(msix: &Msix) -> u64 {
        let mut data = [0; 8];
        msix.read_pending(0, &mut data);
        u64::from_le_bytes(data)
    }

    fn sent(msix: &Msix) -> Vec<bool> {
        msix.lines.iter().map(|line| line.event().read().is_ok()).collect()
    }

    #[test]
    fn kvm_is_told_of_a_message_when_it_may_be_sent_and_once() {
        let (msix, routed) = msix(2);
        program(&msix, 1, 0x31, 0);
        assert!(routed.lock().unwrap().is_empty(), "MSI-X is not enabled");
        msix.set_control(ENABLE | FUNCTION_MASK);
        assert!(routed.lock().unwrap().is_empty(), "all are masked");
        msix.set_control(ENABLE);
        let message = Message { address: 0xfee0_1000, data: 0x31 };
        assert_eq!(*routed.lock().unwrap(), [(1, message)]);
        program(&msix, 1, 0x31, 1);
        program(&msix, 1, 0x31, 0);
        assert_eq!(routed.lock().unwrap().len(), 1, "nothing has changed");
        program(&msix, 1, 0x32, 1);
        assert_eq!(routed.lock().unwrap().len(), 1, "it is masked");
        program(&msix, 1, 0x32, 0);
        assert_eq!(routed.lock().unwrap()[1], (1, Message { data: 0x32, ..message }));
    }

    #[test]
    fn a_masked_vector_is_pending_and_sent_when_its_mask_goes() {
        let (msix, _) = msix(10);
        msix.set_control(ENABLE);
        program(&msix, 9, 0x31, 1);
        program(&msix, 0, 0x30, 0);
        msix.lines[9].signal();
        msix.lines[0].signal();
        assert_eq!((pending(&msix), sent(&msix)[0], sent(&msix)[9]), (1 << 9, true, false));
        msix.set_control(0);
        msix.lines[0].signal();
        program(&msix, 9, 0x31, 0);
        assert_eq!((pending(&msix), sent(&msix)), (1 << 9 | 1, vec![false; 10]), "not enabled");
        msix.set_control(ENABLE);
        let sent = sent(&msix);
        assert_eq!((pending(&msix), sent[0], sent[1], sent[9]), (0, true, false, true));
    }

    #[test]
    fn what_is_pending_is_sent_where_the_table_goes_on() {
        let (old, _) = msix(3);
        old.set_control(ENABLE);
        program(&old, 0, 0x30, 0);
        program(&old, 2, 0x31, 1);
        old.lines[2].signal();
        let (new, routed) = msix(3);
        let state: State = serde_json::from_str(&serde_json::to_string(&old.save()).unwrap()).unwrap();
        assert!(new.restore(&state));
        assert_eq!((routed.lock().unwrap().len(), pending(&new)), (1, 1 << 2));
        program(&new, 2, 0x31, 0);
        assert_eq!((sent(&new), routed.lock().unwrap().len()), (vec![false, false, true], 2));
        assert!(!msix(2).0.restore(&state));
    }

    #[test]
    fn accesses_that_there_are_not_do_nothing() {
        let (msix, routed) = msix(1);
        msix.set_control(ENABLE);
        let before = msix.save();
        for (offset, len) in [(16, 4), (u64::MAX - 7, 8), (2, 4), (0, 1), (12, 2), (16, 8)] {
            msix.write(offset, &vec![0; len]);
            let mut data = vec![0xaa; len];
            msix.read(offset, &mut data);
            assert_eq!(data, vec![0; len], "{offset} {len}");
        }
        assert_eq!((msix.save(), routed.lock().unwrap().len()), (before, 0));
        let mut byte = [0xaa];
        msix.read_pending(u64::MAX / 8, &mut byte);
        assert_eq!(byte, [0]);
        // Reserved bits stay zero, and an address keeps its alignment.
        msix.write(0, &u64::MAX.to_le_bytes());
        msix.write(12, &u32::MAX.to_le_bytes());
        let mut entry = [0; 8];
        msix.read(0, &mut entry);
        assert_eq!(u64::from_le_bytes(entry), !3);
        msix.read(8, &mut entry);
        assert_eq!(u64::from_le_bytes(entry), 1 << 32);
    }
}
