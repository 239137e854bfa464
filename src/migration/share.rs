//! Which connection carries which pages. Memory is divided into chunks, and each chunk belongs to
//! one connection for the whole migration. So data of a page never overtakes earlier data of the
//! same page.

use std::ops::Range;

use super::wire::Run;
use vellum_sys::plant::{self, Mistake};

/// The maximum number of connections of one migration.
pub(crate) const MAX_CONNECTIONS: u32 = 16;
/// Pages per chunk: a multiple of what one frame carries.
const CHUNK: u64 = 512;

/// The share of one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    connection: u32,
    of: u32,
}

impl Share {
    /// The share of connection `connection`, from 0, of `of`.
    pub fn new(connection: u32, of: u32) -> Self {
        Self { connection, of }
    }

    /// The number of connections.
    pub fn of(&self) -> u32 {
        self.of
    }

    /// The share in pass `pass`: always the same.
    pub(crate) fn in_pass(self, pass: u32) -> Self {
        let other = plant::is(Mistake::ChunkChangesConnection) && pass > 1;
        Self { connection: (self.connection + u32::from(other)) % self.of, ..self }
    }

    fn carries(&self, region: u32, chunk: u64) -> bool {
        (chunk + u64::from(region)) % u64::from(self.of) == u64::from(self.connection)
    }

    /// The first pages from `from` on that this connection carries, in a region of `pages` pages.
    pub fn next(&self, region: u32, from: u64, pages: u64) -> Option<Range<u64>> {
        if self.of == 1 {
            return Some(from..pages).filter(|range| !range.is_empty());
        }
        let chunk = (from / CHUNK..pages.div_ceil(CHUNK)).find(|chunk| self.carries(region, *chunk))?;
        Some(from.max(chunk * CHUNK)..pages.min((chunk + 1) * CHUNK)).filter(|range| !range.is_empty())
    }

    /// Whether this connection carries all of `run`.
    pub fn holds(&self, run: &Run) -> bool {
        let last = run.first.saturating_add(run.pages.saturating_sub(1).into());
        let chunks = run.first / CHUNK..=last / CHUNK;
        self.of == 1
            || chunks.clone().count() <= self.of as usize
                && chunks.into_iter().all(|chunk| self.carries(run.region, chunk))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_has_one_connection() {
        for of in [1, 2, 3, 16] {
            for (region, pages) in [(0, 1), (1, CHUNK), (2, 5 * CHUNK + 7), (0, 40 * CHUNK - 1)] {
                let mut carried = vec![None; pages as usize];
                for connection in 0..of {
                    let share = Share::new(connection, of);
                    let mut at = 0;
                    while let Some(own) = share.next(region, at, pages) {
                        assert!(own.start >= at && own.end <= pages);
                        for page in own.clone() {
                            assert_eq!(carried[page as usize].replace(connection), None, "page {page}");
                        }
                        let run = Run {
                            region,
                            pass: 1,
                            first: own.start,
                            pages: own.end as u32 - own.start as u32,
                        };
                        for other in 0..of {
                            assert_eq!(Share::new(other, of).holds(&run), other == connection, "{run:?}");
                        }
                        at = own.end;
                    }
                }
                assert!(carried.iter().all(Option::is_some), "{of} connections, {pages} pages");
            }
        }
    }

    #[test]
    fn what_lies_in_two_parts_is_in_neither() {
        let run = Run { region: 0, pass: 1, first: CHUNK - 1, pages: 2 };
        assert!((0..2).all(|connection| !Share::new(connection, 2).holds(&run)));
        let run = Run { region: 0, pass: 1, first: u64::MAX, pages: u32::MAX };
        assert!((0..2).filter(|connection| Share::new(*connection, 2).holds(&run)).count() <= 1);
    }
}
