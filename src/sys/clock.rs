//! The clocks that all processes of a host share.

use std::num::NonZeroU64;
use std::time::{Duration, SystemTime};

/// CLOCK_MONOTONIC: the time since an unspecified point during boot. A signal handler may call
/// this.
pub fn monotonic() -> Duration {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // This uses libc, which has already found the vDSO. rustix looks for it on the first call,
    // which a sandbox forbids.
    // SAFETY: the structure is ours. This clock exists on every Linux, so the call cannot fail.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32)
}

/// The whole microseconds in `time`.
pub fn micros(time: Duration) -> u64 {
    time.as_micros() as u64
}

/// CLOCK_REALTIME: the time since 1970 on the host's clock.
pub fn realtime() -> Duration {
    // A host whose clock is before 1970 has no valid time yet.
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

/// Sets this thread's timer slack to the minimum (PR_SET_TIMERSLACK, prctl(2)), for threads that
/// keep to a rate. By default the kernel may end a wait up to 50 µs late, to wake several threads
/// at once.
pub fn wait_exactly() {
    // In nanoseconds. If the call is refused, waits stay as they were.
    let _ = rustix::thread::set_current_timer_slack(Some(NonZeroU64::MIN));
}

/// Ticks per second of Arm's generic timer (CNTFRQ_EL0). Programs and guests read the same counter.
#[cfg(target_arch = "aarch64")]
pub fn counter_hz() -> u64 {
    let hz: u64;
    // SAFETY: the register can be read at EL0 on Linux and has no side effects.
    unsafe {
        std::arch::asm!("mrs {hz}, cntfrq_el0", hz = out(reg) hz, options(nomem, nostack, preserves_flags))
    };
    hz
}
