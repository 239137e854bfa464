//! `cargo lab compare --kernel A --kernel B`: compares two kernels that were built elsewhere on an
//! emulated host, alternating.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use super::{Processor, Subject, measure};
use crate::architecture::Architecture;
use crate::cache::{Cache, digest};
use crate::kernel::bench::Bench;
use crate::kernel::build::{Image, target};
use crate::{Error, Result};

/// The default commands.
pub const COMMANDS: [&str; 2] = [
    "vellum bench dirty-log -b 64M -s anonymous -i 3 --json {json}",
    "vellum bench page-table -b 64M -s anonymous -v 2 --json {json}",
];

/// Offset and magic of kernel images: `HdrS` of a bzImage, `ARM\x64` of an Image
/// (Documentation/arch).
const MAGIC: [(usize, &[u8], Architecture); 2] =
    [(0x202, b"HdrS", Architecture::X86), (0x38, b"ARM\x64", Architecture::Arm)];

/// Finds the image of `path`, an image or a built tree. Returns the image and its architecture.
pub fn find(path: &Path) -> Result<(PathBuf, Architecture)> {
    let inside = [Architecture::X86, Architecture::Arm].map(|architecture| {
        path.join(format!("arch/{}/boot/{}", architecture.kernel(), target(architecture)))
    });
    let file = match path.is_dir() {
        true => inside.into_iter().find(|file| file.is_file()).ok_or_else(|| {
            Error::Usage(format!(
                "--kernel {}: no built kernel is in that tree; build it first",
                path.display()
            ))
        })?,
        false => path.to_owned(),
    };
    let mut start = Vec::new();
    let read = File::open(&file).and_then(|image| image.take(0x210).read_to_end(&mut start));
    read.map_err(Error::file("read", &file))?;
    let is =
        |(at, magic, _): &&(usize, &[u8], Architecture)| start.get(*at..at + magic.len()) == Some(*magic);
    match MAGIC.iter().find(is) {
        Some((.., architecture)) => Ok((file, *architecture)),
        None => Err(Error::Usage(format!(
            "--kernel {}: neither a bzImage nor an Image of arm64, which emulated hosts boot",
            file.display()
        ))),
    }
}

/// Copies the image into the cache, under a digest of its content, because `path` may be rebuilt
/// meanwhile. `side` is part of its label in tables.
fn keep(cache: &Cache, path: &Path, side: char) -> Result<Image> {
    let (file, architecture) = find(path)?;
    let content = fs::read(&file).map_err(Error::file("read", &file))?;
    let name = format!("own/{}", digest([content.as_slice()]));
    let dir = cache.entry(&format!("kernel/{name}"), |out| {
        let to = out.join(target(architecture));
        fs::write(&to, &content).map_err(Error::file("write", &to))
    })?;
    Ok(Image { label: format!("{side}: {}", path.display()), architecture, dir, name })
}

/// Where the comparison of these kernels is kept.
pub fn kept(cache: &Cache, kernels: &[PathBuf; 2], processor: Processor) -> Result<PathBuf> {
    let [before, after] = [keep(cache, &kernels[0], 'A')?, keep(cache, &kernels[1], 'B')?];
    let key = digest([before.name.as_bytes(), after.name.as_bytes()]);
    Ok(cache.path(&format!("compare/own-{key}-{}", processor.name())))
}

/// Compares the kernels by `commands`, and keeps the table and every result in `out`.
pub fn compare(
    cache: &Cache,
    kernels: &[PathBuf; 2],
    commands: &[String],
    processor: Processor,
    out: &Path,
) -> Result<()> {
    let images = [keep(cache, &kernels[0], 'A')?, keep(cache, &kernels[1], 'B')?];
    let bed = processor.bed;
    if let Some(other) = images.iter().find(|image| image.architecture != bed.architecture()) {
        return Err(Error::Usage(format!("{}: --bed {} does not boot it", other.label, bed.name())));
    }
    let commands = if commands.is_empty() { COMMANDS.map(String::from).to_vec() } else { commands.to_vec() };
    let benches: Vec<Bench> = commands.iter().map(|command| Bench::plain(command, true)).collect();
    let benches: Vec<&Bench> = benches.iter().collect();
    let kernels = |_: Option<&str>| Ok(images.clone());
    let subject = Subject {
        name: "own kernels".into(),
        headline: "",
        benches: &benches,
        is_patched: false,
        kernels: &kernels,
    };
    measure(cache, &subject, processor, out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_known_by_what_is_in_it_and_found_in_a_tree() {
        let dir = std::env::temp_dir().join(format!("vellum-lab-own-{}", std::process::id()));
        let boot = dir.join("arch/x86/boot");
        fs::create_dir_all(&boot).unwrap();
        let refused = find(&dir).unwrap_err().to_string();
        assert!(refused.contains("build it first"), "{refused}");
        let image = |at: usize, magic: &[u8]| {
            let mut image = vec![0; 0x400];
            image[at..at + magic.len()].copy_from_slice(magic);
            image
        };
        let file = boot.join("bzImage");
        fs::write(&file, image(0x202, b"HdrS")).unwrap();
        assert_eq!(find(&dir).unwrap(), (file.clone(), Architecture::X86));
        fs::write(&file, image(0x38, b"ARM\x64")).unwrap();
        assert_eq!(find(&file).unwrap().1, Architecture::Arm);
        fs::write(&file, b"HdrS").unwrap();
        assert!(find(&file).unwrap_err().to_string().contains("neither a bzImage"));
        fs::remove_dir_all(dir).unwrap();
    }
}
