# SPDX-License-Identifier: GPL-2.0-only
# Runs in a host with KVM as modules: unloads them and loads them again, with a machine before and
# after. KVM's pending RCU callbacks, such as those that free tables of the TDP MMU, must run before
# its code is gone, and the second load must find no remains of the first.
parameters() { tr ' ' '\n' < /proc/cmdline | sed -n "s/^$1\.//p"; }
in_force() { grep . /sys/module/kvm*/parameters/* 2> /dev/null; }
machine() { vellum test dirty-log --memory 8m --events 5k --seed 1 > /tmp/machine 2>&1 || { cat /tmp/machine; exit 1; }; }

[ -d /sys/module/kvm_amd/holders ] || { echo "KVM is built in: build the kernel with --variant modules"; exit 1; }
modules=$(cut -d ' ' -f 1 /proc/modules)
before=$(in_force)
for time in 1 2 3; do
	machine
	# Newest first, and then the other way.
	other=
	for module in $modules; do
		rmmod "$module" || exit 1
		other="$module $other"
	done
	[ ! -e /dev/kvm ] || { echo "there is a /dev/kvm without KVM"; exit 1; }
	for module in $other; do
		# shellcheck disable=SC2046 # Each parameter is a word.
		insmod "/modules/$module.ko" $(parameters "$module") || exit 1
	done
	[ "$(in_force)" = "$before" ] || { echo "other parameters after load $time:"; in_force; exit 1; }
done
machine
echo "unloaded and loaded 3 times:" $modules
