//! What a vCPU's thread does next, as a state machine without a thread or KVM.
//!
//! ```text
//!                  Run                        Pause                     nothing left
//!   Wait --------------------> Enter ------------------> Complete -------------------------> Wait
//! ```
//!
//! Whoever is to run may have to sleep first, as often as it is told: it is neither in the guest nor does it wait for a command then.
//!
//! An MMIO or port access that the VMM has served is half done until `KVM_RUN` is called again; with immediate_exit that
//! completes it and enters no guest (api.rst, KVM_RUN). What KVM hands over in parts ends with the next part, until a call
//! returns `EINTR`: only then is a vCPU's state whole.

use crate::vm::lifecycle::Exit;

/// What the thread has been told.
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
    /// Pause by itself, until somebody resumes it.
    Pause,
    /// The guest is over.
    Stop(Exit),
}

/// What the thread does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// `KVM_RUN`.
    Enter,
    /// It sleeps, until its nap is over or it has been told something else.
    Throttle,
    /// `KVM_RUN` with immediate_exit.
    Complete,
    /// It says that it is paused, and waits for another command.
    Wait,
    /// It is over.
    End,
}

/// What a `KVM_RUN` came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Returned {
    /// An exit, and what its handler says.
    Exit(Flow),
    /// This error.
    Error(i32),
}

/// What follows from that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum After {
    /// The next step, by the command.
    Next,
    /// The same, but the vCPU was interrupted: it may enter again.
    Interrupted,
    /// It pauses itself, unless it has been told something else meanwhile.
    PauseItself,
    /// The guest has ended.
    Ended(Exit),
    /// `KVM_RUN` has failed.
    Failed,
}

/// Where the thread is.
#[derive(Debug, Default)]
pub(super) struct Cycle {
    /// Whether an access may be half done in KVM. Nothing is before the first entry.
    unfinished: bool,
    /// Whether the last step was [`Step::Complete`].
    completing: bool,
}

impl Cycle {
    /// The next step under `command`, for a vCPU that is to sleep or not.
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

    /// What follows from what a `KVM_RUN` came to.
    pub fn returned(&mut self, returned: Returned) -> After {
        match returned {
            Returned::Exit(Flow::Stop(exit)) => After::Ended(exit),
            // It has been told to pause already.
            Returned::Exit(_) if self.completing => After::Next,
            Returned::Exit(Flow::Continue) => After::Next,
            Returned::Exit(Flow::Pause) => After::PauseItself,
            Returned::Error(libc::EINTR) if self.completing => {
                self.unfinished = false;
                After::Next
            }
            // The second is what KVM says after a vCPU that waited for INIT or SIPI was woken.
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

    /// A vCPU that has been in the guest and is told to pause.
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
        // It has not been in the guest: nothing is half done.
        assert_eq!(cycle.next(Command::Pause, true), Step::Wait);
        assert_eq!(cycle.next(Command::Run, false), Step::Enter);
        assert_eq!(cycle.returned(INTERRUPTED), After::Interrupted);
        // It has: an access is completed before it pauses, whether it has slept or not.
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
        // Paused again without having run: there is still nothing to complete.
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
