//! Logins of a guest: `--login` creates a user with cloud-init.
//!
//! The guest's SSH host key is generated here and given to the guest, so that it is known before
//! the first connection. The machine's directory has an ssh_config(5) with the forwarded port, the
//! user and that key.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::json;

use super::failure::Failure;
use super::kernel::KernelArgs;
use super::output::say;
use super::run_flags::FLAGS;
use vellum_control::names;
use vellum_devices::virtio::cidata::Seed;
use vellum_devices::virtio::net::user::Forward;
use vellum_sys::file;
use vellum_sys::mmap::memfd;
use vellum_sys::random;

/// Characters that are not mistaken for each other: no i, l, o, 0 or 1.
const ALPHABET: &[u8; 32] = b"abcdefghjkmnpqrstuvwxyz23456789-";
/// Characters of a password: 60 bits.
const PASSWORD: usize = 12;
/// The file of a kept machine's user-data.
const USER_DATA: &str = "user-data";
/// Characters of an instance ID.
const INSTANCE: usize = 8;
/// The first line of user-data.
const HEAD: &str = "#cloud-config\n";
/// The public keys that ssh(1) uses.
const KEYS: [&str; 4] = ["id_ed25519.pub", "id_ed25519_sk.pub", "id_ecdsa.pub", "id_rsa.pub"];

/// A user of the guest.
pub(super) struct Login {
    /// The machine's ssh_config. `None` if SSH cannot reach it.
    pub config: Option<PathBuf>,
    /// The host port that is forwarded to the guest's SSH server.
    pub port: u16,
}

/// A machine whose disk is kept.
pub(super) struct Kept {
    /// Its directory.
    pub directory: PathBuf,
    /// Whether an earlier run left writes there.
    pub has_disk: bool,
}

/// A seed with `user_data` and `meta_data`.
pub(super) fn seed(user_data: PathBuf, meta_data: Option<PathBuf>) -> Seed {
    Seed { user_data, meta_data, network_config: None }
}

/// Gives the guest a seed that creates `user`, and forwards a port to its SSH server if it has a
/// network without a tap. The disk of a `kept` machine
/// has its users. cloud-init creates another `user` there as soon as it sees a new instance ID.
pub(super) fn prepare(
    args: &mut KernelArgs,
    user: &str,
    name: Option<&str>,
    kept: Option<&Kept>,
    files: &mut Vec<File>,
) -> Result<Login, Failure> {
    let host = |what: &str, error: std::io::Error| Failure::host(format!("--login: {what}: {error}"));
    let port = free_port().map_err(|error| host("a port for SSH", error))?;
    let address = Ipv4Addr::LOCALHOST.into();
    let is_reachable = args.devices.forward(Forward { udp: false, address, host: port, guest: 22 });
    // The keys of a kept machine are permanent. Others last as long as the machine runs.
    let directory = match (kept, name) {
        (Some(kept), _) => Some(kept.directory.clone()),
        (None, Some(name)) => {
            Some(names::make_ssh_directory(name).map_err(|error| Failure::of(&error, FLAGS))?)
        }
        (None, None) => None,
    };
    // Without the overlay the guest has no user, whatever its seed was.
    let before = kept.filter(|kept| kept.has_disk).and_then(|kept| user_of(&kept.directory.join(USER_DATA)));
    let is_new = before.as_deref() != Some(user);
    let identity = match &directory {
        Some(directory) if is_reachable => Identity::of(directory, before.is_none())?,
        _ => None,
    };
    if is_new {
        let password = letters(PASSWORD).map_err(|error| host("a password", error))?;
        // A new ID makes cloud-init configure the guest. The ID is not secret in the guest.
        let instance = letters(INSTANCE).map_err(|error| host("an instance ID", error))?;
        let user_data = user_data(user, &password, identity.as_ref())?;
        let hostname = name.unwrap_or("vellum");
        let id = format!("instance-id: vellum-{instance}\nlocal-hostname: {hostname}\n");
        let seed = match kept {
            Some(kept) => {
                let write = |file: &str, text: &str| {
                    let path = kept.directory.join(file);
                    private(&path).and_then(|mut file| file.write_all(text.as_bytes())).map(|()| path)
                };
                let meta_data = write("meta-data", &id).map_err(|error| host("meta-data", error))?;
                let user_data = write(USER_DATA, &user_data).map_err(|error| host("user-data", error))?;
                seed(user_data, Some(meta_data))
            }
            None => {
                let mut hold = |text: &str| {
                    let mut file = memfd(c"vellum-seed", 0, None)?;
                    file.write_all(text.as_bytes())?;
                    let path = file::path_of(&file);
                    files.push(file);
                    Ok(path)
                };
                let meta_data = hold(&id).map_err(|error| host("meta-data", error))?;
                let user_data = hold(&user_data).map_err(|error| host("user-data", error))?;
                seed(user_data, Some(meta_data))
            }
        };
        args.devices.add(seed);
        say(&format!("log in as {user} with the password {password}"));
    } else if let Some(kept) = kept {
        let file = |name: &str| kept.directory.join(name);
        args.devices.add(seed(file(USER_DATA), Some(file("meta-data"))));
        say(&format!("log in as {user} with the password of the run that created this user"));
    }
    let config = match (directory, identity) {
        (Some(directory), Some(identity)) => {
            let config = identity.configure(&directory, name.unwrap_or("vellum"), user, port)?;
            let link = name
                .map(names::make_ssh_directory)
                .transpose()
                .map_err(|error| Failure::of(&error, FLAGS))?;
            match link {
                // The configuration of a kept machine is in its own directory.
                Some(runtime) if runtime != directory => {
                    let path = runtime.join("config");
                    fs::copy(&config, &path).map_err(|error| host("its SSH configuration", error))?;
                    Some(path)
                }
                _ => Some(config),
            }
        }
        _ => None,
    };
    Ok(Login { config, port })
}

/// Random characters of [`ALPHABET`].
fn letters(count: usize) -> std::io::Result<String> {
    let mut bytes = vec![0; count];
    random::fill(&mut bytes)?;
    Ok(bytes.iter().map(|byte| char::from(ALPHABET[usize::from(byte % 32)])).collect())
}

fn free_port() -> std::io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

/// The user's public SSH keys.
fn own_keys() -> Vec<String> {
    let Some(home) = std::env::var_os("HOME") else { return Vec::new() };
    let keys =
        KEYS.iter().filter_map(|name| fs::read_to_string(Path::new(&home).join(".ssh").join(name)).ok());
    keys.map(|key| key.trim().to_owned()).filter(|key| !key.is_empty()).collect()
}

/// The user-data of cloud-init. JSON is valid YAML, and it quotes the comment of a key.
fn user_data(user: &str, password: &str, identity: Option<&Identity>) -> Result<String, Failure> {
    let mut keys = own_keys();
    keys.extend(identity.map(|identity| identity.public.trim().to_owned()));
    let mut config = json!({
        "users": [{
            "name": user,
            "shell": "/bin/bash",
            "sudo": "ALL=(ALL) NOPASSWD:ALL",
            "lock_passwd": false,
            "plain_text_passwd": password,
            "ssh_authorized_keys": keys,
        }],
        "ssh_pwauth": false,
        "disable_root": user != "root",
    });
    if let Some(identity) = identity {
        config["ssh_keys"] =
            json!({ "ed25519_private": identity.host_private, "ed25519_public": identity.host_public });
    }
    let text = serde_json::to_string_pretty(&config).map_err(Failure::host)?;
    Ok(format!("{HEAD}{text}\n"))
}

/// The user that the user-data in the file `path` creates. `None` if there is no such file.
fn user_of(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let config: serde_json::Value = serde_json::from_str(text.strip_prefix(HEAD)?).ok()?;
    Some(config["users"][0]["name"].as_str()?.to_owned())
}

/// The keys of a machine: the guest's host key, and one that can log in.
struct Identity {
    host_private: String,
    host_public: String,
    public: String,
}

impl Identity {
    /// The keys in `directory`. They are generated if `is_new`. `None` if ssh-keygen is not
    /// installed.
    fn of(directory: &Path, is_new: bool) -> Result<Option<Self>, Failure> {
        for name in ["host", "key"] {
            let path = directory.join(name);
            if path.exists() && !is_new {
                continue;
            }
            for old in [path.clone(), path.with_extension("pub")] {
                let _ = fs::remove_file(old);
            }
            let mut keygen = Command::new("ssh-keygen");
            keygen.args(["-q", "-t", "ed25519", "-N", "", "-C", "vellum", "-f"]).arg(&path);
            match keygen.stdin(Stdio::null()).stdout(Stdio::null()).output() {
                Ok(output) if output.status.success() => {}
                Ok(output) => {
                    let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
                    return Err(Failure::host(format!("--login: ssh-keygen: {why}")));
                }
                Err(_) => {
                    say(
                        "ssh-keygen is not installed, so there is no access by SSH: apt install openssh-client",
                    );
                    return Ok(None);
                }
            }
        }
        let read = |name: &str| {
            let path = directory.join(name);
            fs::read_to_string(&path).map_err(|error| Failure::host(format!("{}: {error}", path.display())))
        };
        Ok(Some(Self {
            host_private: read("host")?,
            host_public: read("host.pub")?,
            public: read("key.pub")?,
        }))
    }

    /// Writes known_hosts and an ssh_config into `directory`. Returns the path of the ssh_config.
    fn configure(&self, directory: &Path, name: &str, user: &str, port: u16) -> Result<PathBuf, Failure> {
        let known = directory.join("known_hosts");
        let write = |path: &Path, text: String| {
            private(path)
                .and_then(|mut file| file.write_all(text.as_bytes()))
                .map_err(|error| Failure::host(format!("{}: {error}", path.display())))
        };
        write(&known, format!("{name} {}\n", self.host_public.trim()))?;
        let config = directory.join("config");
        // ssh(1) expands what follows a percent sign. An agent's keys would come first, and the server
        // ends a connection after six.
        let quoted = |path: &Path| path.display().to_string().replace('%', "%%");
        let text = format!(
            "Host {name}\n  HostName 127.0.0.1\n  Port {port}\n  User {user}\n  HostKeyAlias {name}\n  \
             UserKnownHostsFile \"{}\"\n  StrictHostKeyChecking yes\n  IdentityFile \"{}\"\n  \
             IdentitiesOnly yes\n  LogLevel ERROR\n",
            quoted(&known),
            quoted(&directory.join("key")),
        );
        write(&config, text)?;
        Ok(config)
    }
}

/// Creates an empty file that only this user can read.
fn private(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// ssh(1) reads the configuration as it is meant, in a directory of any name.
    #[test]
    fn ssh_finds_the_keys_and_offers_no_others() {
        if !vellum_sys::program::is_installed("ssh") {
            return eprintln!("ssh is not installed");
        }
        let directory = std::env::temp_dir().join(format!("vellum login %h {}", std::process::id()));
        fs::create_dir(&directory).unwrap();
        let identity = Identity {
            host_private: String::new(),
            host_public: "ssh-ed25519 AAAA".into(),
            public: String::new(),
        };
        let config = identity.configure(&directory, "web", "ada", 2222).unwrap();
        let read = Command::new("ssh").arg("-G").arg("-F").arg(&config).arg("web").output().unwrap();
        fs::remove_dir_all(&directory).unwrap();
        let read = String::from_utf8(read.stdout).unwrap();
        let known = format!("userknownhostsfile {}", directory.join("known_hosts").display());
        let key = format!("identityfile {}", directory.join("key").display());
        for line in [&known[..], &key, "identitiesonly yes", "hostkeyalias web", "port 2222"] {
            let is_there = |found: &str| found.replace("%%", "%") == line;
            assert!(read.lines().any(is_there), "{line}: {read}");
        }
    }

    #[test]
    fn user_data_is_cloud_config_whatever_a_key_says() {
        let identity = Identity {
            host_private: "-----BEGIN\nx\n".into(),
            host_public: "ssh-ed25519 AAAA".into(),
            public: "ssh-ed25519 BBBB a \"comment\": #1".into(),
        };
        let text = user_data("ada", "abc", Some(&identity)).unwrap();
        let (first, rest) = text.split_once('\n').unwrap();
        assert_eq!(first, "#cloud-config");
        let config: serde_json::Value = serde_json::from_str(rest).unwrap();
        let user = &config["users"][0];
        assert_eq!((&user["name"], &user["plain_text_passwd"]), (&json!("ada"), &json!("abc")));
        let keys = user["ssh_authorized_keys"].as_array().unwrap();
        assert!(keys.contains(&json!(identity.public)));
        assert_eq!(config["ssh_keys"]["ed25519_private"], json!(identity.host_private));
    }
}
