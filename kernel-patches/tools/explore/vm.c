// SPDX-License-Identifier: GPL-2.0-only
/*
 * The VM, its processors, and the actions of its user space, on every architecture.
 *
 * User space's operations are KVM's ioctls. A processor of the guest is a task. It enters the guest
 * as far as requests and page tables are concerned. In the guest it reads and writes through a TLB,
 * and walks KVM's page tables. KVM's own handler handles its faults. The rule: the log has each page
 * that the guest has written since user space last collected it.
 */
#include <linux/kvm_host.h>
#include <linux/fs.h>
#include <linux/version.h>

#include "explore.h"
#include "host.h"
#include "vm.h"

struct setup setup;
struct program program;

struct kvm *vm;
struct kvm_vcpu *vcpus[VCPUS];
struct processor cpus[VCPUS];

/* Whether the log is on, and the pages written since user space's last collection */
static bool logging, written[PAGES];
/* Whether a memslot is being deleted, and whether it is deleted */
bool going[2];
unsigned int moves;
static bool absent[2];
/* What user space has got of the log and has not cleared */
static unsigned long got[LAST_GFN / 64 + 1], got_of_tables[TABLE_GFNS / 64];

static gfn_t base_gfn(void)
{
	return setup.odd ? 0x201 : 0x200;
}

/* Ends of chunks and of huge pages, and pages between them */
gfn_t gfn_of(int page)
{
	static const gfn_t gfns[PAGES] = { 0x210, 0x3c1, 0x3ff, 0x400, 0x401, 0x480, 0x5ff, 0x600 };

	return gfns[page];
}

static unsigned long all_pages(void)
{
	return LAST_GFN - base_gfn();
}

/* The memslot's pages, or 0 for all. A smaller one ends between pages that one reset may protect together. */
static unsigned long fewer_pages;
#define FEWER_PAGES 0x200ul

static unsigned long slot_pages(void)
{
	return fewer_pages ?: all_pages();
}

bool beyond_slot(gfn_t gfn)
{
	return slot_of(gfn) == SLOT_ID && gfn >= base_gfn() + slot_pages();
}

/* ---- ioctls ---- */

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

void set_slot_of(u32 id, gfn_t first, unsigned long pages, u32 flags)
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

#ifdef KVM_CAP_DIRTY_LOG_RING
/* The smallest ring has 256 entries, with a soft limit of 192. */
static u32 ring_entries(void)
{
	return setup.prefault ? 256 : 1024;
}
#endif

const char *lacks(const struct setup *of)
{
#ifndef KVM_CAP_DIRTY_LOG_RING
	if (of->ring)
		return "dirty ring";
#endif
	return arch_lacks(of);
}

void vm_create(void)
{
	int id;
	long ret;

	kernel_init();
	arch_init();
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 3, 0)
	ret = kvm_init(NULL, sizeof(struct kvm_vcpu), __alignof__(struct kvm_vcpu), NULL);
#else
	ret = kvm_init(sizeof(struct kvm_vcpu), __alignof__(struct kvm_vcpu), NULL);
#endif
	if (ret)
		fail("kvm_init() gives %ld", ret);
	vm_fd = kvm_device->unlocked_ioctl(NULL, KVM_CREATE_VM, 0);
	if (vm_fd < 0)
		fail("KVM_CREATE_VM gives %d", vm_fd);
	vm = kernel_file(vm_fd)->file->private_data;
#ifdef KVM_CAP_DIRTY_LOG_RING
	if (setup.ring && (ret = enable(KVM_CAP_DIRTY_LOG_RING_ACQ_REL, ring_entries() * sizeof(struct kvm_dirty_gfn))))
		fail("a dirty ring gives %ld", ret);
#endif
	if (setup.manual && (ret = enable(KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, 1 + 2 * setup.init_set)))
		fail("KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2 gives %ld", ret);
	for (id = 0; id < VCPUS; id++) {
		ret = vm_ioctl(KVM_CREATE_VCPU, (void *)(long)id);
		if (ret < 0)
			fail("KVM_CREATE_VCPU gives %ld", ret);
		vcpu_fds[id] = ret;
		vcpus[id] = kernel_file(ret)->file->private_data;
	}
	set_slot(all_pages(), 0);
	arch_created();
}

/* ---- A processor ---- */

void kick(int id)
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

struct entry *tlb_find(struct kvm_vcpu *vcpu, gfn_t gfn, unsigned long tag)
{
	struct entry *entry;

	for (entry = cpu_of(vcpu)->tlb; entry < cpu_of(vcpu)->tlb + TLB_ENTRIES; entry++)
		if (entry->level && entry->tag == tag && entry->gfn == (gfn & -(1ul << 9 * (entry->level - 1))))
			return entry;
	return NULL;
}

u64 read_entry(u64 *entry)
{
	const void *pc = __builtin_return_address(0);

	kernel_check_access(entry, pc);
	point(AT_READ, entry, pc);
	return *(volatile u64 *)entry;
}

void memory_reached(struct kvm_vcpu *vcpu, gfn_t gfn, bool write, unsigned long pfn)
{
	int page;

	if (absent[slot_of(gfn)] || (beyond_slot(gfn) && !going[SLOT_ID]))
		fail("the guest gets to gfn %lx, whose memslot was deleted", (long)gfn);
	if (pfn != host_pfn(hva_of(gfn)))
		fail("the guest gets to the page that gfn %lx had before the host moved it", (long)gfn);
	for (page = 0; write && page < PAGES; page++)
		if (gfn == gfn_of(page))
			written[page] = true;
}

/* A thread of a vCPU leaves KVM_RUN for something else. */
void outside(struct kvm_vcpu *vcpu, void (*action)(struct kvm_vcpu *vcpu, struct op op), struct op op)
{
	run_ends(vcpu);
	action(vcpu, op);
	run_begins(vcpu);
}

static void reset_full_ring(struct kvm_vcpu *vcpu, struct op op);

void guest_access(struct kvm_vcpu *vcpu, gfn_t gfn, bool write, reached reached)
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
		ret = handle_fault(vcpu, gfn, code);
		if (cpu->emulated)
			return;
		if (ret < 0)
			fail("KVM's handler of the fault gives %d", ret);
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

/* The pages of entries that user space has harvested and has yet to reset */
static unsigned long harvested;

#ifdef KVM_CAP_DIRTY_LOG_RING
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
	unsigned long pages = harvest(true) | harvested;
	int page;
	long ret;

	harvested = 0;
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
#else
static unsigned long harvest(bool reset)
{
	return 0;
}

static void reset_rings(void)
{
}
#endif

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
	set_slot(slot_pages(), KVM_MEM_LOG_DIRTY_PAGES);
	nothing_is_written();
	logging = true;
}

static void log_off(void)
{
	if (!logging)
		return;
	logging = false;
	set_slot(slot_pages(), 0);
	if (setup.tables_logged)
		set_slot_of(TABLES_SLOT_ID, TABLES, TABLE_GFNS, 0);
}

/* Deletes a memslot and adds it again. */
static void move_slot(struct op op)
{
	bool was = logging;

	moves++;
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
	if (setup.replaced)
		harvested |= harvest(true);
	going[SLOT_ID] = true;
	set_slot(0, 0);
	absent[SLOT_ID] = true;
	point(AT_YIELD, NULL, __builtin_return_address(0));
	memset(got, 0, sizeof(got));
	absent[SLOT_ID] = false;
	if (setup.replaced)
		fewer_pages = op.page & 1 ? 0 : FEWER_PAGES;
	set_slot(slot_pages(), was ? KVM_MEM_LOG_DIRTY_PAGES : 0);
	going[SLOT_ID] = false;
	nothing_is_written();
	logging = was;
}

const char *op_name(int code)
{
	static const char *const names[DO_CODES] = {
		"nothing", "reads", "writes", "changes a page table for", "flushes and reads by that page table", "log on",
		"log off", "collects", "clears", "resets the rings", "moves the memslot", "moves the host's page", "ages", "waits for vCPU 0",
		"sets INITIALLY_SET", "signals user space", "pre-faults", "writes in L2", "initializes its vCPU",
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

static bool ended;

static int vcpu_has_ended(void *unused)
{
	return ended;
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
	case DO_JOIN: return wait_for(vcpu_has_ended, NULL, "vCPU 0", __builtin_return_address(0));
	case DO_INIT_SET: return set_init_set(NULL, op);
	}
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
	case DO_READ:
	case DO_WRITE:
		return guest_access(vcpu, gfn_of(op.page), op.code == DO_WRITE, memory_reached);
	default:
		arch_op(vcpu, op);
	}
}

static void vcpu_task(int id)
{
	struct kvm_vcpu *vcpu = vcpus[id];
	struct op *op;

	run_begins(vcpu);
	for (op = program.ops[id]; op->code; op++) {
		vcpu_op(vcpu, *op);
	}
	run_ends(vcpu);
	ended |= !id;
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
void alone(int id, struct op op)
{
	kernel_switch(USER, id);
	run_begins(vcpus[id]);
	vcpu_op(vcpus[id], op);
	run_ends(vcpus[id]);
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

static bool in_tlb(int id, gfn_t gfn)
{
	struct entry *entry;

	for (entry = cpus[id].tlb; entry < cpus[id].tlb + TLB_ENTRIES; entry++)
		if (entry->level && entry->gfn == (gfn & -(1ul << 9 * (entry->level - 1))))
			return true;
	return false;
}

/*
 * No other task runs any more. A vCPU writes to each page. Then the log must have every written
 * page. With L2, L2 writes alone: what L1 writes as well is in the log.
 */
void vm_final_check(int id)
{
	static unsigned long bitmap[LAST_GFN / 64 + 1];
	unsigned long pages = 0;
	bool first[PAGES];
	int page, turn;

	if (!logging)
		return;
	/* Pages that the TLB has come first, as the others would take their places there. */
	for (page = 0; page < PAGES; page++)
		first[page] = in_tlb(id, gfn_of(page));
	for (turn = 1; turn >= 0; turn--)
		for (page = 0; page < PAGES; page++)
			if (first[page] == turn)
				alone(id, (struct op){ setup.l2 ? DO_L2_WRITE : DO_WRITE, page });
	if (setup.ring) {
		pages = harvest(false) | harvested;
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
