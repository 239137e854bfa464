//! What Vellum takes for granted of the kernel: memory that is handed over has the contents of the
//! last moment, and nothing else of a session changes on the way.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use support::kexec::{self, KEPT};
use support::{Failed, Random, ensure, test};
use vellum_sys::liveupdate::{Orchestrator, Session};

const PAGE: u64 = 4096;
const SESSION: &str = "handover";
const SEALS: SealFlags = SealFlags::GROW.union(SealFlags::SHRINK).union(SealFlags::SEAL);

/// Two files in memory, one with holes, are preserved. They are written to until the kexec.
#[test(kexec::host())]
fn memory_has_the_contents_of_the_last_moment_before_the_kexec() -> Result<(), Failed> {
    const PAGES: [u64; 2] = [16 << 10, 333];
    match kexec::past() {
        0 => {
            let seed = keep_seed()?;
            let session = Orchestrator::open()?.create(SESSION)?;
            let files = [memfd(PAGES[0])?, memfd(PAGES[1])?];
            files[0].write_all_at(&page(seed, 0, 7), 7 * PAGE)?;
            for (token, file) in (1..).zip(&files) {
                session.preserve(file, token)?;
            }
            for (which, file) in files.iter().enumerate() {
                fill(file, seed, which, PAGES[which])?;
            }
            Err(kexec::go_on())
        }
        _ => {
            let (seed, session) = (kept_seed()?, Orchestrator::open()?.retrieve(SESSION)?);
            for (which, pages) in PAGES.into_iter().enumerate() {
                let file = session.retrieved(1 + which as u64)?;
                check(&file, seed, which, pages)?;
                let seals = rustix::fs::fcntl_get_seals(&file)?;
                ensure(seals == SEALS, || format!("the seals are {seals:?}"))?;
            }
            Ok(session.finish()?)
        }
    }
}

/// The same memory goes through ten kexecs, between kernels of two versions, and changes before
/// each.
#[test(kexec::host())]
fn memory_goes_from_kernel_to_kernel_and_back_ten_times() -> Result<(), Failed> {
    const PAGES: u64 = 4 << 10;
    let past = kexec::past();
    let file = match past {
        0 => {
            keep_seed()?;
            memfd(PAGES)?
        }
        _ => {
            let session = Orchestrator::open()?.retrieve(SESSION)?;
            let file = session.retrieved(u64::from(past))?;
            check(&file, kept_seed()?, past as usize, PAGES)?;
            // What a session has retrieved is preserved until its end.
            let busy = Orchestrator::open()?.create("too early")?.preserve(&file, 1);
            refused("preserving before the end", busy, libc::EBUSY)?;
            session.finish()?;
            file
        }
    };
    if past == 10 {
        return Ok(());
    }
    let session = Orchestrator::open()?.create(SESSION)?;
    session.preserve(&file, u64::from(past) + 1)?;
    fill(&file, kept_seed()?, past as usize + 1, PAGES)?;
    Err(kexec::go_on())
}

/// What is refused, with which error. Vellum's own messages rely on these.
#[test(kexec::host())]
fn the_kernel_refuses_with_these_errors() -> Result<(), Failed> {
    let orchestrator = Orchestrator::open()?;
    refused("a second opener", Orchestrator::open(), libc::EBUSY)?;
    let session = orchestrator.create(SESSION)?;
    refused("a name twice", orchestrator.create(SESSION), libc::EEXIST)?;
    refused("a session of no kernel before", orchestrator.retrieve("none"), libc::ENOENT)?;
    let file = memfd(3)?;
    session.preserve(&file, 1)?;
    refused("a token twice", session.preserve(&memfd(1)?, 1), libc::EEXIST)?;
    refused("a file twice", session.preserve(&file, 2), libc::EBUSY)?;
    let other = orchestrator.create("other")?;
    refused("a file in two sessions", other.preserve(&file, 1), libc::EBUSY)?;
    refused(
        "an event's file",
        session.preserve(&rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)?, 3),
        libc::ENOENT,
    )?;
    let huge = rustix::fs::memfd_create("huge", MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB)?;
    refused("huge pages", session.preserve(&huge, 3), libc::ENOENT)?;
    refused("an end before the kexec", session.finish(), libc::EINVAL)?;
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let punch = || rustix::fs::fallocate(&file, hole, 0, PAGE).map_err(io::Error::from);
    refused("a hole in a preserved file", punch(), libc::EPERM)?;
    drop(session);
    punch()?;
    Ok(other.preserve(&file, 1)?)
}

/// A session that is closed, and one that nobody asks for in the next kernel, leave nothing. Another
/// one beside them arrives each time.
#[test(kexec::host())]
fn only_open_sessions_are_handed_over() -> Result<(), Failed> {
    match kexec::past() {
        0 => {
            let orchestrator = Orchestrator::open()?;
            let file = memfd(100)?;
            orchestrator.create("closed")?.preserve(&file, 1)?;
            let left: Session = orchestrator.create("left")?;
            left.preserve(&file, 1)?;
            let (other, arrives) = (memfd(100)?, orchestrator.create(SESSION)?);
            arrives.preserve(&other, 1)?;
            Err(kexec::go_on())
        }
        1 => {
            let orchestrator = Orchestrator::open()?;
            refused("a closed session", orchestrator.retrieve("closed"), libc::ENOENT)?;
            let arrived = orchestrator.retrieve(SESSION)?;
            let file = arrived.retrieved(1)?;
            arrived.finish()?;
            let arrives = orchestrator.create(SESSION)?;
            arrives.preserve(&file, 1)?;
            Err(kexec::go_on())
        }
        _ => {
            let orchestrator = Orchestrator::open()?;
            refused("a session of two kernels before", orchestrator.retrieve("left"), libc::ENOENT)?;
            let arrived = orchestrator.retrieve(SESSION)?;
            arrived.retrieved(1)?;
            Ok(arrived.finish()?)
        }
    }
}

/// A sealed file of `pages` holes, as a machine's memory.
fn memfd(pages: u64) -> io::Result<File> {
    let file: File =
        rustix::fs::memfd_create("handover", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?.into();
    file.set_len(pages * PAGE)?;
    rustix::fs::fcntl_add_seals(file.as_fd(), SEALS)?;
    Ok(file)
}

/// The contents of page `number` of file `which`.
fn page(seed: u64, which: usize, number: u64) -> Vec<u8> {
    let mut random = Random::of(seed ^ (which as u64) << 32 ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    (0..PAGE / 8).flat_map(|_| random.below(u64::MAX).to_le_bytes()).collect()
}

/// One page of seven stays a hole.
fn is_hole(number: u64) -> bool {
    number % 7 == 3
}

fn fill(file: &File, seed: u64, which: usize, pages: u64) -> io::Result<()> {
    (0..pages)
        .filter(|&number| !is_hole(number))
        .try_for_each(|number| file.write_all_at(&page(seed, which, number), number * PAGE))
}

/// Compares every page.
fn check(file: &File, seed: u64, which: usize, pages: u64) -> Result<(), Failed> {
    let length = file.metadata()?.len();
    ensure(length == pages * PAGE, || format!("file {which} has {length} bytes"))?;
    let mut wrong = Vec::new();
    for number in 0..pages {
        let mut found = vec![0; PAGE as usize];
        file.read_exact_at(&mut found, number * PAGE)?;
        let wanted = if is_hole(number) { vec![0; PAGE as usize] } else { page(seed, which, number) };
        wrong.extend((found != wanted).then_some(number));
    }
    ensure(wrong.is_empty(), || {
        format!("{} of {pages} pages of file {which} are wrong: {wrong:?}", wrong.len())
    })
}

fn seed_file() -> PathBuf {
    Path::new(KEPT).join("seed")
}

/// Chooses a seed, and leaves it to the next kernels.
fn keep_seed() -> io::Result<u64> {
    let seed = Random::new().below(u64::MAX);
    fs::write(seed_file(), seed.to_string())?;
    Ok(seed)
}

fn kept_seed() -> Result<u64, Failed> {
    Ok(fs::read_to_string(seed_file())?.parse()?)
}

fn refused<T>(what: &str, result: io::Result<T>, error: i32) -> Result<(), Failed> {
    let got = result.err().and_then(|error| error.raw_os_error());
    ensure(got == Some(error), || format!("{what}: {got:?}, not {error}"))
}
