//! A guest tries to escape while the host changes the shared tree, file systems are mounted that
//! must not be shared, and more files are opened than there are descriptors.

use std::ffi::CString;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use support::share::mount::fuse;
use support::{Failed, Need, Scratch, ensure, test};

use crate::at_once::descriptors;
use crate::by_hand::root;
use crate::mounted::{Both, CACHES, writable};

/// A thread keeps exchanging a directory of the share with a link that leads out, and back.
#[test(fuse())]
fn who_renames_while_a_guest_looks_does_not_let_it_out() -> Result<(), Failed> {
    for cache in CACHES {
        let (both, outside) = (Both::new(writable(cache))?, Scratch::new()?);
        fs::write(outside.path("secret"), "outside")?;
        fs::create_dir(both.here.path("dir"))?;
        fs::write(both.here.path("dir/secret"), "inside")?;
        // A server that used path names would follow this link. The guest's kernel reads it and
        // follows it in the guest's own tree.
        symlink(outside.dir(), both.here.path("way"))?;
        symlink("/proc/self/fd", both.here.path("magic"))?;
        let over = Arc::new(AtomicBool::new(false));
        let (stop, here) = (over.clone(), both.here.dir().to_owned());
        let swaps = std::thread::spawn(move || -> Result<u32, rustix::io::Errno> {
            let mut count = 0;
            while !stop.load(Ordering::Relaxed) {
                for other in ["way", "magic"] {
                    let (one, other) = (here.join("dir"), here.join(other));
                    renameat_with(CWD, &one, CWD, &other, RenameFlags::EXCHANGE)?;
                    renameat_with(CWD, &one, CWD, &other, RenameFlags::EXCHANGE)?;
                    count += 2;
                }
            }
            Ok(count)
        });
        let tried = || -> Result<(), Failed> {
            let base = File::open(&both.mount.path)?;
            for _ in 0..1000 {
                // NO_SYMLINKS forbids the guest's kernel to follow links. So the server alone
                // decides the result: the directory, or an error.
                let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC;
                let how = rustix::fs::ResolveFlags::NO_SYMLINKS;
                let none = rustix::fs::Mode::empty();
                if let Ok(file) = rustix::fs::openat2(&base, "dir/secret", flags, none, how) {
                    let mut text = [0; 16];
                    let len = rustix::io::pread(&file, &mut text, 0).unwrap_or(0);
                    ensure(len == 0 || text[..len] == *b"inside", || format!("{:?}", &text[..len]))?;
                }
                let make = rustix::fs::OFlags::CREATE | rustix::fs::OFlags::WRONLY | flags;
                let _ = rustix::fs::openat2(&base, "dir/made", make, rustix::fs::Mode::RUSR, how);
                let _ = rustix::fs::openat2(&base, "dir/0", flags, none, how);
            }
            Ok(())
        };
        let tried = tried();
        over.store(true, Ordering::Relaxed);
        let count = swaps.join().map_err(|_| "it has panicked")??;
        tried?;
        ensure(count > 100, || format!("{count} renames: the guest was not disturbed"))?;
        let names: Vec<_> =
            fs::read_dir(outside.dir())?.map(|it| it.map(|it| it.file_name())).collect::<Result<_, _>>()?;
        ensure(names == ["secret"], || format!("{cache:?}: outside there is {names:?}"))?;
    }
    Ok(())
}

/// A mount that is removed on drop.
struct Mounted(CString);

impl Mounted {
    fn new(source: &Path, kind: &str, at: &Path) -> Option<Self> {
        let text = |path: &Path| CString::new(path.as_os_str().as_bytes()).expect("no zero byte");
        let (source, at, kind, flags) = match kind {
            "bind" => (text(source), text(at), CString::default(), libc::MS_BIND),
            kind => (text(source), text(at), CString::new(kind).expect("no zero byte"), 0),
        };
        // SAFETY: the strings end in a zero.
        let done =
            unsafe { libc::mount(source.as_ptr(), at.as_ptr(), kind.as_ptr(), flags, std::ptr::null()) };
        (done == 0).then_some(Self(at))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // SAFETY: the string ends in a zero.
        unsafe { libc::umount2(self.0.as_ptr(), libc::MNT_DETACH) };
    }
}

/// Needs root, because the test mounts file systems.
fn mounts() -> Need {
    root()?;
    fuse()
}

/// Each kind of pseudo file system is mounted in the share, before it is served and after. A file
/// of one is also mounted on a file.
#[test(mounts())]
fn no_pseudo_file_system_is_shared() -> Result<(), Failed> {
    for cache in CACHES {
        let both = Both::new(writable(cache))?;
        let mut mounted = Vec::new();
        for kind in [
            "proc",
            "sysfs",
            "devtmpfs",
            "devpts",
            "cgroup2",
            "debugfs",
            "tracefs",
            "securityfs",
            "bpf",
            "mqueue",
        ] {
            let at = both.here.path(kind);
            fs::create_dir(&at)?;
            // Not every kernel has every kind.
            let Some(mount) = Mounted::new(Path::new("none"), kind, &at) else { continue };
            mounted.push(mount);
            let names: Vec<_> = fs::read_dir(both.path(kind))?.collect();
            ensure(names.is_empty(), || format!("{cache:?}: {kind} has {names:?}"))?;
            for inside in fs::read_dir(&at)?.flatten().take(20) {
                let there = both.path(kind).join(inside.file_name());
                ensure(File::open(&there).is_err(), || format!("{cache:?}: {}", there.display()))?;
            }
            let made = File::create(both.path(kind).join("made"));
            ensure(made.is_err(), || format!("{cache:?}: something is made in {kind}"))?;
        }
        ensure(mounted.len() >= 3, || format!("only {} of them could be mounted", mounted.len()))?;
        fs::write(both.here.path("version"), "mine")?;
        let file = Mounted::new(Path::new("/proc/version"), "bind", &both.here.path("version"));
        ensure(file.is_some(), || "it cannot be mounted on a file".into())?;
        let read = fs::read(both.path("version"));
        ensure(read.is_err(), || format!("{cache:?}: {read:?}"))?;
        // An ordinary file system is shared.
        let at = both.here.path("tmpfs");
        fs::create_dir(&at)?;
        let _files = Mounted::new(Path::new("none"), "tmpfs", &at).ok_or("no tmpfs")?;
        fs::write(at.join("file"), "shared")?;
        ensure(fs::read(both.path("tmpfs/file"))? == b"shared", || "a tmpfs is not shared".into())?;
    }
    Ok(())
}

/// More files are opened through a mount than there may be descriptors. Each must be the file of
/// its name, and none may stay open.
#[test(fuse())]
fn opens_leave_no_descriptors() -> Result<(), Failed> {
    const FILES: usize = 10_000;
    let before = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(4096), maximum: before.maximum })?;
    // The server inherits the limit of its parent.
    let both = Both::new(writable(vellum_share::Cache::Auto));
    setrlimit(Resource::Nofile, before)?;
    let both = both?;
    fs::metadata(both.path("."))?;
    let server = both.mount.server()?;
    for at in 0..FILES {
        fs::write(both.here.path(&at.to_string()), at.to_string())?;
    }
    let mut most = 0;
    for round in 0..2 {
        for at in 0..FILES {
            let file = File::open(both.path(&at.to_string()))?;
            if at % 1000 == round {
                let mut text = [0; 8];
                let len = rustix::io::pread(&file, &mut text, 0)?;
                ensure(text[..len] == *at.to_string().as_bytes(), || format!("{at} is another file"))?;
            }
        }
        most = most.max(descriptors(server)?);
    }
    ensure(most < 4096, || format!("{most} descriptors"))?;
    // Nodes keep at most half of the descriptors. Opened files keep none.
    let kept = descriptors(server)?;
    ensure(kept <= 2048 + 64, || format!("{kept} descriptors are left"))
}
