#!/bin/sh
# SPDX-License-Identifier: GPL-2.0-only
# How long the entry of a block is invalid while the block takes the place of its table: from the TLB invalidation by which the walker begins
# to the call that installs the block; and how many faults vCPUs take while all blocks come back, of which one a block is due, and how many
# of these while some entry is invalid. The first is for a host whose clock counts instructions, the others for one whose CPUs run at once:
#
#     cargo lab run arm64 --kernel IMAGE --hugepages 40 --file .../invalid-time.sh:/invalid-time.sh -- sh /invalid-time.sh 64M 1
#     cargo lab run arm64 --kernel IMAGE --multi --memory 4096 --hugepages 1088 --file … -- sh /invalid-time.sh 2G 4
set -eu
tracing=/sys/kernel/tracing
mount -t tracefs none $tracing 2> /dev/null || :
cd $tracing
echo 8192 > buffer_size_kb
for function in __kvm_tlb_flush_vmid_ipa __kvm_tlb_flush_vmid kvm_arch_commit_memory_region kvm_handle_guest_abort; do
	echo "p:stage2/$function $function" >> kprobe_events
done
if grep -q ' stage2_map_walker_try_leaf$' /proc/kallsyms; then
	echo "p:stage2/install stage2_map_walker_try_leaf" >> kprobe_events
else
	# Without the series the table is freed just before, when each of its entries has been visited. A probe of what visits them would be
	# most of what is measured.
	echo "p:stage2/install free_pages" >> kprobe_events
fi
echo 1 > events/stage2/enable
# So little work leaves the host idle for a part of the time, for which vellum refuses its own figures.
vellum bench page-table -b "$1" -v "$2" -s anonymous_hugetlb > /dev/null || :
echo 0 > events/stage2/enable
# What counts comes after the last change of a memslot, by which logging ends. Lines are `task-pid [cpu] flags seconds: event: (...)`.
awk '
	/ kvm_arch_commit_memory_region: / { faults = meanwhile = blocks = invalid = all = most = 0; split("", since) }
	/ kvm_handle_guest_abort: / {
		faults++
		# The one who has made it invalid is in its own fault.
		if (invalid)
			meanwhile++
	}
	/ __kvm_tlb_flush_vmid(_ipa)?: / {
		invalid += !($1 in since)
		since[$1] = $4 + 0
	}
	/^ *vcpu.* install: / && $1 in since {
		took = ($4 - since[$1]) * 1e6
		delete since[$1]
		invalid--
		blocks++
		all += took
		if (took > most)
			most = took
	}
	END {
		if (!blocks) {
			print "no block took the place of a table" > "/dev/stderr"
			exit 1
		}
		printf "%d blocks, %d faults, %d while an entry was invalid; ", blocks, faults, meanwhile
		printf "entries were invalid for %.1f us each, %.1f at most\n", all / blocks, most
	}
' trace
