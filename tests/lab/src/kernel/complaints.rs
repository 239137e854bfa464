//! The kernel's reports about faults in itself: lockdep, KASAN, RCU, sleeping in atomic context,
//! WARN_ON, BUG.

/// The texts that begin a complaint.
const BEGINNINGS: [&str; 12] = [
    "WARNING: ",
    "BUG: ",
    "kernel BUG at",
    "Oops",
    // Any other exception that ends a task: `general protection fault, …: 0000 [#1]`.
    ": 0000 [#",
    "possible recursive locking",
    "inconsistent lock state",
    "suspicious RCU usage",
    "UBSAN: ",
    "INFO: task ",
    "INFO: rcu_",
    // lockdep disables itself after this one.
    "INFO: trying to register",
];

fn is_first(line: &str) -> bool {
    // SLUB's complaints have no colon: `BUG kmalloc-64 (Not tainted): Poison overwritten`.
    line.starts_with("BUG ") || BEGINNINGS.iter().any(|mark| line.contains(mark))
}

/// How many functions of its backtrace identify a complaint.
const DEPTH: usize = 8;

/// The complaints in a kernel's log: the text and the callers, without parts that differ between
/// boots (time, CPU, process) or builds (line numbers, offsets).
pub fn complaints(log: &str) -> Vec<String> {
    let lines: Vec<&str> =
        log.lines().map(|line| line.split_once("] ").map_or(line, |(_, text)| text)).collect();
    let begins = (0..lines.len()).filter(|&index| is_first(lines[index]));
    begins
        .map(|first| {
            let rest = lines[first + 1..].iter().take_while(|line| !is_first(line));
            // `Call Trace` on x86, `Call trace` on Arm.
            let traces = |line: &&&str| ["Call Trace", "Call trace"].iter().any(|mark| line.contains(mark));
            let calls = rest.clone().skip_while(|line| !traces(line)).skip(1);
            // Entries with a question mark are leftovers on the stack.
            let calls = calls.take_while(|line| line.starts_with(' ')).filter(|line| !line.contains('?'));
            let calls: Vec<String> = calls.take(DEPTH).map(|line| lasting(line)).collect();
            let said = rest.filter(|line| line.contains("suspicious ")).map(|line| lasting(line));
            let said: Vec<String> = [lasting(lines[first])].into_iter().chain(said).collect();
            let from = if calls.is_empty() { "" } else { ", from " };
            format!("{}{from}{}", said.join(" "), calls.join(" < "))
        })
        .collect()
}

/// The words of a line that do not differ between builds.
fn lasting(line: &str) -> String {
    // 7.2 writes `WARNING: virt/kvm/kvm_main.c:431 at f+0x1/0x2, CPU#0: program/258`.
    let line = line.split_once(", CPU#").map_or(line, |(line, _)| line);
    let words = line.split_whitespace().filter(|word| !word.chars().all(|c| c.is_ascii_digit()));
    let lasting = words.map(|word| {
        let (place, number) = word.rsplit_once(':').unwrap_or((word, ""));
        let numbered = !number.is_empty() && number.chars().all(|c| c.is_ascii_digit());
        let word = if numbered { place } else { word };
        word.split_once("+0x").map_or(word, |(function, _)| function)
    });
    lasting.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_complaint_of_two_boots_is_one() {
        let log = |time, cpu, line, offset| {
            format!(
                "[ {time}] WARNING: CPU: {cpu} PID: 4{cpu} at arch/x86/kvm/x86.c:{line} f+0x{offset}/0x2\n[ {time}] other\n\
                 [ {time}] Call Trace:\n[ {time}]  g+0x{offset}/0x9\n[ {time}]  ? h+0x1/0x9\n[ {time}]  i+0x1/0x9\n[ {time}] \n\
                 [ {time}]  j+0x1/0x9\n"
            )
        };
        assert_eq!(complaints(&log("1.5", 0, 12, 1)), complaints(&log("2.0", 1, 13, 2)));
        assert_eq!(
            complaints(&log("1.5", 0, 12, 1)),
            ["WARNING: CPU: PID: at arch/x86/kvm/x86.c f, from g < i"]
        );
    }

    #[test]
    fn who_ran_into_it_does_not_tell_it_from_others() {
        let line = "[ 1.0] WARNING: virt/kvm/kvm_main.c:431 at f+0x1/0x2, CPU#0: program/258\n";
        assert_eq!(complaints(line), ["WARNING: virt/kvm/kvm_main.c at f"]);
    }

    #[test]
    fn every_kind_is_heard() {
        for line in [
            "BUG kmalloc-64 (Not tainted): Poison overwritten",
            "BUG: KASAN: use-after-free in f+0x1/0x2",
            "general protection fault, probably for non-canonical address 0xdead000000000100: 0000 [#1] SMP",
            "general protection fault: 0000 [#1] SMP",
            "invalid opcode: 0000 [#1] SMP",
            "BUG: unable to handle page fault for address: 0000000000001000",
            "INFO: trying to register non-static key.",
            "rcu: INFO: rcu_sched self-detected stall on CPU",
            "rcu: INFO: rcu_sched detected stalls on CPUs/tasks:",
            "INFO: task x:1 blocked for more than 120 seconds.",
            "UBSAN: shift-out-of-bounds in a.c:1:2",
            "WARNING: possible circular locking dependency detected",
        ] {
            assert_eq!(complaints(&format!("[    1.0] quiet\n[    1.5] {line}\n")).len(), 1, "{line}");
        }
        // A program's own end and similar text are not complaints.
        let log = "[    1.0] traps: a[12] general protection fault ip:401000 sp:7ffe error:0 in a[401000+1000]\n\
                   [    1.0] rcu: Hierarchical RCU implementation.\n";
        assert!(complaints(log).is_empty());
    }

    #[test]
    fn complaints_of_one_kind_differ_by_their_place() {
        let log = |file, function| {
            format!(
                "[    1.5] WARNING: suspicious RCU usage\n[    1.5] 5.10.223 #1 Not tainted\n\
                 [    1.5] {file}:694 suspicious rcu_dereference_check() usage!\n[    1.5] \n\
                 [    1.5] Call Trace:\n[    1.5]  dump_stack+0xa4/0xd9\n[    1.5]  {function}+0x1/0x2\n"
            )
        };
        let one = complaints(&log("a.h", "f"));
        assert_eq!(
            one,
            [
                "WARNING: suspicious RCU usage a.h suspicious rcu_dereference_check() usage!, from dump_stack < f"
            ]
        );
        assert_ne!(one, complaints(&log("b.h", "f")));
        assert_ne!(one, complaints(&log("a.h", "g")));
        assert_eq!(complaints(&(log("a.h", "f") + &log("b.h", "g"))).len(), 2);
    }
}
