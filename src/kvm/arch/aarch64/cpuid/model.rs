//! `--cpu`: which CPU guests are shown. On Arm it is the host's: KVM lets few of the ID registers be less than they are.

use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::Leaf;

/// A CPU model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Model {
    /// What this host's KVM offers.
    #[default]
    Host,
}

impl std::str::FromStr for Model {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "host" => Ok(Self::Host),
            other => Err(format!("{other}: on Arm guests are shown the host's CPU; use host")),
        }
    }
}

impl fmt::Display for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("host")
    }
}

/// Levels of features, of which Arm has none here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {}

impl Level {
    /// The highest level that has none of these features.
    pub fn without<'a>(_features: impl Iterator<Item = &'a str> + Clone) -> Option<&'static str> {
        None
    }
}

/// What guests are shown, register by register.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Listed {
    registers: Vec<Leaf>,
}

impl Listed {
    /// What is described so.
    pub fn of(registers: &[Leaf]) -> Self {
        Self { registers: registers.to_vec() }
    }

    /// The registers that read the same in all of these.
    pub fn common(all: &[Self]) -> Self {
        let in_all = |leaf: &&Leaf| all.iter().all(|one| one.registers.contains(leaf));
        let first = all.first().map_or(&[][..], |first| &first.registers);
        Self { registers: first.iter().filter(in_all).copied().collect() }
    }

    /// Refuses to read one.
    ///
    /// # Errors
    /// Always, in words.
    pub fn read(path: &Path) -> Result<Self, String> {
        Err(format!(
            "{}: on Arm guests are shown the host's CPU, so there is no model to make of files",
            path.display()
        ))
    }
}
