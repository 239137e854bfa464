//! The registers with which the first vCPU enters a kernel. The others wait for INIT and SIPI, as
//! on hardware.

use kvm_bindings::{Msrs, kvm_msr_entry, kvm_regs, kvm_segment, kvm_sregs};
use kvm_ioctls::VcpuFd;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryError};

use super::boot::{Entry, GDT, PAGE_TABLES};
use super::cpuid::Setup;
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};

/// CR0: protected mode, extension type (always 1), paging. CR4: physical address extension.
const CR0_PE: u64 = 1;
const CR0_ET: u64 = 1 << 4;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
/// EFER: long mode enabled, long mode active.
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
/// The bit of RFLAGS that is always 1.
const RFLAGS: u64 = 1 << 1;
/// Selectors. Linux's boot protocol requires code at 0x10 and data at 0x18.
const CODE: u16 = 0x10;
const DATA: u16 = 0x18;
const TASK: u16 = 0x20;
/// Segment types (Intel SDM vol. 3, 3.4.5.1 and 3.5).
const EXECUTE_READ: u8 = 0xb;
const READ_WRITE: u8 = 0x3;
const BUSY_TSS: u8 = 0xb;
/// IA32_MTRR_DEF_TYPE: MTRRs enabled, write-back by default.
const MSR_MTRR_DEF_TYPE: u32 = 0x2ff;
const MTRR_ON_WRITE_BACK: u64 = 1 << 11 | 6;
/// IA32_MISC_ENABLE: fast string operations, which firmware enables.
const MSR_MISC_ENABLE: u32 = 0x1a0;
const FAST_STRINGS: u64 = 1;

/// Why the first vCPU's registers could not be set.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An ioctl failed.
    #[error("{0} of the first vCPU's boot state: {1}")]
    Ioctl(&'static str, #[source] kvm_ioctls::Error),
    /// There is no RAM for the GDT.
    #[error("the boot GDT cannot be written; use more")]
    Memory(#[from] GuestMemoryError),
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        match self {
            Self::Ioctl(..) => ErrorOrigin::HOST,
            Self::Memory(_) => ErrorOrigin::user(Field::Memory),
        }
    }
}

/// Sets the initial state of a vCPU that boots a kernel, on its own thread. `entry` is for the vCPU
/// that enters the kernel.
///
/// # Errors
/// KVM refuses, or guest memory has no RAM at [`GDT`].
pub fn begin<M: GuestMemoryBackend>(
    vcpu: &VcpuFd,
    setup: &Setup,
    entry: Option<(&Entry, &M)>,
) -> Result<(), Error> {
    vcpu.set_cpuid2(setup).map_err(|e| Error::Ioctl("KVM_SET_CPUID2", e))?;
    set_msrs(vcpu)?;
    entry.map_or(Ok(()), |(entry, memory)| set(vcpu, entry, memory))
}

/// Makes `vcpu` start at `entry`, and writes the GDT of its segments.
///
/// # Errors
/// KVM refuses, or guest memory has no RAM at [`GDT`].
fn set<M: GuestMemoryBackend>(vcpu: &VcpuFd, entry: &Entry, memory: &M) -> Result<(), Error> {
    let (regs, sregs) = {
        let sregs = vcpu.get_sregs().map_err(|e| Error::Ioctl("KVM_GET_SREGS", e))?;
        registers(entry, sregs)
    };
    let gdt = [0, 0, descriptor(&sregs.cs), descriptor(&sregs.ds), descriptor(&sregs.tr)];
    memory.write_slice(gdt.map(u64::to_le_bytes).as_flattened(), GuestAddress(GDT))?;
    vcpu.set_sregs(&sregs).map_err(|e| Error::Ioctl("KVM_SET_SREGS", e))?;
    vcpu.set_regs(&regs).map_err(|e| Error::Ioctl("KVM_SET_REGS", e))
}

/// Sets the MSRs that firmware would set, for every vCPU. MSRs that KVM lacks are skipped.
///
/// # Errors
/// KVM refuses the call itself.
fn set_msrs(vcpu: &VcpuFd) -> Result<(), Error> {
    let pairs = [(MSR_MISC_ENABLE, FAST_STRINGS), (MSR_MTRR_DEF_TYPE, MTRR_ON_WRITE_BACK)];
    for (index, data) in pairs {
        let entry = kvm_msr_entry { index, data, ..Default::default() };
        let msrs = Msrs::from_entries(&[entry]).expect("one entry fits");
        vcpu.set_msrs(&msrs).map_err(|e| Error::Ioctl("KVM_SET_MSRS", e))?;
    }
    Ok(())
}

/// The registers as text for a failure's report.
pub fn describe(vcpu: &VcpuFd) -> String {
    let (Ok(r), Ok(s)) = (vcpu.get_regs(), vcpu.get_sregs()) else {
        return "registers: KVM cannot read them".into();
    };
    let segment = |g: &kvm_segment| {
        format!("{:04x} base {:x} limit {:x} dpl {} l {}", g.selector, g.base, g.limit, g.dpl, g.l)
    };
    format!(
        "rip {:016x} rsp {:016x} rflags {:08x}\n\
         rax {:016x} rbx {:016x} rcx {:016x} rdx {:016x}\n\
         rsi {:016x} rdi {:016x} rbp {:016x} r8  {:016x}\n\
         r9  {:016x} r10 {:016x} r11 {:016x} r12 {:016x}\n\
         r13 {:016x} r14 {:016x} r15 {:016x}\n\
         cr0 {:08x} cr2 {:016x} cr3 {:016x} cr4 {:08x} efer {:04x}\n\
         cs {}\nss {}\ngdt {:x}+{:x} idt {:x}+{:x}",
        r.rip,
        r.rsp,
        r.rflags,
        r.rax,
        r.rbx,
        r.rcx,
        r.rdx,
        r.rsi,
        r.rdi,
        r.rbp,
        r.r8,
        r.r9,
        r.r10,
        r.r11,
        r.r12,
        r.r13,
        r.r14,
        r.r15,
        s.cr0,
        s.cr2,
        s.cr3,
        s.cr4,
        s.efer,
        segment(&s.cs),
        segment(&s.ss),
        s.gdt.base,
        s.gdt.limit,
        s.idt.base,
        s.idt.limit
    )
}

/// The registers for `entry`. `sregs` are the vCPU's after reset.
fn registers(entry: &Entry, mut sregs: kvm_sregs) -> (kvm_regs, kvm_sregs) {
    let long = matches!(entry, Entry::Long { .. });
    let flat = |selector, type_, code: bool| kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector,
        type_,
        present: 1,
        dpl: 0,
        db: u8::from(!(code && long)),
        s: 1,
        l: u8::from(code && long),
        g: 1,
        ..Default::default()
    };
    let data = flat(DATA, READ_WRITE, false);
    sregs.cs = flat(CODE, EXECUTE_READ, true);
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.tr = kvm_segment { limit: 0x67, selector: TASK, type_: BUSY_TSS, present: 1, ..Default::default() };
    (sregs.gdt.base, sregs.gdt.limit) = (GDT, 5 * 8 - 1);
    (sregs.idt.base, sregs.idt.limit) = (0, 0);
    sregs.cr0 = CR0_PE | CR0_ET;
    sregs.cr4 = 0;
    let mut regs = kvm_regs { rflags: RFLAGS, ..Default::default() };
    match *entry {
        Entry::Long { rip, rsi } => {
            sregs.cr0 |= CR0_PG;
            sregs.cr3 = PAGE_TABLES;
            sregs.cr4 = CR4_PAE;
            sregs.efer = EFER_LME | EFER_LMA;
            (regs.rip, regs.rsi) = (rip, rsi);
        }
        Entry::Protected { eip, eax, ebx } => {
            (regs.rip, regs.rax, regs.rbx) = (eip.into(), eax.into(), ebx.into());
        }
    }
    (regs, sregs)
}

/// A segment's descriptor in a GDT (Intel SDM vol. 3, figure 3-8).
fn descriptor(segment: &kvm_segment) -> u64 {
    let limit = u64::from(if segment.g == 1 { segment.limit >> 12 } else { segment.limit });
    let bit = |value: u8, at: u32| u64::from(value) << at;
    (limit & 0xffff)
        | (segment.base & 0xff_ffff) << 16
        | bit(segment.type_, 40)
        | bit(segment.s, 44)
        | bit(segment.dpl, 45)
        | bit(segment.present, 47)
        | (limit >> 16 & 0xf) << 48
        | bit(segment.avl, 52)
        | bit(segment.l, 53)
        | bit(segment.db, 54)
        | bit(segment.g, 55)
        | (segment.base >> 24 & 0xff) << 56
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_those_that_linux_uses() {
        let (_, long) = registers(&Entry::Long { rip: 0, rsi: 0 }, kvm_sregs::default());
        assert_eq!(descriptor(&long.cs), 0x00af_9b00_0000_ffff);
        assert_eq!(descriptor(&long.ds), 0x00cf_9300_0000_ffff);
        let (regs, protected) = registers(&Entry::Protected { eip: 1, eax: 2, ebx: 3 }, kvm_sregs::default());
        assert_eq!(descriptor(&protected.cs), 0x00cf_9b00_0000_ffff);
        assert_eq!(descriptor(&protected.tr), 0x0000_8b00_0000_0067);
        assert_eq!((regs.rip, regs.rax, regs.rbx, regs.rflags, protected.cr0), (1, 2, 3, 2, 0x11));
    }
}
