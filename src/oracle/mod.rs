//! Whether a dirty log loses pages: what judges a tracker, and the tests that ask it.
//!
//! [`judge`] judges any collection by the stamps that a built-in guest leaves; [`soak`] is the test that asks it for seconds or
//! hours, over every tracker and backing; [`edges`] looks directly for the pages that a kernel forgets at the ends of a clear.
//! How dirty pages are collected is [`crate::dirty`]'s.

pub mod edges;
pub mod judge;
pub mod soak;
