//! The state of a machine as it comes from a peer or a file: descriptions and sections, until KVM would hear of them.

use serde_json::Value;
use vellum::guests::{self, model};
use vellum::machine;
use vellum::payload::Section;

/// How many pages the guest has whose model is followed.
const PAGES: u64 = 100;

/// The target. The input is a description and, in an array, sections as `[name, version, body]`.
pub fn state(data: &[u8]) {
    let Ok((description, sections)) = serde_json::from_slice::<(Value, Vec<(String, u16, Value)>)>(data)
    else {
        return;
    };
    let section = |(name, version, body): (String, u16, Value)| Section::new(name, version, &body);
    let sections: Vec<Section> = sections.into_iter().map(section).collect();
    let _ = machine::state::Description::from_json(description.clone());
    if let Ok(description) = guests::state::Description::from_json(description) {
        assert!(description.write.stride >= 4096);
    }
    let _ = machine::state::State::read(sections.clone(), 1, ["disk0"]);
    if let Ok(state) = guests::state::State::read(sections, 1, PAGES) {
        let models = state.models().iter().map(|model| (model.clone(), 1000)).collect();
        model::verify(models, PAGES, |_| guests::stamp::Stamp { writer: 0, epoch: 0, page: 0 });
    }
}
