//! Requests that no guest's kernel makes, and more files than a process may have descriptors.

use std::ffi::{CStr, CString};
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use support::{Failed, LIMIT, Need, Scratch, ensure, eventually, test};
use vellum_sandbox::Mode;
use vellum_share::Config;
use vellum_share::fuse::{CREATE, IN_HEADER, OPEN, OUT_HEADER, RELEASE, ROOT, opened};
use vellum_share::process::{Client, open_root};
use vellum_share::server::MAX_ANSWER;
use vellum_sys::host;

const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const SETATTR: u32 = 4;
const SYMLINK: u32 = 6;
const MKNOD: u32 = 8;
const MKDIR: u32 = 9;
const UNLINK: u32 = 10;
const RENAME: u32 = 12;
const LINK: u32 = 13;
const SETXATTR: u32 = 21;
const INIT: u32 = 26;
const OPENDIR: u32 = 27;
const READDIR: u32 = 28;

/// A guest that can send any request.
struct Guest {
    client: Client,
    answer: Vec<u8>,
}

impl Guest {
    fn new(path: &Path, config: Config) -> Result<Self, Failed> {
        let client = Client::start(&open_root(path)?, config, None, Mode::On)?;
        let mut guest = Self { client, answer: vec![0; MAX_ANSWER] };
        let words = [7u32, 39, 1 << 16, u32::MAX];
        guest
            .ask(INIT, 0, &words.map(u32::to_ne_bytes).concat())?
            .0
            .map_err(|error| format!("INIT: {error}"))?;
        Ok(guest)
    }

    /// The body of the answer or its error number, and a descriptor if one came with it.
    #[allow(clippy::type_complexity, reason = "what came, and what came along")]
    fn ask(
        &mut self,
        opcode: u32,
        node: u64,
        body: &[u8],
    ) -> Result<(Result<Vec<u8>, i32>, Option<OwnedFd>), Failed> {
        let mut request = vec![0; IN_HEADER];
        request[..4].copy_from_slice(&((IN_HEADER + body.len()) as u32).to_ne_bytes());
        request[4..8].copy_from_slice(&opcode.to_ne_bytes());
        request[8..16].copy_from_slice(&7u64.to_ne_bytes());
        request[16..24].copy_from_slice(&node.to_ne_bytes());
        request.extend_from_slice(body);
        let (len, descriptor) = self.client.ask(&request, &mut self.answer)?;
        let answer = &self.answer[..len];
        if len == 0 {
            return Ok((Ok(Vec::new()), None));
        }
        ensure(answer[8..16] == 7u64.to_ne_bytes(), || "it is another request's answer".into())?;
        let error = -i32::from_ne_bytes(answer[4..8].try_into()?);
        Ok((if error == 0 { Ok(answer[OUT_HEADER..].to_vec()) } else { Err(error) }, descriptor))
    }

    fn error(&mut self, opcode: u32, node: u64, body: &[u8]) -> Result<i32, Failed> {
        let (answer, descriptor) = self.ask(opcode, node, body)?;
        ensure(descriptor.is_none() || answer.is_ok(), || "a refusal came with a descriptor".into())?;
        Ok(answer.err().unwrap_or(0))
    }

    fn lookup(&mut self, parent: u64, name: &str) -> Result<u64, Failed> {
        let (answer, _) = self.ask(LOOKUP, parent, &text(name))?;
        let answer = answer.map_err(|error| format!("{name}: {error}"))?;
        Ok(u64::from_ne_bytes(answer[..8].try_into()?))
    }
}

fn text(name: &str) -> Vec<u8> {
    CString::new(name).expect("no zero byte").into_bytes_with_nul()
}

fn writable() -> Config {
    Config { writable: true, ..Config::default() }
}

/// No name leads out of the directory, and special files are not opened.
#[test]
fn nothing_beyond_the_directory_is_reached() -> Result<(), Failed> {
    let directory = Scratch::new()?;
    fs::create_dir(directory.path("inside"))?;
    fs::write(directory.path("inside/file"), "data")?;
    symlink("/etc/passwd", directory.path("absolute"))?;
    symlink("../..", directory.path("up"))?;
    symlink("/proc/self/root", directory.path("magic"))?;
    let fifo = CString::new(directory.path("fifo").as_os_str().as_bytes())?;
    // SAFETY: the path is a string that ends in a zero.
    ensure(unsafe { libc::mkfifo(fifo.as_ptr(), 0o600) } == 0, || "no FIFO".into())?;
    let mut guest = Guest::new(directory.dir(), writable())?;
    for name in ["..", ".", "", "inside/file", "/etc", "inside/../.."] {
        let error = guest.error(LOOKUP, ROOT, &text(name))?;
        ensure(error == libc::EINVAL, || format!("{name:?}: {error}"))?;
        let error = guest.error(MKDIR, ROOT, &[&[0; 8], &text(name)[..]].concat())?;
        ensure(error == libc::EINVAL, || format!("mkdir {name:?}: {error}"))?;
        let renamed = [&ROOT.to_ne_bytes()[..], &text("inside"), &text(name)].concat();
        let error = guest.error(RENAME, ROOT, &renamed)?;
        ensure(error == libc::EINVAL, || format!("rename to {name:?}: {error}"))?;
    }
    let flags = (libc::O_RDWR.cast_unsigned() as u64).to_ne_bytes();
    for (name, expected) in [
        ("absolute", libc::ELOOP),
        ("up", libc::ELOOP),
        ("magic", libc::ELOOP),
        ("fifo", libc::EACCES),
        ("inside", libc::EISDIR),
    ] {
        let node = guest.lookup(ROOT, name)?;
        let error = guest.error(OPEN, node, &flags)?;
        ensure(error == expected, || format!("open {name}: {error}"))?;
        // Nothing can be looked up in them, made in them, or created over them.
        if name != "inside" {
            let error = guest.error(LOOKUP, node, &text("file"))?;
            ensure(error == libc::ENOTDIR, || format!("in {name}: {error}"))?;
            let error = guest.error(MKDIR, node, &[&[0; 8], &text("made")[..]].concat())?;
            ensure(error == libc::ENOTDIR, || format!("made in {name}: {error}"))?;
            let create = [&[2u8, 0, 0, 0][..], &[0; 12], &text(name)].concat();
            let error = guest.error(CREATE, ROOT, &create)?;
            ensure(error == expected, || format!("created over {name}: {error}"))?;
        }
    }
    // Node numbers that were never given out, and requests that are cut short.
    for node in [0, 2000, u64::MAX] {
        for opcode in [LOOKUP, GETATTR, OPEN, OPENDIR, UNLINK] {
            let error = guest.error(opcode, node, &[b'a', 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])?;
            ensure(error == libc::ESTALE, || format!("{opcode} of {node}: {error}"))?;
        }
    }
    for opcode in 0..60 {
        guest.error(opcode, ROOT, &[])?;
        guest.error(opcode, ROOT, &[0xff; 3])?;
    }
    let mut names: Vec<_> = fs::read_dir(directory.dir())?
        .map(|entry| entry.map(|entry| entry.file_name()))
        .collect::<Result<_, _>>()?;
    names.sort();
    ensure(names == ["absolute", "fifo", "inside", "magic", "up"], || format!("{names:?}"))
}

/// Nothing in a read-only share changes, whatever a guest asks for.
#[test]
fn what_is_read_only_does_not_change() -> Result<(), Failed> {
    let directory = Scratch::new()?;
    fs::write(directory.path("file"), "data")?;
    let before = fs::metadata(directory.path("file"))?;
    let mut guest = Guest::new(directory.dir(), Config::default())?;
    let file = guest.lookup(ROOT, "file")?;
    let name = text("new");
    let requests: [(u32, u64, Vec<u8>); 9] = [
        (MKDIR, ROOT, [&[0; 8], &name[..]].concat()),
        (MKNOD, ROOT, [&(libc::S_IFREG | 0o600).to_ne_bytes()[..], &[0; 12], &name].concat()),
        (SYMLINK, ROOT, [&name[..], &text("target")].concat()),
        (UNLINK, ROOT, text("file")),
        (RENAME, ROOT, [&ROOT.to_ne_bytes()[..], &text("file"), &name].concat()),
        (LINK, ROOT, [&file.to_ne_bytes()[..], &name].concat()),
        (CREATE, ROOT, [&(libc::O_RDWR).to_ne_bytes()[..], &[0; 12], &name].concat()),
        (SETATTR, file, [&[8u8][..], &[0; 87]].concat()),
        (SETXATTR, file, [&[1u8, 0, 0, 0, 0, 0, 0, 0][..], &text("user.a"), b"x"].concat()),
    ];
    for (opcode, node, body) in requests {
        let error = guest.error(opcode, node, &body)?;
        ensure(error == libc::EROFS, || format!("{opcode}: {error}"))?;
    }
    for flags in [libc::O_RDWR, libc::O_WRONLY, libc::O_RDONLY | libc::O_TRUNC] {
        let error = guest.error(OPEN, file, &(flags.cast_unsigned() as u64).to_ne_bytes())?;
        ensure(error == libc::EROFS, || format!("{flags:#x}: {error}"))?;
    }
    // The descriptor that comes with the answer is read-only too.
    let (answer, descriptor) = guest.ask(OPEN, file, &[0; 8])?;
    ensure(answer.is_ok(), || "it is not opened".into())?;
    let file = fs::File::from(descriptor.ok_or("it came without a descriptor")?);
    ensure(std::os::unix::fs::FileExt::write_at(&file, b"x", 0).is_err(), || "it is writable".into())?;
    let after = fs::metadata(directory.path("file"))?;
    ensure((before.ctime_nsec(), before.len()) == (after.ctime_nsec(), after.len()), || {
        "it has changed".into()
    })
}

/// Changes that could give a guest's file rights on the host are refused, unless the configuration
/// allows them.
#[test]
fn privileged_changes_are_refused_unless_asked_for() -> Result<(), Failed> {
    for allowed in [false, true] {
        let directory = Scratch::new()?;
        fs::write(directory.path("file"), "")?;
        let config = Config { setid: allowed, devices: allowed, privileged_xattrs: allowed, ..writable() };
        let mut guest = Guest::new(directory.dir(), config)?;
        let file = guest.lookup(ROOT, "file")?;
        let mut change = vec![0; 88];
        change[0] = 1;
        change[68..72].copy_from_slice(&(libc::S_IFREG | 0o4755).to_ne_bytes());
        let error = guest.error(SETATTR, file, &change)?;
        let mode = fs::metadata(directory.path("file"))?.permissions().mode() & 0o7777;
        ensure((error == 0, mode == 0o4755) == (allowed, allowed), || format!("setid: {error}, {mode:o}"))?;
        let device =
            [&(libc::S_IFCHR | 0o600).to_ne_bytes()[..], &0x103u32.to_ne_bytes(), &[0; 8], &text("null")]
                .concat();
        // The next test checks that they work when they are allowed. Not every host allows a test
        // to make them.
        if !allowed {
            let error = guest.error(MKNOD, ROOT, &device)?;
            ensure(error == libc::EPERM, || format!("device: {error}"))?;
            let error = guest.error(SETXATTR, file, &trusted())?;
            ensure(error == libc::EPERM, || format!("attribute: {error}"))?;
        }
    }
    Ok(())
}

/// The body of a SETXATTR request for the attribute `trusted.a` with the value `x`.
fn trusted() -> Vec<u8> {
    [&[1u8, 0, 0, 0, 0, 0, 0, 0][..], &text("trusted.a"), b"x"].concat()
}

/// Needs a process that may make device nodes and privileged attributes in the directories of
/// tests.
fn privileged() -> Need {
    let directory = Scratch::new().map_err(|error| error.to_string())?;
    let (node, file) = (directory.path("node"), directory.path("file"));
    let made = rustix::fs::mknodat(
        rustix::fs::CWD,
        &node,
        rustix::fs::FileType::CharacterDevice,
        rustix::fs::Mode::RUSR,
        rustix::fs::makedev(1, 3),
    );
    made.map_err(|error| {
        format!("needs to make device nodes ({error}): run the tests as root, in no user namespace")
    })?;
    fs::write(&file, "").map_err(|error| error.to_string())?;
    rustix::fs::setxattr(&file, "trusted.a", b"x", rustix::fs::XattrFlags::empty()).map_err(|error| {
        format!("needs attributes in trusted. ({error}): run the tests as root, TMPDIR on ext4, xfs or tmpfs")
    })
}

#[test(privileged())]
fn device_nodes_and_trusted_attributes_are_made_where_they_are_asked_for() -> Result<(), Failed> {
    let directory = Scratch::new()?;
    fs::write(directory.path("file"), "")?;
    let config = Config { devices: true, privileged_xattrs: true, ..writable() };
    let mut guest = Guest::new(directory.dir(), config)?;
    let file = guest.lookup(ROOT, "file")?;
    let device =
        [&(libc::S_IFCHR | 0o600).to_ne_bytes()[..], &0x103u32.to_ne_bytes(), &[0; 8], &text("null")]
            .concat();
    let error = guest.error(MKNOD, ROOT, &device)?;
    ensure(error == 0, || format!("device: {error}"))?;
    let made = fs::symlink_metadata(directory.path("null"))?.rdev();
    ensure(made == rustix::fs::makedev(1, 3), || format!("device {made:#x}"))?;
    let error = guest.error(SETXATTR, file, &trusted())?;
    ensure(error == 0, || format!("attribute: {error}"))?;
    let mut value = [0; 2];
    let len = rustix::fs::getxattr(directory.path("file"), "trusted.a", &mut value[..])?;
    ensure(value[..len] == *b"x", || format!("attribute: {:?}", &value[..len]))
}

pub fn root() -> Need {
    if host::is_root() { Ok(()) } else { Err("needs root: run the tests with sudo".into()) }
}

/// The host's proc, sysfs and devices are not shared. The guest sees empty directories there.
#[test(root())]
fn pseudo_file_systems_are_hidden() -> Result<(), Failed> {
    let mut guest = Guest::new(Path::new("/"), Config::default())?;
    for name in ["proc", "sys", "dev"] {
        let node = guest.lookup(ROOT, name)?;
        for inside in ["self", "kernel", "null", "mem", "1"] {
            let error = guest.error(LOOKUP, node, &text(inside))?;
            ensure(error == libc::ENOENT, || format!("{name}/{inside}: {error}"))?;
        }
        let (answer, _) = guest.ask(OPENDIR, node, &[0; 8])?;
        let fh = answer.map_err(|error| format!("{name}: {error}"))?[..8].to_vec();
        let list = [&fh[..], &[0; 8], &4096u32.to_ne_bytes(), &[0; 20]].concat();
        let (answer, _) = guest.ask(READDIR, node, &list)?;
        ensure(answer == Ok(Vec::new()), || format!("{name} has something: {answer:?}"))?;
    }
    // Other directories beside them are shared.
    let etc = guest.lookup(ROOT, "etc")?;
    guest.lookup(etc, "passwd").map(drop)
}

/// With `joined`, as the lower layer of an overlay needs it, the guest sees no automounts, and
/// inode numbers of different file systems still differ.
#[test(root())]
fn joined_file_systems_are_one_to_the_guest() -> Result<(), Failed> {
    let directory = Scratch::new()?;
    let place = directory.path("mounted");
    fs::create_dir(&place)?;
    let path = CString::new(place.as_os_str().as_bytes())?;
    // SAFETY: the strings end in a zero.
    let mounted =
        unsafe { libc::mount(c"tmpfs".as_ptr(), path.as_ptr(), c"tmpfs".as_ptr(), 0, std::ptr::null()) };
    ensure(mounted == 0, || format!("mount: {}", std::io::Error::last_os_error()))?;
    let seen = || -> Result<(), Failed> {
        fs::write(place.join("inside"), "x")?;
        let own = fs::metadata(&place)?.ino();
        for joined in [true, false] {
            let mut guest = Guest::new(directory.dir(), Config { joined, ..Config::default() })?;
            // The fields of fuse_entry_out: the node, and from its attributes the inode number and
            // the flags.
            let mut look = |node: u64, name: &str| -> Result<(u64, u64, u32), Failed> {
                let (answer, _) = guest.ask(LOOKUP, node, &text(name))?;
                let answer = answer.map_err(|error| format!("{name}: {error}"))?;
                let word = |at: usize| answer[at..at + 8].try_into().map(u64::from_ne_bytes);
                Ok((word(0)?, word(40)?, u32::from_ne_bytes(answer[124..128].try_into()?)))
            };
            let (node, ino, flags) = look(ROOT, "mounted")?;
            let right = if joined { (1 << 48 ^ own, 0) } else { (own, 1) };
            ensure((ino, flags) == right, || format!("joined {joined}: {ino:x} {flags}, {own:x} here"))?;
            let (_, ino, flags) = look(node, "inside")?;
            let own = fs::metadata(place.join("inside"))?.ino();
            let right = if joined { (1 << 48 ^ own, 0) } else { (own, 0) };
            ensure((ino, flags) == right, || format!("joined {joined}: {ino:x} {flags}, {own:x} here"))?;
        }
        Ok(())
    };
    let outcome = seen();
    // SAFETY: the string ends in a zero.
    unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
    outcome
}

/// A file system that is not shared takes the place of one that was, with its mount's and its
/// device's number. The guest knows the old one's root and asks for a file of the new one.
#[test(root())]
fn what_is_mounted_later_in_the_same_place_is_hidden() -> Result<(), Failed> {
    let directory = Scratch::new()?;
    let place = directory.path("mounted");
    fs::create_dir(&place)?;
    let path = CString::new(place.as_os_str().as_bytes())?;
    let mount = |kind: &CStr| -> Result<(u64, u64), Failed> {
        // SAFETY: the strings end in a zero.
        let mounted =
            unsafe { libc::mount(kind.as_ptr(), path.as_ptr(), kind.as_ptr(), 0, std::ptr::null()) };
        ensure(mounted == 0, || format!("mount: {}", std::io::Error::last_os_error()))?;
        let root = fs::metadata(&place)?;
        Ok((root.dev(), root.ino()))
    };
    // SAFETY: the string ends in a zero.
    let unmount = || unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
    let seen = || -> Result<bool, Failed> {
        let before = mount(c"tmpfs")?;
        let mut guest = Guest::new(directory.dir(), Config::default())?;
        let node = guest.lookup(ROOT, "mounted")?;
        unmount();
        let same = mount(c"proc")? == before;
        let error = guest.error(LOOKUP, node, &text("self"))?;
        ensure(error == libc::ESTALE, || format!("same numbers: {same}: {error}"))?;
        let node = guest.lookup(ROOT, "mounted")?;
        let error = guest.error(LOOKUP, node, &text("self"))?;
        ensure(error == libc::ENOENT, || format!("same numbers: {same}: {error}"))?;
        unmount();
        Ok(same)
    };
    // Other mounts that come and go meanwhile may take the numbers.
    let outcome = eventually(LIMIT, "the device's number is given again", || Ok(seen()?.then_some(())));
    unmount();
    outcome
}

/// Sets how many files this process may have open. Returns the previous limit.
fn limit(most: u64) -> Result<u64, Failed> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel fills in `limit`, and then reads it.
    unsafe {
        ensure(libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) == 0, || "getrlimit".into())?;
        let before = std::mem::replace(&mut limit.rlim_cur, most);
        ensure(libc::setrlimit(libc::RLIMIT_NOFILE, &limit) == 0, || "setrlimit".into())?;
        Ok(before)
    }
}

/// A guest knows 100,000 files and opens each, while the process may have 512 descriptors. No
/// descriptor leaks.
#[test]
fn more_files_are_known_than_there_are_descriptors() -> Result<(), Failed> {
    const DIRECTORIES: usize = 100;
    const FILES: usize = 1000;
    let directory = Scratch::new()?;
    for at in 0..DIRECTORIES {
        let inside = directory.path(&at.to_string());
        fs::create_dir(&inside)?;
        for file in 0..FILES {
            fs::File::create(inside.join(file.to_string()))?;
        }
    }
    let before = limit(512)?;
    let guest = Guest::new(directory.dir(), Config::default());
    limit(before)?;
    let mut guest = guest?;
    let mut nodes = Vec::new();
    for at in 0..DIRECTORIES {
        let inside = guest.lookup(ROOT, &at.to_string())?;
        for file in 0..FILES {
            nodes.push((guest.lookup(inside, &file.to_string())?, at, file));
        }
    }
    for &(node, at, file) in nodes.iter().rev() {
        let (answer, descriptor) = guest.ask(OPEN, node, &[0; 8])?;
        let answer = answer.map_err(|error| format!("{at}/{file}: {error}"))?;
        // One file in a thousand is compared with the host's file of that name.
        if file == 7 {
            let there = fs::File::from(descriptor.ok_or("no descriptor")?).metadata()?.ino();
            let here = fs::metadata(directory.path(&format!("{at}/{file}")))?.ino();
            ensure(there == here, || format!("{at}/{file} is another file"))?;
        }
        let error = guest.error(RELEASE, node, &[&answer[..8], &[0; 16]].concat())?;
        ensure(error == 0, || format!("release: {error}"))?;
    }
    // After FORGET the nodes are gone, and their numbers are stale.
    for &(node, ..) in &nodes {
        guest.error(FORGET, node, &1u64.to_ne_bytes())?;
    }
    let error = guest.error(GETATTR, nodes[0].0, &[0; 16])?;
    ensure(error == libc::ESTALE, || format!("it is known yet: {error}"))
}

/// The number of an open file is at its place in the answer.
#[test]
fn an_opened_file_is_named_by_its_answer() -> Result<(), Failed> {
    let directory = Scratch::new()?;
    let mut guest = Guest::new(directory.dir(), writable())?;
    let create =
        [&(libc::O_RDWR).to_ne_bytes()[..], &(libc::S_IFREG | 0o644).to_ne_bytes(), &[0; 8], &text("new")]
            .concat();
    let (answer, descriptor) = guest.ask(CREATE, ROOT, &create)?;
    let answer = answer.map_err(|error| format!("create: {error}"))?;
    let whole = [&[0; OUT_HEADER][..], &answer].concat();
    let fh = opened(CREATE, &whole).ok_or("no number")?;
    ensure(descriptor.is_some() && fh > 0, || format!("{fh}"))?;
    ensure(directory.path("new").exists(), || "it is not there".into())
}
