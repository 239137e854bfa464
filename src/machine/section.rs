//! The sections of a machine's state, which one process writes and another reads: names, versions,
//! and JSON that is parsed strictly.

use std::collections::BTreeMap;

use serde::Serialize;
use serde::de::DeserializeOwned;

/// A part of a machine's state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Section {
    /// Its name: `vcpu0`, `clock`, `irqchip`, `serial`, `rtc`, `disk0`.
    pub name: String,
    /// The version of its fields.
    pub version: u16,
    /// Its fields, as JSON.
    pub body: Vec<u8>,
}

/// Why sections are not this machine's state.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A section is missing.
    #[error("the saved state has no section {0}; it is damaged or of another machine")]
    Missing(String),
    /// Two sections have the same name.
    #[error("the saved state has two sections {0:?}; it is damaged")]
    Twice(String),
    /// No component has a section of this name.
    #[error("the saved state has a section {0:?} that this machine does not know; give it the same devices")]
    Unknown(String),
    /// The section has another version.
    #[error("section {name} of the saved state has version {found}, and this program knows {known}")]
    Version {
        /// The section's name.
        name: String,
        /// Its version.
        found: u16,
        /// The supported version.
        known: u16,
    },
    /// The fields do not match the version.
    #[error("section {name} of the saved state: {error}; it is damaged or from another version")]
    Body {
        /// The section's name.
        name: String,
        /// What is wrong.
        error: serde_json::Error,
    },
    /// The fields have values that are never saved.
    #[error("section {name} of the saved state has {what}; it is damaged or of another machine")]
    Implausible {
        /// The section's name.
        name: String,
        /// What is wrong.
        what: &'static str,
    },
}

impl Section {
    /// A section of this name with `fields`.
    pub fn new(name: impl Into<String>, version: u16, fields: &impl Serialize) -> Self {
        let body = serde_json::to_vec(fields).expect("states are plain data");
        Self { name: name.into(), version, body }
    }
}

/// Sections to restore. Each is taken once.
#[derive(Debug)]
pub struct Sections(BTreeMap<String, Section>);

impl Sections {
    /// Collects `sections`.
    ///
    /// # Errors
    /// Two have the same name.
    pub fn new(sections: Vec<Section>) -> Result<Self, Error> {
        let mut all = BTreeMap::new();
        for section in sections {
            if let Some(first) = all.insert(section.name.clone(), section) {
                return Err(Error::Twice(first.name));
            }
        }
        Ok(Self(all))
    }

    /// The fields of section `name`, which must have version `known`.
    ///
    /// # Errors
    /// The section is missing, has another version, or its fields do not match.
    pub fn take<T: DeserializeOwned>(&mut self, name: &str, known: u16) -> Result<T, Error> {
        let section = self.0.remove(name).ok_or_else(|| Error::Missing(name.into()))?;
        if section.version != known {
            return Err(Error::Version { name: name.into(), found: section.version, known });
        }
        serde_json::from_slice(&section.body).map_err(|error| Error::Body { name: name.into(), error })
    }

    /// Whether there is a section of this name.
    pub fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// Checks that all sections have been taken.
    ///
    /// # Errors
    /// A section is left.
    pub fn end(self) -> Result<(), Error> {
        self.0.into_keys().next().map_or(Ok(()), |name| Err(Error::Unknown(name)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_section_is_there_once_and_of_a_version_that_is_known() {
        let one = |name: &str, version| Section::new(name, version, &[1, 2]);
        let read = |sections: Vec<Section>| -> Result<[u8; 2], Error> {
            let mut sections = Sections::new(sections)?;
            let fields = sections.take("rtc", 1)?;
            sections.end()?;
            Ok(fields)
        };
        let says = |sections: Vec<Section>| read(sections).unwrap_err().to_string();
        assert_eq!(read(vec![one("rtc", 1)]).unwrap(), [1, 2]);
        assert!(says(vec![]).contains("no section rtc"));
        assert!(says(vec![one("rtc", 1), one("rtc", 1)]).contains("two sections \"rtc\""));
        assert!(says(vec![one("rtc", 1), one("fan", 1)]).contains("\"fan\" that"));
        assert!(says(vec![one("rtc", 2)]).contains("version 2, and this program knows 1"));
        let cut = Section { body: b"[1,".to_vec(), ..one("rtc", 1) };
        assert!(says(vec![cut]).contains("section rtc of the saved state: EOF"));
    }
}
