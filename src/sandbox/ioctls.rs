//! The ioctl requests that threads may make, under the names of the kernel's headers
//! (include/uapi/linux/kvm.h). Apart from `ASSEMBLY`, requests that create a machine are missing:
//! that is over before the sandbox is entered.

use kvm_bindings::*;
use vmm_sys_util::ioctl::{_IOC_NONE, _IOC_READ, _IOC_WRITE, ioctl_expr};

#[cfg(target_arch = "x86_64")]
use vellum_sys::cr3_cache;

const fn io(number: u32) -> u32 {
    ioctl_expr(_IOC_NONE, KVMIO, number, 0) as u32
}

const fn ior<T>(number: u32) -> u32 {
    ioctl_expr(_IOC_READ, KVMIO, number, size_of::<T>() as u32) as u32
}

const fn iow<T>(number: u32) -> u32 {
    ioctl_expr(_IOC_WRITE, KVMIO, number, size_of::<T>() as u32) as u32
}

const fn iowr<T>(number: u32) -> u32 {
    ioctl_expr(_IOC_READ | _IOC_WRITE, KVMIO, number, size_of::<T>() as u32) as u32
}

/// KVM_RUN. It comes first because it is the most frequent request.
pub const RUN: &[u32] = &[io(0x80)];

/// A vCPU's state. Its own thread reads and writes it, and main restores it.
pub const VCPU_STATE: &[u32] = &[
    ior::<kvm_regs>(0x81),        // KVM_GET_REGS
    iow::<kvm_regs>(0x82),        // KVM_SET_REGS
    ior::<kvm_mp_state>(0x98),    // KVM_GET_MP_STATE
    iow::<kvm_mp_state>(0x99),    // KVM_SET_MP_STATE
    iow::<kvm_guest_debug>(0x9b), // KVM_SET_GUEST_DEBUG
    ior::<kvm_vcpu_events>(0x9f), // KVM_GET_VCPU_EVENTS
    iow::<kvm_vcpu_events>(0xa0), // KVM_SET_VCPU_EVENTS
    iow::<kvm_one_reg>(0xab),     // KVM_GET_ONE_REG
    iow::<kvm_one_reg>(0xac),     // KVM_SET_ONE_REG
    io(0xce),                     // KVM_GET_STATS_FD
];

/// Like `VCPU_STATE`, for this architecture only.
#[cfg(target_arch = "x86_64")]
pub const VCPU_STATE_HERE: &[u32] = &[
    ior::<kvm_sregs>(0x83),                // KVM_GET_SREGS
    iow::<kvm_sregs>(0x84),                // KVM_SET_SREGS
    ior::<kvm_sregs2>(0xcc),               // KVM_GET_SREGS2
    iow::<kvm_sregs2>(0xcd),               // KVM_SET_SREGS2
    iowr::<kvm_translation>(0x85),         // KVM_TRANSLATE
    iowr::<kvm_msrs>(0x88),                // KVM_GET_MSRS
    iow::<kvm_msrs>(0x89),                 // KVM_SET_MSRS
    ior::<kvm_fpu>(0x8c),                  // KVM_GET_FPU
    iow::<kvm_fpu>(0x8d),                  // KVM_SET_FPU
    ior::<kvm_lapic_state>(0x8e),          // KVM_GET_LAPIC
    iow::<kvm_lapic_state>(0x8f),          // KVM_SET_LAPIC
    iow::<kvm_cpuid2>(0x90),               // KVM_SET_CPUID2
    iowr::<kvm_cpuid2>(0x91),              // KVM_GET_CPUID2
    io(0x9a),                              // KVM_NMI
    ior::<kvm_debugregs>(0xa1),            // KVM_GET_DEBUGREGS
    iow::<kvm_debugregs>(0xa2),            // KVM_SET_DEBUGREGS
    io(0xa2),                              // KVM_SET_TSC_KHZ
    io(0xa3),                              // KVM_GET_TSC_KHZ
    ior::<kvm_xsave>(0xa4),                // KVM_GET_XSAVE
    iow::<kvm_xsave>(0xa5),                // KVM_SET_XSAVE
    ior::<kvm_xsave>(0xcf),                // KVM_GET_XSAVE2
    ior::<kvm_xcrs>(0xa6),                 // KVM_GET_XCRS
    iow::<kvm_xcrs>(0xa7),                 // KVM_SET_XCRS
    io(0xad),                              // KVM_KVMCLOCK_CTRL
    iow::<kvm_device_attr>(0xe1),          // KVM_SET_DEVICE_ATTR: the TSC offset
    iow::<kvm_device_attr>(0xe2),          // KVM_GET_DEVICE_ATTR
    iowr::<kvm_nested_state>(0xbe),        // KVM_GET_NESTED_STATE
    ior::<cr3_cache::Raw>(cr3_cache::GET), // KVM_GET_CR3_CACHE
    iow::<cr3_cache::Raw>(cr3_cache::SET), // KVM_SET_CR3_CACHE
];

/// Like `VCPU_STATE`, for this architecture only.
#[cfg(target_arch = "aarch64")]
pub const VCPU_STATE_HERE: &[u32] = &[
    iow::<kvm_vcpu_init>(0xae), // KVM_ARM_VCPU_INIT
    iowr::<kvm_reg_list>(0xb0), // KVM_GET_REG_LIST
];

/// The requests of devices while a guest runs, on any thread.
pub const DEVICES: &[u32] = &[
    iow::<kvm_irq_level>(0x61), // KVM_IRQ_LINE
    iow::<kvm_msi>(0xa5),       // KVM_SIGNAL_MSI
    // A guest changes the routes when it programs its I/O APIC.
    iow::<kvm_irq_routing>(0x6a), // KVM_SET_GSI_ROUTING
    // A guest that moves a BAR moves the doorbells in it.
    iow::<kvm_ioeventfd>(0x79), // KVM_IOEVENTFD
];

/// A vCPU's request when its dirty ring is full.
pub const RINGS: &[u32] = &[
    io(0xc7), // KVM_RESET_DIRTY_RINGS
];

/// The requests of a migration's additional connections before they read pages.
pub const CLEARS: &[u32] = &[
    iowr::<kvm_clear_dirty_log>(0xc0), // KVM_CLEAR_DIRTY_LOG
];

/// Dirty logs, memslots, which change while a guest runs, and the state of their pages.
pub const MEMORY: &[u32] = &[
    iow::<kvm_dirty_log>(0x42),                // KVM_GET_DIRTY_LOG
    iowr::<kvm_clear_dirty_log>(0xc0),         // KVM_CLEAR_DIRTY_LOG
    iow::<kvm_userspace_memory_region>(0x46),  // KVM_SET_USER_MEMORY_REGION
    iow::<kvm_userspace_memory_region2>(0x49), // KVM_SET_USER_MEMORY_REGION2
    // PAGEMAP_SCAN (include/uapi/linux/fs.h): finds the pages that were ever touched.
    ioctl_expr(_IOC_READ | _IOC_WRITE, 0x66, 16, 96) as u32,
];

/// Cloning a disk's open file for a snapshot (FICLONE).
pub const CLONES: &[u32] = &[libc::FICLONE as u32];

/// A virtual machine's state and its interrupts and doorbells.
pub const MACHINE: &[u32] = &[
    io(0x03),                     // KVM_CHECK_EXTENSION
    iow::<kvm_enable_cap>(0xa3),  // KVM_ENABLE_CAP: how the dirty log is cleared
    iow::<kvm_irqfd>(0x76),       // KVM_IRQFD
    iow::<kvm_ioeventfd>(0x79),   // KVM_IOEVENTFD
    iow::<kvm_clock_data>(0x7b),  // KVM_SET_CLOCK
    ior::<kvm_clock_data>(0x7c),  // KVM_GET_CLOCK
    iow::<kvm_device_attr>(0xe1), // KVM_SET_DEVICE_ATTR
    iow::<kvm_device_attr>(0xe2), // KVM_GET_DEVICE_ATTR
];

/// Like `MACHINE`, for this architecture only.
#[cfg(target_arch = "x86_64")]
pub const MACHINE_HERE: &[u32] = &[
    iowr::<kvm_irqchip>(0x62),   // KVM_GET_IRQCHIP
    ior::<kvm_irqchip>(0x63),    // KVM_SET_IRQCHIP
    ior::<kvm_pit_state2>(0x9f), // KVM_GET_PIT2
    iow::<kvm_pit_state2>(0xa0), // KVM_SET_PIT2
];

/// Like `MACHINE`, for this architecture only.
#[cfg(target_arch = "aarch64")]
pub const MACHINE_HERE: &[u32] = &[];

/// The requests that create a machine, for a process that does so after the sandbox is active.
pub const ASSEMBLY: &[u32] = &[
    io(0x01), // KVM_CREATE_VM
    io(0x04), // KVM_GET_VCPU_MMAP_SIZE
    io(0x41), // KVM_CREATE_VCPU
    io(0x60), // KVM_CREATE_IRQCHIP
];

/// Like `ASSEMBLY`, for this architecture only.
#[cfg(target_arch = "x86_64")]
pub const ASSEMBLY_HERE: &[u32] = &[
    iowr::<kvm_msr_list>(0x02),  // KVM_GET_MSR_INDEX_LIST
    iowr::<kvm_cpuid2>(0x05),    // KVM_GET_SUPPORTED_CPUID
    io(0x47),                    // KVM_SET_TSS_ADDR
    iow::<kvm_pit_config>(0x77), // KVM_CREATE_PIT2
];

/// Like `ASSEMBLY`, for this architecture only.
#[cfg(target_arch = "aarch64")]
pub const ASSEMBLY_HERE: &[u32] = &[
    ior::<kvm_vcpu_init>(0xaf),      // KVM_ARM_PREFERRED_TARGET
    iowr::<kvm_create_device>(0xe0), // KVM_CREATE_DEVICE: the interrupt controller
];

/// Memory whose pages are loaded on demand.
pub const FAULTS: &[u32] = vellum_sys::uffd::REQUESTS;

/// Restoring the terminal, which a dying process does from any thread. rustix uses TCSETS2, and
/// TCSETS if the kernel refuses that; the C libraries use TCSETS. A terminal that another process
/// group has in the foreground is not restored.
pub const TERMINAL_RESTORE: &[u32] = &[
    libc::TCSETS as u32,
    libc::TCSETS2 as u32,
    libc::TCGETS as u32,
    libc::TCGETS2 as u32,
    libc::TIOCGPGRP as u32,
];

/// The event loop's requests on the terminal and on descriptors.
pub const DESCRIPTORS: &[u32] = &[
    libc::TIOCGWINSZ as u32,
    libc::FIONBIO as u32,
    libc::FIONREAD as u32,
    // The offloads of the guest's network driver are known only when it runs.
    libc::TUNSETOFFLOAD as u32,
];
