//! The arguments of an operating system in a disk image. [`image`](crate::cli::image) and
//! [`login`](crate::cli::login) implement them.

use std::path::PathBuf;

use clap::Args;

/// The arguments for an operating system in a disk image.
#[derive(Debug, Args)]
#[command(next_help_heading = "A disk image with an operating system (without --kernel)")]
pub(crate) struct ImageArgs {
    /// Enter this firmware instead of the image's kernel: an ELF or PVH image, such as
    /// rust-hypervisor-firmware or OVMF's CLOUDHV.fd
    #[arg(long, value_name = "FILE", conflicts_with = "kernel")]
    pub firmware: Option<PathBuf>,

    /// Create a user NAME in the guest with cloud-init. The user has this user's public SSH keys,
    /// sudo, and a password for the console, which is printed
    #[arg(long, value_name = "NAME", value_parser = user, requires = "guest", conflicts_with_all = ["user_data", "cloud-init"])]
    pub login: Option<String>,

    /// Configure cloud-init's first boot: short for --cloud-init user-data=FILE
    #[arg(long, value_name = "FILE", requires = "guest", conflicts_with = "cloud-init")]
    pub user_data: Option<PathBuf>,

    /// Connect by SSH as the user of --login once the guest has booted, and stop the guest
    /// afterwards. `vellum ssh NAME` connects to a running guest
    #[arg(long, requires = "login")]
    pub ssh: bool,

    /// Keep the guest's writes under the machine's name, for the next `vellum run` with the same
    /// name. Otherwise they are discarded when the guest ends. The image is unchanged. `--disk
    /// IMAGE,overlay=none` writes to it
    #[arg(long, requires = "guest")]
    pub keep: bool,
}

impl ImageArgs {
    /// The first flag that is given.
    pub fn given(&self) -> Option<&'static str> {
        let flags = [
            ("--firmware", self.firmware.is_some()),
            ("--login", self.login.is_some()),
            ("--user-data", self.user_data.is_some()),
            ("--ssh", self.ssh),
            ("--keep", self.keep),
        ];
        flags.into_iter().find_map(|(flag, is_given)| is_given.then_some(flag))
    }
}

/// Parses the value of `--login`, a name that useradd(8) accepts.
fn user(user: &str) -> Result<String, &'static str> {
    let sound = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"_-".contains(&byte);
    let first = user.bytes().next().is_some_and(|byte| byte.is_ascii_lowercase() || byte == b'_');
    match first && user.len() <= 32 && user.bytes().all(sound) {
        true => Ok(user.to_owned()),
        false => {
            Err("a name of 1 to 32 small letters, digits, `-` and `_` is expected; the first is a letter")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_users() {
        for good in ["ada", "_a", "a-b_9"] {
            assert!(user(good).is_ok(), "{good}");
        }
        for bad in ["", "Ada", "9a", "-a", "a b", "a:b", &"a".repeat(33)] {
            assert!(user(bad).is_err(), "{bad}");
        }
    }
}
