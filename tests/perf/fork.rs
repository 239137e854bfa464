//! `cargo bench --bench fork` measures how soon a forked machine runs, compared with a machine that
//! is started, and what a further machine takes of the kernel's memory, compared with a bare VM.
//!
//! Starting: the time from exec of the command to the first byte on the serial port, which is the new
//! machine's first exit to Vellum. `vellum run` starts a kernel of a few bytes. `vellum fork` forks a
//! machine of the same size that has touched 256 MiB and then writes to no memory. Its guest waits for
//! another VM generation ID, which tells the new machine to write to its serial port. Both machines
//! have a memfd, of 1 GiB and of 8 GiB. The creation of KVM's memslot is a part of both
//! times, and is also measured apart: KVM_SET_USER_MEMORY_REGION for memory that nobody has touched,
//! in this process. A first fork creates the base. Before the later fork a byte on its serial port
//! tells the first machine to write to 1,000 pages, every second one, which are copied and not mapped.
//! The time to copy so many pages into a memfd and back is measured apart.
//!
//! The kernel's memory: what the memory control group of the new machine's processes is charged for
//! before the guest has run, and that of a process that makes a VM of this size with a vCPU, and
//! nothing else. It is skipped where no group can be made.
//!
//! The rivals take turns. The benchmark prints medians, and the median and quartiles of the ratio
//! in each round.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::{ChildStderr, Command, Stdio};
use std::time::Instant;

use support::cgroup::Group;
use support::env::{Machine, TestEnv};
use support::guests::Code;
use support::perf::floor::{installed, median, quartiles};
use support::{Failed, LIMIT, ensure, eventually};
use vellum_kvm::arch::layout;
use vellum_kvm::memory::{Backing, Memory, MemoryConfig};
use vellum_kvm::vm::Vm;
use vellum_sys::mmap::{Mapping, PAGE_SIZE, Source, memfd};

support::vellum!();

/// How often each machine is started.
const STARTS: usize = 15;

/// How often the kernel's memory is read.
const GROUPS: usize = 5;

/// The pages that the first machine writes to before it is forked again.
const CHANGED: u64 = 1000;

/// The argument with which this program is a bare VM of so many bytes.
const BARE: &str = "--bare-vm=";

/// The quartiles of the ratios of `one` to `other`, pair by pair.
fn ratios(one: &[f64], other: &[f64]) -> [f64; 3] {
    quartiles(one.iter().zip(other).map(|(one, other)| one / other).collect())
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

/// Writes to all memory from 8 MiB to 264 MiB, and then `V` to the serial port. For each byte that comes
/// there it writes to every second one of 2,000 pages, and then `W` to the port. In a machine with
/// another VM generation ID, it writes `V` to the port forever.
fn touches() -> Vec<u8> {
    // mov edi, VMGENID; mov rsi, [rdi]
    let mut code = vec![0xbf];
    code.extend((layout::VMGENID as u32).to_le_bytes());
    code.extend([0x48, 0x8b, 0x37]);
    // mov ebx, 8 MiB; fill: mov [rbx], ebx; add ebx, 4096; cmp ebx, 264 MiB; jb fill
    code.extend([0xbb, 0, 0, 0x80, 0, 0x89, 0x1b, 0x81, 0xc3, 0, 0x10, 0, 0]);
    code.extend([0x81, 0xfb, 0, 0, 0x80, 0x10, 0x72, 0xf0]);
    // mov dx, 0x3f8; mov al, 'V'; out dx, al
    code.extend([0x66, 0xba, 0xf8, 0x03, 0xb0, b'V', 0xee]);
    // wait: mov ecx, 256; again: cmp rsi, [rdi]; jne forked; dec ecx; jnz again
    code.extend([0xb9, 0, 1, 0, 0, 0x48, 0x3b, 0x37, 0x75, 0x2c, 0xff, 0xc9, 0x75, 0xf7]);
    // mov dx, 0x3fd; in al, dx; test al, 1; jz wait; mov dx, 0x3f8; in al, dx
    code.extend([0x66, 0xba, 0xfd, 0x03, 0xec, 0xa8, 1, 0x74, 0xe9, 0x66, 0xba, 0xf8, 0x03, 0xec]);
    // mov ebx, 8 MiB; write: inc dword [rbx]; add ebx, 8192; cmp ebx, 8 MiB + 1000 * 8192; jb write
    code.extend([0xbb, 0, 0, 0x80, 0, 0xff, 0x03, 0x81, 0xc3, 0, 0x20, 0, 0]);
    code.extend([0x81, 0xfb, 0, 0, 0xfd, 0, 0x72, 0xf0]);
    // mov al, 'W'; out dx, al; jmp wait
    code.extend([0xb0, b'W', 0xee, 0xeb, 0xca]);
    // forked: mov dx, 0x3f8; mov al, 'V'; on: out dx, al; jmp on
    code.extend([0x66, 0xba, 0xf8, 0x03, 0xb0, b'V', 0xee, 0xeb, 0xfd]);
    Code::default().bytes(&code).elf64()
}

/// The serial port of a machine, a pseudo-terminal.
struct Port {
    port: File,
    /// Kept open for what the machine has to say later.
    _says: BufReader<ChildStderr>,
}

impl Port {
    fn of(machine: &mut Machine) -> Result<Self, Failed> {
        let (mut says, mut line) =
            (BufReader::new(machine.child.stderr.take().ok_or("no pipe")?), String::new());
        says.read_line(&mut line)?;
        let name = line.trim().strip_prefix("vellum: the serial port is ").ok_or_else(|| line.clone())?;
        let port = File::options().read(true).write(true).custom_flags(libc::O_NOCTTY).open(name)?;
        Ok(Self { port, _says: says })
    }

    /// Waits for a byte, which must be this one.
    fn says(&self, expected: u8) -> Result<(), Failed> {
        let mut byte = [0];
        eventually(LIMIT, "the guest writes to its serial port", || {
            let mut poll = vellum_sys::poll::Poll::default();
            poll.readable(&self.port);
            let is_there = poll.wait(Some(std::time::Duration::from_millis(200)))?;
            Ok((is_there && (&self.port).read(&mut byte)? == 1).then_some(()))
        })?;
        ensure(byte[0] == expected, || format!("{byte:?}"))
    }
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

/// Milliseconds that KVM takes to create a memslot of `bytes`.
fn memslot(bytes: u64) -> Result<f64, Failed> {
    let config = MemoryConfig { backing: Backing::Memfd, ..MemoryConfig::new(bytes) };
    let memory = Memory::map(layout::RAM, config)?;
    let vm = vellum_host::kvm::create_vm(&vellum_kvm::vm::open()?)?;
    let start = Instant::now();
    let vm = Vm::over(vm, memory, None)?;
    let took = ms(start);
    drop(vm);
    Ok(took)
}

/// Milliseconds to copy so many pages out of a mapping into a memfd, and from there into another.
fn copying(pages: u64) -> Result<f64, Failed> {
    let len = pages * PAGE_SIZE;
    let [from, to] = [(); 2].map(|()| Mapping::new(len, PAGE_SIZE, Source::Anonymous));
    let (from, to, file) = (from?, to?, memfd(c"copied", len, None)?);
    from.populate(0, len)?;
    let mut page = vec![0; PAGE_SIZE as usize];
    let start = Instant::now();
    for at in (0..len).step_by(PAGE_SIZE as usize) {
        from.copy_to(at, &mut page);
        file.write_all_at(&page, at)?;
    }
    for at in (0..len).step_by(PAGE_SIZE as usize) {
        file.read_exact_at(&mut page, at)?;
        to.copy_from(at, &page);
    }
    Ok(ms(start))
}

/// Measures and prints the times for machines with this much memory.
fn starting(env: &TestEnv, vellum: &Path, memory: &str, bytes: u64) -> Result<(), Failed> {
    let (touches_all, prints) = (env.path("touches"), env.path("prints"));
    fs::write(&touches_all, touches())?;
    fs::write(&prints, Code::default().print("V").spin().elf64())?;
    let serial = env.path(&format!("serial-{memory}"));
    ensure(Command::new("mkfifo").arg(&serial).status()?.success(), || "mkfifo".into())?;
    let mut all = [const { Vec::new() }; 5];
    for round in 0..STARTS {
        let line = format!("run -k {} -m {memory},backing=memfd --serial pty", touches_all.display());
        let mut here = env.start("here", &mut env.command(&line))?;
        let port = Port::of(&mut here)?;
        port.says(b'V')?;
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
            (&port.port).write_all(b"x")?;
            port.says(b'W')?;
        }
        if round % 2 == 1 {
            all[0].push(first_byte(&mut run, &serial, false)?);
        }
        env.ctl("here stop")?;
        here.end()?;
        all[3].push(memslot(bytes)?);
        all[4].push(copying(CHANGED)?);
    }
    let [ran, first, later, memslot, copying] = all;
    println!(
        "{memory}, exec to the first byte: run {:.2} ms, forked {:.2} ms, forked again {:.2} ms ({STARTS} rounds)",
        median(&ran),
        median(&first),
        median(&later)
    );
    println!("  of which a memslot of {memory}: {:.2} ms in each", median(&memslot));
    let [ratio, low, high] = ratios(&first, &ran);
    println!(
        "  forked, of what it takes to run: {ratio:.3} (quartiles {low:.3} to {high:.3}); goal 1.5 at most"
    );
    let [ratio, low, high] = ratios(&later, &first);
    println!(
        "  again, after {CHANGED} changed pages, of the first time: {ratio:.3} (quartiles {low:.3} to {high:.3}); goal \
         1.3 at most, and copying the pages, which takes {:.2} ms",
        median(&copying)
    );
    Ok(())
}

/// Measures and prints the kernel's memory of a further machine.
fn kernel_memory(env: &TestEnv, vellum: &Path, memory: &str, bytes: u64) -> Result<(), Failed> {
    let write = "--passes 0 --workload write,rate=1000";
    let here = env.start("here", &mut env.command(&format!("run -m {memory},backing=memfd {write}")))?;
    env.has_written("here", 1000)?;
    let [mut forked, mut bare] = [const { Vec::new() }; 2];
    // The first fork changes the machine's mapping.
    for round in 0..=GROUPS {
        let group = Group::new()?;
        let mut command = group.command(vellum);
        command.env("XDG_RUNTIME_DIR", env.dir()).args(["fork", "here", "--name", "there", "--paused"]);
        ensure(command.stdout(Stdio::null()).status()?.success(), || "it was not forked".into())?;
        let takes = group.kernel()?;
        env.ctl("there stop")?;
        eventually(LIMIT, "it has ended", || Ok((!env.socket("there").exists()).then_some(())))?;
        let group = Group::new()?;
        let mut command = group.command(std::env::current_exe()?);
        let mut child =
            command.arg(format!("{BARE}{bytes}")).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        child.stdout.as_mut().ok_or("a pipe")?.read_exact(&mut [0])?;
        let takes_bare = group.kernel()?;
        drop(child.stdin.take());
        child.wait()?;
        if round > 0 {
            forked.push(takes as f64 / 1024.0);
            bare.push(takes_bare as f64 / 1024.0);
        }
    }
    env.ctl("here stop")?;
    here.end()?;
    let [ratio, low, high] = ratios(&forked, &bare);
    println!(
        "{memory}, the kernel's memory: a forked machine before it runs {:.0} KiB, a bare VM {:.0} KiB\n  ratio {ratio:.3} \
         (quartiles {low:.3} to {high:.3}, {GROUPS} rounds); goal 1.2 at most",
        median(&forked),
        median(&bare)
    );
    Ok(())
}

/// Is a bare VM until its standard input ends.
fn bare_vm(bytes: u64) -> Result<(), Failed> {
    let config = MemoryConfig { backing: Backing::Memfd, ..MemoryConfig::new(bytes) };
    let memory = Memory::map(layout::RAM, config)?;
    let vm = Vm::new(&vellum_kvm::vm::open()?, memory)?;
    let _vcpu = vm.create_vcpu(0)?;
    std::io::stdout().write_all(b"V")?;
    std::io::stdout().flush()?;
    Ok(std::io::stdin().read_to_end(&mut Vec::new()).map(drop)?)
}

fn main() -> Result<(), Failed> {
    if let Some(bytes) = std::env::args().find_map(|arg| arg.strip_prefix(BARE)?.parse().ok()) {
        return bare_vm(bytes);
    }
    // `cargo test --benches` only checks that every benchmark works.
    if let Err(error) = vellum_kvm::vm::open() {
        println!("skipped: {error}");
        return Ok(());
    }
    let env = TestEnv::new()?;
    let vellum = installed(Path::new(VELLUM), Path::new(env!("CARGO_TARGET_TMPDIR")));
    match Group::new() {
        Ok(_) => kernel_memory(&env, &vellum, "1g", 1 << 30)?,
        Err(why) => println!("the kernel's memory: skipped: {why}"),
    }
    starting(&env, &vellum, "1g", 1 << 30)?;
    starting(&env, &vellum, "8g", 8 << 30)
}
