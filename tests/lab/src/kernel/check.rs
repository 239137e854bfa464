//! `cargo lab check`: what a maintainer would try before reading a series.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use super::boots;
use super::build::{self, Config, Image};
use super::complaints::complaints;
use super::selftests::{self, Results};
use super::series::{self, Series};
use super::tree::{self, Tree};
use vellum::report::{Case, Report, Status};

use crate::artifacts::Programs;
use crate::bed::{HostKernel, Request};
use crate::cache::Cache;
use crate::form;
use crate::lanes::side_by_side;
use crate::{Error, Result, tool};

/// Holds `series` to its promises; each step says what it saw and how long it took. Images, and what the selftests and the
/// commands did on them, are kept: after a stop the next check goes on from there. Each step is a case of `report`, the one that ends
/// it too.
pub fn check(cache: &Cache, series: &Series, report: &mut Report) -> Result<()> {
    let tree = Tree::open(cache, series.base)?;
    let mut timed = |name: &str, step: &dyn Fn() -> Result<()>| {
        let (start, done) = (Instant::now(), step());
        let seconds = start.elapsed().as_secs_f64();
        let case = Case::new(format!("{}/{}/{name}", series.base.name, series.name), Status::Pass);
        let case = Case { seconds: Some(seconds), ..case };
        form::add(
            report,
            match &done {
                Ok(()) => case,
                Err(error) => Case { status: Status::Fail, ..case.because(error.to_string()) },
            },
        );
        done?;
        println!("  ({seconds:.0} s)");
        Ok(())
    };
    timed("applies", &|| applies(cache, &tree, series))?;
    timed("checkpatch", &|| checkpatch(&tree.source, series, &[]))?;
    timed("warnings", &|| warnings(cache, &tree, series))?;
    timed("other architectures", &|| elsewhere(cache, &tree, series))?;
    timed("in user space", &|| in_user_space(cache, &tree, series))?;
    let build = |variant| build::build(cache, series.base, std::slice::from_ref(series), variant);
    timed("boots under its tests", &|| boots::once_each(cache, &build(None)?, &series.about.test))?;
    timed("selftests as before", &|| {
        let before = build::build(cache, series.base, &[], None)?;
        selftests_alike(cache, &tree, series, &before, &build(None)?)
    })?;
    timed("with its stack, lockdep and KASAN", &|| {
        // A kernel that checks itself takes the longest to build and to run. One with the whole stack serves each series.
        let stack = stack_of(series)?;
        let image = build::build(cache, series.base, &stack, Some(build::DEBUG))?;
        boots::once_each(cache, &image, &series.about.test)?;
        selftests_without_splat(cache, &tree, series, &image)
    })
}

/// The hosts on which a series matters: both modes, and those that its own commands ask for.
fn hosts(series: &Series, image: &Image) -> Vec<Request> {
    let mut hosts: Vec<(bool, Vec<String>)> = vec![(true, Vec::new()), (false, Vec::new())];
    for bench in series.about.bench.iter().chain(&series.about.test) {
        let host = (bench.npt, bench.parameters.clone());
        if !hosts.contains(&host) {
            hosts.push(host);
        }
    }
    let request = |(npt, parameters)| Request {
        second_stage: npt,
        parameters,
        ..Request::new(HostKernel::Image(image.bzimage()))
    };
    hosts.into_iter().map(request).collect()
}

/// How often a selftest that ended otherwise is asked again, before and after: a race in the test itself ends one way or
/// the other on either kernel.
const AGAIN: usize = 6;

fn selftests_alike(cache: &Cache, tree: &Tree, series: &Series, before: &Image, after: &Image) -> Result<()> {
    let tests = selftests::build(cache, tree, &series.patches)?;
    let programs = Programs::build()?;
    let pairs = hosts(series, before).into_iter().zip(hosts(series, after));
    let asked: Vec<(&Image, Request)> = pairs.flat_map(|(old, new)| [(before, old), (after, new)]).collect();
    let results =
        side_by_side(&asked, |(image, host)| selftests::run(cache, &programs, image, &tests, host.clone()))?;
    for (asked, results) in asked.chunks(2).zip(results.chunks(2)) {
        let ([_, (_, new_host)], [old, new]) = (asked, results) else { unreachable!("they come in pairs") };
        let host = new_host.label();
        let mut differences = old.differences(new);
        for name in selftests::added(&series.patches)? {
            use selftests::Verdict::{Fail, Pass};
            let ended = [old, new].map(|results| results.verdicts.get(&name).copied());
            let [Some(Fail(_)), Some(Pass)] = ended else {
                return Err(Error::Series(format!(
                    "{} {host}: {name}, which the series adds, must fail before it and pass after: {ended:?}",
                    after.label
                )));
            };
            differences.remove(&name);
            report(&after.label, &format!("{host}: {name} fails on {} and passes", before.label));
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
                // Only what never happens without the series is the series' doing.
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
        let known = complaints(&old.log);
        if let Some(splat) = complaints(&new.log).into_iter().find(|splat| !known.contains(splat)) {
            return Err(Error::Series(format!(
                "{} {host}: during the selftests the kernel complained, and {} did not:\n{splat}\n{}",
                after.label, before.label, new.log
            )));
        }
        let also =
            if known.is_empty() { String::new() } else { format!("; both complain: {}", known.join("; ")) };
        report(
            &after.label,
            &format!("{host}: selftests end as on {}: {}{unsteady}{also}", before.label, new.summary()),
        );
    }
    Ok(())
}

fn selftests_without_splat(cache: &Cache, tree: &Tree, series: &Series, image: &Image) -> Result<()> {
    let tests = selftests::build(cache, tree, &series.patches)?;
    let programs = Programs::build()?;
    let hosts = hosts(series, image);
    let ask = |image: &Image, hosts: &[Request]| {
        side_by_side(hosts, |host| selftests::run(cache, &programs, image, &tests, host.clone()))
    };
    let results = ask(image, &hosts)?;
    let complain = |results: &Results| !complaints(&results.log).is_empty();
    let mut known = vec![Vec::new(); hosts.len()];
    let mut also = String::new();
    // The pristine kernel takes long to build: it is asked only where there is something to ask.
    let doubtful: Vec<usize> = (0..hosts.len()).filter(|&index| complain(&results[index])).collect();
    if !doubtful.is_empty() {
        let before = build::build(cache, series.base, &[], Some(build::DEBUG))?;
        let kernel = HostKernel::Image(before.bzimage());
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

/// The series alone, then all of its base in their order; the tree is pristine afterwards.
pub fn applies(cache: &Cache, tree: &Tree, series: &Series) -> Result<()> {
    let _lock = cache.lock(&format!("kernel/{}", tree.package.version))?;
    tree.carry(&series.patches)?;
    let stack = stack_of(series)?;
    tree.carry(&series::stacked(&stack))?;
    tree.carry(&[])?;
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

fn stack_of(series: &Series) -> Result<Vec<Series>> {
    Ok(series::all()?.into_iter().filter(|other| other.base == series.base).collect())
}

/// Whether the checkpatch of `source` has nothing to say: that MAINTAINERS may want an entry for a new file, and that the
/// history, where it is not there or shallow, does not have a commit, are not about the patches.
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

/// Compiles what each patch touches with W=1, patch by patch, and compares its warnings with the pristine ones. The
/// object directory is its own: W=1 changes every command line.
pub fn warnings(cache: &Cache, tree: &Tree, series: &Series) -> Result<()> {
    build::require_tools()?;
    let _lock = cache.lock(&format!("kernel/{}", tree.package.version))?;
    let config = Config::new(series.base, None)?;
    let mut objects = config.objects(tree)?.into_os_string();
    objects.push("-w1");
    let objects = PathBuf::from(objects);
    let mut targets = Vec::new();
    for patch in &series.patches {
        let text = fs::read_to_string(patch).map_err(Error::file("read", patch))?;
        targets.extend(sources_in(&text).filter_map(targets_of));
    }
    targets.sort();
    targets.dedup();
    tree.carry(&[])?;
    build::configure(tree, &config, &objects)?;
    // An object that is not rebuilt repeats no warning, and would then seem to gain those that it always had.
    for target in targets.iter().map(String::as_str).chain(["virt/kvm"]) {
        tree::remove(&objects.join(target))?;
    }
    let mut seen = compile(tree, &objects, build::command(tree, &objects), &targets)?;
    for (index, patch) in series.patches.iter().enumerate() {
        tree.carry(&series.patches[..=index])?;
        let now = compile(tree, &objects, build::command(tree, &objects), &targets)?;
        // An object that was not rebuilt repeats no warning: only what is new and is more than before counts.
        for (warning, count) in &now {
            if count > seen.get(warning).unwrap_or(&0) {
                return Err(Error::Series(format!("{} adds a warning (W=1): {warning}", patch.display())));
            }
        }
        for (warning, count) in now {
            // A part that was rebuilt alone repeats some of a header's warnings only.
            let most = seen.entry(warning).or_default();
            *most = count.max(*most);
        }
    }
    tree.carry(&[])?;
    let (patches, targets) = (series.patches.len(), targets.join(", "));
    report(&series.name, &format!("{patches} patches compile with W=1 without a new warning: {targets}"));
    Ok(())
}

/// Runs the series' own tool on the patched sources, where it has one, then on each mistake that is planted there: it must
/// pass the one, and fail the others with what they say.
pub fn in_user_space(cache: &Cache, tree: &Tree, series: &Series) -> Result<()> {
    let Some(line) = &series.about.tool else { return Ok(()) };
    let _lock = cache.lock(&format!("kernel/{}", tree.package.version))?;
    let source = tree.source.to_string_lossy();
    let run = |patches: &[PathBuf]| {
        tree.carry(patches)?;
        let mut words = line.split_whitespace().map(|word| word.replace("{source}", &source));
        let tool = series::directory().join("tools").join(words.next().unwrap_or_default());
        tool::output(Command::new(tool).args(words).env("CC", build::COMPILER))
    };
    let caught = || -> Result<()> {
        run(&series.patches).map_err(|error| Error::Series(format!("{}: {error}", series.name)))?;
        report(&series.name, &format!("`{line}` passes"));
        for planted in &series.planted {
            let said = says(planted)?;
            let missed = |why: String| Error::Series(format!("{}: `{line}` {why}", planted.display()));
            match run(&[series.patches.as_slice(), std::slice::from_ref(planted)].concat()) {
                Err(Error::Failed { output, .. }) if output.contains(&said) => (),
                Err(Error::Failed { output, .. }) => {
                    return Err(missed(format!("fails, but does not say {said:?}:\n{output}")));
                }
                Err(error) => return Err(error),
                Ok(_) => return Err(missed("passes, and must not".into())),
            }
        }
        if !series.planted.is_empty() {
            report(&series.name, &format!("it catches all {} planted mistakes", series.planted.len()));
        }
        Ok(())
    };
    let caught = caught();
    tree.carry(&[])?;
    caught
}

/// What a tool prints of a planted mistake, by the first line of its patch.
fn says(planted: &Path) -> Result<String> {
    let text = fs::read_to_string(planted).map_err(Error::file("read", planted))?;
    let first = text.lines().next().unwrap_or_default();
    first.strip_prefix("Says: ").map(str::to_owned).ok_or_else(|| {
        Error::Series(format!("{}: its first line is `Says: ` and what the tool prints", planted.display()))
    })
}

/// Compilers of Debian's for the other architectures that have KVM; it has none for loongarch.
const ELSEWHERE: [(&str, &str); 4] = [
    ("arm64", "aarch64-linux-gnu-"),
    ("powerpc", "powerpc64le-linux-gnu-"),
    ("riscv", "riscv64-linux-gnu-"),
    ("s390", "s390x-linux-gnu-"),
];

/// Compiles, with W=1, KVM of the other architectures that the series touches and that there is a compiler for, pristine and
/// patched; says of what else it touches that it was not compiled.
pub fn elsewhere(cache: &Cache, tree: &Tree, series: &Series) -> Result<()> {
    let mut files = BTreeSet::new();
    for patch in &series.patches {
        let text = fs::read_to_string(patch).map_err(Error::file("read", patch))?;
        files.extend(sources_in(&text).filter(|file| targets_of(file).is_none()).map(str::to_owned));
    }
    if files.is_empty() {
        return Ok(());
    }
    let _lock = cache.lock(&format!("kernel/{}", tree.package.version))?;
    for (arch, prefix) in ELSEWHERE {
        let kvm = format!("arch/{arch}/kvm/");
        let here = format!("arch/{arch}/");
        if !files.iter().any(|file| file.starts_with(&here)) || tool::find(&format!("{prefix}gcc")).is_none()
        {
            continue;
        }
        let objects = tree.home.join(format!("build-{arch}-w1"));
        let make = || {
            let mut make = build::command(tree, &objects);
            // The last one counts.
            make.args([format!("ARCH={arch}"), format!("CROSS_COMPILE={prefix}"), format!("CC={prefix}gcc")]);
            make
        };
        tree.carry(&[])?;
        if !objects.join(".config").is_file() {
            fs::create_dir_all(&objects).map_err(Error::file("create", &objects))?;
            tool::output(make().arg("defconfig"))?;
            let config = tree.source.join("scripts/config");
            tool::output(
                Command::new(config).arg("--file").arg(objects.join(".config")).args(["-e", "KVM"]),
            )?;
            tool::output(make().arg("olddefconfig"))?;
        }
        tree::remove(&objects.join(&kvm))?;
        let targets = [kvm.clone()];
        let before = compile(tree, &objects, make(), &targets)?;
        tree.carry(&series.patches)?;
        let after = compile(tree, &objects, make(), &targets)?;
        tree.carry(&[])?;
        if let Some((warning, _)) =
            after.iter().find(|(warning, count)| *count > before.get(*warning).unwrap_or(&0))
        {
            return Err(Error::Series(format!("{}: {kvm}: a new warning (W=1): {warning}", series.name)));
        }
        files.retain(|file| !file.starts_with(&here));
        report(&series.name, &format!("{kvm} compiles with W=1 without a new warning"));
    }
    if !files.is_empty() {
        let files: Vec<String> = files.into_iter().collect();
        report(
            &series.name,
            &format!("not compiled here, for want of a compiler or a configuration: {}", files.join(", ")),
        );
    }
    Ok(())
}

/// The C files and headers that a patch changes.
fn sources_in(patch: &str) -> impl Iterator<Item = &str> {
    let files = patch.lines().filter_map(|line| line.strip_prefix("+++ b/"));
    files.filter(|file| file.ends_with(".c") || file.ends_with(".h"))
}

/// What to compile for a file on x86: all of KVM where KVM's own is changed, for its generic half is built from there and its
/// headers are included from everywhere in it; else the objects of the directory; for another header KVM as well, which is
/// what the series are about. Nothing for what this configuration does not build.
fn targets_of(file: &str) -> Option<String> {
    const KVM: [&str; 6] = [
        "arch/x86/kvm/",
        "arch/x86/include/",
        "virt/kvm/",
        "include/linux/",
        "include/uapi/linux/",
        "include/asm-generic/",
    ];
    match file.rsplit_once('/') {
        _ if KVM.iter().any(|dir| file.starts_with(dir)) => Some("arch/x86/kvm/".to_owned()),
        Some((dir, _)) if ["kernel/", "mm/", "arch/x86/"].iter().any(|built| file.starts_with(built)) => {
            Some(format!("{dir}/"))
        }
        _ => None,
    }
}

/// Warnings by text, with the line numbers taken out: a patch moves lines.
fn compile(
    tree: &Tree,
    objects: &Path,
    mut make: Command,
    targets: &[String],
) -> Result<BTreeMap<String, usize>> {
    let mut found = BTreeMap::new();
    if targets.is_empty() {
        return Ok(found);
    }
    tree.date_for(objects)?;
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    make.args([&format!("-j{jobs}"), "W=1"]).args(targets);
    tool::lines(&mut make, |line| {
        if let Some((place, text)) = line.split_once(": warning: ") {
            let file = place.split(':').next().unwrap_or(place);
            *found.entry(format!("{file}: {text}")).or_default() += 1;
        }
    })?;
    Ok(found)
}

pub(super) fn report(what: &str, seen: &str) {
    println!("{what}: {seen}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_with_kvm_in_it_is_not_always_of_x86s_kvm() {
        let patch = "+++ b/arch/x86/mm/tlb.c\n+++ b/virt/kvm/kvm_main.c\n+++ b/Documentation/a.rst\n";
        assert_eq!(sources_in(patch).collect::<Vec<_>>(), ["arch/x86/mm/tlb.c", "virt/kvm/kvm_main.c"]);
        let target = |file| targets_of(file).unwrap_or_default();
        assert_eq!(target("arch/x86/mm/tlb.c"), "arch/x86/mm/");
        assert_eq!(target("kernel/locking/qrwlock.c"), "kernel/locking/");
        for kvm in ["virt/kvm/kvm_main.c", "include/linux/kvm_host.h", "arch/x86/include/asm/kvm_host.h"] {
            assert_eq!(target(kvm), "arch/x86/kvm/", "{kvm}");
        }
        for other in
            ["drivers/gpu/drm/i915/gvt/kvmgt.c", "arch/arm64/kvm/mmu.c", "tools/testing/selftests/kvm/a.c"]
        {
            assert_eq!(targets_of(other), None, "{other}");
        }
    }
}
