//! What a series touches, compiled: patch by patch with more warnings ([`warnings`]), whole under
//! other configurations ([`configurations`]), and for other architectures ([`elsewhere`]).

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

/// make's word for more warnings than the kernel has by default.
const W1: &[&str] = &["W=1"];

/// The driver that is built as part of [`GVT`] alone.
const DRIVERS: &str = "drivers/";

/// The configuration with i915's virtualisation, whose KVMGT takes KVM's locks.
const GVT: &str = "gvt";

/// What series are compiled under beside the configuration that is measured: what none of the
/// others builds; 32 bits; a kernel that is preempted anywhere, where rwlock_needbreak() is more
/// than 0; KVM as modules; warnings as errors; lockdep and KASAN.
const OTHERS: [&str; 6] = [GVT, "i386", "preempt", variants::MODULES, "werror", variants::DEBUG];

/// Compiles what each patch touches with W=1, patch by patch, and compares its warnings with the
/// pristine ones. The object directory is its own: W=1 changes every command line.
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
    // An object that is not rebuilt repeats no warning, and would then seem to gain those that it
    // always had.
    for target in targets.iter().map(String::as_str).chain(["virt/kvm"]) {
        tree::remove(&objects.join(target))?;
    }
    let mut seen = compile(tree, &objects, build::command(tree, &objects), &targets, W1)?;
    for (index, patch) in series.patches.iter().enumerate() {
        tree.carry(&series.patches[..=index])?;
        let now = compile(tree, &objects, build::command(tree, &objects), &targets, W1)?;
        // An object that was not rebuilt repeats no warning: only what is new and is more than
        // before counts.
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

/// Compiles, with the whole series, what it touches under each of [`OTHERS`] that its base has: no
/// file of x86 may be left that none of them builds, and none may warn of what it did not warn of
/// before. What came of one is kept.
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

/// Compiles `targets` under one configuration; the files that it touches there, and whose objects
/// are not made.
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
        // One that is left of another series would seem to be of this one, and need not be made.
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
            // Mostly nothing warns, and the pristine objects need not be compiled to know that.
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

/// Those of `targets` that this configuration builds. Asked for by name, an object is compiled also
/// where the Makefile that has it leaves it out, such as one for 64 bits alone.
fn built(tree: &Tree, objects: &Path, targets: &[String]) -> Result<Vec<String>> {
    let (single, mut built): (Vec<String>, Vec<String>) =
        targets.iter().cloned().partition(|target| target.ends_with(".o"));
    if single.is_empty() {
        return Ok(built);
    }
    tree.date_for(objects)?;
    tool::output(build::command(tree, objects).arg("prepare"))?;
    for object in single {
        // It may be the Makefile of a directory above that has it, and nobody descends into its
        // own, or make has nothing to do there.
        let mut above =
            Path::new(&object).ancestors().skip(1).filter(|dir| dir.components().next().is_some());
        let dry = |dir: &Path| tool::text(build::command(tree, objects).arg("-n").arg(dir.join(""))).ok();
        if above.any(|dir| dry(dir).is_some_and(|said| makes(&said, &object))) {
            built.push(object);
        }
    }
    Ok(built)
}

/// Whether make says that it would make `object`, which is not there.
fn makes(said: &str, object: &str) -> bool {
    said.split_whitespace().any(|word| word == object)
}

/// Compilers of Debian's for the other architectures that have KVM; it has none for loongarch.
const ELSEWHERE: [(&str, &str); 4] = [
    ("arm64", "aarch64-linux-gnu-"),
    ("powerpc", "powerpc64le-linux-gnu-"),
    ("riscv", "riscv64-linux-gnu-"),
    ("s390", "s390x-linux-gnu-"),
];

/// Compiles, with W=1, KVM of the other architectures that the series touches and that there is a
/// compiler for, pristine and patched; says of what else it touches that it was not compiled.
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

/// Whether a file is one of those that configuration `name` is for.
fn is_of(file: &str, name: &str) -> bool {
    file.starts_with(DRIVERS) == (name == GVT) && !targets_of(file).is_empty()
}

/// What to compile for `files` under the configuration `name`, or that which is measured.
fn targets(files: impl IntoIterator<Item = impl AsRef<str>>, name: Option<&str>) -> Vec<String> {
    let mut all = BTreeSet::new();
    for file in files {
        let file = file.as_ref();
        if is_of(file, name.unwrap_or_default()) {
            all.extend(targets_of(file));
        }
    }
    // An object of a directory that is built whole is built with it.
    let whole: Vec<String> = all.iter().filter(|target| target.ends_with('/')).cloned().collect();
    let with = |target: &String| whole.iter().any(|dir| target != dir && target.starts_with(dir));
    all.into_iter().filter(|target| !with(target)).collect()
}

/// The object of a file that is compiled by itself.
fn object_of(file: &str) -> Option<String> {
    let name = file.strip_suffix(".c").or_else(|| file.strip_suffix(".S"))?;
    Some(format!("{name}.o"))
}

/// What to compile for a file on x86: the object alone of a file that is compiled by itself; all of
/// KVM for its headers, which are included from everywhere in it, and for its generic half, which
/// is built from there; KVM for another header as well, which is what the series are about, and the
/// kernel's locks with it, or the objects beside it. Nothing for what x86 does not build.
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

/// Warnings by text, with the line numbers taken out: a patch moves lines.
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
    // A patch may add a file that the ones before it do not have.
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
    // By itself 5.10's kbuild leaves out what of a directory is part of a module.
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
