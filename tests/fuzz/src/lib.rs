//! What the targets share as programs of libFuzzer.

use std::mem::zeroed;
use std::ptr::null_mut;

/// The size of the stack of signal handlers. libFuzzer's handler prints a backtrace and writes the
/// input.
const SIZE: usize = 1 << 20;

/// Declares a program of the target `$name`.
#[macro_export]
macro_rules! target {
    ($name:ident) => {
        libfuzzer_sys::fuzz_target!(init: $crate::signal_stack(), |data: &[u8]| fuzz_targets::$name(data));
    };
}

/// Gives signal handlers a stack of their own. After a stack overflow, libFuzzer's handler of
/// SIGSEGV could not run otherwise, and the input would be lost. libFuzzer keeps the flag
/// SA_ONSTACK of the action that it replaces.
pub fn signal_stack() {
    let stack = Box::leak(vec![0_u8; SIZE].into_boxed_slice());
    let stack = libc::stack_t { ss_sp: stack.as_mut_ptr().cast(), ss_flags: 0, ss_size: SIZE };
    // SAFETY: sigaction is plain data, for which all zeroes is a value: the default action.
    let mut action: libc::sigaction = unsafe { zeroed() };
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: both arguments outlive the calls, the stack lives until the process ends, and the
    // action stays the default one.
    let results =
        unsafe { [libc::sigaltstack(&stack, null_mut()), libc::sigaction(libc::SIGSEGV, &action, null_mut())] };
    assert_eq!(results, [0, 0], "signal handlers have no stack");
}
