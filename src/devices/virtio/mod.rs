//! Virtio 1.2 devices, and the transport that carries them.
//!
//! Whoever adds a device writes its file and puts it on the list of [`KINDS`]: the command line, the machine, saved states and
//! messages know it by that.
//!
//! Start reading at [`VirtioDevice`], then [`transport`], which drives one, and [`mmio`] and [`pci`], the thin codecs by which a guest
//! reaches its registers. [`queue`] takes requests off a ring, [`slices`](vellum_kvm::memory::slices) is a request's bytes, [`interrupt`] the way back
//! to the driver. Then one file a device: [`rng`] is the shortest, [`blk`] and [`fs`] have a thread of their own ([`worker`]); the
//! others run on the event loop. What announces the devices to a guest (ACPI, FDT) and wires their eventfds to KVM lives
//! with the machine, not here.
//!
//! The driver is hostile: it may change buffers while they are read, point rings anywhere, and reset in the middle of
//! a request. Whatever breaks the rules of a ring stops the device with DEVICE_NEEDS_RESET; whatever is merely a bad
//! request is answered with the device's own error.

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
pub mod worker;

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

/// Makes the list of all kinds of device, and the type of their saved states.
macro_rules! kinds {
    ($($name:ident = $module:ident),* $(,)?) => {
        /// All kinds of device, in the order in which a guest finds them. The last two are a disk that is made of files, and a directory
        /// that is its guest's root.
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

/// What a kind of device is, beside what it does: `KIND` of its file.
#[derive(Debug)]
pub struct Kind {
    /// What it is called by users and in messages, as `disk`.
    pub key: &'static str,
    /// What it is and how its arguments are written, in a line.
    pub about: &'static str,
    /// What stands for its arguments in such a line; `None` where it takes none.
    pub value: Option<&'static str>,
    /// Whether a machine can have several.
    pub repeats: bool,
    /// Reads its arguments.
    pub parse: fn(&str) -> Result<Arc<dyn DeviceConfig>, String>,
    /// Reads what [`DeviceConfig::written`] has written.
    pub read: fn(Value) -> Result<Arc<dyn DeviceConfig>, serde_json::Error>,
}

/// A device that is asked for.
pub trait DeviceConfig: Any + fmt::Debug + Send + Sync {
    /// Its kind.
    fn kind(&self) -> &'static Kind;

    /// What its guest knows it by, where no other device of its kind may have the same.
    fn own_name(&self) -> Option<&str> {
        None
    }

    /// Opens the files, taps and sockets that it needs of the host. Nothing is left behind on failure.
    ///
    /// # Errors
    /// What is wrong with them, and whose fault that is.
    fn open(&self) -> Result<Box<dyn VirtioDevice>, OpenError>;

    /// What is asked for, for another process of this host, wherever that is in the file system.
    ///
    /// # Errors
    /// Where a path is no text, or this process is nowhere.
    fn written(&self) -> io::Result<Value> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// As [`DeviceConfig::open_unlocked`], with what [`VirtioDevice::lend`] gave in the process where it runs yet.
    ///
    /// # Errors
    /// Where these are not what such a device has.
    fn take_over(&self, _lent: Vec<OwnedFd>) -> Result<Box<dyn VirtioDevice>, OpenError> {
        self.open_unlocked()
    }

    /// As [`DeviceConfig::open`], for a machine that runs in another process yet: it takes no lock that the other may have, until
    /// [`VirtioDevice::retake`].
    ///
    /// # Errors
    /// As there.
    fn open_unlocked(&self) -> Result<Box<dyn VirtioDevice>, OpenError> {
        self.open()
    }
}

/// Why a device cannot be opened.
pub type OpenError = Box<dyn Diagnose + Send + Sync>;

/// The first act of a thread that a device starts: it gives up what a thread of its kind does not need.
pub type Enter = Box<dyn FnOnce(ThreadKind) -> io::Result<()> + Send>;

/// How long a device may take to finish what is in flight before it is said to hang: longer than any request to a disk
/// that works, and short enough for whoever waits.
pub const PAUSE_TIMEOUT: Duration = Duration::from_secs(2);

/// What keeps a device from standing still.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} has not come back for {:.1} s", .since.as_secs_f64())]
pub struct Hang {
    /// A request, with the file that it goes to.
    pub what: String,
    /// How long it has been under way.
    pub since: Duration,
}

/// What the transport asks of a device. The transport holds the device's mutex during every call.
pub trait VirtioDevice: Send {
    /// The device type (virtio 1.2, section 5).
    fn kind(&self) -> u32;

    /// Feature bits that the device itself offers; the transport adds its own.
    fn features(&self) -> u64 {
        0
    }

    /// The largest size of each queue, a power of two.
    fn queue_sizes(&self) -> &[u16];

    /// Fills `data` from the device's configuration space at `offset`; what lies beyond it reads as zero.
    fn read_config(&self, offset: usize, data: &mut [u8]);

    /// The driver writes to the configuration space; most devices have nothing to write.
    fn write_config(&mut self, _offset: usize, _data: &[u8]) {}

    /// Starts the device's own thread, if it has one, whose first act is `enter`. Before the first activation, when nothing can
    /// be opened any more.
    ///
    /// # Errors
    /// Where the host refuses the thread, or it cannot be confined.
    fn start(&mut self, _enter: Enter) -> io::Result<()> {
        Ok(())
    }

    /// What the host can do with it beside what the guest does, of a type that is this device's own.
    fn handle(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        None
    }

    /// The driver is ready, or the machine resumes: the device owns its queues until [`VirtioDevice::quiesce`].
    fn activate(&mut self, active: Active);

    /// Finishes what is in flight and gives the queues back: nothing touches guest memory any more. A device that would
    /// take longer than `patience` says what hangs, and goes on with its queues as if it had not been asked.
    fn quiesce(&mut self, patience: Duration) -> Result<Option<Active>, Hang>;

    /// The driver has reset the device: forget everything that the next driver must not see. This runs on a vCPU's
    /// thread, whose sandbox allows few system calls; the queues' doorbells ring afterwards, for what needs more.
    fn reset(&mut self) {}

    /// Whether queue notifications are for the event loop; false for a device with a worker of its own.
    fn on_event_loop(&self) -> bool {
        true
    }

    /// Adds the device's own file descriptors to the event loop, with data below [`QUEUE_EVENTS`].
    fn watch(&mut self, _ops: &mut EventOps) {}

    /// The driver has notified queue `index`.
    fn notified(&mut self, _index: u16, _ops: &mut EventOps) {}

    /// One of the device's own file descriptors is ready.
    fn ready(&mut self, _events: Events, _ops: &mut EventOps) {}

    /// Gives up the locks that it has on the host's files, so that another process can have them. While it is quiesced.
    fn release(&mut self) {}

    /// Takes them: where it was released, or opened to be [restored](DeviceConfig::open_unlocked).
    ///
    /// # Errors
    /// Who else has one.
    fn retake(&mut self) -> Result<(), OpenError> {
        Ok(())
    }

    /// Descriptors of all that it has open on the host, for a process that takes it over ([`DeviceConfig::take_over`]). This one may run it
    /// on nonetheless.
    ///
    /// # Errors
    /// Where there is no descriptor left.
    fn lend(&mut self) -> io::Result<Vec<OwnedFd>> {
        Ok(Vec::new())
    }

    /// Its machine has come from another process, and runs here from now on: tells the world, where that has to know.
    fn arrived(&mut self) {}

    /// Why its machine can be neither saved nor moved, if it cannot; with the key of its kind.
    fn stays(&self) -> Option<(&'static str, &'static str)> {
        None
    }

    /// What a new process needs to carry on, beyond the transport's registers. Called while quiesced.
    fn save(&self) -> DeviceState;

    /// Takes over what `save` gave; called before the first activation.
    fn restore(&mut self, state: DeviceState) -> Result<(), RestoreError>;
}

/// In the event loop the data of queue `n`'s doorbell is `QUEUE_EVENTS + n`; a device's own are below it.
pub const QUEUE_EVENTS: u32 = 1 << 31;

/// A saved state that does not fit the device it is given to.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// It is another device's.
    #[error(
        "the saved state is of a {found}, the device here is a {expected}: give the restored machine the same devices in the same order"
    )]
    Kind {
        /// The device here.
        expected: &'static str,
        /// The device that was saved.
        found: &'static str,
    },
    /// A field holds what no save writes.
    #[error("the saved state's {field} is {value}, which {reason}")]
    Field {
        /// Which field.
        field: &'static str,
        /// What it holds.
        value: String,
        /// What is wrong with it.
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
    /// Feature bits that both sides have agreed on.
    pub features: u64,
    /// The queues that the driver has made ready, in order of their index.
    pub queues: Vec<VirtQueue>,
}

impl Active {
    /// EventSources what the driver has made available in queue `index`, if it has made that ready: [`VirtQueue::serve`].
    pub fn serve<'m>(&'m mut self, index: u16, serve: impl FnMut(&mut Chain<'m>) -> Served) {
        if let Some(queue) = self.queues.iter_mut().find(|queue| queue.index() == index) {
            queue.serve(&self.memory, serve);
        }
    }

    /// Tells the driver that the configuration space has changed.
    pub fn config_changed(&self) {
        if let Some(queue) = self.queues.first() {
            queue.interrupt().config();
        }
    }

    /// Whether the driver has accepted this feature bit.
    pub fn has(&self, feature: u32) -> bool {
        self.features & (1 << feature) != 0
    }
}

/// Copies the part of a configuration space that starts at `offset`; zeros follow its end.
pub(crate) fn read_space(space: &[u8], offset: usize, data: &mut [u8]) {
    let tail = space.get(offset..).unwrap_or(&[]);
    let count = tail.len().min(data.len());
    data[..count].copy_from_slice(&tail[..count]);
    data[count..].fill(0);
}
