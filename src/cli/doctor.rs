//! `vellum doctor`: what this host offers.

use std::io::Write;

use clap::Args;

use super::Failure;
use crate::host::doctor;
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
    let diagnosis = doctor::examine();
    let text = if args.json {
        let json = serde_json::to_string_pretty(&diagnosis).map_err(Failure::host)?;
        format!("{json}\n")
    } else {
        diagnosis.to_string()
    };
    // A reader that has seen enough closes the pipe; the verdict stands.
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(if diagnosis.ok { Exit::PowerOff } else { Exit::Error })
}
