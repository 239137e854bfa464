//! A Linux guest moves to another process while it works, and there and back again.

use guest_agent::{Event, MemoryWork, Pattern, Request};
use harness::{Failed, ensure};

use crate::guest::{Guest, Image};

/// Data that the guest has the sum of.
const DATA_MIB: u64 = 48;

/// 2 vCPUs move twice while one process in the guest writes to memory and another reads the clock.
pub fn under_load(image: &Image, irqchip: &str) -> Result<(), Failed> {
    let flags = ["--cpus", "2", "--memory", "320m", "--irqchip", irqchip, "--rng", "--balloon"];
    let step = |what: &str| eprintln!("linux {} {irqchip} moves: {what}", image.version);
    let mut guest = Guest::start(image, "", &flags)?;
    step("boots");
    guest.ready()?;
    guest.shell(&format!(
        "dd if=/dev/urandom of=/tmp/data bs=1M count={DATA_MIB} 2>/dev/null && sha256sum /tmp/data > /tmp/sum"
    ))?;
    // Writes the same pages over and over, and looks whether the clocks ever go backwards.
    guest.shell(
        "(i=0; while :; do i=$((i+1)); dd if=/dev/zero of=/tmp/scratch bs=64k count=64 conv=notrunc 2>/dev/null
           echo $i > /tmp/rounds; done) > /dev/null 2>&1 &
         (last=0; while :; do now=$(cut -d' ' -f1 /proc/uptime | tr -d .)
           [ $now -ge $last ] || echo back from $last to $now >> /tmp/backwards; last=$now; done) > /dev/null 2>&1 &",
    )?;
    for hop in 1..=2 {
        step(&format!("hop {hop}"));
        let (there, address) = Guest::to_come(&["--serial", "null", "--rng", "--balloon"])?;
        let rounds = count(&guest)?;
        let moved = guest.vellum(&["migrate", guest.name(), "--to", &address, "--downtime", "5s"])?;
        ensure(moved.status.success(), || format!("hop {hop}: {moved:?}"))?;
        eprint!("{}", String::from_utf8_lossy(&moved.stdout));
        guest.wait()?.with(15)?;
        guest = there;
        ensure(guest.ctl(&["status"])?["state"] == "running", || "it does not run".into())?;
        let after = count(&guest)?;
        ensure(after >= rounds, || format!("the writer was at {rounds}, and is at {after}"))?;
        guest.shell("sha256sum -c /tmp/sum && ! cat /tmp/backwards 2>/dev/null")?;
        // It works on: new connections, both processors, entropy.
        let work = MemoryWork { mib: 32, rate_mib: 0, pattern: Pattern::Random, seconds: 1, seed: hop };
        let Event::Memory { pages: 1.., wrong: 0, .. } = guest.ask_one(&Request::Memory(work))? else {
            return Err("memory is not what was written".into());
        };
        guest.shell("dd if=/dev/hwrng bs=64 count=1 2>/dev/null | sha256sum")?;
        let still = count(&guest)?;
        ensure(still > rounds, || format!("the writer stands still at {still}"))?;
    }
    let Event::Facts { cpus: 2, clocksource, .. } = guest.ask_one(&Request::Facts)? else {
        return Err("no facts, or a CPU is lost".into());
    };
    ensure(clocksource == "kvm-clock", || format!("its clock is {clocksource} now"))?;
    let ended = guest.power_off()?.with(0)?;
    ensure(ended.errors.is_empty(), || format!("vellum had to say: {}", ended.errors))
}

/// How often the writer in the guest has been round.
fn count(guest: &Guest) -> Result<u64, Failed> {
    Ok(guest.shell("cat /tmp/rounds")?.trim().parse()?)
}
