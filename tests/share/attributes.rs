//! Extended attributes through the server: programs ask for the sizes first, and copies keep the
//! attributes.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use rustix::fs::{
    CWD, FileType, Mode, XattrFlags, getxattr, getxattr_query, listxattr, listxattr_query, mknodat, setxattr,
};
use rustix::io::Errno;
use support::share::mount::fuse;
use support::{Failed, Need, Scratch, ensure, test};

use crate::mounted::{Both, CACHES, writable};

const VALUES: [(&str, &[u8]); 4] =
    [("user.note", b"hello"), ("user.empty", b""), ("user.zeroes", &[0; 3]), ("user.long", &[7; 3000])];

/// Needs a FUSE mount, and below it a file system with extended attributes.
fn attributes() -> Need {
    fuse()?;
    let here = Scratch::new().map_err(|error| error.to_string())?;
    fs::write(here.path("file"), "").map_err(|error| error.to_string())?;
    setxattr(here.path("file"), "user.long", &[7; 3000], XattrFlags::empty()).map_err(|error| {
        format!("needs attributes of 3000 bytes ({error}): run the tests with TMPDIR on ext4, xfs or btrfs")
    })
}

/// Reads all attributes of a file as programs do: first the size, then as many bytes.
fn all(path: &Path) -> Result<BTreeMap<String, Vec<u8>>, Failed> {
    let mut names = vec![0; listxattr_query(path)?];
    if !names.is_empty() {
        let len = listxattr(path, &mut names[..])?;
        ensure(len == names.len(), || format!("a list of {len} bytes, and {} were told", names.len()))?;
    }
    let names = names.split(|byte| *byte == 0).filter(|name| !name.is_empty());
    let mut found = BTreeMap::new();
    for name in names.map(|name| String::from_utf8_lossy(name).into_owned()) {
        let mut value = vec![0; getxattr_query(path, name.as_str())?];
        if !value.is_empty() {
            let len = getxattr(path, name.as_str(), &mut value[..])?;
            ensure(len == value.len(), || format!("{name}: {len} bytes, and {} were told", value.len()))?;
        }
        if name.starts_with("user.") {
            found.insert(name, value);
        }
    }
    Ok(found)
}

fn expected() -> BTreeMap<String, Vec<u8>> {
    VALUES.map(|(name, value)| (name.to_owned(), value.to_vec())).into()
}

fn set(path: &Path) -> Result<(), Failed> {
    for (name, value) in VALUES {
        setxattr(path, name, value, XattrFlags::empty())?;
    }
    Ok(())
}

#[test(attributes())]
fn a_size_that_is_asked_for_is_the_size() -> Result<(), Failed> {
    for cache in CACHES {
        let both = Both::new(writable(cache))?;
        for (name, by_guest) in [("here", false), ("there", true)] {
            fs::write(both.here.path(name), "")?;
            set(&if by_guest { both.path(name) } else { both.here.path(name) })?;
            ensure(all(&both.path(name))? == expected(), || format!("{cache:?}: {name}"))?;
        }
        fs::create_dir(both.here.path("directory"))?;
        set(&both.here.path("directory"))?;
        ensure(all(&both.path("directory"))? == expected(), || format!("{cache:?}: directory"))?;
        // A missing attribute, and buffers that are too small.
        let file = both.path("here");
        ensure(getxattr_query(&file, "user.none") == Err(Errno::NODATA), || "user.none".into())?;
        ensure(getxattr(&file, "user.note", &mut [0; 4][..]) == Err(Errno::RANGE), || "4 of 5 bytes".into())?;
        ensure(listxattr(&file, &mut [0; 4][..]) == Err(Errno::RANGE), || "4 bytes of names".into())?;
        fs::write(both.here.path("plain"), "")?;
        ensure(all(&both.path("plain"))?.is_empty(), || "plain".into())?;
    }
    Ok(())
}

/// A FIFO only has attributes of the privileged kinds. A request for them does not open it.
#[test(attributes())]
fn a_fifo_is_asked_for_its_attributes_without_being_opened() -> Result<(), Failed> {
    let both = Both::new(writable(CACHES[0]))?;
    mknodat(CWD, both.here.path("fifo"), FileType::Fifo, Mode::RUSR, 0)?;
    ensure(all(&both.path("fifo"))?.is_empty(), || "it has some".into())
}

/// `cp -a` and `tar --xattrs` ask for the sizes first.
#[test(attributes())]
fn copies_keep_attributes() -> Result<(), Failed> {
    for cache in CACHES {
        let both = Both::new(writable(cache))?;
        let out = Scratch::new()?;
        fs::create_dir(both.here.path("from"))?;
        fs::write(both.here.path("from/file"), "data")?;
        set(&both.here.path("from/file"))?;
        set(&both.here.path("from"))?;
        let copy = |from: &Path, to: &Path| -> Result<(), Failed> {
            let status = Command::new("cp").arg("-a").args([from, to]).status()?;
            ensure(status.success(), || format!("cp: {status}"))?;
            for name in ["", "file"] {
                ensure(all(&to.join(name))? == expected(), || format!("{cache:?}: {:?}", to.join(name)))?;
            }
            Ok(())
        };
        // A copy out of the share, and a copy within it.
        copy(&both.path("from"), &out.path("copy"))?;
        copy(&both.path("from"), &both.path("copy"))?;
        let pack = Command::new("tar")
            .args(["--xattrs", "--xattrs-include=user.*", "-cf"])
            .arg(out.path("tar"))
            .arg("-C")
            .arg(&both.mount.path)
            .arg("from")
            .status()?;
        let unpack = Command::new("tar")
            .args(["--xattrs", "--xattrs-include=user.*", "-xf"])
            .arg(out.path("tar"))
            .arg("-C")
            .arg(out.dir())
            .status()?;
        ensure(pack.success() && unpack.success(), || format!("tar: {pack}, {unpack}"))?;
        ensure(all(&out.path("from/file"))? == expected(), || format!("{cache:?}: tar"))?;
    }
    Ok(())
}
