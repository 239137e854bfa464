//! Begins a migration or a snapshot: checks the request and starts the thread.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use serde_json::{Value, json};

use super::MigratableMachine;
use super::operation::{Operation, SaveOperation, Work};
use crate::commit_flag::CommitFlag;
use crate::events::{Moving, Options};
use crate::forking::Forking;
use crate::link::GiveUp;
use crate::message::SessionId;
use crate::preserving::Preserving;
use crate::saving::{self, Saving};
use crate::sender::Sending;
use crate::since::Since;
use crate::snapshot::Files;
use crate::threads;
use vellum_control::operation::{Asker, Kind};
use vellum_control::{self as control, Loses, MigrateRequest, MigrationBlocker, Snapshot};
use vellum_kvm::dirty::Method;
use vellum_kvm::dirty::log::ends_on_a_huge_page;
use vellum_machine::SaveState;
use vellum_sandbox::ThreadKind;

impl<P: SaveState> MigratableMachine<P> {
    pub(super) fn leave(
        &mut self,
        by: Asker,
        asked: &MigrateRequest,
        mut sockets: Vec<OwnedFd>,
    ) -> Result<Value, String> {
        self.may_leave()?;
        let hands_over = asked.link == control::Link::Memfd;
        if hands_over {
            self.can_hand_over(asked)?;
        }
        if hands_over && asked.postcopies() {
            return Err("memory that is handed over is there at once: none of it can follow".into());
        }
        let method = asked.tracker.as_deref().map(method).transpose()?;
        let options = Options {
            downtime: Duration::from_millis(asked.downtime_ms),
            timeout: asked.timeout_ms.map(|ms| (Duration::from_millis(ms), asked.then)),
            bandwidth: asked.bandwidth,
            throttling: asked.throttle,
            compress: asked.compress.is_some(),
            method,
            liveness: Duration::from_millis(asked.liveness_ms.max(1)),
            verify: asked.verify,
            hands_over,
            mode: asked.mode,
            postcopies: asked.postcopies(),
        };
        let (mine, thread_end) = threads::pair(self.wake.clone()).map_err(refused)?;
        let session = SessionId::random().map_err(refused)?;
        let distrust = self.distrust(method, asked.loses);
        let give_up = GiveUp::default();
        let successor = match asked.succeeded {
            true => Some(sockets.pop().ok_or("it takes another descriptor")?),
            false => None,
        };
        let fence = match asked.fence {
            true => sockets
                .pop()
                .map(CommitFlag::new)
                .transpose()
                .map_err(|error| format!("the fence: {error}"))?,
            false => None,
        };
        let sending = Sending::new(sockets, fence, session, options, self.moving(), mine, give_up.clone());
        let (sending, lanes, server) = sending.map_err(|error| error.to_string())?;
        let sandbox = self.sandbox;
        if let Some(server) = server {
            let body = move || match sandbox.enter(ThreadKind::Connection, "serving") {
                Ok(()) => server.run(),
                Err(error) => server.fail(error.to_string()),
            };
            std::thread::Builder::new().name("serving".into()).spawn(body).map_err(refused)?;
        }
        for (number, lane) in (1..).zip(lanes) {
            let name = format!("migration{number}");
            let body = move || match sandbox.enter(ThreadKind::Connection, &format!("migration{number}")) {
                Ok(()) => lane.run(),
                Err(error) => lane.fail(error.to_string()),
            };
            // They end with the migration's thread.
            std::thread::Builder::new().name(name).spawn(body).map_err(refused)?;
        }
        let kind = if asked.succeeded { Kind::Upgrade } else { Kind::Migration };
        let mut leaving = SaveOperation::new(thread_end, distrust);
        (leaving.successor, leaving.give_up) = (successor, give_up);
        self.begin(kind, by, leaving, || sending.run())?;
        // The migration uses the dirty log from here on. A refused one leaves it on.
        self.since = None;
        Ok(json!({ "session": format!("{session:?}") }))
    }

    pub(super) fn snapshot(
        &mut self,
        by: Asker,
        asked: &Snapshot,
        files: Vec<OwnedFd>,
    ) -> Result<Value, String> {
        self.may_leave()?;
        let mut files = files.into_iter().map(File::from);
        let mut next = || files.next().ok_or("it takes three descriptors");
        let (ram, map, state) = (next()?, next()?, next()?);
        let files = Files { ram, map, state, clones: files.collect() };
        let disks = self.machine.disks();
        if !files.clones.is_empty() && files.clones.len() != disks.len() {
            return Err(format!("files for {} clones, and it has {} disks", files.clones.len(), disks.len()));
        }
        let method = asked.tracker.as_deref().map(method).transpose()?;
        let distrust = self.distrust(method, asked.loses);
        let [downtime, timeout] = [asked.downtime_ms, asked.timeout_ms].map(Duration::from_millis);
        let options = saving::Options { downtime, timeout, method, stop: asked.stop, follow: asked.follow };
        let (mine, thread_end) = threads::pair(self.wake.clone()).map_err(refused)?;
        // Useless for a point other than the next, or with another method.
        let continues = |since: &Since| {
            since.chain == asked.chain
                && since.point.checked_add(1) == Some(asked.number)
                && asked.after == Some(since.taken)
                && method.is_none_or(|method| method == since.method)
        };
        let since = self.since.take().filter(|since| continues(since)).map(|since| *since);
        let place = saving::Place { files, chain: asked.chain.clone(), number: asked.number, disks };
        let saving = Saving::new(options, place, self.moving(), since, mine).map_err(refused)?;
        let mut leaving = SaveOperation::new(thread_end, distrust);
        leaving.stop = asked.stop;
        self.begin(Kind::Snapshot, by, leaving, || saving.run())?;
        Ok(json!({}))
    }

    pub(super) fn fork(
        &mut self,
        by: Asker,
        available: Option<u64>,
        files: Vec<OwnedFd>,
    ) -> Result<Value, String> {
        may_leave(self.fork_stays())?;
        self.is_idle()?;
        let mut files = files.into_iter().map(File::from);
        let mut next = || files.next().ok_or("it takes four descriptors");
        let (ram, map, state, next) = (next()?, next()?, next()?, next()?);
        let files = Files { ram, map, state, clones: files.collect() };
        let overlays = self.machine.info().overlays.len();
        if files.clones.len() != overlays {
            return Err(format!("files for {} overlays, and it has {overlays}", files.clones.len()));
        }
        let (mine, thread_end) = threads::pair(self.wake.clone()).map_err(refused)?;
        let copies = self.machine.ram().is_without_file();
        // The next snapshot needs the log that the last one has left on, if possible.
        let may_log = copies || self.since.is_none();
        let disks = self.machine.disks();
        let forking = Forking::new(self.moving(), files, next, available, may_log, disks, mine)?;
        // A fork may follow the guest's writes. It does not ask what this kernel's log loses.
        let leaving = SaveOperation::new(thread_end, Some(UNASKED));
        self.begin(Kind::Fork, by, leaving, || forking.run())?;
        if copies {
            self.since = None;
        }
        Ok(json!({}))
    }

    pub(super) fn live_update(&mut self, by: Asker, files: Vec<OwnedFd>) -> Result<Value, String> {
        self.may_leave()?;
        let files: [File; 3] = files
            .into_iter()
            .map(File::from)
            .collect::<Vec<_>>()
            .try_into()
            .map_err(|_| "it takes three descriptors")?;
        let [ram, map, state] = files;
        let files = Files { ram, map, state, clones: Vec::new() };
        let (mine, thread_end) = threads::pair(self.wake.clone()).map_err(refused)?;
        let preserving = Preserving::new(self.moving(), files, self.machine.disks(), mine)?;
        self.begin(Kind::LiveUpdate, by, SaveOperation::new(thread_end, None), || preserving.run())?;
        // The kernel refuses to free pages of memory that it preserves.
        self.machine.ram().mapping.keep(true);
        Ok(json!({}))
    }

    /// Checks that another process can map its RAM too.
    fn can_hand_over(&self, asked: &MigrateRequest) -> Result<(), String> {
        self.machine.ram().can_be_handed_over()?;
        if asked.connections != 1 || !asked.fence {
            return Err("memory is handed over by one connection, with a fence".into());
        }
        Ok(())
    }

    /// Checks that it may begin to leave. Some machines cannot, and only one operation is possible
    /// at a time.
    pub(super) fn may_leave(&self) -> Result<(), String> {
        may_leave(self.stays())?;
        self.is_idle()
    }

    fn moving(&self) -> Moving {
        Moving {
            describe: self.machine.describe(),
            memory: self.machine.memory(),
            ram: self.machine.ram(),
            pagemap: self.pagemap.clone(),
            throttle: self.machine.throttle(),
            disks: self.machine.disks(),
        }
    }

    /// Starts the thread of an operation.
    fn begin(
        &mut self,
        kind: Kind,
        by: Asker,
        mut leaving: SaveOperation,
        run: impl FnOnce() + Send + 'static,
    ) -> Result<(), String> {
        let sandbox = self.sandbox;
        let body = move || match sandbox.enter(ThreadKind::Migration, "migration") {
            Ok(()) => run(),
            Err(error) => tracing::error!("{error}"),
        };
        leaving.thread =
            Some(std::thread::Builder::new().name("migration".into()).spawn(body).map_err(refused)?);
        self.operation.begin(Operation::new(kind, Some(by), Work::SaveOperation(Box::new(leaving))));
        Ok(())
    }

    /// Why INITIALLY_SET is not used for this machine. None if the host loses no pages of it with
    /// that method (`loses`), or if another method was requested.
    fn distrust(&self, asked: Option<Method>, loses: Loses) -> Option<&'static str> {
        if asked.is_some() || self.machine.info().dirty_ring.is_some() {
            return None;
        }
        match loses {
            Loses::Nothing => None,
            Loses::Edges if !self.machine.memory().iter().any(ends_on_a_huge_page) => None,
            Loses::Edges => Some(
                "this kernel loses pages of a dirty log that is all set at first where memslots begin as this machine's do; vellum \
                 doctor says more",
            ),
            Loses::Pages => Some(
                "this kernel loses pages of a dirty log that is all set at first; vellum doctor says more",
            ),
        }
    }
}

fn may_leave(stays: Option<MigrationBlocker>) -> Result<(), String> {
    stays.map_or(Ok(()), |MigrationBlocker { name, why, .. }| Err(format!("{name}: {why}")))
}

/// Why a fork does not use INITIALLY_SET.
const UNASKED: &str =
    "it is not known whether this kernel loses pages of a dirty log that is all set at first";

fn refused(error: io::Error) -> String {
    format!("the host refuses it: {error}")
}

fn method(name: &str) -> Result<Method, String> {
    let known = Method::NAMES.iter().find(|(known, _)| *known == name);
    known.map(|(_, method)| *method).ok_or(format!("there is no tracker {name}"))
}
