//! The key=value arguments: any text is a configuration or one line that says what is wrong.

use vellum::cli::args;
use vellum::devices::virtio::KINDS;
use vellum::keyvalue;

/// The target: `cargo fuzz` feeds it, and so does `cargo test` from the corpus.
pub fn keyvalue(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let one_line = |error: Option<String>| {
        assert!(error.is_none_or(|error| !error.is_empty()));
    };
    for kind in KINDS {
        one_line((kind.parse)(&text).err());
    }
    one_line(args::memory(&text).err());
    one_line(args::cpus(&text).err());
    one_line(keyvalue::size(&text, 1).err());
    one_line(keyvalue::list(&text).err());
    one_line(keyvalue::duration(&text).err());
}
