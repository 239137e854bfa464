// SPDX-License-Identifier: GPL-2.0-only
/*
 * The VM, its processors, and the actions of its user space.
 *
 * User space's operations are KVM's ioctls. A processor of the guest is a task. It enters the guest
 * like vcpu_enter_guest(), as far as requests and page tables are concerned. In the guest it reads
 * and writes through a TLB, walks KVM's page tables, and sets accessed and dirty bits.
 * kvm_mmu_page_fault() handles its faults. The rule: the log has each page that the guest has
 * written since user space last collected it.
 *
 * With shadow paging the guest's page tables map each page at its own guest physical address.
 */
#include <linux/kvm_host.h>
#include <linux/fs.h>
#include <linux/version.h>

#include "mmu.h"
#include "mmu/mmu_internal.h"
#include "mmu/spte.h"
#include "mmu/page_track.h"
#include "x86.h"

#include "explore.h"
#include "host.h"

struct setup setup;
struct program program;

#define SLOT_ID 0
#define LAST_GFN 0x800ul
/* The page tables of the guest have a memslot of their own, one huge page behind. */
#define TABLES_SLOT_ID 1
#define TABLES 0x800ul
#define TABLE_GFNS 0x200ul
#define TLB_ENTRIES 8

static struct kvm *vm;
static struct kvm_vcpu *vcpus[VCPUS];

static struct processor {
	bool in_guest, kicked;
	/* How often it has left the guest since */
	unsigned int exits;
	bool emulated, hit, ring_full;
	struct entry { gfn_t gfn; unsigned long pfn; hpa_t root; u8 level; bool writable, dirty; } tlb[TLB_ENTRIES];
	unsigned int next;
} cpus[VCPUS];

/* Whether the log is on, and the pages written since user space's last collection */
static bool logging, written[PAGES];
/* Whether a memslot is being deleted, and whether it is deleted */
static bool going[2], absent[2];
/* What user space has got of the log and has not cleared */
static unsigned long got[LAST_GFN / 64 + 1], got_of_tables[TABLE_GFNS / 64];

static gfn_t base_gfn(void)
{
	return setup.odd ? 0x201 : 0x200;
}

/* Ends of chunks and of huge pages, and pages between them */
static gfn_t gfn_of(int page)
{
	static const gfn_t gfns[PAGES] = { 0x210, 0x3c1, 0x3ff, 0x400, 0x401, 0x480, 0x5ff, 0x600 };

	return gfns[page];
}

static int slot_of(gfn_t gfn)
{
	return gfn >= TABLES ? TABLES_SLOT_ID : SLOT_ID;
}

static unsigned long hva_of(gfn_t gfn)
{
	return USER_BASE + ((gfn - 0x200) << PAGE_SHIFT);
}

/* ---- The vendor module: a kvm_amd, or a kvm_intel with EPT, as far as the MMU uses it ---- */

static struct processor *cpu_of(struct kvm_vcpu *vcpu)
{
	return &cpus[vcpu->vcpu_id];
}

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

/* Replace those of x86.c, which also set up what does not concern guest memory */
int __wrap_kvm_arch_init_vm(struct kvm *kvm, unsigned long type)
{
	kvm->arch.vm_type = type;
#ifdef KVM_PRE_FAULT_MEMORY
	kvm->arch.pre_fault_allowed = true;
#endif
	kvm_page_track_init(kvm);
	return kvm_mmu_init_vm(kvm);
}

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
	kvm_init_mmu(vcpu);
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
	if (!emulate_change(vcpu, gpa >> PAGE_SHIFT) && !going[slot_of(gpa >> PAGE_SHIFT)])
		fail("KVM emulates an access to memory, gfn %lx", (long)(gpa >> PAGE_SHIFT));
	cpu_of(vcpu)->emulated = true;
	return 1;
}

/* ---- ioctls ---- */

static void tables_init(void);
static void alone(int id, struct op op);
static int vm_fd, vcpu_fds[VCPUS];

static long vm_ioctl(unsigned int command, void *argument)
{
	struct kernel_file *file = kernel_file(vm_fd);

	return file->operations->unlocked_ioctl(file->file, command, (unsigned long)argument);
}

static long vcpu_ioctl(struct kvm_vcpu *vcpu, unsigned int command, void *argument)
{
	struct kernel_file *file = kernel_file(vcpu_fds[vcpu->vcpu_id]);

	return file->operations->unlocked_ioctl(file->file, command, (unsigned long)argument);
}

static void set_slot_of(u32 id, gfn_t first, unsigned long pages, u32 flags)
{
	struct kvm_userspace_memory_region region = {
		.slot = id,
		.flags = flags,
		.guest_phys_addr = first << PAGE_SHIFT,
		.memory_size = pages << PAGE_SHIFT,
		.userspace_addr = hva_of(first),
	};
	long ret = vm_ioctl(KVM_SET_USER_MEMORY_REGION, &region);

	if (ret)
		fail("KVM_SET_USER_MEMORY_REGION gives %ld", ret);
}

static void set_slot(unsigned long pages, u32 flags)
{
	set_slot_of(SLOT_ID, base_gfn(), pages, flags);
}

static long enable(u32 capability, u64 argument)
{
	struct kvm_enable_cap cap = { .cap = capability, .args = { argument } };

	return vm_ioctl(KVM_ENABLE_CAP, &cap);
}

/* The smallest ring has 256 entries, with a soft limit of 192. */
static u32 ring_entries(void)
{
	return setup.prefault ? 256 : 1024;
}

extern bool tdp_mmu_enabled;
int kvm_x86_harness_eager(void);

void vm_create(void)
{
	int id;
	long ret;

	kernel_init();
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
	ret = kvm_init(sizeof(struct kvm_vcpu), __alignof__(struct kvm_vcpu), NULL);
	if (ret)
		fail("kvm_init() gives %ld", ret);
	vm_fd = kvm_device->unlocked_ioctl(NULL, KVM_CREATE_VM, 0);
	if (vm_fd < 0)
		fail("KVM_CREATE_VM gives %d", vm_fd);
	vm = kernel_file(vm_fd)->file->private_data;
	if (setup.ring && (ret = enable(KVM_CAP_DIRTY_LOG_RING, ring_entries() * sizeof(struct kvm_dirty_gfn))))
		fail("a dirty ring gives %ld", ret);
	if (setup.manual && (ret = enable(KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, 1 + 2 * setup.init_set)))
		fail("KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2 gives %ld", ret);
	for (id = 0; id < VCPUS; id++) {
		ret = vm_ioctl(KVM_CREATE_VCPU, (void *)(long)id);
		if (ret < 0)
			fail("KVM_CREATE_VCPU gives %ld", ret);
		vcpu_fds[id] = ret;
		vcpus[id] = kernel_file(ret)->file->private_data;
	}
	set_slot(LAST_GFN - base_gfn(), 0);
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

/* ---- A processor ---- */

static void kick(int id)
{
	if (id < VCPUS)
		cpus[id].kicked = true;
}

struct ipi { unsigned long mask; unsigned int exits[VCPUS]; bool inside[VCPUS]; };

/* The host takes interrupts unless it walks page tables with interrupts off. */
static int all_have_left(void *argument)
{
	struct ipi *ipi = argument;
	int id;

	for (id = 0; id < VCPUS; id++)
		if (ipi->inside[id] && cpus[id].exits == ipi->exits[id] &&
		    (cpus[id].in_guest || vcpus[id]->mode == READING_SHADOW_PAGE_TABLES))
			return 0;
	return 1;
}

__used static void x_smp_call_function_many(const struct cpumask *mask, void *function, void *info, bool wait)
{
	struct ipi ipi = { 0 };
	int id;

	for (id = 0; id < VCPUS; id++) {
		if (id == self_id() || !(mask->bits[0] >> id & 1))
			continue;
		kick(id);
		ipi.inside[id] = true;
		ipi.exits[id] = cpus[id].exits;
	}
	if (wait)
		wait_for(all_have_left, &ipi, "vCPUs that have to leave the guest", __builtin_return_address(0));
}
asm(".globl smp_call_function_many\n.set smp_call_function_many, x_smp_call_function_many");

__used static void x_send_reschedule(int id)
{
	kick(id);
}
struct smp_ops ex_smp_ops = { .smp_send_reschedule = x_send_reschedule };
asm(".globl smp_ops\n.set smp_ops, ex_smp_ops");

static void leave_guest(struct kvm_vcpu *vcpu)
{
	struct processor *cpu = cpu_of(vcpu);

	cpu->in_guest = false;
	cpu->exits++;
	vcpu->mode = OUTSIDE_GUEST_MODE;
	kvm_vcpu_srcu_read_lock(vcpu);
	released(__builtin_return_address(0));
}

/* vcpu_enter_guest() with the requests that concern the MMU */
static bool enter_guest(struct kvm_vcpu *vcpu)
{
	struct processor *cpu = cpu_of(vcpu);

	if (kvm_request_pending(vcpu)) {
		cpu->ring_full = kvm_dirty_ring_check_request(vcpu);
		if (cpu->ring_full)
			return false;
		if (kvm_check_request(KVM_REQ_MMU_FREE_OBSOLETE_ROOTS, vcpu))
			kvm_mmu_free_obsolete_roots(vcpu);
		if (kvm_check_request(KVM_REQ_MMU_SYNC, vcpu))
			kvm_mmu_sync_roots(vcpu);
		if (kvm_check_request(KVM_REQ_LOAD_MMU_PGD, vcpu))
			kvm_mmu_load_pgd(vcpu);
		if (kvm_check_request(KVM_REQ_TLB_FLUSH, vcpu)) {
			flush_tlb(vcpu);
			kvm_clear_request(KVM_REQ_TLB_FLUSH_CURRENT, vcpu);
		}
		kvm_service_local_tlb_flush_requests(vcpu);
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
	return setup.tdp ? vcpu->arch.mmu->root.hpa : 0;
}

static struct entry *tlb_find(struct kvm_vcpu *vcpu, gfn_t gfn)
{
	struct entry *entry;

	for (entry = cpu_of(vcpu)->tlb; entry < cpu_of(vcpu)->tlb + TLB_ENTRIES; entry++)
		if (entry->level && entry->root == tlb_tag(vcpu) &&
		    entry->gfn == (gfn & -KVM_PAGES_PER_HPAGE(entry->level)))
			return entry;
	return NULL;
}

enum access { DONE, FAULT, INTERRUPTED };

static u64 read_spte(u64 *sptep)
{
	const void *pc = __builtin_return_address(0);

	kernel_check_access(sptep, pc);
	point(AT_READ, sptep, pc);
	return *(volatile u64 *)sptep;
}

/* One access of the guest: through its TLB, or by a walk of the tables, which fills the TLB. */
static enum access access_memory(struct kvm_vcpu *vcpu, gfn_t gfn, bool write, u64 *code, unsigned long *pfn)
{
	struct processor *cpu = cpu_of(vcpu);
	struct entry *hit = tlb_find(vcpu, gfn);
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
		sptep = __va(vcpu->arch.mmu->root.hpa);
		for (level = vcpu->arch.mmu->root_role.level;; level--) {
			if (cpu->kicked)
				return INTERRUPTED;
			sptep += (gfn >> 9 * (level - 1)) & 511;
			spte = read_spte(sptep);
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
			.root = tlb_tag(vcpu),
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

/* Does the effect of an access that has reached memory at a guest's address. */
typedef void (*reached)(struct kvm_vcpu *vcpu, gfn_t gfn, bool write, unsigned long pfn);

static void memory_reached(struct kvm_vcpu *vcpu, gfn_t gfn, bool write, unsigned long pfn)
{
	int page;

	if (absent[slot_of(gfn)])
		fail("the guest gets to gfn %lx, whose memslot was deleted", (long)gfn);
	if (pfn != host_pfn(hva_of(gfn)))
		fail("the guest gets to the page that gfn %lx had before the host moved it", (long)gfn);
	for (page = 0; write && page < PAGES; page++)
		if (gfn == gfn_of(page))
			written[page] = true;
}

/* A thread of a vCPU leaves KVM_RUN for something else. */
static void outside(struct kvm_vcpu *vcpu, void (*action)(struct kvm_vcpu *vcpu, struct op op), struct op op)
{
	kvm_vcpu_srcu_read_unlock(vcpu);
	vcpu_put(vcpu);
	action(vcpu, op);
	vcpu_load(vcpu);
	kvm_vcpu_srcu_read_lock(vcpu);
}

static void reset_full_ring(struct kvm_vcpu *vcpu, struct op op);

static void guest_access(struct kvm_vcpu *vcpu, gfn_t gfn, bool write, reached reached)
{
	struct processor *cpu = cpu_of(vcpu);
	enum access access;
	unsigned long pfn;
	int tries, ret;
	u64 code;

	cpu->emulated = false;
	for (tries = 0; tries < 10000; tries++) {
		/* What it waits for may need this processor. */
		if (tries > 4)
			give_way();
		if (!enter_guest(vcpu)) {
			if (cpu->ring_full)
				outside(vcpu, reset_full_ring, (struct op){ DO_RESET });
			cpu->ring_full = false;
			continue;
		}
		access = access_memory(vcpu, gfn, write, &code, &pfn);
		if (access == DONE)
			reached(vcpu, gfn, write, pfn);
		leave_guest(vcpu);
		if (access == DONE) {
			say("vCPU %d: %s gfn %lx%s", vcpu->vcpu_id, write ? "writes" : "reads", (long)gfn, cpu->hit ? " through its TLB" : "");
			return;
		}
		if (access == INTERRUPTED)
			continue;
		say("vCPU %d: %s fault on gfn %lx", vcpu->vcpu_id, write ? "write" : "read", (long)gfn);
		ret = kvm_mmu_page_fault(vcpu, gfn << PAGE_SHIFT, code, NULL, 0);
		if (cpu->emulated)
			return;
		if (ret < 0)
			fail("kvm_mmu_page_fault() gives %d", ret);
	}
	fail("faults on gfn %lx come to no end", (long)gfn);
}

/* ---- User space ---- */

static void nothing_is_written(void)
{
	memset(written, 0, sizeof(written));
}

static bool in_bitmap(const unsigned long *bitmap, int page)
{
	return test_bit(gfn_of(page) - base_gfn(), bitmap);
}

static void get_log(u32 slot, unsigned long *bitmap)
{
	struct kvm_dirty_log log = { .slot = slot, .dirty_bitmap = bitmap };
	long ret = vm_ioctl(KVM_GET_DIRTY_LOG, &log);

	if (ret)
		fail("KVM_GET_DIRTY_LOG gives %ld", ret);
}

static void collect(void)
{
	static unsigned long bitmap[LAST_GFN / 64 + 1];
	int page;

	if (!logging || setup.ring)
		return;
	if (setup.tables_logged) {
		get_log(TABLES_SLOT_ID, bitmap);
		bitmap_or(got_of_tables, got_of_tables, bitmap, TABLE_GFNS);
	}
	get_log(SLOT_ID, bitmap);
	if (vm->manual_dirty_log_protect) {
		bitmap_or(got, got, bitmap, LAST_GFN);
		return;
	}
	for (page = 0; page < PAGES; page++)
		if (in_bitmap(bitmap, page))
			written[page] = false;
}

static void clear_log(u32 slot, unsigned long first, unsigned long pages, unsigned long mask)
{
	struct kvm_clear_dirty_log log = { .slot = slot, .first_page = first, .num_pages = pages, .dirty_bitmap = &mask };
	long ret = vm_ioctl(KVM_CLEAR_DIRTY_LOG, &log);

	if (ret)
		fail("KVM_CLEAR_DIRTY_LOG gives %ld", ret);
}

/* The chunk with the page tables */
static void clear_tables(void)
{
	if (!logging || !vm->manual_dirty_log_protect || !got_of_tables[0])
		return;
	clear_log(TABLES_SLOT_ID, 0, 64, got_of_tables[0]);
	got_of_tables[0] = 0;
}

static void clear(int page)
{
	unsigned long first = (gfn_of(page) - base_gfn()) / 64 * 64, mask = got[first / 64];
	int other;

	if (!logging || !vm->manual_dirty_log_protect || !mask)
		return;
	clear_log(SLOT_ID, first, min(64ul, LAST_GFN - base_gfn() - first), mask);
	got[first / 64] = 0;
	for (other = 0; other < PAGES; other++)
		if ((gfn_of(other) - base_gfn()) / 64 == first / 64 && mask >> (gfn_of(other) - base_gfn()) % 64 & 1)
			written[other] = false;
}

static u32 ring_next[VCPUS];

/* The pages of entries that user space has not seen. With `reset` the entries are returned. */
static unsigned long harvest(bool reset)
{
	unsigned long pages = 0;
	int id, page;

	for (id = 0; id < VCPUS; id++) {
		u32 next = ring_next[id];

		for (;; next++) {
			struct kvm_dirty_gfn *entry = &vcpus[id]->dirty_ring.dirty_gfns[next % ring_entries()];

			if (READ_ONCE(entry->flags) != KVM_DIRTY_GFN_F_DIRTY)
				break;
			for (page = 0; page < PAGES; page++)
				if (entry->slot == SLOT_ID && entry->offset == gfn_of(page) - base_gfn())
					pages |= 1ul << page;
			if (reset)
				WRITE_ONCE(entry->flags, KVM_DIRTY_GFN_F_RESET);
		}
		if (reset)
			ring_next[id] = next;
	}
	return pages;
}

static bool ring_is_reset(void)
{
	int id;

	for (id = 0; id < VCPUS; id++)
		if (vcpus[id]->dirty_ring.reset_index != ring_next[id])
			return false;
	return true;
}

static void reset_rings(void)
{
	unsigned long pages = harvest(true);
	int page;
	long ret;

	do {
		ret = vm_ioctl(KVM_RESET_DIRTY_RINGS, NULL);
		set_signal(false);
		if (ret < 0 && ret != -EINTR)
			fail("KVM_RESET_DIRTY_RINGS gives %ld", ret);
	} while (!ring_is_reset());
	for (page = 0; page < PAGES; page++)
		if (pages >> page & 1)
			written[page] = false;
}

static void reset_full_ring(struct kvm_vcpu *vcpu, struct op op)
{
	reset_rings();
}

#ifdef KVM_PRE_FAULT_MEMORY
/* More than a ring has entries */
#define PREFAULTED 320

static void prefault(struct kvm_vcpu *vcpu, struct op op)
{
	struct kvm_pre_fault_memory range = {
		.gpa = (op.page & 1 ? 0x4c0ul : 0x400ul) << PAGE_SHIFT,
		.size = PREFAULTED << PAGE_SHIFT,
	};
	u64 before;
	long ret;

	while (range.size) {
		before = range.size;
		ret = vcpu_ioctl(vcpu, KVM_PRE_FAULT_MEMORY, &range);
		/* The memslot is gone, or going. */
		if (ret == -ENOENT || ret == -EAGAIN)
			return;
		if (ret && ret != -ENOSPC)
			fail("KVM_PRE_FAULT_MEMORY gives %ld", ret);
		if (!ret && range.size == before)
			fail("KVM_PRE_FAULT_MEMORY gives 0 and has done nothing");
		if (ret)
			reset_rings();
	}
}
#endif

static void log_on(void)
{
	if (logging)
		return;
	memset(got, 0, sizeof(got));
	memset(got_of_tables, 0, sizeof(got_of_tables));
	if (setup.tables_logged)
		set_slot_of(TABLES_SLOT_ID, TABLES, TABLE_GFNS, KVM_MEM_LOG_DIRTY_PAGES);
	set_slot(LAST_GFN - base_gfn(), KVM_MEM_LOG_DIRTY_PAGES);
	nothing_is_written();
	logging = true;
}

static void log_off(void)
{
	if (!logging)
		return;
	logging = false;
	set_slot(LAST_GFN - base_gfn(), 0);
	if (setup.tables_logged)
		set_slot_of(TABLES_SLOT_ID, TABLES, TABLE_GFNS, 0);
}

/* Deletes a memslot and adds it again. */
static void move_slot(struct op op)
{
	bool was = logging;

	/* L1 may lose L2's tables. A guest on shadow paging could not go on without its own. */
	if (setup.nested && !setup.tables_logged && op.page & 1) {
		going[TABLES_SLOT_ID] = true;
		set_slot_of(TABLES_SLOT_ID, TABLES, 0, 0);
		absent[TABLES_SLOT_ID] = true;
		point(AT_YIELD, NULL, __builtin_return_address(0));
		absent[TABLES_SLOT_ID] = false;
		set_slot_of(TABLES_SLOT_ID, TABLES, TABLE_GFNS, 0);
		going[TABLES_SLOT_ID] = false;
		return;
	}
	logging = false;
	going[SLOT_ID] = true;
	set_slot(0, 0);
	absent[SLOT_ID] = true;
	point(AT_YIELD, NULL, __builtin_return_address(0));
	memset(got, 0, sizeof(got));
	absent[SLOT_ID] = false;
	set_slot(LAST_GFN - base_gfn(), was ? KVM_MEM_LOG_DIRTY_PAGES : 0);
	going[SLOT_ID] = false;
	nothing_is_written();
	logging = was;
}

const char *op_name(int code)
{
	static const char *const names[DO_CODES] = {
		"nothing", "reads", "writes", "changes a page table for", "flushes and reads by that page table", "log on",
		"log off", "collects", "clears", "resets the rings", "moves the memslot", "moves the host's page", "ages",
		"sets INITIALLY_SET", "signals user space", "pre-faults",
	};

	return names[code];
}

/* Any thread of user space may request it, including a vCPU's. */
static void set_init_set(struct kvm_vcpu *vcpu, struct op op)
{
	enable(KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, op.page & 1 ? 3 : setup.manual);
}

/* The host's huge page that an operation concerns. The last one has the page tables. */
static unsigned long block_for(struct op op)
{
	return hva_of(has_tables() && op.page == PAGES - 1 ? TABLES : gfn_of(op.page));
}

static void user_op(struct op op)
{
	switch (op.code) {
	case DO_LOG_ON: return log_on();
	case DO_LOG_OFF: return log_off();
	case DO_COLLECT: return collect();
	case DO_CLEAR: return setup.tables_logged && op.page & 1 ? clear_tables() : clear(op.page);
	case DO_RESET:
		if (setup.ring)
			reset_rings();
		return;
	case DO_MOVE: return move_slot(op);
	case DO_NOTIFY: return host_replace(block_for(op));
	case DO_AGE: return host_age(block_for(op));
	case DO_INIT_SET: return set_init_set(NULL, op);
	}
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

static void follow_table(struct kvm_vcpu *vcpu, struct op op)
{
	int page = entry_of(op);

	/* All changes that have ended by now come before the flush. */
	flushed_version[vcpu->vcpu_id][page] = version[page];
	if (setup.nested)
		enter_nested(vcpu);
	else if (op.page < 4)
		kvm_mmu_invlpg(vcpu, address_of(page) << PAGE_SHIFT);
	else if (kvm_set_cr3(vcpu, (op.page < 6 ? TABLES : OTHER_ROOT) << PAGE_SHIFT))
		fail("kvm_set_cr3() fails");
	guest_access(vcpu, address_of(page), false, followed);
	if (setup.nested)
		leave_nested(vcpu);
}

static void vcpu_op(struct kvm_vcpu *vcpu, struct op op)
{
	switch (op.code) {
	case DO_SIGNAL:
		set_signal(true);
		return;
	case DO_INIT_SET:
		/*
		 * Only user space knows whether a log is cleared or collected; it stays the same.
		 */
		if (setup.manual)
			outside(vcpu, set_init_set, op);
		return;
#ifdef KVM_PRE_FAULT_MEMORY
	case DO_PREFAULT:
		return outside(vcpu, prefault, op);
#endif
	case DO_TABLE:
		return change_table(vcpu, entry_of(op));
	case DO_FOLLOW:
		return follow_table(vcpu, op);
	default:
		guest_access(vcpu, gfn_of(op.page), op.code == DO_WRITE, memory_reached);
	}
}

static void vcpu_task(int id)
{
	struct kvm_vcpu *vcpu = vcpus[id];
	struct op *op;

	vcpu_load(vcpu);
	kvm_vcpu_srcu_read_lock(vcpu);
	for (op = program.ops[id]; op->code; op++) {
		vcpu_op(vcpu, *op);
	}
	kvm_vcpu_srcu_read_unlock(vcpu);
	vcpu_put(vcpu);
}

void vm_task(int id)
{
	struct op *op;

	if (id == RCU) {
		rcu_task();
	} else if (id == USER) {
		for (op = program.ops[USER]; op->code; op++) {
			say("user space: %s %lx", op_name(op->code), (long)gfn_of(op->page));
			user_op(*op);
			say("user space: %s is done", op_name(op->code));
		}
	} else {
		vcpu_task(id);
	}
}

/* One operation of a vCPU while no other task runs */
static void alone(int id, struct op op)
{
	kernel_switch(USER, id);
	vcpu_load(vcpus[id]);
	kvm_vcpu_srcu_read_lock(vcpus[id]);
	vcpu_op(vcpus[id], op);
	kvm_vcpu_srcu_read_unlock(vcpus[id]);
	vcpu_put(vcpus[id]);
	kernel_switch(id, USER);
}

void vm_before(void)
{
	int i;

	for (i = 0; program.before[i].op.code; i++) {
		struct op op = program.before[i].op;

		if (program.before[i].task == USER)
			user_op(op);
		else
			alone(program.before[i].task, op);
	}
}

/*
 * No other task runs any more. Each vCPU writes to each page. Then the log must have every written
 * page.
 */
void vm_final_check(void)
{
	static unsigned long bitmap[LAST_GFN / 64 + 1];
	unsigned long pages = 0;
	int id, page;

	if (!logging)
		return;
	for (id = 0; id < VCPUS; id++)
		for (page = 0; page < PAGES; page++)
			alone(id, (struct op){ DO_WRITE, page });
	if (setup.ring) {
		pages = harvest(false);
	} else {
		get_log(SLOT_ID, bitmap);
		for (page = 0; page < PAGES; page++)
			if (in_bitmap(bitmap, page) || in_bitmap(got, page))
				pages |= 1ul << page;
	}
	for (page = 0; page < PAGES; page++)
		if (written[page] && !(pages >> page & 1))
			fail("gfn %lx was written to, and is not in the log", (long)gfn_of(page));
}
