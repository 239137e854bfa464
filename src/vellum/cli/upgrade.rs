//! `vellum ctl NAME upgrade`: the machine continues in another build of Vellum, with its name and
//! open files. This is the client: it borrows descriptors from the machine's process, starts the
//! other build with them, and migrates the machine as `vellum migrate --link memfd` does. Memory
//! that was forked is copied, as by `vellum migrate`.

use std::fs;
use std::fs::File;
use std::io::{Seek, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::client::{failure, has_a_descriptor, heard, is_confined, listen, loses, other_user, status};
use super::failure::Failure;
use super::output::{print, say};
use super::take_over::Inherited;
use vellum_control::client::Client;
use vellum_control::{Do, Event, Lending, Link, Loses, MigrateRequest, Then, names};
use vellum_kvm::vm::lifecycle::Exit;
use vellum_machine::handoff::List;
use vellum_migration::commit_flag::CommitFlag;
use vellum_migration::link::LIVENESS;
use vellum_sandbox::Mode;
use vellum_sandbox::user::User;
use vellum_sys::mmap::memfd;
use vellum_sys::program::detached_with;
use vellum_sys::signal;

/// How long the guest may run while forked memory is copied. Then it stands still for the rest.
const COPY_TIMEOUT: Duration = Duration::from_secs(60);

/// How long the new process may take to end after a failed migration.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Runs `vellum ctl NAME upgrade`.
pub(super) fn run(machine: &str, binary: &Path, downtime: Duration) -> Result<Exit, Failure> {
    let path = names::find(machine).map_err(failure)?;
    signal::remember(&signal::ENDING).map_err(Failure::host)?;
    let mut client = listen(&path)?;
    let has = status(&mut client)?;
    if !has.forked {
        has_a_descriptor(machine, &has).map_err(|why| Failure::usage(format!("upgrade: {why}")))?;
    }
    let (mut list, descriptors) = borrow(&mut client)?;
    if let Some(control) = list.control.as_mut().filter(|_| list.user.is_some()) {
        // Its guard is root and removes this name, which the machine's process does not choose.
        control.path = std::path::absolute(path).map_err(Failure::host)?;
    }
    let [link, other_link] = <[UnixStream; 2]>::from(UnixStream::pair().map_err(Failure::host)?);
    let [supervisor, other_supervisor] = <[UnixStream; 2]>::from(UnixStream::pair().map_err(Failure::host)?);
    // No descriptor has all of a forked memory, so it is copied.
    let shared = has.backing.as_deref().filter(|backing| backing.starts_with("shared-"));
    let copy = has.forked.then(|| shared.unwrap_or("memfd").to_owned());
    let mut child = start(binary, &list, &descriptors, copy, [&other_link, &other_supervisor])?;
    drop((other_link, other_supervisor));
    join_group(has.pid, child.id());
    let liveness = LIVENESS.max(downtime);
    let asked = Do::Migrate(MigrateRequest {
        fence: true,
        link: if has.forked { Link::Stream } else { Link::Memfd },
        loses: if has.forked { loses() } else { Loses::Nothing },
        timeout_ms: has.forked.then_some(COPY_TIMEOUT.as_millis() as u64),
        then: Then::Force,
        succeeded: true,
        ..MigrateRequest::new(downtime.as_millis() as u64, liveness.as_millis() as u64)
    });
    let fence = CommitFlag::file().map_err(Failure::host)?;
    let sockets = [link.as_fd(), fence.as_fd(), supervisor.as_fd()];
    if let Err(error) = client.ask_with(&asked, &sockets) {
        end(&mut child);
        return Err(failure(error));
    }
    drop((link, supervisor));
    let of = client.last_id();
    loop {
        if signal::take().is_some() {
            let _ = client.ask(&Do::MigrateCancel { of: has.numbered.then_some(of) });
        }
        let Some(line) = heard(&mut client, Some(of), "it was upgraded")? else { continue };
        match serde_json::from_value::<Event>(line) {
            Ok(Event::Stayed { why }) => {
                end(&mut child);
                return Err(Failure::host(format!("{machine} stays in the process that it is in: {why}")));
            }
            Ok(Event::Moved { us, .. }) => {
                let (ms, binary, pid) = (us as f64 / 1000.0, binary.display(), child.id());
                print(format_args!(
                    "{machine} goes on in {binary}, process {pid}; it stood still for {ms:.1} ms\n"
                ))?;
                return Ok(Exit::PowerOff);
            }
            _ => {}
        }
    }
}

/// The list and descriptors of everything that the machine has open, from the process at the other
/// end of this connection. To root, it cannot say that it has another user than it has, nor that it
/// is not confined.
pub(super) fn borrow(client: &mut Client) -> Result<(List, Vec<OwnedFd>), Failure> {
    let mut all = Vec::new();
    loop {
        let (answer, mut part) = client.ask_for(&Do::Lend { from: all.len() }).map_err(failure)?;
        let Lending { list, descriptors } = serde_json::from_value(answer).map_err(Failure::host)?;
        let came = part.len();
        all.append(&mut part);
        if all.len() == descriptors {
            let bytes = serde_json::to_vec(&list).map_err(Failure::host)?;
            let mut list = List::parse(&bytes, descriptors).map_err(Failure::host)?;
            if let Some(User { uid, gid }) = other_user(client)? {
                list.user = Some((uid, gid));
                if is_confined(client)? {
                    list.sandbox = Mode::On.to_string();
                }
            }
            return Ok((list, all));
        }
        if came == 0 || all.len() > descriptors {
            return Err(Failure::host(format!("{} descriptors came, of {descriptors}", all.len())));
        }
    }
}

/// Starts the other build. A `copy` of the memory has this backing. It waits for the machine at the first of `sockets`.
fn start(
    binary: &Path,
    list: &List,
    descriptors: &[OwnedFd],
    copy: Option<String>,
    [link, supervisor]: [&UnixStream; 2],
) -> Result<Child, Failure> {
    let numbers: Vec<_> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
    let inherited = Inherited {
        list: serde_json::to_value(list).map_err(Failure::host)?,
        descriptors: numbers.clone(),
        link: link.as_raw_fd(),
        supervisor: supervisor.as_raw_fd(),
        copy,
    };
    let mut file = memfd(c"vellum-take-over", 0, None).map_err(Failure::host)?;
    serde_json::to_writer(&mut file, &inherited).map_err(Failure::host)?;
    file.flush().and_then(|()| file.rewind()).map_err(Failure::host)?;
    let standard = |at: usize| -> Result<Stdio, Failure> {
        match list.standard.get(at).and_then(|at| descriptors.get(*at)) {
            Some(descriptor) => Ok(File::from(descriptor.try_clone().map_err(Failure::host)?).into()),
            None => Ok(Stdio::null()),
        }
    };
    let mut command = Command::new(binary);
    command.args(["receive", "--take-over", &file.as_raw_fd().to_string()]);
    command.stdin(standard(0)?).stdout(standard(1)?).stderr(standard(2)?);
    let others = [file.as_raw_fd(), link.as_raw_fd(), supervisor.as_raw_fd()];
    detached_with(&mut command, numbers.into_iter().chain(others).collect());
    command.spawn().map_err(|error| {
        Failure::usage(format!("upgrade {}: {error}; name a program that is a Vellum", binary.display()))
    })
}

/// Moves process `child` into the cgroup of process `of`, which it takes over from, so that it ends
/// with the processes of that cgroup.
fn join_group(of: u32, child: u32) {
    let group = |pid: u32| {
        let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
        groups.lines().find_map(|line| line.strip_prefix("0::")).map(str::to_owned)
    };
    let (Some(theirs), Some(own)) = (group(of), group(child)) else { return };
    if theirs != own
        && let Err(error) = fs::write(format!("/sys/fs/cgroup{theirs}/cgroup.procs"), child.to_string())
    {
        say(&format!(
            "the new process stays in the control group {own}, and what ends {theirs} does not end it: {error}"
        ));
    }
}

/// Waits for the new process to end after a failed migration, and kills it after
/// [`ANSWER_TIMEOUT`].
fn end(child: &mut Child) {
    let since = Instant::now();
    while matches!(child.try_wait(), Ok(None)) {
        if since.elapsed() > ANSWER_TIMEOUT {
            let _ = child.kill();
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}
