//! A debugger's view of a vCPU, and KVM's debug mode.
//!
//! The registers are those of GDB's features `org.gnu.gdb.i386.core`, `sse` and `segments`, in that
//! order. The system registers follow; GDB shows them by name. Linux's GDB scripts use `$gs_base`
//! to find per-CPU variables.

use kvm_bindings::*;
use kvm_ioctls::VcpuFd;

use crate::arch::watch::{Access, Watch};
use crate::vm::vcpu::SLOTS;

/// Whether a KVM whose KVM_SET_GUEST_DEBUG takes these flags can block interrupts during a single
/// step.
pub fn blocks_interrupts(flags: u32) -> bool {
    flags & KVM_GUESTDBG_BLOCKIRQ != 0
}

/// Why debugging is not supported; None if it is.
pub const IMPOSSIBLE: Option<&str> = None;
/// The breakpoint instruction: INT3.
pub const BREAKPOINT: &[u8] = &[0xcc];
/// The size of GDB's register block in bytes.
pub const BYTES: usize = 608;
/// The target description for GDB.
pub const DESCRIPTION: &str = include_str!("debug.xml");

/// IA32_KERNEL_GS_BASE.
const MSR_KERNEL_GS_BASE: u32 = 0xc000_0102;

/// The registers of a vCPU.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Registers {
    regs: kvm_regs,
    sregs: kvm_sregs,
    fpu: kvm_fpu,
    kernel_gs_base: u64,
}

/// A position in GDB's register block, for copying values to or from it.
struct Cursor<'a> {
    bytes: &'a mut [u8; BYTES],
    at: usize,
    /// Whether values are copied from the block.
    load: bool,
}

impl Cursor<'_> {
    fn bytes(&mut self, value: &mut [u8]) {
        let place = &mut self.bytes[self.at..self.at + value.len()];
        if self.load {
            value.copy_from_slice(place)
        } else {
            place.copy_from_slice(value)
        }
        self.at += value.len();
    }

    fn u64(&mut self, value: &mut u64) {
        let mut bytes = value.to_le_bytes();
        self.bytes(&mut bytes);
        *value = u64::from_le_bytes(bytes);
    }

    /// Copies the lower half of a value. The upper half stays.
    fn low(&mut self, value: &mut u64) {
        let mut bytes = (*value as u32).to_le_bytes();
        self.bytes(&mut bytes);
        *value = *value & !0xffff_ffff | u64::from(u32::from_le_bytes(bytes));
    }

    /// Copies a 16-bit value in a 32-bit field.
    fn word(&mut self, value: &mut u16) {
        let mut wide = u64::from(*value);
        self.low(&mut wide);
        *value = wide as u16;
    }

    /// Copies a read-only value.
    fn shown(&mut self, mut value: u64) {
        self.low(&mut value);
    }
}

/// The processor's full tag word, from the abridged one, in which a bit says that a register is in
/// use (Intel SDM vol. 1, 10.5.1.1).
fn tags(abridged: u8) -> u16 {
    (0..8).map(|at| if abridged >> at & 1 == 1 { 0 } else { 3 << (at * 2) }).sum()
}

impl Registers {
    /// Reads a vCPU's registers, on its thread.
    ///
    /// # Errors
    /// KVM's error.
    pub fn read(vcpu: &VcpuFd) -> Result<Self, kvm_ioctls::Error> {
        let mut msrs = msr(0);
        // Zero if KVM lacks this MSR.
        let kernel_gs_base = vcpu.get_msrs(&mut msrs).map_or(0, |_| msrs.as_slice()[0].data);
        let (regs, sregs, fpu) = (vcpu.get_regs()?, vcpu.get_sregs()?, vcpu.get_fpu()?);
        Ok(Self { regs, sregs, fpu, kernel_gs_base })
    }

    /// Writes the registers that differ from `before`, on the vCPU's thread.
    ///
    /// # Errors
    /// KVM refuses a value.
    pub fn write(&self, vcpu: &VcpuFd, before: &Self) -> Result<(), kvm_ioctls::Error> {
        if self.sregs != before.sregs {
            vcpu.set_sregs(&self.sregs)?;
        }
        if self.regs != before.regs {
            vcpu.set_regs(&self.regs)?;
        }
        if self.fpu != before.fpu {
            vcpu.set_fpu(&self.fpu)?;
        }
        if self.kernel_gs_base != before.kernel_gs_base {
            vcpu.set_msrs(&msr(self.kernel_gs_base))?;
        }
        Ok(())
    }

    /// The address of the current instruction.
    pub fn pc(&self) -> u64 {
        self.regs.rip
    }

    /// The registers in GDB's form.
    pub fn to_bytes(&self) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        let mut this = *self;
        this.walk(Cursor { bytes: &mut bytes, at: 0, load: false });
        bytes
    }

    /// A copy with the values in `bytes`. Selectors stay, because they mean nothing without
    /// descriptors. The FPU's tags and pointers stay too.
    #[must_use]
    pub fn with_bytes(&self, bytes: &[u8; BYTES]) -> Self {
        let mut this = *self;
        this.walk(Cursor { bytes: &mut bytes.clone(), at: 0, load: true });
        this
    }

    /// Copies each register in GDB's order.
    fn walk(&mut self, mut cursor: Cursor<'_>) {
        let Self { regs, sregs, fpu, kernel_gs_base } = self;
        let general = [
            &mut regs.rax,
            &mut regs.rbx,
            &mut regs.rcx,
            &mut regs.rdx,
            &mut regs.rsi,
            &mut regs.rdi,
            &mut regs.rbp,
            &mut regs.rsp,
            &mut regs.r8,
            &mut regs.r9,
            &mut regs.r10,
            &mut regs.r11,
            &mut regs.r12,
            &mut regs.r13,
            &mut regs.r14,
            &mut regs.r15,
            &mut regs.rip,
        ];
        general.into_iter().for_each(|register| cursor.u64(register));
        cursor.low(&mut regs.rflags);
        for segment in [sregs.cs, sregs.ss, sregs.ds, sregs.es, sregs.fs, sregs.gs] {
            cursor.shown(segment.selector.into());
        }
        fpu.fpr.iter_mut().for_each(|register| cursor.bytes(&mut register[..10]));
        cursor.word(&mut fpu.fcw);
        cursor.word(&mut fpu.fsw);
        cursor.shown(tags(fpu.ftwx).into());
        // Selectors and offsets of the last FPU instruction and operand. 64-bit code has no
        // selectors.
        cursor.shown(0);
        cursor.shown(fpu.last_ip);
        cursor.shown(0);
        cursor.shown(fpu.last_dp);
        cursor.shown(fpu.last_opcode.into());
        fpu.xmm.iter_mut().for_each(|register| cursor.bytes(register));
        let mut mxcsr = fpu.mxcsr.to_le_bytes();
        cursor.bytes(&mut mxcsr);
        fpu.mxcsr = u32::from_le_bytes(mxcsr);
        let system = [
            &mut sregs.fs.base,
            &mut sregs.gs.base,
            kernel_gs_base,
            &mut sregs.cr0,
            &mut sregs.cr2,
            &mut sregs.cr3,
            &mut sregs.cr4,
            &mut sregs.cr8,
            &mut sregs.efer,
        ];
        system.into_iter().for_each(|register| cursor.u64(register));
        debug_assert_eq!(cursor.at, BYTES);
    }
}

fn msr(data: u64) -> Msrs {
    let entry = kvm_msr_entry { index: MSR_KERNEL_GS_BASE, data, ..Default::default() };
    Msrs::from_entries(&[entry]).expect("one fits")
}

/// Translates the linear address `at` with a vCPU's page tables, on its thread. `None` if it is not
/// mapped.
pub fn physical(vcpu: &VcpuFd, at: u64) -> Option<u64> {
    vcpu.translate_gva(at).ok().filter(|found| found.valid != 0).map(|found| found.physical_address)
}

/// A hardware breakpoint, if the processor supports it: 1, 2, 4 or 8 aligned bytes, and 1 byte for
/// instructions.
pub fn watch(at: u64, bytes: u64, access: Access) -> Option<Watch> {
    let possible = matches!(bytes, 1 | 2 | 4 | 8) && at.is_multiple_of(bytes);
    (possible && (access != Access::Execute || bytes == 1)).then_some(Watch { at, bytes, access })
}

/// KVM's debug mode of a vCPU with these hardware breakpoints. `planted` enables software
/// breakpoints. `step` requests a single step, without interrupts if this KVM `blocks` them. With
/// none of these, debugging is disabled.
pub fn control(watches: &[Option<Watch>; SLOTS], planted: bool, step: bool, blocks: bool) -> kvm_guest_debug {
    let mut debug = kvm_guest_debug::default();
    if !planted && !step && watches.iter().all(Option::is_none) {
        return debug;
    }
    debug.control = KVM_GUESTDBG_ENABLE | if planted { KVM_GUESTDBG_USE_SW_BP } else { 0 };
    if step {
        debug.control |= KVM_GUESTDBG_SINGLESTEP | if blocks { KVM_GUESTDBG_BLOCKIRQ } else { 0 };
    }
    // DR7, Intel SDM vol. 3, 17.2.4: bit 10 is always 1; two enable bits and four bits of length
    // and access for each breakpoint.
    let mut dr7 = 1 << 10;
    for (at, watch) in watches.iter().enumerate() {
        let Some(watch) = watch else { continue };
        debug.control |= KVM_GUESTDBG_USE_HW_BP;
        debug.arch.debugreg[at] = watch.at;
        let access = match watch.access {
            Access::Execute => 0,
            Access::Write => 1,
            Access::Any => 3,
        };
        let len = match watch.bytes {
            1 => 0,
            2 => 1,
            4 => 3,
            _ => 2,
        };
        dr7 |= 2 << (at * 2) | (access | len << 2) << (16 + at * 4);
    }
    debug.arch.debugreg[7] = dr7;
    debug
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_come_back_as_gdb_has_them() {
        let mut registers = Registers::default();
        (registers.regs.rax, registers.regs.rip, registers.regs.rflags) = (1, 0xffff_ffff_8100_0000, 0x246);
        (registers.sregs.gs.base, registers.sregs.cr3, registers.sregs.cs.selector) = (7, 0x1000, 0x10);
        (registers.fpu.xmm[3], registers.fpu.mxcsr, registers.fpu.fcw) = ([5; 16], 0x1f80, 0x37f);
        registers.kernel_gs_base = 9;
        let bytes = registers.to_bytes();
        assert_eq!(registers.with_bytes(&bytes), registers);
        // As in GDB's own descriptions: rip after the general registers, cs after eflags, the bases
        // at the end.
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        assert_eq!(
            (word(0), word(128), word(136) & 0xffff_ffff, word(140) & 0xffff_ffff),
            (1, registers.regs.rip, 0x246, 0x10)
        );
        assert_eq!((word(BYTES - 64), word(BYTES - 56), word(BYTES - 32)), (7, 9, 0x1000));
        let mut other = bytes;
        other[0] = 2;
        other[140] = 0x33;
        let changed = registers.with_bytes(&other);
        assert_eq!((changed.regs.rax, changed.sregs.cs.selector), (2, 0x10), "a selector stays");
    }

    /// GDB counts by the description: a missing or extra register would shift all that follow.
    #[test]
    fn the_description_is_as_long_as_the_registers() {
        let sizes = DESCRIPTION.split("bitsize=\"").skip(1).map(|rest| rest.split('"').next().unwrap());
        let bits: usize = sizes.map(|bits| bits.parse::<usize>().unwrap()).sum();
        let flags = ["i386_eflags", "i386_mxcsr"].map(|id| {
            let size = DESCRIPTION.split(&format!("<flags id=\"{id}\" size=\"")).nth(1).unwrap();
            size.split('"').next().unwrap().parse::<usize>().unwrap()
        });
        assert_eq!((bits / 8, flags), (BYTES, [4, 4]));
    }

    #[test]
    fn breakpoints_become_debug_registers() {
        for (at, bytes, access) in [
            (1, 2, Access::Write),
            (0, 3, Access::Any),
            (0, 16, Access::Write),
            (0, 4, Access::Execute),
            (0, 0, Access::Any),
        ] {
            assert_eq!(watch(at, bytes, access), None, "{at} {bytes} {access:?}");
        }
        let watches = [
            watch(0x1000, 1, Access::Execute),
            None,
            watch(0x2008, 8, Access::Write),
            watch(0x3004, 4, Access::Any),
        ];
        let debug = control(&watches, true, false, true);
        assert_eq!(debug.arch.debugreg[..4], [0x1000, 0, 0x2008, 0x3004]);
        // Bits 1, 5 and 7 enable them; execute 1, write 8 (0b1001), any 4 (0b1111).
        assert_eq!(debug.arch.debugreg[7], 0xf900_04a2);
        assert_eq!(debug.control, KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_USE_SW_BP | KVM_GUESTDBG_USE_HW_BP);
        assert_eq!(control(&[None; SLOTS], false, false, true), kvm_guest_debug::default());
        let step = control(&[None; SLOTS], false, true, true).control;
        assert_eq!(step & (KVM_GUESTDBG_USE_HW_BP | KVM_GUESTDBG_USE_SW_BP), 0);
        assert_eq!(
            step & (KVM_GUESTDBG_SINGLESTEP | KVM_GUESTDBG_BLOCKIRQ),
            KVM_GUESTDBG_SINGLESTEP | KVM_GUESTDBG_BLOCKIRQ
        );
        assert_eq!(tags(0b0000_0001), 0xfffc);
    }
}
