//! `--cpu`: the CPU shown to guests. On Arm it is always the host's, because KVM allows few changes
//! to ID registers.

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
            other => Err(format!("{other}: Arm guests always get the host's CPU; use host")),
        }
    }
}

impl fmt::Display for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("host")
    }
}

/// Feature levels. Arm has none here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {}

impl Level {
    /// The highest level without any of these features.
    pub fn without<'a>(_features: impl Iterator<Item = &'a str> + Clone) -> Option<&'static str> {
        None
    }
}

/// The ID registers shown to guests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Listed {
    registers: Vec<Leaf>,
}

impl Listed {
    /// A list of these registers.
    pub fn of(registers: &[Leaf]) -> Self {
        Self { registers: registers.to_vec() }
    }

    /// The registers with the same value in all of these.
    pub fn common(all: &[Self]) -> Self {
        let in_all = |leaf: &&Leaf| all.iter().all(|one| one.registers.contains(leaf));
        let first = all.first().map_or(&[][..], |first| &first.registers);
        Self { registers: first.iter().filter(in_all).copied().collect() }
    }

    /// Refuses to read a model.
    ///
    /// # Errors
    /// Always.
    pub fn read(path: &Path) -> Result<Self, String> {
        Err(format!(
            "{}: Arm guests always get the host's CPU, so models cannot be read from files",
            path.display()
        ))
    }
}
