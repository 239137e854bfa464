//! The bed of kernels: every series applies and compiles, and the frozen base's kernel with all
//! series boots under the oracle. Builds are cached. A cold cache means more work, not a skip.

use super::tally::Tally;
use crate::Result;
use crate::cache::Cache;
use crate::kernel::series::{self, Series};
use crate::kernel::tree::Tree;
use crate::kernel::{BASES, boots, build, check, objects};

const HOST: &str = "kernels";

/// Checks every series in `kernel-patches/`.
pub fn run(tally: &mut Tally) -> Result<()> {
    let cache = Cache::open()?;
    let all = series::all()?;
    if all.is_empty() {
        tally.skip(HOST, "kernel-patches", "it holds no series yet");
    }
    for series in &all {
        let name = format!("{}/{}", series.base.name, series.name);
        tally.stage(HOST, &format!("{name} applies and compiles"), applies_and_compiles(&cache, series));
        tally.lap(HOST, &format!("{name} applies and compiles"));
    }
    // The other bases change, so their kernels are built only on request.
    for base in BASES.iter().filter(|base| base.frozen.is_some()) {
        let stack = series::of_base(base, &["all".to_owned()])?;
        if !stack.is_empty() {
            tally.stage(
                HOST,
                &format!("{} with all of its series boots", base.name),
                stack_boots(&cache, &stack),
            );
            tally.lap(HOST, &format!("{} with all of its series: building and boots", base.name));
        }
    }
    Ok(())
}

fn applies_and_compiles(cache: &Cache, series: &Series) -> Result<()> {
    let tree = Tree::open(cache, series.base)?;
    check::applies(cache, &tree, series)?;
    objects::warnings(cache, &tree, series)?;
    check::in_user_space(cache, &tree, series)
}

fn stack_boots(cache: &Cache, stack: &[Series]) -> Result<()> {
    let image = build::build(cache, stack[0].base, stack, None)?;
    let mut tests = Vec::new();
    for series in stack {
        // A series for another architecture is in the source but not in the image that boots.
        if series.architecture()? == image.architecture {
            tests.extend(series.about.test.iter().cloned());
        }
    }
    // Races with two CPUs fail now and then by chance. They and tests that need other hosts or
    // kernels are left to `cargo lab check`.
    tests.retain(|test| !test.multi && test.is_plain());
    boots::every_time(cache, &image, stack, &tests)
}
