//! Compiles the files that a series changes: patch by patch with more warnings ([`warnings`]), as a
//! whole under other configurations ([`configurations`]), and for other architectures
//! ([`elsewhere`]).

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::build::{self, Config};
use super::series::Series;
use super::tree::{self, Tree};
use super::{report, variants};
use crate::cache::{Cache, digest};
use crate::{Error, Result, tool};

/// make's argument for more warnings than the default.
const W1: &[&str] = &["W=1"];

/// Drivers are built only under [`GVT`].
const DRIVERS: &str = "drivers/";

/// The configuration with i915's GVT, whose KVMGT takes KVM's locks.
const GVT: &str = "gvt";

/// The configurations besides the measured one: i915's GVT; 32 bits; full preemption, where
/// rwlock_needbreak() can return more than 0; KVM as modules; warnings as errors; lockdep and
/// KASAN.
const OTHERS: [&str; 6] = [GVT, "i386", "preempt", variants::MODULES, "werror", variants::DEBUG];

/// Compiles the files of each patch with W=1, patch by patch, and compares the warnings with the
/// pristine ones. It has an object directory of its own, because W=1 changes every command line.
pub fn warnings(cache: &Cache, tree: &Tree, series: &Series) -> Result<()> {
    build::require_tools()?;
    let _lock = cache.lock(&format!("kernel/{}", tree.package.version))?;
    let config = Config::new(series.base, None)?;
    let mut objects = config.objects(tree)?.into_os_string();
    objects.push("-w1");
    let objects = PathBuf::from(objects);
    let files = touched(series)?;
    let targets = targets(&files, None);
    if targets.is_empty() {
        report(&series.name, "touches nothing that x86 builds");
        return Ok(());
    }
    tree.carry(&[])?;
    build::configure(tree, &config, &objects)?;
    // Without a rebuild, an object repeats no warning. Its old warnings would then look new later.
    for target in targets.iter().map(String::as_str).chain(["virt/kvm"]) {
        tree::remove(&objects.join(target))?;
    }
    let mut seen = compile(tree, &objects, build::command(tree, &objects), &targets, W1)?;
    for (index, patch) in series.patches.iter().enumerate() {
        tree.carry(&series.patches[..=index])?;
        let now = compile(tree, &objects, build::command(tree, &objects), &targets, W1)?;
        // An object that was not rebuilt repeats no warning, so only a count above the old one is
        // new.
        for (warning, count) in &now {
            if count > seen.get(warning).unwrap_or(&0) {
                return Err(Error::Series(format!("{} adds a warning (W=1): {warning}", patch.display())));
            }
        }
        for (warning, count) in now {
            // A partial rebuild repeats only some of a header's warnings.
            let most = seen.entry(warning).or_default();
            *most = count.max(*most);
        }
    }
    tree.carry(&[])?;
    let (patches, targets) = (series.patches.len(), targets.join(", "));
    report(&series.name, &format!("{patches} patches compile with W=1 without a new warning: {targets}"));
    Ok(())
}

/// Compiles the files that the whole series changes under each of [`OTHERS`] that its base has.
/// Every x86 file must be built by at least one of them, and no new warning may appear. The results
/// are kept.
pub fn configurations(cache: &Cache, tree: &Tree, series: &Series) -> Result<()> {
    build::require_tools()?;
    let files = touched(series)?;
    let built = |file: &&String| !file.ends_with(".h") && !targets_of(file).is_empty();
    let mut left: BTreeSet<&String> = files.iter().filter(built).collect();
    if left.is_empty() {
        report(&series.name, "touches nothing that x86 builds");
        return Ok(());
    }
    for name in OTHERS {
        let targets = targets(&files, Some(name));
        if targets.is_empty() || !Config::known(series.base, name) {
            continue;
        }
        let missed = under(cache, tree, series, name, &targets)?;
        left.retain(|file| missed.contains(file) || !is_of(file, name));
        let missed = if missed.is_empty() {
            String::new()
        } else {
            format!("; not built in it: {}", missed.join(", "))
        };
        report(
            &series.name,
            &format!("{name}: compiles without a new warning: {}{missed}", targets.join(", ")),
        );
    }
    match left.into_iter().map(String::as_str).collect::<Vec<_>>() {
        left if left.is_empty() => Ok(()),
        left => Err(Error::Series(format!(
            "{}: no configuration builds {}: put one that does into resources/kernel",
            series.name,
            left.join(", ")
        ))),
    }
}

/// Compiles `targets` under one configuration. Returns the series' files for it whose objects were
/// not made.
fn under(cache: &Cache, tree: &Tree, series: &Series, name: &str, targets: &[String]) -> Result<Vec<String>> {
    let config = Config::new(series.base, Some(name))?;
    let mut files = touched(series)?;
    files.retain(|file| is_of(file, name) && !file.ends_with(".h"));
    let mut key = vec![config.text()?, build::toolchain()?.into(), targets.join(" ").into()];
    for patch in &series.patches {
        let text = fs::read(patch).map_err(Error::file("read", patch))?;
        key.push(build::change(&text).to_vec());
    }
    let key = digest(key.iter().map(Vec::as_slice));
    let entry = format!("kernel/{}/compiled/{}-{name}-{key}", tree.package.version, series.name);
    let kept = cache.entry(&entry, |out| {
        let _lock = cache.lock(&format!("kernel/{}", tree.package.version))?;
        let objects = config.objects(tree)?;
        tree.carry(&series.patches)?;
        build::configure(tree, &config, &objects)?;
        // A leftover object of another series would be taken for this one's.
        for object in files.iter().filter_map(|file| object_of(file)) {
            tree::remove(&objects.join(object))?;
        }
        let targets = built(tree, &objects, targets)?;
        eprintln!("lab: compiling under {name} of {}: {}", series.name, targets.join(", "));
        let now = match compile(tree, &objects, build::command(tree, &objects), &targets, &[]) {
            Err(Error::Failed { output, .. }) => {
                return Err(Error::Series(format!(
                    "{} does not compile under {name}:\n{output}",
                    series.name
                )));
            }
            warnings => warnings?,
        };
        let made = |file: &String| object_of(file).is_some_and(|object| objects.join(object).is_file());
        let missed: Vec<String> = files.iter().filter(|file| !made(file)).cloned().collect();
        tree.carry(&[])?;
        if !now.is_empty() {
            // Usually there are no warnings, so the pristine objects are compiled only if there
            // are.
            for target in targets.iter().map(String::as_str).chain(["virt/kvm"]) {
                tree::remove(&objects.join(target))?;
            }
            let before = compile(tree, &objects, build::command(tree, &objects), &targets, &[])?;
            if let Some((warning, _)) =
                now.iter().find(|(text, count)| *count > before.get(*text).unwrap_or(&0))
            {
                return Err(Error::Series(format!("{} under {name}: a new warning: {warning}", series.name)));
            }
        }
        let file = out.join("missed");
        fs::write(&file, missed.join("\n")).map_err(Error::file("write", &file))
    })?;
    let file = kept.join("missed");
    let missed = fs::read_to_string(&file).map_err(Error::file("read", &file))?;
    Ok(missed.lines().map(str::to_owned).collect())
}

/// The targets that this configuration builds. make compiles an object by name even if the Makefile
/// leaves it out, such as a 64-bit object.
fn built(tree: &Tree, objects: &Path, targets: &[String]) -> Result<Vec<String>> {
    let (single, mut built): (Vec<String>, Vec<String>) =
        targets.iter().cloned().partition(|target| target.ends_with(".o"));
    if single.is_empty() {
        return Ok(built);
    }
    tree.date_for(objects)?;
    tool::output(build::command(tree, objects).arg("prepare"))?;
    for object in single {
        // The Makefile with the object may be in a directory above, if make does not descend into
        // the object's own directory or has nothing to do there.
        let mut above =
            Path::new(&object).ancestors().skip(1).filter(|dir| dir.components().next().is_some());
        let dry = |dir: &Path| tool::text(build::command(tree, objects).arg("-n").arg(dir.join(""))).ok();
        if above.any(|dir| dry(dir).is_some_and(|said| makes(&said, &object))) {
            built.push(object);
        }
    }
    Ok(built)
}

/// Whether make's output contains the missing `object`, so make would build it.
fn makes(said: &str, object: &str) -> bool {
    said.split_whitespace().any(|word| word == object)
}

/// Debian's compilers for other architectures with KVM. Debian has none for loongarch.
const ELSEWHERE: [(&str, &str); 4] = [
    ("arm64", "aarch64-linux-gnu-"),
    ("powerpc", "powerpc64le-linux-gnu-"),
    ("riscv", "riscv64-linux-gnu-"),
    ("s390", "s390x-linux-gnu-"),
];

/// Compiles KVM, with W=1, pristine and patched, for other architectures whose files the series
/// changes and that have a compiler here. Reports the files that were not compiled.
pub fn elsewhere(cache: &Cache, tree: &Tree, series: &Series) -> Result<()> {
    let mut files = touched(series)?;
    files.retain(|file| targets_of(file).is_empty());
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
            // The last value on the command line counts.
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
        let before = compile(tree, &objects, make(), &targets, W1)?;
        tree.carry(&series.patches)?;
        let after = compile(tree, &objects, make(), &targets, W1)?;
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

/// The C and assembler files and headers that the series changes.
fn touched(series: &Series) -> Result<BTreeSet<String>> {
    let mut files = BTreeSet::new();
    for patch in &series.patches {
        let text = fs::read_to_string(patch).map_err(Error::file("read", patch))?;
        files.extend(sources_in(&text).map(str::to_owned));
    }
    Ok(files)
}

fn sources_in(patch: &str) -> impl Iterator<Item = &str> {
    let files = patch.lines().filter_map(|line| line.strip_prefix("+++ b/"));
    files.filter(|file| [".c", ".h", ".S"].iter().any(|kind| file.ends_with(kind)))
}

/// Whether the configuration `name` is for `file`.
fn is_of(file: &str, name: &str) -> bool {
    file.starts_with(DRIVERS) == (name == GVT) && !targets_of(file).is_empty()
}

/// The make targets for `files` under the configuration `name`, or under the measured one.
fn targets(files: impl IntoIterator<Item = impl AsRef<str>>, name: Option<&str>) -> Vec<String> {
    let mut all = BTreeSet::new();
    for file in files {
        let file = file.as_ref();
        if is_of(file, name.unwrap_or_default()) {
            all.extend(targets_of(file));
        }
    }
    // A directory that is built as a whole includes its objects.
    let whole: Vec<String> = all.iter().filter(|target| target.ends_with('/')).cloned().collect();
    let with = |target: &String| whole.iter().any(|dir| target != dir && target.starts_with(dir));
    all.into_iter().filter(|target| !with(target)).collect()
}

/// The object of a file that is compiled by itself.
fn object_of(file: &str) -> Option<String> {
    let name = file.strip_suffix(".c").or_else(|| file.strip_suffix(".S"))?;
    Some(format!("{name}.o"))
}

/// The make targets of a file on x86. A file that is compiled by itself: its object. KVM's headers,
/// which all of KVM includes, and virt/kvm, which is built from KVM's directory: all of KVM.
/// Another shared header: KVM, which the series are about, and the kernel's locks. Another header:
/// the objects beside it. A file that x86 does not build: nothing.
fn targets_of(file: &str) -> Vec<String> {
    const KVM: &str = "arch/x86/kvm/";
    const SHARED: [&str; 4] =
        ["arch/x86/include/", "include/linux/", "include/uapi/linux/", "include/asm-generic/"];
    const BUILT: [&str; 4] = ["arch/x86/", "kernel/", "mm/", DRIVERS];
    let owned = |targets: &[&str]| targets.iter().map(|target| (*target).to_owned()).collect();
    let within = |dirs: &[&str]| dirs.iter().any(|dir| file.starts_with(dir));
    let (dir, name) = file.rsplit_once('/').unwrap_or(("", file));
    match object_of(file) {
        _ if within(&["virt/kvm/"]) => owned(&[KVM]),
        Some(object) if within(&BUILT) => vec![object],
        None if within(&[KVM]) || within(&SHARED) && name.starts_with("kvm") => owned(&[KVM]),
        None if within(&SHARED) => owned(&[KVM, "kernel/locking/"]),
        None if within(&BUILT) => vec![format!("{dir}/")],
        _ => Vec::new(),
    }
}

/// Counts the warnings by text, without line numbers, because patches move lines.
fn compile(
    tree: &Tree,
    objects: &Path,
    mut make: Command,
    targets: &[String],
    more: &[&str],
) -> Result<BTreeMap<String, usize>> {
    let mut found = BTreeMap::new();
    if targets.is_empty() {
        return Ok(found);
    }
    // An earlier patch may not have a file that a later one adds.
    let there = |target: &&String| match target.strip_suffix(".o") {
        Some(name) => [".c", ".S"].iter().any(|kind| tree.source.join(format!("{name}{kind}")).is_file()),
        None => true,
    };
    let targets: Vec<&String> = targets.iter().filter(there).collect();
    if targets.is_empty() {
        return Ok(found);
    }
    tree.date_for(objects)?;
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    // 5.10's kbuild by itself leaves out a directory's modules.
    make.arg(format!("-j{jobs}")).arg("KBUILD_MODULES=1").args(more).args(targets);
    tool::lines(&mut make, |line| {
        if let Some((place, text)) = line.split_once(": warning: ") {
            let file = place.split(':').next().unwrap_or(place);
            *found.entry(format!("{file}: {text}")).or_default() += 1;
        }
    })?;
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_with_kvm_in_it_is_not_always_of_x86s_kvm() {
        let patch =
            "+++ b/arch/x86/mm/tlb.c\n+++ b/virt/kvm/kvm_main.c\n+++ b/Documentation/a.rst\n+++ b/a.S\n";
        assert_eq!(
            sources_in(patch).collect::<Vec<_>>(),
            ["arch/x86/mm/tlb.c", "virt/kvm/kvm_main.c", "a.S"]
        );
        assert_eq!(targets_of("arch/x86/mm/tlb.c"), ["arch/x86/mm/tlb.o"]);
        assert_eq!(targets_of("kernel/sched/core.c"), ["kernel/sched/core.o"]);
        assert_eq!(targets_of("arch/x86/kvm/mmu/mmu.c"), ["arch/x86/kvm/mmu/mmu.o"]);
        assert_eq!(targets_of("kernel/sched/sched.h"), ["kernel/sched/"]);
        assert_eq!(targets_of("include/linux/rwlock.h"), ["arch/x86/kvm/", "kernel/locking/"]);
        for kvm in ["virt/kvm/kvm_main.c", "include/linux/kvm_host.h", "arch/x86/kvm/mmu/spte.h"] {
            assert_eq!(targets_of(kvm), ["arch/x86/kvm/"], "{kvm}");
        }
        for other in ["arch/arm64/kvm/mmu.c", "tools/testing/selftests/kvm/a.c"] {
            assert!(targets_of(other).is_empty(), "{other}");
        }
    }

    #[test]
    fn an_object_that_make_does_not_name_is_not_built() {
        let said =
            "set -e;  gcc-12 -c -o arch/x86/kernel/kvm.o arch/x86/kernel/kvm.c\nar arch/x86/kernel/kvm.o";
        assert!(makes(said, "arch/x86/kernel/kvm.o"));
        for other in ["arch/x86/kernel/kvm", "x86/kernel/kvm.o", "arch/x86/kernel/kvm_cr3_cache.o"] {
            assert!(!makes(said, other), "{other}");
        }
    }

    #[test]
    fn a_driver_is_built_where_its_configuration_is() {
        let files = ["drivers/gpu/drm/i915/gvt/kvmgt.c", "arch/x86/kvm/x86.c", "arch/x86/kvm/x86.h"];
        assert_eq!(targets(files, Some(GVT)), ["drivers/gpu/drm/i915/gvt/kvmgt.o"]);
        assert_eq!(targets(files, Some("i386")), ["arch/x86/kvm/"]);
        assert_eq!(targets(files, None), ["arch/x86/kvm/"]);
    }
}
