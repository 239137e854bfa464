//! Mounts a shared directory on this host through /dev/fuse and the server.
//!
//! In a VMM the device passes requests between /dev/fuse and the server. Here a process of its own
//! does that, the carrier. A test may wait for its own mount, in a page fault or at its end, and
//! then waits for another process. A carrier that ends closes /dev/fuse: the kernel aborts the
//! connection, and waiting processes get an error. So a test may fail but not hang.

use std::collections::HashMap;
use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::{Failed, Need};
use vellum_sandbox::Mode;
use vellum_share::Config;
use vellum_share::fuse::{Header, IN_HEADER, READ, RELEASE, TRANSFER, Transfer, WRITE, opened, out_header};
use vellum_share::process::{Client, open_root};
use vellum_share::server::{MAX_ANSWER, MAX_WRITE};
use vellum_sys::{host, signal};

/// The command-line word that makes this program the carrier.
pub const WORD: &str = "carry";
/// The seconds after which a carrier ends by itself. No test takes as long.
const LONGEST: u32 = 900;
/// How long the carrier may take to end once the mount is gone.
const MOUNT_TIMEOUT: Duration = Duration::from_secs(20);

/// What mounting requires.
pub fn fuse() -> Need {
    if !host::is_root() {
        return Err("needs root: run the tests with sudo".into());
    }
    match File::open("/dev/fuse") {
        Ok(_) => Ok(()),
        Err(error) => Err(format!("needs /dev/fuse ({error}): modprobe fuse")),
    }
}

/// A mounted directory. It is unmounted when this is dropped.
pub struct Mount {
    /// The mount point.
    pub path: PathBuf,
    carrier: Child,
}

impl Mount {
    /// Mounts `shared` at `path`, an empty directory.
    pub fn new(shared: &Path, path: PathBuf, config: Config) -> Result<Self, Failed> {
        Self::recorded(shared, path, config, None)
    }

    /// Like [`Mount::new`]. Writes and fsyncs are appended to `record`, which [`acts`] reads.
    pub fn recorded(
        shared: &Path,
        path: PathBuf,
        config: Config,
        record: Option<&Path>,
    ) -> Result<Self, Failed> {
        let fuse = File::options().read(true).write(true).open("/dev/fuse")?;
        let options = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions",
            fuse.as_raw_fd()
        );
        let [source, target, kind, options] = ["vellum", path.to_str().ok_or("a path")?, "fuse", &options]
            .map(|text| CString::new(text).expect("no zero byte"));
        // SAFETY: strings that end in a zero.
        let mounted = unsafe {
            libc::mount(
                source.as_ptr(),
                target.as_ptr(),
                kind.as_ptr(),
                libc::MS_NOSUID | libc::MS_NODEV,
                options.as_ptr().cast(),
            )
        };
        if mounted != 0 {
            return Err(format!("mount: {}", io::Error::last_os_error()).into());
        }
        let mut command = Command::new("/proc/self/exe");
        command
            .arg(WORD)
            .arg(shared)
            .arg(serde_json::to_string(&config)?)
            .args(record)
            .stdin(Stdio::from(fuse));
        signal::end_with_parent(&mut command);
        let carrier = command.spawn();
        // Closes the command's copy of /dev/fuse.
        drop(command);
        match carrier {
            Ok(carrier) => Ok(Self { path, carrier }),
            Err(error) => {
                unmount(&path);
                Err(error.into())
            }
        }
    }

    /// The process ID of the server.
    pub fn server(&self) -> Result<u32, Failed> {
        let list = format!("/proc/{0}/task/{0}/children", self.carrier.id());
        let children = std::fs::read_to_string(&list)?;
        let first = children.split_whitespace().next().and_then(|pid| pid.parse().ok());
        first.ok_or_else(|| format!("{list}: {children:?}").into())
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        unmount(&self.path);
        let end = Instant::now() + MOUNT_TIMEOUT;
        while Instant::now() < end && matches!(self.carrier.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(1));
        }
        // A file may still be open, or the server hangs. Waiting processes get an error.
        let _ = self.carrier.kill();
        let _ = self.carrier.wait();
    }
}

fn unmount(path: &Path) {
    let path = CString::new(path.as_os_str().as_bytes()).expect("no zero byte");
    // SAFETY: a string that ends in a zero.
    unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
}

/// Runs the carrier.
pub fn carry() -> Result<(), Failed> {
    // SAFETY: the signal has no handler and ends the process.
    unsafe { libc::alarm(LONGEST) };
    let (shared, config) = (std::env::args_os().nth(2), std::env::args().nth(3));
    let config: Config = serde_json::from_str(&config.ok_or("no configuration")?)?;
    let fuse = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    // The server must not inherit /dev/fuse, as in a VMM.
    let nothing = File::open("/dev/null")?;
    // SAFETY: descriptors that are open.
    unsafe { libc::dup2(nothing.as_raw_fd(), 0) };
    let client =
        Client::start(&open_root(Path::new(&shared.ok_or("no directory")?))?, config, None, Mode::On)?;
    let record = std::env::args_os().nth(4).map(|path| File::options().append(true).create(true).open(path));
    serve(fuse, &client, record.transpose()?);
    Ok(())
}

/// An operation on a file.
pub enum Act {
    /// These bytes were written at this offset.
    Write(u64, Vec<u8>),
    /// Everything before was synced.
    Sync,
}

const FSYNC: u32 = 20;
const FALLOCATE: u32 = 43;

/// The operations in `record`.
pub fn acts(record: &[u8]) -> Vec<Act> {
    let (mut acts, mut left) = (Vec::new(), record);
    while let Some((word, rest)) = left.split_first_chunk::<8>() {
        left = rest;
        match u64::from_le_bytes(*word) {
            u64::MAX => acts.push(Act::Sync),
            at => {
                let (len, rest) = left.split_first_chunk::<8>().expect("a length");
                let (data, rest) = rest.split_at(u64::from_le_bytes(*len) as usize);
                acts.push(Act::Write(at, data.to_vec()));
                left = rest;
            }
        }
    }
    acts
}

/// A request as an entry of a record, if it is an operation.
fn noted(opcode: u32, bytes: &[u8]) -> Option<Vec<u8>> {
    let word = |at: usize| bytes[IN_HEADER + at..][..8].try_into().map(u64::from_ne_bytes).expect("8 bytes");
    match opcode {
        WRITE => {
            let data = &bytes[IN_HEADER + TRANSFER..];
            Some([&word(8).to_le_bytes()[..], &(data.len() as u64).to_le_bytes(), data].concat())
        }
        // The overlay of a disk uses it only to zero a range.
        FALLOCATE => {
            let zeroes = vec![0; word(16) as usize];
            Some([&word(8).to_le_bytes()[..], &word(16).to_le_bytes(), &zeroes].concat())
        }
        FSYNC => Some(u64::MAX.to_le_bytes().to_vec()),
        _ => None,
    }
}

/// Passes requests to the server until the mount is gone.
fn serve(mut fuse: File, client: &Client, mut record: Option<File>) {
    let mut files: HashMap<u64, File> = HashMap::new();
    let (mut request, mut answer) = (vec![0; MAX_WRITE as usize + (64 << 10)], vec![0; MAX_ANSWER]);
    loop {
        let len = match fuse.read(&mut request) {
            Ok(len) => len,
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EINTR | libc::EAGAIN)) => {
                continue;
            }
            Err(_) => return,
        };
        let bytes = &request[..len];
        let header = Header::parse(bytes.first_chunk().expect("the kernel sends whole headers"), len)
            .expect("the kernel's");
        let transfer =
            |at: usize| Transfer::parse(bytes[at..at + TRANSFER].try_into().expect("whole arguments"));
        let (data, extra) = match header.opcode {
            READ => {
                let Transfer { fh, offset, size } = transfer(IN_HEADER);
                let mut data = vec![0; size as usize];
                let read =
                    files.get(&fh).ok_or(libc::EBADF).and_then(|file| read_all(file, &mut data, offset));
                (read.map(|len| data[..len].to_vec()), None)
            }
            WRITE => {
                let Transfer { fh, offset, size } = transfer(IN_HEADER);
                let data = &bytes[IN_HEADER + TRANSFER..][..size as usize];
                let wrote = files.get(&fh).ok_or(libc::EBADF).and_then(|file| {
                    file.write_all_at(data, offset).map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
                });
                (wrote.map(|()| u64::from(size).to_ne_bytes().to_vec()), None)
            }
            opcode => {
                let Ok((len, descriptor)) = client.ask(bytes, &mut answer) else { return };
                if let (Some(descriptor), Some(fh)) = (descriptor, opened(opcode, &answer[..len])) {
                    files.insert(fh, descriptor.into());
                }
                if opcode == RELEASE {
                    files.remove(&u64::from_ne_bytes(
                        bytes[IN_HEADER..IN_HEADER + 8].try_into().expect("8 bytes"),
                    ));
                }
                (Ok(Vec::new()), Some(len))
            }
        };
        let whole = match (data, extra) {
            (_, Some(0)) => continue,
            (_, Some(len)) => answer[..len].to_vec(),
            (Ok(data), None) => [&out_header(data.len(), 0, header.unique)[..], &data].concat(),
            (Err(error), None) => out_header(0, error, header.unique).to_vec(),
        };
        if let Some(record) = &mut record
            && let Some(act) = noted(header.opcode, bytes)
        {
            record.write_all(&act).expect("room for the record");
        }
        // The process that made the request may have been killed meanwhile.
        let _ = fuse.write(&whole);
    }
}

fn read_all(file: &File, data: &mut [u8], offset: u64) -> Result<usize, i32> {
    let mut done = 0;
    while done < data.len() {
        match file.read_at(&mut data[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) => return Err(error.raw_os_error().unwrap_or(libc::EIO)),
        }
    }
    Ok(done)
}
