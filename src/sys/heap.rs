//! The C library's heap, as far as confined threads have to care.

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
