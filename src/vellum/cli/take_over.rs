//! `vellum receive --take-over`: the new process of `vellum ctl NAME upgrade`, which starts it. A
//! list with inherited descriptors replaces the machine's command line.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::args;
use super::failure::Failure;
use super::flags::Flags;
use super::kernel;
use super::result::ResultArgs;
use crate::session::incoming::{self, Lenience, Listen, Outcome};
use crate::session::log::{self, Beside};
use crate::session::{self};
use vellum_devices::console;
use vellum_devices::virtio::DeviceConfig;
use vellum_devices::virtio::handoff::HandedDevice;
use vellum_kvm::memory::MemoryConfig;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_linux as machine;
use vellum_linux::virtio;
use vellum_machine::handoff::{Device, List, Serial};
use vellum_migration::link::LIVENESS;
use vellum_sandbox::user::User;
use vellum_sys::file::taken;
use vellum_sys::identity;

/// The content of the file of `--take-over`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Inherited {
    /// A [`List`].
    pub list: Value,
    /// The list's descriptors, by their numbers in this process.
    pub descriptors: Vec<RawFd>,
    /// The connection that the machine arrives on.
    pub link: RawFd,
    /// The socket to the process that this one takes over from. Used if the list has none.
    #[serde(rename = "tether")]
    pub supervisor: RawFd,
    /// The backing of memory that is copied. Otherwise it arrives as a descriptor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy: Option<String>,
}

/// The maximum size of the file in bytes.
const MAX_MESSAGE: u64 = 2 << 20;

/// The descriptors of a list. Each can be taken once.
struct Descriptors(Vec<Option<OwnedFd>>);

impl Descriptors {
    fn take(&mut self, at: usize) -> Result<OwnedFd, Failure> {
        let taken = self.0.get_mut(at).and_then(Option::take);
        taken.ok_or_else(|| Failure::usage(format!("--take-over: descriptor {at} of the list is not there")))
    }

    fn file(&mut self, at: Option<usize>) -> Result<Option<File>, Failure> {
        at.map(|at| self.take(at).map(File::from)).transpose()
    }
}

/// Runs the machine that arrives from the process that this one takes over from.
pub(super) fn run(file: RawFd, flags: Flags) -> Result<Exit, Failure> {
    log::start(tracing::Level::INFO, Beside::Console);
    let wrong = |what: &dyn std::fmt::Display| Failure::usage(format!("--take-over {file}: {what}"));
    let mut bytes = Vec::new();
    let opened = taken(file).map(File::from).ok_or_else(|| wrong(&"no such descriptor is open"))?;
    opened.take(MAX_MESSAGE).read_to_end(&mut bytes).map_err(|error| wrong(&error))?;
    let inherited: Inherited = serde_json::from_slice(&bytes).map_err(|error| wrong(&error))?;
    let Inherited { list, descriptors, link, supervisor, copy } = inherited;
    let list = serde_json::to_vec(&list).map_err(Failure::host)?;
    let list = List::parse(&list, descriptors.len()).map_err(|error| wrong(&error))?;
    let numbers: BTreeSet<RawFd> = descriptors.iter().copied().chain([link, supervisor]).collect();
    if numbers.len() != descriptors.len() + 2 {
        return Err(wrong(&"a descriptor is named twice"));
    }
    let own = |fd: RawFd| taken(fd).ok_or_else(|| wrong(&format_args!("descriptor {fd} is not open")));
    let mut lent =
        Descriptors(descriptors.into_iter().map(|fd| own(fd).map(Some)).collect::<Result<_, _>>()?);
    let (link, first) = (own(link)?, own(supervisor)?);
    let supervisor = list.supervisor.map_or(Ok(first), |at| lent.take(at))?;
    let control = list.control.as_ref().map(|control| lent.take(control.descriptor)).transpose()?;
    let user = list.user.filter(|_| identity::effective().0 == 0).map(|(uid, gid)| User { uid, gid });
    let process = session::Config {
        control: list.control.map(|control| control.path),
        sandbox: list.sandbox.parse().map_err(|error| wrong(&error))?,
        user,
        limit: list.limit_ms.map(Duration::from_millis),
        result: list.result.clone(),
        lent: Some(session::Supervised { control: control.map(Arc::new), supervisor: Arc::new(supervisor) }),
        gdb: None,
        waits: None,
        opens_as_user: true,
        outlives_client: false,
        tells_of_silence: false,
        // Its memory has nothing in common with another machine's any more. A machine that waits for
        // commands is not handed over.
        log: None,
        forked_from: None,
        children: None,
    };
    let serial = match list.serial {
        Some(Serial { output, input, slave, raw }) => {
            let [output, input, slave] = [lent.file(output)?, lent.file(input)?, lent.file(slave)?];
            console::Opened::handed_over(output, input, slave).raw(raw)
        }
        None => console::Opened::handed_over(None, None, None),
    };
    let mut devices: Vec<Arc<dyn DeviceConfig>> = Vec::new();
    for Device { kind, written, descriptors } in list.devices {
        let descriptors = descriptors.into_iter().map(|at| lent.take(at)).collect::<Result<_, _>>()?;
        devices
            .push(Arc::new(HandedDevice::new(&kind, written, descriptors).map_err(|error| wrong(&error))?));
    }
    let config = machine::Config {
        dirty_ring: list.dirty_ring,
        virtio: virtio::Config(devices),
        ..machine::Config::default()
    };
    // Memory that is not copied arrives with its backing.
    let backing = copy.map(|copy| args::backing(&copy)).transpose().map_err(|error| wrong(&error))?;
    let memory = MemoryConfig { lock: list.lock, ..MemoryConfig::new(0) };
    let memory = MemoryConfig { backing: backing.unwrap_or(memory.backing), ..memory };
    // Closes the remaining descriptors: the standard ones, which this process has as its own.
    drop(lent);
    let lenience = Lenience { liveness: LIVENESS, other_tsc: true };
    let result = ResultArgs::at(list.result).open_as(user)?;
    let outcome = incoming::run(&process, Listen::Lent(link, serial), memory, config, lenience);
    match outcome.map_err(|error| Failure::of(&error, flags))? {
        Outcome::Succeeded(exit) => Ok(exit),
        Outcome::BuiltIn(outcome) => result.deliver(&[outcome.report]).map(|()| outcome.exit),
        Outcome::Kernel(outcome) => {
            kernel::tell(&outcome);
            Ok(outcome.exit)
        }
    }
}
