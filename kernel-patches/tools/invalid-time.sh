#!/bin/sh
# SPDX-License-Identifier: GPL-2.0-only
# How long the entry of a block is invalid while the block takes the place of its table: from the TLB invalidation, right after the entry was
# made invalid, until what installs the block returns. Cache maintenance in between counts. Also how many faults vCPUs take while all blocks
# come back, of which one a block is due, and how many of these are on a block whose entry another vCPU has made invalid. The first figure is
# for a host whose clock counts instructions, the others for one whose CPUs run at once:
#
#     cargo lab run arm64 --kernel IMAGE --hugepages 40 --file .../invalid-time.sh:/invalid-time.sh -- sh /invalid-time.sh 64M 1
#     cargo lab run arm64 --kernel IMAGE --multi --memory 4096 --hugepages 1088 --file … -- sh /invalid-time.sh 2G 4
set -eu
tracing=/sys/kernel/tracing
mount -t tracefs none $tracing 2> /dev/null || :
cd $tracing
echo 8192 > buffer_size_kb
for function in __kvm_tlb_flush_vmid_ipa __kvm_tlb_flush_vmid kvm_arch_commit_memory_region; do
	echo "p:stage2/$function $function" >> kprobe_events
done
if grep -q ' stage2_map_walker_try_leaf$' /proc/kallsyms; then
	# Its return: what it does before the store is a part of the time.
	echo "r:stage2/install stage2_map_walker_try_leaf" >> kprobe_events
else
	# Without the series that function is inlined. The table is freed just before the block is installed, when each of its entries has been
	# visited, and nothing is cleaned after that. A probe of what visits them would be most of what is measured.
	echo "p:stage2/install free_pages" >> kprobe_events
fi
echo 1 > events/stage2/enable
echo 1 > events/kvm/kvm_guest_fault/enable
# So little work leaves the host idle for a part of the time, for which vellum refuses its own figures.
vellum bench page-table -b "$1" -v "$2" -s anonymous_hugetlb > /dev/null || :
echo 0 > events/stage2/enable
echo 0 > events/kvm/kvm_guest_fault/enable
# What counts comes after the last change of a memslot, by which logging ends. Lines are `task-pid [cpu] flags seconds: event: (...)`.
awk '
	# The number of the block of 2 MiB in which hexadecimal digits, 0x and a comma around them, point.
	function block(hex,   i, n) {
		hex = tolower(substr(hex, 3))
		sub(/,$/, "", hex)
		for (i = 1; i <= length(hex); i++)
			n = n * 16 + index("0123456789abcdef", substr(hex, i, 1)) - 1
		return int(n / 2097152)
	}
	/ kvm_arch_commit_memory_region: / {
		faults = meanwhile = blocks = all = most = 0
		split("", since)
		split("", invalid)
	}
	/ kvm_guest_fault: / {
		faults++
		for (i = 1; i < NF; i++)
			if ($i == "ipa")
				at[$1] = block($(i + 1))
		meanwhile += at[$1] in invalid
	}
	/ __kvm_tlb_flush_vmid(_ipa)?: / && $1 in at {
		since[$1] = $4 + 0
		invalid[at[$1]] = 1
	}
	/^ *vcpu.* install: / && $1 in since {
		took = ($4 - since[$1]) * 1e6
		delete since[$1]
		delete invalid[at[$1]]
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
		printf "%d blocks, %d faults, %d of them on a block that was invalid; ", blocks, faults, meanwhile
		printf "entries were invalid for %.1f us each, %.1f at most\n", all / blocks, most
	}
' trace
