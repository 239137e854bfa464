//! The reader of the judge's console. No log makes it panic or run for long, and an incomplete one
//! never passes.

use vellum_judge::read::{Verdict, read};

/// The RAM whose checksums are quick to compute.
const MAX_RAM: u64 = 256 << 20;

/// The target. `cargo fuzz` runs it, and `cargo test` runs it on the corpus.
pub fn judge(data: &[u8]) {
    let log = read(data);
    let is_long = log.ranges.iter().map(|range| range.end - range.start).sum::<u64>() > MAX_RAM;
    let is_sparse = log.start.as_ref().is_some_and(|start| start.write < 20 || start.hot.is_some());
    if is_long || is_sparse {
        return;
    }
    if log.verdict() == Verdict::Whole {
        assert!(log.faults.is_empty() && log.starts == 1, "a log passes that is not whole");
        let text = String::from_utf8_lossy(data);
        assert!(text.contains("# end WHOLE") && !text.contains("# end LOST"), "no verdict passes");
    }
}
