//! Flags and commands of other VMMs: virtme-ng, kvmtool, QEMU, Firecracker, Cloud Hypervisor. Some
//! work here too ([`ours`]). The others are answered with Vellum's equivalent. Without that some
//! flags would be misread: clap reads QEMU's `-kernel` as `-k ernel`.

use std::ffi::OsString;
use std::path::Path;

use clap::Command;

/// Another program's flag, and its equivalent here.
const FLAGS: &[(&str, &str)] = &[
    // QEMU's
    ("-accel", "leave it out: Vellum always uses KVM"),
    ("-S", "--gdb SOCK,wait"),
    ("-append", "--cmdline TEXT"),
    ("-bios", "--firmware FILE, an ELF or PVH image"),
    ("-boot", "--kernel FILE, or --disk IMAGE with a system in it"),
    ("-cdrom", "--disk PATH,readonly"),
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
    ("-incoming", "vellum receive --listen ADDRESS"),
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
    ("-object", "--rng, or --memory SIZE,backing=memfd"),
    ("-pflash", "--firmware FILE"),
    ("-qmp", "--name NAME, and then vellum ctl NAME"),
    ("-serial", "--serial WHERE"),
    ("-smp", "--cpus N"),
    ("-s", "--gdb SOCK"),
    ("-snapshot", "--disk PATH,overlay=discard"),
    ("-vga", "leave it out: there is no display"),
    ("-virtfs", "--share DIR[:TAG]"),
    ("--append", "--cmdline TEXT"),
    ("--smp", "--cpus N"),
    // kvmtool's
    ("--hugetlbfs", "--memory SIZE,backing=hugetlb-2m"),
    ("--mem", "--memory SIZE"),
    ("--9p", "--share DIR[:TAG]"),
    ("--tty", "--serial pty"),
    ("--sdl", "leave it out: there is no display"),
    ("--vnc", "leave it out: there is no display"),
    ("--debug", "--loglevel debug"),
    // virtme's
    ("-a", "--cmdline TEXT"),
    ("-e", "-- COMMAND, last"),
    ("-g", "leave it out: there is no display"),
    ("-n", "--net user for a network, --name NAME for a name"),
    ("-r", "--kernel FILE"),
    ("-b", "make in the kernel tree, and then vellum run -k DIR"),
    ("--build", "make in the kernel tree, and then vellum run -k DIR"),
    ("--cwd", "--guest-dir DIR"),
    ("--dry-run", "leave it out: no other program is started whose command could be shown"),
    ("--graphics", "leave it out: there is no display"),
    ("--overlay-rwdir", "--share DIR[:TAG],overlay"),
    ("--qemu", "leave it out: there is no QEMU"),
    ("--qemu-opts", "leave it out: there is no QEMU"),
    ("--run", "--kernel FILE"),
    ("--rw", "--share DIR[:TAG],rw; the guest's root is copy on write"),
    ("--script-sh", "-- sh -c COMMAND, last"),
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
    ("--boot-timer", "vellum test startup"),
    ("--config-file", "flags of vellum run; vellum run -h has the most used ones"),
    ("--device", "leave it out: no device of the host can be assigned"),
    ("--fs", "--share DIR[:TAG]"),
    ("--initramfs", "--initrd FILE"),
    ("--landlock", "leave it out: it is on, see --sandbox"),
    ("--no-api", "leave it out: there is no socket without --name"),
    ("--no-seccomp", "--sandbox off"),
    ("--pmem", "--disk PATH"),
    ("--restore", "vellum restore DIR"),
    ("--seccomp", "--sandbox on, log or off"),
];

/// Another program's command, and its equivalent here.
const COMMANDS: [(&str, &str); 25] = [
    ("attach", "exec -t NAME"),
    ("balloon", "ctl NAME balloon SIZE"),
    ("boot", "run"),
    ("checkpoint", "snapshot NAME DIR"),
    ("compare", "report compare A B"),
    ("console", "exec -t NAME, or run --serial"),
    ("create", "run"),
    ("debug", "ctl NAME sysrq KEY, or dump NAME FILE"),
    ("destroy", "stop NAME"),
    ("events", "ctl NAME events"),
    ("kill", "stop NAME"),
    ("load", "restore DIR"),
    ("ls", "list"),
    ("monitor", "ctl NAME events"),
    ("nmi", "ctl NAME nmi"),
    ("poweroff", "stop NAME"),
    ("ps", "list"),
    ("sandbox", "run -k KERNEL -- COMMAND"),
    ("save", "snapshot NAME DIR"),
    ("setup", "run --root DIR"),
    ("shell", "exec -t NAME"),
    ("shutdown", "stop NAME"),
    ("start", "run"),
    ("sysrq", "ctl NAME sysrq KEY"),
    ("version", "--version"),
];

/// The equivalent of another program's command.
pub(super) fn command(typed: &str) -> Option<&'static str> {
    COMMANDS.iter().find(|(theirs, _)| *theirs == typed).map(|(_, ours)| *ours)
}

/// Rewrites `words`, which start with the program's name, to Vellum's own command line. These forms
/// are rewritten:
///
/// - `ctl pause NAME` to `ctl NAME pause`
/// - `pause -n NAME` and `pause --name NAME`, which are kvmtool's, to `pause NAME`
/// - `run -- COMMAND`, which is virtme-ng's, to `run --kernel . -- COMMAND`, in a directory where a
///   kernel was built
pub(super) fn ours(mut words: Vec<OsString>, definition: fn() -> Command, here: &Path) -> Vec<OsString> {
    let word = |at: usize| words.get(at).and_then(|word| word.to_str());
    match word(1) {
        Some("ctl") => {
            let definition = definition();
            let is_verb = |word: &str| {
                let ctl = definition.find_subcommand("ctl");
                word != "help" && ctl.is_some_and(|ctl| ctl.find_subcommand(word).is_some())
            };
            if let (Some(verb), Some(name)) = (word(2), word(3))
                && is_verb(verb)
                && !is_verb(name)
                && !name.starts_with('-')
            {
                words.swap(2, 3);
            }
        }
        Some("pause" | "resume" | "stop" | "status" | "exec" | "ssh")
            if matches!(word(2), Some("-n" | "--name")) =>
        {
            words.remove(2);
        }
        Some("run") => {
            let end = words.iter().position(|word| word == "--");
            let flags = words[2..end.unwrap_or(words.len())].iter().filter_map(|word| word.to_str());
            let boots = |flag: &str| {
                ["-k", "-d", "--kernel", "--disk", "--firmware", "--from"]
                    .iter()
                    .any(|known| flag.starts_with(known))
            };
            if end.is_some_and(|end| end + 1 < words.len()) && !flags.clone().any(boots) && is_built(here) {
                words.splice(2..2, ["--kernel".into(), ".".into()]);
            }
        }
        _ => {}
    }
    words
}

/// Whether a kernel was built in `directory`.
fn is_built(directory: &Path) -> bool {
    let images = ["arch/x86/boot/bzImage", "arch/arm64/boot/Image"];
    directory.join(".config").is_file() && images.iter().any(|image| directory.join(image).is_file())
}

/// The message for another program's flag after `run`, if there is one.
pub(super) fn other_program() -> Option<String> {
    let words = std::env::args_os().skip(1);
    translate(&words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>())
}

fn translate(words: &[String]) -> Option<String> {
    let [run, words @ ..] = words else { return None };
    if run != "run" {
        return None;
    }
    // Words behind `--` belong to the guest's command.
    let words = words.split(|word| word == "--").next().unwrap_or_default();
    // Whether a word is not the value of the flag before it. A kernel's command line may contain
    // anything.
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

    /// Parses a line. Returns the message if it is refused.
    fn answered(line: &str, here: &Path) -> Result<(), String> {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        if let Some(said) = translate(&words[1..]) {
            return Err(said);
        }
        let ours = ours(words.iter().map(OsString::from).collect(), command_line, here);
        let read = crate::cli::read_from(ours).map(drop);
        read.map_err(|error| crate::cli::refusal::one_line(crate::cli::LINE, &words[1..], &error))
    }

    fn command_line() -> Command {
        crate::cli::command()
    }

    /// Words of other programs work, or are answered with the right equivalent.
    #[test]
    fn what_fingers_know_works_or_is_answered() {
        let tree = std::env::temp_dir().join(format!("vellum-habits-{}", std::process::id()));
        std::fs::create_dir_all(tree.join("arch/x86/boot")).unwrap();
        std::fs::write(tree.join("arch/x86/boot/bzImage"), "").unwrap();
        std::fs::write(tree.join(".config"), "").unwrap();
        for line in [
            // virtme-ng
            "vellum run -- uname -r",
            "vellum run -v",
            "vellum run --verbose -k x -- uname -r",
            "vellum run --kconfig",
            "vellum run --cpus 4 --memory 2G -k x",
            // kvmtool
            "vellum run -k bzImage -i initrd.gz -d disk.img -c 4 -m 1G -p quiet",
            "vellum run -k bzImage --network mode=tap,tapif=tap0",
            "vellum pause -n web",
            "vellum resume --name web",
            "vellum stop -n web",
            "vellum ctl pause web",
            "vellum ctl status web",
            "vellum ctl sysrq web t",
            // Vellum's own spelling, where the selftests have another
            "vellum bench dirty-log --memory 16m --cpus 2",
            "vellum bench migration --memory 16m",
            "vellum test dirty-log -m 16m -c 2",
            "vellum test dirty-edges -m 8m",
        ] {
            assert_eq!(answered(line, &tree), Ok(()), "{line}");
        }
        std::fs::remove_dir_all(&tree).unwrap();
        for (line, word) in [
            // virtme-ng
            ("vellum run -- uname -r", "name a kernel"),
            ("vellum run -k DIR uname", "-- uname"),
            ("vellum run -r", "--kernel FILE"),
            ("vellum run -k x -e uname", "-- COMMAND"),
            ("vellum run -k x --cwd /tmp", "--guest-dir DIR"),
            ("vellum run -k x --dry-run", "leave it out"),
            ("vellum run -k x --network user", "--net user"),
            ("vellum run -k x -n", "--net user"),
            ("vellum run -k x --rw", "--share DIR[:TAG],rw"),
            ("vellum run -k x --graphics", "no display"),
            ("vellum run --build", "make in the kernel tree"),
            // kvmtool
            ("vellum run bzImage", "behind -k"),
            ("vellum setup web", "run --root DIR"),
            ("vellum stat web", "did you mean 'status'"),
            ("vellum debug web", "sysrq"),
            ("vellum version", "--version"),
            ("vellum run -k x --9p /src,tag", "--share"),
            // QEMU
            ("vellum run -kernel x -append quiet", "--kernel FILE"),
            ("vellum run -k x -s -S", "--gdb SOCK"),
            ("vellum run -cdrom x.iso", "--disk PATH,readonly"),
            ("vellum run -incoming tcp:0:4444", "vellum receive"),
            ("vellum run -snapshot", "overlay=discard"),
            // Firecracker
            ("vellum run --config-file vm.json --no-api", "vellum run -h"),
            ("vellum run --api-sock /tmp/fc", "vellum ctl"),
            // Cloud Hypervisor
            ("vellum run -k x --cpus boot=4", "the number alone"),
            ("vellum run -k x --initramfs y", "--initrd FILE"),
            ("vellum run -k x --fs tag=a", "--share"),
            ("vellum run --restore source_url=file:///x", "vellum restore"),
            // All of them
            ("vellum ps", "vellum list"),
            ("vellum shell web", "exec -t NAME"),
            ("vellum kill web", "stop NAME"),
            ("vellum compare a b", "report compare"),
            ("vellum console web", "exec -t"),
        ] {
            let said = answered(line, Path::new("/nonexistent")).expect_err(line);
            assert!(said.contains(word) && said.lines().count() == 1, "{line}: {said}");
        }
    }

    #[test]
    fn no_guess_is_far_off() {
        for (line, far) in [
            ("vellum migrate web --rw", "--recover"),
            ("vellum restore d --rw", "--record"),
            ("vellum run -k x --frobnicate", "--forward"),
            ("vellum frobnicate", "did you mean"),
        ] {
            let said = answered(line, Path::new("/")).expect_err(line);
            assert!(!said.contains(far) && !said.contains("did you mean"), "{line}: {said}");
        }
        let near = answered("vellum run --memroy 1g", Path::new("/")).unwrap_err();
        assert!(near.contains("did you mean --memory?"), "{near}");
    }

    #[test]
    fn words_of_ours_stay_where_they_are() {
        for line in [
            "vellum ctl web pause",
            "vellum ctl pause pause",
            "vellum ctl web migrate-set --downtime 1s",
            "vellum run -k x -- a",
            "vellum run --kernel=x -- a",
            "vellum run -d x -- a",
            "vellum stop web",
        ] {
            let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            assert_eq!(ours(words.clone(), command_line, Path::new("/")), words, "{line}");
        }
        for (theirs, _) in COMMANDS {
            assert!(command_line().find_subcommand(theirs).is_none(), "{theirs} is a command of ours");
        }
    }

    /// Flags in this list are answered before clap sees them.
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
