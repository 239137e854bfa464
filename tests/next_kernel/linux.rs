//! Debian's kernels as guests that outlive their host's kernel, while they write memory and a disk.

use std::fs::{self, File, FileTimes};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use guest_agent::{Event, MemoryWork, Pattern, Request};
use serde::{Deserialize, Serialize};
use support::env::{Process, TestEnv};
use support::kexec;
use support::linux::{WORKERS, empty, for_this_bed, holds};
use support::{Failed, LIMIT, Need, ensure, eventually, test};
use vellum_sys::clock;

use crate::hang::Watch;
use crate::machines::{kept, refuses, restore, succeeds};

/// How often the kernel is replaced.
const KEXECS: u32 = 10;

/// The machine's name.
const NAME: &str = "linux";

/// The tap, and the addresses of host and guest.
const TAP: &str = "vellum-lu";
const HOST: &str = "192.168.78.1";
const GUEST: &str = "192.168.78.2";

/// How far the guest's clock may deviate from the host's, in seconds.
const CLOCK: f64 = 0.05;

/// Longer than the guest's kernel lets a CPU or a grace period be without progress (20 s and 21 s).
const LONG: Duration = Duration::from_secs(25);

/// The guest's kernel and initramfs.
fn image(version: &str) -> Result<PathBuf, String> {
    let dir = std::env::var_os("VELLUM_GUESTS").map(|dir| Path::new(&dir).join(version));
    dir.filter(|dir| dir.is_dir())
        .ok_or(format!("needs a guest with Linux {version}: cargo lab test live-update"))
}

fn has(version: &str) -> Need {
    kexec::host()?;
    image(version).map(drop)
}

#[test(has("6.1"))]
fn linux_6_1_outlives_ten_kernels() -> Result<(), Failed> {
    outlives("6.1")
}

#[test(has("6.12"))]
fn linux_6_12_outlives_ten_kernels() -> Result<(), Failed> {
    outlives("6.12")
}

/// What is known of the guest when it is saved.
#[derive(Debug, Serialize, Deserialize)]
struct Before {
    /// How far its uptime is ahead of the host's real time.
    ahead: [f64; 2],
    /// The number that the disk's writer has flushed.
    flushed: u64,
    /// What its kernel complains about.
    complaints: String,
    /// The host's real time after the save.
    saved: f64,
}

/// A guest with 2 vCPUs outlives ten kexecs while the agent writes memory, and others write a disk
/// and check the clocks. Its clock advances by the time that passed, but for the last time.
fn outlives(version: &str) -> Result<(), Failed> {
    let (env, past) = (TestEnv::new()?, kexec::past());
    let guest = Guest { env: &env };
    tap()?;
    let (serial, _watch) = match past {
        0 => guest.boots(version)?,
        _ => guest.comes_back(past)?,
    };
    guest.works(&serial).inspect_err(|_| eprintln!("the guest said:\n{}", serial.tail()))?;
    if past == KEXECS {
        return guest.ends(&serial);
    }
    // An open connection ends with this kernel, on the guest's side too.
    std::mem::forget(Process::spawn(
        env.command(&format!("exec {NAME} -- sleep 86400")).stdout(Stdio::null()).stderr(Stdio::null()),
    )?);
    eventually(LIMIT, "the command runs", || Ok((guest.sleepers()? > 0).then_some(())))?;
    // As an operator does: what cannot be loaded is known before the save. The host's one CPU hashes the
    // next kernel for seconds meanwhile, of which the guest's kernel complains.
    kexec::load(&kexec::next()?)?;
    let (flushed, complaints, ahead) = (guest.flushed()?, guest.complaints()?, guest.ahead()?);
    let said = succeeds(&env, &format!("live-update save {NAME} --detach"))?;
    let saved = seconds();
    eprint!("{said}");
    serde_json::to_writer(File::create(kept("before"))?, &Before { ahead, flushed, complaints, saved })?;
    if past == 0 {
        while seconds() < saved + LONG.as_secs_f64() {
            std::thread::sleep(Duration::from_millis(100));
        }
    }
    Err(kexec::go_on())
}

/// The machine.
struct Guest<'a> {
    env: &'a TestEnv,
}

/// What the guest says on its serial port, and where it is typed to.
struct Serial {
    heard: Arc<Mutex<String>>,
    port: File,
}

impl Serial {
    /// The pseudo-terminal that `log` names.
    fn open(log: &str) -> Result<Self, Failed> {
        let path = log.lines().find_map(|line| line.split_once("the serial port is ")).ok_or(log)?.1;
        let port = File::options().read(true).write(true).open(path)?;
        let (heard, mut from) = (Arc::<Mutex<String>>::default(), port.try_clone()?);
        let to = heard.clone();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = from.read(&mut bytes) {
                *to.lock().unwrap_or_else(PoisonError::into_inner) +=
                    &String::from_utf8_lossy(&bytes[..count]);
            }
        });
        Ok(Self { heard, port })
    }

    /// The last lines.
    fn tail(&self) -> String {
        let heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        let lines: Vec<_> = heard.lines().collect();
        lines[lines.len().saturating_sub(60)..].join("\n")
    }

    fn events(&self) -> Vec<Event> {
        let heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        let lines = heard.lines().filter_map(|line| Some(&line[line.find("{\"event\"")?..]));
        // The first and the last line may lack a part.
        lines.filter_map(|line| serde_json::from_str(line).ok()).collect()
    }
}

impl Guest<'_> {
    /// Starts it, and its work.
    fn boots(&self, version: &str) -> Result<(Serial, Watch), Failed> {
        let (dir, disk) = (image(version)?, kept("disk"));
        empty(&disk)?;
        let (flags, cmdline) = for_this_bed();
        let mut command =
            self.env.command("run --cpus 2 --memory 320m,backing=memfd --serial pty --rng --balloon");
        command.args(flags).arg(format!("--params=quiet {cmdline}"));
        command.arg("--kernel").arg(dir.join("vmlinuz")).arg("--initrd").arg(dir.join("initrd"));
        command.arg("--disk").arg(disk).arg("--vsock").arg(kept("vsock"));
        command.args(["--net", &format!("tap={TAP},mac=02:00:00:00:78:02")]);
        let mut machine = self.env.start(NAME, &mut command)?;
        let mut line = String::new();
        BufReader::new(machine.child.stderr.take().ok_or("it is piped")?).read_line(&mut line)?;
        // It ends with the kernel.
        std::mem::forget(machine);
        let mut serial = Serial::open(&line)?;
        eventually(LIMIT, "the agent is ready", || {
            let ready =
                |event: &Event| matches!(event, Event::Ready { failed_modules } if failed_modules.is_empty());
            Ok(serial.events().iter().any(ready).then_some(()))
        })?;
        self.shell(&format!("ip addr add {GUEST}/24 dev eth0 && ip link set eth0 up"))?;
        self.shell(
            "dd if=/dev/urandom of=/tmp/data bs=1M count=48 2>/dev/null && sha256sum /tmp/data > /tmp/sum",
        )?;
        self.shell(WORKERS)?;
        self.shell("until [ -e /tmp/flushed ]; do :; done")?;
        // The request goes over the serial port, which outlives the kernel with the guest.
        let work = MemoryWork {
            mib: 64,
            rate_mib: 8,
            pattern: Pattern::Random,
            seconds: 1_000_000,
            seed: 1,
            until: Some("/enough".into()),
        };
        writeln!(serial.port, "{}", serde_json::to_string(&Request::Memory(work))?)?;
        let watch = self.watch(&serial);
        Ok((serial, watch))
    }

    /// Watches it. From now on its memory's writer says something each second.
    fn watch(&self, serial: &Serial) -> Watch {
        let heard = serial.heard.clone();
        let length = move || heard.lock().unwrap_or_else(PoisonError::into_inner).len();
        Watch::start(self.env.socket(NAME), length)
    }

    /// Restores it, and compares it with what it was.
    fn comes_back(&self, past: u32) -> Result<(Serial, Watch), Failed> {
        let before: Before = serde_json::from_slice(&fs::read(kept("before"))?)?;
        if past == 1 {
            self.is_refused_with_another_disk()?;
        }
        let (start, stands) = (seconds(), past == KEXECS);
        let clock = if stands { "stand-still" } else { "advance" };
        let said = succeeds(self.env, &restore(&format!("{NAME} --clock {clock}")))?;
        eprint!("kernel {past}, after {:.1} s: {said}", start - before.saved);
        let serial = Serial::open(&fs::read_to_string(self.env.path(&format!("vellum/{NAME}.log")))?)?;
        let watch = self.watch(&serial);
        let [from, to] = self.ahead()?;
        let [least, most] = before.ahead;
        let gone = if stands { start - before.saved } else { 0.0 };
        let difference = [from - most + gone, to - least + gone];
        eprintln!("its clock: {:.3} to {:.3} s ahead of what it was", difference[0], difference[1]);
        // Of time that it stands still for, a part before the save and after the start is not known.
        ensure(difference[0] <= CLOCK && (stands || difference[1] >= -CLOCK), || {
            format!("its clock is {difference:?} s ahead of what it was")
        })?;
        let complaints = self.complaints()?;
        ensure(complaints == before.complaints, || {
            format!("its kernel complains:\n{complaints}\nand did before:\n{}", before.complaints)
        })?;
        let still = self.flushed()?;
        ensure(still >= before.flushed, || format!("{still} is flushed, and {} was", before.flushed))?;
        eventually(LIMIT, "the guest knows that its vsock connection is gone", || {
            Ok((self.sleepers()? == 0).then_some(()))
        })?;
        Ok((serial, watch))
    }

    /// A disk that was written to since is named. With the disk as it was, the machine runs.
    fn is_refused_with_another_disk(&self) -> Result<(), Failed> {
        let disk = File::options().write(true).open(kept("disk"))?;
        let was = disk.metadata()?.modified()?;
        disk.set_times(FileTimes::new().set_modified(was + Duration::from_secs(1)))?;
        refuses(self.env, &restore(NAME), 2, "has been written to since")?;
        Ok(disk.set_times(FileTimes::new().set_modified(was))?)
    }

    /// All of its work goes on, and nothing is wrong.
    fn works(&self, serial: &Serial) -> Result<(), Failed> {
        self.shell("sha256sum -c /tmp/sum && ! cat /tmp/backwards 2>/dev/null")?;
        let flushed = self.flushed()?;
        eventually(LIMIT, "the disk's writer goes on", || Ok((self.flushed()? > flushed + 3).then_some(())))?;
        let seconds = eventually(LIMIT, "the memory's writer goes on", || {
            let told = serial.events().into_iter().filter_map(|event| match event {
                Event::Memory { second, wrong, .. } => Some((second, wrong)),
                _ => None,
            });
            let told: Vec<_> = told.collect();
            ensure(self.env.standing(NAME).is_some(), || "it has ended".into())?;
            Ok((told.len() >= 2).then_some(told))
        })?;
        ensure(seconds.iter().all(|(_, wrong)| *wrong == 0), || format!("pages are wrong: {seconds:?}"))?;
        ensure(seconds.is_sorted(), || format!("{seconds:?}"))?;
        self.shell("dd if=/dev/hwrng bs=64 count=1 2>/dev/null | sha256sum")?;
        // A guest whose network works refuses a connection to a closed port at once.
        let closed: SocketAddr = format!("{GUEST}:9").parse()?;
        eventually(LIMIT, "the guest's network answers", || {
            let answer = TcpStream::connect_timeout(&closed, Duration::from_secs(1));
            Ok(answer.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionRefused).then_some(()))
        })
    }

    /// Ends its work and the machine. What it has flushed is on the disk.
    fn ends(&self, serial: &Serial) -> Result<(), Failed> {
        self.shell("touch /enough")?;
        eventually(LIMIT, "the memory's writer ends", || {
            Ok(serial.events().contains(&Event::Done).then_some(()))
        })?;
        let flushed = self.flushed()?;
        eprintln!("{flushed} sectors were written");
        self.env.ctl(&format!("{NAME} stop"))?;
        eventually(LIMIT, "it ends", || Ok(self.env.standing(NAME).is_none().then_some(())))?;
        holds(&kept("disk"), flushed)
    }

    /// Runs a shell line in the guest by its agent. It must succeed.
    fn shell(&self, line: &str) -> Result<String, Failed> {
        let output = self.env.command(&format!("exec {NAME} -- sh -c")).arg(line).output()?;
        ensure(output.status.success(), || format!("`{line}`: {output:?}"))?;
        Ok(String::from_utf8(output.stdout)?)
    }

    /// The last number that was written to the disk and flushed.
    fn flushed(&self) -> Result<u64, Failed> {
        Ok(self.shell("cat /tmp/flushed")?.trim().parse()?)
    }

    /// The number of commands that a connection keeps.
    fn sleepers(&self) -> Result<usize, Failed> {
        Ok(self.shell("pidof sleep; true")?.split_whitespace().count())
    }

    /// The messages of its kernel about time, CPUs and disks that stand still.
    fn complaints(&self) -> Result<String, Failed> {
        self.shell(
            "dmesg | grep -E 'soft lockup|hard LOCKUP|rcu.*(stall|detected)|clocksource: timekeeping|_nsec:|unstable|blocked for more|I/O error|BUG|Call Trace'; true",
        )
    }

    /// How far its uptime is ahead of the host's real time: at least and at most.
    fn ahead(&self) -> Result<[f64; 2], Failed> {
        let mut all = [f64::MIN, f64::MAX];
        for _ in 0..5 {
            let before = seconds();
            let uptime = self.shell("cat /proc/uptime")?;
            let after = seconds();
            let uptime: f64 = uptime.split_whitespace().next().unwrap_or_default().parse()?;
            // It has two digits, which are cut and not rounded.
            all = [all[0].max(uptime - after), all[1].min(uptime + 0.01 - before)];
        }
        Ok(all)
    }
}

/// The host's real time in seconds.
fn seconds() -> f64 {
    clock::realtime().as_secs_f64()
}

/// Makes the guest's side of the network. It is lost with the kernel.
fn tap() -> Result<(), Failed> {
    for line in [
        format!("tunctl -t {TAP}"),
        format!("ip addr add {HOST}/24 dev {TAP}"),
        format!("ip link set {TAP} up"),
    ] {
        let words: Vec<&str> = line.split(' ').collect();
        let output = Command::new(words[0]).args(&words[1..]).output()?;
        ensure(output.status.success(), || format!("{line}: {output:?}"))?;
    }
    Ok(())
}
