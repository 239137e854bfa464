//! The floor under `vellum run --kernel`: the KVM calls that Vellum makes for a kernel of a few bytes with 128 MiB and a
//! split interrupt controller, in one thread, with no checks beyond `expect`.
//!
//! The guest's first byte on the serial port goes to standard output; the benchmark `boot` takes the time until then.

use std::io::Write;

use kvm_bindings::{
    KVM_CAP_SPLIT_IRQCHIP, KVM_CAP_TSC_DEADLINE_TIMER, KVM_MAX_CPUID_ENTRIES, Msrs, kvm_enable_cap,
    kvm_msr_entry, kvm_regs, kvm_segment, kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VcpuExit};
use vmm_sys_util::eventfd::EventFd;

const RAM: usize = 128 << 20;
const CODE: usize = 0x10_0000;
const TABLES: usize = 0x9000;

#[expect(clippy::disallowed_methods, reason = "its memory lives until the process ends")]
fn main() {
    let kvm = Kvm::new().expect("/dev/kvm");
    assert_eq!(kvm.get_api_version(), 12);
    // SAFETY: a fresh anonymous mapping disturbs nothing.
    let ram = unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        libc::mmap(std::ptr::null_mut(), RAM, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
    };
    assert_ne!(ram, libc::MAP_FAILED);
    // SAFETY: the mapping is that long, lives until the process ends, and no guest uses it yet.
    let memory = unsafe { std::slice::from_raw_parts_mut(ram.cast::<u8>(), RAM) };
    // mov dx, 0x3f8; mov al, 'V'; out dx, al
    memory[CODE..][..7].copy_from_slice(&[0x66, 0xba, 0xf8, 0x03, 0xb0, b'V', 0xee]);
    // PML4, PDPT, and one page directory whose first entry is a page of 2 MiB.
    for (at, entry) in [(0, TABLES as u64 + 0x1003), (0x1000, TABLES as u64 + 0x2003), (0x2000, 0x83)] {
        memory[TABLES + at..][..8].copy_from_slice(&entry.to_le_bytes());
    }

    let vm = kvm.create_vm().expect("KVM_CREATE_VM");
    let region = kvm_userspace_memory_region {
        memory_size: RAM as u64,
        userspace_addr: ram as u64,
        ..Default::default()
    };
    // SAFETY: the mapping lives until the process ends.
    unsafe { vm.set_user_memory_region(region) }.expect("KVM_SET_USER_MEMORY_REGION");
    vm.set_tss_address(0xfffb_d000).expect("KVM_SET_TSS_ADDR");
    let mut split = kvm_enable_cap { cap: KVM_CAP_SPLIT_IRQCHIP, ..Default::default() };
    split.args[0] = 24;
    vm.enable_cap(&split).expect("KVM_CAP_SPLIT_IRQCHIP");
    let irq = EventFd::new(0).expect("eventfd");
    vm.register_irqfd(&irq, 4).expect("KVM_IRQFD");
    assert!(vm.check_extension_raw(KVM_CAP_TSC_DEADLINE_TIMER.into()) > 0);
    let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).expect("KVM_GET_SUPPORTED_CPUID");
    let mut vcpu = vm.create_vcpu(0).expect("KVM_CREATE_VCPU");
    vcpu.set_cpuid2(&cpuid).expect("KVM_SET_CPUID2");
    for (index, data) in [(0x1a0, 1), (0x2ff, 1 << 11 | 6)] {
        let entry = kvm_msr_entry { index, data, ..Default::default() };
        vcpu.set_msrs(&Msrs::from_entries(&[entry]).expect("one entry")).expect("KVM_SET_MSRS");
    }
    let mut sregs = vcpu.get_sregs().expect("KVM_GET_SREGS");
    let flat = kvm_segment { limit: u32::MAX, present: 1, s: 1, g: 1, ..Default::default() };
    sregs.cs = kvm_segment { selector: 0x10, type_: 11, l: 1, ..flat };
    let data = kvm_segment { selector: 0x18, type_: 3, db: 1, ..flat };
    (sregs.ss, sregs.ds, sregs.es, sregs.fs, sregs.gs) = (data, data, data, data, data);
    (sregs.cr0, sregs.cr3, sregs.cr4, sregs.efer) = (0x8000_0011, TABLES as u64, 0x20, 0x500);
    vcpu.set_sregs(&sregs).expect("KVM_SET_SREGS");
    let regs = kvm_regs { rip: CODE as u64, rflags: 2, ..Default::default() };
    vcpu.set_regs(&regs).expect("KVM_SET_REGS");
    match vcpu.run().expect("KVM_RUN") {
        VcpuExit::IoOut(0x3f8, byte) => std::io::stdout().write_all(byte).expect("standard output"),
        exit => panic!("{exit:?}"),
    }
}
