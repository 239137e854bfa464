//! One file is used at random in every way, as fsx does. Its contents must match a model in memory,
//! however they are read.
//!
//! A known difference: with `cache=none` a file cannot be mapped shared and writable (mmap fails
//! with ENODEV). The kernel allows that only with FUSE_DIRECT_IO_ALLOW_MMAP, and then it caches the
//! mapped pages after all.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{FallocateFlags, copy_file_range, fallocate};
use support::share::mount::fuse;
use support::{Failed, Random, Scratch, ensure, test};
use vellum_share::Cache;

use crate::mounted::{Both, CACHES, writable};

const MAX_FILE: u64 = 512 << 10;
const STEPS: u32 = 600;

#[test(fuse())]
fn a_file_is_used_in_every_way_at_once() -> Result<(), Failed> {
    let mut random = Random::new();
    let plain = Scratch::new()?;
    exercise(&plain.path("file"), &plain.path("file"), true, &mut random)
        .map_err(|error| said("the host's", &error))?;
    for cache in CACHES {
        let both = Both::new(writable(cache))?;
        exercise(&both.path("file"), &both.here.path("file"), cache != Cache::None, &mut random)
            .map_err(|error| said(&format!("{cache:?}"), &error))?;
    }
    Ok(())
}

fn said(which: &str, error: &Failed) -> Failed {
    format!("{which}: {}", error.message().unwrap_or("?")).into()
}

/// `there` is the path of the file on the host. `maps` says whether the file can be mapped.
fn exercise(path: &Path, there: &Path, maps: bool, random: &mut Random) -> Result<(), Failed> {
    let open = || File::options().read(true).write(true).create(true).truncate(false).open(path);
    let (mut file, mut model, mut log) = (open()?, Vec::<u8>::new(), Vec::new());
    for step in 0..STEPS {
        let act = random.below(13);
        let at = random.below(MAX_FILE);
        let longest = [100, 5000, 70_000, MAX_FILE][random.below(4) as usize];
        let len = (1 + random.below(longest)).min(MAX_FILE - at);
        let range = at as usize..(at + len) as usize;
        log.push(format!("{step}: {act} {at:#x} {len:#x}"));
        let done = || -> Result<(), Failed> {
            let data: Vec<u8> = (0..len).map(|byte| (byte + u64::from(step) * 7) as u8 | 1).collect();
            match act {
                0 | 1 => {
                    file.write_all_at(&data, at)?;
                    put(&mut model, &data, at);
                }
                2 | 3 => {
                    let mut data = vec![0; len as usize];
                    let mut have = 0;
                    while have < data.len() {
                        match file.read_at(&mut data[have..], at + have as u64)? {
                            0 => break,
                            count => have += count,
                        }
                    }
                    ensure(
                        data[..have] == model[range.start.min(model.len())..range.end.min(model.len())],
                        || "another read".into(),
                    )?;
                }
                4 | 5 if !maps => {
                    let ended = mapped(&file, 0, 1, |_| ());
                    ensure(ended.is_err(), || {
                        "it can be mapped: the list of differences is too long".into()
                    })?;
                }
                4 => {
                    // A mapping is valid up to the end of the file. There are no pages beyond it.
                    let end = (at + len).min(model.len() as u64);
                    if at < end {
                        let data = &data[..(end - at) as usize];
                        mapped(&file, at, data.len(), |bytes| bytes.copy_from_slice(data))?;
                        put(&mut model, data, at);
                    }
                }
                5 => {
                    let end = (at + len).min(model.len() as u64);
                    if at < end {
                        let right = &model[at as usize..end as usize];
                        let same = mapped(&file, at, right.len(), |bytes| bytes == right)?;
                        ensure(same, || "another mapping".into())?;
                    }
                }
                6 => {
                    file.set_len(at)?;
                    model.resize(at as usize, 0);
                }
                7 => {
                    let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                    fallocate(&file, how, at, len)?;
                    let end = range.end.min(model.len());
                    model[range.start.min(end)..end].fill(0);
                }
                8 => {
                    fallocate(&file, FallocateFlags::ZERO_RANGE, at, len)?;
                    put(&mut model, &vec![0; len as usize], at);
                }
                9 => {
                    fallocate(&file, FallocateFlags::empty(), at, len)?;
                    model.resize(model.len().max(range.end), 0);
                }
                10 => {
                    // Copies to another range of the same file that does not overlap.
                    let to = random.below(MAX_FILE);
                    let len = len.min(at.abs_diff(to)).min(MAX_FILE - to);
                    let copied = copy_file_range(
                        &file,
                        Some(&mut at.clone()),
                        &file,
                        Some(&mut to.clone()),
                        len as usize,
                    )?;
                    let from = model.iter().skip(at as usize).take(copied).copied().collect::<Vec<u8>>();
                    ensure(from.len() == copied, || format!("{copied} bytes copied"))?;
                    put(&mut model, &from, to);
                }
                11 => {
                    file.sync_all()?;
                    ensure(fs::read(there)? == model, || "the host has something else".into())?;
                    // Drops the cached pages, so the next read comes from the server.
                    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
                }
                _ => file = open()?,
            }
            ensure(file.metadata()?.len() == model.len() as u64, || {
                format!("{} bytes, and not {}", file.metadata().map_or(0, |it| it.len()), model.len())
            })
        };
        let mut done = done;
        done().map_err(|error: Failed| {
            let last = log[log.len().saturating_sub(12)..].join("\n");
            Failed::from(format!("{}, after\n{last}", error.message().unwrap_or("?")))
        })?;
    }
    drop(file);
    ensure(fs::read(path)? == model, || "at the end".into())
}

fn put(model: &mut Vec<u8>, data: &[u8], at: u64) {
    if data.is_empty() {
        return;
    }
    let end = at as usize + data.len();
    model.resize(model.len().max(end), 0);
    model[at as usize..end].copy_from_slice(data);
}

/// Calls `work` with `len` bytes at `at` of `file`, in a shared mapping.
fn mapped<T>(file: &File, at: u64, len: usize, work: impl FnOnce(&mut [u8]) -> T) -> Result<T, Failed> {
    let skip = at as usize % 4096;
    let (access, from) = (libc::PROT_READ | libc::PROT_WRITE, (at as usize - skip) as i64);
    // SAFETY: the mapping is new, and nothing makes the file shorter while it exists.
    let start = unsafe {
        libc::mmap(std::ptr::null_mut(), skip + len, access, libc::MAP_SHARED, file.as_raw_fd(), from)
    };
    if start == libc::MAP_FAILED {
        return Err(format!("mmap: {}", io::Error::last_os_error()).into());
    }
    // SAFETY: the mapping has this length, and there is no other reference into it.
    let done = work(unsafe { std::slice::from_raw_parts_mut(start.cast::<u8>().add(skip), len) });
    // SAFETY: the same mapping. No reference to it is left.
    unsafe { libc::munmap(start, skip + len) };
    Ok(done)
}
