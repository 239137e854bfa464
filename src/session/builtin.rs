//! A built-in guest and the session around it, put together.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::{Cause, Config, Error, Session, progress};
use crate::guests::guest::{Guest, GuestConfig};
use crate::guests::run::{Run, RunConfig};
use crate::host::Facts;
use crate::report::Report;
use crate::sandbox::ThreadKind;
use crate::vm;
use crate::vm::lifecycle::Exit;

/// What came of a run.
pub struct Outcome {
    /// The result.
    pub report: Report,
    /// How the run ended.
    pub exit: Exit,
    /// When the first doorbell rang, on CLOCK_MONOTONIC.
    pub first_doorbell: Option<Duration>,
}

/// Runs the workload to its end, to the end of its time, or until somebody ends it; what was measured by then is the result.
///
/// # Errors
/// Where it cannot be started, or cannot go on.
pub fn run(process: &Config, config: &RunConfig) -> Result<Outcome, Error> {
    let process = Config { limit: config.duration, ..process.clone() };
    let mut session = Session::open(&process, [])?;
    let mut facts = Facts::collect(String::new());
    let kvm = vm::open()?;
    let memory = progress::map(config.memory)?;
    let sandbox = session.confine()?;
    facts.sandbox = session.sandbox_status();
    let enter =
        move |index| sandbox.enter(ThreadKind::Vcpu, &format!("vcpu{index}")).map_err(io::Error::other);
    let guest = GuestConfig {
        pins: config.pins.clone(),
        page: config.page,
        cpuid: config.cpuid.clone(),
        enter: Arc::new(enter),
        ..GuestConfig::new(config.vcpus)
    };
    let mut run = Run::new(Guest::start(&kvm, memory, guest)?, config.clone())?;
    let end = session.run(&mut run)?;
    let first_doorbell = run.guest.bell.first();
    let (mut report, right) = run.report(facts);
    match end.cause {
        Cause::Signal(signal) => {
            report.cut_short = Some(format!("ended by signal {signal}: these are the results so far"));
        }
        Cause::Stop => {
            report.cut_short = Some("ended by vellum ctl: these are the results so far".into());
        }
        Cause::Guest | Cause::Limit => {}
    }
    let exit = if right { end.exit } else { Exit::Error };
    Ok(Outcome { report, exit, first_doorbell })
}
