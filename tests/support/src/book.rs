//! The pages of README and the book that have commands, where these run, and which are not run.

use std::path::{Path, PathBuf};
use std::{fs, io};

use crate::{Failed, ensure, page};

/// A page, and how its commands are run.
#[derive(Clone, Copy, Debug)]
pub struct Page {
    /// The path without its ending, below `docs/src`.
    pub name: &'static str,
    /// Its Markdown.
    pub text: &'static str,
    /// Where its commands can run.
    pub place: Place,
    /// Commands that make what the page takes for granted.
    pub before: &'static [&'static str],
    /// Commands that are not run as they stand. `…` at the end of a row stands for any rest.
    instead: &'static [(&'static str, Instead)],
}

/// Where the commands of a page can run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Place {
    /// On any KVM, in every run of the tests.
    Kvm,
    /// On any KVM. Takes long, so only with `VELLUM_BOOK=all`.
    Slow,
    /// On a KVM that runs Linux, with a guest as `bzImage` and `initrd.gz`.
    Linux,
    /// Nowhere in a test.
    Nowhere,
}

/// What happens to a command that is not run as it stands, and why.
#[derive(Clone, Copy, Debug)]
pub enum Instead {
    /// Another command runs.
    Run(&'static str, &'static str),
    /// Nothing runs.
    Nothing(&'static str),
}

use Instead::{Nothing, Run};
use Place::{Kvm, Linux, Nowhere, Slow};

const LAB: &str =
    "boots emulated hosts: `cargo lab test` does so, and a test of the laboratory reads the line";
const OTHER_HOST: &str = "needs another host: tests/migrate moves a guest over a test's own sshd";
const OTHER_PROGRAM: &str = "is another program";
const HOURS: &str = "takes from minutes to hours";
const LINUX: &str = "needs a Linux guest, which pages of another place run";
const INTERACTIVE: &str = "has a terminal: tests/linux/typed.rs types on one";
const TREE: &str = "needs a tree in which a kernel was built: cargo lab test linux -- on_the_hosts_root";
const IMAGE: &str = "needs a distribution's image: cargo lab test linux -- images_of_clouds";
const SMALL_MIGRATION: &str = "vellum bench migration -b 16m --dirty-rate 1m --json m.json || test -s m.json";
const MISSED_RATE: &str = "on a busy host the guest misses its rate, and the result says so";
/// A machine in place of the Linux guest that the page starts.
const OWN_GUEST: &str =
    "starts a Linux guest: here the machine has a built-in one, and runs in the background";

/// The judge's image is for x86-64.
const JUDGE: Place = if cfg!(target_arch = "x86_64") { Slow } else { Nowhere };

macro_rules! page {
    ($path:literal, $place:expr, $before:expr, $instead:expr) => {
        Page {
            name: $path,
            text: include_str!(concat!("../../../docs/src/", $path, ".md")),
            place: $place,
            before: $before,
            instead: $instead,
        }
    };
}

/// All pages with commands.
pub const PAGES: &[Page] = &[
    Page {
        name: "readme",
        text: include_str!("../../../README.md"),
        place: Kvm,
        before: &[],
        instead: &[
            ("cargo run --release…", Nothing("builds: cargo lab fresh does so on a fresh machine")),
            ("rustup toolchain install…", Nothing("installs: cargo lab fresh does so on a fresh machine")),
            ("cargo lab test --setup…", Nothing("is the test command itself: cargo lab fresh runs it")),
            ("vellum run -k DIR…", Nothing(LINUX)),
            ("vellum run -d debian-12.qcow2…", Nothing(IMAGE)),
            ("vellum test --duration 1h…", Nothing(HOURS)),
            ("vellum migrate web --to ssh:…", Nothing(OTHER_HOST)),
            ("cargo lab compare…", Nothing(LAB)),
            ("vellum test dirty-log --duration 10m…", Nothing(HOURS)),
        ],
    },
    page!("tutorials/first-steps", Kvm, &[], &[]),
    page!(
        "tutorials/dirty-pages",
        Kvm,
        &[],
        &[
            (
                "vellum test",
                Nothing("has a verdict that depends on the host's kernel: tests/dirty_log runs both tests"),
            ),
            ("vellum test dirty-edges", Nothing("has a verdict that depends on the host's kernel")),
        ]
    ),
    page!(
        "tutorials/migrate",
        Kvm,
        &[],
        &[
            (
                "vellum bench migration -b 256m --dirty-rate 64m --json m.json",
                Run(SMALL_MIGRATION, MISSED_RATE),
            ),
            ("vellum receive --name web…", Nothing(OTHER_HOST)),
            ("vellum migrate web --to ssh:…", Nothing(OTHER_HOST)),
        ]
    ),
    page!("tutorials/kernel-patch", Kvm, &[], &[("cargo lab…", Nothing(LAB))]),
    page!(
        "tutorials/linux-guest",
        Linux,
        &[],
        &[
            ("curl…", Nothing("downloads an image")),
            ("cargo lab guest guest…", Nothing("makes the guest that this page's test is given")),
            ("vellum run -k guest/vmlinuz -i guest/initrd -c 2 -m 512m", Nothing(INTERACTIVE)),
            ("vellum run -k ~/linux…", Nothing(TREE)),
        ]
    ),
    page!("how-to/arm64", Nowhere, &[], &[("cargo lab…", Nothing(LAB))]),
    page!(
        "how-to/ci",
        Nowhere,
        &[],
        &[
            ("vellum test dirty-log --duration 10m…", Nothing(HOURS)),
            ("vellum test dirty-edges --tracker ring --interrupt…", Nothing("fails on most kernels")),
        ]
    ),
    page!(
        "how-to/compare",
        Slow,
        &[],
        &[
            ("cargo lab compare…", Nothing(LAB)),
            (
                "vellum bench dirty-log -b 1G --repeat 5 --json before/1.json…",
                Run("vellum bench dirty-log -b 64M --repeat 2 --json before/1.json", "takes a minute"),
            ),
            (
                "vellum bench dirty-log -b 1G --repeat 5 --json after/1.json…",
                Run("vellum bench dirty-log -b 64M --repeat 2 --json after/1.json", "takes a minute"),
            ),
        ]
    ),
    page!("how-to/containers", Nowhere, &[], &[("podman…", Nothing(OTHER_PROGRAM))]),
    page!(
        "how-to/cpus",
        Linux,
        &[],
        &[(
            "vellum run -k bzImage -i initrd.gz --cpu common.json…",
            Run(
                "vellum run -k bzImage -i initrd.gz --cpu common.json -- true",
                "runs until it is ended by hand",
            ),
        )]
    ),
    page!(
        "how-to/disks",
        Slow,
        &["vellum disk create debian-12.qcow2 64m"],
        &[
            ("vellum run -k…", Nothing("needs an image with a root file system: tests/linux has disks")),
            ("vellum run -d…", Nothing(IMAGE)),
            ("vellum ssh…", Nothing(IMAGE)),
            ("scp…", Nothing(IMAGE)),
        ]
    ),
    page!(
        "how-to/dumps",
        Slow,
        &["vellum run --name web -m 16m --passes 0 --workload write,rate=100 >web.log 2>&1 &"],
        &[
            ("crash…", Nothing(OTHER_PROGRAM)),
            ("makedumpfile…", Nothing("needs a Linux guest: cargo lab test linux -- is_dumped")),
            (
                "vellum run -k bzImage -i initrd.gz --on-panic…",
                Nothing("needs a guest that panics: tests/linux/ends.rs has one"),
            ),
        ]
    ),
    page!(
        "how-to/fleets",
        Slow,
        &[],
        &[
            (
                "vellum fleet plan nightly.toml --into /shared/nightly",
                Run("vellum fleet plan nightly.toml --into nightly", "writes into a directory of all hosts"),
            ),
            ("vellum fleet…", Nothing("needs Slurm: tests/fleet runs one")),
        ]
    ),
    page!(
        "how-to/fork",
        Slow,
        &[],
        &[
            (
                "vellum run -k bzImage -i initrd.gz -m 1g,backing=memfd --name web…",
                Run(
                    "vellum run -m 16m,backing=memfd --name web --passes 0 --workload write,rate=100 >web.log 2>&1 &",
                    OWN_GUEST,
                ),
            ),
            (
                "vellum fork web --count 100 --name w%d --serial file=w%d.log…",
                Run(
                    "vellum fork web --count 3 --name w%d",
                    "has a serial port, which a built-in guest has not"
                ),
            ),
            ("vellum run -k ~/linux --root host --zygote z…", Nothing(TREE)),
            ("vellum run --from z…", Nothing(TREE)),
        ]
    ),
    page!(
        "how-to/from-kvmtool",
        Linux,
        &["vellum disk create disk.img 16m"],
        &[
            ("lkvm…", Nothing(OTHER_PROGRAM)),
            (
                "vellum run -k bzImage…",
                Run(
                    "vellum run -k bzImage -i initrd.gz -d disk.img -c 4 -m 1g -p \"quiet\" -- true",
                    "runs until it is ended by hand",
                ),
            ),
        ]
    ),
    page!(
        "how-to/gdb",
        Nowhere,
        &[],
        &[("vellum run -k vmlinux…", Nothing("waits for GDB: tests/linux/debugged.rs brings one"))]
    ),
    page!(
        "how-to/huge-pages",
        Nowhere,
        &[],
        &[
            (
                "vellum run -m 4g,backing=hugetlb-2m…",
                Nothing("needs 4 GiB of huge pages: tests/run.rs has some")
            ),
            ("echo 128…", Nothing("changes this host")),
        ]
    ),
    page!(
        "how-to/judge",
        JUDGE,
        &[],
        &[
            ("vellum judge run…", Nothing("drives another VMM: tests/judge has those that are installed")),
            ("apt-get install…", Nothing("installs a package")),
            ("cargo build…", Nothing(OTHER_PROGRAM)),
            ("export RUSTUP_TOOLCHAIN…", Nothing(OTHER_PROGRAM)),
            ("export CFLAGS…", Nothing(OTHER_PROGRAM)),
            ("export VELLUM_VMMS…", Nothing(OTHER_PROGRAM)),
            (
                "vellum run -k judge.elf -c 2 -m 256 -p passes=20 > log",
                Run(
                    "vellum run -k judge.elf -c 2 -m 64 -p passes=3 > log",
                    "takes minutes beside other work"
                ),
            ),
            (
                "vellum run -k judge.elf -m 256 -p passes=20 --disk judge.raw,readonly > log",
                Run(
                    "vellum run -k judge.elf -m 64 -p passes=3 --disk judge.raw,readonly > log",
                    "takes minutes beside other work",
                ),
            ),
        ]
    ),
    page!(
        "how-to/kernel-loop",
        Linux,
        &[
            "vellum run -k bzImage -i initrd.gz -m 512m --name web --vsock web.sock --serial file=web.log >run.log 2>&1 &"
        ],
        &[
            ("make…", Nothing(OTHER_PROGRAM)),
            ("vellum run -k .…", Nothing(TREE)),
            ("vellum run -k DIR…", Nothing(TREE)),
            ("scripts/kconfig…", Nothing(OTHER_PROGRAM)),
            (
                "vellum exec web --request '{\"do\":\"kexec\"…",
                Nothing("needs a second kernel in the guest: tests/linux/kexec.rs has one"),
            ),
        ]
    ),
    page!("how-to/lab", Nowhere, &[], &[("cargo lab…", Nothing(LAB)), ("VELLUM_GUESTS…", Nothing(LAB))]),
    page!(
        "how-to/networks",
        Nowhere,
        &[],
        &[
            ("vellum run…", Nothing("needs passt or a tap: tests/linux/passt.rs and whole.rs have both")),
            ("sudo…", Nothing("changes this host's network")),
        ]
    ),
    page!(
        "how-to/packaging",
        Nowhere,
        &[],
        &[("cargo lab release…", Nothing("makes a package: CI does so"))]
    ),
    page!(
        "how-to/pci",
        Linux,
        &[],
        &[("vellum run -k bzImage -i initrd.gz --transport pci", Nothing(INTERACTIVE))]
    ),
    page!(
        "how-to/postcopy",
        Slow,
        &[
            "vellum run --name web -m 16m --passes 0 --workload write,rate=100 >web.log 2>&1 &",
            "vellum receive --name other --listen unix:other.sock >other.log 2>&1 &",
        ],
        &[(
            "vellum migrate web --to ssh:other:web --mode hybrid…",
            Run("vellum migrate web --to unix:other.sock --mode hybrid", OTHER_HOST),
        )]
    ),
    page!(
        "how-to/shares",
        Linux,
        &["mkdir DIR", "echo hello > DIR/file", "chown -R 65534:65534 DIR || :"],
        &[
            ("vellum run -k bzImage -i initrd.gz --share DIR:data", Nothing(INTERACTIVE)),
            ("mount…", Nothing("is typed in the guest")),
        ]
    ),
    page!(
        "how-to/snapshots",
        Slow,
        &["vellum run --name web -m 16m --passes 0 --workload write,rate=100 >web.log 2>&1 &"],
        &[
            (
                "vellum restore web.snap --name again…",
                Run("vellum restore web.snap --name again >again.log 2>&1 &", "has a disk"),
            ),
            ("vellum snapshot web web.snap --reflink…", Nothing("needs a file system that shares blocks")),
            ("vellum restore web.snap --disk…", Nothing("needs a file system that shares blocks")),
        ]
    ),
    page!(
        "how-to/live-update",
        Nowhere,
        &[],
        &[
            ("vellum live-update…", Nothing("needs a kernel that hands memory over: tests/next_kernel")),
            ("kexec…", Nothing(OTHER_PROGRAM)),
            ("mkdir /etc/systemd…", Nothing("installs what a host with systemd has")),
            ("cp resources/systemd…", Nothing("installs what a host with systemd has")),
            ("sed s/%p…", Nothing("installs what a host with systemd has")),
            ("systemctl…", Nothing(OTHER_PROGRAM)),
            ("cargo lab test live-update…", Nothing(LAB)),
        ]
    ),
    page!(
        "how-to/upgrade",
        Slow,
        &["ln -s bin/vellum vellum"],
        &[(
            "vellum run -k bzImage -i initrd.gz -m 1g,backing=memfd --name web…",
            Run(
                "vellum run -m 16m,backing=memfd --name web --passes 0 --workload write,rate=100 >web.log 2>&1 &",
                OWN_GUEST,
            ),
        )]
    ),
    page!(
        "reference/commands",
        Slow,
        &[],
        &[
            ("vellum run -c 4 -m 4g,backing=hugetlb-2m…", Nothing("needs 4 GiB of huge pages")),
            ("vellum run -k…", Nothing(LINUX)),
            (
                "vellum bench dirty-log -v 4 -b 1G…",
                Run(
                    "vellum bench dirty-log -v 2 -b 64M --hot 10 --collect continuous --json result.json",
                    "needs 4 GiB of memory",
                ),
            ),
            ("vellum bench migration --dirty-rate 64m --json m.json", Run(SMALL_MIGRATION, MISSED_RATE)),
            ("vellum bench context-switch --cr3-cache both…", Nothing("needs a patched kernel")),
        ]
    ),
    page!("reference/reports", Slow, &[], &[]),
    page!("explanation/benchmarks", Nowhere, &[], &[("vellum…", Nothing(HOURS))]),
    page!("explanation/cr3-cache", Nowhere, &[], &[("vellum run -k…", Nothing("needs a patched kernel"))]),
    page!("explanation/explore", Nowhere, &[], &[("cargo lab explore…", Nothing(LAB))]),
    page!("explanation/history", Nowhere, &[], &[("cargo lab history…", Nothing(LAB))]),
];

/// The Markdown files below `dir`.
fn below(dir: &Path, into: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            below(&path, into)?;
        } else if path.extension().is_some_and(|kind| kind == "md") {
            into.push(path);
        }
    }
    Ok(())
}

/// The root of the workspace.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// All pages of the book, and README.
pub fn files() -> io::Result<Vec<PathBuf>> {
    let mut files = vec![root().join("README.md")];
    below(&root().join("docs/src"), &mut files)?;
    Ok(files)
}

/// Checks that `command_line` has each flag with which a page calls it. `program` is how pages do.
pub fn check_flags(program: &str, command_line: &mut clap::Command) -> Result<(), Failed> {
    command_line.build();
    let mut count = 0;
    for file in
        files()?.into_iter().chain([root().join("CONTRIBUTING.md"), root().join("kernel-patches/README.md")])
    {
        let text = fs::read_to_string(&file)?;
        for command in page::commands(&text, program) {
            count += 1;
            if let Some(flag) = page::unknown_flag(command_line, &command) {
                return Err(format!("{}: {flag} is no flag: {command}", file.display()).into());
            }
        }
    }
    ensure(count > 20, || format!("{program}: {count} commands"))
}

impl Page {
    /// A page without text, which runs anywhere.
    pub const fn of_nothing() -> Self {
        Self { name: "nothing", text: "", place: Kvm, before: &[], instead: &[] }
    }

    /// What runs instead of `command`, if it does not run as it stands.
    pub fn instead(&self, command: &str) -> Option<Instead> {
        let is_meant = |row: &str| match row.strip_suffix('…') {
            Some(start) => command.starts_with(start),
            None => command == row,
        };
        self.instead.iter().find(|(row, _)| is_meant(row)).map(|(_, instead)| *instead)
    }

    /// The name of its test.
    pub fn test(&self) -> String {
        self.name.replace(['/', '-'], "_")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_page_with_commands_is_listed_and_runs_if_any_of_them_can() {
        let files = files().unwrap();
        assert!(files.len() > 30, "{files:?}");
        for file in files {
            let text = fs::read_to_string(&file).unwrap();
            let listed = PAGES.iter().any(|page| page.text == text);
            assert_eq!(!page::steps(&text).is_empty(), listed, "{}: whether it has commands", file.display());
        }
        for page in PAGES.iter().filter(|page| page.name != "how-to/judge" || JUDGE != Nowhere) {
            let runs = page::steps(page.text)
                .iter()
                .any(|step| !matches!(page.instead(&step.command), Some(Nothing(_))));
            assert_eq!(runs, page.place != Nowhere, "{}: whether a command can run", page.name);
        }
    }

    #[test]
    fn each_row_of_the_table_is_for_a_command() {
        for page in PAGES {
            let steps = page::steps(page.text);
            for row in page.instead {
                let only = Page { instead: std::slice::from_ref(row), ..*page };
                let found = steps.iter().any(|step| only.instead(&step.command).is_some());
                assert!(found, "{}: no command is {:?}", page.name, row.0);
            }
        }
    }
}
