//! The flags of `vellum run` for errors, for a guest with a kernel and without.

use super::failure::Failure;
use super::flags::Flags;
use crate::session;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_sys::diagnose::Field;

/// The flag of each field.
pub(super) const FLAGS: Flags = &[&[
    (Field::Backing, "--memory backing="),
    (Field::Cmdline, "--cmdline"),
    (Field::CpuModel, "--cpu"),
    (Field::Cpuid, "--cpuid"),
    (Field::Cpus, "--cpus"),
    (Field::Cr3Cache, "--cr3-cache on:"),
    (Field::Gdb, "--gdb:"),
    (Field::GuestPage, "--workload page="),
    (Field::Initrd, "--initrd"),
    (Field::Irqchip, "--irqchip:"),
    (Field::Kernel, "--kernel"),
    (Field::Lock, "--memory lock:"),
    (Field::Memory, "--memory:"),
    (Field::Name, "--name:"),
    (Field::Pin, "--cpus pin:"),
    (Field::Prealloc, "--memory prealloc:"),
    (Field::Protocol, "--protocol"),
    (Field::RingEntries, "--dirty-ring="),
    (Field::Sandbox, "--sandbox:"),
    (Field::Serial, "--serial"),
    (Field::Uart, "--uart:"),
    (Field::Slots, "--memory slots="),
    (Field::EagerSplit, "--memory eager-split:"),
    (Field::Tracker, "--dirty-ring:"),
    (Field::User, "--user"),
]];

/// The failure of a machine that cannot run, or that the user ended before it ran.
pub(super) fn failure(error: session::Error) -> Failure {
    match error.interrupted() {
        Some(signal) => Failure::ended(Exit::Signal(signal), error.to_string()),
        None => Failure::of(&error, FLAGS),
    }
}
