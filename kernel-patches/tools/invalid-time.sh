#!/bin/sh
# SPDX-License-Identifier: GPL-2.0-only
# Measures how long a block's entry is invalid while the block replaces its table: from the TLB
# invalidation, right after the entry was made invalid, until the function that installs the block
# returns. Cache maintenance in between counts. Also counts the faults of vCPUs while all blocks
# come back (one for each block is needed), and those of them on a block whose entry another vCPU
# has made invalid. The first figure is for a host whose clock counts instructions, the others for
# one with CPUs in parallel:
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
	# Probes its return, because its work before the store is part of the time.
	echo "r:stage2/install stage2_map_walker_try_leaf" >> kprobe_events
else
	# Without the series that function is inlined. The table is freed directly before the block is
	# installed, after each of its entries has been visited, and nothing is cleaned after that. A probe
	# in the visits would dominate the measured time.
	echo "p:stage2/install free_pages" >> kprobe_events
fi
echo 1 > events/stage2/enable
echo 1 > events/kvm/kvm_guest_fault/enable
# The host idles for a part of the time, so vellum calls its own figures invalid.
vellum bench page-table -b "$1" -v "$2" -s anonymous_hugetlb > /dev/null || :
echo 0 > events/stage2/enable
echo 0 > events/kvm/kvm_guest_fault/enable
# Only what follows the last change of a memslot counts, which ends logging. Lines are `task-pid
# [cpu] flags seconds: event: (...)`.
awk '
	# The number of the 2 MiB block of a hexadecimal address, with 0x and a comma removed.
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
