//! What Vellum's test programs share: those with `harness = false` all of it, libtest's and benchmarks some.
//!
//! A test is a function with [`#[test]`](macro@test), or one of several of a kind that `main` [adds](Tests::add). It
//! says what it needs of its [host](hosts); where that is missing it is `ignored`, with the reason and the remedy in its
//! line. [`Tests::run`] runs what the command line asks for, as libtest would, and keeps a [`record`] for
//! `cargo lab test`, which counts from there. [`eventually`] is how a test waits, and a [`env::TestEnv`] has its machines.

pub mod env;
pub mod faults;
pub mod guests;
pub mod hosts;
pub mod page;
#[cfg(target_arch = "x86_64")]
pub mod pc;
pub mod perf;
mod random;
pub mod record;
mod scratch;
pub mod share;
mod signals;
pub mod tools;
pub mod virtio;
mod wait;
mod watchdog;

use std::panic::{self, AssertUnwindSafe};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

/// For the code that [`test`](macro@test) makes.
pub use inventory;
use libtest_mimic::Trial;
pub use libtest_mimic::{Arguments, Completion, Failed};

pub use random::Random;
use record::{Line, Outcome, Record};
pub use scratch::Scratch;
/// Makes a function a test, under its own name. What it needs stands in the attribute, each a [`Need`], and is asked for
/// when the program starts. The function gives `Result<(), Failed>`, or `Result<Completion, Failed>` where it may find
/// out only while it runs that it cannot say anything here.
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
pub use wait::{LIMIT, eventually};
use watchdog::Running;

/// Why a test cannot run here, and what to do about it; `Ok` where it can.
pub type Need = Result<(), String>;

/// Fails the test with a message unless `condition` holds.
pub fn ensure(condition: bool, message: impl FnOnce() -> String) -> Result<(), Failed> {
    if condition { Ok(()) } else { Err(message().into()) }
}

/// How a test may end.
pub trait Ends {
    /// The end in its general form.
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
    /// Its name.
    pub name: &'static str,
    /// What it needs.
    pub need: fn() -> Need,
    /// Runs it.
    pub test: fn() -> Result<Completion, Failed>,
}

inventory::collect!(Declared);

/// The tests of a program.
pub struct Tests {
    arguments: Arguments,
    record: Arc<Record>,
    running: Running,
    tests: Vec<Trial>,
}

impl Tests {
    /// Every function of the program that is a test, with the arguments of the command line. Signals that a parent ignores,
    /// as shells do for jobs in the background, have their default actions from here on.
    pub fn from_args() -> Self {
        signals::restore();
        let record = Arc::new(Record::new(std::env::var_os(record::VARIABLE).map(PathBuf::from)));
        let mut tests = Self {
            arguments: Arguments::from_args(),
            record,
            running: Running::default(),
            tests: Vec::new(),
        };
        let mut declared: Vec<&Declared> = inventory::iter::<Declared>.into_iter().collect();
        declared.sort_by_key(|declared| declared.name);
        declared.into_iter().for_each(|one| tests.add_if(one.name, one.need, one.test));
        tests
    }

    /// One test after the other.
    pub fn one_at_a_time(&mut self) {
        self.arguments.test_threads = Some(1);
    }

    /// Adds a test that needs something of its host.
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
        // What is not asked for need not be able to run.
        let none = self.arguments.is_filtered_out(&Trial::test(&name, || Ok(())));
        let need = if none { Ok(()) } else { need() };
        let (recorded, running) = (name.clone(), self.running.clone());
        let trial = Trial::ignorable_test(name, move || {
            let ended = match need {
                Ok(()) => running.during(&recorded, || panic::catch_unwind(AssertUnwindSafe(test))),
                Err(why) => Ok(Ok(Completion::ignored_with(why))),
            };
            record.write(&Line::Test { name: recorded, outcome: Outcome::of(&ended) });
            ended.unwrap_or_else(|payload| panic::resume_unwind(payload))
        });
        self.tests.push(trial);
    }

    /// Runs the tests and says how they ended, on the terminal and in the record.
    pub fn run(self) -> ExitCode {
        self.running.watch();
        let conclusion = libtest_mimic::run(&self.arguments, self.tests);
        if !self.arguments.list {
            let tests = conclusion.num_passed + conclusion.num_failed + conclusion.num_ignored;
            self.record.write(&Line::End(tests));
        }
        conclusion.exit_code()
    }
}
