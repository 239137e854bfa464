//! Small reads of sysfs and procfs: one line into the caller's buffer without allocation, or a
//! whole file.
//!
//! A file that is missing or unreadable is not an error here: its value is unknown.

use std::fs::File;
use std::io::Read;
use std::path::Path;

/// The size that most of these files fit in. They do not report their length, and a reader with a
/// small first buffer makes more calls.
const USUAL: usize = 4096;

/// The content of `path`; `None` if it cannot be read or is not text.
pub fn whole(path: &Path) -> Option<String> {
    let mut text = String::with_capacity(USUAL);
    File::open(path).ok()?.read_to_string(&mut text).ok()?;
    Some(text)
}

/// The first line of `path`, trimmed; `None` if it cannot be read or is not text.
pub fn read<'b>(path: &str, buffer: &'b mut [u8]) -> Option<&'b str> {
    let length = File::open(path).ok()?.read(buffer).ok()?;
    str::from_utf8(&buffer[..length]).ok()?.lines().next().map(str::trim)
}

/// A module's boolean parameter: `Y`/`N`, or `1`/`0` in kernels where it is an int (`kvm_amd.npt`).
pub fn truth(text: &str) -> Option<bool> {
    match text {
        "Y" | "1" => Some(true),
        "N" | "0" => Some(false),
        _ => None,
    }
}

/// The active choice in a line such as `always [madvise] never`.
pub fn chosen(line: &str) -> Option<&str> {
    line.split_once('[')?.1.split_once(']').map(|(choice, _)| choice)
}

/// Parses a kernel list such as `0-2,5`; `None` if the text is not a list.
pub fn list(text: &str) -> Option<Vec<u32>> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse::<u32>().ok()?..=last.parse().ok()?)
    };
    let ranges: Option<Vec<_>> = text.trim().split(',').map(range).collect();
    Some(ranges?.into_iter().flatten().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_forms_that_the_kernel_prints() {
        assert_eq!(chosen("always [madvise] never"), Some("madvise"));
        assert_eq!(chosen("always madvise"), None);
        assert_eq!((truth("Y"), truth("0"), truth("auto")), (Some(true), Some(false), None));
        assert_eq!(list("0-2,5\n"), Some(vec![0, 1, 2, 5]));
        assert_eq!((list(""), list("1-x")), (None, None));
        assert_eq!(read("/proc/sys/kernel/ostype", &mut [0; 32]), Some("Linux"));
        assert_eq!(read("/no/such/file", &mut [0; 32]), None);
        assert_eq!(whole(Path::new("/proc/sys/kernel/ostype")).as_deref(), Some("Linux\n"));
        assert_eq!(whole(Path::new("/no/such/file")), None);
    }
}
