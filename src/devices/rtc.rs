//! The real-time clock and its CMOS memory (MC146818). The time registers are read-only and show
//! the host's time in UTC.
//!
//! It has no interrupt, hence no alarm. ACPI announces none. Boards without ports have the clock
//! behind other registers ([`super::pl031`]).

use std::sync::Mutex;

use serde::{Deserialize, Serialize};

use super::{Ending, bus::BusDevice};
use vellum_kvm::arch::clocks::{self, ClockPolicy};

/// Register B: 24-hour mode. BCD mode is a clear bit.
const B_24_HOUR: u8 = 1 << 1;
/// Register D: the battery is good.
const D_VALID: u8 = 1 << 7;
/// The cell of the century on a PC.
const CENTURY: usize = 0x32;
const CELLS: usize = 128;

/// The clock, shared by its register interfaces.
#[derive(Default)]
pub struct Rtc(Mutex<State>);

/// The state that a migration carries.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    index: u8,
    /// The memory cells; time cells are ignored. Always `CELLS` bytes.
    cells: Vec<u8>,
    /// Seconds by which the clock is ahead of the host's. Negative if it is behind.
    ahead: i64,
    /// The host's real time when this was saved, in nanoseconds.
    realtime: u64,
}

/// A saved state with a wrong number of CMOS cells.
#[derive(Debug, thiserror::Error)]
#[error("the saved clock has {0} CMOS cells, not {CELLS}; the file is damaged or from another version")]
pub struct RestoreError(usize);

impl Default for State {
    fn default() -> Self {
        Self { index: 0, cells: vec![0; CELLS], ahead: 0, realtime: 0 }
    }
}

impl Rtc {
    /// Saves the state for [`Rtc::restore`].
    pub fn save(&self) -> State {
        State { realtime: clocks::now(), ..self.state().clone() }
    }

    /// Restores what [`Rtc::save`] returned. `meanwhile` says whether the time since then counts.
    /// The time never goes back.
    ///
    /// # Errors
    /// The state has a wrong number of cells.
    pub fn restore(&self, state: State, meanwhile: ClockPolicy) -> Result<(), RestoreError> {
        if state.cells.len() != CELLS {
            return Err(RestoreError(state.cells.len()));
        }
        let now = clocks::now();
        let passed = meanwhile.passed(state.realtime, now).as_nanos() as i128;
        let behind = (i128::from(state.realtime) + passed - i128::from(now)) / 1_000_000_000;
        let ahead = state.ahead.saturating_add(behind as i64);
        *self.state() = State { index: state.index & 0x7f, ahead, ..state };
        Ok(())
    }

    /// Seconds since 1970 by this clock.
    pub fn seconds(&self) -> u64 {
        seconds(&self.state())
    }

    /// Sets the clock, in seconds since 1970.
    pub(crate) fn set_seconds(&self, seconds: u64) {
        self.state().ahead = seconds.wrapping_sub(clocks::now() / 1_000_000_000) as i64;
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().expect("no one panics while holding the clock")
    }
}

impl BusDevice for Rtc {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let state = self.state();
        data.fill(0xff);
        if offset == 1 {
            data[0] =
                time_cell(state.index, seconds(&state)).unwrap_or(state.cells[usize::from(state.index)]);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) -> Option<Ending> {
        let mut state = self.state();
        match offset {
            // Bit 7 masks NMIs. The machine has none.
            0 => state.index = data[0] & 0x7f,
            _ => {
                let index = usize::from(state.index);
                state.cells[index] = data[0];
            }
        }
        None
    }
}

fn seconds(state: &State) -> u64 {
    (clocks::now() / 1_000_000_000).saturating_add_signed(state.ahead)
}

/// The value of clock cell `index` at `unix` seconds after 1970. None if the cell is memory.
fn time_cell(index: u8, unix: u64) -> Option<u8> {
    let bcd = |n: u64| (((n / 10 % 10) << 4) | (n % 10)) as u8;
    let (days, seconds) = (unix / 86400, unix % 86400);
    let (year, month, day) = civil(days);
    Some(match usize::from(index) {
        0x0 => bcd(seconds % 60),
        0x2 => bcd(seconds / 60 % 60),
        0x4 => bcd(seconds / 3600),
        // 1 January 1970 was a Thursday. Sunday is 1.
        0x6 => bcd((days + 4) % 7 + 1),
        0x7 => bcd(day),
        0x8 => bcd(month),
        0x9 => bcd(year % 100),
        // Never updating.
        0xa => 0x26,
        0xb => B_24_HOUR,
        0xc => 0,
        0xd => D_VALID,
        CENTURY => bcd(year / 100),
        _ => return None,
    })
}

/// Year, month and day of a day after 1 January 1970 in the Gregorian calendar.
fn civil(days: u64) -> (u64, u64, u64) {
    // A year that starts on 1 March has the leap day at its end. All eras of 400 years are alike.
    // 719468 days lie between 1 March of year 0 and 1 January 1970.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let (day, month) = (day - (153 * month + 2) / 5 + 1, if month < 10 { month + 3 } else { month - 9 });
    (era * 400 + year + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_calendar_is_gregorian() {
        // Days from `date -u -d DATE +%s`, divided by 86400.
        for (days, date) in [
            (0, (1970, 1, 1)),
            (11_016, (2000, 2, 29)),
            (11_017, (2000, 3, 1)),
            (19_782, (2024, 2, 29)),
            (47_540, (2100, 2, 28)),
            (47_541, (2100, 3, 1)),
            (20_818, (2026, 12, 31)),
        ] {
            assert_eq!(civil(days), date, "{days}");
        }
    }

    #[test]
    fn cells_are_bcd_in_24_hours() {
        // 2000-02-29 23:59:58, a Tuesday.
        let cell = |index| time_cell(index, 11_016 * 86400 + 86398).unwrap();
        let cells = [0, 2, 4, 6, 7, 8, 9, 0x32].map(cell);
        assert_eq!(cells, [0x58, 0x59, 0x23, 3, 0x29, 2, 0, 0x20]);
    }

    #[test]
    fn memory_cells_survive_saving_and_time_cells_are_not_memory() {
        let rtc = Rtc::default();
        for (index, value) in [(0x40, 0x5a), (0xd, 0)] {
            rtc.write(0, &[index]);
            rtc.write(1, &[value]);
        }
        let copy = Rtc::default();
        copy.restore(rtc.save(), ClockPolicy::Passes).unwrap();
        let read = |index: u8| {
            copy.write(0, &[index]);
            let mut data = [0];
            copy.read(1, &mut data);
            data[0]
        };
        assert_eq!((read(0x40), read(0xd)), (0x5a, D_VALID));
        assert!(copy.restore(State { cells: vec![], ..State::default() }, ClockPolicy::Stands).is_err());
    }

    #[test]
    fn the_time_goes_on_by_what_has_passed_or_stands() {
        let ahead = |saved: State, meanwhile| {
            let copy = Rtc::default();
            copy.restore(saved, meanwhile).unwrap();
            copy.state().ahead
        };
        let (now, hour) = (clocks::now(), 3600);
        let at = |realtime| State { realtime, ..State::default() };
        let (earlier, later) = (now - hour * 1_000_000_000, now + hour * 1_000_000_000);
        assert_eq!(ahead(at(earlier), ClockPolicy::Passes), 0);
        assert!((-(hour as i64) - 60..=-(hour as i64)).contains(&ahead(at(earlier), ClockPolicy::Stands)));
        // Saved by a host whose clock is ahead of this one's.
        assert!((hour as i64 - 60..=hour as i64).contains(&ahead(at(later), ClockPolicy::Passes)));
        let far = State { ahead: i64::MAX, ..at(u64::MAX) };
        assert_eq!(ahead(far, ClockPolicy::Passes), i64::MAX);
    }
}
