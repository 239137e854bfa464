/* SPDX-License-Identifier: GPL-2.0-only */
/* Shared by the scheduler and the drivers; included only on the C library's side. */
#ifndef SCHED_H
#define SCHED_H

#include <stdbool.h>
#include <stdint.h>

#include "explore.h"

#define MAX_SWITCHES 4096
#define MAX_EVENTS 200000
#define MAX_SHARED 8192
#define TEXT 400

/* At its `count`-th point, or where it waits after that, `task` yields to `next`. */
struct change {
	uint32_t count;
	uint8_t task, next;
};

struct event {
	uint32_t count;
	uint8_t task, kind;
	const void *address, *pc;
	uint64_t value;
};

/* A run's result. The child that runs it writes it for its parent. */
struct result {
	volatile int failed;
	char why[TEXT];
	const void *where;
	uint32_t points, changes_made, preempted;
	struct change changes[MAX_SWITCHES];
	uint32_t events;
	struct event event[MAX_EVENTS];
	/* The output of `say`. An event's value is its offset here. */
	uint32_t said;
	char text[256 << 10];
	/* Addresses, and the tasks that read and wrote them: a hash table. */
	struct { const void *address; uint8_t readers, writers; } shared[MAX_SHARED];
};

/* How a run is scheduled. */
struct schedule {
	/* PCT: the number of priority changes, and of points; 0: use `changes`. */
	uint32_t depth, length;
	uint8_t first;
	uint32_t changes;
	struct change change[MAX_SWITCHES];
	/* Keep all events, for a trace. */
	bool events;
};

extern struct result *result;
extern struct schedule schedule;

void schedule_run(void);
void seed_random(uint64_t seed);
bool is_shared(const void *address);

#endif
