// SPDX-License-Identifier: GPL-2.0-only
/*
 * A guest without an operating system that uses the CR3 cache's hypercall, and the VMM that
 * disturbs it.
 *
 * 	cr3-cache test [SEED [STEPS]]	each rule of the cache, then a hostile guest
 * 	cr3-cache bench			exits and time of a switch
 *
 * The guest switches between address spaces. At one address, each has the number of the space. The
 * guest reads it after each switch.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/kvm.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <time.h>
#include <unistd.h>

/* The header of the kernel with the series, by -I. */
#include <asm/kvm_cr3_cache.h>

#define PAGE		4096ul
#define MEMORY		(16ul << 20)
#define SPACES		8
#define PML4(i)		(0x10000ul + (i) * PAGE)
#define PDPT		0x20000ul		/* of what all spaces share */
#define PD		0x21000ul
#define PT(i)		(0x30000ul + (i) * PAGE)	/* 4 KiB each of the shared part */
#define OWN(i, level)	(0x50000ul + ((i) * 4 + (level)) * PAGE)
#define NUMBER(i)	(0x80000ul + (i) * PAGE)	/* a page that holds i */
#define CODE		0x100000ul
#define MAILBOX		0x101000ul
#define MAILBOX_2	0x102000ul		/* the second vCPU's */
#define STEAL		0x103000ul		/* its time that was stolen, by KVM */
#define STACK		0x104000ul
#define CACHE		0x200000ul
#define CACHE_SLOT	1			/* the cache's page has a slot of its own */
#define WHERE		(1ul << 39)		/* where each space has its number */

#define CR4_PAE		(1ul << 5)
#define CR4_PGE		(1ul << 7)
#define CR4_PCIDE	(1ul << 17)
#define CR0_WP		(1ul << 16)
#define NOFLUSH		(1ull << 63)
#define PTE		0x7ul			/* present, writable, user */

enum op {
	OP_HYPERCALL, OP_SWITCH, OP_LOAD, OP_READ_CR3, OP_CR4, OP_CR0,
	OP_INVPCID, OP_POKE, OP_PEEK, OP_INVLPG,
};

struct space {
	uint64_t key, genuine, number, pad;
};

/* The assembly below uses the offsets. */
struct mailbox {
	uint64_t op, arg[4], ret;	/* 0, 8, 40 */
	uint64_t steps, spaces;		/* 48, 56 */
	uint64_t hits, misses, wrong;	/* 64, 72, 80 */
	uint64_t seed, cached, at;	/* 88, 96, 104 */
	uint64_t pad[2];
	struct space space[SPACES];	/* 128 */
};

asm(".pushsection .rodata\n"
    ".globl guest, section, section_mov, section_end, guest_end\n"
    "guest:\n"
    "	outb %al, $0x10\n"
    "	mov (%r15), %rax\n"
    "	cmp $0, %rax\n	je hypercall\n"
    "	cmp $1, %rax\n	je do_switches\n"
    "	cmp $2, %rax\n	je load\n"
    "	cmp $3, %rax\n	je read_cr3\n"
    "	cmp $4, %rax\n	je load_cr4\n"
    "	cmp $5, %rax\n	je load_cr0\n"
    "	cmp $6, %rax\n	je do_invpcid\n"
    "	cmp $7, %rax\n	je poke\n"
    "	cmp $8, %rax\n	je peek\n"
    "	cmp $9, %rax\n	je do_invlpg\n"
    "	ud2\n"
    "hypercall:\n"
    "	mov $120, %eax\n"
    "	mov 8(%r15), %rbx\n	mov 16(%r15), %rcx\n"
    "	mov 24(%r15), %rdx\n	mov 32(%r15), %rsi\n"
    "	vmcall\n	mov %rax, 40(%r15)\n	jmp guest\n"
    "load:\n	mov 8(%r15), %rax\n	mov %rax, %cr3\n	jmp guest\n"
    "read_cr3:\n	mov %cr3, %rax\n	mov %rax, 40(%r15)\n	jmp guest\n"
    "load_cr4:\n	mov 8(%r15), %rax\n	mov %rax, %cr4\n	jmp guest\n"
    "load_cr0:\n	mov 8(%r15), %rax\n	mov %rax, %cr0\n	jmp guest\n"
    "do_invpcid:\n	mov 8(%r15), %rax\n	invpcid 16(%r15), %rax\n	jmp guest\n"
    "poke:\n	mov 8(%r15), %rax\n	mov 16(%r15), %rbx\n"
    "	mov %rbx, (%rax)\n	jmp guest\n"
    "peek:\n	mov 8(%r15), %rax\n	mov (%rax), %rax\n"
    "	mov %rax, 40(%r15)\n	jmp guest\n"
    "do_invlpg:\n	mov 8(%r15), %rax\n	invlpg (%rax)\n	jmp guest\n"

    /* steps switches: in turn, or at random with a seed */
    "do_switches:\n	mov 48(%r15), %rbx\n	mov 104(%r15), %r12\n"
    "next:\n	test %rbx, %rbx\n	jz switched\n	dec %rbx\n"
    "	mov 88(%r15), %rax\n	test %rax, %rax\n	jnz random\n"
    "	inc %r12\n	cmp 56(%r15), %r12\n	jb chosen\n"
    "	xor %r12d, %r12d\n	jmp chosen\n"
    "random:\n	movabs $6364136223846793005, %rcx\n	imul %rcx, %rax\n"
    "	inc %rax\n	mov %rax, 88(%r15)\n	shr $33, %rax\n"
    "	xor %edx, %edx\n	divq 56(%r15)\n	mov %rdx, %r12\n"
    "chosen:\n	mov %r12, %r13\n	shl $5, %r13\n	lea 128(%r15,%r13), %r13\n"
    "	mov (%r13), %rsi\n"
    "	cmpq $0, 96(%r15)\n	je miss\n"
    "section:\n"
    "	xor %edi, %edi\n"
    "	cmp 0(%r14), %rsi\n	cmove 8(%r14), %rdi\n"
    "	cmp 16(%r14), %rsi\n	cmove 24(%r14), %rdi\n"
    "	cmp 32(%r14), %rsi\n	cmove 40(%r14), %rdi\n"
    "	cmp 48(%r14), %rsi\n	cmove 56(%r14), %rdi\n"
    "	test %rdi, %rdi\n	jz miss\n"
    "section_mov:\n	mov %rdi, %cr3\n"
    "section_end:\n"
    "	incq 64(%r15)\n	jmp loaded\n"
    "miss:\n	incq 72(%r15)\n	mov 8(%r13), %rax\n	mov %rax, %cr3\n"
    "loaded:\n"
    "	movabs $0x8000000000, %rax\n	mov (%rax), %rax\n"
    "	cmp 16(%r13), %rax\n	je next\n	incq 80(%r15)\n	jmp next\n"
    "switched:\n	mov %r12, 104(%r15)\n	jmp guest\n"
    "guest_end:\n"
    ".popsection\n");
extern const char guest[], section[], section_mov[], section_end[], guest_end[];

#define SECTION		(CODE + (section - guest))
#define SECTION_LEN	((uint64_t)(section_end - section))

struct vm {
	int fd, vcpu;
	uint8_t *memory, *cache;
	struct kvm_run *run;
	volatile struct mailbox *mailbox;
	bool pcid;
};

#define MOST_FAILED	100
static int kvm, has_cache, failed, checks;
static const char *test;
static bool with_irqchip;	/* of the VMs that are created now */

static void die(const char *what)
{
	fprintf(stderr, "cr3-cache: %s: %s\n", what, strerror(errno));
	exit(1);
}

static int must(int r, const char *what)
{
	if (r < 0)
		die(what);
	return r;
}

/* The condition comes first, because the message may use what it changed. */
#define check(holds, ...) ({ bool it_holds = (holds); report(it_holds, __VA_ARGS__); })

__attribute__((format(printf, 2, 3)))
static bool report(bool holds, const char *format, ...)
{
	va_list args;

	checks++;
	if (!holds) {
		failed++;
		printf("not ok: %s: ", test);
		va_start(args, format);
		vprintf(format, args);
		va_end(args);
		printf("\n");
		fflush(stdout);
		/* If the guest does not come back, all further tests fail as well. */
		if (failed == MOST_FAILED) {
			printf("%d checks, %d failed: what follows is left out\n", checks, failed);
			exit(1);
		}
	}
	return holds;
}

static uint64_t *at(struct vm *vm, uint64_t gpa)
{
	if (gpa >= CACHE && gpa < CACHE + PAGE)
		return (uint64_t *)(vm->cache + (gpa - CACHE));
	return (uint64_t *)(vm->memory + gpa);
}

static int set_slot(struct vm *vm, int slot, uint64_t gpa, uint64_t size, void *hva, int flags)
{
	struct kvm_userspace_memory_region region = {
		.slot = slot, .flags = flags, .guest_phys_addr = gpa,
		.memory_size = size, .userspace_addr = (uintptr_t)hva,
	};

	return ioctl(vm->fd, KVM_SET_USER_MEMORY_REGION, &region);
}

/* All memory except the cache's page, which has a slot of its own. */
static void set_slots(struct vm *vm)
{
	must(set_slot(vm, 0, 0, CACHE, vm->memory, 0), "slot 0");
	must(set_slot(vm, CACHE_SLOT, CACHE, PAGE, vm->cache, 0), "slot 1");
	must(set_slot(vm, 2, CACHE + PAGE, MEMORY - CACHE - PAGE, vm->memory + CACHE + PAGE, 0), "slot 2");
}

static void map_number(struct vm *vm, int space, uint64_t gpa)
{
	at(vm, OWN(space, 2))[0] = gpa | PTE;
}

static void make_tables(struct vm *vm)
{
	at(vm, PDPT)[0] = PD | PTE;
	for (uint64_t gpa = 0; gpa < MEMORY; gpa += PAGE) {
		at(vm, PD)[gpa >> 21] = PT(gpa >> 21) | PTE;
		at(vm, PT(gpa >> 21))[gpa >> 12 & 511] = gpa | PTE;
	}
	for (int i = 0; i < SPACES; i++) {
		at(vm, PML4(i))[0] = PDPT | PTE;
		at(vm, PML4(i))[1] = OWN(i, 0) | PTE;
		at(vm, OWN(i, 0))[0] = OWN(i, 1) | PTE;
		at(vm, OWN(i, 1))[0] = OWN(i, 2) | PTE;
		at(vm, NUMBER(i))[0] = 100 + i;
		map_number(vm, i, NUMBER(i));
	}
	memcpy(at(vm, CODE), guest, guest_end - guest);
}

static void set_cpuid(struct vm *vm, bool feature)
{
	struct { struct kvm_cpuid2 head; struct kvm_cpuid_entry2 entries[100]; } cpuid = { .head.nent = 100 };

	must(ioctl(kvm, KVM_GET_SUPPORTED_CPUID, &cpuid), "KVM_GET_SUPPORTED_CPUID");
	for (unsigned int i = 0; i < cpuid.head.nent; i++)
		if (cpuid.entries[i].function == 0x40000001) {
			check(!(cpuid.entries[i].eax & 1u << KVM_FEATURE_CR3_CACHE), "the bit is in the supported CPUID");
			if (feature)
				cpuid.entries[i].eax |= 1u << KVM_FEATURE_CR3_CACHE;
		}
	must(ioctl(vm->vcpu, KVM_SET_CPUID2, &cpuid), "KVM_SET_CPUID2");
}

static void reset_registers(struct vm *vm)
{
	struct kvm_segment code = {
		.limit = ~0u, .selector = 8, .type = 11, .present = 1, .s = 1, .l = 1, .g = 1,
	};
	struct kvm_segment data = {
		.limit = ~0u, .selector = 16, .type = 3, .present = 1, .s = 1, .db = 1, .g = 1,
	};
	struct kvm_regs regs = { .rip = CODE, .rflags = 2, .rsp = STACK, .r14 = CACHE, .r15 = MAILBOX };
	struct kvm_sregs sregs;

	must(ioctl(vm->vcpu, KVM_GET_SREGS, &sregs), "KVM_GET_SREGS");
	sregs.cs = code;
	sregs.ds = sregs.es = sregs.fs = sregs.gs = sregs.ss = data;
	sregs.cr0 = 0x80000033;
	sregs.cr3 = vm->mailbox->space[0].genuine;
	sregs.cr4 = CR4_PAE | (vm->pcid ? CR4_PCIDE : 0);
	sregs.efer = 0x500;
	must(ioctl(vm->vcpu, KVM_SET_SREGS, &sregs), "KVM_SET_SREGS");
	must(ioctl(vm->vcpu, KVM_SET_REGS, &regs), "KVM_SET_REGS");
}

/* The CR3 value of each space, without and with PCIDs. */
static void set_spaces(struct vm *vm)
{
	for (int i = 0; i < SPACES; i++) {
		volatile struct space *space = &vm->mailbox->space[i];

		space->number = 100 + i;
		space->genuine = space->key = PML4(i);
		if (vm->pcid) {
			space->genuine |= i + 1;
			space->key = space->genuine | NOFLUSH;
		}
	}
}

static int enable(struct vm *vm)
{
	struct kvm_enable_cap cap = { .cap = KVM_CAP_CR3_CACHE };

	return ioctl(vm->fd, KVM_ENABLE_CAP, &cap);
}

static void create_over(struct vm *vm, bool with_cache, bool feature)
{
	int size = must(ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0), "KVM_GET_VCPU_MMAP_SIZE");

	vm->fd = must(ioctl(kvm, KVM_CREATE_VM, 0), "KVM_CREATE_VM");
	must(ioctl(vm->fd, KVM_SET_TSS_ADDR, 0xfffbd000), "KVM_SET_TSS_ADDR");
	if (with_cache)
		must(enable(vm), "KVM_ENABLE_CAP");
	if (with_irqchip)
		must(ioctl(vm->fd, KVM_CREATE_IRQCHIP, 0), "KVM_CREATE_IRQCHIP");
	set_slots(vm);
	vm->vcpu = must(ioctl(vm->fd, KVM_CREATE_VCPU, 0), "KVM_CREATE_VCPU");
	vm->run = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, vm->vcpu, 0);
	if (vm->run == MAP_FAILED)
		die("mmap of the vCPU");
	set_cpuid(vm, feature);
}

static void create(struct vm *vm, bool with_cache, bool feature, bool pcid)
{
	*vm = (struct vm) { .pcid = pcid };
	vm->memory = mmap(NULL, MEMORY, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	vm->cache = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (vm->memory == MAP_FAILED || vm->cache == MAP_FAILED)
		die("mmap");
	vm->mailbox = (void *)at(vm, MAILBOX);
	make_tables(vm);
	set_spaces(vm);
	create_over(vm, with_cache, feature);
	reset_registers(vm);
}

static void destroy(struct vm *vm, bool memory)
{
	munmap(vm->run, must(ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0), "KVM_GET_VCPU_MMAP_SIZE"));
	close(vm->vcpu);
	close(vm->fd);
	if (memory) {
		munmap(vm->memory, MEMORY);
		munmap(vm->cache, PAGE);
	}
}

/* Runs up to the next exit to user space. MMIO reads as zero. */
static unsigned int enter(struct vm *vm)
{
	for (;;) {
		if (ioctl(vm->vcpu, KVM_RUN, 0) < 0) {
			if (errno == EINTR)
				continue;
			die("KVM_RUN (what does dmesg say?)");
		}
		if (vm->run->exit_reason != KVM_EXIT_MMIO)
			return vm->run->exit_reason;
		memset(vm->run->mmio.data, 0, sizeof(vm->run->mmio.data));
	}
}

/* One operation of the guest. It waits at its OUT before and after. */
static bool operate(struct vm *vm, enum op op)
{
	unsigned int exit;

	vm->mailbox->op = op;
	exit = enter(vm);
	return check(exit == KVM_EXIT_IO, "exit %u in operation %d", exit, op);
}

static uint64_t with(struct vm *vm, enum op op, uint64_t a, uint64_t b, uint64_t c, uint64_t d)
{
	vm->mailbox->arg[0] = a;
	vm->mailbox->arg[1] = b;
	vm->mailbox->arg[2] = c;
	vm->mailbox->arg[3] = d;
	operate(vm, op);
	return vm->mailbox->ret;
}

static int64_t do_register(struct vm *vm)
{
	return with(vm, OP_HYPERCALL, KVM_CR3_CACHE_REGISTER, CACHE, SECTION, SECTION_LEN);
}

static void ask(struct vm *vm, uint64_t spaces, uint64_t steps, bool cached)
{
	vm->mailbox->hits = vm->mailbox->misses = vm->mailbox->wrong = 0;
	vm->mailbox->spaces = spaces;
	vm->mailbox->steps = steps;
	vm->mailbox->cached = cached;
}

static void switches(struct vm *vm, uint64_t spaces, uint64_t steps, bool cached)
{
	ask(vm, spaces, steps, cached);
	operate(vm, OP_SWITCH);
	check(!vm->mailbox->wrong, "%" PRIu64 " of %" PRIu64 " switches ended in another address space",
	      vm->mailbox->wrong, steps);
}

static const struct kvm_cr3_cache_entry *entries(struct vm *vm)
{
	return ((struct kvm_cr3_cache_page *)vm->cache)->entries;
}

static int published(struct vm *vm)
{
	int nr = 0;

	for (int i = 0; i < KVM_CR3_CACHE_ENTRIES; i++)
		nr += entries(vm)[i].guest_cr3 != 0;
	return nr;
}

static uint64_t statistic(struct vm *vm, const char *name)
{
	char path[200], text[32] = "";
	int fd;

	snprintf(path, sizeof(path), "/sys/kernel/debug/kvm/%d-%d/%s", getpid(), vm->fd, name);
	fd = open(path, O_RDONLY);
	if (fd < 0 || read(fd, text, sizeof(text) - 1) < 0)
		die(path);
	close(fd);
	return strtoull(text, NULL, 10);
}

static void begin(struct vm *vm, const char *name, bool pcid)
{
	test = name;
	create(vm, true, true, pcid);
	check(enter(vm) == KVM_EXIT_IO, "the guest does not start");
	check(do_register(vm) > 0, "registration: %" PRId64, (int64_t)vm->mailbox->ret);
}

/*
 * Gets all of a few spaces published. If they are as many as entries, others must be dropped first.
 */
static void warm(struct vm *vm, int spaces)
{
	uint64_t steps = 4 * spaces;
	int i;

	for (i = 0; i < 1000; i++) {
		switches(vm, spaces, steps, true);
		if (vm->mailbox->hits == steps)
			break;
	}
	check(i < 1000 && published(vm) >= spaces, "%d entries of %d spaces", published(vm), spaces);
}

static void end(struct vm *vm)
{
	destroy(vm, true);
	printf("ok: %s\n", test);
	fflush(stdout);
}

/* Drops all roots, as a deleted memslot does. */
static void change_slots(struct vm *vm)
{
	static uint8_t other[4096] __attribute__((aligned(4096)));

	must(set_slot(vm, 5, 1ul << 30, PAGE, other, 0), "slot 5");
	must(set_slot(vm, 5, 1ul << 30, 0, other, 0), "slot 5, deleted");
}

static void test_hits(bool pcid)
{
	struct vm vm;
	uint64_t exits;

	begin(&vm, pcid ? "hits, with PCIDs" : "hits", pcid);
	for (int spaces = 2; spaces <= KVM_CR3_CACHE_ENTRIES; spaces++) {
		warm(&vm, spaces);
		exits = statistic(&vm, "exits");
		switches(&vm, spaces, 1000, true);
		exits = statistic(&vm, "exits") - exits;
		/* Interrupts of the host are included. */
		check(vm.mailbox->hits == 1000 && exits < 20, "%d spaces: %" PRIu64 " hits of 1000, %" PRIu64 " exits",
		      spaces, vm.mailbox->hits, exits);
		check(with(&vm, OP_READ_CR3, 0, 0, 0, 0) == vm.mailbox->space[vm.mailbox->at].genuine,
		      "CR3 reads as %" PRIx64, vm.mailbox->ret);
	}
	vm.mailbox->seed = 1;
	switches(&vm, SPACES, 5000, true);
	check(vm.mailbox->hits && vm.mailbox->misses, "at random: %" PRIu64 " hits", vm.mailbox->hits);
	with(&vm, OP_HYPERCALL, KVM_CR3_CACHE_UNREGISTER, 0, 0, 0);
	check(!published(&vm), "entries after the registration is gone");
	switches(&vm, SPACES, 1000, true);
	check(!vm.mailbox->hits && !published(&vm), "hits after the registration is gone");
	end(&vm);
}

/* Without PCIDs PWT is part of CR3, but not of the root. */
static void test_same_root(void)
{
	struct vm vm;

	begin(&vm, "two values of one root", false);
	vm.mailbox->space[1].genuine = vm.mailbox->space[1].key = PML4(0) | 1 << 3;
	vm.mailbox->space[1].number = vm.mailbox->space[0].number;
	for (int i = 0; i < 50; i++) {
		switches(&vm, 1 + i % 3, 1 + i % 2, true);
		check(with(&vm, OP_READ_CR3, 0, 0, 0, 0) == vm.mailbox->space[vm.mailbox->at].genuine,
		      "CR3 reads as %" PRIx64 " in space %" PRIu64, vm.mailbox->ret, (uint64_t)vm.mailbox->at);
	}
	end(&vm);
}

/* User space may latch an INIT as from another vCPU. It takes effect when the state is read. */
static void test_init(void)
{
	struct kvm_vcpu_events events;
	struct kvm_cr3_cache state;
	struct kvm_mp_state mp;
	struct vm vm;

	with_irqchip = true;
	begin(&vm, "INIT", false);
	with_irqchip = false;
	warm(&vm, 3);
	must(ioctl(vm.vcpu, KVM_GET_VCPU_EVENTS, &events), "KVM_GET_VCPU_EVENTS");
	events.flags = KVM_VCPUEVENT_VALID_SMM;
	events.smi.latched_init = 1;
	must(ioctl(vm.vcpu, KVM_SET_VCPU_EVENTS, &events), "KVM_SET_VCPU_EVENTS");
	must(ioctl(vm.vcpu, KVM_GET_MP_STATE, &mp), "KVM_GET_MP_STATE");
	check(!published(&vm), "%d entries after INIT", published(&vm));
	must(ioctl(vm.vcpu, KVM_GET_CR3_CACHE, &state), "KVM_GET_CR3_CACHE");
	check(!state.flags, "the vCPU is registered after INIT");
	end(&vm);
}

static void test_registration(void)
{
	static uint8_t other[4096] __attribute__((aligned(4096)));
	struct kvm_cr3_cache state = { .reserved = { 1 } };
	struct vm vm;

	test = "registration without capability, or without CPUID";
	for (int i = 0; i < 2; i++) {
		create(&vm, i, !i, false);
		check(enter(&vm) == KVM_EXIT_IO, "the guest does not start");
		check(do_register(&vm) == -1000, "not ENOSYS but %" PRId64, (int64_t)vm.mailbox->ret);
		check(enable(&vm) < 0, "enabled with a vCPU there");
		destroy(&vm, true);
	}

	begin(&vm, "registration", false);
#define REGISTER(gpa, start, len) \
	(int64_t)with(&vm, OP_HYPERCALL, KVM_CR3_CACHE_REGISTER, gpa, start, len)
	check(REGISTER(CACHE + 64, SECTION, SECTION_LEN) == -EINVAL, "unaligned");
	check(REGISTER(1ul << 32, SECTION, SECTION_LEN) == -EFAULT, "unmapped");
	check(REGISTER(~0ul << 12, SECTION, SECTION_LEN) == -EFAULT, "beyond all memory");
	check(REGISTER(CACHE, SECTION, 0) == -EINVAL, "an empty section");
	check(REGISTER(CACHE, SECTION, KVM_CR3_CACHE_MAX_SECTION + 1) == -EINVAL, "a long section");
	check(REGISTER(CACHE, -16ul, 32) == -EINVAL, "a section around the end");
	must(set_slot(&vm, 5, 1ul << 32, PAGE, other, KVM_MEM_READONLY), "slot 5");
	check(REGISTER(1ul << 32, SECTION, SECTION_LEN) == -EFAULT, "read-only");
	check((int64_t)with(&vm, OP_HYPERCALL, 77, 0, 0, 0) == -EINVAL, "an unknown operation");
	check(ioctl(vm.vcpu, KVM_SET_CR3_CACHE, &state) < 0 && errno == EINVAL, "reserved fields");
	check(do_register(&vm) > 0, "a good one after all");
	warm(&vm, 3);
	end(&vm);
}

/* What another role may do with the pages, the guest must not be able to do in this role. */
static void test_roles(void)
{
	struct vm vm;

	begin(&vm, "CR0.WP drops the entries", false);
	for (int i = 0; i < 4; i++) {
		warm(&vm, 4);
		with(&vm, OP_CR4, CR4_PAE | (i & 1 ? 0 : CR4_PGE), 0, 0, 0);
		warm(&vm, 4);
		with(&vm, OP_CR0, 0x80000033 | (i & 1 ? 0 : CR0_WP), 0, 0, 0);
		check(published(&vm) <= 1, "%d entries after CR0.WP", published(&vm));
		switches(&vm, 4, 100, true);
	}
	check(statistic(&vm, "cr3_cache_drop_role") > 0, "not counted");
	end(&vm);
}

static void test_flush(void)
{
	struct vm vm;

	/* This write makes the guest's page table go out of sync. The reload is the flush. */
	begin(&vm, "a reload of the same CR3 is a flush", false);
	warm(&vm, 2);
	with(&vm, OP_LOAD, PML4(0), 0, 0, 0);
	for (int i = 0; i < 6; i++) {
		uint64_t number = i & 1 ? 0 : 5;

		with(&vm, OP_POKE, OWN(0, 2), NUMBER(number) | PTE, 0, 0);
		with(&vm, OP_LOAD, PML4(0), 0, 0, 0);
		check(with(&vm, OP_PEEK, WHERE, 0, 0, 0) == 100 + number, "%" PRIu64 " is there", vm.mailbox->ret);
	}

	/* Another address space's table. The switch back owes the flush. */
	for (int i = 0; i < 6; i++) {
		uint64_t number = i & 1 ? 1 : 6;

		with(&vm, OP_LOAD, PML4(0), 0, 0, 0);
		with(&vm, OP_POKE, OWN(1, 2), NUMBER(number) | PTE, 0, 0);
		with(&vm, OP_LOAD, PML4(1), 0, 0, 0);
		check(with(&vm, OP_PEEK, WHERE, 0, 0, 0) == 100 + number, "%" PRIu64 " is there", vm.mailbox->ret);
	}
	warm(&vm, 2);
	with(&vm, OP_HYPERCALL, KVM_CR3_CACHE_FLUSH, 0, 0, 0);
	check(published(&vm) <= 1, "%d entries after the hypercall", published(&vm));
	end(&vm);
}

/* A flush of everything also affects spaces that are then switched to without an exit. */
static void test_flush_all(bool pcid)
{
	static const char *const names[] = { "CR4.PGE", "INVPCID", "the hypercall", "INVPCID of one context" };
	uint64_t cr4 = CR4_PAE | (pcid ? CR4_PCIDE : 0);
	struct vm vm;

	begin(&vm, pcid ? "flushes of all, with PCIDs" : "flushes of all", pcid);
	for (int i = 0; i < 24; i++) {
		uint64_t number = i & 1 ? 2 : 5;

		warm(&vm, 4);
		with(&vm, OP_LOAD, vm.mailbox->space[0].genuine, 0, 0, 0);
		with(&vm, OP_POKE, OWN(2, 2), NUMBER(number) | PTE, 0, 0);
		vm.mailbox->space[2].number = 100 + number;
		switch (i % 4) {
		case 0:
			with(&vm, OP_CR4, cr4 ^= CR4_PGE, 0, 0, 0);
			break;
		case 1:
			with(&vm, OP_INVPCID, 2, 0, 0, 0);
			break;
		case 2:
			with(&vm, OP_HYPERCALL, KVM_CR3_CACHE_FLUSH, 0, 0, 0);
			check(published(&vm) <= 1, "%d entries after the hypercall", published(&vm));
			break;
		case 3:
			/* Without PCIDs all spaces have PCID 0. */
			with(&vm, OP_INVPCID, 1, pcid ? 3 : 0, 0, 0);
			break;
		}
		ask(&vm, 4, 16, true);
		operate(&vm, OP_SWITCH);
		check(!vm.mailbox->wrong, "%s leaves %" PRIu64 " old translations", names[i % 4], vm.mailbox->wrong);
	}
	end(&vm);
}

static void test_pcid(void)
{
	struct vm vm;
	uint64_t flush;

	begin(&vm, "INVPCID and PCID forms", true);
	warm(&vm, 4);
	/* Type 1: everything of the context of space 2. */
	with(&vm, OP_LOAD, PML4(0) | 1, 0, 0, 0);
	with(&vm, OP_INVPCID, 1, 3, 0, 0);
	for (int i = 0; i < KVM_CR3_CACHE_ENTRIES; i++)
		check(entries(&vm)[i].guest_cr3 != (PML4(2) | 3 | NOFLUSH), "space 2 after INVPCID");
	warm(&vm, 4);
	check(statistic(&vm, "cr3_cache_drop_flush") > 0, "not counted");

	/* Bit 63 is in every value, so a load that is a flush exits. */
	warm(&vm, 4);
	for (int i = 0; i < KVM_CR3_CACHE_ENTRIES; i++)
		check((entries(&vm)[i].guest_cr3 & entries(&vm)[i].host_cr3 & NOFLUSH) &&
		      !(entries(&vm)[i].guest_cr3 & KVM_CR3_CACHE_HOST_BIT) &&
		      (entries(&vm)[i].host_cr3 & 0x7ff) == (entries(&vm)[i].guest_cr3 & 0x7ff),
		      "%llx for %llx", entries(&vm)[i].host_cr3, entries(&vm)[i].guest_cr3);
	flush = statistic(&vm, "cr3_cache_misses");
	with(&vm, OP_POKE, OWN(1, 2), NUMBER(6) | PTE, 0, 0);
	with(&vm, OP_LOAD, PML4(1) | 2, 0, 0, 0);
	check(with(&vm, OP_PEEK, WHERE, 0, 0, 0) == 106, "a load with a flush does not flush");
	check(statistic(&vm, "cr3_cache_misses") == flush + 1, "a load with a flush does not exit");

	/* A PCID with the host's bit is the guest's own, and is not published. */
	vm.mailbox->space[3].genuine = PML4(3) | 0x801;
	vm.mailbox->space[3].key = vm.mailbox->space[3].genuine | NOFLUSH;
	with(&vm, OP_POKE, OWN(1, 2), NUMBER(1) | PTE, 0, 0);
	with(&vm, OP_INVPCID, 2, 0, 0, 0);
	switches(&vm, 4, 400, true);
	check(vm.mailbox->misses >= 100 && vm.mailbox->misses <= 110, "%" PRIu64 " misses of 400",
	      vm.mailbox->misses);
	check(statistic(&vm, "cr3_cache_skipped") > 0, "not counted");
	end(&vm);
}

/* A page directory with the same address as one of KVM's roots. */
static void test_collision(void)
{
	unsigned int tried = 0;
	struct vm vm;

	begin(&vm, "a page directory at the address of a root", false);
	for (int i = 0; i < 4 * KVM_CR3_CACHE_ENTRIES; i++) {
		uint64_t gpa;

		warm(&vm, 4);
		gpa = entries(&vm)[i % KVM_CR3_CACHE_ENTRIES].host_cr3 & ~(PAGE - 1);
		/* Existing memory of the guest is kept. */
		if (gpa < CACHE + PAGE)
			continue;
		/* Space 7 is in the guest's memory, or in a slot of its own. */
		if (gpa < MEMORY)
			memcpy(at(&vm, gpa), at(&vm, PML4(7)), PAGE);
		else
			must(set_slot(&vm, 6, gpa, PAGE, at(&vm, PML4(7)), 0), "an alias");
		tried++;
		with(&vm, OP_LOAD, gpa, 0, 0, 0);
		check(with(&vm, OP_PEEK, WHERE, 0, 0, 0) == 107, "%" PRIu64 " is there", vm.mailbox->ret);
		check(with(&vm, OP_READ_CR3, 0, 0, 0, 0) == gpa, "CR3 reads as %" PRIx64, vm.mailbox->ret);
		with(&vm, OP_LOAD, PML4(0), 0, 0, 0);
		if (gpa >= MEMORY)
			must(set_slot(&vm, 6, gpa, 0, at(&vm, PML4(7)), 0), "no alias");
		change_slots(&vm);
	}
	check(tried, "all roots are where the guest has something else");
	end(&vm);
}

/* A page directory is freed, holds data for a while, and then becomes another space's. */
static void test_release(void)
{
	struct vm vm;

	begin(&vm, "a page directory that is freed and used again", false);
	for (int round = 0; round < 8; round++) {
		warm(&vm, 4);
		with(&vm, OP_LOAD, PML4(0), 0, 0, 0);
		for (int i = 0; i < 512; i++)
			with(&vm, OP_POKE, PML4(3) + 8 * i, 0x1234567ull * i + round, 0, 0);
		for (int i = 0; i < 512; i++)
			check(with(&vm, OP_PEEK, PML4(3) + 8 * i, 0, 0, 0) == 0x1234567ull * i + round, "data");
		for (int i = 0; i < 512; i++)
			with(&vm, OP_POKE, PML4(3) + 8 * i, i ? 0 : PDPT | PTE, 0, 0);
		with(&vm, OP_POKE, PML4(3) + 8, OWN(round & 1 ? 3 : 7, 0) | PTE, 0, 0);
		vm.mailbox->space[3].number = round & 1 ? 103 : 107;
		/* Another address space owes a flush. */
		with(&vm, OP_LOAD, PML4(3), 0, 0, 0);
		check(with(&vm, OP_PEEK, WHERE, 0, 0, 0) == vm.mailbox->space[3].number, "the old space");
	}
	end(&vm);
}

static void debug(struct vm *vm, int control, uint64_t breakpoint)
{
	struct kvm_guest_debug debug = { .control = control };

	if (breakpoint) {
		debug.arch.debugreg[0] = breakpoint;
		debug.arch.debugreg[7] = 0x402;
	}
	must(ioctl(vm->vcpu, KVM_SET_GUEST_DEBUG, &debug), "KVM_SET_GUEST_DEBUG");
}

/* Stops the vCPU before the instruction at @offset of the section. */
static bool stop_at(struct vm *vm, unsigned int offset)
{
	unsigned int exit;

	debug(vm, KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_USE_HW_BP, SECTION + offset);
	ask(vm, 4, 40, true);
	vm->mailbox->op = OP_SWITCH;
	exit = enter(vm);
	debug(vm, 0, 0);
	/* Not every offset is an instruction. */
	return exit == KVM_EXIT_DEBUG;
}

static uint64_t rip(struct vm *vm)
{
	struct kvm_regs regs;

	must(ioctl(vm->vcpu, KVM_GET_REGS, &regs), "KVM_GET_REGS");
	return regs.rip;
}

/* At each instruction of the section: a value read before the stop must not be loaded after it. */
static void test_section(bool pcid)
{
	unsigned int stops = 0;
	struct vm vm;

	begin(&vm, pcid ? "stopped in the section, with PCIDs" : "stopped in the section", pcid);
	for (unsigned int offset = 1; offset < SECTION_LEN; offset++) {
		warm(&vm, 4);
		if (!stop_at(&vm, offset))
			continue;
		stops++;
		check(rip(&vm) == SECTION, "at %u the vCPU shows itself at %" PRIx64, offset, rip(&vm) - SECTION);
		change_slots(&vm);
		check(enter(&vm) == KVM_EXIT_IO, "it does not go on");
		check(!vm.mailbox->wrong && vm.mailbox->hits && vm.mailbox->misses,
		      "%" PRIu64 " wrong, %" PRIu64 " hits after a stop at %u", vm.mailbox->wrong, vm.mailbox->hits, offset);
	}
	check(stops == 11, "%u stops in the section", stops);

	/* The section completes even if it is single-stepped. */
	warm(&vm, 4);
	debug(&vm, KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_SINGLESTEP, 0);
	ask(&vm, 4, 20, true);
	vm.mailbox->op = OP_SWITCH;
	for (stops = 0; stops < 5000; stops++)
		if (enter(&vm) != KVM_EXIT_DEBUG)
			break;
	check(vm.run->exit_reason == KVM_EXIT_IO, "stepped, it does not get through");
	check(!vm.mailbox->wrong, "wrong when stepped");
	end(&vm);
}

/* At each instruction of the section, a move to a KVM without the cache, and back. */
static void test_migration(bool pcid)
{
	struct kvm_cr3_cache state, none = {};
	struct kvm_sregs sregs;
	struct kvm_regs regs;
	struct vm vm, old;

	begin(&vm, pcid ? "migration, with PCIDs" : "migration", pcid);
	for (unsigned int offset = 0; offset < SECTION_LEN; offset++) {
		warm(&vm, 4);
		if (!stop_at(&vm, offset))
			continue;
		for (int to_cache = 0; to_cache < 2; to_cache++) {
			memset(&state, 0, sizeof(state));
			if (!to_cache)
				must(ioctl(vm.vcpu, KVM_GET_CR3_CACHE, &state), "KVM_GET_CR3_CACHE");
			check(to_cache || (state.flags == KVM_CR3_CACHE_REGISTERED && state.gpa == CACHE), "state");
			check(!published(&vm), "entries in what is saved");
			must(ioctl(vm.vcpu, KVM_GET_REGS, &regs), "KVM_GET_REGS");
			must(ioctl(vm.vcpu, KVM_GET_SREGS, &sregs), "KVM_GET_SREGS");
			check(regs.rip <= SECTION || regs.rip >= SECTION + SECTION_LEN, "saved in the section");
			old = vm;
			create_over(&vm, to_cache, true);
			destroy(&old, false);
			must(ioctl(vm.vcpu, KVM_SET_SREGS, &sregs), "KVM_SET_SREGS");
			must(ioctl(vm.vcpu, KVM_SET_REGS, &regs), "KVM_SET_REGS");
			if (to_cache) {
				state = (struct kvm_cr3_cache) {
					.flags = KVM_CR3_CACHE_REGISTERED, .gpa = CACHE,
					.section = SECTION, .section_len = SECTION_LEN,
				};
				must(ioctl(vm.vcpu, KVM_SET_CR3_CACHE, &state), "KVM_SET_CR3_CACHE");
			} else {
				check(ioctl(vm.vcpu, KVM_GET_CR3_CACHE, &none) < 0, "a state without the cache");
			}
			check(enter(&vm) == KVM_EXIT_IO, "it does not go on");
			check(!vm.mailbox->wrong, "%" PRIu64 " wrong after a move at %u", vm.mailbox->wrong, offset);
			if (!to_cache) {
				switches(&vm, 4, 100, true);
				check(!vm.mailbox->hits, "hits without a cache");
			}
		}
	}
	end(&vm);
}

/* Emptying the page must reach the dirty log, from which a migration's last pass takes it. */
static void test_dirty_log(void)
{
	uint64_t bitmap = 0;
	struct kvm_dirty_log log = { .slot = CACHE_SLOT, .dirty_bitmap = &bitmap };
	struct kvm_cr3_cache state;
	struct vm vm;

	begin(&vm, "the page is dirty when it is written", false);
	must(set_slot(&vm, CACHE_SLOT, CACHE, PAGE, vm.cache, KVM_MEM_LOG_DIRTY_PAGES), "the log");
	warm(&vm, 4);
	must(ioctl(vm.fd, KVM_GET_DIRTY_LOG, &log), "KVM_GET_DIRTY_LOG");
	check(bitmap & 1, "published, and not dirty");
	must(ioctl(vm.fd, KVM_GET_DIRTY_LOG, &log), "KVM_GET_DIRTY_LOG");
	check(!(bitmap & 1), "dirty twice");
	must(ioctl(vm.vcpu, KVM_GET_CR3_CACHE, &state), "KVM_GET_CR3_CACHE");
	must(ioctl(vm.fd, KVM_GET_DIRTY_LOG, &log), "KVM_GET_DIRTY_LOG");
	check((bitmap & 1) && !published(&vm), "emptied, and not dirty");
	end(&vm);
}

static void test_slots(void)
{
	struct vm vm;

	begin(&vm, "the page's slot goes, comes back, and is another's memory", false);
	for (int i = 0; i < 4; i++) {
		uint8_t *other = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

		warm(&vm, 4);
		must(set_slot(&vm, CACHE_SLOT, CACHE, 0, vm.cache, 0), "the slot goes");
		switches(&vm, 4, 100, true);
		check(!vm.mailbox->hits, "hits without a page");
		vm.cache = other;
		must(set_slot(&vm, CACHE_SLOT, CACHE, PAGE, vm.cache, 0), "the slot comes back");
		switches(&vm, 4, 100, true);
		check(vm.mailbox->hits > 80, "%" PRIu64 " hits in the new page", vm.mailbox->hits);
	}
	end(&vm);
}

/*
 * Another thread writes to the page. This could harm only the guest, and here not even the guest.
 */
static void test_overwritten(void)
{
	struct vm vm;

	begin(&vm, "the page is written to by others", false);
	for (int i = 0; i < 50; i++) {
		struct kvm_cr3_cache_entry *entry;
		uint64_t value;

		warm(&vm, 4);
		entry = (void *)&entries(&vm)[i % KVM_CR3_CACHE_ENTRIES];
		value = entry->host_cr3;
		/*
		 * Roots can be adjacent in memory: another root's value would be loaded, and map
		 * its space.
		 */
		for (int j = 0; j < KVM_CR3_CACHE_ENTRIES; j++)
			if (value < entries(&vm)[j].host_cr3 + PAGE)
				value = entries(&vm)[j].host_cr3 + PAGE;
		/*
		 * 0 would be an empty entry. The guest does not load it, and KVM does not notice.
		 */
		entry->host_cr3 = i & 1 ? value : 0x1234567890ull * (i + 1);
		switches(&vm, 4, 8, true);
	}
	check(statistic(&vm, "cr3_cache_overwritten") >= 40, "%" PRIu64 " counted",
	      statistic(&vm, "cr3_cache_overwritten"));
	end(&vm);
}

/* A second vCPU of the same VM, with a mailbox of its own. */
static void create_second(struct vm *vm, struct vm *second)
{
	int size = must(ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0), "KVM_GET_VCPU_MMAP_SIZE");
	struct kvm_regs regs;

	*second = *vm;
	second->vcpu = must(ioctl(vm->fd, KVM_CREATE_VCPU, 1), "KVM_CREATE_VCPU 1");
	second->run = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, second->vcpu, 0);
	if (second->run == MAP_FAILED)
		die("mmap of the second vCPU");
	second->mailbox = (void *)at(vm, MAILBOX_2);
	set_cpuid(second, true);
	set_spaces(second);
	reset_registers(second);
	must(ioctl(second->vcpu, KVM_GET_REGS, &regs), "KVM_GET_REGS");
	regs.r15 = MAILBOX_2;
	must(ioctl(second->vcpu, KVM_SET_REGS, &regs), "KVM_SET_REGS");
	check(enter(second) == KVM_EXIT_IO, "the second vCPU does not start");
}

static void destroy_second(struct vm *second)
{
	munmap(second->run, must(ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0), "KVM_GET_VCPU_MMAP_SIZE"));
	close(second->vcpu);
}

static bool set_msr(struct vm *vm, uint32_t index, uint64_t value)
{
	struct { struct kvm_msrs head; struct kvm_msr_entry entry; } msrs = {
		.head.nmsrs = 1, .entry = { .index = index, .data = value },
	};

	return ioctl(vm->vcpu, KVM_SET_MSRS, &msrs) == 1;
}

/*
 * Another vCPU changes a page table below a root of this one. The shadow page may go out of sync,
 * and a hit syncs nothing. Before the flush that is owed, the old or the new number may be there.
 * After it, the new one must be.
 */
static void test_unsync(void)
{
	struct vm vm, second;
	uint64_t old = 0;

	begin(&vm, "a page table is changed by another vCPU", false);
	create_second(&vm, &second);
	for (int i = 0; i < 16; i++) {
		uint64_t number = i & 1 ? 1 : 6, before = i & 1 ? 106 : 101, seen;

		warm(&vm, 4);
		with(&vm, OP_LOAD, PML4(0), 0, 0, 0);
		with(&second, OP_POKE, OWN(1, 2), NUMBER(number) | PTE, 0, 0);
		/* Through the entry. */
		for (int entry = 0; entry < KVM_CR3_CACHE_ENTRIES; entry++)
			if (entries(&vm)[entry].guest_cr3 == PML4(1))
				with(&vm, OP_LOAD, entries(&vm)[entry].host_cr3, 0, 0, 0);
		seen = with(&vm, OP_PEEK, WHERE, 0, 0, 0);
		check(seen == before || seen == 100 + number, "%" PRIu64 " is there", seen);
		old += seen == before;
		with(&vm, OP_LOAD, PML4(1), 0, 0, 0);
		check(with(&vm, OP_PEEK, WHERE, 0, 0, 0) == 100 + number, "%" PRIu64 " is there after the flush",
		      vm.mailbox->ret);
		vm.mailbox->space[1].number = 100 + number;
	}
	check(old, "no hit was ever out of sync: nothing was tried");
	destroy_second(&second);
	end(&vm);
}

/* KVM_FEATURE_PV_TLB_FLUSH: another vCPU requests a flush of this one, which does not run. */
static void test_flush_by_another(void)
{
	struct vm vm, second;

	begin(&vm, "a flush that another vCPU asks for", false);
	create_second(&vm, &second);
	check(set_msr(&vm, 0x4b564d03, STEAL | 1), "this KVM does not count stolen time");
	for (int i = 0; i < 16; i++) {
		uint64_t number = i & 1 ? 1 : 6;

		warm(&vm, 4);
		with(&vm, OP_LOAD, PML4(0), 0, 0, 0);
		with(&second, OP_POKE, OWN(1, 2), NUMBER(number) | PTE, 0, 0);
		vm.mailbox->space[1].number = 100 + number;
		/* struct kvm_steal_time: preempted, and KVM_VCPU_FLUSH_TLB. */
		*((uint8_t *)at(&vm, STEAL) + 16) = 3;
		ask(&vm, 4, 16, true);
		operate(&vm, OP_SWITCH);
		check(!vm.mailbox->wrong, "%" PRIu64 " old translations", vm.mailbox->wrong);
		check(!(*((uint8_t *)at(&vm, STEAL) + 16) & 2), "KVM did not look");
	}
	destroy_second(&second);
	end(&vm);
}

/* A KVM in the guest must not see the list, because vmcs02 has none. */
static void test_nested(void)
{
	struct { struct kvm_msrs head; struct kvm_msr_entry entry; } msrs = {
		.head.nmsrs = 1, .entry.index = 0x485,		/* IA32_VMX_MISC */
	};

	test = "a nested KVM is told of no CR3 targets";
	if (ioctl(kvm, KVM_GET_MSRS, &msrs) != 1) {
		printf("skipped: nested guests: this KVM has none\n");
		return;
	}
	check(!(msrs.entry.data >> 16 & 0x1ff), "IA32_VMX_MISC is %llx", msrs.entry.data);
	printf("ok: %s\n", test);
}

static volatile bool stop;

static void *slot_changes(void *vm)
{
	while (!stop)
		change_slots(vm);
	return NULL;
}

/* On one CPU these meet only if the host preempts one of them. */
static void test_zaps(uint64_t steps)
{
	pthread_t thread;
	struct vm vm;

	begin(&vm, "all roots are zapped while the guest runs", false);
	stop = false;
	pthread_create(&thread, NULL, slot_changes, &vm);
	vm.mailbox->seed = 3;
	for (int i = 0; i < 1000 && !statistic(&vm, "cr3_cache_drop_zap"); i++) {
		switches(&vm, SPACES, steps, true);
		check(vm.mailbox->hits > 0, "no hit");
	}
	stop = true;
	pthread_join(thread, NULL);
	check(statistic(&vm, "cr3_cache_drop_zap") > 0, "not counted");
	end(&vm);
}

static uint64_t random64(uint64_t *seed)
{
	*seed ^= *seed << 13;
	*seed ^= *seed >> 7;
	*seed ^= *seed << 17;
	return *seed;
}

/* Anything is allowed. The guest may be lost, but the host must not be. */
static void test_hostile(uint64_t seed, uint64_t steps)
{
	uint64_t shutdowns = 0, state = seed * 2 + 1;
	struct vm vm;

	begin(&vm, "a hostile guest", seed & 1);
	printf("seed %" PRIu64 ", %" PRIu64 " steps%s\n", seed, steps, seed & 1 ? ", with PCIDs" : "");
	for (uint64_t i = 0; i < steps; i++) {
		uint64_t value = random64(&state), page = entries(&vm)[value >> 8 & 3].host_cr3;
		unsigned int exit;

		vm.mailbox->op = OP_LOAD;
		vm.mailbox->arg[0] = PML4(value >> 16 & 7) | (vm.pcid ? value >> 20 & 3 : 0);
		switch (value & 15) {
		case 0:			/* any number */
			vm.mailbox->arg[0] = random64(&state) >> (value >> 24 & 63);
			break;
		case 1:			/* beside a root */
			vm.mailbox->arg[0] = page ^ 1ul << (value >> 24 & 63);
			break;
		case 2: case 3:		/* a root, outside of the section */
			vm.mailbox->arg[0] = page;
			break;
		case 4:
			vm.mailbox->op = OP_HYPERCALL;
			vm.mailbox->arg[0] = value >> 24 & 3;
			vm.mailbox->arg[1] = value & 1 << 28 ? CACHE : random64(&state) >> (value >> 32 & 63) & -PAGE;
			vm.mailbox->arg[2] = SECTION;
			vm.mailbox->arg[3] = SECTION_LEN;
			break;
		case 5:
			((uint64_t *)vm.cache)[value >> 24 & 7] = value & 1 << 28 ? page : random64(&state);
			break;
		case 6:
			vm.mailbox->op = OP_CR4;
			vm.mailbox->arg[0] = CR4_PAE | (value >> 24 & 1 ? CR4_PGE : 0) | (vm.pcid ? CR4_PCIDE : 0);
			break;
		case 7:			/* its own tables */
			vm.mailbox->op = OP_POKE;
			vm.mailbox->arg[0] = (value >> 24 & 1 ? PML4(value >> 16 & 7) : OWN(value >> 16 & 7, value >> 26 & 3)) + 8;
			vm.mailbox->arg[1] = random64(&state) & (MEMORY - PAGE) ? NUMBER(value >> 32 & 7) | PTE : 0;
			break;
		case 8:
			change_slots(&vm);
			break;
		default:
			ask(&vm, SPACES, 16, true);
			vm.mailbox->op = OP_SWITCH;
			vm.mailbox->seed = value | 1;
		}
		exit = enter(&vm);
		if (exit != KVM_EXIT_IO) {
			/* It has lost its page table or its code. */
			struct kvm_vcpu_events events = {};

			shutdowns++;
			make_tables(&vm);
			must(ioctl(vm.vcpu, KVM_SET_VCPU_EVENTS, &events), "KVM_SET_VCPU_EVENTS");
			reset_registers(&vm);
			if (!check(enter(&vm) == KVM_EXIT_IO, "step %" PRIu64 ": exit %u, and no return", i, exit))
				break;
		}
		if (!(i % 64))
			do_register(&vm);
	}
	printf("it was lost %" PRIu64 " times\n", shutdowns);
	end(&vm);
}

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec / 1e9;
}

static void bench(void)
{
	printf("%-8s %-6s %7s %10s %9s %11s\n", "spaces", "cache", "PCIDs", "exits", "hits", "us a switch");
	for (int pcid = 0; pcid < 2; pcid++)
		for (int spaces = 2; spaces <= SPACES; spaces += spaces < 6 ? 1 : 2)
			for (int cached = 0; cached <= !!has_cache; cached++) {
				const uint64_t steps = 40000;
				uint64_t exits;
				double time;
				struct vm vm;

				test = "bench";
				create(&vm, has_cache, true, pcid);
				enter(&vm);
				if (cached)
					do_register(&vm);
				/* None of these switches owes a flush. */
				for (int i = 0; i < SPACES; i++)
					vm.mailbox->space[i].genuine = vm.mailbox->space[i].key;
				switches(&vm, spaces, 8 * spaces, cached);
				exits = statistic(&vm, "exits");
				time = now();
				switches(&vm, spaces, steps, cached);
				time = now() - time;
				exits = statistic(&vm, "exits") - exits;
				printf("%-8d %-6s %7s %10.5f %9.5f %11.4f\n", spaces, cached ? "on" : "off", pcid ? "on" : "off",
				       (double)exits / steps, (double)vm.mailbox->hits / steps, time * 1e6 / steps);
				destroy(&vm, true);
			}
}

int main(int argc, char **argv)
{
	uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 0) : 1;
	uint64_t steps = argc > 3 ? strtoull(argv[3], NULL, 0) : 2000;

	mount("none", "/sys/kernel/debug", "debugfs", 0, NULL);
	kvm = must(open("/dev/kvm", O_RDWR), "/dev/kvm");
	has_cache = ioctl(kvm, KVM_CHECK_EXTENSION, KVM_CAP_CR3_CACHE);
	printf("%d entries\n", has_cache);

	/* This also works without a cache, as with a stock KVM or EPT. */
	if (argc > 1 && !strcmp(argv[1], "bench")) {
		bench();
		return !!failed;
	}
	if (!has_cache) {
		printf("skipped: this KVM has no CR3 cache\n");
		return 4;
	}

	for (int pcid = 0; pcid < 2; pcid++) {
		test_hits(pcid);
		test_section(pcid);
		test_migration(pcid);
		test_flush_all(pcid);
	}
	test_same_root();
	test_registration();
	test_init();
	test_roles();
	test_flush();
	test_pcid();
	test_collision();
	test_release();
	test_dirty_log();
	test_slots();
	test_overwritten();
	test_unsync();
	test_flush_by_another();
	test_nested();
	test_zaps(steps);
	test_hostile(seed, steps);
	test_hostile(seed + 1, steps);
	printf("%d checks, %d failed\n", checks, failed);
	return !!failed;
}
