//! Live migration: a machine moves to another process, on this host or another, and nothing of it is lost.
//!
//! | file | what it is |
//! |---|---|
//! | [`message`] | what the two sides say to each other |
//! | [`wire`] | messages, state and pages as bytes, and back: no I/O, every length checked |
//! | [`source`], [`target`] | the two sides as pure machines: (state, event) to (state, actions); `tests/handover.rs` enumerates them |
//! | [`plan`] | when to send another pass, when to pause the guest, when to give up: pure, on a clock of the caller's |
//! | [`fit`] | what keeps a machine from going to a target, all of it in one answer |
//! | [`pages`] | harvested pages to frames, and frames to pages |
//! | [`pack`] | pages compressed, and back |
//! | [`verify`] | whether both sides have the same memory, while both stand still |
//! | [`bits`] | a bit a page, which the threads of several connections share |
//! | [`share`] | which of several connections carries which pages |
//! | [`pace`] | a cap on bandwidth |
//! | [`commit_flag`] | on one host, a word that both processes see, and that decides |
//! | [`link`] | one connection: a stream socket that carries frames |
//! | [`sender`], [`receiver`] | each side's thread, which drives its machine |
//! | [`pending`] | which pages are still to go |
//! | [`populating`] | memory of a target that is to be there in full |
//! | [`fetching`] | memory that comes when somebody wants it, out of a snapshot or from a source that has handed over its guest |
//! | [`postcopy_memory`] | which of it is missing, and how what comes gets into it |
//! | [`saving`], [`loading`] | the same between a machine and the files of a [`snapshot`] |
//! | [`since`] | what one snapshot leaves to the next |
//! | [`threads`], [`events`] | how that thread and the event loop's speak, and what they say |
//! | [`migratable`], [`incoming`] | each side's machine, which does on the event loop's thread what the other thread demands |
//!
//! What a whole machine's state is, and in which order it is saved and restored, is [`vellum_machine::state`]'s. A client
//! (`cli/migrate.rs`) connects the two sides and hands over the connection; the machine itself opens nothing.
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
//!   (--verify) sums, COMPARE ----------->    both stand still: every page is compared
//!              <-------------------------  COMPARED
//!   COMMIT     ------------------------->    from here on the source may not run again by itself
//!              <-------------------------  DONE: the guest runs on the target; or REFUSED: it never ran
//!   BYE        ------------------------->
//! ```
//!
//! Several connections share the pages, chunk by chunk; all else goes over the first. Behind FIT each of the others joins the migration
//! by its session and its number (JOIN, JOINED), and every pass ends with a PASS_END on all of them, which both sides wait for. Until
//! READY the cut of one is the cut of all. From then on only the first counts.
//!
//! Where both are on one host, RAM may be handed over as a descriptor that comes with HELLO, beside the commit_flag, without which it is not
//! done: CONFIG says so, no passes follow, and the last pages are those of other memory. Both have the same RAM from FIT on. The target
//! writes nothing there before COMMIT, and the source nothing after it.
//!
//! # Postcopy
//!
//! The guest may have to run on the target before all of its memory is there. FINAL says then how many pages follow, of which the map has
//! been sent. The target empties those, and whatever shares a huge page with them, and has faults on them reported from here on: to
//! restore the state may want them already. Behind DONE:
//!
//! ```text
//!              <-------------------------  the map of what is missing, LACKING: what the target says, not what the source has sent
//!   all of that, on all connections -->
//!              <-------------------------  pages that somebody waits for, on a connection of their own
//!   these, there ---------------------->
//!              <-------------------------  COMPLETE: the target lacks nothing any more
//!   BYE        ------------------------->
//! ```
//!
//! A cut between DONE and COMPLETE leaves both sides waiting for another link (`postcopy-paused`); QUERY on that is answered by RAN and
//! by the map anew. Neither can go on without the other then.
//!
//! Two copies never run: the source runs until it has sent COMMIT, and afterwards only where the target has said that it never ran
//! and never will, or where the operator insists. After a cut QUERY asks the target what became of it; every message from COMMIT
//! on may be repeated and does nothing the second time. Between two processes of one host the [`commit_flag`] decides at once, and nobody
//! has to ask.

pub mod bits;
pub mod commit_flag;
pub mod events;
pub mod fetching;
pub mod fit;
pub mod incoming;
pub mod link;
pub mod loading;
pub mod message;
pub mod migratable;
pub mod pace;
pub mod pack;
pub mod pages;
pub(crate) mod pending;
pub mod plan;
pub mod populating;
pub(crate) mod postcopy_memory;
pub mod receiver;
pub(crate) mod saving;
pub mod sender;
pub mod share;
pub mod since;
pub mod snapshot;
pub mod source;
pub mod target;
pub mod threads;
pub mod verify;
pub mod wire;
