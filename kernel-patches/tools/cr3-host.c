// SPDX-License-Identifier: GPL-2.0-only
/*
 * Runs the host's side of the CR3 cache in user space. The script `cr3-host` names the source.
 *
 * This file has a guest of one vCPU, which switches among address spaces through its page; a
 * processor, which exits at a load of CR3 unless the value is a target; pages that are roots, or
 * free, or already another address space's root; and the order in which KVM calls the cache when a
 * vCPU exits and enters. That order is x86.c's and vmx.c's and is not under test. The vCPU may exit
 * before each instruction of the section. What happens then is random.
 *
 * The guest has page directories at the same addresses as roots.
 */
#define _GNU_SOURCE
#include <limits.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t u64, gpa_t, hpa_t, gfn_t;
typedef uint32_t u32;
typedef uint16_t u16;
typedef uint8_t u8;
typedef unsigned int uint;
typedef unsigned long ulong;

#define PAGE_SHIFT 12
#define PAGE_SIZE 4096ull
#define PAGE_ALIGNED(a) (!((a) & (PAGE_SIZE - 1)))
#define INVALID_PAGE (~(hpa_t)0)
#define VALID_PAGE(x) ((x) != INVALID_PAGE)
#define BIT(n) (1ull << (n))
#define GENMASK_ULL(h, l) ((~0ull << (l)) & (~0ull >> (63 - (h))))
#define X86_CR4_PCIDE BIT(17)
#define X86_CR3_PCID_MASK 0xfffull
#define X86_CR3_PCID_NOFLUSH BIT(63)
#define X86_CR3_LAM_U57 BIT(61)
#define X86_CR3_LAM_U48 BIT(62)
#define __PT_BASE_ADDR_MASK GENMASK_ULL(51, 12)
#define PT64_ROOT_4LEVEL 4
#define KVM_MMU_NUM_PREV_ROOTS 3
#define KVM_MAX_CR3_TARGETS (KVM_MMU_NUM_PREV_ROOTS + 1)
#define KVM_MMU_ROOT_CURRENT BIT(0)
#define KVM_MMU_ROOT_PREVIOUS(i) BIT(1 + (i))
#define KVM_MMU_ROOTS_ALL (BIT(1 + KVM_MMU_NUM_PREV_ROOTS) - 1)
#define KVM_MMU_ROOT_INFO_INVALID ((struct kvm_mmu_root_info){ .pgd = INVALID_PAGE, .hpa = INVALID_PAGE })
#define BITS_PER_LONG 64
#define KVM_ENOSYS 1000
#define KVM_EFAULT 14
#define KVM_EINVAL 22
#define EINVAL 22
#define EIO 5
#define GFP_KERNEL 0
#define VCPU_EXREG_CR3 0
#define MMIO_GVA_ANY 0
enum { KVM_REQ_MMU_RELOAD, KVM_REQ_MMU_FREE_OBSOLETE_ROOTS = 0, KVM_REQ_LOAD_MMU_PGD, KVM_REQ_TLB_FLUSH_CURRENT, KVM_REQ_TRIPLE_FAULT, KVM_REQ_VM_DEAD, KVM_REQ_VM_BUGGED = KVM_REQ_VM_DEAD };

#define __read_mostly
#define module_param(...)
#define EXPORT_SYMBOL_GPL(...)
#define __always_inline inline
#define DECLARE_STATIC_KEY_FALSE(key) extern int key
#define DEFINE_STATIC_KEY_FALSE(key) int key
#define static_branch_unlikely(key) (*(key) > 0)
#define static_branch_inc(key) (++*(key))
#define static_branch_dec(key) (--*(key))
/* Work is done at once, which is the earliest possible time. */
struct work_struct { int unused; };
struct delayed_work { void (*function)(struct work_struct *work); };
#define DECLARE_DELAYED_WORK(name, work) struct delayed_work name = { work }
#define schedule_delayed_work(work, delay) (work)->function(NULL)
#define flush_delayed_work(work) (void)(work)
typedef int atomic_t;
#define ATOMIC_INIT(value) (value)
#define atomic_inc(value) (++*(value))
static int atomic_xchg(atomic_t *value, int other)
{
	int before = *value;

	*value = other;
	return before;
}
#define WARN_ON(x) (void)(x)
#define likely(x) (x)
#define unlikely(x) (x)
#define BUILD_BUG_ON(x) _Static_assert(!(x), #x)
#define LIST_HEAD(x) int x = 0
#define list_empty(x) true
#define spin_lock(x)
#define spin_unlock(x)
#define read_lock(x)
#define read_unlock(x)
#define write_lock(x)
#define write_unlock(x)
#define mutex_lock(x)
#define mutex_unlock(x)
#define srcu_read_lock(x) 0
#define srcu_read_unlock(x, y) (void)(y)
#define min_t(t, a, b) ((t)(a) < (t)(b) ? (t)(a) : (t)(b))
#define clamp(v, l, h) ((v) < (l) ? (l) : (v) > (h) ? (h) : (v))
#define swap(a, b) ({ typeof(a) t_ = (a); (a) = (b); (b) = t_; })
#define WARN_ON_ONCE(x) ({ bool w_ = (x); if (w_) fail("KVM warns: %s", #x); w_; })
#define WARN_ONCE(x, ...) ({ bool w_ = (x); if (w_) fail(__VA_ARGS__); w_; })
#define KVM_BUG_ON(x, kvm) WARN_ON_ONCE(x)

#include <asm/kvm_cr3_cache.h>
#include "types.h"

/* ---- not under test ---- */

union kvm_mmu_page_role {
	u32 word;
	struct { u32 level : 4, direct : 1, other : 8; };
};

struct kvm_mmu_page {
	union kvm_mmu_page_role role;
	gfn_t gfn;
	int root_count;
};

struct kvm_mmu {
#if NEW
	struct kvm_mmu_root_info root;
	union kvm_mmu_page_role root_role;
	struct { union kvm_mmu_page_role base; } cpu_role;
	u64 pae_root[4];
#else
	hpa_t root_hpa;
	gpa_t root_pgd;
	bool direct_map;
	u8 root_level, shadow_root_level;
	struct { union kvm_mmu_page_role base; } mmu_role;
	u64 pae_root[4];
#endif
	struct kvm_mmu_root_info published[KVM_MAX_CR3_TARGETS];
	int nr_published;
	bool roots_changed, roots_added;
	struct kvm_mmu_root_info prev_roots[KVM_MMU_NUM_PREV_ROOTS];
};

struct kvm_memslots { u64 generation; };
struct kvm {
	struct { bool cr3_cache; } arch;
	int mmu_lock, lock, srcu, created_vcpus;
	struct kvm_memslots slots;
};

struct kvm_vcpu {
	struct kvm *kvm;
	struct {
		struct kvm_mmu *mmu;
		struct kvm_vcpu_cr3_cache cr3_cache;
		struct { u32 features; } pv_cpuid;
		unsigned long cr3;
	} arch;
	struct {
		u64 cr3_cache_switches, cr3_cache_misses, cr3_cache_updates, cr3_cache_restarts,
		    cr3_cache_overwritten, cr3_cache_skipped, cr3_cache_drop_lru, cr3_cache_drop_zap,
		    cr3_cache_drop_flush, cr3_cache_drop_role, cr3_cache_drop_saved;
	} stat;
	unsigned long requests;
};

#define PAGES 24
#define BASE 0x10000ull
#define SPACES 9
#define SECTION 0xffffffff81000000ull
#define STEP 4			/* bytes of an instruction of the section */
#define SECTION_LEN (7 * STEP)
#define CACHE_GPA 0x200000ull

static struct kvm_mmu_page pages[PAGES];
static struct kvm_mmu mmu;
static struct kvm kvm;
static struct kvm_vcpu vcpu_now, *vcpu = &vcpu_now;
static bool tdp_enabled, tdp_mmu_enabled, force_flush_and_sync_on_reuse;
static int kvm_nr_cr3_targets = 4;

/* The guest's memory at its page, and another memory that a slot may have there. */
static struct kvm_cr3_cache_page backing[2];
static int which_backing;	/* -1: no slot */

/* The processor and the guest's registers. */
static struct {
	u64 targets[4];
	int nr;
	u64 cr3;
} vmcs;
static u64 rip, rdi, wanted, cr3_of_guest;
static bool cr4_pcide, smm, nested, stock;
static bool uses;	/* the guest goes by its page */
static u64 steps, hits, misses, exits, seed, state;

static u32 rnd(u32 n)
{
	state = state * 6364136223846793005ull + 1442695040888963407ull;
	return (u32)(state >> 33) % n;
}

__attribute__((format(printf, 1, 2), noreturn))
static void fail(const char *format, ...)
{
	va_list args;

	printf("FAILED: ");
	va_start(args, format);
	vprintf(format, args);
	va_end(args);
	printf(" (seed %llu, step %llu)\n", (unsigned long long)seed, (unsigned long long)steps);
	exit(1);
}

static struct kvm_mmu_page *page_of(hpa_t hpa)
{
	u64 at = ((hpa & GENMASK_ULL(51, 12)) - BASE) >> PAGE_SHIFT;

	return at < PAGES ? &pages[at] : NULL;
}
#define to_shadow_page(hpa) page_of(hpa)
#define root_to_sp(hpa) page_of(hpa)
#define kvm_mmu_is_dummy_root(hpa) false
#define IS_VALID_PAE_ROOT(x) false
#define INVALID_PAE_ROOT 0
#define vcpu_clear_mmio_info(...)
#define __clear_sp_write_flooding_count(...)
#define kvm_mmu_commit_zap_page(...)

/* A page that is no longer a root can be reused at once. */
static void mmu_free_root_page(struct kvm *kvm, hpa_t *hpa, int *list)
{
	if (!VALID_PAGE(*hpa))
		return;
	page_of(*hpa)->root_count--;
	*hpa = INVALID_PAGE;
}

static void kvm_make_request(int request, struct kvm_vcpu *vcpu) { vcpu->requests |= BIT(request); }
static bool kvm_test_request(int request, struct kvm_vcpu *vcpu) { return vcpu->requests & BIT(request); }
#define kvm_register_mark_available(...)
static unsigned long kvm_rip_read(struct kvm_vcpu *vcpu) { return rip; }
static void kvm_rip_write(struct kvm_vcpu *vcpu, unsigned long to) { rip = to; }
static bool is_guest_mode(struct kvm_vcpu *vcpu) { return nested; }
static bool is_smm(struct kvm_vcpu *vcpu) { return smm; }
#define kvm_read_cr3(vcpu) ((vcpu)->arch.cr3)
#define kvm_read_cr4_bits(vcpu, bits) (cr4_pcide)
#define kvm_is_cr4_bit_set(vcpu, bit) (cr4_pcide)
#define gpa_to_gfn(gpa) ((gpa) >> PAGE_SHIFT)
#define __kvm_memslots(kvm, space) (&(kvm)->slots)

static int kvm_write_guest_page(struct kvm *kvm, gfn_t gfn, const void *data, int offset, int len)
{
	if (gfn != CACHE_GPA >> PAGE_SHIFT || which_backing < 0)
		return -14;
	memcpy((char *)&backing[which_backing] + offset, data, len);
	return 0;
}

static void *memchr_inv(const void *p, int c, size_t n)
{
	for (const char *at = p; n--; at++)
		if (*at != c)
			return (void *)at;
	return NULL;
}

static void set_targets(struct kvm_vcpu *vcpu, const u64 *targets, int nr)
{
	memcpy(vmcs.targets, targets, nr * sizeof(*targets));
	vmcs.nr = nr;
}
static int get_targets(struct kvm_vcpu *vcpu, u64 *targets)
{
	memcpy(targets, vmcs.targets, sizeof(vmcs.targets));
	return vmcs.nr;
}
static int get_cpl(struct kvm_vcpu *vcpu) { return 0; }
static struct {
	void (*set_cr3_targets)(struct kvm_vcpu *, const u64 *, int);
	int (*get_cr3_targets)(struct kvm_vcpu *, u64 *);
	int (*get_cpl)(struct kvm_vcpu *);
} kvm_x86_ops = { set_targets, get_targets, get_cpl };
#define kvm_x86_call(f) kvm_x86_ops.f

int kvm_mmu_cr3_roots(struct kvm_vcpu *vcpu, struct kvm_mmu_root_info *roots);
bool kvm_mmu_root_switched(struct kvm_vcpu *vcpu, gpa_t pgd, hpa_t hpa);
#define kvm_mmu_is_live_root(...) true
#if NEW
void kvm_mmu_free_roots(struct kvm *kvm, struct kvm_mmu *mmu, ulong roots);
#define FREE_ROOTS(roots) kvm_mmu_free_roots(&kvm, &mmu, roots)
#define ROOT_HPA mmu.root.hpa
#define ROOT_PGD mmu.root.pgd
#define ROLE mmu.root_role
#else
void kvm_mmu_free_roots(struct kvm_vcpu *vcpu, struct kvm_mmu *mmu, ulong roots);
#define FREE_ROOTS(roots) kvm_mmu_free_roots(vcpu, &mmu, roots)
#define ROOT_HPA mmu.root_hpa
#define ROOT_PGD mmu.root_pgd
#define ROLE mmu.mmu_role.base
#endif
static void kvm_mmu_unload(struct kvm_vcpu *vcpu) { FREE_ROOTS(KVM_MMU_ROOTS_ALL); }

/* ---- under test ---- */

#include "cr3_cache.c"
#include "extract.h"

/* ---- the guest, the processor, and the order of calls ---- */

#define CACHE (&vcpu->arch.cr3_cache)

/*
 * The guest's CR3 for a space. KVM must not publish the last three, because it could not
 * distinguish them from others.
 */
static u64 value_of(int space)
{
	/* So their page directories are also those of other spaces. */
	u64 value = BASE + space % (SPACES - 3) * PAGE_SIZE;

	if (cr4_pcide)
		value |= space + 1;
	if (space >= SPACES - 2)
		value |= cr4_pcide ? BIT(11) : BIT(3);
#if NEW
	if (space == SPACES - 3)
		value |= BIT(61);	/* LAM */
#endif
	return value;
}

static u64 random_space(void)
{
	static u32 many = 4;

	if (!rnd(200))
		many = 1 + rnd(SPACES);
	return value_of(rnd(many));
}

static void set_role(u32 other)
{
	union kvm_mmu_page_role role = { .level = 4, .other = other };

	ROLE = role;
#if NEW
	mmu.cpu_role.base = role;
#else
	mmu.root_level = mmu.shadow_root_level = 4;
#endif
	/* As kvm_init_mmu() does. */
	mmu.roots_changed = true;
}

/* The processor's root must be the root that the guest wants. */
static void look(const char *when)
{
	struct kvm_mmu_page *page = page_of(vmcs.cr3);

	if (!page || !page->root_count)
		fail("%s: the guest runs on a page that is no root", when);
	if (page->role.word != ROLE.word)
		fail("%s: the guest runs on a root of another role", when);
	if (page->gfn != (cr3_of_guest & GENMASK_ULL(51, 12)) >> PAGE_SHIFT)
		fail("%s: the guest runs in another address space than %llx", when, (unsigned long long)cr3_of_guest);
}

/* Before the vCPU runs: everything that it could load must be one of its roots. */
static void look_at_targets(void)
{
	const struct kvm_cr3_cache_entry *in_page;
	int found = 0;

	if (nested)
		return;
	if (smm && vmcs.nr)
		fail("in SMM there are %d targets", vmcs.nr);
	for (int i = 0; i < vmcs.nr; i++) {
		struct kvm_mmu_page *page = page_of(vmcs.targets[i]);

		if (!page || !page->root_count)
			fail("a target is no root");
		if (page->role.word != ROLE.word)
			fail("a target is a root of another role");
		for (int space = 0; space < SPACES; space++)
			if (value_of(space) == (vmcs.targets[i] & ~X86_CR3_PCID_NOFLUSH))
				fail("a target is what the guest loads for a space: %llx", (unsigned long long)vmcs.targets[i]);
	}
	if (which_backing < 0 || !CACHE->registered)
		return;
	in_page = backing[which_backing].entries;
	for (int i = 0; i < 4; i++) {
		u64 key = in_page[i].guest_cr3, pgd = key & GENMASK_ULL(51, 12);

		if (!key)
			continue;
		if (in_page[i].host_cr3 & BIT(40))
			continue;	/* not KVM's */
		if (cr4_pcide ? !(key & BIT(63)) || key & BIT(11) || key & BIT(61) : key != pgd)
			fail("%llx is published", (unsigned long long)key);
		for (int t = 0; t < vmcs.nr; t++)
			if (vmcs.targets[t] == in_page[i].host_cr3) {
				found++;
				if (page_of(vmcs.targets[t])->gfn != pgd >> PAGE_SHIFT)
					fail("an entry for %llx has another's root", (unsigned long long)key);
				t = vmcs.nr;
			} else if (t == vmcs.nr - 1) {
				fail("an entry is no target");
			}
		if (!vmcs.nr)
			fail("an entry is no target");
	}
}

static void load_root(void)
{
	gfn_t gfn = (vcpu->arch.cr3 & GENMASK_ULL(51, 12)) >> PAGE_SHIFT;
	u32 at;

	if (VALID_PAGE(ROOT_HPA))
		return;
	/* A page directory has one root, whatever else is in CR3. */
	for (at = 0; at < PAGES; at++)
		if (pages[at].root_count && pages[at].gfn == gfn && pages[at].role.word == ROLE.word)
			break;
	if (at == PAGES) {
		do
			at = rnd(PAGES);
		while (pages[at].root_count);
		pages[at] = (struct kvm_mmu_page){ .role = ROLE, .gfn = gfn };
	}
	pages[at].root_count++;
	ROOT_HPA = BASE + at * PAGE_SIZE;
	ROOT_PGD = vcpu->arch.cr3;
	/* As kvm_mmu_load() does. */
	mmu.roots_added = true;
}

/* The part of vcpu_enter_guest() that concerns the cache. */
static void enter(void)
{
	if (!stock)
		kvm_cr3_cache_restart(vcpu);
	if (kvm_test_request(KVM_REQ_MMU_RELOAD, vcpu)) {
		kvm_cr3_cache_drop(vcpu, KVM_CR3_CACHE_DROP_ZAP);
		kvm_mmu_unload(vcpu);
	}
	vcpu->requests = 0;
	load_root();
	if (!stock && kvm_cr3_cache_update(vcpu))
		fail("the vCPU cannot be entered");
	vmcs.cr3 = ROOT_HPA | (cr4_pcide ? vcpu->arch.cr3 & 0xfff : 0) |
		   (vcpu->arch.cr3 & (X86_CR3_LAM_U48 | X86_CR3_LAM_U57));
	if (CACHE->registered)
		vmcs.cr3 ^= KVM_CR3_CACHE_HOST_BIT;
	look_at_targets();
	look("at an entry");
}

static void leave(void)
{
	exits++;
	if (!stock && kvm_cr3_cache_may_have_switched(vcpu))
		__kvm_cr3_cache_resolve(vcpu, vmcs.cr3);
	if (vcpu->arch.cr3 != cr3_of_guest)
		fail("KVM has %lx for the guest's CR3, which is %llx", vcpu->arch.cr3, (unsigned long long)cr3_of_guest);
	look("at an exit");
}

/* kvm_set_cr3() */
static void set_cr3(u64 value)
{
	if ((value & ~X86_CR3_PCID_NOFLUSH) != (wanted & ~X86_CR3_PCID_NOFLUSH))
		fail("KVM takes %llx for the guest's CR3", (unsigned long long)value);
	value &= ~X86_CR3_PCID_NOFLUSH;
	if (value != vcpu->arch.cr3) {
		if (!
#if NEW
		    fast_pgd_switch(vcpu, &mmu, value, ROLE))
			;
#else
		    fast_pgd_switch(vcpu, value, ROLE))
			FREE_ROOTS(KVM_MMU_ROOT_CURRENT);
#endif
		vcpu->arch.cr3 = value;
	}
	cr3_of_guest = value;
}

static bool is_target(u64 value)
{
	for (int i = 0; i < vmcs.nr && !nested; i++)
		if (vmcs.targets[i] == value)
			return true;
	return false;
}

static void do_register(bool well)
{
	u64 gpa = CACHE_GPA, len = SECTION_LEN;
	int r;

	if (!well)
		switch (rnd(4)) {
		case 0: gpa += 64; break;
		case 1: gpa += PAGE_SIZE; break;
		case 2: len = 0; break;
		case 3: len = 257; break;
		}
	r = kvm_cr3_cache_hypercall(vcpu, KVM_CR3_CACHE_REGISTER, gpa, SECTION, len);
	if (well && which_backing >= 0 ? r != 4 : r >= 0)
		fail("registration gives %d", r);
	uses = CACHE->registered;
}

/* Memory without a slot is not the guest's any longer. */
static void forget_other_memory(void)
{
	for (int i = 0; i < 2; i++)
		if (i != which_backing)
			memset(&backing[i], 0, sizeof(backing[i]));
}

static void new_vcpu(void)
{
	kvm_cr3_cache_release_key(vcpu);
	FREE_ROOTS(KVM_MMU_ROOTS_ALL);
	vcpu_now = (struct kvm_vcpu){ .kvm = &kvm, .arch = { .mmu = &mmu, .cr3 = cr3_of_guest } };
	vcpu->arch.pv_cpuid.features = BIT(KVM_FEATURE_CR3_CACHE);
	vmcs.nr = 0;
	set_role(ROLE.other);
}

/* Saves, moves to another host, perhaps one without the cache, and continues. */
static void save_and_move(void)
{
	struct kvm_cr3_cache saved;

	/* As at the end of KVM_RUN. */
	kvm_cr3_cache_restart(vcpu);
	if (kvm_cr3_cache_get(vcpu, &saved))
		fail("KVM_GET_CR3_CACHE");
	if (saved.flags && which_backing >= 0 && memchr_inv(&backing[which_backing], 0, sizeof(backing[0])))
		fail("what is saved has entries");
	if (saved.flags && rip > SECTION && rip < SECTION + SECTION_LEN && CACHE->nr)
		fail("what is saved has a RIP in the section");
	switch (rnd(4)) {
	case 0:	/* it stays */
		return;
	/* Memory without a slot is not saved. */
	case 1:
		stock = true;
		saved.flags = 0;
		memset((char *)&saved + 8, 0, sizeof(saved) - 8);
		/* fallthrough */
	default:
		forget_other_memory();
		new_vcpu();
		if (!stock && kvm_cr3_cache_set(vcpu, &saved) && which_backing >= 0)
			fail("KVM_SET_CR3_CACHE");
	}
}

/* A random event while the vCPU is not in the guest. */
static void something(void)
{
	struct kvm_cr3_cache_entry *entry;
	u64 at = rip;
	int i;

	switch (rnd(16)) {
	case 0:	/* all shadow pages are zapped */
		kvm_make_request(KVM_REQ_MMU_RELOAD, vcpu);
		break;
	case 1:	/* CR0.WP: the current root is of another role from now on, and the others come back with it */
		FREE_ROOTS(KVM_MMU_ROOT_CURRENT);
		set_role(ROLE.other ^ 1);
		break;
	case 2:	/* memslots: the page's goes, comes back, or is another's */
		which_backing = (int)rnd(3) - 1;
		kvm.slots.generation++;
		break;
	case 3:	/* somebody writes to the page */
		if (which_backing < 0 || !CACHE->registered)
			break;
		entry = &backing[which_backing].entries[rnd(4)];
		entry->guest_cr3 = random_space() | (cr4_pcide ? BIT(63) : 0);
		entry->host_cr3 = BIT(40) | BIT(11) | BASE | (cr4_pcide ? BIT(63) : 0);
		break;
	case 4:	/* an SMI, and its end: RIP is what was saved */
		if (stock)
			break;
		kvm_cr3_cache_restart(vcpu);
		at = rip;
		smm = true;
		kvm_mmu_unload(vcpu);
		mmu.roots_changed = true;
		rip = 0x8000;
		enter();
		leave();
		smm = false;
		kvm_mmu_unload(vcpu);
		mmu.roots_changed = true;
		rip = at;
		break;
	case 5:	/* a nested guest runs for a while, and its hypervisor's roots go */
		if (stock)
			break;
		kvm_cr3_cache_restart(vcpu);
		nested = true;
		if (rnd(2))
			kvm_make_request(KVM_REQ_MMU_RELOAD, vcpu);
		enter();
		leave();
		nested = false;
		break;
	case 6:	/* INVPCID of one, of all */
		i = rnd(KVM_MMU_NUM_PREV_ROOTS);
		if (!stock)
			kvm_cr3_cache_drop(vcpu, KVM_CR3_CACHE_DROP_FLUSH);
		FREE_ROOTS(rnd(2) ? KVM_MMU_ROOTS_ALL : KVM_MMU_ROOT_PREVIOUS(i));
		break;
	case 7:
		if (!stock)
			save_and_move();
		break;
	}
}

static void exit_now(bool disturbed)
{
	leave();
	if (disturbed && !rnd(4))
		something();
	enter();
}

/* Hypercalls and other actions of the guest between switches. */
static void between(void)
{
	leave();
	if (which_backing < 0 && rnd(2)) {
		which_backing = rnd(2);
		kvm.slots.generation++;
	}
	switch (rnd(6)) {
	case 0:
		if (!stock && !CACHE->registered && which_backing >= 0)
			do_register(true);
		else if (!stock && !rnd(4))
			do_register(false);
		break;
	case 1:
		if (!stock)
			kvm_cr3_cache_hypercall(vcpu, KVM_CR3_CACHE_FLUSH, 0, 0, 0);
		break;
	case 2:
		if (!stock && !rnd(20)) {
			kvm_cr3_cache_hypercall(vcpu, KVM_CR3_CACHE_UNREGISTER, 0, 0, 0);
			uses = false;
			forget_other_memory();
		}
		break;
	case 3:	/* CR4.PCIDE */
		if (rnd(20))
			break;
		cr4_pcide = !cr4_pcide;
		if (!stock)
			CACHE->dirty = true;
		kvm_mmu_unload(vcpu);
		mmu.roots_changed = true;
		cr3_of_guest = vcpu->arch.cr3 = value_of(0);
		break;
	case 4:	/* back from the host without the cache */
		stock = false;
		break;
	case 5:
		something();
		break;
	}
	enter();
}

static void own_value(void)
{
	unsigned long value;

	rip = SECTION + SECTION_LEN + 64;
	if (is_target(wanted)) {
		vmcs.cr3 = wanted & ~X86_CR3_PCID_NOFLUSH;
		cr3_of_guest = wanted & ~X86_CR3_PCID_NOFLUSH;
		look("a load of the guest's own value that did not exit");
		return;
	}
	leave();
	value = wanted;
	if (!stock && (kvm_cr3_cache_load_exits(vcpu, &value) || value != wanted))
		fail("KVM takes a load of the guest's own value for one of the section's");
	set_cr3(wanted);
	misses++;
	enter();
}

/*
 * Whether other threads write to the page all the time, and the processor does not find all of its
 * list.
 */
static bool hostile;

/* Runs the guest's section from RIP on. */
static void by_section(bool stepped)
{
	struct kvm_cr3_cache_entry *entries;
	/*
	 * Another vCPU writes to the page whenever this one has begun; a processor ignores bit 63
	 * in the list.
	 */
	bool scribbled = hostile && !rnd(8), blind = hostile && !rnd(4);
	unsigned long value;
	int turns = 0;

	rip = SECTION;
	rdi = 0;
	for (;;) {
		u64 at = rip;

		if (++turns > 300)
			fail("the section does not come to its end");
		if (stepped || !rnd(60)) {
			exit_now(!stepped);
			if (rip != at)
				continue;
		}
		switch ((rip - SECTION) / STEP) {
		case 0:
			rdi = 0;
			break;
		case 1 ... 4:
			entries = which_backing < 0 ? NULL : backing[which_backing].entries;
			if (entries && scribbled && CACHE->registered) {
				entries[0].guest_cr3 = wanted;
				entries[0].host_cr3 = BIT(40) | BIT(11) | BASE | (cr4_pcide ? BIT(63) : 0);
			}
			if (entries && entries[(rip - SECTION) / STEP - 1].guest_cr3 == wanted)
				rdi = entries[(rip - SECTION) / STEP - 1].host_cr3;
			break;
		case 5:
			if (!rdi)
				return own_value();
			break;
		case 6:
			if (!stock && is_target(rdi) && !rnd(50)) {	/* it is emulated */
				leave();
				set_cr3(kvm_cr3_cache_guest_cr3(vcpu, rdi));
				rip += STEP;
				enter();
				return;
			}
			if (is_target(rdi) && !(blind && rdi & X86_CR3_PCID_NOFLUSH)) {
				vmcs.cr3 = rdi & ~X86_CR3_PCID_NOFLUSH;
				cr3_of_guest = wanted & ~X86_CR3_PCID_NOFLUSH;
				rip += STEP;
				hits++;
				return look("a load that did not exit");
			}
			leave();
			value = rdi;
			if (!stock && kvm_cr3_cache_load_exits(vcpu, &value)) {
				if (kvm_test_request(KVM_REQ_TRIPLE_FAULT, vcpu))
					return own_value();	/* the guest's end: another one begins */
				if (is_target(rdi))
					fail("KVM has the guest read again what it has published");
				enter();
				continue;
			}
			/*
			 * KVM is not responsible for repeated writes to the page, nor for a host
			 * without the cache.
			 */
			if (value & BIT(40) && (stock || scribbled))
				value = wanted;
			if (!stock && value != wanted)
				fail("KVM takes %#lx, which exits, for %#lx", rdi, value);
			set_cr3(value);
			if (!stock)
				misses++;
			enter();
			return;
		}
		rip += STEP;
	}
}

int main(int argc, char **argv)
{
	u64 most = strtoull(argv[1], NULL, 10);

	seed = state = strtoull(argv[2], NULL, 10);
	kvm.arch.cr3_cache = true;
	ROOT_HPA = INVALID_PAGE;
	for (int i = 0; i < KVM_MMU_NUM_PREV_ROOTS; i++)
		mmu.prev_roots[i] = KVM_MMU_ROOT_INFO_INVALID;
	cr3_of_guest = value_of(0);
	set_role(0);
	new_vcpu();
	enter();
	leave();
	do_register(true);
	enter();
	/* The last tenth is hostile. */
	for (; steps < most + most / 10; steps++) {
		bool owes = !rnd(10);

		hostile = steps >= most;
		if (!rnd(10))
			between();
		wanted = random_space();
		if (cr4_pcide && !owes)
			wanted |= X86_CR3_PCID_NOFLUSH;
		if (owes || !uses)
			own_value();
		else
			by_section(!rnd(100));
		if (cr3_of_guest != (wanted & ~X86_CR3_PCID_NOFLUSH))
			fail("the guest is in %llx and not in %llx", (unsigned long long)cr3_of_guest, (unsigned long long)wanted);
	}
	printf("%llu switches, %llu hits, %llu exits (seed %llu): each was to a root of the guest's own\n",
	       (unsigned long long)steps, (unsigned long long)hits, (unsigned long long)exits, (unsigned long long)seed);
	if (hits < steps / 20)
		fail("hardly a switch hits");
	nested = false;
	kvm_cr3_cache_unregister(vcpu);
	kvm_cr3_cache_update(vcpu);
	if (kvm_cr3_cache_in_use())
		fail("nobody has a page, and each exit is still asked about it");
	return 0;
}
