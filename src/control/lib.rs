//! The control socket of a running machine. Requests are JSON lines `{"id","do",…}`, answered by
//! `{"id","ok"}` or `{"id","error"}`.
//!
//! The client chooses a request's number. The answer carries it, and so does each [`Event`] of the
//! request, on every connection that listens. Clients of one machine must choose different numbers:
//! [`client`] starts at a random one. Older builds send events without numbers; see
//! [`Status::numbered`].
//!
//! A running machine opens no paths. The client opens the files and sockets that a request needs,
//! and sends their descriptors with the request's first byte (SCM_RIGHTS, unix(7)).
//! [`Do::descriptors`] says how many.
//!
//! `request` has the requests, `status` and `event` what a machine says of itself. [`operation`]
//! says which operations exclude each other. [`server`] is the machine's side, on its event loop.
//! [`client`] is the side of `vellum ctl` and `list`. [`names`] finds the socket of a named
//! machine, and [`agent`] talks to the guest agent. The machine itself carries out the requests
//! (`machine/`).

pub mod agent;
pub mod client;
mod event;
pub mod names;
pub mod operation;
mod request;
pub mod server;
mod state;
mod status;

pub use self::event::{Came, Disk, Event, Fetched, Left, Pass, Phase, Waited, WrittenPoint};
pub use self::request::{
    Compression, Do, Lending, Link, Loses, MAX_LINE, MigrateRequest, Mode, Request, Snapshot, Then,
    Throttling, parse,
};
pub use self::state::MachineState;
pub use self::status::{ChildDevice, Cr3Cache, DirtyRings, MigrationBlocker, Status};
