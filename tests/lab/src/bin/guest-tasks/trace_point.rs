//! KVM's trace points, counted on the only CPU (perf_event_open(2)).

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd};

/// Counts events of trace points on the only CPU until dropped.
pub struct TracePoint(File);

/// perf_event_open(2): struct perf_event_attr as of its first version.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    kind: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup_events: u32,
    breakpoint: u32,
    address: u64,
}

impl TracePoint {
    /// Counts the events of `name`, such as `kvm/kvm_exit`, that pass `filter`.
    pub fn count(name: &str, filter: Option<&str>) -> io::Result<Self> {
        const TRACE_POINT: u32 = 2;
        // _IOW('$', 6, char *)
        const SET_FILTER: libc::c_ulong = 0x4008_2406;
        let path = format!("/sys/kernel/tracing/events/{name}/id");
        let id = fs::read_to_string(&path).map_err(|error| io::Error::other(format!("{path}: {error}")))?;
        let size = size_of::<Attributes>() as u32;
        let config = id.trim().parse().map_err(io::Error::other)?;
        let attributes = Attributes { kind: TRACE_POINT, size, config, ..Attributes::default() };
        // SAFETY: `attributes` outlives the call and holds its own size. The counter is for every
        // process on CPU 0.
        let fd = unsafe { libc::syscall(libc::SYS_perf_event_open, &raw const attributes, -1, 0, -1, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and has no other owner.
        let counter = Self(unsafe { File::from_raw_fd(fd as i32) });
        if let Some(filter) = filter {
            let filter = std::ffi::CString::new(filter)?;
            // SAFETY: the string is NUL-terminated and outlives the call.
            let result = unsafe { libc::ioctl(counter.0.as_raw_fd(), SET_FILTER as _, filter.as_ptr()) };
            if result < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(counter)
    }

    /// The number of events so far.
    pub fn so_far(&self) -> io::Result<f64> {
        let mut bytes = [0; 8];
        (&self.0).read_exact(&mut bytes)?;
        Ok(u64::from_ne_bytes(bytes) as f64)
    }
}
