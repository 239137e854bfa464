//! The floor under `vellum run`: the fewest KVM calls that bring one vCPU with 128 MiB to its first doorbell.
//!
//! No arguments, no threads, no checks beyond `expect`. Prints when the doorbell rang, in nanoseconds on CLOCK_MONOTONIC,
//! and is compared with `vellum test startup` by the benchmark `startup`.

use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_regs, kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit};

const RAM: usize = 128 << 20;
const SLOT: u64 = 0xc000_0000;
const DOORBELL: u64 = 0xd000_0000;

fn map(len: usize) -> *mut u64 {
    // SAFETY: a fresh anonymous mapping disturbs nothing.
    let at = unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
    };
    assert_ne!(at, libc::MAP_FAILED);
    at.cast()
}

#[expect(clippy::disallowed_methods, reason = "its memory lives until the process ends")]
fn main() {
    let kvm = Kvm::new().expect("/dev/kvm");
    assert_eq!(kvm.get_api_version(), 12);
    let (ram, own) = (map(RAM), map(4 * 4096));
    let vm = kvm.create_vm().expect("KVM_CREATE_VM");
    for (slot, gpa, len, hva) in [(0, 0, RAM, ram), (1, SLOT, 4 * 4096, own)] {
        let region = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: gpa,
            memory_size: len as u64,
            userspace_addr: hva as u64,
        };
        // SAFETY: both mappings live until the process ends.
        unsafe { vm.set_user_memory_region(region) }.expect("KVM_SET_USER_MEMORY_REGION");
    }
    // mov [rdi], eax
    // PML4 -> PDPT -> PD; the slot and the doorbell as 2 MiB pages.
    for (word, value) in [
        (0, 0x0789),
        (512, (SLOT + 2 * 4096) | 0x27),
        (1024 + 3, (SLOT + 3 * 4096) | 0x27),
        (1536, SLOT | 0xe7),
        (1536 + 128, DOORBELL | 0xe7),
    ] {
        // SAFETY: the words lie in the four pages mapped above, which the guest does not use yet.
        unsafe { own.add(word).write(value) };
    }
    let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).expect("KVM_GET_SUPPORTED_CPUID");
    let mut vcpu = vm.create_vcpu(0).expect("KVM_CREATE_VCPU");
    vcpu.set_cpuid2(&cpuid).expect("KVM_SET_CPUID2");
    let mut sregs = vcpu.get_sregs().expect("KVM_GET_SREGS");
    let flat = kvm_segment { limit: u32::MAX, present: 1, s: 1, g: 1, dpl: 3, ..Default::default() };
    sregs.cs = kvm_segment { selector: 11, type_: 11, l: 1, ..flat };
    let data = kvm_segment { selector: 19, type_: 3, db: 1, ..flat };
    (sregs.ss, sregs.ds, sregs.es, sregs.fs, sregs.gs) = (data, data, data, data, data);
    (sregs.cr0, sregs.cr3, sregs.cr4, sregs.efer) = (0x8001_0033, SLOT + 4096, 0x620, 0xd00);
    vcpu.set_sregs(&sregs).expect("KVM_SET_SREGS");
    let regs = kvm_regs { rip: SLOT, rdi: DOORBELL, rflags: 2, ..Default::default() };
    vcpu.set_regs(&regs).expect("KVM_SET_REGS");
    match vcpu.run().expect("KVM_RUN") {
        VcpuExit::MmioWrite(DOORBELL, _) => {
            println!("{}", vellum::sys::clock::monotonic().as_nanos());
        }
        exit => panic!("{exit:?}"),
    }
}
