// SPDX-License-Identifier: GPL-2.0-only
/*
 * Runs a kernel's stage-2 page-table code in user space. The script `stage2` names the source.
 *
 * Emulated hosts have no caches, and no TLB that keeps stale entries. A kernel without maintenance
 * passes every test there and is the fastest. Here each store to an entry, each TLB invalidation
 * and each cache maintenance call is recorded and checked against these rules:
 *
 * - a valid entry becomes another valid one, except for its permissions and access flag, only by
 *   being invalid in between (Arm ARM, break-before-make), and a block never replaces a valid
 *   table;
 * - an entry becomes valid only when no TLB can have anything else for any of its addresses: what
 *   was valid there, and everything below an unlinked table, has been invalidated by VMID, or by an
 *   IPA in it with its own level as the hint;
 * - before memory is mapped cacheable, exactly the mapped bytes are cleaned to the PoC, unless FWB;
 *   before instructions can be fetched from it, on mapping and on relaxing permissions, the
 *   instruction cache is invalidated for it, unless DIC, or VPIPT without VHE, where the TLB
 *   invalidation does it; nothing else is maintained; and all of it happens while the replaced
 *   entry is still valid;
 * - unmapped memory is cleaned afterwards, exactly;
 * - a table is freed when no entry points to it, no TLB has a path to it, and it has no valid
 *   counted entry; after that it is not accessed;
 * - nothing is written to a table that no entry points to;
 * - a table is referenced once by its allocator and once by each valid entry;
 * - a mapping takes no more tables than kvm_mmu_cache_min_pages();
 * - after each operation every address translates as in a plain array of pages.
 *
 * Random operations come first, then faults: the faults of several vCPUs are taken before any of
 * them is handled. They are handled one after the other, as user_mem_abort() does under the MMU
 * lock, until each access succeeds.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef uint64_t u64;
typedef uint32_t u32;
typedef uint8_t u8;
typedef u64 phys_addr_t;

static unsigned int seed;
static const char *doing = "nothing";
static char setting[80];

static void __attribute__((noreturn, format(printf, 1, 2))) fail(const char *form, ...);

/* The parts of the kernel that the code under test needs */

#define PAGE_SIZE	(1UL << PAGE_SHIFT)
#define PAGE_MASK	(~(PAGE_SIZE - 1))
#define PTRS_PER_PTE	(1 << (PAGE_SHIFT - 3))
#define SZ_4K		4096UL
#define BIT(n)		(1UL << (n))
#define GENMASK(h, l)	((~0UL << (l)) & (~0UL >> (63 - (h))))
#define FIELD_GET(m, v)	(((v) & (m)) >> __builtin_ctzl(m))
#define FIELD_PREP(m, v) (((u64)(v) << __builtin_ctzl(m)) & (m))
#define ALIGN_DOWN(x, a) ((x) & ~((u64)(a) - 1))
#define PAGE_ALIGN(x)	ALIGN_DOWN((x) + PAGE_SIZE - 1, PAGE_SIZE)
#define IS_ALIGNED(x, a) (!((x) & ((u64)(a) - 1)))
#define WARN_ON(c)	({ if (c) fail("the kernel warns: %s", #c); 0; })
#define WARN_ON_ONCE(c)	WARN_ON(c)
#define BUG_ON(c)	WARN_ON(c)
#define READ_ONCE(x)	(x)
#define WRITE_ONCE(x, v) store(&(x), v)
#define smp_store_release(p, v) store(p, v)
#define GFP_KERNEL	0
#define GFP_KERNEL_ACCOUNT 0
#define __GFP_ZERO	0
#define isb()		do { } while (0)
#define ishst		1
#define ish		2
#define dsb(kind)	barrier(kind)
#define __always_inline	inline

#define ARM64_HW_PGTABLE_LEVEL_SHIFT(n)	((PAGE_SHIFT - 3) * (4 - (n)) + 3)
#define ARM64_HW_PGTABLE_LEVELS(bits)	(((bits) - 4) / (PAGE_SHIFT - 3))
#define MT_DEVICE_nGnRE	5
#define MT_NORMAL	0
#define PAGE_S2_MEMATTR(attr) ((u64)(fwb ? FWB_##attr : PLAIN_##attr) << 2)
#define PLAIN_NORMAL	0xf
#define PLAIN_DEVICE_nGnRE 0x1
#define FWB_NORMAL	6
#define FWB_DEVICE_nGnRE 1
#define ARM64_HAS_STAGE2_FWB	1
#define ARM64_HAS_CACHE_DIC	2
#define cpus_have_const_cap(cap) ((cap) == ARM64_HAS_STAGE2_FWB ? fwb : dic)

#define IPA_BITS	40
#define START_LEVEL	(PAGE_SHIFT == 12 ? 1 : 2)
#define VTCR_EL2_TGRAN_SL0_BASE	(PAGE_SHIFT == 12 ? 2 : 3)
#define VTCR_EL2_SL0_MASK	GENMASK(7, 6)
#define VTCR_EL2_IPA(vtcr)	(64 - ((vtcr) & 0x3f))
#define VTCR	((64 - IPA_BITS) | FIELD_PREP(VTCR_EL2_SL0_MASK, VTCR_EL2_TGRAN_SL0_BASE - START_LEVEL))
/* kvm_mmu_cache_min_pages() */
#define MIN_PAGES	(4 - START_LEVEL - 1)

struct page {
	int refs;
	bool used, linked;
	u32 level;
	u64 ipa;
};
struct kvm_s2_mmu { int unused; };
struct kvm { struct { u64 vtcr; struct kvm_s2_mmu mmu; } arch; };
struct kvm_mmu_memory_cache { int nobjs; };

static bool fwb, dic, vhe;
static enum { PIPT, VPIPT, ALIASING } icache;

static void store(u64 *ptep, u64 new);
static void barrier(int kind);
static void *__va(u64 pa);
static u64 __pa(void *va);
static struct page *virt_to_page(void *va);
static bool reachable(struct page *page);
static void get_page(struct page *page);
static void put_page(struct page *page);
static int page_count(struct page *page) { return page->refs; }
static void free_page(unsigned long va);
static void *alloc_pages_exact(size_t size, int flags);
static void free_pages_exact(void *va, size_t size);
static unsigned long get_zeroed_page(int flags) { fail("hypervisor tables are not run here"); }
static void *kvm_mmu_memory_cache_alloc(struct kvm_mmu_memory_cache *mc);
static void __kvm_tlb_flush_vmid(struct kvm_s2_mmu *mmu);
static void __kvm_tlb_flush_vmid_ipa(struct kvm_s2_mmu *mmu, u64 ipa, int level);
#define kvm_call_hyp(f, ...) f(__VA_ARGS__)
static void __flush_dcache_area(void *va, size_t size);
static void invalidate_icache_range(unsigned long start, unsigned long end);
static void __flush_icache_all(void);
static bool icache_is_aliasing(void) { return icache == ALIASING; }
static bool icache_is_vpipt(void) { return icache == VPIPT; }
static bool is_kernel_in_hyp_mode(void) { return vhe; }

#include "header.h"
#include "pgtable.c"

/* Tables are pages of an arena; of the guest's memory there are addresses only. */

#define BLOCK		(1UL << ARM64_HW_PGTABLE_LEVEL_SHIFT(2))
#define LARGEST		(PAGE_SHIFT == 12 ? 1UL << 30 : BLOCK)
#define WINDOW		(2 * LARGEST)
#define PAGES		(WINDOW / PAGE_SIZE)
#define IPA		(1UL << 32)
/* Each IPA has two frames. An operation uses some of the second ones. */
#define FRAMES		(1UL << 36)
#define TABLES_PA	(1UL << 40)
#define TABLES		2048

static u8 *arena;
static u64 *shadow;
static struct page pages[TABLES];
static struct kvm kvm = { .arch.vtcr = VTCR };
static struct kvm_pgtable pgt;

/* The expected guest memory: one entry per page. */
static struct expected {
	u32 frame;
	u8 level, prot;
	bool old;
} *want;

/* What a TLB or a walk may still have of a removed entry. */
static struct stale { u64 ipa, size; u32 level; struct page *table; } stale[1 << 20];
static int stales;
/* Maintenance before its mapping, and unmapped memory that has not been cleaned yet. */
static struct area { u64 pa, size; } cleaned[8], invalidated[8], owed[1 << 20];
static int cleans, invalidates, owing;
static bool all_invalidated;
/* A valid entry has become invalid and has not been replaced yet. */
static bool broken;

static enum { MAP, UNMAP, ATTRS, FLUSH, DESTROY } operation;
static bool unordered, untold;
static unsigned long operations, installs, clean_calls, clean_bytes, icache_calls, icache_bytes, tlbis;
/* For the vCPU that is forced to fault. */
static unsigned long forced_calls, forced_bytes;

static void fail(const char *form, ...)
{
	va_list list;

	fflush(stdout);
	fprintf(stderr, "FAILED: ");
	va_start(list, form);
	vfprintf(stderr, form, list);
	fprintf(stderr, "\n  while it was to %s; %s, seed %u\n", doing, setting, seed);
	_exit(1);
}

static void on_fault(int signal, siginfo_t *info, void *context)
{
	u8 *at = info->si_addr;

	if (at >= arena && at < arena + TABLES * PAGE_SIZE)
		fail("a table is read or written that has been freed (page %zu)", (at - arena) / PAGE_SIZE);
	fail("a wrong address is used: %p", at);
}

static u32 next(u32 limit)
{
	static u64 state;

	if (!state)
		state = seed * 2654435769UL + 1;
	state = state * 6364136223846793005UL + 1442695040888963407UL;
	return (state >> 33) % limit;
}

static u64 size_at(u32 level) { return 1UL << ARM64_HW_PGTABLE_LEVEL_SHIFT(level); }

static void *__va(u64 pa)
{
	if (pa >= TABLES_PA && pa < TABLES_PA + TABLES * PAGE_SIZE)
		return arena + (pa - TABLES_PA);
	return (void *)(pa | 1UL << 62);
}

static u64 __pa(void *va)
{
	u8 *at = va;

	if (at >= arena && at < arena + TABLES * PAGE_SIZE)
		return TABLES_PA + (at - arena);
	return (u64)va & ~(1UL << 62);
}

static struct page *virt_to_page(void *va)
{
	size_t index = ((u8 *)va - arena) / PAGE_SIZE;

	if (index >= TABLES)
		fail("%p is no table", va);
	return &pages[index];
}

static u64 *entries(struct page *page) { return (u64 *)(arena + (page - pages) * PAGE_SIZE); }

static void *alloc_pages_exact(size_t size, int flags)
{
	int count = size / PAGE_SIZE, at = 0, run = 0;

	for (; at < TABLES && run < count; at++)
		run = pages[at].used ? 0 : run + 1;
	if (run < count)
		fail("out of tables");
	at -= count;
	mprotect(arena + at * PAGE_SIZE, size, PROT_READ | PROT_WRITE);
	memset(arena + at * PAGE_SIZE, 0, size);
	memset((u8 *)shadow + at * PAGE_SIZE, 0, size);
	for (int i = at; i < at + count; i++)
		pages[i] = (struct page){ .refs = 1, .used = true };
	return arena + at * PAGE_SIZE;
}

static void *kvm_mmu_memory_cache_alloc(struct kvm_mmu_memory_cache *mc)
{
	if (!mc->nobjs--)
		fail("a mapping takes more than %d tables", MIN_PAGES);
	return alloc_pages_exact(PAGE_SIZE, 0);
}

static void gone(struct page *page)
{
	for (int i = 0; operation != DESTROY && i < stales; i++)
		if (stale[i].table == page)
			fail("a table is freed while a TLB may still lead to it");
	if (operation != DESTROY && reachable(page))
		fail("a table is freed while an entry leads to it");
	page->used = false;
	mprotect(entries(page), PAGE_SIZE, PROT_NONE);
}

static void get_page(struct page *page)
{
	if (!page->used)
		fail("a freed table is referenced");
	page->refs++;
}

static void put_page(struct page *page)
{
	if (!page->used)
		fail("a reference to a freed table is dropped");
	if (!--page->refs)
		gone(page);
}

static void free_page(unsigned long va)
{
	struct page *page = virt_to_page((void *)va);

	if (!page->used)
		fail("a table is freed twice");
	if (page->refs != 1)
		fail("a table is freed with %d references", page->refs);
	page->refs = 0;
	gone(page);
}

static void free_pages_exact(void *va, size_t size)
{
	for (size_t at = 0; at < size; at += PAGE_SIZE)
		free_page((unsigned long)va + at);
}

/* TLBs */

static void now_stale(u64 ipa, u32 level, u64 pte)
{
	struct stale gone = { ipa, size_at(level), level };

	if (kvm_pte_table(pte, level)) {
		u64 *below = __va(kvm_pte_to_phys(pte));

		gone.table = virt_to_page(below);
		for (int i = 0; i < PTRS_PER_PTE; i++)
			if (below[i] & 1)
				now_stale(ipa + i * size_at(level + 1), level + 1, below[i]);
	}
	stale[stales++] = gone;
}

static void __kvm_tlb_flush_vmid(struct kvm_s2_mmu *mmu)
{
	stales = 0;
	unordered = untold = false;
	tlbis++;
}

/*
 * A hint gives the level of the walk's last entry. When 5.10 unlinks an empty table, it gives the
 * table's level. No entry is known to be wrong for that here; the kernel's own fix came much later.
 */
static void __kvm_tlb_flush_vmid_ipa(struct kvm_s2_mmu *mmu, u64 ipa, int level)
{
	for (int i = 0; i < stales;) {
		struct stale *s = &stale[i];
		bool hit = ipa - s->ipa < s->size && (s->table || !level || level == s->level);

		if (hit)
			*s = stale[--stales];
		else
			i++;
	}
	unordered = untold = false;
	tlbis++;
}

static void barrier(int kind) { unordered = false; }

/* Caches */

static bool take(struct area *areas, int *count, u64 pa, u64 size)
{
	for (int i = 0; i < *count; i++) {
		if (areas[i].pa == pa && areas[i].size == size) {
			areas[i] = areas[--*count];
			return true;
		}
	}
	return false;
}

static void __flush_dcache_area(void *va, size_t size)
{
	u64 pa = __pa(va);

	if (fwb)
		fail("data is cleaned although the CPU has FWB");
	if (operation == MAP && broken)
		fail("data is cleaned while the entry is invalid");
	clean_calls++;
	clean_bytes += size;
	if (operation == UNMAP) {
		if (!take(owed, &owing, pa, size))
			fail("%#lx bytes are cleaned at %#lx, which were not just unmapped", size, pa);
	} else if (operation == MAP) {
		if (cleans == 8)
			fail("data is cleaned, and not mapped");
		cleaned[cleans++] = (struct area){ pa, size };
	} else if (operation != FLUSH) {
		fail("data is cleaned where nothing is mapped or unmapped");
	}
}

static void invalidate_icache_range(unsigned long start, unsigned long end)
{
	if (dic)
		return;
	if (operation == MAP && broken)
		fail("instructions are invalidated while the entry is invalid");
	icache_calls++;
	icache_bytes += end - start;
	if (invalidates == 8)
		fail("instructions are invalidated, and cannot be fetched");
	invalidated[invalidates++] = (struct area){ __pa((void *)start), end - start };
}

static void __flush_icache_all(void)
{
	if (dic)
		return;
	if (operation == MAP && broken)
		fail("instructions are invalidated while the entry is invalid");
	icache_calls++;
	all_invalidated = true;
}

static bool executable(u64 pte) { return !(pte & BIT(54)); }

static void instructions_from(u64 pa, u64 size)
{
	if (dic || (icache == VPIPT && !vhe))
		return;
	if (icache == ALIASING) {
		if (!all_invalidated)
			fail("the entry is executable before the instruction cache is invalidated");
		all_invalidated = false;
	} else if (!take(invalidated, &invalidates, pa, size)) {
		if (invalidates)
			fail("the instruction cache is invalidated for %#lx bytes of %#lx", invalidated[0].size, size);
		fail("the entry is executable before the instruction cache is invalidated");
	}
}

static void becomes_valid(u64 ipa, u32 level, u64 pte)
{
	u64 size = size_at(level), pa = kvm_pte_to_phys(pte);

	for (int i = 0; i < stales; i++)
		if (stale[i].ipa < ipa + size && ipa < stale[i].ipa + stale[i].size)
			fail("an entry becomes valid while a TLB may still have what was there: no TLBI since");
	if (kvm_pte_table(pte, level)) {
		struct page *child = virt_to_page(__va(pa));

		if (!child->used || child->linked)
			fail("a table is linked that is free, or linked elsewhere");
		for (int i = 0; i < PTRS_PER_PTE; i++)
			if (entries(child)[i])
				fail("a table is linked that is not empty");
		child->linked = true;
		child->level = level + 1;
		child->ipa = ipa;
		return;
	}
	installs++;
	if (((pte >> 2) & 0xf) == (fwb ? FWB_NORMAL : PLAIN_NORMAL) && !fwb &&
	    !take(cleaned, &cleans, pa, size)) {
		if (cleans)
			fail("the data is cleaned for %#lx bytes of %#lx", cleaned[0].size, size);
		fail("the entry is valid before its data is cleaned to the PoC");
	}
	if (executable(pte))
		instructions_from(pa, size);
}

static bool reachable(struct page *page)
{
	/* A table below an unlinked one stays linked to that. */
	u64 *table = (u64 *)pgt.pgd;
	u64 at = page->ipa, first = ARM64_HW_PGTABLE_LEVEL_SHIFT(START_LEVEL);

	if (!page->linked)
		return false;
	if (page->level == START_LEVEL)
		return true;
	table += (at >> first);
	for (u32 level = START_LEVEL; kvm_pte_table(*table, level); level++) {
		u64 *below = __va(kvm_pte_to_phys(*table));

		if (virt_to_page(below) == page)
			return true;
		table = below + ((at >> ARM64_HW_PGTABLE_LEVEL_SHIFT(level + 1)) & (PTRS_PER_PTE - 1));
	}
	return false;
}

/* Every store to an entry calls this. */
static void store(u64 *ptep, u64 new)
{
	struct page *page = virt_to_page(ptep);
	u64 old, ipa, perms_and_age = BIT(6) | BIT(7) | BIT(54) | BIT(10);
	u32 level = page->level;

	if (!page->used)
		fail("a freed table is written to");
	old = *ptep;
	if (old != shadow[ptep - (u64 *)arena])
		fail("an entry was changed by a plain store");
	if (!reachable(page))
		fail("a table is written to that no entry leads to");
	ipa = page->ipa + (ptep - entries(page)) * size_at(level);
	if (old & new & 1) {
		bool gains = executable(new) && !executable(old);

		if (kvm_pte_table(old, level) && old != new)
			fail("%s over a valid table", kvm_pte_table(new, level) ? "a table" : "a block");
		if ((old ^ new) & ~perms_and_age)
			fail("a valid entry takes the place of another: %#lx, then %#lx", old, new);
		if (gains)
			instructions_from(kvm_pte_to_phys(new), size_at(level));
		untold |= ((old ^ new) & ~BIT(10)) != 0;
	} else if (new & 1) {
		becomes_valid(ipa, level, new);
		broken = false;
	} else if (old & 1) {
		if (kvm_pte_table(old, level))
			virt_to_page(__va(kvm_pte_to_phys(old)))->linked = false;
		else if (operation == UNMAP && !fwb && ((old >> 2) & 0xf) == PLAIN_NORMAL)
			owed[owing++] = (struct area){ kvm_pte_to_phys(old), size_at(level) };
		now_stale(ipa, level, old);
		broken = true;
	}
	*ptep = shadow[ptep - (u64 *)arena] = new;
	unordered = true;
}

/* The hardware's walk: 0, or the leaf entry and its level. */
static u64 walk(u64 ipa, u32 *at)
{
	u64 *entry = (u64 *)pgt.pgd + (ipa >> ARM64_HW_PGTABLE_LEVEL_SHIFT(START_LEVEL));
	u32 level = START_LEVEL;

	while (kvm_pte_table(*entry, level)) {
		level++;
		entry = (u64 *)__va(kvm_pte_to_phys(*entry)) +
			((ipa >> ARM64_HW_PGTABLE_LEVEL_SHIFT(level)) & (PTRS_PER_PTE - 1));
	}
	*at = level;
	return *entry & 1 ? *entry : 0;
}

static void compare(u64 page)
{
	struct expected *e = &want[page];
	u32 level;
	u64 ipa = IPA + page * PAGE_SIZE, pte = walk(ipa, &level);
	u64 pa = kvm_pte_to_phys(pte) + (ipa & (size_at(level) - 1));
	u8 prot = (pte & BIT(6) ? KVM_PGTABLE_PROT_R : 0) | (pte & BIT(7) ? KVM_PGTABLE_PROT_W : 0) |
		  (executable(pte) ? KVM_PGTABLE_PROT_X : 0) |
		  (((pte >> 2) & 0xf) == 1 ? KVM_PGTABLE_PROT_DEVICE : 0);

	if (!e->prot != !pte)
		fail("page %#lx is %smapped, and must %sbe", ipa, pte ? "" : "not ", e->prot ? "" : "not ");
	if (!pte)
		return;
	if (pa != FRAMES + e->frame * PAGE_SIZE || level != e->level || prot != e->prot || !(pte & BIT(10)) != e->old)
		fail("page %#lx is mapped to %#lx with %#x at level %u%s, and must be to %#lx with %#x at %u", ipa, pa,
		     prot, level, pte & BIT(10) ? "" : ", old", FRAMES + e->frame * PAGE_SIZE, e->prot, e->level);
}

/* Checks after an operation on COUNT pages from FIRST. */
static void ended(u64 first, u64 count)
{
	operations++;
	if (operation == MAP && broken)
		fail("an entry that was valid is left invalid");
	broken = false;
	if (cleans)
		fail("%#lx bytes are cleaned at %#lx, and not mapped", cleaned[0].size, cleaned[0].pa);
	if (invalidates || all_invalidated)
		fail("the instruction cache is invalidated for what cannot be fetched");
	if (owing)
		fail("%#lx bytes at %#lx are unmapped and not cleaned", owed[0].size, owed[0].pa);
	if (operation == UNMAP && stales)
		fail("something is unmapped without a TLBI");
	if (operation == MAP && unordered)
		fail("no barrier orders the new entry before what follows");
	for (u64 page = first; page < first + count && page < first + 1024; page++)
		compare(page);
	for (int i = 0; i < 64; i++)
		compare(next(PAGES));
	for (int i = 0; i < TABLES; i++) {
		struct page *page = &pages[i];
		int refs = 1;

		if (!page->used)
			continue;
		if (memcmp(entries(page), shadow + i * PTRS_PER_PTE, PAGE_SIZE))
			fail("an entry was changed by a plain store");
		if (operations % 16)
			continue;
		for (int e = 0; e < PTRS_PER_PTE; e++)
			refs += entries(page)[e] & 1;
		if (page->refs != refs)
			fail("a table has %d references for %d valid entries", page->refs, refs - 1);
		if (!reachable(page))
			fail("a table that no entry leads to is left behind");
	}
}

static void forget(u64 page)
{
	u64 count = want[page].prot ? size_at(want[page].level) / PAGE_SIZE : 1;

	memset(&want[page & ~(count - 1)], 0, count * sizeof(*want));
}

static int map(u64 page, u32 level, u32 frame, u8 prot, bool cache)
{
	struct kvm_mmu_memory_cache mc = { MIN_PAGES };
	struct expected *e = &want[page];
	u64 count = size_at(level) / PAGE_SIZE;
	int ret, must = 0;
	bool same = e->prot && e->level == level && e->frame == frame && !e->old &&
		    !((e->prot ^ prot) & KVM_PGTABLE_PROT_DEVICE);
	unsigned long calls = clean_calls + icache_calls, was = tlbis;

	doing = "map";
	operation = MAP;
	if (same) {
		must = e->prot == prot ? 0 : -EAGAIN;
	} else {
		u32 found;

		walk(IPA + page * PAGE_SIZE, &found);
		if (!cache && found < level)
			must = -ENOMEM;
		else if (e->prot && e->level < level)
			forget(page);
		for (u64 i = 0; !must && i < count; i++)
			e[i] = (struct expected){ frame + i, level, prot, false };
	}
	ret = kvm_pgtable_stage2_map(&pgt, IPA + page * PAGE_SIZE, size_at(level), FRAMES + (u64)frame * PAGE_SIZE, prot,
				     cache ? &mc : NULL);
	if (ret != must)
		fail("mapping gives %d, and must give %d", ret, must);
	if ((same || must) && (calls != clean_calls + icache_calls || tlbis != was))
		fail("maintenance is done for an entry that stays as it is");
	ended(page, count);
	return ret;
}

static void unmap(u64 page, u64 count)
{
	doing = "unmap";
	operation = UNMAP;
	for (u64 i = page; i < page + count; i++)
		forget(i);
	kvm_pgtable_stage2_unmap(&pgt, IPA + page * PAGE_SIZE, count * PAGE_SIZE);
	ended(page, count);
}

static void protect(u64 page, u64 count)
{
	doing = "write-protect";
	operation = ATTRS;
	for (u64 i = page; i < page + count; i++) {
		u64 of_leaf = want[i].prot ? size_at(want[i].level) / PAGE_SIZE : 1;
		u64 first = i & ~(of_leaf - 1);

		for (u64 p = first; p < first + of_leaf && want[i].prot & KVM_PGTABLE_PROT_W; p++)
			if (p != i)
				want[p].prot &= ~KVM_PGTABLE_PROT_W;
		want[i].prot &= ~KVM_PGTABLE_PROT_W;
	}
	kvm_pgtable_stage2_wrprotect(&pgt, IPA + page * PAGE_SIZE, count * PAGE_SIZE);
	/* The callers do that. */
	__kvm_tlb_flush_vmid(NULL);
	ended(page, count);
}

static void each_of_leaf(u64 page, u8 set, int old)
{
	u64 of_leaf = size_at(want[page].level) / PAGE_SIZE, first = page & ~(of_leaf - 1);

	for (u64 p = first; want[page].prot && p < first + of_leaf; p++) {
		if (p == page)
			continue;
		want[p].prot |= set;
		want[p].old = old < 0 ? want[p].old : old;
	}
	if (want[page].prot) {
		want[page].prot |= set;
		want[page].old = old < 0 ? want[page].old : old;
	}
}

static void relax(u64 page, u8 prot)
{
	doing = "relax permissions";
	operation = ATTRS;
	each_of_leaf(page, prot, -1);
	kvm_pgtable_stage2_relax_perms(&pgt, IPA + page * PAGE_SIZE, prot);
	if (untold)
		fail("permissions change, and no TLBI follows");
	ended(page, 1);
}

static void age(u64 page, bool old)
{
	doing = old ? "make old" : "make young";
	operation = ATTRS;
	each_of_leaf(page, 0, old);
	(old ? kvm_pgtable_stage2_mkold : kvm_pgtable_stage2_mkyoung)(&pgt, IPA + page * PAGE_SIZE);
	ended(page, 1);
}

/* A level, pages or above, for the operations of one run, so that they meet. */
static u32 some_level(void)
{
	u32 dice = next(10);

	return dice < 6 ? 3 : dice < 9 || PAGE_SHIFT != 12 ? 2 : 1;
}

static u64 some_page(u32 level)
{
	u64 pages_of = size_at(level) / PAGE_SIZE, spots = PAGES / pages_of;

	if (level == 3)
		return (next(2) * (LARGEST / PAGE_SIZE)) + next(3) * (BLOCK / PAGE_SIZE) % (LARGEST / PAGE_SIZE) +
		       next(4) * 37 % (BLOCK / PAGE_SIZE);
	return next(spots < 4 ? spots : next(2) ? 4 : spots) * pages_of;
}

static void at_random(int count)
{
	while (count--) {
		u32 level = some_level(), dice = next(100);
		u64 page = some_page(level);
		u8 device = next(12) ? 0 : KVM_PGTABLE_PROT_DEVICE;
		u8 prot = KVM_PGTABLE_PROT_R | (next(2) ? KVM_PGTABLE_PROT_W : 0) |
			  (!device && next(2) ? KVM_PGTABLE_PROT_X : 0);
		u32 frame = page + (next(8) ? 0 : PAGES);

		if (dice < 62)
			map(page, level, frame, prot | device, true);
		else if (dice < 66)
			map(page, level, frame, prot | device, false);
		else if (dice < 74)
			unmap(page, size_at(level) / PAGE_SIZE);
		else if (dice < 75)
			unmap(0, PAGES);
		else if (dice < 83)
			protect(page, size_at(level) / PAGE_SIZE);
		else if (dice < 93)
			relax(page, want[page].prot & KVM_PGTABLE_PROT_DEVICE ? prot & ~KVM_PGTABLE_PROT_X : prot);
		else
			age(page, next(2));
	}
}

/*
 * One fault as user_mem_abort() handles it. FOUND is what the CPU found when it faulted; others may
 * have changed it since. LEVEL is the level of the mapping.
 */
struct fault { bool missing; u32 level; u8 access; };

static struct fault take_fault(u64 page, u8 access)
{
	struct fault fault = { .access = access };
	u64 pte = walk(IPA + page * PAGE_SIZE, &fault.level);

	fault.missing = !pte;
	return fault;
}

static bool permitted(u64 page, u8 access)
{
	u32 level;
	u64 pte = walk(IPA + page * PAGE_SIZE, &level);

	return pte && (access != KVM_PGTABLE_PROT_W || pte & BIT(7)) && (access != KVM_PGTABLE_PROT_X || executable(pte));
}

static void handle(u64 page, struct fault fault, u32 level, bool logging)
{
	u8 prot = KVM_PGTABLE_PROT_R;

	if (logging)
		level = 3;
	if (fault.access == KVM_PGTABLE_PROT_W || !logging)
		prot |= KVM_PGTABLE_PROT_W;
	if (fault.access == KVM_PGTABLE_PROT_X || dic)
		prot |= KVM_PGTABLE_PROT_X;
	page &= ~(size_at(level) / PAGE_SIZE - 1);
	if (!fault.missing && fault.level == level)
		relax(page, prot);
	else
		map(page, level, page, prot, true);
}

static void together(int vcpus, int rounds)
{
	static const u8 accesses[] = { KVM_PGTABLE_PROT_R, KVM_PGTABLE_PROT_W, KVM_PGTABLE_PROT_X };

	for (int round = 0; round < rounds; round++) {
		u32 level = next(2) ? 3 : PAGE_SHIFT == 12 && !next(4) ? 1 : 2;
		u64 page = some_page(level);
		bool logging = !next(3), fresh = next(2);
		u8 access[8];
		int turns = 0;
		unsigned long before;

		if (fresh)
			unmap(page, size_at(level) / PAGE_SIZE);
		before = clean_calls;
		for (int v = 0; v < vcpus; v++)
			access[v] = accesses[next(3)];
		for (bool done = false; !done; turns++) {
			struct fault faults[8];

			if (turns > 4)
				fail("vCPUs fault on one page for ever");
			for (int v = 0; v < vcpus; v++)
				faults[v] = take_fault(page, access[v]);
			done = true;
			for (int v = 0; v < vcpus; v++) {
				/* An access that is permitted takes no fault. */
				if (faults[v].missing || !permitted(page, access[v])) {
					handle(page, faults[v], level, logging);
					done = false;
				}
			}
		}
		if (fresh && !fwb && clean_calls != before + 1)
			fail("%d vCPUs fault together, and the memory is cleaned %lu times", vcpus, clean_calls - before);
	}
}

/* Blocks whose pages were write-protected and written one by one become blocks again. */
static void rebuild(u32 level)
{
	u64 count = size_at(level) / PAGE_SIZE, page = level == 1 ? LARGEST / PAGE_SIZE : 0;
	unsigned long bytes;

	unmap(page, count);
	map(page, level, page, KVM_PGTABLE_PROT_R | KVM_PGTABLE_PROT_W, true);
	for (u64 p = page; p < page + count; p += count / 256 * (1 + next(3)))
		map(p, 3, p, KVM_PGTABLE_PROT_R | KVM_PGTABLE_PROT_W, true);
	bytes = clean_bytes;
	map(page, level, page, KVM_PGTABLE_PROT_R | KVM_PGTABLE_PROT_W, true);
	if (!fwb && clean_bytes - bytes != size_at(level))
		fail("a block of %#lx bytes is rebuilt, and %#lx are cleaned", size_at(level), clean_bytes - bytes);
}

static void run(int count)
{
	static const char *const caches[] = { "PIPT", "VPIPT", "aliasing VIPT" };

	snprintf(setting, sizeof(setting), "%luK pages%s%s, %s, %s", PAGE_SIZE / 1024, fwb ? ", FWB" : "", dic ? ", DIC" : "",
		 caches[icache], vhe ? "VHE" : "nVHE");
	memset(want, 0, PAGES * sizeof(*want));
	if (kvm_pgtable_stage2_init(&pgt, &kvm))
		fail("no page table");
	/* Tables of the first level may be adjacent. */
	for (u64 i = 0; i << ARM64_HW_PGTABLE_LEVEL_SHIFT(START_LEVEL - 1) < 1UL << IPA_BITS; i++) {
		struct page *page = virt_to_page((u8 *)pgt.pgd + i * PAGE_SIZE);

		page->linked = true;
		page->level = START_LEVEL;
		page->ipa = i * size_at(START_LEVEL - 1);
	}
	at_random(count);
	together(8, count / 4);
	rebuild(2);
	if (PAGE_SHIFT == 12)
		rebuild(1);
	doing = "flush";
	operation = FLUSH;
	kvm_pgtable_stage2_flush(&pgt, IPA, WINDOW);
	doing = "destroy";
	operation = DESTROY;
	kvm_pgtable_stage2_destroy(&pgt);
	for (int i = 0; i < TABLES; i++)
		if (pages[i].used)
			fail("a table is left behind with %d references", pages[i].refs);
}

int main(int argc, char **argv)
{
	struct sigaction action = { .sa_sigaction = on_fault, .sa_flags = SA_SIGINFO };

	seed = strtoul(argv[2], NULL, 10);
	sigaction(SIGSEGV, &action, NULL);
	sigaction(SIGBUS, &action, NULL);
	arena = mmap(NULL, TABLES * PAGE_SIZE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	shadow = mmap(NULL, TABLES * PAGE_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	want = calloc(PAGES, sizeof(*want));
	for (int way = 0; way < 24; way++) {
		fwb = way & 1;
		dic = way & 2;
		vhe = way & 4;
		icache = way / 8;
		run(atoi(argv[1]));
	}
	printf("%2luK pages: %lu operations, %lu leaf entries, %lu cleans of %lu MiB, %lu invalidations of instructions, %lu TLBIs (seed %u)\n",
	       PAGE_SIZE / 1024, operations, installs, clean_calls, clean_bytes >> 20, icache_calls, tlbis, seed);
	return 0;
}
