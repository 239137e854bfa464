//! Live migration: moves a machine to another process on this host or another, without loss.
//!
//! | file | contents |
//! |---|---|
//! | [`message`] | the messages of the two sides |
//! | [`wire`] | messages, state and pages as bytes: no I/O, every length checked |
//! | [`source`], [`target`] | both sides as pure state machines; see `tests/handover.rs` |
//! | [`plan`] | when to send a pass, pause the guest or give up: pure, on the caller's clock |
//! | [`fit`] | every reason why a machine cannot move to a target |
//! | [`pages`] | harvested pages to frames, and frames to pages |
//! | [`pack`] | compression of pages |
//! | [`verify`] | the comparison of both sides' memory while both are paused |
//! | [`bits`] | a bitmap of pages that the threads of several connections share |
//! | [`share`] | which connection carries which pages |
//! | [`pace`] | a cap on bandwidth |
//! | [`commit_flag`] | on one host, the word in shared memory that decides ownership |
//! | [`link`] | one connection: a stream socket that carries frames |
//! | [`sender`], [`receiver`] | each side's thread, which drives its state machine |
//! | [`pending`] | the pages still to be sent |
//! | [`populating`] | populating all memory of a target |
//! | [`fetching`] | memory on demand, from a snapshot or from a source after the hand-over |
//! | [`postcopy_memory`] | which memory is missing, and how arriving pages are placed |
//! | [`saving`], [`loading`] | moving a machine to and from the files of a [`snapshot`] |
//! | [`forking`] | freezing a machine's memory as the base of others, which [`loading`] makes |
//! | [`since`] | what one snapshot keeps for the next |
//! | [`threads`], [`events`] | how these threads and the event loop's thread communicate |
//! | [`migratable`], [`incoming`] | each side's machine, driven on the event loop's thread |
//!
//! [`vellum_machine::state`] defines a machine's state and the order of saving and restoring it. A
//! client (`cli/migrate.rs`) connects the two sides and passes the connection to each. The machine
//! itself opens nothing.
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
//!   (pause) last pages, state, FINAL --->    restores all but what writes guest memory
//!              <-------------------------  READY
//!   (--verify) sums, COMPARE ----------->    both are paused: every page is compared
//!              <-------------------------  COMPARED
//!   COMMIT     ------------------------->    now the source may not resume on its own
//!              <-------------------------  DONE: it runs on the target; or REFUSED: it never ran
//!   BYE        ------------------------->
//! ```
//!
//! Several connections share the pages, chunk by chunk. Everything else uses the first connection.
//! After FIT each of the others joins the migration by session and number (JOIN, JOINED). Every
//! pass ends with a PASS_END on each connection, and both sides wait for all of them. Until READY,
//! the loss of one connection is the loss of all. From then on only the first counts.
//!
//! On one host, RAM can be handed over as a descriptor that is sent with HELLO. This requires a
//! shared commit_flag. CONFIG then announces it, no passes follow, and the last pages are those of
//! other memory. From FIT on, both sides map the same RAM. The target does not write to it before
//! COMMIT, and the source does not write to it afterwards.
//!
//! # Postcopy
//!
//! With postcopy, the guest runs on the target before all of its memory has arrived. FINAL then
//! says how many pages are missing. Their map has been sent before it. The target registers
//! for faults on these pages and on every page that shares a huge page with them, and unmaps them.
//! It does so before it restores the state, because that may already access them. After DONE:
//!
//! ```text
//!              <-------------------------  the map of missing pages, LACKING
//!   all missing pages, all connections ->
//!              <-------------------------  requests for faulting pages, on their own connection
//!   requested pages, same connection --->
//!              <-------------------------  COMPLETE: no page is missing
//!   BYE        ------------------------->
//! ```
//!
//! The target's map counts, not what the source believes it has sent.
//!
//! If the link drops between DONE and COMPLETE, both sides wait for another one
//! (`postcopy-paused`). On the new link the source sends QUERY, and the target answers with RAN and
//! a new map. In this state, neither side can continue without the other.
//!
//! Two copies never run. The source runs until it has sent COMMIT. Afterwards it runs only if the
//! target has said that it never ran and never will, or if the operator insists. After a lost link,
//! QUERY asks the target for the outcome. Every message from COMMIT on may be repeated without
//! effect. Between two processes on one host the [`commit_flag`] decides at once, without a
//! message.

pub mod bits;
pub mod commit_flag;
pub mod events;
pub mod fetching;
pub mod fit;
pub(crate) mod forking;
pub mod incoming;
pub mod link;
pub mod live_update;
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
pub(crate) mod preserving;
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
