//! What this host offers, as a list of checks. Each says what was found, and the remedy if
//! something is missing.
//!
//! The checks are in the order in which they are printed. They use the other files of this crate. A
//! check fails if no guest can run. It warns if only a feature of Vellum is unavailable.

use std::fmt;
use std::path::Path;

use kvm_ioctls::Kvm;
use serde::Serialize;

use super::density::{self, Resource};
use super::topology::{self, Size};
use super::{Facts, Paging, cgroup, hugepages, kvm, root_command, sysfs};
use vellum_sys as sys;

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckVerdict {
    /// It passes.
    Ok,
    /// Something is not available.
    Warn,
    /// No guest will run.
    Fail,
}

/// One check, which is one line of the output.
#[derive(Debug, Serialize)]
pub struct Check {
    /// What was checked.
    pub name: String,
    /// The check's result.
    pub verdict: CheckVerdict,
    /// What was found.
    pub found: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

/// All checks and what follows from them.
#[derive(Debug, Serialize)]
pub struct Diagnosis {
    /// Whether guests run here.
    pub ok: bool,
    /// The facts that every result of this host carries.
    pub host: Facts,
    /// The checks, in reading order.
    pub checks: Vec<Check>,
    /// What this host is ready for. Empty until `conclude`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ready: Vec<Check>,
}

/// The name of the check that runs a guest: whether the dirty log reports every dirty page.
pub const DIRTY_LOG: &str = "dirty log";
const USERFAULTFD: &str = "userfaultfd";
const THP: &str = "THP";

/// Runs all checks but the one that needs a guest.
pub fn examine() -> Diagnosis {
    // No guest runs, so there is no sandbox.
    let facts = Facts::collect("off".into());
    let kvm = kvm::open();
    let mut checks = vec![node(&kvm)];
    checks.extend(kvm.as_ref().ok().map(capabilities));
    #[cfg(target_arch = "aarch64")]
    checks.extend(kvm.as_ref().ok().and_then(|kvm| Some(stage2(&super::stage2::examine(kvm).ok()?))));
    checks.push(module(&facts));
    // Arm has no CR3.
    checks.extend(kvm.as_ref().ok().filter(|_| facts.paging != Paging::Stage2).map(cr3_cache));
    checks.extend(hugepages::sizes().into_iter().map(huge_pages));
    checks.extend([
        thp(&facts),
        userfaultfd(),
        locked_memory(),
        tun(),
        seccomp(),
        landlock(),
        super::live_update::examine(),
    ]);
    checks.push(Check::ok("CPUs", format!("{}; {}", topology::cpus(), facts.cpu)));
    checks.push(memory(&topology::memory()));
    checks.extend(machines());
    let ok = checks.iter().all(|check| check.verdict != CheckVerdict::Fail);
    Diagnosis { ok, host: facts, checks, ready: Vec::new() }
}

impl Diagnosis {
    /// Concludes from the checks what this host is ready for.
    pub fn conclude(&mut self) {
        let verdict =
            |name: &str| self.checks.iter().find(|check| check.name == name).map(|check| check.verdict);
        let is_ok = |name: &str| verdict(name) == Some(CheckVerdict::Ok);
        let guests = "built-in guests";
        if !self.ok {
            let failed = self.checks.iter().filter(|check| check.verdict == CheckVerdict::Fail);
            let names: Vec<_> = failed.map(|check| check.name.as_str()).collect();
            self.ready = vec![Check::fail(guests, "no", format!("see {} above", names.join(", ")))];
            return;
        }
        let linux = match self.host.module.as_deref() {
            Some("kvm_pvm") => Check::warn(
                "Linux guests",
                "not stock kernels: kvm_pvm runs only those with CONFIG_PVM_GUEST; none was tried",
                "use a host with kvm_intel or kvm_amd, or an emulated one: cargo lab run svm",
            ),
            _ => Check::ok("Linux guests", "yes; none was tried"),
        };
        let migration = match verdict(DIRTY_LOG) {
            Some(CheckVerdict::Ok) => Check::ok("live migration", "yes"),
            _ => Check::ok("live migration", "yes, with manual-protect: see dirty log above"),
        };
        let postcopy = match is_ok(USERFAULTFD) {
            true => Check::ok("postcopy", "yes"),
            false => Check::warn("postcopy", "no", "see userfaultfd above"),
        };
        let pools = self.checks.iter().filter(|check| check.name.ends_with("iB pages"));
        let reserved: Vec<_> = pools
            .filter(|check| check.verdict == CheckVerdict::Ok)
            .map(|check| check.name.as_str())
            .collect();
        let huge = match (is_ok(THP), reserved.is_empty()) {
            (_, false) => Check::ok("huge pages", format!("yes, {} are reserved", reserved.join(" and "))),
            (true, true) => Check::ok("huge pages", "yes, transparent ones (backing=thp); none are reserved"),
            (false, true) => Check::warn("huge pages", "no", "see THP and the pools above"),
        };
        self.ready = vec![Check::ok(guests, "yes"), linux, migration, postcopy, huge];
    }
}

impl Check {
    /// A check that passes.
    pub fn ok(name: impl Into<String>, found: impl fmt::Display) -> Self {
        Self { name: name.into(), verdict: CheckVerdict::Ok, found: found.to_string(), remedy: None }
    }

    /// A check that finds something unavailable. `remedy` says what to do.
    pub fn warn(name: impl Into<String>, found: impl fmt::Display, remedy: impl fmt::Display) -> Self {
        Self { verdict: CheckVerdict::Warn, remedy: Some(remedy.to_string()), ..Self::ok(name, found) }
    }

    fn fail(name: impl Into<String>, found: impl fmt::Display, remedy: impl fmt::Display) -> Self {
        Self { verdict: CheckVerdict::Fail, ..Self::warn(name, found, remedy) }
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = match self.verdict {
            CheckVerdict::Ok => "ok",
            CheckVerdict::Warn => "warn",
            CheckVerdict::Fail => "FAIL",
        };
        write!(f, "{verdict:<5} {:<20} {}", self.name, self.found)?;
        self.remedy.as_ref().map_or(Ok(()), |remedy| write!(f, ": {remedy}"))
    }
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.checks.iter().try_for_each(|check| writeln!(f, "{check}"))?;
        if !self.ready.is_empty() {
            writeln!(f, "\nThis host is ready for:")?;
        }
        self.ready.iter().try_for_each(|check| writeln!(f, "{check}"))
    }
}

fn node(kvm: &Result<Kvm, kvm::Unusable>) -> Check {
    let name = "/dev/kvm";
    let made = kvm.as_ref().map(|kvm| kvm::create_vm(kvm).map(drop));
    match made {
        Ok(Ok(())) => Check::ok(name, "API version 12, and a VM can be created"),
        Ok(Err(unusable)) => without_path(name, &unusable),
        Err(unusable) => without_path(name, unusable),
    }
}

/// The line already starts with the path.
fn without_path(name: &str, unusable: &kvm::Unusable) -> Check {
    let problem = unusable.problem.to_string();
    let found = problem.strip_prefix(name).unwrap_or(&problem).trim_start_matches([' ', ':']);
    Check::fail(name, found, &unusable.remedy)
}

#[cfg(target_arch = "aarch64")]
fn stage2(found: &super::stage2::Stage2) -> Check {
    let host = match found.vhe {
        Some(true) => "VHE",
        Some(false) => "nVHE",
        None => "VHE or nVHE, which this kernel does not show",
    };
    let gics = found.gics.join(", ");
    let text = format!("{host}; guest-physical addresses of {} bits; {gics}", found.bits);
    if found.gics.is_empty() {
        return Check::warn("stage 2", text, "without a GIC in KVM no Linux guest runs");
    }
    Check::ok("stage 2", text)
}

fn capabilities(kvm: &Kvm) -> Check {
    let offer = kvm::offer(kvm);
    let name = "KVM capabilities";
    if offer.missing.is_empty() {
        return Check::ok(name, offer);
    }
    let found = format!("{offer}; missing {}", offer.missing.join(", "));
    let remedy = "a newer kernel, or another KVM module";
    if offer.usable { Check::warn(name, found, remedy) } else { Check::fail(name, found, remedy) }
}

fn module(facts: &Facts) -> Check {
    let name = "KVM module";
    let Some(module) = &facts.module else {
        return Check::fail(name, "none is loaded", "see /dev/kvm above");
    };
    let paging = match facts.paging {
        Paging::Ept => "EPT",
        Paging::Npt => "NPT",
        Paging::Stage2 => "stage 2",
        Paging::Shadow => "shadow paging",
        Paging::Unknown => "paging unknown",
    };
    let flag = |value: Option<bool>| match value {
        Some(true) => "Y",
        Some(false) => "N",
        None => "?",
    };
    let nx = facts.nx_huge_pages.as_deref().unwrap_or("?");
    let (tdp, split) = (flag(facts.tdp_mmu), flag(facts.eager_page_split));
    Check::ok(name, format!("{module}, {paging}; tdp_mmu={tdp} eager_page_split={split} nx_huge_pages={nx}"))
}

fn cr3_cache(kvm: &Kvm) -> Check {
    let name = "CR3 cache";
    match super::cr3_cache::entries(kvm) {
        Ok(entries) => Check::ok(
            name,
            format!("a guest that knows of it switches among {entries} address spaces without an exit"),
        ),
        Err(super::cr3_cache::Unavailable { why, remedy }) => {
            Check::warn(name, format!("none: {why}"), remedy)
        }
    }
}

fn huge_pages(page_size: u64) -> Check {
    let name = format!("{} pages", Size(page_size));
    let pools: Vec<_> = hugepages::pools().into_iter().filter(|pool| pool.page_size == page_size).collect();
    let Some(host) = pools.iter().find(|pool| pool.node.is_none()) else {
        return Check::warn(name, "the kernel does not say", "mount sysfs on /sys");
    };
    let mut found = format!("{} of {} free", host.free.saturating_sub(host.reserved), host.total);
    for pool in pools.iter().filter(|pool| pool.node.is_some()) {
        found += &format!("; node {}: {} of {}", pool.node.unwrap_or(0), pool.free, pool.total);
    }
    if host.on_demand > 0 {
        found += &format!("; {} more on demand", host.on_demand);
    }
    let limits = cgroup::hugetlb_limits(Path::new("/"), cgroup::Process::default(), page_size);
    if let Some(limit) = limits.iter().min_by_key(|limit| limit.left()) {
        let left = limit.left() / page_size;
        found += &format!("; the control group allows {left}");
    }
    // Enough for the default guest, or for the smallest useful guest on pages of this size.
    let wanted = (256u64 << 20).max(page_size);
    let shortages = hugepages::shortages(page_size, wanted);
    // One command alone might not help: a larger pool does not raise a control group's limit.
    let commands: Vec<_> = shortages.iter().filter_map(hugepages::Shortage::command).collect();
    match shortages.is_empty() {
        true => Check::ok(name, found),
        false => {
            Check::warn(name, found, format!("to have {} on them, {}", Size(wanted), commands.join(" and ")))
        }
    }
}

fn thp(facts: &Facts) -> Check {
    let name = THP;
    match facts.thp.as_deref() {
        Some(mode @ ("always" | "madvise")) => Check::ok(name, mode),
        Some(mode) => {
            let file = Path::new("/sys/kernel/mm/transparent_hugepage/enabled");
            Check::warn(name, mode, format!("for backing=thp, {}", root_command("madvise", file)))
        }
        None if !Path::new("/sys/kernel/mm").exists() => {
            Check::warn(name, "the kernel does not say", "mount sysfs on /sys")
        }
        None => Check::warn(
            name,
            "not in this kernel",
            "boot one with CONFIG_TRANSPARENT_HUGEPAGE for backing=thp",
        ),
    }
}

fn memory(memory: &topology::HostMemory) -> Check {
    match memory.available {
        0 => Check::warn(
            "memory",
            format!("{}; the kernel does not say how much is available", Size(memory.total)),
            "mount proc on /proc",
        ),
        _ => Check::ok("memory", memory),
    }
}

/// How many machines fit, and what runs out first.
fn machines() -> Option<Check> {
    let first = density::resources(density::Shape::default()).into_iter().min_by_key(Resource::machines)?;
    let Resource { name, limit, left, each } = &first;
    let fit = first.machines();
    Some(Check::ok(
        "machines",
        format!(
            "{fit} with one vCPU, beside their guests' pages; the first limit is {limit}: {left} {name} left, {each} a machine"
        ),
    ))
}

/// KVM touches guest memory from the kernel, so a userfaultfd for user-mode faults alone is not
/// enough.
fn userfaultfd() -> Check {
    let name = USERFAULTFD;
    let Err(error) = sys::uffd::by_call() else {
        return Check::ok(name, "faults of KVM are handled for this user");
    };
    if sys::uffd::by_device().is_ok() {
        return Check::ok(name, "faults of KVM are handled for this user, by /dev/userfaultfd");
    }
    let remedy = remedy_for_userfaultfd(&error);
    Check::warn(name, format!("faults of KVM are not handled for this user ({error})"), remedy)
}

/// What to do if the kernel refuses a userfaultfd with this error.
pub fn remedy_for_userfaultfd(error: &std::io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ENOSYS) => "boot a kernel with CONFIG_USERFAULTFD for memory that comes on demand",
        // Docker's own filter forbids the call. The sysctl alone does not help there.
        Some(libc::EPERM) if kvm::in_container() => {
            "on the host sudo sysctl vm.unprivileged_userfaultfd=1, and start the container with --security-opt \
             seccomp=unconfined"
        }
        _ => {
            "sudo sysctl vm.unprivileged_userfaultfd=1, or give this user /dev/userfaultfd or CAP_SYS_PTRACE"
        }
    }
}

fn locked_memory() -> Check {
    let name = "RLIMIT_MEMLOCK";
    match sys::host::memlock_limit() {
        None => Check::ok(name, "unlimited"),
        Some(limit) if sys::host::is_root() => {
            Check::ok(name, format!("{}, which does not bind root", Size(limit)))
        }
        Some(limit) => Check::warn(
            name,
            format!("{}: no more can be locked (lock=on)", Size(limit)),
            "sudo prlimit --pid $$ --memlock=unlimited",
        ),
    }
}

fn tun() -> Check {
    let name = "/dev/net/tun";
    let opened = std::fs::File::options().read(true).write(true).open(name);
    let Err(error) = opened else {
        return Check::ok(name, "can be opened");
    };
    let remedy = match error.raw_os_error() {
        _ if kvm::in_container() => "start the container with --device /dev/net/tun",
        Some(libc::EACCES | libc::EPERM) => "sudo chmod 666 /dev/net/tun",
        _ => "sudo modprobe tun",
    };
    Check::warn(name, format!("cannot be opened ({error}), so there is no network device"), remedy)
}

fn seccomp() -> Check {
    let name = "seccomp";
    match sys::seccomp::is_available(libc::SECCOMP_RET_TRAP) {
        Ok(()) => Check::ok(name, "filters can be installed"),
        Err(error) => Check::warn(
            name,
            format!("no filter can be installed ({error})"),
            "boot a kernel with CONFIG_SECCOMP_FILTER, or run without the sandbox",
        ),
    }
}

fn landlock() -> Check {
    let name = "Landlock";
    let error = match sys::seccomp::landlock_abi() {
        Ok(abi) => return Check::ok(name, format!("ABI {abi}")),
        Err(error) => error,
    };
    let remedy = match error.raw_os_error() {
        Some(libc::EOPNOTSUPP) => {
            let mut buffer = [0; 256];
            let enabled = sysfs::read("/sys/kernel/security/lsm", &mut buffer).unwrap_or("capability");
            format!("boot with lsm=landlock,{enabled}")
        }
        Some(libc::EPERM) => "a filter around this process forbids it".into(),
        _ => "boot Linux 5.13 or later with CONFIG_SECURITY_LANDLOCK".into(),
    };
    Check::warn(name, format!("not there ({error}); the sandbox is seccomp alone"), remedy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Facts;

    fn diagnosis(checks: Vec<Check>) -> Diagnosis {
        let host = Facts { module: Some("kvm_amd".into()), ..Facts::collect("off".into()) };
        let ok = checks.iter().all(|check| check.verdict != CheckVerdict::Fail);
        let mut diagnosis = Diagnosis { ok, host, checks, ready: Vec::new() };
        diagnosis.conclude();
        diagnosis
    }

    fn ready(checks: Vec<Check>) -> Vec<String> {
        diagnosis(checks).ready.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn the_conclusion_follows_from_the_checks() {
        let well = || {
            vec![Check::ok(DIRTY_LOG, "no page"), Check::ok(USERFAULTFD, "handled"), Check::ok(THP, "always")]
        };
        let said = ready(well());
        assert!(said.iter().all(|line| line.starts_with("ok ")), "{said:?}");
        assert!(said.iter().any(|line| line.contains("Linux guests") && line.contains("none was tried")));
        let mut poor = well();
        poor[0] = Check::warn(DIRTY_LOG, "loses pages", "x");
        poor[1] = Check::warn(USERFAULTFD, "not handled", "x");
        poor[2] = Check::warn(THP, "never", "x");
        let said = ready(poor).join("\n");
        for part in
            ["yes, with manual-protect", "warn  postcopy             no", "warn  huge pages           no"]
        {
            assert!(said.contains(part), "{part} is missing in {said}");
        }
        let none = ready(vec![Check::fail("/dev/kvm", "no such file", "x")]);
        assert_eq!(none, ["FAIL  built-in guests      no: see /dev/kvm above"]);
        let shown = diagnosis(well()).to_string();
        assert!(shown.contains("\n\nThis host is ready for:\nok    built-in guests"), "{shown}");
    }

    #[test]
    fn memory_of_which_the_kernel_says_nothing_is_not_well() {
        let check = memory(&topology::HostMemory { total: 1 << 30, available: 0, limited_by: None });
        assert_eq!(
            (check.verdict, check.remedy.as_deref()),
            (CheckVerdict::Warn, Some("mount proc on /proc"))
        );
    }
}
