//! A Linux guest is forked while it works. Each machine keeps its data, its clock continues, its
//! devices work, and its random numbers differ from the others'.

use support::{Failed, Scratch, ensure};

use crate::guest::{Guest, Image, scratch};

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
