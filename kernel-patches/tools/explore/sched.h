/* SPDX-License-Identifier: GPL-2.0-only */
/* What the scheduler and the drivers share; only the C library's side includes it. */
#ifndef SCHED_H
#define SCHED_H

#include <stdbool.h>
#include <stdint.h>

#include "explore.h"

#define MAX_SWITCHES 4096
#define MAX_EVENTS 200000
#define MAX_SHARED 8192
#define TEXT 400

/* At its `count`-th point, or where it waits after that, `task` gives way to `next`. */
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

/* A run's result; the child that runs it writes it for its parent. */
struct result {
	volatile int failed;
	char why[TEXT];
	const void *where;
	uint32_t points, changes_made, preempted;
	struct change changes[MAX_SWITCHES];
	uint32_t events;
	struct event event[MAX_EVENTS];
	/* What `say` printed; an event's value is its place here. */
	uint32_t said;
	char text[256 << 10];
	/* Addresses, and who read and wrote them: a hash table. */
	struct { const void *address; uint8_t readers, writers; } shared[MAX_SHARED];
};

/* How a run is scheduled. */
struct schedule {
	/* PCT: how many changes of priority, and among how many points; 0: as `changes` say. */
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
