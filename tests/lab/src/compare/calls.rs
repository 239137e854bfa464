//! Counts a benchmark's calls of kernel functions, and sums one of their arguments, by a kprobe
//! with a histogram (Documentation/trace/kprobetrace.rst, histogram.rst). Probes add instructions,
//! so nothing is timed meanwhile.

use vellum_report::Figure;

use crate::{Error, Result};

/// A counted function as `calls` in series.toml names it: `name`, or `name:N` to also sum the N-th
/// argument, from 1 on.
#[derive(Clone, Debug, PartialEq)]
pub struct Call<'a> {
    function: &'a str,
    argument: Option<u32>,
}

impl<'a> Call<'a> {
    /// Parses a function to count.
    ///
    /// # Errors
    /// The text is malformed; the error says how.
    pub fn parse(text: &'a str) -> std::result::Result<Self, String> {
        let (function, argument) = match text.split_once(':') {
            None => (text, None),
            Some((function, argument)) => {
                let number = argument.parse().ok().filter(|number| (1..=6).contains(number));
                (function, Some(number.ok_or(format!("{text}: arguments are numbered from 1 to 6"))?))
            }
        };
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
        if function.is_empty() || !function.chars().all(is_name) {
            return Err(format!("{text}: not a function, as in __flush_dcache_area:2"));
        }
        Ok(Self { function, argument })
    }
}

/// The kernel's tracing directory.
const TRACING: &str = "/sys/kernel/tracing";

/// `command`, with `calls` counted into `file`. The exit status is the command's.
pub fn watched(command: Vec<String>, calls: &[Call<'_>], file: &str) -> Vec<String> {
    let (mut begin, mut end) = (String::new(), String::new());
    for (at, Call { function, argument }) in calls.iter().enumerate() {
        let fetched = argument.map_or(String::new(), |number| format!(" n=\\$arg{number}:u64"));
        let summed = if argument.is_some() { ":vals=n" } else { "" };
        let event = format!("{TRACING}/events/calls/c{at}");
        begin += &format!(
            "echo \"p:calls/c{at} {function}{fetched}\" >> {TRACING}/kprobe_events && \
             echo 'hist:keys=common_pid{summed}' > {event}/trigger && "
        );
        end += &format!("echo '# c{at}' >> {file} && cat {event}/hist >> {file} || exit 1; ");
        end += &format!("echo '!hist:keys=common_pid{summed}' > {event}/trigger; ");
    }
    let script = format!(
        "mount -t tracefs none {TRACING} 2> /dev/null; : > {file}; {begin}\"$@\"; code=$?; {end}\
         echo > {TRACING}/kprobe_events; exit $code"
    );
    ["sh", "-c", &script, "sh"].into_iter().map(str::to_owned).chain(command).collect()
}

/// The figures of `calls` in the output of [`watched`].
///
/// # Errors
/// The text has no histogram of a call, or the histogram lost entries.
pub fn figures(text: &str, calls: &[Call<'_>]) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for (at, Call { function, argument }) in calls.iter().enumerate() {
        let head = format!("# c{at}\n");
        let part = text.split_once(&head).map(|(_, rest)| rest.split("\n# c").next().unwrap_or_default());
        let part = part.filter(|part| part.contains("Hits:")).ok_or_else(|| {
            Error::Refused(format!(
                "the host has no histogram of {function}: is it called so there, and not inlined?"
            ))
        })?;
        if !part.lines().any(|line| line.trim() == "Dropped: 0") {
            return Err(Error::Refused(format!(
                "the host's histogram of {function} was too small for its tasks"
            )));
        }
        let [hits, sum] = ["hitcount:", "n:"].map(|name| part.lines().map(|line| value(line, name)).sum());
        figures.push(Figure::once(format!("{function}_calls"), "times", hits));
        if let Some(number) = argument {
            figures.push(Figure::once(format!("{function}_argument_{number}"), "in all", sum));
        }
    }
    Ok(figures)
}

/// The value after `name` in a histogram's entry. 0 in any other line.
fn value(line: &str, name: &str) -> f64 {
    let Some((_, values)) = line.strip_prefix('{').and_then(|line| line.split_once('}')) else { return 0.0 };
    let mut words = values.split_whitespace();
    words.find(|word| *word == name).and_then(|_| words.next()?.parse().ok()).unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# c0
# event histogram
#
# trigger info: hist:keys=common_pid:vals=hitcount,n:sort=hitcount:size=2048 [active]
#

{ common_pid:        101 } hitcount:          3  n:      12288
{ common_pid:        102 } hitcount:         10  n:      40960

Totals:
    Hits: 13
    Entries: 2
    Dropped: 0
# c1
# event histogram

Totals:
    Hits: 0
    Entries: 0
    Dropped: 0
";

    #[test]
    fn calls_and_arguments_of_all_tasks_are_added() {
        let calls = [Call::parse("clean:2").unwrap(), Call::parse("never").unwrap()];
        let figures = figures(TEXT, &calls).unwrap();
        let said: Vec<_> =
            figures.iter().map(|figure| (figure.label.name.as_str(), figure.value())).collect();
        assert_eq!(said, [("clean_calls", 13.0), ("clean_argument_2", 53248.0), ("never_calls", 0.0)]);
    }

    #[test]
    fn what_was_not_counted_is_told() {
        let calls = [Call::parse("a").unwrap(), Call::parse("b").unwrap(), Call::parse("c").unwrap()];
        assert!(figures(TEXT, &calls).unwrap_err().to_string().contains("no histogram of c"));
    }

    #[test]
    fn a_histogram_that_lost_entries_is_refused() {
        let lost = TEXT.replacen("Dropped: 0", "Dropped: 1", 1);
        assert!(
            figures(&lost, &[Call::parse("clean:2").unwrap()]).unwrap_err().to_string().contains("too small")
        );
    }

    #[test]
    fn names_and_arguments_are_checked() {
        for bad in ["", ":1", "f:0", "f:7", "f:x", "f g", "f;g"] {
            assert!(Call::parse(bad).is_err(), "{bad}");
        }
        let words = watched(vec!["true".into()], &[Call::parse("f:2").unwrap()], "0.calls");
        assert!(words[2].contains("p:calls/c0 f n=\\$arg2:u64") && words[4] == "true", "{words:?}");
    }
}
