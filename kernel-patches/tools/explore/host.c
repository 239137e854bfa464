// SPDX-License-Identifier: GPL-2.0-only
/*
 * The host's memory: pages, page tables, and MMU notifiers.
 *
 * Guest memory is the upper half of the arena. User space's addresses of it are below the arena.
 * KVM has to learn the size of a mapping. On x86 it walks the host's page tables, which are real. On
 * arm64 the memory is of hugetlbfs, which says the size. The host can move a block of 2 MiB. The
 * contents of its pages move with it and are not modelled.
 */
#include <linux/kvm_host.h>
#include <linux/fs.h>
#include <linux/hugetlb.h>
#include <linux/mmu_notifier.h>
#include <linux/version.h>

#include "explore.h"
#include "host.h"

#define BLOCK (2ul << 20)
#define BLOCKS 4
/* The other place of a block that the host has moved */
#define ELSEWHERE (16ul << 20)

extern unsigned long ex_vmemmap_base;
static bool elsewhere[BLOCKS], taken[BLOCKS];
static struct mmu_notifier *notifier;
static struct mm_struct *host_mm;

unsigned long ex_zero_page_pfn = 1;
asm(".globl zero_page_pfn\n.set zero_page_pfn, ex_zero_page_pfn");
/* Its name before 7.0 */
asm(".globl zero_pfn\n.set zero_pfn, ex_zero_page_pfn");
struct mem_section ex_section, *ex_mem_section[1] = { &ex_section };
asm(".globl mem_section\n.set mem_section, ex_mem_section_pointer");
struct mem_section **ex_mem_section_pointer = ex_mem_section;

static int block_of(unsigned long hva)
{
	return (hva - USER_BASE) / BLOCK;
}

unsigned long host_pfn(unsigned long hva)
{
	unsigned long pfn = (GUEST_BASE + hva - USER_BASE) >> PAGE_SHIFT;

	return elsewhere[block_of(hva)] ? pfn + (ELSEWHERE >> PAGE_SHIFT) : pfn;
}

#ifdef CONFIG_X86
unsigned int ex_pgdir_shift = 39, ex_ptrs_per_p4d = 1;
asm(".globl pgdir_shift\n.set pgdir_shift, ex_pgdir_shift");
asm(".globl ptrs_per_p4d\n.set ptrs_per_p4d, ex_ptrs_per_p4d");
struct cpuinfo_x86 ex_boot_cpu_data = { .x86_phys_bits = 46, .x86_virt_bits = 48 };
asm(".globl boot_cpu_data\n.set boot_cpu_data, ex_boot_cpu_data");

static pmd_t *pmds;

static void set_size_of(int block)
{
	unsigned long hva = USER_BASE + block * BLOCK;
	unsigned long pa = host_pfn(hva) << PAGE_SHIFT;

	pmds[pmd_index(hva)] = __pmd(taken[block] ? 0 :
				     setup.huge ? pa | _PAGE_PRESENT | _PAGE_RW | _PAGE_USER | _PAGE_PSE :
						  (unsigned long)pmds - (unsigned long)arena + (_PAGE_PRESENT | _PAGE_RW | _PAGE_USER));
}

#if LINUX_VERSION_CODE < KERNEL_VERSION(5, 16, 0)
/* KVM asks this function for the size of a mapping. */
__used static pte_t *x_lookup_address_in_mm(struct mm_struct *mm, unsigned long address, unsigned int *level)
{
	pmd_t *pmd = &pmds[pmd_index(address)];

	point(AT_READ, pmd, __builtin_return_address(0));
	*level = pmd_large(*pmd) ? PG_LEVEL_2M : PG_LEVEL_4K;
	return pmd_none(*pmd) ? NULL : (pte_t *)pmd;
}
asm(".globl lookup_address_in_mm\n.set lookup_address_in_mm, x_lookup_address_in_mm");
#endif

static void tables_init(void)
{
	unsigned long hva = USER_BASE;
	pgd_t *pgd = harness_alloc(PAGE_SIZE);
	pud_t *pud = harness_alloc(PAGE_SIZE);

	host_mm->pgd = pgd;
	pmds = harness_alloc(PAGE_SIZE);
	pgd[(hva >> 39) & 511] = __pgd(__pa(pud) | _PAGE_TABLE);
	pud[(hva >> 30) & 511] = __pud(__pa(pmds) | _PAGE_TABLE);
}
#else
static struct hstate hugepages = { .order = 9 };
static struct hugetlbfs_sb_info filesystem = { .hstate = &hugepages };
static struct super_block super = { .s_fs_info = &filesystem };
static struct inode inode = { .i_sb = &super };
static struct file file = { .f_inode = &inode };
static struct vm_area_struct vma = { .vm_file = &file };

static void set_size_of(int block)
{
}

static void tables_init(void)
{
	vma.vm_start = USER_BASE;
	vma.vm_end = USER_BASE + BLOCKS * BLOCK;
	*(vm_flags_t *)&vma.vm_flags = VM_READ | VM_WRITE | VM_HUGETLB;
}

__used static struct vm_area_struct *x_find_vma(struct mm_struct *mm, unsigned long address)
{
	return address < vma.vm_end ? &vma : NULL;
}
asm(".globl find_vma\n.set find_vma, x_find_vma");
asm(".globl find_vma_intersection\n.set find_vma_intersection, x_find_vma");

__used static unsigned long x_vma_kernel_pagesize(struct vm_area_struct *vma)
{
	return BLOCK;
}
asm(".globl vma_kernel_pagesize\n.set vma_kernel_pagesize, x_vma_kernel_pagesize");

/* vma_lookup() */
__used static struct vm_area_struct *x_mtree_load(void *tree, unsigned long address)
{
	return x_find_vma(NULL, address);
}
asm(".globl mtree_load\n.set mtree_load, x_mtree_load");
#endif

void host_init(struct mm_struct *mm)
{
	unsigned long pages = ARENA_SIZE >> PAGE_SHIFT, i;
	struct page *page = harness_alloc(pages * sizeof(*page));

	ex_vmemmap_base = (unsigned long)page;
	for (i = 0; i < pages; i++)
		atomic_set(&page[i]._refcount, 1 << 20);
#if defined(CONFIG_X86) && LINUX_VERSION_CODE < KERNEL_VERSION(5, 16, 0)
	/* Only pages of a compound page can be mapped by a huge page. */
	for (i = GUEST_BASE >> PAGE_SHIFT; setup.huge && i < pages; i++)
		if (i & (PTRS_PER_PMD - 1))
			page[i].compound_head = (unsigned long)&page[i & -PTRS_PER_PMD] | 1;
		else
			__set_bit(PG_head, &page[i].flags);
#endif
	ex_section.section_mem_map = SECTION_MARKED_PRESENT | SECTION_HAS_MEM_MAP | SECTION_IS_EARLY;
	host_mm = mm;
	tables_init();
	for (i = 0; i < BLOCKS; i++)
		set_size_of(i);
}

static int one_page(unsigned long hva, struct page **pages)
{
	if (taken[block_of(hva)])
		return 0;
	pages[0] = pfn_to_page(host_pfn(hva));
	page_ref_inc(pages[0]);
	return 1;
}

__used static int x_gup_fast(unsigned long hva, int n, unsigned int flags, struct page **pages)
{
	point(AT_YIELD, NULL, __builtin_return_address(0));
	return one_page(hva, pages);
}

__used static int is_there(void *hva)
{
	return !taken[block_of((unsigned long)hva)];
}

/* Like the host's fault handler, it waits while the page is being moved. */
__used static long x_gup(unsigned long hva, unsigned long n, struct page **pages)
{
	wait_for(is_there, (void *)hva, "a page that the host moves", __builtin_return_address(0));
	return one_page(hva, pages);
}

__used static int x_notifier_register(struct mmu_notifier *mn)
{
	notifier = mn;
	return 0;
}
asm(".globl get_user_pages_fast_only\n.set get_user_pages_fast_only, x_gup_fast");
asm(".globl get_user_pages_unlocked\n.set get_user_pages_unlocked, x_gup");
asm(".globl mmu_notifier_register\n.set mmu_notifier_register, x_notifier_register");

void host_replace(unsigned long hva)
{
	int block = block_of(hva);
	struct mmu_notifier_range range = {
		.mm = host_mm,
		.start = USER_BASE + block * BLOCK,
		.end = USER_BASE + (block + 1) * BLOCK,
		.flags = MMU_NOTIFIER_RANGE_BLOCKABLE,
	};

	notifier->ops->invalidate_range_start(notifier, &range);
	taken[block] = true;
	set_size_of(block);
	point(AT_YIELD, NULL, __builtin_return_address(0));
	elsewhere[block] = !elsewhere[block];
	taken[block] = false;
	set_size_of(block);
	notifier->ops->invalidate_range_end(notifier, &range);
}

void host_age(unsigned long hva)
{
	unsigned long start = hva & -BLOCK;

	if (rnd(2))
		notifier->ops->clear_flush_young(notifier, host_mm, start, start + BLOCK);
	else
		notifier->ops->clear_young(notifier, host_mm, start, start + BLOCK);
}
