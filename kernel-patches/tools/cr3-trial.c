// SPDX-License-Identifier: GPL-2.0-only
/*
 * Tests when a guest uses its page of the CR3 cache, with a kernel's own code. The script
 * `cr3-trial` names the source.
 *
 * Each load of CR3 either owes a flush, and is not looked up, or may be found in the page. The tool
 * decides what the page contains.
 */
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef uint16_t u16;

/* What the functions under test use. */
#define this_cpu_ptr(variable) (variable)
#define this_cpu_read(variable) (variable)
#define this_cpu_write(variable, value) ((variable) = (value))
#define this_cpu_dec(variable) ((variable)--)
#define static_branch_unlikely(key) true
#ifndef __always_inline
#define __always_inline inline
#endif
#define clamp(value, low, high) ((value) < (low) ? (low) : (value) > (high) ? (high) : (value))

static void *cr3_cache_page;
static unsigned int kvm_cr3_cache_left;
/* Whether the host has the cache, and how often the guest asked for it. */
static bool offered;
static unsigned long registered;
/* Whether the page has the value that is loaded. */
static bool published;
static unsigned long looked;

static bool kvm_cr3_cache_section(void *page, unsigned long cr3)
{
	(void)page;
	(void)cr3;
	looked++;
	return published;
}

static long try_register_page(void)
{
	registered++;
	cr3_cache_page = offered ? &cr3_cache_page : NULL;
	return offered ? 4 : -1000;
}

static void unregister_page(void)
{
	cr3_cache_page = NULL;
}

#include EXTRACT

static void __attribute__((format(printf, 1, 2), noreturn)) fail(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	fputs("FAILED: ", stdout);
	vprintf(format, args);
	puts("");
	va_end(args);
	exit(1);
}

static void begin(void)
{
	memset(&cr3_cache_trial, 0, sizeof(cr3_cache_trial));
	kvm_cr3_cache_left = 0;
	cr3_cache_page = &cr3_cache_page;
	offered = true;
	registered = looked = 0;
}

/* @n loads, of which each @nth hits. The others miss, or owe a flush. */
static unsigned long loads(unsigned long n, unsigned long nth, bool flushes)
{
	unsigned long before = looked;

	for (unsigned long i = 0; i < n; i++) {
		published = nth && i % nth == nth - 1;
		if (!published && flushes)
			kvm_cr3_cache_flush();
		else if (kvm_cr3_cache_load(0x1000) && !published)
			fail("a load that finds nothing is called a hit");
	}
	return looked - before;
}

int main(void)
{
	const unsigned long most = CR3_CACHE_MAX_PAUSE, trial = CR3_CACHE_TRIAL;
	/* A trial without a hit. */
	const unsigned long vain = CR3_CACHE_MARGIN + 1;
	const unsigned long round = most + trial, n = 100 * round;
	unsigned long seen, pause = 0, longest = 0;

	for (unsigned long nth = 1; nth <= 2; nth++) {
		begin();
		seen = loads(n, nth, false);
		if (seen != n)
			fail("a guest of which each load %lu hits looks at %lu of %lu", nth, seen, n);
		begin();
		seen = loads(n, nth, true);
		if (seen != n / nth)
			fail("with flushes beside, of %lu that may hit %lu are looked for", n / nth, seen);
	}
	for (unsigned long nth = 3; nth <= 64; nth += 3) {
		begin();
		/* Until each pause has the maximum length. */
		loads(4 * round, nth, false);
		seen = loads(n, nth, false);
		if (seen > 101 * trial)
			fail("a guest of which each load %lu hits still looks at %lu of %lu", nth, seen, n);
		if (seen < 99 * vain)
			fail("a guest of which each load %lu hits looks at %lu of %lu, and never again", nth, seen, n);
		begin();
		loads(4 * round, nth, true);
		seen = loads(n, nth, true);
		if (seen > 101 * trial)
			fail("flushes are not counted: each load %lu hits, and %lu of %lu are looked for", nth, seen, n);
	}

	begin();
	for (unsigned long i = 0; i < 10 * round; i++) {
		pause = loads(1, 0, false) ? 0 : pause + 1;
		longest = pause > longest ? pause : longest;
	}
	if (longest != most)
		fail("the longest pause is %lu loads, not %lu", longest, most);
	/* From now on each load would hit. */
	loads(round, 1, false);
	seen = loads(n, 1, false);
	if (seen != n)
		fail("a guest that hits now looks at %lu of %lu", seen, n);
	/* Hardly any hits again: the pauses start short. */
	seen = loads(vain + CR3_CACHE_MIN_PAUSE + vain, 0, false);
	if (seen != 2 * vain)
		fail("the first pause is not %d loads", CR3_CACHE_MIN_PAUSE);

	/*
	 * The guest asks a host without the cache now and then. A host with the cache gets the
	 * guest back.
	 */
	begin();
	loads(4 * round, 0, false);
	offered = false;
	registered = 0;
	loads(10 * round, 0, false);
	if (registered < 9 || registered > 11)
		fail("a host that refuses was asked %lu times in 10 pauses", registered);
	offered = true;
	loads(round, 1, false);
	if (loads(n, 1, false) != n)
		fail("a guest that is back does not look");

	begin();
	loads(vain + 1, 0, false);
	if (cr3_cache_page)
		fail("its page stays registered while it is not looked into");

	/* The guest has not registered. */
	begin();
	cr3_cache_page = NULL;
	if (loads(n, 1, false) || loads(n, 0, true) || registered)
		fail("without a page it is looked into, or registered");
	printf("pauses of %d to %lu loads, where fewer than %d of %lu hit; looked for again after each\n",
	       CR3_CACHE_MIN_PAUSE, most, CR3_CACHE_HITS, trial);
	return 0;
}
