//! The lab.
fn main(){}
