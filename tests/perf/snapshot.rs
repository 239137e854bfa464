//! `cargo bench --bench snapshot` measures the cost of writing a snapshot, and how soon a machine
//! runs whose memory is mapped from the snapshot's files.
//!
//! - It saves a paused guest of 512 MiB that has written to all of its memory. The rival is a
//!   process that writes as many bytes of memory to a file, one mebibyte at a time, and syncs them
//!   to the disk (pwrite(2), fsync(2)).
//! - It measures the time from exec to the first byte on the serial port: for `vellum run` of a
//!   kernel of a few bytes with 256 MiB, and for `vellum restore --memory map` of a machine of 256
//!   MiB and of one of 8 GiB. Both have touched 192 MiB, and their files are in the page cache. The
//!   time of `vellum run` with 8 GiB is a lower bound for the larger machine.
//!
//! The rivals take turns. The benchmark prints medians, and the median and quartiles of the ratio
//! in each round.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use support::env::TestEnv;
use support::guests::Code;
use support::perf::floor::installed;
use support::perf::floor::quartiles;
use support::{Failed, LIMIT, ensure, eventually};
use vellum_sys::mmap::PAGE_SIZE;

support::vellum!();

/// The bytes that are written, the block size of the simple writer, and the number of rounds.
const BYTES: u64 = 512 << 20;
const BLOCK: usize = 1 << 20;
const WRITES: usize = 9;
/// How often each machine is started.
const STARTS: usize = 60;

/// The quartiles of the ratios of `one` to `other`, pair by pair.
fn ratios(one: &[f64], other: &[f64]) -> [f64; 3] {
    quartiles(one.iter().zip(other).map(|(one, other)| one / other).collect())
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

/// Writes as many bytes as the guest has. Returns the milliseconds.
fn bare(file: &Path, content: &[u8]) -> Result<f64, Failed> {
    let start = Instant::now();
    let to = File::create_new(file)?;
    for at in (0..BYTES).step_by(BLOCK) {
        to.write_all_at(&content[at as usize..][..BLOCK], at)?;
    }
    to.sync_all()?;
    let took = ms(start);
    fs::remove_file(file)?;
    Ok(took)
}

fn writing(env: &TestEnv) -> Result<(), Failed> {
    let line = "run --memory 512m --passes 0 --workload write,order=sequential";
    let here = env.start("here", &mut env.command(line))?;
    let mut client = env.listen("here")?;
    eventually(LIMIT, "it has written to all of its memory", || {
        Ok((client.line()?["done"].as_u64() >= Some(BYTES / PAGE_SIZE)).then_some(()))
    })?;
    env.ctl("here pause")?;
    let content: Vec<u8> = (0..BYTES / 8).flat_map(|word| word.to_ne_bytes()).collect();
    // Both are on the disk with the compiler's output. A file system in memory would measure
    // nothing.
    let at = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let (dir, file) = (at.join("saved"), at.join("bare"));
    let (mut saved, mut written) = (Vec::new(), Vec::new());
    for round in 0..WRITES {
        for turn in 0..2 {
            if (round + turn) % 2 == 0 {
                let _ = fs::remove_dir_all(&dir);
                let start = Instant::now();
                let output = env.vellum(&format!("snapshot here {}", dir.display()))?;
                saved.push(ms(start));
                ensure(output.status.success(), || format!("{output:?}"))?;
            } else {
                let _ = fs::remove_file(&file);
                written.push(bare(&file, &content)?);
            }
        }
    }
    fs::remove_dir_all(&dir)?;
    drop(here);
    let ([ours, ..], [theirs, ..]) = (quartiles(saved.clone()), quartiles(written.clone()));
    let [ratio, low, high] = ratios(&written, &saved);
    println!(
        "512 MiB, a snapshot: {ours:.0} ms; pwrite and fsync: {theirs:.0} ms; as fast as that {ratio:.3} times (quartiles {low:.3} to \
         {high:.3}, {WRITES} rounds); goal 0.9 at least"
    );
    Ok(())
}

/// Writes to all memory from 8 MiB to 200 MiB, then writes to the serial port forever.
fn touches() -> Vec<u8> {
    // mov ebx, 8 MiB; fill: mov [rbx], ebx; add ebx, 4096; cmp ebx, 200 MiB; jb fill
    let mut code = vec![0xbb, 0, 0, 0x80, 0, 0x89, 0x1b, 0x81, 0xc3, 0, 0x10, 0, 0];
    code.extend([0x81, 0xfb, 0, 0, 0x80, 0x0c, 0x72, 0xf0]);
    // mov dx, 0x3f8; mov al, 'V'; on: out dx, al; jmp on
    code.extend([0x66, 0xba, 0xf8, 0x03, 0xb0, b'V', 0xee, 0xeb, 0xfd]);
    Code::default().bytes(&code).elf64()
}

/// Milliseconds until the first byte of a machine.
fn first_byte(command: &mut Command) -> Result<f64, Failed> {
    let start = Instant::now();
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
    let mut byte = [0];
    let came = child.stdout.as_mut().ok_or("piped")?.read_exact(&mut byte);
    let took = ms(start);
    child.kill()?;
    let status = child.wait()?;
    ensure(came.is_ok() && byte == *b"V", || format!("{byte:?}, {status:?}"))?;
    Ok(took)
}

fn starting(env: &TestEnv) -> Result<(), Failed> {
    let (touches_all, prints) = (env.path("touches"), env.path("prints"));
    fs::write(&touches_all, touches())?;
    fs::write(&prints, Code::default().print("V").spin().elf64())?;
    let vellum = installed(Path::new(VELLUM), Path::new(env!("CARGO_TARGET_TMPDIR")));
    let dir = |memory: &str| PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("shown-{memory}"));
    for memory in ["256m", "8g"] {
        let _ = fs::remove_dir_all(dir(memory));
        let out = env.path("out");
        let line =
            format!("run -k {} --memory {memory} --serial file={}", touches_all.display(), out.display());
        let here = env.start("here", &mut env.command(&line))?;
        eventually(LIMIT, "it has written", || Ok((fs::metadata(&out)?.len() > 0).then_some(())))?;
        let saved = env.vellum(&format!("snapshot here {} --stop --downtime 1m", dir(memory).display()))?;
        ensure(saved.status.success(), || format!("{saved:?}"))?;
        here.end()?;
        fs::remove_file(out)?;
    }
    let run = |memory: &str| {
        let mut command = Command::new(&vellum);
        command.args(["run", "-m", memory, "-k"]).arg(&prints);
        command
    };
    let restore = |memory: &str| {
        let mut command = Command::new(&vellum);
        command.arg("restore").arg(dir(memory)).args(["--memory", "map"]);
        command
    };
    let mut all = [const { Vec::new() }; 4];
    for round in 0..STARTS {
        for turn in 0..4 {
            let which = (round + turn) % 4;
            let mut command = match which {
                0 => run("256m"),
                1 => restore("256m"),
                2 => restore("8g"),
                _ => run("8g"),
            };
            all[which].push(first_byte(&mut command)?);
        }
    }
    for memory in ["256m", "8g"] {
        fs::remove_dir_all(dir(memory))?;
    }
    let [ran, small, large, ran_large] = all;
    let median = |of: &[f64]| quartiles(of.to_vec())[0];
    println!(
        "exec to the first byte: run, 256 MiB {:.2} ms, 8 GiB {:.2} ms; restored by map, {:.2} and {:.2} ms ({STARTS} rounds)",
        median(&ran),
        median(&ran_large),
        median(&small),
        median(&large)
    );
    let [ratio, low, high] = ratios(&small, &ran);
    println!(
        "  256 MiB restored, of what it takes to run: {ratio:.3} (quartiles {low:.3} to {high:.3}); goal 1.5 at most"
    );
    let [ratio, low, high] = ratios(&large, &small);
    println!("  8 GiB, of what 256 MiB take: {ratio:.3} (quartiles {low:.3} to {high:.3}); goal 1.2 at most");
    let [ratio, low, high] = ratios(&ran_large, &ran);
    println!("  the same of run: {ratio:.3} (quartiles {low:.3} to {high:.3})");
    Ok(())
}

fn main() -> Result<(), Failed> {
    // `cargo test --benches` only checks that every benchmark works.
    if let Err(error) = vellum_kvm::vm::open() {
        println!("skipped: {error}");
        return Ok(());
    }
    let env = TestEnv::new()?;
    starting(&env)?;
    writing(&env)
}
