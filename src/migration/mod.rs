//! Live migration: a machine moves to another process, on this host or another, and nothing of it is lost. Here are the rules of the
//! hand-over, which `tests/handover.rs` enumerates; nothing drives them yet.
//!
//! | file | what it is |
//! |---|---|
//! | [`message`] | what the two sides say to each other |
//! | [`wire`] | messages, state and pages as bytes, and back: no I/O, every length checked |
//! | [`source`], [`target`] | the two sides as pure machines: (state, event) to (state, actions) |
//!
//! # The hand-over
//!
//! ```text
//! source                                   target
//!   HELLO      ------------------------->    is it a Vellum, which versions?
//!              <-------------------------  WELCOME
//!   CONFIG     ------------------------->    does it fit here?
//!              <-------------------------  FIT, or MISFIT with every reason
//!   pages, PASS_END, pages, … ---------->    the guest runs on the source
//!   (pause) last pages, state, FINAL --->    everything is restored but what writes guest memory
//!              <-------------------------  READY
//!   COMMIT     ------------------------->    from here on the source may not run again by itself
//!              <-------------------------  DONE: the guest runs on the target; or REFUSED: it never ran
//!   BYE        ------------------------->
//! ```
//!
//! Two copies never run: the source runs until it has sent COMMIT, and afterwards only where the target has said that it never ran
//! and never will, or where the operator insists. After a cut QUERY asks the target what became of it; every message from COMMIT
//! on may be repeated and does nothing the second time.

pub mod message;
pub mod source;
pub mod target;
pub mod wire;
