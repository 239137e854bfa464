// SPDX-License-Identifier: GPL-2.0-only
/*
 * Stand-ins for the rest of the kernel: memory, locks, RCU, SRCU, files, the host's pages.
 *
 * This file is compiled with the kernel's flags and headers. A symbol that KVM needs and that is
 * missing here gets an unmapped address. A run that uses it ends with its name, so no function is
 * stubbed silently. STANDS_FOR gives a function the kernel's name without its prototype, which
 * differs between kernels. The registers of the arguments do not differ.
 */
#include <linux/kvm_host.h>
#include <linux/fs.h>
#include <linux/miscdevice.h>
#include <linux/mmu_notifier.h>
#include <linux/percpu.h>
#include <linux/rwlock.h>
#include <linux/slab.h>
#include <linux/version.h>

#include "explore.h"
#include "host.h"

#define STANDS_FOR(symbol, function) asm(".globl " #symbol "\n.set " #symbol ", " #function)
#define DOES_NOTHING(symbol) STANDS_FOR(symbol, nothing)
#define RETURNS_0(symbol) STANDS_FOR(symbol, nothing)

__used static long nothing(void)
{
	return 0;
}

/* ---- Memory: each allocation has its own place in the arena, and none is used twice in a run. ---- */

/* For each 16 bytes of the arena, whether they were freed. */
static u8 freed[ARENA_SIZE >> 4];
/* The second page is the zero page (host.c). */
static unsigned long arena_end = 2 * PAGE_SIZE;

void kernel_check_access(const void *address, const void *pc)
{
	unsigned long offset = (char *)address - arena;

	if ((unsigned long)address < PAGE_SIZE)
		fail_at(pc, "a NULL pointer: address %p", address);
	if (offset < ARENA_SIZE && freed[offset >> 4])
		fail_at(pc, "use after free: address %p", address);
}

static void *allocate(unsigned long size, unsigned long align, gfp_t flags)
{
	void *p;

	arena_end = ALIGN(arena_end, align);
	if (arena_end + size > GUEST_BASE)
		fail("the harness is out of memory");
	p = arena + arena_end;
	arena_end = ALIGN(arena_end + size, 16);
	if (!(flags & __GFP_ZERO))
		memset(p, 0xa5, size);
	return p;
}

static void release(void *p, unsigned long size)
{
	if (p)
		memset(freed + (((char *)p - arena) >> 4), 1, DIV_ROUND_UP(size, 16));
}

void *harness_alloc(unsigned long size)
{
	return allocate(size, PAGE_SIZE, __GFP_ZERO);
}

/* An object's size is stored before it. */
__used static void *x_kmalloc(unsigned long size, gfp_t flags)
{
	unsigned long *p = allocate(size + 64, 64, flags);

	*p = size;
	return (char *)p + 64;
}

__used static void x_kfree(void *p)
{
	if (p && !IS_ERR(p)) {
		unsigned long offset = (char *)p - arena;

		if (offset >= ARENA_SIZE)
			return;
		if (freed[offset >> 4])
			fail("freed twice: %p", p);
		release(p, *(unsigned long *)((char *)p - 64));
	}
}

__used static void *x_kmalloc_size_third(void *cache, gfp_t flags, unsigned long size)
{
	return x_kmalloc(size, flags);
}

__used static void *x_kvmalloc(unsigned long size)
{
	return x_kmalloc(size, __GFP_ZERO);
}

__used static void *x_kvcalloc(unsigned long n, unsigned long size)
{
	return x_kmalloc(n * size, __GFP_ZERO);
}

/* Whole pages, also with their size before them */
__used static void *x_vzalloc(unsigned long size)
{
	char *p = allocate(size + PAGE_SIZE, PAGE_SIZE, __GFP_ZERO) + PAGE_SIZE;

	*(unsigned long *)(p - 64) = size;
	return p;
}

/* The constructor of `constructed` objects zeroes them. */
struct cache { unsigned long size; bool constructed; };

/* lib/xarray.c's */
struct cache ex_xa_nodes = { sizeof(struct xa_node), true }, *ex_radix_tree_node_cachep = &ex_xa_nodes;
STANDS_FOR(radix_tree_node_cachep, ex_radix_tree_node_cachep);

__used static void *x_cache_create(const char *name, unsigned int size)
{
	struct cache *cache = x_kmalloc(sizeof(*cache), 0);

	cache->size = size;
	cache->constructed = false;
	return cache;
}

__used static void *x_cache_alloc(struct cache *cache, gfp_t flags)
{
	return x_kmalloc(cache->size, flags | (cache->constructed ? __GFP_ZERO : 0));
}

__used static void *x_cache_alloc_lru(struct cache *cache, void *lru, gfp_t flags)
{
	return x_cache_alloc(cache, flags);
}

__used static void x_cache_free(struct cache *cache, void *p)
{
	x_kfree(p);
}

__used static unsigned long x_get_free_pages(gfp_t flags, unsigned int order)
{
	unsigned long address = (unsigned long)allocate(PAGE_SIZE << order, PAGE_SIZE << order, flags);
	unsigned int i;

	for (i = 0; i < 1u << order; i++)
		atomic_set(&virt_to_page((void *)address)[i]._refcount, 1);
	return address;
}

__used static unsigned long x_get_zeroed_page(gfp_t flags)
{
	return x_get_free_pages(flags | __GFP_ZERO, 0);
}

__used static void x_free_pages(unsigned long address, unsigned int order)
{
	if (!address)
		return;
	if (freed[(address - (unsigned long)arena) >> 4])
		fail("a page is freed twice");
	release((void *)address, PAGE_SIZE << order);
}

__used static struct page *x_alloc_pages(gfp_t flags, unsigned int order)
{
	return virt_to_page((void *)x_get_free_pages(flags, order));
}

__used static struct page *x_alloc_pages_node(int node, gfp_t flags, unsigned int order)
{
	return x_alloc_pages(flags, order);
}

__used static void x_free_page_struct(struct page *page, unsigned int order)
{
	x_free_pages((unsigned long)page_address(page), order);
}

/* The last reference of a page has been dropped. */
__used static void x_folio_put(struct page *page)
{
	x_free_page_struct(page, 0);
}
STANDS_FOR(__folio_put, x_folio_put);
STANDS_FOR(__put_page, x_folio_put);

__used static void *x_alloc_exact(unsigned long size, gfp_t flags)
{
	return (void *)x_get_free_pages(flags, get_order(size));
}

__used static void x_free_exact(void *p, unsigned long size)
{
	x_free_pages((unsigned long)p, get_order(size));
}
STANDS_FOR(alloc_pages_exact_noprof, x_alloc_exact);
STANDS_FOR(alloc_pages_exact, x_alloc_exact);
STANDS_FOR(free_pages_exact, x_free_exact);

STANDS_FOR(kmem_cache_create, x_cache_create);
STANDS_FOR(kmem_cache_create_usercopy, x_cache_create);
STANDS_FOR(__kmem_cache_create_args, x_cache_create);
STANDS_FOR(kmem_cache_alloc, x_cache_alloc);
STANDS_FOR(kmem_cache_alloc_noprof, x_cache_alloc);
STANDS_FOR(kmem_cache_alloc_lru_noprof, x_cache_alloc_lru);
STANDS_FOR(kmem_cache_free, x_cache_free);
STANDS_FOR(kmem_cache_alloc_trace, x_kmalloc_size_third);
STANDS_FOR(__kmalloc_cache_noprof, x_kmalloc_size_third);
STANDS_FOR(__kmalloc, x_kmalloc);
STANDS_FOR(__kmalloc_noprof, x_kmalloc);
STANDS_FOR(__kmalloc_node_noprof, x_kvmalloc);
STANDS_FOR(kvmalloc_node, x_kvmalloc);
STANDS_FOR(__kvmalloc_node_noprof, x_kvmalloc);
STANDS_FOR(__vcalloc_noprof, x_kvcalloc);
STANDS_FOR(__vcalloc, x_kvcalloc);
STANDS_FOR(vzalloc, x_vzalloc);
STANDS_FOR(__vmalloc, x_vzalloc);
STANDS_FOR(__vmalloc_noprof, x_vzalloc);
STANDS_FOR(vzalloc_noprof, x_vzalloc);
STANDS_FOR(kfree, x_kfree);
STANDS_FOR(kvfree, x_kfree);
STANDS_FOR(vfree, x_kfree);
STANDS_FOR(__get_free_pages, x_get_free_pages);
STANDS_FOR(get_free_pages_noprof, x_get_free_pages);
STANDS_FOR(get_zeroed_page, x_get_zeroed_page);
STANDS_FOR(get_zeroed_page_noprof, x_get_zeroed_page);
STANDS_FOR(alloc_pages_noprof, x_alloc_pages);
STANDS_FOR(__alloc_pages_nodemask, x_alloc_pages);
STANDS_FOR(__alloc_pages_noprof, x_alloc_pages);
STANDS_FOR(alloc_pages_node_noprof, x_alloc_pages_node);
STANDS_FOR(free_pages, x_free_pages);
STANDS_FOR(__free_pages, x_free_page_struct);
/* These tables are not read: the size comes with the call. */
char kmalloc_tables[1 << 14] __aligned(64);
STANDS_FOR(kmalloc_caches, kmalloc_tables);
/* All processors share what is allocated for each. */
__used static void *x_alloc_percpu(unsigned long size)
{
	return x_kmalloc(size, __GFP_ZERO);
}
STANDS_FOR(pcpu_alloc_noprof, x_alloc_percpu);
STANDS_FOR(__alloc_percpu, x_alloc_percpu);
/* Statistics of memory use */
DOES_NOTHING(lruvec_stat_mod_folio);
DOES_NOTHING(mod_node_page_state);
DOES_NOTHING(__mod_lruvec_kmem_state);
DOES_NOTHING(__mod_lruvec_slab_state);
/* The host is never short of memory. */
__used static void *x_shrinker_alloc(void)
{
	return x_kmalloc(PAGE_SIZE, __GFP_ZERO);
}
STANDS_FOR(shrinker_alloc, x_shrinker_alloc);
DOES_NOTHING(shrinker_register);
RETURNS_0(register_shrinker);
RETURNS_0(__percpu_counter_init);
RETURNS_0(__percpu_counter_init_many);
DOES_NOTHING(percpu_counter_add_batch);
int ex_percpu_counter_batch = 32;
STANDS_FOR(percpu_counter_batch, ex_percpu_counter_batch);
RETURNS_0(__percpu_counter_sum);

unsigned long ex_page_offset_base, ex_vmemmap_base, ex_phys_base;
STANDS_FOR(page_offset_base, ex_page_offset_base);
STANDS_FOR(vmemmap_base, ex_vmemmap_base);
STANDS_FOR(phys_base, ex_phys_base);

/* ---- Processors: each task has one. The per-CPU variables are copied when tasks change. ---- */

/* The linker defines symbols for the ends of a section. */
extern char percpu_start[] asm("__start_percpu_of_kvm"), percpu_end[] asm("__stop_percpu_of_kvm");
static char percpu_of[TASKS][4096] __aligned(64);
static struct task_struct task_of[TASKS];
static struct mm_struct mm;

#define PERCPU(type, name) type ex_##name __section(".data..percpu"); STANDS_FOR(name, ex_##name)
PERCPU(struct task_struct *, current_task);
STANDS_FOR(const_current_task, ex_current_task);
/* arm64 has it in thread_info from 5.16 on. */
#if defined(CONFIG_X86) || LINUX_VERSION_CODE < KERNEL_VERSION(5, 16, 0)
#define CPU_NUMBER
PERCPU(int, cpu_number);
STANDS_FOR(const_cpu_number, ex_cpu_number);
#endif
#ifdef CONFIG_X86
/* As long as the longest in any base */
PERCPU(unsigned long, __preempt_count);
PERCPU(unsigned long, this_cpu_off);
#else
/* The variables of the running task are in the section itself. */
unsigned long ex_cpu_offset;
#endif
/* 6.2 to 6.14 have these in one structure. */
#if defined(CONFIG_X86) && LINUX_VERSION_CODE >= KERNEL_VERSION(6, 2, 0) && LINUX_VERSION_CODE < KERNEL_VERSION(6, 15, 0)
struct pcpu_hot ex_pcpu_hot __section(".data..percpu");
STANDS_FOR(pcpu_hot, ex_pcpu_hot);
STANDS_FOR(const_pcpu_hot, ex_pcpu_hot);
#endif
unsigned long ex_per_cpu_offset[NR_CPUS];
STANDS_FOR(__per_cpu_offset, ex_per_cpu_offset);
unsigned int ex_nr_cpu_ids = TASKS;
STANDS_FOR(nr_cpu_ids, ex_nr_cpu_ids);
unsigned long ex_cpu_mask[BITS_TO_LONGS(NR_CPUS)] = { (1 << TASKS) - 1 };
STANDS_FOR(__cpu_online_mask, ex_cpu_mask);
STANDS_FOR(__cpu_possible_mask, ex_cpu_mask);
STANDS_FOR(__cpu_present_mask, ex_cpu_mask);

__used static unsigned int x_cpumask_next(int id, const struct cpumask *mask)
{
	return find_next_bit(mask->bits, TASKS, id + 1);
}
STANDS_FOR(cpumask_next, x_cpumask_next);

static void set_processor(int id)
{
	ex_current_task = &task_of[id];
#ifdef CPU_NUMBER
	ex_cpu_number = id;
#else
	task_thread_info(&task_of[id])->cpu = id;
#endif
#ifdef CONFIG_X86
	ex___preempt_count = PREEMPT_ENABLED;
#else
	task_thread_info(&task_of[id])->preempt_count = PREEMPT_ENABLED;
#endif
#if defined(CONFIG_X86) && LINUX_VERSION_CODE >= KERNEL_VERSION(6, 2, 0) && LINUX_VERSION_CODE < KERNEL_VERSION(6, 15, 0)
	ex_pcpu_hot.cpu_number = id;
	ex_pcpu_hot.current_task = &task_of[id];
	ex_pcpu_hot.preempt_count = PREEMPT_ENABLED;
#endif
	/* gcc does not know that these variables are in the section. */
	barrier();
}

void kernel_switch(int from, int to)
{
	unsigned long size = percpu_end - percpu_start;

	memcpy(percpu_of[from], percpu_start, size);
	memcpy(percpu_start, percpu_of[to], size);
}

/* Called once, by user space's task. */
void kernel_init(void)
{
	int id;

	if (percpu_end - percpu_start > sizeof(percpu_of[0]))
		fail("the variables of a processor take %ld bytes", (long)(percpu_end - percpu_start));
	/* arm64's linear map is where its header says. */
	ex_page_offset_base = (unsigned long)arena;
	for (id = 0; id < TASKS; id++) {
		task_of[id].mm = &mm;
		set_processor(id);
		memcpy(percpu_of[id], percpu_start, percpu_end - percpu_start);
	}
	set_processor(USER);
	atomic_set(&mm.mm_count, 1000);
	atomic_set(&mm.mm_users, 1000);
	host_init(&mm);
}

/* No task is asked to give up its processor. The scheduler changes tasks. */
asm(".globl preempt_schedule_thunk, __SCT__preempt_schedule, ___preempt_schedule\n"
    "preempt_schedule_thunk: __SCT__preempt_schedule: ___preempt_schedule: ret");
DOES_NOTHING(preempt_schedule);
DOES_NOTHING(preempt_schedule_notrace);
DOES_NOTHING(preempt_notifier_inc);
DOES_NOTHING(preempt_notifier_dec);
DOES_NOTHING(preempt_notifier_register);
DOES_NOTHING(preempt_notifier_unregister);
RETURNS_0(single_task_running);

__used static void x_cond_resched(void)
{
	point(AT_YIELD, NULL, __builtin_return_address(0));
}
STANDS_FOR(__cond_resched, x_cond_resched);
STANDS_FOR(__SCT__cond_resched, x_cond_resched);
DOES_NOTHING(__SCT__might_resched);
STANDS_FOR(_cond_resched, x_cond_resched);

/* ---- Locks, in the kernel's own words, so that inlined code works too ---- */

__used static int spin_is_free(void *lock)
{
	return !READ_ONCE(((arch_spinlock_t *)lock)->val.counter);
}

__used static void x_spin_lock(raw_spinlock_t *lock)
{
	void *pc = __builtin_return_address(0);

	point(AT_LOCK, lock, pc);
	wait_for(spin_is_free, &lock->raw_lock, "a spinlock", pc);
	lock->raw_lock.val.counter = 1;
}

__used static unsigned long x_spin_lock_irqsave(raw_spinlock_t *lock)
{
	x_spin_lock(lock);
	return 0;
}

__used static int x_spin_trylock(raw_spinlock_t *lock)
{
	point(AT_LOCK, lock, __builtin_return_address(0));
	if (!spin_is_free(&lock->raw_lock))
		return 0;
	lock->raw_lock.val.counter = 1;
	return 1;
}

__used static void x_spin_unlock(raw_spinlock_t *lock)
{
	if (!lock->raw_lock.val.counter)
		fail("a spinlock is unlocked that nobody holds");
	lock->raw_lock.val.counter = 0;
	released(__builtin_return_address(0));
}
STANDS_FOR(_raw_spin_lock, x_spin_lock);
STANDS_FOR(_raw_spin_lock_bh, x_spin_lock);
STANDS_FOR(_raw_spin_lock_irq, x_spin_lock);
STANDS_FOR(_raw_spin_lock_irqsave, x_spin_lock_irqsave);
STANDS_FOR(_raw_spin_trylock, x_spin_trylock);
STANDS_FOR(_raw_spin_unlock, x_spin_unlock);
STANDS_FOR(_raw_spin_unlock_bh, x_spin_unlock);
STANDS_FOR(_raw_spin_unlock_irq, x_spin_unlock);
STANDS_FOR(_raw_spin_unlock_irqrestore, x_spin_unlock);

#define WRITER 0xff

__used static int may_read(void *lock)
{
	return !(((rwlock_t *)lock)->raw_lock.cnts.counter & WRITER);
}

__used static int may_write(void *lock)
{
	return !((rwlock_t *)lock)->raw_lock.cnts.counter;
}

/* rwlock_is_contended() reads the waiters' lock. */
static void wait_for_rwlock(rwlock_t *lock, int (*ready)(void *), void *pc)
{
	point(AT_LOCK, lock, pc);
	if (ready(lock))
		return;
	lock->raw_lock.wait_lock.val.counter++;
	wait_for(ready, lock, "mmu_lock", pc);
	lock->raw_lock.wait_lock.val.counter--;
}

__used static void x_read_lock(rwlock_t *lock)
{
	wait_for_rwlock(lock, may_read, __builtin_return_address(0));
	lock->raw_lock.cnts.counter += 0x200;
}

__used static int x_read_trylock(rwlock_t *lock)
{
	point(AT_LOCK, lock, __builtin_return_address(0));
	if (!may_read(lock))
		return 0;
	lock->raw_lock.cnts.counter += 0x200;
	return 1;
}

__used static void x_read_unlock(rwlock_t *lock)
{
	if (lock->raw_lock.cnts.counter < 0x200)
		fail("a lock is unlocked that nobody has read-locked");
	lock->raw_lock.cnts.counter -= 0x200;
	released(__builtin_return_address(0));
}

__used static void x_write_lock(rwlock_t *lock)
{
	wait_for_rwlock(lock, may_write, __builtin_return_address(0));
	lock->raw_lock.cnts.counter |= WRITER;
}

__used static void x_write_unlock(rwlock_t *lock)
{
	if (!(lock->raw_lock.cnts.counter & WRITER))
		fail("a lock is unlocked that nobody has write-locked");
	lock->raw_lock.cnts.counter &= ~WRITER;
	released(__builtin_return_address(0));
}

/* Like __cond_resched_rwlock_write() of kernel/sched/core.c */
__used static int x_cond_resched_write(rwlock_t *lock)
{
	if (!lock->raw_lock.wait_lock.val.counter)
		return 0;
	x_write_unlock(lock);
	x_write_lock(lock);
	return 1;
}

__used static int x_cond_resched_read(rwlock_t *lock)
{
	if (!lock->raw_lock.wait_lock.val.counter)
		return 0;
	x_read_unlock(lock);
	x_read_lock(lock);
	return 1;
}
STANDS_FOR(_raw_read_lock, x_read_lock);
STANDS_FOR(_raw_read_trylock, x_read_trylock);
STANDS_FOR(_raw_read_unlock, x_read_unlock);
STANDS_FOR(_raw_write_lock, x_write_lock);
STANDS_FOR(_raw_write_unlock, x_write_unlock);
STANDS_FOR(__cond_resched_rwlock_write, x_cond_resched_write);
STANDS_FOR(__cond_resched_rwlock_read, x_cond_resched_read);
STANDS_FOR(__cond_resched_lock, x_cond_resched);

__used static int mutex_is_free(void *lock)
{
	return !((struct mutex *)lock)->owner.counter;
}

__used static void x_mutex_init(struct mutex *lock)
{
	lock->owner.counter = 0;
}

__used static int x_mutex_lock(struct mutex *lock)
{
	void *pc = __builtin_return_address(0);

	point(AT_LOCK, lock, pc);
	wait_for(mutex_is_free, lock, "a mutex", pc);
	lock->owner.counter = 1 + self_id();
	return 0;
}

__used static int x_mutex_trylock(struct mutex *lock)
{
	if (!mutex_is_free(lock))
		return 0;
	lock->owner.counter = 1 + self_id();
	return 1;
}

__used static void x_mutex_unlock(struct mutex *lock)
{
	if (!lock->owner.counter)
		fail("a mutex is unlocked that nobody holds");
	lock->owner.counter = 0;
	released(__builtin_return_address(0));
}
STANDS_FOR(__mutex_init, x_mutex_init);
STANDS_FOR(mutex_init_generic, x_mutex_init);
STANDS_FOR(mutex_lock, x_mutex_lock);
STANDS_FOR(mutex_lock_killable, x_mutex_lock);
STANDS_FOR(mutex_trylock, x_mutex_trylock);
STANDS_FOR(mutex_unlock, x_mutex_unlock);
/* The host's mmap_lock. The host's page tables change in one step here. */
DOES_NOTHING(down_read);
DOES_NOTHING(up_read);

/* ---- RCU: a callback runs once all sections that had begun have ended. ---- */

static int rcu_depth[TASKS];
static unsigned int rcu_left[TASKS];
static struct rcu_head *rcu_queue, **rcu_tail = &rcu_queue;

__used static void x_rcu_read_lock(void)
{
	rcu_depth[self_id()]++;
}

__used static void x_rcu_read_unlock(void)
{
	if (!rcu_depth[self_id()])
		fail("rcu_read_unlock() without rcu_read_lock()");
	if (!--rcu_depth[self_id()])
		rcu_left[self_id()]++;
}

struct grace { u8 inside[TASKS]; unsigned int left[TASKS]; };

static void grace_begins(struct grace *grace)
{
	int id;

	for (id = 0; id < TASKS; id++) {
		grace->inside[id] = !!rcu_depth[id];
		grace->left[id] = rcu_left[id];
	}
}

__used static int grace_is_over(void *argument)
{
	struct grace *grace = argument;
	int id;

	for (id = 0; id < TASKS; id++)
		if (grace->inside[id] && rcu_left[id] == grace->left[id])
			return 0;
	return 1;
}

__used static void x_synchronize_rcu(void)
{
	struct grace grace;

	grace_begins(&grace);
	wait_for(grace_is_over, &grace, "a grace period of RCU", __builtin_return_address(0));
}

__used static void x_call_rcu(struct rcu_head *head, rcu_callback_t function)
{
	head->func = function;
	head->next = NULL;
	*rcu_tail = head;
	rcu_tail = (struct rcu_head **)&head->next;
}

__used static int rcu_has_work(void *unused)
{
	return rcu_queue || all_others_ended(RCU);
}

void rcu_task(void)
{
	struct rcu_head *head;

	for (;;) {
		wait_for(rcu_has_work, NULL, "callbacks of RCU", NULL);
		if (!rcu_queue)
			return;
		head = rcu_queue;
		rcu_queue = NULL;
		rcu_tail = &rcu_queue;
		x_synchronize_rcu();
		while (head) {
			struct rcu_head *next = (struct rcu_head *)head->next;

			head->func(head);
			head = next;
		}
	}
}
STANDS_FOR(__rcu_read_lock, x_rcu_read_lock);
STANDS_FOR(__rcu_read_unlock, x_rcu_read_unlock);
STANDS_FOR(synchronize_rcu, x_synchronize_rcu);
STANDS_FOR(call_rcu, x_call_rcu);

/* SRCU: two counts of readers, as in the kernel; there are few domains. */
static struct srcu { void *domain; int index, readers[2], busy; } srcus[8];

static struct srcu *srcu_of(void *domain)
{
	struct srcu *srcu;

	for (srcu = srcus; srcu < srcus + ARRAY_SIZE(srcus); srcu++) {
		if (!srcu->domain)
			srcu->domain = domain;
		if (srcu->domain == domain)
			return srcu;
	}
	fail("more domains of SRCU than the harness has");
}

__used static int x_srcu_read_lock(void *domain)
{
	struct srcu *srcu = srcu_of(domain);
	int index;

	point(AT_LOCK, domain, __builtin_return_address(0));
	index = srcu->index;
	srcu->readers[index]++;
	return index;
}

__used static void x_srcu_read_unlock(void *domain, int index)
{
	srcu_of(domain)->readers[index]--;
	released(__builtin_return_address(0));
}

__used static int srcu_is_idle(void *srcu)
{
	return !((struct srcu *)srcu)->busy;
}

__used static int srcu_has_no_old_reader(void *srcu)
{
	return !((struct srcu *)srcu)->readers[!((struct srcu *)srcu)->index];
}

__used static void x_synchronize_srcu(void *domain)
{
	struct srcu *srcu = srcu_of(domain);
	void *pc = __builtin_return_address(0);

	point(AT_LOCK, domain, pc);
	wait_for(srcu_is_idle, srcu, "another grace period of SRCU", pc);
	srcu->busy = 1;
	wait_for(srcu_has_no_old_reader, srcu, "old readers of SRCU", pc);
	srcu->index = !srcu->index;
	wait_for(srcu_has_no_old_reader, srcu, "readers of SRCU", pc);
	srcu->busy = 0;
	released(pc);
}
RETURNS_0(init_srcu_struct);
RETURNS_0(init_srcu_struct_generic);
STANDS_FOR(__srcu_read_lock, x_srcu_read_lock);
STANDS_FOR(__srcu_read_unlock, x_srcu_read_unlock);
STANDS_FOR(synchronize_srcu, x_synchronize_srcu);
STANDS_FOR(synchronize_srcu_expedited, x_synchronize_srcu);
/* No process waits in the kernel for a notifier here. */
RETURNS_0(rcuwait_wake_up);
DOES_NOTHING(finish_rcuwait);

/* ---- KCSAN's calls that order nothing here ---- */
DOES_NOTHING(kcsan_atomic_next);
DOES_NOTHING(kcsan_nestable_atomic_begin);
DOES_NOTHING(kcsan_nestable_atomic_end);
DOES_NOTHING(kcsan_disable_current);
DOES_NOTHING(kcsan_enable_current);
DOES_NOTHING(kcsan_enable_current_nowarn);

/* ---- Copies between user space and the kernel, which are both this process ---- */

__used static unsigned long x_copy(void *to, const void *from, unsigned long n)
{
	memcpy(to, from, n);
	return 0;
}
/* The address is in rax. rdx gets the value, and rax an error. */
asm(".globl __get_user_8, __get_user_nocheck_8\n"
    "__get_user_8: __get_user_nocheck_8: mov (%rax), %rdx\n"
    "xor %eax, %eax\nret");
/* Copies from rsi to rdi. rcx gets the number of bytes left. */
asm(".globl rep_movs_alternative\nrep_movs_alternative: rep movsb\nret");
STANDS_FOR(_copy_from_user, x_copy);
STANDS_FOR(_copy_to_user, x_copy);

/* Before 5.14 KVM has a list of its statistics' files, which ends with a nameless one. */
#ifndef CONFIG_X86
struct { const char *name; unsigned long more[3]; } ex_no_debugfs_entries;
STANDS_FOR(debugfs_entries, ex_no_debugfs_entries);
#endif

/* ---- Files: what an ioctl makes is kept by the order in which it was made. ---- */

static struct kernel_file files[8];
static int files_made;
const struct file_operations *kvm_device;

struct kernel_file *kernel_file(int fd)
{
	return &files[fd];
}

__used static struct file *x_getfile(const char *name, const struct file_operations *operations, void *private)
{
	struct file *file = x_kmalloc(sizeof(*file), __GFP_ZERO);

	file->private_data = private;
	files[files_made].file = file;
	files[files_made].operations = operations;
	files_made++;
	return file;
}

__used static int x_getfd(const char *name, const struct file_operations *operations, void *private)
{
	x_getfile(name, operations, private);
	return files_made - 1;
}

__used static int x_get_unused_fd(void)
{
	return files_made;
}

__used static int x_misc_register(struct miscdevice *device)
{
	kvm_device = device->fops;
	return 0;
}
STANDS_FOR(anon_inode_getfile, x_getfile);
STANDS_FOR(anon_inode_getfile_fmode, x_getfile);
STANDS_FOR(anon_inode_getfd, x_getfd);
STANDS_FOR(get_unused_fd_flags, x_get_unused_fd);
DOES_NOTHING(fd_install);
STANDS_FOR(misc_register, x_misc_register);

/* ---- Warnings ---- */

__used static void x_warn(const char *format)
{
	fail_at(__builtin_return_address(0), "the kernel warns: %s", format);
}

__used static void x_warn_trap(void)
{
	fail_at(__builtin_return_address(0), "the kernel warns");
}
STANDS_FOR(__SCT__WARN_trap, x_warn_trap);
STANDS_FOR(ex_warn, x_warn_trap);
STANDS_FOR(__warn_printk, x_warn);
STANDS_FOR(refcount_warn_saturate, x_warn);
STANDS_FOR(__list_add_valid_or_report, x_warn);
STANDS_FOR(__list_del_entry_valid_or_report, x_warn);
DOES_NOTHING(_printk);
DOES_NOTHING(printk);
RETURNS_0(___ratelimit);

/* ---- Parts of KVM and of the kernel that do not concern a guest's memory ---- */
RETURNS_0(kvm_init_irq_routing);
RETURNS_0(kvm_set_irq_routing);
RETURNS_0(kvm_coalesced_mmio_init);
RETURNS_0(kvm_irqfd_init);
RETURNS_0(kvm_async_pf_init);
RETURNS_0(kvm_vfio_ops_init);
RETURNS_0(kvm_gmem_init);
DOES_NOTHING(kvm_eventfd_init);
DOES_NOTHING(kvm_async_pf_vcpu_init);
DOES_NOTHING(kvm_gmem_prepare_memory_region);
DOES_NOTHING(kvm_gmem_commit_memory_region);
DOES_NOTHING(gfn_to_pfn_cache_invalidate_start);
RETURNS_0(__cpuhp_setup_state);
#if defined(CONFIG_X86) && LINUX_VERSION_CODE < KERNEL_VERSION(5, 16, 0)
/* Processors need no setup. */
RETURNS_0(smp_call_function_single);
RETURNS_0(on_each_cpu);
/* The guest has neither CPUID nor MTRRs. */
RETURNS_0(kvm_find_cpuid_entry);
__used static bool x_mtrr_check(void)
{
	return true;
}
STANDS_FOR(kvm_mtrr_check_gfn_range_consistency, x_mtrr_check);
/* Copies edx bytes from rsi to rdi. rax gets the number of bytes left. */
asm(".globl copy_user_generic_unrolled\ncopy_user_generic_unrolled: mov %edx, %ecx\nrep movsb\nxor %eax, %eax\nret");
/* A page that nobody else has yet, at rdi */
asm(".globl clear_page_orig\nclear_page_orig: mov $512, %ecx\nxor %eax, %eax\nrep stosq\nret");
#endif
DOES_NOTHING(x86_virt_register_emergency_callback);
DOES_NOTHING(cpu_emergency_register_virt_callback);
RETURNS_0(__cpuhp_setup_state_cpuslocked);
DOES_NOTHING(register_syscore);
DOES_NOTHING(register_syscore_ops);
RETURNS_0(register_reboot_notifier);
DOES_NOTHING(perf_register_guest_info_callbacks);
RETURNS_0(kobject_uevent_env);
RETURNS_0(add_uevent_var);
DOES_NOTHING(get_task_pid);
DOES_NOTHING(put_pid);
DOES_NOTHING(mark_page_accessed);
RETURNS_0(vmalloc_to_page);
/* The host does not encrypt its memory. */
RETURNS_0(set_memory_decrypted);
/* No page of the host belongs to hugetlbfs. */
struct static_key_false ex_hugetlb_key;
STANDS_FOR(hugetlb_optimize_vmemmap_key, ex_hugetlb_key);
/* No optional feature is offered to guests. */
u32 ex_cpu_caps[64];
STANDS_FOR(kvm_cpu_caps, ex_cpu_caps);
bool ex_itlb_multihit;
STANDS_FOR(itlb_multihit_kvm_mitigation, ex_itlb_multihit);
enum system_states ex_system_state = SYSTEM_RUNNING;
STANDS_FOR(system_state, ex_system_state);
unsigned long ex_jiffies = INITIAL_JIFFIES;
STANDS_FOR(jiffies, ex_jiffies);

__used static int x_snprintf(char *buffer, unsigned long size)
{
	if (size)
		*buffer = 0;
	return 0;
}
STANDS_FOR(snprintf, x_snprintf);

/* Sets whether a signal is pending for user space's task. */
void set_signal(bool pending)
{
	if (pending)
		set_tsk_thread_flag(&task_of[USER], TIF_SIGPENDING);
	else
		clear_tsk_thread_flag(&task_of[USER], TIF_SIGPENDING);
}
