//! A guest that judges by itself whether its memory and its state survived a migration, a snapshot
//! or a restore.
//!
//! [`image`] has the bootable image, for any VMM. It prints KTAP on its console. [`read`] derives a
//! verdict from that log. [`schedule`] determines what is written when. [`drive`] starts VMMs with
//! the image and moves their machines.
//!
//! # Why the verdict can be trusted
//!
//! A VMM moves these parts of a machine: the registers *R(v)* of each vCPU *v*, the pages *P(v)*
//! that only *v* writes, and the shared pages *S*, which all vCPUs write in turn. *S* contains the
//! array of published positions. After the move each part has the state of some time before it: its
//! age. The move was right if all ages are equal. Otherwise the image prints LOST:
//!
//! 1. *R(v)* holds *v*'s position, which determines the content of every page of *P(v)*: the
//!    page's address, the last pass that wrote it
//!    ([`Schedule::writes`](schedule::Schedule::writes)), and at the page's end a hash of both.
//!    *v* compares each page of *P(v)* before it writes it. A page that is older or newer than
//!    *R(v)* differs, because two passes never leave the same words. So *P(v)* and *R(v)* have the
//!    same age.
//! 2. In each pass *v* visits some pages of *S* in the same way. The array of positions holds *v*'s
//!    position, and *v* compares it with its registers at each boundary, every 64 accesses. So *S*
//!    and *R(v)* have the same age, for each *v*.
//! 3. By 1 and 2 all parts have the age of *S*.
//!
//! While the loop runs, a vCPU does not read its position from memory. It keeps three copies: in a
//! general register, in an XMM register, and in the FS and GS bases. On 64-bit Arm, the second is in
//! a SIMD register, and the third in TPIDR_EL0 and TPIDRRO_EL0. All three are compared at each
//! boundary, which tells the part of the state that is old. Two more comparisons find a wrong
//! machine earlier: no vCPU's position goes back from where another vCPU has seen it (kept in
//! registers), and no vCPU is more than a phase ahead. After each pass every vCPU also compares its
//! neighbour's pages. A checksum in a register covers code, tables, parameters, and the stacks in use.
//! All else that the image writes, besides buffers of devices, is on the page of the positions.
//!
//! A fault sets a bit of the position that is never cleared. The checksum of all words that the
//! last pass reads has an initial value that depends on the position. [`read`] computes it again.
//! So a log that says WHOLE is accepted only if the image has read the right words.
//!
//! Devices are judged in the same way. The number of requests that the first processor has made of
//! a disk follows from its position. So do the bytes that the device has written: sectors, status,
//! the entries and the index of the used ring. If the device's own position in the rings has
//! another age, it answers a request twice or never. Timers and clocks are compared with their
//! earlier values, which are in memory. These comparisons find a clock that goes back and an
//! interrupt that does not come. They do not prove an age.
//!
//! The image cannot detect:
//! - A machine that goes back as a whole. It looks like a machine that has run for less time.
//!   [`read`] finds that the progress on the console goes back.
//! - Changes of pages that the image excludes. It lists these.
//! - Changes of words in a page other than the first two and the last.
//!
//! Positions in the array have 32 bits, so a position that is 4,096 phases old looks right there.
//! The pages still differ.
//!
//! `model.rs` implements this argument as a program. It rolls back every proper subset of the
//! parts. `tests/judge/faults.rs` does that with the image.

pub mod drive;
#[allow(dead_code)] // The image for Arm uses the rest.
pub mod dtb;
pub mod image;
#[cfg(test)]
mod model;
pub mod read;
#[allow(dead_code)] // The image uses the rest.
mod schedule;
#[allow(dead_code)] // The image uses the rest.
pub mod sectors;
mod words;
