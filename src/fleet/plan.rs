//! The plan: tests with arguments, seeds, repetitions and required host features. It is a TOML
//! file.
//!
//! ```toml
//! name = "nightly"
//!
//! [[test]]
//! name = "oracle"
//! run = "test dirty-log"
//! features = ["ept", "kernel_6_12"]
//! seeds = 1000
//! per_task = 10
//! minutes = 30
//! [test.arguments]
//! tracker = ["manual-protect", "ring"]
//! duration = "10s"
//! ```
//!
//! Tasks are numbered in the order of the file: test by test, and for each test round by round over
//! its ranges of seeds. A batch system only gets the task's number.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use toml::{Table, Value};

use super::{Error, features};
use vellum_report::printable;
use vellum_sys::keyvalue;
use vellum_sys::open;

/// The largest plan in bytes. A thousand tests take a tenth of it.
pub const LARGEST: u64 = 1 << 20;

/// The most tasks in a plan.
const MAX_TASKS: u64 = 10_000_000;

/// The longest name of a plan or a test.
const LONGEST: usize = 64;

/// Arguments that the fleet sets itself.
const OWN: [&str; 6] = ["json", "format", "origin", "exit", "heartbeat", "seed"];

/// Checks a command's arguments and returns the name of its seed argument, if it has one. The
/// command line provides it.
pub type Check<'a> = &'a dyn Fn(&[String]) -> Result<Option<String>, String>;

/// A valid plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The plan's name.
    pub name: String,
    /// The tests to run.
    pub tests: Vec<Test>,
    /// The SHA-256 of its text in hexadecimal. Results name their plan by it.
    pub digest: String,
}

/// A test or benchmark in a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Test {
    /// Its name, unique in the plan.
    pub name: String,
    /// The command (`test dirty-log`) with its arguments.
    pub words: Vec<String>,
    /// The argument for a seed. Without one, a seed only numbers the run.
    pub seeded: Option<String>,
    /// The features that a host needs.
    pub features: BTreeSet<String>,
    /// The first seed.
    pub first_seed: u64,
    /// The number of seeds.
    pub seeds: u64,
    /// The number of seeds per task.
    pub per_task: u64,
    /// How often to run all seeds.
    pub times: u64,
    /// The time limit of a task in minutes.
    pub minutes: u64,
}

/// One task: a range of seeds of one test.
#[derive(Clone, Debug, PartialEq)]
pub struct Task<'a> {
    /// Its number.
    pub index: u64,
    /// Its test.
    pub test: &'a Test,
    /// The repetition, from 0.
    pub round: u64,
    /// The first seed.
    pub first: u64,
    /// The number of seeds.
    pub count: u64,
}

#[derive(Deserialize)]
struct Written {
    name: String,
    #[serde(default)]
    test: Vec<WrittenTest>,
}

#[derive(Deserialize)]
struct WrittenTest {
    name: String,
    run: String,
    #[serde(default)]
    arguments: Table,
    #[serde(default)]
    features: Vec<String>,
    #[serde(default = "default_one")]
    first_seed: u64,
    #[serde(default = "default_one")]
    seeds: u64,
    #[serde(default = "default_one")]
    per_task: u64,
    #[serde(default = "default_one")]
    times: u64,
    #[serde(default = "hour")]
    minutes: u64,
}

fn default_one() -> u64 {
    1
}

fn hour() -> u64 {
    60
}

impl Plan {
    /// Reads and checks a plan.
    ///
    /// # Errors
    /// Fails if the file cannot be read or the plan is not valid.
    pub fn read(path: &Path, check: Check) -> Result<Self, Error> {
        let wrong = |why| Error::Plan { path: path.into(), why };
        let text = open::read_text(path, LARGEST)
            .map_err(|error| wrong(format!("cannot read: {error}; name a plan (a TOML file)")))?;
        Self::parse(&text, check).map_err(wrong)
    }

    /// Parses a plan.
    ///
    /// # Errors
    /// The problem and the remedy.
    pub fn parse(text: &str, check: Check) -> Result<Self, String> {
        if text.len() as u64 > LARGEST {
            return Err(format!("longer than {} KiB, the limit for plans", LARGEST >> 10));
        }
        let table: Table = text.parse().map_err(|error: toml::de::Error| one_line(&error, text))?;
        known(&table, &["name", "test"], "a plan")?;
        let keys =
            ["name", "run", "arguments", "features", "first_seed", "seeds", "per_task", "times", "minutes"];
        let begins = "test: begin each test with [[test]], in two pairs of brackets";
        let tests = table.get("test").map(|tests| tests.as_array().ok_or(begins)).transpose()?;
        for test in tests.into_iter().flatten() {
            known(test.as_table().ok_or(begins)?, &keys, "a test")?;
        }
        let Written { name, test } =
            table.try_into().map_err(|error: toml::de::Error| one_line(&error, text))?;
        label(&name)?;
        let mut tests: Vec<Test> = Vec::new();
        for written in test {
            let name = written.name.clone();
            label(&name)?;
            if tests.iter().any(|test| test.name == name) {
                return Err(format!("two tests are called {name}"));
            }
            tests.push(of(written, check).map_err(|why| format!("test {name}: {why}"))?);
        }
        if tests.is_empty() {
            return Err("the plan has no [[test]]".into());
        }
        let plan = Self { name, tests, digest: digest(text.as_bytes()) };
        match plan.tests.iter().try_fold(0u64, |sum, test| sum.checked_add(test.tasks()?)) {
            Some(tasks) if tasks <= MAX_TASKS => Ok(plan),
            _ => Err(format!("more than {MAX_TASKS} tasks: raise per_task or split the plan")),
        }
    }

    /// The number of tasks.
    pub fn len(&self) -> u64 {
        self.tests.iter().filter_map(Test::tasks).sum()
    }

    /// Always false: a plan has at least one test.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The task with that number.
    pub fn task(&self, index: u64) -> Option<Task<'_>> {
        let mut rest = index;
        for test in &self.tests {
            let tasks = test.tasks()?;
            if rest >= tasks {
                rest -= tasks;
                continue;
            }
            let ranges = test.seeds.div_ceil(test.per_task);
            let (round, range) = (rest / ranges, rest % ranges);
            let from = range * test.per_task;
            let count = test.per_task.min(test.seeds - from);
            return Some(Task { index, test, round, first: test.first_seed + from, count });
        }
        None
    }

    /// All tasks.
    pub fn tasks(&self) -> impl Iterator<Item = Task<'_>> {
        (0..self.len()).filter_map(|index| self.task(index))
    }

    /// The test with this name and seed, or the only test with the seed.
    ///
    /// # Errors
    /// Fails if no test or more than one has it.
    pub fn with_seed(&self, seed: u64, name: Option<&str>) -> Result<&Test, Error> {
        let has = |test: &&Test| (test.first_seed..test.first_seed + test.seeds).contains(&seed);
        let of: Vec<&Test> =
            self.tests.iter().filter(|test| name.is_none_or(|name| test.name == name)).collect();
        let names = || self.tests.iter().map(|test| test.name.as_str()).collect::<Vec<_>>().join(", ");
        if of.is_empty() {
            let typed = name.unwrap_or_default();
            return Err(Error::Asked(format!("{typed}: not a test of this plan; tests are {}", names())));
        }
        match of.iter().copied().filter(has).collect::<Vec<_>>()[..] {
            [test] => Ok(test),
            [] => Err(Error::Asked(format!("seed {seed}: no test of this plan has this seed"))),
            _ => Err(Error::Asked(format!(
                "seed {seed}: several tests have this seed; name one of {}",
                names()
            ))),
        }
    }
}

impl Test {
    fn tasks(&self) -> Option<u64> {
        self.seeds.div_ceil(self.per_task).checked_mul(self.times)
    }

    /// The arguments of one run, without the program.
    pub fn command(&self, seed: u64) -> Vec<String> {
        let mut words = self.words.clone();
        words.extend(self.seeded.as_ref().map(|flag| format!("{flag}={seed}")));
        words
    }

    /// The text of a plan that runs one seed of this test `times` times.
    pub fn again(&self, plan: &str, seed: u64, times: u64) -> String {
        let mut test = Table::new();
        let text = |text: &str| Value::String(text.into());
        test.insert("name".into(), text(&self.name));
        test.insert("run".into(), text(&self.words[..2].join(" ")));
        test.insert(
            "features".into(),
            Value::Array(self.features.iter().map(|feature| text(feature)).collect()),
        );
        for (key, number) in [("first_seed", seed), ("seeds", 1), ("times", times), ("minutes", self.minutes)]
        {
            test.insert(key.into(), Value::Integer(number.cast_signed()));
        }
        let mut arguments = Table::new();
        for word in &self.words[2..] {
            let word = word.trim_start_matches("--");
            let (key, value) =
                word.split_once('=').map_or((word, Value::Boolean(true)), |(key, value)| (key, text(value)));
            match arguments.get_mut(key) {
                None => drop(arguments.insert(key.into(), value)),
                Some(Value::Array(values)) => values.push(value),
                Some(before) => *before = Value::Array(vec![before.clone(), value]),
            }
        }
        test.insert("arguments".into(), Value::Table(arguments));
        let mut whole = Table::new();
        let mut name = format!("{plan}-{}-{seed}", self.name);
        // A name has only letters, digits, - and _, so this cuts between characters.
        name.truncate(LONGEST);
        whole.insert("name".into(), text(&name));
        whole.insert("test".into(), Value::Array(vec![Value::Table(test)]));
        toml::to_string(&whole).expect("a table of plain values")
    }
}

fn of(written: WrittenTest, check: Check) -> Result<Test, String> {
    let mut words: Vec<String> = written.run.split(' ').map(str::to_owned).collect();
    if words.len() != 2 || !["test", "bench"].contains(&words[0].as_str()) || words[1].starts_with('-') {
        return Err(format!(
            "run = {:?}: use `test NAME` or `bench NAME`, as in \"test dirty-log\"",
            written.run
        ));
    }
    for (key, value) in &written.arguments {
        if key.is_empty()
            || key.starts_with('-')
            || !key.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
        {
            return Err(format!("arguments: {key:?} is not the name of an argument"));
        }
        if OWN.contains(&key.as_str()) {
            return Err(format!(
                "arguments: {key} is set by the fleet; leave it out (for seeds use the keys of the test)"
            ));
        }
        argument(key, value, &mut words)?;
    }
    let seeded = check(&words)?;
    let mut all = BTreeSet::new();
    for feature in written.features {
        features::check(&feature)?;
        all.insert(feature);
    }
    let WrittenTest { name, first_seed, seeds, per_task, times, minutes, .. } = written;
    for (key, value, most) in [
        ("seeds", seeds, 1 << 40),
        ("per_task", per_task, 10_000),
        ("times", times, 1_000_000),
        ("minutes", minutes, 525_600),
    ] {
        if !(1..=most).contains(&value) {
            return Err(format!("{key} = {value}: use 1 to {most}"));
        }
    }
    if first_seed > 1 << 62 {
        return Err(format!("first_seed = {first_seed}: use at most {}", 1u64 << 62));
    }
    Ok(Test { name, words, seeded, features: all, first_seed, seeds, per_task, times, minutes })
}

/// Appends one argument as words. The `=` keeps a value from being taken for a flag.
fn argument(key: &str, value: &Value, words: &mut Vec<String>) -> Result<(), String> {
    match value {
        Value::Boolean(true) => words.push(format!("--{key}")),
        Value::Boolean(false) => {}
        Value::String(text) if text.contains('\0') => {
            return Err(format!("arguments: {key} has a zero byte"));
        }
        Value::String(text) => words.push(format!("--{key}={text}")),
        Value::Integer(number) => words.push(format!("--{key}={number}")),
        Value::Float(number) => words.push(format!("--{key}={number}")),
        Value::Array(values) if values.iter().all(|value| !value.is_array() && !value.is_bool()) => {
            values.iter().try_for_each(|value| argument(key, value, words))?;
        }
        _ => return Err(format!("arguments: {key} must be text, a number, true or a list of these")),
    }
    Ok(())
}

/// Reports an unknown key, with the nearest known one.
fn known(table: &Table, keys: &[&str], what: &str) -> Result<(), String> {
    match table.keys().find(|key| !keys.contains(&key.as_str())) {
        None => Ok(()),
        Some(key) => Err(format!(
            "unknown key '{}'{}: {what} has {}",
            printable(key),
            keyvalue::meant(key, keys.iter().copied()),
            keys.join(", ")
        )),
    }
}

/// Checks that a name is safe in file names, tables and shells.
fn label(name: &str) -> Result<(), String> {
    let right = |c: char| c.is_ascii_alphanumeric() || "_-".contains(c);
    match (1..=LONGEST).contains(&name.len()) && name.chars().all(right) && !name.starts_with('-') {
        true => Ok(()),
        false => Err(format!("name = {name:?}: use up to {LONGEST} letters, digits, - and _")),
    }
}

/// The error and its position, without the lines of the file.
fn one_line(error: &toml::de::Error, text: &str) -> String {
    let before = error.span().and_then(|span| text.get(..span.start));
    let place = before.map_or(String::new(), |before| {
        let line = before.matches('\n').count() + 1;
        let column = before.chars().rev().take_while(|&c| c != '\n').count() + 1;
        format!("line {line}, column {column}: ")
    });
    let said = if before.is_some() { error.message().to_owned() } else { error.to_string() };
    let said: Vec<&str> = said.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    format!("{place}{}", printable(&said.join("; ")))
}

fn digest(bytes: &[u8]) -> String {
    use sha2::{Digest, Sha256};
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The directory with the results of a plan.
pub fn results(plan: &Path) -> PathBuf {
    plan.parent().unwrap_or(Path::new(".")).join("results")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Plan, String> {
        Plan::parse(text, &|words| Ok((words[1] == "dirty-log").then(|| "-S".into())))
    }

    const PLAN: &str = "name = \"n\"\n[[test]]\nname = \"a\"\nrun = \"test dirty-log\"\nseeds = 25\nper_task = 10\ntimes = 2\n\
        [test.arguments]\ntracker = [\"ring\", \"bitmap\"]\nmemory = \"8m\"\nrevoke = true\nrace = false\n\
        [[test]]\nname = \"b\"\nrun = \"bench memslot\"\nfirst_seed = 7\n";

    #[test]
    fn tasks_are_numbered_over_tests_rounds_and_seeds() {
        let plan = parse(PLAN).unwrap();
        assert_eq!((plan.len(), plan.tasks().count()), (7, 7));
        let of = |index| {
            plan.task(index).map(|task| (task.test.name.as_str(), task.round, task.first, task.count))
        };
        assert_eq!(
            [of(0), of(2), of(3), of(6), of(7)],
            [Some(("a", 0, 1, 10)), Some(("a", 0, 21, 5)), Some(("a", 1, 1, 10)), Some(("b", 0, 7, 1)), None]
        );
        let words = plan.tests[0].command(9).join(" ");
        let flags = words.replace("--", "");
        assert_eq!(flags, "test dirty-log memory=8m revoke tracker=ring tracker=bitmap -S=9");
        assert_eq!(plan.tests[1].command(9).join(" "), "bench memslot");
    }

    #[test]
    fn a_seed_again_is_a_plan_of_its_own() {
        let plan = parse(PLAN).unwrap();
        let again = parse(&plan.tests[0].again("n", 9, 50)).unwrap();
        assert_eq!((again.len(), again.name.as_str()), (50, "n-a-9"));
        assert_eq!(again.tests[0].command(9), plan.tests[0].command(9));
        assert!(plan.with_seed(26, None).is_err() && plan.with_seed(7, None).is_err());
        assert_eq!(plan.with_seed(9, Some("a")).unwrap().name, "a");
    }

    #[test]
    fn one_test_without_its_second_brackets_is_told_what_lacks() {
        let first = PLAN.split("[[test]]\nname = \"b\"").next().unwrap();
        assert!(parse(first).is_ok());
        assert!(parse(&first.replace("[[test]]", "[test]")).unwrap_err().contains("two pairs"));
    }

    #[test]
    fn bad_plans_are_refused_in_one_line_with_what_would_work() {
        for (from, to, why) in [
            ("seeds =", "sedes =", "did you mean 'seeds'"),
            ("name = \"n\"", "nmae = \"n\"", "did you mean 'name'"),
            ("run = \"test dirty-log\"", "run = \"test dirty-log; id\"", "as in \"test dirty-log\""),
            ("run = \"test dirty-log\"", "run = \"run x\"", "as in \"test dirty-log\""),
            ("memory = ", "json = ", "set by the fleet"),
            ("memory = ", "\"a b\" = ", "not the name of an argument"),
            ("per_task = 10", "per_task = 0", "use 1 to"),
            ("per_task = 10", "features = [\"$(id)\"]", "letters, digits and _"),
            ("per_task = 10", "features = [\"etp\"]", "did you mean 'ept'"),
            ("name = \"b\"", "name = \"a\"", "two tests are called a"),
            ("name = \"b\"", "name = \"../b\"", "letters, digits"),
            ("times = 2", "times = 900000\nminutes = 1", "use 1"),
            ("name = \"n\"", "name = ", "line 1, column 8: "),
            ("seeds =", "\"a\\u001b\\n\" =", "unknown key 'a\\u{1b}\\n'"),
        ] {
            let planted = PLAN.replacen(from, to, 1);
            assert_ne!(planted, PLAN, "{from}");
            match parse(&planted) {
                Err(error) => {
                    assert!(error.contains(why) && !error.contains(['\n', '\u{1b}']), "{to}: {error}")
                }
                Ok(plan) => assert!(why == "use 1" && plan.len() > 1_000_000, "{to} is taken"),
            }
        }
    }
}
