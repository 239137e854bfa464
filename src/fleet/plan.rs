//! The plan: which tests, with which arguments, seeds and how often, on hosts with which features. It is a TOML file that people write.
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
//! Its tasks are numbered in the order of the file: test by test, each time over its ranges of seeds. A task's number is all that
//! is ever handed to a batch system.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use toml::{Table, Value};

use super::{Error, features};
use vellum_report::printable;
use vellum_sys::keyvalue;
use vellum_sys::open;

/// The largest plan that is read, in bytes: a thousand tests are a tenth of it.
pub const LARGEST: u64 = 1 << 20;

/// The most tasks of a plan.
const MAX_TASKS: u64 = 10_000_000;

/// The longest name of a plan or a test.
const LONGEST: usize = 64;

/// Arguments that the fleet gives itself.
const OWN: [&str; 6] = ["json", "format", "origin", "exit", "heartbeat", "seed"];

/// What checks the arguments of a command, and names the one that takes a seed, where one does: the command line.
pub type Check<'a> = &'a dyn Fn(&[String]) -> Result<Option<String>, String>;

/// A plan that has been checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// What it is called.
    pub name: String,
    /// What is run.
    pub tests: Vec<Test>,
    /// The SHA-256 of its text, in hexadecimal: results say by it which plan they are of.
    pub digest: String,
}

/// One test or benchmark of a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Test {
    /// What it is called, unique in the plan.
    pub name: String,
    /// `test dirty-log` with its arguments, a word each.
    pub words: Vec<String>,
    /// The argument that takes a seed; without one, a seed is the number of a run and nothing else.
    pub seeded: Option<String>,
    /// What a host needs.
    pub features: BTreeSet<String>,
    /// The first seed.
    pub first_seed: u64,
    /// How many seeds.
    pub seeds: u64,
    /// How many of them in a task.
    pub per_task: u64,
    /// How often all of them.
    pub times: u64,
    /// How long a task may take.
    pub minutes: u64,
}

/// One task: a range of seeds of one test.
#[derive(Clone, Debug, PartialEq)]
pub struct Task<'a> {
    /// Its number.
    pub index: u64,
    /// Of what.
    pub test: &'a Test,
    /// The how manieth time, from 0.
    pub round: u64,
    /// The first seed.
    pub first: u64,
    /// How many.
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
    /// Where it cannot be read, or something in it would not work.
    pub fn read(path: &Path, check: Check) -> Result<Self, Error> {
        let wrong = |why| Error::Plan { path: path.into(), why };
        let text = open::read_text(path, LARGEST)
            .map_err(|error| wrong(format!("cannot be read: {error}; name a plan, which is a TOML file")))?;
        Self::parse(&text, check).map_err(wrong)
    }

    /// The plan that `text` is.
    ///
    /// # Errors
    /// What is wrong in it, and what would work.
    pub fn parse(text: &str, check: Check) -> Result<Self, String> {
        if text.len() as u64 > LARGEST {
            return Err(format!("longer than {} KiB, which no plan is", LARGEST >> 10));
        }
        let table: Table = text.parse().map_err(|error: toml::de::Error| one_line(&error, text))?;
        known(&table, &["name", "test"], "a plan")?;
        let keys =
            ["name", "run", "arguments", "features", "first_seed", "seeds", "per_task", "times", "minutes"];
        let begins = "test: [[test]] begins each, in two pairs of brackets";
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
            return Err("it has no [[test]]".into());
        }
        let plan = Self { name, tests, digest: digest(text.as_bytes()) };
        match plan.tests.iter().try_fold(0u64, |sum, test| sum.checked_add(test.tasks()?)) {
            Some(tasks) if tasks <= MAX_TASKS => Ok(plan),
            _ => Err(format!("more than {MAX_TASKS} tasks: raise per_task, or make two plans")),
        }
    }

    /// How many tasks.
    pub fn len(&self) -> u64 {
        self.tests.iter().filter_map(Test::tasks).sum()
    }

    /// Never so: a plan has a test.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The task of that number.
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

    /// All of them.
    pub fn tasks(&self) -> impl Iterator<Item = Task<'_>> {
        (0..self.len()).filter_map(|index| self.task(index))
    }

    /// Those that have this seed of the test of this name, or of the only one that has it.
    ///
    /// # Errors
    /// Where there is none, or several tests have it.
    pub fn with_seed(&self, seed: u64, name: Option<&str>) -> Result<&Test, Error> {
        let has = |test: &&Test| (test.first_seed..test.first_seed + test.seeds).contains(&seed);
        let of: Vec<&Test> =
            self.tests.iter().filter(|test| name.is_none_or(|name| test.name == name)).collect();
        let names = || self.tests.iter().map(|test| test.name.as_str()).collect::<Vec<_>>().join(", ");
        if of.is_empty() {
            let typed = name.unwrap_or_default();
            return Err(Error::Asked(format!("{typed}: no test of this plan; there are {}", names())));
        }
        match of.iter().copied().filter(has).collect::<Vec<_>>()[..] {
            [test] => Ok(test),
            [] => Err(Error::Asked(format!("seed {seed}: no test of this plan has it"))),
            _ => Err(Error::Asked(format!("seed {seed}: several tests have it; name one of {}", names()))),
        }
    }
}

impl Test {
    fn tasks(&self) -> Option<u64> {
        self.seeds.div_ceil(self.per_task).checked_mul(self.times)
    }

    /// The command of one run, the program aside.
    pub fn command(&self, seed: u64) -> Vec<String> {
        let mut words = self.words.clone();
        words.extend(self.seeded.as_ref().map(|flag| format!("{flag}={seed}")));
        words
    }

    /// A plan of this one seed of it, to be run so many times, as a file.
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
        // Of letters, digits, - and _ alone, as both names are.
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
            "run = {:?}: `test NAME` or `bench NAME`, as in \"test dirty-log\"",
            written.run
        ));
    }
    for (key, value) in &written.arguments {
        if key.is_empty()
            || key.starts_with('-')
            || !key.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
        {
            return Err(format!("arguments: {key:?} is no name of an argument"));
        }
        if OWN.contains(&key.as_str()) {
            return Err(format!(
                "arguments: {key} is what a task gives itself; leave it out (seeds has its own keys)"
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
            return Err(format!("{key} = {value}: from 1 to {most}"));
        }
    }
    if first_seed > 1 << 62 {
        return Err(format!("first_seed = {first_seed}: at most {}", 1u64 << 62));
    }
    Ok(Test { name, words, seeded, features: all, first_seed, seeds, per_task, times, minutes })
}

/// One argument as words. With `=` in it a value is never taken for another flag.
fn argument(key: &str, value: &Value, words: &mut Vec<String>) -> Result<(), String> {
    match value {
        Value::Boolean(true) => words.push(format!("--{key}")),
        Value::Boolean(false) => {}
        Value::String(text) if text.contains('\0') => {
            return Err(format!("arguments: {key} has a zero byte in it"));
        }
        Value::String(text) => words.push(format!("--{key}={text}")),
        Value::Integer(number) => words.push(format!("--{key}={number}")),
        Value::Float(number) => words.push(format!("--{key}={number}")),
        Value::Array(values) if values.iter().all(|value| !value.is_array() && !value.is_bool()) => {
            values.iter().try_for_each(|value| argument(key, value, words))?;
        }
        _ => return Err(format!("arguments: {key} is text, a number, true, or a list of these")),
    }
    Ok(())
}

/// Answers a key that is not there with the nearest that is.
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

/// A name that is the same in a file's name, a table and a shell.
fn label(name: &str) -> Result<(), String> {
    let right = |c: char| c.is_ascii_alphanumeric() || "_-".contains(c);
    match (1..=LONGEST).contains(&name.len()) && name.chars().all(right) && !name.starts_with('-') {
        true => Ok(()),
        false => Err(format!("name = {name:?}: up to {LONGEST} letters, digits, - and _")),
    }
}

/// What is wrong and where, without the lines of the file itself.
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

/// Where the results of the plan in this file lie.
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
            ("memory = ", "json = ", "a task gives itself"),
            ("memory = ", "\"a b\" = ", "no name of an argument"),
            ("per_task = 10", "per_task = 0", "from 1 to"),
            ("per_task = 10", "features = [\"$(id)\"]", "letters, digits and _"),
            ("per_task = 10", "features = [\"etp\"]", "did you mean 'ept'"),
            ("name = \"b\"", "name = \"a\"", "two tests are called a"),
            ("name = \"b\"", "name = \"../b\"", "letters, digits"),
            ("times = 2", "times = 900000\nminutes = 1", "from 1"),
            ("name = \"n\"", "name = ", "line 1, column 8: "),
            ("seeds =", "\"a\\u001b\\n\" =", "unknown key 'a\\u{1b}\\n'"),
        ] {
            let planted = PLAN.replacen(from, to, 1);
            assert_ne!(planted, PLAN, "{from}");
            match parse(&planted) {
                Err(error) => {
                    assert!(error.contains(why) && !error.contains(['\n', '\u{1b}']), "{to}: {error}")
                }
                Ok(plan) => assert!(why == "from 1" && plan.len() > 1_000_000, "{to} is taken"),
            }
        }
    }
}
