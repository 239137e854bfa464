//! Runs a built-in guest in a session.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::{Cause, Config, End, Error, Session, progress};
use vellum_guests::guest::{Guest, GuestConfig};
use vellum_guests::run::{BuiltinMachine, RunConfig};
use vellum_host::Facts;
use vellum_kvm::vm;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_machine::SessionMachine;
use vellum_migration::migratable::MigratableMachine;
use vellum_report::Report;
use vellum_sandbox::ThreadKind;

/// The outcome of a run.
pub struct Outcome {
    /// The result.
    pub report: Report,
    /// How the run ended.
    pub exit: Exit,
    /// Another process took over the machine and reported the result.
    pub succeeded: bool,
    /// When the first doorbell rang, on CLOCK_MONOTONIC.
    pub first_doorbell: Option<Duration>,
}

/// Runs the workload until it completes, its time is over, or the user ends it. The result has what
/// was measured by then.
///
/// # Errors
/// The guest cannot be started or cannot go on.
pub fn run(process: &Config, config: &RunConfig) -> Result<Outcome, Error> {
    let process = Config { limit: config.duration, ..process.clone() };
    let mut session = Session::open(&process, [], None)?;
    let mut facts = Facts::collect(String::new());
    // The configuration is checked before KVM is opened, so that a wrong one is reported without
    // KVM too.
    let memory = progress::map(config.memory)?;
    let kvm = vm::open()?;
    if config.fill {
        progress::fill(&memory)?;
    }
    let pagemap = Session::pagemap(&process);
    let door = session.door(&kvm)?;
    let sandbox = session.confine()?;
    facts.sandbox = session.sandbox_status();
    let enter =
        move |index| sandbox.enter(ThreadKind::Vcpu, &format!("vcpu{index}")).map_err(io::Error::other);
    let guest = GuestConfig {
        pins: config.pins.clone(),
        page: config.page,
        cpuid: config.cpuid.clone(),
        dirty_ring: config.dirty_ring,
        enter: Arc::new(enter),
        ..GuestConfig::new(config.vcpus)
    };
    let run = BuiltinMachine::new(Guest::start(&kvm, memory, guest)?, config.clone())?;
    let mut mobile = MigratableMachine::new(run, sandbox, pagemap).map_err(|e| Error::Host("eventfd", e))?;
    door.into_iter().for_each(|door| mobile.debug(door));
    let end = session.run(&mut mobile)?;
    let successor = mobile.successor();
    let outcome = Outcome::of(mobile, facts, end);
    Ok(match successor {
        Some(successor) => Outcome { exit: session.wait_for(successor), succeeded: true, ..outcome },
        None => outcome,
    })
}

impl Outcome {
    /// The outcome of a guest that ended with `end`, on the host described by `facts`.
    pub(super) fn of(mobile: MigratableMachine<BuiltinMachine>, facts: Facts, end: End) -> Self {
        let (elsewhere, saved) = (mobile.is_elsewhere(), mobile.is_saved());
        let mut run = mobile.machine;
        let first_doorbell = run.guest.bell.first();
        if elsewhere {
            run.give_away();
        }
        let (mut report, right) = run.report(facts);
        report.cut_short = match end.cause {
            _ if end.exit == Exit::Moved => {
                Some("the guest has moved to another process, which checks its pages in the end".into())
            }
            _ if saved => Some("the guest was saved, and its pages are checked where it ends".into()),
            _ if elsewhere => Some(
                "the guest may run on the target of its migration, which checks its pages in the end".into(),
            ),
            Cause::Signal(signal) => Some(format!("ended by signal {signal}: these are the results so far")),
            Cause::Stop => Some("ended by vellum stop: these are the results so far".into()),
            Cause::Guest | Cause::Limit => None,
        };
        if let Some(answer) = report.answer.as_mut().filter(|_| elsewhere && end.exit == Exit::Moved) {
            answer.elsewhere = true;
        }
        let exit = if right { end.exit } else { Exit::Error };
        Self { report, exit, succeeded: false, first_doorbell }
    }
}
