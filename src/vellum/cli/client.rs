//! What commands share that ask something of a running machine by its control socket.

use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use super::devices;
use super::failure::Failure;
use vellum_bench::oracle::edges::{self, EdgeVerdict};
use vellum_control::client::{Client, Error};
use vellum_control::{Do, Loses, MigrationBlocker, Status};
use vellum_kvm::dirty::Method;
use vellum_sys::diagnose::Diagnose;

/// How long one look at what the machine says takes.
const LOOK: Duration = Duration::from_millis(200);

/// Why a request was not done: no flag is to blame.
pub(super) fn failure(error: impl Diagnose + 'static) -> Failure {
    Failure::of(&error, &[])
}

/// A connection to the machine at `path` that hears what happens there: who listens before anything begins misses nothing.
pub(super) fn listen(path: &Path) -> Result<Client, Failure> {
    let mut machine = Client::connect(path).map_err(failure)?;
    machine.ask(&Do::Events {}).map_err(failure)?;
    // A look at what it says is short; its answer may take as long as any.
    machine.wait_within(LOOK);
    Ok(machine)
}

/// What the machine says of operation `of`, if it says something before `what` that is waited for.
pub(super) fn heard(machine: &mut Client, of: Option<u64>, what: &str) -> Result<Option<Value>, Failure> {
    match machine.event_of(of) {
        Ok(line) => Ok(Some(line)),
        Err(Error::Silent { .. }) => Ok(None),
        Err(Error::Closed { .. }) => Err(Failure::host(format!("the machine has ended before {what}"))),
        Err(error) => Err(failure(error)),
    }
}

/// What the machine says of itself.
pub(super) fn status(machine: &mut Client) -> Result<Status, Failure> {
    serde_json::from_value(machine.ask(&Do::Status {}).map_err(failure)?).map_err(Failure::host)
}

/// Whether the machine that is as `status` says can be saved and moved.
pub(super) fn may_leave(status: &Status) -> Result<(), Failure> {
    match &status.stays {
        None => Ok(()),
        Some(MigrationBlocker { key, name, why }) => Err(Failure::usage(format!(
            "{} {name}: {why}; a machine with one can be neither saved nor moved",
            devices::flag(key)
        ))),
    }
}

/// Whether pages of the machine that is as `status` says can be collected by `method`.
pub(super) fn check(method: Method, status: &Status) -> Result<(), Failure> {
    match (method, status.dirty_ring) {
        (Method::Ring, None) => Err(Failure::usage(
            "--tracker ring: this machine has no dirty ring, which it would have to be started with: vellum run --dirty-ring",
        )),
        (Method::Ring, Some(_)) | (_, None) => Ok(()),
        (method, Some(_)) => Err(Failure::usage(format!(
            "--tracker {}: this machine has a dirty ring (--dirty-ring), beside which KVM keeps no bitmap; ring would work",
            method.name()
        ))),
    }
}

/// Why a machine that is as `status` says has no memory that another process can be handed.
pub(super) fn has_a_descriptor(name: &str, status: &Status) -> Result<(), String> {
    let backing = status.backing.as_deref().unwrap_or("unknown");
    let huge = match backing {
        "memfd" => return Ok(()),
        shared if shared.starts_with("shared-") => return Ok(()),
        huge if huge.starts_with("hugetlb-") => format!("shared-{huge}"),
        _ => "memfd".into(),
    };
    Err(format!(
        "the memory of {name} is {backing}, of which no other process can be handed a descriptor; start it with --memory \
         SIZE,backing={huge}"
    ))
}

/// What this host, which is the machine's, is known to lose: what `vellum doctor` says, by the same probe.
pub(super) fn loses() -> Loses {
    match edges::probe() {
        Ok(EdgeVerdict::Lost) => Loses::Edges,
        Ok(EdgeVerdict::Others(_)) => Loses::Pages,
        Ok(EdgeVerdict::Kept | EdgeVerdict::Untested(_)) | Err(_) => Loses::Nothing,
    }
}
