//! The clocks that all processes of a host share.

use std::num::NonZeroU64;
use std::time::{Duration, SystemTime};

/// CLOCK_MONOTONIC: the time since some point before the host's boot ended. A signal handler may ask for it.
pub fn monotonic() -> Duration {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // By libc, which has found the vDSO already: rustix looks for it when it is first asked, which a sandbox forbids.
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
    // A host that believes to be before 1970 has no time yet.
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

/// From now on this thread's waits end when they are due, and not up to 50 µs later, as the kernel otherwise lets them, to wake several threads
/// at once (PR_SET_TIMERSLACK, prctl(2)). For threads that keep to a rate.
pub fn wait_exactly() {
    // In nanoseconds. Where it is refused, waits stay as they were.
    let _ = rustix::thread::set_current_timer_slack(Some(NonZeroU64::MIN));
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
