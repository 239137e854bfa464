//! The kernel that a machine boots: its files, and how they come into guest memory. The boot protocols are the board's
//! ([`vellum_kvm::arch::boot`]).

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

/// What is to be booted.
#[derive(Clone, Debug)]
pub struct BootConfig {
    /// The kernel image.
    pub kernel: PathBuf,
    /// The initial RAM disk, or a multiboot guest's module.
    pub initrd: Option<PathBuf>,
    /// The command line.
    pub cmdline: String,
    /// How the kernel is entered; `None` for the first way that it offers.
    pub protocol: Option<Protocol>,
}

impl BootConfig {
    /// `kernel` with nothing besides.
    pub fn new(kernel: PathBuf) -> Self {
        Self { kernel, initrd: None, cmdline: String::new(), protocol: None }
    }
}

/// A kernel whose files are open.
pub struct Image {
    config: BootConfig,
    kernel: File,
    initrd: Option<File>,
}

impl Image {
    /// Opens the files.
    ///
    /// # Errors
    /// Where one cannot be read.
    pub fn open(config: BootConfig) -> Result<Self, Error> {
        let kernel = open(Field::Kernel, &config.kernel)?;
        let initrd = config.initrd.as_ref().map(|path| open(Field::Initrd, path)).transpose()?;
        Ok(Self { config, kernel, initrd })
    }

    /// Loads them into `memory`, of `size` bytes, which `tables` describe.
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
    // Says to others that somebody needs it, as a disk's lock does: output is not written over it. It can be read without.
    let _ = lock(&file, Lock::Shared);
    Ok(file)
}
