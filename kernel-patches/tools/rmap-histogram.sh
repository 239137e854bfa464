# SPDX-License-Identifier: GPL-2.0-only
# Runs in a host with the kernel of 5.10/pte-list-desc: reads the histogram of a VM's rmap chains
# while the VM's memslots are added, removed and moved. A walk that continues in a replaced set of
# memslots ends in an oops.
vellum bench memslot move_inactive map -s 30 -b 64m -l 2s > /dev/null 2>&1 &
reads=0 short=0
while kill -0 $! 2> /dev/null; do
	text=$(cat /sys/kernel/debug/kvm/*/rmap_histogram 2> /dev/null)
	status=$?
	# An oops kills the reader, and the benchmark then waits for it for ever.
	[ $status -lt 128 ] || { echo "a read was killed, status $status"; exit 1; }
	# The file exists only while the VM does.
	[ $status = 0 ] || continue
	reads=$((reads + 1))
	[ "$(echo "$text" | wc -l)" = 4 ] || short=$((short + 1))
done
wait $! || { echo "the benchmark ended with $?"; exit 1; }
echo "$reads reads, $short without four lines"
[ $reads -gt 0 ] && [ $short = 0 ]
