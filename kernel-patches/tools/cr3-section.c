// SPDX-License-Identifier: GPL-2.0-only
/*
 * Runs the section that reads the CR3 cache's page in user space. The script `cr3-section` names
 * the source.
 *
 * A child process is the vCPU. Its parent is KVM: it steps the child through the section by ptrace,
 * so that the processor executes each instruction, and emulates the load of CR3. Before each
 * instruction the vCPU may exit. KVM then does what the host's series does: if RIP is in the
 * section and not at its start, it sets RIP to the start. After that the page may change. All pairs
 * of two such exits are tried, each before any instruction and with any change, for a value at each
 * place of the page and for a missing value.
 *
 * A change gives each entry another host_cr3, as after a zap, moves the entries to other places, or
 * empties the page. An empty page means that the vCPU is on a KVM without the cache, and no later
 * exit sets RIP.
 *
 * These rules are checked: a loaded value is published at that moment for the value that the guest
 * wants; the return value says whether it was loaded; without a change a published value is found;
 * RDI, RSI, RSP, the stack and the page are unchanged; no register has an address of the host at
 * the end; the load is the last instruction of the section; and the section is not longer than KVM
 * allows.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

typedef uint64_t u64;

#define ENTRIES 4
#define MAX_SECTION 256
/* More steps than the longest section has if two exits restart it. */
#define MAX_STEPS 600
#define STACK_WORDS 64

enum change { NEW_ROOTS, OTHER_PLACES, STOCK_KVM, NR_CHANGES };

struct exit_at {
	/* The instruction since the section's start before which it exits; -1 for no exit */
	int step;
	enum change change;
};

struct entry {
	u64 guest_cr3, host_cr3;
};

extern char kvm_cr3_cache_section[], kvm_cr3_cache_section_end[];

/* Shared with the vCPU. */
static struct {
	struct entry entries[ENTRIES];
	u64 stack[STACK_WORDS];
} *memory;

/* KVM's own list. It does not read the page. */
static struct entry published[ENTRIES];
static u64 last_host_cr3;
static bool restarts = true;
static pid_t vcpu;
static char what[200];

static void __attribute__((format(printf, 1, 2), noreturn)) fail(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	fputs("FAILED: ", stdout);
	vprintf(format, args);
	printf(" (%s)\n", what);
	va_end(args);
	kill(vcpu, SIGKILL);
	exit(1);
}

static void __attribute__((noreturn)) broken(const char *call)
{
	fprintf(stderr, "cr3-section: %s: %s\n", call, strerror(errno));
	if (vcpu > 0)
		kill(vcpu, SIGKILL);
	exit(2);
}

/*
 * Each root is another page. Bit 11 is set in each of the host's values and in none of the guest's.
 */
static u64 new_host_cr3(void)
{
	return last_host_cr3 += 1 << 12;
}

static bool is_of_host(u64 value)
{
	return value > (1ull << 40 | 1 << 11) - 1 && value <= last_host_cr3;
}

static u64 guest_cr3(int nr)
{
	return 1ull << 63 | (u64)(nr + 1) << 12 | 1;
}

static void publish(void)
{
	memcpy(memory->entries, published, sizeof(published));
}

static void apply(enum change change)
{
	struct entry first = published[0];

	switch (change) {
	case NEW_ROOTS:
		for (int i = 0; i < ENTRIES; i++)
			published[i].host_cr3 = new_host_cr3();
		break;
	case OTHER_PLACES:
		memmove(published, published + 1, sizeof(published) - sizeof(first));
		published[ENTRIES - 1] = first;
		for (int i = 0; i < ENTRIES; i++)
			published[i].host_cr3 = new_host_cr3();
		break;
	default:
		memset(published, 0, sizeof(published));
	}
	publish();
}

static bool is_published(u64 guest, u64 host)
{
	for (int i = 0; i < ENTRIES; i++)
		if (published[i].guest_cr3 == guest && published[i].host_cr3 == host)
			return true;
	return false;
}

/* The register that the instruction at @rip loads into CR3: 0F 22 with reg 3; else -1 */
static int loads_cr3(u64 rip)
{
	const unsigned char *code = (const unsigned char *)rip;
	int rex = 0;

	if ((code[0] & 0xf0) == 0x40)
		rex = *code++;
	if (code[0] != 0x0f || code[1] != 0x22 || (code[2] >> 3 & 7) != 3 || rex & 4)
		return -1;
	return (code[2] & 7) | (rex & 1) << 3;
}

static u64 of_register(const struct user_regs_struct *regs, int nr)
{
	const u64 values[] = { regs->rax, regs->rcx, regs->rdx, regs->rbx, regs->rsp, regs->rbp,
		regs->rsi, regs->rdi, regs->r8, regs->r9, regs->r10, regs->r11, regs->r12,
		regs->r13, regs->r14, regs->r15 };

	return values[nr];
}

static void get(struct user_regs_struct *regs)
{
	if (ptrace(PTRACE_GETREGS, vcpu, NULL, regs))
		broken("PTRACE_GETREGS");
}

static void set(struct user_regs_struct *regs)
{
	if (ptrace(PTRACE_SETREGS, vcpu, NULL, regs))
		broken("PTRACE_SETREGS");
}

static void step(void)
{
	int status;

	if (ptrace(PTRACE_SINGLESTEP, vcpu, NULL, NULL) || waitpid(vcpu, &status, 0) != vcpu)
		broken("PTRACE_SINGLESTEP");
	if (!WIFSTOPPED(status) || WSTOPSIG(status) != SIGTRAP)
		fail("the section ends with status %#x", status);
}

static bool in_section(u64 rip)
{
	return rip > (u64)kvm_cr3_cache_section && rip < (u64)kvm_cr3_cache_section_end;
}

/*
 * One call for a value that is in @place of the page, or nowhere, with two exits. Returns the
 * number of instructions.
 */
static int call(int place, const struct exit_at *exits)
{
	const u64 wanted = guest_cr3(place), end = 0x1000;
	struct user_regs_struct regs;
	bool loaded = false, changed = false, stock = false;
	u64 stack[STACK_WORDS], *sp = &memory->stack[STACK_WORDS / 2];
	int steps;

	for (int i = 0; i < ENTRIES; i++)
		published[i] = (struct entry){ guest_cr3(i), new_host_cr3() };
	publish();
	for (int i = 0; i < STACK_WORDS; i++)
		memory->stack[i] = 0x5a5a0000 + i;
	*sp = end;
	memcpy(stack, memory->stack, sizeof(stack));

	get(&regs);
	regs.rip = (u64)kvm_cr3_cache_section;
	regs.rdi = (u64)memory->entries;
	regs.rsi = wanted;
	regs.rsp = (u64)sp;
	/* Registers with other values, none of which may matter. */
	regs.rax = regs.rdx = regs.rcx = 0xdead;
	regs.orig_rax = -1;
	set(&regs);

	for (steps = 0; regs.rip != end; steps++) {
		int nr;

		if (steps == MAX_STEPS)
			fail("the section does not come to its end");

		for (int i = 0; i < 2; i++) {
			if (exits[i].step != steps)
				continue;
			if (in_section(regs.rip) && restarts && !stock) {
				regs.rip = (u64)kvm_cr3_cache_section;
				set(&regs);
			}
			if (stock)
				continue;
			apply(exits[i].change);
			changed = true;
			stock = exits[i].change == STOCK_KVM;
		}

		nr = loads_cr3(regs.rip);
		if (nr >= 0) {
			u64 value = of_register(&regs, nr);

			if (!is_published(wanted, value))
				fail("CR3 is loaded with %#llx, which is not published for %#llx",
				     (unsigned long long)value, (unsigned long long)wanted);
			if (loaded)
				fail("CR3 is loaded twice");
			loaded = true;
			regs.rip += (*(unsigned char *)regs.rip & 0xf0) == 0x40 ? 4 : 3;
			if (regs.rip != (u64)kvm_cr3_cache_section_end)
				fail("the load of CR3 is not the last instruction of the section");
			set(&regs);
			continue;
		}

		step();
		get(&regs);
		if (in_section(regs.rip) && (regs.rdi != (u64)memory->entries || regs.rsi != wanted))
			fail("the section changes RDI or RSI, from which it is started anew");
	}

	if ((regs.rax & 0xff) != loaded)
		fail("the section says %llu, and CR3 was%s loaded", regs.rax & 0xff, loaded ? "" : " not");
	if (!changed && loaded != (place < ENTRIES))
		fail("an entry is %s", loaded ? "found that is not there" : "not found");
	for (int i = 0; i < 16; i++)
		if (is_of_host(of_register(&regs, i)))
			fail("register %d has an address of the host in the end", i);
	if (regs.rsp != (u64)(sp + 1) || memcmp(stack, memory->stack, sizeof(stack)))
		fail("the section writes to the stack");
	if (memcmp(published, memory->entries, sizeof(published)))
		fail("the section writes to the page");
	return steps;
}

int main(int argc, char **argv)
{
	const struct exit_at never = { .step = -1 };
	const long length = kvm_cr3_cache_section_end - kvm_cr3_cache_section;
	long calls = 0;
	int status;

	restarts = !(argc > 1 && !strcmp(argv[1], "no-restart"));
	setvbuf(stdout, NULL, _IOLBF, 0);
	memory = mmap(NULL, sizeof(*memory), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		broken("mmap");
	last_host_cr3 = 1ull << 40 | 1 << 11;

	vcpu = fork();
	if (vcpu < 0)
		broken("fork");
	if (!vcpu) {
		if (ptrace(PTRACE_TRACEME, 0, NULL, NULL))
			_exit(1);
		raise(SIGSTOP);
		_exit(1);
	}
	if (waitpid(vcpu, &status, 0) != vcpu || !WIFSTOPPED(status))
		broken("ptrace");

	snprintf(what, sizeof(what), "the section itself");
	if (length < 1 || length > MAX_SECTION)
		fail("the section is %ld bytes long", length);

	for (int place = 0; place <= ENTRIES; place++) {
		const struct exit_at none[2] = { never, never };
		int undisturbed;

		snprintf(what, sizeof(what), "place %d, no exit", place);
		undisturbed = call(place, none);
		calls++;

		/* The second exit may come while the section runs again. */
		for (int one = 0; one < undisturbed; one++)
			for (int two = one; two < 2 * undisturbed; two++)
				for (int changes = 0; changes < NR_CHANGES * NR_CHANGES; changes++) {
					const struct exit_at both[2] = {
						{ one, changes / NR_CHANGES },
						{ two, changes % NR_CHANGES },
					};

					snprintf(what, sizeof(what),
						 "place %d, exits before instructions %d and %d, changes %d and %d",
						 place, one, two, both[0].change, both[1].change);
					call(place, both);
					calls++;
				}
	}

	kill(vcpu, SIGKILL);
	printf("%ld calls of a section of %ld bytes, exits before each instruction: what was loaded was published\n",
	       calls, length);
	return 0;
}
