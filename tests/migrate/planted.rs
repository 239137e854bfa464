//! Faults of a migration, planted in both processes (`vellum_sys::plant`). Each is noticed, and
//! without it the same test passes.

use std::fs;

use support::env::{Machine, TestEnv};
use support::guests::Code;
use support::hosts::{kvm, real};
use support::{Failed, LIMIT, Tests, ensure, eventually, is_caught};

use crate::{ends_with, every_page_is_right, numbered, succeeds};

/// A migration with faults that spoil it.
#[derive(Clone, Copy)]
struct Case {
    /// The faults to plant.
    mistakes: &'static [&'static str],
    /// The guest, and the options of its migration.
    guest: Guest,
    migrate: &'static str,
    /// The message of the source or the target.
    says: &'static str,
}

#[derive(Clone, Copy)]
enum Guest {
    /// A built-in guest with these options.
    BuiltIn(&'static str),
    /// A kernel that writes to its disk, with its disk writing to its memory.
    Disk,
    /// A kernel that fills pages and clears them again.
    Empties,
}

const DIFFERS: &str = "the target's memory differs in";

const CASES: [Case; 9] = [
    // Without a rate limit all pages are always dirty.
    Case {
        mistakes: &["dropped-bit"],
        guest: Guest::BuiltIn("--cpus 2 --memory 8m,slots=3 --workload write,order=random"),
        migrate: "--verify --downtime 1s --timeout 1s,then=force",
        says: DIFFERS,
    },
    // The last pass has few dirty pages, and the writes right before it matter.
    Case {
        mistakes: &["no-last-harvest", "harvest-before-save"],
        guest: Guest::BuiltIn("--cpus 2 --memory 64m,slots=3 --workload write,order=random,rate=50000"),
        migrate: "--verify --downtime 1s --timeout 3s,then=force",
        says: DIFFERS,
    },
    // A page that is lost in a pass of a second is not written again in the later ones, which take
    // milliseconds.
    Case {
        mistakes: &["read-before-clear"],
        guest: Guest::BuiltIn("--memory 8m,slots=3 --workload write,order=random,rate=4000"),
        migrate: "--verify --bandwidth 8m --tracker manual-protect --downtime 10ms --timeout 10s,then=force",
        says: DIFFERS,
    },
    Case {
        mistakes: &["own-slot-left-out"],
        guest: Guest::BuiltIn("--memory 8m --workload write,rate=4000"),
        migrate: "--verify --bandwidth 40m --downtime 10ms --timeout 10s,then=force",
        says: DIFFERS,
    },
    // The guest reaches untouched memory only during the migration, and stays there.
    Case {
        mistakes: &["silence-left-out"],
        guest: Guest::BuiltIn("--memory 1g,slots=3 --workload write,order=sequential,rate=20000"),
        migrate: "--verify --bandwidth 80m --tracker initially-set --downtime 10ms --timeout 3s,then=force",
        says: DIFFERS,
    },
    Case {
        mistakes: &["vmm-writes-left-out"],
        guest: Guest::Disk,
        migrate: "--verify --bandwidth 1m --timeout 10s,then=force",
        says: DIFFERS,
    },
    // A page that is zero in the end must have been sent before with other content. One pass finds
    // half of the pages full, or all in one state. Many passes find each of them full at least
    // once.
    Case {
        mistakes: &["zero-skipped"],
        guest: Guest::Empties,
        migrate: "--verify --bandwidth 8m --downtime 10ms --timeout 2s,then=force",
        says: DIFFERS,
    },
    Case {
        mistakes: &["chunk-changes-connection"],
        guest: Guest::BuiltIn("--memory 8m --workload write,order=random"),
        migrate: "--connections 2 --downtime 1s --timeout 1s,then=force",
        says: "which is another connection's",
    },
    Case {
        mistakes: &["sum-of-live-memory"],
        guest: Guest::BuiltIn("--memory 2m --workload write,order=random"),
        migrate: "--downtime 1s --timeout 1s,then=force",
        says: "the checksum of a payload of",
    },
];

/// Adds a test for each fault, and one for each case without faults.
pub fn add(tests: &mut Tests) {
    for case in CASES {
        let name = |mistake: &str| format!("planted_{mistake}_is_caught");
        tests.add(format!("without_{}_it_moves", case.mistakes.join("_")), real(), move || {
            let (moved, said) = case.run(None)?;
            ensure(moved, || said)
        });
        for mistake in case.mistakes {
            tests.add(name(mistake), kvm(), move || {
                is_caught(|| {
                    let (moved, said) = case.run(Some(mistake))?;
                    ensure(moved || said.contains(case.says), || said)?;
                    Ok(moved)
                })
            });
        }
    }
    tests.add("planted_locks-not-retaken_is_caught", kvm(), || {
        is_caught(|| refused(Some("locks-not-retaken")))
    });
}

impl Case {
    /// Whether the guest migrates, and what both sides print.
    fn run(self, mistake: Option<&'static str>) -> Result<(bool, String), Failed> {
        let env = TestEnv::planted(mistake)?;
        let (here, receive) = self.guest.start(&env)?;
        let there = env.receive("there", &receive)?;
        let output = env.migrate("here", "there", self.migrate)?;
        let mut said = String::from_utf8_lossy(&output.stderr).into_owned();
        let moved = output.status.success();
        let (last, other) = if moved { (("there", there), here) } else { (("here", here), there) };
        said += &String::from_utf8_lossy(&ends_with(other, if moved { 15 } else { 1 })?.stderr);
        let (name, machine) = last;
        succeeds(&env.vellum(&format!("ctl {name} stop"))?)?;
        let end = machine.end()?;
        said += &String::from_utf8_lossy(&end.stderr);
        if moved && matches!(self.guest, Guest::BuiltIn(_)) {
            every_page_is_right(&env.path("there.json"))?;
        }
        Ok((moved, said))
    }
}

impl Guest {
    /// Starts the guest. Returns also the options of its target.
    fn start(self, env: &TestEnv) -> Result<(Machine, String), Failed> {
        let [kernel, disk] = ["kernel", "disk"].map(|name| env.path(name));
        let pc = |image: Vec<u8>, devices: &str| -> Result<Machine, Failed> {
            fs::write(&kernel, image)?;
            env.run("here", &format!("run --kernel {} --memory 32m {devices}", kernel.display()))
        };
        Ok(match self {
            Self::BuiltIn(line) => {
                let machine = env.run("here", &format!("run --passes 0 {line}"))?;
                // A guest that has only started has little to lose.
                env.has_written("here", 4 * (8 << 20) / 4096)?;
                (machine, format!("--json {}", env.path("there.json").display()))
            }
            Self::Disk => {
                fs::write(&disk, [0; 512 * numbered::SECTORS as usize])?;
                let devices = format!("--serial null --disk {}", disk.display());
                (pc(numbered::kernel(), &devices)?, devices)
            }
            Self::Empties => {
                // xor ecx, ecx; round: xor ecx, 1; xor ebx, ebx
                // page: mov [rbx + 8 MiB], ecx; add ebx, 4096
                let mut code = vec![0x31, 0xc9, 0x83, 0xf1, 1, 0x31, 0xdb, 0x89, 0x8b, 0, 0, 0x80, 0];
                code.extend([0x81, 0xc3, 0, 0x10, 0, 0]);
                // cmp ebx, 1 MiB; jb page; jmp round
                code.extend([0x81, 0xfb, 0, 0, 0x10, 0, 0x72, 0xec, 0xeb, 0xe5]);
                let (serial, code) = (env.path("serial"), Code::default().print("A").bytes(&code));
                let machine = pc(code.elf64(), &format!("--serial file={}", serial.display()))?;
                eventually(LIMIT, "it begins", || Ok((fs::metadata(&serial)?.len() > 0).then_some(())))?;
                (machine, "--serial null".into())
            }
        })
    }
}

/// The target refuses the guest because its disk is in use. Returns whether the guest runs on with
/// the lock of its own disk.
fn refused(mistake: Option<&'static str>) -> Result<bool, Failed> {
    let env = TestEnv::planted(mistake)?;
    let [kernel, disk, other] = ["kernel", "disk", "other"].map(|name| env.path(name));
    fs::write(&kernel, Code::default().spin().elf64())?;
    let pc = |disk: &std::path::Path| {
        let (kernel, disk) = (kernel.display(), disk.display());
        format!("run --kernel {kernel} --memory 32m --serial null --disk {disk}")
    };
    [&disk, &other].into_iter().try_for_each(|disk| fs::write(disk, [0; 4096]))?;
    let _here = env.start("here", &mut env.command(&pc(&disk)))?;
    let _holds = env.start("holds", &mut env.command(&pc(&other)))?;
    let there = env.receive("there", &format!("--serial null --disk {}", other.display()))?;
    let output = env.migrate("here", "there", "")?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure(output.status.code() == Some(1) && said.contains("in use"), || said.clone())?;
    ends_with(there, 1)?;
    ensure(env.standing("here").as_deref() == Some("running"), || "it does not run on".into())?;
    match env.start("second", &mut env.command(&pc(&disk))) {
        Ok(_) => Ok(false),
        Err(error) if error.message().is_some_and(|said| said.contains("in use")) => Ok(true),
        Err(error) => Err(error),
    }
}

#[support::test(kvm())]
fn a_guest_that_is_refused_goes_on_with_the_lock_of_its_disk() -> Result<(), Failed> {
    ensure(refused(None)?, || "a second machine has its disk".into())
}
