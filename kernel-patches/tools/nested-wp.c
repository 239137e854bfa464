// SPDX-License-Identifier: GPL-2.0-only
/*
 * Runs the write protection of stage-2 page tables for the dirty log in user space. The script
 * `nested-wp` names the source.
 *
 * A VM has a stage-2 page table, and three shadow stage-2 page tables of nested guests, one of
 * which is invalid. Each has a VMID and TLB entries that permit writes. User space switches the log
 * on, and later clears a part of it. If a write-protected table still has such TLB entries, the
 * guest continues to write, and none of its writes are logged.
 */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef uint64_t u64;
typedef u64 gfn_t, phys_addr_t;

#define PAGE_SHIFT 12
#define SHADOWS 3
#define __ffs(mask) __builtin_ctzl(mask)
#define __fls(mask) (63 - __builtin_clzl(mask))
#define lockdep_assert_held_write(lock)
#define write_lock(lock)
#define write_unlock(lock)
#define WARN_ON_ONCE(condition) (condition)
#define is_protected_kvm_enabled() false
#define kvm_call_hyp_nvhe(function, ...)
#define kvm_call_hyp(function, mmu, ...) flushed(mmu)
#define kvm_invalidate_vncr_ipa_all(kvm)
#define kvm_dirty_log_manual_protect_and_init_set(kvm) false
#define kvm_mmu_split_huge_pages(kvm, start, end)

struct kvm_s2_mmu { bool valid, protected, stale; };
struct kvm_memory_slot { gfn_t base_gfn; unsigned long npages; };
struct kvm {
	int mmu_lock;
	struct { struct kvm_s2_mmu mmu, *nested_mmus[SHADOWS]; unsigned long nested_mmus_size; struct { int handle; } pkvm; } arch;
};

static struct kvm_s2_mmu shadows[SHADOWS];
static struct kvm_memory_slot slot = { 0x100, 0x1000 };

static void flushed(struct kvm_s2_mmu *mmu) { mmu->stale = false; }
static void kvm_tlb_flush_vmid_range(struct kvm_s2_mmu *mmu, phys_addr_t addr, u64 size) { flushed(mmu); }
static bool kvm_s2_mmu_valid(struct kvm_s2_mmu *mmu) { return mmu->valid; }
static u64 kvm_phys_size(struct kvm_s2_mmu *mmu) { return 1ul << 40; }
static void *kvm_memslots(struct kvm *kvm) { return &slot; }
static struct kvm_memory_slot *id_to_memslot(void *slots, int id) { return slots; }

/* Changes entries and leaves the TLB to its callers, like kvm_pgtable_stage2_wrprotect(). */
static void kvm_stage2_wp_range(struct kvm_s2_mmu *mmu, phys_addr_t addr, phys_addr_t end) { mmu->protected = true; }

static void kvm_flush_remote_tlbs_memslot(struct kvm *kvm, const struct kvm_memory_slot *memslot);

#include "extract.h"

/* Like virt/kvm/kvm_main.c, with the call of kvm_clear_dirty_log_protect() after mmu_lock. */
static void kvm_flush_remote_tlbs_memslot(struct kvm *kvm, const struct kvm_memory_slot *memslot)
{
	kvm_arch_flush_remote_tlbs_range(kvm, memslot->base_gfn, memslot->npages);
}

static struct kvm kvm;

static void begin(void)
{
	kvm.arch.mmu = (struct kvm_s2_mmu){ .valid = true, .stale = true };
	kvm.arch.nested_mmus_size = SHADOWS;
	for (int i = 0; i < SHADOWS; i++) {
		shadows[i] = (struct kvm_s2_mmu){ .valid = i != 1, .stale = true };
		kvm.arch.nested_mmus[i] = &shadows[i];
	}
}

/* Counts the write-protected tables with TLB entries left. All valid tables must be protected. */
static int left(const char *when)
{
	int left = kvm.arch.mmu.stale, unprotected = !kvm.arch.mmu.protected;

	for (int i = 0; i < SHADOWS; i++) {
		left += shadows[i].protected && shadows[i].stale;
		unprotected += shadows[i].valid && !shadows[i].protected;
	}
	if (unprotected)
		printf("nested-wp: %s leaves %d tables writable\n", when, unprotected);
	if (left)
		printf("nested-wp: %s write-protects %d tables and leaves their TLB entries\n", when, left);
	return left + unprotected;
}

int main(void)
{
	int bad;

	begin();
	kvm_mmu_wp_memory_region(&kvm, 0);
	bad = left("switching the log on");
	begin();
	kvm_arch_mmu_enable_log_dirty_pt_masked(&kvm, &slot, 64, ~0ul);
	kvm_flush_remote_tlbs_memslot(&kvm, &slot);
	bad += left("clearing it");
	if (!bad)
		printf("the TLB entries of all tables that are write-protected go\n");
	return !!bad;
}
