//! A vCPU in a core dump: `struct elf_prstatus` (include/linux/elfcore.h), from which crash(8) and
//! GDB take its registers.

use kvm_bindings::{kvm_regs, kvm_sregs};
use kvm_ioctls::VcpuFd;

use super::paging::{ROOT, Tables};

/// Why core dumps are not supported; None if they are.
pub const IMPOSSIBLE: Option<&str> = None;
/// EM_X86_64.
pub const MACHINE: u16 = 62;
/// The address of Linux's image (`__START_KERNEL_map`, Documentation/arch/x86/x86_64/mm.rst).
pub const IMAGE: u64 = 0xffff_ffff_8000_0000;

/// CR0.PG, CR4.LA57, EFER.LMA.
const PAGING: u64 = 1 << 31;
const FIVE_LEVELS: u64 = 1 << 12;
const LONG_MODE: u64 = 1 << 10;
/// With page-table isolation the kernel's root table is the first of two pages
/// (arch/x86/include/asm/pgtable.h, PTI_PGTABLE_SWITCH_BIT).
const USERS: u64 = 1 << 12;

/// The size of `struct elf_prstatus`, and the offsets of its PID and registers.
const PRSTATUS: usize = 336;
const PID: usize = 32;
const REGISTERS: usize = 112;

/// The registers of a vCPU.
#[derive(Clone, Copy, Debug, Default)]
pub struct Core {
    regs: kvm_regs,
    sregs: kvm_sregs,
}

impl Core {
    /// Reads a vCPU's registers, on its thread.
    ///
    /// # Errors
    /// KVM's error.
    pub fn read(vcpu: &VcpuFd) -> Result<Self, kvm_ioctls::Error> {
        Ok(Self { regs: vcpu.get_regs()?, sregs: vcpu.get_sregs()? })
    }

    /// The page tables that it may be using. For a vCPU in user space, the kernel's are beside
    /// them.
    pub fn tables(&self) -> Vec<Tables> {
        let Self { sregs, .. } = self;
        if sregs.cr0 & PAGING == 0 || sregs.efer & LONG_MODE == 0 {
            return Vec::new();
        }
        let levels = if sregs.cr4 & FIVE_LEVELS != 0 { 5 } else { 4 };
        let root = sregs.cr3 & ROOT;
        let roots = [root, root & !USERS];
        let distinct = if root & USERS == 0 { 1 } else { 2 };
        roots[..distinct].iter().map(|root| Tables { root: *root, levels }).collect()
    }

    /// `struct elf_prstatus` of vCPU `index`.
    pub fn prstatus(&self, index: usize) -> Vec<u8> {
        let Self { regs: r, sregs: s } = self;
        let selector = |segment: &kvm_bindings::kvm_segment| u64::from(segment.selector);
        // struct user_regs_struct.
        let registers = [
            r.r15,
            r.r14,
            r.r13,
            r.r12,
            r.rbp,
            r.rbx,
            r.r11,
            r.r10,
            r.r9,
            r.r8,
            r.rax,
            r.rcx,
            r.rdx,
            r.rsi,
            r.rdi,
            r.rax,
            r.rip,
            selector(&s.cs),
            r.rflags,
            r.rsp,
            selector(&s.ss),
            s.fs.base,
            s.gs.base,
            selector(&s.ds),
            selector(&s.es),
            selector(&s.fs),
            selector(&s.gs),
        ];
        let mut status = vec![0; PRSTATUS];
        // PIDs start at 1: readers treat PID 0 as an idle vCPU.
        status[PID..PID + 4].copy_from_slice(&(index as u32 + 1).to_le_bytes());
        for (at, register) in registers.iter().enumerate() {
            status[REGISTERS + at * 8..][..8].copy_from_slice(&register.to_le_bytes());
        }
        status
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_are_where_readers_look_for_them() {
        let mut core = Core::default();
        (core.regs.rip, core.regs.rsp, core.sregs.gs.base) = (1, 2, 3);
        let status = core.prstatus(4);
        let word = |at: usize| u64::from_le_bytes(status[at..at + 8].try_into().unwrap());
        // Offsets in struct elf_prstatus that readers use: rip 16, rsp 19, gs_base 22.
        assert_eq!(
            (status.len(), word(112 + 16 * 8), word(112 + 19 * 8), word(112 + 22 * 8)),
            (336, 1, 2, 3)
        );
        assert_eq!(status[32], 5);
    }

    #[test]
    fn tables_are_those_of_64_bit_paging() {
        let mut core = Core::default();
        assert!(core.tables().is_empty());
        (core.sregs.cr0, core.sregs.efer, core.sregs.cr3) = (PAGING | 1, LONG_MODE, 0x3025);
        let tables = |root, levels| Tables { root, levels };
        assert_eq!(core.tables(), [tables(0x3000, 4), tables(0x2000, 4)]);
        (core.sregs.cr3, core.sregs.cr4) = (0x4000, FIVE_LEVELS);
        assert_eq!(core.tables(), [tables(0x4000, 5)]);
    }
}
