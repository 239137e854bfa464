//! A request for an emulated host.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{Emulated, HOSTS, kexec};
use crate::artifacts::Kernel;

/// The kernel of an emulated host.
#[derive(Clone, Debug)]
pub enum HostKernel {
    /// A Debian kernel, with KVM as modules.
    Debian(Kernel),
    /// A bzImage (on Arm: an Image) with KVM built in, or with KVM's modules beside it.
    Image(PathBuf),
}

impl HostKernel {
    /// The kernel's bootable image.
    pub fn image(&self) -> &Path {
        match self {
            HostKernel::Debian(kernel) => &kernel.image,
            HostKernel::Image(path) => path,
        }
    }
}

/// The number of CPUs of an emulated host, and what drives its clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// One CPU with a clock that counts instructions: for figures, and for tests with their own
    /// time limits.
    Counted,
    /// One CPU in real time: for Linux guests.
    Real,
    /// Two CPUs, for races. They run in parallel in real time, or take turns if the emulator cannot
    /// do that.
    Races,
}

/// In labels: a host of [`Pace::Races`], and one whose CPUs take turns.
pub const AT_ONCE: &str = "two CPUs at once";
const IN_TURN: &str = "two CPUs in turn";

/// A network of two emulated hosts. Each sends its frames to the other's socket. Frames to a host
/// that is not up yet are lost, as on a real network.
#[derive(Clone, Debug)]
pub struct Wire {
    /// The two ends: unix datagram sockets, created by the emulators.
    pub ends: [PathBuf; 2],
    /// The index of this host's end.
    pub end: usize,
}

impl Wire {
    /// The Ethernet address of this host's end.
    pub fn mac(&self) -> String {
        format!("52:54:00:00:00:{:02x}", self.end + 1)
    }
}

/// The default size of huge pages.
pub const HUGEPAGE: &str = "2M";

/// A request for an emulated host.
#[derive(Clone, Debug)]
pub struct Request {
    /// The emulated host.
    pub host: Emulated,
    /// The processor's model by the emulator's name. None: the bed's own.
    pub cpu: Option<String>,
    /// Whether the processor has page-modification logging.
    pub pml: bool,
    /// Whether an Arm board has a GICv2.
    pub gicv2: bool,
    /// Its kernel.
    pub kernel: HostKernel,
    /// Whether KVM uses the second stage (NPT, EPT). Otherwise it shadows the guest's page tables.
    pub second_stage: bool,
    /// The CPUs and their clock.
    pub pace: Pace,
    /// The memory in MiB.
    pub memory_mib: u32,
    /// The number of huge pages reserved at boot.
    pub hugepages: u32,
    /// Their size, as on the kernel's command line: 2M, 1G, on Arm also 32M and 512M.
    pub hugepage_size: String,
    /// Module parameters besides the second stage's: `kvm.eager_page_split=N`.
    pub parameters: Vec<String>,
    /// A network to another host, on eth0.
    pub wire: Option<Wire>,
    /// A disk with the host's root, an ext4 image, which stays unchanged. None: the initramfs is
    /// the root. Only hosts that QEMU emulates can have one.
    pub root: Option<PathBuf>,
    /// Whether systemd is the first process, with the root on a disk and `next`. The command runs
    /// again after each boot.
    pub systemd: bool,
    /// Other disks: raw images, which stay unchanged. Only hosts that QEMU emulates can have them.
    pub disks: Vec<PathBuf>,
    /// Kernels that can take the host's place by kexec, by name. The host then hands memory over
    /// and has a disk that outlives its kernel ([`super::kexec`]).
    pub next: Vec<(String, PathBuf)>,
    /// Files of this machine and their paths in the host.
    pub files: Vec<(PathBuf, String)>,
    /// Directories to create in the host.
    pub directories: Vec<String>,
    /// Environment for the commands.
    pub env: Vec<(String, String)>,
    /// The commands.
    pub commands: Vec<Vec<String>>,
    /// The limit of the host's own time, boot included.
    pub time_limit: Duration,
    /// The limit of the host's own time without output.
    pub silence_limit: Option<Duration>,
}

impl Request {
    /// A request without commands.
    pub fn new(kernel: HostKernel) -> Self {
        Self {
            host: HOSTS[0],
            cpu: None,
            pml: false,
            gicv2: false,
            kernel,
            second_stage: true,
            pace: Pace::Counted,
            memory_mib: 2048,
            hugepages: 0,
            hugepage_size: HUGEPAGE.to_owned(),
            parameters: Vec::new(),
            wire: None,
            root: None,
            systemd: false,
            disks: Vec::new(),
            next: Vec::new(),
            files: Vec::new(),
            directories: Vec::new(),
            env: Vec::new(),
            commands: Vec::new(),
            time_limit: Duration::from_secs(20 * 60),
            silence_limit: None,
        }
    }

    /// The host's name in messages.
    pub fn label(&self) -> String {
        let mut words = vec![self.host.label(self.second_stage, self.pml)];
        words.extend(self.cpu.as_ref().map(|cpu| format!("-cpu {cpu}")));
        words.extend(self.parameters.iter().cloned());
        let races = if self.host.takes_turns() { IN_TURN } else { AT_ONCE };
        words.extend((self.pace == Pace::Races).then(|| races.to_owned()));
        words.join(" ")
    }

    /// Every module parameter, the bed's own first.
    pub fn all_parameters(&self) -> Vec<String> {
        let mut all = self.host.parameters(self.second_stage);
        all.extend(self.parameters.iter().cloned());
        all
    }

    /// The kernel's command line.
    pub fn command_line(&self) -> String {
        // nokaslr and mitigations=off make two runs alike.
        let console = self.host.ports().console;
        let mut line = format!("console={console},115200 panic=-1 quiet nokaslr mitigations=off");
        if self.pace != Pace::Counted {
            // On a busy machine in real time, the kernel's check for timer ticks would panic.
            line.push_str(" no_timer_check nowatchdog");
        }
        for parameter in self.all_parameters() {
            line.push(' ');
            line.push_str(&parameter);
        }
        if self.hugepages > 0 {
            line.push_str(&format!(" hugepagesz={} hugepages={}", self.hugepage_size, self.hugepages));
        }
        if !self.next.is_empty() {
            line.push_str(kexec::HANDS_OVER);
        }
        line
    }
}
