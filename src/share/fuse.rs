//! The FUSE protocol (include/uapi/linux/fuse.h, major version 7): parses requests and writes
//! answers. No I/O.
//!
//! A request is a header and arguments, whose layout depends on the opcode. An answer is a header
//! with an error number and, if that is 0, the data. Numbers have the machine's byte order, which
//! host and guest share. The guest is hostile: this file checks every length and name.

use std::ffi::CStr;

/// The size of a request's header.
pub const IN_HEADER: usize = 40;
/// The size of an answer's header.
pub const OUT_HEADER: usize = 16;
/// The size of the arguments of a read or a write.
pub const TRANSFER: usize = 40;
/// The longest name, as in Linux.
pub(crate) const NAME_MAX: usize = 255;
/// The node of the shared directory.
pub const ROOT: u64 = 1;

const MAJOR: u32 = 7;
/// The newest minor version known here: Linux 6.6.
const MINOR: u32 = 39;
/// The oldest minor version: Linux 5.4, the first with virtio-fs.
const OLDEST: u32 = 31;

/// Features that both sides may negotiate (FUSE_INIT).
pub mod init {
    /// Reads of one file may run in parallel.
    pub(crate) const ASYNC_READ: u32 = 1 << 0;
    /// Open handles O_TRUNC.
    pub(crate) const ATOMIC_O_TRUNC: u32 = 1 << 3;
    /// Writes may be larger than a page.
    pub(crate) const BIG_WRITES: u32 = 1 << 5;
    /// Cached data is invalid when the file's size or time changes.
    pub(crate) const AUTO_INVAL_DATA: u32 = 1 << 12;
    /// Directory entries come with attributes.
    pub(crate) const DO_READDIRPLUS: u32 = 1 << 13;
    /// Attributes come only if the guest wants them.
    pub(crate) const READDIRPLUS_AUTO: u32 = 1 << 14;
    /// The guest's page cache writes back later.
    pub(crate) const WRITEBACK_CACHE: u32 = 1 << 16;
    /// Lookups in one directory may run in parallel.
    pub(crate) const PARALLEL_DIROPS: u32 = 1 << 18;
    /// The answer has the most pages of a request.
    pub const MAX_PAGES: u32 = 1 << 22;
    /// Targets of symbolic links may be cached.
    pub(crate) const CACHE_SYMLINKS: u32 = 1 << 23;
    /// Attributes mark mount points.
    pub(crate) const SUBMOUNTS: u32 = 1 << 27;
}

/// Flags of an open file (`FOPEN_*`).
pub mod open {
    /// Do not cache the content.
    pub(crate) const DIRECT_IO: u32 = 1 << 0;
    /// Keep the cached content.
    pub(crate) const KEEP_CACHE: u32 = 1 << 1;
    /// Cache the listing.
    pub(crate) const CACHE_DIR: u32 = 1 << 3;
}

/// Attributes to change (`FATTR_*`).
pub mod change {
    /// The mode.
    pub const MODE: u32 = 1 << 0;
    /// The owner.
    pub(crate) const UID: u32 = 1 << 1;
    /// The group.
    pub(crate) const GID: u32 = 1 << 2;
    /// The size.
    pub const SIZE: u32 = 1 << 3;
    /// The access time.
    pub(crate) const ATIME: u32 = 1 << 4;
    /// The modification time.
    pub(crate) const MTIME: u32 = 1 << 5;
    /// The file is open.
    pub(crate) const FH: u32 = 1 << 6;
    /// Set the access time to now.
    pub(crate) const ATIME_NOW: u32 = 1 << 7;
    /// Set the modification time to now.
    pub(crate) const MTIME_NOW: u32 = 1 << 8;
}

/// The bytes are not a valid request. Holds the error number for the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bad(pub i32);

/// The header of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The opcode.
    pub opcode: u32,
    /// The request's number. The answer repeats it.
    pub unique: u64,
    /// The node.
    pub node: u64,
    /// The user of the calling process.
    pub uid: u32,
    /// The group of the calling process.
    pub gid: u32,
}

impl Header {
    /// Parses the header of a request of `total` bytes. `None` if the length does not match.
    pub fn parse(bytes: &[u8; IN_HEADER], total: usize) -> Option<Self> {
        let mut fields = Fields(bytes);
        let (len, opcode) = (fields.u32().ok()?, fields.u32().ok()?);
        let (unique, node) = (fields.u64().ok()?, fields.u64().ok()?);
        let (uid, gid) = (fields.u32().ok()?, fields.u32().ok()?);
        // Extensions at the end (total_extlen) are ignored.
        (len as usize == total).then_some(Self { opcode, unique, node, uid, gid })
    }
}

/// The arguments of a read or a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// The open file.
    pub fh: u64,
    /// The offset in the file.
    pub offset: u64,
    /// The number of bytes.
    pub size: u32,
}

impl Transfer {
    /// Parses the arguments.
    pub fn parse(bytes: &[u8; TRANSFER]) -> Self {
        let word = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        let size = u32::from_ne_bytes(bytes[16..20].try_into().expect("4 bytes"));
        Self { fh: word(0), offset: word(8), size }
    }
}

/// New attributes of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// The valid fields, as bits of [`change`].
    pub valid: u32,
    /// The open file.
    pub fh: u64,
    /// The size in bytes.
    pub size: u64,
    /// The access time in seconds and nanoseconds since 1970.
    pub atime: (u64, u32),
    /// The modification time.
    pub mtime: (u64, u32),
    /// Permissions.
    pub mode: u32,
    /// The owner.
    pub uid: u32,
    /// The group.
    pub gid: u32,
}

/// A request's opcode and arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "fuse.h says what they are")]
pub enum Request<'r> {
    Init {
        minor: u32,
        readahead: u32,
        flags: u32,
    },
    Destroy,
    Lookup {
        name: &'r CStr,
    },
    Forget {
        lookups: u64,
    },
    BatchForget {
        nodes: &'r [u8],
    },
    GetAttr {
        fh: Option<u64>,
    },
    SetAttr(Change),
    ReadLink,
    Symlink {
        name: &'r CStr,
        target: &'r CStr,
    },
    MkNod {
        mode: u32,
        rdev: u32,
        name: &'r CStr,
    },
    MkDir {
        mode: u32,
        name: &'r CStr,
    },
    Unlink {
        name: &'r CStr,
    },
    RmDir {
        name: &'r CStr,
    },
    Rename {
        name: &'r CStr,
        to: u64,
        new: &'r CStr,
        flags: u32,
    },
    Link {
        node: u64,
        name: &'r CStr,
    },
    Open {
        flags: u32,
    },
    Create {
        flags: u32,
        mode: u32,
        name: &'r CStr,
    },
    /// A read or a write of an open file. The VMM handles it.
    Transfer,
    StatFs,
    Release {
        fh: u64,
    },
    Flush {
        fh: u64,
    },
    FSync {
        fh: u64,
        data: bool,
    },
    SetXattr {
        name: &'r CStr,
        value: &'r [u8],
        flags: u32,
    },
    GetXattr {
        name: &'r CStr,
        size: u32,
    },
    ListXattr {
        size: u32,
    },
    RemoveXattr {
        name: &'r CStr,
    },
    OpenDir,
    ReadDir {
        fh: u64,
        offset: u64,
        size: u32,
        plus: bool,
    },
    FSyncDir {
        fh: u64,
        data: bool,
    },
    Allocate {
        fh: u64,
        offset: u64,
        len: u64,
        mode: u32,
    },
    Seek {
        fh: u64,
        offset: u64,
        whence: u32,
    },
    Copy {
        from: u64,
        from_at: u64,
        to: u64,
        to_at: u64,
        len: u64,
    },
}

/// The opcode of INIT. A guest sends it at mount, when nothing is open.
pub const INIT: u32 = 26;
/// The opcode of READ.
pub const READ: u32 = 15;
/// The opcode of WRITE.
pub const WRITE: u32 = 16;
/// The opcode of OPEN.
pub const OPEN: u32 = 14;
/// The opcode of CREATE.
pub const CREATE: u32 = 35;
/// The opcode of RELEASE.
pub const RELEASE: u32 = 18;

impl<'r> Request<'r> {
    /// Whether the guest waits for an answer.
    pub(crate) fn is_answered(&self) -> bool {
        !matches!(self, Self::Forget { .. } | Self::BatchForget { .. })
    }

    /// Parses the arguments after the header.
    ///
    /// # Errors
    /// The error number for the answer. ENOSYS for an unsupported opcode, so that the guest does
    /// not ask again.
    pub fn parse(opcode: u32, arguments: &'r [u8]) -> Result<Self, Bad> {
        let mut of = Fields(arguments);
        Ok(match opcode {
            1 => Self::Lookup { name: of.name()? },
            2 => Self::Forget { lookups: of.u64()? },
            3 => {
                let (flags, fh) = (of.u64()? as u32, of.u64()?);
                Self::GetAttr { fh: (flags & 1 != 0).then_some(fh) }
            }
            4 => Self::SetAttr(of.change()?),
            5 => Self::ReadLink,
            6 => Self::Symlink { name: of.name()?, target: of.text()? },
            8 => {
                let (mode, rdev) = (of.u32()?, of.u32()?);
                of.skip(8)?;
                Self::MkNod { mode, rdev, name: of.name()? }
            }
            9 => {
                let mode = of.u64()? as u32;
                Self::MkDir { mode, name: of.name()? }
            }
            10 => Self::Unlink { name: of.name()? },
            11 => Self::RmDir { name: of.name()? },
            12 => Self::Rename { to: of.u64()?, name: of.name()?, new: of.name()?, flags: 0 },
            45 => {
                let (to, flags) = (of.u64()?, of.u64()? as u32);
                Self::Rename { to, flags, name: of.name()?, new: of.name()? }
            }
            13 => Self::Link { node: of.u64()?, name: of.name()? },
            OPEN => Self::Open { flags: of.u32()? },
            CREATE => {
                let (flags, mode) = (of.u32()?, of.u32()?);
                of.skip(8)?;
                Self::Create { flags, mode, name: of.name()? }
            }
            READ | WRITE => Self::Transfer,
            17 => Self::StatFs,
            RELEASE | 29 => Self::Release { fh: of.u64()? },
            25 => Self::Flush { fh: of.u64()? },
            20 => Self::FSync { fh: of.u64()?, data: of.u32()? & 1 != 0 },
            30 => Self::FSyncDir { fh: of.u64()?, data: of.u32()? & 1 != 0 },
            21 => {
                let (size, flags) = (of.u32()?, of.u32()?);
                let name = of.name()?;
                let value = of.0.get(..size as usize).ok_or(Bad(libc::EINVAL))?;
                Self::SetXattr { name, value, flags }
            }
            22 => {
                let size = of.u64()? as u32;
                Self::GetXattr { size, name: of.name()? }
            }
            23 => Self::ListXattr { size: of.u32()? },
            24 => Self::RemoveXattr { name: of.name()? },
            INIT => {
                let major = of.u32()?;
                let (minor, readahead, flags) = (of.u32()?, of.u32()?, of.u32()?);
                match major == MAJOR && minor >= OLDEST {
                    true => Self::Init { minor, readahead, flags },
                    false => return Err(Bad(libc::EPROTO)),
                }
            }
            27 => Self::OpenDir,
            28 | 44 => {
                let transfer = Transfer::parse(of.0.first_chunk().ok_or(Bad(libc::EINVAL))?);
                let Transfer { fh, offset, size } = transfer;
                Self::ReadDir { fh, offset, size, plus: opcode == 44 }
            }
            38 => Self::Destroy,
            42 => {
                let count = of.u64()? as u32 as usize;
                let bytes = count.checked_mul(16).and_then(|bytes| of.0.get(..bytes));
                Self::BatchForget { nodes: bytes.ok_or(Bad(libc::EINVAL))? }
            }
            43 => {
                let (fh, offset, len) = (of.u64()?, of.u64()?, of.u64()?);
                Self::Allocate { fh, offset, len, mode: of.u32()? }
            }
            46 => Self::Seek { fh: of.u64()?, offset: of.u64()?, whence: of.u32()? },
            47 => {
                let (from, from_at, _node) = (of.u64()?, of.u64()?, of.u64()?);
                Self::Copy { from, from_at, to: of.u64()?, to_at: of.u64()?, len: of.u64()? }
            }
            _ => return Err(Bad(libc::ENOSYS)),
        })
    }
}

/// The nodes of a [`Request::BatchForget`] with the number of lookups to forget.
pub(crate) fn forgotten(nodes: &[u8]) -> impl Iterator<Item = (u64, u64)> {
    let word = |bytes: &[u8]| u64::from_ne_bytes(bytes.try_into().expect("8 bytes"));
    nodes.as_chunks::<16>().0.iter().map(move |entry| (word(&entry[..8]), word(&entry[8..])))
}

/// Takes arguments from the front.
struct Fields<'r>(&'r [u8]);

impl<'r> Fields<'r> {
    fn skip(&mut self, bytes: usize) -> Result<&'r [u8], Bad> {
        let (front, rest) = self.0.split_at_checked(bytes).ok_or(Bad(libc::EINVAL))?;
        self.0 = rest;
        Ok(front)
    }

    fn u32(&mut self) -> Result<u32, Bad> {
        Ok(u32::from_ne_bytes(self.skip(4)?.try_into().expect("4 bytes")))
    }

    fn u64(&mut self) -> Result<u64, Bad> {
        Ok(u64::from_ne_bytes(self.skip(8)?.try_into().expect("8 bytes")))
    }

    /// Text up to its zero byte.
    fn text(&mut self) -> Result<&'r CStr, Bad> {
        let text = CStr::from_bytes_until_nul(self.0).map_err(|_| Bad(libc::EINVAL))?;
        self.skip(text.count_bytes() + 1)?;
        Ok(text)
    }

    /// The name of a directory entry: not a path, `.` or `..`.
    fn name(&mut self) -> Result<&'r CStr, Bad> {
        let name = self.text()?;
        match name.to_bytes() {
            b"" | b"." | b".." => Err(Bad(libc::EINVAL)),
            bytes if bytes.contains(&b'/') => Err(Bad(libc::EINVAL)),
            bytes if bytes.len() > NAME_MAX => Err(Bad(libc::ENAMETOOLONG)),
            _ => Ok(name),
        }
    }

    fn change(&mut self) -> Result<Change, Bad> {
        let valid = self.u64()? as u32;
        let (fh, size, _lock_owner) = (self.u64()?, self.u64()?, self.u64()?);
        let (atime, mtime, _ctime) = (self.u64()?, self.u64()?, self.u64()?);
        let (atime_ns, mtime_ns, _ctime_ns, mode) = (self.u32()?, self.u32()?, self.u32()?, self.u32()?);
        let (_unused, uid, gid) = (self.u32()?, self.u32()?, self.u32()?);
        let (atime, mtime) = ((atime, atime_ns), (mtime, mtime_ns));
        Ok(Change { valid, fh, size, atime, mtime, mode, uid, gid })
    }
}

/// Attributes of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "stat(2) says what they are")]
pub struct Attributes {
    pub ino: u64,
    pub size: u64,
    pub blocks: u64,
    pub atime: (u64, u32),
    pub mtime: (u64, u32),
    pub ctime: (u64, u32),
    pub mode: u32,
    pub nlink: u32,
    pub uid: u32,
    pub gid: u32,
    pub rdev: u32,
    pub blksize: u32,
    /// The file is a mount point.
    pub submount: bool,
}

/// How long the guest may cache an answer, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Valid {
    /// The entry.
    pub entry: u64,
    /// The attributes.
    pub attributes: u64,
}

/// An answer, beginning with its header.
#[derive(Debug, Default)]
pub struct Answer {
    bytes: Vec<u8>,
    expected: bool,
}

impl Answer {
    /// The finished answer.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Whether the guest waits for the answer.
    pub(crate) fn is_expected(&self) -> bool {
        self.expected
    }

    /// The number of bytes after the header.
    pub fn size(&self) -> usize {
        self.bytes.len() - OUT_HEADER
    }

    /// Starts a new answer.
    pub fn begin(&mut self) {
        self.bytes.clear();
        self.bytes.resize(OUT_HEADER, 0);
        self.expected = false;
    }

    /// Finishes the answer to `unique`. An `error` other than 0 removes the data.
    pub fn finish(&mut self, unique: u64, error: i32) {
        if error != 0 {
            self.bytes.truncate(OUT_HEADER);
        }
        let header = out_header(self.size(), error, unique);
        self.bytes[..OUT_HEADER].copy_from_slice(&header);
        self.expected = true;
    }

    /// Removes all data after the first `len` bytes.
    pub fn truncate(&mut self, len: usize) {
        self.bytes.truncate(OUT_HEADER + len);
    }

    /// Appends bytes.
    pub fn raw(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Appends numbers.
    pub(crate) fn u32s<const N: usize>(&mut self, words: [u32; N]) {
        words.iter().for_each(|word| self.raw(&word.to_ne_bytes()));
    }

    /// Appends numbers.
    pub(crate) fn u64s<const N: usize>(&mut self, words: [u64; N]) {
        words.iter().for_each(|word| self.raw(&word.to_ne_bytes()));
    }

    fn attributes(&mut self, of: &Attributes) {
        self.u64s([of.ino, of.size, of.blocks, of.atime.0, of.mtime.0, of.ctime.0]);
        self.u32s([
            of.atime.1, of.mtime.1, of.ctime.1, of.mode, of.nlink, of.uid, of.gid, of.rdev, of.blksize,
        ]);
        self.u32s([of.submount.into()]);
    }

    /// Appends the result of a lookup. Node 0 means that there is no node.
    pub fn entry(&mut self, node: u64, of: &Attributes, valid: Valid) {
        self.u64s([node, 0, valid.entry, valid.attributes]);
        self.u32s([0, 0]);
        self.attributes(of);
    }

    /// Appends attributes.
    pub(crate) fn attr(&mut self, of: &Attributes, valid: Valid) {
        self.u64s([valid.attributes]);
        self.u32s([0, 0]);
        self.attributes(of);
    }

    /// Appends the number of an open file.
    pub fn opened(&mut self, fh: u64, flags: u32) {
        self.u64s([fh]);
        self.u32s([flags, 0]);
    }

    /// Appends the result of the negotiation with a guest of version `minor`. `most` is the largest
    /// write.
    pub fn init(&mut self, minor: u32, readahead: u32, flags: u32, most: u32) {
        self.u32s([MAJOR, minor.min(MINOR), readahead, flags]);
        // The most background requests, and the number at which the guest considers the share
        // congested.
        self.raw(&64u16.to_ne_bytes());
        self.raw(&48u16.to_ne_bytes());
        // The granularity of times is 1 ns.
        self.u32s([most, 1]);
        self.raw(&((most / 4096) as u16).to_ne_bytes());
        self.raw(&[0; 34]);
    }

    /// Appends a directory entry, padded to 8 bytes.
    pub(crate) fn dirent(&mut self, ino: u64, next: u64, kind: u32, name: &[u8]) {
        self.u64s([ino, next]);
        self.u32s([name.len() as u32, kind]);
        self.raw(name);
        self.bytes.resize(OUT_HEADER + self.size().next_multiple_of(8), 0);
    }
}

/// The header of an answer with `len` bytes of data.
pub fn out_header(len: usize, error: i32, unique: u64) -> [u8; OUT_HEADER] {
    let mut header = [0; OUT_HEADER];
    header[..4].copy_from_slice(&((OUT_HEADER + len) as u32).to_ne_bytes());
    header[4..8].copy_from_slice(&(-error).to_ne_bytes());
    header[8..].copy_from_slice(&unique.to_ne_bytes());
    header
}

/// The number of the open file in an answer to OPEN or CREATE.
pub fn opened(opcode: u32, answer: &[u8]) -> Option<u64> {
    // An answer to CREATE begins with the entry.
    let at = OUT_HEADER + if opcode == CREATE { 128 } else { 0 };
    let error = i32::from_ne_bytes(answer.get(4..8)?.try_into().ok()?);
    let fh = u64::from_ne_bytes(answer.get(at..at + 8)?.try_into().ok()?);
    (error == 0).then_some(fh)
}

/// What the server closes at a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closes {
    /// Nothing.
    Nothing,
    /// The open file with this number.
    One(u64),
    /// All.
    All,
}

/// What the server closes at a request with these arguments.
pub fn closes(opcode: u32, arguments: &[u8]) -> Closes {
    match Request::parse(opcode, arguments) {
        Ok(Request::Init { .. } | Request::Destroy) => Closes::All,
        Ok(Request::Release { fh }) => Closes::One(fh),
        _ => Closes::Nothing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_request_that_ends_an_open_file_is_known() {
        let seven = [7, 0, 0, 0, 0, 0, 0, 0];
        // RELEASE, RELEASEDIR, DESTROY and FLUSH.
        for (opcode, closes_) in
            [(RELEASE, Closes::One(7)), (29, Closes::One(7)), (38, Closes::All), (25, Closes::Nothing)]
        {
            assert_eq!(closes(opcode, &seven), closes_, "{opcode}");
        }
        assert_eq!(closes(INIT, &[7, 0, 0, 0, 40, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]), Closes::All);
        assert_eq!(closes(RELEASE, &[7]), Closes::Nothing);
    }

    fn name(text: &[u8]) -> Result<&CStr, Bad> {
        Fields(text).name()
    }

    #[test]
    fn names_are_one_component() {
        assert_eq!(name(b"a\0rest"), Ok(c"a"));
        assert_eq!(name(b"...\0"), Ok(c"..."));
        for bad in [&b""[..], b"a", b"\0", b".\0", b"..\0", b"a/b\0", b"/\0"] {
            assert_eq!(name(bad), Err(Bad(libc::EINVAL)), "{bad:?}");
        }
        let long = [[b'a'; NAME_MAX + 1].as_slice(), b"\0"].concat();
        assert_eq!(name(&long), Err(Bad(libc::ENAMETOOLONG)));
        assert!(name(&long[1..]).is_ok());
    }

    /// The sizes of the structures in fuse.h.
    #[test]
    fn answers_have_the_sizes_that_linux_expects() {
        let valid = Valid { entry: 0, attributes: 1 };
        let size = |write: fn(&mut Answer, Valid)| {
            let mut answer = Answer::default();
            answer.begin();
            write(&mut answer, valid);
            answer.size()
        };
        assert_eq!(size(|answer, valid| answer.entry(1, &Attributes::default(), valid)), 128);
        assert_eq!(size(|answer, valid| answer.attr(&Attributes::default(), valid)), 104);
        assert_eq!(size(|answer, _| answer.opened(1, 0)), 16);
        assert_eq!(size(|answer, _| answer.init(38, 0, 0, 1 << 20)), 64);
        assert_eq!(size(|answer, _| answer.dirent(1, 2, 4, b"abc")), 32);
    }

    #[test]
    fn counts_that_lie_are_refused() {
        let forget = [3u64.to_ne_bytes(), 1u64.to_ne_bytes(), 1u64.to_ne_bytes()].concat();
        assert_eq!(Request::parse(42, &forget), Err(Bad(libc::EINVAL)));
        let attribute = [&100u32.to_ne_bytes()[..], &0u32.to_ne_bytes(), b"user.a\0short"].concat();
        assert_eq!(Request::parse(21, &attribute), Err(Bad(libc::EINVAL)));
        assert_eq!(Request::parse(999, &[]), Err(Bad(libc::ENOSYS)));
        assert_eq!(
            Request::parse(INIT, &[7, 0, 0, 0, 30, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
            Err(Bad(libc::EPROTO))
        );
    }

    #[test]
    fn a_header_has_the_length_of_its_request() {
        let mut bytes = [0; IN_HEADER];
        bytes[0] = 56;
        assert!(Header::parse(&bytes, 56).is_some());
        assert!(Header::parse(&bytes, 57).is_none());
    }
}
