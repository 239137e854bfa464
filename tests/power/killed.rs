//! The VMM is killed twenty times while the guest writes.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use support::virtio::disk::disk;
use support::{Failed, Random, Scratch, ensure, test};
use vellum_devices::virtio::transport::Codec;
use vellum_sys::signal;

use crate::{ask, overlaid};

/// The command-line argument that makes this program write.
pub const WORD: &str = "write";
const KILLS: u32 = 20;
const SECTORS: u64 = 4096;

/// The sectors that version `version` of the disk writes.
fn written(version: u64) -> impl Iterator<Item = u64> {
    (0..1 + version % 5).map(move |part| (version * 97 + part * 1031) % SECTORS)
}

fn sector(number: u64, version: u64) -> [u8; 512] {
    let mut bytes = [0; 512];
    for words in bytes.as_chunks_mut::<16>().0 {
        words[..8].copy_from_slice(&number.to_le_bytes());
        words[8..].copy_from_slice(&version.to_le_bytes());
    }
    bytes
}

/// Writes one version after another until it is killed. After the flush of each version it prints a
/// byte.
pub fn write() -> Result<(), String> {
    use std::io::Write;
    let argument = |at| std::env::args().nth(at).ok_or("an argument is missing");
    let (base, over, first) = (argument(2)?, argument(3)?, argument(4)?);
    let mut driver = disk(Codec::Mmio, &overlaid(base.into(), over.into()));
    driver.start();
    for version in first.parse().map_err(|error| format!("{first}: {error}"))?.. {
        for number in written(version) {
            ask::write(&mut driver, number * 512, &sector(number, version));
        }
        ask::flush(&mut driver);
        std::io::stdout()
            .write_all(b".")
            .and_then(|()| std::io::stdout().flush())
            .map_err(|error| error.to_string())?;
    }
    Ok(())
}

#[test]
fn what_was_flushed_outlives_its_process() -> Result<(), Failed> {
    let (mut random, scratch) = (Random::new(), Scratch::new()?);
    let (base, over) = (scratch.path("base"), scratch.path("over"));
    let original: Vec<u8> = (0..SECTORS).flat_map(|number| sector(number, 0)).collect();
    std::fs::write(&base, &original)?;
    // The last version that was flushed.
    let mut flushed = 0u64;
    for kill in 0..KILLS {
        let mut command = Command::new("/proc/self/exe");
        command.arg(WORD).args([&base, &over]).arg((flushed + 1).to_string()).stdout(Stdio::piped());
        signal::end_with_parent(&mut command);
        let mut child = command.spawn()?;
        let mut out = child.stdout.take().expect("piped");
        // The writer has started. The kill comes at a random point of its work.
        out.read_exact(&mut [0])?;
        std::thread::sleep(Duration::from_micros(random.below(20_000)));
        child.kill()?;
        child.wait()?;
        let mut said = Vec::new();
        out.read_to_end(&mut said)?;
        flushed += 1 + said.len() as u64;
        check(&base, &over, flushed)
            .map_err(|error| Failed::from(format!("kill {kill}: {}", error.message().unwrap_or("?"))))?;
        // The version after the last flush may be partly on the disk. The next writer begins after
        // it.
        flushed += 1;
        let mut driver = disk(Codec::Mmio, &overlaid(base.clone(), over.clone()));
        driver.start();
        for number in written(flushed) {
            ask::write(&mut driver, number * 512, &sector(number, flushed));
        }
        ask::flush(&mut driver);
    }
    ensure(std::fs::read(&base)? == original, || "the base has changed".into())
}

/// Each sector must have the last version up to `flushed` that wrote it, or the next version.
fn check(base: &Path, over: &Path, flushed: u64) -> Result<(), Failed> {
    let mut due = vec![0; SECTORS as usize];
    (1..=flushed).for_each(|version| written(version).for_each(|number| due[number as usize] = version));
    let next: Vec<u64> = written(flushed + 1).collect();
    let mut driver = disk(Codec::Mmio, &overlaid(base.to_owned(), over.to_owned()));
    driver.start();
    let found = ask::read(&mut driver, 0, SECTORS as usize * 512);
    for (number, bytes) in (0..).zip(found.chunks(512)) {
        let right = sector(number, due[number as usize]);
        let may = next.contains(&number) && *bytes == sector(number, flushed + 1);
        ensure(*bytes == right || may, || {
            format!("sector {number} is of version {:?}, and not {}", &bytes[8..16], due[number as usize])
        })?;
    }
    Ok(())
}
