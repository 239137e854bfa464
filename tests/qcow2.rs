//! qcow2 images. QEMU's tools create them, write to them and check them. Vellum reads and writes
//! the same disks.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, ExitCode, Output};

use support::{Failed, LIMIT, Random, Scratch, Tests, ensure, eventually, test, tools};
use vellum_devices::virtio::blk::{Blk, BlkConfig, BlkError};
use vellum_disk::Image;
use vellum_disk::overlay::{Base, Overlay, unnamed};
use vellum_disk::qcow2::{Error, Named, Qcow2};
use vellum_kvm::arch::layout;
use vellum_kvm::memory::slices::Slices;
use vellum_kvm::memory::{Memory, MemoryConfig};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

fn main() -> ExitCode {
    Tests::from_args().run()
}

/// The size of each disk in bytes. It is not a multiple of the larger cluster sizes.
const SIZE: usize = (9 << 20) + 512;
/// The longest request in bytes.
const MAX_REQUEST: usize = 300 << 10;

/// The path of a file in `scratch`.
fn file(scratch: &Scratch, name: &str) -> String {
    scratch.path(name).display().to_string()
}

fn run(program: &str, arguments: &[&str]) -> Result<Output, Failed> {
    let output =
        Command::new(program).args(arguments).output().map_err(|error| format!("{program}: {error}"))?;
    ensure(output.status.success(), || format!("{program} {arguments:?}: {output:?}"))?;
    Ok(output)
}

fn open(path: &str, write: bool) -> Result<File, Failed> {
    Ok(File::options().read(true).write(write).open(path)?)
}

/// Guest memory for the data of requests.
struct Guest(Memory);

impl Guest {
    fn new() -> Result<Self, Failed> {
        Ok(Self(Memory::map(layout::RAM, MemoryConfig::new(2 << 20))?))
    }

    /// `len` bytes of memory, in pieces of odd sizes, which a driver may use.
    fn slices(&self, len: usize) -> Slices<'_> {
        let (mut slices, mut at) = (Slices::default(), 0);
        while at < len {
            let part = (len - at).min(40_000);
            for slice in self.0.guest.get_slices(GuestAddress(at as u64), part) {
                slices.push(slice.expect("it is memory"));
            }
            at += part;
        }
        slices
    }

    fn read(&self, image: &Image, at: u64, len: usize) -> Result<Vec<u8>, Failed> {
        self.0.guest.write_slice(&vec![0xa5; len], GuestAddress(0))?;
        let (mut data, mut from) = (self.slices(len), at);
        while data.left() > 0 {
            let count = image.read(&mut data, from)?;
            ensure(count > 0, || format!("{at}: a read of {len} bytes ends at {from}"))?;
            from += count as u64;
        }
        let mut bytes = vec![0; len];
        self.0.guest.read_slice(&mut bytes, GuestAddress(0))?;
        Ok(bytes)
    }

    fn write(&self, image: &mut Image, at: u64, bytes: &[u8]) -> Result<(), Failed> {
        self.0.guest.write_slice(bytes, GuestAddress(0))?;
        let (mut data, mut to) = (self.slices(bytes.len()), at);
        while data.left() > 0 {
            to += image.write(&mut data, to)? as u64;
        }
        Ok(())
    }

    /// Fails unless the contents of `image` are exactly `model`.
    fn compare(&self, image: &Image, model: &[u8]) -> Result<(), Failed> {
        for (number, due) in model.chunks(MAX_REQUEST).enumerate() {
            let at = number * MAX_REQUEST;
            let found = self.read(image, at as u64, due.len())?;
            let differs = found.iter().zip(due).position(|(found, due)| found != due);
            ensure(differs.is_none(), || format!("byte {} is wrong", at + differs.unwrap_or(0)))?;
        }
        Ok(())
    }

    /// Applies random requests to both `image` and `model`.
    fn exercise(
        &self,
        image: &mut Image,
        model: &mut [u8],
        random: &mut Random,
        steps: u32,
    ) -> Result<(), Failed> {
        let sectors = model.len() as u64 / 512;
        for _ in 0..steps {
            let first = random.below(sectors);
            let most = (sectors - first).min(MAX_REQUEST as u64 / 512);
            let (at, len) = ((first * 512) as usize, ((1 + random.below(most)) * 512) as usize);
            let part = &mut model[at..at + len];
            match random.below(8) {
                0 => {
                    image.zero(at as u64, len as u64, random.below(2) == 0)?;
                    part.fill(0);
                }
                1 => {
                    // A discarded range reads as zeroes. If nothing was discarded, it is unchanged.
                    if image.discard(at as u64, len as u64)? {
                        part.fill(0);
                    }
                }
                2 => image.flush()?,
                3 | 4 => ensure(self.read(image, at as u64, len)? == part, || {
                    format!("{len} bytes at {at} are wrong")
                })?,
                _ => {
                    part.iter_mut().for_each(|byte| *byte = random.below(256) as u8);
                    self.write(image, at as u64, part)?;
                }
            }
        }
        Ok(())
    }
}

/// A disk with some data, some zeroes and some holes.
fn contents(random: &mut Random) -> Vec<u8> {
    let mut bytes = vec![0; SIZE];
    for part in bytes.chunks_mut(48 << 10) {
        match random.below(3) {
            0 => part.iter_mut().for_each(|byte| *byte = random.below(256) as u8),
            1 => part.fill(random.below(256) as u8),
            _ => {}
        }
    }
    bytes
}

/// The options with which QEMU creates an image, and the options of the conversion.
const KINDS: [(&str, &[&str]); 30] = [
    ("compat=0.10", &[]),
    ("compat=0.10,cluster_size=512", &[]),
    ("compat=0.10,cluster_size=4k", &["-c"]),
    ("compat=0.10,cluster_size=2M", &[]),
    ("compat=0.10", &["-c"]),
    ("compat=1.1", &[]),
    ("compat=1.1", &["-c"]),
    ("cluster_size=512", &[]),
    ("cluster_size=512", &["-c"]),
    ("cluster_size=4k", &[]),
    ("cluster_size=4k", &["-c"]),
    ("cluster_size=8k,refcount_bits=8", &[]),
    ("cluster_size=16k", &["-S", "0"]),
    ("cluster_size=32k", &["-c"]),
    ("cluster_size=128k", &[]),
    ("cluster_size=256k", &["-c"]),
    ("cluster_size=512k", &[]),
    ("cluster_size=1M", &["-c"]),
    ("cluster_size=2M", &[]),
    ("cluster_size=2M", &["-c"]),
    ("refcount_bits=1", &[]),
    ("refcount_bits=2", &["-c"]),
    ("refcount_bits=4", &[]),
    ("refcount_bits=8", &[]),
    ("refcount_bits=32", &["-c"]),
    ("refcount_bits=64", &[]),
    ("lazy_refcounts=on", &[]),
    ("preallocation=metadata", &[]),
    ("preallocation=falloc", &[]),
    ("preallocation=full", &[]),
];

fn writable(path: &str) -> Result<Image, Failed> {
    Ok(Image::Qcow2(Box::new(Qcow2::open(open(path, true)?, true, Named::default())?)))
}

/// Checks with QEMU that the image is valid and has exactly the contents `model`.
fn is_sound(scratch: &Scratch, path: &str, model: &[u8]) -> Result<(), Failed> {
    run("qemu-img", &["check", "-q", path])?;
    let due = file(scratch, "due.raw");
    fs::write(&due, model)?;
    run("qemu-img", &["compare", "-q", "-f", "qcow2", "-F", "raw", path, &due]).map(drop)
}

#[test(tools::program("qemu-img"))]
fn images_of_thirty_kinds_are_read_and_written() -> Result<(), Failed> {
    let (mut random, guest) = (Random::new(), Guest::new()?);
    for (options, more) in KINDS {
        let scratch = Scratch::new()?;
        let (raw, path) = (file(&scratch, "a.raw"), file(&scratch, "a.qcow2"));
        let mut model = contents(&mut random);
        fs::write(&raw, &model)?;
        let line = [&["convert", "-f", "raw", "-O", "qcow2", "-o", options], more, &[&raw, &path]].concat();
        run("qemu-img", &line)?;
        let about =
            |error: Failed| Failed::from(format!("{options} {more:?}: {}", error.message().unwrap_or("")));
        let work = |model: &mut Vec<u8>, random: &mut Random| {
            let readonly = Qcow2::open(open(&path, false)?, false, Named::default())?;
            ensure(readonly.size() == SIZE as u64, || format!("{} bytes", readonly.size()))?;
            guest.compare(&Image::Qcow2(Box::new(readonly)), model)?;
            let mut image = writable(&path)?;
            guest.exercise(&mut image, model, random, 60)?;
            guest.compare(&image, model)?;
            drop(image);
            is_sound(&scratch, &path, model)
        };
        work(&mut model, &mut random).map_err(about)?;
    }
    Ok(())
}

#[test(tools::program("qemu-img"))]
fn snapshots_inside_an_image_keep_what_they_had() -> Result<(), Failed> {
    let (mut random, guest, scratch) = (Random::new(), Guest::new()?, Scratch::new()?);
    let (raw, path, then) = (file(&scratch, "a.raw"), file(&scratch, "a.qcow2"), file(&scratch, "then.raw"));
    let mut model = contents(&mut random);
    fs::write(&raw, &model)?;
    run("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", &raw, &path])?;
    run("qemu-img", &["snapshot", "-c", "then", &path])?;
    let before = model.clone();
    let mut image = writable(&path)?;
    guest.exercise(&mut image, &mut model, &mut random, 100)?;
    drop(image);
    is_sound(&scratch, &path, &model)?;
    run("qemu-img", &["convert", "-l", "then", "-O", "raw", &path, &then])?;
    ensure(fs::read(&then)? == before, || "the snapshot has changed".into())
}

#[test(tools::program("qemu-img"))]
fn files_beside_an_image_are_opened_only_if_they_are_named() -> Result<(), Failed> {
    let (mut random, guest, scratch) = (Random::new(), Guest::new()?, Scratch::new()?);
    let (raw, base, top) =
        (file(&scratch, "a.raw"), file(&scratch, "base.qcow2"), file(&scratch, "top.qcow2"));
    let mut model = contents(&mut random);
    fs::write(&raw, &model)?;
    run("qemu-img", &["convert", "-O", "qcow2", "-c", &raw, &base])?;
    for (format, backing) in [("raw", &raw), ("qcow2", &base)] {
        let _ = fs::remove_file(&top);
        run("qemu-img", &["create", "-q", "-f", "qcow2", "-b", backing, "-F", format, &top])?;
        match Qcow2::open(open(&top, true)?, true, Named::default()) {
            Err(Error::Backing(name)) if name == *backing => {}
            other => return Err(format!("{:?}", other.map(drop)).into()),
        }
        let named = Named { backing: Some(open(backing, false)?), ..Named::default() };
        let (before, mut image) =
            (model.clone(), Image::Qcow2(Box::new(Qcow2::open(open(&top, true)?, true, named)?)));
        guest.compare(&image, &model)?;
        guest.exercise(&mut image, &mut model, &mut random, 60)?;
        drop(image);
        is_sound(&scratch, &top, &model)?;
        let unchanged = file(&scratch, "unchanged.raw");
        run("qemu-img", &["convert", "-O", "raw", backing, &unchanged])?;
        ensure(fs::read(&unchanged)? == before, || format!("the {format} backing file has changed"))?;
        model = before;
    }
    let (data, out) = (file(&scratch, "data"), file(&scratch, "out.qcow2"));
    run(
        "qemu-img",
        &["create", "-q", "-f", "qcow2", "-o", &format!("data_file={data}"), &out, &SIZE.to_string()],
    )?;
    let refused = Qcow2::open(open(&out, true)?, true, Named::default());
    ensure(matches!(refused, Err(Error::DataFile)), || "a data file was not asked for".into())?;
    let named = Named { data: Some(open(&data, true)?), ..Named::default() };
    let mut image = Image::Qcow2(Box::new(Qcow2::open(open(&out, true)?, true, named)?));
    let mut model = vec![0; SIZE];
    guest.exercise(&mut image, &mut model, &mut random, 60)?;
    drop(image);
    is_sound(&scratch, &out, &model)
}

#[test(tools::program("qemu-img"))]
fn what_cannot_be_read_is_refused_by_name() -> Result<(), Failed> {
    let scratch = Scratch::new()?;
    let (path, size) = (file(&scratch, "a.qcow2"), SIZE.to_string());
    let refused = |options: &str, due: &str| match Qcow2::open(open(&path, true)?, true, Named::default()) {
        Err(error) if error.to_string().contains(due) => Ok(()),
        other => Err(Failed::from(format!("{options}: {:?}", other.map(drop)))),
    };
    for (options, due) in [
        ("extended_l2=on,cluster_size=128k", "extended L2"),
        ("compression_type=zstd", "zstd"),
        ("compat=1.1", ""),
    ] {
        let _ = fs::remove_file(&path);
        run("qemu-img", &["create", "-q", "-f", "qcow2", "-o", options, &path, &size])?;
        if !due.is_empty() {
            refused(options, due)?;
        }
    }
    // Fields of the header: crypt_method, and the dirty and the corrupt bit of
    // incompatible_features.
    for (at, byte, due) in [(35, 2, "encrypted"), (79, 1, "not closed in order"), (79, 2, "corrupt")] {
        let mut was = [0];
        let file = open(&path, true)?;
        file.read_exact_at(&mut was, at)?;
        file.write_all_at(&[byte], at)?;
        refused(due, due)?;
        file.write_all_at(&was, at)?;
    }
    Ok(())
}

/// An image that was not copied to its end is refused, wherever it ends. QEMU reads the rest as
/// zeroes.
#[test(tools::program("qemu-img"))]
fn an_image_that_is_cut_off_is_refused() -> Result<(), Failed> {
    let (mut random, scratch) = (Random::new(), Scratch::new()?);
    let raw = file(&scratch, "a.raw");
    let bytes: Vec<u8> = (0..SIZE).map(|_| random.below(256) as u8).collect();
    fs::write(&raw, bytes)?;
    for (number, (options, more)) in KINDS.into_iter().enumerate() {
        let path = file(&scratch, &number.to_string());
        let line = [&["convert", "-f", "raw", "-O", "qcow2", "-o", options], more, &[&raw, &path]].concat();
        run("qemu-img", &line)?;
        let image = open(&path, true)?;
        let mut clusters = [0; 4];
        image.read_exact_at(&mut clusters, 20)?;
        let mut length = image.metadata()?.len();
        // The last cluster may be partial, and clusters behind it may count the others.
        length -= 8 << u32::from_be_bytes(clusters).min(18);
        while length > 104 {
            image.set_len(length)?;
            let refused = Qcow2::open(open(&path, false)?, false, Named::default()).map(drop);
            let is_due = matches!(refused, Err(Error::CutOff { .. } | Error::Header { .. }));
            ensure(is_due, || format!("{options} {more:?}, {length} bytes: {refused:?}"))?;
            length = random.below(length);
        }
        fs::remove_file(&path)?;
    }
    Ok(())
}

/// An image that another machine uses is refused before any byte of it changes. imago clears the
/// autoclear features of an image when it opens it for writing.
#[test(tools::program("qemu-img"))]
fn an_image_that_another_machine_has_is_left_alone() -> Result<(), Failed> {
    let scratch = Scratch::new()?;
    let path = file(&scratch, "a.qcow2");
    run("qemu-img", &["create", "-q", "-f", "qcow2", &path, "1M"])?;
    let config = BlkConfig::new(&path);
    let first = Blk::open(&config)?;
    open(&path, true)?.write_all_at(&[0x80], 88)?;
    let before = fs::read(&path)?;
    for config in [config.clone(), BlkConfig { readonly: true, ..config.clone() }] {
        let refused = Blk::open(&config).map(drop);
        ensure(matches!(refused, Err(BlkError::Locked { .. })), || format!("{refused:?}"))?;
    }
    ensure(fs::read(&path)? == before, || "the image has changed".into())?;
    drop(first);
    // A program that another test starts has the lock, too, until it is executed.
    eventually(LIMIT, "the image is free", || match Blk::open(&config) {
        Err(BlkError::Locked { .. }) => Ok(None),
        opened => Ok(Some(opened.map(drop)?)),
    })
}

/// An overlay on a qcow2 image holds what the guest writes. The image does not change.
#[test(tools::program("qemu-img"))]
fn an_overlay_leaves_its_image_alone() -> Result<(), Failed> {
    let (mut random, guest, scratch) = (Random::new(), Guest::new()?, Scratch::new()?);
    let (raw, path) = (file(&scratch, "a.raw"), file(&scratch, "a.qcow2"));
    let mut model = contents(&mut random);
    fs::write(&raw, &model)?;
    run("qemu-img", &["convert", "-O", "qcow2", "-c", &raw, &path])?;
    let before = fs::read(&path)?;
    let file = open(&path, false)?;
    let base = Base::Qcow2(Box::new(Qcow2::open(file.try_clone()?, false, Named::default())?), file);
    let mut image = Image::Over(Box::new(Overlay::new(base, SIZE as u64, None, unnamed()?, false)?));
    guest.exercise(&mut image, &mut model, &mut random, 200)?;
    guest.compare(&image, &model)?;
    drop(image);
    ensure(fs::read(&path)? == before, || "the image has changed".into())
}

/// Damaged tables may cause an error or wrong contents. They must not cause a panic, an endless
/// loop, or the use of more memory than the image has.
#[test(tools::program("qemu-img"))]
fn damaged_images_end_in_errors() -> Result<(), Failed> {
    let (mut random, guest, scratch) = (Random::new(), Guest::new()?, Scratch::new()?);
    let (raw, path) = (file(&scratch, "a.raw"), file(&scratch, "a.qcow2"));
    let model = contents(&mut random);
    fs::write(&raw, &model)?;
    run("qemu-img", &["convert", "-O", "qcow2", "-o", "cluster_size=4k", &raw, &path])?;
    let sound = fs::read(&path)?;
    let damaged = Path::new(&path).with_extension("damaged");
    for _ in 0..200 {
        fs::write(&damaged, &sound)?;
        let file = open(&damaged.display().to_string(), true)?;
        match random.below(4) {
            // Damages the header, the tables behind it, or any byte, or cuts off the end.
            0 => file.write_all_at(&random.below(u64::MAX).to_be_bytes(), random.below(104))?,
            1 => file.write_all_at(
                &random.below(u64::MAX).to_be_bytes(),
                random.below(16) * 4096 + random.below(512) * 8,
            )?,
            2 => file.write_all_at(
                &((random.below(64) * 4096) | (1 << 63)).to_be_bytes(),
                random.below(64) * 4096 + random.below(512) * 8,
            )?,
            _ => file.set_len(random.below(sound.len() as u64))?,
        }
        let Ok(image) = Qcow2::open(file, true, Named::default()) else { continue };
        let mut image = Image::Qcow2(Box::new(image));
        for _ in 0..20 {
            let at = random.below(SIZE as u64 / 512) * 512;
            let len = 4096.min(SIZE - at as usize);
            let _ = guest.read(&image, at, len);
            let _ = guest.write(&mut image, at, &vec![7; len]);
        }
        let _ = image.flush();
    }
    Ok(())
}

fn word(file: &File, at: u64) -> Result<u64, Failed> {
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, at)?;
    Ok(u64::from_be_bytes(bytes))
}

/// The guest and the snapshots of an image that is opened for writing keep their data, whatever its
/// refcounts and flags were. Otherwise the image is refused, and no byte of it changes.
#[test(tools::program("qemu-img"))]
fn an_image_with_wrong_refcounts_is_refused_or_loses_nothing() -> Result<(), Failed> {
    const CLUSTER: u64 = 4096;
    let (mut random, guest, scratch) = (Random::new(), Guest::new()?, Scratch::new()?);
    let (raw, path, then) = (file(&scratch, "a.raw"), file(&scratch, "a.qcow2"), file(&scratch, "then.raw"));
    let (mut raised, mut refused) = (0, 0);
    for kind in [&["-c"][..], &[]] {
        fs::write(&raw, contents(&mut random))?;
        let line = [&["convert", "-O", "qcow2", "-o", "cluster_size=4k"], kind, &[&raw, &path]].concat();
        run("qemu-img", &line)?;
        run("qemu-img", &["snapshot", "-c", "then", &path])?;
        // Some clusters are only in the snapshot, some only in the disk, and some in both.
        let mut image = writable(&path)?;
        for _ in 0..40 {
            let at = random.below(SIZE as u64 / CLUSTER) * CLUSTER;
            guest.write(&mut image, at, &vec![random.below(256) as u8; CLUSTER as usize])?;
        }
        drop(image);
        let sound = fs::read(&path)?;
        let original = open(&path, false)?;
        let (l1, counts) = (word(&original, 40)?, word(&original, 48)?);
        let block = word(&original, counts)?;
        drop(original);
        for _ in 0..15 {
            fs::write(&path, &sound)?;
            let image = open(&path, true)?;
            let l2 = word(&image, l1 + random.below(4) * 8)? & !(1 << 63);
            let entry = l2 + random.below(CLUSTER / 8) * 8;
            let what = random.below(5);
            match what {
                // A refcount that is wrong by one, or 0, of any cluster or of one of the first.
                0 | 1 => {
                    let most = if what == 0 { 40 } else { CLUSTER / 2 };
                    let (at, mut bytes) = (block + random.below(most) * 2, [0; 2]);
                    image.read_exact_at(&mut bytes, at)?;
                    let count = u16::from_be_bytes(bytes);
                    let wrong = match random.below(3) {
                        0 => 0,
                        1 => count.saturating_sub(1),
                        _ => count + 1,
                    };
                    image.write_all_at(&wrong.to_be_bytes(), at)?;
                }
                // A cluster that is written in place, or no longer is.
                2 => image.write_all_at(&(word(&image, entry)? ^ (1 << 63)).to_be_bytes(), entry)?,
                3 => {
                    let entry = l1 + random.below(4) * 8;
                    image.write_all_at(&(word(&image, entry)? ^ (1 << 63)).to_be_bytes(), entry)?;
                }
                // Two entries for one cluster.
                _ => {
                    let other = word(&image, l2 + random.below(CLUSTER / 8) * 8)?;
                    image.write_all_at(&other.to_be_bytes(), entry)?;
                }
            }
            drop(image);
            let damaged = fs::read(&path)?;
            let read = || -> Result<_, Failed> {
                let image = Qcow2::open(open(&path, false)?, false, Named::default())?;
                let mut disk = vec![0; SIZE];
                image.read_exact_at(&mut disk, 0)?;
                run("qemu-img", &["convert", "-l", "then", "-O", "raw", &path, &then])?;
                Ok((disk, fs::read(&then)?))
            };
            // Two halves of a compressed cluster are none.
            let Ok((mut model, snapshot)) = read() else { continue };
            let mut image = match Qcow2::open(open(&path, true)?, true, Named::default()) {
                Err(_) => {
                    ensure(fs::read(&path)? == damaged, || "a refused image has changed".into())?;
                    refused += 1;
                    continue;
                }
                Ok(image) => {
                    raised += image.raised();
                    Image::Qcow2(Box::new(image))
                }
            };
            let in_case =
                |error: Failed| Failed::from(format!("{what}, {kind:?}: {}", error.message().unwrap_or("")));
            guest.exercise(&mut image, &mut model, &mut random, 20).map_err(in_case)?;
            guest.compare(&image, &model).map_err(in_case)?;
            drop(image);
            let (disk, after) = read().map_err(in_case)?;
            ensure(disk == model && after == snapshot, || format!("{what}, {kind:?}: data was overwritten"))?;
        }
    }
    ensure(raised > 0 && refused > 0, || format!("{raised} refcounts raised, {refused} images refused"))
}

/// What is wrong with the refcounts of an image is said with the remedy. Its first allocation would
/// take hours, or overwrite its header.
#[test(tools::program("qemu-img"))]
fn refcounts_that_a_writer_cannot_trust_are_named() -> Result<(), Failed> {
    let scratch = Scratch::new()?;
    let path = file(&scratch, "a.qcow2");
    let make = |options| -> Result<(File, u64, u64), Failed> {
        let _ = fs::remove_file(&path);
        run("qemu-img", &["create", "-q", "-f", "qcow2", "-o", options, &path, "1G"])?;
        let image = open(&path, true)?;
        let table = word(&image, 48)?;
        let block = word(&image, table)?;
        Ok((image, table, block))
    };
    let is_refused = |due: &str| match Qcow2::open(open(&path, true)?, true, Named::default()) {
        Err(error) if error.to_string().contains(due) => {
            // A reader does not need them.
            Qcow2::open(open(&path, false)?, false, Named::default())?;
            Ok(())
        }
        other => Err(Failed::from(format!("{due}: {:?}", other.map(drop)))),
    };
    let (image, table, block) = make("cluster_size=64k")?;
    // A loss of power leaves refcounts that are too low.
    image.write_all_at(&[0; 2], block)?;
    let opened = Qcow2::open(open(&path, true)?, true, Named::default())?;
    ensure(opened.raised() == 1, || format!("{} were raised", opened.raised()))?;
    drop(opened);
    run("qemu-img", &["check", "-q", &path])?;
    image.write_all_at(&[0; 8], table)?;
    is_refused("byte 0 is used 1 times and counted 0 times; `qemu-img check --repair=all`")?;
    image.write_all_at(&table.to_be_bytes(), table)?;
    is_refused("also used as something else")?;
    // One block of many entries, and 9 MB that count 2^39 clusters.
    let (image, table, block) = make("cluster_size=64k,refcount_bits=1")?;
    image.write_all_at(&[0xff; 65536], block)?;
    is_refused("count too much that nothing uses; `qemu-img check --repair=leaks`")?;
    image.write_all_at(&block.to_be_bytes().repeat(8192), table)?;
    is_refused("also used as something else")?;
    let (image, table, _) = make("cluster_size=64k")?;
    image.set_len(8 << 20)?;
    image.write_all_at(&(4u64 << 20).to_be_bytes(), table + 8191 * 8)?;
    Qcow2::open(open(&path, true)?, true, Named::default())?;
    image.write_all_at(&(5u64 << 20 | 512).to_be_bytes(), table + 8191 * 8)?;
    is_refused("not where a cluster begins")
}

/// Tables that lead to themselves or to each other, clusters that several entries have, and wrong
/// refcounts. The disk is refused, or read as QEMU reads it. Writes end, whatever they do to the
/// image.
#[test(tools::program("qemu-img"))]
fn loops_and_wrong_refcounts_are_refused_or_read_as_qemu_reads_them() -> Result<(), Failed> {
    const CLUSTER: u64 = 4096;
    const COPIED: u64 = 1 << 63;
    const COMPRESSED: u64 = 1 << 62;
    let (mut random, guest, scratch) = (Random::new(), Guest::new()?, Scratch::new()?);
    let (raw, path, due) = (file(&scratch, "a.raw"), file(&scratch, "a.qcow2"), file(&scratch, "due.raw"));
    let model: Vec<u8> = (0..SIZE).map(|_| random.below(256) as u8).collect();
    fs::write(&raw, model)?;
    run("qemu-img", &["convert", "-O", "qcow2", "-o", "cluster_size=4k", &raw, &path])?;
    let sound = fs::read(&path)?;
    let image = open(&path, false)?;
    let (l1, counts) = (word(&image, 40)?, word(&image, 48)?);
    let (l2, count) = (word(&image, l1)? & !COPIED, word(&image, counts)?);
    let other = word(&image, l1 + 8)?;
    let data = word(&image, l2)?;
    drop(image);
    let everywhere = |entry: u64| entry.to_be_bytes().repeat(CLUSTER as usize / 8);
    let cases: [(&str, u64, Vec<u8>); 16] = [
        ("an L1 entry leads to the L1 table", l1, (l1 | COPIED).to_be_bytes().into()),
        ("an L1 entry leads to the refcount table", l1, (counts | COPIED).to_be_bytes().into()),
        ("an L1 entry leads to a cluster of data", l1, data.to_be_bytes().into()),
        ("two L1 entries lead to one L2 table", l1, other.to_be_bytes().into()),
        ("an L1 entry leads into a cluster", l1, (l2 + 512).to_be_bytes().into()),
        ("an L2 entry leads to its own table", l2, (l2 | COPIED).to_be_bytes().into()),
        ("all L2 entries lead to the L1 table", l2, everywhere(l1 | COPIED)),
        ("all L2 entries lead to one cluster", l2, everywhere(data)),
        ("all L2 entries lead to the refcounts", l2, everywhere(count | COPIED)),
        ("an L2 entry leads into a cluster", l2, (data + 512).to_be_bytes().into()),
        ("compressed clusters are the L2 table", l2, everywhere(l2 | COMPRESSED)),
        ("compressed clusters are the header", l2, everywhere(COMPRESSED | 0xff << 54)),
        ("all refcounts are 0", count, vec![0; CLUSTER as usize]),
        ("all refcounts are the largest", count, vec![0xff; CLUSTER as usize]),
        ("the refcounts are in their own table", counts, counts.to_be_bytes().into()),
        ("the refcounts are in the L2 table", counts, l2.to_be_bytes().into()),
    ];
    let mut read_right = 0;
    for (what, at, bytes) in cases {
        fs::write(&path, &sound)?;
        open(&path, true)?.write_all_at(&bytes, at)?;
        let in_case = |error: Failed| Failed::from(format!("{what}: {}", error.message().unwrap_or("")));
        if let Ok(image) = Qcow2::open(open(&path, false)?, false, Named::default()) {
            let reads = Command::new("qemu-img").args(["convert", "-O", "raw", &path, &due]).output()?;
            let image = Image::Qcow2(Box::new(image));
            // QEMU may refuse what is in doubt.
            if reads.status.success() && guest.read(&image, 0, MAX_REQUEST).is_ok() {
                guest.compare(&image, &fs::read(&due)?).map_err(in_case)?;
                read_right += 1;
            }
        }
        let Ok(image) = Qcow2::open(open(&path, true)?, true, Named::default()) else { continue };
        let mut image = Image::Qcow2(Box::new(image));
        for _ in 0..50 {
            let at = random.below(SIZE as u64 / 512) * 512;
            let len = 8192.min(SIZE - at as usize);
            let _ = guest.write(&mut image, at, &vec![7; len]);
            let _ = guest.read(&image, at, len);
        }
        let _ = image.flush();
    }
    // Those with wrong refcounts alone.
    ensure(read_right >= 4, || format!("{read_right} were read"))
}
