//! A kernel for this machine as a Debian package, with the running kernel's configuration minus the
//! modules that it has not loaded.
//!
//! dpkg-deb alone makes the package. Its scripts run the hooks in /etc/kernel as Debian's kernels
//! do, which update the initramfs and the boot loader's menu.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::Base;
use super::build;
use super::series::{self, Series};
use super::tree::Tree;
use crate::cache::{Cache, digest};
use crate::hosts::doctor;
use crate::{Error, Result, artifacts, tool};

/// The running kernel's configuration.
pub fn running_config() -> Result<Vec<u8>> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let boot = PathBuf::from(format!("/boot/config-{}", release.trim()));
    if let Ok(config) = fs::read(&boot) {
        return Ok(config);
    }
    tool::output(Command::new("zcat").arg("/proc/config.gz")).map_err(|_| {
        Error::Usage(format!(
            "--bed metal: neither {} nor /proc/config.gz tells how this kernel was configured: install the package that the \
             running kernel came in, or modprobe configs",
            boot.display()
        ))
    })
}

/// Builds the package of `base` with `series`. Its kernel release ends with `suffix`.
pub fn build(cache: &Cache, base: &Base, series: &[Series], suffix: &str, config: &[u8]) -> Result<PathBuf> {
    build::require_tools()?;
    // Distributions' configurations build certificates in, for which the kernel builds a program
    // with OpenSSL.
    if let Some(line) = doctor::install_line(&doctor::missing(&["/usr/include/openssl/bio.h"])) {
        return Err(Error::Package(format!(
            "building a kernel for this machine lacks Debian's packages: {line}"
        )));
    }
    let tree = Tree::open(cache, base)?;
    let patches = series::stacked(series);
    let fragment = artifacts::workspace().join("resources/kernel/metal.config");
    let mut parts = vec![config.to_vec(), suffix.into(), build::toolchain()?.into()];
    for path in patches.iter().chain([&fragment]) {
        parts.push(fs::read(path).map_err(Error::file("read", path))?);
    }
    let text = fs::read(&fragment).map_err(Error::file("read", &fragment))?;
    let configuration = digest([config, text.as_slice()]);
    let key = digest(parts.iter().map(Vec::as_slice));
    let dir = cache.entry(&format!("kernel/{}/deb/{key}", tree.package.version), |out| {
        let _lock = cache.lock(&format!("kernel/{}", tree.package.version))?;
        cache.need_mib(8192)?;
        tree.carry(&patches)?;
        let objects = tree.home.join(format!("build-metal-{configuration}"));
        configure(&tree, &objects, config, &fragment)?;
        tree.date_for(&objects)?;
        let local = format!("LOCALVERSION={suffix}");
        let make = |targets: &[&str]| {
            let mut make = build::command(&tree, &objects);
            make.arg(&local).args(targets);
            make
        };
        let label = format!("{}{suffix}", tree.package.version);
        let jobs = format!("-j{}", std::thread::available_parallelism().map_or(1, usize::from));
        // A kernel without modules has no such target.
        let dotconfig = objects.join(".config");
        let dotconfig = fs::read_to_string(&dotconfig).map_err(Error::file("read", &dotconfig))?;
        let modules = dotconfig.lines().any(|line| line == "CONFIG_MODULES=y").then_some("modules");
        let targets = [jobs.as_str(), "bzImage"].into_iter().chain(modules);
        build::watched(&mut make(&targets.collect::<Vec<_>>()), &label)?;
        let release = tool::text(&mut make(&["-s", "kernelrelease"]))?.trim().to_owned();
        let root = out.join("root");
        let boot = root.join("boot");
        fs::create_dir_all(&boot).map_err(Error::file("create", &boot))?;
        for (from, to) in
            [("arch/x86/boot/bzImage", "vmlinuz"), (".config", "config"), ("System.map", "System.map")]
        {
            let from = objects.join(from);
            fs::copy(&from, boot.join(format!("{to}-{release}"))).map_err(Error::file("copy", &from))?;
        }
        if modules.is_some() {
            let target = format!("INSTALL_MOD_PATH={}", root.display());
            tool::output(&mut make(&["-s", &target, "INSTALL_MOD_STRIP=1", "modules_install"]))?;
            for link in ["build", "source"] {
                // The links would point into this cache.
                let _ = fs::remove_file(root.join(format!("lib/modules/{release}/{link}")));
            }
        }
        package(&root, out, &release, &tree.package.version)
    })?;
    let entries = fs::read_dir(&dir).map_err(Error::file("read", &dir))?;
    let debs = entries.filter_map(|entry| Some(entry.ok()?.path()));
    debs.into_iter()
        .find(|path| path.extension().is_some_and(|extension| extension == "deb"))
        .ok_or_else(|| Error::Package(format!("{} holds no package: remove it and try again", dir.display())))
}

/// The package's name in dpkg, from the file's name.
pub fn package_of(deb: &Path) -> String {
    let name = deb.file_name().unwrap_or_default().to_string_lossy();
    name.split('_').next().unwrap_or_default().to_owned()
}

fn configure(tree: &Tree, objects: &Path, config: &[u8], fragment: &Path) -> Result<()> {
    // The stamp is written last, so a partial configuration is not taken for a complete one.
    let stamp = objects.join(".configured");
    if stamp.is_file() {
        return Ok(());
    }
    fs::create_dir_all(objects).map_err(Error::file("create", objects))?;
    let start = objects.join("config.running");
    fs::write(&start, config).map_err(Error::file("write", &start))?;
    let mut merge = Command::new(tree.source.join("scripts/kconfig/merge_config.sh"));
    merge.args(["-m", "-O"]).arg(objects).arg(&start).arg(fragment).current_dir(&tree.source);
    tool::output(&mut merge)?;
    tool::output(build::command(tree, objects).arg("olddefconfig"))?;
    only_loaded_modules(tree, objects)?;
    let dotconfig = objects.join(".config");
    let got = fs::read_to_string(&dotconfig).map_err(Error::file("read", &dotconfig))?;
    for symbol in ["CONFIG_KVM_INTEL=y", "CONFIG_KVM_AMD=y"] {
        if !got.lines().any(|line| line == symbol) {
            return Err(Error::Package(format!(
                "--bed metal: {} {} with this machine's configuration does not take {symbol}: resources/kernel/metal.config has to \
                 ask for what it depends on",
                tree.package.name, tree.package.version
            )));
        }
    }
    fs::write(&stamp, "").map_err(Error::file("write", &stamp))
}

/// Drops the modules that this machine has not loaded. A distribution's whole set takes hours to
/// build.
fn only_loaded_modules(tree: &Tree, objects: &Path) -> Result<()> {
    let modules = fs::read_to_string("/proc/modules").unwrap_or_default();
    if modules.is_empty() {
        return Ok(());
    }
    let mut list = String::from("Module Size Used by\n");
    for fields in modules.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()) {
        if let [name, size, used, ..] = fields[..] {
            list += &format!("{name} {size} {used}\n");
        }
    }
    let lsmod = objects.join("lsmod");
    fs::write(&lsmod, list).map_err(Error::file("write", &lsmod))?;
    let lsmod = format!("LSMOD={}", lsmod.display());
    tool::output(build::command(tree, objects).args([&lsmod, "localmodconfig"])).map(drop)
}

fn package(root: &Path, out: &Path, release: &str, version: &str) -> Result<()> {
    let debian = root.join("DEBIAN");
    fs::create_dir_all(&debian).map_err(Error::file("create", &debian))?;
    // dpkg allows neither underscores nor upper case in names.
    let name = format!("linux-image-{}", release.to_lowercase().replace('_', "-"));
    let control = format!(
        "Package: {name}\nVersion: {version}\nArchitecture: amd64\nMaintainer: Vellum's laboratory <root@localhost>\n\
         Section: kernel\nPriority: optional\nDepends: kmod\nRecommends: initramfs-tools | dracut\n\
         Description: Linux {release}, for a comparison by cargo lab\n"
    );
    let write = |name: &str, text: &str, mode| {
        use std::os::unix::fs::PermissionsExt;
        let path = debian.join(name);
        fs::write(&path, text)
            .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(mode)))
            .map_err(Error::file("write", &path))
    };
    write("control", &control, 0o644)?;
    let has_modules = root.join("lib/modules").is_dir();
    let index = if has_modules { format!("depmod {release}\n") } else { String::new() };
    for (script, directory, before) in
        [("postinst", "postinst.d", index), ("postrm", "postrm.d", String::new())]
    {
        let text = format!(
            "#!/bin/sh\nset -e\n{before}[ ! -d /etc/kernel/{directory} ] ||\n\trun-parts --arg={release} \
             --arg=/boot/vmlinuz-{release} /etc/kernel/{directory}\n"
        );
        write(script, &text, 0o755)?;
    }
    let deb = out.join(format!("{name}_{version}_amd64.deb"));
    tool::output(Command::new("dpkg-deb").args(["--root-owner-group", "--build"]).args([root, &deb]))?;
    fs::remove_dir_all(root).map_err(Error::file("remove", root))
}
