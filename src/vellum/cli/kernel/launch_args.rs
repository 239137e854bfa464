//! The arguments of a command in a guest with a kernel. [`launch`](crate::cli::launch) implements
//! them.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;

/// A command for the guest.
#[derive(Debug, Args)]
#[command(next_help_heading = "A command in a guest with a kernel")]
pub struct LaunchArgs {
    /// The command's working directory in the guest
    #[arg(long, value_name = "DIR", requires = "kernel")]
    pub guest_dir: Option<OsString>,

    /// The command's user: a number, or a name from the guest's /etc/passwd
    #[arg(long, value_name = "USER", requires = "kernel")]
    pub guest_user: Option<String>,

    /// Write how the run ended as JSON, which tells the command's status from Vellum's own:
    /// {"ended":"command","status":0}
    #[arg(long, value_name = "FILE", requires = "kernel")]
    pub status_file: Option<PathBuf>,

    /// Print the options that a kernel needs for this, as a fragment for its merge_config.sh
    #[arg(long)]
    pub kconfig: bool,

    /// A command and its arguments, run in the guest with this process's standard streams; its exit
    /// status is vellum's. The guest's root is that of --root, or the initramfs: --initrd's, or one
    /// with this host's static busybox. Directories of --share are below /mnt, by their tags.
    /// Without a command, a terminal gets the user's shell, if --root is given or --kernel is not
    /// an image
    #[arg(last = true, value_name = "COMMAND", requires = "kernel")]
    pub command: Vec<OsString>,
}
