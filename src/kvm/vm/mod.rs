//! A machine: KVM's VM, its memory and its vCPUs.
//!
//! Start with [`Vm`]. [`memory`] maps guest memory, [`memslots`] tells KVM, [`vcpu`] runs it,
//! [`lifecycle`] says how it ends.

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

/// Why KVM cannot provide a machine.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// KVM is missing, not permitted or busy.
    #[error(transparent)]
    Kvm(#[from] host::kvm::Unusable),
    /// An ioctl failed.
    #[error("{call}: {source}")]
    Ioctl {
        /// The ioctl.
        call: &'static str,
        /// KVM's error.
        source: kvm_ioctls::Error,
    },
    /// Guest memory failed.
    #[error(transparent)]
    Memory(#[from] memory::Error),
    /// A vCPU thread failed.
    #[error(transparent)]
    Vcpu(#[from] vcpu::Error),
    /// Dirty rings are not possible.
    #[error(transparent)]
    Ring(#[from] ring::Error),
    /// The CR3 cache is not possible.
    #[error(transparent)]
    Cr3Cache(#[from] cr3_cache::Error),
    /// Eager splitting is not possible.
    #[error(transparent)]
    EagerSplit(#[from] eager_split::Error),
    /// KVM has no such memslot.
    #[error("there is no memslot {0}")]
    NoSlot(u32),
    /// More vCPUs than KVM allows.
    #[error("{asked} is out of range: this KVM has from 1 to {most}")]
    Cpus {
        /// The requested number.
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

/// Adds the ioctl's name to its error.
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
    /// The vCPUs' dirty rings, if the machine was created with them.
    pub dirty_ring: Option<Arc<DirtyRing>>,
    /// The number of address spaces among which each vCPU can switch without an exit, if the CR3
    /// cache is enabled.
    pub cr3_cache: Option<u32>,
    memslots: Arc<Memslots>,
}

/// A KVM vCPU.
#[derive(Debug)]
pub struct Processor {
    // First, so that it is dropped before the memory on which it runs.
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
    /// Creates a VM with `memory`.
    pub fn new(kvm: &Kvm, memory: Memory) -> Result<Self, Error> {
        Self::with_dirty_ring(kvm, memory, None)
    }

    /// Creates a VM with `memory` whose vCPUs have dirty rings of this size. KVM must know before
    /// it has memslots (for the backup bitmap) and vCPUs (for the rings).
    pub fn with_dirty_ring(kvm: &Kvm, memory: Memory, entries: Option<u32>) -> Result<Self, Error> {
        Self::over(host::kvm::create_vm(kvm)?, memory, entries)
    }

    /// Like [`Vm::with_dirty_ring`], with an empty VM.
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

    /// Enables the CR3 cache, if chosen. The VM must have no vCPU yet. CPUID must announce it to
    /// the guest.
    pub fn with_cr3_cache(mut self, choice: cr3_cache::Choice) -> Result<Self, Error> {
        self.cr3_cache = match choice {
            cr3_cache::Choice::Off => None,
            _ => Some(cr3_cache::enable(&self.fd)?),
        };
        Ok(self)
    }

    /// The memslots.
    pub fn memslots(&self) -> &Arc<Memslots> {
        &self.memslots
    }

    /// Creates vCPU `index`.
    #[expect(clippy::disallowed_methods, reason = "a vCPU takes a reference to its memory here")]
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
