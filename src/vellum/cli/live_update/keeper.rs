//! The process that holds what the last kernel has handed over, until each machine has run or is
//! given up. It serves one client after another at a socket, with a line of JSON each way.
//!
//! A session that is retrieved and closed frees what was not retrieved. So the keeper first does what
//! can fail, then retrieves all memory, and no error ends it after that. It finishes the session at
//! once: until then the kernel holds the memory too, and preserves it for no other session. A
//! machine's process maps its memory and outlives the keeper. If the keeper is killed, only machines
//! are lost that do not run yet.
//!
//! A save that is cancelled leaves a keeper too, with the machines whose processes have ended.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::super::client::failure;
use super::super::failure::Failure;
use super::super::starting::{Log, Starting, inherited, this_program};
use super::note::Note;
use super::orchestrator;
use super::restore::{self, STARTED_AS};
use vellum_control::names;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_migration::commit_flag::{CommitFlag, Ownership};
use vellum_migration::live_update::{self, RECORD, Saved};
use vellum_sys::file::taken;
use vellum_sys::poll::Poll;
use vellum_sys::socket::Listener;
use vellum_sys::{identity, signal, socket};

/// What a client asks for.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case", deny_unknown_fields)]
pub(super) enum Request {
    /// Run these machines, or all if none is named, with these words of a command line. Relative
    /// paths are within this directory.
    Restore {
        machines: Vec<String>,
        /// The name that one machine gets instead of its own. The words have it too.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
        words: Vec<String>,
        directory: PathBuf,
    },
    /// Say how they were started.
    List { machines: Vec<String> },
    /// Free the memory of machines.
    GiveUp { machines: Vec<String> },
}

/// What the client is told.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "said", rename_all = "kebab-case")]
pub(super) enum Answer {
    /// A machine runs.
    Runs {
        name: String,
        pid: u32,
        /// The time from its start, in microseconds.
        us: u64,
    },
    /// How a machine that is kept was started.
    Saved { name: String, line: Vec<String> },
    /// A machine's memory is freed.
    GivenUp { name: String },
    /// Something failed, because of what the user asked for if `usage` is set.
    Failed { why: String, usage: bool },
    /// The last one.
    Over {
        /// The machines that are kept.
        kept: Vec<String>,
        /// The time in which all memory was retrieved, in microseconds.
        retrieved_us: u64,
    },
}

/// What the keeper's process inherits.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Inherited {
    /// The socket on which it sends a byte when it listens.
    pub waits: RawFd,
    /// What was saved in this kernel. `None` retrieves what the last one has handed over.
    pub saved: Option<InKernel>,
}

/// What was saved in the kernel that runs.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct InKernel {
    /// The record.
    pub record: RawFd,
    /// The memory of each machine of the record. `None` for one that runs.
    pub memory: Vec<Option<RawFd>>,
}

/// How long a client may take to send its line.
const LINE_TIMEOUT: Duration = Duration::from_secs(10);

/// How often signals are checked.
const LOOK: Duration = Duration::from_millis(200);

/// The longest line of a client in bytes.
const MAX_LINE: u64 = 1 << 20;

/// The socket of the keeper of a session, beside those of machines.
pub(super) fn socket(session: &str) -> Result<PathBuf, Failure> {
    Ok(names::make_directory().map_err(failure)?.join(format!("live-update-{session}.keeper")))
}

/// A machine that has not run yet.
struct Kept {
    saved: Saved,
    ram: File,
}

/// What the last kernel has handed over.
struct Keeper {
    session: String,
    retrieved_us: u64,
    record: File,
    kept: Vec<Kept>,
    /// Why machines are lost, by their names. A restore tells it once.
    lost: Vec<(String, String)>,
}

/// The keepers that answer, by their sessions, and the machines that they keep.
pub(super) fn all() -> Result<Vec<(String, Vec<String>)>, Failure> {
    let mut all = Vec::new();
    for (name, path) in names::all_with("keeper").map_err(failure)? {
        let Ok(stream) = UnixStream::connect(path) else { continue };
        let session = name.trim_start_matches("live-update-").to_owned();
        let (_, kept, _) = ask(&stream, &Request::List { machines: Vec::new() })?;
        all.push((session, kept));
    }
    Ok(all)
}

/// Asks the keeper. Returns its answers, and from the last one the machines that are kept and the time
/// in which their memory was retrieved, in microseconds.
pub(super) fn ask(
    stream: &UnixStream,
    request: &Request,
) -> Result<(Vec<Answer>, Vec<String>, u64), Failure> {
    let mut line = serde_json::to_vec(request).map_err(Failure::host)?;
    line.push(b'\n');
    (&*stream).write_all(&line).map_err(Failure::host)?;
    let mut answers = Vec::new();
    for line in BufReader::new(stream).lines() {
        let line = line.map_err(|error| Failure::host(format!("the keeper: {error}")))?;
        match serde_json::from_str(&line).map_err(Failure::host)? {
            Answer::Over { kept, retrieved_us } => return Ok((answers, kept, retrieved_us)),
            answer => answers.push(answer),
        }
    }
    Err(Failure::host("the keeper has ended before it answered; what had not run is lost"))
}

/// Runs the keeper of `session`. It sends a byte on the descriptor of the list when it listens.
pub(super) fn run(session: &str, list: RawFd) -> Result<Exit, Failure> {
    let Inherited { waits, saved } = inherited(list)?;
    let own = |fd: RawFd| taken(fd).ok_or_else(|| Failure::usage("--child: no such descriptor is open"));
    let waits = own(waits)?;
    signal::remember(&signal::ENDING).map_err(Failure::host)?;
    // Memory that is retrieved is lost with this process.
    let listener = Listener::bind(&socket(session)?).map_err(Failure::host)?;
    let mut keeper = match saved {
        None => Keeper::retrieve(session)?,
        Some(InKernel { record, memory }) => {
            let memory = memory.into_iter().map(|fd| fd.map(|fd| own(fd).map(File::from)).transpose());
            Keeper::inherit(session, own(record)?.into(), memory.collect::<Result<_, _>>()?)?
        }
    };
    // The client may have ended. The next one finds the socket.
    let _ = UnixStream::from(waits).write_all(&[1]);
    while !keeper.kept.is_empty() || !keeper.lost.is_empty() {
        let mut poll = Poll::default();
        poll.readable(&listener);
        // An interrupt is meant for the client. A termination ends the machines that have not run.
        if signal::take().is_some_and(|signal| signal == libc::SIGTERM) {
            break;
        }
        if !poll.wait(Some(LOOK)).map_err(Failure::host)? {
            continue;
        }
        if let Ok(client) = listener.accept() {
            // A client that has ended hears nothing, and what it has asked for is done.
            let _ = keeper.serve(&client);
        }
    }
    Ok(Exit::PowerOff)
}

impl Keeper {
    /// Retrieves everything that the last kernel has handed over.
    fn retrieve(name: &str) -> Result<Self, Failure> {
        let session = orchestrator()?.retrieve(&live_update::session(name)).map_err(|error| match error.raw_os_error() {
            Some(libc::ENOENT) => Failure::ended(Exit::NotRun, format!(
                "--session {name}: the last kernel has handed over no such session, or it was restored already, or a Vellum with another format of \
                     saved machines has saved it"
            )),
            Some(libc::EINVAL) => {
                Failure::usage(format!("--session {name}: another process has it; restore it as that user"))
            }
            _ => Failure::host(format!("--session {name}: {error}")),
        })?;
        let start = Instant::now();
        let record = session.retrieved(RECORD).map_err(|error| {
            Failure::host(format!("--session {name}: the state of its machines was not handed over: {error}"))
        })?;
        let mut keeper = Self::of(name, record, |at| {
            Some(session.retrieved(live_update::token(at)).map_err(|error| error.to_string()))
        })?;
        // Closing it does the same.
        let _ = session.finish();
        keeper.retrieved_us = start.elapsed().as_micros() as u64;
        Ok(keeper)
    }

    /// Takes what was saved in this kernel.
    fn inherit(session: &str, record: File, memory: Vec<Option<File>>) -> Result<Self, Failure> {
        let mut memory = memory.into_iter();
        Self::of(session, record, |_| memory.next().flatten().map(Ok))
    }

    /// The machines of the record. `memory` gives that of a machine by its number, or `None` if it is
    /// not kept.
    fn of(
        session: &str,
        record: File,
        mut memory: impl FnMut(usize) -> Option<Result<File, String>>,
    ) -> Result<Self, Failure> {
        let list = live_update::read(&record).map_err(failure)?;
        let (mut kept, mut lost) = (Vec::with_capacity(list.machines.len()), Vec::new());
        for (at, saved) in list.machines.into_iter().enumerate() {
            let Some(ram) = memory(at) else { continue };
            match ram.and_then(|ram| saved.check(&ram).map(|()| ram)) {
                Ok(ram) => kept.push(Kept { saved, ram }),
                // The others are not lost with it.
                Err(why) => lost.push((saved.name, why)),
            }
        }
        Ok(Self { session: session.to_owned(), retrieved_us: 0, record, kept, lost })
    }

    /// Serves one client.
    fn serve(&mut self, client: &UnixStream) -> std::io::Result<()> {
        if socket::peer_uid(client)? != identity::effective().0 {
            return Ok(());
        }
        client.set_nonblocking(false)?;
        client.set_read_timeout(Some(LINE_TIMEOUT))?;
        client.set_write_timeout(Some(LINE_TIMEOUT))?;
        let mut line = String::new();
        BufReader::new(std::io::Read::take(client, MAX_LINE)).read_line(&mut line)?;
        let answers = match serde_json::from_str(&line) {
            Ok(request) => self.answer(request),
            Err(error) => vec![Answer::Failed { why: format!("the keeper: {error}"), usage: true }],
        };
        let kept = self.kept.iter().map(|kept| kept.saved.name.clone()).collect();
        let mut all = Vec::new();
        for answer in answers.iter().chain([&Answer::Over { kept, retrieved_us: self.retrieved_us }]) {
            serde_json::to_writer(&mut all, answer)?;
            all.push(b'\n');
        }
        (&*client).write_all(&all)
    }

    fn answer(&mut self, request: Request) -> Vec<Answer> {
        let named = match &request {
            Request::Restore { machines, .. } | Request::List { machines } | Request::GiveUp { machines } => {
                machines.clone()
            }
        };
        let is_meant = |name: &String| named.is_empty() || named.contains(name);
        let names: Vec<_> = self.kept.iter().map(|kept| kept.saved.name.clone()).collect();
        let unknown =
            |name: &&String| !names.contains(*name) && self.lost.iter().all(|(lost, _)| lost != *name);
        if let Some(unknown) = named.iter().find(unknown) {
            let why = format!("{unknown}: no machine of this name is kept; these are: {}", names.join(", "));
            return vec![Answer::Failed { why, usage: true }];
        }
        let mut answers = Vec::new();
        let told =
            |name: &str, why: &str| Answer::Failed { why: format!("{name} is lost: {why}"), usage: false };
        if let Request::List { .. } = request {
            // A question changes nothing.
            let lost = self.lost.iter().filter(|(name, _)| is_meant(name));
            answers.extend(lost.map(|(name, why)| told(name, why)));
        } else {
            for (name, why) in self.lost.extract_if(.., |(name, _)| is_meant(name)) {
                Note::remove_machine(&self.session, &name);
                answers.push(told(&name, &why));
            }
        }
        let (meant, others): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.kept).into_iter().partition(|kept: &Kept| is_meant(&kept.saved.name));
        self.kept = others;
        match request {
            Request::List { .. } => {
                let line = |kept: &Kept| Answer::Saved {
                    name: kept.saved.name.clone(),
                    line: kept.saved.line.clone(),
                };
                answers.extend(meant.iter().map(line));
                self.kept.extend(meant);
            }
            Request::GiveUp { .. } => {
                for Kept { saved, .. } in meant {
                    Note::remove_machine(&self.session, &saved.name);
                    answers.push(Answer::GivenUp { name: saved.name });
                }
            }
            Request::Restore { name, words, directory, .. } => {
                let started: Vec<_> = meant
                    .into_iter()
                    .map(|kept| {
                        let name = name.as_ref().unwrap_or(&kept.saved.name);
                        let started = self.start(&kept, name, &words, &directory);
                        (kept, started)
                    })
                    .collect();
                for (kept, started) in started {
                    answers.push(self.settle(kept, started));
                }
            }
        }
        answers
    }

    /// Starts the process of a machine under this name.
    fn start(
        &self,
        kept: &Kept,
        name: &str,
        words: &[String],
        directory: &Path,
    ) -> Result<(Starting, CommitFlag, Instant), Failure> {
        let Saved { host, point, line: started_as, .. } = &kept.saved;
        let since = Instant::now();
        let files = kept.saved.files(&self.record).map_err(Failure::host)?;
        let flag = CommitFlag::file().map_err(Failure::host)?;
        let ours = CommitFlag::new(OwnedFd::from(flag.try_clone().map_err(Failure::host)?))
            .map_err(Failure::host)?;
        ours.step(Ownership::Open, Ownership::Committed);
        let descriptors = [&files.ram, &files.map, &files.state, &kept.ram].map(AsRawFd::as_raw_fd);
        let mut line: Vec<String> = ["live-update", "restore", "--name", name].map(Into::into).into();
        line.extend(["--serial".into(), host.serial.clone(), "--sandbox".into(), host.sandbox.clone()]);
        if let Some((user, group)) = host.user.filter(|_| identity::effective().0 == 0) {
            line.extend(["--user".into(), format!("{user}:{group}")]);
        }
        line.extend(host.dirty_ring.map(|entries| format!("--dirty-ring={entries}")));
        line.extend(host.pins.as_ref().map(|cpus| {
            let cpus: Vec<String> = cpus.iter().map(usize::to_string).collect();
            format!("--pin={}", cpus.join(","))
        }));
        // The next save finds it in this process's own command line.
        let started_as = serde_json::to_string(started_as).map_err(Failure::host)?;
        line.push(format!("{STARTED_AS}{started_as}"));
        line.extend_from_slice(words);
        let inherit = |waits, log| {
            let inherited = restore::Inherited {
                point: point.clone(),
                files: descriptors,
                flag: flag.as_raw_fd(),
                waits,
                log,
                devices: host.devices.clone(),
                result: host.result.clone(),
                limit: host.limit_ms.map(Duration::from_millis),
                lock: host.lock,
            };
            (inherited, descriptors.into_iter().chain([flag.as_raw_fd()]).collect())
        };
        let log = Log::new(name)?;
        let mut command = this_program(line.into_iter().map(Into::into), [Stdio::null(), log.output()?])?;
        command.current_dir(directory);
        let starting = Starting::spawn(name, command, inherit, Some(log))?;
        Ok((starting, ours, since))
    }

    /// Waits until a machine runs, or keeps it.
    fn settle(&mut self, kept: Kept, started: Result<(Starting, CommitFlag, Instant), Failure>) -> Answer {
        let told = |failed: &Failure| failed.exit == Exit::Usage;
        let (mut starting, flag, since) = match started {
            Ok(started) => started,
            Err(failed) => {
                let answer = Answer::Failed {
                    why: format!("{}: {}", kept.saved.name, failed.message),
                    usage: told(&failed),
                };
                self.kept.push(kept);
                return answer;
            }
        };
        match starting.runs() {
            Ok(()) => {
                Note::remove_machine(&self.session, &kept.saved.name);
                Answer::Runs {
                    name: starting.name.clone(),
                    pid: starting.child.id(),
                    us: since.elapsed().as_micros() as u64,
                }
            }
            // Its memory is as it was saved if no vCPU has run.
            Err(failed) if flag.step(Ownership::Committed, Ownership::Withdrawn) == Ownership::Withdrawn => {
                self.kept.push(kept);
                Answer::Failed { usage: told(&failed), why: failed.message }
            }
            Err(failed) => {
                Note::remove_machine(&self.session, &kept.saved.name);
                Answer::Failed {
                    why: format!("{}; it had begun to run, and is lost", failed.message),
                    usage: false,
                }
            }
        }
    }
}
