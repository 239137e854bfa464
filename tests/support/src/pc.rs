//! Linux machines within one process, and handing one over to another, for tests of a machine's
//! state.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::{Failed, LIMIT, ensure, eventually};
use kvm_bindings::CpuId;
use vellum_devices::console::Target;
use vellum_kvm::arch::boot::Entry;
use vellum_kvm::arch::clocks::ClockPolicy;
use vellum_kvm::arch::{layout, regs};
use vellum_kvm::memory::{Memory, MemoryConfig, Slot};
use vellum_kvm::vm::lifecycle::Exit;
use vellum_linux::state::Description;
use vellum_linux::{self as machine, Board, BootConfig, Image, LinuxMachine, Opened, Origin};
use vellum_machine::state::cut_like;
use vellum_machine::{Machine, SaveState, Section};
use vellum_sandbox::{self as sandbox, Sandbox};

/// Bytes of RAM. Copying it takes most of the time of a hand-over here.
const RAM: u64 = 4 << 20;

/// A sandbox that is off, because tests are not confined.
pub fn unconfined() -> Sandbox {
    Sandbox::new(sandbox::Mode::Off)
}

/// The path of a new file.
fn scratch(ending: &str) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!("pc-{}-{}.{ending}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    std::env::temp_dir().join(name)
}

/// A new file with the content `bytes`.
pub fn written(bytes: &[u8]) -> Result<PathBuf, Failed> {
    let path = scratch("elf");
    std::fs::write(&path, bytes)?;
    Ok(path)
}

/// A machine and the file that its serial port writes to.
pub struct Pc {
    /// The machine.
    pub machine: LinuxMachine,
    serial: PathBuf,
}

impl Drop for Pc {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.serial);
    }
}

impl Pc {
    fn config(change: impl FnOnce(&mut machine::Config)) -> (machine::Config, PathBuf) {
        let serial = scratch("serial");
        let mut config =
            machine::Config { serial: Target::File(serial.clone()), ..machine::Config::default() };
        change(&mut config);
        (config, serial)
    }

    /// A board without a kernel, and the file of its serial port.
    pub fn board(change: impl FnOnce(&mut machine::Config)) -> Result<(Board, PathBuf), Failed> {
        let (config, serial) = Self::config(change);
        let memory = Memory::map(layout::RAM, MemoryConfig { slots: 3, ..MemoryConfig::new(RAM) })?;
        Ok((Opened::open(config)?.assemble(&vellum_kvm::vm::open()?, None, || Ok(memory))?, serial))
    }

    /// A machine that waits at the entry of `image`.
    pub fn boot(image: &[u8], change: impl FnOnce(&mut machine::Config)) -> Result<Self, Failed> {
        let (board, serial, entry) = Self::loaded(image, change)?;
        let opened = board.open_serial()?;
        Ok(Self { machine: board.start(Origin::Boot(&entry), opened, unconfined())?, serial })
    }

    /// A machine that waits at the entry of `image`, with the devices of kvm-unit-tests. Otherwise
    /// only multiboot guests have them, and those start in 32-bit mode.
    pub fn boot_with_test_devices(
        image: &[u8],
        change: impl FnOnce(&mut machine::Config),
    ) -> Result<Self, Failed> {
        let (board, serial, entry) = Self::loaded(image, change)?;
        let opened = board.open_serial()?;
        let machine = board.start(Origin::State { test_devices: true }, opened, unconfined())?;
        let cpuid = CpuId::from_entries(&machine.description().cpuid)?;
        let memory = machine.vm.memory.guest.clone();
        machine.vcpus[0].with(move |fd| -> Result<(), Failed> {
            Ok(regs::begin(fd, &cpuid, Some((&entry, &memory)))?)
        })??;
        Ok(Self { machine, serial })
    }

    /// A board with `image` in its memory, the file of its serial port, and the entry.
    fn loaded(
        image: &[u8],
        change: impl FnOnce(&mut machine::Config),
    ) -> Result<(Board, PathBuf, Entry), Failed> {
        let kernel = written(image)?;
        let mut image = Image::open(BootConfig::new(kernel.clone()))?;
        std::fs::remove_file(kernel)?;
        let (board, serial) = Self::board(change)?;
        let entry = board.boot(&mut image)?;
        Ok((board, serial, entry))
    }

    /// A board like the one that `described` describes. `change` sets the host's side of its
    /// devices.
    pub fn board_like(
        described: serde_json::Value,
        change: impl FnOnce(&mut machine::Config),
    ) -> Result<(Board, PathBuf, Origin<'static>), Failed> {
        let (config, serial) = Self::config(|config| {
            config.incoming = true;
            change(config);
        });
        let description = Description::from_json(described)?;
        let mut memory = Memory::map(layout::RAM, MemoryConfig::new(description.memory))?;
        cut_like(&mut memory, &description.slots)?;
        let opened = Opened::open(config)?.become_like(&description)?;
        let origin = Origin::State { test_devices: description.test_devices };
        Ok((opened.assemble(&vellum_kvm::vm::open()?, None, || Ok(memory))?, serial, origin))
    }

    /// A machine like the one that `described` describes.
    pub fn like(
        described: serde_json::Value,
        change: impl FnOnce(&mut machine::Config),
    ) -> Result<Self, Failed> {
        let (board, serial, origin) = Self::board_like(described, change)?;
        let opened = board.open_serial()?;
        Ok(Self { machine: board.start(origin, opened, unconfined())?, serial })
    }

    /// The output of its serial port.
    pub fn said(&self) -> Result<Vec<u8>, Failed> {
        Ok(std::fs::read(&self.serial)?)
    }

    /// Waits until the guest has ended. Returns how.
    pub fn end(&mut self) -> Result<Exit, Failed> {
        eventually(LIMIT, "the guest ends", || Ok(self.machine.poll()?))
    }
}

/// Copies the words of memory that differ.
pub fn copy(from: &[Slot], to: &[Slot]) -> Result<(), Failed> {
    let places = |slots: &[Slot]| -> Vec<_> { slots.iter().map(|s| (s.id(), s.gpa(), s.bytes())).collect() };
    ensure(places(from) == places(to), || format!("{:?} became {:?}", places(from), places(to)))?;
    for (from, to) in from.iter().zip(to) {
        let words = |slot: &Slot| (slot.offset() / 8) as usize..((slot.offset() + slot.bytes()) / 8) as usize;
        let (from, to) = (&from.mapping().words()[words(from)], &to.mapping().words()[words(to)]);
        for (from, to) in from.iter().zip(to) {
            let word = from.load(Ordering::Relaxed);
            // Untouched pages stay untouched.
            if word != to.load(Ordering::Relaxed) {
                to.store(word, Ordering::Relaxed);
            }
        }
    }
    Ok(())
}

/// Hands `source`, which is paused, over to `target`, which has never run, and starts it there.
pub fn hand_over(
    source: &mut impl SaveState,
    target: &mut impl SaveState,
    change: impl FnOnce(Vec<Section>) -> Vec<Section>,
) -> Result<(), Failed> {
    let sections = source.save().map_err(|error| error.to_string())?;
    copy(&source.memory(), &target.memory())?;
    target.restore(change(sections), ClockPolicy::Passes).map_err(|error| error.to_string())?;
    source.release();
    target.commit(false).map_err(|error| error.to_string())?;
    target.start().map_err(|error| error.to_string())?;
    Ok(())
}
