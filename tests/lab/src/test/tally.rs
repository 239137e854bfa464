//! Counting what test programs print. libtest and libtest-mimic agree on the lines that matter.

use std::collections::BTreeMap;

/// What happened, over all beds.
#[derive(Default)]
pub struct Tally {
    passed: u64,
    failures: Vec<String>,
    /// How many failures there were before the test program that runs, and how many it says that it has.
    before: usize,
    reported: u64,
    /// Skipped tests by where and why.
    skipped: BTreeMap<(String, String), Vec<String>>,
}

impl Tally {
    /// Takes in one line of a test program's output.
    pub fn line(&mut self, bed: &str, line: &str) {
        let line = plain(line);
        if let Some(summary) = line.strip_prefix("test result: ") {
            self.passed += number_before(summary, " passed");
            self.reported += number_before(summary, " failed");
        } else if let Some((name, outcome)) = line.strip_prefix("test ").and_then(|l| l.rsplit_once(" ... "))
        {
            let outcome = outcome.trim();
            if outcome.starts_with("FAILED") {
                self.named(bed, name);
            } else if let Some(rest) = outcome.strip_prefix("ignored") {
                let (name, why) = reason(name, rest);
                self.skip(bed, name, why);
            }
        } else if let Some(name) = line.strip_prefix("---- ").and_then(|l| l.strip_suffix(" ----")) {
            // Its report. What a test has said itself may stand between its name and its outcome above.
            self.named(bed, name.strip_suffix(" stdout").unwrap_or(name));
        }
    }

    fn named(&mut self, bed: &str, name: &str) {
        // libtest-mimic pads it.
        let failure = format!("{bed}: {}", name.trim_end());
        if !self.failures[self.before..].contains(&failure) {
            self.failures.push(failure);
        }
    }

    /// A program ended. Where it failed and fewer failures are known by name than it reports, at least one, it is itself a
    /// failure.
    pub fn ended(&mut self, bed: &str, program: &str, success: bool) {
        let names = (self.failures.len() - self.before) as u64;
        if !success && names < self.reported.max(1) {
            self.failures.push(format!("{bed}: {program}"));
        }
        (self.before, self.reported) = (self.failures.len(), 0);
    }

    /// A check of the laboratory's own succeeded.
    pub fn pass(&mut self) {
        self.passed += 1;
    }

    /// A check of the laboratory's own failed.
    pub fn fail(&mut self, bed: &str, what: &str) {
        self.failures.push(format!("{bed}: {what}"));
        self.before = self.failures.len();
    }

    /// Something was not run.
    pub fn skip(&mut self, bed: &str, what: &str, why: &str) {
        let key = (bed.to_owned(), why.to_owned());
        self.skipped.entry(key).or_default().push(what.to_owned());
    }

    /// How many failed.
    pub fn failed(&self) -> usize {
        self.failures.len()
    }

    /// The one list, and the closing line alone on a line.
    pub fn print(&self) {
        if !self.skipped.is_empty() {
            println!("\nSkipped:");
        }
        for ((bed, why), names) in &self.skipped {
            println!("  {bed}: {}\n    {why}", names.join(", "));
        }
        if !self.failures.is_empty() {
            println!("\nFailed:");
            self.failures.iter().for_each(|failure| println!("  {failure}"));
        }
        let skipped: usize = self.skipped.values().map(Vec::len).sum();
        println!("\n{} passed, {} failed, {skipped} skipped", self.passed, self.failed());
    }
}

/// `name (why) ... ignored`, `name ... ignored, why` (libtest) or `name ... ignored (why)` (libtest-mimic).
fn reason<'a>(name: &'a str, rest: &'a str) -> (&'a str, &'a str) {
    let rest = rest.trim_start_matches([',', ' ']);
    let rest = rest.strip_prefix('(').and_then(|rest| rest.strip_suffix(')')).unwrap_or(rest);
    if !rest.is_empty() {
        return (name, rest);
    }
    match name.split_once(" (") {
        Some((name, why)) => (name, why.strip_suffix(')').unwrap_or(why)),
        None => (name, "it says no reason"),
    }
}

fn number_before(text: &str, word: &str) -> u64 {
    let digits = text.split(word).next().and_then(|before| before.rsplit(' ').next());
    digits.and_then(|digits| digits.parse().ok()).unwrap_or(0)
}

/// Without the colours that a terminal would show.
fn plain(line: &str) -> String {
    let mut out = String::with_capacity(line.len());
    let mut rest = line;
    while let Some((before, after)) = rest.split_once("\x1b[") {
        out.push_str(before);
        rest = after.split_once('m').map_or("", |(_, after)| after);
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(lines: &[&str]) -> Tally {
        let mut tally = Tally::default();
        lines.iter().for_each(|line| tally.line("local", line));
        tally
    }

    #[test]
    fn every_form_of_a_skip_keeps_its_reason() {
        let tally = counted(&[
            "test a ... ignored, needs root",
            "test b (needs KVM: load it) ... ignored",
            "test c ... ignored (needs a tap)",
            "test d ... \x1b[33mignored\x1b[0m",
        ]);
        let reasons: Vec<&str> = tally.skipped.keys().map(|(_, why)| why.as_str()).collect();
        assert_eq!(reasons, ["it says no reason", "needs KVM: load it", "needs a tap", "needs root"]);
        assert_eq!(tally.skipped.values().flatten().collect::<Vec<_>>(), ["d", "b", "c", "a"]);
    }

    #[test]
    fn failures_are_named_and_counted_once() {
        let mut tally = counted(&[
            "test good ... ok",
            "test bad::one - should panic ... FAILED",
            "test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s",
        ]);
        tally.ended("local", "cargo test", false);
        assert_eq!((tally.passed, tally.failed()), (1, 1));
        assert_eq!(tally.failures, ["local: bad::one - should panic"]);
    }

    #[test]
    fn a_failure_whose_test_has_spoken_is_known_by_its_report() {
        let mut tally = counted(&[
            "test chatty ... seed 90",
            "it works",
            "FAILED",
            "---- chatty ----",
            "why",
            "test result: FAILED. 0 passed; 1 failed; 17 filtered out",
        ]);
        tally.ended("local", "x", false);
        assert_eq!(tally.failures, ["local: chatty"]);
        tally.line("local", "test result: FAILED. 0 passed; 1 failed");
        tally.ended("local", "y", false);
        assert_eq!(tally.failures, ["local: chatty", "local: y"]);
        let mut both = counted(&["test bad    ... FAILED", "---- bad stdout ----"]);
        both.ended("local", "z", false);
        assert_eq!(both.failures, ["local: bad"]);
    }

    #[test]
    fn a_program_that_dies_without_a_word_is_a_failure() {
        let mut tally = counted(&["test good ... ok"]);
        tally.ended("local", "target/debug/deps/x", false);
        assert_eq!(tally.failures, ["local: target/debug/deps/x"]);
        tally.ended("local", "y", true);
        assert_eq!(tally.failed(), 1);
    }
}
