//! What a host does while its guest stands still. It is printed for the reader of a test's output.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use support::env::TestEnv;
use support::{Failed, LIMIT, Need, ensure, test};
use vellum_control::Do;
use vellum_control::client::Client;

/// The time without progress after which the host's state is printed. The guest says something each
/// second.
const QUIET: Duration = Duration::from_secs(120);

/// How long events are recorded.
const RECORDED: Duration = Duration::from_secs(1);

/// The number of events that are printed, and of the most frequent places.
const EVENTS: usize = 200;
const PLACES: usize = 40;

const TRACING: &str = "/sys/kernel/tracing";

/// Watches a guest until it is dropped.
pub struct Watch {
    _alive: Arc<()>,
}

impl Watch {
    /// Calls `progress` each second. If its value stays the same for [`QUIET`], the state of the host
    /// and of the machine behind `socket` is printed, once. If it stays for [`LIMIT`], the program
    /// ends, as it does when a test hangs.
    pub fn start(socket: PathBuf, progress: impl Fn() -> usize + Send + 'static) -> Self {
        let alive = Arc::new(());
        let watched = Arc::downgrade(&alive);
        thread::spawn(move || watch(&watched, &socket, progress));
        Self { _alive: alive }
    }
}

fn watch(watched: &Weak<()>, socket: &Path, progress: impl Fn() -> usize) {
    let (mut last, mut since, mut is_told) = (progress(), Instant::now(), false);
    while watched.upgrade().is_some() {
        thread::sleep(Duration::from_secs(1));
        let now = progress();
        if now != last {
            (last, since) = (now, Instant::now());
        }
        if since.elapsed() >= QUIET && !is_told {
            is_told = true;
            eprintln!("\nthe guest has said nothing for {QUIET:?}:\n{}", state(socket));
        }
        if since.elapsed() >= LIMIT {
            eprintln!("the guest hangs: it has said nothing for {LIMIT:?}");
            process::exit(101);
        }
    }
}

/// The state of the machine, of all threads of Vellum, and of KVM.
fn state(socket: &Path) -> String {
    let threads = threads().unwrap_or_else(|error| error.to_string());
    let events = events().unwrap_or_else(|error| format!("{TRACING}: {error}"));
    format!("{}\n{threads}\n{events}", status(socket))
}

/// What the machine says of itself.
fn status(socket: &Path) -> String {
    let asked = Client::connect(socket).and_then(|mut client| client.ask(&Do::Status {}));
    asked.map_or_else(|error| format!("no status: {error}"), |status| status.to_string())
}

/// The threads of all processes of Vellum: their times on a CPU, and where they sleep.
fn threads() -> io::Result<String> {
    let mut said = String::new();
    for process in fs::read_dir("/proc")?.flatten() {
        let name = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
        let tasks = fs::read_dir(process.path().join("task"));
        for task in tasks.into_iter().flatten().flatten().filter(|_| name.starts_with("vellum")) {
            let read = |file| fs::read_to_string(task.path().join(file)).unwrap_or_default();
            let status = read("status");
            let status = status.lines().find(|line| line.starts_with("State:")).unwrap_or_default();
            said += &format!(
                "{} {} of {}: {status}, in {}, times on a CPU and in its queue: {}\n{}",
                task.file_name().display(),
                read("comm").trim_end(),
                process.file_name().display(),
                read("wchan"),
                read("schedstat").trim_end(),
                read("stack")
            );
        }
    }
    Ok(said)
}

/// The events of KVM and of its timers in a second: the most frequent ones, and the last.
fn events() -> io::Result<String> {
    let enable = |on| {
        ["kvm", "timer/hrtimer_start", "timer/hrtimer_expire_entry"]
            .iter()
            .try_for_each(|event| fs::write(format!("{TRACING}/events/{event}/enable"), on))
    };
    fs::write(format!("{TRACING}/trace"), "")?;
    enable("1")?;
    thread::sleep(RECORDED);
    enable("0")?;
    let trace = fs::read_to_string(format!("{TRACING}/trace"))?;
    let lines: Vec<&str> = trace.lines().filter(|line| !line.starts_with('#')).collect();
    // task-pid [cpu] flags time: event: …
    let mut places = BTreeMap::<String, usize>::new();
    for line in &lines {
        let (task, rest) = line.trim_start().split_once(" [").unwrap_or((line, ""));
        let event = rest.split_once(": ").map_or(rest, |(_, event)| event);
        // The times of timers differ in each event.
        let is_same =
            |word: &&str| !["expires=", "softexpires=", "now="].iter().any(|is| word.starts_with(is));
        let event: Vec<&str> = event.split(' ').filter(is_same).collect();
        *places.entry(format!("{task}: {}", event.join(" "))).or_default() += 1;
    }
    let mut places: Vec<_> = places.into_iter().map(|(place, count)| (count, place)).collect();
    places.sort_unstable();
    places.reverse();
    places.truncate(PLACES);
    let places: Vec<String> = places.iter().map(|(count, place)| format!("{count:6} {place}")).collect();
    let last = &lines[lines.len().saturating_sub(EVENTS)..];
    Ok(format!(
        "{} events within {RECORDED:?}; the most frequent:\n{}\nthe last:\n{}",
        lines.len(),
        places.join("\n"),
        last.join("\n")
    ))
}

fn tracing() -> Need {
    match fs::File::options().write(true).open(format!("{TRACING}/events/kvm/enable")) {
        Ok(_) => Ok(()),
        Err(error) => Err(format!("needs KVM's events in {TRACING}, as root ({error})")),
    }
}

#[test(tracing())]
fn a_host_tells_what_its_machines_do() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let machine = env.run("here", "run --memory 16m --passes 0 --workload write,rate=1000")?;
    env.has_written("here", 100)?;
    let said = state(&env.socket("here"));
    let pid = machine.child.id();
    // Not every KVM has an event for each exit.
    let all = [
        format!("\"pid\":{pid}"),
        format!("vcpu0 of {pid}: State:"),
        " events within".into(),
        "hrtimer_".into(),
    ];
    for what in &all {
        ensure(said.contains(what), || format!("no {what} in:\n{said}"))?;
    }
    env.ctl("here stop")?;
    machine.end().map(drop)
}
