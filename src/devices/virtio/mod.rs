//! Virtio 1.2 devices, and the transports that carry them.
//!
//! To add a device, write its file and add it to [`KINDS`]. The command line, the machine, saved
//! states and messages find it there.
//!
//! Start reading at [`VirtioDevice`], then [`transport`], which drives a device. [`mmio`] and
//! [`pci`] are thin codecs through which a guest reaches its registers. [`queue`] takes requests
//! off a ring, [`slices`](vellum_kvm::memory::slices) holds a request's bytes, [`interrupt`]
//! signals the driver. Each device is one file or directory. [`rng`] is the shortest. [`blk`] and
//! [`fs`] have a thread of their own ([`worker`]); the others run on the event loop. The machine
//! announces devices to the guest (ACPI, FDT) and wires their eventfds to KVM.
//!
//! The driver is hostile: it may change buffers while they are read, point rings anywhere, and
//! reset in the middle of a request. A violation of a ring's rules stops the device with
//! DEVICE_NEEDS_RESET. A bad request is answered with the device's own error.

pub mod balloon;
pub mod blk;
pub mod cidata;
pub mod console;
pub mod fs;
pub mod handoff;
pub mod interrupt;
pub mod mmio;
pub mod net;
pub mod pci;
pub mod queue;
pub mod registers;
pub mod rng;
pub mod transport;
pub mod vsock;
pub(crate) mod worker;

use std::any::Any;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use event_manager::{EventOps, Events};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use queue::{Chain, Served, VirtQueue};
use vellum_kvm::memory::GuestMemory;
use vellum_sandbox::ThreadKind;
use vellum_sys::diagnose::Diagnose;

/// Defines the list of all kinds of device, and the type of their saved states.
macro_rules! kinds {
    ($($name:ident = $module:ident),* $(,)?) => {
        /// All kinds of device, in the order in which a guest finds them. The last two are a disk
        /// made of files, and a directory that is the guest's root.
        pub static KINDS: &[&Kind] = &[$(&$module::KIND,)* &cidata::KIND, &fs::ROOT];

        /// A device's own part of its saved state.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(rename_all = "kebab-case", deny_unknown_fields)]
        pub enum DeviceState {
            $(
                #[doc = concat!("Of `", stringify!($module), "`.")]
                $name($module::State),
            )*
        }

        impl DeviceState {
            /// The key of its kind.
            pub fn key(&self) -> &'static str {
                match self {
                    $(Self::$name(_) => $module::KIND.key,)*
                }
            }
        }
    };
}

kinds! {
    Disk = blk,
    Net = net,
    Vsock = vsock,
    Console = console,
    Rng = rng,
    Balloon = balloon,
    Share = fs,
}

/// A kind of device as users see it: `KIND` in its file.
#[derive(Debug)]
pub struct Kind {
    /// Its name for users and in messages, such as `disk`.
    pub key: &'static str,
    /// A line of help: what it is, and the syntax of its arguments.
    pub about: &'static str,
    /// The placeholder for its arguments in help; `None` if it takes none.
    pub value: Option<&'static str>,
    /// Whether a machine can have several.
    pub repeats: bool,
    /// Parses its arguments.
    pub parse: fn(&str) -> Result<Arc<dyn DeviceConfig>, String>,
    /// Reads what [`DeviceConfig::written`] returned.
    pub read: fn(Value) -> Result<Arc<dyn DeviceConfig>, serde_json::Error>,
}

/// The configuration of a device.
pub trait DeviceConfig: Any + fmt::Debug + Send + Sync {
    /// Its kind.
    fn kind(&self) -> &'static Kind;

    /// Its name in the guest, if that must be unique among devices of its kind.
    fn own_name(&self) -> Option<&str> {
        None
    }

    /// Opens the files, taps and sockets that the device needs. A failure leaves nothing behind.
    ///
    /// # Errors
    /// What cannot be opened, and whether the user or the host is at fault.
    fn open(&self) -> Result<Box<dyn VirtioDevice>, OpenError>;

    /// The configuration for another process of this host, independent of the working directory.
    ///
    /// # Errors
    /// A path is not UTF-8, or this process has no working directory.
    fn written(&self) -> io::Result<Value> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Like [`DeviceConfig::open_unlocked`], with the descriptors from [`VirtioDevice::lend`] of
    /// the process that still runs the device.
    ///
    /// # Errors
    /// The descriptors do not fit the device.
    fn take_over(&self, _lent: Vec<OwnedFd>) -> Result<Box<dyn VirtioDevice>, OpenError> {
        self.open_unlocked()
    }

    /// Like [`DeviceConfig::open`], for a machine that still runs in another process. Takes no lock
    /// that the other process may hold. [`VirtioDevice::retake`] does that later.
    ///
    /// # Errors
    /// As [`DeviceConfig::open`].
    fn open_unlocked(&self) -> Result<Box<dyn VirtioDevice>, OpenError> {
        self.open()
    }
}

/// Why a device cannot be opened.
pub type OpenError = Box<dyn Diagnose + Send + Sync>;

/// Called first by a thread that a device starts. Drops the privileges that a thread of its kind
/// does not need.
pub type Enter = Box<dyn FnOnce(ThreadKind) -> io::Result<()> + Send>;

/// Why the thread of a device does not run.
#[derive(Debug)]
pub enum StartError {
    /// The host refuses the thread, or it cannot be sandboxed.
    Host(io::Error),
    /// A file that the thread reads first cannot be used.
    Open(OpenError),
}

impl From<io::Error> for StartError {
    fn from(error: io::Error) -> Self {
        Self::Host(error)
    }
}

/// How long a device may take to finish requests in flight before it counts as hung. Longer than
/// any request of a working disk, short enough for users who wait.
pub const PAUSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Why a device cannot be quiesced.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} has not come back for {:.1} s", .since.as_secs_f64())]
pub struct Hang {
    /// A request and its file.
    pub what: String,
    /// How long it has been in progress.
    pub since: Duration,
}

/// The interface of a device to its transport. The transport holds the device's mutex during every
/// call.
pub trait VirtioDevice: Send {
    /// The device type (virtio 1.2, section 5).
    fn kind(&self) -> u32;

    /// Feature bits that the device itself offers. The transport adds its own.
    fn features(&self) -> u64 {
        0
    }

    /// The maximum size of each queue, a power of two.
    fn queue_sizes(&self) -> &[u16];

    /// Reads the device's configuration space from `offset` into `data`. Bytes beyond its end are
    /// zero.
    fn read_config(&self, offset: usize, data: &mut [u8]);

    /// Handles a write to the configuration space. Most devices have no writable fields.
    fn write_config(&mut self, _offset: usize, _data: &[u8]) {}

    /// Starts the device's own thread, if it has one. The thread calls `enter` first. This happens
    /// before the first activation, when nothing more can be opened.
    ///
    /// # Errors
    /// The thread does not run.
    fn start(&mut self, _enter: Enter) -> Result<(), StartError> {
        Ok(())
    }

    /// A handle for the host's own operations on the device. Its type belongs to the device.
    fn handle(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        None
    }

    /// The driver is ready, or the machine resumes: the device owns its queues until
    /// [`VirtioDevice::quiesce`].
    fn activate(&mut self, active: Active);

    /// Finishes requests in flight and returns the queues. Afterwards the device does not touch
    /// guest memory. If this would take longer than `patience`, the device reports what hangs and
    /// continues with its queues.
    fn quiesce(&mut self, patience: Duration) -> Result<Option<Active>, Hang>;

    /// The driver has reset the device: drop all state that the next driver must not see. This runs
    /// on a vCPU thread, whose sandbox allows few system calls. The queues' doorbells ring
    /// afterwards, for work that needs more.
    fn reset(&mut self) {}

    /// Whether queue notifications go to the event loop. False for a device with a worker.
    fn on_event_loop(&self) -> bool {
        true
    }

    /// Adds the device's own file descriptors to the event loop, with data below [`QUEUE_EVENTS`].
    fn watch(&mut self, _ops: &mut EventOps) {}

    /// The driver has notified queue `index`.
    fn notified(&mut self, _index: u16, _ops: &mut EventOps) {}

    /// One of the device's own file descriptors is ready.
    fn ready(&mut self, _events: Events, _ops: &mut EventOps) {}

    /// Releases the device's locks on the host's files, so that another process can take them.
    /// Called while quiesced.
    fn release(&mut self) {}

    /// Takes the locks again: after a release, or when opened
    /// [unlocked](DeviceConfig::open_unlocked).
    ///
    /// # Errors
    /// Another user holds a lock.
    fn retake(&mut self) -> Result<(), OpenError> {
        Ok(())
    }

    /// Duplicates all descriptors that the device has open on the host, for a process that takes it
    /// over ([`DeviceConfig::take_over`]). This process may still continue to run the device.
    ///
    /// # Errors
    /// No descriptor is left.
    fn lend(&mut self) -> io::Result<Vec<OwnedFd>> {
        Ok(Vec::new())
    }

    /// The machine has arrived from another process and runs here now. Announces that to the
    /// network, if needed. If it was `forked`, the other machine runs on.
    fn arrived(&mut self, _forked: bool) {}

    /// Why the machine can be neither saved nor moved because of this device, if so: the key of its
    /// kind, and the reason.
    fn stays(&self) -> Option<(&'static str, &'static str)> {
        None
    }

    /// Whether a fork copies what the device keeps in this process alone.
    fn is_copied_by_forks(&self) -> bool {
        false
    }

    /// The state that a new process needs, beyond the transport's registers. Called while quiesced.
    fn save(&self) -> DeviceState;

    /// Restores what `save` returned. Called before the first activation.
    fn restore(&mut self, state: DeviceState) -> Result<(), RestoreError>;
}

/// In the event loop, queue `n`'s doorbell has the data `QUEUE_EVENTS + n`. A device's own events
/// are below.
pub(crate) const QUEUE_EVENTS: u32 = 1 << 31;

/// A saved state does not fit its device.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// It belongs to another kind of device.
    #[error(
        "the saved state is of a {found}, the device here is a {expected}: give the restored machine the same devices in the same order"
    )]
    Kind {
        /// The device here.
        expected: &'static str,
        /// The device that was saved.
        found: &'static str,
    },
    /// A field has an invalid value.
    #[error("the saved state's {field} is {value}, which {reason}")]
    Field {
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
        /// What is wrong with it, as a verb phrase.
        reason: &'static str,
    },
}

impl RestoreError {
    fn kind(expected: &Kind, found: &DeviceState) -> Self {
        RestoreError::Kind { expected: expected.key, found: found.key() }
    }
}

/// What a device owns while its driver runs.
pub struct Active {
    /// Guest memory.
    pub memory: Arc<GuestMemory>,
    /// The negotiated feature bits.
    pub features: u64,
    /// The queues that the driver has made ready, ordered by index.
    pub queues: Vec<VirtQueue>,
}

impl Active {
    /// Serves the available requests of queue `index`, if it is ready: [`VirtQueue::serve`].
    pub fn serve<'m>(&'m mut self, index: u16, serve: impl FnMut(&mut Chain<'m>) -> Served) {
        if let Some(queue) = self.queues.iter_mut().find(|queue| queue.index() == index) {
            queue.serve(&self.memory, serve);
        }
    }

    /// Tells the driver that the configuration space has changed.
    pub(crate) fn config_changed(&self) {
        if let Some(queue) = self.queues.first() {
            queue.interrupt().config();
        }
    }

    /// Whether the driver has accepted this feature bit.
    pub fn has(&self, feature: u32) -> bool {
        self.features & (1 << feature) != 0
    }
}

/// Copies the part of a configuration space from `offset` on. Bytes beyond its end are zero.
pub(crate) fn read_space(space: &[u8], offset: usize, data: &mut [u8]) {
    let tail = space.get(offset..).unwrap_or(&[]);
    let count = tail.len().min(data.len());
    data[..count].copy_from_slice(&tail[..count]);
    data[count..].fill(0);
}
