//! `cargo bench --bench boot`: the time from exec to the first byte on the serial port, of a guest
//! of a few bytes with 128 MiB, for Vellum and for the floors. Also Vellum's memory beside the
//! guest's while that guest runs.
//!
//! Copies of all programs are started in turn, so that other load affects all alike. The benchmark
//! prints the median of each, and the medians of the ratios to both floors, round by round, with
//! quartiles. On a busy host a real-time priority (`chrt -f 10`) keeps most of the load out of the
//! figures. The floors are a static C program, `tests/perf/floor.c`, which `cc` compiles first. One
//! makes the calls that Vellum makes, the other the fewest that print a guest's byte.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use support::guests::Code;
use support::perf::floor::{compiled, installed, median, multiples};

const ROUNDS: usize = 100;

/// Starts `program` and waits for its first byte. Returns the milliseconds that it took.
fn start(program: &Path, args: &[&str]) -> (f64, Child) {
    let start = Instant::now();
    let mut child = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("cannot start");
    let mut byte = [0];
    child.stdout.as_mut().unwrap().read_exact(&mut byte).expect("no byte");
    let took = start.elapsed().as_secs_f64() * 1e3;
    assert_eq!(byte, *b"V");
    (took, child)
}

/// The overhead once it no longer changes. Code that only start-up needed is released after a
/// moment without events.
fn settled(pid: u32) -> u64 {
    let mut last = overhead(pid);
    loop {
        std::thread::sleep(4 * vellum_sys::program::SETTLING);
        let now = overhead(pid);
        if now == last {
            return now;
        }
        last = now;
    }
}

/// The KiB of the process's proportional share of memory, without the mapping of the guest.
fn overhead(pid: u32) -> u64 {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).expect("smaps");
    let number = |line: &str| line.split_whitespace().nth(1).and_then(|n| n.parse::<u64>().ok());
    let (mut total, mut size) = (0, 0);
    for line in maps.lines() {
        match line.split(':').next() {
            Some("Size") => size = number(line).unwrap_or(0),
            // The guest's memory is one mapping of 128 MiB, or one for each slot.
            Some("Pss") if size < 100 << 10 => total += number(line).unwrap_or(0),
            _ => {}
        }
    }
    total
}

fn main() {
    // `cargo test --benches` runs every benchmark.
    if let Err(error) = vellum_kvm::vm::open() {
        println!("skipped: {error}");
        return;
    }
    let vellum = PathBuf::from(env!("CARGO_BIN_EXE_vellum"));
    let floor = match compiled(Path::new(env!("CARGO_TARGET_TMPDIR"))) {
        Ok(floor) => floor,
        Err(error) => {
            println!("skipped: the floor cannot be compiled: {error}; install gcc and libc6-dev");
            return;
        }
    };
    let vellum = installed(&vellum, Path::new(env!("CARGO_TARGET_TMPDIR")));
    let image = |name: &str, code: Code| {
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::write(&path, code.elf64()).expect("the image");
        path
    };
    let done = image("boot-done", Code::default().print("V").power_off());
    let spin = image("boot-spin", Code::default().print("V").spin());
    let run = |image: &Path, sandbox: &'static str| {
        let image = image.to_str().expect("a path in UTF-8").to_owned();
        ["run", "-m", "128", "--sandbox", sandbox, "-k"]
            .map(str::to_owned)
            .into_iter()
            .chain([image])
            .collect()
    };
    let subjects: [(&str, &Path, Vec<String>); 4] = [
        ("floor, same calls", &floor, vec!["same".into()]),
        ("floor, shortest", &floor, vec!["shortest".into()]),
        ("vellum, sandbox on", &vellum, run(&done, "on")),
        ("vellum, sandbox off", &vellum, run(&done, "off")),
    ];
    let mut samples = [const { Vec::new() }; 4];
    for _ in 0..ROUNDS {
        for ((_, program, args), samples) in subjects.iter().zip(&mut samples) {
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            let (took, mut child) = start(program, &args);
            samples.push(took);
            assert!(child.wait().expect("wait").success());
        }
    }
    let least = |samples: &[f64]| samples.iter().copied().fold(f64::INFINITY, f64::min);
    println!(
        "exec to the first byte on the serial port, 128 MiB, medians of {ROUNDS} (half lie between), started in turn:"
    );
    for ((name, ..), of) in subjects.iter().zip(&samples) {
        println!(
            "  {name:20} {:7.3} ms  least {:7.3}  {} times the same calls, {} times the shortest",
            median(of),
            least(of),
            multiples(of, &samples[0]),
            multiples(of, &samples[1])
        );
    }

    let args: Vec<String> = run(&spin, "on");
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let (_, mut child) = start(&vellum, &args);
    let first = overhead(child.id());
    println!(
        "proportional share of memory without the guest's: {first} KiB at the first byte, {} KiB when it has settled",
        settled(child.id())
    );
    child.kill().expect("kill");
    child.wait().expect("wait");
}
