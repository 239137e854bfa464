//! `vellum judge disk`.

use std::path::PathBuf;

use clap::Args;

use crate::cli::failure::Failure;
use vellum_judge::sectors;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_sys::keyvalue;

/// Write a disk for the image, which reads it while it runs: each sector is a function of its
/// number
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct DiskArgs {
    /// The new file; `-` is standard output
    #[arg(short, long, value_name = "FILE")]
    out: PathBuf,

    /// The size of the disk
    #[arg(long, value_name = "SIZE", default_value = "1m", value_parser = |text: &str| keyvalue::size(text, 4096))]
    size: u64,
}

const EXAMPLES: &str = "\
The image finds it as a virtio-blk device, on virtio-mmio or PCI, and never writes to it.

Examples:
  vellum judge disk --out judge.raw
  vellum run -k judge.elf --disk judge.raw > log";

/// Runs `vellum judge disk`.
pub(super) fn run(args: &DiskArgs) -> Result<Exit, Failure> {
    if !args.size.is_multiple_of(4096) || args.size == 0 {
        return Err(Failure::usage("--size: a multiple of 4096 bytes would work"));
    }
    super::image::write(&args.out, |out| {
        (0..args.size / 512).try_for_each(|number| out.write_all(&sectors::sector(number)))
    })
}
