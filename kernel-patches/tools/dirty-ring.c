// SPDX-License-Identifier: GPL-2.0-only
/*
 * Runs a kernel's dirty ring in user space. The script `dirty-ring` names the source.
 *
 * One vCPU has a ring, and its memory is logged. When the guest writes to a page that is not
 * writable, it faults: the page becomes writable, and its entry is pushed. User space harvests
 * entries and makes KVM reset them, which protects their pages. A page that is writable after user
 * space had its entry reset is lost: no later write to it is in the ring.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t u64;
typedef int64_t s64;
typedef uint32_t u32;
typedef uint16_t u16;

#define CONFIG_HAVE_KVM_DIRTY_RING 1
#define BITS_PER_LONG 64
#define PAGE_SIZE 4096ul
#define PAGE_ALIGNED(x) (!((x) & (PAGE_SIZE - 1)))
#define KVM_DIRTY_RING_RSVD_ENTRIES 64
#define KVM_DIRTY_GFN_F_DIRTY 1
#define KVM_DIRTY_GFN_F_RESET 2
#define KVM_USER_MEM_SLOTS 32764
#define KVM_EXIT_DIRTY_RING_FULL 31
#define KVM_REQ_DIRTY_RING_SOFT_FULL 1
#define __weak __attribute__((weak))
#define likely(x) (x)
#define unlikely(x) (x)
#define READ_ONCE(x) (*(volatile __typeof__(x) *)&(x))
#define smp_store_release(p, v) __atomic_store_n(p, v, __ATOMIC_RELEASE)
#define smp_load_acquire(p) __atomic_load_n(p, __ATOMIC_ACQUIRE)
#define smp_wmb() __atomic_thread_fence(__ATOMIC_RELEASE)
#define lockdep_assert_held(lock)
#define WARN_ON_ONCE(condition) ({ bool it = !!(condition); warnings += it; it; })
#define KVM_MMU_LOCK(kvm)
#define KVM_MMU_UNLOCK(kvm)
#define cond_resched()
#define current NULL
#define srcu_read_lock(srcu) 0
#define srcu_read_unlock(srcu, idx)
#define trace_kvm_dirty_ring_reset(ring)
#define trace_kvm_dirty_ring_push(ring, slot, offset)
#define trace_kvm_dirty_ring_exit(vcpu)
#define __fls(mask) (63 - __builtin_clzl(mask))
#define BIT(nr) (1ul << (nr))
#define vzalloc(size) calloc(1, size)
#define vfree free
#define vmalloc_to_page(address) NULL

struct page;
struct kvm_dirty_gfn { u32 flags, slot; u64 offset; };
struct kvm { u32 dirty_ring_size; bool dirty_ring_with_bitmap; int slots_lock, srcu; };
struct kvm_memory_slot { u32 id; u64 npages; };
struct kvm_pre_fault_memory { u64 gpa, size, flags; };
struct kvm_vcpu;

#define ENTRIES 1024
/* Pages of each of the two memslots. */
#define PAGES 4096ul

static int warnings;
/* The check for a signal at which one becomes pending; 0 for never. */
static int signal_at, looks;
/* KVM protects a page that the memslot does not have. */
static bool beyond_end;
static bool writable[2 * PAGES], in_ring[2 * PAGES];
static struct kvm_memory_slot slots[2] = { { 0, PAGES }, { 1, PAGES } };

static bool signal_pending(void *task) { return ++looks == signal_at; }
static int kvm_arch_nr_memslot_as_ids(struct kvm *kvm) { return 1; }
static int kvm_arch_nr_memslots_as_ids(struct kvm *kvm) { return 1; }
static void *__kvm_memslots(struct kvm *kvm, int as_id) { return slots; }
static struct kvm_memory_slot *id_to_memslot(struct kvm_memory_slot *of, int id) { return id < 2 ? of + id : NULL; }
static void kvm_make_request(int request, struct kvm_vcpu *vcpu);
static bool kvm_check_request(int request, struct kvm_vcpu *vcpu);

static void kvm_arch_mmu_enable_log_dirty_pt_masked(struct kvm *kvm, struct kvm_memory_slot *slot, u64 offset,
						    unsigned long mask)
{
	for (int bit = 0; bit < 64; bit++)
		if (mask >> bit & 1) {
			beyond_end |= offset + bit >= slot->npages;
			writable[slot->id * PAGES + offset + bit] = false;
		}
}

#include "header.h"

struct kvm_vcpu {
	struct kvm *kvm;
	struct kvm_dirty_ring dirty_ring;
	struct { u32 exit_reason; } *run;
	bool requested;
};

static void kvm_make_request(int request, struct kvm_vcpu *vcpu) { vcpu->requested = true; }

static bool kvm_check_request(int request, struct kvm_vcpu *vcpu)
{
	bool was = vcpu->requested;

	vcpu->requested = false;
	return was;
}

#include "ring.h"

static struct kvm kvm = { .dirty_ring_size = ENTRIES * sizeof(struct kvm_dirty_gfn) };
static struct kvm_vcpu vcpu = { .kvm = &kvm };
static u32 next;

static void begin(void)
{
	struct kvm_dirty_ring *ring = &vcpu.dirty_ring;

	free(ring->dirty_gfns);
	*ring = (struct kvm_dirty_ring){ .size = ENTRIES, .soft_limit = ENTRIES - KVM_DIRTY_RING_RSVD_ENTRIES };
	ring->dirty_gfns = calloc(ENTRIES, sizeof(struct kvm_dirty_gfn));
	memset(writable, 0, sizeof(writable));
	memset(in_ring, 0, sizeof(in_ring));
	vcpu.requested = false;
	warnings = signal_at = looks = 0;
	next = 0;
}

/* The guest writes to a page, or KVM maps it as for a write. */
static void fault(u64 page)
{
	if (writable[page])
		return;
	writable[page] = true;
	kvm_dirty_ring_push(&vcpu, page / PAGES, page % PAGES);
}

/* Collects new entries of the ring. Their pages go to `pages` in order. */
static u32 harvest(u64 *pages)
{
	u32 nr = 0;

	for (;; next++, nr++) {
		struct kvm_dirty_gfn *entry = &vcpu.dirty_ring.dirty_gfns[next % ENTRIES];

		if (entry->flags != KVM_DIRTY_GFN_F_DIRTY)
			return nr;
		pages[nr] = entry->slot * PAGES + entry->offset;
		in_ring[pages[nr]] = true;
		entry->flags = KVM_DIRTY_GFN_F_RESET;
	}
}

static int reset(int *done)
{
	u32 before = vcpu.dirty_ring.reset_index;
	int ret, count = 0;

	looks = 0;
#ifdef COUNTS_ITSELF
	ret = kvm_dirty_ring_reset(&kvm, &vcpu.dirty_ring, &count);
#else
	ret = kvm_dirty_ring_reset(&kvm, &vcpu.dirty_ring);
#endif
	*done = vcpu.dirty_ring.reset_index - before;
	return ret;
}

static u32 rnd_state;

static u32 rnd(u32 n)
{
	rnd_state = rnd_state * 1664525 + 1013904223;
	return (rnd_state >> 8) % n;
}

/* The n-th page that the guest writes. */
static u64 nth(int pattern, int n)
{
	switch (pattern) {
	case 0: return n;			/* upwards */
	case 1: return PAGES - 1 - n;		/* downwards */
	case 2: return n * 63 % PAGES;		/* a mask each */
	case 3: return (n & 1) * PAGES + n / 2;	/* in both memslots in turn */
	default: return rnd(2 * PAGES);
	}
}

static int signals(void)
{
	static const char *const names[] = { "upwards", "downwards", "apart", "in two memslots", "at random" };
	u64 pages[ENTRIES];
	u64 losses = 0, most = 0, ended = 0, all = 0;

	for (int pattern = 0; pattern < 5; pattern++) {
		for (int at = 1; at <= 400; at++) {
			u64 lost = 0;
			int done, nr;

			begin();
			rnd_state = 1;
			for (int n = 0; n < 300; n++)
				fault(nth(pattern, n));
			nr = harvest(pages);
			signal_at = at;
			reset(&done);
			all++;
			ended += looks >= at;
			for (int n = 0; n < done; n++)
				lost += writable[pages[n]];
			/* Resets the remaining entries at once. */
			signal_at = 0;
			reset(&done);
			for (int n = 0; n < nr && !lost; n++)
				if (writable[pages[n]]) {
					printf("dirty-ring: page %lu, written %s, is writable after all resets\n", pages[n],
					       names[pattern]);
					return 1;
				}
			losses += lost > 0;
			most = lost > most ? lost : most;
		}
	}
	if (losses) {
		printf("dirty-ring: of %lu resets that a signal ended %lu lose pages, up to %lu: they are free for new entries and not protected\n",
		       ended, losses, most);
		return 1;
	}
	printf("%lu resets, %lu of them ended by a signal: no page is lost\n", all, ended);
	return 0;
}

/* A page beyond the end of a smaller memslot is harvested, and then a page of that memslot. */
static int replaced(void)
{
	u64 pages[ENTRIES];
	u64 losses = 0, all = 0;
	int done;

	for (u64 end = 1; end <= 64; end++) {
		for (u64 old = end; old < 128; old++) {
			for (u64 page = 0; page < end; page++) {
				begin();
				fault(old);
				harvest(pages);
				/* The new memslot is not mapped. */
				slots[0].npages = end;
				memset(writable, 0, sizeof(writable));
				fault(page);
				harvest(pages);
				reset(&done);
				slots[0].npages = PAGES;
				losses += writable[page];
				all++;
			}
		}
	}
	if (beyond_end) {
		printf("dirty-ring: KVM protects pages that the memslot does not have\n");
		return 1;
	}
	if (losses) {
		printf("dirty-ring: of %lu resets with an entry of a page that the memslot has no more %lu lose the page beside it\n",
		       all, losses);
		return 1;
	}
	printf("%lu resets with an entry of a page that the memslot has no more: no other page is lost\n", all);
	return 0;
}

#ifdef PREFAULTS
static void vcpu_load(struct kvm_vcpu *vcpu) {}
static void vcpu_put(struct kvm_vcpu *vcpu) {}

static long kvm_arch_vcpu_pre_fault_memory(struct kvm_vcpu *vcpu, struct kvm_pre_fault_memory *range)
{
	fault(range->gpa / PAGE_SIZE);
	return PAGE_SIZE;
}

#include "prefault.h"

static int prefault(void)
{
	struct kvm_pre_fault_memory range = { .size = PAGES * PAGE_SIZE };
	static u64 pages[2 * ENTRIES];
	int done, full = 0, seen = 0;
	typeof(*vcpu.run) run;

	begin();
	vcpu.run = &run;
	while (range.size) {
		u64 before = range.size;
		int ret = kvm_vcpu_pre_fault_memory(&vcpu, &range);

		if (!ret && range.size < before)
			continue;
		if (ret != -ENOSPC || range.size != before) {
			printf("dirty-ring: pre-faulting gives %d, after %lu pages\n", ret, (before - range.size) / PAGE_SIZE);
			return 1;
		}
		full++;
		if (!harvest(pages)) {
			printf("dirty-ring: pre-faulting stops for a full ring that is empty\n");
			return 1;
		}
		reset(&done);
	}
	if (warnings) {
		printf("dirty-ring: KVM warns %d times that the ring is full\n", warnings);
		return 1;
	}
	for (u64 page = 0; page < PAGES; page++) {
		while (kvm_dirty_ring_check_request(&vcpu)) {
			if (!harvest(pages)) {
				printf("dirty-ring: the vCPU exits for a full ring that is empty\n");
				return 1;
			}
			reset(&done);
		}
		fault(page);
	}
	harvest(pages);
	for (u64 page = 0; page < PAGES; page++)
		seen += in_ring[page];
	if (seen != PAGES || warnings) {
		printf("dirty-ring: %d of %lu pages are in the ring, and KVM warns %d times\n", seen, PAGES, warnings);
		return 1;
	}
	printf("%lu pages are pre-faulted with a ring of %d entries: all are in it, and it was full %d times\n", PAGES, ENTRIES,
	       full);
	return 0;
}
#endif

int main(int argc, char **argv)
{
	if (!strcmp(argv[1], "reset"))
		return signals() || replaced();
	if (!strcmp(argv[1], "signals"))
		return signals();
	if (!strcmp(argv[1], "replaced"))
		return replaced();
#ifdef PREFAULTS
	if (!strcmp(argv[1], "prefault"))
		return prefault();
#endif
	fprintf(stderr, "dirty-ring: %s: this kernel has reset, signals, replaced%s\n", argv[1],
#ifdef PREFAULTS
		" and prefault"
#else
		""
#endif
	);
	return 2;
}
