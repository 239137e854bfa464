//! Directories, disks with overlays, and the devices of a PC.

use std::fs;

use serde_json::Value;
use support::env::TestEnv;
use support::guests::Code;
use support::hosts::{kvm, real};
use support::{Failed, LIMIT, ensure, eventually, test};
use vellum_sys::host::allowed_cpus;
use vellum_sys::keyvalue;

use crate::{fork, says, stop};

/// A directory that the guest has not mounted has a server of its own in each machine. The list has
/// each fork below the machine that it came from, and what memory it occupies.
#[test(real())]
fn a_machine_with_a_directory_is_forked_and_listed() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let (kernel, shared) = (env.path("kernel"), env.path("shared"));
    fs::write(&kernel, Code::default().spin().elf64())?;
    fs::create_dir(&shared)?;
    let as_root = if vellum_sys::host::is_root() { ",as-root" } else { "" };
    let share = format!("--serial null --share {}:data{as_root}", shared.display());
    let here =
        env.run("here", &format!("run --kernel {} --memory 16m,backing=memfd {share}", kernel.display()))?;
    // In the order of names the machine comes last.
    let first = fork(&env, "here", &format!("--name b {share}"))?;
    let second = fork(&env, "b", &format!("--name a {share}"))?;
    let list = String::from_utf8(env.vellum("list --memory")?.stdout)?;
    let lines: Vec<&str> = list.lines().skip(2).collect();
    let begins = ["here ", "  b ", "    a "].iter().zip(&lines).all(|(name, line)| line.starts_with(name));
    ensure(begins && lines.len() == 3, || list.clone())?;
    for line in lines {
        let figures: Vec<f64> = line
            .split_whitespace()
            .rev()
            .take(3)
            .filter_map(|word| word.trim_end_matches('m').parse().ok())
            .collect();
        let [part, private, shared] = figures[..] else { return Err(list.into()) };
        // All three map the program and the page that the guest runs on.
        ensure(shared > 0.0 && 0.0 < private && private < part && part < private + shared, || list.clone())?;
    }
    let list = String::from_utf8(env.vellum("list --memory --json")?.stdout)?;
    let listed = list.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
    let of = |name: &str| listed.iter().find(|status| status["name"] == name).ok_or_else(|| list.clone());
    ensure(of("a")?["forked_from"] == of("b")?["pid"], || list.clone())?;
    ensure(of("here")?["forked_from"].is_null(), || list.clone())?;
    ensure(of("a")?["resident"]["private"].as_u64() > Some(0), || list.clone())?;
    for machine in second.into_iter().chain(first) {
        env.ctl(&format!("{} stop", machine.name))?;
        machine.is_over()?;
    }
    env.ctl("here stop")?;
    here.end_with(&["vellum-guard", "vellum-share"]).map(drop)
}

/// The overlay of a disk is copied. Each new machine has one of its own, and says so if it has none.
#[test(kvm())]
fn a_machine_with_an_overlay_is_forked() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let (kernel, base, other) = (env.path("kernel"), env.path("base"), env.path("other"));
    fs::write(&kernel, Code::default().spin().elf64())?;
    fs::write(&base, vec![7; 1 << 20])?;
    fs::write(&other, vec![7; 1 << 19])?;
    let disk = |overlay: &str| format!("--serial null --disk {}{overlay}", base.display());
    let file = env.path("file");
    let run = |name, overlay: &str| {
        env.run(name, &format!("run --kernel {} --memory 16m {}", kernel.display(), disk(overlay)))
    };
    let here = run("here", ",overlay=discard")?;
    let named = format!(",overlay={}", file.display());
    let made = [
        fork(&env, "here", &format!("--name first {}", disk(",overlay=discard")))?,
        fork(&env, "here", &format!("--name second {}", disk(&named)))?,
        fork(&env, "first", &format!("--name third {}", disk(",overlay=discard")))?,
    ];
    ensure(fs::read(&file)?.starts_with(b"VLMOVER\n"), || "the copy is no overlay".into())?;
    let another = format!("--serial null --disk {},overlay=discard", other.display());
    for (line, says_that) in [
        (
            format!("fork here --name new {}", disk("")),
            "--disk: disk0 has an overlay: give the new machine one",
        ),
        (format!("fork here --name new {}", disk(&named)), "has content already"),
        (format!("fork here --name new {another}"), "it is of another image"),
        (
            format!("fork second --name new {}", disk(",overlay=discard")),
            "--disk: disk0: only this process has the map of its overlay; a machine with one cannot be forked",
        ),
    ] {
        says(&env.vellum(&line)?, 2, says_that)?;
    }
    for machine in made.into_iter().flatten() {
        env.ctl(&format!("{} stop", machine.name))?;
        machine.is_over()?;
    }
    env.ctl("here stop")?;
    here.end()?;
    ensure(fs::read(&base)? == vec![7; 1 << 20], || "the image was written to".into())
}

/// What is said of a machine after its start is in a file beside its socket, which is gone with the
/// machine if nothing was said.
#[test(kvm())]
fn what_is_said_of_a_forked_machine_is_kept() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let kernel = env.path("kernel");
    fs::write(&kernel, Code::default().spin().elf64())?;
    let flags = format!("--kernel {} --memory 16m,backing=memfd --serial null", kernel.display());
    let here = env.run("here", &format!("run {flags}"))?;
    let log = |name: &str| env.socket(name).with_extension("log");
    for (name, by, said) in [("ends", "stop", ""), ("fails", "nmi", "triple fault on vCPU 0")] {
        let forked = fork(&env, "here", &format!("--name {name} --serial null"))?;
        ensure(log(name).exists(), || "there is no file".into())?;
        env.ctl(&format!("{name} {by}"))?;
        for machine in forked {
            machine.is_over()?;
        }
        match said {
            "" => eventually(LIMIT, "its file is removed", || Ok((!log(name).exists()).then_some(())))?,
            said => {
                let text = fs::read_to_string(log(name))?;
                ensure(text.contains(said), || text.clone())?;
            }
        }
    }
    env.ctl("here stop")?;
    here.end().map(drop)
}

/// A PC with devices: in each machine, the serial port continues without a lost byte.
#[test(kvm())]
fn a_pc_is_forked_with_its_devices() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let kernel = env.path("kernel");
    // mov dx, 0x3f8; xor eax, eax
    // next: out dx, al; inc eax; mov ecx, 256; wait: dec ecx; jnz wait; jmp next
    let counts = [0x66, 0xba, 0xf8, 0x03, 0x31, 0xc0, 0xee, 0xff, 0xc0, 0xb9, 0, 1, 0, 0, 0xff, 0xc9]
        .into_iter()
        .chain([0x75, 0xfc, 0xeb, 0xf2]);
    fs::write(&kernel, Code::default().bytes(&counts.collect::<Vec<u8>>()).elf64())?;
    let devices = |name: &str| format!("--rng --balloon --serial file={}", env.path(name).display());
    let here = env.run(
        "here",
        &format!("run --kernel {} --memory 32m,backing=memfd {}", kernel.display(), devices("here.out")),
    )?;
    let counts = |name: &str| {
        let path = env.path(name);
        eventually(LIMIT, "it counts", || Ok(fs::read(&path).ok().filter(|bytes| bytes.len() > 600)))
    };
    counts("here.out")?;
    // The refusal names the missing device, and no machine is left behind.
    let refused = env.vellum("fork here --name there --serial null")?;
    says(&refused, 2, "--rng: here has rng: give the new machine one too")?;
    let refused = env.vellum(&format!("fork here --name there --vsock v {}", devices("there.out")))?;
    says(&refused, 2, "--vsock: here has no vsock: leave it out")?;
    let refused = env.vellum(&format!("fork here --name there {}", devices("here.out")))?;
    says(&refused, 2, "is the output of another running machine")?;
    for name in ["there", "then"] {
        let forked = fork(&env, "here", &format!("--name {name} {}", devices(&format!("{name}.out"))))?;
        let counted = counts(&format!("{name}.out"))?;
        let wrong = counted.windows(2).find(|two| two[1] != two[0].wrapping_add(1));
        ensure(wrong.is_none(), || format!("{wrong:?} in what {name} has counted"))?;
        for forked in forked {
            env.ctl(&format!("{name} stop"))?;
            forked.is_over()?;
        }
    }
    let output = stop(&env, "here", here)?;
    ensure(output.status.success(), || format!("{output:?}"))?;
    let counted = fs::read(env.path("here.out"))?;
    let wrong = counted.iter().enumerate().find(|(at, byte)| **byte != *at as u8);
    ensure(wrong.is_none(), || format!("{wrong:?} of {}", counted.len()))
}

/// vCPUs of machines that are pinned take turns at the CPUs. Those of the machine that is forked
/// stay where they are.
#[test(kvm())]
fn forks_take_turns_at_the_cpus_that_they_are_pinned_to() -> Result<(), Failed> {
    let allowed = allowed_cpus()?;
    let list = allowed.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
    let env = TestEnv::new()?;
    let here = env.run(
        "here",
        "run --memory 16m,backing=memfd --cpus 3,pin=off --passes 0 --workload write,rate=1000",
    )?;
    let made = fork(&env, "here", &format!("--count 3 --name f%d --pin {list}"))?;
    for (number, machine) in made.iter().enumerate() {
        for vcpu in 0..3 {
            let wanted = allowed[(3 * number + vcpu) % allowed.len()];
            let found = cpus_of(machine.pid, &format!("vcpu{vcpu}"))?;
            ensure(found == wanted.to_string(), || format!("vCPU {vcpu} of machine {number}: {found}"))?;
        }
    }
    let free = cpus_of(here.child.id(), "vcpu0")?;
    ensure(keyvalue::list(&free)? == allowed, || format!("the first machine: {free}"))?;
    let beyond = allowed.iter().max().unwrap_or(&0) + 1;
    let says_that = format!("{beyond}: not a CPU that this process may use; those are ");
    says(&env.vellum(&format!("fork here --name new --pin {beyond}"))?, 2, &says_that)?;
    for machine in made {
        env.ctl(&format!("{} stop", machine.name))?;
        machine.is_over()?;
    }
    env.ctl("here stop")?;
    here.end().map(drop)
}

/// The CPUs that the thread of this name may use.
fn cpus_of(pid: u32, name: &str) -> Result<String, Failed> {
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let task = task?.path();
        // A thread may end meanwhile.
        if fs::read_to_string(task.join("comm")).is_ok_and(|comm| comm.trim() == name) {
            let status = fs::read_to_string(task.join("status"))?;
            let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
            return Ok(list.ok_or("no list of CPUs")?.trim().to_owned());
        }
    }
    Err(format!("process {pid} has no thread {name}").into())
}
