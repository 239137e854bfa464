//! Many threads change one tree at the same time, as fsstress does. Nothing may hang. In the end
//! the mount must show what the host has, and no descriptor may leak.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, RenameFlags, mknodat, renameat_with};
use support::share::mount::fuse;
use support::{Failed, LIMIT, Random, ensure, eventually, test};

use crate::mounted::{Both, CACHES, tree, writable};

const THREADS: u64 = 4;
const STEPS: u32 = 1500;

#[test(fuse())]
fn many_change_a_tree_at_once() -> Result<(), Failed> {
    let mut seeds = Random::new();
    for cache in CACHES {
        let both = Both::new(writable(cache))?;
        fs::metadata(both.path("."))?;
        let server = both.mount.server()?;
        let before = descriptors(server)?;
        // One thread makes its changes on the host's side, if the cache mode shows these at once.
        let from_host = cache == vellum_share::Cache::None;
        let own = from_host.then(|| both.here.dir().to_owned());
        let roots = (0..THREADS).map(|_| both.mount.path.clone()).chain(own);
        let threads: Vec<_> = roots
            .map(|root| {
                let mut random = seeds.split();
                std::thread::spawn(move || (0..STEPS).try_for_each(|step| act(&root, &mut random, step)))
            })
            .collect();
        for thread in threads {
            thread.join().map_err(|_| "a thread has panicked")?.map_err(|error| said(cache, &error))?;
        }
        let (mounted, here) = (tree(&both.mount.path)?, tree(both.here.dir())?);
        ensure(mounted == here, || format!("{cache:?}: {mounted:?}\n{here:?}"))?;
        // Nodes keep a bounded number of descriptors. Those of open files are all closed. The tree
        // is removed here, and its nodes with it. The kernel forgets files that the host has
        // removed only when it needs the memory.
        for entry in fs::read_dir(&both.mount.path)? {
            let path = entry?.path();
            if path.is_dir() && !path.is_symlink() {
                fs::remove_dir_all(path)?
            } else {
                fs::remove_file(path)?
            }
        }
        if from_host {
            continue;
        }
        eventually(LIMIT, "descriptors go with what they are of", || {
            Ok((descriptors(server)? <= before + 2).then_some(()))
        })?;
    }
    Ok(())
}

fn said(cache: vellum_share::Cache, error: &std::io::Error) -> Failed {
    format!("{cache:?}: {error}").into()
}

/// How many descriptors the process `pid` has.
pub fn descriptors(pid: u32) -> Result<usize, Failed> {
    Ok(fs::read_dir(format!("/proc/{pid}/fd"))?.count())
}

/// Does one random thing. It may fail for any reason that the other threads can cause. Errors of
/// the connection and of descriptors are returned.
fn act(root: &Path, random: &mut Random, step: u32) -> std::io::Result<()> {
    let mut name = || -> PathBuf {
        let parts = (0..=random.below(3)).map(|_| ["a", "b", "c", "d", "e"][random.below(5) as usize]);
        root.join(parts.collect::<PathBuf>())
    };
    let (one, other) = (name(), name());
    let number = random.below(1 << 16);
    let ended = match random.below(16) {
        0 | 1 => fs::create_dir(&one),
        2..=4 => {
            // A blocking open of a FIFO would wait for the other end.
            let mut how = File::options();
            how.create(true).write(true).truncate(false).mode(0o644).custom_flags(libc::O_NONBLOCK);
            how.open(&one).and_then(|mut file| {
                file.write_all(&step.to_ne_bytes())?;
                file.write_all_at(&[1; 5000], number)?;
                file.set_len(number / 2)
            })
        }
        5 => fs::rename(&one, &other),
        6 => renameat_with(CWD, &one, CWD, &other, RenameFlags::EXCHANGE).map_err(Into::into),
        7 => fs::remove_file(&one),
        8 => fs::remove_dir(&one),
        9 => fs::remove_dir_all(&one),
        10 => fs::hard_link(&one, &other),
        11 => symlink("a/b", &one),
        12 => mknodat(CWD, &one, FileType::Fifo, Mode::RUSR, 0).map_err(Into::into),
        13 => fs::set_permissions(&one, fs::Permissions::from_mode(0o700 | number as u32 & 0o77)),
        14 => fs::read_dir(&one).and_then(|mut all| all.try_for_each(|entry| entry?.metadata().map(drop))),
        _ => File::options().read(true).custom_flags(libc::O_NONBLOCK).open(&one).and_then(|file| {
            let mut bytes = [0; 5000];
            file.read_at(&mut bytes, 0).map(drop)
        }),
    };
    match ended.as_ref().map_err(std::io::Error::raw_os_error) {
        Err(Some(
            libc::ENOTCONN | libc::ECONNABORTED | libc::EIO | libc::ENFILE | libc::EMFILE | libc::EBADF,
        )) => ended,
        _ => Ok(()),
    }
}
