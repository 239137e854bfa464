//! Opens `/dev/kvm`, and says what to do if that fails. `vm/` decides what the VM is for.
//!
//! Whether KVM works is found out by using it. CPU flags are not checked, because kvm_pvm works
//! without vmx or svm.

use std::fmt;
use std::fs;
use std::io;
use std::os::linux::fs::MetadataExt;
use std::path::Path;

use kvm_bindings::*;
use kvm_ioctls::{Kvm, VmFd};

use super::sysfs;
use vellum_sys as sys;
use vellum_sys::diagnose::{Diagnose, ErrorOrigin};

/// How to get the same result without KVM, in the lab.
#[cfg(target_arch = "x86_64")]
const EMULATED: &str = "without KVM, `cargo lab run svm -- vellum run` does the same on an emulated host";
/// How to get the same result without KVM, in the lab.
#[cfg(target_arch = "aarch64")]
const EMULATED: &str = "without KVM, `cargo lab run arm64 -- vellum run` does the same on an emulated host";

/// KVM's API version. It has not changed since Linux 2.6.22 (api.rst, 4.1).
const API: i32 = 12;

/// Why KVM cannot be used, and the remedy.
#[derive(Debug, thiserror::Error)]
#[error("{problem}: {remedy}")]
pub struct Unusable {
    /// What is wrong.
    pub problem: Problem,
    /// The remedy.
    pub remedy: String,
}

impl Diagnose for Unusable {
    fn origin(&self) -> ErrorOrigin {
        ErrorOrigin::HOST.lacking()
    }
}

/// What is wrong with KVM.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// The node does not exist.
    #[error("/dev/kvm does not exist")]
    Absent,
    /// The node exists, but no driver is behind it.
    #[error("/dev/kvm has no KVM behind it")]
    NoModule,
    /// This user may not open the node.
    #[error("/dev/kvm may not be opened by this user")]
    NoPermission,
    /// Another hypervisor uses the processor's virtualization.
    #[error("/dev/kvm is busy: another hypervisor holds the processor's virtualization")]
    Busy,
    /// The node is a different device.
    #[error("/dev/kvm is not KVM")]
    Other,
    /// The API version is different.
    #[error("/dev/kvm speaks version {0} of KVM's interface, not {API}")]
    Version(i32),
    /// Another error, with the call that failed.
    #[error("/dev/kvm: {0} failed ({1})")]
    Failed(&'static str, io::Error),
}

/// Opens `/dev/kvm`.
pub fn open() -> Result<Kvm, Unusable> {
    let kvm = Kvm::new().map_err(|error| match error.errno() {
        libc::ENOENT => Unusable { problem: Problem::Absent, remedy: how_to_get_a_node() },
        libc::ENXIO | libc::ENODEV => Unusable { problem: Problem::NoModule, remedy: how_to_load_a_module() },
        libc::EACCES | libc::EPERM => {
            Unusable { problem: Problem::NoPermission, remedy: how_to_get_permission(error.errno()) }
        }
        libc::EBUSY => busy(),
        errno => failed("open", errno),
    })?;
    match kvm.get_api_version() {
        API => Ok(kvm),
        ..0 => {
            let remedy = "put the kernel's own there (ls -l /dev/kvm should say 10, 232)".into();
            Err(Unusable { problem: Problem::Other, remedy })
        }
        other => {
            Err(Unusable { problem: Problem::Version(other), remedy: "boot Linux 2.6.22 or later".into() })
        }
    }
}

/// Creates a VM. KVM enables the processor's virtualization only now, so a conflict with another
/// hypervisor also shows only now.
pub fn create_vm(kvm: &Kvm) -> Result<VmFd, Unusable> {
    loop {
        match kvm.create_vm().map_err(|error| error.errno()) {
            // On some kernels a signal, for instance a profiler's, interrupts the creation of a VM.
            Err(libc::EINTR) => continue,
            Err(libc::EBUSY) => return Err(busy()),
            Err(errno) => return Err(failed("KVM_CREATE_VM", errno)),
            Ok(vm) => return Ok(vm),
        }
    }
}

fn busy() -> Unusable {
    let remedy = "end the virtual machines of VirtualBox or VMware, or unload its modules (sudo modprobe -r vboxnetadp \
                  vboxnetflt vboxdrv; sudo modprobe -r vmmon)";
    Unusable { problem: Problem::Busy, remedy: remedy.into() }
}

fn failed(call: &'static str, errno: i32) -> Unusable {
    let remedy = match errno {
        libc::EMFILE => "raise the limit on open files (ulimit -n)",
        libc::ENOMEM => "free memory on the host",
        _ => "the kernel's log may say why (sudo dmesg | grep -i kvm)",
    };
    let remedy = remedy.into();
    Unusable { problem: Problem::Failed(call, io::Error::from_raw_os_error(errno)), remedy }
}

fn how_to_get_a_node() -> String {
    if in_container() {
        return format!("start the container with --device /dev/kvm; {EMULATED}");
    }
    // The kernel lists the node if a module has created one. Then it is only missing from this
    // /dev.
    match sysfs::read("/sys/class/misc/kvm/dev", &mut [0; 16]).and_then(|dev| dev.split_once(':')) {
        Some((major, minor)) => {
            let command = format!("mknod -m 666 /dev/kvm c {major} {minor}");
            format!("the kernel has KVM, so only the node is missing here: {}; {EMULATED}", as_root(&command))
        }
        None => how_to_load_a_module(),
    }
}

fn how_to_load_a_module() -> String {
    if cfg!(target_arch = "aarch64") {
        return format!("boot the kernel at EL2, with CONFIG_KVM and without kvm-arm.mode=none; {EMULATED}");
    }
    // This only affects the text of the remedy: the vendor decides which module could work at all.
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let (module, setting) =
        if cpuinfo.contains("GenuineIntel") { ("kvm_intel", "VT-x") } else { ("kvm_amd", "SVM") };
    let load = as_root(&format!("modprobe {module}"));
    let where_it_fails = if cpuinfo.contains(" hypervisor") {
        "let the hypervisor that runs this machine pass on nested virtualization".to_owned()
    } else {
        format!("enable {setting} in the firmware's setup")
    };
    format!("{load}, and where that fails {where_it_fails}; {EMULATED}")
}

fn how_to_get_permission(errno: i32) -> String {
    // A control group's device filter causes EPERM, the node's mode EACCES.
    if errno == libc::EPERM && in_container() {
        return "start the container with --device /dev/kvm".into();
    }
    let (uid, _) = sys::identity::effective();
    let user = name_of("/etc/passwd", uid).unwrap_or_else(|| uid.to_string());
    let shared =
        fs::metadata("/dev/kvm").ok().filter(|node| node.st_gid() != 0 && node.st_mode() & 0o060 == 0o060);
    let Some(group) = shared.and_then(|node| name_of("/etc/group", node.st_gid())) else {
        // Without a group to join, the node itself has to change. udev or the next boot undoes
        // that.
        return as_root(&format!("chown {user} /dev/kvm"));
    };
    if is_listed(&group, &user) {
        return format!(
            "{user} is in its group already, but not in this session: log in again, or newgrp {group}"
        );
    }
    format!("{}, then log in again, or newgrp {group}", as_root(&format!("usermod -aG {group} {user}")))
}

/// A command in the form that this user has to type.
fn as_root(command: &str) -> String {
    if sys::host::is_root() { command.to_owned() } else { format!("sudo {command}") }
}

/// The name that /etc/passwd or /etc/group gives to a number. Static programs have no other way to
/// look it up.
pub(super) fn name_of(file: &str, id: u32) -> Option<String> {
    let text = fs::read_to_string(file).ok()?;
    let id = id.to_string();
    text.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)? == id).then(|| name.to_owned())
    })
}

fn is_listed(group: &str, user: &str) -> bool {
    let text = fs::read_to_string("/etc/group").unwrap_or_default();
    let members =
        text.lines().find_map(|line| line.strip_prefix(group)?.strip_prefix(':')?.split(':').nth(2));
    members.is_some_and(|members| members.split(',').any(|member| member == user))
}

/// Whether this process is in a container: in a PID namespace other than the initial one, whose
/// number is fixed (PROC_PID_INIT_INO, include/linux/proc_ns.h). The marker files of container
/// engines are no evidence, because they are also in machine images that were made from container
/// images.
pub fn in_container() -> bool {
    const FIRST: &str = "pid:[4026531836]";
    fs::read_link("/proc/self/ns/pid").is_ok_and(|namespace| namespace != Path::new(FIRST))
}

/// A capability of KVM that Vellum uses.
struct Capability {
    number: u32,
    name: &'static str,
    /// No guest runs without it.
    essential: bool,
    /// What is not available without it.
    without: &'static str,
}

const fn essential(number: u32, name: &'static str) -> Capability {
    Capability { number, name, essential: true, without: "guest" }
}

const fn useful(number: u32, name: &'static str, without: &'static str) -> Capability {
    Capability { number, name, essential: false, without }
}

/// In the order of KVM's own numbers, without the prefix KVM_CAP_.
const CAPABILITIES: &[Capability] = &[
    #[cfg(target_arch = "x86_64")]
    useful(KVM_CAP_IRQCHIP, "IRQCHIP", "Linux guest"),
    essential(KVM_CAP_USER_MEMORY, "USER_MEMORY"),
    #[cfg(target_arch = "x86_64")]
    essential(KVM_CAP_EXT_CPUID, "EXT_CPUID"),
    useful(KVM_CAP_IRQFD, "IRQFD", "virtio device"),
    #[cfg(target_arch = "x86_64")]
    useful(KVM_CAP_PIT2, "PIT2", "Linux guest"),
    useful(KVM_CAP_IOEVENTFD, "IOEVENTFD", "virtio device"),
    #[cfg(target_arch = "x86_64")]
    useful(KVM_CAP_GET_TSC_KHZ, "GET_TSC_KHZ", "rate or latency measured by the guest's TSC"),
    #[cfg(target_arch = "aarch64")]
    essential(KVM_CAP_ONE_REG, "ONE_REG"),
    useful(KVM_CAP_READONLY_MEM, "READONLY_MEM", "test of read-only memslots"),
    #[cfg(target_arch = "aarch64")]
    essential(KVM_CAP_DEVICE_CTRL, "DEVICE_CTRL"),
    #[cfg(target_arch = "aarch64")]
    useful(KVM_CAP_ARM_PSCI_0_2, "ARM_PSCI_0_2", "Linux guest"),
    essential(KVM_CAP_IMMEDIATE_EXIT, "IMMEDIATE_EXIT"),
    useful(
        KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2,
        "MANUAL_DIRTY_LOG_PROTECT2",
        "KVM_CLEAR_DIRTY_LOG (Linux 5.2 has it)",
    ),
    useful(KVM_CAP_BINARY_STATS_FD, "BINARY_STATS_FD", "counters of KVM in results (Linux 5.14 has them)"),
];

/// What this KVM offers of the capabilities that Vellum uses.
#[derive(Debug)]
pub struct Offer {
    /// The number of used capabilities that it has.
    pub present: usize,
    /// The missing capabilities, each with what does not work without it.
    pub missing: Vec<String>,
    /// Whether guests still run.
    pub usable: bool,
    /// The maximum number of vCPUs in a VM.
    pub vcpus: usize,
    /// The maximum number of memslots in a VM.
    pub memslots: usize,
    /// The maximum size of a dirty ring in bytes; 0 if there is none.
    pub dirty_ring: u64,
}

/// Checks every capability that Vellum uses.
pub fn offer(kvm: &Kvm) -> Offer {
    let value = |number: u32| kvm.check_extension_raw(number.into()).max(0);
    let missing = || CAPABILITIES.iter().filter(|capability| value(capability.number) == 0);
    let ring = value(KVM_CAP_DIRTY_LOG_RING).max(value(KVM_CAP_DIRTY_LOG_RING_ACQ_REL)) as u64;
    let mut descriptions: Vec<String> =
        missing().map(|capability| format!("{} (no {})", capability.name, capability.without)).collect();
    if ring == 0 {
        descriptions.push("DIRTY_LOG_RING (no dirty ring; Linux 5.11 has it, on Arm 6.2)".into());
    }
    Offer {
        present: CAPABILITIES.len() - missing().count() + usize::from(ring > 0),
        missing: descriptions,
        usable: missing().all(|capability| !capability.essential),
        vcpus: kvm.get_max_vcpus(),
        memslots: kvm.get_nr_memslots(),
        dirty_ring: ring,
    }
}

impl fmt::Display for Offer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of {} used here; up to {} vCPUs, {} memslots",
            self.present,
            self.present + self.missing.len(),
            self.vcpus,
            self.memslots
        )?;
        if self.dirty_ring > 0 {
            write!(f, ", a dirty ring of {} KiB", self.dirty_ring >> 10)?;
        }
        Ok(())
    }
}
