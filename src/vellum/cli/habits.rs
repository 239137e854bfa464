//! Flags that people know from other VMMs, and what they are called here. Some of them would be taken for something else: the
//! `-kernel` of QEMU is `-k ernel` to whoever reads short flags.

/// Another program's flag, and the words for it here.
const FLAGS: [(&str, &str); 46] = [
    // QEMU's
    ("-accel", "leave it out: Vellum always uses KVM"),
    ("-append", "--cmdline TEXT"),
    ("-bios", "--firmware FILE, an ELF or PVH image"),
    ("-chardev", "--serial WHERE, --console WHERE"),
    ("-cpu", "--cpuid +NAME,-NAME; without it the guest has the host's CPU"),
    ("-daemonize", "leave it out: let the shell do that, with --serial null and &"),
    ("-device", "--disk, --net, --vsock, --rng, --balloon, --console"),
    ("-display", "leave it out: there is no display"),
    ("-drive", "--disk PATH"),
    ("-enable-kvm", "leave it out: Vellum always uses KVM"),
    ("-fsdev", "--share DIR[:TAG]"),
    ("-gdb", "--gdb SOCK[,wait]"),
    ("-hda", "--disk PATH"),
    ("-initrd", "--initrd FILE"),
    ("-kernel", "--kernel FILE"),
    ("-machine", "leave it out: there is one machine"),
    ("-M", "leave it out: there is one machine"),
    ("-mem-path", "--memory SIZE,backing=hugetlb-2m"),
    ("-mem-prealloc", "--memory SIZE,prealloc"),
    ("-monitor", "--name NAME, and then vellum ctl NAME"),
    ("-name", "--name NAME"),
    ("-netdev", "--net user, or --net tap=NAME"),
    ("-nic", "--net user, or --net tap=NAME"),
    ("-no-reboot", "leave it out: a reset ends the machine, with status 10"),
    ("-nographic", "leave it out: the serial port leads to this terminal"),
    ("-qmp", "--name NAME, and then vellum ctl NAME"),
    ("-serial", "--serial WHERE"),
    ("-smp", "--cpus N"),
    ("-virtfs", "--share DIR[:TAG]"),
    ("--append", "--cmdline TEXT"),
    ("--smp", "--cpus N"),
    // kvmtool's
    ("--hugetlbfs", "--memory SIZE,backing=hugetlb-2m"),
    ("--mem", "--memory SIZE"),
    ("--9p", "--share DIR[:TAG]"),
    ("--tty", "--serial pty"),
    // virtme's
    ("--exec", "-- COMMAND, last"),
    ("--kdir", "--kernel DIR"),
    ("--kimg", "--kernel FILE"),
    ("--pwd", "--guest-dir DIR"),
    ("--rodir", "--share DIR[:TAG],ro"),
    ("--rwdir", "--share DIR[:TAG],rw"),
    // Cloud Hypervisor's and Firecracker's
    ("--api-socket", "--name NAME, and then vellum ctl NAME"),
    ("--api-sock", "--name NAME, and then vellum ctl NAME"),
    ("--event-monitor", "--name NAME, and then vellum ctl NAME events"),
    ("--fs", "--share DIR[:TAG]"),
    ("--seccomp", "--sandbox on, log or off"),
];

/// One line that translates, where this program was started with `run` and another one's flag.
pub(super) fn other_program() -> Option<String> {
    let words = std::env::args_os().skip(1);
    translate(&words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>())
}

fn translate(words: &[String]) -> Option<String> {
    let [run, words @ ..] = words else { return None };
    if run != "run" {
        return None;
    }
    // What a guest is to do is its own.
    let words = words.split(|word| word == "--").next().unwrap_or_default();
    // The value of the one before: a kernel's command line may hold anything.
    let free = |before: Option<&String>| {
        !before.is_some_and(|before| ["-p", "--cmdline", "--params", "--cpuid"].contains(&before.as_str()))
    };
    let flag =
        |at: usize| words[at].split('=').next().filter(|_| free(at.checked_sub(1).map(|at| &words[at])));
    (0..words.len()).find_map(|at| {
        let (theirs, ours) = FLAGS.iter().find(|(theirs, _)| flag(at) == Some(theirs))?;
        Some(
            format!("{theirs}: another program's word; here it is {ours}")
                .replace("here it is leave", "leave"),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(line: &str) -> Option<String> {
        translate(&line.split(' ').map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn other_programs_words_are_translated() {
        for (line, ours) in [
            ("run -kernel x", "-kernel: another program's word; here it is --kernel FILE"),
            ("run -k x -append console=ttyS0", "--cmdline TEXT"),
            ("run --append=quiet", "--cmdline TEXT"),
            ("run -m 1g -smp 4", "--cpus N"),
            ("run -cpu host", "the host's CPU"),
            ("run -nographic", "; leave it out: the serial port"),
            ("run -k x --hugetlbfs /mnt", "backing=hugetlb-2m"),
            ("run -k x --tty 0", "--serial pty"),
            ("run --api-socket /tmp/s", "vellum ctl"),
            ("run --rwdir /src -- true", "--share DIR[:TAG],rw"),
        ] {
            let line = said(line).unwrap_or_else(|| panic!("{line}: nothing"));
            assert!(line.contains(ours), "{line}");
        }
    }

    #[test]
    fn our_own_words_are_not() {
        for line in [
            "run -k x -p -append",
            "run -k vmlinuz -i initrd -c4 -m512m",
            "run --cpuid -cpu",
            "run --name n --serial pty --sandbox off",
            "run -k host -- find / -name x",
            "bench dirty-log -smp",
            "run",
        ] {
            assert_eq!(said(line), None, "{line}");
        }
    }

    /// A flag of ours would never be reached.
    #[test]
    fn no_flag_of_ours_is_among_them() {
        let cli = crate::cli::command();
        let run = cli.find_subcommand("run").unwrap();
        for (theirs, _) in FLAGS {
            let ours = match theirs.strip_prefix("--") {
                Some(long) => run.get_arguments().any(|arg| arg.get_long() == Some(long)),
                None if theirs.len() == 2 => {
                    run.get_arguments().any(|arg| arg.get_short() == theirs.chars().nth(1))
                }
                None => false,
            };
            assert!(!ours, "{theirs}");
        }
    }
}
