//! Decides what a vCPU's thread does next: a state machine without a thread or KVM.
//!
//! ```text
//!                  Run                        Pause                     nothing left
//!   Wait --------------------> Enter ------------------> Complete -------------------------> Wait
//! ```
//!
//! A throttled vCPU sleeps before it enters the guest. It is then neither in the guest nor waiting
//! for a command.
//!
//! An MMIO or port access that the VMM has served is only half done until the next `KVM_RUN`. With
//! immediate_exit, that call completes the access without entering the guest (api.rst, KVM_RUN). An
//! access that KVM reports in parts continues with its next part, until a call returns `EINTR`.
//! Only then is a vCPU's state complete.

use crate::vm::lifecycle::Exit;

/// The command given to the thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Command {
    Pause,
    Run,
    Stop,
}

impl Command {
    pub fn from_u8(value: u8) -> Self {
        match value {
            value if value == Self::Pause as u8 => Self::Pause,
            value if value == Self::Run as u8 => Self::Run,
            _ => Self::Stop,
        }
    }
}

/// What the loop does after an exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// Enter the guest again.
    Continue,
    /// Pause until resumed.
    Pause,
    /// The guest has ended.
    Stop(Exit),
}

/// The thread's next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// `KVM_RUN`.
    Enter,
    /// Sleep until the nap ends or another command comes.
    Throttle,
    /// `KVM_RUN` with immediate_exit.
    Complete,
    /// Report the pause, and wait for another command.
    Wait,
    /// End the loop.
    End,
}

/// The result of a `KVM_RUN`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Returned {
    /// An exit, and its handler's decision.
    Exit(Flow),
    /// An errno.
    Error(i32),
}

/// What follows from the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum After {
    /// The next step depends on the command.
    Next,
    /// Like `Next`, but the vCPU was interrupted: it may enter again.
    Interrupted,
    /// The vCPU pauses itself, unless another command came meanwhile.
    PauseItself,
    /// The guest has ended.
    Ended(Exit),
    /// `KVM_RUN` has failed.
    Failed,
}

/// The thread's state.
#[derive(Debug, Default)]
pub(super) struct Cycle {
    /// Whether an access may be half done in KVM. Before the first entry none is.
    unfinished: bool,
    /// Whether the last step was [`Step::Complete`].
    completing: bool,
}

impl Cycle {
    /// The next step under `command`. `throttled` means that the vCPU shall sleep.
    pub fn next(&mut self, command: Command, throttled: bool) -> Step {
        let step = match command {
            Command::Run if throttled => Step::Throttle,
            Command::Run => Step::Enter,
            Command::Pause if self.unfinished => Step::Complete,
            Command::Pause => Step::Wait,
            Command::Stop => Step::End,
        };
        self.unfinished |= step == Step::Enter;
        self.completing = step == Step::Complete;
        step
    }

    /// Decides what follows from the result of a `KVM_RUN`.
    pub fn returned(&mut self, returned: Returned) -> After {
        match returned {
            Returned::Exit(Flow::Stop(exit)) => After::Ended(exit),
            // It has already been told to pause.
            Returned::Exit(_) if self.completing => After::Next,
            Returned::Exit(Flow::Continue) => After::Next,
            Returned::Exit(Flow::Pause) => After::PauseItself,
            Returned::Error(libc::EINTR) if self.completing => {
                self.unfinished = false;
                After::Next
            }
            // KVM returns EAGAIN after a vCPU that waited for INIT or SIPI was woken.
            Returned::Error(libc::EINTR | libc::EAGAIN) if !self.completing => After::Interrupted,
            Returned::Error(_) => After::Failed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GO_ON: Returned = Returned::Exit(Flow::Continue);
    const INTERRUPTED: Returned = Returned::Error(libc::EINTR);

    /// A vCPU that was in the guest and is told to pause.
    fn pausing() -> Cycle {
        let mut cycle = Cycle::default();
        assert_eq!(cycle.next(Command::Run, false), Step::Enter);
        assert_eq!(cycle.returned(INTERRUPTED), After::Interrupted);
        assert_eq!(cycle.next(Command::Pause, false), Step::Complete);
        cycle
    }

    #[test]
    fn commands_survive_being_stored() {
        for command in [Command::Pause, Command::Run, Command::Stop] {
            assert_eq!(Command::from_u8(command as u8), command);
        }
    }

    #[test]
    fn a_nap_comes_before_the_guest_and_after_any_other_command() {
        let mut cycle = Cycle::default();
        assert_eq!(cycle.next(Command::Run, true), Step::Throttle);
        // It was not in the guest: nothing is half done.
        assert_eq!(cycle.next(Command::Pause, true), Step::Wait);
        assert_eq!(cycle.next(Command::Run, false), Step::Enter);
        assert_eq!(cycle.returned(INTERRUPTED), After::Interrupted);
        // It was in the guest: an access is completed before the pause, whether it has slept or
        // not.
        assert_eq!(cycle.next(Command::Run, true), Step::Throttle);
        assert_eq!(cycle.next(Command::Pause, true), Step::Complete);
        assert_eq!(cycle.returned(INTERRUPTED), After::Next);
        assert_eq!(cycle.next(Command::Pause, true), Step::Wait);
        assert_eq!(cycle.next(Command::Stop, true), Step::End);
    }

    #[test]
    fn what_never_ran_has_nothing_to_complete() {
        let mut cycle = Cycle::default();
        assert_eq!(cycle.next(Command::Pause, false), Step::Wait);
        assert_eq!(cycle.next(Command::Stop, false), Step::End);
    }

    #[test]
    fn a_pause_waits_until_nothing_is_half_done() {
        let mut cycle = pausing();
        for _ in 0..3 {
            assert_eq!(cycle.returned(GO_ON), After::Next);
            assert_eq!(cycle.next(Command::Pause, false), Step::Complete);
        }
        assert_eq!(cycle.returned(INTERRUPTED), After::Next);
        assert_eq!(cycle.next(Command::Pause, false), Step::Wait);
        // Paused again without running: still nothing to complete.
        assert_eq!(cycle.next(Command::Pause, false), Step::Wait);
        assert_eq!(cycle.next(Command::Run, false), Step::Enter);
        assert_eq!(cycle.returned(GO_ON), After::Next);
        assert_eq!(cycle.next(Command::Pause, false), Step::Complete);
    }

    #[test]
    fn only_eintr_says_that_nothing_is_left() {
        for errno in [libc::EFAULT, libc::EAGAIN, libc::EINVAL, libc::ENOMEM, libc::EBADF] {
            assert_eq!(pausing().returned(Returned::Error(errno)), After::Failed, "errno {errno}");
        }
    }

    #[test]
    fn a_guest_that_ends_while_it_is_completed_has_ended() {
        assert_eq!(pausing().returned(Returned::Exit(Flow::Stop(Exit::Reset))), After::Ended(Exit::Reset));
        // It pauses anyway.
        assert_eq!(pausing().returned(Returned::Exit(Flow::Pause)), After::Next);
    }

    #[test]
    fn resumed_or_stopped_while_it_is_completed() {
        assert_eq!(pausing().next(Command::Run, false), Step::Enter);
        assert_eq!(pausing().next(Command::Stop, false), Step::End);
    }

    #[test]
    fn what_an_exit_asks_for_follows() {
        let mut cycle = Cycle::default();
        cycle.next(Command::Run, false);
        for (returned, after) in [
            (GO_ON, After::Next),
            (Returned::Exit(Flow::Pause), After::PauseItself),
            (Returned::Exit(Flow::Stop(Exit::PowerOff)), After::Ended(Exit::PowerOff)),
            (Returned::Error(libc::EAGAIN), After::Interrupted),
            (Returned::Error(libc::EFAULT), After::Failed),
        ] {
            assert_eq!(cycle.returned(returned), after);
        }
    }
}
