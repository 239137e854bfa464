//! `vellum judge read` and `vellum judge image`: an incomplete log never passes.

use std::fs;
use std::process::Output;

use support::env::TestEnv;
use support::{Failed, ensure, test};
use vellum_judge::image::{Format, image};
use vellum_judge::read::{Verdict, read};

use crate::succeeds;

/// A complete log of the image.
fn log() -> Result<Vec<u8>, Failed> {
    Ok(fs::read("tests/fuzz/corpus/judge/whole.log")?)
}

fn judged(env: &TestEnv, log: &[u8], more: &str) -> Result<Output, Failed> {
    let path = env.path("log");
    fs::write(&path, log)?;
    env.vellum(&format!("judge read {} {more}", path.display()))
}

#[test]
fn a_log_passes_only_if_it_is_whole() -> Result<(), Failed> {
    let log = log()?;
    ensure(read(&log).verdict() == Verdict::Whole, || format!("{:?}", read(&log)))?;
    // Each line is removed, and the log is cut at each place.
    let lines: Vec<&[u8]> = log.split_inclusive(|byte| *byte == b'\n').collect();
    for without in 0..lines.len() {
        let rest = [&lines[..without], &lines[without + 1..]].concat().concat();
        let needed = !["KTAP", "# left", "1..", "# pass"]
            .iter()
            .any(|start| lines[without].starts_with(start.as_bytes()));
        let passes = read(&rest).verdict() == Verdict::Whole;
        ensure(passes != needed, || format!("without {}", String::from_utf8_lossy(lines[without])))?;
    }
    let end = log.len() - lines.last().map_or(0, |line| line.len());
    for cut in 0..end + "# end WHOL".len() {
        ensure(read(&log[..cut]).verdict() != Verdict::Whole, || format!("cut at {cut}"))?;
    }
    // The log twice, as if the machine had been restarted.
    let twice = read(&[log.clone(), log.clone()].concat()).verdict();
    ensure(matches!(twice, Verdict::Crashed(_)), || format!("{twice:?}"))?;
    // With one digit of a checksum or of the seed changed.
    let text = String::from_utf8(log)?;
    for (from, to) in [("checksum=0x", "checksum=0x1"), ("seed=", "seed=1"), ("# ram 0x1", "# ram 0x2")] {
        let changed = read(text.replacen(from, to, 1).as_bytes()).verdict();
        ensure(matches!(changed, Verdict::Crashed(_)), || format!("{to}: {changed:?}"))?;
    }
    Ok(())
}

/// A machine that went back as a whole is right in itself. Its progress is not.
#[test]
fn progress_that_goes_back_is_a_loss() -> Result<(), Failed> {
    let log = String::from_utf8(log()?)?;
    let with = |positions: &[(u64, u64, u64)]| {
        let of = |(pass, phase, accesses): &(u64, u64, u64)| {
            format!("# pass {pass} of 8 phase={phase} accesses={accesses} faults=0\r\n")
        };
        let lines: String = positions.iter().map(of).collect();
        read(log.replacen("1..", &format!("{lines}1.."), 1).as_bytes())
    };
    for (positions, verdict) in [
        (&[(1, 0, 64), (1, 0, 64), (1, 1, 0), (8, 3, 0)][..], Verdict::Whole),
        (&[(2, 0, 0), (1, 3, 64)], Verdict::Lost),
        (&[(2, 1, 0), (2, 0, 64)], Verdict::Lost),
        (&[(2, 1, 64), (2, 1, 0), (3, 0, 0)], Verdict::Lost),
        (&[(9, 0, 0)], Verdict::Crashed("lines of the image make no sense".into())),
    ] {
        let found = with(positions).verdict();
        ensure(found == verdict, || format!("{positions:?}: {found:?}"))?;
    }
    // A line that is cut has no position: this one may be at access 65 or at 6.
    let lines = "# pass 8 of 8 phase=3 accesses=64 faults=0\r\n# pass 8 of 8 phase=3 accesses=6";
    let cut = format!("{}{lines}", log.split("1..").next().unwrap_or_default());
    let verdict = read(cut.as_bytes()).verdict();
    ensure(matches!(verdict, Verdict::Crashed(_)), || format!("{verdict:?}"))?;
    let back = with(&[(2, 1, 64), (2, 1, 0)]).loss();
    ensure(
        back == " went-back: access 0 of phase 1 of pass 2 came after access 64 of phase 1 of pass 2",
        || back,
    )
}

/// A kind that was not checked does not pass, and only some may be left out. A timer that never
/// interrupts is not whole.
#[test]
fn what_was_not_checked_does_not_pass() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let whole = String::from_utf8(log()?)?;
    let output = judged(&env, whole.as_bytes(), "--format ktap")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let skips = text.contains("kvmclock-back # SKIP there is no kvmclock");
    ensure(output.status.success() && skips, || format!("{output:?}"))?;
    for (from, to) in [("ok 1 lost-write", "ok 1 lost-write # SKIP no"), ("interrupts=1", "interrupts=0 x=")]
    {
        let verdict = read(whole.replacen(from, to, 1).as_bytes()).verdict();
        ensure(matches!(verdict, Verdict::Crashed(_)), || format!("{to}: {verdict:?}"))?;
    }
    Ok(())
}

#[test]
fn noise_around_the_lines_does_not_matter() -> Result<(), Failed> {
    let noise = b"\x1b[2J\x1b[01;01HSeaBIOS (version 1.16)\r\n\xff\xfe\x00\x07\r\n\x1b[0m";
    let before = b"ok 3 disks\r\n# ram test passed\r\nok [main] started\r\n\x1b]0;a title\x07";
    let log = [&noise[..], before, &log()?, b"\x1bc[ 1.0] reboot: Power down\n# sum of all\n"].concat();
    ensure(read(&log).verdict() == Verdict::Whole, || format!("{:?}", read(&log)))
}

#[test]
fn a_verdict_is_an_exit_status_and_one_line() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let whole = String::from_utf8(log()?)?;
    let fault = "# fault lost-write vcpu=1 address=0x200000 expected=0x3 found=0x2\r\n1..";
    for (log, status, says) in [
        (whole.clone(), 0, ""),
        (
            whole.replacen("1..", fault, 1),
            1,
            "LOST: 1 faults; the first is lost-write at 0x200000, seen by vCPU 1",
        ),
        (
            whole.replacen(
                "1..",
                &format!("{}\r\nBail out! exception 6 error 0x0\r\n1..", &fault[..fault.len() - 5]),
                1,
            ),
            1,
            "seen by vCPU 1; then the image stopped: exception 6 error 0x0",
        ),
        (whole.replace("# end WHOLE", ""), 1, "no verdict: the log ends without a verdict"),
        ("Bail out! too little memory".into(), 1, "the image judged nothing: too little memory"),
        (String::new(), 1, "no verdict: the image's first line is missing"),
    ] {
        let output = judged(&env, log.as_bytes(), "--format ktap")?;
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        let right = output.status.code() == Some(status) && error.contains(says);
        ensure(right && error.lines().count() == usize::from(status != 0), || format!("{output:?}"))?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure(text.contains("not ok") == (status != 0), || text)?;
    }
    let missing = env.vellum("judge read /nonexistent")?;
    ensure(missing.status.code() == Some(2), || format!("{missing:?}"))
}

#[test]
fn an_image_is_a_new_file_in_each_format() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    for (name, format) in Format::NAMES {
        let path = env.path(name);
        succeeds(env.vellum(&format!("judge image --out {} --format {name}", path.display()))?)?;
        ensure(fs::read(&path)? == image(format), || name.into())?;
        let again = env.vellum(&format!("judge image --out {}", path.display()))?;
        let said = String::from_utf8_lossy(&again.stderr).into_owned();
        ensure(again.status.code() == Some(2) && said.contains("exists"), || format!("{again:?}"))?;
    }
    Ok(())
}
