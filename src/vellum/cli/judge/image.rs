//! `vellum judge image`.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::Args;

use crate::cli::failure::Failure;
use vellum_judge::image::{self, Arch, Format};
use vellum_kvm::vm::lifecycle::Exit;
use vellum_sys::keyvalue;

/// Write the image: any VMM boots it as a kernel
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct ImageArgs {
    /// The new file; `-` is standard output
    #[arg(short, long, value_name = "FILE")]
    out: PathBuf,

    /// x86_64 or aarch64 [default: that of this host]
    #[arg(long, value_name = "ARCH", value_parser = |text: &str| keyvalue::one_of("architecture", text, &Arch::NAMES))]
    arch: Option<Arch>,

    /// The format. Of x86_64: elf, with a PVH note and a 64-bit entry; bzimage; or flat, memory from
    /// 1 MiB on. Of aarch64: image, as of Linux [default: elf or image]
    #[arg(long, value_name = "FORMAT", value_parser = |text: &str| keyvalue::one_of("format", text, &Format::NAMES))]
    format: Option<Format>,
}

const EXAMPLES: &str = "\
The image's kernel command line, with its defaults:
  seed=1 passes=10 order=shuffled write=100 verify=each report=1s
  passes=0          no end
  order=sequential  page after page
  write=PERCENT     pages that a pass writes; it reads the others
  hot=PAGES:SHARE   percent of the pages, and of the writes that they get
  rate=PAGES        at most so many a second, on each vCPU
  verify=end        compare a neighbour's pages after the last pass only
  report=TIME       between two lines of progress
  clock=TIME        a longer step of a clock is a fault
  late=TIME         a timer interrupt or a disk's answer that is later is a fault (10s)

Examples:
  vellum judge image --out judge.elf
  vellum judge image --arch aarch64 --out judge.image
  vellum run -k judge.elf -p passes=10 > log
  vellum judge read log";

/// Runs `vellum judge image`.
pub(super) fn run(args: &ImageArgs) -> Result<Exit, Failure> {
    let format = match (args.arch, args.format) {
        (arch, None) => arch.unwrap_or(Arch::HOST).format(),
        (None, Some(format)) => format,
        (Some(arch), Some(format)) if format.arch() == arch => format,
        (Some(Arch::X86_64), Some(_)) => {
            return Err(Failure::usage("--format image is of aarch64; elf, bzimage or flat would work"));
        }
        (Some(Arch::Aarch64), Some(_)) => {
            return Err(Failure::usage("--format: aarch64 has no other format than image"));
        }
    };
    let image = image::image(format);
    write(&args.out, |out| out.write_all(&image))
}

/// Creates the file `out`, or uses standard output, and calls `write` with it.
pub(super) fn write(
    out: &Path,
    write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<Exit, Failure> {
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::AlreadyExists => {
            Failure::usage(format!("--out {}: exists; remove it, or name another file", out.display()))
        }
        // A path that cannot be is the user's; a disk that is full is not.
        io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied | io::ErrorKind::NotADirectory => {
            Failure::usage(format!("--out {}: {error}", out.display()))
        }
        _ => Failure::host(format!("--out {}: cannot write: {error}", out.display())),
    };
    if out == Path::new("-") {
        let mut stdout = io::stdout().lock();
        write(&mut stdout).and_then(|()| stdout.flush()).map_err(failed)?;
    } else {
        let mut file = io::BufWriter::new(File::create_new(out).map_err(failed)?);
        write(&mut file).and_then(|()| file.flush()).map_err(|error| {
            // Half an image is of no use, and would be in the way of the next attempt.
            let _ = fs::remove_file(out);
            failed(error)
        })?;
    }
    Ok(Exit::PowerOff)
}
