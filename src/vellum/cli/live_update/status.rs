//! `vellum live-update status`.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::json;

use super::super::failure::Failure;
use super::super::output::print;
use super::{SESSION, keeper, read_image, session};
use vellum_host::doctor::CheckVerdict;
use vellum_host::live_update;
use vellum_kvm::vm::lifecycle::Exit;

/// Say whether this kernel can hand machines over to the next one
#[derive(Debug, Args)]
pub struct StatusArgs {
    /// The session whose keeper is looked for
    #[arg(long, value_name = "NAME", default_value = SESSION, value_parser = session)]
    session: String,

    /// Say whether this kernel image fits into the scratch area, with --initrd
    #[arg(long, value_name = "FILE")]
    kernel: Option<PathBuf>,

    /// The initial RAM disk of that kernel
    #[arg(long, value_name = "FILE", requires = "kernel")]
    initrd: Option<PathBuf>,

    /// Print it as JSON
    #[arg(long)]
    json: bool,
}

/// Runs `vellum live-update status`. The exit status is 1 if it is not available.
pub fn run(args: &StatusArgs) -> Result<Exit, Failure> {
    let check = live_update::examine();
    let is_available = check.verdict == CheckVerdict::Ok;
    let is_kept = UnixStream::connect(keeper::socket(&args.session)?).is_ok();
    let misfit =
        args.kernel.as_deref().map(|kernel| misfit(kernel, args.initrd.as_deref())).transpose()?.flatten();
    if args.json {
        let said = json!({ "available": is_available, "check": check, "keeper": is_kept, "misfit": misfit });
        print(format_args!("{said}\n"))?;
    } else {
        print(format_args!("{check}\n"))?;
        if args.kernel.is_some() {
            print(format_args!(
                "{}\n",
                misfit.as_deref().unwrap_or("the kernel fits into the scratch area")
            ))?;
        }
        if is_kept {
            print("machines were handed over and have not run yet: vellum live-update restore\n")?;
        }
    }
    Ok(if is_available && misfit.is_none() { Exit::PowerOff } else { Exit::Error })
}

/// Why a kernel and its initial RAM disk do not fit into the scratch area, if they do not.
fn misfit(kernel: &Path, initrd: Option<&Path>) -> Result<Option<String>, Failure> {
    let read =
        |path: &Path| read_image(path).map_err(|why| Failure::usage(format!("{}: {why}", path.display())));
    let scratch = live_update::scratch().ok_or_else(|| {
        Failure::host("the scratch area's size is in debugfs: it takes CONFIG_KEXEC_HANDOVER_DEBUGFS, and debugfs mounted")
    })?;
    let needs = live_update::memory_of(&read(kernel)?);
    let initrd = initrd.map(read).transpose()?.map_or(0, |bytes| bytes.len() as u64);
    let largest = scratch.into_iter().max().unwrap_or(0);
    let [needs, initrd, largest] = [needs, initrd, largest].map(|bytes| bytes.div_ceil(1 << 20));
    Ok((needs + initrd > largest).then(|| format!(
        "the kernel takes {needs} MiB and its initramfs {initrd} MiB, and the largest part of the scratch area has {largest} MiB: boot \
         with a larger kho_scratch="
    )))
}
