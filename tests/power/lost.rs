//! The host loses power.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use support::share::mount::{Act, Mount, acts, fuse};
use support::virtio::disk::disk;
use support::{Failed, Need, Random, Scratch, ensure, test};
use vellum_devices::virtio::transport::Codec;
use vellum_share::{Cache, Config};

use crate::{ask, overlaid};

/// The number of power losses. VELLUM_CUTS sets another number.
const CUTS: u32 = 50;
const SECTOR: usize = 512;
const BYTES: u64 = 16 << 20;

fn ext4() -> Need {
    fuse()?;
    if !fs::read_to_string("/proc/filesystems").is_ok_and(|all| all.contains("ext4")) {
        return Err("needs a kernel with ext4: modprobe ext4".into());
    }
    if !Path::new("/dev/loop-control").exists() {
        return Err("needs loop devices: modprobe loop".into());
    }
    ["mkfs.ext4", "e2fsck", "debugfs"].into_iter().try_for_each(support::tools::program)
}

/// Runs a command. Returns its exit status and its output.
fn run(line: &[&str]) -> Result<(Option<i32>, String), Failed> {
    let output = Command::new(line[0]).args(&line[1..]).stdin(Stdio::null()).output()?;
    let said = [&output.stdout[..], &output.stderr].concat();
    Ok((output.status.code(), String::from_utf8_lossy(&said).into_owned()))
}

fn works(line: &[&str]) -> Result<String, Failed> {
    let (status, said) = run(line)?;
    ensure(status == Some(0), || format!("{line:?}: {status:?}: {said}"))?;
    Ok(said)
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a name of this test's own")
}

/// A file that was synced, and the number of acts on the disk when the sync returned.
struct Promise {
    name: String,
    contents: Vec<u8>,
    acts: usize,
}

/// The acts of ext4 on a disk whose first contents were `original`, and the files that were synced.
fn workload(
    scratch: &Scratch,
    original: &[u8],
    random: &mut Random,
) -> Result<(Vec<Act>, Vec<Promise>), Failed> {
    let [there, mounted, record] = ["there", "mounted", "record"].map(|name| scratch.path(name));
    fs::create_dir(&there)?;
    fs::create_dir(&mounted)?;
    fs::write(there.join("disk"), original)?;
    let config = Config { writable: true, cache: Cache::None, ..Config::default() };
    let mount = Mount::recorded(&there, mounted.clone(), config, Some(&record))?;
    let root = scratch.path("root");
    fs::create_dir(&root)?;
    works(&["mount", "-o", "loop,commit=1", text(&mounted.join("disk")), text(&root)])?;
    let worked = used(&root, &record, random);
    works(&["umount", text(&root)])?;
    let promises = worked?;
    drop(mount);
    Ok((acts(&fs::read(&record)?), promises))
}

/// Uses a file system as a program does that syncs its data.
fn used(root: &Path, record: &Path, random: &mut Random) -> Result<Vec<Promise>, Failed> {
    let mut promises = Vec::new();
    for step in 0..60u32 {
        let directory = root.join(format!("d{}", step / 10));
        fs::create_dir_all(&directory)?;
        // Files that soon disappear or are renamed. They are never synced.
        for number in 0..random.below(6) {
            let short = directory.join(format!("short{number}"));
            fs::write(&short, vec![step as u8; random.below(20_000) as usize])?;
            if random.below(2) == 0 {
                fs::remove_file(&short)?
            } else {
                fs::rename(&short, root.join("moved"))?
            }
        }
        let contents: Vec<u8> =
            (0..random.below(60_000)).map(|at| (at * u64::from(step + 1)) as u8).collect();
        let (new, name) = (directory.join("new"), format!("d{}/f{step}", step / 10));
        let mut file = File::create(&new)?;
        file.write_all(&contents)?;
        file.sync_all()?;
        fs::rename(&new, root.join(&name))?;
        File::open(&directory)?.sync_all()?;
        promises.push(Promise { name, contents, acts: acts(&fs::read(record)?).len() });
    }
    Ok(promises)
}

#[test(ext4())]
fn what_was_flushed_outlives_a_loss_of_power() -> Result<(), Failed> {
    let (mut random, scratch) = (Random::new(), Scratch::new()?);
    let base = scratch.path("base");
    // Sectors that are never written are not zero, so that lost data cannot be right by accident.
    fs::write(&base, (0..BYTES).map(|at| (at / 512) as u8 | 1).collect::<Vec<u8>>())?;
    // With checksums a torn superblock would be invalid, and the journal does not contain the
    // superblock. The journal contains everything else.
    works(&[
        "mkfs.ext4",
        "-q",
        "-F",
        "-E",
        "nodiscard",
        "-O",
        "^metadata_csum",
        "-J",
        "size=4",
        text(&base),
    ])?;
    let original = fs::read(&base)?;
    let (asked, promises) = workload(&scratch, &original, &mut random)?;
    let [there, mounted, record] = ["over", "over-mounted", "over-record"].map(|name| scratch.path(name));
    fs::create_dir(&there)?;
    fs::create_dir(&mounted)?;
    let over = mounted.join("overlay");
    // The overlay is created before its file system is recorded, so it exists in every case.
    drop(disk(Codec::Mmio, &overlaid(base.clone(), there.join("overlay"))));
    let begin = fs::read(there.join("overlay"))?;
    let config = Config { writable: true, cache: Cache::None, ..Config::default() };
    let mount = Mount::recorded(&there, mounted, config, Some(&record))?;
    let mut driver = disk(Codec::Mmio, &overlaid(base.clone(), over));
    driver.start();
    // The length of the record when each act began.
    let mut starts = Vec::with_capacity(asked.len() + 1);
    let length = || fs::metadata(&record).map_or(0, |it| it.len());
    for act in &asked {
        starts.push(length());
        match act {
            Act::Write(at, data) => ask::write(&mut driver, *at, data),
            Act::Sync => ask::flush(&mut driver),
        }
    }
    starts.push(length());
    drop(driver);
    drop(mount);
    let done = acts(&fs::read(&record)?);
    let syncs = done.iter().filter(|act| matches!(act, Act::Sync)).count();
    eprintln!("{} acts of ext4's, {} of the overlay's, {syncs} of them syncs", asked.len(), done.len());
    ensure(syncs > 100 && promises.len() == 60, || "that is no workload".into())?;
    let cuts = std::env::var("VELLUM_CUTS").ok().and_then(|text| text.parse().ok()).unwrap_or(CUTS);
    let test = Cut { base: &base, original, asked, starts, begin, done, promises };
    let mut repaired = 0;
    for cut in 0..cuts {
        let at = random.below(test.done.len() as u64 + 1) as usize;
        // In every second case, power is lost right before the overlay syncs. Then the most writes
        // are pending.
        let next = test.done[at..].iter().position(|act| matches!(act, Act::Sync)).unwrap_or(0);
        let at = at + if cut % 2 == 0 { next } else { 0 };
        let lost = test.lost(at, &mut random, &scratch).map_err(|error| {
            Failed::from(format!("loss {cut}, after {at} acts: {}", error.message().unwrap_or("?")))
        })?;
        repaired += u32::from(lost);
    }
    eprintln!("{cuts} losses of power, the journal was needed after {repaired}");
    ensure(fs::read(&base)? == test.original, || "the base has changed".into())
}

/// The results of a run.
struct Cut<'a> {
    base: &'a Path,
    original: Vec<u8>,
    asked: Vec<Act>,
    starts: Vec<u64>,
    begin: Vec<u8>,
    done: Vec<Act>,
    promises: Vec<Promise>,
}

impl Cut<'_> {
    /// The length of a record of the first `count` acts on the overlay.
    fn recorded(&self, count: usize) -> u64 {
        let len = |act: &Act| match act {
            Act::Write(_, data) => 16 + data.len() as u64,
            Act::Sync => 8,
        };
        self.done[..count].iter().map(len).sum()
    }

    /// Simulates a power loss after `cut` acts on the overlay. Returns whether the journal was
    /// needed.
    fn lost(&self, cut: usize, random: &mut Random, scratch: &Scratch) -> Result<bool, Failed> {
        let mut medium = self.begin.clone();
        let synced = self.done[..cut].iter().rposition(|act| matches!(act, Act::Sync)).unwrap_or(0);
        // Of the writes since the last sync, none, all or a random part is on the disk.
        let share = random.below(5);
        for (number, act) in self.done[..cut].iter().enumerate() {
            let Act::Write(at, data) = act else { continue };
            for (part, bytes) in data.chunks(SECTOR).enumerate() {
                if number < synced || random.below(4) < share {
                    medium[*at as usize + part * SECTOR..][..bytes.len()].copy_from_slice(bytes);
                }
            }
        }
        let over: PathBuf = scratch.path("after");
        fs::write(&over, medium)?;
        let mut driver = disk(Codec::Mmio, &overlaid(self.base.to_owned(), over));
        driver.start();
        let found = ask::read(&mut driver, 0, BYTES as usize);
        drop(driver);
        let flushed = self.is_old_or_new(self.recorded(cut), &found)?;
        let image = scratch.path("image");
        fs::write(&image, found)?;
        let (status, said) = run(&["e2fsck", "-p", text(&image)])?;
        ensure(matches!(status, Some(0 | 1)), || format!("e2fsck -p: {status:?}: {said}"))?;
        let all = works(&["e2fsck", "-fn", text(&image)]);
        all.map_err(|error| format!("more than the journal: {}", error.message().unwrap_or("?")))?;
        // Checks one of the synced files.
        let kept: Vec<&Promise> = self.promises.iter().filter(|promise| promise.acts <= flushed).collect();
        if let Some(promise) = kept.get(random.below(kept.len() as u64) as usize) {
            let out = scratch.path("out");
            let _ = fs::remove_file(&out);
            run(&["debugfs", "-R", &format!("dump /{} {}", promise.name, out.display()), text(&image)])?;
            let is = fs::read(&out).unwrap_or_default();
            ensure(out.exists() && is == promise.contents, || {
                format!("{}: {} bytes", promise.name, is.len())
            })?;
        }
        Ok(said.contains("recovering journal"))
    }

    /// Checks `found` against the contents that are possible when `recorded` bytes were recorded.
    /// Returns how many of the requested acts come before the end of the last completed flush.
    fn is_old_or_new(&self, recorded: u64, found: &[u8]) -> Result<usize, Failed> {
        let ended = |act: usize| self.starts[act + 1] <= recorded;
        let is_flush = |act: usize| matches!(self.asked[act], Act::Sync);
        // A flush is complete if the record reaches to where the next act began.
        let flushed =
            (0..self.asked.len()).rev().find(|act| is_flush(*act) && ended(*act)).map_or(0, |act| act + 1);
        let mut old = self.original.clone();
        let mut new: HashMap<usize, Vec<&[u8]>> = HashMap::new();
        for (number, act) in self.asked.iter().enumerate() {
            let Act::Write(at, data) = act else { continue };
            if number < flushed {
                old[*at as usize..][..data.len()].copy_from_slice(data);
            } else if self.starts[number] <= recorded {
                for (part, bytes) in data.chunks(SECTOR).enumerate() {
                    new.entry(*at as usize / SECTOR + part).or_default().push(bytes);
                }
            }
        }
        for (number, (found, old)) in found.chunks(SECTOR).zip(old.chunks(SECTOR)).enumerate() {
            let may = || new.get(&number).is_some_and(|any| any.contains(&found));
            ensure(found == old || may(), || format!("sector {number} is neither old nor new"))?;
        }
        Ok(flushed)
    }
}
