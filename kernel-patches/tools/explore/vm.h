/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Shared by vm.c, which every architecture has, and the architecture's x86.c or arm64.c.
 */
#ifndef VM_H
#define VM_H

#define SLOT_ID 0
#define LAST_GFN 0x800ul
/* The page tables of the guest have a memslot of their own, one huge page behind. */
#define TABLES_SLOT_ID 1
#define TABLES 0x800ul
#define TABLE_GFNS 0x200ul
#ifdef CONFIG_X86
#define TLB_ENTRIES 8
#else
/* L1 and L2 have entries at the same time. */
#define TLB_ENTRIES 16
#endif

struct processor {
	bool in_guest, kicked;
	/* How often it has left the guest since */
	unsigned int exits;
	bool emulated, hit, ring_full;
	struct entry {
		gfn_t gfn;
		unsigned long pfn;
		/* The root or the page tables that it is for */
		unsigned long tag;
		/* 1 for a page, more for what is larger, 0 for none */
		u8 level;
		bool writable, dirty;
	} tlb[TLB_ENTRIES];
	unsigned int next;
	/* arm64: how often an entry was invalidated */
	unsigned int invalidated;
};

enum access { DONE, FAULT, INTERRUPTED };

/* Does the effect of an access that has reached memory at a guest's address. */
typedef void (*reached)(struct kvm_vcpu *vcpu, gfn_t gfn, bool write, unsigned long pfn);

extern struct kvm *vm;
extern struct kvm_vcpu *vcpus[VCPUS];
extern struct processor cpus[VCPUS];
/* Whether a memslot is being deleted */
extern bool going[2];
/* How often a memslot has been deleted */
extern unsigned int moves;

static inline struct processor *cpu_of(struct kvm_vcpu *vcpu)
{
	return &cpus[vcpu->vcpu_id];
}

static inline int slot_of(gfn_t gfn)
{
	return gfn >= TABLES ? TABLES_SLOT_ID : SLOT_ID;
}

static inline unsigned long hva_of(gfn_t gfn)
{
	return USER_BASE + ((gfn - 0x200) << PAGE_SHIFT);
}

gfn_t gfn_of(int page);
/* Whether the memslot, which may have become smaller, lacks it */
bool beyond_slot(gfn_t gfn);
void set_slot_of(u32 id, gfn_t first, unsigned long pages, u32 flags);
struct entry *tlb_find(struct kvm_vcpu *vcpu, gfn_t gfn, unsigned long tag);
u64 read_entry(u64 *entry);
void kick(int id);
void memory_reached(struct kvm_vcpu *vcpu, gfn_t gfn, bool write, unsigned long pfn);
void guest_access(struct kvm_vcpu *vcpu, gfn_t gfn, bool write, reached reached);
void outside(struct kvm_vcpu *vcpu, void (*action)(struct kvm_vcpu *vcpu, struct op op), struct op op);
void alone(int id, struct op op);

/* ---- What an architecture provides ---- */

/* What a setup needs and KVM of the base lacks, or NULL */
const char *arch_lacks(const struct setup *of);
/* Before KVM is initialized, and after the VM has its vCPUs and its memslot */
void arch_init(void);
void arch_created(void);
/* The thread of a vCPU enters KVM_RUN, and leaves it. */
void run_begins(struct kvm_vcpu *vcpu);
void run_ends(struct kvm_vcpu *vcpu);
bool enter_guest(struct kvm_vcpu *vcpu);
void leave_guest(struct kvm_vcpu *vcpu);
/* One access of the guest: through its TLB, or by a walk of the tables, which fills the TLB */
enum access access_memory(struct kvm_vcpu *vcpu, gfn_t gfn, bool write, u64 *code, unsigned long *pfn);
/* KVM's handler of a fault */
int handle_fault(struct kvm_vcpu *vcpu, gfn_t gfn, u64 code);
/* An operation of a vCPU that only this architecture has */
void arch_op(struct kvm_vcpu *vcpu, struct op op);

#endif
