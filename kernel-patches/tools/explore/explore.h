/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * The interface between the two sides of the harness. Kernel code and its stand-ins are compiled
 * with the kernel's flags and headers. The scheduler and the drivers are compiled with those of the
 * C library. Only plain types cross.
 */
#ifndef EXPLORE_H
#define EXPLORE_H

#define TASKS 4		/* vCPU 0, vCPU 1, user space, RCU */
#define VCPUS 2
#define USER 2
#define RCU 3
#define PAGES 8
#define OPS 24

enum kind { AT_READ, AT_WRITE, AT_ATOMIC, AT_LOCK, AT_UNLOCK, AT_WAIT, AT_YIELD };

/* A step of a task's program. */
struct op {
	unsigned char code, page;
};

enum op_code {
	/* vCPUs; the second two if KVM shadows page tables of the guest */
	DO_NONE, DO_READ, DO_WRITE, DO_TABLE, DO_FOLLOW,
	/* user space */
	DO_LOG_ON, DO_LOG_OFF, DO_COLLECT, DO_CLEAR, DO_RESET, DO_MOVE, DO_NOTIFY, DO_AGE, DO_JOIN,
	/* threads of vCPUs, the first also user space */
	DO_INIT_SET, DO_SIGNAL, DO_PREFAULT,
	/* arm64's vCPUs */
	DO_L2_WRITE, DO_VCPU_INIT,
	DO_CODES
};

struct program {
	/* Operations before the tasks run concurrently. `task` is a task's number. */
	struct { struct op op; unsigned char task; } before[OPS];
	struct op ops[USER + 1][OPS];
};

/* The properties that all runs of one process share. */
struct setup {
	int tdp;		/* two-dimensional paging, else KVM shadows the guest's page tables */
	int tdp_mmu;		/* the TDP MMU, else rmaps */
	int ept;		/* EPT's bits, else those of NPT */
	int ad;			/* with EPT: accessed and dirty bits */
	int ring;		/* the log is a dirty ring, else a bitmap */
	int manual;		/* KVM_CLEAR_DIRTY_LOG */
	int init_set;		/* KVM_DIRTY_LOG_INITIALLY_SET */
	int huge;		/* the host has huge pages */
	int eager;		/* kvm.eager_page_split */
	int odd;		/* the memslot begins one page after a huge page's first */
	int nested;		/* the guest, L1, has a nested guest, L2, whose page tables KVM shadows */
	int tables_logged;	/* the memslot of the page tables is logged, too; they have no shadows at first */
	int prefault;		/* vCPUs' threads call KVM_PRE_FAULT_MEMORY; the rings are small */
	int l2;			/* arm64: L2 writes, too, by a shadow stage-2 page table */
	int init;		/* arm64: vCPUs are initialized again */
	int replaced;		/* a moved memslot may become smaller; user space harvests the rings before, and resets them later */
	int late;		/* arm64: a fault is handled late, beside one log's end and another's begin */
};

extern struct setup setup;
extern struct program program;

/* Whether the guest has page tables that KVM shadows. */
static inline int has_tables(void)
{
	return setup.nested || !setup.tdp;
}

/* sched.c */
int self_id(void);
void point(enum kind kind, const void *address, const void *pc);
void wait_for(int (*ready)(void *), void *argument, const char *what, const void *pc);
void released(const void *pc);
void give_way(void);
int on_task_stack(const void *address);
void say(const char *format, ...);
void fail(const char *format, ...) __attribute__((noreturn));
/* `where` is the place in the kernel that failed */
void fail_at(const void *where, const char *format, ...) __attribute__((noreturn));
unsigned int rnd(unsigned int n);
int all_others_ended(int but);

/* kernel.c */
void kernel_switch(int from, int to);
void kernel_check_access(const void *address, const void *pc);

/* vm.c */
const char *lacking_operation(unsigned long address);
/* What a setup needs and KVM of the base lacks, or NULL */
const char *lacks(const struct setup *of);
void vm_create(void);
void vm_before(void);
void vm_task(int id);
void vm_final_check(int id);
const char *op_name(int code);

/* drive.c gives memory to the kernel's side. */
extern char *arena;
#define ARENA_SIZE (64ul << 20)
/* The start of guest memory in the arena, aligned to huge pages. */
#define GUEST_BASE (32ul << 20)
/*
 * User space's address of it, below the arena: KVM takes an address above PAGE_OFFSET for an error.
 */
#define USER_BASE ((unsigned long)arena - (1ul << 30))

#endif
