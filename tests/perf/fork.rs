//! `cargo bench --bench fork` measures how soon a forked machine runs, compared with a machine that
//! is started.
//!
//! It measures the time from exec of the command to the first byte on the serial port: for `vellum
//! run` of a kernel of a few bytes, and for `vellum fork` of a machine of the same size that has
//! touched 192 MiB and writes to its serial port forever. It measures with 1 GiB and with 8 GiB,
//! where the creation of KVM's memslot is a part of both times. A first fork creates the base, and
//! a later fork finds it.
//!
//! The rivals take turns. The benchmark prints medians, and the median and quartiles of the ratio
//! in each round.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use support::env::TestEnv;
use support::guests::Code;
use support::perf::floor::{installed, quartiles};
use support::{Failed, LIMIT, ensure, eventually};

support::vellum!();

/// How often each machine is started.
const STARTS: usize = 15;

/// The quartiles of the ratios of `one` to `other`, pair by pair.
fn ratios(one: &[f64], other: &[f64]) -> [f64; 3] {
    quartiles(one.iter().zip(other).map(|(one, other)| one / other).collect())
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

/// Writes to all memory from 8 MiB to 200 MiB, then writes to the serial port forever.
fn touches() -> Vec<u8> {
    // mov ebx, 8 MiB; fill: mov [rbx], ebx; add ebx, 4096; cmp ebx, 200 MiB; jb fill
    let mut code = vec![0xbb, 0, 0, 0x80, 0, 0x89, 0x1b, 0x81, 0xc3, 0, 0x10, 0, 0];
    code.extend([0x81, 0xfb, 0, 0, 0x80, 0x0c, 0x72, 0xf0]);
    // mov dx, 0x3f8; mov al, 'V'; on: out dx, al; mov ecx, 65536; wait: dec ecx; jnz wait; jmp on
    code.extend([0x66, 0xba, 0xf8, 0x03, 0xb0, b'V', 0xee, 0xb9, 0, 0, 1, 0, 0xff, 0xc9, 0x75, 0xfc]);
    code.extend([0xeb, 0xf6]);
    Code::default().bytes(&code).elf64()
}

/// Milliseconds until the first byte comes through the pipe `serial` of the machine that `command`
/// starts. `ends` says whether the command ends by itself then.
fn first_byte(command: &mut Command, serial: &Path, ends: bool) -> Result<f64, Failed> {
    // The pipe is opened before the machine checks for a reader. It is read after there is a
    // writer.
    let reader = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(serial)?;
    let start = Instant::now();
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn()?;
    let mut byte = [0];
    let took = eventually(LIMIT, "the first byte comes", || {
        let mut poll = vellum_sys::poll::Poll::default();
        poll.readable(&reader);
        poll.wait(Some(std::time::Duration::from_millis(200)))?;
        Ok(matches!((&reader).read(&mut byte), Ok(1)).then(|| ms(start)))
    })?;
    ensure(byte == *b"V", || format!("{byte:?}"))?;
    if ends {
        child.wait()?;
    } else {
        child.kill()?;
        child.wait()?;
    }
    Ok(took)
}

/// Measures and prints the times for machines with this much memory.
fn starting(env: &TestEnv, vellum: &Path, memory: &str) -> Result<(), Failed> {
    let (touches_all, prints) = (env.path("touches"), env.path("prints"));
    fs::write(&touches_all, touches())?;
    fs::write(&prints, Code::default().print("V").spin().elf64())?;
    let serial = env.path(&format!("serial-{memory}"));
    ensure(Command::new("mkfifo").arg(&serial).status()?.success(), || "mkfifo".into())?;
    let mut all = [const { Vec::new() }; 3];
    for round in 0..STARTS {
        let out = env.path("out");
        let line = format!(
            "run -k {} -m {memory},backing=memfd --serial file={}",
            touches_all.display(),
            out.display()
        );
        let here = env.start("here", &mut env.command(&line))?;
        eventually(LIMIT, "it has written", || Ok((fs::metadata(&out)?.len() > 0).then_some(())))?;
        let fork = |name: &str| {
            let mut command = Command::new(vellum);
            command.env("XDG_RUNTIME_DIR", env.dir()).args(["fork", "here", "--name", name, "--serial"]);
            command.arg(format!("file={}", serial.display()));
            command
        };
        let mut run = Command::new(vellum);
        run.args(["run", "-m", &format!("{memory},backing=memfd"), "-k"]).arg(&prints).arg("--serial");
        run.arg(format!("file={}", serial.display()));
        if round % 2 == 0 {
            all[0].push(first_byte(&mut run, &serial, false)?);
        }
        for (which, name) in [(1, "first"), (2, "later")] {
            all[which].push(first_byte(&mut fork(name), &serial, true)?);
            env.ctl(&format!("{name} stop"))?;
            let socket = env.socket(name);
            eventually(LIMIT, "it has ended", || Ok((!socket.exists()).then_some(())))?;
        }
        if round % 2 == 1 {
            all[0].push(first_byte(&mut run, &serial, false)?);
        }
        env.ctl("here stop")?;
        here.end()?;
        fs::remove_file(out)?;
    }
    let [ran, first, later] = all;
    let median = |of: &[f64]| quartiles(of.to_vec())[0];
    println!(
        "{memory}, exec to the first byte: run {:.2} ms, forked {:.2} ms, forked again {:.2} ms ({STARTS} rounds)",
        median(&ran),
        median(&first),
        median(&later)
    );
    let [ratio, low, high] = ratios(&first, &ran);
    println!(
        "  forked, of what it takes to run: {ratio:.3} (quartiles {low:.3} to {high:.3}); goal 1.5 at most"
    );
    let [ratio, low, high] = ratios(&later, &first);
    println!("  again, of the first time: {ratio:.3} (quartiles {low:.3} to {high:.3}); goal 1.3 at most");
    Ok(())
}

fn main() -> Result<(), Failed> {
    // `cargo test --benches` only checks that every benchmark works.
    if let Err(error) = vellum_kvm::vm::open() {
        println!("skipped: {error}");
        return Ok(());
    }
    let env = TestEnv::new()?;
    let vellum = installed(Path::new(VELLUM), Path::new(env!("CARGO_TARGET_TMPDIR")));
    starting(&env, &vellum, "1g")?;
    starting(&env, &vellum, "8g")
}
