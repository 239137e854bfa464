//! Premises: what must have held for a result to mean what it says.
//!
//! Each kind is a variant with its own figures, so that a program can tell them apart; the sentence is made when it is shown. No
//! flag is named here, because a premise does not know the command line.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::printable;
use super::units::humanised;

/// A premise that did not hold, and where.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Failed {
    /// The part of the measurement, where it was not all of it: `round 2`, `500 tables`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<String>,
    /// What did not hold.
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

/// What did not hold.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "snake_case")]
pub enum Premise {
    /// The clock of an emulated host counts instructions, and idle time as if it were some.
    HostIdled {
        /// The share of the time, from 0 to 1.
        share: f64,
        /// How much is tolerated.
        limit: f64,
    },
    /// A figure would have been no number.
    NothingToMeasureBy {
        /// Which.
        figure: String,
    },
    /// Memory does not hold what was written.
    WrongContents {
        /// Pages.
        wrong: u64,
        /// Pages looked at.
        of: u64,
        /// One of them, in words.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        example: Option<String>,
    },
    /// Huge pages were asked for, and KVM mapped none.
    NoHugePage {
        /// The backing that promised them.
        backing: String,
        /// The mappings of 4 KiB, where this kernel counts them.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        small: Option<u64>,
    },
    /// Guest page tables are not shadowed, and their shadowing was to be measured.
    NotShadowed {
        /// What the kernel has instead.
        paging: String,
    },
    /// The guest's code was interpreted by KVM instead of run.
    Interpreted {
        /// Faults that installed a mapping.
        faults: u64,
        /// How many had to.
        least: u64,
    },
    /// A counter without which a premise cannot be shown.
    NoCounter {
        /// KVM's name for it.
        counter: String,
        /// What it would have shown.
        shows: String,
    },
    /// KVM ran out of shadow pages and rebuilt some of them while it was measured.
    Recycled {
        /// How many.
        pages: u64,
    },
    /// Memory that should have been missing was there.
    NotMissing {
        /// Faults that were answered.
        faults: u64,
        /// How many there had to be.
        least: u64,
    },
    /// Accessed bits are not as marking or accessing should have left them.
    IdlePages {
        /// The share of pages that are idle, from 0 to 1.
        share: f64,
        /// After what.
        after: String,
    },
    /// The empty loop took as long as the one with the work in it.
    NotResolved {
        /// Seconds with the work.
        with: f64,
        /// Seconds without.
        without: f64,
    },
    /// A guest that was left alone did not write at the rate that was asked for.
    RateMissed {
        /// Bytes of pages a second.
        asked: f64,
        /// What it wrote.
        got: f64,
    },
    /// A race between two threads, on one CPU.
    OneCpu,
}

impl fmt::Display for Premise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HostIdled { share, limit } => write!(
                f,
                "the emulated host was idle for {:.1} % of the time, which its clock counts as work; above {:.0} % that is no \
                 measurement: measure more memory or more rounds",
                share * 100.0,
                limit * 100.0
            ),
            Self::NothingToMeasureBy { figure } => {
                write!(f, "{} could not be computed: there was nothing to measure it by", printable(figure))
            }
            Self::WrongContents { wrong, of, example } => {
                write!(f, "{wrong} of {of} pages do not hold what was written to them")?;
                example.iter().try_for_each(|example| write!(f, "; {}", printable(example)))
            }
            Self::NoHugePage { backing, small } => {
                write!(f, "memory is backed by {}, but KVM mapped no huge page", printable(backing))?;
                small.iter().try_for_each(|small| write!(f, ", only {small} of 4 KiB"))
            }
            Self::NotShadowed { paging } => write!(
                f,
                "this KVM maps guests by {}, so their page tables are not shadowed: load kvm_intel with ept=0 or kvm_amd with npt=0",
                printable(paging)
            ),
            Self::Interpreted { faults, least } => write!(
                f,
                "{faults} faults installed a mapping where at least {least} had to: this KVM emulates code at CPL 0 in software"
            ),
            Self::NoCounter { counter, shows } => {
                write!(f, "without the counter {} nothing shows that {}", printable(counter), printable(shows))
            }
            Self::Recycled { pages } => write!(
                f,
                "KVM recycled {pages} shadow pages, so that what was timed is their rebuilding too: give KVM a larger budget of them"
            ),
            Self::NotMissing { faults, least } => {
                write!(f, "{faults} faults where at least {least} had to be: memory was not missing")
            }
            Self::IdlePages { share, after } => {
                write!(f, "{:.1} % of the pages are idle after {}", share * 100.0, printable(after))
            }
            Self::NotResolved { with, without } => write!(
                f,
                "{:.1} µs with the work and {:.1} µs without: the host was disturbed, or there is too little work in a round",
                with * 1e6,
                without * 1e6
            ),
            Self::RateMissed { asked, got } => write!(
                f,
                "the guest, left alone, wrote {} where {} was asked for: this host is too busy or too slow for that",
                humanised("bytes/s", *got),
                humanised("bytes/s", *asked)
            ),
            Self::OneCpu => f.write_str(
                "on one CPU the other thread need not run between KVM's two looks: that no page was lost says nothing",
            ),
        }
    }
}
