// SPDX-License-Identifier: GPL-2.0-only
/*
 * arm64's processors, and what of KVM for arm64 the harness does not compile.
 *
 * A processor walks KVM's stage-2 page tables. Its TLB has entries of several VMIDs, one for each
 * page table, and it takes permission faults from its TLB, as the architecture permits. It does not
 * set access flags, so KVM gets such faults too. TLB invalidations are broadcast and are complete
 * when they return, unless KVM asks for those of its own processor. kvm_handle_guest_abort() handles
 * faults.
 *
 * In setups with L2, the guest has a nested guest whose stage-2 page table, which the guest made,
 * maps each page at its own address. KVM has a shadow of that table for each vCPU.
 */
#include <linux/kvm_host.h>
#include <linux/version.h>
#include <asm/esr.h>
#include <asm/kvm_arm.h>
#include <asm/kvm_asm.h>
#include <asm/kvm_emulate.h>
#include <asm/kvm_mmu.h>
#include <asm/kvm_pgtable.h>

#include "explore.h"
#include "host.h"
#include "vm.h"

/* The host's limit, and what the VM has: three levels of tables, of which each has few entries */
#define MAX_IPA_BITS 40
#define IPA_BITS 36
#define STANDS_FOR(symbol, function) asm(".globl " #symbol "\n.set " #symbol ", " #function)

/* ---- The host's processor ---- */

/* It has VHE, no optional feature of memory, and caches that KVM must clean. */
__used bool ex_has_cap(unsigned long cap)
{
#ifdef ARM64_ALWAYS_SYSTEM
	if (cap == ARM64_ALWAYS_SYSTEM || cap == ARM64_ALWAYS_BOOT)
		return true;
#endif
	return cap == ARM64_HAS_VIRT_HOST_EXTN;
}
/* 5.10 has a static key for each. */
struct static_key_false ex_cap_keys[ARM64_NCAPS] = { [ARM64_HAS_VIRT_HOST_EXTN].key.enabled = { 1 } };
struct static_key_false ex_caps_ready = { .key.enabled = { 1 } };
STANDS_FOR(cpu_hwcap_keys, ex_cap_keys);
STANDS_FOR(arm64_const_caps_ready, ex_caps_ready);
unsigned long ex_cpucaps[BITS_TO_LONGS(ARM64_NCAPS)];
STANDS_FOR(system_cpucaps, ex_cpucaps);
STANDS_FOR(cpu_hwcaps, ex_cpucaps);
u64 ex_va_bits = 48;
STANDS_FOR(vabits_actual, ex_va_bits);
s64 ex_memstart;
STANDS_FOR(memstart_addr, ex_memstart);
unsigned long ex_icache_flags;
STANDS_FOR(__icache_flags, ex_icache_flags);

/* arm64 has it in assembly. */
__used static void *x_memset64(u64 *p, u64 value, unsigned long n)
{
	while (n--)
		p[n] = value;
	return p;
}
STANDS_FOR(memset64, x_memset64);

/* The tasks share one thread, so what is done here happens at once. */
static unsigned long get(volatile void *p, int size)
{
	switch (size) {
	case 1: return *(volatile u8 *)p;
	case 2: return *(volatile u16 *)p;
	case 4: return *(volatile u32 *)p;
	default: return *(volatile u64 *)p;
	}
}

static void put(volatile void *p, unsigned long value, int size)
{
	switch (size) {
	case 1: *(volatile u8 *)p = value; break;
	case 2: *(volatile u16 *)p = value; break;
	case 4: *(volatile u32 *)p = value; break;
	default: *(volatile u64 *)p = value;
	}
}

unsigned long ex_xchg(volatile void *p, unsigned long new, int size)
{
	unsigned long old = get(p, size);

	put(p, new, size);
	return old;
}

unsigned long ex_cmpxchg(volatile void *p, unsigned long old, unsigned long new, int size)
{
	unsigned long was = get(p, size);

	if (size < 8)
		old &= (1ul << 8 * size) - 1;
	if (was == old)
		put(p, new, size);
	return was;
}

long ex_fetch(volatile void *p, int op, long i, int size)
{
	unsigned long old = get(p, size);

	put(p, op == '+' ? old + i : op == '-' ? old - i : op == '&' ? old & i : op == '|' ? old | i :
	    op == '^' ? old ^ i : old & ~i, size);
	return size == 4 ? (int)old : (long)old;
}

__used static u64 x_read_ftr(u32 id)
{
	/* Addresses of 40 bits, pages of 4K */
	return id == SYS_ID_AA64MMFR0_EL1 ? 2 : 0;
}
STANDS_FOR(read_sanitised_ftr_reg, x_read_ftr);

__used static u32 x_ipa_limit(void)
{
	return MAX_IPA_BITS;
}
STANDS_FOR(get_kvm_ipa_limit, x_ipa_limit);
STANDS_FOR(kvm_get_pa_bits, x_ipa_limit);

__used static int x_true(void)
{
	return 1;
}
STANDS_FOR(pfn_is_map_memory, x_true);
STANDS_FOR(pfn_valid, x_true);

const char *lacking_operation(unsigned long address)
{
	return NULL;
}

/* ---- TLBs ---- */

#define ALL_LEVELS INT_MAX

/* `level` is the architecture's: 3 for a page. */
static void invalidate(struct processor *cpu, struct kvm_s2_mmu *mmu, gfn_t first, gfn_t last, int level)
{
	struct entry *entry;

	cpu->invalidated++;
	for (entry = cpu->tlb; entry < cpu->tlb + TLB_ENTRIES; entry++) {
		gfn_t end = entry->gfn + (1ul << 9 * (entry->level - 1)) - 1;

		if (entry->level && entry->tag == (unsigned long)mmu && entry->gfn <= last && end >= first &&
		    (level == ALL_LEVELS || level == 4 - entry->level))
			entry->level = 0;
	}
}

static void invalidate_all(struct kvm_s2_mmu *mmu, gfn_t first, gfn_t last, int level)
{
	int id;

	point(AT_YIELD, NULL, __builtin_return_address(0));
	for (id = 0; id < VCPUS; id++)
		invalidate(&cpus[id], mmu, first, last, level);
}

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 6, 0)
/* 0 stands for any level. */
#define LEVEL(level) ((level) ?: ALL_LEVELS)
#else
#define LEVEL(level) ((level) >= 0 && (level) <= 3 ? (level) : ALL_LEVELS)
#endif

void __kvm_tlb_flush_vmid(struct kvm_s2_mmu *mmu)
{
	say("the TLBs lose what they have of a VMID");
	invalidate_all(mmu, 0, -1ul, ALL_LEVELS);
}

void __kvm_tlb_flush_vmid_ipa(struct kvm_s2_mmu *mmu, phys_addr_t ipa, int level)
{
	say("the TLBs lose what they have of gfn %lx", (long)(ipa >> PAGE_SHIFT));
	invalidate_all(mmu, ipa >> PAGE_SHIFT, ipa >> PAGE_SHIFT, LEVEL(level));
}

void __kvm_tlb_flush_vmid_ipa_nsh(struct kvm_s2_mmu *mmu, phys_addr_t ipa, int level)
{
	if (raw_smp_processor_id() < VCPUS)
		invalidate(&cpus[raw_smp_processor_id()], mmu, ipa >> PAGE_SHIFT, ipa >> PAGE_SHIFT, LEVEL(level));
}

void __kvm_tlb_flush_vmid_range(struct kvm_s2_mmu *mmu, phys_addr_t start, unsigned long pages)
{
	say("the TLBs lose what they have from gfn %lx on, %lx pages", (long)(start >> PAGE_SHIFT), pages);
	invalidate_all(mmu, start >> PAGE_SHIFT, (start >> PAGE_SHIFT) + pages - 1, ALL_LEVELS);
}

/* Caches are not simulated. */
__used static void x_nothing(void)
{
}
STANDS_FOR(dcache_clean_inval_poc, x_nothing);
STANDS_FOR(__flush_dcache_area, x_nothing);
STANDS_FOR(invalidate_icache_range, x_nothing);

/* ---- What arm.c does for the VM and its vCPUs, as far as memory is concerned ---- */

static struct kvm_s2_mmu *shadows[VCPUS];

__used static int x_init_vm(struct kvm *kvm, unsigned long type)
{
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 0, 0)
	/* kvm_arm_setup_stage2() */
	kvm->arch.vtcr = VTCR_EL2_T0SZ(IPA_BITS) | VTCR_EL2_LVLS_TO_SL0(stage2_pgtable_levels(IPA_BITS));
	return kvm_init_stage2_mmu(kvm, &kvm->arch.mmu);
#else
	return kvm_init_stage2_mmu(kvm, &kvm->arch.mmu, IPA_BITS);
#endif
}
STANDS_FOR(kvm_arch_init_vm, x_init_vm);

__used static struct kvm *x_alloc_vm(void)
{
	return (struct kvm *)harness_alloc(sizeof(struct kvm));
}
STANDS_FOR(kvm_arch_alloc_vm, x_alloc_vm);

__used static int x_vcpu_create(struct kvm_vcpu *vcpu)
{
	vcpu->arch.hw_mmu = &vcpu->kvm->arch.mmu;
	vcpu->arch.mmu_page_cache.gfp_zero = __GFP_ZERO;
	return 0;
}
STANDS_FOR(kvm_arch_vcpu_create, x_vcpu_create);

__used static void x_vcpu_load(struct kvm_vcpu *vcpu, int cpu)
{
	vcpu->cpu = cpu;
}
STANDS_FOR(kvm_arch_vcpu_load, x_vcpu_load);
STANDS_FOR(kvm_arch_vcpu_put, x_nothing);
STANDS_FOR(kvm_arch_vcpu_postcreate, x_nothing);
STANDS_FOR(kvm_arch_sync_dirty_log, x_nothing);

__used static int x_zero(void)
{
	return 0;
}
STANDS_FOR(kvm_arch_init, x_zero);
/* kvm_init() has each processor call kvm_arch_check_processor_compat(), the first VM hardware_enable(). */
STANDS_FOR(smp_call_function_single, x_zero);
STANDS_FOR(on_each_cpu, x_zero);
STANDS_FOR(kvm_arch_vcpu_precreate, x_zero);
STANDS_FOR(kvm_arch_enable_virtualization_cpu, x_zero);
STANDS_FOR(kvm_arch_hardware_enable, x_zero);
STANDS_FOR(kvm_arch_hardware_setup, x_zero);
STANDS_FOR(kvm_vm_ioctl_check_extension, x_zero);
STANDS_FOR(kvm_arch_vcpu_runnable, x_zero);

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 6, 0)
__used static void x_flush_memslot(struct kvm *kvm)
{
	kvm_flush_remote_tlbs(kvm);
}
STANDS_FOR(kvm_arch_flush_remote_tlbs_memslot, x_flush_memslot);
#endif

__used static int x_should_kick(struct kvm_vcpu *vcpu)
{
	return kvm_vcpu_exiting_guest_mode(vcpu) == IN_GUEST_MODE;
}
STANDS_FOR(kvm_arch_vcpu_should_kick, x_should_kick);

__used static void x_send_reschedule(int id)
{
	kick(id);
}
STANDS_FOR(arch_smp_send_reschedule, x_send_reschedule);
STANDS_FOR(smp_send_reschedule, x_send_reschedule);

const char *arch_lacks(const struct setup *of)
{
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 3, 0)
	if (of->eager)
		return "split of blocks when the log is switched on";
#endif
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 11, 0)
	if (of->l2)
		return "shadow stage-2 page tables";
#endif
	return NULL;
}

void arch_init(void)
{
}

void arch_created(void)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 3, 0)
	if (setup.eager)
		vm->arch.mmu.split_page_chunk_size = PMD_SIZE;
#endif
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 11, 0)
	int id;

	if (!setup.l2)
		return;
	vm->arch.nested_mmus = harness_alloc(PAGE_SIZE);
	/* Each vCPU has two, of which the second is not in use. */
	for (id = 0; id < 2 * VCPUS; id++) {
		struct kvm_s2_mmu *mmu = harness_alloc(sizeof(*mmu));

		vm->arch.nested_mmus[id] = mmu;
		vm->arch.nested_mmus_size++;
		if (kvm_init_stage2_mmu(vm, mmu, IPA_BITS))
			fail("a shadow page table is not made");
		if (id & 1)
			continue;
		mmu->tlb_vttbr = 0;
		mmu->nested_stage2_enabled = true;
		shadows[id / 2] = mmu;
	}
#endif
}

#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 11, 0)
/* The guest's table for L2 maps each page at its own address, by blocks or by pages. */
int __wrap_kvm_walk_nested_s2(struct kvm_vcpu *vcpu, phys_addr_t gipa, struct kvm_s2_trans *result)
{
	result->output = gipa;
	result->block_size = gipa >> PAGE_SHIFT < 0x600 ? PMD_SIZE : PAGE_SIZE;
	result->level = gipa >> PAGE_SHIFT < 0x600 ? 2 : 3;
	result->readable = result->writable = true;
	result->esr = 0;
	return 0;
}
#endif

/* ---- A processor ---- */

void run_begins(struct kvm_vcpu *vcpu)
{
	vcpu_load(vcpu);
}

void run_ends(struct kvm_vcpu *vcpu)
{
	vcpu_put(vcpu);
}

void leave_guest(struct kvm_vcpu *vcpu)
{
	cpu_of(vcpu)->in_guest = false;
	cpu_of(vcpu)->exits++;
	vcpu->mode = OUTSIDE_GUEST_MODE;
	released(__builtin_return_address(0));
}

/* kvm_arch_vcpu_ioctl_run() with the requests that concern memory */
bool enter_guest(struct kvm_vcpu *vcpu)
{
	struct processor *cpu = cpu_of(vcpu);

#ifdef KVM_CAP_DIRTY_LOG_RING
	if (kvm_request_pending(vcpu)) {
		cpu->ring_full = kvm_dirty_ring_check_request(vcpu);
		if (cpu->ring_full)
			return false;
	}
#endif
	cpu->kicked = false;
	smp_store_mb(vcpu->mode, IN_GUEST_MODE);
	point(AT_READ, &vcpu->requests, __builtin_return_address(0));
	if (READ_ONCE(vcpu->requests)) {
		vcpu->mode = OUTSIDE_GUEST_MODE;
		return false;
	}
	cpu->in_guest = true;
	return true;
}

#define VALID 1
#define TABLE 2
#define READABLE BIT(6)
#define WRITABLE BIT(7)
#define ACCESSED BIT(10)

#define TRANSLATION_FAULT 0x04
#define ACCESS_FAULT 0x08
#define PERMISSION_FAULT 0x0c

/* The syndrome of a fault at a level */
static enum access fault(u64 *esr, bool write, int kind, int level)
{
	*esr = (u64)ESR_ELx_EC_DABT_LOW << ESR_ELx_EC_SHIFT | ESR_ELx_IL | (write ? ESR_ELx_WNR : 0) | kind | level;
	return FAULT;
}

/*
 * The TLB gets an entry. What it has of the same addresses must have gone before the table's entry
 * became valid (break-before-make). The permissions of an entry may change while it is valid.
 */
static struct entry *fill(struct processor *cpu, struct kvm_s2_mmu *mmu, gfn_t gfn, int level, u64 pte)
{
	struct entry new = {
		.gfn = gfn & -(1ul << 9 * (3 - level)),
		.pfn = (pte & GENMASK_ULL(47, 12)) >> PAGE_SHIFT,
		.tag = (unsigned long)mmu,
		.level = 4 - level,
		.writable = !!(pte & WRITABLE),
	};
	struct entry *entry;

	for (entry = cpu->tlb; entry < cpu->tlb + TLB_ENTRIES; entry++) {
		u8 larger = max(entry->level, new.level);

		if (entry->level && entry->tag == new.tag && (entry->gfn ^ new.gfn) >> 9 * (larger - 1) == 0 &&
		    (entry->level != new.level || entry->pfn != new.pfn))
			fail("a TLB gets an entry for gfn %lx and has another one", (long)gfn);
	}
	entry = &cpu->tlb[cpu->next++ % TLB_ENTRIES];
	*entry = new;
	return entry;
}

enum access access_memory(struct kvm_vcpu *vcpu, gfn_t gfn, bool write, u64 *esr, unsigned long *pfn)
{
	struct kvm_s2_mmu *mmu = vcpu->arch.hw_mmu;
	struct processor *cpu = cpu_of(vcpu);
	struct entry *hit = tlb_find(vcpu, gfn, (unsigned long)mmu);
	unsigned int invalidated = cpu->invalidated;
	int level = mmu->pgt->start_level;
	u64 *table = (u64 *)mmu->pgt->pgd, pte;

	cpu->hit = hit;
	if (hit && write && !hit->writable)
		return fault(esr, write, PERMISSION_FAULT, 4 - hit->level);
	if (!hit) {
		for (;; level++) {
			int shift = 9 * (3 - level);

			/* An invalidation waits for walks that have begun. */
			point(AT_READ, &cpu->kicked, __builtin_return_address(0));
			if (cpu->kicked || cpu->invalidated != invalidated)
				return INTERRUPTED;
			kernel_check_access(table, __builtin_return_address(0));
			/* The first table may be as large as several. */
			pte = table[level == mmu->pgt->start_level ? gfn >> shift : gfn >> shift & 511];
			if (!(pte & VALID))
				return fault(esr, write, TRANSLATION_FAULT, level);
			if (level == 3 || !(pte & TABLE))
				break;
			table = __va(pte & GENMASK_ULL(47, 12));
		}
		if (!(pte & ACCESSED))
			return fault(esr, write, ACCESS_FAULT, level);
		if (!(pte & READABLE))
			fail("a page is mapped that the guest may not read");
		hit = fill(cpu, mmu, gfn, level, pte);
		if (write && !hit->writable)
			return fault(esr, write, PERMISSION_FAULT, level);
	}
	/* The TLB entry is used until it is invalidated or an interrupt is taken. */
	point(AT_READ, &cpu->kicked, __builtin_return_address(0));
	if (cpu->kicked || !hit->level)
		return INTERRUPTED;
	*pfn = (hit->pfn & -(1ul << 9 * (hit->level - 1))) + (gfn & ((1ul << 9 * (hit->level - 1)) - 1));
	return DONE;
}

int handle_fault(struct kvm_vcpu *vcpu, gfn_t gfn, u64 esr)
{
	bool moving = going[slot_of(gfn)];
	unsigned int before = moves;
	int ret;

	vcpu->arch.fault.esr_el2 = esr;
	vcpu->arch.fault.far_el2 = 0;
	/* From 6.16 on, bit 63 says that the address is valid. */
	vcpu->arch.fault.hpfar_el2 = BIT(63) | gfn << 4;
	ret = kvm_handle_guest_abort(vcpu);

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 0, 0)
	/* It looks for the memslot twice. KVM_RUN fails if that has gone in between. */
	if (ret == -EFAULT && (moving || moves != before)) {
		cpu_of(vcpu)->emulated = true;
		return 1;
	}
#endif
	return ret;
}

/* A guest's access to an address without a memslot, i.e. to a device */
int io_mem_abort(struct kvm_vcpu *vcpu, phys_addr_t ipa)
{
	if (!going[slot_of(ipa >> PAGE_SHIFT)])
		fail("KVM takes memory for a device, gfn %lx", (long)(ipa >> PAGE_SHIFT));
	cpu_of(vcpu)->emulated = true;
	return 1;
}

/* KVM_ARM_VCPU_INIT, by a thread of a vCPU, on a host without FEAT_S2FWB */
static void init_again(struct kvm_vcpu *vcpu, struct op op)
{
	stage2_unmap_vm(vm);
}

void arch_op(struct kvm_vcpu *vcpu, struct op op)
{
	if (op.code == DO_VCPU_INIT)
		return outside(vcpu, init_again, op);
	/* L2 has a VMID of its own. */
	vcpu->arch.hw_mmu = shadows[vcpu->vcpu_id];
	guest_access(vcpu, gfn_of(op.page), true, memory_reached);
	vcpu->arch.hw_mmu = &vm->arch.mmu;
}
