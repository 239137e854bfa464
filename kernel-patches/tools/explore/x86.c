// SPDX-License-Identifier: GPL-2.0-only
/*
 * x86's processors, the vendor module, and page tables of the guest that KVM shadows.
 *
 * A processor enters the guest like vcpu_enter_guest(), and sets accessed and dirty bits.
 * kvm_mmu_page_fault() handles its faults. With shadow paging the guest's page tables map each page
 * at its own guest physical address.
 */
#include <linux/kvm_host.h>
#include <linux/version.h>
#include <asm/vmx.h>

#include "mmu.h"
#include "mmu/mmu_internal.h"
#include "mmu/spte.h"
/* KVM of 5.10 has it elsewhere. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(5, 16, 0)
#include "mmu/page_track.h"
#else
#include <asm/kvm_page_track.h>
#endif
#include "x86.h"

#include "explore.h"
#include "host.h"
#include "vm.h"

/* ---- The vendor module: a kvm_amd, or a kvm_intel with EPT, as far as the MMU uses it ---- */

static void flush_tlb(struct kvm_vcpu *vcpu)
{
	say("vCPU %d: flushes its TLB", vcpu->vcpu_id);
	memset(cpu_of(vcpu)->tlb, 0, sizeof(cpu_of(vcpu)->tlb));
}

static void flush_tlb_address(struct kvm_vcpu *vcpu, gva_t address)
{
	struct entry *entry;

	for (entry = cpu_of(vcpu)->tlb; entry < cpu_of(vcpu)->tlb + TLB_ENTRIES; entry++)
		if (entry->level && entry->gfn == (address >> PAGE_SHIFT & -KVM_PAGES_PER_HPAGE(entry->level)))
			entry->level = 0;
}

#if LINUX_VERSION_CODE < KERNEL_VERSION(5, 16, 0)
#define OLD_KVM
#endif

static void load_mmu_pgd(struct kvm_vcpu *vcpu, hpa_t root, int level)
{
}

static void does_nothing(void)
{
}

static int returns_0(void)
{
	return 0;
}

#ifdef OLD_KVM
const char *lacking_operation(unsigned long address)
{
	return address ? NULL : "operation";
}

/* KVM calls these by their pointers. It asks whether there are those that log writes. */
static void vendor_init(void)
{
	kvm_x86_ops.vm_size = sizeof(struct kvm);
	kvm_x86_ops.tlb_flush_all = flush_tlb;
	kvm_x86_ops.tlb_flush_current = flush_tlb;
	kvm_x86_ops.tlb_flush_guest = flush_tlb;
	kvm_x86_ops.tlb_flush_gva = flush_tlb_address;
	kvm_x86_ops.load_mmu_pgd = (void *)load_mmu_pgd;
	kvm_x86_ops.get_mt_mask = (void *)returns_0;
	kvm_x86_ops.cache_reg = (void *)does_nothing;
	kvm_x86_ops.get_rflags = (void *)returns_0;
	kvm_x86_ops.get_cpl = (void *)returns_0;
}
#else
/* An operation that the harness lacks has an unmapped address. */
#define LACKING 0x70000000ul
static const char *op_names[256];

const char *lacking_operation(unsigned long address)
{
	unsigned long i = (address - LACKING) / 16;

	return address >= LACKING && i < ARRAY_SIZE(op_names) ? op_names[i] : NULL;
}

static void jump(char *from, unsigned long to)
{
	int distance = to - (unsigned long)from - 5;

	*from = 0xe9;
	memcpy(from + 1, &distance, 4);
}

static void vendor_init(void)
{
	int i = 0;

	kvm_x86_ops.vm_size = sizeof(struct kvm);
	kvm_x86_ops.flush_tlb_all = flush_tlb;
	kvm_x86_ops.flush_tlb_current = flush_tlb;
	kvm_x86_ops.flush_tlb_guest = flush_tlb;
	/* From 7.2 on it has a third argument. */
	kvm_x86_ops.flush_tlb_gva = (void *)flush_tlb_address;
	kvm_x86_ops.load_mmu_pgd = load_mmu_pgd;
	kvm_x86_ops.get_mt_mask = (void *)returns_0;
	kvm_x86_ops.cache_reg = (void *)does_nothing;
	kvm_x86_ops.get_rflags = (void *)returns_0;
/* As kvm_ops_update() of x86.c */
#define OPERATION(name, otherwise) \
	op_names[i] = #name; \
	jump((char *)&__SCT__kvm_x86_##name, (unsigned long)kvm_x86_ops.name ?: (otherwise)); \
	i++;
#define KVM_X86_OP(name) OPERATION(name, LACKING + 16 * i)
#define KVM_X86_OP_OPTIONAL(name) OPERATION(name, (unsigned long)does_nothing)
#define KVM_X86_OP_OPTIONAL_RET0(name) OPERATION(name, (unsigned long)returns_0)
#include <asm/kvm-x86-ops.h>
}
#endif

/* Replace those of x86.c, which also set up what does not concern guest memory */
int __wrap_kvm_arch_init_vm(struct kvm *kvm, unsigned long type)
{
#ifdef OLD_KVM
	INIT_LIST_HEAD(&kvm->arch.active_mmu_pages);
	INIT_LIST_HEAD(&kvm->arch.zapped_obsolete_pages);
	INIT_LIST_HEAD(&kvm->arch.lpage_disallowed_mmu_pages);
	kvm_page_track_init(kvm);
	kvm_mmu_init_vm(kvm);
	/* As kvm_mmu_init_tdp_mmu(), whose parameter is its own */
	if (setup.tdp_mmu) {
		kvm->arch.tdp_mmu_enabled = true;
		INIT_LIST_HEAD(&kvm->arch.tdp_mmu_roots);
		INIT_LIST_HEAD(&kvm->arch.tdp_mmu_pages);
	}
	return 0;
#else
	kvm->arch.vm_type = type;
#ifdef KVM_PRE_FAULT_MEMORY
	kvm->arch.pre_fault_allowed = true;
#endif
	kvm_page_track_init(kvm);
	return kvm_mmu_init_vm(kvm);
#endif
}

#ifdef OLD_KVM
int __wrap_kvm_arch_init(void *opaque)
{
	int ret = kvm_mmu_vendor_module_init();

	kvm_mmu_set_mask_ptes(PT_USER_MASK, PT_ACCESSED_MASK, PT_DIRTY_MASK, PT64_NX_MASK, 0, PT_PRESENT_MASK, 0, 0);
	/* As vmx_enable_tdp() */
	if (setup.ept) {
		kvm_mmu_set_mask_ptes(VMX_EPT_READABLE_MASK, setup.ad ? VMX_EPT_ACCESS_BIT : 0, setup.ad ? VMX_EPT_DIRTY_BIT : 0,
				      0, VMX_EPT_EXECUTABLE_MASK, 0, VMX_EPT_RWX_MASK, 0);
		kvm_mmu_set_mmio_spte_mask(VMX_EPT_MISCONFIG_WX_VALUE, 0);
	}
	return ret;
}

int __wrap_kvm_arch_hardware_setup(void *opaque)
{
	return 0;
}

int __wrap_kvm_arch_check_processor_compat(void *opaque)
{
	return 0;
}

int __wrap_kvm_arch_hardware_enable(void)
{
	return 0;
}

/* No thread looks for pages that could be huge again. */
int __wrap_kvm_mmu_post_init_vm(struct kvm *kvm)
{
	return 0;
}
#endif

int __wrap_kvm_arch_enable_virtualization_cpu(void)
{
	return 0;
}

int __wrap_kvm_arch_vcpu_precreate(struct kvm *kvm, unsigned int id)
{
	return 0;
}

int __wrap_kvm_arch_vcpu_create(struct kvm_vcpu *vcpu)
{
	bitmap_fill((unsigned long *)&vcpu->arch.regs_avail, 32);
	vcpu->arch.cr0 = X86_CR0_PE | X86_CR0_PG | X86_CR0_WP;
	vcpu->arch.cr4 = X86_CR4_PAE;
	vcpu->arch.efer = EFER_LMA | EFER_LME | EFER_NX;
	vcpu->arch.maxphyaddr = 46;
	vcpu->arch.cr3 = TABLES << PAGE_SHIFT;
	if (kvm_mmu_create(vcpu))
		return -ENOMEM;
#ifdef OLD_KVM
	vcpu->arch.cr3_lm_rsvd_bits = rsvd_bits(46, 63);
	kvm_init_mmu(vcpu, false);
#else
	kvm_init_mmu(vcpu);
#endif
	return 0;
}

void __wrap_kvm_arch_vcpu_postcreate(struct kvm_vcpu *vcpu)
{
}

void __wrap_kvm_arch_vcpu_load(struct kvm_vcpu *vcpu, int cpu)
{
	vcpu->cpu = cpu;
}

void __wrap_kvm_arch_vcpu_put(struct kvm_vcpu *vcpu)
{
}

static bool emulate_change(struct kvm_vcpu *vcpu, gfn_t gfn);

/* A guest's access to an address without a memslot, i.e. to a device, or to a page table */
int __wrap_x86_emulate_instruction(struct kvm_vcpu *vcpu, gpa_t gpa, int type, void *insn, int length)
{
	if (!emulate_change(vcpu, gpa >> PAGE_SHIFT) && !going[slot_of(gpa >> PAGE_SHIFT)] &&
	    !beyond_slot(gpa >> PAGE_SHIFT))
		fail("KVM emulates an access to memory, gfn %lx", (long)(gpa >> PAGE_SHIFT));
	cpu_of(vcpu)->emulated = true;
	return 1;
}

#ifdef OLD_KVM
const char *arch_lacks(const struct setup *of)
{
	/* L2 needs what nested_svm_init_mmu_context() of this KVM does. */
	if (of->nested)
		return "nested guests in this harness";
	return of->prefault ? "KVM_PRE_FAULT_MEMORY" : NULL;
}

void arch_init(void)
{
	kvm_mmu_x86_module_init();
	vendor_init();
	kvm_configure_mmu(setup.tdp, 4, PG_LEVEL_1G);
}

/* These have other names there. */
#define kvm_vcpu_srcu_read_lock(vcpu) ((vcpu)->srcu_idx = srcu_read_lock(&(vcpu)->kvm->srcu))
#define kvm_vcpu_srcu_read_unlock(vcpu) srcu_read_unlock(&(vcpu)->kvm->srcu, (vcpu)->srcu_idx)
#define ROOT(mmu) ((mmu)->root_hpa)
#define ROOT_LEVEL(mmu) ((mmu)->shadow_root_level)
#else
extern bool tdp_mmu_enabled;
#define ROOT(mmu) ((mmu)->root.hpa)
#define ROOT_LEVEL(mmu) ((mmu)->root_role.level)

const char *arch_lacks(const struct setup *of)
{
	return NULL;
}

void arch_init(void)
{
	/* The module's parameter, which kvm_mmu_x86_module_init() reads */
	tdp_mmu_enabled = setup.tdp_mmu;
	kvm_mmu_x86_module_init();
	kvm_mmu_vendor_module_init();
	if (setup.ept)
		/* Before 7.3 it also asks for execute-only mappings. */
		((void (*)(bool, bool))kvm_mmu_set_ept_masks)(setup.ad, true);
	vendor_init();
	eager_page_split = setup.eager;
	kvm_configure_mmu(setup.tdp, 4, 4, PG_LEVEL_1G);
	if (tdp_mmu_enabled != (setup.tdp && setup.tdp_mmu))
		fail("KVM %s the TDP MMU", tdp_mmu_enabled ? "uses" : "does not use");
}
#endif

static void tables_init(void);

void arch_created(void)
{
	int id;

	if (!has_tables())
		return;
	set_slot_of(TABLES_SLOT_ID, TABLES, TABLE_GFNS, 0);
	tables_init();
	/* The tables have been used on each vCPU, so they have shadows. */
	for (id = 0; id < VCPUS; id++)
		alone(id, (struct op){ DO_FOLLOW, 0 });
	if (!setup.tables_logged)
		return;
	/* These have none again. */
	set_slot_of(TABLES_SLOT_ID, TABLES, 0, 0);
	set_slot_of(TABLES_SLOT_ID, TABLES, TABLE_GFNS, 0);
}

void run_begins(struct kvm_vcpu *vcpu)
{
	vcpu_load(vcpu);
	kvm_vcpu_srcu_read_lock(vcpu);
}

void run_ends(struct kvm_vcpu *vcpu)
{
	kvm_vcpu_srcu_read_unlock(vcpu);
	vcpu_put(vcpu);
}

__used static void x_send_reschedule(int id)
{
	kick(id);
}
struct smp_ops ex_smp_ops = { .smp_send_reschedule = x_send_reschedule };
asm(".globl smp_ops\n.set smp_ops, ex_smp_ops");

void leave_guest(struct kvm_vcpu *vcpu)
{
	struct processor *cpu = cpu_of(vcpu);

	cpu->in_guest = false;
	cpu->exits++;
	vcpu->mode = OUTSIDE_GUEST_MODE;
	kvm_vcpu_srcu_read_lock(vcpu);
	released(__builtin_return_address(0));
}

/* vcpu_enter_guest() with the requests that concern the MMU */
bool enter_guest(struct kvm_vcpu *vcpu)
{
	struct processor *cpu = cpu_of(vcpu);

	if (kvm_request_pending(vcpu)) {
#ifdef OLD_KVM
		if (kvm_check_request(KVM_REQ_MMU_RELOAD, vcpu))
			kvm_mmu_unload(vcpu);
#else
		cpu->ring_full = kvm_dirty_ring_check_request(vcpu);
		if (cpu->ring_full)
			return false;
		if (kvm_check_request(KVM_REQ_MMU_FREE_OBSOLETE_ROOTS, vcpu))
			kvm_mmu_free_obsolete_roots(vcpu);
#endif
		if (kvm_check_request(KVM_REQ_MMU_SYNC, vcpu))
			kvm_mmu_sync_roots(vcpu);
		if (kvm_check_request(KVM_REQ_LOAD_MMU_PGD, vcpu))
			kvm_mmu_load_pgd(vcpu);
		if (kvm_check_request(KVM_REQ_TLB_FLUSH, vcpu)) {
			flush_tlb(vcpu);
			kvm_clear_request(KVM_REQ_TLB_FLUSH_CURRENT, vcpu);
		}
#ifdef OLD_KVM
		if (kvm_check_request(KVM_REQ_TLB_FLUSH_CURRENT, vcpu))
			flush_tlb(vcpu);
		if (kvm_check_request(KVM_REQ_TLB_FLUSH_GUEST, vcpu))
			flush_tlb(vcpu);
#else
		kvm_service_local_tlb_flush_requests(vcpu);
#endif
	}
	if (kvm_mmu_reload(vcpu))
		fail("kvm_mmu_reload() fails");
	cpu->kicked = false;
	smp_store_release(&vcpu->mode, IN_GUEST_MODE);
	kvm_vcpu_srcu_read_unlock(vcpu);
	smp_mb__after_srcu_read_unlock();
	point(AT_READ, &vcpu->requests, __builtin_return_address(0));
	if (READ_ONCE(vcpu->requests)) {
		vcpu->mode = OUTSIDE_GUEST_MODE;
		kvm_vcpu_srcu_read_lock(vcpu);
		return false;
	}
	cpu->in_guest = true;
	return true;
}

/*
 * With shadow paging a TLB does not know KVM's root: the tag is the guest's PCID, which does not
 * change.
 */
static hpa_t tlb_tag(struct kvm_vcpu *vcpu)
{
	return setup.tdp ? ROOT(vcpu->arch.mmu) : 0;
}

enum access access_memory(struct kvm_vcpu *vcpu, gfn_t gfn, bool write, u64 *code, unsigned long *pfn)
{
	struct processor *cpu = cpu_of(vcpu);
	struct entry *hit = tlb_find(vcpu, gfn, tlb_tag(vcpu));
	bool ad = !setup.ept || setup.ad;
	u64 writable = setup.ept ? VMX_EPT_WRITABLE_MASK : PT_WRITABLE_MASK;
	u64 present = setup.ept ? VMX_EPT_READABLE_MASK : PT_PRESENT_MASK;
	u64 accessed = setup.ept ? VMX_EPT_ACCESS_BIT : PT_ACCESSED_MASK;
	u64 dirty = setup.ept ? VMX_EPT_DIRTY_BIT : PT_DIRTY_MASK;
	u64 *sptep, spte, new;
	int level;

	cpu->hit = hit;
	*code = (write ? PFERR_WRITE_MASK : 0) | PFERR_USER_MASK;
	if (!hit || (write && (!hit->writable || !hit->dirty))) {
		sptep = __va(ROOT(vcpu->arch.mmu));
		for (level = ROOT_LEVEL(vcpu->arch.mmu);; level--) {
			if (cpu->kicked)
				return INTERRUPTED;
			sptep += (gfn >> 9 * (level - 1)) & 511;
			spte = read_entry(sptep);
			/* An entry for a device's address: a misconfiguration, or reserved bits */
			if (setup.ept ? (spte & 7) == VMX_EPT_MISCONFIG_WX_VALUE :
					(spte & present) && (spte & GENMASK_ULL(51, 46))) {
				*code = PFERR_RSVD_MASK;
				return FAULT;
			}
			if (!(spte & present))
				return FAULT;
			if (level == 1 || spte & PT_PAGE_SIZE_MASK)
				break;
			sptep = __va(spte & GENMASK_ULL(45, 12));
		}
		if (write && !(spte & writable)) {
			*code |= PFERR_PRESENT_MASK;
			/* A fault also removes the TLB entry. */
			if (hit)
				hit->level = 0;
			return FAULT;
		}
		new = spte | (ad ? accessed | (write ? dirty : 0) : 0);
		if (new != spte) {
			point(AT_ATOMIC, sptep, __builtin_return_address(0));
			if (*sptep != spte)
				return INTERRUPTED;
			*sptep = new;
		}
		if (!hit)
			hit = &cpu->tlb[cpu->next++ % TLB_ENTRIES];
		*hit = (struct entry){
			.gfn = gfn & -KVM_PAGES_PER_HPAGE(level),
			.pfn = (spte & GENMASK_ULL(45, 12)) >> PAGE_SHIFT,
			.tag = tlb_tag(vcpu),
			.level = level,
			.writable = !!(spte & writable),
			.dirty = write || !ad,
		};
	}
	/* The TLB entry is used until an interrupt is taken. */
	point(AT_READ, &cpu->kicked, __builtin_return_address(0));
	if (cpu->kicked)
		return INTERRUPTED;
	*pfn = (hit->pfn & -KVM_PAGES_PER_HPAGE(hit->level)) + (gfn & (KVM_PAGES_PER_HPAGE(hit->level) - 1));
	return DONE;
}

int handle_fault(struct kvm_vcpu *vcpu, gfn_t gfn, u64 code)
{
	return kvm_mmu_page_fault(vcpu, gfn << PAGE_SHIFT, code, NULL, 0);
}

/*
 * ---- The guest's page tables that KVM shadows ----
 *
 * They have four levels: L1's tables for L2, or the guest's own with shadow paging. The guest
 * changes the entries for the first two pages in a table of the last level. With shadow paging it
 * also changes the entry for the third page in a table of the level above, which KVM emulates.
 */

#define DIRECTORY (TABLES + 2)
#define LEAF_TABLE (TABLES + 3)
/* Shadow paging: tables of the tables' own memslot and of the last block, and a second root */
#define OWN_TABLE (TABLES + 4)
#define BLOCK_TABLE (TABLES + 5)
#define OTHER_ROOT (TABLES + 6)
/* Tables of the last level, which the entry for the third page refers to in turn */
#define THIRD_TABLES (TABLES + 8)
#define THIRD_TABLE_COUNT 8
/* The pages that the changed entries map in turn */
#define TARGETS (TABLES + 0x10)
#define CHANGED 3

/*
 * How often each entry was changed; the same with a change that KVM has yet to end; and how often
 * when each vCPU last flushed
 */
static unsigned long version[CHANGED], begun[CHANGED], flushed_version[VCPUS][CHANGED];
static int changed_page[VCPUS];
static bool third_changes;

static int entry_of(struct op op)
{
	return op.page % (setup.nested ? 2 : CHANGED);
}

static gfn_t address_of(int page)
{
	return page == 2 ? 0xa00 : page;
}

static u64 *table_entry(gfn_t table, int index)
{
	return (u64 *)hva_of(table) + index;
}

static u64 guest_pte(gfn_t gfn)
{
	return gfn << PAGE_SHIFT | PT_PRESENT_MASK | PT_WRITABLE_MASK | PT_USER_MASK | PT_ACCESSED_MASK | PT_DIRTY_MASK;
}

static gfn_t target(int page, unsigned long version)
{
	return TARGETS + 64 * page + version % (page == 2 ? THIRD_TABLE_COUNT : 64);
}

/* The table with the entry of a page, and its index there */
static gfn_t table_of(int page)
{
	return page == 2 ? DIRECTORY : LEAF_TABLE;
}

static int index_of(int page)
{
	return page == 2 ? 5 : page;
}

static u64 pte_of(int page, unsigned long version)
{
	return guest_pte(page == 2 ? THIRD_TABLES + version % THIRD_TABLE_COUNT : target(page, version));
}

static void tables_init(void)
{
	int page, i;

	for (page = 0; page < 3; page++)
		*table_entry(TABLES + page, 0) = guest_pte(TABLES + page + 1);
	for (page = 0; page < CHANGED; page++)
		*table_entry(table_of(page), index_of(page)) = pte_of(page, 0);
	if (setup.nested)
		return;
	*table_entry(OTHER_ROOT, 0) = *table_entry(TABLES, 0);
	/* Two huge pages, and a table of pages. KVM sets their accessed and dirty bits. */
	for (i = 1; i < 3; i++)
		*table_entry(DIRECTORY, i) = i * 0x200ul << PAGE_SHIFT | PT_PRESENT_MASK | PT_WRITABLE_MASK | PT_USER_MASK | PT_PAGE_SIZE_MASK;
	*table_entry(DIRECTORY, 3) = guest_pte(BLOCK_TABLE);
	*table_entry(DIRECTORY, 4) = guest_pte(OWN_TABLE);
	for (i = 0; i < 512; i++) {
		*table_entry(BLOCK_TABLE, i) = (0x600ul + i) << PAGE_SHIFT | PT_PRESENT_MASK | PT_WRITABLE_MASK | PT_USER_MASK;
		*table_entry(OWN_TABLE, i) = guest_pte(TABLES + i);
	}
	for (i = 0; i < THIRD_TABLE_COUNT; i++)
		*table_entry(THIRD_TABLES + i, 0) = guest_pte(target(2, i));
}

static unsigned long nested_cr3(struct kvm_vcpu *vcpu)
{
	return TABLES << PAGE_SHIFT;
}

static u64 nested_pdptr(struct kvm_vcpu *vcpu, int index)
{
	return 0;
}

static void nested_fault(struct kvm_vcpu *vcpu, struct x86_exception *exception)
{
	if (!going[TABLES_SLOT_ID])
		fail("KVM finds no page for L2 in L1's tables");
	/* A nested exit ends L2's access. */
	cpu_of(vcpu)->emulated = true;
}

/* Like nested_svm_transition_tlb_flush() */
static void nested_flush(struct kvm_vcpu *vcpu)
{
	kvm_make_request(KVM_REQ_MMU_SYNC, vcpu);
	kvm_make_request(KVM_REQ_TLB_FLUSH_CURRENT, vcpu);
}

/* Like nested_svm_init_mmu_context() */
static void enter_nested(struct kvm_vcpu *vcpu)
{
#ifndef OLD_KVM
	vcpu->arch.hflags |= HF_GUEST_MASK;
	vcpu->arch.mmu = &vcpu->arch.guest_mmu;
#if LINUX_VERSION_CODE >= KERNEL_VERSION(7, 2, 0)
	kvm_init_shadow_npt_mmu(vcpu, X86_CR4_PAE, EFER_LMA | EFER_LME | EFER_NX, nested_cr3(vcpu), 0);
#else
	kvm_init_shadow_npt_mmu(vcpu, X86_CR0_PG, X86_CR4_PAE, EFER_LMA | EFER_LME | EFER_NX | EFER_SVME, nested_cr3(vcpu));
#endif
#if LINUX_VERSION_CODE >= KERNEL_VERSION(7, 3, 0)
	vcpu->arch.ngpa_walk.get_guest_pgd = nested_cr3;
	vcpu->arch.ngpa_walk.get_pdptr = nested_pdptr;
	vcpu->arch.ngpa_walk.inject_page_fault = (void *)nested_fault;
#else
	vcpu->arch.mmu->get_guest_pgd = nested_cr3;
	vcpu->arch.mmu->get_pdptr = nested_pdptr;
	vcpu->arch.mmu->inject_page_fault = (void *)nested_fault;
#endif
	nested_flush(vcpu);
#endif
}

static void leave_nested(struct kvm_vcpu *vcpu)
{
	vcpu->arch.hflags &= ~HF_GUEST_MASK;
	vcpu->arch.mmu = &vcpu->arch.root_mmu;
	nested_flush(vcpu);
}

/* The vCPU's change of an entry takes effect. */
static void table_reached(struct kvm_vcpu *vcpu, gfn_t gfn, bool write, unsigned long pfn)
{
	int page = changed_page[vcpu->vcpu_id];

	memory_reached(vcpu, gfn, write, pfn);
	version[page] = ++begun[page];
	*table_entry(gfn, index_of(page)) = pte_of(page, version[page]);
}

/*
 * Changes an entry of a directory like emulator_write_phys(). Only one vCPU does so at a time, as
 * with a lock of the guest, so the order of changes is known.
 */
static bool emulate_change(struct kvm_vcpu *vcpu, gfn_t gfn)
{
	gpa_t at = (DIRECTORY << PAGE_SHIFT) + index_of(2) * sizeof(u64);
	u64 pte;

	if (setup.tdp || gfn != DIRECTORY)
		return false;
	pte = pte_of(2, ++begun[2]);
	if (kvm_vcpu_write_guest(vcpu, at, &pte, sizeof(pte)))
		fail("KVM does not write to a page table");
	kvm_page_track_write(vcpu, at, (void *)&pte, sizeof(pte));
	version[2] = begun[2];
	return true;
}

static void change_table(struct kvm_vcpu *vcpu, int page)
{
	if (page == 2 && third_changes)
		return;
	third_changes |= page == 2;
	changed_page[vcpu->vcpu_id] = page;
	guest_access(vcpu, table_of(page), true, table_reached);
	if (page == 2)
		third_changes = false;
}

/* A read by an entry that may have changed, after this vCPU has flushed its TLB */
static void followed(struct kvm_vcpu *vcpu, gfn_t gfn, bool write, unsigned long pfn)
{
	int page = gfn == address_of(2) ? 2 : gfn;
	unsigned long of;

	for (of = flushed_version[vcpu->vcpu_id][page]; of <= begun[page]; of++)
		if (pfn == host_pfn(hva_of(target(page, of))))
			return;
	fail("%s gets to the page that it had before the page table changed and its vCPU flushed", setup.nested ? "L2" : "the guest");
}

static void invlpg(struct kvm_vcpu *vcpu, gva_t address)
{
	/* The instruction exits. KVM of 5.10 warns if there is no root. */
	while (!VALID_PAGE(ROOT(vcpu->arch.mmu)))
		if (enter_guest(vcpu))
			leave_guest(vcpu);
	kvm_mmu_invlpg(vcpu, address);
}

static void follow_table(struct kvm_vcpu *vcpu, struct op op)
{
	int page = entry_of(op);

	/* All changes that have ended by now come before the flush. */
	flushed_version[vcpu->vcpu_id][page] = version[page];
	if (setup.nested)
		enter_nested(vcpu);
	else if (op.page < 4)
		invlpg(vcpu, address_of(page) << PAGE_SHIFT);
	else if (kvm_set_cr3(vcpu, (op.page < 6 ? TABLES : OTHER_ROOT) << PAGE_SHIFT))
		fail("kvm_set_cr3() fails");
	guest_access(vcpu, address_of(page), false, followed);
	if (setup.nested)
		leave_nested(vcpu);
}

void arch_op(struct kvm_vcpu *vcpu, struct op op)
{
	if (op.code == DO_TABLE)
		change_table(vcpu, entry_of(op));
	else
		follow_table(vcpu, op);
}
