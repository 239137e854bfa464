// SPDX-License-Identifier: GPL-2.0-only
/*
 * Runs a kernel's stage-2 page-table code in user space. The script `late-fault` names the source.
 *
 * An arm64 vCPU takes a write fault on a logged page. It continues only after the log went off,
 * another vCPU's fault made a block there, and the log went on again. It then has memory mapped by
 * pages, like its fault, and relaxes permissions. Afterwards only the logged page may be writable.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef uint64_t u64;
typedef uint32_t u32;
typedef uint16_t u16;
typedef uint8_t u8;
typedef int8_t s8;
typedef u64 phys_addr_t, kvm_pfn_t;

#define CONFIG_ARM64_4K_PAGES 1
#define PAGE_SHIFT 12
#define PAGE_SIZE 4096ul
#define PTRS_PER_PTE 512
#define BIT(n) (1ul << (n))
#define GENMASK(h, l) (~0ul << (l) & ~0ul >> (63 - (h)))
#define FIELD_GET(mask, value) (((value) & (mask)) >> __builtin_ctzl(mask))
#define FIELD_PREP(mask, value) ((u64)(value) << __builtin_ctzl(mask) & (mask))
#define ALIGN_DOWN(x, size) ((x) & ~((__typeof__(x))(size) - 1))
#define ALIGN(x, size) ALIGN_DOWN((x) + (size) - 1, size)
#define PAGE_ALIGN(x) ALIGN(x, PAGE_SIZE)
#define PAGE_ALIGNED(x) IS_ALIGNED(x, PAGE_SIZE)
#define PAGE_MASK (~(PAGE_SIZE - 1))
#define IS_ALIGNED(x, size) (!((x) & ((size) - 1)))
#define IS_ENABLED(option) 0
#define ARM64_HW_PGTABLE_LEVEL_SHIFT(level) (12 + 9 * (3 - (level)))
#define __phys_to_pfn(pa) ((pa) >> PAGE_SHIFT)
#define READ_ONCE(x) (*(volatile __typeof__(x) *)&(x))
#define WRITE_ONCE(x, v) (*(volatile __typeof__(x) *)&(x) = (v))
#define smp_store_release(p, v) __atomic_store_n(p, v, __ATOMIC_RELEASE)
#define cmpxchg(p, old, new) ({ __typeof__(*(p)) expected = (old); __atomic_compare_exchange_n(p, &expected, new, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); expected; })
#define cmpxchg_relaxed cmpxchg
#define unlikely(x) (x)
#define likely(x) (x)
#define fallthrough
#define __ro_after_init
#define __must_check
#define min(a, b) ((a) < (b) ? (a) : (b))
#define min_t(type, a, b) ((type)(a) < (type)(b) ? (type)(a) : (type)(b))
#define max(a, b) ((a) > (b) ? (a) : (b))
#define max_t(type, a, b) ((type)(a) > (type)(b) ? (type)(a) : (type)(b))
#define swap(a, b) ({ __typeof__(a) was = a; a = b; b = was; })
#define WARN_ON(condition) ({ bool it = !!(condition); if (it) fail(#condition); it; })
#define WARN_ON_ONCE WARN_ON
#define BUG_ON(condition) WARN_ON(condition)
#define BUILD_BUG_ON(condition)
#define KVM_BUG_ON(condition, kvm) WARN_ON(condition)
#define IS_ERR(p) ((unsigned long)(p) >= -4095ul)
#define PTR_ERR(p) ((long)(p))
#define ERR_PTR(error) ((void *)(long)(error))
#define __rcu
#define rcu_dereference_check(p, c) (p)
#define rcu_dereference(p) (p)
#define rcu_dereference_raw(p) (p)
#define rcu_read_lock()
#define rcu_read_unlock()
#define rcu_read_lock_held() true
#define rcu_assign_pointer(p, v) ((p) = (v))
#define RCU_INIT_POINTER(p, v) ((p) = (v))
#define dsb(domain)
#define isb()
#define cond_resched()
#define lockdep_assert_held_write(lock)
#define kvm_call_hyp(function, ...)
/* A CPU without LPA2, XNX and other options. It has FWB and DIC, so nothing is cleaned. */
#define cpus_have_final_cap(capability) ((capability) == ARM64_HAS_STAGE2_FWB || (capability) == ARM64_HAS_CACHE_DIC)
#define alternative_has_cap_unlikely(capability) false
#define system_supports_lpa2() false
#define system_supports_bti_kernel() false
#define system_supports_tlb_range() false
#define system_supports_hw_dbm() false
#define cpuid_feature_extract_unsigned_field(value, shift) ((value) >> (shift) & 15)
enum { ARM64_HAS_STAGE2_FWB = 1, ARM64_HAS_CACHE_DIC, ARM64_KVM_HVHE, ARM64_HAS_XNX, ARM64_WORKAROUND_REPEAT_TLBI,
       ARM64_WORKAROUND_AMPERE_AC03_CPU_38, ARM64_HAS_HAFT, ARM64_HW_DBM, ARM64_HAS_LPA2 };
#define ID_AA64MMFR0_EL1_PARANGE_SHIFT 0
#define ID_AA64MMFR0_EL1_PARANGE_48 5
#define ID_AA64MMFR0_EL1_PARANGE_52 6
#define PAGE_S2_MEMATTR(attr, ...) (KVM_S2_##attr << 2)
enum { KVM_S2_NORMAL = 15, KVM_S2_NORMAL_NC = 5, KVM_S2_DEVICE_nGnRE = 1, KVM_S2_AS_S1 = 7 };
enum { MT_NORMAL, MT_DEVICE_nGnRE, MT_NORMAL_NC };
/* Registers whose values do not matter here. */
#define VTCR_EL2_FLAGS 0
#define VTCR_EL2_PS 0x70000ul
#define VTCR_EL2_PS_SHIFT 16
#ifdef T0SZ_OF_BITS
#define VTCR_EL2_T0SZ(bits) 0
#else
#define VTCR_EL2_T0SZ 0x3ful
#endif
#define VTCR_EL2_T0SZ_MASK 0x3ful
#define VTCR_EL2_T0SZ_SHIFT 0
#define VTCR_EL2_DS BIT(32)
#define VTCR_EL2_HA BIT(21)
#define VTCR_EL2_VS BIT(19)
#define VTCR_EL2_VS_8BIT 0
#define VTCR_EL2_VS_16BIT BIT(19)
#define VTCR_EL2_SL0_MASK 0xc0ul
#define VTCR_EL2_SL0_SHIFT 6
#define VTCR_EL2_TGRAN_SL0_BASE 2
#define VTCR_EL2_IPA(vtcr) 39
#define VTCR_EL2_LVLS_TO_SL0(levels) 0
#define VTCR_EL2_LVLS(vtcr) 3
#define ARM64_HW_PGTABLE_LEVELS(bits) 3
#define ID_AA64MMFR1_EL1_VMIDBits_SHIFT 4
#define ID_AA64MMFR1_EL1_VMIDBits_16 2
#define MAX_TLBI_RANGE_PAGES (1ul << 21)
#define TLBI_TTL_UNKNOWN 0
#define UL(x) x##ul
#define __tlbi_level(operation, address, level)
#define __tlbi(operation)
#define __tlbi_sync_s1ish_hyp()
#define container_of(p, type, member) ((type *)((char *)(p) - offsetof(type, member)))
struct rb_root_cached { void *root; };
struct kvm_mmu_memory_cache { int nobjs; };
struct kvm_arch { u64 vtcr; };
struct kvm_s2_mmu { u64 vtcr; struct kvm_pgtable *pgt; struct kvm_arch *arch; struct kvm_mmu_memory_cache split_page_cache; };
static void *kvm_mmu_memory_cache_alloc(struct kvm_mmu_memory_cache *mc);
static int get_vmid_bits(u64 mmfr1) { return 8; }
static u32 id_aa64mmfr0_parange_to_phys_shift(int parange) { return 48; }
static bool kvm_host_has_vhe;
#define is_kernel_in_hyp_mode() true

static void __attribute__((noreturn)) fail(const char *what)
{
	printf("late-fault: the kernel warns: %s\n", what);
	exit(1);
}

#include "header.h"
#include "stage2.h"
#include "pgtable.h"

#define BLOCK (2ul << 20)
#define IPA BLOCK
/* The page of the late write. */
#define LATE (IPA + 5 * PAGE_SIZE)

static void *page(void) { return aligned_alloc(PAGE_SIZE, PAGE_SIZE); }
static void *zalloc_page(void *mc) { return memset(page(), 0, PAGE_SIZE); }
static void *kvm_mmu_memory_cache_alloc(struct kvm_mmu_memory_cache *mc) { return page(); }
static void nothing(void *address) {}
static void free_unlinked(void *address, s8 level) {}
static int page_count(void *address) { return 2; }
static void *phys_to_virt(phys_addr_t phys) { return (void *)phys; }
static phys_addr_t virt_to_phys(void *address) { return (phys_addr_t)address; }

static struct kvm_pgtable_mm_ops mm_ops = {
	.zalloc_page = zalloc_page,
	.free_unlinked_table = free_unlinked,
	.get_page = nothing,
	.put_page = nothing,
	.page_count = page_count,
	.phys_to_virt = phys_to_virt,
	.virt_to_phys = virt_to_phys,
};

static struct kvm_s2_mmu mmu;
static struct kvm_pgtable pgt;

static int map(u64 ipa, u64 size, u64 prot)
{
	/* Memory is one gigabyte above its IPA. */
	return kvm_pgtable_stage2_map(&pgt, ipa, size, ipa + (1ul << 30), prot | KVM_PGTABLE_PROT_R | KVM_PGTABLE_PROT_X, &mmu, 0);
}

static s8 level_at(u64 ipa, kvm_pte_t *pte)
{
	s8 level;

	*pte = 0;
	return kvm_pgtable_get_leaf(&pgt, ipa, pte, &level) || !(*pte & 1) ? -1 : level;
}

/* user_mem_abort() for logged memory, on a write fault on an entry of this size. */
static int write_fault(u64 ipa, u64 granule)
{
	enum kvm_pgtable_prot prot = KVM_PGTABLE_PROT_R | KVM_PGTABLE_PROT_W | KVM_PGTABLE_PROT_X;

	if (granule != PAGE_SIZE)
		return map(ipa, PAGE_SIZE, KVM_PGTABLE_PROT_W);
#if defined(WITH_SIZE)
	return kvm_pgtable_stage2_relax_perms(&pgt, ipa, PAGE_SIZE, prot, 0);
#elif defined(WITH_FLAGS)
	return kvm_pgtable_stage2_relax_perms(&pgt, ipa, prot, 0);
#else
	return kvm_pgtable_stage2_relax_perms(&pgt, ipa, prot);
#endif
}

int main(void)
{
	int writable = 0, again = 0, ret;
	kvm_pte_t pte;
	u64 granule;
	s8 level;

	mmu.pgt = &pgt;
	pgt = (struct kvm_pgtable){ .ia_bits = 39, .start_level = 1, .mm_ops = &mm_ops, .mmu = &mmu };
	pgt.pgd = (kvm_pteref_t)zalloc_page(NULL);

	/* Logged: the page is mapped read-only. The vCPU faults. */
	if (map(LATE, PAGE_SIZE, 0))
		fail("a page is not mapped");
	granule = kvm_granule_size(level_at(LATE, &pte));
	/* The log goes off, another vCPU's fault makes a block, and the log goes on. */
	if (map(IPA, BLOCK, KVM_PGTABLE_PROT_W) || level_at(LATE, &pte) != 2)
		fail("no block is mapped");
	if (kvm_pgtable_stage2_wrprotect(&pgt, IPA, BLOCK) || level_at(LATE, &pte) != 2 || pte & KVM_PTE_LEAF_ATTR_LO_S2_S2AP_W)
		fail("the block is not write-protected");
	/* The first vCPU continues, and takes its fault again as long as it gets -EAGAIN. */
	while ((ret = write_fault(LATE, granule)) == -EAGAIN && again++ < 4)
		granule = kvm_granule_size(level_at(LATE, &pte));
	if (ret)
		fail("the fault is not handled");
	for (u64 ipa = IPA; ipa < IPA + BLOCK; ipa += PAGE_SIZE)
		writable += level_at(ipa, &pte) >= 0 && pte & KVM_PTE_LEAF_ATTR_LO_S2_S2AP_W;
	if (writable != 1) {
		printf("late-fault: %d of %lu pages are writable, and one is logged\n", writable, BLOCK / PAGE_SIZE);
		return 1;
	}
	printf("the page that is logged is the one that is writable, after %d faults\n", again + 1);
	return 0;
}
