//! Finds a kernel and its modules: a file, a built tree, an unpacked linux-image package, or the
//! host's own kernel.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use super::unpack::unpack;
use super::{Error, config};
use vellum_sys::open::{self, Kind};

/// The maximum number of modules that are loaded at once. All of them are in memory.
const MAX_LOADED: usize = 1 << 10;

/// A kernel and the files around it.
#[derive(Clone, Debug, Default)]
pub struct Kernel {
    /// Its image.
    pub image: PathBuf,
    /// The text of its configuration, from beside the image or from within it.
    pub config: Option<String>,
    /// The directory with its modules and their lists: the tree, or /lib/modules/RELEASE.
    pub place: PathBuf,
    /// The directory that becomes `kernel` in /lib/modules/RELEASE.
    pub objects: PathBuf,
    /// The module files by name, with `_` for `-`.
    modules: BTreeMap<String, PathBuf>,
}

/// An unpacked module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Module {
    /// Its name.
    pub name: String,
    /// The ELF file.
    pub content: Vec<u8>,
    /// The modules it depends on.
    pub needs: Vec<String>,
}

fn file(path: &Path) -> impl Fn(std::io::Error) -> Error {
    move |source| Error::File { path: path.into(), source }
}

impl Kernel {
    /// Finds the kernel that `--kernel` names. `release` is that of the host's kernel.
    ///
    /// # Errors
    /// Fails if there is none.
    pub fn find(named: &Path, release: &str) -> Result<Self, Error> {
        let mut kernel = Self::named(named, release)?;
        if kernel.config.is_none() {
            // Another check reports an unreadable image.
            kernel.config = super::read(&kernel.image).ok().and_then(|image| config::within(&image));
        }
        Ok(kernel)
    }

    /// Whether it has modules.
    pub fn has_modules(&self) -> bool {
        !self.modules.is_empty()
    }

    /// The names and files of its modules.
    pub fn files(&self) -> impl Iterator<Item = (&str, &Path)> {
        self.modules.iter().map(|(name, path)| (name.as_str(), path.as_path()))
    }

    fn named(named: &Path, release: &str) -> Result<Self, Error> {
        if named == Path::new("host") && !named.exists() {
            let image = PathBuf::from(format!("/boot/vmlinuz-{release}"));
            return match open::for_reading(&image, Kind::Regular) {
                Ok(_) => Self::installed(Path::new("/"), image, release),
                Err(_) => Err(Error::NoHostKernel(image)),
            };
        }
        if !fs::metadata(named).map_err(file(named))?.is_dir() {
            return Self::of_image(named);
        }
        if named.join("arch/x86/boot/bzImage").is_file() {
            return Self::built(named);
        }
        let images: Vec<String> = fs::read_dir(named.join("boot"))
            .map_err(|_| Error::NoTree(named.into()))?
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter(|name| name.starts_with("vmlinuz-"))
            .collect();
        match &images[..] {
            [] => Err(Error::NoTree(named.into())),
            [image] => Self::installed(named, named.join("boot").join(image), &image["vmlinuz-".len()..]),
            several => Err(Error::Several(named.into(), several.join(", "))),
        }
    }

    /// A kernel image, with the tree or package that it is in.
    fn of_image(image: &Path) -> Result<Self, Error> {
        let name = image.file_name().unwrap_or_default().to_string_lossy();
        let parent = image.parent().unwrap_or(Path::new(""));
        if image.ends_with("arch/x86/boot/bzImage")
            && let Some(tree) = image.ancestors().nth(4)
        {
            return Self::built(if tree.as_os_str().is_empty() { Path::new(".") } else { tree });
        }
        match name.strip_prefix("vmlinuz-").filter(|_| parent.ends_with("boot")) {
            Some(release) => Self::installed(&parent.join(".."), image.into(), release),
            None => Ok(Self { image: image.into(), place: parent.into(), ..Self::default() }),
        }
    }

    /// A kernel below `root`, installed as distributions do.
    fn installed(root: &Path, image: PathBuf, release: &str) -> Result<Self, Error> {
        let config = super::read_text(&root.join(format!("boot/config-{release}"))).ok();
        // If /lib is not a symbolic link, a package has one of the two.
        let places = ["lib/modules", "usr/lib/modules"].map(|place| root.join(place).join(release));
        let place = places.iter().find(|place| place.is_dir()).unwrap_or(&places[0]).clone();
        check_within(root, &place)?;
        let mut modules = BTreeMap::new();
        let objects = place.join("kernel");
        check_within(root, &objects)?;
        index(&objects, &mut modules);
        Ok(Self { image, config, place, objects, modules })
    }

    /// A tree with a built kernel. The objects may be elsewhere (O=).
    fn built(tree: &Path) -> Result<Self, Error> {
        let config = super::read_text(&tree.join(".config")).ok();
        let order = super::read_text(&tree.join("modules.order")).unwrap_or_default();
        let mut modules = BTreeMap::new();
        // Since 6.3 the file lists objects, not modules. Before 5.x the paths began with `kernel/`.
        for line in order.lines() {
            let path = line.strip_prefix("kernel/").unwrap_or(line);
            let path = tree.join(path).with_extension("ko");
            let is_own = || path.is_file() && check_within(tree, &path).is_ok();
            if let Some(name) = name(&path).filter(|_| is_own()) {
                modules.insert(name, path);
            }
        }
        let (place, objects) = (tree.to_owned(), tree.to_owned());
        Ok(Self { image: tree.join("arch/x86/boot/bzImage"), config, place, objects, modules })
    }

    /// Whether it has a module of this name.
    pub fn has(&self, name: &str) -> bool {
        self.modules.contains_key(&name.replace('-', "_"))
    }

    /// Loads the modules `names` and their dependencies, in loading order. A name without a module
    /// is skipped: it is built in, or [`config`] reports it.
    ///
    /// # Errors
    /// Fails if a module cannot be read, or they are too many.
    pub fn load(&self, names: &[&str]) -> Result<Vec<Module>, Error> {
        let (mut entered, mut loaded) = (BTreeSet::new(), Vec::new());
        let mut enter = |name: &str| -> Result<Option<(Module, usize)>, Error> {
            let name = name.replace('-', "_");
            let Some(path) = self.modules.get(&name) else { return Ok(None) };
            // Hostile files may depend on each other.
            if !entered.insert(name.clone()) {
                return Ok(None);
            }
            if entered.len() > MAX_LOADED {
                return Err(Error::Modules { first: name, most: MAX_LOADED });
            }
            let content = read(path)?;
            let needs = needs(&content);
            Ok(Some((Module { name, content, needs }, 0)))
        };
        for name in names {
            // The modules on the way down, and how many of their dependencies were visited.
            let mut above = Vec::from_iter(enter(name)?);
            while let Some((module, next)) = above.last_mut() {
                match module.needs.get(*next) {
                    Some(needed) => {
                        *next += 1;
                        let below = enter(needed)?;
                        above.extend(below);
                    }
                    None => loaded.extend(above.pop().map(|(module, _)| module)),
                }
            }
        }
        Ok(loaded)
    }
}

/// Refuses a directory of the package in `root` that is elsewhere. What is in it becomes the guest's.
fn check_within(root: &Path, dir: &Path) -> Result<(), Error> {
    match (root.canonicalize(), dir.canonicalize()) {
        (Ok(all), Ok(found)) if !found.starts_with(&all) => {
            Err(Error::Outside { path: dir.into(), root: root.into() })
        }
        _ => Ok(()),
    }
}

/// The name of a module file.
fn name(path: &Path) -> Option<String> {
    match path.file_name()?.to_str()?.split_once('.')? {
        (name, "ko" | "ko.gz" | "ko.xz" | "ko.zst") => Some(name.replace('-', "_")),
        _ => None,
    }
}

/// Adds all modules below `dir`.
fn index(dir: &Path, modules: &mut BTreeMap<String, PathBuf>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        // Skips links, which could form cycles.
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => index(&path, modules),
            Ok(_) => drop(name(&path).map(|name| modules.insert(name, path))),
            Err(_) => {}
        }
    }
}

/// A module's content, unpacked.
pub(super) fn read(path: &Path) -> Result<Vec<u8>, Error> {
    let packed = super::read_unlinked(path).map_err(file(path))?;
    unpack(packed).map_err(|why| Error::Module { path: path.into(), why })
}

/// A module's dependencies: `depends=` in its .modinfo section, written by modpost. Built trees and
/// unpacked packages have no modules.dep.
fn needs(content: &[u8]) -> Vec<String> {
    let mark = b"\0depends=";
    let Some(at) = content.windows(mark.len()).position(|window| window == mark) else { return Vec::new() };
    let value = content[at + mark.len()..].split(|&byte| byte == 0).next().unwrap_or_default();
    let names = String::from_utf8_lossy(value).into_owned();
    names.split(',').filter(|name| !name.is_empty()).map(|name| name.replace('-', "_")).collect()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn module(needs: &str) -> Vec<u8> {
        format!("\x7fELF\0license=GPL\0depends={needs}\0retpoline=Y\0").into_bytes()
    }

    fn put(path: &Path, content: &[u8]) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    fn scratch(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("vellum-launch-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).unwrap();
        dir
    }

    #[test]
    fn a_built_tree_has_its_modules_by_their_order() {
        let tree = scratch("tree");
        put(&tree.join("arch/x86/boot/bzImage"), b"");
        put(&tree.join(".config"), b"CONFIG_ACPI=y\n");
        put(&tree.join("modules.order"), b"drivers/a-one.o\nkernel/net/two.ko\nnot/built.o\n");
        put(&tree.join("drivers/a-one.ko"), &module("two"));
        // A cycle, which no real kernel has.
        put(&tree.join("net/two.ko"), &module("a-one"));
        for named in [tree.clone(), tree.join("arch/x86/boot/bzImage")] {
            let kernel = Kernel::find(&named, "").unwrap();
            assert!(kernel.image.ends_with("arch/x86/boot/bzImage") && kernel.config.is_some());
            let loaded = kernel.load(&["a-one", "built", "absent"]).unwrap();
            assert_eq!(loaded.iter().map(|module| &module.name[..]).collect::<Vec<_>>(), ["two", "a_one"]);
        }
        fs::remove_dir_all(tree).unwrap();
    }

    /// A package may come from a stranger, and the guest reads its modules' directory.
    #[test]
    fn what_a_package_s_links_lead_out_to_is_not_the_guest_s() {
        let dir = scratch("links");
        let (root, out) = (dir.join("root"), dir.join("out"));
        put(&root.join("boot/vmlinuz-1"), b"");
        put(&root.join("lib/modules/1/kernel/one.ko"), &module(""));
        put(&out.join("kernel/two.ko"), &module(""));
        put(&out.join("secret"), b"it is secret\n");
        let place = root.join("lib/modules/1");
        // Debian's package has such links to the headers; the guest follows them in its own files.
        std::os::unix::fs::symlink(&out, place.join("build")).unwrap();
        std::os::unix::fs::symlink(out.join("secret"), place.join("modules.builtin")).unwrap();
        std::os::unix::fs::symlink(out.join("secret"), place.join("kernel/three.ko")).unwrap();
        let kernel = Kernel::find(&root, "").unwrap();
        assert!(kernel.has("one") && kernel.load(&["one"]).is_ok());
        let refused = kernel.load(&["three"]).map(drop).unwrap_err().to_string();
        assert!(refused.contains("symbolic link"), "{refused}");
        let found = crate::modules::of(&kernel).unwrap();
        assert!(found.beside.iter().all(|(_, content)| !content.windows(6).any(|part| part == b"secret")));
        for (link, to) in [(place.join("kernel"), out.join("kernel")), (place.clone(), out.clone())] {
            fs::remove_dir_all(&link).unwrap();
            std::os::unix::fs::symlink(to, &link).unwrap();
            let refused = Kernel::find(&root, "").unwrap_err().to_string();
            assert!(refused.contains("leads out of"), "{refused}");
        }
        fs::remove_dir_all(dir).unwrap();
    }

    /// Each level of a recursion would take stack.
    #[test]
    fn a_long_chain_of_modules_is_refused() {
        let tree = scratch("chain");
        put(&tree.join("arch/x86/boot/bzImage"), b"");
        for number in 0..1100 {
            put(&tree.join(format!("m{number}.ko")), &module(&format!("m{}", number + 1)));
        }
        let order: String = (0..1100).map(|number| format!("m{number}.o\n")).collect();
        put(&tree.join("modules.order"), order.as_bytes());
        let kernel = Kernel::find(&tree, "").unwrap();
        assert_eq!(kernel.load(&["m100"]).unwrap().len(), 1000);
        assert!(matches!(kernel.load(&["m0"]), Err(Error::Modules { .. })));
        fs::remove_dir_all(tree).unwrap();
    }

    #[test]
    fn a_package_has_its_modules_packed_in_each_way() {
        let root = scratch("package");
        put(&root.join("boot/vmlinuz-6.1"), b"");
        put(&root.join("boot/config-6.1"), b"x");
        let modules = root.join("lib/modules/6.1/kernel");
        let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gz.write_all(&module("")).unwrap();
        put(&modules.join("gz.ko.gz"), &gz.finish().unwrap());
        let mut xz = Vec::new();
        lzma_rs::xz_compress(&mut &module("gz")[..], &mut xz).unwrap();
        put(&modules.join("deep/xz.ko.xz"), &xz);
        put(&modules.join("bad.ko"), b"text");
        let kernel = Kernel::find(&root, "").unwrap();
        let loaded = kernel.load(&["xz"]).unwrap();
        assert_eq!(loaded.iter().map(|module| &module.name[..]).collect::<Vec<_>>(), ["gz", "xz"]);
        assert_eq!(loaded[1].content, module("gz"));
        let bad = kernel.load(&["bad"]).unwrap_err().to_string();
        assert!(bad.contains("bad.ko") && bad.contains("gzip"), "{bad}");
        put(&root.join("boot/vmlinuz-6.2"), b"");
        assert!(Kernel::find(&root, "").unwrap_err().to_string().contains("several kernels"));
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn what_is_no_tree_says_what_one_is() {
        let empty = scratch("empty");
        let error = Kernel::find(&empty, "").unwrap_err().to_string();
        assert!(error.contains("arch/x86/boot/bzImage") && error.contains("boot/vmlinuz-*"), "{error}");
        assert!(matches!(Kernel::find(&empty.join("absent"), ""), Err(Error::File { .. })));
        assert!(matches!(Kernel::find(Path::new("host"), "no-release"), Err(Error::NoHostKernel(_))));
        fs::remove_dir_all(empty).unwrap();
    }
}
