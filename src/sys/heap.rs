//! The heap: the allocator of static programs, and what confined threads need of glibc's.

#[cfg(target_env = "musl")]
mod own {
    use std::alloc::{GlobalAlloc, Layout};
    use std::sync::{Mutex, MutexGuard, PoisonError};

    use dlmalloc::Dlmalloc;

    /// The allocator of static programs. musl's own keeps objects of each size in groups of a few
    /// pages, and maps and unmaps pages for each group. A program that has just started keeps
    /// starting new groups, which costs 84 calls and 55 page faults before a machine runs. This
    /// allocator grows one heap. It has one lock, as musl's has, and makes no call that the sandbox
    /// forbids. The lock is Rust's, which takes a few instructions; musl's calls two functions.
    ///
    /// The functions are never inlined, because inlining made the program 350 KiB larger.
    struct Heap(Mutex<Dlmalloc>);

    #[global_allocator]
    static HEAP: Heap = Heap(Mutex::new(Dlmalloc::new()));

    impl Heap {
        fn locked(&self) -> MutexGuard<'_, Dlmalloc> {
            // Nothing in the allocator panics halfway through an operation.
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }
    }

    // SAFETY: every call is passed on unchanged, under the lock, to an allocator that keeps the
    // trait's promises.
    unsafe impl GlobalAlloc for Heap {
        #[inline(never)]
        unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
            // SAFETY: the caller's promises are the ones that this call needs.
            unsafe { self.locked().malloc(layout.size(), layout.align()) }
        }

        #[inline(never)]
        unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
            // SAFETY: as above.
            unsafe { self.locked().free(at, layout.size(), layout.align()) }
        }

        #[inline(never)]
        unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
            // SAFETY: as above.
            unsafe { self.locked().calloc(layout.size(), layout.align()) }
        }

        #[inline(never)]
        unsafe fn realloc(&self, at: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
            // SAFETY: as above.
            unsafe { self.locked().realloc(at, layout.size(), layout.align(), bytes) }
        }
    }
}

/// Keeps glibc to one heap. Call it before there are threads.
///
/// glibc gives threads their own heaps. When one of them shrinks for the first time, glibc opens
/// `/proc/sys/vm/overcommit_memory` (malloc/arena.c, check_may_shrink_heap), and the sandbox would
/// kill a confined thread for that. The main heap shrinks with brk(2). No hot path allocates often
/// enough to contend for it.
pub fn keep_to_one() {
    #[cfg(target_env = "gnu")]
    // SAFETY: sets an option of the allocator with numbers. No other thread exists yet.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}
