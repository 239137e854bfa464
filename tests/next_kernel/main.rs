//! What outlives the kernel of a host (`support::kexec`).

mod handover;
mod hang;
mod linux;
mod machines;
mod systemd;

use std::process::ExitCode;

use support::Tests;

support::vellum!();

fn main() -> ExitCode {
    Tests::from_args().run()
}
