//! What programs do with files through the server, compared with what the host sees.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::Path;

use support::share::mount::{Mount, fuse};
use support::share::posix::checked;
use support::{Failed, Random, Scratch, ensure, test};
use vellum_share::{Cache, Config};

/// A directory on the host, and its mount through the server.
pub struct Both {
    // The first field, so that it is unmounted before the directories are removed.
    pub mount: Mount,
    pub here: Scratch,
    _there: Scratch,
}

impl Both {
    pub fn new(config: Config) -> Result<Self, Failed> {
        let (here, there) = (Scratch::new()?, Scratch::new()?);
        let mount = Mount::new(here.dir(), there.dir().to_owned(), config)?;
        Ok(Self { mount, here, _there: there })
    }

    pub fn path(&self, name: &str) -> std::path::PathBuf {
        self.mount.path.join(name)
    }
}

pub fn writable(cache: Cache) -> Config {
    Config { writable: true, cache, ..Config::default() }
}

pub const CACHES: [Cache; 3] = [Cache::Auto, Cache::Always, Cache::None];

#[test(fuse())]
fn calls_do_what_posix_says() -> Result<(), Failed> {
    let plain = Scratch::new()?;
    let (all, wrong) = checked(plain.dir(), None, false)?;
    ensure(wrong.is_empty(), || format!("the host's own file system:\n{}", wrong.join("\n")))?;
    for cache in CACHES {
        let config = Config { writable: true, setid: true, devices: true, cache, ..Config::default() };
        let both = Both::new(config)?;
        let (done, wrong) = checked(&both.mount.path, Some(cache), false)?;
        ensure(wrong.is_empty(), || format!("{cache:?}: {} of {done}:\n{}", wrong.len(), wrong.join("\n")))?;
        ensure(done == all, || format!("{cache:?}: {done} of {all}"))?;
    }
    Ok(())
}

#[test(fuse())]
fn files_are_made_changed_renamed_and_removed() -> Result<(), Failed> {
    for cache in CACHES {
        let both = Both::new(writable(cache))?;
        let (a, b) = (both.path("a"), both.path("dir/b"));
        fs::write(&a, "one")?;
        fs::create_dir(both.path("dir"))?;
        fs::set_permissions(&a, fs::Permissions::from_mode(0o640))?;
        fs::rename(&a, &b)?;
        ensure(fs::read(both.here.path("dir/b"))? == b"one", || "the host does not see it".into())?;
        ensure(fs::metadata(both.here.path("dir/b"))?.permissions().mode() & 0o777 == 0o640, || {
            "its mode".into()
        })?;
        fs::hard_link(&b, both.path("c"))?;
        ensure(fs::metadata(both.path("c"))?.nlink() == 2, || "it has one link".into())?;
        symlink("dir/b", both.path("link"))?;
        ensure(fs::read(both.path("link"))? == b"one", || "the link leads elsewhere".into())?;
        let mut file = File::options().append(true).open(&b)?;
        file.write_all(b" two")?;
        file.set_len(6)?;
        file.sync_all()?;
        ensure(fs::read(both.here.path("c"))? == b"one tw", || "what was appended".into())?;
        let times = fs::FileTimes::new().set_modified(std::time::UNIX_EPOCH + std::time::Duration::new(5, 6));
        file.set_times(times)?;
        drop(file);
        let seen = fs::metadata(both.here.path("c"))?;
        ensure((seen.mtime(), seen.mtime_nsec()) == (5, 6), || {
            format!("{}.{}", seen.mtime(), seen.mtime_nsec())
        })?;
        // The file stays usable after its name is removed.
        let mut open = File::options().read(true).write(true).open(both.path("c"))?;
        fs::remove_file(both.path("c"))?;
        fs::remove_file(&b)?;
        open.write_all(b"ONE")?;
        open.seek(SeekFrom::Start(0))?;
        let mut text = String::new();
        open.read_to_string(&mut text)?;
        ensure(text == "ONE tw", || text.clone())?;
        open.set_permissions(fs::Permissions::from_mode(0o600))?;
        drop(open);
        ensure(fs::read(both.path("link")).is_err_and(|error| error.kind() == ErrorKind::NotFound), || {
            "it is there".into()
        })?;
        ensure(fs::remove_dir(both.path("nothing")).is_err(), || "nothing is removed".into())?;
        fs::remove_dir(both.path("dir"))?;
        fs::remove_file(both.path("link"))?;
        ensure(fs::read_dir(both.here.dir())?.next().is_none(), || "something is left".into())?;
    }
    Ok(())
}

#[test(fuse())]
fn all_entries_of_a_directory_are_listed_once() -> Result<(), Failed> {
    for cache in CACHES {
        let both = Both::new(writable(cache))?;
        let names: Vec<String> = (0..3000).map(|at| format!("{at}-{}", "x".repeat(at % 200))).collect();
        for name in &names {
            File::create(both.here.path(name))?;
        }
        for _ in 0..2 {
            let mut listed: Vec<String> = fs::read_dir(&both.mount.path)?
                .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
                .collect::<Result<_, std::io::Error>>()?;
            listed.sort_by_key(|name| name.split('-').next().and_then(|number| number.parse::<u32>().ok()));
            ensure(listed == names, || format!("{} entries", listed.len()))?;
        }
        // The types of new entries are right, too.
        fs::create_dir(both.path("z"))?;
        let kind = fs::read_dir(&both.mount.path)?
            .find_map(|entry| entry.ok().filter(|entry| entry.file_name() == "z"));
        ensure(kind.is_some_and(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())), || {
            "a directory".into()
        })?;
    }
    Ok(())
}

/// A change on the host is visible when a file is opened the next time.
#[test(fuse())]
fn what_the_host_changes_is_seen_at_the_next_open() -> Result<(), Failed> {
    for cache in [Cache::Auto, Cache::None] {
        let both = Both::new(Config { cache, ..Config::default() })?;
        for round in 0..50u32 {
            let text = format!("{round}").repeat(1 + round as usize % 7);
            // The file is overwritten in place and replaced by another file, in turns.
            if round % 2 == 0 {
                fs::write(both.here.path("file"), &text)?;
            } else {
                fs::write(both.here.path("new"), &text)?;
                fs::rename(both.here.path("new"), both.here.path("file"))?;
            }
            let seen = fs::read_to_string(both.path("file"))?;
            ensure(seen == text, || format!("{cache:?}, round {round}: {seen} is not {text}"))?;
        }
        fs::remove_file(both.here.path("file"))?;
        ensure(File::open(both.path("file")).is_err(), || "it is there yet".into())?;
    }
    Ok(())
}

/// Random reads, writes, truncations, holes and reopenings, compared with a model in memory.
#[test(fuse())]
fn a_file_holds_what_was_written_to_it() -> Result<(), Failed> {
    const MAX_FILE: u64 = 3 << 20;
    let mut random = Random::new();
    for cache in CACHES {
        let both = Both::new(writable(cache))?;
        let path = both.path("file");
        let open = || File::options().read(true).write(true).create(true).truncate(false).open(&path);
        let (mut file, mut model) = (open()?, Vec::<u8>::new());
        for step in 0..400u64 {
            let at = random.below(MAX_FILE / 2);
            let most = random_size(&mut random);
            let len = random.below(1 + most) as usize;
            match random.below(10) {
                0..=3 => {
                    let data: Vec<u8> = (0..len).map(|byte| (byte as u64 * 31 + step) as u8).collect();
                    file.write_all_at(&data, at)?;
                    let end = at as usize + len;
                    if len > 0 {
                        model.resize(model.len().max(end), 0);
                        model[at as usize..end].copy_from_slice(&data);
                    }
                }
                4..=6 => {
                    let mut data = vec![0; len];
                    let mut read = 0;
                    while read < len {
                        match file.read_at(&mut data[read..], at + read as u64)? {
                            0 => break,
                            count => read += count,
                        }
                    }
                    let due = model
                        .get((at as usize).min(model.len())..(at as usize + len).min(model.len()))
                        .unwrap_or(&[]);
                    ensure(&data[..read] == due, || format!("{cache:?}, step {step}: {len} bytes at {at}"))?;
                }
                7 => {
                    file.set_len(at)?;
                    model.resize(at as usize, 0);
                }
                8 => {
                    file.sync_all()?;
                    let here = fs::read(both.here.path("file"))?;
                    ensure(here == model, || format!("{cache:?}, step {step}: the host has something else"))?;
                }
                _ => file = open()?,
            }
        }
        drop(file);
        ensure(fs::read(&path)? == model, || format!("{cache:?}: at the end"))?;
    }
    Ok(())
}

fn random_size(random: &mut Random) -> u64 {
    [1, 100, 5000, 70_000, 1 << 20][random.below(5) as usize]
}

/// Random changes to a tree of names, in the share and on a file system of the host. Both must end
/// up the same.
#[test(fuse())]
fn a_tree_of_names_is_what_the_host_would_have_made_of_it() -> Result<(), Failed> {
    let mut random = Random::new();
    for cache in CACHES {
        let (both, plain) = (Both::new(writable(cache))?, Scratch::new()?);
        let name = |random: &mut Random| {
            let depth = 1 + random.below(3);
            (0..depth).map(|_| ["a", "b", "c", "d"][random.below(4) as usize]).collect::<Vec<_>>().join("/")
        };
        for step in 0..1500 {
            let (one, other, what) = (name(&mut random), name(&mut random), random.below(8));
            let act = |root: &Path| -> Result<(), i32> {
                let (one, other) = (root.join(&one), root.join(&other));
                let done = match what {
                    0 | 1 => fs::create_dir(one),
                    2 => File::options()
                        .create_new(true)
                        .write(true)
                        .mode(0o644)
                        .open(one)
                        .and_then(|mut file| file.write_all(&[step as u8])),
                    3 => fs::rename(one, other),
                    4 => fs::remove_file(one),
                    5 => fs::remove_dir(one),
                    6 => fs::hard_link(one, other),
                    _ => symlink("a", one),
                };
                done.map_err(|error| error.raw_os_error().unwrap_or(0))
            };
            let (mounted, direct) = (act(&both.mount.path), act(plain.dir()));
            ensure(mounted == direct, || {
                format!("{cache:?}, step {step}: {what} {one} {other}: {mounted:?}, not {direct:?}")
            })?;
        }
        let (mounted, here, direct) = (tree(&both.mount.path)?, tree(both.here.dir())?, tree(plain.dir())?);
        ensure(mounted == direct && here == direct, || format!("{cache:?}: {mounted:?}\n{direct:?}"))?;
    }
    Ok(())
}

/// Each path below `root` with its type, its number of links and its contents.
pub fn tree(root: &Path) -> Result<BTreeMap<String, String>, Failed> {
    let mut found = BTreeMap::new();
    let mut left = vec![root.to_owned()];
    while let Some(path) = left.pop() {
        for entry in fs::read_dir(&path)? {
            let path = entry?.path();
            let stat = fs::symlink_metadata(&path)?;
            let what = match stat.file_type() {
                kind if kind.is_dir() => {
                    left.push(path.clone());
                    "directory".into()
                }
                kind if kind.is_symlink() => format!("to {}", fs::read_link(&path)?.display()),
                kind if kind.is_fifo() => "fifo".into(),
                _ => format!("{} links, {:?}", stat.nlink(), fs::read(&path)?),
            };
            found.insert(path.strip_prefix(root)?.display().to_string(), what);
        }
    }
    Ok(found)
}
