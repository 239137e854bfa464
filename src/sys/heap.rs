//! The heap: whose it is, and what confined threads need of it.

#[cfg(target_env = "musl")]
mod own {
    use std::alloc::{GlobalAlloc, Layout};
    use std::sync::{Mutex, MutexGuard, PoisonError};

    use dlmalloc::Dlmalloc;

    /// The allocator of static programs. musl's own keeps objects of each size in groups of a few pages, and maps and unmaps pages
    /// for a group; a program that has just started is always at the beginning of some group: until a machine runs, 84 calls and 55
    /// page faults. This one grows one heap, with one lock, as musl's has, and calls nothing that the sandbox forbids. The lock is
    /// Rust's, which is taken and released in a few instructions where musl's calls two functions.
    ///
    /// It is called and never inlined, which made the program 350 KiB larger.
    struct Heap(Mutex<Dlmalloc>);

    #[global_allocator]
    static HEAP: Heap = Heap(Mutex::new(Dlmalloc::new()));

    impl Heap {
        fn locked(&self) -> MutexGuard<'_, Dlmalloc> {
            // Nothing in the allocator panics while it is half done.
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }
    }

    // SAFETY: every call is passed on as it is, under the lock, to an allocator that keeps the trait's promises.
    unsafe impl GlobalAlloc for Heap {
        #[inline(never)]
        unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
            // SAFETY: the caller's promises are those that are asked for.
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

/// Keeps glibc to one heap. Called before there are threads.
///
/// glibc gives threads heaps of their own, and when one of them shrinks for the first time it opens
/// `/proc/sys/vm/overcommit_memory` (malloc/arena.c, check_may_shrink_heap): a confined thread that frees memory would
/// be killed for it. The one main heap shrinks by brk(2). What allocates often enough to contend for it is no hot path.
pub fn keep_to_one() {
    #[cfg(target_env = "gnu")]
    // SAFETY: an option of the allocator, by numbers; no other thread is there to see it change.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}
