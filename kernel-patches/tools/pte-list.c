// SPDX-License-Identifier: GPL-2.0-only
/*
 * Runs the reverse-map code of a kernel's arch/x86/kvm/mmu/mmu.c in user space:
 * a random test against a plain model, then what an add and a removal cost at
 * given chain lengths.  The script `pte-list` cuts the code out of the source and
 * passes it as EXTRACT.  Built twice: with -fsanitize=thread, whose hooks below
 * report each memory access, it counts distinct cache lines; without, it counts
 * instructions by single-stepping.
 */
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

typedef uint64_t u64;
typedef uint32_t u32;
#define UNTRACED __attribute__((no_sanitize("thread"), noinline))

/* What the extract needs of the kernel. */
struct kvm_vcpu;
struct kvm_rmap_head {
	unsigned long val;
};

struct list_head {
	struct list_head *next, *prev;
};

#define container_of(p, t, m) ((t *)((char *)(p) - offsetof(t, m)))
#define list_next_entry(p, m) container_of((p)->m.next, __typeof__(*(p)), m)
#define list_prev_entry(p, m) container_of((p)->m.prev, __typeof__(*(p)), m)
#define IS_ENABLED(x) 1
#define BIT(n) (1ul << (n))
#define BUG() abort()
#define BUG_ON(c) do { if (c) abort(); } while (0)
#define WARN_ON_ONCE BUG_ON
#define pr_err(...) fprintf(stderr, __VA_ARGS__)
#define rmap_printk(...) do { } while (0)
#define is_shadow_present_pte(spte) true

static inline void INIT_LIST_HEAD(struct list_head *head)
{
	head->next = head->prev = head;
}

static inline void list_add_tail(struct list_head *entry, struct list_head *head)
{
	entry->prev = head->prev;
	entry->next = head;
	head->prev->next = entry;
	head->prev = entry;
}

static inline void list_del(struct list_head *entry)
{
	entry->prev->next = entry->next;
	entry->next->prev = entry->prev;
}

static size_t live_bytes, allocs, frees;
/* Zeroed memory for the measurements, allocated in a few instructions. */
static char *arena;

UNTRACED static void *desc_alloc(size_t size)
{
	char *desc = arena;

	/* A slab object of 2^n bytes is aligned to its size. */
	if (desc) {
		arena += size;
		live_bytes += size;
		return desc;
	}
	desc = aligned_alloc(size, size);
	memset(desc, 0, size);
	live_bytes += size;
	allocs++;
	return desc;
}

UNTRACED static void desc_free(void *desc, size_t size)
{
	live_bytes -= size;
	if (arena)
		return;
	frees++;
	memset(desc, 0xa5, size);
	free(desc);
}

struct pte_list_desc;
struct pte_list_short;
static struct pte_list_desc *mmu_alloc_pte_list_desc(struct kvm_vcpu *vcpu);
static void mmu_free_pte_list_desc(struct pte_list_desc *desc);
static struct pte_list_short *mmu_alloc_pte_list_short(struct kvm_vcpu *vcpu);
static void mmu_free_pte_list_short(struct pte_list_short *list);

struct kvm;
struct kvm_mmu_memory_cache;
#define kvm_mmu_memory_cache_alloc(cache) desc_alloc(sizeof(struct pte_list_desc))
#define KVM_BUG_ON_DATA_CORRUPTION(c, kvm) ({ BUG_ON(c); 0; })

#include EXTRACT

static struct pte_list_desc *mmu_alloc_pte_list_desc(struct kvm_vcpu *vcpu)
{
	return desc_alloc(sizeof(struct pte_list_desc));
}

static void mmu_free_pte_list_desc(struct pte_list_desc *desc)
{
	desc_free(desc, sizeof(*desc));
}

#ifdef PTE_LIST_SHORT
static struct pte_list_short *mmu_alloc_pte_list_short(struct kvm_vcpu *vcpu)
{
	return desc_alloc(sizeof(struct pte_list_short));
}

static void mmu_free_pte_list_short(struct pte_list_short *list)
{
	desc_free(list, sizeof(*list));
}
#endif

/* Each SPTE is in a table of its own, as usual for the SPTEs of one gfn. */
#define MAX_SPTES 1100
static u64 *sptes[MAX_SPTES];

__attribute__((noinline)) static int add(struct kvm_rmap_head *head, u64 *spte)
{
	return pte_list_add(NULL, spte, head);
}

__attribute__((noinline)) static void del(struct kvm_rmap_head *head, u64 *spte)
{
#ifdef TAKES_CACHE
	pte_list_remove(NULL, spte, head);
#else
	__pte_list_remove(spte, head);
#endif
}

#ifdef __SANITIZE_THREAD__

static uintptr_t lines[1 << 16];
/* volatile, because the compiler inserts the hooks after its alias analysis. */
static volatile unsigned int nr_lines;
static volatile bool tracing;

UNTRACED static void touch(void *addr, unsigned long size)
{
	uintptr_t line = (uintptr_t)addr / 64, last = ((uintptr_t)addr + size - 1) / 64;
	char here;
	unsigned int i;

	/* The stack stays in the cache. */
	if (!tracing || labs((char *)addr - &here) < 65536)
		return;
	for (; line <= last; line++) {
		for (i = 0; i < nr_lines && lines[i] != line; i++)
			;
		if (i == nr_lines)
			lines[nr_lines++] = line;
	}
}

#define HOOK(n) \
	void __tsan_read##n(void *p) { touch(p, n); } \
	void __tsan_write##n(void *p) { touch(p, n); } \
	void __tsan_unaligned_read##n(void *p) { touch(p, n); } \
	void __tsan_unaligned_write##n(void *p) { touch(p, n); }
HOOK(1) HOOK(2) HOOK(4) HOOK(8) HOOK(16)
void __tsan_read_range(void *p, unsigned long n) { touch(p, n); }
void __tsan_write_range(void *p, unsigned long n) { touch(p, n); }
void __tsan_func_entry(void *p) { }
void __tsan_func_exit(void) { }
void __tsan_init(void) { }
void *__tsan_memcpy(void *d, const void *s, unsigned long n)
{
	touch(d, n);
	touch((void *)s, n);
	return memcpy(d, s, n);
}

#define FIGURE "cache lines"
static void begin(void) { nr_lines = 0; tracing = true; }
static unsigned long end(void) { tracing = false; return nr_lines; }

#else

#define FIGURE "instructions"
static void begin(void) { asm volatile("int3" ::: "memory"); }
static unsigned long end(void) { asm volatile("int3" ::: "memory"); return 0; }

#endif

static unsigned int seed = 1;

static unsigned int rnd(unsigned int below)
{
	seed = seed * 1103515245 + 12345;
	return (seed >> 8) % below;
}

static void check_chain(struct kvm_rmap_head *head, const bool *present, unsigned int count)
{
	static unsigned char seen[MAX_SPTES];
	struct rmap_iterator iter;
	unsigned int n = 0;
	u64 *sptep;

	memset(seen, 0, sizeof(seen));
	for (sptep = rmap_get_first(head, &iter); sptep; sptep = rmap_get_next(&iter)) {
		if (!present[*sptep] || seen[*sptep]++) {
			printf("FAIL: spte %lu is listed but was removed, or twice\n", *sptep);
			exit(1);
		}
		n++;
	}
	if (n != count) {
		printf("FAIL: the chain lists %u sptes of %u\n", n, count);
		exit(1);
	}
#ifdef HAVE_COUNT
	if (pte_list_count(head) != count) {
		printf("FAIL: pte_list_count is %u, must be %u\n", pte_list_count(head), count);
		exit(1);
	}
#endif
}

static void expect_count(unsigned int r, unsigned int count)
{
	/* Up to 5.10 the sum ends at the first desc with a hole, which gets the spte. */
	if (EXACT_COUNT ? r != count : r > count) {
		printf("FAIL: pte_list_add returns %u, must be %u\n", r, count);
		exit(1);
	}
}

/* Grow a chain to max, add and remove at random there, then empty it in some order. */
static void random_round(unsigned int max, unsigned int steps, unsigned int order)
{
	struct kvm_rmap_head head = { 0 };
	static bool present[MAX_SPTES];
	unsigned int count = 0, i, n;

	for (n = 0; n < max; n++) {
		expect_count(add(&head, sptes[n]), count++);
		present[n] = true;
	}
	while (steps--) {
		n = rnd(max);
		if (present[n]) {
			del(&head, sptes[n]);
			count--;
		} else {
			expect_count(add(&head, sptes[n]), count++);
		}
		present[n] = !present[n];
		if (steps % 61 == 0 || max < 20)
			check_chain(&head, present, count);
	}
	for (i = 0; count; i++) {
		n = order == 0 ? i : order == 1 ? max - 1 - i : rnd(max);
		if (!present[n])
			continue;
		del(&head, sptes[n]);
		present[n] = false;
		count--;
		check_chain(&head, present, count);
	}
	if (head.val || live_bytes || allocs != frees) {
		printf("FAIL: %zu bytes leaked\n", live_bytes);
		exit(1);
	}
}

static void random_test(void)
{
	unsigned int round, order;

	for (round = 0; round < 400; round++) {
		order = round % 3;
		random_round(1 + rnd(6), 50, order);
		random_round(1 + rnd(60), rnd(2) * 500, order);
		if (round % 10 == 0)
			random_round(1 + rnd(MAX_SPTES - 1), rnd(2) * 5000, order);
	}
}

#define ARENA (1 << 20)

enum order { OLDEST, NEWEST, MIDDLE };

/* Builds a chain of n - 1, measures the add of the nth and the removal of one. */
static void one(int n, enum order order, unsigned long *add_cost, unsigned long *del_cost,
		size_t *bytes)
{
	struct kvm_rmap_head *head = aligned_alloc(64, 64);
	int i, victim = order == OLDEST ? 0 : order == NEWEST ? n - 1 : n / 2;

	u64 *newest = sptes[n - 1], *removed = sptes[victim];

	head->val = 0;
	arena = aligned_alloc(4096, ARENA);
	memset(arena, 0, ARENA);
	for (i = 0; i < n - 1; i++) {
		/* A desc that replaces a smaller one is aligned too. */
		arena = (char *)(((uintptr_t)arena + 127) & ~127ul);
		add(head, sptes[i]);
	}
	arena = (char *)(((uintptr_t)arena + 127) & ~127ul);
	begin();
	add(head, newest);
	*add_cost = end();
	*bytes = live_bytes;
	begin();
	del(head, removed);
	*del_cost = end();
	for (i = 0; i < n; i++)
		if (i != victim)
			del(head, sptes[i]);
	free(head);
	arena = NULL;
}

static const int lengths[] = { 1, 2, 3, 4, 5, 14, 15, 16, 100, 250, 500, 999, 1000, 1001 };
#define NR_LENGTHS (sizeof(lengths) / sizeof(lengths[0]))

#ifndef __SANITIZE_THREAD__
/* The child traps before and after each measured call; count the steps between. */
static void count_steps(pid_t pid, unsigned long *steps, unsigned int nr)
{
	bool stepping = false;
	unsigned int n = 0;
	int status;

	waitpid(pid, &status, 0);
	ptrace(PTRACE_CONT, pid, 0, 0);
	for (;;) {
		waitpid(pid, &status, 0);
		if (!WIFSTOPPED(status))
			break;
		if (stepping) {
			/* the trap itself arrives as a step over int3 */
			long op = ptrace(PTRACE_PEEKTEXT, pid,
					 ptrace(PTRACE_PEEKUSER, pid, 16 * 8, 0), 0);
			if ((op & 0xff) != 0xcc) {
				steps[n]++;
				ptrace(PTRACE_SINGLESTEP, pid, 0, 0);
				continue;
			}
			/* step onto the trap, and take it */
			ptrace(PTRACE_CONT, pid, 0, 0);
			waitpid(pid, &status, 0);
			stepping = false;
			if (++n == nr)
				break;
			ptrace(PTRACE_CONT, pid, 0, 0);
		} else {
			stepping = true;
			ptrace(PTRACE_SINGLESTEP, pid, 0, 0);
		}
	}
	ptrace(PTRACE_KILL, pid, 0, 0);
	waitpid(pid, &status, 0);
}
#endif

int main(void)
{
	static const char *const name[] = { "oldest", "newest", "middle" };
	unsigned long cost[3][NR_LENGTHS][2] = { 0 };
	size_t bytes[NR_LENGTHS] = { 0 };
	unsigned int i, o;

	for (i = 0; i < MAX_SPTES; i++) {
		sptes[i] = aligned_alloc(4096, 4096);
		*sptes[i] = i;
	}
	random_test();

	for (o = 0; o < 3; o++) {
		for (i = 0; i < NR_LENGTHS; i++) {
#ifdef __SANITIZE_THREAD__
			one(lengths[i], o, &cost[o][i][0], &cost[o][i][1], &bytes[i]);
#else
			unsigned long unused[2];
			pid_t pid = fork();

			if (!pid) {
				ptrace(PTRACE_TRACEME, 0, 0, 0);
				raise(SIGSTOP);
				one(lengths[i], o, &unused[0], &unused[1], &bytes[i]);
				_exit(0);
			}
			count_steps(pid, cost[o][i], 2);
#endif
		}
	}

	printf("%-28s", FIGURE ", chain length");
	for (i = 0; i < NR_LENGTHS; i++)
		printf("%7d", lengths[i]);
	printf("\n%-28s", "add");
	for (i = 0; i < NR_LENGTHS; i++)
		printf("%7lu", cost[0][i][0]);
	for (o = 0; o < 3; o++) {
		printf("\nremove the %-17s", name[o]);
		for (i = 0; i < NR_LENGTHS; i++)
			printf("%7lu", cost[o][i][1]);
	}
#ifdef __SANITIZE_THREAD__
	printf("\n%-28s", "bytes of descriptors");
	for (i = 0; i < NR_LENGTHS; i++)
		printf("%7zu", bytes[i]);
#endif
	printf("\n");
	return 0;
}
