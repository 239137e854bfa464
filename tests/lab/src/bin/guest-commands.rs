//! The cost of a command in a guest: from exec to its first line, compared with a bare boot of the
//! same kernel and archive. Also the cost of its shared directories, compared with the host's own
//! files. It runs inside emulated hosts, for `cargo lab speed`.
//!
//! Times are by the host's clock, which counts instructions there, without idle time. The two boots
//! alternate. The cost of a shell and its programs alone is subtracted from the file steps.

use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use clap::Parser;
use vellum_host::idle;

const VELLUM: &str = "/bin/vellum";
/// An emulator that stops at any instruction (`lab::hosts::svm`) delivers an interrupt twice less
/// often without PV EOI. It does not save XSAVE state either.
const FLAGS: [&str; 3] = ["--cpuid=-pv-eoi", "--params", "noxsave"];
/// How often each boot is timed.
const ROUNDS: usize = 3;
/// The archive's link target among the open files of a vellum process.
const ARCHIVE: &str = "/memfd:vellum-initramfs (deleted)";
/// A command may take this much longer than a bare boot to its first line.
const LIMIT: f64 = 1.15;
/// The directory of the files on the host.
const HERE: &str = "/data";
/// Requests per step.
const COUNT: u64 = 64;
/// The largest request, in bytes.
const LARGE: u64 = 128 << 10;
/// How often a file is opened.
const OPENED: u64 = 50;

/// A command in a guest, and its directories: what they cost.
#[derive(Parser)]
#[command(name = "guest-commands")]
struct Cli {
    /// The tree in which its kernel was built
    #[arg(long)]
    tree: PathBuf,
    /// How long an instruction takes by this host's clock
    #[arg(long)]
    nanoseconds: f64,
}

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("guest-commands: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> io::Result<()> {
    let instructions = |time: Duration| time.as_nanos() as f64 / cli.nanoseconds;
    let bare = Path::new("/bare.cpio");
    fs::write(bare, without(&archive(&cli.tree)?, guest_agent::LAUNCH.trim_start_matches('/')))?;
    let (mut launched, mut booted) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let mut command = vellum(&cli.tree);
        launched.push(instructions(first_line(command.args(["--", "uname", "-r"]), |_| true)?));
        let mut command = vellum(&cli.tree.join("arch/x86/boot/bzImage"));
        command.arg("--initrd").arg(bare).args(["--params", "-- exec /bin/busybox uname -r"]);
        // The agent passes the command's output on.
        booted.push(instructions(first_line(&mut command, |line| line.contains("\"stdout\""))?));
    }
    let (launched, booted) = (median(&mut launched), median(&mut booted));
    println!("From exec to the first line of uname -r, in millions of instructions, medians of {ROUNDS}:");
    println!("  bare boot with the same archive  {:10.1}", booted / 1e6);
    println!(
        "  vellum run -k TREE -- uname -r   {:10.1}  {:.3} of the bare boot",
        launched / 1e6,
        launched / booted
    );
    if launched / booted > LIMIT {
        return Err(io::Error::other(format!(
            "a command takes more than {LIMIT} times the bare boot to its first line"
        )));
    }

    fs::create_dir_all(HERE)?;
    fs::write(format!("{HERE}/file"), vec![1; (COUNT * LARGE) as usize])?;
    let host = steps(Command::new("sh").args(["-c", &script(HERE)]))?;
    println!("A shared directory, in instructions a request, with the host's own files beside it:");
    println!("  {:44}{:>12}", "", "the host");
    for ((name, _, count), cost) in STEPS.iter().zip(&host) {
        println!("  {name:44}{:12.0}", instructions(*cost) / *count as f64);
    }
    for cache in ["auto", "none", "always"] {
        let share = format!("{HERE}:data,rw,as-root,cache={cache}");
        let mut command = vellum(&cli.tree);
        let there = steps(command.args(["--share", &share, "--", "sh", "-c", &script("/mnt/data")]))?;
        println!("  {:44}{:>12}{:>12}", format!("cache={cache}"), "the guest", "of the host");
        for (((name, _, count), there), host) in STEPS.iter().zip(&there).zip(&host) {
            let cost = instructions(*there) / *count as f64;
            println!(
                "  {name:44}{cost:12.0}{:12.2}",
                there.as_nanos() as f64 / host.as_nanos().max(1) as f64
            );
        }
    }
    Ok(())
}

/// The file steps: the name, the shell command in directory $d, and its number of requests.
const STEPS: [(&str, &str, u64); 6] = [
    ("reads of 128 KiB, the guest's cache is empty", "dd if=$d/file of=/dev/null bs=131072 count=64", COUNT),
    ("the same again", "dd if=$d/file of=/dev/null bs=131072 count=64", COUNT),
    ("writes of 128 KiB", "dd if=/dev/zero of=$d/new bs=131072 count=64", COUNT),
    ("reads of 4 KiB", "dd if=$d/file of=/dev/null bs=4096 count=64", COUNT),
    ("writes of 4 KiB", "dd if=/dev/zero of=$d/small bs=4096 count=64", COUNT),
    ("opening and closing", "i=0; while [ $i -lt 50 ]; do : < $d/file; i=$((i + 1)); done", OPENED),
];

/// A shell script for [`STEPS`] in `directory`. For each step it first runs its programs without
/// requests, then the step. After each it prints a line and waits for an answer, so that it does
/// nothing while the clock is read.
fn script(directory: &str) -> String {
    let mut script = format!("d={directory}; ");
    if directory != HERE {
        script += "echo 3 > /proc/sys/vm/drop_caches; ";
    }
    script += "echo; read x; ";
    for (_, line, _) in STEPS {
        let idle = line.replace("count=64", "count=0").replace("-lt 50", "-lt 0");
        script += &format!("{idle} 2>/dev/null; echo; read x; {line} 2>/dev/null; echo; read x; ");
    }
    script
}

/// The time of each of [`STEPS`] by `command`, without its programs' own.
fn steps(command: &mut Command) -> io::Result<Vec<Duration>> {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let (mut stdin, stdout) = (child.stdin.take().ok_or_else(none)?, child.stdout.take().ok_or_else(none)?);
    let (mut times, mut began) = (Vec::new(), now()?);
    for line in BufReader::new(stdout).lines() {
        line?;
        times.push(now()? - began);
        began = now()?;
        stdin.write_all(b"\n")?;
    }
    ended(child)?;
    // The first interval is the start.
    let steps = times.get(1..).unwrap_or_default();
    if steps.len() != 2 * STEPS.len() {
        return Err(io::Error::other(format!("{} steps of {}", steps.len(), 2 * STEPS.len())));
    }
    Ok(steps.chunks(2).map(|step| step[1].saturating_sub(step[0])).collect())
}

/// The host's busy time since an arbitrary point.
fn now() -> io::Result<Duration> {
    static BEGAN: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    // The host was idle before the first call. The offset keeps the difference positive.
    const PAST: Duration = Duration::from_secs(1 << 20);
    let elapsed = BEGAN.get_or_init(Instant::now).elapsed();
    let idle = idle::since_boot().ok_or_else(|| io::Error::other("this host does not tell when it idles"))?;
    Ok((PAST + elapsed).saturating_sub(idle))
}

/// The time from `command`'s start to a line that satisfies `is_it`.
fn first_line(command: &mut Command, is_it: impl Fn(&str) -> bool) -> io::Result<Duration> {
    let began = now()?;
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
    let mut took = None;
    for line in BufReader::new(child.stdout.take().ok_or_else(none)?).split(b'\n') {
        if took.is_none() && is_it(&String::from_utf8_lossy(&line?)) {
            took = Some(now()? - began);
        }
    }
    ended(child)?;
    took.ok_or_else(|| io::Error::other("it has not said it"))
}

/// A vellum command for a guest of `kernel`.
fn vellum(kernel: &Path) -> Command {
    let mut command = Command::new(VELLUM);
    command.arg("run").arg("--kernel").arg(kernel).args(FLAGS);
    command
}

fn ended(mut child: Child) -> io::Result<()> {
    let status = child.wait()?;
    if status.success() { Ok(()) } else { Err(io::Error::other(format!("a command ended: {status}"))) }
}

fn none() -> io::Error {
    io::Error::other("it has no streams")
}

/// The archive that Vellum makes for a command in a guest of `tree`. It is a memfd, open in the
/// process that waits for the command.
fn archive(tree: &Path) -> io::Result<Vec<u8>> {
    let mut command = vellum(tree);
    let mut child =
        command.args(["--", "sh", "-c", "echo; cat"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let (mut stdin, stdout) = (child.stdin.take().ok_or_else(none)?, child.stdout.take().ok_or_else(none)?);
    BufReader::new(stdout).read_line(&mut String::new())?;
    let mut files =
        fs::read_dir(format!("/proc/{}/fd", child.id()))?.filter_map(|entry| Some(entry.ok()?.path()));
    let found = files.find(|path| fs::read_link(path).is_ok_and(|to| to == Path::new(ARCHIVE)));
    let content = found.ok_or_else(|| io::Error::other("it has no archive")).and_then(fs::read);
    stdin.flush()?;
    drop(stdin);
    ended(child)?;
    content
}

/// A cpio `newc` archive without the file `name`.
fn without(archive: &[u8], name: &str) -> Vec<u8> {
    let (mut rest, mut kept) = (archive, Vec::new());
    // The 7th field is the file's size, the 12th the length of its name.
    let field = |record: &[u8], nth: usize| {
        let text = record.get(6 + 8 * nth..14 + 8 * nth).and_then(|text| std::str::from_utf8(text).ok());
        text.and_then(|text| usize::from_str_radix(text, 16).ok()).unwrap_or(0)
    };
    while rest.starts_with(b"070701") {
        let (size, length) = (field(rest, 6), field(rest, 11));
        let end = ((110 + length).next_multiple_of(4) + size).next_multiple_of(4).min(rest.len());
        if rest.get(110..109 + length) != Some(name.as_bytes()) {
            kept.extend(&rest[..end]);
        }
        rest = &rest[end..];
    }
    kept
}

fn median(samples: &mut [f64]) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}

#[cfg(test)]
mod tests {
    use vellum_launch::initramfs::Initramfs;

    use super::*;

    #[test]
    fn one_file_is_taken_out_of_an_archive() {
        let made = |names: &[&str]| {
            let mut archive = Initramfs::new();
            names.iter().for_each(|name| archive.file(name, 0o644, name.as_bytes()));
            archive.finish()
        };
        let (all, names) = (made(&["/one", "/three", "/two"]), |archive: &[u8]| {
            ["one", "three", "two", "TRAILER!!!"]
                .map(|name| archive.windows(name.len()).filter(|part| *part == name.as_bytes()).count())
        });
        assert_eq!(names(&all), [2, 2, 2, 1]);
        assert_eq!(names(&without(&all, "three")), [2, 0, 2, 1]);
        assert_eq!(without(&all, "four"), all);
    }

    #[test]
    fn each_step_has_as_many_requests_as_it_says() {
        for (name, line, count) in STEPS {
            let says = [format!("count={count}"), format!("-lt {count}")];
            assert!(says.iter().any(|part| line.contains(part)), "{name}");
        }
        assert!(STEPS[0].1.contains(&format!("bs={LARGE} ")));
    }
}
