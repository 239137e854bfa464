//! What the kernel's locks did during a benchmark, from /proc/lock_stat
//! (Documentation/locking/lockstat.rst): how often each was taken and contended, and how long it
//! was held. The kernels are built with `--variant lock-stat`.
//!
//! The statistics cover the whole command, including the VM's start and end.

use vellum_report::{Figure, Report};

use crate::{Error, Result};

/// The kernel variant with lock statistics.
pub const VARIANT: &str = "lock-stat";

/// The KVM counter by which figures are divided: page faults that mapped something.
const FAULTS: &str = "pf_fixed";

/// `command`, with lock statistics of its run in `file`. The exit status is the command's.
pub fn watched(command: Vec<String>, file: &str) -> Vec<String> {
    let script = format!(
        "echo 0 > /proc/lock_stat && echo 1 > /proc/sys/kernel/lock_stat && \"$@\"; code=$?
         echo 0 > /proc/sys/kernel/lock_stat; cat /proc/lock_stat > {file} || exit 1; exit $code"
    );
    ["sh", "-c", &script, "sh"].into_iter().map(str::to_owned).chain(command).collect()
}

/// How often and how long a lock was held, for read or for write.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Use {
    taken: f64,
    contended: f64,
    /// Microseconds.
    held: f64,
}

impl Use {
    fn add(&mut self, other: Self) {
        self.taken += other.taken;
        self.contended += other.contended;
        self.held += other.held;
    }
}

/// A lock's figures. A spinlock counts as held for write. `timed` is false if the host's clock does
/// not count instructions. Hold times are also given per fault if `report` has the number of
/// faults.
pub fn figures(text: &str, lock: &str, report: Option<&Report>, timed: bool) -> Result<Vec<Figure>> {
    let [write, read] = uses(text, lock)?;
    let moved = |report: &Report| {
        let faults = report.counters.iter().find(|counter| counter.name == FAULTS)?;
        faults.after.checked_sub(faults.before).filter(|&faults| faults > 0)
    };
    let faults = report.and_then(moved);
    let mut figures = Vec::new();
    let mut figure =
        |name: &str, unit: &str, value| figures.push(Figure::once(format!("{lock}_{name}"), unit, value));
    for (way, one) in [("write", write), ("read", read)] {
        figure(&format!("{way}_taken"), "times", one.taken);
        figure(&format!("{way}_contended"), "times", one.contended);
        if !timed {
            continue;
        }
        figure(&format!("{way}_held"), "ns", one.held * 1e3);
        if let Some(faults) = faults {
            figure(&format!("{way}_held_per_fault"), "ns", one.held * 1e3 / faults as f64);
        }
    }
    if let Some(faults) = faults {
        figure("faults", "faults", faults as f64);
    }
    Ok(figures)
}

/// The sums over all classes whose name contains `lock`: for write, for read.
fn uses(text: &str, lock: &str) -> Result<[Use; 2]> {
    if !text.starts_with("lock_stat version") {
        return Err(Error::Refused("the host's /proc/lock_stat is not what Linux writes".into()));
    }
    let mut both = [Use::default(); 2];
    let mut seen = false;
    // A class's line begins with its name and a colon. Lines of contention points have no colon.
    for (name, rest) in text.lines().filter_map(|line| line.rsplit_once(": ")) {
        let name = name.trim();
        if !name.contains(lock) {
            continue;
        }
        // con-bounces, contentions, four wait times, acq-bounces, acquisitions, the shortest,
        // longest, total and average hold time
        let columns: Vec<f64> = rest.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        let [_, contended, _, _, _, _, _, taken, _, _, held, _] = columns[..] else {
            return Err(Error::Refused(format!(
                "/proc/lock_stat: {} figures of {name}, not 12",
                columns.len()
            )));
        };
        both[usize::from(name.ends_with("-R"))].add(Use { taken, contended, held });
        seen = true;
    }
    if seen { Ok(both) } else { Err(Error::Refused(format!("/proc/lock_stat knows no lock called {lock}"))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "lock_stat version 0.4
-----
                              class name    con-bounces    contentions   waittime-min ...
-----

                       &(kvm)->mmu_lock:             3             17           0.10           9.00          99.00           1.00            400           4325           0.20          60.00        5540.50           1.28
                       ----------------
                       &(kvm)->mmu_lock             10          [<00000000abcdef01>] f+0x10/0x20
...
                    &(kvm)->mmu_lock-W:             0              1           0.00           0.00           0.00           0.00              1              2           0.10           0.10           0.20           0.10
                    &(kvm)->mmu_lock-R:             0              5           0.00           0.00           0.00           0.00              9             10           0.50           0.50           5.00           0.50
                             &other->lock:             0              7           0.00           0.00           0.00           0.00              9             70           0.50           0.50           5.00           0.50
";

    #[test]
    fn a_spinlock_counts_as_written_and_places_of_waiting_are_no_locks() {
        let [write, read] = uses(TEXT, "mmu_lock").unwrap();
        assert_eq!(write, Use { taken: 4327.0, contended: 18.0, held: 5540.5 + 0.2 });
        assert_eq!(read, Use { taken: 10.0, contended: 5.0, held: 5.0 });
    }

    #[test]
    fn what_is_not_there_is_told_and_not_zero() {
        assert!(uses(TEXT, "no_such_lock").unwrap_err().to_string().contains("no_such_lock"));
        assert!(uses("", "mmu_lock").is_err());
        let short = TEXT.replace("           0.20           0.10\n", "\n");
        assert!(uses(&short, "mmu_lock").unwrap_err().to_string().contains("10 figures"));
    }

    #[test]
    fn times_are_left_out_where_nothing_counts_instructions() {
        let names = |timed| {
            figures(TEXT, "mmu_lock", None, timed)
                .unwrap()
                .into_iter()
                .map(|f| f.label.name)
                .collect::<Vec<_>>()
        };
        assert!(names(true).contains(&"mmu_lock_read_held".to_owned()));
        assert!(names(false).iter().all(|name| !name.contains("held")));
    }

    #[test]
    fn the_command_keeps_its_words_and_its_status() {
        let words = ["sh", "-c", "exit 3; #"].map(str::to_owned).to_vec();
        let line = watched(words, "0.locks");
        assert_eq!(line[line.len() - 3..], ["sh", "-c", "exit 3; #"]);
        assert!(line[2].ends_with("exit $code"));
    }
}
