//! A machine: KVM's VM, its memory and its vCPUs.
//!
//! Start with [`Vm`]; [`memory`] maps what it is given, [`vcpu`] runs it, [`lifecycle`] says how it ends.

pub mod counters;
pub mod exits;
pub mod lifecycle;
pub mod ring;
pub mod vcpu;

use std::sync::Arc;

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Kvm, VcpuFd, VmFd};

use crate::fault::{Blame, Fault, Field};
use crate::host;
use crate::memory::{self, Memory, Slot};
use ring::DirtyRing;

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
    /// More vCPUs than KVM has.
    #[error("{asked} is out of range: this KVM has from 1 to {most}")]
    Cpus {
        /// What was asked.
        asked: usize,
        /// `KVM_CAP_MAX_VCPUS`.
        most: usize,
    },
}

impl Fault for Error {
    fn blame(&self) -> Blame {
        match self {
            Self::Kvm(error) => error.blame(),
            Self::Ioctl { .. } => Blame::HOST,
            Self::Memory(error) => error.blame(),
            Self::Vcpu(error) => error.blame(),
            Self::Ring(error) => error.blame(),
            Self::Cpus { .. } => Blame::user(Field::Cpus),
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
    pub dirty_ring: Option<DirtyRing>,
}

impl Vm {
    /// Makes a VM over `memory`.
    pub fn new(kvm: &Kvm, memory: Memory) -> Result<Self, Error> {
        Self::with_dirty_ring(kvm, memory, None)
    }

    /// Makes a VM over `memory` whose vCPUs have dirty rings of so many entries: KVM wants to know before it has
    /// memslots (for the backup bitmap) and vCPUs (for the rings).
    pub fn with_dirty_ring(kvm: &Kvm, memory: Memory, entries: Option<u32>) -> Result<Self, Error> {
        let fd = host::kvm::create_vm(kvm)?;
        let dirty_ring = entries.map(|entries| ring::enable(&fd, entries)).transpose()?;
        let vm = Self { fd: Arc::new(fd), memory, dirty_ring };
        for slot in &vm.memory.slots {
            vm.set_slot(slot, 0)?;
        }
        Ok(vm)
    }

    /// Adds, moves or changes the flags of a memslot, whose host memory must stay mapped as long as the VM.
    pub fn set_slot(&self, slot: &Slot, flags: u32) -> Result<(), Error> {
        self.set_region(kvm_userspace_memory_region {
            slot: slot.id,
            flags,
            guest_phys_addr: slot.gpa,
            memory_size: slot.len,
            userspace_addr: slot.hva,
        })
    }

    /// Deletes a memslot, and with it what its dirty log holds.
    pub fn delete_slot(&self, id: u32) -> Result<(), Error> {
        self.set_region(kvm_userspace_memory_region { slot: id, ..Default::default() })
    }

    fn set_region(&self, region: kvm_userspace_memory_region) -> Result<(), Error> {
        // SAFETY: the caller keeps the host memory mapped as long as the VM; `Memory` and the workload's slot do, and
        // guest memory is only ever accessed as such.
        ioctl("KVM_SET_USER_MEMORY_REGION", unsafe { self.fd.set_user_memory_region(region) })
    }

    /// Makes vCPU `index`.
    pub fn create_vcpu(&self, index: usize) -> Result<VcpuFd, Error> {
        ioctl("KVM_CREATE_VCPU", self.fd.create_vcpu(index as u64))
    }
}
