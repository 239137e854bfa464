//! A machine: KVM's VM, its memory and its vCPUs.
//!
//! Start with [`Vm`]; [`memory`] maps what it is given, [`memslots`] tells KVM, [`vcpu`] runs it, [`lifecycle`] says how it
//! ends.

pub mod counters;
pub mod cr3_cache;
pub mod eager_split;
pub mod exits;
pub mod lifecycle;
pub mod memslots;
pub mod quiesced;
pub mod ring;
pub mod vcpu;

use std::io;
use std::ops::Deref;
use std::sync::Arc;

use kvm_ioctls::{Kvm, VcpuFd, VmFd};

use crate::memory::{self, Memory};
use memslots::Memslots;
use ring::DirtyRing;
use vellum_host as host;
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};
use vellum_sys::kick::RunPage;

/// Why a machine cannot be had from KVM.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// KVM is not there, not permitted, busy.
    #[error(transparent)]
    Kvm(#[from] host::kvm::Unusable),
    /// An ioctl failed.
    #[error("{call}: {source}")]
    Ioctl {
        /// Its name.
        call: &'static str,
        /// What KVM said.
        source: kvm_ioctls::Error,
    },
    /// Guest memory.
    #[error(transparent)]
    Memory(#[from] memory::Error),
    /// vCPU threads.
    #[error(transparent)]
    Vcpu(#[from] vcpu::Error),
    /// Dirty rings.
    #[error(transparent)]
    Ring(#[from] ring::Error),
    /// The CR3 cache.
    #[error(transparent)]
    Cr3Cache(#[from] cr3_cache::Error),
    /// Blocks that are split at once.
    #[error(transparent)]
    EagerSplit(#[from] eager_split::Error),
    /// KVM has no such memslot.
    #[error("there is no memslot {0}")]
    NoSlot(u32),
    /// More vCPUs than KVM has.
    #[error("{asked} is out of range: this KVM has from 1 to {most}")]
    Cpus {
        /// What was asked.
        asked: usize,
        /// `KVM_CAP_MAX_VCPUS`.
        most: usize,
    },
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        match self {
            Self::Kvm(error) => error.origin(),
            Self::Ioctl { .. } | Self::NoSlot(_) => ErrorOrigin::HOST,
            Self::Memory(error) => error.origin(),
            Self::Vcpu(error) => error.origin(),
            Self::Ring(error) => error.origin(),
            Self::Cr3Cache(error) => error.origin(),
            Self::EagerSplit(error) => error.origin(),
            Self::Cpus { .. } => ErrorOrigin::user(Field::Cpus),
        }
    }
}

/// Names the ioctl that failed.
pub fn ioctl<T>(call: &'static str, result: Result<T, kvm_ioctls::Error>) -> Result<T, Error> {
    result.map_err(|source| Error::Ioctl { call, source })
}

/// Opens `/dev/kvm`.
pub fn open() -> Result<Kvm, Error> {
    Ok(host::kvm::open()?)
}

/// KVM's VM with its memslots.
#[derive(Debug)]
pub struct Vm {
    /// KVM's descriptor.
    pub fd: Arc<VmFd>,
    /// RAM.
    pub memory: Memory,
    /// The ring that each vCPU has, where the machine was made with one.
    pub dirty_ring: Option<Arc<DirtyRing>>,
    /// How many address spaces each vCPU can switch among without an exit, where it may do that at all.
    pub cr3_cache: Option<u32>,
    memslots: Arc<Memslots>,
}

/// A vCPU as KVM has it.
#[derive(Debug)]
pub struct Processor {
    // First, so that the memory that it runs on goes last.
    fd: VcpuFd,
    page: Arc<RunPage>,
    ring: Option<Arc<DirtyRing>>,
    _memslots: Arc<Memslots>,
}

impl Deref for Processor {
    type Target = VcpuFd;

    fn deref(&self) -> &VcpuFd {
        &self.fd
    }
}

impl Vm {
    /// Makes a VM over `memory`.
    pub fn new(kvm: &Kvm, memory: Memory) -> Result<Self, Error> {
        Self::with_dirty_ring(kvm, memory, None)
    }

    /// Makes a VM over `memory` whose vCPUs have dirty rings of so many entries: KVM wants to know before it has
    /// memslots (for the backup bitmap) and vCPUs (for the rings).
    pub fn with_dirty_ring(kvm: &Kvm, memory: Memory, entries: Option<u32>) -> Result<Self, Error> {
        Self::over(host::kvm::create_vm(kvm)?, memory, entries)
    }

    /// The same of a VM that has nothing yet.
    pub fn over(fd: VmFd, memory: Memory, entries: Option<u32>) -> Result<Self, Error> {
        let fd = Arc::new(fd);
        let memslots = Arc::new(Memslots::new(fd.clone()));
        let ring = |entries| DirtyRing::enable(&fd, &memslots, entries).map(Arc::new);
        let dirty_ring = entries.map(ring).transpose()?;
        if let Some(bytes) = memory.config.eager_split {
            eager_split::enable(&fd, bytes)?;
        }
        memory.slots().iter().try_for_each(|slot| memslots.set(slot, 0))?;
        Ok(Self { fd, memory, dirty_ring, cr3_cache: None, memslots })
    }

    /// Lets its guest load CR3 without an exit, if that is the choice. It has no vCPU yet; the guest has to be told in CPUID.
    pub fn with_cr3_cache(mut self, choice: cr3_cache::Choice) -> Result<Self, Error> {
        self.cr3_cache = match choice {
            cr3_cache::Choice::Off => None,
            _ => Some(cr3_cache::enable(&self.fd)?),
        };
        Ok(self)
    }

    /// Its memslots.
    pub fn memslots(&self) -> &Arc<Memslots> {
        &self.memslots
    }

    /// Makes vCPU `index`.
    #[expect(
        clippy::disallowed_methods,
        reason = "this is where a vCPU gets hold of the memory that it runs on"
    )]
    pub fn create_vcpu(&self, index: usize) -> Result<Processor, Error> {
        let fd = ioctl("KVM_CREATE_VCPU", self.fd.create_vcpu(index as u64))?;
        let mapped = |error: io::Error| kvm_ioctls::Error::new(error.raw_os_error().unwrap_or(libc::EIO));
        let page = ioctl("mmap of kvm_run", RunPage::map(&fd).map_err(mapped))?;
        if let Some(ring) = &self.dirty_ring {
            ioctl("mmap of a dirty ring", ring.add(&fd).map_err(mapped))?;
        }
        let (page, ring) = (Arc::new(page), self.dirty_ring.clone());
        Ok(Processor { fd, page, ring, _memslots: self.memslots.clone() })
    }
}
