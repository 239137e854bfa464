//! What a fresh machine takes over from this one: the configuration of network clients. Keys and
//! passwords are not copied.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Error, Result, chroot, tool};

/// Variables that name certificates, and the laboratory's variable for a mirror.
const VARIABLES: [&str; 6] = [
    "CURL_CA_BUNDLE",
    "GIT_SSL_CAINFO",
    "REQUESTS_CA_BUNDLE",
    "SSL_CERT_DIR",
    "SSL_CERT_FILE",
    "VELLUM_DEBIAN_MIRROR",
];
/// Prefixes of variables that configure rustup, cargo and pip as clients.
const BEGINNINGS: [&str; 9] = [
    "CARGO_HTTP_",
    "CARGO_NET_",
    "CARGO_REGISTRIES_",
    "CARGO_REGISTRY_",
    "CARGO_SOURCE_",
    "PIP_",
    "RUSTUP_DIST_",
    "RUSTUP_UPDATE_",
    "RUSTUP_USE_",
];
/// Suffixes of variables with secrets.
const SECRET: [&str; 3] = ["_TOKEN", "_PASSWORD", "_SECRET"];

/// Files and directories that are copied to the same path.
const FILES: [&str; 4] =
    ["/etc/hosts", "/etc/pip.conf", "/etc/resolv.conf", "/usr/local/share/ca-certificates"];
/// apt's sources and trusted keys.
const APT: [&str; 7] = [
    "/etc/apt/keyrings",
    "/etc/apt/preferences",
    "/etc/apt/preferences.d",
    "/etc/apt/sources.list",
    "/etc/apt/sources.list.d",
    "/etc/apt/trusted.gpg",
    "/etc/apt/trusted.gpg.d",
];
/// Debian's certificate bundle, which each machine makes itself.
const BUNDLE: &str = "/etc/ssl/certs/";

/// The variables in `all` to take over.
pub fn variables(
    all: impl IntoIterator<Item = (OsString, OsString)>,
) -> impl Iterator<Item = (OsString, OsString)> {
    all.into_iter().filter(|(name, _)| name.to_str().is_some_and(is_carried))
}

fn is_carried(name: &str) -> bool {
    let is_secret = SECRET.iter().any(|end| name.ends_with(end));
    let is_proxy = name.to_ascii_lowercase().ends_with("_proxy");
    !is_secret
        && (is_proxy || VARIABLES.contains(&name) || BEGINNINGS.iter().any(|begin| name.starts_with(begin)))
}

/// Copies the files below `root`.
pub fn files(root: &Path) -> Result<()> {
    let of_variables = variables(std::env::vars_os()).map(|(_, value)| PathBuf::from(value));
    let certificates =
        of_variables.filter(|path| path.is_absolute() && path.is_file() && !path.starts_with(BUNDLE));
    FILES.iter().map(PathBuf::from).chain(certificates).try_for_each(|path| copy(&path, root))?;
    apt(root)?;
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
    if let Some(config) = home.map(|home| home.join("config.toml")).filter(|config| config.is_file()) {
        let to = root.join("root/.cargo");
        fs::create_dir_all(&to).map_err(Error::file("create", &to))?;
        fs::copy(&config, to.join("config.toml")).map_err(Error::file("copy", &config))?;
    }
    // No service may start: it would listen on this machine's network.
    let policy = root.join("usr/sbin/policy-rc.d");
    fs::write(&policy, "#!/bin/sh\nexit 101\n").map_err(Error::file("write", &policy))?;
    tool::output(Command::new("chmod").arg("755").arg(&policy)).map(drop)
}

/// apt's sources, if this machine has the same Debian, and its settings for fetching.
fn apt(root: &Path) -> Result<()> {
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    if release.lines().any(|line| line == format!("VERSION_CODENAME={}", chroot::SUITE)) {
        let own = root.join("etc/apt/sources.list");
        fs::remove_file(&own).map_err(Error::file("remove", &own))?;
        APT.iter().try_for_each(|path| copy(Path::new(path), root))?;
    }
    let dump = tool::text(Command::new(tool::need("apt-config")?).arg("dump"))?;
    let fetching: Vec<&str> = dump.lines().filter(|line| line.starts_with("Acquire::")).collect();
    let to = root.join("etc/apt/apt.conf.d/90host");
    fs::write(&to, fetching.join("\n") + "\n").map_err(Error::file("write", &to))
}

fn copy(path: &Path, root: &Path) -> Result<()> {
    if !path.exists() {
        return Ok(());
    }
    tool::output(Command::new("cp").args(["-rL", "--parents"]).arg(path).arg(root)).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_configures_a_client_is_carried_and_what_is_secret_or_else_is_not() {
        for name in
            ["https_proxy", "NO_PROXY", "SSL_CERT_FILE", "CARGO_NET_RETRY", "RUSTUP_DIST_SERVER", "PIP_CERT"]
        {
            assert!(is_carried(name), "{name}");
        }
        for name in [
            "CARGO_REGISTRY_TOKEN",
            "CARGO_REGISTRIES_MINE_TOKEN",
            "CARGO_HOME",
            "CARGO",
            "RUSTUP_HOME",
            "RUSTUP_TOOLCHAIN",
            "RUSTUP_AUTO_INSTALL",
            "RUSTFLAGS",
            "PATH",
            "HOME",
            "XDG_CACHE_HOME",
        ] {
            assert!(!is_carried(name), "{name}");
        }
    }
}
