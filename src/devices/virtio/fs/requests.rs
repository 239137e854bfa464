//! Passes requests to the server of a directory. Reads and writes of open files are done here,
//! without the server.

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::virtio::Active;
use crate::virtio::queue::Chain;
use crate::virtio::worker::Work;
use vellum_kvm::memory::slices::Slices;
use vellum_share::fuse::{self, Closes, Header, IN_HEADER, OUT_HEADER, TRANSFER, Transfer, out_header};
use vellum_share::process::Client;
use vellum_share::server::{MAX_ANSWER, MAX_REQUEST, MAX_WRITE};

/// The worker's state.
pub struct Requests {
    client: Client,
    pub path: PathBuf,
    /// Open files, by the server's handles.
    files: HashMap<u64, File>,
    request: Vec<u8>,
    answer: Vec<u8>,
    /// The server has ended, and that was logged.
    over: bool,
    /// The guest has mounted the directory.
    mounted: Arc<AtomicBool>,
}

/// A request in progress, for status messages: its opcode.
#[derive(Clone, Copy, Debug)]
pub struct Asked(u32);

impl fmt::Display for Asked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            fuse::READ => f.write_str("a read"),
            fuse::WRITE => f.write_str("a write"),
            other => write!(f, "a FUSE request of type {other}"),
        }
    }
}

impl Requests {
    /// Requests for the directory `path`, served by `client`.
    pub fn new(client: Client, path: &Path, mounted: Arc<AtomicBool>) -> Self {
        Self {
            client,
            path: path.into(),
            files: HashMap::new(),
            request: vec![0; MAX_REQUEST],
            answer: vec![0; MAX_ANSWER],
            over: false,
            mounted,
        }
    }

    /// Reads bytes of `transfer`'s file into `data`. Returns how many.
    fn read(&self, transfer: Transfer, data: &mut Slices<'_>) -> Result<usize, i32> {
        check(transfer)?;
        let file = self.files.get(&transfer.fh).ok_or(libc::EBADF)?;
        let most = (transfer.size as usize).min(data.left());
        moved(most, |done| data.preadv(file, at(transfer, done)?, most - done))
    }

    fn write(&self, transfer: Transfer, data: &mut Slices<'_>) -> Result<usize, i32> {
        check(transfer)?;
        let file = self.files.get(&transfer.fh).ok_or(libc::EBADF)?;
        let most = transfer.size as usize;
        if most > data.left() {
            return Err(libc::EINVAL);
        }
        moved(most, |done| data.pwritev(file, at(transfer, done)?, most - done))
    }

    /// Has the server answer. Returns the length of the answer in `self.answer`.
    fn ask(&mut self, opcode: u32, len: usize) -> Result<usize, i32> {
        let asked = self.client.ask(&self.request[..len], &mut self.answer);
        let (len, descriptor) = asked.map_err(|error| {
            if error.raw_os_error() != Some(libc::EINVAL) && !std::mem::replace(&mut self.over, true) {
                tracing::error!("share {}: {error}: every request fails from now on", self.path.display());
            }
            error.raw_os_error().unwrap_or(libc::EIO)
        })?;
        if let (Some(descriptor), Some(fh)) = (descriptor, fuse::opened(opcode, &self.answer[..len])) {
            self.files.insert(fh, descriptor.into());
        }
        Ok(len)
    }
}

/// The largest read or write, in bytes: as many pages of a guest as it is told, of 64 KiB each at
/// most. A pause waits for it.
const MAX_TRANSFER: u32 = MAX_WRITE * 16;

/// Refuses a read or a write that is larger than a guest is told.
fn check(transfer: Transfer) -> Result<(), i32> {
    if transfer.size > MAX_TRANSFER { Err(libc::EINVAL) } else { Ok(()) }
}

/// The file offset of the next bytes of `transfer`.
fn at(transfer: Transfer, done: usize) -> io::Result<u64> {
    let at = transfer.offset.checked_add(done as u64).filter(|&at| i64::try_from(at).is_ok());
    at.ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))
}

/// Continues until `most` bytes are moved, or no more are available.
fn moved(most: usize, mut part: impl FnMut(usize) -> io::Result<usize>) -> Result<usize, i32> {
    let mut done = 0;
    while done < most {
        match part(done) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // Return what was moved. The next request meets the error.
            Err(_) if done > 0 => break,
            Err(error) => return Err(error.raw_os_error().unwrap_or(libc::EIO)),
        }
    }
    Ok(done)
}

impl Work for Requests {
    type Notice = ();
    type Request = Asked;

    fn begin(&mut self, _active: &Active, (): ()) {}

    /// The server may have done a part, so no request is repeated.
    fn answer(
        &mut self,
        chain: &mut Chain<'_>,
        begins: impl FnOnce(Asked),
        _are_wanted: &dyn Fn() -> bool,
    ) -> Option<u32> {
        Some(self.answer_to(chain, begins))
    }
}

impl Requests {
    /// Answers the request in `chain`. Returns the number of bytes written.
    fn answer_to(&mut self, chain: &mut Chain<'_>, begins: impl FnOnce(Asked)) -> u32 {
        let Chain { readable, writable, .. } = chain;
        let total = readable.left();
        let Some(bytes) = readable.read_array::<IN_HEADER>() else { return 0 };
        // Without a header there is no ID to answer.
        let Some(header) = Header::parse(&bytes, total) else { return 0 };
        begins(Asked(header.opcode));
        // From the first request on, the guest and the server know of each other.
        self.mounted.store(true, Ordering::Release);
        let fail =
            |writable: &mut Slices<'_>, error| writable.write(&out_header(0, error, header.unique)) as u32;
        if let fuse::READ | fuse::WRITE = header.opcode {
            let Some(transfer) = readable.read_array::<TRANSFER>() else {
                return fail(writable, libc::EINVAL);
            };
            let transfer = Transfer::parse(&transfer);
            if header.opcode == fuse::WRITE {
                return match self.write(transfer, readable) {
                    Err(error) => fail(writable, error),
                    Ok(count) => {
                        let header = writable.write(&out_header(8, 0, header.unique));
                        (header + writable.write(&(count as u64).to_ne_bytes())) as u32
                    }
                };
            }
            let mut head = Slices::default();
            writable.split_front(OUT_HEADER, &mut head);
            return match self.read(transfer, writable) {
                Err(error) => fail(&mut head, error),
                Ok(count) => (head.write(&out_header(count, 0, header.unique)) + count) as u32,
            };
        }
        if total > MAX_REQUEST {
            return fail(writable, libc::EINVAL);
        }
        self.request[..IN_HEADER].copy_from_slice(&bytes);
        readable.read(&mut self.request[IN_HEADER..total]);
        let answered = self.ask(header.opcode, total);
        // The server has closed its own, whatever it has answered.
        match fuse::closes(header.opcode, &self.request[IN_HEADER..total]) {
            Closes::Nothing => {}
            Closes::One(fh) => drop(self.files.remove(&fh)),
            Closes::All => self.files.clear(),
        }
        match answered {
            Ok(len) => writable.write(&self.answer[..len]) as u32,
            Err(error) => fail(writable, error),
        }
    }
}
