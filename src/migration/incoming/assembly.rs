//! Assembles a machine like the source's from this process's resources, or returns every reason why
//! it cannot.

use std::io;
use std::sync::Arc;

use serde_json::Value;

use super::{Arrived, Host};
use crate::fit::{self, Parts, Tsc};
use crate::message::Misfit;
use crate::migratable::MigratableMachine;
use crate::receiver::Ram;
use vellum_guests::guest::{Guest, GuestConfig};
use vellum_guests::run::BuiltinMachine;
use vellum_guests::state as guest_state;
use vellum_kvm::arch::layout;
use vellum_kvm::memory::{Backing, Memory, MemoryConfig, Room, short_size};
use vellum_linux::{self as machine, Origin};
use vellum_machine::state::{self, cut_like};
use vellum_sandbox::ThreadKind;

/// Why a machine cannot be assembled here.
pub(super) enum Refused {
    Misfits(Vec<Misfit>),
    Failed(String),
}

impl From<String> for Refused {
    fn from(why: String) -> Self {
        Self::Failed(why)
    }
}

fn failed(error: impl std::fmt::Display) -> Refused {
    Refused::Failed(error.to_string())
}

/// The source of memory: the host's memory within `room`, or what there is already.
struct Source {
    room: Room,
    there: Option<Ram>,
}

/// Maps memory of the source's size, with the source's memslots.
fn map(from: Source, config: MemoryConfig, size: u64, places: &[state::Place]) -> Result<Memory, Refused> {
    let config = MemoryConfig { size, slots: 1, ..config };
    let (mapped, remedy) = match from.there {
        Some(Ram::Handed(file)) => (Memory::adopt(layout::RAM, config, file), "have it copied"),
        Some(Ram::Base(file)) => (Memory::on_base(layout::RAM, config, file), "restore a snapshot of it"),
        None => {
            let mapped = Memory::map_within(&from.room, layout::RAM, config);
            (mapped, "use a target with more memory, or another backing there")
        }
    };
    let mut memory = mapped.map_err(|error| {
        Refused::Misfits(vec![Misfit {
            what: "memory".into(),
            source: short_size(size),
            target: error.to_string(),
            remedy: remedy.into(),
        }])
    })?;
    cut_like(&mut memory, places).map_err(failed)?;
    Ok(memory)
}

fn fits(theirs: &Parts<'_>, ours: &Parts<'_>, tsc: Tsc) -> Result<(), Refused> {
    let misfits = fit::misfits(theirs, ours, tsc);
    if misfits.is_empty() { Ok(()) } else { Err(Refused::Misfits(misfits)) }
}

/// Assembles a machine like the one that `config` describes.
pub(super) fn assemble(host: Host, config: Value, there: Option<Ram>) -> Result<Arrived, Refused> {
    let Host { kvm, begun, devices, serial, mut memory, room, pagemap, other_tsc, sandbox, .. } = host;
    match &there {
        Some(Ram::Handed(file)) => memory.backing = Backing::of_handed(file).map_err(failed)?,
        Some(Ram::Base(file)) => memory.backing = Backing::of_base(file, memory.backing).map_err(failed)?,
        None => {}
    }
    let from = Source { room, there };
    if config["kind"] == "built-in" {
        if let Some(name) = devices.names().next() {
            return Err(Refused::Misfits(vec![Misfit {
                what: name.to_owned(),
                source: "a guest without devices".into(),
                target: "a device".into(),
                remedy: "leave it out there".into(),
            }]));
        }
        let described = guest_state::Description::from_json(config).map_err(failed)?;
        let mut config = described.run(memory).map_err(failed)?;
        // Like the backing, the dirty ring and the CPUs belong to this host. The source's settings do
        // not matter.
        config.dirty_ring = devices.dirty_ring();
        config.pins = devices.pins().map(<[usize]>::to_vec);
        let memory = map(from, memory, described.memory, described.ram())?;
        let enter = move |index: usize| {
            sandbox.enter(ThreadKind::Vcpu, &format!("vcpu{index}")).map_err(io::Error::other)
        };
        let guest = GuestConfig {
            page: config.page,
            cpuid: config.cpuid.clone(),
            dirty_ring: config.dirty_ring,
            pins: config.pins.clone(),
            enter: Arc::new(enter),
            begun,
            ..GuestConfig::new(config.vcpus)
        };
        let guest = Guest::start(&kvm, memory, guest).map_err(failed)?;
        let mut run = BuiltinMachine::new(guest, config).map_err(failed)?;
        let here = run.description();
        let [theirs, ours] = [&described, &here].map(|guest| Parts {
            cpuid: &guest.cpuid,
            tsc_khz: Some(guest.tsc_khz),
            devices: &[],
        });
        fits(&theirs, &ours, Tsc { scales: run.guest.scales_tsc(), allowed: other_tsc })?;
        if other_tsc {
            run.guest.allow_other_tsc();
        }
        return Ok(Arrived::BuiltIn(Box::new(
            MigratableMachine::new(run, sandbox, pagemap).map_err(failed)?,
        )));
    }
    let described = machine::state::Description::from_json(config).map_err(failed)?;
    let memory = map(from, memory, described.memory, &described.slots)?;
    let devices = devices.become_like(&described).map_err(failed)?;
    let board = devices.assemble(&kvm, begun, || Ok(memory)).map_err(failed)?;
    let origin = Origin::State { test_devices: described.test_devices };
    let mut machine = board.start(origin, serial, sandbox).map_err(failed)?;
    let here = machine.description();
    let [theirs, ours] = [&described, &here].map(|machine| Parts {
        cpuid: &machine.cpuid,
        tsc_khz: machine.tsc_khz,
        devices: &machine.devices,
    });
    fits(&theirs, &ours, Tsc { scales: machine.scales_tsc(), allowed: other_tsc })?;
    if other_tsc {
        machine.allow_other_tsc();
    }
    Ok(Arrived::Pc(Box::new(MigratableMachine::new(machine, sandbox, pagemap).map_err(failed)?)))
}
