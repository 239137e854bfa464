//! The kit of Vellum's test programs. Programs with `harness = false` use all of it, libtest's and
//! benchmarks parts.
//!
//! A test is a function with [`#[test]`](macro@test), or one of a series that `main`
//! [adds](Tests::add). It says what it needs of its [host](hosts). If that is missing, it is
//! `ignored`, and its line says why and what would help. [`Tests::run`] runs the tests that the
//! command line selects, as libtest does, and writes a [`record`] that `cargo lab test` counts
//! from. A test waits with [`eventually`], and starts machines in a [`env::TestEnv`].

pub mod book;
pub mod browser;
pub mod cgroup;
pub mod env;
pub mod faults;
pub mod guests;
pub mod hosts;
pub mod kexec;
pub mod linux;
pub mod page;
#[cfg(target_arch = "x86_64")]
pub mod pc;
pub mod perf;
mod random;
pub mod record;
pub mod results;
mod scratch;
pub mod share;
mod signals;
pub mod tools;
pub mod virtio;
mod wait;
pub mod watchdog;

use std::collections::HashSet;
use std::panic::{self, AssertUnwindSafe};
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

/// For the code that [`test`](macro@test) generates.
pub use inventory;
use libtest_mimic::Trial;
pub use libtest_mimic::{Arguments, Completion, Failed};

pub use random::Random;
use record::{Line, Outcome, Record};
pub use scratch::{Scratch, executable};
/// Makes a function a test, under its own name. The attribute lists what it needs, each a [`Need`].
/// They are evaluated when the program starts. The function returns `Result<(), Failed>`, or
/// `Result<Completion, Failed>` if it may find out while it runs that it cannot test anything on
/// this host.
///
/// ```
/// use support::{Failed, Need, Tests, test};
///
/// fn arithmetic() -> Need {
///     Ok(())
/// }
///
/// #[test(arithmetic())]
/// fn two_and_two_are_four() -> Result<(), Failed> {
///     support::ensure(2 + 2 == 4, || "they are not".into())
/// }
///
/// # let _ =
/// Tests::from_args().run();
/// ```
pub use support_macros::test;
pub use wait::{LIMIT, eventually, is_caught};
use watchdog::Running;

/// The reason that a test cannot run here, with a remedy, or `Ok` if it can.
pub type Need = Result<(), String>;

/// Fails the test with a message unless `condition` holds.
pub fn ensure(condition: bool, message: impl FnOnce() -> String) -> Result<(), Failed> {
    if condition { Ok(()) } else { Err(message().into()) }
}

/// The result types of a test.
pub trait Ends {
    /// Converts the result to the general type.
    fn end(self) -> Result<Completion, Failed>;
}

impl Ends for Result<(), Failed> {
    fn end(self) -> Result<Completion, Failed> {
        self.map(|()| Completion::Completed)
    }
}

impl Ends for Result<Completion, Failed> {
    fn end(self) -> Result<Completion, Failed> {
        self
    }
}

/// A function with [`test`](macro@test).
pub struct Declared {
    /// The name.
    pub name: &'static str,
    /// Checks what the test needs.
    pub need: fn() -> Need,
    /// Runs the test.
    pub test: fn() -> Result<Completion, Failed>,
}

inventory::collect!(Declared);

/// Why a test is skipped that passed on the host around an emulated one.
const PASSED_ELSEWHERE: &str = "passed on the KVM of this machine: cargo lab test svm, or --full";

/// The tests of a program.
pub struct Tests {
    arguments: Arguments,
    record: Arc<Record>,
    /// The tests that passed on another host.
    passed: HashSet<String>,
    running: Running,
    tests: Vec<Trial>,
}

impl Tests {
    /// All test functions of the program, with the arguments of the command line. Signals that the
    /// parent ignores, as shells do for background jobs, get their default actions.
    pub fn from_args() -> Self {
        signals::restore();
        let mut tests = Self {
            arguments: Arguments::from_args(),
            record: Arc::new(Record::from_env()),
            passed: record::passed(),
            running: Running::default(),
            tests: Vec::new(),
        };
        let mut declared: Vec<&Declared> = inventory::iter::<Declared>.into_iter().collect();
        declared.sort_by_key(|declared| declared.name);
        declared.into_iter().for_each(|one| tests.add_if(one.name, one.need, one.test));
        tests
    }

    /// Runs the tests one after the other.
    pub fn one_at_a_time(&mut self) {
        self.arguments.test_threads = Some(1);
    }

    /// Adds a test with a requirement.
    pub fn add<E: Ends>(
        &mut self,
        name: impl Into<String>,
        need: Need,
        test: impl FnOnce() -> E + Send + 'static,
    ) {
        self.add_if(name, || need, || test().end());
    }

    fn add_if(
        &mut self,
        name: impl Into<String>,
        need: impl FnOnce() -> Need,
        test: impl FnOnce() -> Result<Completion, Failed> + Send + 'static,
    ) {
        let (name, record) = (name.into(), Arc::clone(&self.record));
        // A test that is filtered out is not checked for what it needs.
        let none = self.arguments.is_filtered_out(&Trial::test(&name, || Ok(())));
        let need = match () {
            () if none => Ok(()),
            () if self.passed.contains(&name) => Err(PASSED_ELSEWHERE.into()),
            () => need(),
        };
        let (recorded, running) = (name.clone(), self.running.clone());
        let trial = Trial::ignorable_test(name, move || {
            let start = Instant::now();
            let ended = match need {
                Ok(()) => running.during(&recorded, || panic::catch_unwind(AssertUnwindSafe(test))),
                Err(why) => Ok(Ok(Completion::ignored_with(why))),
            };
            let milliseconds = start.elapsed().as_millis() as u64;
            record.write(&Line::Test { name: recorded, outcome: Outcome::of(&ended), milliseconds });
            ended.unwrap_or_else(|payload| panic::resume_unwind(payload))
        });
        self.tests.push(trial);
    }

    /// Runs the tests. Prints and records how they ended.
    ///
    /// A test waits for other processes half of its time, so there are two tests for each CPU. An
    /// emulated host, whose time passes as it executes instructions, has one.
    pub fn run(mut self) -> ExitCode {
        self.running.watch();
        if !vellum_host::Facts::collect(String::new()).emulated {
            let cpus = thread::available_parallelism().map_or(1, usize::from);
            self.arguments.test_threads.get_or_insert(2 * cpus);
        }
        let conclusion = libtest_mimic::run(&self.arguments, self.tests);
        if !self.arguments.list {
            let tests = conclusion.num_passed + conclusion.num_failed + conclusion.num_ignored;
            self.record.write(&Line::End(tests));
        }
        conclusion.exit_code()
    }
}
