//! `vellum doctor`: the capabilities of this host.

use std::path::PathBuf;

use clap::Args;

use super::failure::Failure;
use super::output::print;
use vellum_bench::oracle::edges::{self, EdgeVerdict};
use vellum_fleet::features;
use vellum_host::Facts;
use vellum_host::doctor::{self, Check, DIRTY_LOG};
use vellum_host::kvm;
use vellum_kvm::arch::cpuid;
use vellum_kvm::arch::cpuid::model::Listed;
use vellum_kvm::vm;
use vellum_kvm::vm::lifecycle::Exit;

/// Check what this host supports, and how to get what it lacks
///
/// Exits with 1 if no guest can run.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,

    /// Print the CPU features that guests of this host can have, as a file for vellum run --cpu
    /// FILE and --cpu-common
    #[arg(long, conflicts_with = "json")]
    cpu_json: bool,

    /// Print the CPU features that are in all of these files of --cpu-json, as a file for vellum
    /// run --cpu FILE
    #[arg(long, value_name = "FILE", num_args = 1.., conflicts_with_all = ["json", "cpu_json"])]
    cpu_common: Vec<PathBuf>,

    /// Print this host's features as Feature= of its node's line in slurm.conf; nothing is changed
    #[arg(long, conflicts_with_all = ["json", "cpu_json", "cpu_common"])]
    slurm_features: bool,
}

/// Runs `vellum doctor`.
pub fn run(args: &DoctorArgs) -> Result<Exit, Failure> {
    if args.cpu_json || !args.cpu_common.is_empty() {
        return model(&args.cpu_common);
    }
    if args.slurm_features {
        let all: Vec<String> = features::here(&Facts::collect("off".into())).into_iter().collect();
        return print(format_args!("Feature={}\n", all.join(","))).map(|_| Exit::PowerOff);
    }
    let mut diagnosis = doctor::examine();
    if diagnosis.ok {
        diagnosis.checks.extend(level());
        diagnosis.checks.push(dirty_log());
        diagnosis.checks.extend(dirty_ring());
    }
    diagnosis.conclude();
    let text = if args.json {
        let json = serde_json::to_string_pretty(&diagnosis).map_err(Failure::host)?;
        format!("{json}\n")
    } else {
        diagnosis.to_string()
    };
    print(text)?;
    Ok(if diagnosis.ok { Exit::PowerOff } else { Exit::Error })
}

/// Prints a CPU model: what `files` have in common, or what this host's KVM supports if there are
/// none.
fn model(files: &[PathBuf]) -> Result<Exit, Failure> {
    let read =
        |path: &PathBuf| Listed::read(path).map_err(|error| Failure::usage(format!("--cpu-common {error}")));
    let listed = match files {
        [] => {
            let kvm = vm::open().map_err(Failure::host)?;
            let vm = kvm::create_vm(&kvm).map_err(Failure::host)?;
            cpuid::listed(&kvm, &vm).map_err(Failure::host)?
        }
        files => Listed::common(&files.iter().map(read).collect::<Result<Vec<_>, _>>()?),
    };
    let json = serde_json::to_string_pretty(&listed).map_err(Failure::host)?;
    print(format_args!("{json}\n"))?;
    Ok(Exit::PowerOff)
}

/// The highest psABI level that guests can have.
fn level() -> Option<Check> {
    let kvm = vm::open().ok()?;
    let level = cpuid::level(&kvm, &kvm::create_vm(&kvm).ok()?).ok()??;
    Some(Check::ok("CPU model", format_args!("{level}; vellum run --cpu")))
}

/// Whether KVM loses pages if a signal interrupts a reset of a dirty ring. Vellum blocks signals
/// there. Other programs may not.
fn dirty_ring() -> Option<Check> {
    let name = "dirty ring";
    match edges::probe_reset() {
        Ok(None) => None,
        Ok(Some(0)) => Some(Check::ok(name, "a reset that a signal ends loses no page")),
        Ok(Some(_)) => Some(Check::warn(
            name,
            "this kernel loses pages where a signal ends KVM_RESET_DIRTY_RINGS",
            "Vellum blocks signals for the call, other VMMs may not; kernel-patches/7.3/dirty-ring-reset fixes the kernel",
        )),
        Err(error) => Some(Check::warn(name, format!("not tested: {error}"), "vellum run says more")),
    }
}

/// Checks the dirty log with a guest.
fn dirty_log() -> Check {
    let name = DIRTY_LOG;
    match edges::probe() {
        Ok(found @ (EdgeVerdict::Kept | EdgeVerdict::Untested(_))) => Check::ok(name, found),
        Ok(found @ EdgeVerdict::Lost) => Check::warn(
            name,
            found,
            "manual-protect does not; kernel-patches/6.12/init-all-set-boundary fixes it",
        ),
        Ok(found @ EdgeVerdict::Others(_)) => {
            Check::warn(name, found, "vellum test dirty-log --tracker initially-set -s thp says how often")
        }
        Err(error) => Check::warn(name, format!("not tested: {error}"), "vellum run says more"),
    }
}
