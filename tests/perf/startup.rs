//! `cargo bench --bench startup` measures the time from exec to the first doorbell of a guest with
//! 128 MiB, for Vellum and for the floor.
//!
//! They are started in turns, so other load on the host affects both alike. The benchmark prints
//! the median of each, and the median and quartiles of the ratio in each round. The floor is a
//! static C program with the same system calls, `tests/perf/floor.c`. `cc` compiles it first.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use support::perf::floor::{compiled, installed, median, multiples};
use vellum_sys::clock::monotonic;

const ROUNDS: usize = 60;

/// Milliseconds from before exec to the doorbell that the program reports.
fn once(program: &Path, args: &[&str]) -> f64 {
    let start = monotonic();
    let output = Command::new(program).args(args).stderr(Stdio::inherit()).output().expect("cannot start");
    assert!(output.status.success(), "{}: {}", program.display(), output.status);
    let text = String::from_utf8_lossy(&output.stdout);
    let rang: u64 = text.trim().parse().expect("the program prints nanoseconds");
    (rang - start.as_nanos() as u64) as f64 / 1e6
}

fn main() {
    // `cargo test --benches` only checks that every benchmark works.
    if let Err(error) = vellum_kvm::vm::open() {
        println!("skipped: {error}");
        return;
    }
    let floor = match compiled(Path::new(env!("CARGO_TARGET_TMPDIR"))) {
        Ok(floor) => floor,
        Err(error) => {
            println!("skipped: the floor cannot be compiled: {error}; install gcc and libc6-dev");
            return;
        }
    };
    let vellum = installed(Path::new(env!("CARGO_BIN_EXE_vellum")), Path::new(env!("CARGO_TARGET_TMPDIR")));
    // Two pages, 64 MiB apart: the benchmark measures the start, not the workload.
    let args = ["test", "startup", "--memory", "128m", "--passes", "1", "--workload", "write,stride=64m"];
    let sandboxes = [["--sandbox", "on"], ["--sandbox", "off"]];
    let mut samples = vec![Vec::new(); 3];
    for _ in 0..ROUNDS {
        samples[0].push(once(&floor, &["doorbell"]));
        for (sandbox, samples) in sandboxes.iter().zip(&mut samples[1..]) {
            samples.push(once(&vellum, &[&args[..], sandbox].concat()));
        }
    }
    let names = ["floor", "vellum, sandbox on", "vellum, sandbox off"];
    println!("exec to the first doorbell, 128 MiB, medians of {ROUNDS} (half lie between), started in turn:");
    for (name, of) in names.into_iter().zip(&samples) {
        let least = of.iter().copied().fold(f64::INFINITY, f64::min);
        let times = multiples(of, &samples[0]);
        println!("  {name:20} {:7.3} ms  least {least:7.3}  {times} times the floor", median(of));
    }
    match overhead(&vellum) {
        Some(kib) => println!("PSS of a running guest with 128 MiB, its memory left out: {kib} KiB"),
        None => println!("PSS: skipped, /proc/PID/smaps cannot be read"),
    }
}

/// The proportional set size of a running Vellum in KiB, without the mapping of guest RAM.
fn overhead(vellum: &Path) -> Option<u64> {
    let mut child = Command::new(vellum)
        .args(["run", "--memory", "128m", "--passes", "0"])
        .stdout(Stdio::null())
        .spawn()
        .ok()?;
    let tasks = format!("/proc/{}/task", child.id());
    let running =
        |path: PathBuf| std::fs::read_to_string(path.join("comm")).is_ok_and(|name| name.starts_with("vcpu"));
    while child.try_wait().ok()?.is_none()
        && !std::fs::read_dir(&tasks).ok()?.flatten().any(|task| running(task.path()))
    {
        std::thread::yield_now();
    }
    // Memory that only start-up needs is freed a moment later.
    std::thread::sleep(std::time::Duration::from_millis(300));
    let maps = std::fs::read_to_string(format!("/proc/{}/smaps", child.id()));
    let _ = child.kill();
    let _ = child.wait();
    let mut total = 0;
    let mut size = 0;
    for line in maps.ok()?.lines() {
        let mut words = line.split_whitespace();
        match (words.next()?, words.next().and_then(|word| word.parse::<u64>().ok())) {
            ("Size:", Some(kib)) => size = kib,
            // RAM is the only mapping with exactly this size.
            ("Pss:", Some(kib)) if size != 128 << 10 => total += kib,
            _ => {}
        }
    }
    Some(total)
}
