// The floors under Vellum, static and without checks beyond "it worked". For `cargo bench --bench
// boot`:
//
//   same      the KVM calls that Vellum makes for a kernel of a few bytes with 128 MiB and a split interrupt controller
//   shortest  the fewest calls that bring a byte of a guest with a split interrupt controller to the serial port
//
// The guest's first byte on the serial port goes to standard output. For `cargo bench --bench
// startup`:
//
//   doorbell  the KVM calls that bring a guest without an OS and with 128 MiB to its first doorbell
//
// When the doorbell rang goes to standard output, in nanoseconds on CLOCK_MONOTONIC.

#include <fcntl.h>
#include <linux/kvm.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define RAM (128ul << 20)
#define CODE 0x100000
#define TABLES 0x9000
#define SLOT 0xc0000000ul
#define DOORBELL 0xd0000000ul

static int check(int result)
{
	if (result < 0)
		abort();
	return result;
}

static void *map(size_t bytes, int flags, int fd)
{
	void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);

	if (at == MAP_FAILED)
		abort();
	return at;
}

static int doorbell(void)
{
	int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
	int kvm = check(open("/dev/kvm", O_RDWR | O_CLOEXEC));
	void *ram = map(RAM, flags, -1);
	uint64_t *own = map(4 * 4096, flags, -1);
	struct kvm_cpuid2 *cpuid = calloc(1, sizeof(*cpuid) + 256 * sizeof(cpuid->entries[0]));
	struct kvm_regs regs = { .rip = SLOT, .rdi = DOORBELL, .rflags = 2 };
	struct kvm_sregs sregs;
	struct timespec rang;
	struct kvm_run *run;
	int vm, vcpu;

	if (ioctl(kvm, KVM_GET_API_VERSION, 0) != 12)
		abort();
	vm = check(ioctl(kvm, KVM_CREATE_VM, 0));

	struct kvm_userspace_memory_region regions[] = {
		{ .slot = 0, .memory_size = RAM, .userspace_addr = (uintptr_t)ram },
		{ .slot = 1, .guest_phys_addr = SLOT, .memory_size = 4 * 4096, .userspace_addr = (uintptr_t)own },
	};
	check(ioctl(vm, KVM_SET_USER_MEMORY_REGION, &regions[0]));
	check(ioctl(vm, KVM_SET_USER_MEMORY_REGION, &regions[1]));
	// mov [rdi], eax; then PML4, PDPT, and a page directory with the slot and the doorbell as pages of
	// 2 MiB.
	own[0] = 0x0789;
	own[512] = (SLOT + 2 * 4096) | 0x27;
	own[1024 + 3] = (SLOT + 3 * 4096) | 0x27;
	own[1536] = SLOT | 0xe7;
	own[1536 + 128] = DOORBELL | 0xe7;
	cpuid->nent = 256;
	check(ioctl(kvm, KVM_GET_SUPPORTED_CPUID, cpuid));
	vcpu = check(ioctl(vm, KVM_CREATE_VCPU, 0));
	run = map(check(ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0)), MAP_SHARED, vcpu);
	check(ioctl(vcpu, KVM_SET_CPUID2, cpuid));
	check(ioctl(vcpu, KVM_GET_SREGS, &sregs));

	struct kvm_segment code = { .limit = ~0u, .selector = 11, .type = 11, .present = 1, .s = 1, .l = 1, .dpl = 3 };
	struct kvm_segment data = { .limit = ~0u, .selector = 19, .type = 3, .present = 1, .s = 1, .db = 1, .dpl = 3 };
	sregs.cs = code;
	sregs.ss = sregs.ds = sregs.es = sregs.fs = sregs.gs = data;
	sregs.cr0 = 0x80010033;
	sregs.cr3 = SLOT + 4096;
	sregs.cr4 = 0x620;
	sregs.efer = 0xd00;
	check(ioctl(vcpu, KVM_SET_SREGS, &sregs));
	check(ioctl(vcpu, KVM_SET_REGS, &regs));
	check(ioctl(vcpu, KVM_RUN, 0));
	if (run->exit_reason != KVM_EXIT_MMIO || run->mmio.phys_addr != DOORBELL)
		abort();
	check(clock_gettime(CLOCK_MONOTONIC, &rang));
	printf("%llu\n", rang.tv_sec * 1000000000ull + rang.tv_nsec);
	return 0;
}

int main(int argc, char **argv)
{
	if (argc > 1 && !strcmp(argv[1], "doorbell"))
		return doorbell();

	int same = argc > 1 && !strcmp(argv[1], "same");
	// mov dx, 0x3f8; mov al, 'V'; out dx, al: in 64-bit mode, and in real mode.
	static const uint8_t code64[] = { 0x66, 0xba, 0xf8, 0x03, 0xb0, 'V', 0xee };
	static const uint8_t code16[] = { 0xba, 0xf8, 0x03, 0xb0, 'V', 0xee };
	int kvm = check(open("/dev/kvm", O_RDWR | O_CLOEXEC));
	int vm, vcpu, size;
	struct kvm_run *run;
	uint8_t *ram;

	if (same && ioctl(kvm, KVM_GET_API_VERSION, 0) != 12)
		abort();
	ram = mmap(NULL, RAM, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (ram == MAP_FAILED)
		abort();
	vm = check(ioctl(kvm, KVM_CREATE_VM, 0));

	struct kvm_userspace_memory_region region = { .memory_size = RAM, .userspace_addr = (uintptr_t)ram };
	check(ioctl(vm, KVM_SET_USER_MEMORY_REGION, &region));
	if (same)
		check(ioctl(vm, KVM_SET_TSS_ADDR, 0xfffbd000ul));
	struct kvm_enable_cap split = { .cap = KVM_CAP_SPLIT_IRQCHIP, .args = { 24 } };
	check(ioctl(vm, KVM_ENABLE_CAP, &split));
	if (same) {
		struct kvm_irqfd irqfd = { .fd = check(eventfd(0, EFD_CLOEXEC)), .gsi = 4 };
		check(ioctl(vm, KVM_IRQFD, &irqfd));
		check(ioctl(vm, KVM_CHECK_EXTENSION, KVM_CAP_TSC_DEADLINE_TIMER));
	}
	vcpu = check(ioctl(vm, KVM_CREATE_VCPU, 0));
	size = check(ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0));
	run = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, vcpu, 0);
	if (run == MAP_FAILED)
		abort();

	struct kvm_sregs sregs;
	struct kvm_regs regs = { .rflags = 2 };
	if (same) {
		struct kvm_cpuid2 *cpuid = calloc(1, sizeof(*cpuid) + 256 * sizeof(cpuid->entries[0]));
		struct {
			struct kvm_msrs head;
			struct kvm_msr_entry entries[2];
		} msrs = { { .nmsrs = 2 }, { { .index = 0x1a0, .data = 1 }, { .index = 0x2ff, .data = 1 << 11 | 6 } } };

		cpuid->nent = 256;
		check(ioctl(kvm, KVM_GET_SUPPORTED_CPUID, cpuid));
		check(ioctl(vcpu, KVM_SET_CPUID2, cpuid));
		check(ioctl(vcpu, KVM_SET_MSRS, &msrs));
		check(ioctl(vcpu, KVM_GET_SREGS, &sregs));
		memcpy(ram + CODE, code64, sizeof(code64));
		// PML4, PDPT, and one page directory whose first entry is a page of 2 MiB.
		*(uint64_t *)(ram + TABLES) = TABLES + 0x1003;
		*(uint64_t *)(ram + TABLES + 0x1000) = TABLES + 0x2003;
		*(uint64_t *)(ram + TABLES + 0x2000) = 0x83;
		struct kvm_segment code = { .limit = ~0u, .selector = 0x10, .type = 11, .present = 1, .s = 1, .g = 1, .l = 1 };
		struct kvm_segment data = { .limit = ~0u, .selector = 0x18, .type = 3, .present = 1, .s = 1, .g = 1, .db = 1 };
		sregs.cs = code;
		sregs.ss = sregs.ds = sregs.es = sregs.fs = sregs.gs = data;
		sregs.cr0 = 0x80000011;
		sregs.cr3 = TABLES;
		sregs.cr4 = 0x20;
		sregs.efer = 0x500;
		regs.rip = CODE;
	} else {
		check(ioctl(vcpu, KVM_GET_SREGS, &sregs));
		memcpy(ram, code16, sizeof(code16));
		sregs.cs.base = sregs.cs.selector = 0;
		regs.rip = 0;
	}
	check(ioctl(vcpu, KVM_SET_SREGS, &sregs));
	check(ioctl(vcpu, KVM_SET_REGS, &regs));
	check(ioctl(vcpu, KVM_RUN, 0));
	if (run->exit_reason != KVM_EXIT_IO || run->io.port != 0x3f8)
		abort();
	check(write(1, (uint8_t *)run + run->io.data_offset, 1));
	return 0;
}
