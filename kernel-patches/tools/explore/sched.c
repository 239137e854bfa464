// SPDX-License-Identifier: GPL-2.0-only
/*
 * Simulated processors: tasks with stacks of their own that take turns on one thread.
 *
 * gcc compiles KVM as for KCSAN, so each memory access calls a function here. Accesses outside of
 * the task's stack, atomic operations and locks are points at which another task may continue.
 * Memory is ordered: the harness finds no fault that needs a weaker order.
 */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include "sched.h"

#define STACK (256ul << 10)
/* After this many points without a wait, a task counts as spinning and yields. */
#define SPIN 60000
/* A run with this many points counts as endless. */
#define ENDLESS 3000000

struct result *result;
struct schedule schedule;

static struct task {
	ucontext_t context;
	uint32_t count, since;
	int priority;
	bool ended;
	int (*ready)(void *);
	void *argument;
	const char *what;
} tasks[TASKS];

static char *stacks;
static int self;
static bool running;
static ucontext_t home;
static uint64_t random_state;
static uint32_t change_at[16];
static int lowest;

void seed_random(uint64_t seed)
{
	random_state = seed * 0x9e3779b97f4a7c15ull + 0x1234567;
	for (int i = 0; i < 4; i++)
		rnd(2);
}

unsigned int rnd(unsigned int n)
{
	random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
	return (unsigned int)(random_state >> 33) % n;
}

int self_id(void)
{
	return self;
}

int on_task_stack(const void *address)
{
	char *at = (char *)address;

	return at >= stacks && at < stacks + TASKS * STACK;
}

static void event(enum kind kind, const void *address, const void *pc, uint64_t value)
{
	if (schedule.events && result->events < MAX_EVENTS)
		result->event[result->events++] = (struct event){ tasks[self].count, self, kind, address, pc, value };
}

void say(const char *format, ...)
{
	va_list arguments;
	uint32_t at = result->said;

	if (!running || !schedule.events || at > sizeof(result->text) - TEXT)
		return;
	va_start(arguments, format);
	result->said += vsnprintf(result->text + at, TEXT, format, arguments) + 1;
	va_end(arguments);
	event(AT_YIELD, NULL, NULL, at);
}

void fail(const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	vsnprintf(result->why, TEXT, format, arguments);
	va_end(arguments);
	result->failed = 1;
	_exit(0);
}

void fail_at(const void *where, const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	vsnprintf(result->why, TEXT, format, arguments);
	va_end(arguments);
	result->where = where;
	result->failed = 1;
	_exit(0);
}

static int is_ready(int id)
{
	struct task *task = &tasks[id];

	return !task->ended && (!task->ready || task->ready(task->argument));
}

/* The runnable task with the highest priority; -1 if there is none. */
static int best(void)
{
	int found = -1;

	for (int id = 0; id < TASKS; id++)
		if (is_ready(id) && (found < 0 || tasks[id].priority > tasks[found].priority))
			found = id;
	return found;
}

static void go_to(int next, const void *pc)
{
	int last = self;

	if (next == last)
		return;
	if (result->changes_made < MAX_SWITCHES)
		result->changes[result->changes_made++] = (struct change){ tasks[last].count, last, next };
	event(AT_WAIT, NULL, pc, next);
	kernel_switch(last, next);
	self = next;
	swapcontext(&tasks[last].context, &tasks[next].context);
}

static struct change *change_here(void)
{
	for (uint32_t i = 0; i < schedule.changes; i++)
		if (schedule.change[i].task == self && schedule.change[i].count == tasks[self].count)
			return &schedule.change[i];
	return NULL;
}

/* A livelock under an unfair schedule is not a fault of the kernel. */
static void look_for_spin(const void *pc)
{
	if (++tasks[self].since > SPIN) {
		tasks[self].since = 0;
		tasks[self].priority = --lowest;
	}
	if (result->points > ENDLESS)
		fail_at(pc, "the run comes to no end: %s goes on", self < VCPUS ? "a vCPU" : "user space");
}

static void note_shared(const void *address, bool write)
{
	uint32_t slot = ((uintptr_t)address >> 2) * 2654435761u % MAX_SHARED;

	for (int tries = 0; tries < 64; tries++, slot = (slot + 1) % MAX_SHARED) {
		if (result->shared[slot].address && result->shared[slot].address != address)
			continue;
		result->shared[slot].address = address;
		if (write)
			result->shared[slot].writers |= 1 << self;
		else
			result->shared[slot].readers |= 1 << self;
		return;
	}
}

bool is_shared(const void *address)
{
	uint32_t slot = ((uintptr_t)address >> 2) * 2654435761u % MAX_SHARED;

	for (int tries = 0; tries < 64; tries++, slot = (slot + 1) % MAX_SHARED) {
		if (!result->shared[slot].address)
			return false;
		if (result->shared[slot].address == address) {
			uint8_t all = result->shared[slot].readers | result->shared[slot].writers;

			return result->shared[slot].writers && (all & (all - 1));
		}
	}
	/* The table is full there. */
	return true;
}

void point(enum kind kind, const void *address, const void *pc)
{
	struct change *change;

	if (!running)
		return;
	tasks[self].count++;
	result->points++;
	event(kind, address, pc, kind == AT_LOCK || kind == AT_UNLOCK || kind == AT_YIELD ? 0 : *(const volatile uint8_t *)address);
	if (address)
		note_shared(address, kind != AT_READ);
	look_for_spin(pc);
	if (schedule.depth) {
		for (uint32_t i = 0; i < schedule.depth; i++)
			if (change_at[i] == result->points)
				tasks[self].priority = --lowest;
		if (kind == AT_UNLOCK || kind == AT_YIELD || tasks[self].priority <= 0)
			go_to(best(), pc);
		return;
	}
	change = change_here();
	if (change && change->next != self && is_ready(change->next)) {
		result->preempted++;
		go_to(change->next, pc);
	}
}

/* For a task that polls: the others continue first. */
void give_way(void)
{
	struct change *change;
	int id;

	if (!running)
		return;
	point(AT_YIELD, NULL, __builtin_return_address(0));
	if (schedule.depth) {
		tasks[self].priority = --lowest;
		go_to(best(), __builtin_return_address(0));
		return;
	}
	change = change_here();
	for (id = 0; !change && id < TASKS; id++)
		if (id != self && is_ready(id)) {
			go_to(id, __builtin_return_address(0));
			return;
		}
}

void released(const void *pc)
{
	point(AT_UNLOCK, NULL, pc);
}

/* Runs other tasks until `ready` returns true. */
void wait_for(int (*ready)(void *), void *argument, const char *what, const void *pc)
{
	struct task *task = &tasks[self];
	struct change *change;
	int next;

	if (!running) {
		if (!ready(argument))
			fail("%s: nobody will end this wait (pc %p)", what, pc);
		return;
	}
	task->since = 0;
	while (!ready(argument)) {
		task->ready = ready;
		task->argument = argument;
		task->what = what;
		change = schedule.depth ? NULL : change_here();
		next = change && is_ready(change->next) ? change->next : best();
		if (next < 0) {
			char all[TEXT] = "";

			for (int id = 0; id < TASKS; id++)
				if (!tasks[id].ended)
					snprintf(all + strlen(all), TEXT - strlen(all), " task %d: %s;", id, tasks[id].what);
			fail("all wait for each other:%s", all);
		}
		go_to(next, pc);
	}
	task->ready = NULL;
}

int all_others_ended(int but)
{
	for (int id = 0; id < TASKS; id++)
		if (id != but && !tasks[id].ended)
			return 0;
	return 1;
}

static void body(int id)
{
	int next;

	vm_task(id);
	tasks[self].ended = true;
	next = best();
	if (next < 0) {
		for (id = 0; id < TASKS; id++)
			if (!tasks[id].ended)
				fail("a task waits for ever: %s", tasks[id].what);
		running = false;
		kernel_switch(self, USER);
		setcontext(&home);
	}
	go_to(next, NULL);
}

/* Runs `program` by `schedule`. */
void schedule_run(void)
{
	stacks = mmap(NULL, TASKS * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	for (int id = 0; id < TASKS; id++) {
		tasks[id].priority = 1 + (schedule.depth ? (int)rnd(1000) : id == schedule.first ? 100 : 10 - id);
		getcontext(&tasks[id].context);
		tasks[id].context.uc_stack.ss_sp = stacks + id * STACK;
		tasks[id].context.uc_stack.ss_size = STACK;
		makecontext(&tasks[id].context, (void (*)(void))body, 1, id);
	}
	for (uint32_t i = 0; i < schedule.depth; i++)
		change_at[i] = 1 + rnd(schedule.length);
	running = true;
	self = best();
	kernel_switch(USER, self);
	swapcontext(&home, &tasks[self].context);
	self = USER;
}

/* gcc's calls. A plain access is a point too, like a marked one. */
#define ACCESS(name, kind)						\
	void __tsan_##name(void *address);				\
	void __tsan_##name(void *address)				\
	{								\
		const void *pc = __builtin_return_address(0);		\
									\
		if (!running || on_task_stack(address))			\
			return;						\
		kernel_check_access(address, pc);			\
		point(kind, address, pc);				\
	}
#define ACCESSES(size)							\
	ACCESS(read##size, AT_READ) ACCESS(write##size, AT_WRITE)	\
	ACCESS(unaligned_read##size, AT_READ) ACCESS(unaligned_write##size, AT_WRITE) \
	ACCESS(volatile_read##size, AT_READ) ACCESS(volatile_write##size, AT_WRITE) \
	ACCESS(unaligned_volatile_read##size, AT_READ) ACCESS(unaligned_volatile_write##size, AT_WRITE)
ACCESSES(1) ACCESSES(2) ACCESSES(4) ACCESSES(8) ACCESSES(16)

#define HOOK(name, ...) void name(__VA_ARGS__); void name(__VA_ARGS__) { }
HOOK(__tsan_func_entry, void *pc)
HOOK(__tsan_func_exit, void)
HOOK(__tsan_init, void)
HOOK(__tsan_read_range, void *address, unsigned long size)
HOOK(__tsan_write_range, void *address, unsigned long size)

/* The kernel's call for an atomic operation, or for a write of a whole structure. */
void __kcsan_check_access(const volatile void *address, unsigned long size, int type);
void __kcsan_check_access(const volatile void *address, unsigned long size, int type)
{
	const void *pc = __builtin_return_address(0);

	if (!running || on_task_stack((const void *)address))
		return;
	kernel_check_access((const void *)address, pc);
	if (type & 4)
		point(type & 1 ? AT_ATOMIC : AT_READ, (const void *)address, pc);
}
