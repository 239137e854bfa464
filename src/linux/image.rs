//! The kernel that a machine boots: its files, and how they are loaded into guest memory. The boot
//! protocols belong to the board ([`vellum_kvm::arch::boot`]).

use std::fs::File;
use std::path::{Path, PathBuf};

use super::Error;
use vellum_kvm::arch::boot::{self, Entry};
use vellum_kvm::arch::load::BootRequest;
use vellum_kvm::arch::protocol::Protocol;
use vellum_kvm::arch::tables::Tables;
use vellum_kvm::memory::{GuestMemory, short_size};
use vellum_sys::diagnose::{Diagnose, Field};
use vellum_sys::file::{Lock, lock};
use vellum_sys::open::{self, Kind};

/// What to boot.
#[derive(Clone, Debug)]
pub struct BootConfig {
    /// The kernel image.
    pub kernel: PathBuf,
    /// The initial RAM disk, or a multiboot guest's module.
    pub initrd: Option<PathBuf>,
    /// The command line.
    pub cmdline: String,
    /// How the kernel is entered; `None` for the first protocol that it offers.
    pub protocol: Option<Protocol>,
}

impl BootConfig {
    /// Only `kernel`, without an initrd or a command line.
    pub fn new(kernel: PathBuf) -> Self {
        Self { kernel, initrd: None, cmdline: String::new(), protocol: None }
    }
}

/// A kernel with open files.
pub struct Image {
    config: BootConfig,
    kernel: File,
    initrd: Option<File>,
}

impl Image {
    /// Opens the files.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn open(config: BootConfig) -> Result<Self, Error> {
        let kernel = open(Field::Kernel, &config.kernel)?;
        let initrd = config.initrd.as_ref().map(|path| open(Field::Initrd, path)).transpose()?;
        Ok(Self { config, kernel, initrd })
    }

    /// Loads the files into `memory`, which has `size` bytes. `tables` describe the board.
    pub(super) fn load(&mut self, memory: &GuestMemory, size: u64, tables: &Tables) -> Result<Entry, Error> {
        let config = &self.config;
        let name = config.kernel.file_name().unwrap_or_default().to_string_lossy();
        let request = BootRequest {
            name: &name,
            cmdline: &config.cmdline,
            protocol: config.protocol,
            tables: Some(tables),
        };
        boot::load(memory, &mut self.kernel, self.initrd.as_mut(), &request).map_err(|error| {
            let value = match error.field() {
                Some(Field::Initrd) => {
                    config.initrd.as_deref().unwrap_or(Path::new("")).display().to_string()
                }
                Some(Field::Cmdline) => {
                    format!("'{}…'", config.cmdline.chars().take(32).collect::<String>().escape_debug())
                }
                Some(Field::Memory) => short_size(size),
                Some(Field::Protocol) => config.protocol.map_or(String::new(), |asked| asked.to_string()),
                _ => config.kernel.display().to_string(),
            };
            Error::Boot { value, error }
        })
    }
}

fn open(field: Field, path: &Path) -> Result<File, Error> {
    let refuse = |error| Error::Open { field, path: path.to_owned(), error };
    let file = open::for_reading(path, Kind::Regular).map_err(refuse)?;
    // A shared lock tells other programs that the file is in use, as a disk's lock does, so that no
    // output overwrites it. The file can be read without the lock.
    let _ = lock(&file, Lock::Shared);
    Ok(file)
}
