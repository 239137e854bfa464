//! Boot loader entries: files in loader/entries, as used by systemd-boot and Fedora's GRUB
//! (UAPI.1).

use std::cmp::Ordering;

use super::{Disk, Entry, MAX_CONFIG, Refused, version};

/// The directories with entries. The paths of kernels in them begin at the partition's root.
pub(crate) const DIRECTORIES: [&str; 2] = ["/loader/entries", "/boot/loader/entries"];
/// The maximum number of entries that are read.
const MAX_ENTRIES: usize = 256;

/// One file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Item {
    /// The file's name without `.conf`.
    pub id: String,
    /// `title`.
    pub title: String,
    /// `version`.
    pub version: String,
    /// `sort-key`.
    pub sort_key: Option<String>,
    /// `machine-id`.
    pub machine_id: String,
    /// `linux`: the kernel's path.
    pub linux: Option<String>,
    /// `initrd`. The key may be repeated.
    pub initrds: Vec<String>,
    /// `options`. The values of repeated keys are joined.
    pub options: String,
}

/// Parses the text of an entry.
pub fn parse(id: &str, text: &str) -> Item {
    let mut item = Item { id: id.into(), ..Item::default() };
    for line in text.lines().map(str::trim) {
        let Some((key, value)) = line.split_once([' ', '\t']) else { continue };
        let value = value.trim();
        match key {
            "title" => item.title = value.into(),
            "version" => item.version = value.into(),
            "sort-key" => item.sort_key = Some(value.into()),
            "machine-id" => item.machine_id = value.into(),
            "linux" => item.linux = Some(value.into()),
            "initrd" => item.initrds.extend(value.split_whitespace().map(str::to_owned)),
            "options" if item.options.is_empty() => item.options = value.into(),
            "options" => item.options = format!("{} {value}", item.options),
            _ => {}
        }
    }
    item
}

/// The order of a menu. The first entry is the default.
fn order(one: &Item, two: &Item) -> Ordering {
    let newest = || version::compare(&two.version, &one.version);
    match (&one.sort_key, &two.sort_key) {
        (Some(a), Some(b)) => a.cmp(b).then_with(|| one.machine_id.cmp(&two.machine_id)).then_with(newest),
        (Some(_), None) => Ordering::Less,
        (None, Some(_)) => Ordering::Greater,
        (None, None) => Ordering::Equal,
    }
    .then_with(|| version::compare(&two.id, &one.id))
}

/// The entries in `directory` of volume `at`, in the menu's order.
pub(crate) fn items(disk: &Disk, at: usize, directory: &str) -> Vec<Item> {
    let Some(Ok(files)) = disk.volumes.get(at).map(|volume| &volume.content) else { return Vec::new() };
    let names = files.names(directory).into_iter();
    let items = names.filter_map(|name| {
        let text = files.read(&format!("{directory}/{name}"), MAX_CONFIG).ok()?;
        Some(parse(name.strip_suffix(".conf")?, &String::from_utf8_lossy(&text)))
    });
    let mut items: Vec<Item> = items.take(MAX_ENTRIES).collect();
    items.sort_by(order);
    items
}

/// The entries of systemd-boot's menu. The default of loader.conf comes first.
pub fn entries(disk: &Disk, refused: &mut Refused) -> Vec<(String, Entry)> {
    let mut found = Vec::new();
    for (at, volume, files) in disk.readable() {
        for directory in DIRECTORIES {
            let mut items = items(disk, at, directory);
            let config = files.read(&directory.replace("entries", "loader.conf"), MAX_CONFIG);
            let config = String::from_utf8_lossy(&config.unwrap_or_default()).into_owned();
            let default = config.lines().find_map(|line| line.trim().strip_prefix("default"));
            if let Some(pattern) = default.map(str::trim) {
                let chosen = items.iter().position(|item| {
                    matches(pattern, &item.id) || matches(pattern, &format!("{}.conf", item.id))
                });
                if let Some(chosen) = chosen {
                    items[..=chosen].rotate_right(1);
                }
            }
            let place = format!("{directory} of {}", volume.name());
            for item in items {
                match item.linux {
                    Some(linux) => found.push((
                        place.clone(),
                        Entry {
                            title: if item.title.is_empty() { item.id } else { item.title },
                            kernel: (at, linux),
                            initrds: item.initrds.into_iter().map(|initrd| (at, initrd)).collect(),
                            cmdline: item.options,
                        },
                    )),
                    None => refused.push(format!("{place}: {}.conf names no kernel", item.id)),
                }
            }
        }
    }
    found
}

/// Whether a name matches a pattern with `*` and `?`.
fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name) = (pattern.as_bytes(), name.as_bytes());
    let (mut p, mut n) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p, n));
                p += 1;
            }
            Some(&byte) if byte == b'?' || byte == name[n] => (p, n) = (p + 1, n + 1),
            _ => match &mut star {
                // The last star takes one more byte.
                Some((at, from)) => {
                    *from += 1;
                    (p, n) = (*at + 1, *from);
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|&byte| byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_read_as_fedora_writes_it() {
        let item = parse(
            "abc-6.8.5-301.fc40.x86_64",
            "title Fedora Linux (6.8.5-301.fc40.x86_64) 40\nversion 6.8.5-301.fc40.x86_64\n\
             linux /vmlinuz-6.8.5\ninitrd /initramfs-6.8.5.img $tuned_initrd\n\
             options root=UUID=1 ro\noptions  console=ttyS0\n# a comment\ngrub_users $grub_users\n",
        );
        assert_eq!(item.linux.as_deref(), Some("/vmlinuz-6.8.5"));
        assert_eq!(item.initrds, ["/initramfs-6.8.5.img", "$tuned_initrd"]);
        assert_eq!(item.options, "root=UUID=1 ro console=ttyS0");
    }

    #[test]
    fn the_newest_entry_is_first() {
        let item = |id: &str, key: Option<&str>, version: &str| Item {
            id: id.into(),
            sort_key: key.map(str::to_owned),
            version: version.into(),
            ..Item::default()
        };
        let mut items = [
            item("x-6.8.5", None, ""),
            item("x-6.12.1", None, ""),
            item("a", Some("fedora"), "6.8"),
            item("b", Some("fedora"), "6.12"),
        ];
        items.sort_by(order);
        assert_eq!(items.map(|item| item.id), ["b", "a", "x-6.12.1", "x-6.8.5"]);
    }

    #[test]
    fn patterns() {
        for (pattern, name, fits) in [
            ("fedora-*", "fedora-6.8", true),
            ("*", "", true),
            ("a?c", "abc", true),
            ("a*c*e", "abcde", true),
            ("a*c", "abcd", false),
            ("", "a", false),
        ] {
            assert_eq!(matches(pattern, name), fits, "{pattern} {name}");
        }
    }
}
