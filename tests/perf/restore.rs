//! `cargo bench --bench restore` measures a guest that is restored and then uses its working set,
//! for each way to load its memory.
//!
//! A kernel of a few bytes has written to all of its 512 MiB. It then writes in rounds to every
//! eighth page, and writes a byte to its serial port after each round. The benchmark measures the
//! time from the start of `vellum restore` to the second byte, so at least one round is complete.
//! It measures with all of the snapshot's pages in the page cache, and with none (`dd
//! oflag=nocache`).
//!
//! The rivals take turns. The benchmark prints medians with quartiles, and the median of the ratio
//! in each round of demand with `--prefetch` to demand without.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use support::env::TestEnv;
use support::guests::Code;
use support::perf::floor::quartiles;
use support::{Failed, LIMIT, ensure, eventually};
use vellum_migration::snapshot::working_set;

support::vellum!();

const ROUNDS: usize = 15;
const WAYS: [&str; 4] = ["eager", "map", "demand", "demand --prefetch"];

/// Writes to each page of 512 MiB except the first 8 MiB, and then in rounds to every eighth page.
fn kernel() -> Vec<u8> {
    // mov ebx, 8 MiB; fill: mov [rbx], ebx; add ebx, 4096; cmp ebx, 512 MiB; jb fill
    let mut code = vec![0xbb, 0, 0, 0x80, 0, 0x89, 0x1b, 0x81, 0xc3, 0, 0x10, 0, 0];
    code.extend([0x81, 0xfb, 0, 0, 0, 0x20, 0x72, 0xf0]);
    // mov dx, 0x3f8; round: out dx, al; mov ebx, 8 MiB
    code.extend([0x66, 0xba, 0xf8, 0x03, 0xee, 0xbb, 0, 0, 0x80, 0]);
    // next: add dword [rbx], 1; add ebx, 32768; cmp ebx, 512 MiB; jb next; jmp round
    code.extend([
        0x83, 0x03, 1, 0x81, 0xc3, 0, 0x80, 0, 0, 0x81, 0xfb, 0, 0, 0, 0x20, 0x72, 0xef, 0xeb, 0xe7,
    ]);
    Code::default().bytes(&code).elf64()
}

fn len(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |data| data.len())
}

/// Removes all of `file` from the page cache.
fn forget(file: &Path) -> Result<(), Failed> {
    let to = format!("of={}", file.display());
    let output =
        Command::new("dd").args([&to, "oflag=nocache", "conv=notrunc,fdatasync", "count=0"]).output()?;
    ensure(output.status.success(), || format!("{output:?}"))
}

/// Milliseconds until a restored machine has finished at least one whole round.
fn round(env: &TestEnv, dir: &Path, how: &str) -> Result<f64, Failed> {
    let serial = env.path("again.out");
    let _ = fs::remove_file(&serial);
    let line =
        format!("restore {} --serial file={} --name again --memory {how}", dir.display(), serial.display());
    let start = Instant::now();
    let machine = support::env::Process::spawn(&mut env.command(&line))?;
    while len(&serial) < 2 {
        ensure(start.elapsed() < LIMIT, || format!("{how}: it does not go round"))?;
        std::thread::sleep(std::time::Duration::from_micros(100));
    }
    let took = start.elapsed().as_secs_f64() * 1e3;
    env.ctl("again stop")?;
    machine.output()?;
    Ok(took)
}

fn main() -> Result<(), Failed> {
    // `cargo test --benches` only checks that every benchmark works.
    if let Err(error) = vellum_kvm::vm::open() {
        println!("skipped: {error}");
        return Ok(());
    }
    let env = TestEnv::new()?;
    let (image, out, dir) = (env.path("kernel"), env.path("out"), env.path("snap"));
    fs::write(&image, kernel())?;
    let line = format!("run --kernel {} --memory 512m --serial file={}", image.display(), out.display());
    let here = env.start("here", &mut env.command(&line))?;
    eventually(LIMIT, "it goes round", || Ok((len(&out) > 2).then_some(())))?;
    let saved = env.vellum(&format!("snapshot here {} --stop --downtime 10s", dir.display()))?;
    ensure(saved.status.success(), || format!("{saved:?}"))?;
    here.end()?;
    let line = format!("restore {} --serial null --memory demand --record=3s", dir.display());
    let records = env.start("records", &mut env.command(&line))?;
    eventually(LIMIT, "it is recorded", || Ok(dir.join(working_set::NAME).exists().then_some(())))?;
    env.ctl("records stop")?;
    records.end()?;
    println!("working set: {} bytes of a record", len(&dir.join(working_set::NAME)));
    for cached in [true, false] {
        let mut all = WAYS.map(|_| Vec::new());
        for turn in 0..ROUNDS {
            for at in 0..WAYS.len() {
                let way = (turn + at) % WAYS.len();
                if !cached {
                    forget(&dir.join("ram-0"))?;
                }
                all[way].push(round(&env, &dir, WAYS[way])?);
            }
        }
        let ratios = all[3].iter().zip(&all[2]).map(|(with, without)| with / without).collect();
        println!("the snapshot is {}in the page cache:", if cached { "" } else { "not " });
        for (way, samples) in WAYS.iter().zip(all) {
            let [median, low, high] = quartiles(samples);
            println!("  {way:18} {median:8.1} ms (quartiles {low:.1} to {high:.1}, {ROUNDS} rounds)");
        }
        let [ratio, low, high] = quartiles(ratios);
        println!("  with --prefetch, of what it takes without: {ratio:.3} (quartiles {low:.3} to {high:.3})");
    }
    Ok(())
}
