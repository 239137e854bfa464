//! Parts of the benchmarks of starting: the program of floors, `tests/perf/floor.c`, an installed
//! copy of a program, and statistics.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Copies `program` into `dir`, as an installation does. A linker writes its file here and there,
/// so the page cache holds that file in single pages. A page fault maps fewer of these at once than
/// of a file that was copied or read from disk. This makes some 20 of 180 page faults for Vellum,
/// and 0.1 of the ratio.
pub fn installed(program: &Path, dir: &Path) -> PathBuf {
    let name = program.file_name().expect("a program has a name");
    let copy = dir.join(name);
    std::fs::copy(program, &copy).expect("a copy");
    copy
}

/// Compiles `tests/perf/floor.c` as a static program in `dir`.
pub fn compiled(dir: &Path) -> Result<PathBuf, String> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../perf/floor.c");
    let program = dir.join("floor");
    let status = Command::new("cc").args(["-O2", "-static", "-o"]).arg(&program).arg(source).status();
    match status {
        Ok(status) if status.success() => Ok(program),
        Ok(status) => Err(format!("cc: {status}")),
        Err(error) => Err(format!("cc: {error}")),
    }
}

/// The median.
pub fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    (sorted[sorted.len() / 2] + sorted[(sorted.len() - 1) / 2]) / 2.0
}

/// The median, the lower quartile and the upper quartile.
pub fn quartiles(mut samples: Vec<f64>) -> [f64; 3] {
    samples.sort_by(f64::total_cmp);
    [samples[samples.len() / 2], samples[samples.len() / 4], samples[samples.len() - 1 - samples.len() / 4]]
}

/// `samples` divided by `floor`, round by round: the median and the quartiles, as text.
pub fn multiples(samples: &[f64], floor: &[f64]) -> String {
    let mut ratios: Vec<f64> = samples.iter().zip(floor).map(|(sample, floor)| sample / floor).collect();
    ratios.sort_by(f64::total_cmp);
    let at = |part: usize| ratios[(ratios.len() - 1) * part / 4];
    format!("{:5.2} ({:.2} to {:.2})", median(&ratios), at(1), at(3))
}
