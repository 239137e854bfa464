//! Everything of a point except memory: the machine's configuration and its state, as one JSON
//! object.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Error;
use vellum_machine::Section;

/// The maximum size of a `state` file in bytes.
pub(crate) const MAX_BYTES: u64 = 64 << 20;

/// The contents of a `state` file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Body {
    machine: Value,
    sections: Vec<Part>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Part {
    name: String,
    version: u16,
    fields: Box<serde_json::value::RawValue>,
}

/// The bytes of a `state` file for a machine's [description](vellum_machine::SaveState::describe)
/// and its state.
///
/// # Errors
/// A section is not valid JSON.
pub fn bytes(machine: &Value, sections: &[Section]) -> Result<Vec<u8>, serde_json::Error> {
    let parts = sections.iter().map(|section| {
        let fields = serde_json::from_slice(&section.body)?;
        Ok(Part { name: section.name.clone(), version: section.version, fields })
    });
    let sections = parts.collect::<Result<Vec<_>, serde_json::Error>>()?;
    serde_json::to_vec(&Body { machine: machine.clone(), sections })
}

/// Parses the output of [`bytes`]. `file` is the file's name.
///
/// # Errors
/// The bytes are not a valid `state` file.
pub fn parse(bytes: &[u8], file: &str) -> Result<(Value, Vec<Section>), Error> {
    let body: Body = serde_json::from_slice(bytes)
        .map_err(|error| Error::Unfit { file: file.into(), what: format!("{error}; it is damaged") })?;
    let section = |part: Part| Section {
        name: part.name,
        version: part.version,
        body: part.fields.get().as_bytes().to_vec(),
    };
    Ok((body.machine, body.sections.into_iter().map(section).collect()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn sections_come_back_as_they_went() {
        let sections = [Section::new("vcpu0", 1, &u64::MAX), Section::new("rtc", 3, &[1.5])];
        let machine = json!({"kind": "pc"});
        let written = bytes(&machine, &sections).unwrap();
        assert_eq!(parse(&written, "state-0").unwrap(), (machine, sections.to_vec()));
        let more = String::from_utf8(written).unwrap().replacen("\"machine\"", "\"fan\":1,\"machine\"", 1);
        let said = parse(more.as_bytes(), "state-0").unwrap_err().to_string();
        assert!(said.starts_with("state-0: ") && said.contains("fan"), "{said}");
    }
}
