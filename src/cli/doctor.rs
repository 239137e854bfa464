//! `vellum doctor`: what this host offers.

use clap::Args;

use super::{Failure, print};
use crate::host::doctor::{self, Check};
use crate::oracle::edges::{self, EdgeVerdict};
use crate::vm::lifecycle::Exit;

/// Say what this host offers, and what to do about what it lacks
///
/// Exits with 1 where no guest can run.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Does what was asked.
pub fn run(args: &DoctorArgs) -> Result<Exit, Failure> {
    let mut diagnosis = doctor::examine();
    if diagnosis.ok {
        diagnosis.checks.push(dirty_log());
    }
    let text = if args.json {
        let json = serde_json::to_string_pretty(&diagnosis).map_err(Failure::host)?;
        format!("{json}\n")
    } else {
        diagnosis.to_string()
    };
    print(text)?;
    Ok(if diagnosis.ok { Exit::PowerOff } else { Exit::Error })
}

/// The one check that runs a guest.
fn dirty_log() -> Check {
    let name = "dirty log";
    match edges::probe() {
        Ok(found @ (EdgeVerdict::Kept | EdgeVerdict::Untested(_))) => Check::ok(name, found),
        Ok(found @ EdgeVerdict::Lost) => Check::warn(
            name,
            found,
            "manual-protect does not; kernel-patches/6.12/init-all-set-boundary mends it",
        ),
        Ok(found @ EdgeVerdict::Others(_)) => {
            Check::warn(name, found, "vellum test dirty-log --tracker initially-set -s thp says how often")
        }
        Err(error) => Check::warn(name, format!("not tested: {error}"), "vellum run says more"),
    }
}
