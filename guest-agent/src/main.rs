//! PID 1 of Linux guests.
fn main() {}
