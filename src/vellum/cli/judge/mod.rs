//! `vellum judge`: the image that judges its own machine, and the reader of its console. The work
//! is in [`vellum_judge`].

mod disk;
mod image;
mod read;
mod run;

use clap::{Args, Subcommand};

use super::failure::Failure;
use vellum_kvm::vm::lifecycle::Exit;

/// Find memory and state that a VMM loses: a guest for any VMM that judges its own migration,
/// snapshot or restore
#[derive(Debug, Args)]
pub(super) struct JudgeArgs {
    #[command(subcommand)]
    what: JudgeCommand,
}

#[derive(Debug, Subcommand)]
enum JudgeCommand {
    Image(image::ImageArgs),
    Disk(disk::DiskArgs),
    Read(Box<read::ReadArgs>),
    Run(Box<run::RunArgs>),
}

/// Runs `vellum judge`.
pub(super) fn run(args: &JudgeArgs) -> Result<Exit, Failure> {
    match &args.what {
        JudgeCommand::Image(args) => image::run(args),
        JudgeCommand::Disk(args) => disk::run(args),
        JudgeCommand::Read(args) => read::run(args),
        JudgeCommand::Run(args) => run::run(args),
    }
}
