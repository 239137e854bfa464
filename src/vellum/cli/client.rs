//! What the clients of a control socket share.

use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use super::devices;
use super::failure::Failure;
use vellum_bench::oracle::edges::{self, EdgeVerdict};
use vellum_control::client::{Client, Error};
use vellum_control::{Do, Loses, MigrationBlocker, Status};
use vellum_kvm::dirty::Method;
use vellum_sandbox::user::User;
use vellum_sys::diagnose::Diagnose;
use vellum_sys::{identity, socket};

/// How long a client waits for an event before it looks for signals.
const LOOK: Duration = Duration::from_millis(200);

/// A failed request. No flag is named.
pub(super) fn failure(error: impl Diagnose + 'static) -> Failure {
    Failure::of(&error, &[])
}

/// Connects to the machine at `path` and subscribes to its events. A client that subscribes before
/// an operation starts misses none of its events.
pub(super) fn listen(path: &Path) -> Result<Client, Failure> {
    let mut machine = Client::connect(path).map_err(failure)?;
    machine.ask(&Do::Events {}).map_err(failure)?;
    // Waiting for an event is short. An answer may take as long as any.
    machine.wait_within(LOOK);
    Ok(machine)
}

/// The next event of operation `of`, or `None` if none came in time. `what` names what the client
/// waits for.
pub(super) fn heard(machine: &mut Client, of: Option<u64>, what: &str) -> Result<Option<Value>, Failure> {
    match machine.event_of(of) {
        Ok(line) => Ok(Some(line)),
        Err(Error::Silent { .. }) => Ok(None),
        Err(Error::Closed { .. }) => Err(Failure::host(format!("the machine has ended before {what}"))),
        Err(error) => Err(failure(error)),
    }
}

/// The machine's status.
pub(super) fn status(machine: &mut Client) -> Result<Status, Failure> {
    serde_json::from_value(machine.ask(&Do::Status {}).map_err(failure)?).map_err(Failure::host)
}

/// The user of a machine's process, if this process is root and that one is not. It may have dropped
/// root since it listens, so its credentials are those of its process now. What such a process says
/// is that user's word.
///
/// # Errors
/// This process is root, and the other one's user is unknown.
pub(super) fn other_user(machine: &Client) -> Result<Option<User>, Failure> {
    if identity::effective().0 != 0 {
        return Ok(None);
    }
    // Real, effective, saved and of the file system (proc_pid_status(5)).
    let effective = |line: String| line.split_whitespace().nth(1)?.parse().ok();
    let [uid, gid] = [process_status(machine, "Uid")?, process_status(machine, "Gid")?].map(effective);
    let (uid, gid) = uid.zip(gid).ok_or_else(|| Failure::host("the machine's user is not told"))?;
    Ok((uid != 0).then_some(User { uid, gid }))
}

/// Whether a filter of system calls is in force in the machine's process.
///
/// # Errors
/// It is not told.
pub(super) fn is_confined(machine: &Client) -> Result<bool, Failure> {
    Ok(process_status(machine, "Seccomp")? == "2")
}

/// A line of /proc/PID/status of the machine's process.
fn process_status(machine: &Client, name: &str) -> Result<String, Failure> {
    let pid = socket::peer_pid(machine.connection()).map_err(Failure::host)?;
    let of = |error: &dyn std::fmt::Display| Failure::host(format!("{name} of process {pid}: {error}"));
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).map_err(|error| of(&error))?;
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    Ok(line.ok_or_else(|| of(&"it is not told"))?.trim().to_owned())
}

/// Checks that the machine with this `status` can be saved and migrated.
pub(super) fn may_leave(status: &Status) -> Result<(), Failure> {
    blocked(status.stays.as_ref(), "can be neither saved nor moved")
}

/// Checks that the machine with this `status` can be forked.
pub(super) fn may_fork(status: &Status) -> Result<(), Failure> {
    blocked(status.fork_stays.as_ref(), "cannot be forked")
}

fn blocked(by: Option<&MigrationBlocker>, what: &str) -> Result<(), Failure> {
    by.map_or(Ok(()), |MigrationBlocker { key, name, why }| {
        let flag = devices::flag(key);
        Err(Failure::usage(format!("{flag} {name}: {why}; a machine with one {what}")))
    })
}

/// Checks that dirty pages of the machine with this `status` can be collected by `method`.
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

/// Checks that the memory of the machine with this `status` has a descriptor that another process
/// can be given.
pub(super) fn has_a_descriptor(name: &str, status: &Status) -> Result<(), String> {
    if status.forked {
        return Err(format!(
            "the memory of {name} was forked, and no descriptor has all of it; vellum snapshot and vellum migrate without a memory link \
             copy it"
        ));
    }
    let backing = status.backing.as_deref().unwrap_or("unknown");
    let huge = match backing {
        "memfd" => return Ok(()),
        shared if shared.starts_with("shared-") => return Ok(()),
        huge if huge.starts_with("hugetlb-") => format!("shared-{huge}"),
        _ => "memfd".into(),
    };
    Err(format!(
        "the memory of {name} is {backing}, which no other process can map; start it with --memory \
         SIZE,backing={huge}"
    ))
}

/// What this host's dirty log is known to lose. The machine runs on this host. `vellum doctor` uses
/// the same probe.
pub(super) fn loses() -> Loses {
    match edges::probe() {
        Ok(EdgeVerdict::Lost) => Loses::Edges,
        Ok(EdgeVerdict::Others(_)) => Loses::Pages,
        Ok(EdgeVerdict::Kept | EdgeVerdict::Untested(_)) | Err(_) => Loses::Nothing,
    }
}
