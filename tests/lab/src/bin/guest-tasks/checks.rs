//! Checks that are not measurements: a guest with page table isolation refuses the CR3 cache, and a
//! CPU or kernel that goes away leaves no page registered with the host.

use std::fs;
use std::io;

use crate::guest::{BLOCK, Guest, images};
use crate::trace_point::TracePoint;
use crate::{Cli, UNHINDERED, WORKLOADS};

/// A parameter for page table isolation, and what the guest's log then says about isolation and the
/// cache.
const ISOLATION: [(&str, &str, &str); 2] = [
    (
        "pti=on",
        "page tables isolation: enabled",
        "CR3 cache: not with page table isolation (pti=off allows it)",
    ),
    ("pti=off", "page tables isolation: disabled on command line", "CR3 cache: on"),
];
/// Loads of CR3 without an exit, by all of KVM's present guests.
const HITS: &str = "/sys/kernel/debug/kvm/cr3_cache_switches";
/// Loads of CR3 with an exit, by vCPUs with a registered page.
const MISSES: &str = "/sys/kernel/debug/kvm/cr3_cache_misses";
/// The cache's hypercalls that register and unregister a vCPU's page
/// (Documentation/virt/kvm/cr3-cache.rst).
const REGISTERS: &str = "nr==120 && a0==0";
const UNREGISTERS: &str = "nr==120 && a0==2";
/// The module parameter of a Linux guest's kernel that enables the cache.
const USES: &str = "/sys/module/kvm_cr3_cache/parameters/enable";
/// The parameter that disables the cache in a kernel started by kexec.
const DOES_WITHOUT: &str = "kvm_cr3_cache.enable=0";

/// With page table isolation and without.
pub fn isolation(cli: &Cli) -> io::Result<()> {
    ISOLATION.iter().try_for_each(|(parameter, isolation, cache)| {
        isolated(cli, parameter, &[isolation, cache], *parameter == "pti=off")
    })
}

/// Starts a guest with `parameter`. Its log must contain all of `says`. Its tasks then switch, and
/// must hit the cache or not, as `hits` says.
fn isolated(cli: &Cli, parameter: &str, says: &[&str], hits: bool) -> io::Result<()> {
    let guest = Guest::start(cli, 1, parameter)?;
    let log = guest.text(&["dmesg"])?;
    let of_it = log.lines().filter(|line| line.contains("CR3 cache") || line.contains("isolation:"));
    let of_it = of_it.collect::<Vec<_>>().join("\n");
    eprintln!("guest-tasks: {parameter}: the guest's log has\n{of_it}");
    if let Some(missing) = says.iter().find(|line| !of_it.contains(**line)) {
        return Err(io::Error::other(format!("{parameter}: the guest's log lacks {missing:?}")));
    }
    let (_, switch, _) = WORKLOADS[0];
    guest.asked(switch)?;
    let hit = times(HITS)?;
    eprintln!("guest-tasks: {parameter}: {hit} loads of CR3 without an exit");
    if (hit != 0) != hits {
        let wrong = if hits { "the guest does not use the cache" } else { "the guest uses the cache" };
        return Err(io::Error::other(format!("{parameter}: {wrong}: {HITS} is {hit}")));
    }
    guest.end()
}

/// In a guest with two CPUs, one CPU goes offline and comes back. The kernel then disables the
/// cache, enables it again, and kexecs another kernel. In a guest with one CPU, the kernel panics
/// into a crash kernel. After each step the host must have no page registered for what has gone.
pub fn teardown(cli: &Cli) -> io::Result<()> {
    let pages = Pages::count()?;
    let mut guest = Guest::start(cli, 2, UNHINDERED)?;
    guest.uses_it("a guest with two CPUs")?;
    let cpu = "/sys/devices/system/cpu/cpu1/online";
    // CPU 1 alone registers and goes, whatever the other CPU does meanwhile.
    guest.shell(&format!("echo 0 > {cpu}; echo 1 > {cpu}; echo 0 > {cpu}"))?;
    pages.are_at_most(1, "CPU 1 is offline")?;
    guest.shell(&format!("echo 1 > {cpu}; echo 0 > {USES}"))?;
    pages.are_at_most(0, "the kernel does without")?;
    guest.does_without("the kernel does without")?;
    guest.shell(&format!("echo 1 > {USES}"))?;
    guest.uses_it("the kernel goes on with it")?;
    guest.goes_to_another_kernel(cli, false)?;
    pages.are_at_most(0, "another kernel runs")?;
    guest.does_without("another kernel runs")?;
    guest.end()?;

    let pages = Pages::count()?;
    let mut guest = Guest::start(cli, 1, &format!("{UNHINDERED} crashkernel=112M"))?;
    guest.uses_it("a guest with a CPU")?;
    guest.goes_to_another_kernel(cli, true)?;
    pages.are_at_most(0, "the kernel has panicked, and another one runs")?;
    guest.does_without("the kernel has panicked, and another one runs")?;
    guest.end()
}

/// Counts the vCPUs with a registered page, by the hypercalls since this was created.
struct Pages([TracePoint; 2]);

impl Pages {
    fn count() -> io::Result<Self> {
        let point = |filter| TracePoint::count("kvm/kvm_hypercall", Some(filter));
        Ok(Self([point(REGISTERS)?, point(UNREGISTERS)?]))
    }

    fn are_at_most(&self, most: u64, when: &str) -> io::Result<()> {
        let [registered, unregistered] = [self.0[0].so_far()?, self.0[1].so_far()?];
        let said = format!(
            "{when}: pages were registered {registered} times, and unregistered {unregistered} times"
        );
        eprintln!("guest-tasks: {said}");
        if registered == 0.0 || registered - unregistered > most as f64 {
            return Err(io::Error::other(format!("{said}: the host still has a page that is none")));
        }
        Ok(())
    }
}

/// Reads one of KVM's counters.
fn times(path: &str) -> io::Result<u64> {
    let text = fs::read_to_string(path).map_err(|error| io::Error::other(format!("{path}: {error}")))?;
    text.trim().parse().map_err(|error| io::Error::other(format!("{path}: {text:?}: {error}")))
}

impl Guest {
    /// Replaces the guest's kernel with a copy of itself that does not use the cache, by kexec or
    /// after a panic.
    fn goes_to_another_kernel(&mut self, cli: &Cli, on_panic: bool) -> io::Result<()> {
        let [kernel, initrd] = images(cli)?.map(|image| image.len());
        for (name, first, bytes) in [("kernel", 0, kernel), ("initrd", kernel.div_ceil(BLOCK), initrd)] {
            self.shell(&format!("dd if=/dev/vda bs={BLOCK} skip={first} | head -c {bytes} > /{name}"))?;
        }
        let params = self.text(&["cat", "/proc/cmdline"])?;
        // The panicked kernel had reserved memory for its successor, which needs none itself.
        let params = params.split_whitespace().filter(|word| !word.starts_with("crashkernel="));
        let params = params.chain([DOES_WITHOUT]).collect::<Vec<_>>().join(" ");
        let kexec = serde_json::json!({
            "do": "kexec", "kernel": "/kernel", "initrd": "/initrd", "params": params, "on_panic": on_panic,
        });
        match (self.asked(&kexec.to_string()), on_panic) {
            (Ok(_), true) => drop(self.shell("echo c > /proc/sysrq-trigger")),
            // The kernel is replaced before the agent can answer.
            (Err(error), false) if error.to_string().contains("closed the connection") => (),
            (Err(error), _) => return Err(error),
            (Ok(events), false) => return Err(io::Error::other(format!("kexec was answered by {events:?}"))),
        }
        let runs = r#"{"do":"exec","command":["cat","/proc/cmdline"]}"#;
        self.answers(runs, |events| events.iter().any(|event| event.to_string().contains(DOES_WITHOUT)))
    }

    /// Its tasks switch and hit the cache.
    fn uses_it(&self, when: &str) -> io::Result<()> {
        let before = times(HITS)?;
        self.asked(WORKLOADS[0].1)?;
        let hits = times(HITS)? - before;
        eprintln!("guest-tasks: {when}: {hits} loads of CR3 without an exit");
        if hits == 0 {
            return Err(io::Error::other(format!("{when}: the guest does not use the cache")));
        }
        Ok(())
    }

    /// Its tasks switch, and KVM counts neither hits nor misses.
    fn does_without(&self, when: &str) -> io::Result<()> {
        let seen = || Ok::<_, io::Error>((times(HITS)?, times(MISSES)?));
        let before = seen()?;
        self.asked(WORKLOADS[0].1)?;
        let after = seen()?;
        if before != after {
            return Err(io::Error::other(format!(
                "{when}: hits and misses were {before:?}, and are {after:?}"
            )));
        }
        Ok(())
    }
}
