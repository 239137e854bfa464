//! The key=value arguments, and the CPU model's file. Any text is a configuration or an error of
//! one line.

use vellum::cli::args;
use vellum_devices::virtio::KINDS;
#[cfg(target_arch = "x86_64")]
use vellum_kvm::arch::cpuid::model::Listed;
use vellum_sys::keyvalue;

/// The target. `cargo fuzz` runs it, and `cargo test` runs it on the corpus.
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
    #[cfg(target_arch = "x86_64")]
    match Listed::parse(&text) {
        Ok(listed) => {
            let again = serde_json::to_string(&Listed::common(&[listed])).expect("plain data");
            assert!(Listed::parse(&again).is_ok());
        }
        Err(error) => one_line(Some(error)),
    }
}
