//! A Linux guest is forked while it works. Each machine keeps its data, its clock continues, its
//! devices work, and its random numbers differ from the others'.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Output, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

use support::{Failed, Scratch, ensure};

use crate::VELLUM;
use crate::guest::{Guest, Image, for_this_bed, noise, scratch, short_name};

/// The size of the data whose checksum the guest keeps.
const DATA_MIB: u64 = 16;

/// A forked machine, which is stopped on drop.
struct Forked<'a> {
    guest: &'a Guest,
    name: String,
}

impl<'a> Forked<'a> {
    /// Forks machine `from`. The new machine gets a vsock in `scratch`.
    fn of(guest: &'a Guest, from: &str, name: String, scratch: &Scratch) -> Result<Self, Failed> {
        let vsock = scratch.path(&name).display().to_string();
        let devices = ["--vsock", &vsock, "--rng", "--balloon", "--serial", "null"];
        let output = guest.vellum(&[&["fork", from, "--name", &name][..], &devices].concat())?;
        ensure(output.status.success(), || format!("{output:?}"))?;
        eprintln!("{}", String::from_utf8_lossy(&output.stdout).trim());
        Ok(Self { guest, name })
    }

    fn shell(&self, line: &str) -> Result<String, Failed> {
        let output = self.guest.vellum(&["exec", &self.name, "--", "sh", "-c", line])?;
        ensure(output.status.success(), || format!("{}: `{line}`: {output:?}", self.name))?;
        Ok(String::from_utf8(output.stdout)?)
    }
}

impl Drop for Forked<'_> {
    fn drop(&mut self) {
        let _ = self.guest.vellum(&["ctl", &self.name, "stop"]);
    }
}

fn seconds(uptime: &str) -> Result<f64, Failed> {
    Ok(uptime.split_whitespace().next().unwrap_or_default().parse()?)
}

const UPTIME: &str = "cat /proc/uptime";
const RANDOM: &str = "head -c 32 /dev/urandom | sha256sum";

/// A guest with 2 vCPUs is forked twice while it works, and one of the new machines once more.
pub fn while_it_works(image: &Image, irqchip: &str) -> Result<(), Failed> {
    let scratch = scratch()?;
    let flags = ["--cpus", "2", "--memory", "256m,backing=memfd", "--irqchip", irqchip, "--rng", "--balloon"];
    let mut guest = Guest::start(image, "", &flags)?;
    guest.ready()?;
    guest.shell(&format!(
        "dd if=/dev/urandom of=/tmp/data bs=1M count={DATA_MIB} 2>/dev/null && sha256sum /tmp/data > /tmp/sum"
    ))?;
    // The guest writes to memory all the time.
    guest.shell("(while :; do cat /tmp/data > /tmp/other; done) > /dev/null 2>&1 &")?;
    let name = |nth: usize| format!("{}-{nth}", guest.name());
    let (mut forked, mut random): (Vec<Forked>, _) = (Vec::new(), vec![guest.shell(RANDOM)?]);
    for nth in 0..3 {
        let from = if nth < 2 { guest.name().to_owned() } else { name(0) };
        let before = seconds(&guest.shell(UPTIME)?)?;
        let one = Forked::of(&guest, &from, name(nth), &scratch)?;
        let here = seconds(&one.shell(UPTIME)?)?;
        let after = seconds(&guest.shell(UPTIME)?)?;
        let goes_on = before - 0.05 <= here && here <= after + 0.05;
        ensure(goes_on, || format!("its clock is at {here} s, between {before} and {after} in the other"))?;
        one.shell("sha256sum -c /tmp/sum")?;
        // A page that only this machine has.
        one.shell(&format!(
            "echo {nth} > /tmp/own && cat /tmp/data > /tmp/again && cmp /tmp/data /tmp/again"
        ))?;
        random.push(one.shell(RANDOM)?);
        // Linux supports VM generations since 5.18, if that is compiled in.
        let knows = !one.shell("ls -d /sys/bus/*/drivers/vmgenid 2>/dev/null; true")?.is_empty();
        let reseeds = one.shell("dmesg | grep -c 'crng reseeded due to virtual machine fork'; true")?;
        eprintln!("vmgenid: {knows}, reseeded {} times", reseeds.trim());
        ensure(!knows || reseeds.trim() != "0", || "its random numbers are those of the other".into())?;
        forked.push(one);
    }
    for (nth, one) in forked.iter().enumerate() {
        ensure(one.shell("cat /tmp/own")?.trim() == nth.to_string(), || "it has another's page".into())?;
        one.shell("sha256sum -c /tmp/sum")?;
    }
    guest.shell("sha256sum -c /tmp/sum && ! cat /tmp/own 2>/dev/null")?;
    random.push(guest.shell(RANDOM)?);
    random.sort();
    random.dedup();
    ensure(random.len() == 5, || "two of them have the same random numbers".into())?;
    drop(forked);
    guest.ctl(&["stop"])?;
    guest.wait()?.with(0).map(drop)
}

/// A guest that waits for commands. It is killed on drop, and ends its machine.
struct Zygote {
    child: Child,
    name: String,
}

impl Zygote {
    /// Boots `image` with `flags`. Returns when the guest waits.
    fn boot(image: &Image, name: String, flags: &[&str]) -> Result<Self, Failed> {
        let (bed_flags, cmdline) = for_this_bed();
        let mut command = Command::new(VELLUM);
        command.args(["run", "--kernel", &image.kernel(), "--initrd", &image.initrd(), "--zygote", &name]);
        command.args(flags).args(bed_flags).args(["--params", cmdline]);
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let mut zygote = Self { child, name };
        let mut said = String::new();
        BufReader::new(zygote.child.stdout.as_mut().ok_or("a pipe")?).read_line(&mut said)?;
        let waits = said == format!("{0} waits: vellum run --from {0} -- COMMAND\n", zygote.name);
        if !waits {
            let mut errors = String::new();
            zygote.child.stderr.take().ok_or("a pipe")?.read_to_string(&mut errors)?;
            return Err(format!("{said}: {errors}").into());
        }
        Ok(zygote)
    }

    /// A vellum that runs `script` in a fork.
    fn command(&self, flags: &[&str], script: &str) -> Command {
        let mut command = Command::new(VELLUM);
        command.args(["run", "--from", &self.name]).args(flags).args(["--", "sh", "-c", script]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn run(&self, script: &str) -> Result<Output, Failed> {
        Ok(self.command(&[], script).output()?)
    }
}

impl Drop for Zygote {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn now() -> Result<u64, Failed> {
    Ok(SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs())
}

/// One guest boots, and commands run in forks of it. Each has its own status, streams and memory,
/// random numbers that differ from the others', and the host's time and directories.
pub fn for_commands(image: &Image) -> Result<(), Failed> {
    let scratch = scratch()?;
    let data = noise(29, 200_000);
    for name in ["in", "out"] {
        fs::create_dir(scratch.path(name))?;
    }
    fs::write(scratch.path("in").join("data"), &data)?;
    let as_root = if vellum_sys::host::is_root() { ",as-root" } else { "" };
    let shares = [("in", ""), ("out", ",rw")]
        .map(|(name, access)| format!("{}{access}{as_root}", scratch.path(name).display()));
    let flags = ["--memory", "256m", "--share", &shares[0], "--share", &shares[1]];
    let mut zygote = Zygote::boot(image, short_name(&scratch), &flags)?;
    let mut random = Vec::new();
    for nth in 0..20 {
        let before = now()?;
        let output = zygote.run(&format!(
            "test ! -e /tmp/own && touch /tmp/own && echo {nth} > /mnt/out/{nth} && cmp /mnt/in/data /mnt/in/data || exit 99
            cat /proc/sys/kernel/random/uuid; date +%s; echo error {nth} >&2; exit {nth}"
        ))?;
        let after = now()?;
        let whole = || format!("{nth}: {output:?}");
        ensure(output.status.code() == Some(nth), whole)?;
        ensure(output.stderr == format!("error {nth}\n").into_bytes(), whole)?;
        let said = String::from_utf8(output.stdout.clone())?;
        let [uuid, time] = said.lines().collect::<Vec<_>>()[..] else { return Err(whole().into()) };
        let time: u64 = time.parse()?;
        ensure(before <= time + 1 && time <= after + 1, || format!("{before} {time} {after}"))?;
        random.push(uuid.to_owned());
        ensure(fs::read_to_string(scratch.path("out").join(nth.to_string()))? == format!("{nth}\n"), whole)?;
    }
    random.sort();
    random.dedup();
    ensure(random.len() == 20, || format!("equal random numbers: {random:?}"))?;
    // Binary output, and input up to its end.
    let output = zygote.run("cat /mnt/in/data")?;
    ensure(output.status.success() && output.stdout == data, || format!("{}", output.status))?;
    let mut child = zygote.command(&[], "cat").stdin(Stdio::piped()).spawn()?;
    let (mut stdin, sent) = (child.stdin.take().ok_or("a pipe")?, data.clone());
    let writer = std::thread::spawn(move || stdin.write_all(&sent));
    let output = child.wait_with_output()?;
    writer.join().expect("it does not panic")?;
    ensure(output.status.success() && output.stdout == data, || format!("{}", output.status))?;
    // The ends of a command, and of its guest.
    let status_file = scratch.path("status").display().to_string();
    for (script, status, ended, says) in [
        ("kill -9 $$", 137, "\"ended\":\"command\",\"status\":137", ""),
        ("echo c > /proc/sysrq-trigger", 11, "\"ended\":\"machine\",\"status\":11", "sysrq triggered crash"),
    ] {
        let output = zygote.command(&["--status-file", &status_file], script).output()?;
        let told = fs::read_to_string(&status_file)?;
        let errors = String::from_utf8_lossy(&output.stderr);
        let right = output.status.code() == Some(status) && told.contains(ended) && errors.contains(says);
        ensure(right, || format!("{script}: {told}: {output:?}"))?;
    }
    let output = Command::new(VELLUM).args(["run", "--from", &zygote.name, "--", "/no/program"]).output()?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure(output.status.code() == Some(14) && errors.contains("/no/program"), || format!("{output:?}"))?;
    // Two at once: each waits for the other.
    let meets = |own: &str, other: &str| {
        zygote
            .command(
                &[],
                &format!("touch /mnt/out/{own}; until ls /mnt/out | grep -qx {other}; do sleep 0.1; done"),
            )
            .spawn()
    };
    for child in [meets("one", "two")?, meets("two", "one")?] {
        let output = child.wait_with_output()?;
        ensure(output.status.success() && output.stderr.is_empty(), || format!("{output:?}"))?;
    }
    // The guest that waits has seen none of that, and no fork is left.
    let list = Command::new(VELLUM).arg("list").output()?;
    let listed = String::from_utf8_lossy(&list.stdout);
    ensure(listed.contains(&zygote.name) && !listed.contains("from-"), || listed.clone().into_owned())?;
    let stopped = Command::new(VELLUM).args(["stop", &zygote.name]).output()?;
    ensure(stopped.status.success(), || format!("{stopped:?}"))?;
    let status = zygote.child.wait()?;
    ensure(status.success(), || format!("the zygote: {status}"))
}
