// SPDX-License-Identifier: GPL-2.0-only
/*
 * Runs the decisions of tlb.c in a guest with the CR3 cache at a context switch. The script
 * `cr3-slots` names the source.
 *
 * The guest has one CPU, and contexts whose page tables change: by this CPU, or by another CPU,
 * which sends no interrupt because the context is not loaded here. Each change makes a flush due
 * and increments tlb_gen. A context that ends leaves its page directory to another one.
 *
 * The host shadows each page directory with a root. It holds the four that were used last, and
 * publishes them while the CPU has a registered page. A root maps what was in the page directory
 * when the root was last synced, as if it missed each later change. (A real root misses only
 * changes in page tables that are out of sync.) A load of the guest's own value syncs, unless it
 * has bit 63 and the host holds the root. The load of a published value does not sync.
 *
 * After each switch the root must belong to the loaded context, and have each of its changes up to
 * the tlb_gen that the switch has seen.
 *
 * switch_mm_irqs_off() and flush_tlb_func() around the functions under test are not the kernel's
 * own here. switch_to() and flush() below are short versions of them.
 */
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t u64;
typedef uint16_t u16;
typedef struct { u64 unused; } pgd_t;
typedef struct { u64 counter; } atomic64_t;

struct mm_struct {
	pgd_t *pgd;
	struct { u64 ctx_id; atomic64_t tlb_gen; } context;
};

#define TLB_NR_DYN_ASIDS 6
static struct {
	struct mm_struct *loaded_mm;
	u16 loaded_mm_asid, next_asid;
	bool invalidate_other;
	struct { u64 ctx_id, tlb_gen; } ctxs[TLB_NR_DYN_ASIDS];
} cpu_tlbstate = { .next_asid = 1 };

static unsigned int seed;
static unsigned long steps_done;
static u64 rnd_state;
/* During a pause the CPU has no registered page. */
static bool pcids, tlb_slots_without_pcid, registered, pauses;

static void __attribute__((noreturn)) fail(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	fputs("FAILED: ", stdout);
	vprintf(format, args);
	printf(" (step %lu, %s PCIDs, seed %u)\n", steps_done, pcids ? "with" : "without", seed);
	exit(1);
}

static uint32_t rnd(uint32_t n)
{
	rnd_state = rnd_state * 6364136223846793005ull + 1442695040888963407ull;
	return (uint32_t)(rnd_state >> 33) % n;
}

/* What the functions under test call. */
#define X86_FEATURE_PCID 1
#define static_cpu_has(feature) pcids
#define boot_cpu_has(feature) pcids
#define static_branch_unlikely(key) (*(key))
#define this_cpu_read(variable) (variable)
#define this_cpu_write(variable, value) ((variable) = (value))
#define this_cpu_add_return(variable, value) ((variable) += (value))
#define VM_WARN_ON_ONCE(condition) do { if (condition) fail("%s", #condition); } while (0)
#define MAX_ASID_AVAILABLE 4094
#define CR3_NOFLUSH (1ull << 63)
#define __sme_pa(pgd) ((u64)(pgd))

static u16 kern_pcid(u16 asid) { return asid + 1; }
static void clear_asid_other(void) { fail("another context is to be flushed, as for page table isolation"); }
static void invalidate_user_asid(u16 asid) { }
static void write_cr3(u64 cr3);
static bool kvm_cr3_cache_load(u64 cr3);
static bool kvm_cr3_cache_pauses(void) { return pauses; }
static void kvm_cr3_cache_flush(void) { }
#define inline
#include EXTRACT

/* The guest's contexts, and the page directories that they use in turn. */
#define MMS 9
#define PGDS 11
static struct mm_struct mms[MMS];
static struct mm_struct *owner[PGDS];
static u64 last_ctx_id = 1;

static pgd_t *pgd_at(int nr) { return (pgd_t *)((u64)(nr + 1) << 12); }
static struct mm_struct *owner_of(u64 cr3) { return owner[((cr3 & ~CR3_NOFLUSH) >> 12) - 1]; }

/* The host's roots: the current one, then those used before. */
#define ROOTS 4
static struct root { u64 cr3, ctx_id, gen; } roots[ROOTS];
static unsigned long hits, loads, flushes;

static void sync(struct root *root)
{
	const struct mm_struct *mm = owner_of(root->cr3);

	root->ctx_id = mm->context.ctx_id;
	root->gen = mm->context.tlb_gen.counter;
}

/* Makes the root of @cr3 the current one. Returns true if it was held. */
static bool use_root(u64 cr3)
{
	struct root root = { .cr3 = cr3 };
	int i;

	for (i = 0; i < ROOTS - 1 && roots[i].cr3 != cr3; i++)
		;
	if (roots[i].cr3 == cr3)
		root = roots[i];
	memmove(roots + 1, roots, i * sizeof(root));
	roots[0] = root;
	return root.ctx_id;
}

static void write_cr3(u64 cr3)
{
	bool held = use_root(cr3 & ~CR3_NOFLUSH);

	loads++;
	if (!pcids && cr3 & CR3_NOFLUSH)
		fail("bit 63 of CR3 is set");
	if (!held || !(cr3 & CR3_NOFLUSH))
		sync(&roots[0]);
}

static bool kvm_cr3_cache_load(u64 cr3)
{
	/* With PCIDs the host publishes values with bit 63, without PCIDs values without it. */
	for (int i = 1; registered && i < ROOTS; i++) {
		if (!roots[i].ctx_id || (roots[i].cr3 | (pcids ? CR3_NOFLUSH : 0)) != cr3)
			continue;
		use_root(roots[i].cr3);
		hits++;
		return true;
	}
	return false;
}

static void zap(void)
{
	memset(roots + 1, 0, sizeof(roots) - sizeof(roots[0]));
	sync(&roots[0]);
}

static void switch_to(struct mm_struct *next)
{
	u64 next_tlb_gen = next->context.tlb_gen.counter;
	bool need_flush;
	u16 asid;

	if (next == cpu_tlbstate.loaded_mm)
		return;
	choose_new_asid(next, next_tlb_gen, &asid, &need_flush);
	if (need_flush) {
		cpu_tlbstate.ctxs[asid].ctx_id = next->context.ctx_id;
		cpu_tlbstate.ctxs[asid].tlb_gen = next_tlb_gen;
	}
	flushes += need_flush;
	load_new_mm_cr3(next->pgd, asid, LAM need_flush);
	cpu_tlbstate.loaded_mm = next;
	cpu_tlbstate.loaded_mm_asid = asid;

	if (roots[0].ctx_id != next->context.ctx_id)
		fail("a context runs on the root of another one that had its page directory");
	if (roots[0].gen < next_tlb_gen)
		fail("a context runs on a root that lacks a flush");
}

/* The loaded context flushes itself: by a load of the same value, or for one address. */
static void flush(bool one)
{
	struct mm_struct *mm = cpu_tlbstate.loaded_mm;
	u16 asid = cpu_tlbstate.loaded_mm_asid;
	u64 gen = mm->context.tlb_gen.counter;

	if (cpu_tlbstate.ctxs[asid].ctx_id != mm->context.ctx_id)
		fail("the loaded context has no slot");
	/* INVLPG affects all roots, but only for that address. */
	if (one && cpu_tlbstate.ctxs[asid].tlb_gen + 1 == gen) {
		for (int i = 0; i < ROOTS; i++)
			if (roots[i].ctx_id == mm->context.ctx_id && roots[i].gen + 1 == gen)
				roots[i].gen = gen;
	} else {
		sync(&roots[0]);
	}
	cpu_tlbstate.ctxs[asid].tlb_gen = gen;
	if (roots[0].gen < gen)
		fail("a flush leaves the loaded root without a change");
}

static void start(struct mm_struct *mm)
{
	int nr;

	do
		nr = rnd(PGDS);
	while (owner[nr]);
	owner[nr] = mm;
	mm->pgd = pgd_at(nr);
	mm->context.ctx_id = ++last_ctx_id;
	mm->context.tlb_gen.counter = 1;
}

static void some_step(void)
{
	struct mm_struct *mm = &mms[rnd(rnd(2) ? MMS : 4)];

	switch (rnd(16)) {
	case 0 ... 8:
		switch_to(mm);
		break;
	case 9 ... 11:
		mm->context.tlb_gen.counter++;
		if (mm == cpu_tlbstate.loaded_mm)
			flush(rnd(2));
		break;
	case 12:
		/* A context ends, and another one takes its page directory. */
		if (mm == cpu_tlbstate.loaded_mm)
			break;
		for (int i = 0; i < PGDS; i++)
			if (owner[i] == mm)
				owner[i] = NULL;
		start(mm);
		break;
	case 13:
		zap();
		break;
	case 14:
		if (!rnd(8))
			registered = !registered;
		pauses = !registered && rnd(2);
		break;
	case 15:
		if (!rnd(8))
			tlb_slots_without_pcid = !tlb_slots_without_pcid;
		break;
	}
}

int main(int argc, char **argv)
{
	unsigned long steps = strtoul(argv[1], NULL, 0);
	unsigned long seen[2][3] = {};

	setvbuf(stdout, NULL, _IOLBF, 0);
	rnd_state = seed = strtoul(argv[2], NULL, 0);
	for (int round = 0; round < 2; round++) {
		pcids = round;
		memset(owner, 0, sizeof(owner));
		memset(roots, 0, sizeof(roots));
		memset(&cpu_tlbstate, 0, sizeof(cpu_tlbstate));
		cpu_tlbstate.next_asid = 1;
		hits = loads = flushes = 0;
		registered = tlb_slots_without_pcid = true;
		pauses = false;
		for (int i = 0; i < MMS; i++)
			start(&mms[i]);
		switch_to(&mms[0]);
		for (steps_done = 0; steps_done < steps / 2; steps_done++)
			some_step();
		if (!hits || !flushes)
			fail("%lu hits and %lu flushes: nothing was tried", hits, flushes);
		seen[round][0] = hits;
		seen[round][1] = loads;
		seen[round][2] = flushes;
	}
	printf("%lu steps; without PCIDs %lu hits, %lu loads, %lu flushes; with %lu, %lu, %lu: no flush was lacking (seed %u)\n",
	       steps, seen[0][0], seen[0][1], seen[0][2], seen[1][0], seen[1][1], seen[1][2], seed);
	return 0;
}
