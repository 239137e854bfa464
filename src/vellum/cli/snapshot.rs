//! `vellum snapshot`: the client of a snapshot. It creates the files and hands them to the machine,
//! which opens no path itself. When they are written, the client names them. If the client is
//! killed, the snapshot ends with its connection: no file is left, and the guest goes on.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Subcommand};
use serde_json::json;

use super::args;
use super::client::{check, failure, heard, listen, loses, may_leave, status};
use super::failure::Failure;
use super::output::{print, say};
use vellum_control::client::{Client, Error};
use vellum_control::{Do, Event, Loses, Snapshot, Status, names};
use vellum_kvm::memory::short_size;
use vellum_kvm::vm::lifecycle::Exit;
use vellum_migration::snapshot::layer::{self, Reader};
use vellum_migration::snapshot::manifest::{self, Point};
use vellum_migration::snapshot::merge::merge;
use vellum_migration::snapshot::source::Source;
use vellum_migration::snapshot::store::Store;
use vellum_sys::keyvalue;
use vellum_sys::mmap::PAGE_SIZE;
use vellum_sys::signal;

/// Write a running machine's memory and state into a directory: `vellum restore` runs it again
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES, args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct SnapshotArgs {
    #[command(subcommand)]
    what: Option<SnapshotCommand>,

    /// The machine: its name (--name), or the path of its control socket
    #[arg(required = true)]
    machine: Option<String>,

    /// The directory: a new one, or one with a snapshot, which gets another point
    #[arg(value_name = "DIR", required = true)]
    dir: Option<PathBuf>,

    /// The longest downtime
    #[arg(long, value_name = "TIME", value_parser = keyvalue::duration, default_value = "300ms")]
    downtime: Duration,

    /// Pause the guest for longer after this time, if it writes faster than passes over its memory
    /// finish
    #[arg(long, value_name = "TIME", value_parser = keyvalue::duration, default_value = "30s")]
    timeout: Duration,

    /// How dirty pages are collected while the guest runs: bitmap, manual-protect, initially-set or
    /// ring [default: as `vellum migrate`]
    #[arg(long, value_name = "NAME", value_parser = args::TRACKER, hide_possible_values = true)]
    tracker: Option<args::Tracker>,

    /// Pause the guest first, and leave it paused
    #[arg(long)]
    paused: bool,

    /// End the machine after the snapshot; the guest does not run again here
    #[arg(long)]
    stop: bool,

    /// Keep dirty tracking on, so that the next snapshot into DIR has only the changes. Each page
    /// that the guest writes then costs it a fault
    #[arg(long)]
    follow: bool,

    /// Clone the machine's disks into DIR during the pause, as disk0-N of point N and so on. DIR
    /// must be on the disks' file system, and its files must be able to share blocks, as on Btrfs
    /// and XFS
    #[arg(long)]
    reflink: bool,

    /// Print the machine's events as JSON lines
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum SnapshotCommand {
    /// Print the points of a snapshot
    List {
        /// The directory
        dir: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Stop dirty tracking; the next snapshot of the machine is full
    End {
        /// The machine: its name (--name), or the path of its control socket
        machine: String,
    },
    /// Merge a point and those that it continues into one full point of the same number; the others
    /// are removed
    Merge {
        /// The directory
        dir: PathBuf,
        /// The last point to merge [default: the newest]
        #[arg(long, value_name = "N")]
        to: Option<u32>,
    },
    /// Read all of a snapshot, and compare it with its checksums
    Verify {
        /// The directory
        dir: PathBuf,
    },
}

const EXAMPLES: &str = "\
Examples:
  vellum snapshot web web.snap             while it runs: passes over memory, then a short pause
  vellum snapshot web web.snap --stop      and end it there: vellum restore web.snap goes on
  vellum snapshot web web.snap --follow    and then again: the further points have only what has changed
  vellum snapshot list web.snap            its points
  vellum snapshot merge web.snap           one full point of those that the newest needs
Disks are flushed and named in it, and no part of it: one that has changed since is refused by vellum restore.
  vellum snapshot web web.snap --reflink   with clones of its disks: vellum restore web.snap --disk web.snap/disk0-0";

/// Runs `vellum snapshot`.
pub fn run(args: &SnapshotArgs) -> Result<Exit, Failure> {
    match (&args.what, &args.machine, &args.dir) {
        (Some(SnapshotCommand::List { dir, json }), ..) => list(dir, *json),
        (Some(SnapshotCommand::Merge { dir, to }), ..) => join(dir, *to),
        (Some(SnapshotCommand::Verify { dir }), ..) => verify(dir),
        (Some(SnapshotCommand::End { machine }), ..) => {
            let path = names::find(machine).map_err(failure)?;
            let mut machine = Client::connect(&path).map_err(failure)?;
            machine.ask(&Do::SnapshotEnd {}).map(|_| Exit::PowerOff).map_err(failure)
        }
        (None, Some(machine), Some(dir)) => take(args, machine, dir),
        (None, ..) => Err(Failure::usage("a machine and a directory are expected")),
    }
}

fn take(args: &SnapshotArgs, name: &str, dir: &Path) -> Result<Exit, Failure> {
    let path = names::find(name).map_err(failure)?;
    signal::remember(&signal::ENDING).map_err(Failure::host)?;
    let mut machine = listen(&path)?;
    let has = status(&mut machine)?;
    may_leave(&has)?;
    if let Some(tracker) = args.tracker {
        check(tracker.method, &has)?;
    }
    let chooses = args.tracker.is_none() && has.dirty_ring.is_none();
    let store = Store::open(dir).map_err(failure)?;
    store.check_room().map_err(failure)?;
    let clones = if args.reflink { has.disks.len() } else { 0 };
    let files = store.unnamed(clones).map_err(failure)?;
    if args.paused {
        machine.ask(&Do::Pause {}).map_err(failure)?;
    }
    let asked = Do::Snapshot(Snapshot {
        downtime_ms: args.downtime.as_millis() as u64,
        timeout_ms: args.timeout.as_millis() as u64,
        tracker: args.tracker.map(|tracker| tracker.method.name().to_owned()),
        loses: if chooses { loses() } else { Loses::Nothing },
        stop: args.stop,
        chain: store.chain().to_owned(),
        number: store.next(),
        after: store.newest(),
        follow: args.follow && !args.stop,
        clones: clones as u32,
    });
    let descriptors = [&files.ram, &files.map, &files.state].into_iter().chain(&files.clones);
    let descriptors: Vec<_> = descriptors.map(AsFd::as_fd).collect();
    machine.ask_with(&asked, &descriptors).map_err(failure)?;
    let of = machine.last_id();
    if let Some(left) = has.limit_ms {
        let left = Duration::from_millis(left).as_secs();
        say(&format!(
            "{name} is to end in {left} s, by --duration or --timeout; that limit is not in the snapshot: a machine that vellum restore \
             makes of it runs until somebody stops it"
        ));
    }
    let (point, us) = written(args, name, &mut machine, &has)?;
    let (present, zero) = (point.present, point.zero);
    let kind = kind(&point, store.newest());
    let number = match store.add(&files, point) {
        Ok(number) => number,
        Err(error) => {
            // The machine reports by itself how it goes on.
            let _ = machine.ask(&Do::SnapshotCancel { of: has.numbered.then_some(of) });
            return Err(failure(error));
        }
    };
    machine.ask(&Do::SnapshotNamed {}).map_err(failure)?;
    over(&mut machine, of);
    if !args.json {
        let stood = match us {
            Some(us) => format!("it stood still for {:.1} ms", us as f64 / 1000.0),
            None => "it stands still".into(),
        };
        let size = short_size(present * PAGE_SIZE);
        let dir = dir.display();
        print(format_args!(
            "point {number} of {dir}, {kind}: {present} pages ({size}), {zero} zero; {stood}\n"
        ))?;
    }
    Ok(Exit::PowerOff)
}

/// The kind of `point` in words, and the cost of tracking to the guest. `before` is the time of the
/// previous point.
fn kind(point: &Point, before: Option<u64>) -> String {
    match before {
        None => "whole".into(),
        Some(_) if point.full => {
            "whole, because no changes were followed since the point before: --follow".into()
        }
        Some(before) => {
            let seconds = point.taken.saturating_sub(before) as f64 / 1e9;
            let faults = point.present + point.zero;
            format!(
                "what has changed in {seconds:.1} s, for {faults} or more faults of the guest's on pages that it wrote to"
            )
        }
    }
}

/// Waits until the snapshot is written. Returns its entry for the list, and the downtime.
fn written(
    args: &SnapshotArgs,
    name: &str,
    machine: &mut Client,
    has: &Status,
) -> Result<(Point, Option<u64>), Failure> {
    let of = machine.last_id();
    loop {
        if signal::take().is_some() {
            let _ = machine.ask(&Do::SnapshotCancel { of: has.numbered.then_some(of) });
        }
        let Some(line) = heard(machine, Some(of), "the snapshot was written")? else { continue };
        if args.json {
            print(format_args!("{line}\n"))?;
        }
        match serde_json::from_value::<Event>(line) {
            Ok(Event::Snapshot { us, full, written, .. }) => return Ok((Point::of(0, full, written), us)),
            Ok(Event::NoSnapshot { why }) => {
                return Err(Failure::host(format!("no snapshot of {name}: {why}")));
            }
            _ => {}
        }
    }
}

/// Waits until the machine can take another snapshot, or has ended.
fn over(machine: &mut Client, of: u64) {
    loop {
        match machine.event_of(Some(of)) {
            Ok(line) if line["event"] == "snapshot-over" || line["event"] == "no-snapshot" => return,
            Ok(_) | Err(Error::Silent { .. }) => {}
            Err(_) => return,
        }
    }
}

/// A time in nanoseconds since 1970 as a UTC date, if it is in the range of dates.
fn date(nanoseconds: i128) -> String {
    let date = i64::try_from(nanoseconds / 1_000_000).ok().and_then(chrono::DateTime::from_timestamp_millis);
    date.map_or("at no date".into(), |date| date.format("%Y-%m-%d %H:%M:%S.%3fZ").to_string())
}

fn list(dir: &Path, as_json: bool) -> Result<Exit, Failure> {
    let manifest = Source::open(dir).and_then(|source| source.manifest()).map_err(failure)?;
    if as_json {
        return print(format_args!("{}\n", json!(manifest))).map(|_| Exit::PowerOff);
    }
    print("point  kind  taken                     memory  present  zero pages\n")?;
    for point in &manifest.points {
        let kind = if point.full { "full" } else { "part" };
        let (all, present) = (short_size(point.pages * PAGE_SIZE), short_size(point.present * PAGE_SIZE));
        let taken = date(point.taken.into());
        let line =
            format!("{:>5}  {kind}  {taken:<24}  {all:>6}  {present:>7}  {:>10}\n", point.number, point.zero);
        print(line)?;
        for disk in &point.disks {
            // Names in the list are not trusted. A terminal would obey control characters.
            let (name, path) = (disk.name.escape_debug(), disk.path.escape_debug());
            let cloned = if disk.clone_changed.is_some() { ", cloned" } else { "" };
            let changed = disk
                .changed
                .map_or("at a time that it does not tell".into(), |at| format!("at {}", date(at.into())));
            let size = short_size(disk.bytes);
            print(format_args!("       {name}  {path}  {size}, last written to {changed}{cloned}\n"))?;
        }
    }
    Ok(Exit::PowerOff)
}

fn join(dir: &Path, to: Option<u32>) -> Result<Exit, Failure> {
    let (first, point) = merge(dir, to).map_err(failure)?;
    let (size, number) = (short_size(point.present * PAGE_SIZE), point.number);
    let (present, zero) = (point.present, point.zero);
    print(format_args!(
        "points {first} to {number} are point {number} now: {present} pages ({size}), {zero} zero\n"
    ))?;
    Ok(Exit::PowerOff)
}

fn verify(dir: &Path) -> Result<Exit, Failure> {
    let manifest = Source::open(dir).and_then(|source| source.manifest()).map_err(failure)?;
    for point in &manifest.points {
        let chosen =
            Source::open(dir).and_then(|source| source.choose(Some(point.number))).map_err(failure)?;
        let Some((point, files)) = chosen.layers.into_iter().next_back() else { continue };
        layer::check_room(manifest::NAME, point.pages).map_err(failure)?;
        let reader = Reader::new(files.ram, &files.map, &point.label(), point.pages, point.map_crc);
        let present = reader.and_then(|reader| reader.verify()).map_err(failure)?;
        print(format_args!("point {}: {present} pages are as they were written\n", point.number))?;
    }
    Ok(Exit::PowerOff)
}
