/* SPDX-License-Identifier: GPL-2.0-only */
/* Shared by the files that are compiled with the kernel's flags. */
#ifndef HOST_H
#define HOST_H

struct kernel_file {
	struct file *file;
	const struct file_operations *operations;
};

extern const struct file_operations *kvm_device;

void kernel_init(void);
struct kernel_file *kernel_file(int fd);
void *harness_alloc(unsigned long size);
void rcu_task(void);
void set_signal(bool pending);

/* host.c */
void host_init(struct mm_struct *mm);
/* The host's page at an address, and whether it is being taken away */
unsigned long host_pfn(unsigned long hva);
void host_replace(unsigned long hva);
void host_age(unsigned long hva);

#endif
