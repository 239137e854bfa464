//! A directory as this host's kernel sees it by way of its server: mounted through /dev/fuse, with a thread that does what the device
//! does in a VMM.

use std::collections::HashMap;
use std::ffi::CString;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use harness::{Failed, Need};
use vellum::sandbox::Mode;
use vellum::share::Config;
use vellum::share::fuse::{Header, IN_HEADER, READ, RELEASE, TRANSFER, Transfer, WRITE, opened, out_header};
use vellum::share::process::{Client, open_root};
use vellum::share::server::{MOST_ANSWER, MOST_WRITE};
use vellum::sys::host;

/// What mounting takes.
pub fn fuse() -> Need {
    if !host::is_root() {
        return Err("needs root: run the tests with sudo".into());
    }
    match File::open("/dev/fuse") {
        Ok(_) => Ok(()),
        Err(error) => Err(format!("needs /dev/fuse ({error}): modprobe fuse")),
    }
}

pub struct Mount {
    pub path: PathBuf,
    thread: Option<JoinHandle<()>>,
}

impl Mount {
    /// Shows `shared` at `path`, an empty directory.
    pub fn new(shared: &Path, path: PathBuf, config: Config) -> Result<Self, Failed> {
        let client = Client::start(&open_root(shared)?, config, None, Mode::On)?;
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
            return Err(format!("mount: {}", std::io::Error::last_os_error()).into());
        }
        let thread = std::thread::spawn(move || serve(fuse, &client));
        Ok(Self { path, thread: Some(thread) })
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let path = CString::new(self.path.as_os_str().as_bytes()).expect("no zero byte");
        // SAFETY: a string that ends in a zero.
        unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
        drop(self.thread.take().map(JoinHandle::join));
    }
}

/// Carries requests until the mount is gone.
fn serve(mut fuse: File, client: &Client) {
    let mut files: HashMap<u64, File> = HashMap::new();
    let (mut request, mut answer) = (vec![0; MOST_WRITE as usize + (64 << 10)], vec![0; MOST_ANSWER]);
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
        // Whoever asked may have been killed meanwhile.
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
