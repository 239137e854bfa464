//! Dirty tracking: who wrote which page since somebody last asked.

pub mod bitmap;
