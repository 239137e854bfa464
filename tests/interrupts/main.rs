//! Interrupts of a machine that is paused or continues as another one: none is lost, and none comes
//! twice. The tests run on real KVM, with a kernel of a few bytes ([`guest`]) and both interrupt
//! controllers.
//!
//! In *rounds* the guest raises a random set of interrupts while it takes none: they are requested
//! but not taken, or one is in service and not ended. *Freely*, all sources run while the machine
//! is paused at random times.
//!
//! `VELLUM_MIGRATION=all` makes more than a thousand pauses instead of some hundreds. `VELLUM_SEED`
//! repeats a run.

mod guest;

use std::mem::offset_of;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::sync::{Arc, LazyLock, Mutex};

use event_manager::{EventManager, MutEventSubscriber, SubscriberOps};
use support::hosts::{kvm, slow_if_emulated};
use support::pc::{Pc, hand_over};
use support::{Failed, LIMIT, Need, Random, Tests, ensure, eventually};
use vellum_devices::virtio::registers::{Half, Register};
use vellum_devices::virtio::rng::RngConfig;
use vellum_host::Facts;
use vellum_kvm::arch::irqchip::Mode;
use vellum_machine::{Machine, SaveState};
use virtio_bindings::virtio_config::*;
use virtio_bindings::virtio_ring::VRING_DESC_F_WRITE;
use vm_memory::{ByteValued, Bytes, GuestAddress};

use guest::{Control, want};

fn main() -> ExitCode {
    let mut tests = Tests::from_args();
    let in_service = in_service();
    for (irqchip, mode) in [("split", Mode::Split), ("kernel", Mode::Kernel)] {
        for (name, timer) in [("deadline", Timer::Deadline), ("one_shot", Timer::OneShot)] {
            let name = |what: &str| format!("{what}_with_a_{name}_timer_and_a_{irqchip}_irqchip");
            let sources = want::TIMER | want::SERIAL | want::VIRTIO | want::LEVEL;
            tests.add(name("what_is_requested_is_taken_once"), slow_if_emulated(), move || {
                rounds(mode, timer, sources)
            });
            tests.add(name("what_comes_freely_is_taken_once"), slow_if_emulated(), move || {
                freely(mode, timer)
            });
        }
        let name = format!("what_is_in_service_stays_so_until_its_end_with_a_{irqchip}_irqchip");
        tests.add(name, in_service.clone(), move || rounds(mode, Timer::Deadline, !0));
    }
    tests.run()
}

/// Requires a KVM that keeps an interrupt in service until the guest ends it.
fn in_service() -> Need {
    kvm()?;
    match Guest::keeps_in_service() {
        Ok(true) => Ok(()),
        Ok(false) => Err("needs a KVM that keeps an interrupt in service until its guest ends it: this one forgets it as it delivers it \
                          (cargo lab test svm has one that does)"
            .into()),
        Err(error) => Err(error.message().unwrap_or("the guest does not run").into()),
    }
}

/// How the local APIC's timer is armed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Timer {
    /// With a TSC deadline.
    Deadline,
    /// With a count. When the local APIC is set, KVM restarts a timer that has expired. The state
    /// does not tell whether it has interrupted, so it may interrupt once more after a move.
    OneShot,
}

/// The number of pauses. An emulated CPU takes a second for each.
fn pauses() -> u64 {
    static PAUSES: LazyLock<u64> = LazyLock::new(|| {
        let all = std::env::var("VELLUM_MIGRATION").is_ok_and(|value| value == "all");
        match (all, Facts::collect(String::new()).emulated) {
            (true, _) => 1200,
            (false, true) => 10,
            (false, false) => 40,
        }
    });
    *PAUSES
}

// SAFETY: only integers, without padding: 64 bits wide except for four of 32 bits that follow one
// another.
unsafe impl ByteValued for Control {}

type Subscriber = Arc<Mutex<dyn MutEventSubscriber + Send>>;

/// A guest and its current machine.
struct Guest {
    /// The event loop of its device.
    events: EventManager<Subscriber>,
    pc: Pc,
    /// Bytes sent to its serial port.
    sent: u64,
    timer: Timer,
    /// An interrupt stays in service until the guest ends it. A KVM that ends it at once sees that
    /// the line is still asserted, and its interrupt may come twice.
    in_service: bool,
}

impl Guest {
    /// Whether this KVM keeps an interrupt in service until the guest ends it.
    fn keeps_in_service() -> Result<bool, Failed> {
        let mut guest = Self::up(Mode::Split, Timer::Deadline)?;
        guest.put(offset_of!(Control, want), want::HELD)?;
        guest.put(offset_of!(Control, go), 1)?;
        guest.until("it has taken an interrupt", |control| control.ready == 1)?;
        guest.pc.machine.pause()?;
        let lapic = guest.pc.machine.vcpus[0].with(|fd| fd.get_lapic())??;
        // The in-service registers: 32 vectors each, 16 bytes apart.
        let byte = 0x100 + 0x10 * usize::from(guest::HELD / 32) + usize::from(guest::HELD % 32 / 8);
        Ok(lapic.regs[byte] as u8 & 1 << (guest::HELD % 8) != 0)
    }

    /// A guest that is programmed and waits with interrupts off.
    fn boot(irqchip: Mode, timer: Timer) -> Result<Self, Failed> {
        Ok(Self { in_service: Self::keeps_in_service()?, ..Self::up(irqchip, timer)? })
    }

    fn up(irqchip: Mode, timer: Timer) -> Result<Self, Failed> {
        let pc = Pc::boot_with_test_devices(&guest::kernel(), |config| {
            config.irqchip = irqchip;
            config.virtio.0.push(Arc::new(RngConfig));
        })?;
        let memory = &pc.machine.vm.memory.guest;
        let (table, (at, register)) = guest::descriptor_table();
        memory.write_slice(&table, GuestAddress(guest::IDT))?;
        memory.write_slice(&register, GuestAddress(at))?;
        // The one buffer of eight bytes that the driver gives the device again and again.
        memory.write_obj(
            [guest::BUFFER, 8 | u64::from(VRING_DESC_F_WRITE) << 32],
            GuestAddress(guest::DESCRIPTORS),
        )?;
        let mut guest = Self { events: events(&pc)?, pc, sent: 0, timer, in_service: false };
        guest.drive();
        let (lvt, by_deadline) = match timer {
            Timer::Deadline => (1 << 18, 1),
            Timer::OneShot => (0, 0),
        };
        guest.put(offset_of!(Control, by_deadline), by_deadline)?;
        guest.put(offset_of!(Control, lvt), lvt | u64::from(guest::TIMER))?;
        guest.pc.machine.start()?;
        guest.until("it is up", |control| control.up == 1)?;
        Ok(guest)
    }

    /// Programs the device's registers.
    fn drive(&self) {
        const FEATURES_OK: u32 =
            VIRTIO_CONFIG_S_ACKNOWLEDGE | VIRTIO_CONFIG_S_DRIVER | VIRTIO_CONFIG_S_FEATURES_OK;
        let device = &self.pc.machine.virtio.devices[0].device;
        for (register, value) in [
            (Register::Status, VIRTIO_CONFIG_S_ACKNOWLEDGE | VIRTIO_CONFIG_S_DRIVER),
            (Register::DriverFeaturesSelect, 1),
            (Register::DriverFeatures, 1 << (VIRTIO_F_VERSION_1 - 32)),
            (Register::Status, FEATURES_OK),
            (Register::QueueSelect, 0),
            (Register::QueueSize, 16),
            (Register::QueueDescriptors(Half::Low), guest::DESCRIPTORS as u32),
            (Register::QueueAvailable(Half::Low), guest::AVAILABLE as u32),
            (Register::QueueUsed(Half::Low), guest::USED as u32),
            (Register::QueueReady, 1),
            (Register::Status, FEATURES_OK | VIRTIO_CONFIG_S_DRIVER_OK),
        ] {
            device.set(register, value);
        }
    }

    fn put(&self, field: usize, value: u64) -> Result<(), Failed> {
        let at = GuestAddress(guest::CONTROL + field as u64);
        Ok(self.pc.machine.vm.memory.guest.store(value, at, Ordering::Release)?)
    }

    fn control(&self) -> Result<Control, Failed> {
        let mut control = Control::default();
        for (at, word) in (guest::CONTROL..).step_by(8).zip(control.as_mut_slice().as_chunks_mut().0) {
            let value: u64 = self.pc.machine.vm.memory.guest.load(GuestAddress(at), Ordering::Acquire)?;
            *word = value.to_ne_bytes();
        }
        let mut wrong = control.out_of_turn + control.unexpected + control.wrong_bytes;
        wrong += if self.timer == Timer::Deadline { control.early } else { 0 };
        wrong += if self.in_service { control.unasserted } else { 0 };
        ensure(wrong == 0, || format!("what must not be: {control:?}"))?;
        Ok(control)
    }

    /// Runs the device's event loop.
    fn serve(&mut self) -> Result<(), Failed> {
        while self.events.run_with_timeout(0).map_err(|error| error.to_string())? > 0 {}
        Ok(())
    }

    /// Waits until `is` is true for the guest's counters.
    fn until(&mut self, what: &str, is: impl Fn(&Control) -> bool) -> Result<Control, Failed> {
        let mut last = Control::default();
        let found = eventually(LIMIT, what, || {
            self.serve()?;
            last = self.control()?;
            Ok(is(&last).then_some(last))
        });
        found.map_err(|error| format!("{}: {last:?}", error.message().unwrap_or(what)).into())
    }

    /// Sends the next byte to its serial port.
    fn send(&mut self) {
        self.pc.machine.serial.receive(&[self.sent as u8]);
        self.sent += 1;
    }

    /// Pauses the guest, and continues it here or in another machine.
    fn pause(&mut self, moves: bool) -> Result<(), Failed> {
        self.pc.machine.pause()?;
        if !moves {
            self.pc.machine.resume();
            return Ok(());
        }
        let config = |config: &mut vellum_linux::Config| config.virtio.0.push(Arc::new(RngConfig));
        let mut there = Pc::like(self.pc.machine.describe(), config)?;
        hand_over(&mut self.pc.machine, &mut there.machine, |sections| sections)?;
        self.events = events(&there)?;
        self.pc = there;
        Ok(())
    }
}

fn events(pc: &Pc) -> Result<EventManager<Subscriber>, Failed> {
    let mut events = EventManager::<Subscriber>::new().map_err(|error| error.to_string())?;
    events.add_subscriber(pc.machine.virtio.devices[0].device.subscriber());
    Ok(events)
}

/// What a guest must have counted, and how many more it may have: a move raises unacknowledged
/// interrupts again.
#[derive(Clone, Copy, Debug, Default)]
struct Due {
    /// Timer, serial port, line, the line whose interrupt stays in service, device.
    least: [u64; 5],
    more: [u64; 5],
}

impl Due {
    /// Adds one of each of `want`, for a round after which `guest` has moved or not.
    fn add(&mut self, guest: &Guest, want: u64, moves: bool) {
        let one = |of: u64| u64::from(want & of != 0);
        let [timer, serial, level, virtio] = [want::TIMER, want::SERIAL, want::LEVEL, want::VIRTIO].map(one);
        let held = one(want::HELD) + one(want::STILL);
        let moves = u64::from(moves);
        let started_anew = if guest.timer == Timer::OneShot { moves } else { 0 };
        let ended_early = if guest.in_service { 0 } else { level };
        let more = [started_anew, 0, ended_early, 0, virtio * moves];
        for (at, least) in [timer, serial, level, held, virtio].into_iter().enumerate() {
            self.least[at] += least;
            self.more[at] += more[at];
        }
    }

    fn counted(control: &Control) -> [u64; 5] {
        [control.timer, control.serial, control.level, control.held, control.virtio]
    }

    fn is_met(&self, control: &Control) -> bool {
        let all = Self::counted(control).iter().zip(self.least).all(|(is, least)| *is >= least);
        all && control.bytes >= self.least[1] && control.used >= self.least[4]
    }

    fn check(&self, control: &Control) -> Result<(), Failed> {
        let counted = Self::counted(control);
        let within =
            (0..5).all(|at| (self.least[at]..=self.least[at] + self.more[at]).contains(&counted[at]));
        // Data never comes again.
        let data = (control.bytes, control.used) == (self.least[1], self.least[4]);
        ensure(within && data, || {
            format!("timer, serial, level, held, virtio: {counted:?} of {self:?}: {control:?}")
        })
    }
}

/// The vectors of `want` that are requested in the local APIC, in the format of
/// [`Control::requested`].
fn requested(want: u64) -> [u32; 4] {
    let mut words = [0; 4];
    for (of, vector) in [
        (want::TIMER, guest::TIMER),
        (want::SERIAL, guest::SERIAL),
        (want::VIRTIO, guest::VIRTIO),
        (want::LEVEL, guest::LEVEL),
    ] {
        if want & of != 0 {
            words[usize::from(vector / 32) - 1] |= 1 << (vector % 32);
        }
    }
    words
}

/// Rounds with random subsets of `sources`.
fn rounds(irqchip: Mode, timer: Timer, sources: u64) -> Result<(), Failed> {
    let mut random = Random::new();
    let mut guest = Guest::boot(irqchip, timer)?;
    let mut due = Due::default();
    let mut moved = 0;
    for round in 1..=pauses() {
        let mut want = random.below(64) & sources;
        if want & want::HELD == 0 {
            want &= !want::STILL;
        }
        let moves = random.below(4) > 0;
        // Everything is requested before the pause, or some may still be on its way.
        let all = random.below(2) == 0;
        let context = |error: Failed| -> Failed {
            let (how, said) =
                (if moves { "moved" } else { "paused" }, error.message().unwrap_or("it failed"));
            format!("round {round}, want {want:#x}, {how}, all requested: {all}: {said}").into()
        };
        if want & want::SERIAL != 0 {
            guest.send();
        }
        let before = guest.control()?;
        let words = if all { requested(want) } else { [0; 4] };
        let at = GuestAddress(guest::CONTROL + offset_of!(Control, requested) as u64);
        guest.pc.machine.vm.memory.guest.write_obj(words, at)?;
        guest.put(offset_of!(Control, period), 1 + random.below(100_000))?;
        guest.put(offset_of!(Control, want), want)?;
        guest.put(offset_of!(Control, go), round)?;
        let ready = guest.until("it is ready", |control| control.ready == round).map_err(context)?;
        let taken = |control: &Control| [control.timer, control.serial, control.level, control.virtio];
        let none = taken(&ready) == taken(&before);
        ensure(none, || format!("with interrupts off {before:?} became {ready:?}")).map_err(context)?;
        guest.pause(moves).map_err(context)?;
        moved += u64::from(moves);
        due.add(&guest, want, moves);
        guest.put(offset_of!(Control, release), round)?;
        guest.until("all have come", |control| due.is_met(control)).map_err(context)?;
        guest.put(offset_of!(Control, rest), round)?;
        let done = guest.until("it is done", |control| control.done == round).map_err(context)?;
        due.check(&done).map_err(context)?;
    }
    let [is, least] = [Due::counted(&guest.control()?), due.least];
    eprintln!(
        "{} pauses, {moved} of them moves; timer, serial, level, held, virtio: {is:?} of {least:?}",
        pauses()
    );
    Ok(())
}

/// All sources run freely.
fn freely(irqchip: Mode, timer: Timer) -> Result<(), Failed> {
    let mut random = Random::new();
    let mut guest = Guest::boot(irqchip, timer)?;
    // 2 ms. With a count, a tick of the timer is a nanosecond in KVM.
    let khz = guest.pc.machine.description().tsc_khz.unwrap_or(1_000_000);
    let period = if timer == Timer::Deadline { u64::from(khz) * 2 } else { 2_000_000 };
    guest.put(offset_of!(Control, period), period)?;
    guest.put(offset_of!(Control, free), 1)?;
    let mut moved = 0;
    for round in 0..pauses() {
        let context = |error: Failed| -> Failed {
            format!("pause {round}: {}", error.message().unwrap_or("it failed")).into()
        };
        for _ in 0..random.below(300) {
            guest.serve()?;
            if guest.pc.machine.serial.room() > 32 && random.below(8) == 0 {
                guest.send();
            }
        }
        let moves = random.below(4) > 0;
        guest.pause(moves).map_err(context)?;
        moved += u64::from(moves);
        // A later byte must not hide one that was lost.
        let (was, sent) = (guest.control()?, guest.sent);
        let on = |is: u64, was: u64| is >= was + 2;
        let go_on = |is: &Control| {
            is.bytes == sent && on(is.timer, was.timer) && on(is.level, was.level) && on(is.used, was.used)
        };
        guest.until("all sources go on", go_on).map_err(context)?;
    }
    guest.put(offset_of!(Control, stop), 1)?;
    let end = guest.until("all sources have stopped", |is| {
        is.done == 1 && is.used == is.offered && is.level >= is.asserted && is.timer == is.armed
    })?;
    eprintln!(
        "{} pauses, {moved} of them moves; timer {}, level {} of {}, bytes {} by {} interrupts, virtio {} by {}",
        pauses(),
        end.timer,
        end.level,
        end.asserted,
        end.bytes,
        end.serial,
        end.used,
        end.virtio,
    );
    let again = end.level - end.asserted <= if guest.in_service { 0 } else { end.asserted };
    let more = [end.serial.saturating_sub(end.bytes), end.virtio - end.used];
    let few = again && more.iter().all(|more| *more <= moved);
    ensure(few && end.bytes == guest.sent, || format!("{moved} moves, {} sent: {end:?}", guest.sent))
}
