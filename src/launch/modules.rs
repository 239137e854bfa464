//! Builds the module lists for modprobe without depmod.
//!
//! modpost writes each module's dependencies into the module, so no symbols have to be resolved. In
//! /lib/modules/RELEASE (modules.dep(5)), busybox reads the text files and kmod reads the tries
//! `*.bin`. kmod's libkmod/libkmod-index.c defines their format.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::thread;

use super::kernel::{Kernel, read};
use vellum_sys::open;

/// The largest .modinfo section.
const MAX_FILE: u64 = 4 << 20;
/// The maximum number of modules that one depends on, also through others. Those of Debian's kernels
/// have some dozens.
const MAX_NEEDED: usize = 1 << 10;
/// Files from the build that modprobe can use unchanged.
const KEPT: [&str; 3] = ["modules.builtin", "modules.builtin.modinfo", "modules.order"];

/// A file name in the guest's /lib/modules/RELEASE, and the content.
pub type Named = (String, Vec<u8>);

/// A kernel's modules for modprobe in the guest.
#[derive(Debug, PartialEq, Eq)]
pub struct Modules {
    /// The host directory with the module files.
    pub directory: PathBuf,
    /// The files beside that directory, which becomes `kernel`. Empty if depmod has already run:
    /// then the directory is complete.
    pub beside: Vec<Named>,
}

/// The modules of `kernel`. `None` if it has none. A module that is unreadable or depends on too many
/// is left out, and loading it fails in the guest.
pub fn of(kernel: &Kernel) -> Option<Modules> {
    if !kernel.has_modules() {
        return None;
    }
    if kernel.place.join("modules.dep.bin").is_file() {
        return Some(Modules { directory: kernel.place.clone(), beside: Vec::new() });
    }
    let files: Vec<_> = kernel.files().collect();
    let about = strings(&files);
    let within =
        |path: &Path| path.strip_prefix(&kernel.objects).ok()?.to_str().map(|path| format!("kernel/{path}"));
    let places: BTreeMap<&str, String> =
        files.iter().filter_map(|(name, path)| Some((*name, within(path)?))).collect();
    let needs: BTreeMap<&str, Vec<String>> =
        about.iter().map(|(name, info)| (*name, values(info, "depends").flat_map(list).collect())).collect();
    let (mut dep, mut alias, mut softdep) = (Vec::new(), Vec::new(), String::new());
    for (name, info) in &about {
        let Some(place) = places.get(name) else { continue };
        let Some(needed) = all_needed(name, &needs) else { continue };
        let needed = needed.into_iter().filter_map(|name| places.get(&*name).map(String::as_str));
        let line = [&[&*format!("{place}:")], &needed.collect::<Vec<_>>()[..]].concat().join(" ");
        dep.push(((*name).to_owned(), line));
        alias.extend(values(info, "alias").map(|alias| (underscored(alias), (*name).to_owned())));
        softdep.extend(values(info, "softdep").map(|what| format!("softdep {name} {what}\n")));
    }
    let mut beside: Vec<Named> = KEPT
        .iter()
        .filter_map(|name| Some(((*name).to_owned(), super::read_unlinked(&kernel.place.join(name)).ok()?)))
        .collect();
    let builtin = super::read_unlinked(&kernel.place.join("modules.builtin"));
    let builtin = builtin.ok().and_then(|text| String::from_utf8(text).ok()).unwrap_or_default();
    let builtin = builtin.lines().filter_map(|line| {
        let name = line.rsplit('/').next()?.strip_suffix(".ko")?;
        Some((name.replace('-', "_"), String::new()))
    });
    let text = |lines: &mut dyn Iterator<Item = String>| lines.collect::<String>().into_bytes();
    beside.extend([
        ("modules.dep".into(), text(&mut dep.iter().map(|(_, line)| format!("{line}\n")))),
        (
            "modules.alias".into(),
            text(&mut alias.iter().map(|(alias, name)| format!("alias {alias} {name}\n"))),
        ),
        ("modules.softdep".into(), softdep.into_bytes()),
        ("modules.builtin.bin".into(), trie(builtin.collect())),
        ("modules.dep.bin".into(), trie(dep)),
        ("modules.alias.bin".into(), trie(alias)),
        // modprobe opens it, but never needs it: dependencies are known by name.
        ("modules.symbols.bin".into(), trie(Vec::new())),
    ]);
    Some(Modules { directory: kernel.objects.clone(), beside })
}

/// The .modinfo sections of `files`, read on all CPUs because distributions compress modules.
fn strings<'a>(files: &[(&'a str, &Path)]) -> BTreeMap<&'a str, Vec<u8>> {
    let count = thread::available_parallelism().map_or(1, usize::from);
    let part = files.len().div_ceil(count).max(1);
    let of_part = |part: &[(&'a str, &Path)]| -> Vec<(&'a str, Vec<u8>)> {
        part.iter().filter_map(|(name, path)| Some((*name, modinfo_of(path)?))).collect()
    };
    thread::scope(|scope| {
        let parts: Vec<_> = files.chunks(part).map(|part| scope.spawn(move || of_part(part))).collect();
        parts.into_iter().filter_map(|part| part.join().ok()).flatten().collect()
    })
}

fn modinfo_of(path: &Path) -> Option<Vec<u8>> {
    if path.extension().is_some_and(|extension| extension != "ko") {
        let content = read(path).ok()?;
        return modinfo(|offset, size| {
            let start = usize::try_from(offset).ok()?;
            Some(content.get(start..start.checked_add(usize::try_from(size).ok()?)?)?.to_vec())
        });
    }
    let file = open::for_reading(path, open::Kind::Unlinked).ok()?;
    modinfo(|offset, size| {
        let mut part = vec![0; usize::try_from(size).ok()?];
        file.read_exact_at(&mut part, offset).ok()?;
        Some(part)
    })
}

/// The section .modinfo of a 64-bit little-endian ELF file. `part` reads an offset and size of the
/// file.
fn modinfo(part: impl Fn(u64, u64) -> Option<Vec<u8>>) -> Option<Vec<u8>> {
    let bounded = |offset, size| if size <= MAX_FILE { part(offset, size) } else { None };
    let head = part(0, 64)?;
    if !head.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let half = |from: &[u8], at: usize| Some(u16::from_le_bytes(from.get(at..at + 2)?.try_into().ok()?));
    let word = |from: &[u8], at: usize| Some(u32::from_le_bytes(from.get(at..at + 4)?.try_into().ok()?));
    let long = |from: &[u8], at: usize| Some(u64::from_le_bytes(from.get(at..at + 8)?.try_into().ok()?));
    // e_shoff, e_shentsize, e_shnum, e_shstrndx
    let (start, size, count) = (long(&head, 40)?, half(&head, 58)?, half(&head, 60)?);
    let (size, names) = (usize::from(size).max(64), usize::from(half(&head, 62)?));
    let table = bounded(start, size as u64 * u64::from(count))?;
    let section = |nth: usize| table.get(nth * size..(nth + 1) * size);
    // sh_name, sh_offset, sh_size
    let content = |section: &[u8]| bounded(long(section, 24)?, long(section, 32)?);
    let names = content(section(names)?)?;
    let called = |section: &&[u8]| {
        word(section, 0)
            .and_then(|at| names.get(at as usize..))
            .is_some_and(|name| name.starts_with(b".modinfo\0"))
    };
    content((0..usize::from(count)).filter_map(section).find(called)?)
}

/// The values of `key` in a .modinfo.
fn values<'a>(info: &'a [u8], key: &'a str) -> impl Iterator<Item = &'a str> {
    let lines = info.split(|byte| *byte == 0).filter_map(|line| std::str::from_utf8(line).ok());
    lines
        .filter_map(move |line| line.strip_prefix(key)?.strip_prefix('='))
        .filter(|value| !value.contains('\n'))
}

fn list(names: &str) -> impl Iterator<Item = String> {
    names.split(',').filter(|name| !name.is_empty()).map(|name| name.replace('-', "_"))
}

/// All dependencies of `name` in depmod's order: a module before those it depends on. `None` if there
/// are more than [`MAX_NEEDED`].
fn all_needed<'a>(name: &'a str, needs: &'a BTreeMap<&str, Vec<String>>) -> Option<Vec<String>> {
    let (mut entered, mut done) = (BTreeSet::from([name]), Vec::new());
    // The modules on the way down, and how many of their dependencies were visited.
    let mut above = vec![(name, 0)];
    while let Some((at, next)) = above.last_mut() {
        match needs.get(at).and_then(|needed| needed.get(*next)) {
            Some(needed) => {
                *next += 1;
                // Hostile files may depend on each other.
                if entered.insert(needed) {
                    above.push((needed, 0));
                }
            }
            None => {
                done.push((*at).to_owned());
                above.pop();
            }
        }
        if entered.len() > MAX_NEEDED {
            return None;
        }
    }
    // The last one is `name` itself.
    done.pop();
    done.reverse();
    Some(done)
}

/// An alias in the form for lookups: `_` for `-`, except in character ranges.
fn underscored(alias: &str) -> String {
    let mut within = false;
    let one = |c| {
        within = (within || c == '[') && c != ']';
        if c == '-' && !within { '_' } else { c }
    };
    alias.chars().map(one).collect()
}

/// A trie of keys and values in the format of libkmod-index.c. The format has no place for keys
/// that are not ASCII, so they are left out.
fn trie(mut entries: Vec<(String, String)>) -> Vec<u8> {
    const MAGIC: u32 = 0xb007_f457;
    const VERSION: u32 = 0x0002_0001;
    entries.retain(|(key, value)| key.is_ascii() && !key.contains('\0') && !value.contains('\0'));
    entries.sort();
    entries.dedup();
    let entries: Vec<(&[u8], &str)> =
        entries.iter().map(|(key, value)| (key.as_bytes(), &value[..])).collect();
    let mut bytes = [MAGIC, VERSION, 0].map(u32::to_be_bytes).concat();
    let root = node(&entries, false, &mut bytes);
    bytes[8..12].copy_from_slice(&root.to_be_bytes());
    bytes
}

/// Writes the node of `entries`, its children first. Returns its offset, with flags in the highest
/// bits. The root has no prefix.
fn node(entries: &[(&[u8], &str)], has_prefix: bool, bytes: &mut Vec<u8>) -> u32 {
    const PREFIX: u32 = 0x8000_0000;
    const VALUES: u32 = 0x4000_0000;
    const CHILDREN: u32 = 0x2000_0000;
    let first = entries.first().map_or(&[][..], |(key, _)| key);
    let last = entries.last().map_or(&[][..], |(key, _)| key);
    // The entries are sorted: a prefix of the first and the last is a prefix of all.
    let common = first.iter().zip(last).take_while(|(a, b)| a == b).count();
    let common = if has_prefix { common } else { 0 };
    let own = entries.iter().take_while(|(key, _)| key.len() == common).count();
    let (own, others) = entries.split_at(own);
    let children: Vec<(u8, u32)> = others
        .chunk_by(|(a, _), (b, _)| a[common] == b[common])
        .map(|chunk| {
            let below: Vec<_> = chunk.iter().map(|(key, value)| (&key[common + 1..], *value)).collect();
            (chunk[0].0[common], node(&below, true, bytes))
        })
        .collect();
    let mut at = bytes.len() as u32;
    if common > 0 {
        at |= PREFIX;
        bytes.extend(&first[..common]);
        bytes.push(0);
    }
    if let (Some((first, _)), Some((last, _))) = (children.first(), children.last()) {
        at |= CHILDREN;
        bytes.extend([*first, *last]);
        for letter in *first..=*last {
            let child = children.iter().find(|(known, _)| *known == letter).map_or(0, |(_, at)| *at);
            bytes.extend(child.to_be_bytes());
        }
    }
    if !own.is_empty() {
        at |= VALUES;
        bytes.extend((own.len() as u32).to_be_bytes());
        for (nth, (_, value)) in own.iter().enumerate() {
            bytes.extend((nth as u32).to_be_bytes());
            bytes.extend(value.bytes());
            bytes.push(0);
        }
    }
    at
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::Command;

    use super::*;

    /// An ELF file with only a .modinfo of these strings.
    fn module(strings: &[&str]) -> Vec<u8> {
        let info: Vec<u8> = strings.iter().flat_map(|string| [string.as_bytes(), b"\0"].concat()).collect();
        let names = b"\0.modinfo\0.shstrtab\0";
        let mut elf = b"\x7fELF\x02\x01\x01".to_vec();
        elf.resize(64, 0);
        let (info_at, names_at) = (64, 64 + info.len());
        elf.extend(&info);
        elf.extend(names);
        let table = elf.len() as u64;
        elf[40..48].copy_from_slice(&table.to_le_bytes());
        elf[58..64].copy_from_slice(&[64, 0, 3, 0, 2, 0]);
        for (name, at, size) in [(0u32, 0, 0), (1, info_at, info.len()), (10, names_at, names.len())] {
            let mut section = vec![0; 64];
            section[..4].copy_from_slice(&name.to_le_bytes());
            section[24..32].copy_from_slice(&(at as u64).to_le_bytes());
            section[32..40].copy_from_slice(&(size as u64).to_le_bytes());
            elf.extend(section);
        }
        elf
    }

    #[test]
    fn what_a_module_says_of_itself_is_found_and_what_is_cut_is_none() {
        let elf = module(&["license=GPL", "depends=a-b,c", "alias=pci:v*d*", "alias=x-[a-b]-y"]);
        let cut = |end: usize| {
            modinfo(|offset, size| Some(elf[..end].get(offset as usize..(offset + size) as usize)?.to_vec()))
        };
        let info = cut(elf.len()).unwrap();
        assert_eq!(values(&info, "depends").flat_map(list).collect::<Vec<_>>(), ["a_b", "c"]);
        let aliases: Vec<_> = values(&info, "alias").map(underscored).collect();
        assert_eq!(aliases, ["pci:v*d*", "x_[a-b]_y"]);
        (0..elf.len()).for_each(|end| assert_eq!(cut(end), None, "{end}"));
    }

    #[test]
    fn what_others_need_comes_after_them_and_circles_end() {
        let needs = [("a", vec!["b", "c"]), ("b", vec!["c", "a"]), ("c", vec![])];
        let needs: BTreeMap<&str, Vec<String>> = needs
            .into_iter()
            .map(|(name, needs)| (name, needs.into_iter().map(str::to_owned).collect()))
            .collect();
        assert_eq!(all_needed("a", &needs).unwrap(), ["b", "c"]);
        assert_eq!(all_needed("c", &needs).unwrap(), [""; 0]);
    }

    /// 100,000 files that depend on each other in turn. Each level of a recursion would take stack.
    #[test]
    fn a_long_chain_of_modules_is_left_out() {
        let names: Vec<String> = (0..100_000).map(|number| format!("m{number}")).collect();
        let next = |at: usize| names.get(at + 1).cloned().into_iter().collect::<Vec<_>>();
        let needs: BTreeMap<&str, Vec<String>> =
            names.iter().enumerate().map(|(at, name)| (&**name, next(at))).collect();
        assert_eq!(all_needed("m0", &needs), None);
        assert_eq!(all_needed("m99000", &needs).unwrap().len(), 999);
    }

    /// Checks the tries with the real modprobe, if this host has one.
    #[test]
    fn modprobe_finds_modules_by_name_and_alias() {
        let dir = std::env::temp_dir().join(format!("vellum-modules-{}", std::process::id()));
        let tree = dir.join("tree");
        let put = |path: &str, content: &[u8]| {
            let path = tree.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        };
        put("arch/x86/boot/bzImage", b"");
        put("modules.order", b"drivers/a-one.o\nnet/two.o\nnet/twofold.o\n");
        put("modules.builtin", b"kernel/fs/built-in.ko\n");
        put("drivers/a-one.ko", &module(&["depends=two,twofold", "alias=pci:v00001AF4d*sv*"]));
        put("net/two.ko", &module(&["depends=twofold", "alias=two-alias"]));
        put("net/twofold.ko", &module(&["depends="]));
        let kernel = Kernel::find(&tree, "").unwrap();
        let modules = of(&kernel).unwrap();
        assert_eq!(modules.directory, tree);
        let text = |name: &str| {
            let found = modules.beside.iter().find(|(known, _)| known == name).unwrap();
            String::from_utf8(found.1.clone()).unwrap()
        };
        assert_eq!(
            text("modules.dep"),
            "kernel/drivers/a-one.ko: kernel/net/two.ko kernel/net/twofold.ko\n\
             kernel/net/two.ko: kernel/net/twofold.ko\nkernel/net/twofold.ko:\n"
        );
        assert_eq!(text("modules.alias"), "alias pci:v00001AF4d*sv* a_one\nalias two_alias two\n");
        let place = dir.join("lib/modules/9.9");
        fs::create_dir_all(&place).unwrap();
        modules.beside.iter().for_each(|(name, content)| fs::write(place.join(name), content).unwrap());
        std::os::unix::fs::symlink(&tree, place.join("kernel")).unwrap();
        for (asked, loads) in [
            ("a-one", &["twofold", "two", "a-one"][..]),
            ("pci:v00001AF4d00001000sv0", &["twofold", "two", "a-one"]),
            ("two-alias", &["twofold", "two"]),
        ] {
            let mut modprobe = Command::new("modprobe");
            modprobe.args(["--set-version=9.9", "--show-depends", asked, "--dirname"]).arg(&dir);
            let Ok(output) = modprobe.output() else {
                eprintln!("skipped: modprobe: the tests with a guest cover the same");
                break;
            };
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            let named = |line: &str| Some(line.trim().rsplit('/').next()?.strip_suffix(".ko")?.to_owned());
            let found: Vec<_> = said.lines().filter_map(named).collect();
            assert_eq!(found, loads, "{asked}: {output:?}");
        }
        fs::remove_dir_all(dir).unwrap();
    }
}
