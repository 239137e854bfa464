// SPDX-License-Identifier: GPL-2.0-only
/*
 * The drivers. Each run is a child forked from a process with a VM, so all runs begin alike.
 *
 * Random runs use PCT: tasks have priorities, and at `depth` points the running task falls below
 * all others. Exhaustive runs take fixed programs and change tasks at each point where tasks meet
 * in memory, and at each pair of such points. A failing run is shrunk: operations and changes of
 * task are removed one by one, as long as it fails in the same way.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include "sched.h"

char *arena;
static const char *self_path;
extern char __executable_start[], etext[];
extern const struct { unsigned long address; const char *name; } lacking_symbols[];

/* The setups' names. The drivers take them in turn. */
static const struct { const char *name; struct setup setup; } setups[] = {
#ifdef EXPLORE_ARM64
	{ "stage2", { .tdp = 1, .manual = 1 } },
	{ "stage2-init-set", { .tdp = 1, .manual = 1, .init_set = 1, .odd = 1 } },
	{ "stage2-split", { .tdp = 1, .manual = 1, .eager = 1 } },
	{ "stage2-ring", { .tdp = 1, .ring = 1 } },
	{ "stage2-init", { .tdp = 1, .manual = 1, .init = 1 } },
	{ "stage2-nested", { .tdp = 1, .manual = 1, .l2 = 1 } },
	{ "stage2-late", { .tdp = 1, .manual = 1, .late = 1 } },
#else
	{ "tdp-mmu", { .tdp = 1, .tdp_mmu = 1, .manual = 1, .eager = 1 } },
	{ "tdp-mmu-huge", { .tdp = 1, .tdp_mmu = 1, .manual = 1, .huge = 1 } },
	{ "tdp-mmu-init-set", { .tdp = 1, .tdp_mmu = 1, .manual = 1, .init_set = 1, .huge = 1, .odd = 1 } },
	{ "tdp-mmu-ring", { .tdp = 1, .tdp_mmu = 1, .ring = 1, .huge = 1 } },
	{ "rmaps", { .tdp = 1, .manual = 1, .huge = 1 } },
	{ "rmaps-init-set", { .tdp = 1, .manual = 1, .init_set = 1, .huge = 1, .odd = 1 } },
	{ "rmaps-ring", { .tdp = 1, .ring = 1, .huge = 1 } },
	{ "ept", { .tdp = 1, .tdp_mmu = 1, .ept = 1, .ad = 1, .huge = 1 } },
	{ "nested", { .tdp = 1, .tdp_mmu = 1, .nested = 1, .huge = 1 } },
	{ "nested-rmaps", { .tdp = 1, .nested = 1, .huge = 1 } },
	{ "ept-no-ad", { .tdp = 1, .tdp_mmu = 1, .ept = 1, .manual = 1, .huge = 1 } },
	{ "nested-init-set", { .tdp = 1, .tdp_mmu = 1, .nested = 1, .manual = 1, .init_set = 1, .huge = 1, .tables_logged = 1 } },
	{ "tdp-mmu-prefault", { .tdp = 1, .tdp_mmu = 1, .manual = 1, .huge = 1, .prefault = 1 } },
	{ "tdp-mmu-ring-replaced", { .tdp = 1, .tdp_mmu = 1, .ring = 1, .huge = 1, .replaced = 1 } },
	{ "tdp-mmu-prefault-ring", { .tdp = 1, .tdp_mmu = 1, .ring = 1, .huge = 1, .prefault = 1 } },
	{ "shadow", { .manual = 1, .huge = 1 } },
	{ "shadow-init-set", { .manual = 1, .init_set = 1, .huge = 1, .odd = 1 } },
	{ "shadow-ring", { .ring = 1, .huge = 1 } },
#endif
};
#define SETUPS (sizeof(setups) / sizeof(*setups))

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec / 1e9;
}

/* ---- Privileged instructions of kernel code ---- */

static void fault_handler(int signal, siginfo_t *info, void *context)
{
	greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
	unsigned long pc = registers[REG_RIP], address = (unsigned long)info->si_addr;

	if (signal == SIGTRAP)
		fail_at((void *)pc, "the harness lacks an instruction of arm64");
	if (signal == SIGILL)
		fail_at((void *)pc + 1, "the kernel warns, or finds a bug");
	if (pc >= (unsigned long)__executable_start && pc < (unsigned long)etext) {
		unsigned char *code = (unsigned char *)pc;

		/* cli and sti: interrupts come only at points. */
		if (*code == 0xfa || *code == 0xfb) {
			*code = 0x90;
			return;
		}
	}
	for (int i = 0; lacking_symbols[i].name; i++)
		if (address - lacking_symbols[i].address < 4096 || pc == lacking_symbols[i].address)
			fail_at(pc == lacking_symbols[i].address ? *(void **)registers[REG_RSP] : (void *)pc + 1,
				"the harness lacks %s", lacking_symbols[i].name);
	if (lacking_operation(pc))
		fail_at(*(void **)registers[REG_RSP], "the harness lacks the vendor's %s", lacking_operation(pc));
	fail_at((void *)pc + 1, "signal %d, address %#lx", signal, address);
}

static void prepare_process(void)
{
	static char stack[64 << 10];
	stack_t alternate = { .ss_sp = stack, .ss_size = sizeof(stack) };
	struct sigaction action = { .sa_sigaction = fault_handler, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER };
	unsigned long start = (unsigned long)__executable_start & -4096ul;

	sigaltstack(&alternate, NULL);
	sigaction(SIGSEGV, &action, NULL);
	sigaction(SIGILL, &action, NULL);
	sigaction(SIGTRAP, &action, NULL);
	sigaction(SIGBUS, &action, NULL);
	mprotect((void *)start, ((unsigned long)etext - start + 4095) & -4096ul, PROT_READ | PROT_WRITE | PROT_EXEC);
	arena = mmap((void *)0x100000000000ul, ARENA_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	/* Guest memory at the addresses where KVM reads it */
	mmap((void *)USER_BASE, 16ul << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
	result = mmap(NULL, sizeof(*result), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

/* ---- Programs ---- */

static bool nth_program(unsigned int n);

static void random_program(void)
{
	static const unsigned char logged[] = { DO_LOG_ON, DO_LOG_OFF, DO_COLLECT, DO_CLEAR, DO_CLEAR, DO_CLEAR, DO_RESET, DO_RESET,
						DO_MOVE, DO_NOTIFY, DO_NOTIFY, DO_AGE, DO_AGE, DO_INIT_SET };
	int id, i, ops;

	/*
	 * Long programs seldom clear the page table's chunk while L2 begins to use it, end a log and
	 * begin one during a fault, or write beside a page that the memslot has no more.
	 */
	if ((setup.tables_logged || setup.late || setup.replaced) && rnd(2)) {
		nth_program(0);
		return;
	}
	memset(&program, 0, sizeof(program));
	/* A fault of the log loses pages that were mapped before the log is on. */
	ops = rnd(5);
	for (i = 0; i < ops; i++) {
		program.before[i].task = rnd(VCPUS);
		program.before[i].op = (struct op){ rnd(4) ? DO_WRITE : DO_READ, rnd(PAGES) };
	}
	if (rnd(2)) {
		program.before[i].task = USER;
		program.before[i].op.code = DO_LOG_ON;
	}
	for (id = 0; id < VCPUS; id++) {
		ops = 2 + rnd(6);
		for (i = 0; i < ops; i++) {
			unsigned int draw = rnd(16);

			program.ops[id][i] = (struct op){ draw < 10 ? DO_WRITE : draw < 15 ? DO_READ : setup.ring ? DO_SIGNAL : DO_INIT_SET,
							  rnd(PAGES) };
			if (has_tables() && rnd(setup.nested ? 8 : 2))
				program.ops[id][i].code = rnd(2) ? DO_TABLE : DO_FOLLOW;
			if (setup.prefault && !rnd(3))
				program.ops[id][i].code = DO_PREFAULT;
			if (setup.l2 && rnd(2))
				program.ops[id][i].code = DO_L2_WRITE;
			if (setup.init && !rnd(4))
				program.ops[id][i].code = DO_VCPU_INIT;
		}
	}
	ops = 2 + rnd(8);
	for (i = 0; i < ops; i++) {
		program.ops[USER][i] = (struct op){ logged[rnd(sizeof(logged))], rnd(PAGES) };
	}
	if (rnd(4))
		program.ops[USER][rnd(2)].code = DO_LOG_ON;
}

/* ---- One run ---- */

static uint64_t runs;

static void forget_result(void)
{
	result->failed = 0;
	result->why[0] = 0;
	result->where = NULL;
	result->points = result->changes_made = result->preempted = result->events = result->said = 0;
	memset(result->shared, 0, sizeof(result->shared));
}

/*
 * No other task runs any more. Each vCPU but the last has the check in a process of its own: what
 * one vCPU writes with a fault would be in the log for the other one, too.
 */
static void final_checks(void)
{
	int status;

	for (int id = 0; id < VCPUS - 1; id++) {
		pid_t child = fork();

		if (!child) {
			alarm(20);
			vm_final_check(id);
			_exit(0);
		}
		if (child < 0 || waitpid(child, &status, 0) < 0 || !WIFEXITED(status))
			fail("the check of vCPU %d at the end ends by a signal, or cannot begin", id);
		if (result->failed)
			_exit(0);
	}
	vm_final_check(VCPUS - 1);
}

static bool run_once(bool events)
{
	int status;
	pid_t child;

	forget_result();
	runs++;
	schedule.events = events;
	child = fork();
	if (!child) {
		alarm(20);
		vm_before();
		schedule_run();
		final_checks();
		_exit(0);
	}
	if (child < 0 || waitpid(child, &status, 0) < 0) {
		perror("explore: fork");
		exit(2);
	}
	if (!WIFEXITED(status)) {
		result->failed = 1;
		snprintf(result->why, TEXT, "the run ends by signal %d", WTERMSIG(status));
	}
	return result->failed;
}

/* ---- Shrinking ---- */

/* Numbers change when operations are removed. */
static bool same_failure(const char *why)
{
	const char *said = result->why;

	if (!result->failed)
		return false;
	while (*why && *said) {
		size_t digits = strspn(why, "0123456789abcdef");

		if (digits) {
			why += digits;
			said += strspn(said, "0123456789abcdef");
			continue;
		}
		if (*why++ != *said++)
			return false;
	}
	return *why == *said;
}

static void adopt_changes(void)
{
	schedule.depth = 0;
	schedule.changes = result->changes_made < MAX_SWITCHES ? result->changes_made : MAX_SWITCHES;
	memcpy(schedule.change, result->changes, schedule.changes * sizeof(struct change));
	schedule.first = result->changes_made ? result->changes[0].task : 0;
}

static void shrink(double until)
{
	struct schedule kept;
	struct program kept_program;
	char why[TEXT];
	bool again = true;

	memcpy(why, result->why, TEXT);
	while (again && now() < until) {
		again = false;
		for (int i = 0; program.before[i].op.code && now() < until; ) {
			kept_program = program;
			memmove(&program.before[i], &program.before[i + 1], (OPS - 1 - i) * sizeof(*program.before));
			run_once(false);
			if (same_failure(why)) {
				again = true;
			} else {
				program = kept_program;
				i++;
			}
		}
		for (int id = 0; id <= USER; id++)
			for (int i = 0; program.ops[id][i].code && now() < until; ) {
				kept_program = program;
				memmove(&program.ops[id][i], &program.ops[id][i + 1], (OPS - 1 - i) * sizeof(struct op));
				run_once(false);
				if (same_failure(why)) {
					again = true;
				} else {
					program = kept_program;
					i++;
				}
			}
		for (uint32_t step = schedule.changes; step; step /= 2)
			for (uint32_t i = 0; i + step <= schedule.changes && now() < until; ) {
				kept = schedule;
				memmove(&schedule.change[i], &schedule.change[i + step],
					(schedule.changes - i - step) * sizeof(struct change));
				schedule.changes -= step;
				run_once(false);
				if (same_failure(why)) {
					again = true;
				} else {
					schedule = kept;
					i += step;
				}
			}
	}
}

/* ---- The trace ---- */

static const char *task_name(int id)
{
	static const char *const names[TASKS] = { "vCPU 0", "vCPU 1", "user space", "RCU" };

	return names[id];
}

#define MAX_LINES 4096
static struct { const void *pc; char text[300]; } lines[MAX_LINES];
static int known_lines;

/*
 * Finds the kernel's functions and lines, innermost first, of the places where tasks stop, by one
 * call of addr2line.
 */
static void find_lines(void)
{
	char command[64 << 10], line[1024];
	int length = snprintf(command, sizeof(command), "addr2line -a -f -i -e %s", self_path), at = -1;
	FILE *answer;

	known_lines = 0;
	for (uint32_t i = 0; i <= result->events && known_lines < MAX_LINES && length < (int)sizeof(command) - 32; i++) {
		const void *pc = i < result->events ? result->event[i].pc : result->where;
		int known = 0;

		if ((i < result->events && result->event[i].kind != AT_WAIT) || !pc)
			continue;
		while (known < known_lines && lines[known].pc != pc)
			known++;
		if (known < known_lines)
			continue;
		lines[known_lines].pc = pc;
		lines[known_lines++].text[0] = 0;
		length += snprintf(command + length, sizeof(command) - length, " %#lx", (unsigned long)pc - 1);
	}
	answer = popen(command, "r");
	while (answer && fgets(line, sizeof(line), answer)) {
		char function[100], *start, *end, *text;

		line[strcspn(line, "\n")] = 0;
		if (!strncmp(line, "0x", 2)) {
			at++;
			continue;
		}
		snprintf(function, sizeof(function), "%.99s", line);
		if (at < 0 || at >= known_lines || !fgets(line, sizeof(line), answer))
			break;
		line[strcspn(line, "\n")] = 0;
		if ((end = strstr(line, " (discriminator")))
			*end = 0;
		start = strstr(line, "/arch/") ?: strstr(line, "/virt/") ?: strstr(line, "/include/") ?: strrchr(line, '/') ?: line;
		text = lines[at].text;
		snprintf(text + strlen(text), sizeof(lines[at].text) - strlen(text), "%s%s() %.100s", *text ? " < " : "", function, start + 1);
	}
	if (answer)
		pclose(answer);
}

static const char *line_of(const void *pc)
{
	for (int i = 0; i < known_lines; i++)
		if (lines[i].pc == pc)
			return lines[i].text;
	return "its end";
}

static void print_repeated(const char *indent, int *repeated)
{
	if (*repeated)
		printf("%s   (%d times more)\n", indent, *repeated);
	*repeated = 0;
}

static void print_trace(const char *indent)
{
	int step = 0, repeated = 0;
	const char *last = "";

	find_lines();

	for (uint32_t i = 0; i < result->events; i++) {
		struct event *event = &result->event[i];

		if (event->kind == AT_YIELD && !event->pc) {
			const char *text = result->text + event->value;

			/* A vCPU that waits for something faults repeatedly. */
			if (!strcmp(text, last)) {
				repeated++;
				continue;
			}
			print_repeated(indent, &repeated);
			last = text;
			printf("%s%d  %s\n", indent, ++step, text);
		} else if (event->kind == AT_WAIT) {
			print_repeated(indent, &repeated);
			printf("%s%d  %s stops at %s; %s goes on\n", indent, ++step, task_name(event->task), line_of(event->pc),
			       task_name(event->value));
		}
	}
	printf("%s%d  %s", indent, ++step, result->why);
	if (result->where)
		printf(": %s", line_of(result->where));
	puts("");
}

static void print_program(const char *indent)
{
	for (int i = 0; program.before[i].op.code; i++)
		printf("%sbefore: %s %s %d\n", indent, task_name(program.before[i].task), op_name(program.before[i].op.code),
		       program.before[i].op.page);
	for (int id = 0; id <= USER; id++) {
		printf("%s%s:", indent, task_name(id));
		for (struct op *op = program.ops[id]; op->code; op++)
			printf("%s %s %d", op == program.ops[id] ? "" : ",", op_name(op->code), op->page);
		puts("");
	}
}

/* Whether the first failure ends the program, without its trace */
static bool first_alone;

static void report_failure(const char *which, double until)
{
	uint32_t depth = schedule.depth;

	printf("    # %s fails: %s\n", which, result->why);
	if (first_alone)
		return;
	adopt_changes();
	if (run_once(false)) {
		shrink(until);
		run_once(true);
	} else {
		/*
		 * A task that yielded cannot be told from one that waited. The run without
		 * shrinking still fails.
		 */
		puts("    # its changes of task alone do not make it fail; it is not shrunk");
		schedule.depth = depth;
		run_once(true);
	}
	puts("    # the operations, with the pages that they are of:");
	print_program("    #   ");
	printf("    # the trace, %u changes of task:\n", result->changes_made);
	print_trace("    #   ");
}

/* ---- Drivers ---- */

static bool random_runs(uint64_t seed, uint64_t most, double until)
{
	double start = now();

	for (uint64_t i = 0; i < most && now() < until; i++, seed++) {
		seed_random(seed);
		random_program();
		schedule.depth = 1 + rnd(4);
		/*
		 * Runs have thousands to tens of thousands of points. Everything in a run follows
		 * from its seed.
		 */
		schedule.length = 500 << rnd(7);
		if (run_once(false)) {
			char which[128];

			snprintf(which, sizeof(which), "the run of seed %lu, after %lu runs and %.1f s,", seed, runs, now() - start);
			report_failure(which, now() + 60);
			return false;
		}
	}
	return true;
}

/*
 * The programs of the exhaustive driver: vCPUs on two pages and one operation of user space, after
 * some setup.
 */
static bool nth_program(unsigned int n)
{
	static const unsigned char beside[] = { DO_LOG_ON, DO_COLLECT, DO_CLEAR, DO_RESET, DO_LOG_OFF, DO_MOVE, DO_NOTIFY, DO_AGE };
	static const struct op first[] = { { DO_WRITE, 3 }, { DO_READ, 3 }, { DO_WRITE, 4 } };
	static const struct op second[] = { { DO_NONE, 0 }, { DO_WRITE, 3 } };
	int i = 0;

	if (n >= sizeof(beside) * 3 * 2)
		return false;
	memset(&program, 0, sizeof(program));
#define BEFORE(who, what, page) do {					\
		program.before[i].task = who;				\
		program.before[i++].op = (struct op){ what, page };	\
	} while (0)
	if (setup.late && !n) {
		/* A fault on a logged page, beside another one that makes a block of it */
		BEFORE(USER, DO_LOG_ON, 0);
		BEFORE(1, DO_READ, 3);
		program.ops[1][0] = (struct op){ DO_WRITE, 3 };
		program.ops[0][0] = (struct op){ DO_WRITE, 4 };
		program.ops[USER][0] = (struct op){ DO_LOG_OFF, 0 };
		program.ops[USER][1] = (struct op){ DO_JOIN, 0 };
		program.ops[USER][2] = (struct op){ DO_LOG_ON, 0 };
		return true;
	}
	if (setup.replaced && !n) {
		/* A reset of a page of the memslot and of one beyond its end */
		BEFORE(USER, DO_LOG_ON, 0);
		BEFORE(0, DO_WRITE, 3);
		program.ops[USER][0] = (struct op){ DO_MOVE, 0 };
		program.ops[USER][1] = (struct op){ DO_JOIN, 0 };
		program.ops[USER][2] = (struct op){ DO_RESET, 0 };
		program.ops[0][0] = (struct op){ DO_WRITE, 2 };
		return true;
	}
	if (setup.tables_logged && !n) {
		/* A chunk with a page table is cleared, while L2 begins to use it. */
		BEFORE(0, DO_TABLE, 0);
		BEFORE(USER, DO_LOG_ON, 0);
		BEFORE(USER, DO_COLLECT, 0);
		program.ops[USER][0] = (struct op){ DO_CLEAR, 1 };
		program.ops[1][0] = (struct op){ DO_FOLLOW, 0 };
		program.ops[0][0] = (struct op){ DO_TABLE, 0 };
		program.ops[0][1] = (struct op){ DO_FOLLOW, 0 };
		return true;
	}
	if (has_tables() && n < 2u + setup.tables_logged) {
		/* Both vCPUs change the table, flush, and use it. */
		for (int id = 0; id < VCPUS; id++) {
			program.ops[id][0] = (struct op){ DO_TABLE, id * n % 2 };
			program.ops[id][1] = (struct op){ DO_FOLLOW, id * n % 2 };
		}
		return true;
	}
	if (setup.nested)
		return false;
	program.ops[USER][0] = (struct op){ beside[n / 6], 3 };
	program.ops[0][0] = setup.prefault ? (struct op){ DO_PREFAULT, n % 3 } : first[n % 3];
	program.ops[1][0] = second[n / 3 % 2];
	BEFORE(0, DO_WRITE, 3);
	BEFORE(1, DO_READ, 3);
	if (beside[n / 6] != DO_LOG_ON) {
		BEFORE(USER, DO_LOG_ON, 0);
		BEFORE(0, DO_WRITE, 3);
		BEFORE(USER, DO_COLLECT, 0);
	}
	return true;
}

/* Finds the places where tasks meet, at which their order matters. */
static uint32_t meeting_points(struct change *points, uint32_t most, uint32_t after_task, uint32_t after_count)
{
	uint32_t found = 0;
	bool after = !after_count;

	for (uint32_t i = 0; i < result->events && found < most; i++) {
		struct event *event = &result->event[i];

		if (event->kind == AT_WAIT && event->task == after_task && event->count >= after_count)
			after = true;
		if (after && event->kind != AT_WAIT && event->kind != AT_YIELD && event->address && is_shared(event->address))
			points[found++] = (struct change){ event->count, event->task, 0 };
	}
	return found;
}

static bool give_way_once(struct change *change, uint32_t n, unsigned int program_number, unsigned int first)
{
	char which[128];

	schedule.depth = 0;
	schedule.first = first;
	schedule.changes = n;
	memcpy(schedule.change, change, n * sizeof(*change));
	if (!run_once(true))
		return true;
	snprintf(which, sizeof(which), "program %u, begun by %s, with %u changes of task,", program_number, task_name(first), n);
	report_failure(which, now() + 60);
	return false;
}

#define MOST_POINTS 20000

/* Runs every schedule with at most two unforced changes of task. */
static bool exhaustive_runs(double until)
{
	static struct change points[MOST_POINTS], later[MOST_POINTS];
	unsigned int n, done = 0;

	for (n = 0; nth_program(n); n++) {
		bool whole = true;

		for (unsigned int first = 0; first <= USER; first++) {
			uint32_t count, i, j, more;
			struct change pair[2];

			if (!program.ops[first][0].code)
				continue;
			if (!give_way_once(NULL, 0, n, first))
				return false;
			count = meeting_points(points, MOST_POINTS, 0, 0);
			for (i = 0; i < count; i++)
				for (unsigned int next = 0; next <= USER; next++) {
					if (next == points[i].task || !program.ops[next][0].code)
						continue;
					if (now() >= until) {
						whole = false;
						goto out;
					}
					pair[0] = points[i];
					pair[0].next = next;
					if (!give_way_once(pair, 1, n, first))
						return false;
					if (!result->preempted)
						continue;
					more = meeting_points(later, MOST_POINTS, pair[0].task, pair[0].count);
					for (j = 0; j < more && now() < until; j++)
						for (unsigned int last = 0; last <= USER; last++) {
							if (last == later[j].task || !program.ops[last][0].code)
								continue;
							pair[1] = later[j];
							pair[1].next = last;
							if (!give_way_once(pair, 2, n, first))
								return false;
						}
				}
		}
out:
		done += whole;
		if (now() >= until)
			break;
	}
	while (nth_program(n))
		n++;
	printf("    # of %u programs %u were run in each order with at most two changes of task\n", n, done);
	return true;
}

/* One setup by one driver, in a process of its own. */
static bool test(const struct setup *of, bool exhaustive, uint64_t seed, uint64_t most, double time)
{
	double start = now();
	int status;

	fflush(stdout);
	if (!fork()) {
		bool passed;

		setup = *of;
		forget_result();
		if (!fork()) {
			vm_create();
			_exit(0);
		}
		wait(&status);
		if (result->failed) {
			find_lines();
			printf("    # the VM cannot be made: %s: %s\n", result->why, line_of(result->where));
			exit(1);
		}
		vm_create();
		passed = exhaustive ? exhaustive_runs(start + time) : random_runs(seed, most, start + time);
		printf("    # %lu runs, %.1f s\n", runs, now() - start);
		exit(!passed);
	}
	wait(&status);
	return !status;
}

int main(int argc, char **argv)
{
	uint64_t seed = 1, most = 1000;
	double time = 0;
	const char *only = NULL;
	int failures = 0, number = 0, tests, option;
	bool timed = false, counted = false;

	self_path = argv[0];
	while ((option = getopt(argc, argv, "s:n:t:o:f")) != -1)
		switch (option) {
		case 's': seed = strtoull(optarg, NULL, 10); break;
		case 'n': most = strtoull(optarg, NULL, 10); counted = true; break;
		case 't': time = strtod(optarg, NULL); timed = true; break;
		case 'o': only = optarg; break;
		case 'f': first_alone = true; break;
		default: return 2;
		}
	if (timed && !counted)
		most = UINT64_MAX;
	tests = only ? 0 : SETUPS;
	for (unsigned int i = 0; only && i < SETUPS; i++)
		tests += !strcmp(only, setups[i].name);
	if (!tests) {
		fprintf(stderr, "explore: no setup %s:", only);
		for (unsigned int i = 0; i < SETUPS; i++)
			fprintf(stderr, " %s", setups[i].name);
		fputs(" are known\n", stderr);
		return 2;
	}
	setvbuf(stdout, NULL, _IOLBF, 0);
	prepare_process();
	puts("KTAP version 1");
	printf("1..%d\n", 2 * tests);
	for (unsigned int i = 0; i < SETUPS; i++) {
		if (only && strcmp(only, setups[i].name))
			continue;
		for (int exhaustive = 0; exhaustive < 2; exhaustive++) {
			/*
			 * Half of the time each. Without a time limit, some seconds for the
			 * exhaustive driver.
			 */
			double share = timed ? time / (2 * tests) : exhaustive ? 5 : 1e9;
			const char *lacking = lacks(&setups[i].setup);
			bool passed = lacking || test(&setups[i].setup, exhaustive, seed, most, share);

			printf("%sok %d %s, %s", passed ? "" : "not ", ++number, setups[i].name, exhaustive ? "exhaustive" : "random");
			if (lacking)
				printf(" # SKIP KVM of this base has no %s", lacking);
			putchar('\n');
			failures += !passed;
			if (failures && first_alone)
				return 1;
		}
	}
	return failures ? 1 : 0;
}
