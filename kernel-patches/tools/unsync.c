// SPDX-License-Identifier: GPL-2.0-only
/*
 * Runs the code that marks shadow pages as unsync in user space. The script `unsync` names the
 * source.
 *
 * The guest is a hypervisor: L1 runs on the TDP MMU, and KVM shadows the page tables that L1 has
 * made for L2. One of these, a page of L1's memory, is shadowed by two pages, of two roots, and
 * write-protected. Two vCPUs in L1 write to it at the same time. Each faults, holds mmu_lock for
 * read, calls mmu_try_to_unsync_pages(), maps the page writable, writes to it, and switches to L2,
 * which flushes its TLB: KVM checks whether the root has anything unsync below it, and if so takes
 * mmu_lock for write and syncs the shadow. L2 must then see what its own vCPU wrote.
 *
 * A task is a vCPU. Tasks take turns on one thread, at random, at each memory access of the code
 * under test. Sometimes one sleeps for as long as the other needs for all that, as with an
 * interrupt of the host, or with a host that is itself a guest.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <unistd.h>

/* Code that is not under test makes no turns. */
#define quiet __attribute__((no_sanitize("thread")))

typedef uint64_t u64;
typedef uint8_t u8;
typedef uint32_t u32;
typedef u64 gfn_t, hpa_t;

#define VCPUS 2
#define LEVELS 4
#define ROOTS 2

static unsigned int seed;
static u64 rnd_state;

quiet static u32 rnd(u32 n)
{
	rnd_state = rnd_state * 6364136223846793005ull + 1442695040888963407ull;
	return (u32)(rnd_state >> 33) % n;
}

struct task {
	ucontext_t context;
	char stack[64 << 10];
	bool ended;
	/* The number of turns for which it does not run. */
	u64 sleeps;
};

static struct task tasks[VCPUS], *self;
static ucontext_t home;
static bool running;
static u64 turns;

quiet static void turn(void)
{
	struct task *last = self;

	if (!running)
		return;
	do {
		turns++;
		self = &tasks[rnd(VCPUS)];
	} while (self->ended || self->sleeps > turns);
	if (self != last)
		swapcontext(&last->context, &self->context);
}

quiet static void access_memory(void)
{
	if (!running)
		return;
	if (!rnd(64))
		self->sleeps = turns + rnd(400);
	if (self->sleeps > turns || !rnd(4))
		turn();
}

#define HOOK(name) quiet void __tsan_##name(void *address) { access_memory(); }
HOOK(read1) HOOK(read2) HOOK(read4) HOOK(read8) HOOK(read16)
HOOK(write1) HOOK(write2) HOOK(write4) HOOK(write8) HOOK(write16)
HOOK(unaligned_read8) HOOK(unaligned_write8)
quiet void __tsan_func_entry(void *pc) { }
quiet void __tsan_func_exit(void) { }
quiet void __tsan_init(void) { }

/* The kernel's basics. Tasks share one CPU, on which memory is ordered. */
#define likely(x) (x)
#define unlikely(x) (x)
#define BITS_PER_LONG 64
#define DECLARE_BITMAP(name, bits) unsigned long name[(bits) / 64]
#define READ_ONCE(x) (*(const volatile __typeof__(x) *)&(x))
#define WRITE_ONCE(x, v) (*(volatile __typeof__(x) *)&(x) = (v))
#define smp_load_acquire(p) READ_ONCE(*(p))
#define smp_store_release(p, v) WRITE_ONCE(*(p), v)
#define smp_wmb() __asm__ volatile("" ::: "memory")
#define smp_rmb() __asm__ volatile("" ::: "memory")
#define WARN_ON(x) ({ bool __x = (x); if (__x) die("a warning of the kernel: " #x); __x; })
#define WARN_ON_ONCE WARN_ON
#define lockdep_assert_held_read(x)
#define lockdep_assert_held(x)

#define die(...) do {						\
	fprintf(stderr, "FAILED: " __VA_ARGS__);		\
	fprintf(stderr, " (seed %u)\n", seed);			\
	_exit(1);						\
} while (0)

typedef struct { bool held; } spinlock_t;

quiet static void spin_lock(spinlock_t *lock)
{
	turn();
	while (lock->held)
		turn();
	lock->held = true;
}

quiet static void spin_unlock(spinlock_t *lock)
{
	lock->held = false;
	turn();
}

static inline bool __test_and_set_bit(long nr, volatile unsigned long *map)
{
	unsigned long word = map[nr / 64];

	map[nr / 64] = word | 1ul << nr % 64;
	return word >> nr % 64 & 1;
}

/* KVM's types, as far as the code under test uses them */
#define PG_LEVEL_4K 1
#define PG_LEVEL_2M 2
#define PT64_ROOT_4LEVEL 4
#define VALID_PAGE(x) ((x) != 0)

struct kvm_rmap_head { u64 *sptep; };
struct rmap_iterator { int unused; };
#define for_each_rmap_spte(head, iter, sptep)			\
	for (sptep = (head)->sptep; sptep; sptep = NULL)

struct kvm_mmu_page {
	bool unsync;
	union { struct { u8 level; bool direct; }; u32 word; } role;
	gfn_t gfn;
	u64 *spt;
	unsigned int unsync_children;
	struct kvm_rmap_head parent_ptes;
	DECLARE_BITMAP(unsync_child_bitmap, 512);
};

struct kvm_arch { spinlock_t mmu_unsync_pages_lock; };
struct kvm {
	struct kvm_arch arch;
	struct { u64 mmu_unsync; } stat;
	int readers;
	bool writer;
};
struct kvm_vcpu { struct kvm *kvm; };
struct kvm_memory_slot { int unused; };

static struct kvm vm;
static struct kvm_mmu_page pages[ROOTS][LEVELS];
static u64 tables[ROOTS][LEVELS][512];

/* The guest's page table: whether L1 may write to it, its content, and its shadows' content */
static bool writable;
static u64 content, shadow[ROOTS];
static u64 faults, syncs;

/* A leaf is pages[][0]. Its entry is the 7th of the page above. */
#define INDEX 7

quiet static struct kvm_mmu_page *sptep_to_sp(u64 *sptep)
{
	return &pages[0][0] + (sptep - &tables[0][0][0]) / 512;
}

quiet static int spte_index(u64 *sptep)
{
	return (sptep - &tables[0][0][0]) % 512;
}

#define root_to_sp(root) ((struct kvm_mmu_page *)(root))
#define to_shadow_page(root) root_to_sp(root)
#define kvm_mmu_is_dummy_root(root) false
#define trace_kvm_mmu_unsync_page(sp)
#define kvm_gfn_is_write_tracked(kvm, slot, gfn) false
#define kvm_slot_page_track_is_active(...) false
#define kvm_page_track_is_active(...) false
#define kvm_gfn_is_lpage_allowed(kvm, slot, gfn, level) false
#define for_each_gfn_valid_sp_with_gptes(kvm, sp, gfn)		\
	for (sp = &pages[0][0]; sp <= &pages[ROOTS - 1][0]; sp += LEVELS)
#define for_each_gfn_indirect_valid_sp for_each_gfn_valid_sp_with_gptes

#include EXTRACT

quiet static void read_lock(void)
{
	while (vm.writer)
		turn();
	vm.readers++;
	turn();
}

quiet static void read_unlock(void)
{
	vm.readers--;
	turn();
}

quiet static void write_lock(void)
{
	while (vm.writer || vm.readers)
		turn();
	vm.writer = true;
}

/* The effect of mmu_sync_children(): everything is write-protected again, and then copied. */
quiet static void sync_children(int root)
{
	struct kvm_mmu_page *sp = pages[root];
	int level;

	if (!sp[0].unsync)
		die("a root has unsync children, and no page below it is unsync");
	writable = false;
	shadow[root] = content;
	sp[0].unsync = false;
	for (level = 1; level < LEVELS; level++) {
		sp[level].unsync_children = 0;
		memset(sp[level].unsync_child_bitmap, 0, sizeof(sp[level].unsync_child_bitmap));
	}
	syncs++;
}

quiet static void flush(int root, u64 wrote)
{
	if (is_unsync_root((hpa_t)&pages[root][LEVELS - 1])) {
		write_lock();
		/* Another vCPU may have done it before this one got the lock. */
		if (pages[root][LEVELS - 1].unsync_children)
			sync_children(root);
		vm.writer = false;
		turn();
	}
	if (shadow[root] < wrote)
		die("a vCPU wrote to a page table and flushed its TLB, and KVM still uses what was there before");
}

quiet static void vcpu(int id)
{
	struct kvm_memory_slot slot;
	int root = rnd(ROOTS), times;
	u64 wrote;

	for (times = 0; times < 3; times++) {
		/* The guest's write either faults or succeeds. */
		for (;;) {
			turn();
			if (writable) {
				wrote = ++content;
				break;
			}
			faults++;
			read_lock();
			if (!mmu_try_to_unsync_pages(&vm, &slot, 0, MAY_UNSYNC, false))
				writable = true;
			read_unlock();
		}
		flush(root, wrote);
	}
	self->ended = true;
	for (id = 0; id < VCPUS; id++)
		if (!tasks[id].ended)
			break;
	if (id == VCPUS) {
		running = false;
		setcontext(&home);
	}
	turn();
}

quiet static void run(void)
{
	int i, level;

	memset(&vm, 0, sizeof(vm));
	memset(pages, 0, sizeof(pages));
	memset(shadow, 0, sizeof(shadow));
	content = 0;
	writable = false;
	for (i = 0; i < ROOTS; i++) {
		for (level = 0; level < LEVELS; level++) {
			pages[i][level].role.level = level + 1;
			pages[i][level].spt = tables[i][level];
			if (level < LEVELS - 1)
				pages[i][level].parent_ptes.sptep = &tables[i][level + 1][INDEX];
		}
	}
	for (i = 0; i < VCPUS; i++) {
		tasks[i].ended = false;
		tasks[i].sleeps = 0;
		getcontext(&tasks[i].context);
		tasks[i].context.uc_stack.ss_sp = tasks[i].stack;
		tasks[i].context.uc_stack.ss_size = sizeof(tasks[i].stack);
		makecontext(&tasks[i].context, (void (*)(void))vcpu, 1, i);
	}
	running = true;
	self = &tasks[rnd(VCPUS)];
	swapcontext(&home, &self->context);
}

quiet int main(int argc, char **argv)
{
	long runs = atol(argv[1]), i;

	seed = strtoul(argv[2], NULL, 10);
	rnd_state = seed;
	for (i = 0; i < runs; i++)
		run();
	printf("%ld runs, %llu faults, %llu syncs: each flush saw what its vCPU wrote (seed %u)\n",
	       runs, (unsigned long long)faults, (unsigned long long)syncs, seed);
	return 0;
}
