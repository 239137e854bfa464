//! The process that holds what the last kernel has handed over, until each machine has run or is
//! given up. It serves one client after another at a socket, with a line of JSON each way.
//!
//! Closing a retrieved session frees what was not retrieved, so all memory is retrieved first. A
//! machine's process maps its memory and outlives the keeper. If the keeper is killed, only machines
//! are lost that do not run yet.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::super::client::failure;
use super::super::failure::Failure;
use super::super::starting::{Log, Starting, inherited};
use super::orchestrator;
use super::restore::Inherited;
use vellum_control::names;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_migration::commit_flag::{CommitFlag, Ownership};
use vellum_migration::live_update::{self, RECORD, Saved};
use vellum_sys::liveupdate::Session;
use vellum_sys::poll::Poll;
use vellum_sys::socket::Listener;
use vellum_sys::{identity, signal, socket};

/// What a client asks for.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case", deny_unknown_fields)]
pub(super) enum Request {
    /// Run one machine or all, with these words of a command line.
    Restore { machine: Option<String>, words: Vec<String> },
    /// Say how they were started.
    List { machine: Option<String> },
    /// Free the memory of a machine.
    GiveUp { machine: String },
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
    Saved { name: String, line: String },
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
    session: Session,
    retrieved_us: u64,
    record: File,
    kept: Vec<Kept>,
    /// Why machines are lost, by their names. Each is told once.
    lost: Vec<(String, String)>,
}

/// Runs the keeper of `session`. It sends a byte on the descriptor of the list when it listens.
pub(super) fn run(session: &str, list: RawFd) -> Result<Exit, Failure> {
    let waits: RawFd = inherited(list)?;
    let waits = vellum_sys::file::taken(waits)
        .ok_or_else(|| Failure::usage("--child: no such descriptor is open"))?;
    signal::remember(&signal::ENDING).map_err(Failure::host)?;
    let mut keeper = Keeper::open(session)?;
    let listener = Listener::bind(&socket(session)?).map_err(Failure::host)?;
    UnixStream::from(waits).write_all(&[1]).map_err(Failure::host)?;
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
    keeper.session.finish().map_err(Failure::host)?;
    Ok(Exit::PowerOff)
}

impl Keeper {
    /// Retrieves everything.
    fn open(name: &str) -> Result<Self, Failure> {
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
        let list = live_update::read(&record).map_err(failure)?;
        let (mut kept, mut lost) = (Vec::with_capacity(list.machines.len()), Vec::new());
        for (at, saved) in list.machines.into_iter().enumerate() {
            let ram = session.retrieved(live_update::token(at)).map_err(|error| error.to_string());
            match ram.and_then(|ram| saved.check(&ram).map(|()| ram)) {
                Ok(ram) => kept.push(Kept { saved, ram }),
                // The others are not lost with it.
                Err(why) => lost.push((saved.name, why)),
            }
        }
        let retrieved_us = start.elapsed().as_micros() as u64;
        Ok(Self { session, retrieved_us, record, kept, lost })
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
            Request::Restore { machine, .. } | Request::List { machine } => machine.clone(),
            Request::GiveUp { machine } => Some(machine.clone()),
        };
        let is_meant = |name: &str| named.as_ref().is_none_or(|named| named == name);
        let lost = self.lost.extract_if(.., |(name, _)| is_meant(name));
        let mut answers: Vec<Answer> = lost
            .map(|(name, why)| Answer::Failed { why: format!("{name} is lost: {why}"), usage: false })
            .collect();
        if answers.is_empty() && !self.kept.iter().any(|kept| is_meant(&kept.saved.name)) {
            let names: Vec<_> = self.kept.iter().map(|kept| kept.saved.name.as_str()).collect();
            let why = format!(
                "{}: no machine of this name is kept; these are: {}",
                named.as_deref().unwrap_or_default(),
                names.join(", ")
            );
            return vec![Answer::Failed { why, usage: true }];
        }
        let (meant, others): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.kept).into_iter().partition(|kept: &Kept| is_meant(&kept.saved.name));
        self.kept = others;
        match request {
            Request::List { .. } => {
                let line = |kept: &Kept| Answer::Saved {
                    name: kept.saved.name.clone(),
                    line: kept.saved.line.join(" "),
                };
                answers.extend(meant.iter().map(line));
                self.kept.extend(meant);
            }
            Request::GiveUp { .. } => {
                answers.extend(meant.into_iter().map(|kept| Answer::GivenUp { name: kept.saved.name }));
            }
            Request::Restore { words, .. } => {
                let started: Vec<_> = meant
                    .into_iter()
                    .map(|kept| {
                        let started = self.start(&kept, &words);
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

    /// Starts the process of a machine.
    fn start(&self, kept: &Kept, words: &[String]) -> Result<(Starting, CommitFlag, Instant), Failure> {
        let Saved { name, host, point, .. } = &kept.saved;
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
        line.extend(host.result.as_ref().map(|path| format!("--json={}", path.display())));
        line.extend_from_slice(words);
        let inherit = |waits, log| {
            let inherited = Inherited {
                point: point.clone(),
                files: descriptors,
                flag: flag.as_raw_fd(),
                waits,
                log,
                devices: host.devices.clone(),
                limit: host.limit_ms.map(Duration::from_millis),
                lock: host.lock,
            };
            (inherited, descriptors.into_iter().chain([flag.as_raw_fd()]).collect())
        };
        let log = Log::new(name)?;
        let outputs = [Stdio::null(), log.output()?];
        let starting = Starting::spawn(name, line.into_iter().map(Into::into), inherit, outputs, Some(log))?;
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
            Ok(()) => Answer::Runs {
                name: kept.saved.name,
                pid: starting.child.id(),
                us: since.elapsed().as_micros() as u64,
            },
            // Its memory is as it was saved if no vCPU has run.
            Err(failed) if flag.step(Ownership::Committed, Ownership::Withdrawn) == Ownership::Withdrawn => {
                self.kept.push(kept);
                Answer::Failed { usage: told(&failed), why: failed.message }
            }
            Err(failed) => Answer::Failed {
                why: format!("{}; it had begun to run, and is lost", failed.message),
                usage: false,
            },
        }
    }
}
