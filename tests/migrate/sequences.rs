//! Sequences of operations. A built-in guest writes while its machine is upgraded, migrated, saved,
//! restored, forked and dumped, and while such operations fail. The runner follows the machine from
//! process to process. Its forks run beside it. At the end the stamps of all guests are checked.
//!
//! A machine that a debugger may attach to cannot be migrated or saved. Sequences with `gdb` check
//! that it refuses and runs on.
//!
//! A plain run does the sequences that once failed, and ten random ones of three operations.
//! `VELLUM_SEQUENCES=all` does every ordered pair and 500 random triples.
//! `VELLUM_SEQUENCES=upgrade,dump` does this sequence. `VELLUM_SEED` repeats the random choices
//! within a sequence. A failure prints the command line that repeats it.

mod fails;
mod machine;
mod saves;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use support::hosts::real;
use support::{Failed, Random, Tests, test};

use self::machine::Run;

/// An operation on the machine under test.
type Operation = fn(&mut Run) -> Result<(), Failed>;

const OPERATIONS: [(&str, Operation); 22] = [
    ("upgrade", machine::upgrade),
    ("upgrade-cannot-start", fails::upgrade_cannot_start),
    ("upgrade-refused", fails::upgrade_refused),
    ("upgrade-cancelled", fails::upgrade_cancelled),
    ("migrate", machine::migrate),
    ("migrate-misfit", fails::migrate_misfit),
    ("migrate-target-dies", fails::migrate_target_dies),
    ("migrate-cut", fails::migrate_cut),
    ("migrate-cancelled", fails::migrate_cancelled),
    ("postcopy-recovered-1", |run| fails::postcopy_recovered(run, 1)),
    ("postcopy-recovered-2", |run| fails::postcopy_recovered(run, 2)),
    ("postcopy-recovered-4", |run| fails::postcopy_recovered(run, 4)),
    ("snapshot-full", saves::full),
    ("snapshot-incremental", saves::incremental),
    ("snapshot-cancelled", saves::cancelled),
    ("snapshot-client-dies", saves::client_dies),
    ("restore-eager", |run| saves::restore(run, "eager,backing=memfd")),
    ("restore-map", |run| saves::restore(run, "map")),
    ("restore-demand", |run| saves::restore(run, "demand,backing=memfd")),
    ("fork", saves::fork),
    ("dump", saves::dump),
    ("gdb", saves::gdb),
];

/// Sequences that lost a guest, or left its machine in a wrong state, before a fix.
const KNOWN: [&[&str]; 4] = [
    &["upgrade", "upgrade-cannot-start"],
    &["upgrade", "upgrade-cancelled"],
    &["snapshot-client-dies", "migrate"],
    &["postcopy-recovered-2", "postcopy-recovered-4"],
];

/// The number of sequences that run in parallel. Each waits more than it computes.
const AT_ONCE: usize = 4;

fn asked() -> Option<String> {
    std::env::var("VELLUM_SEQUENCES").ok()
}

/// Runs one sequence. A failure names the operation and the command line that repeats it.
fn sequence(operations: &[&str], seed: u64) -> Result<(), Failed> {
    let has_gdb = operations.contains(&"gdb");
    let mut run = Run::new(seed, has_gdb)?;
    let mut at = "start";
    let go = || -> Result<(), Failed> {
        for name in operations {
            at = name;
            let operation = OPERATIONS.iter().find(|(known, _)| known == name);
            let (_, operation) = operation.ok_or_else(|| format!("{name:?} is not an operation"))?;
            if has_gdb && !["gdb", "dump"].contains(name) {
                saves::refused(&mut run, name)?;
            } else {
                operation(&mut run)?;
            }
            run.goes_on()?;
        }
        at = "end";
        run.end()
    };
    go().map_err(|error| {
        let sequence = operations.join(",");
        format!(
            "{sequence}, at {at}: {error:?}; repeat: VELLUM_SEED={seed} VELLUM_SEQUENCES={sequence} cargo test --test migrate -- \
             sequences_of_operations"
        )
        .into()
    })
}

/// Runs all of these, several in parallel. Returns the failures.
fn all(sequences: &[(Vec<&'static str>, u64)]) -> Result<(), Failed> {
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some((operations, seed)) = sequences.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(error) = sequence(operations, *seed) {
                        let error = format!("{error:?}");
                        eprintln!("{error}");
                        failed.lock().unwrap_or_else(PoisonError::into_inner).push(error);
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    eprintln!("{} sequences, {} failed", sequences.len(), failed.len());
    if failed.is_empty() { Ok(()) } else { Err(failed.join("\n").into()) }
}

/// `count` random sequences of three operations, with a seed for each.
fn triples(random: &mut Random, count: usize) -> Vec<(Vec<&'static str>, u64)> {
    let mut one = |_| {
        let operations = [(); 3].map(|()| OPERATIONS[random.below(OPERATIONS.len() as u64) as usize].0);
        (operations.to_vec(), random.below(u64::MAX))
    };
    (0..count).map(&mut one).collect()
}

#[test(real())]
fn sequences_of_operations_lose_no_page() -> Result<(), Failed> {
    let mut random = Random::new();
    match asked().filter(|asked| asked != "all") {
        Some(one) => {
            let operations: Vec<&str> = one.split(',').collect();
            let seed = std::env::var("VELLUM_SEED").ok().and_then(|seed| seed.parse().ok());
            sequence(&operations, seed.unwrap_or_else(|| random.below(u64::MAX)))
        }
        None => {
            let known = KNOWN.iter().map(|known| known.to_vec());
            let mut sequences: Vec<_> = known.map(|known| (known, random.below(u64::MAX))).collect();
            sequences.extend(triples(&mut random, 10));
            all(&sequences)
        }
    }
}

/// Adds the long tests: the pairs by first operation, and the triples by fifties, because a test
/// that is not over within half an hour counts as stuck.
pub fn add_long(tests: &mut Tests) {
    if asked().as_deref() != Some("all") {
        return;
    }
    for (first, _) in OPERATIONS {
        tests.add(format!("pairs_that_begin_with_{}", first.replace('-', "_")), real(), move || {
            let mut random = Random::new();
            let pair = |(second, _): (&'static str, _)| (vec![first, second], random.below(u64::MAX));
            all(&OPERATIONS.map(pair))
        });
    }
    for nth in 1..=10 {
        tests.add(format!("fifty_random_triples_{nth}_of_10"), real(), || {
            all(&triples(&mut Random::new(), 50))
        });
    }
}
