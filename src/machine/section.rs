//! A machine's state in parts, as it leaves one process and comes into another: names, versions, and JSON that is read strictly.

use std::collections::BTreeMap;

use serde::Serialize;
use serde::de::DeserializeOwned;

/// A part of a machine's state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Section {
    /// What it is of: `vcpu0`, `clock`, `irqchip`, `serial`, `rtc`, `disk0`.
    pub name: String,
    /// The version of its fields.
    pub version: u16,
    /// Its fields, as JSON.
    pub body: Vec<u8>,
}

/// Sections that are not this machine's state.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// One of them is not there.
    #[error("the saved state has no section {0}; it is damaged or of another machine")]
    Missing(String),
    /// Two are of one name.
    #[error("the saved state has two sections {0:?}; it is damaged")]
    Twice(String),
    /// Nobody here has such a state.
    #[error(
        "the saved state has a section {0:?}, of which this machine knows nothing; give it the same devices"
    )]
    Unknown(String),
    /// Its fields are others.
    #[error("section {name} of the saved state has version {found}, and this program knows {known}")]
    Version {
        /// Which.
        name: String,
        /// The version that it has.
        found: u16,
        /// The version that is understood.
        known: u16,
    },
    /// Its fields are not what its version has.
    #[error("section {name} of the saved state: {error}; it is damaged or from another version")]
    Body {
        /// Which.
        name: String,
        /// What is wrong.
        error: serde_json::Error,
    },
    /// Its fields hold what no save writes.
    #[error("section {name} of the saved state has {what}; it is damaged or of another machine")]
    Implausible {
        /// Which.
        name: String,
        /// What is wrong.
        what: &'static str,
    },
}

impl Section {
    /// The section of this name that holds `fields`.
    pub fn new(name: impl Into<String>, version: u16, fields: &impl Serialize) -> Self {
        let body = serde_json::to_vec(fields).expect("states are plain data");
        Self { name: name.into(), version, body }
    }
}

/// Sections that have come, each of which is taken once.
#[derive(Debug)]
pub struct Sections(BTreeMap<String, Section>);

impl Sections {
    /// All of `sections`.
    ///
    /// # Errors
    /// Where two are of one name.
    pub fn new(sections: Vec<Section>) -> Result<Self, Error> {
        let mut all = BTreeMap::new();
        for section in sections {
            if let Some(first) = all.insert(section.name.clone(), section) {
                return Err(Error::Twice(first.name));
            }
        }
        Ok(Self(all))
    }

    /// The fields of section `name`, which must have this version.
    ///
    /// # Errors
    /// Where it is missing, or its fields are not of this version.
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

    /// All that came has been taken.
    ///
    /// # Errors
    /// Where something is left.
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
        assert!(says(vec![one("rtc", 1), one("fan", 1)]).contains("\"fan\", of which"));
        assert!(says(vec![one("rtc", 2)]).contains("version 2, and this program knows 1"));
        let cut = Section { body: b"[1,".to_vec(), ..one("rtc", 1) };
        assert!(says(vec![cut]).contains("section rtc of the saved state: EOF"));
    }
}
