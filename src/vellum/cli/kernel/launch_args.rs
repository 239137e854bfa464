//! The arguments of a command in a guest with a kernel. [`launch`](crate::cli::launch) implements
//! them.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{ArgGroup, Args};

/// A command for the guest.
#[derive(Debug, Args)]
#[command(next_help_heading = "A command in a guest with a kernel")]
#[command(group = ArgGroup::new("launcher").args(["kernel", "from"]).multiple(true))]
pub struct LaunchArgs {
    /// Boot to the point before a command, and wait there as the machine NAME. `vellum run --from
    /// NAME -- COMMAND` forks it. Its memory is a memfd, unless --memory names a backing
    #[arg(long, value_name = "NAME", requires = "kernel", conflicts_with_all = ["name", "command", "guest_dir", "guest_user", "status_file", "gdb", "timeout"])]
    pub zygote: Option<String>,

    /// Run the COMMAND in a fork of the machine NAME, which `vellum run --zygote NAME` started. The
    /// fork ends with the COMMAND
    #[arg(long, value_name = "NAME", conflicts_with_all = ["kernel", "firmware", "disk", "cpus", "memory", "workload", "passes", "duration", "json", "format", "name", "user", "cpu", "cpuid", "dirty_ring", "gdb", "kconfig"])]
    pub from: Option<String>,

    /// The command's working directory in the guest
    #[arg(long, value_name = "DIR", requires = "launcher")]
    pub guest_dir: Option<OsString>,

    /// The command's user: a number, or a name from the guest's /etc/passwd
    #[arg(long, value_name = "USER", requires = "launcher")]
    pub guest_user: Option<String>,

    /// Write how the run ended as JSON, which tells the command's status from Vellum's own:
    /// {"ended":"command","status":0}
    #[arg(long, value_name = "FILE", requires = "launcher")]
    pub status_file: Option<PathBuf>,

    /// Print the options that a kernel needs for this, as a fragment for its merge_config.sh
    #[arg(long)]
    pub kconfig: bool,

    /// A command and its arguments, run in the guest with this process's standard streams; its exit
    /// status is vellum's. The guest's root is that of --root, or the initramfs: --initrd's, or one
    /// with this host's static busybox. Directories of --share are below /mnt, by their tags.
    /// Without a command, a terminal gets the user's shell, if --root is given or --kernel is not
    /// an image
    #[arg(last = true, value_name = "COMMAND", requires = "launcher")]
    pub command: Vec<OsString>,
}
