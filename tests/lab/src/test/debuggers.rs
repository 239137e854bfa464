//! Programs that look into Linux guests from their host: Debian's GDB and makedumpfile with their
//! libraries, and symbols of the guests' kernels.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::architecture::Architecture;
use crate::artifacts::{self, Kernel, SYMBOLS};
use crate::cache::Cache;
use crate::{Error, Result, tool};

/// The packages and the program in each. This GDB has no Python, which would need a tree of files.
const PROGRAMS: [(&str, &str); 2] =
    [("gdb-minimal", "usr/bin/gdb"), ("makedumpfile", "usr/bin/makedumpfile")];

/// The tools of this machine whose libraries these programs use too.
pub const TOOLS: [&str; 2] = ["gdb", "makedumpfile"];

/// Symbols of one kernel are enough: a debugger behaves the same with any kernel.
const KERNEL: &str = "6.1";

/// A file and its path in a host.
pub type Placed = (PathBuf, String);

/// The programs, their libraries, and a kernel's symbols.
pub fn with_symbols(cache: &Cache) -> Result<Vec<Placed>> {
    let mut files = programs(cache)?;
    files.push((Kernel::debian(cache, KERNEL)?.symbols(cache)?, format!("/guests/{KERNEL}/{SYMBOLS}")));
    Ok(files)
}

/// The programs and their libraries, which are small.
pub fn programs(cache: &Cache) -> Result<Vec<Placed>> {
    let mut files = Vec::new();
    for (package, program) in PROGRAMS {
        let path = artifacts::package(cache, Architecture::X86, package)?.join(program);
        let listed = tool::text(Command::new(tool::need("ldd")?).arg(&path))?;
        files.extend(libraries(package, &listed)?);
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        files.push((path, format!("/bin/{name}")));
    }
    files.sort();
    files.dedup();
    Ok(files)
}

/// The libraries in ldd(1)'s output for a program in `package`, with the path at which the loader
/// in a host looks for each.
fn libraries(package: &str, listed: &str) -> Result<Vec<Placed>> {
    let mut files = Vec::new();
    for line in listed.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            [name, "=>", "not", "found"] => {
                return Err(Error::Package(format!(
                    "{package} needs {name}, which this machine lacks: {}, or as root: apt-get install gdb makedumpfile",
                    support::tools::SETUP
                )));
            }
            [name, "=>", path, _] => {
                files.push((Path::new(path).into(), format!("/lib/x86_64-linux-gnu/{name}")))
            }
            // The loader itself, by its path in programs.
            [path, _] if path.starts_with('/') => files.push((Path::new(path).into(), path.to_owned())),
            _ => {}
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_where_a_loader_looks() {
        let listed =
            "\tlinux-vdso.so.1 (0x7f)\n\tlibc.so.6 => /lib/libc.so.6 (0x7f)\n\t/lib64/ld.so.2 (0x7f)\n";
        let files = libraries("p", listed).unwrap();
        let path = |(from, to): &(PathBuf, String)| format!("{} {to}", from.display());
        assert_eq!(
            files.iter().map(path).collect::<Vec<_>>(),
            ["/lib/libc.so.6 /lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld.so.2 /lib64/ld.so.2"]
        );
        let error = libraries("p", "\tlibx.so.1 => not found\n").unwrap_err().to_string();
        assert!(error.contains("libx.so.1") && error.contains("apt-get install gdb makedumpfile"), "{error}");
    }
}
