# SPDX-License-Identifier: GPL-2.0-only
# Runs inside a host whose kernel has 5.10/pte-list-desc: reads the histogram of a VM's rmap chains while the VM's memslots come,
# go and move. A walk that goes on in a set of memslots that was replaced ends in an oops, and no read is complete.
vellum bench memslot move_inactive map -s 30 -b 64m -l 2s > /dev/null 2>&1 &
reads=0 rows=0
while kill -0 $! 2> /dev/null; do
	# There is no such file before the VM is, and none after.
	text=$(cat /sys/kernel/debug/kvm/*/rmap_histogram 2> /dev/null) || continue
	reads=$((reads + 1))
	[ "$(echo "$text" | wc -l)" = 4 ] || rows=$((rows + 1))
done
wait $! || { echo "the benchmark ended with $?"; exit 1; }
echo "$reads reads, $rows without four lines"
[ $reads -gt 0 ] && [ $rows = 0 ]
