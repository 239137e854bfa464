//! A guest that judges by itself whether its memory and its state survived a migration, a snapshot
//! or a restore.
//!
//! [`image`] has the bootable image, for any VMM. It prints KTAP on its console; [`read`] turns
//! that log into a verdict. [`schedule`] says what is written when. [`drive`] starts VMMs with the
//! image and moves their machines.
//!
//! # Why the verdict can be trusted
//!
//! The parts of a machine that a VMM moves are the registers *R(v)* of each vCPU *v*, the pages
//! *P(v)* that only *v* writes, and the shared pages *S*, which all vCPUs write in turn and among
//! which is the array of published positions. Say that each part comes out of the move as of some
//! time, its age. The move was right if all ages are equal. The image prints LOST if they are not:
//!
//! 1. *R(v)* holds *v*'s position, which determines what every page of *P(v)* must hold: the page's
//!    address, the last pass that wrote it ([`Schedule::writes`](schedule::Schedule::writes)), and
//!    a word of both at the page's end. *v* compares each page of *P(v)* before it writes it. A
//!    page that is older or newer than *R(v)* differs, because two passes never leave the same
//!    words. So *P(v)* and *R(v)* have one age.
//! 2. In each pass *v* visits some of *S* in the same way. The array of positions holds *v*'s own,
//!    and *v* compares it with its registers at each boundary, every 64 accesses. So *S* and *R(v)*
//!    have one age, for each *v*.
//! 3. By 1 and 2 all parts have the age of *S*.
//!
//! The position never goes to memory while the loop runs: it lives in a general register, in an XMM
//! register, and in FS and GS base, and all three are compared at each boundary. They tell which
//! part of the state is old. Two more comparisons see a wrong machine sooner: no vCPU's position
//! goes back from where another vCPU has seen it (kept in XMM registers), and no vCPU is more than
//! a phase ahead. After each pass every vCPU compares its neighbour's pages, too, and a sum in a
//! register covers code, tables and stacks.
//!
//! A fault sets a bit of the position that nothing clears. The last pass's checksum of all words
//! that were read starts at a number that only the position gives, and [`read`] computes it again:
//! a log that says WHOLE without having read the right words is not believed.
//!
//! Devices are judged in the same way. The number of requests that the first processor has made of
//! a disk follows from its position. So do the bytes that the device has written: sectors, status,
//! the entries and the index of the used ring. The device's own position in the rings has the same
//! age, or it answers a request twice, or never. Timers and clocks are compared with what the image
//! saw of them before, which lies in memory: these comparisons find what goes back or does not
//! come, and prove no age.
//!
//! What this cannot see: a whole machine that goes back, all parts together, is a machine that has
//! run for less time. Pages that the image excludes, which it lists. And words of a page that are
//! not the first two or the last. Positions in the array have 32 bits, so a position that is old by
//! 4,096 phases looks right there; the pages still differ.
//!
//! `model.rs` has this argument as a program: it rolls back every subset of the parts.

pub mod drive;
pub mod image;
#[cfg(test)]
mod model;
pub mod read;
mod schedule;
#[allow(dead_code)] // The image has the rest.
pub mod sectors;
mod words;
