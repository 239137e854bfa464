//! The real-time clock of Arm boards (PL031, Arm DDI 0224): another register interface to
//! [`super::rtc`].
//!
//! It has no interrupt, hence no alarm. The device tree announces none.

use std::sync::Arc;

use super::rtc::Rtc;
use super::{Ending, bus::BusDevice};

/// RTCDR: seconds since 1970.
const DATA: u64 = 0x0;
/// RTCLR: sets the seconds.
const LOAD: u64 = 0x8;
/// RTCCR: clock enable. The clock always runs.
const CONTROL: u64 = 0xc;
/// RTCPeriphID0 to 3 and RTCPCellID0 to 3. Drivers identify a PL031 by them.
const IDENTITY: u64 = 0xfe0;
const IDENTITIES: [u8; 8] = [0x31, 0x10, 0x04, 0x00, 0x0d, 0xf0, 0x05, 0xb1];

/// The registers, backed by the shared clock.
pub struct Pl031(pub Arc<Rtc>);

impl BusDevice for Pl031 {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let value = match offset {
            DATA | LOAD => self.0.seconds() as u32,
            CONTROL => 1,
            IDENTITY..0x1000 => IDENTITIES[(offset - IDENTITY) as usize / 4].into(),
            // The match and interrupt registers.
            _ => 0,
        };
        data.fill(0);
        data.iter_mut().zip(value.to_le_bytes()).for_each(|(to, from)| *to = from);
    }

    fn write(&self, offset: u64, data: &[u8]) -> Option<Ending> {
        if let (LOAD, Ok(seconds)) = (offset, data.try_into()) {
            self.0.set_seconds(u32::from_le_bytes(seconds).into());
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_tells_the_time_takes_another_and_shows_who_it_is() {
        let clock = Arc::new(Rtc::default());
        let registers = Pl031(clock.clone());
        let read = |offset| {
            let mut data = [0; 4];
            registers.read(offset, &mut data);
            u32::from_le_bytes(data)
        };
        assert!(u64::from(read(DATA)).abs_diff(clock.seconds()) < 60);
        registers.write(LOAD, &1_000_000u32.to_le_bytes());
        registers.write(LOAD, &[0xff]);
        assert!((1_000_000..1_000_060).contains(&read(DATA)), "{}", read(DATA));
        assert_eq!((read(CONTROL), read(0xfe0), read(0xffc)), (1, 0x31, 0xb1));
        // Wide and narrow accesses, and accesses beside every register.
        let mut wide = [0xff; 8];
        registers.read(0xffc, &mut wide);
        registers.read(0xfff, &mut [0]);
        assert_eq!(wide, [0xb1, 0, 0, 0, 0, 0, 0, 0]);
    }
}
