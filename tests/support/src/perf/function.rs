//! Workload code as a function of this process, which benchmarks compare guests with.

use std::io;
use std::sync::atomic::Ordering;

use vellum_guests::control::{Control, flags};
use vellum_sys::mmap::{Mapping, PAGE_SIZE, Source};

/// Position-independent code in executable memory, and a page for its doorbell.
#[derive(Debug)]
pub struct Function {
    code: Mapping,
    doorbell: Mapping,
}

impl Function {
    /// Copies `code` into executable memory.
    pub fn new(code: &[u8]) -> io::Result<Self> {
        let mapping =
            Mapping::new((code.len() as u64).next_multiple_of(PAGE_SIZE), PAGE_SIZE, Source::Anonymous)?;
        for (word, bytes) in mapping.words().iter().zip(code.chunks(8)) {
            let mut padded = [0; 8];
            padded[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_le_bytes(padded), Ordering::Relaxed);
        }
        // SAFETY: the mapping is ours, and it is not written from now on.
        let result = unsafe {
            libc::mprotect(mapping.as_ptr().cast(), mapping.len() as usize, libc::PROT_READ | libc::PROT_EXEC)
        };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { code: mapping, doorbell: Mapping::new(PAGE_SIZE, PAGE_SIZE, Source::Anonymous)? })
    }

    /// Calls the code with `control` until it rings the doorbell, which is set here. The control
    /// block's region must lie in `ram`.
    ///
    /// # Panics
    ///
    /// The control block would lead the code out of `ram`.
    pub fn call_workload(&self, control: &Control, ram: &Mapping) {
        let get = |word: &std::sync::atomic::AtomicU64| word.load(Ordering::Relaxed);
        control.flags.fetch_or(flags::RETURN, Ordering::Relaxed);
        control.doorbell.store(self.doorbell.as_ptr() as u64, Ordering::Relaxed);
        let start = get(&control.region).checked_sub(ram.as_ptr() as u64).expect("below RAM");
        let bytes = get(&control.pages).checked_mul(get(&control.stride)).expect("too many pages");
        assert!(start.checked_add(bytes).is_some_and(|end| end <= ram.len()), "beyond RAM");
        assert!(get(&control.hot_pages) < get(&control.pages), "all pages hot: none is left for the others");
        // SAFETY: the code is a workload's (`arch::workload::Code`). It is a System V ABI function
        // that takes a control block. It accesses only the block, its doorbell and its region,
        // which were checked above. It returns because of flags::RETURN.
        unsafe {
            let function: extern "sysv64" fn(&Control) = std::mem::transmute(self.code.as_ptr());
            function(control);
        }
    }
}
