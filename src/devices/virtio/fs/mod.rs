//! A shared directory of the host (virtio 1.2, section 5.11). The guest mounts it by its tag, with
//! the file system `virtiofs`.
//!
//! [`vellum_share`] executes the requests in a process of its own. A worker thread here carries
//! requests to it and answers back. The worker itself reads and writes files that are already open
//! (`requests`). There is no DAX window.

mod requests;

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::worker::Worker;
use super::{
    Active, DeviceConfig, DeviceState, Enter, Hang, Kind, OpenError, RestoreError, StartError, VirtioDevice,
    read_space,
};
use requests::Requests;
use vellum_sandbox::user::User;
use vellum_sandbox::{self as sandbox, ThreadKind};
use vellum_share::process::{Client, open_root};
use vellum_share::{Cache, Config};
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};
use vellum_sys::identity;
use vellum_sys::keyvalue::{self, KeyValues, path};

/// VIRTIO_ID_FS (virtio 1.2, section 5).
const VIRTIO_ID_FS: u32 = 26;
/// Bytes of a tag in configuration space, padded with zeroes.
const TAG: usize = 36;
/// The high-priority queue (FORGET), and the queue for all other requests.
const QUEUE_SIZES: [u16; 2] = [64, 256];

/// The shared directory as a kind of device.
pub static KIND: Kind = Kind {
    key: "share",
    about: "A directory of the host. The guest mounts it by its tag, as in `mount -t virtiofs TAG /mnt`: \
        `DIR[:TAG][,ro|rw|overlay][,cache=auto|always|none][,user=UID:GID][,as-root][,setid][,devices][,privileged-xattrs]`",
    value: Some("DIR"),
    repeats: true,
    parse: |text| match parse(text) {
        Ok(config) => Ok(Arc::new(config)),
        Err(error) => Err(error.to_string()),
    },
    read: |written| Ok(Arc::new(serde_json::from_value::<FsConfig>(written)?)),
};

/// The shared directory that is the root of a command's guest, as a kind of device.
pub static ROOT: Kind = Kind {
    key: "root",
    about: "The root of a COMMAND's guest: a directory of this host, or `host` for this host's own root. The guest's changes stay in \
        its memory. Files are read as the user who started Vellum. If that is root: as the directory's owner, UID:GID, or root (as-root): \
        `DIR|host[,overlay][,cache=auto|always|none][,user=UID:GID][,as-root]`",
    value: Some("DIR|host"),
    repeats: false,
    parse: |text| match root(text) {
        Ok(config) => Ok(Arc::new(config)),
        Err(error) => Err(error.to_string()),
    },
    read: KIND.read,
};

/// The root's tag. Other directories of such a guest have no slash in their tag.
const ROOT_TAG: &str = "/dev/root";

/// The guest's access to a directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mode {
    /// The guest reads it.
    #[default]
    ReadOnly,
    /// The guest changes it.
    ReadWrite,
    /// The guest reads it. Its changes stay in its own memory.
    Overlay,
}

/// The configuration of a shared directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FsConfig {
    /// The directory.
    pub path: PathBuf,
    /// The tag by which the guest mounts it: 1 to 36 bytes.
    pub tag: String,
    /// The guest's access.
    pub mode: Mode,
    /// What the guest may cache.
    pub cache: Cache,
    /// The user as whom the server acts. By default this process's user; if that is root, the
    /// directory's owner.
    pub user: Option<User>,
    /// The server may act as root.
    pub as_root: bool,
    /// The guest may set setuid and setgid bits.
    pub setid: bool,
    /// The guest may make device nodes.
    pub devices: bool,
    /// The guest may set attributes in `security.` and `trusted.`.
    pub privileged_xattrs: bool,
    /// Whether the server is sandboxed.
    pub sandbox: sandbox::Mode,
    /// The directory is the guest's root.
    pub root: bool,
}

impl FsConfig {
    /// `path`, read-only, with its file name as the tag.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        let tag = path.file_name().map_or("root".into(), |name| name.to_string_lossy().into_owned());
        Self {
            path,
            tag,
            mode: Mode::default(),
            cache: Cache::default(),
            user: None,
            as_root: false,
            setid: false,
            devices: false,
            privileged_xattrs: false,
            sandbox: sandbox::Mode::On,
            root: false,
        }
    }
}

const KEYS: [&str; 11] = [
    "path",
    "ro",
    "rw",
    "overlay",
    "cache",
    "user",
    "as-root",
    "setid",
    "devices",
    "privileged-xattrs",
    "tag",
];

/// Parses `--share`.
fn parse(text: &str) -> Result<FsConfig, keyvalue::Error> {
    let kv = KeyValues::parse(text, Some("path"), &KEYS)?;
    let whole = kv.required("path", path)?;
    // A directory with a colon in its name needs tag=.
    let mut config = match whole.to_str().and_then(|text| text.rsplit_once(':')) {
        Some((path, tag)) if kv.text("tag").is_none() && !path.is_empty() && !tag.contains('/') => {
            FsConfig { tag: tag.into(), ..FsConfig::new(path) }
        }
        _ => FsConfig::new(whole),
    };
    if let Some(tag) = kv.text("tag") {
        config.tag = tag.into();
    }
    let modes = [("ro", Mode::ReadOnly), ("rw", Mode::ReadWrite), ("overlay", Mode::Overlay)];
    let mut chosen = Vec::new();
    for (key, mode) in modes {
        if kv.switch(key)?.unwrap_or(false) {
            chosen.push((key, mode));
        }
    }
    match chosen[..] {
        [] => {}
        [(_, mode)] => config.mode = mode,
        [(one, _), (other, _), ..] => {
            let reason = format!("it excludes {one}");
            return Err(keyvalue::Error::Value { key: other.into(), value: "on".into(), reason });
        }
    }
    config.cache = cache(&kv)?;
    config.user = kv.with("user", str::parse::<User>)?;
    config.as_root = kv.switch("as-root")?.unwrap_or(false);
    config.setid = kv.switch("setid")?.unwrap_or(false);
    config.devices = kv.switch("devices")?.unwrap_or(false);
    config.privileged_xattrs = kv.switch("privileged-xattrs")?.unwrap_or(false);
    Ok(config)
}

/// Parses a root: a directory, or `host`. That is this host's own root, unless a directory has that
/// name.
fn root(text: &str) -> Result<FsConfig, keyvalue::Error> {
    let kv = KeyValues::parse(text, Some("path"), &["path", "overlay", "cache", "user", "as-root"])?;
    let path = kv.required("path", path)?;
    let path = if path == Path::new("host") && !path.exists() { "/".into() } else { path };
    if kv.switch("overlay")? == Some(false) {
        let reason = "a root is always copy on write: leave it out".into();
        return Err(keyvalue::Error::Value { key: "overlay".into(), value: "off".into(), reason });
    }
    Ok(FsConfig {
        tag: ROOT_TAG.into(),
        mode: Mode::Overlay,
        cache: cache(&kv)?,
        user: kv.with("user", str::parse::<User>)?,
        as_root: kv.switch("as-root")?.unwrap_or(false),
        root: true,
        ..FsConfig::new(path)
    })
}

fn cache(kv: &KeyValues) -> Result<Cache, keyvalue::Error> {
    let caches = [("auto", Cache::Auto), ("always", Cache::Always), ("none", Cache::None)];
    Ok(kv.with("cache", |text| keyvalue::one_of("cache", text, &caches))?.unwrap_or_default())
}

/// Why a directory cannot be shared.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FsError {
    /// It cannot be opened.
    #[error("directory {path}: {source}; share one that exists and that this user can read")]
    Open {
        /// The directory.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// Its server does not start.
    #[error("directory {path}: {source}")]
    Serve {
        /// The directory.
        path: PathBuf,
        /// What went wrong.
        source: io::Error,
    },
    /// The tag is empty, too long, or has a zero byte.
    #[error("tag '{0}' has {len} bytes: 1 to {TAG} fit, as in DIR:data", len = .0.len())]
    Tag(String),
    /// The server would act as root.
    #[error(
        "directory {0} belongs to root, so its server would act as root: name another user with user=UID:GID, or allow it with as-root"
    )]
    Root(PathBuf),
    /// `user=` was given by a user who cannot change to another.
    #[error("directory {0}: user=: only root may act as another user; leave it out")]
    User(PathBuf),
}

impl Diagnose for FsError {
    fn origin(&self) -> ErrorOrigin {
        let field = Field::Device(KIND.key);
        match self {
            Self::Serve { source, .. } if source.kind() != io::ErrorKind::PermissionDenied => {
                ErrorOrigin::host(field)
            }
            Self::Serve { .. } => ErrorOrigin::user(field),
            Self::Open { .. } | Self::Tag(_) | Self::Root(_) | Self::User(_) => ErrorOrigin::user(field),
        }
    }
}

impl DeviceConfig for FsConfig {
    fn kind(&self) -> &'static Kind {
        if self.root { &ROOT } else { &KIND }
    }

    fn own_name(&self) -> Option<&str> {
        Some(&self.tag)
    }

    fn written(&self) -> io::Result<Value> {
        let mut written = self.clone();
        super::handoff::make_absolute([&mut written.path])?;
        super::handoff::write(&written)
    }

    fn open(&self) -> Result<Box<dyn VirtioDevice>, OpenError> {
        let device = Fs::open(self).map_err(|error| Box::new(error) as OpenError)?;
        Ok(Box::new(device))
    }
}

/// The device as its driver sees it, and the handle to its worker.
pub(crate) struct Fs {
    config: [u8; TAG + 4],
    key: &'static str,
    requests: Option<Requests>,
    worker: Option<Worker<Requests>>,
    /// The guest has mounted the directory since this device was opened.
    mounted: Arc<AtomicBool>,
}

/// Nothing is saved. A guest that has not mounted the directory has no state in the server, and one
/// that has stays with it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {}

impl Fs {
    /// Opens the directory and starts its server.
    ///
    /// # Errors
    /// The directory cannot be shared.
    pub fn open(config: &FsConfig) -> Result<Self, FsError> {
        let tag = config.tag.as_bytes();
        if tag.is_empty() || tag.len() > TAG || tag.contains(&0) {
            return Err(FsError::Tag(config.tag.clone()));
        }
        let path = &config.path;
        let open_error = |source| FsError::Open { path: path.clone(), source };
        let root = open_root(path).map_err(open_error)?;
        let owner = root.metadata().map_err(open_error)?;
        let user = whom(config, owner.uid(), owner.gid())?;
        let served = Config {
            writable: config.mode == Mode::ReadWrite,
            joined: config.mode == Mode::Overlay,
            cache: config.cache,
            setid: config.setid,
            devices: config.devices,
            privileged_xattrs: config.privileged_xattrs,
        };
        let client = Client::start(&root, served, user, config.sandbox);
        let client = client.map_err(|source| FsError::Serve { path: path.clone(), source })?;
        let mounted = Arc::<AtomicBool>::default();
        let mut space = [0; TAG + 4];
        space[..tag.len()].copy_from_slice(tag);
        space[TAG..].copy_from_slice(&1u32.to_le_bytes());
        Ok(Self {
            config: space,
            key: config.kind().key,
            requests: Some(Requests::new(client, path, mounted.clone())),
            worker: None,
            mounted,
        })
    }
}

/// The user as whom the server acts; `None` for this process's own. `uid` and `gid` own the
/// directory.
fn whom(config: &FsConfig, uid: u32, gid: u32) -> Result<Option<User>, FsError> {
    let (me, _) = identity::effective();
    match config.user {
        Some(user) if me != 0 && user.uid != me => Err(FsError::User(config.path.clone())),
        // The root of a command's guest is never written to.
        None if config.root && me == 0 && uid == 0 => Ok(None),
        Some(User { uid: 0, .. }) if !config.as_root => Err(FsError::Root(config.path.clone())),
        Some(user) => Ok((me == 0).then_some(user)),
        None if me != 0 || config.as_root => Ok(None),
        None if uid == 0 => Err(FsError::Root(config.path.clone())),
        None => Ok(Some(User { uid, gid })),
    }
}

impl VirtioDevice for Fs {
    fn kind(&self) -> u32 {
        VIRTIO_ID_FS
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        read_space(&self.config, offset, data);
    }

    fn on_event_loop(&self) -> bool {
        false
    }

    fn start(&mut self, enter: Enter) -> Result<(), StartError> {
        if let Some(requests) = self.requests.take() {
            let target = requests.path.display().to_string();
            let begin = move || Ok(enter(ThreadKind::Share).map(|()| requests)?);
            self.worker = Some(Worker::start("share", target, begin)?);
        }
        Ok(())
    }

    fn activate(&mut self, active: Active) {
        self.worker.as_ref().expect("the worker starts before the driver runs").give(active, ());
    }

    fn quiesce(&mut self, patience: Duration) -> Result<Option<Active>, Hang> {
        self.worker.as_mut().map_or(Ok(None), |worker| worker.take(patience))
    }

    fn stays(&self) -> Option<(&'static str, &'static str)> {
        let mounted = self.mounted.load(Ordering::Acquire);
        mounted.then_some((self.key, "files that the guest has open in it are open only in this process"))
    }

    fn save(&self) -> DeviceState {
        DeviceState::Share(State {})
    }

    fn restore(&mut self, state: DeviceState) -> Result<(), RestoreError> {
        match state {
            DeviceState::Share(State {}) => Ok(()),
            other => Err(RestoreError::kind(&KIND, &other)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_has_a_tag_and_one_mode() {
        let config = |text| parse(text).unwrap();
        assert_eq!(config("/a/b"), FsConfig { tag: "b".into(), ..FsConfig::new("/a/b") });
        assert_eq!(config("/"), FsConfig { tag: "root".into(), ..FsConfig::new("/") });
        let mode = Mode::ReadWrite;
        assert_eq!(config("/a/b:data,rw"), FsConfig { tag: "data".into(), mode, ..FsConfig::new("/a/b") });
        assert_eq!(config("/a:b/c").tag, "c");
        assert_eq!(config("/a:b,tag=x").path, PathBuf::from("/a:b"));
        assert_eq!(config("/a,cache=always,user=1:2").user, Some(User { uid: 1, gid: 2 }));
        for (text, says) in [
            ("/a,ro,rw", "rw=on: it excludes ro"),
            ("/a,cache=alway", "did you mean 'always'"),
            ("/a,overlya", "did you mean 'overlay'"),
            ("/a,user=root", "UID:GID"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn a_root_is_a_directory_or_the_hosts_own() {
        let config = root("/a/b,user=1:2").unwrap();
        assert_eq!(
            (&*config.path, config.mode, config.kind().key),
            (Path::new("/a/b"), Mode::Overlay, "root")
        );
        assert_eq!(config.user, Some(User { uid: 1, gid: 2 }));
        assert_eq!(root("host,overlay").unwrap().path, Path::new("/"));
        for (text, says) in [("/a,rw", "rw"), ("/a,overlay=off", "leave it out"), ("/a,cache=n", "none")] {
            let error = root(text).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }

    /// Root serves a directory only on request.
    #[test]
    fn a_directory_of_roots_is_not_served_by_root() {
        if identity::effective().0 != 0 {
            return;
        }
        let config = FsConfig::new("/x");
        assert!(matches!(whom(&config, 0, 0), Err(FsError::Root(_))));
        assert_eq!(whom(&config, 7, 8).unwrap(), Some(User { uid: 7, gid: 8 }));
        assert_eq!(whom(&FsConfig { as_root: true, ..config.clone() }, 0, 0).unwrap(), None);
        // The guest's changes stay in its memory, so this reads and does nothing else.
        assert_eq!(whom(&FsConfig { root: true, ..config.clone() }, 0, 0).unwrap(), None);
        let root = FsConfig { user: Some(User { uid: 0, gid: 0 }), ..config };
        assert!(matches!(whom(&root, 7, 8), Err(FsError::Root(_))));
    }
}
