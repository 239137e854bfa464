//! The files and directories that a guest knows, and their descriptors.
//!
//! A node is identified by device, inode number and type. Its descriptor is opened with O_PATH,
//! which identifies a file but gives no access to its content. A guest may know more files than a
//! process may have descriptors. The least recently used descriptors are therefore closed and
//! reopened through the directory in which the node was last found. If another file is there by
//! then, the node is stale (ESTALE) and the guest looks it up again. A file that the guest has
//! unlinked keeps its descriptor.
//!
//! The kernel gives a device's number again as soon as its file system is unmounted. So a file that
//! is reopened across a mount point is stale, too, if what is mounted there is not shared.

use std::collections::{HashMap, VecDeque};
use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, Statx, StatxFlags, openat2, statx};

use super::fuse::ROOT;
use super::mounts::Mounts;

/// The identity of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Id {
    /// Its device.
    pub device: (u32, u32),
    /// Its inode number.
    pub ino: u64,
    /// Its S_IFMT type. The file system may reuse an inode number for a file of another type.
    pub file_type: u32,
}

impl From<&Statx> for Id {
    fn from(stat: &Statx) -> Self {
        let file_type = u32::from(stat.stx_mode) & libc::S_IFMT;
        Self { device: (stat.stx_dev_major, stat.stx_dev_minor), ino: stat.stx_ino, file_type }
    }
}

/// The kind of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A file that is shared.
    File,
    /// The root of a file system that is not shared (proc, sysfs, …): an empty directory.
    Hidden,
}

struct Node {
    id: Id,
    kind: Kind,
    /// How often the guest looked it up and did not forget it.
    lookups: u64,
    /// The number of nodes whose `place` is in this one.
    children: u64,
    /// The directory and name under which it was last found.
    place: Option<(u64, CString)>,
    descriptor: Option<Rc<OwnedFd>>,
    /// It cannot be reopened, so its descriptor stays open.
    pinned: bool,
    /// It was used since `make_room` last passed over it.
    used: bool,
}

/// All nodes of a share.
pub(crate) struct Nodes {
    /// What is mounted, and shared.
    pub mounts: Mounts,
    nodes: HashMap<u64, Node>,
    numbers: HashMap<Id, u64>,
    next: u64,
    /// Nodes with an open descriptor, in the order of opening.
    open: VecDeque<u64>,
    /// The most descriptors that may be open.
    most: usize,
    /// The most nodes. The guest decides when it forgets one.
    most_nodes: usize,
}

/// The maximum number of nodes of a share. They take about 1 GiB. A guest that forgets none has as
/// many files in its own caches.
const MAX_NODES: usize = 4 << 20;

/// The fields requested from statx(2).
const ASKED: StatxFlags = StatxFlags::BASIC_STATS.union(StatxFlags::MNT_ID);

/// The status of `descriptor`.
///
/// # Errors
/// The error of statx(2).
pub fn look(descriptor: &OwnedFd) -> io::Result<Statx> {
    Ok(statx(descriptor, c"", AtFlags::EMPTY_PATH | AtFlags::SYMLINK_NOFOLLOW, ASKED)?)
}

/// The status of `name` in `directory`. Triggers no automount.
///
/// # Errors
/// The error of statx(2).
pub(crate) fn look_at(directory: &OwnedFd, name: &CStr) -> io::Result<Statx> {
    let how = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    Ok(statx(directory, name, how, ASKED)?)
}

fn gone(errno: i32) -> io::Error {
    io::Error::from_raw_os_error(errno)
}

impl Nodes {
    /// Creates the nodes of the directory `root`, with at most `most` open descriptors.
    ///
    /// # Errors
    /// The error of statx(2) for `root`, or /proc is missing.
    pub fn new(root: OwnedFd, most: usize) -> io::Result<Self> {
        let id = Id::from(&look(&root)?);
        let node = Node {
            id,
            kind: Kind::File,
            lookups: 1,
            children: 0,
            place: None,
            descriptor: Some(Rc::new(root)),
            pinned: true,
            used: true,
        };
        Ok(Self {
            mounts: Mounts::open()?,
            nodes: HashMap::from([(ROOT, node)]),
            numbers: HashMap::from([(id, ROOT)]),
            next: ROOT + 1,
            open: VecDeque::new(),
            most: most.max(8),
            most_nodes: MAX_NODES,
        })
    }

    fn node(&self, number: u64) -> io::Result<&Node> {
        self.nodes.get(&number).ok_or_else(|| gone(libc::ESTALE))
    }

    /// The kind of node `number`.
    ///
    /// # Errors
    /// ESTALE if there is no such node.
    pub fn kind(&self, number: u64) -> io::Result<Kind> {
        Ok(self.node(number)?.kind)
    }

    /// The identity of node `number`.
    ///
    /// # Errors
    /// ESTALE if there is no such node.
    pub fn id(&self, number: u64) -> io::Result<Id> {
        Ok(self.node(number)?.id)
    }

    /// The number of the node `id`, if the guest knows it.
    pub fn known(&self, id: Id) -> Option<u64> {
        self.numbers.get(&id).copied()
    }

    /// Counts a lookup of the file `id`, found as `name` in `parent`. Returns its node number.
    ///
    /// # Errors
    /// ENOMEM if the guest knows too many.
    pub fn found(&mut self, id: Id, kind: Kind, parent: u64, name: &CStr) -> io::Result<u64> {
        let number = match self.numbers.get(&id) {
            Some(&number) => number,
            None if self.nodes.len() >= self.most_nodes => return Err(gone(libc::ENOMEM)),
            None => {
                let number = self.next;
                self.next += 1;
                let (lookups, children) = (0, 0);
                let (place, descriptor, pinned, used) = (None, None, false, false);
                let node = Node { id, kind, lookups, children, place, descriptor, pinned, used };
                self.nodes.insert(number, node);
                self.numbers.insert(id, number);
                number
            }
        };
        self.put(number, parent, name);
        if let Some(node) = self.nodes.get_mut(&number) {
            // Another file system may have the device's number since the last lookup.
            node.kind = kind;
            node.lookups += 1;
        }
        Ok(number)
    }

    /// Records that node `number` is now `name` in `parent`.
    pub fn put(&mut self, number: u64, parent: u64, name: &CStr) {
        // The root does not move, and nothing is inside itself.
        if number == ROOT || number == parent {
            return;
        }
        let Some(node) = self.nodes.get_mut(&number) else { return };
        if node.place.as_ref().is_some_and(|(old, called)| *old == parent && called.as_c_str() == name) {
            return;
        }
        let before = node.place.replace((parent, name.to_owned()));
        if let Some(node) = self.nodes.get_mut(&parent) {
            node.children += 1;
        }
        if let Some((parent, _)) = before {
            self.leave(parent);
        }
    }

    /// Removes one child from `parent`.
    fn leave(&mut self, parent: u64) {
        if let Some(node) = self.nodes.get_mut(&parent) {
            node.children -= 1;
            self.drop_unknown(parent);
        }
    }

    /// The guest forgets `lookups` lookups of node `number`.
    pub fn forget(&mut self, number: u64, lookups: u64) {
        if number != ROOT
            && let Some(node) = self.nodes.get_mut(&number)
        {
            // A guest that forgets too much harms only itself.
            node.lookups = node.lookups.saturating_sub(lookups);
            self.drop_unknown(number);
        }
    }

    /// Forgets all nodes but the root.
    pub(crate) fn forget_all(&mut self) {
        self.nodes.retain(|number, _| *number == ROOT);
        self.numbers.retain(|_, number| *number == ROOT);
        self.open.clear();
        if let Some(root) = self.nodes.get_mut(&ROOT) {
            root.children = 0;
        }
    }

    /// Drops node `number` if the guest does not know it and it has no children, then its parents
    /// likewise.
    fn drop_unknown(&mut self, mut number: u64) {
        while number != ROOT
            && let Some(node) = self.nodes.get(&number)
            && node.lookups == 0
            && node.children == 0
        {
            let Some(node) = self.nodes.remove(&number) else { return };
            self.numbers.remove(&node.id);
            // Its number stays in `open` until `make_room` finds it.
            let Some((parent, _)) = node.place else { return };
            let Some(above) = self.nodes.get_mut(&parent) else { return };
            above.children -= 1;
            number = parent;
        }
    }

    /// The descriptor of node `number`.
    ///
    /// # Errors
    /// ESTALE if there is no such node, or if another file has taken its place.
    pub fn get(&mut self, number: u64) -> io::Result<Rc<OwnedFd>> {
        let mut below = Vec::new();
        let mut at = number;
        // Walks up to a directory that is open, then down again.
        let mut descriptor = loop {
            let node = self.nodes.get_mut(&at).ok_or_else(|| gone(libc::ESTALE))?;
            node.used = true;
            if let Some(descriptor) = &node.descriptor {
                break descriptor.clone();
            }
            below.push(at);
            // Renames can create a cycle of places that were each correct at some time.
            let (parent, _) =
                node.place.as_ref().filter(|_| below.len() < 4096).ok_or_else(|| gone(libc::ESTALE))?;
            at = *parent;
        };
        while let Some(at) = below.pop() {
            descriptor = self.reopen(at, &descriptor)?;
        }
        Ok(descriptor)
    }

    fn reopen(&mut self, number: u64, parent: &OwnedFd) -> io::Result<Rc<OwnedFd>> {
        self.make_room()?;
        let node = self.nodes.get_mut(&number).ok_or_else(|| gone(libc::ESTALE))?;
        let (above, name) = node.place.as_ref().ok_or_else(|| gone(libc::ESTALE))?;
        let above = *above;
        let opened = open_beneath(parent, name).map_err(|error| match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENOTDIR | libc::ELOOP | libc::EXDEV) => gone(libc::ESTALE),
            _ => error,
        })?;
        let stat = look(&opened)?;
        let (id, kind) = (node.id, node.kind);
        let crosses = self.nodes.get(&above).is_none_or(|above| above.id.device != id.device);
        if Id::from(&stat) != id || crosses && kind == Kind::File && !self.mounts.is_shared(stat.stx_mnt_id) {
            return Err(gone(libc::ESTALE));
        }
        let node = self.nodes.get_mut(&number).ok_or_else(|| gone(libc::ESTALE))?;
        let descriptor = Rc::new(opened);
        node.descriptor = Some(descriptor.clone());
        self.open.push_back(number);
        Ok(descriptor)
    }

    /// Closes the least recently used descriptor if the limit is reached.
    fn make_room(&mut self) -> io::Result<()> {
        // Each node may be passed over once because it was used.
        for _ in 0..2 * self.open.len() {
            if self.open.len() < self.most {
                return Ok(());
            }
            let Some(number) = self.open.pop_front() else { break };
            match self.nodes.get_mut(&number) {
                Some(node) if node.pinned || node.used => {
                    node.used = false;
                    self.open.push_back(number);
                }
                Some(node) => node.descriptor = None,
                None => {}
            }
        }
        if self.open.len() < self.most { Ok(()) } else { Err(gone(libc::ENFILE)) }
    }

    /// Keeps the descriptor of node `number`, which is about to lose its name.
    ///
    /// # Errors
    /// As [`Nodes::get`].
    pub fn pin(&mut self, number: u64) -> io::Result<()> {
        self.get(number)?;
        if let Some(node) = self.nodes.get_mut(&number) {
            node.pinned = true;
        }
        Ok(())
    }
}

/// Opens `name` in `directory` with O_PATH. A symbolic link is not followed.
pub(crate) fn open_beneath(directory: &OwnedFd, name: &CStr) -> io::Result<OwnedFd> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat2(directory, name, flags, Mode::empty(), resolve)?)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn root(path: &std::path::Path) -> OwnedFd {
        fs::File::open(path).unwrap().into()
    }

    fn directory(name: &str) -> std::path::PathBuf {
        let path = std::env::temp_dir().join(format!("vellum-nodes-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).unwrap();
        path
    }

    /// Looks up a name.
    fn find(nodes: &mut Nodes, parent: u64, name: &CStr) -> io::Result<u64> {
        let directory = nodes.get(parent)?;
        let id = Id::from(&look_at(&directory, name)?);
        nodes.found(id, Kind::File, parent, name)
    }

    #[test]
    fn more_files_than_descriptors_are_reached() {
        let path = directory("many");
        fs::create_dir_all(path.join("a/b")).unwrap();
        let names: Vec<CString> = (0..100).map(|n| CString::new(format!("f{n}")).unwrap()).collect();
        for name in &names {
            fs::write(path.join("a/b").join(name.to_str().unwrap()), name.to_bytes()).unwrap();
        }
        let mut nodes = Nodes::new(root(&path), 8).unwrap();
        let a = find(&mut nodes, ROOT, c"a").unwrap();
        let b = find(&mut nodes, a, c"b").unwrap();
        let files: Vec<u64> = names.iter().map(|name| find(&mut nodes, b, name).unwrap()).collect();
        for _ in 0..2 {
            for &file in &files {
                let id = Id::from(&look(&nodes.get(file).unwrap()).unwrap());
                assert_eq!(id, nodes.id(file).unwrap());
                assert!(nodes.open.len() <= 8);
            }
        }
        // Forgotten directories remain while a known file is in them.
        nodes.forget(b, 1);
        nodes.forget(a, 1);
        assert!(nodes.get(files[0]).is_ok());
        files.iter().for_each(|&file| nodes.forget(file, 1));
        assert_eq!(nodes.nodes.len(), 1);
        fs::remove_dir_all(&path).unwrap();
    }

    #[test]
    fn a_number_that_another_type_of_file_had_is_another_node() {
        let path = directory("type");
        let mut nodes = Nodes::new(root(&path), 8).unwrap();
        let file = Id { device: (1, 2), ino: 3, file_type: libc::S_IFREG };
        let mut found = |id, kind, name| nodes.found(id, kind, ROOT, name).unwrap();
        let first = found(file, Kind::File, c"a");
        assert_eq!(found(file, Kind::File, c"b"), first);
        let other = Id { file_type: libc::S_IFDIR, ..file };
        let second = found(other, Kind::File, c"a");
        assert_ne!(second, first);
        // The number of a device that is shared no more.
        assert_eq!(found(other, Kind::Hidden, c"a"), second);
        assert_eq!(nodes.kind(second).unwrap(), Kind::Hidden);
        fs::remove_dir_all(&path).unwrap();
    }

    #[test]
    fn a_guest_that_forgets_nothing_is_refused_more() {
        let path = directory("most");
        let mut nodes = Nodes { most_nodes: 3, ..Nodes::new(root(&path), 8).unwrap() };
        let id = |ino| Id { device: (1, 2), ino, file_type: libc::S_IFREG };
        let mut found = |ino| nodes.found(id(ino), Kind::File, ROOT, c"a");
        let [first, second] = [1, 2].map(|ino| found(ino).unwrap());
        assert_eq!(found(3).unwrap_err().raw_os_error(), Some(libc::ENOMEM));
        // One that it knows is no other.
        assert_eq!(found(2).unwrap(), second);
        nodes.forget(first, 1);
        assert!(nodes.found(id(3), Kind::File, ROOT, c"a").is_ok());
        fs::remove_dir_all(&path).unwrap();
    }

    #[test]
    fn another_file_by_the_same_name_is_stale_and_one_without_a_name_is_kept() {
        let path = directory("stale");
        for name in ["kept", "replaced"] {
            fs::write(path.join(name), "old").unwrap();
        }
        let mut nodes = Nodes::new(root(&path), 8).unwrap();
        let kept = find(&mut nodes, ROOT, c"kept").unwrap();
        let replaced = find(&mut nodes, ROOT, c"replaced").unwrap();
        nodes.pin(kept).unwrap();
        fs::write(path.join("new"), "new").unwrap();
        fs::rename(path.join("new"), path.join("replaced")).unwrap();
        fs::remove_file(path.join("kept")).unwrap();
        assert!(nodes.get(kept).is_ok());
        assert_eq!(nodes.get(replaced).unwrap_err().raw_os_error(), Some(libc::ESTALE));
        // A lookup finds it as another node.
        assert_ne!(find(&mut nodes, ROOT, c"replaced").unwrap(), replaced);
        fs::remove_dir_all(&path).unwrap();
    }
}
