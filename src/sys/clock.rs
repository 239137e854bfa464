//! The clocks that all processes of a host share.

use std::time::Duration;

/// CLOCK_MONOTONIC: the time since some point before the host's boot ended.
pub fn monotonic() -> Duration {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure is ours; this clock exists on every Linux, so the call cannot fail.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32)
}

/// Whole microseconds.
pub fn micros(time: Duration) -> u64 {
    time.as_micros() as u64
}

/// CLOCK_REALTIME: the time since 1970 as the host knows it.
pub fn realtime() -> Duration {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the structure is ours; this clock exists on every Linux, so the call cannot fail.
    unsafe { libc::clock_gettime(libc::CLOCK_REALTIME, &mut now) };
    // A host that believes to be before 1970 has no time yet.
    Duration::new(now.tv_sec.max(0) as u64, now.tv_nsec.unsigned_abs() as u32)
}

/// From now on this thread's waits end when they are due, and not up to 50 µs later, as the kernel otherwise lets them, to wake several threads
/// at once (PR_SET_TIMERSLACK, prctl(2)). For threads that keep to a rate.
pub fn wait_exactly() {
    // Nanoseconds; 0 would be the default again.
    const SLACK: libc::c_ulong = 1;
    // SAFETY: prctl with this option takes numbers only. Where it is refused, waits stay as they were.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, SLACK, 0, 0, 0) };
}

/// Ticks per second of Arm's generic timer, whose counter programs and guests read alike (CNTFRQ_EL0).
#[cfg(target_arch = "aarch64")]
pub fn counter_hz() -> u64 {
    let hz: u64;
    // SAFETY: the register can be read at EL0 on Linux and has no side effects.
    unsafe {
        std::arch::asm!("mrs {hz}, cntfrq_el0", hz = out(reg) hz, options(nomem, nostack, preserves_flags))
    };
    hz
}
