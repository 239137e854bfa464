// SPDX-License-Identifier: GPL-2.0-only
/*
 * Runs a kernel's TDP MMU in user space. The script `tdp-faults` names the source.
 *
 * A vCPU is a task that is alternately the guest's CPU and KVM. As a CPU it walks the tables
 * without a lock, through a TLB and a cache of tables, and sets accessed and dirty bits. As KVM it
 * handles its faults without mmu_lock if possible, otherwise with mmu_lock held for read. Another
 * task does the work that holds mmu_lock for write, and one is RCU. Tasks take turns on one thread,
 * at random, at each read and write of an SPTE and each lock. A seed repeats a run. These rules are
 * checked:
 *
 * - the host takes a page away: no CPU reaches it once the MMU notifier is done, and if a CPU has
 *   written to it since KVM last reported that, KVM has reported it by then;
 * - nothing is mapped where a TLB still has an old mapping;
 * - a fault removes no write access, and sets no dirty bit without the dirty log;
 * - aging, which flushes no TLB, removes no write access either;
 * - while a slot is logged, a page that a CPU has written since its bit was last cleared has its
 *   bit set, or a fault without mmu_lock that made it writable is about to set it;
 * - no CPU writes to a write-protected gfn, such as a nested guest's page table;
 * - a task without mmu_lock for write walks the tables under RCU, and a task with it does not
 *   access a table once it is removed;
 * - nothing is written to a removed table, and it is freed after a grace period; after that no task
 *   and no CPU reads it;
 * - lists change under their lock;
 * - no task waits for ever;
 * - at the end each table is linked and listed, none is frozen, and all are freed.
 *
 * Most of these are checked wherever KVM reads or writes an SPTE, whether or not another task runs
 * in between. A CPU may set accessed and dirty bits there, too.
 *
 * This file also has the few parts of the kernel that the code needs: locks, RCU, TLB flushes. A
 * flush waits until CPUs in guest mode have left it, as an IPI does, and removes from their TLBs
 * only what is in its range.
 */
#define _GNU_SOURCE
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

typedef uint64_t u64;
typedef uint32_t u32;
typedef uint8_t u8;
typedef u64 gfn_t, gpa_t, hpa_t, kvm_pfn_t;
typedef unsigned long ulong;
typedef unsigned int uint;

#define VCPUS 3
/* The tasks after the vCPUs */
#define MANAGER VCPUS
#define RCU (VCPUS + 1)
#define TASKS (VCPUS + 2)

#define die(...) do {						\
	fprintf(stderr, "FAILED: " __VA_ARGS__);		\
	fprintf(stderr, " (seed %u)\n", seed);			\
	_exit(1);						\
} while (0)

static unsigned int seed;
static u64 rnd_state;

static u32 rnd(u32 n)
{
	rnd_state = rnd_state * 6364136223846793005ull + 1442695040888963407ull;
	return (u32)(rnd_state >> 33) % n;
}

/* Tasks */
struct task {
	ucontext_t context;
	bool ended;
	/* The number of turns for which it still sleeps. */
	u64 sleeps;
	/* What it holds: mmu_lock, for read or for write, and a spinlock. */
	char mmu_lock, spinlock;
	/* The frame number of a page whose dirty bit a CPU has just set, or 0 */
	u64 dirtied;
	/* A gfn that it made writable without mmu_lock and has yet to log, or 0 */
	u64 to_log;
	/* Odd within an RCU read-side section */
	unsigned long rcu_sections;
};

static struct task tasks[TASKS], *self = tasks;
static ucontext_t home;
static bool running;
static u64 turns, last_access;

/* Another task's turn, or another turn of this one */
static void turn(void)
{
	struct task *last = self;

	if (!running)
		return;
	if (turns - last_access > 5000000)
		die("no vCPU gets on: a task waits for ever");
	do {
		turns++;
		self = &tasks[rnd(TASKS)];
	} while (self->ended || self->sleeps > turns);
	if (self != last)
		swapcontext(&last->context, &self->context);
}

/* Another task often runs where it could interfere... */
static void window(void)
{
	if (!rnd(8))
		turn();
}

/* ...and sometimes for so long that the others finish their work. */
static void wide_window(void)
{
	if (!rnd(256)) {
		self->sleeps = turns + rnd(4000);
		turn();
	}
	window();
}

/*
 * Between reading an SPTE and acting on it, where no lock excludes faults without mmu_lock: gives
 * others enough turns to finish something.
 */
static void after_a_look(u32 one_in, u32 most)
{
	if (!rnd(one_in)) {
		self->sleeps = turns + rnd(most);
		turn();
	}
}

/* The kernel's basics */
#define __user
#define __rcu
#define __init
#define __read_mostly
#define CONFIG_X86_64 1
#define likely(x) (x)
#define unlikely(x) (x)
#define BIT(n) (1ul << (n))
#define BIT_ULL(n) (1ull << (n))
#define BITS_PER_LONG 64
#define GENMASK_ULL(h, l) ((~0ull << (l)) & (~0ull >> (63 - (h))))
#define DECLARE_BITMAP(name, bits) unsigned long name[(bits) / 64]
#define static_assert _Static_assert
#define container_of(p, t, m) ((t *)((char *)(p) - offsetof(t, m)))
#define max(a, b) ((a) > (b) ? (a) : (b))
#define min(a, b) ((a) < (b) ? (a) : (b))
#define __ffs(x) __builtin_ctzl(x)
#define module_param_named(...)
/* Among the types that these are used for, only SPTEs have 64 bits. */
#define is_spte(x) __builtin_types_compatible_p(__typeof__(x), u64)
#define READ_ONCE(x) ({								\
	wide_window();								\
	if (is_spte(x))								\
		before_read((u64 *)&(x));					\
	*(__typeof__(x) volatile *)&(x);						\
})
#define WRITE_ONCE(x, v) ({							\
	window();								\
	if (is_spte(x))								\
		before_write((u64 *)&(x));					\
	*(__typeof__(x) volatile *)&(x) = (v);					\
	if (is_spte(x))								\
		after_store(v);							\
})
#define WARN_ON(c) ({ bool __c = !!(c); if (__c) die("line %d warns: %s", __LINE__, #c); __c; })
#define WARN_ON_ONCE WARN_ON
#define WARN_ONCE(c, ...) WARN_ON(c)
#define BUG() die("line %d: BUG()", __LINE__)
#define BUG_ON(c) do { if (c) BUG(); } while (0)
#define pr_err(...) fprintf(stderr, __VA_ARGS__)
#define cpu_relax() turn()
#define clear_bit(n, p) (*(p) &= ~BIT(n))

static void before_read(u64 *sptep);
static void before_write(u64 *sptep);
static void not_removed(u64 *sptep);
static void cpu_writes(u64 *sptep);
static void after_store(u64 spte);
static void written_to(u64 *sptep);
static void replaced(u64 old, u64 new);
static void set_logged(u64 gfn);
static u64 gfn_at(u64 *sptep);
static bool tlbs_have(u64 *sptep);
static u64 flushes, tlb_hits, cached_walks;

static u64 cmpxchg64(u64 *p, u64 expected, u64 new)
{
	u64 old;

	wide_window();
	if (!rnd(4))
		cpu_writes(p);
	old = *p;
	/* If a CPU has set a bit meanwhile, this fails, and the bit is seen. */
	self->dirtied = 0;
	if (old == expected) {
		/* A value read before the table was removed does no harm if this fails. */
		not_removed(p);
		if (!old && tlbs_have(p))
			die("an SPTE is set while a TLB still has what was there before");
		if (self->mmu_lock != 'w')
			replaced(old, new);
		*p = new;
		if (!self->mmu_lock)
			self->to_log = gfn_at(p);
		written_to(p);
	}
	window();
	return old;
}

struct list_head {
	struct list_head *next, *prev;
};

struct hlist_node {
	struct hlist_node *next, **pprev;
};

#define INIT_LIST_HEAD(h) ((h)->next = (h)->prev = (h))
#define list_empty(h) ((h)->next == (h))
#define list_entry_is_head(p, h, m) (&(p)->m == (h))
#define list_next_entry(p, m) container_of((p)->m.next, __typeof__(*(p)), m)
#define list_first_entry(h, t, m) container_of((h)->next, t, m)
#define list_for_each_entry(p, h, m)				\
	for (p = list_first_entry(h, __typeof__(*p), m);	\
	     !list_entry_is_head(p, h, m); p = list_next_entry(p, m))

static void list_is_locked(void)
{
	if (self->mmu_lock != 'w' && !self->spinlock)
		die("a list changes without its lock");
}

static void list_add(struct list_head *new, struct list_head *head)
{
	list_is_locked();
	if (head->next->prev != head)
		die("a list is broken");
	new->next = head->next;
	new->prev = head;
	head->next->prev = new;
	head->next = new;
}

static void list_del(struct list_head *entry)
{
	list_is_locked();
	if (!entry->next || entry->next->prev != entry || entry->prev->next != entry)
		die("taken from a list that it is not on");
	entry->next->prev = entry->prev;
	entry->prev->next = entry->next;
	entry->next = entry->prev = NULL;
}

/* Locks that know their owners */
typedef bool spinlock_t;
#define spin_lock_init(l) (*(l) = false)

static void spin_lock(spinlock_t *l)
{
	do
		turn();
	while (*l);
	*l = self->spinlock = true;
}

static void spin_unlock(spinlock_t *l)
{
	*l = self->spinlock = false;
	window();
}

typedef struct {
	int readers;
	bool writer;
} rwlock_t;

static void read_lock(rwlock_t *l)
{
	do
		turn();
	while (l->writer);
	l->readers++;
	self->mmu_lock = 'r';
}

/* It keeps new readers out first, as queued locks do. */
static void write_lock(rwlock_t *l)
{
	do
		turn();
	while (l->writer);
	l->writer = true;
	while (l->readers)
		turn();
	self->mmu_lock = 'w';
}

static void unlock(rwlock_t *l)
{
	if (self->dirtied)
		die("a dirty bit is overwritten, and nobody is told");
	if (self->mmu_lock == 'w')
		l->writer = false;
	else
		l->readers--;
	self->mmu_lock = 0;
	window();
}

#define read_unlock unlock
#define write_unlock unlock
#define assert_held(c) do { if (!(c)) die("line %d: mmu_lock is not held as it should be", __LINE__); } while (0)
#define lockdep_assert_held(l) assert_held(self->mmu_lock)
#define lockdep_assert_held_read(l) assert_held(self->mmu_lock == 'r')
#define lockdep_assert_held_write(l) assert_held(self->mmu_lock == 'w')
#define need_resched() (!rnd(4))
#define rwlock_needbreak(l) (!rnd(4))

static int cond_resched_rwlock_write(rwlock_t *l)
{
	write_unlock(l);
	write_lock(l);
	return 1;
}

/* RCU */
struct rcu_head {
	struct rcu_head *next;
	void (*func)(struct rcu_head *head);
};

static struct rcu_head *rcu_pending;
static bool in_rcu_callback;
static bool done;
static long tables;

static void rcu_read_lock(void)
{
	self->rcu_sections++;
}

static void rcu_read_unlock(void)
{
	self->rcu_sections++;
}

static void removed(struct rcu_head *head);

static void call_rcu(struct rcu_head *head, void (*func)(struct rcu_head *))
{
	removed(head);
	head->func = func;
	head->next = rcu_pending;
	rcu_pending = head;
}

static void rcu_grace_period(void)
{
	struct rcu_head *next, *head = rcu_pending;
	unsigned long section;
	struct task *task;

	rcu_pending = NULL;
	for (task = tasks; task < tasks + TASKS; task++) {
		section = task->rcu_sections;
		while ((section & 1) && task->rcu_sections == section)
			turn();
	}
	in_rcu_callback = true;
	for (; head; head = next) {
		next = head->next;
		head->func(head);
	}
	in_rcu_callback = false;
}

static void rcu_task(void)
{
	while (!done) {
		rcu_grace_period();
		turn();
	}
}

/* KVM's types, as far as the TDP MMU uses them */
#define PAGE_SHIFT 12
#define PAGE_SIZE 4096
#define PT64_ROOT_MAX_LEVEL 5
#define PT64_ENT_PER_PAGE 512
#define PT_PRESENT_MASK 1ull
#define PT_WRITABLE_MASK 2ull
#define PT_USER_MASK 4ull
#define PT_ACCESSED_MASK 0x20ull
#define PT_DIRTY_MASK 0x40ull
#define PT_PAGE_SIZE_MASK 0x80ull
#define PG_LEVEL_4K 1
#define PG_LEVEL_2M 2
#define PG_LEVEL_1G 3
#define KVM_MAX_HUGEPAGE_LEVEL PG_LEVEL_1G
#define KVM_PAGES_PER_HPAGE(level) (1ul << (((level) - 1) * 9))
#define PFERR_PRESENT_MASK 1
#define PFERR_WRITE_MASK 2
#define PFERR_RSVD_MASK 8
#define PFERR_FETCH_MASK 16
#define INVALID_PAGE (~0ull)
#define VALID_PAGE(x) ((x) != INVALID_PAGE)
#define KVM_REQ_TLB_FLUSH_CURRENT 0
#define __pa(p) ((u64)(p))
#define __va(p) ((void *)(p))

union kvm_mmu_page_role {
	u32 word;
	struct {
		unsigned int level:4, gpte_is_8_bytes:1, direct:1, access:3, invalid:1, ad_disabled:1, smm:8;
	};
};

struct kvm_rmap_head {
	unsigned long val;
};

typedef struct {
	int counter;
} atomic_t;

struct kvm_memory_slot {
	gfn_t base_gfn;
	unsigned long npages, userspace_addr;
	int as_id;
};

struct kvm_memslots {
	struct kvm_memory_slot slot;
};

struct kvm_mmu {
	hpa_t root_hpa;
	int shadow_root_level;
	struct {
		union kvm_mmu_page_role base;
	} mmu_role;
};

struct kvm {
	rwlock_t mmu_lock;
	struct kvm_memslots slots;
	unsigned long mmu_notifier_seq;
	long mmu_notifier_count;
	struct {
		bool tdp_mmu_enabled;
		struct list_head tdp_mmu_roots, tdp_mmu_pages, lpage_disallowed_mmu_pages;
		spinlock_t tdp_mmu_pages_lock, mmu_unsync_lock;
	} arch;
};

struct kvm_vcpu {
	struct kvm *kvm;
	struct {
		struct kvm_mmu *mmu, root_mmu, guest_mmu;
		int mmu_page_header_cache, mmu_shadow_page_cache;
	} arch;
	struct {
		u64 pf_fixed;
	} stat;
};

/* A fault without mmu_lock may be delayed between making a page writable and this. */
static void kvm_vcpu_mark_page_dirty(struct kvm_vcpu *vcpu, gfn_t gfn)
{
	wide_window();
	set_logged(gfn);
	self->to_log = 0;
}

static struct kvm vm;
static struct kvm_vcpu vcpus[VCPUS];

#define __kvm_memslots(kvm, as_id) (&(kvm)->slots)
#define kvm_for_each_memslot(s, slots) for (s = &(slots)->slot; s; s = NULL)
#define hva_to_gfn_memslot(hva, slot) (((hva) - (slot)->userspace_addr) / PAGE_SIZE + (slot)->base_gfn)
#define __gfn_to_memslot(slots, gfn) (&(slots)->slot)
#define mark_page_dirty_in_slot(slot, gfn) ((void)(slot), set_logged(gfn))
#define kvm_make_request(req, vcpu) ((void)(vcpu))
#define kvm_is_reserved_pfn(pfn) false
#define kvm_is_zone_device_pfn(pfn) false
#define PageCompound(page) true
#define is_noslot_pfn(pfn) false
#define trace_mark_mmio_spte(...) ((void)0)
#define trace_kvm_mmu_set_spte(...) ((void)0)
#define trace_kvm_mmu_spte_requested(...) ((void)0)
#define trace_kvm_mmu_get_page(...) ((void)0)

/* The struct page of a table's page is directly after it. */
struct page {
	u64 spte[512], private;
	bool linked, removed, freed;
};

#define virt_to_page(p) ((struct page *)(p))
#define pfn_to_page(pfn) ((struct page *)((pfn) << PAGE_SHIFT))
#define page_private(page) ((page)->private)
#define set_page_private(page, v) ((page)->private = (v))

#define kvm_mmu_memory_cache_alloc(cache) cache_alloc((void *)(cache) == &vcpu->arch.mmu_shadow_page_cache)
#define free_page(p) free_table((struct page *)(p))
#define kmem_cache_free(cache, p) free(p)
#define clear_page(p) memset(p, 0, PAGE_SIZE)

/* Freed tables stay for a while, to detect later reads. */
static struct page *quarantine[256];
static u64 freed_tables;

static void free_table(struct page *table)
{
	if (table->linked && !in_rcu_callback)
		die("a table that was linked is freed without a grace period");
	tables--;
	table->freed = true;
	free(quarantine[freed_tables % 256]);
	quarantine[freed_tables++ % 256] = table;
}

static void *cache_alloc(bool table)
{
	void *p = table ? aligned_alloc(PAGE_SIZE, 2 * PAGE_SIZE) : calloc(1, 512);

	if (!p)
		die("no memory");
	if (table)
		memset(p + PAGE_SIZE, 0, PAGE_SIZE);
	tables += table;
	return p;
}

u64 shadow_nx_mask, shadow_x_mask, shadow_me_mask, shadow_mmio_value, shadow_mmio_access_mask, shadow_acc_track_mask;
u64 shadow_nonpresent_or_rsvd_mask, shadow_nonpresent_or_rsvd_lower_gfn_mask;
u64 shadow_user_mask = PT_USER_MASK, shadow_present_mask = PT_PRESENT_MASK;
u64 shadow_accessed_mask = PT_ACCESSED_MASK, shadow_dirty_mask = PT_DIRTY_MASK;
u8 shadow_phys_bits = 43;
struct kmem_cache *mmu_page_header_cache;
static bool tdp_enabled = true;

static int is_writable_pte(unsigned long pte)
{
	return pte & PT_WRITABLE_MASK;
}

#include "mmu_internal.h"
#include "spte.h"

static struct page *table_of(u64 *sptep)
{
	return (struct page *)((u64)sptep & -PAGE_SIZE);
}

static void removed(struct rcu_head *head)
{
	table_of(container_of(head, struct kvm_mmu_page, rcu_head)->spt)->removed = true;
}

static void before_read(u64 *sptep)
{
	if (self->mmu_lock != 'w' && !(self->rcu_sections & 1))
		die("tables are walked without RCU and without mmu_lock held for write");
	if (table_of(sptep)->freed)
		die("KVM reads a table that was freed");
	if (self->mmu_lock == 'w' && table_of(sptep)->removed)
		die("a walk under mmu_lock goes on in a table that was removed");
}

static void not_removed(u64 *sptep)
{
	if (table_of(sptep)->removed)
		die("an SPTE is written in a table that was removed");
}

static void before_write(u64 *sptep)
{
	self->dirtied = 0;
	not_removed(sptep);
	if (!rnd(4))
		cpu_writes(sptep);
}

/* A store without an exchange misses what cpu_writes() did. */
static void after_store(u64 spte)
{
	if ((spte & PT_DIRTY_MASK) && spte_to_pfn(spte) == self->dirtied)
		self->dirtied = 0;
}

/* A table may have been linked here. SPTEs that map pages are writable only with the other bit. */
static void written_to(u64 *sptep)
{
	if (is_shadow_present_pte(*sptep) && (*sptep & PT_WRITABLE_MASK) && !(*sptep & SPTE_HOST_WRITEABLE))
		((struct page *)__va(*sptep & PT64_BASE_ADDR_MASK))->linked = true;
}

/*
 * Faults flush nothing if a page stays mapped, and the dirty log does not learn of dirty bits that
 * they set.
 */
static void replaced(u64 old, u64 new)
{
	if (!is_shadow_present_pte(old) || !is_shadow_present_pte(new) || spte_to_pfn(old) != spte_to_pfn(new))
		return;
	if (is_writable_pte(old) && !is_writable_pte(new))
		die("a fault takes write access away, and no TLB is flushed");
	if (is_writable_pte(old) && !(old & PT_DIRTY_MASK) && (new & PT_DIRTY_MASK))
		die("a fault sets a dirty bit, which a CPU would have logged");
}

static void kvm_set_pfn_accessed(kvm_pfn_t pfn)
{
}

static void kvm_set_pfn_dirty(kvm_pfn_t pfn);

void kvm_flush_remote_tlbs(struct kvm *kvm);
void kvm_flush_remote_tlbs_with_address(struct kvm *kvm, u64 gfn, u64 pages);

static bool nx_huge_pages;

bool is_nx_huge_page_enabled(void)
{
	return nx_huge_pages;
}

void account_huge_nx_page(struct kvm *kvm, struct kvm_mmu_page *sp)
{
	if (sp->lpage_disallowed)
		return;
	list_add(&sp->lpage_disallowed_link, &kvm->arch.lpage_disallowed_mmu_pages);
	sp->lpage_disallowed = true;
}

void unaccount_huge_nx_page(struct kvm *kvm, struct kvm_mmu_page *sp)
{
	sp->lpage_disallowed = false;
	list_del(&sp->lpage_disallowed_link);
}

/* Whether the dirty log is enabled, and a gfn with a nested guest's page table, or 0 */
static bool logging;
static gfn_t protected_gfn;

static bool has_protected(gfn_t gfn, gfn_t pages)
{
	return protected_gfn && protected_gfn >= gfn && protected_gfn < gfn + pages;
}

/* The size that the host maps is random for each fault. */
static int host_level[TASKS];

int kvm_mmu_hugepage_adjust(struct kvm_vcpu *vcpu, gfn_t gfn, int max_level, kvm_pfn_t *pfn, bool disallowed,
			    int *req_level)
{
	int level = min(host_level[self - tasks], max_level);

	/* disallow_lpage, and a slot with the dirty log enabled */
	if (logging || has_protected(gfn & -KVM_PAGES_PER_HPAGE(level), KVM_PAGES_PER_HPAGE(level)))
		level = PG_LEVEL_4K;

	*req_level = level;
	if (disallowed || level == PG_LEVEL_4K)
		return PG_LEVEL_4K;
	*pfn &= -KVM_PAGES_PER_HPAGE(level);
	return level;
}

void disallowed_hugepage_adjust(u64 spte, gfn_t gfn, int cur_level, kvm_pfn_t *pfn, int *level)
{
	if (cur_level != *level || cur_level == PG_LEVEL_4K || !is_shadow_present_pte(spte) || is_large_pte(spte))
		return;
	*pfn |= gfn & (KVM_PAGES_PER_HPAGE(cur_level) - KVM_PAGES_PER_HPAGE(cur_level - 1));
	--*level;
}

int make_spte(struct kvm_vcpu *vcpu, unsigned int access, int level, gfn_t gfn, kvm_pfn_t pfn, u64 old_spte,
	      bool speculative, bool can_unsync, bool host_writable, bool ad_disabled, u64 *new_spte)
{
	*new_spte = pfn << PAGE_SHIFT | PT_PRESENT_MASK | PT_USER_MASK | PT_ACCESSED_MASK;
	if (level > PG_LEVEL_4K)
		*new_spte |= PT_PAGE_SIZE_MASK;
	if (!host_writable)
		return 0;
	*new_spte |= SPTE_HOST_WRITEABLE;
	if (has_protected(gfn, KVM_PAGES_PER_HPAGE(level)))
		return access & ACC_WRITE_MASK ? SET_SPTE_WRITE_PROTECTED_PT : 0;
	*new_spte |= PT_WRITABLE_MASK | PT_DIRTY_MASK | SPTE_MMU_WRITEABLE;
	return 0;
}

u64 make_nonleaf_spte(u64 *child_pt, bool ad_disabled)
{
	return __pa(child_pt) | PT_PRESENT_MASK | PT_WRITABLE_MASK | PT_USER_MASK | PT_ACCESSED_MASK;
}

u64 make_mmio_spte(struct kvm_vcpu *vcpu, u64 gfn, unsigned int access)
{
	BUG();
}

u64 mark_spte_for_access_track(u64 spte)
{
	BUG();
}

u64 kvm_mmu_changed_pte_notifier_make_spte(u64 old_spte, kvm_pfn_t new_pfn)
{
	BUG();
}

typedef struct {
	u64 pte;
} pte_t;

#define pte_huge(pte) false
#define pte_write(pte) false
#define pte_pfn(pte) 0

#define is_accessed_spte(spte) ({ after_a_look(4, 10000); (is_accessed_spte)(spte); })

/* The code under test */
#include "tdp_iter.c"
#include "tdp_mmu.c"

/* There are no shadow pages */
#define walk_shadow_page_lockless_begin(vcpu) BUG()
#define walk_shadow_page_lockless_end(vcpu) BUG()
#define shadow_last_sptep(vcpu, addr, spte, level) ({ BUG(); (u64 *)NULL; })
#define restore_acc_track_spte(spte) ({ BUG(); (spte); })
#define trace_fast_page_fault(...) ((void)0)
#define kvm_tdp_mmu_last_sptep(...) ({ u64 *__p = (kvm_tdp_mmu_last_sptep)(__VA_ARGS__); after_a_look(32, 400000); __p; })
#define KERN_WARNING ""
#define printk_once(...) ((void)0)
#include "fast.c"

/*
 * The guest: two areas of 1 GiB with a few pages each, none of which is the first of a huge page.
 * When the host takes an area away, all of the area gets another version. A page frame number has
 * area, version and offset.
 */
#define AREAS 2
#define PMDS 3
#define PTES 4
#define AREA_GFNS KVM_PAGES_PER_HPAGE(PG_LEVEL_1G)
#define VERSIONS (1u << 18)

static u32 version[AREAS];
static bool written[AREAS][PMDS][PTES], reported[AREAS][PMDS][PTES];
/* The dirty log's bits, and the pages written since they were last cleared */
static bool logged[AREAS][PMDS][PTES], to_be_logged[AREAS][PMDS][PTES];

static gfn_t gfn_of(int area, int pmd, int pte)
{
	return area * AREA_GFNS + (pmd + 1) * 512 + pte + 1;
}

static kvm_pfn_t pfn_of(gfn_t gfn)
{
	u64 area = gfn / AREA_GFNS;

	return (1 + area * VERSIONS + version[area] % VERSIONS) * AREA_GFNS + gfn % AREA_GFNS;
}

static void set_logged(u64 gfn)
{
	u64 offset = gfn % AREA_GFNS;

	logged[gfn / AREA_GFNS][offset / 512 - 1][offset % 512 - 1] = true;
}

/* A CPU has written to a page. */
static void has_written(int area, int pmd, int pte)
{
	if (protected_gfn == gfn_of(area, pmd, pte))
		die("a CPU writes to a page table that is write-protected");
	written[area][pmd][pte] = to_be_logged[area][pmd][pte] = true;
}

static void kvm_set_pfn_dirty(kvm_pfn_t pfn)
{
	u64 block = pfn / AREA_GFNS - 1, offset = pfn % AREA_GFNS;
	int area = block / VERSIONS, pmd, pte;

	if (pfn == self->dirtied)
		self->dirtied = 0;
	if (block % VERSIONS != version[area] % VERSIONS)
		return;
	for (pmd = 0; pmd < PMDS; pmd++)
		for (pte = 0; pte < PTES; pte++)
			if (!offset || offset == (pmd + 1) * 512 || offset == (pmd + 1) * 512 + pte + 1)
				reported[area][pmd][pte] = true;
}

/* CPUs */
struct tlb_entry {
	gfn_t gfn;
	kvm_pfn_t pfn;
	int level;
	bool dirty;
};

#define PENDING 8

struct cpu {
	bool guest_mode;
	/* Its last fault was on a mapped page. */
	bool present;
	/* The ranges that it was asked to flush, and their number */
	int pending;
	struct {
		gfn_t gfn, pages;
	} flush[PENDING];
	struct tlb_entry tlb[4];
	/* The table for a gfn, by level */
	struct {
		gfn_t gfn;
		u64 *table;
	} walk_cache[PT64_ROOT_MAX_LEVEL];
};

static struct cpu cpus[VCPUS];

static bool overlap(gfn_t gfn, gfn_t pages, gfn_t other, gfn_t others)
{
	return gfn < other + others && other < gfn + pages;
}

void kvm_flush_remote_tlbs_with_address(struct kvm *kvm, u64 gfn, u64 pages)
{
	int i, n, area, pmd, pte;

	wide_window();
	flushes++;
	for (i = 0; i < VCPUS; i++) {
		n = cpus[i].pending;
		if (n == PENDING) {
			/* It has lost count and flushes everything. */
			cpus[i].flush[0].gfn = 0;
			cpus[i].flush[0].pages = AREAS * AREA_GFNS;
			n = 0;
		} else {
			cpus[i].flush[n].gfn = gfn;
			cpus[i].flush[n].pages = pages;
		}
		cpus[i].pending = n + 1;
	}
	for (i = 0; i < VCPUS; i++)
		while (cpus[i].guest_mode && cpus[i].pending)
			turn();

	/* The host writes back what was reported, so the next write must be reported again. */
	for (area = 0; area < AREAS; area++)
		for (pmd = 0; pmd < PMDS; pmd++)
			for (pte = 0; pte < PTES; pte++)
				if (reported[area][pmd][pte] && overlap(gfn_of(area, pmd, pte), 1, gfn, pages))
					reported[area][pmd][pte] = written[area][pmd][pte] = false;
}

void kvm_flush_remote_tlbs(struct kvm *kvm)
{
	kvm_flush_remote_tlbs_with_address(kvm, 0, AREAS * AREA_GFNS);
}

static bool to_be_flushed(struct cpu *cpu, gfn_t gfn, gfn_t pages)
{
	int i;

	for (i = 0; i < cpu->pending; i++)
		if (overlap(gfn, pages, cpu->flush[i].gfn, cpu->flush[i].pages))
			return true;
	return false;
}

/* A CPU's work before it enters the guest */
static void flush_pending(struct cpu *cpu)
{
	struct tlb_entry *entry;
	int level;

	for (entry = cpu->tlb; entry < cpu->tlb + 4; entry++)
		if (entry->level && to_be_flushed(cpu, entry->gfn, KVM_PAGES_PER_HPAGE(entry->level)))
			entry->level = 0;
	for (level = 2; level <= PT64_ROOT_MAX_LEVEL; level++)
		if (cpu->walk_cache[level - 2].table &&
		    to_be_flushed(cpu, cpu->walk_cache[level - 2].gfn, KVM_PAGES_PER_HPAGE(level)))
			cpu->walk_cache[level - 2].table = NULL;
	cpu->pending = 0;
}

/* The first gfn that an SPTE maps */
static u64 gfn_at(u64 *sptep)
{
	struct kvm_mmu_page *sp = sptep_to_sp(sptep);

	return sp->gfn + KVM_PAGES_PER_HPAGE(sp->role.level - !sp->root_count) * (sptep - sp->spt);
}

/* A CPU outside of the guest with a pending flush will flush first. */
static bool tlbs_have(u64 *sptep)
{
	struct kvm_mmu_page *sp = sptep_to_sp(sptep);
	/* role.level: a table has that of the SPTE that points to it, the root has its own. */
	gfn_t pages = KVM_PAGES_PER_HPAGE(sp->role.level - !sp->root_count);
	gfn_t gfn = gfn_at(sptep);
	struct tlb_entry *entry;
	struct cpu *cpu;
	bool found = false;

	for (cpu = cpus; cpu < cpus + VCPUS; cpu++) {
		for (entry = cpu->tlb; entry < cpu->tlb + 4; entry++)
			found |= entry->level && entry->gfn < gfn + pages &&
				 entry->gfn + KVM_PAGES_PER_HPAGE(entry->level) > gfn &&
				 (cpu->guest_mode || !to_be_flushed(cpu, entry->gfn, KVM_PAGES_PER_HPAGE(entry->level)));
	}
	return found;
}

/* Sets accessed and dirty bits like a CPU: only if the SPTE still has the value that was read. */
static bool cpu_set_bits(u64 *sptep, u64 spte, bool write)
{
	u64 new = spte | PT_ACCESSED_MASK | (write ? PT_DIRTY_MASK : 0);

	if (*sptep != spte)
		return false;
	*sptep = new;
	return true;
}

/*
 * Directly before KVM writes an SPTE, a CPU writes to a page that it maps. That CPU may have come
 * through a table that is no longer linked, until TLBs are flushed, which is after KVM's write.
 */
static void cpu_writes(u64 *sptep)
{
	u64 spte = *sptep, offset = spte_to_pfn(spte) % AREA_GFNS;
	u64 block = spte_to_pfn(spte) / AREA_GFNS - 1;
	int pmd = rnd(PMDS), pte = rnd(PTES);

	/* Only SPTEs that map pages have this bit. */
	if (!(spte & SPTE_MMU_WRITEABLE) || !(spte & PT_WRITABLE_MASK) || (spte & PT_DIRTY_MASK))
		return;
	if (!cpu_set_bits(sptep, spte, true))
		return;
	if (offset) {
		pmd = offset / 512 - 1;
		pte = offset % 512 ? offset % 512 - 1 : pte;
	}
	has_written(block / VERSIONS, pmd, pte);
	self->dirtied = spte_to_pfn(spte);
}

static struct tlb_entry *tlb_find(struct cpu *cpu, gfn_t gfn)
{
	int i;

	for (i = 0; i < 4; i++)
		if (cpu->tlb[i].level && (gfn & -KVM_PAGES_PER_HPAGE(cpu->tlb[i].level)) == cpu->tlb[i].gfn)
			return &cpu->tlb[i];
	return NULL;
}

/* One access by the CPU, up to its end or a fault. */
static bool cpu_access(struct cpu *cpu, hpa_t root, gfn_t gfn, bool write)
{
	struct tlb_entry *hit = tlb_find(cpu, gfn);
	int level = 4, cached;
	u64 *table = __va(root), *sptep, spte;

	if (hit && (!write || hit->dirty)) {
		tlb_hits++;
		if (hit->pfn + gfn - hit->gfn != pfn_of(gfn))
			die("a CPU got to a page that the host had taken away, through its TLB");
		return true;
	}

	cpu->present = false;
	cached = 2 + rnd(3);
	if (cached < 4 && cpu->walk_cache[cached - 1].table &&
	    cpu->walk_cache[cached - 1].gfn == (gfn & -KVM_PAGES_PER_HPAGE(cached + 1))) {
		table = cpu->walk_cache[cached - 1].table;
		level = cached;
		cached_walks++;
	}
	for (;; level--) {
		sptep = &table[SHADOW_PT_INDEX(gfn << PAGE_SHIFT, level)];
retry:
		window();
		if (table_of(sptep)->freed)
			die("a CPU walks a table that was freed");
		spte = *sptep;
		if (!(spte & PT_PRESENT_MASK))
			return false;
		if (is_last_spte(spte, level))
			break;
		table = __va(spte & PT64_BASE_ADDR_MASK);
		cpu->walk_cache[level - 2].gfn = gfn & -KVM_PAGES_PER_HPAGE(level);
		cpu->walk_cache[level - 2].table = table;
		window();
	}
	if (write && !(spte & PT_WRITABLE_MASK)) {
		cpu->present = true;
		return false;
	}
	if (!cpu_set_bits(sptep, spte, write))
		goto retry;
	window();

	if (hit && hit->level != level)
		die("a CPU has gfn %lx in its TLB at level %d and in its tables at level %d", gfn, hit->level, level);
	if (!hit)
		hit = &cpu->tlb[rnd(4)];
	*hit = (struct tlb_entry) {
		.gfn = gfn & -KVM_PAGES_PER_HPAGE(level),
		.pfn = spte_to_pfn(spte),
		.level = level,
		.dirty = write || ((spte & PT_DIRTY_MASK) && (spte & PT_WRITABLE_MASK)),
	};
	if (hit->pfn + gfn - hit->gfn != pfn_of(gfn))
		die("a CPU got to a page that the host had taken away, level %d", level);
	return true;
}

static unsigned long faults_wanted;
static u64 results[8], fast;

static int handle_fault(struct kvm_vcpu *vcpu, gfn_t gfn, bool write)
{
	unsigned long seq = vm.mmu_notifier_seq;
	u32 draw = rnd(32), code = write ? PFERR_WRITE_MASK : rnd(4) ? 0 : PFERR_FETCH_MASK;
	u64 sptes[PT64_ROOT_MAX_LEVEL];
	kvm_pfn_t pfn;
	int r, root;

	window();
	r = fast_page_fault(vcpu, gfn << PAGE_SHIFT, code | (cpus[self - tasks].present ? PFERR_PRESENT_MASK : 0), true);
	if (r != RET_PF_INVALID) {
		fast++;
		return r;
	}
	pfn = pfn_of(gfn);
	host_level[self - tasks] = draw == 0 ? PG_LEVEL_1G : draw < 12 ? PG_LEVEL_2M : PG_LEVEL_4K;
	window();

	if (!rnd(8))
		kvm_tdp_mmu_get_walk(vcpu, gfn << PAGE_SHIFT, sptes, &root);

	read_lock(&vm.mmu_lock);
	if (vm.mmu_notifier_count || vm.mmu_notifier_seq != seq)
		r = RET_PF_RETRY;
	else
		r = kvm_tdp_mmu_map(vcpu, gfn << PAGE_SHIFT, code, write || rnd(2), KVM_MAX_HUGEPAGE_LEVEL, pfn, false);
	read_unlock(&vm.mmu_lock);
	results[r]++;
	return r;
}

static void vcpu_task(void)
{
	struct kvm_vcpu *vcpu = &vcpus[self - tasks];
	struct cpu *cpu = &cpus[self - tasks];
	unsigned long faults = 0, attempts;
	int area, pmd, pte;
	gfn_t gfn;
	bool write;

	while (faults < faults_wanted) {
		area = rnd(AREAS);
		pmd = rnd(PMDS);
		pte = rnd(PTES);
		write = rnd(2);
		gfn = gfn_of(area, pmd, pte);

		for (attempts = 0;; attempts++) {
			if (attempts == 100000)
				die("faults on gfn %lx come to no end", gfn);
			/* Entering the guest: pending flushes are done first. */
			cpu->guest_mode = true;
			flush_pending(cpu);
			if (cpu_access(cpu, vcpu->arch.mmu->root_hpa, gfn, write)) {
				if (write)
					has_written(area, pmd, pte);
				last_access = turns;
				break;
			}
			cpu->guest_mode = false;
			/* KVM emulates writes to write-protected pages. */
			if (handle_fault(vcpu, gfn, write) == RET_PF_EMULATE)
				break;
			faults++;
		}
		cpu->guest_mode = false;
		window();
	}
}

/*
 * If a TLB permits a write, so do the tables, unless a flush is under way: nothing else would flush
 * the TLB.
 */
static void no_writer_is_forgotten(void)
{
	struct tlb_entry *entry;
	struct cpu *cpu;
	int level;
	u64 *sptep;

	for (cpu = cpus; cpu < cpus + VCPUS; cpu++) {
		for (entry = cpu->tlb; entry < cpu->tlb + 4; entry++) {
			if (!entry->level || !entry->dirty || to_be_flushed(cpu, entry->gfn, KVM_PAGES_PER_HPAGE(entry->level)))
				continue;
			sptep = __va(vcpus[0].arch.mmu->root_hpa);
			for (level = 4;; level--) {
				sptep += SHADOW_PT_INDEX(entry->gfn << PAGE_SHIFT, level);
				if (!is_shadow_present_pte(*sptep) || is_last_spte(*sptep, level))
					break;
				sptep = __va(*sptep & PT64_BASE_ADDR_MASK);
			}
			if (is_shadow_present_pte(*sptep) && !is_writable_pte(*sptep))
				die("aging takes write access away, and no TLB is flushed");
		}
	}
}

/* The host takes an area away and maps another one. */
static void replace_area(int area)
{
	unsigned long start = area * AREA_GFNS * PAGE_SIZE;
	int pmd, pte;

	write_lock(&vm.mmu_lock);
	vm.mmu_notifier_count++;
	if (kvm_tdp_mmu_zap_hva_range(&vm, start, start + AREA_GFNS * PAGE_SIZE))
		kvm_flush_remote_tlbs(&vm);
	write_unlock(&vm.mmu_lock);

	for (pmd = 0; pmd < PMDS; pmd++) {
		for (pte = 0; pte < PTES; pte++) {
			if (written[area][pmd][pte] && !reported[area][pmd][pte])
				die("a page that was written to is gone, and was never dirty");
			written[area][pmd][pte] = reported[area][pmd][pte] = false;
		}
	}
	version[area]++;
	window();

	write_lock(&vm.mmu_lock);
	vm.mmu_notifier_seq++;
	vm.mmu_notifier_count--;
	write_unlock(&vm.mmu_lock);
}

/*
 * The task that made it writable has yet to set its bit, and does so before its vCPU stops, so a
 * later collection finds it.
 */
static bool is_going_to_be_logged(gfn_t gfn)
{
	int i;

	for (i = 0; i < VCPUS; i++)
		if (tasks[i].to_log == gfn)
			return true;
	return false;
}

/* The dirty log is enabled, partly collected, or disabled. */
static void use_log(struct kvm_memory_slot *slot)
{
	int area = rnd(AREAS), pmd = rnd(PMDS), pte;
	unsigned long mask = 0;

	write_lock(&vm.mmu_lock);
	if (!logging) {
		/* It may drop the lock meanwhile: faults are logged from here on. */
		logging = true;
		memset(logged, 0, sizeof(logged));
		kvm_tdp_mmu_wrprot_slot(&vm, slot, PG_LEVEL_4K);
		kvm_flush_remote_tlbs(&vm);
		/* Writes through TLBs until then came before. */
		memset(to_be_logged, 0, sizeof(to_be_logged));
	} else if (!rnd(3)) {
		logging = false;
	} else {
		for (pte = 0; pte < PTES; pte++) {
			if (to_be_logged[area][pmd][pte] && !logged[area][pmd][pte] &&
			    !is_going_to_be_logged(gfn_of(area, pmd, pte)))
				die("a page was written to, and is not in the dirty log");
			mask |= logged[area][pmd][pte] ? BIT(pte) : 0;
			/*
			 * First, as KVM does: faults without mmu_lock may set it again from here
			 * on.
			 */
			logged[area][pmd][pte] = false;
		}
		kvm_tdp_mmu_clear_dirty_pt_masked(&vm, slot, gfn_of(area, pmd, 0), mask, true);
		kvm_flush_remote_tlbs_with_address(&vm, gfn_of(area, pmd, 0), PTES);
		for (pte = 0; pte < PTES; pte++)
			if (mask & BIT(pte))
				to_be_logged[area][pmd][pte] = false;
	}
	write_unlock(&vm.mmu_lock);
}

/* A nested guest's page table appears in a page or disappears. */
static void protect(struct kvm_memory_slot *slot)
{
	gfn_t gfn = protected_gfn ? 0 : gfn_of(rnd(AREAS), rnd(PMDS), rnd(PTES));

	write_lock(&vm.mmu_lock);
	if (gfn && kvm_tdp_mmu_write_protect_gfn(&vm, slot, gfn))
		kvm_flush_remote_tlbs_with_address(&vm, gfn, 1);
	protected_gfn = gfn;
	write_unlock(&vm.mmu_lock);
}

static void manager_task(void)
{
	struct kvm_memory_slot *slot = &vm.slots.slot;
	struct kvm_mmu_page *sp;
	bool young;
	gfn_t gfn;

	while (!done) {
		gfn = gfn_of(rnd(AREAS), rnd(PMDS), 0) & -512;
		switch (rnd(12)) {
		case 0:
			replace_area(rnd(AREAS));
			break;
		case 1:
			write_lock(&vm.mmu_lock);
			if (kvm_tdp_mmu_zap_gfn_range(&vm, gfn, gfn + (rnd(2) ? 512 : 3)))
				kvm_flush_remote_tlbs(&vm);
			write_unlock(&vm.mmu_lock);
			break;
		case 2:
			write_lock(&vm.mmu_lock);
			kvm_tdp_mmu_zap_collapsible_sptes(&vm, slot);
			write_unlock(&vm.mmu_lock);
			break;
		case 3:
			write_lock(&vm.mmu_lock);
			if (rnd(2) ? kvm_tdp_mmu_wrprot_slot(&vm, slot, rnd(2) ? PG_LEVEL_4K : PG_LEVEL_2M) :
				     kvm_tdp_mmu_clear_dirty_slot(&vm, slot))
				kvm_flush_remote_tlbs(&vm);
			write_unlock(&vm.mmu_lock);
			break;
		case 4:
		case 9:
		case 10:
			/* Faults make pages writable that were just write-protected. */
			if (logging) {
				write_lock(&vm.mmu_lock);
				if (kvm_tdp_mmu_wrprot_slot(&vm, slot, PG_LEVEL_4K))
					kvm_flush_remote_tlbs(&vm);
				write_unlock(&vm.mmu_lock);
			}
			write_lock(&vm.mmu_lock);
			young = kvm_tdp_mmu_age_hva_range(&vm, 0, AREAS * AREA_GFNS * PAGE_SIZE);
			no_writer_is_forgotten();
			if (young && rnd(2))
				kvm_flush_remote_tlbs(&vm);
			write_unlock(&vm.mmu_lock);
			break;
		case 5:
			/* NX huge page recovery */
			write_lock(&vm.mmu_lock);
			if (!list_empty(&vm.arch.lpage_disallowed_mmu_pages)) {
				sp = list_first_entry(&vm.arch.lpage_disallowed_mmu_pages, struct kvm_mmu_page,
						      lpage_disallowed_link);
				if (kvm_tdp_mmu_zap_sp(&vm, sp))
					kvm_flush_remote_tlbs(&vm);
			}
			write_unlock(&vm.mmu_lock);
			break;
		case 6:
			write_lock(&vm.mmu_lock);
			nx_huge_pages = !rnd(4);
			write_unlock(&vm.mmu_lock);
			break;
		case 7:
			use_log(slot);
			break;
		case 8:
			protect(slot);
			break;
		default:
			turn();
		}
	}
}

/* The last vCPU ends the other tasks. The last task ends the run. */
static void task_body(void)
{
	int i, left = 0, vcpus_left = 0;

	if (self == &tasks[RCU])
		rcu_task();
	else if (self == &tasks[MANAGER])
		manager_task();
	else
		vcpu_task();
	self->ended = true;
	for (i = 0; i < TASKS; i++) {
		left += !tasks[i].ended;
		vcpus_left += i < VCPUS && !tasks[i].ended;
	}
	done = !vcpus_left;
	if (left)
		turn();
	setcontext(&home);
}

static void run_tasks(void)
{
	struct task *task;

	for (task = tasks; task < tasks + TASKS; task++) {
		getcontext(&task->context);
		task->context.uc_stack.ss_size = 1 << 20;
		task->context.uc_stack.ss_sp = malloc(task->context.uc_stack.ss_size);
		makecontext(&task->context, task_body, 0);
	}
	running = true;
	swapcontext(&home, &self->context);
	running = false;
}

static long count_tables(u64 *table, int level)
{
	long count = 1;
	int i;

	for (i = 0; i < 512; i++) {
		if (is_frozen_spte(table[i]))
			die("an SPTE of level %d is frozen for good", level);
		if (is_shadow_present_pte(table[i]) && !is_last_spte(table[i], level))
			count += count_tables(__va(table[i] & PT64_BASE_ADDR_MASK), level - 1);
	}
	return count;
}

int main(int argc, char **argv)
{
	struct kvm_mmu_page *sp;
	long linked, listed = 0;
	int i;

	faults_wanted = strtoul(argv[1], NULL, 10);
	rnd_state = seed = strtoul(argv[2], NULL, 10);
	printf("%d vCPUs, %lu faults each, seed %u\n", VCPUS, faults_wanted, seed);
	fflush(stdout);

	INIT_LIST_HEAD(&vm.arch.lpage_disallowed_mmu_pages);
	vm.slots.slot.npages = AREAS * AREA_GFNS;
	tdp_mmu_enabled = true;
	kvm_mmu_init_tdp_mmu(&vm);
	for (i = 0; i < VCPUS; i++) {
		vcpus[i].kvm = &vm;
		vcpus[i].arch.mmu = &vcpus[i].arch.root_mmu;
		vcpus[i].arch.mmu->shadow_root_level = 4;
		vcpus[i].arch.mmu->root_hpa = kvm_tdp_mmu_get_vcpu_root_hpa(&vcpus[i]);
	}

	run_tasks();
	rcu_grace_period();

	linked = count_tables(__va(vcpus[0].arch.mmu->root_hpa), 4);
	list_for_each_entry(sp, &vm.arch.tdp_mmu_pages, link)
		listed++;
	if (linked != listed + 1 || linked != tables)
		die("%ld tables are linked, %ld listed besides the root, %ld not freed", linked, listed, tables);

	printf("faults: %lu without mmu_lock, %lu fixed, %lu spurious, %lu to be retried, %lu emulated; %lu flushes, %lu TLB hits, %lu walks from a cached table\n",
	       fast, results[RET_PF_FIXED], results[RET_PF_SPURIOUS], results[RET_PF_RETRY], results[RET_PF_EMULATE], flushes,
	       tlb_hits, cached_walks);
	printf("%ld tables, all linked and listed\n", linked);

	write_lock(&vm.mmu_lock);
	for (i = 0; i < VCPUS; i++)
		tdp_mmu_put_root(&vm, to_shadow_page(vcpus[i].arch.mmu->root_hpa));
	write_unlock(&vm.mmu_lock);
	kvm_mmu_uninit_tdp_mmu(&vm);
	rcu_grace_period();
	if (tables || !list_empty(&vm.arch.lpage_disallowed_mmu_pages))
		die("%ld tables are left", tables);
	puts("ok");
	return 0;
}
