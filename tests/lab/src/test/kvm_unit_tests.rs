//! `cargo lab kvm-unit-tests DIR`: runs a directory of prebuilt x86 images under `vellum run` on an
//! emulated host, as their `unittests.cfg` says.
//!
//! The configuration is in QEMU's terms. A test that needs something without an equivalent, such as
//! a QEMU device, is skipped with that reason. If the host dies under a test, that test fails, and
//! the others continue on a fresh host.
//!
//! # What does not pass on `svm` (QEMU 7.2, Linux 6.1), and why
//!
//! | test | what fails | why |
//! |---|---|---|
//! | `emulator` | 2 of 151: a non-canonical access by the stack pointer faults as #GP | QEMU's processor; hardware says #SS |
//! | `la57` | LGDT and LIDT of non-canonical addresses do not fault | QEMU's processor takes them |
//! | `xsave` | XCR0 reads as 1 whatever the guest has set | XCR0 is KVM's and the processor's; Vellum does not touch it |
//! | `debug` | single-step after STI; then it does not end | QEMU's processor: there alone, without KVM, it fails in the same places and does not end |
//! | `ioapic`, with `--irqchip split` | a level-triggered interrupt sent elsewhere while in service | Linux 6.1 reports its end to nobody; 6.12 asks for pending ends too (`kvm_scan_ioapic_routes`), and there all 30 pass |
//! | `eventinj`, with `--npt 0` | a page fault while #NP of `int $33` is delivered | QEMU's processor: EXITINTINFO names the `int`, the first event of the instruction, not the #NP (`handle_even_inj`, seg_helper.c), so KVM injects the interrupt again into the handler |
//! | `realmode` | it waits for IRQ 11 by the 8259 | it counts on the vectors that a BIOS gives it; all before that passes |
//! | `s3` | there is no sleep state | Vellum's ACPI is hardware-reduced and has none |
//! | `access`, `asyncpf`, `svm*` | not run to their end | hours on an emulated host |
//! | `x2apic`, `xapic` | the time limit | 30,000 NMIs one after the other between two emulated CPUs; all before that passes |

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::artifacts::Programs;
use crate::cache::Cache;
use crate::hosts::wire::Frame;
use crate::hosts::{self, Pace, Request};
use crate::{Error, Result};

/// One section of `unittests.cfg`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Test {
    /// The section's name.
    pub name: String,
    keys: BTreeMap<String, String>,
}

/// A test's result.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// Its own status says that it passed.
    Pass,
    /// Its last output.
    Fail(String),
    /// The reason.
    Skip(String),
}

/// The exit status of a test that skips itself. It writes 77 >> 1 to the exit port.
const SKIPPED: i32 = 77;
/// The exit status of a test that passes.
const PASSED: i32 = 1;

/// The default limit of a test in seconds, and the factor by which an emulated host is slower than
/// the hosts that the limits were made for. Most tests end long before. Those that map gigabytes
/// need it.
const SECONDS: u64 = 90;
const SLOWNESS: u64 = 10;

/// Vellum's message for a CPU feature that the host lacks (`arch/x86_64/cpuid/`).
const NOT_OFFERED: &str = "this host's KVM does not offer it";

/// The only shell substitution in the tests' arguments: the host's time at the start.
const NOW: &str = "`date +%s`";

/// The number of CPUs for `smp = $MAX_SMP`.
const MAX_SMP: u32 = 2;

/// The interrupt controller of tests that do not choose one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Irqchip {
    /// KVM emulates all of it, with the timer that some tests need
    Kernel,
    /// Vellum emulates the I/O APIC
    Split,
}

/// Runs the directory's tests whose names contain one of `only` (all if it is empty) on `host`.
pub fn run(cache: &Cache, host: &Request, dir: &Path, only: &[String], irqchip: Irqchip) -> Result<u8> {
    let config = dir.join("unittests.cfg");
    let config = if config.is_file() { config } else { dir.join("x86/unittests.cfg") };
    let text = fs::read_to_string(&config).map_err(|error| {
        Error::Usage(format!(
            "{}: {error}; DIR is the x86 directory of a built kvm-unit-tests, which holds unittests.cfg and the .flat images",
            config.display()
        ))
    })?;
    let images = config.parent().unwrap_or(dir);
    let chosen = |test: &Test| only.is_empty() || only.iter().any(|part| test.name.contains(part.as_str()));
    let mut verdicts = Vec::new();
    let mut waiting = Vec::new();
    for test in parse(&text).into_iter().filter(chosen) {
        match test.command(images, irqchip) {
            Ok((image, command)) => waiting.push((test.name, image, command)),
            Err(why) => report(&mut verdicts, test.name, Verdict::Skip(why)),
        }
    }
    if verdicts.is_empty() && waiting.is_empty() {
        return Err(Error::Usage(format!(
            "{}: none of its tests has {} in its name",
            config.display(),
            only.join(" or ")
        )));
    }
    let programs = Programs::build()?;
    while !waiting.is_empty() {
        let done = boot(cache, &programs, host, &waiting, &mut verdicts)?;
        waiting.drain(..done);
    }
    let count = |is: fn(&Verdict) -> bool| verdicts.iter().filter(|(_, verdict)| is(verdict)).count();
    let failed = count(|verdict| matches!(verdict, Verdict::Fail(_)));
    let passed = count(|verdict| matches!(verdict, Verdict::Pass));
    println!(
        "\n{passed} passed, {failed} failed, {} skipped",
        count(|verdict| matches!(verdict, Verdict::Skip(_)))
    );
    Ok(u8::from(failed > 0))
}

/// Runs as many of `waiting` as one host survives. Returns how many were run.
fn boot(
    cache: &Cache,
    programs: &Programs,
    host: &Request,
    waiting: &[(String, PathBuf, String)],
    verdicts: &mut Vec<(String, Verdict)>,
) -> Result<usize> {
    let mut request = host.clone();
    let mut images: Vec<&PathBuf> = waiting.iter().map(|(_, image, _)| image).collect();
    images.sort();
    images.dedup();
    for image in images {
        request.files.push((image.clone(), inside(image)));
    }
    let shell = |line: &String| vec!["sh".to_owned(), "-c".to_owned(), line.clone()];
    request.commands = waiting.iter().map(|(_, _, line)| shell(line)).collect();
    let mut done = 0;
    let mut said = Vec::new();
    let mut up = false;
    let outcome = hosts::run(cache, programs, &request, |frame| match frame {
        Frame::Boot(_) => up = true,
        Frame::Stdout(bytes) | Frame::Stderr(bytes) => said.extend_from_slice(bytes),
        Frame::Exit(exit) => {
            report(verdicts, waiting[done].0.clone(), verdict(exit.code, &String::from_utf8_lossy(&said)));
            said.clear();
            done += 1;
        }
        _ => (),
    });
    match outcome {
        Ok(_) => Ok(done),
        // A host that does not come up would not come up again.
        Err(error) if !up => Err(error),
        // Every test has reported.
        Err(_) if done == waiting.len() => Ok(done),
        // The host's time limit expired, not this test's. The test gets another host.
        Err(Error::Host { timed_out: true, .. }) if done > 0 => Ok(done),
        Err(error) => {
            let why = error.to_string();
            report(
                verdicts,
                waiting[done].0.clone(),
                Verdict::Fail(why.lines().next().unwrap_or_default().into()),
            );
            Ok(done + 1)
        }
    }
}

fn report(verdicts: &mut Vec<(String, Verdict)>, name: String, verdict: Verdict) {
    match &verdict {
        Verdict::Pass => println!("PASS {name}"),
        Verdict::Fail(why) => println!("FAIL {name} ({why})"),
        Verdict::Skip(why) => println!("SKIP {name} ({why})"),
    }
    verdicts.push((name, verdict));
}

/// The result by exit status and console. Vellum's own errors exit with a pass's status, but their
/// message is the last line, and every test prints something.
fn verdict(status: i32, console: &str) -> Verdict {
    let summary = console.lines().rev().find(|line| line.starts_with("SUMMARY"));
    let failures: Vec<&str> = console.lines().filter(|line| line.starts_with("FAIL")).take(3).collect();
    let guest_spoke = console.lines().any(|line| !line.is_empty() && !line.starts_with("vellum: "));
    let error = console.lines().rev().find(|line| !line.trim().is_empty());
    let error = error.is_some_and(|line| line.starts_with("vellum: "));
    match status {
        PASSED if guest_spoke && !error => Verdict::Pass,
        SKIPPED => {
            let why = console.lines().find(|line| line.starts_with("SKIP")).or(summary);
            Verdict::Skip(why.unwrap_or("it skipped itself").trim().to_owned())
        }
        124 => Verdict::Fail("time limit".into()),
        2 if console.contains(NOT_OFFERED) => {
            let line = console.lines().find(|line| line.contains(NOT_OFFERED)).unwrap_or(NOT_OFFERED);
            Verdict::Skip(line.trim_start_matches("vellum: ").into())
        }
        status => {
            let last =
                console.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("nothing was said");
            let words =
                if failures.is_empty() { summary.unwrap_or(last).to_owned() } else { failures.join("; ") };
            Verdict::Fail(format!("status {status}: {}", words.trim()))
        }
    }
}

/// Parses the sections of a `unittests.cfg`.
pub fn parse(text: &str) -> Vec<Test> {
    let mut tests: Vec<Test> = Vec::new();
    for line in text.lines().map(str::trim).filter(|line| !line.starts_with('#')) {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            tests.push(Test { name: name.to_owned(), keys: BTreeMap::new() });
        } else if let (Some(test), Some((key, value))) = (tests.last_mut(), line.split_once('=')) {
            test.keys.insert(key.trim().to_owned(), value.trim().to_owned());
        }
    }
    tests
}

impl Test {
    fn key(&self, name: &str) -> Option<&str> {
        self.keys.get(name).map(String::as_str)
    }

    /// The image and the shell command that runs it in the host. An error is the reason to skip it.
    fn command(&self, images: &Path, irqchip: Irqchip) -> std::result::Result<(PathBuf, String), String> {
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        if let Some(arch) = self.key("arch").filter(|arch| *arch != "x86_64") {
            return Err(format!("it is for {arch}"));
        }
        if self.key("accel") == Some("tcg") {
            return Err("it is for QEMU's TCG".into());
        }
        if words(self.key("groups").unwrap_or_default()).contains(&"nodefault".to_owned()) {
            return Err("its group is nodefault: its authors leave it out of ordinary runs".into());
        }
        let file = self.key("file").ok_or("it names no file")?;
        let image = images.join(file);
        if !image.is_file() {
            return Err(format!("{} was not built", image.display()));
        }
        let cpus = match self.key("smp").unwrap_or("1") {
            max if max.contains("MAX_SMP") => MAX_SMP,
            number => number.parse().map_err(|_| format!("smp = {number}"))?,
        };
        let mut memory = "512m".to_owned();
        let mut arguments = self.key("test_args").map(unquoted).unwrap_or_default();
        let mut features = Vec::new();
        let mut irqchip = irqchip;
        let parameters = self.key("qemu_params").or(self.key("extra_params")).unwrap_or_default();
        let mut parameters = shell_words(parameters).into_iter();
        while let Some(flag) = parameters.next() {
            let mut value = || parameters.next().unwrap_or_default();
            match flag.as_str() {
                "-append" => arguments = value(),
                "-m" => memory = value(),
                "-smp" => return Err("it gives a topology in QEMU's form".into()),
                "-cpu" => features.extend(value().split(',').skip(1).map(str::to_owned)),
                "-machine" | "-M" => match value().as_str() {
                    // The split irqchip has no PIT.
                    "pit=off" | "kernel_irqchip=split" | "q35,kernel-irqchip=split" => {
                        irqchip = Irqchip::Split
                    }
                    "kernel_irqchip=on" => irqchip = Irqchip::Kernel,
                    other => return Err(format!("it needs QEMU's -machine {other}")),
                },
                "-overcommit" => drop(value()),
                "-enable-kvm" => (),
                flag => return Err(format!("it needs QEMU's {flag} {}", value())),
            }
        }
        let mut line = String::new();
        let unmet = |condition: &str, why: &str| {
            format!("{condition} || {{ echo 'SKIP: {why}'; exit {SKIPPED}; }}; ")
        };
        for (name, value) in features.iter().map(|feature| feature.split_once('=').unwrap_or((feature, ""))) {
            match name {
                // A guest sees its host's vendor, as KVM requires.
                "vendor" => {
                    let is = format!("grep -q 'vendor_id.*{value}' /proc/cpuinfo");
                    line += &unmet(&is, &format!("the host is no {value}"));
                }
                // The first is about QEMU's migration. Vellum always does the second.
                "migratable" | "host-phys-bits" if value != "off" => (),
                hyperv if hyperv.starts_with("hv_") => {
                    return Err("it needs Hyper-V's interface, which Vellum has not".into());
                }
                sign if sign.starts_with(['+', '-']) => (),
                other => return Err(format!("it sets a CPU property of QEMU's: {other}={value}")),
            }
        }
        if let Some(check) = self.key("check") {
            for condition in check.split_whitespace() {
                let (path, wanted) = condition.split_once('=').ok_or_else(|| format!("check = {check}"))?;
                let is = format!("[ \"$(cat {path} 2>/dev/null)\" = {wanted} ]");
                line += &unmet(&is, &format!("{path} is not {wanted}"));
            }
        }
        let seconds =
            self.key("timeout").and_then(|t| t.trim_end_matches('s').parse().ok()).unwrap_or(SECONDS)
                * SLOWNESS;
        let irqchip = match irqchip {
            Irqchip::Kernel => "kernel",
            Irqchip::Split => "split",
        };
        line += &format!("printf 'NR_CPUS={cpus}\\nTEST_DEVICE=0\\n' > env; ");
        line += &format!(
            "exec vellum run --nodefaults --loglevel warning --kernel {} --initrd env --cpus {cpus} --memory {memory} \
             --irqchip {irqchip} --timeout {seconds}s",
            inside(&image)
        );
        for feature in features.iter().filter(|feature| feature.starts_with(['+', '-'])) {
            line += &format!(" --cpuid {}", renamed(feature));
        }
        if !arguments.is_empty() {
            let quoted =
                arguments.replace('\'', "'\\''").replace(NOW, &format!("'\"$({})\"'", NOW.trim_matches('`')));
            line += &format!(" --params '{quoted}'");
        }
        Ok((image, line))
    }
}

/// Translates QEMU's names of features to the kernel's, which Vellum uses.
fn renamed(feature: &str) -> String {
    const NAMES: [(&str, &str); 1] = [("tsc-deadline", "tsc-deadline-timer")];
    let (sign, name) = feature.split_at(1);
    let known = NAMES.iter().find(|(theirs, _)| *theirs == name);
    format!("{sign}{}", known.map_or(name, |(_, ours)| ours))
}

fn inside(image: &Path) -> String {
    format!("/images/{}", image.file_name().unwrap_or_default().to_string_lossy())
}

fn unquoted(text: &str) -> String {
    shell_words(text).join(" ")
}

/// Splits words as a shell does: blanks, single and double quotes.
fn shell_words(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    for c in text.chars() {
        match (quote, c) {
            (Some(q), c) if c == q => quote = None,
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, c) if c.is_whitespace() => words.extend(word.take()),
            (_, c) => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

/// The default host of these tests: memory for their guests, time for the longest, and two CPUs in
/// parallel.
pub fn host(request: Request) -> Request {
    let pace = if request.pace == Pace::Counted { Pace::Races } else { request.pace };
    let memory_mib = request.memory_mib.max(4096);
    let time_limit = request.time_limit.max(Duration::from_secs(3600));
    Request { pace, memory_mib, time_limit, ..request }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    const CONFIG: &str = "
# a comment
[apic-split]
file = apic.flat
smp = 2
qemu_params = -cpu qemu64,+x2apic,-pcid -machine kernel_irqchip=split
arch = x86_64
timeout = 30

[old]
file = apic.flat
extra_params = -m 2g -append \"a 'b c'\"
check = /sys/x=Y

[pci]
file = apic.flat
qemu_params = -device pci-testdev
[other]
file = apic.flat
arch = i386
[hyperv]
file = apic.flat
qemu_params = -cpu host,hv_passthrough
[vendor]
file = apic.flat
qemu_params = -cpu max,migratable=no,vendor=GenuineIntel
[clock]
file = apic.flat
test_args = \"10 `date +%s`\"
";

    fn commands() -> Vec<std::result::Result<String, String>> {
        let dir = std::env::temp_dir().join(format!(
            "vellum-kut-{}-{:?}",
            std::process::id(),
            std::thread::current().id()
        ));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("apic.flat"), "").unwrap();
        let commands = parse(CONFIG)
            .iter()
            .map(|test| test.command(&dir, Irqchip::Kernel).map(|(_, line)| line))
            .collect();
        fs::remove_dir_all(&dir).unwrap();
        commands
    }

    #[test]
    fn a_section_becomes_a_command_with_its_own_parameters() {
        let commands = commands();
        let split = commands[0].as_ref().unwrap();
        for part in [
            "/images/apic.flat",
            "--cpus 2",
            "--cpuid +x2apic",
            "--cpuid -pcid",
            "--timeout 300s",
            "--irqchip split",
        ] {
            assert!(split.contains(part), "{part} is not in {split}");
        }
        let old = commands[1].as_ref().unwrap();
        for part in [
            "--memory 2g",
            "--irqchip kernel",
            r"--params 'a '\''b c'\'''",
            "[ \"$(cat /sys/x 2>/dev/null)\" = Y ]",
        ] {
            assert!(old.contains(part), "{part} is not in {old}");
        }
    }

    #[test]
    fn the_time_is_the_hosts_when_the_test_starts() {
        let line = commands()[6].clone().unwrap();
        let (_, arguments) = line.split_once("--params ").unwrap();
        let said =
            Command::new("sh").args(["-c", &format!("printf %s {arguments}")]).output().unwrap().stdout;
        let said = String::from_utf8(said).unwrap();
        let (loops, seconds) = said.split_once(' ').unwrap();
        assert_eq!(loops, "10");
        assert!(seconds.parse::<u64>().unwrap() > 1_700_000_000, "{said}");
    }

    #[test]
    fn what_cannot_run_says_why() {
        let commands = commands();
        assert!(commands[2].as_ref().unwrap_err().contains("pci-testdev"));
        assert!(commands[3].as_ref().unwrap_err().contains("i386"));
        assert!(commands[4].as_ref().unwrap_err().contains("Hyper-V"));
        assert!(
            commands[5].as_ref().unwrap().starts_with("grep -q 'vendor_id.*GenuineIntel' /proc/cpuinfo || {")
        );
    }

    #[test]
    fn an_error_of_vellums_own_is_no_pass() {
        assert_eq!(verdict(1, "PASS: x\nSUMMARY: 1 tests\n"), Verdict::Pass);
        assert!(matches!(verdict(1, "vellum: no memory\n"), Verdict::Fail(_)));
        assert!(matches!(verdict(1, ""), Verdict::Fail(_)));
        assert_eq!(
            verdict(3, "FAIL: a\nSUMMARY: 2 tests, 1 unexpected failures\n"),
            Verdict::Fail("status 3: FAIL: a".into())
        );
        assert!(
            matches!(verdict(SKIPPED, "SKIP: no feature\n"), Verdict::Skip(why) if why == "SKIP: no feature")
        );
        let refused = format!("vellum: --cpuid +vmx: {NOT_OFFERED}; leave it out\n");
        assert!(matches!(verdict(2, &refused), Verdict::Skip(why) if why.starts_with("--cpuid +vmx")));
        assert!(matches!(verdict(2, "vellum: --memory x\n"), Verdict::Fail(_)));
        assert!(matches!(verdict(PASSED, "enabling apic\nvellum: disk.img: I/O error\n"), Verdict::Fail(_)));
    }
}
