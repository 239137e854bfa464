//! The thread and its callers, with a script in place of KVM.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender, channel};

use super::*;
use crate::vm::exits::Reason;
use vellum_sys::kick::RunPage;

/// A step of the script.
enum Act {
    /// `KVM_RUN` returns this exit.
    Exit(fn(&mut [u8; 8]) -> VcpuExit<'_>),
    /// `KVM_RUN` fails.
    Fail(i32),
    /// Runs until interrupted.
    Run,
}

struct Script {
    page: Arc<RunPage>,
    acts: VecDeque<Act>,
    data: [u8; 8],
    /// Receives each entry, and whether it was with immediate_exit.
    entered: Sender<bool>,
}

impl run::Run for Script {
    fn run(&mut self) -> Result<VcpuExit<'_>, kvm_ioctls::Error> {
        let failed = |errno| Err(kvm_ioctls::Error::new(errno));
        let at_once = self.page.immediate_exit();
        let _ = self.entered.send(at_once);
        match self.acts.pop_front() {
            Some(Act::Exit(exit)) => Ok(exit(&mut self.data)),
            Some(Act::Fail(errno)) => failed(errno),
            Some(Act::Run) | None => {
                // A kick ends this. The test has its own time limit.
                while !self.page.immediate_exit() {
                    std::thread::yield_now();
                }
                failed(libc::EINTR)
            }
        }
    }

    fn page(&self) -> &RunPage {
        &self.page
    }

    fn fd(&self) -> Option<&VcpuFd> {
        None
    }
}

struct Driven {
    vcpu: Vcpu,
    entered: Receiver<bool>,
    ended: Receiver<()>,
}

impl Driven {
    fn new(acts: impl IntoIterator<Item = Act>, on_exit: fn(VcpuExit<'_>) -> Flow) -> Self {
        let (end, ended) = channel();
        let vcpu = spawn(Box::new(|| Ok(())), end);
        let page = Arc::new(RunPage::without_vcpu().unwrap());
        let (tell, entered) = channel();
        let acts = acts.into_iter().collect();
        let script = Script { page: page.clone(), acts, data: [0; 8], entered: tell };
        vcpu.run_on(page, script, |_| Ok(()), on_exit);
        vcpu.ready().unwrap();
        Self { vcpu, entered, ended }
    }

    /// Waits until the guest was entered once more. Returns whether with immediate_exit.
    fn entered(&self) -> bool {
        self.entered.recv_timeout(READY_TIMEOUT).unwrap()
    }

    fn ended(&self) -> Ended {
        self.ended.recv_timeout(READY_TIMEOUT).unwrap();
        self.vcpu.take_ended().unwrap()
    }
}

fn spawn(enter: Box<dyn FnOnce() -> io::Result<()> + Send>, end: Sender<()>) -> Vcpu {
    let thread = Thread {
        index: 0,
        pin: None,
        describe: |_| String::new(),
        keep: |_| None,
        enter,
        on_end: Box::new(move || end.send(()).expect("the test waits")),
    };
    Vcpu::spawn(thread).unwrap()
}

fn go_on(_: VcpuExit<'_>) -> Flow {
    Flow::Continue
}

#[test]
fn it_starts_paused_runs_pauses_and_goes_on() {
    let driven = Driven::new([], go_on);
    assert_eq!(driven.vcpu.state(), RunState::Paused);
    for _ in 0..100 {
        driven.vcpu.resume();
        assert!(!driven.entered(), "a kick from before the pause was left");
        driven.vcpu.request_pause();
        driven.vcpu.wait_paused().unwrap();
        assert_eq!(driven.vcpu.state(), RunState::Paused);
        assert!(driven.entered(), "nothing completed what was half done");
    }
    assert_eq!(driven.vcpu.exits().of(Reason::Interrupted), 100);
    driven.vcpu.request_stop();
    let ended = driven.ended();
    assert_eq!((ended.exit, ended.trace), (Exit::PowerOff, None));
    assert_eq!(driven.vcpu.state(), RunState::Exited);
}

#[test]
fn a_pause_completes_an_access_part_by_part() {
    // It is interrupted in the guest. Then three parts are completed, until nothing is left.
    let part = || Act::Exit(|data| VcpuExit::MmioRead(0x1000, data));
    let driven = Driven::new([Act::Run, part(), part(), part()], go_on);
    driven.vcpu.resume();
    assert!(!driven.entered());
    driven.vcpu.request_pause();
    driven.vcpu.wait_paused().unwrap();
    assert!((0..4).all(|_| driven.entered()));
    assert_eq!(driven.vcpu.exits().of(Reason::MmioRead), 3);
}

#[test]
fn an_error_while_it_is_completed_ends_it() {
    for errno in [libc::EFAULT, libc::EAGAIN, libc::EINVAL] {
        let part = Act::Exit(|data| VcpuExit::MmioWrite(0x1000, data));
        let driven = Driven::new([Act::Run, part, Act::Fail(errno)], go_on);
        driven.vcpu.resume();
        driven.entered();
        driven.vcpu.request_pause();
        let ended = driven.ended();
        assert_eq!((ended.exit, ended.error.map(|error| error.errno())), (Exit::Kvm, Some(errno)));
        assert!(ended.trace.unwrap().ends_with("mmio_write@0x1000"));
        assert_eq!(driven.vcpu.state(), RunState::Exited);
    }
}

#[test]
fn an_error_while_it_runs_ends_it() {
    let driven = Driven::new([Act::Fail(libc::EAGAIN), Act::Fail(libc::ENOMEM)], go_on);
    driven.vcpu.resume();
    let ended = driven.ended();
    assert_eq!((ended.exit, ended.error.map(|error| error.errno())), (Exit::Kvm, Some(libc::ENOMEM)));
    assert_eq!(driven.vcpu.exits().of(Reason::Interrupted), 1);
}

#[test]
fn a_handler_pauses_or_ends_it() {
    let bell = || Act::Exit(|data| VcpuExit::MmioWrite(0x2000, data));
    let off = Act::Exit(|_| VcpuExit::Shutdown);
    let driven = Driven::new([bell(), Act::Fail(libc::EINTR), off], |exit| match exit {
        VcpuExit::MmioWrite(..) => Flow::Pause,
        _ => Flow::Stop(Exit::TripleFault),
    });
    driven.vcpu.resume();
    assert!(!driven.entered());
    assert!(driven.entered());
    driven.vcpu.wait_paused().unwrap();
    driven.vcpu.resume();
    let ended = driven.ended();
    assert_eq!((ended.exit, ended.error.is_none(), ended.trace.is_some()), (Exit::TripleFault, true, true));
    assert!(driven.vcpu.wait_paused().is_ok() && driven.vcpu.take_ended().is_none());
}

#[test]
fn a_flush_takes_it_out_once() {
    let driven = Driven::new([], go_on);
    let vcpus = [driven.vcpu];
    resume_all(&vcpus);
    driven.entered.recv_timeout(READY_TIMEOUT).unwrap();
    for _ in 0..100 {
        flush_all(&vcpus).unwrap();
    }
    assert_eq!(vcpus[0].state(), RunState::Running);
    pause_all(&vcpus).unwrap();
    // Each flush has interrupted it, and so did the pause.
    assert_eq!(vcpus[0].exits().of(Reason::Interrupted), 101);
    // A paused vCPU holds back nothing that a flush could bring out.
    flush_all(&vcpus).unwrap();
}

/// Longer than a test waits for a vCPU.
const LONG: Duration = READY_TIMEOUT.saturating_mul(4);

#[test]
fn a_nap_keeps_it_out_of_the_guest_until_it_is_told_otherwise() {
    let driven = Driven::new([], go_on);
    let vcpus = [driven.vcpu];
    let throttle = Throttle::new(&vcpus);
    let entered = || driven.entered.recv_timeout(READY_TIMEOUT).unwrap();
    resume_all(&vcpus);
    assert!(!entered());
    for _ in 0..100 {
        throttle.throttle(LONG);
        // It is out of the guest when this returns. Without the nap it would be in again.
        flush_all(&vcpus).unwrap();
        assert_eq!(vcpus[0].state(), RunState::Running);
        pause_all(&vcpus).unwrap();
        assert!(entered(), "it was in the guest between the nap and the pause");
        // The rest of the nap was dropped.
        resume_all(&vcpus);
        assert!(!entered());
    }
    // A kick that found it asleep lets it enter once with immediate_exit before it continues.
    let goes_on = || while entered() {};
    throttle.throttle(LONG);
    flush_all(&vcpus).unwrap();
    throttle.wake();
    goes_on();
    // A nap that ends at once, and another in the middle of the first.
    throttle.throttle(Duration::ZERO);
    goes_on();
    throttle.throttle(LONG);
    throttle.throttle(Duration::ZERO);
    goes_on();
}

#[test]
fn one_that_naps_can_be_stopped_and_one_that_is_gone_told_to() {
    let driven = Driven::new([], go_on);
    let vcpus = [driven.vcpu];
    let throttle = Throttle::new(&vcpus);
    // A paused vCPU sleeps when it is told to run.
    throttle.throttle(LONG);
    resume_all(&vcpus);
    vcpus[0].request_stop();
    driven.ended.recv_timeout(READY_TIMEOUT).unwrap();
    throttle.throttle(LONG);
    throttle.wake();
    assert_eq!(vcpus[0].state(), RunState::Exited);
}

#[test]
fn calls_do_not_wait_for_a_vcpu_that_is_gone() {
    let driven = Driven::new([], go_on);
    // The script has no descriptor for the call.
    assert!(matches!(driven.vcpu.with(|_| ()), Err(Error::Gone(0))));
    driven.vcpu.request_stop();
    driven.ended();
    assert!(matches!(driven.vcpu.with(|_| ()), Err(Error::Gone(0))));
}

#[test]
fn a_thread_that_never_gets_ready_says_why() {
    let (end, ended) = channel();
    let vcpu = spawn(Box::new(|| Err(io::Error::other("no sandbox"))), end);
    ended.recv_timeout(READY_TIMEOUT).unwrap();
    assert!(matches!(vcpu.ready(), Err(Error::Sandbox(0, _))));
    assert_eq!(vcpu.state(), RunState::Exited);
}

#[test]
fn a_string_instruction_is_cut_into_its_accesses() {
    let mut seen = Vec::new();
    let mut on_exit = |exit: VcpuExit<'_>| match exit {
        VcpuExit::IoOut(port, data) => {
            seen.push((port, data.to_vec()));
            match data {
                [5, 6] => Flow::Pause,
                [9, 9] => Flow::Stop(Exit::Error),
                _ => Flow::Continue,
            }
        }
        VcpuExit::IoIn(_, data) => {
            data.fill(data.len() as u8);
            Flow::Continue
        }
        _ => Flow::Stop(Exit::Error),
    };
    let out = VcpuExit::IoOut(0x10, &[1, 2, 3, 4, 5, 6, 7, 8]);
    // KVM goes on behind the instruction, so what comes after a pause is not lost.
    assert_eq!(run::one_by_one(out, 2, &mut on_exit), Flow::Pause);
    let out = VcpuExit::IoOut(0x10, &[5, 6, 9, 9, 0, 0]);
    assert_eq!(run::one_by_one(out, 2, &mut on_exit), Flow::Stop(Exit::Error));
    let mut data = [0; 6];
    assert_eq!(run::one_by_one(VcpuExit::IoIn(0x10, &mut data), 2, &mut on_exit), Flow::Continue);
    assert_eq!(data, [2; 6]);
    assert_eq!(run::one_by_one(VcpuExit::IoIn(0x10, &mut data), 6, &mut on_exit), Flow::Continue);
    assert_eq!(data, [6; 6]);
    assert_eq!(run::one_by_one(VcpuExit::Hlt, 0, &mut on_exit), Flow::Stop(Exit::Error));
    let all = [[1, 2], [3, 4], [5, 6], [7, 8], [5, 6], [9, 9]];
    assert_eq!(seen, all.map(|part| (0x10, part.to_vec())));
}

#[test]
fn what_cannot_be_prepared_never_runs_and_says_why() {
    let (end, ended) = channel();
    let vcpu = spawn(Box::new(|| Ok(())), end);
    let page = Arc::new(RunPage::without_vcpu().unwrap());
    let script = Script { page: page.clone(), acts: VecDeque::new(), data: [0; 8], entered: channel().0 };
    vcpu.run_on(page, script, |_| Err("no such leaf".into()), go_on);
    vcpu.resume();
    ended.recv_timeout(READY_TIMEOUT).unwrap();
    assert_eq!(vcpu.ready().unwrap_err().to_string(), "vCPU 0: no such leaf");
    assert_eq!(vcpu.state(), RunState::Exited);
}

/// Otherwise the pause would fail after half a minute with a guess that the host is overloaded.
#[test]
fn a_pause_is_given_up_where_there_is_no_hope() {
    let (end, _ended) = channel();
    // It is never given a vCPU, so it never pauses.
    let vcpus = [spawn(Box::new(|| Ok(())), end)];
    let paused = pause_all_unless(&vcpus, || Err(Error::Gone(7)));
    assert!(matches!(paused, Err(Error::Gone(7))));
}
