//! `vellum bench NAME`: one file a benchmark here too; arguments only.

mod context_switch;
mod rmap_fork;

use std::io::Write;
use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{Failure, keyvalue};
use crate::bench::Error;
use crate::report::{Report, json, terminal};
use crate::sys::host::allowed_cpus;
use crate::vm::lifecycle::Exit;

/// Measure the host's KVM with a built-in guest
#[derive(Debug, Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    RmapFork(rmap_fork::RmapForkArgs),
    ContextSwitch(context_switch::ContextSwitchArgs),
}

/// Where the result goes.
#[derive(Debug, Args)]
struct Output {
    /// Write the result as JSON; `-` is standard output, which then carries nothing else
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Does what was asked.
pub fn run(args: BenchArgs) -> Result<Exit, Failure> {
    match args.what {
        What::RmapFork(args) => rmap_fork::run(args),
        What::ContextSwitch(args) => context_switch::run(args),
    }
}

impl Output {
    /// Opens what is to be written, measures, and delivers the result. An invalid one is delivered too, and fails.
    fn deliver(&self, measure: impl FnOnce() -> Result<Report, Error>) -> Result<Exit, Failure> {
        let writer = self.json.as_deref().map(json::Writer::open).transpose().map_err(Failure::usage)?;
        let report = match measure() {
            Ok(report) => report,
            Err(error) => {
                if let Some(writer) = writer {
                    writer.discard();
                }
                return Err(if error.is_usage() { Failure::usage(error) } else { Failure::host(error) });
            }
        };
        if writer.as_ref().is_none_or(|writer| !writer.is_stdout()) {
            let text = terminal::render(&report);
            json::allow_broken_pipe(std::io::stdout().lock().write_all(text.as_bytes()))
                .map_err(Failure::host)?;
        }
        if let Some(writer) = writer {
            writer.write(std::slice::from_ref(&report)).map_err(Failure::host)?;
        }
        Ok(if report.invalid.is_empty() { Exit::PowerOff } else { Exit::Error })
    }
}

/// A CPU that this process may use.
fn cpu(text: &str) -> Result<usize, String> {
    let allowed = allowed_cpus().map_err(|e| e.to_string())?;
    let cpu = keyvalue::number(text, 0..=65_535)?;
    match allowed.contains(&cpu) {
        true => Ok(cpu),
        false => {
            let usable: Vec<_> = allowed.iter().map(usize::to_string).collect();
            Err(format!("not a CPU that this process may use; those are {}", usable.join(",")))
        }
    }
}
