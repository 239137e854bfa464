//! `cargo lab check`: the checks that a maintainer would make before reading a series.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use clap::ValueEnum;
use clap::builder::PossibleValue;

use super::bench::Bench;
use super::boots;
use super::build::{self, Image};
use super::complaints::complaints;
use super::explore;
use super::objects;
use super::selftests::{self, Results};
use super::series::{self, Series};
use super::tree::Tree;
use super::{Base, report, variants};
use vellum_report::{Case, Report, Status};

use crate::architecture::Architecture;
use crate::artifacts::Programs;
use crate::cache::Cache;
use crate::form;
use crate::hosts::{Emulated, HostKernel, Request};
use crate::lanes::side_by_side;
use crate::{Error, Result, tool};

/// A check of a series, by its name in messages and `--only`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The series applies without fuzz, alone and in its base's stack.
    Applies,
    /// checkpatch.pl finds nothing.
    Checkpatch,
    /// No patch adds a warning with W=1.
    Warnings,
    /// The files that it changes compile under [`objects::configurations`].
    Configurations,
    /// KVM compiles for the other architectures whose files it changes.
    Architectures,
    /// Its tool passes, and catches the planted faults.
    UserSpace,
    /// `cargo lab explore` finds its fault and its planted faults, and nothing with it.
    Explore,
    /// Its image boots under the oracle and its tests.
    Boots,
    /// The kernel's selftests end on its base's whole stack as on the base.
    Selftests,
    /// Its base's whole stack as modules, which are loaded, unloaded and loaded again.
    Modules,
    /// Its base's whole stack with lockdep and KASAN.
    Lockdep,
}

impl Step {
    /// The name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Applies => "applies",
            Self::Checkpatch => "checkpatch",
            Self::Warnings => "warnings",
            Self::Configurations => "other configurations",
            Self::Architectures => "other architectures",
            Self::UserSpace => "in user space",
            Self::Explore => "explore",
            Self::Boots => "boots",
            Self::Selftests => "selftests",
            Self::Modules => "modules",
            Self::Lockdep => "lockdep",
        }
    }
}

impl ValueEnum for Step {
    fn value_variants<'a>() -> &'a [Self] {
        use Step::*;
        &[
            Applies,
            Checkpatch,
            Warnings,
            Configurations,
            Architectures,
            UserSpace,
            Explore,
            Boots,
            Selftests,
            Modules,
            Lockdep,
        ]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(self.name()))
    }
}

/// Runs the checks of `series`, or only those in `only`. Each prints its result and its time.
/// Compiled files, images, and the results of selftests and commands are kept, so a stopped check
/// continues from there. Each check is a case of `report`, including one that fails.
pub fn check(cache: &Cache, series: &Series, only: &[Step], report: &mut Report) -> Result<()> {
    let tree = Tree::open(cache, series.base)?;
    for &step in Step::value_variants().iter().filter(|step| only.is_empty() || only.contains(step)) {
        let (start, done) = (Instant::now(), take(step, cache, &tree, series));
        let seconds = start.elapsed().as_secs_f64();
        let case = format!("{}/{}/{}", series.base.name, series.name, step.name());
        let case = Case { seconds: Some(seconds), ..Case::new(case, Status::Pass) };
        form::add(
            report,
            match &done {
                Ok(()) => case,
                Err(error) => Case { status: Status::Fail, ..case.because(error.to_string()) },
            },
        );
        done?;
        println!("  ({}: {seconds:.0} s)", step.name());
    }
    Ok(())
}

fn take(step: Step, cache: &Cache, tree: &Tree, series: &Series) -> Result<()> {
    let build = |variant| build::build(cache, series.base, std::slice::from_ref(series), variant);
    match step {
        Step::Applies => applies(cache, tree, series),
        Step::Checkpatch => checkpatch(&tree.source, series, &[]),
        Step::Warnings => objects::warnings(cache, tree, series),
        Step::Configurations => objects::configurations(cache, tree, series),
        Step::Architectures => objects::elsewhere(cache, tree, series),
        Step::UserSpace => in_user_space(cache, tree, series),
        Step::Explore => explore::check(cache, series),
        Step::Boots => {
            boots::with_mistakes(cache, series)?;
            boots::once_each(cache, &build(None)?, std::slice::from_ref(series), &sound(series))
        }
        // One kernel with the whole stack serves all series of a base: its selftests take minutes,
        // and a kernel that checks itself takes longest to build and run.
        Step::Selftests => selftests_of(cache, series.base, series.architecture()?),
        Step::Modules if series.architecture()? == Architecture::Arm => {
            report(&series.name, "KVM is no module on Arm");
            Ok(())
        }
        Step::Modules => {
            let stack = stack_of(series.base)?;
            let image = build::build(cache, series.base, &stack, Some(variants::MODULES))?;
            let loads = hosts([series]).into_iter().map(|(npt, parameters)| Bench {
                parameters,
                ..Bench::plain("sh /tools/reload-kvm.sh", npt)
            });
            boots::once_each(cache, &image, &stack, &loads.collect::<Vec<_>>())
        }
        Step::Lockdep => {
            let (arch, stack) = (series.architecture()?, stack_of(series.base)?);
            let image = build::build_for(cache, arch, series.base, &stack, Some(variants::DEBUG))?;
            boots::once_each(cache, &image, &stack, &sound(series))?;
            selftests_without_splat(cache, series.base, &stack, &image)
        }
    }
}

/// The tests of `series` for the kernel without planted faults.
fn sound(series: &Series) -> Vec<Bench> {
    series.about.test.iter().filter(|test| !test.sees_a_mistake()).cloned().collect()
}

/// Runs the KVM selftests of `base`, and those that its series add, on its pristine kernel and on
/// the kernel with its whole stack: with nested paging, without it, and with the settings that its
/// series' commands ask for. Earlier results are kept.
pub fn selftests_of(cache: &Cache, base: &Base, architecture: Architecture) -> Result<()> {
    let stack = stack_of(base)?;
    if stack.is_empty() {
        return Err(Error::Usage(format!("{} has no series: there is nothing to compare", base.name)));
    }
    let tree = Tree::open(cache, base)?;
    let image = |series| build::build_for(cache, architecture, base, series, None);
    let hosts = hosts(of_architecture(&stack, architecture)?);
    selftests_alike(cache, &tree, &series::stacked(&stack), &hosts, &image(&[])?, &image(&stack)?)
}

fn of_architecture(stack: &[Series], architecture: Architecture) -> Result<Vec<&Series>> {
    let mut of_it = Vec::new();
    for series in stack {
        if series.architecture()? == architecture {
            of_it.push(series);
        }
    }
    Ok(of_it)
}

/// A host: whether it has nested paging, and its parameters.
type Paging = (bool, Vec<String>);

/// The hosts that matter for `stack`: both paging modes, and the settings of the series' own
/// commands if these run on the first bed of an architecture.
fn hosts<'a>(stack: impl IntoIterator<Item = &'a Series>) -> Vec<Paging> {
    let mut hosts: Vec<Paging> = vec![(true, Vec::new()), (false, Vec::new())];
    let is_for = |bench: &&Bench| {
        [Architecture::X86, Architecture::Arm].map(Emulated::of).iter().any(|bed| {
            bench.is_for(bed.name()) && bench.bed.as_deref().is_none_or(|asked| asked == bed.name())
        })
    };
    for about in stack.into_iter().map(|series| &series.about) {
        for bench in about.bench.iter().chain(&about.test).filter(is_for) {
            let host = (bench.npt, bench.parameters.clone());
            if !hosts.contains(&host) {
                hosts.push(host);
            }
        }
    }
    hosts
}

fn boot_of(image: &Image, (npt, parameters): &Paging) -> Request {
    Request { second_stage: *npt, parameters: parameters.clone(), ..image.host() }
}

/// How often a selftest with a different result is repeated on both kernels. A race in the test
/// itself ends either way on both.
const AGAIN: usize = 6;

fn selftests_alike(
    cache: &Cache,
    tree: &Tree,
    patches: &[PathBuf],
    hosts: &[Paging],
    before: &Image,
    after: &Image,
) -> Result<()> {
    let tests = selftests::build(cache, tree, after.architecture, patches)?;
    let programs = Programs::build_for(after.architecture)?;
    let both = |host| [before, after].map(|image| (image, boot_of(image, host)));
    let asked: Vec<(&Image, Request)> = hosts.iter().flat_map(both).collect();
    let results =
        side_by_side(&asked, |(image, host)| selftests::run(cache, &programs, image, &tests, host.clone()))?;
    for (asked, results) in asked.chunks(2).zip(results.chunks(2)) {
        let ([_, (_, new_host)], [old, new]) = (asked, results) else { unreachable!("they come in pairs") };
        let host = new_host.label();
        let mut differences = old.differences(new);
        use selftests::Verdict::{Fail, Late, Pass, Skip};
        // A patch may add a case to a test of the base, which then fails before it as well.
        for name in selftests::changed(patches, after.architecture)? {
            if let Some([Some(Fail(_) | Late), Some(Pass)]) = differences.get(&name) {
                differences.remove(&name);
                report(&after.label, &format!("{host}: {name} fails on {} and passes", before.label));
            }
        }
        for name in selftests::added(patches, after.architecture)? {
            match [old, new].map(|results| results.verdicts.get(&name).copied()) {
                [Some(Fail(_)), Some(Pass)] => {
                    differences.remove(&name);
                    report(&after.label, &format!("{host}: {name} fails on {} and passes", before.label));
                }
                // No host of the laboratory has what some tests need.
                [Some(Skip), Some(Skip)] => {
                    report(&after.label, &format!("{host}: {name} skips on both: it shows nothing here"));
                }
                ended => {
                    return Err(Error::Series(format!(
                        "{} {host}: {name}, which a patch adds, must fail before it and pass after: {ended:?}",
                        after.label
                    )));
                }
            }
        }
        let mut unsteady = String::new();
        if !differences.is_empty() {
            let mut some = tests.clone();
            some.retain(|(name, _)| differences.contains_key(name));
            let ends = side_by_side(asked, |(image, host)| {
                selftests::endings(cache, &programs, image, &some, AGAIN, host.clone())
            })?;
            differences.retain(|name, first| {
                let mut both = [0, 1].map(|kernel| ends[kernel].get(name).cloned().unwrap_or_default());
                both.iter_mut().zip(first).for_each(|(ends, first)| ends.extend(*first));
                // A result that also occurs without the series is not the series' fault.
                let same = both[1].iter().all(|new| both[0].iter().any(|old| old.is_like(*new)));
                if same {
                    unsteady +=
                        &format!("; ends now so, now so on both, and proves nothing: {name} {:?}", both[0]);
                }
                !same
            });
        }
        if !differences.is_empty() {
            let line = |(name, [old, new]): (&String, &[_; 2])| format!("\n  {name}: {old:?}, then {new:?}");
            let list: String = differences.iter().map(line).collect();
            return Err(Error::Series(format!(
                "{} {host}: selftests end otherwise than on {}, {AGAIN} times asked again:{list}",
                after.label, before.label
            )));
        }
        let [known, complained] = [old, new].map(|run| complaints(&run.log));
        if let Some(splat) = complained.iter().find(|splat| !known.contains(splat)) {
            return Err(Error::Series(format!(
                "{} {host}: during the selftests the kernel complained, and {} did not:\n{splat}\n{}",
                after.label, before.label, new.log
            )));
        }
        let also = of_complaints(&before.label, &known, &complained);
        report(
            &after.label,
            &format!("{host}: selftests end as on {}: {}{unsteady}{also}", before.label, new.summary()),
        );
    }
    Ok(())
}

/// Describes the complaints of the kernel `before` (`known`): those that the kernel with the series
/// also makes (`complained`), and those that only `before` makes. Each with its count on `before`.
fn of_complaints(before: &str, known: &[String], complained: &[String]) -> String {
    let mut times = BTreeMap::new();
    known.iter().for_each(|splat| *times.entry(splat).or_insert(0) += 1);
    let (both, gone): (Vec<_>, Vec<_>) = times.into_iter().partition(|(splat, _)| complained.contains(splat));
    let told = |what: &str, splats: Vec<(&String, u32)>| -> String {
        let each: Vec<String> =
            splats.iter().map(|(splat, times)| format!("{times} times {splat}")).collect();
        if each.is_empty() { String::new() } else { format!("; {what}: {}", each.join("; ")) }
    };
    told("both complain", both) + &told(&format!("{before} alone complains"), gone)
}

fn selftests_without_splat(cache: &Cache, base: &Base, stack: &[Series], image: &Image) -> Result<()> {
    let tree = Tree::open(cache, base)?;
    let tests = selftests::build(cache, &tree, image.architecture, &series::stacked(stack))?;
    let programs = Programs::build_for(image.architecture)?;
    let hosts = hosts(of_architecture(stack, image.architecture)?);
    let hosts: Vec<Request> = hosts.iter().map(|host| boot_of(image, host)).collect();
    let ask = |image: &Image, hosts: &[Request]| {
        side_by_side(hosts, |host| selftests::run(cache, &programs, image, &tests, host.clone()))
    };
    let results = ask(image, &hosts)?;
    let complain = |results: &Results| !complaints(&results.log).is_empty();
    let mut known = vec![Vec::new(); hosts.len()];
    let mut also = String::new();
    // The pristine kernel takes long to build, so it runs only if there are complaints to compare.
    let doubtful: Vec<usize> = (0..hosts.len()).filter(|&index| complain(&results[index])).collect();
    if !doubtful.is_empty() {
        let before = build::build_for(cache, image.architecture, base, &[], Some(variants::DEBUG))?;
        let kernel = HostKernel::Image(before.file());
        let same: Vec<Request> = doubtful
            .iter()
            .map(|&index| Request { kernel: kernel.clone(), ..hosts[index].clone() })
            .collect();
        for (index, results) in doubtful.into_iter().zip(ask(&before, &same)?) {
            known[index] = complaints(&results.log);
        }
        also = format!(", but for what {} has too: ", before.label);
    }
    for ((host, results), known) in hosts.iter().zip(&results).zip(&known) {
        let (log, label) = (&results.log, host.label());
        let (old, new): (Vec<_>, Vec<_>) =
            complaints(log).into_iter().partition(|complaint| known.contains(complaint));
        if let Some(splat) = new.first() {
            return Err(Error::Series(format!(
                "{} {label}: during the selftests the kernel complained:\n{splat}\n{log}",
                image.label
            )));
        }
        let also = if old.is_empty() { String::new() } else { format!("{also}{}", old.join("; ")) };
        report(
            &image.label,
            &format!(
                "{label}: no complaint from the kernel during the selftests{also}: {}",
                results.summary()
            ),
        );
    }
    Ok(())
}

/// Applies the series alone, and then its base's whole stack in order. The tree is pristine
/// afterwards.
pub fn applies(cache: &Cache, tree: &Tree, series: &Series) -> Result<()> {
    let _lock = cache.lock(&format!("kernel/{}", tree.package.version))?;
    let stack = stack_of(series.base)?;
    let applied = tree.carry(&series.patches).and_then(|()| tree.carry(&series::stacked(&stack)));
    applied.and(tree.carry(&[]))?;
    report(
        &series.name,
        &format!(
            "applies to {} without fuzz, alone and in the stack of {}",
            tree.package.version,
            stack.len()
        ),
    );
    Ok(())
}

fn stack_of(base: &Base) -> Result<Vec<Series>> {
    series::of_base(base, &["all".to_owned()])
}

/// Runs `source`'s checkpatch, which must find nothing. Two warnings that are not about the patches
/// are ignored: that MAINTAINERS may need an entry for a new file, and that a missing or shallow
/// history lacks a commit.
pub fn checkpatch(source: &Path, series: &Series, more: &[&str]) -> Result<()> {
    let mut perl = Command::new("perl");
    perl.arg("scripts/checkpatch.pl").args(["--no-signoff", "--terse", "--show-types"]).args(more);
    let whole =
        tool::text(Command::new("git").args(["rev-parse", "--is-shallow-repository"]).current_dir(source));
    let ignored = match whole.as_deref().map(str::trim) {
        Ok("false") => "FILE_PATH_CHANGES",
        _ => "FILE_PATH_CHANGES,UNKNOWN_COMMIT_ID",
    };
    perl.args(["--ignore", ignored]).args(&series.patches).current_dir(source);
    match tool::text(&mut perl) {
        Ok(_) => {
            report(&series.name, "checkpatch finds nothing");
            Ok(())
        }
        Err(Error::Failed { output, .. }) => {
            Err(Error::Series(format!("{}: checkpatch says:\n{output}", series.name)))
        }
        Err(error) => Err(error),
    }
}

/// Runs the series' own tool, if any, on the patched sources and then with each planted fault. It
/// must pass without a fault, and fail and print the expected text with one.
pub fn in_user_space(cache: &Cache, tree: &Tree, series: &Series) -> Result<()> {
    let Some(line) = &series.about.tool else {
        report(&series.name, "has no tool");
        return Ok(());
    };
    let _lock = cache.lock(&format!("kernel/{}", tree.package.version))?;
    let source = tree.source.to_string_lossy();
    let run = |patches: &[PathBuf]| {
        tree.carry(patches)?;
        let mut words = line.split_whitespace().map(|word| word.replace("{source}", &source));
        let tool = super::series_directory().join("tools").join(words.next().unwrap_or_default());
        tool::output(Command::new(tool).args(words).env("CC", build::COMPILER))
    };
    let caught = || -> Result<()> {
        run(&series.patches).map_err(|error| Error::Series(format!("{}: {error}", series.name)))?;
        report(&series.name, &format!("`{line}` passes"));
        // The host's series boots the guest's.
        let (all, name) = (series::all()?, format!("{}/{}", series.base.name, series.name));
        let booted = |planted: &&PathBuf| {
            series.about.test.iter().any(|test| test.is_of(planted))
                || all
                    .iter()
                    .flat_map(|host| &host.about.test)
                    .any(|test| test.is_of_its_guest(&name, planted))
        };
        let in_here = |planted: &&PathBuf| -> bool {
            // A fault that no tool can see is for a test that boots a kernel with it, or for explore.
            !(booted(planted) || explore::is_for(series, planted)) || says(planted).is_ok()
        };
        let here: Vec<&PathBuf> = series.planted.iter().filter(in_here).collect();
        for planted in &here {
            let said = says(planted)?;
            let missed = |why: String| Error::Series(format!("{}: `{line}` {why}", planted.display()));
            match run(&[series.patches.as_slice(), std::slice::from_ref(*planted)].concat()) {
                Err(Error::Failed { output, .. }) if output.contains(&said) => (),
                Err(Error::Failed { output, .. }) => {
                    return Err(missed(format!("fails, but does not say {said:?}:\n{output}")));
                }
                Err(error) => return Err(error),
                Ok(_) => return Err(missed("passes, and must not".into())),
            }
        }
        if !here.is_empty() {
            report(&series.name, &format!("it catches all {} planted mistakes", here.len()));
        }
        Ok(())
    };
    let caught = caught();
    caught.and(tree.carry(&[]))
}

/// The text that a tool prints for a planted fault: the first line of the fault's patch.
fn says(planted: &Path) -> Result<String> {
    let text = fs::read_to_string(planted).map_err(Error::file("read", planted))?;
    let first = text.lines().next().unwrap_or_default();
    first.strip_prefix("Says: ").map(str::to_owned).ok_or_else(|| {
        Error::Series(format!("{}: its first line is `Says: ` and what the tool prints", planted.display()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_for_other_hosts_asks_for_none_here() {
        let of = |name| hosts([&series::named(name).unwrap()]);
        let both = [(true, Vec::new()), (false, Vec::new())];
        assert_eq!(of("6.12/cr3-cache"), both);
        let direct = (true, vec!["kvm.tdp_mmu=1".to_owned()]);
        assert!(of("5.10/tdp-mmu-parallel-faults").contains(&direct));
    }

    #[test]
    fn a_complaint_that_a_series_mends_is_not_told_of_both() {
        let [kept, mended] = ["BUG: kept", "WARNING: mended"].map(str::to_owned);
        let known = [mended.clone(), kept.clone(), mended];
        let said = of_complaints("7.2", &known, std::slice::from_ref(&kept));
        assert_eq!(said, "; both complain: 1 times BUG: kept; 7.2 alone complains: 2 times WARNING: mended");
        assert_eq!(of_complaints("7.2", &[], &[]), "");
    }
}
