//! Premises: the conditions of a valid result.
//!
//! Each kind is a variant with its own figures, so that programs can tell them apart. `Display`
//! builds the sentence. No message names a flag, because a premise does not know the command line.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::printable;
use super::units::humanised;

/// A premise that failed, and where.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Failed {
    /// The part of the measurement, if not all of it: `round 2`, `500 tables`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<String>,
    /// The premise.
    pub premise: Premise,
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.part {
            Some(part) => write!(f, "{}: {}", printable(part), self.premise),
            None => self.premise.fmt(f),
        }
    }
}

/// The conditions that can fail.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "snake_case")]
pub enum Premise {
    /// An emulated host idled. Its clock counts instructions, and idle time as if it were
    /// instructions.
    HostIdled {
        /// The idle share of the time, from 0 to 1.
        share: f64,
        /// The largest share that is tolerated.
        limit: f64,
    },
    /// A figure is not a finite number.
    NothingToMeasureBy {
        /// The figure's label.
        figure: String,
    },
    /// Memory does not hold what the guest wrote.
    WrongContents {
        /// The number of wrong pages.
        wrong: u64,
        /// The number of pages checked.
        of: u64,
        /// One wrong page, in words.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        example: Option<String>,
    },
    /// The backing has huge pages, but KVM mapped none.
    NoHugePage {
        /// The backing.
        backing: String,
        /// The number of 4 KiB mappings, if this kernel counts them.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        small: Option<u64>,
    },
    /// The benchmark measures shadow paging, but KVM does not shadow the guest's page tables.
    NotShadowed {
        /// What KVM uses instead.
        paging: String,
    },
    /// KVM interpreted the guest's code instead of running it.
    Interpreted {
        /// Faults that installed a mapping.
        faults: u64,
        /// The expected minimum.
        least: u64,
    },
    /// The kernel lacks a counter that proves a premise.
    NoCounter {
        /// KVM's name for the counter.
        counter: String,
        /// What the counter would show.
        shows: String,
    },
    /// KVM ran out of shadow pages and rebuilt some during the measurement.
    Recycled {
        /// The number of recycled pages.
        pages: u64,
    },
    /// Memory that should have been missing was present.
    NotMissing {
        /// The number of faults handled.
        faults: u64,
        /// The expected minimum.
        least: u64,
    },
    /// Accessed bits do not have their expected state.
    IdlePages {
        /// The share of idle pages, from 0 to 1.
        share: f64,
        /// The step after which they were read.
        after: String,
    },
    /// The empty loop took as long as the loop with the work.
    NotResolved {
        /// Seconds with the work.
        with: f64,
        /// Seconds without the work.
        without: f64,
    },
    /// An undisturbed guest did not reach the requested write rate.
    RateMissed {
        /// The requested rate in bytes of pages per second.
        asked: f64,
        /// The rate reached.
        got: f64,
    },
    /// The test races two threads, but the host has one CPU.
    OneCpu,
}

impl fmt::Display for Premise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HostIdled { share, limit } => write!(
                f,
                "the emulated host was idle for {:.1} % of the time (limit {:.0} %), and its clock counts idle time as work: \
                 measure more memory or more rounds",
                share * 100.0,
                limit * 100.0
            ),
            Self::NothingToMeasureBy { figure } => {
                write!(f, "{} has no value: it was divided by zero", printable(figure))
            }
            Self::WrongContents { wrong, of, example } => {
                write!(f, "{wrong} of {of} pages have wrong contents")?;
                example.iter().try_for_each(|example| write!(f, "; {}", printable(example)))
            }
            Self::NoHugePage { backing, small } => {
                write!(f, "memory is backed by {}, but KVM mapped no huge pages", printable(backing))?;
                small.iter().try_for_each(|small| write!(f, ", only {small} pages of 4 KiB"))
            }
            Self::NotShadowed { paging } => write!(
                f,
                "this KVM uses {}, not shadow paging: load kvm_intel with ept=0 or kvm_amd with npt=0",
                printable(paging)
            ),
            Self::Interpreted { faults, least } => write!(
                f,
                "{faults} faults installed a mapping, at least {least} were expected: this KVM emulates code at CPL 0 in software"
            ),
            Self::NoCounter { counter, shows } => {
                write!(f, "this kernel lacks the counter {}, which would show that {}", printable(counter), printable(shows))
            }
            Self::Recycled { pages } => write!(
                f,
                "KVM recycled {pages} shadow pages, so the time includes rebuilding them: raise KVM's limit on shadow pages"
            ),
            Self::NotMissing { faults, least } => {
                write!(f, "{faults} faults, at least {least} were expected: some memory was not missing")
            }
            Self::IdlePages { share, after } => {
                write!(f, "{:.1} % of the pages are idle after {}", share * 100.0, printable(after))
            }
            Self::NotResolved { with, without } => write!(
                f,
                "{:.1} µs with the work, {:.1} µs without: the host was disturbed, or a round has too little work",
                with * 1e6,
                without * 1e6
            ),
            Self::RateMissed { asked, got } => write!(
                f,
                "the undisturbed guest wrote {} of the requested {}: this host is too busy or too slow",
                humanised("bytes/s", *got),
                humanised("bytes/s", *asked)
            ),
            Self::OneCpu => f.write_str(
                "the host has one CPU, so the two threads may never have raced: losing no page proves nothing",
            ),
        }
    }
}
