//! What is asked of an emulated host.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{Emulated, HOSTS};
use crate::artifacts::Kernel;

/// The kernel of an emulated host.
#[derive(Clone, Debug)]
pub enum HostKernel {
    /// One of Debian's, with KVM as modules.
    Debian(Kernel),
    /// A bzImage (on Arm: an Image) with KVM built in, or with KVM's modules beside it.
    Image(PathBuf),
}

impl HostKernel {
    /// What boots of it.
    pub fn image(&self) -> &Path {
        match self {
            HostKernel::Debian(kernel) => &kernel.image,
            HostKernel::Image(path) => path,
        }
    }
}

/// How many CPUs an emulated host has, and what its clock goes by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// One CPU, whose clock counts instructions: for figures, and for tests with limits of their
    /// own.
    Counted,
    /// One CPU in real time: for Linux guests.
    Real,
    /// Two CPUs at once in real time, or in turn where the emulator knows nothing else: for races.
    Races,
}

/// How labels name a host of [`Pace::Races`], and one whose CPUs take turns.
pub const AT_ONCE: &str = "two CPUs at once";
const IN_TURN: &str = "two CPUs in turn";

/// A network of two emulated hosts: each sends its frames to the other's socket. Frames to a host
/// that is not up yet are lost, as on any network.
#[derive(Clone, Debug)]
pub struct Wire {
    /// The two ends: unix datagram sockets, which the emulators make.
    pub ends: [PathBuf; 2],
    /// Which of them is this host's.
    pub end: usize,
}

impl Wire {
    /// The Ethernet address of this host's end.
    pub fn mac(&self) -> String {
        format!("52:54:00:00:00:{:02x}", self.end + 1)
    }
}

/// The size of huge pages where none is named.
pub const HUGEPAGE: &str = "2M";

/// What is asked of an emulated host.
#[derive(Clone, Debug)]
pub struct Request {
    /// The processor that is emulated.
    pub host: Emulated,
    /// Its model, by the emulator's name; the bed's own, where none is given.
    pub cpu: Option<String>,
    /// A processor with page-modification logging.
    pub pml: bool,
    /// A board with a GICv2, of which Arm's are.
    pub gicv2: bool,
    /// Its kernel.
    pub kernel: HostKernel,
    /// KVM uses the second stage (NPT, EPT), or shadows the guest's tables.
    pub second_stage: bool,
    /// Its CPUs and their clock.
    pub pace: Pace,
    /// Its memory in MiB.
    pub memory_mib: u32,
    /// Huge pages reserved at boot.
    pub hugepages: u32,
    /// Their size, as the kernel's command line has it: 2M, 1G, of Arm's 32M and 512M.
    pub hugepage_size: String,
    /// Module parameters beyond the second stage's: `kvm.eager_page_split=N`.
    pub parameters: Vec<String>,
    /// A network to another host, as its eth0.
    pub wire: Option<Wire>,
    /// A disk with the root that it has, an ext4 image which it leaves as it is; without one, what
    /// it boots into is its root. Hosts of `svm` have one.
    pub root: Option<PathBuf>,
    /// Other disks, raw images that it leaves as they are. Hosts of `svm` have them.
    pub disks: Vec<PathBuf>,
    /// Files from this machine, and where they are to be in the host.
    pub files: Vec<(PathBuf, String)>,
    /// Directories that are to be in the host.
    pub directories: Vec<String>,
    /// Environment for the commands.
    pub env: Vec<(String, String)>,
    /// The commands.
    pub commands: Vec<Vec<String>>,
    /// The wall-clock limit, boot included.
    pub time_limit: Duration,
}

impl Request {
    /// A host with nothing to do yet.
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
            disks: Vec::new(),
            files: Vec::new(),
            directories: Vec::new(),
            env: Vec::new(),
            commands: Vec::new(),
            time_limit: Duration::from_secs(20 * 60),
        }
    }

    /// The host, as messages name it.
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
        // nokaslr and mitigations=off make two runs the same run.
        let console = self.host.ports().console;
        let mut line = format!("console={console},115200 panic=-1 quiet nokaslr mitigations=off");
        if self.pace != Pace::Counted {
            // Real time on a busy machine: a check that wants timer ticks within a moment would
            // panic.
            line.push_str(" no_timer_check nowatchdog");
        }
        for parameter in self.all_parameters() {
            line.push(' ');
            line.push_str(&parameter);
        }
        if self.hugepages > 0 {
            line.push_str(&format!(" hugepagesz={} hugepages={}", self.hugepage_size, self.hugepages));
        }
        line
    }
}
