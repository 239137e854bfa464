//! `vellum live-update status`.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::json;

use super::super::client::failure;
use super::super::failure::Failure;
use super::super::output::print;
use super::note::Note;
use super::{SESSION, keeper, read_image, restore_of, session};
use vellum_control::names;
use vellum_host::doctor::CheckVerdict;
use vellum_host::live_update;
use vellum_kvm::vm::lifecycle::Exit;

/// Say whether this kernel can hand machines over to the next one
#[derive(Debug, Args)]
pub struct StatusArgs {
    /// The session whose keeper is looked for
    #[arg(long, value_name = "NAME", default_value = SESSION, value_parser = session)]
    session: String,

    /// Say only whether a machine of this name may be started: not if one runs, or was saved and has
    /// not been restored
    #[arg(long, value_name = "NAME", conflicts_with_all = ["kernel", "json"])]
    machine: Option<String>,

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

/// Runs `vellum live-update status`. The exit status is 1 if it is not available, or if the machine
/// may not be started.
pub fn run(args: &StatusArgs) -> Result<Exit, Failure> {
    if let Some(name) = &args.machine {
        return may_start(name);
    }
    let check = live_update::examine();
    let is_available = check.verdict == CheckVerdict::Ok;
    let is_kept = UnixStream::connect(keeper::socket(&args.session)?).is_ok();
    let misfit =
        args.kernel.as_deref().map(|kernel| misfit(kernel, args.initrd.as_deref())).transpose()?.flatten();
    if args.json {
        let waiting: Vec<_> = waiting()
            .map(|(session, note)| json!({ "session": session, "machines": note.machines }))
            .collect();
        let said = json!({
            "available": is_available, "check": check, "keeper": is_kept, "misfit": misfit, "saved": waiting
        });
        print(format_args!("{said}\n"))?;
    } else {
        print(format_args!("{check}\n"))?;
        if args.kernel.is_some() {
            print(format_args!(
                "{}\n",
                misfit.as_deref().unwrap_or("the kernel fits into the scratch area")
            ))?;
        }
        for (session, Note { machines, .. }) in waiting() {
            let restore = restore_of(&session);
            print(format_args!(
                "saved before this boot, and not restored yet: {}: {restore}\n",
                machines.join(", ")
            ))?;
        }
        if is_kept {
            let restore = restore_of(&args.session);
            print(format_args!("a keeper has machines that have not run yet: {restore}\n"))?;
        }
    }
    Ok(if is_available && misfit.is_none() { Exit::PowerOff } else { Exit::Error })
}

/// What was saved before this boot, and has neither been restored nor told to be lost.
fn waiting() -> impl Iterator<Item = (String, Note)> {
    Note::all().into_iter().filter(|(_, note)| note.is_of_another_boot())
}

/// Says whether a machine of this name may be started. A second one would write to the disks of one
/// that is restored later.
fn may_start(name: &str) -> Result<Exit, Failure> {
    let runs = UnixStream::connect(names::socket(name).map_err(failure)?).is_ok();
    let is_in = |machines: &[String]| machines.iter().any(|machine| machine == name);
    let kept = || Ok::<_, Failure>(keeper::all()?.into_iter().find(|(_, kept)| is_in(kept)));
    let saved = || Note::all().into_iter().find(|(_, note)| note.is_valid() && is_in(&note.machines));
    let why = if runs {
        format!("{name} runs")
    } else if let Some((session, _)) = kept()? {
        format!("{name} was saved and is kept: {} {name}", restore_of(&session))
    } else if let Some((session, _)) = saved() {
        format!("{name} was saved and has not been restored: {} {name}", restore_of(&session))
    } else {
        print(format_args!("{name} may be started\n"))?;
        return Ok(Exit::PowerOff);
    };
    print(format_args!("{why}\n"))?;
    Ok(Exit::Error)
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
