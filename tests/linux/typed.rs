//! Interactive use: kvmtool's command line, requests on the serial console, a terminal, a
//! pseudo-terminal, files.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Output, Stdio};

use guest_agent::{Argument, Event, Request};
use support::{Failed, ensure, test};
use vellum_sys::terminal::open_pty;

use crate::VELLUM;
use crate::guest::{CLOCKSOURCE, Guest, Image, for_this_bed, scratch, taps};
use crate::whole_matrix;

/// Runs `vellum run` to its end, with the flags and options that this host needs.
fn run(flags: &[&str], cmdline: &str) -> Result<Output, Failed> {
    let (bed_flags, bed_cmdline) = for_this_bed();
    let mut command = Command::new(VELLUM);
    command.arg("run").args(flags).args(bed_flags).arg("--params").arg(format!("{bed_cmdline} {cmdline}"));
    Ok(command.stdin(Stdio::null()).output()?)
}

/// The events in a console's output.
fn events(console: &[u8]) -> Vec<Event> {
    let text = String::from_utf8_lossy(console);
    let event = |line: &str| serde_json::from_str(line[line.find("{\"event\"")?..].trim_end()).ok();
    text.lines().filter_map(event).collect()
}

/// The agent's request on a kernel's command line. The kernel would cut it at an equals sign.
fn after_dashes(line: &str) -> String {
    let request = Request::Exec { command: ["sh", "-c", line].map(Argument::from).to_vec() };
    format!("-- {}", serde_json::to_string(&request).expect("plain data"))
}

#[test(whole_matrix(), taps())]
fn kvmtools_command_line_boots_it() -> Result<(), Failed> {
    let image = &Image::oldest()?;
    let scratch = scratch()?;
    let disk = scratch.path("disk");
    let mut content = b"what is on the disk\n".to_vec();
    content.resize(1 << 20, 0);
    fs::write(&disk, content)?;
    let (kernel, initrd, disk) = (image.kernel(), image.initrd(), disk.display().to_string());
    let line = "grep -c ^processor /proc/cpuinfo; head -n 1 /dev/vda; ip addr add 192.168.33.2/24 dev eth0; \
                ip link set eth0 up; ping -c 1 192.168.33.1 | grep -o ', 0% packet loss'; free -m | awk 'NR == 2 {print $2}'";
    // It may contain no equals sign.
    let line = line.replace("NR == 2 {print $2}", "/Mem:/ {print $2}");
    let flags = ["-k", &kernel, "-i", &initrd, "-c", "2", "-m", "512", "-d", &disk, "--network", "mode=tap"];
    let output = run(&[&flags[..], &["--timeout", "300s"]].concat(), &after_dashes(&line))?;
    let said: String = events(&output.stdout)
        .into_iter()
        .filter_map(|event| if let Event::Output { text, .. } = event { Some(text) } else { None })
        .collect();
    let rows: Vec<&str> = said.lines().collect();
    let memory = rows.get(3).and_then(|row| row.parse::<u32>().ok()).unwrap_or(0);
    let right = rows.len() == 4 && rows[..3] == ["2", "what is on the disk", ", 0% packet loss"];
    ensure(output.status.success() && right && (400..=512).contains(&memory), || format!("{output:?}"))?;

    let flags = ["--kernel", &kernel, "--initrd", &initrd, "--cpus", "1", "--network", "mode=none"];
    let scripts = ["--nodefaults", "--loglevel=warning", "--timeout", "300s"];
    let output =
        run(&[&flags[..], &scripts].concat(), "console=ttyS0 reboot=k panic=-1 -- {\"do\":\"facts\"}")?;
    let facts = events(&output.stdout);
    ensure(
        output.status.success() && matches!(facts[..], [Event::Facts { cpus: 1, .. }, Event::Done]),
        || format!("{facts:?}, {output:?}"),
    )
}

/// Every workload, one after the other on one line, which kernel messages share.
#[test(whole_matrix())]
fn the_agent_works_on_the_serial_port_alone() -> Result<(), Failed> {
    let image = &Image::oldest()?;
    let scratch = scratch()?;
    let disk = scratch.path("disk");
    fs::write(&disk, vec![0; 2 << 20])?;
    let mut flags = ["--kernel", &image.kernel(), "--disk"].map(str::to_owned).to_vec();
    flags.push(disk.display().to_string());
    let mut guest = Guest::start_as(scratch, image, "", flags)?;
    guest.ready()?;
    let mut answer = |request: &str| -> Result<Vec<Event>, Failed> {
        guest.type_line(request)?;
        let mut all = Vec::new();
        loop {
            match guest.next_event()? {
                Event::Done => return Ok(all),
                event => all.push(event),
            }
        }
    };
    for pattern in ["sequential", "random", "once"] {
        let request =
            format!(r#"{{"do":"memory","mib":16,"rate_mib":8,"pattern":"{pattern}","seconds":2,"seed":3}}"#);
        let seconds = answer(&request)?;
        for event in &seconds {
            // 8 MiB a second are 2048 pages, and at most one slice more in a second.
            let Event::Memory { pages: 1..=2100, p50_ns, p99_ns, max_ns, wrong: 0, .. } = event else {
                return Err(format!("{pattern}: {event:?}").into());
            };
            ensure(p50_ns <= p99_ns && p99_ns <= max_ns, || format!("{pattern}: {event:?}"))?;
        }
        ensure(seconds.len() == 2, || format!("{pattern}: {seconds:?}"))?;
    }
    let passes = answer(r#"{"do":"disk","path":"/dev/vda","mib":2,"passes":3}"#)?;
    let right = |event: &Event| matches!(event, Event::Disk { bytes: 0x20_0000, wrong: 0, .. });
    ensure(passes.len() == 3 && passes.iter().all(right), || format!("{passes:?}"))?;
    let clock = answer(r#"{"do":"clock","seconds":1}"#)?;
    ensure(matches!(clock[..], [Event::Clock { backwards: 0, .. }]), || format!("{clock:?}"))?;
    let ring = answer(r#"{"do":"lat-ctx","tasks":3,"rounds":20,"repeat":2}"#)?;
    let went_round = |event: &Event| matches!(event, Event::LatCtx { switches: 60, ring_ns: 1.., .. });
    ensure(ring.len() == 2 && ring.iter().all(went_round), || format!("{ring:?}"))?;
    for more in ["", r#","pipes":true"#, r#","threads":true"#] {
        let all = answer(&format!(r#"{{"do":"hackbench","pairs":3,"messages":2{more}}}"#))?;
        let came = matches!(all[..], [Event::Hackbench { tasks: 6, messages: 18, ns: 1.. }]);
        ensure(came, || format!("{more}: {all:?}"))?;
    }
    let refused = answer(r#"{"do":"lat-ctx","tasks":1}"#)?;
    let named = |event: &Event| matches!(event, Event::Error { message } if message.contains("2 to 400"));
    ensure(refused.len() == 1 && refused.iter().all(named), || format!("{refused:?}"))?;
    let refused = answer(r#"{"do":"memory","mib":0,"seconds":1}"#);
    ensure(matches!(&refused, Ok(all) if matches!(all[..], [Event::Error { .. }])), || {
        format!("{refused:?}")
    })?;
    // A terminal in canonical mode would cut it at 4095 bytes.
    let long = "x".repeat(20_000);
    let counted =
        answer(&format!(r#"{{"do":"exec","command":["sh","-c","printf %s $0 | wc -c","{long}"]}}"#))?;
    ensure(
        matches!(&counted[..], [Event::Output { text, .. }, Event::Exit { code: 0 }] if text == "20000\n"),
        || format!("{counted:?}"),
    )?;
    guest.type_line(r#"{"do":"power-off"}"#)?;
    guest.wait()?.with(0).map(drop)
}

/// Reads from `file` until `word` has come. Returns what was read.
pub fn until(file: &mut impl Read, word: &str) -> Result<String, Failed> {
    until_any(file, &[word])
}

/// Reads from `file` until one of `words` has come. Returns what was read, with the word at its
/// end.
pub fn until_any(file: &mut impl Read, words: &[&str]) -> Result<String, Failed> {
    let mut said = String::new();
    let mut byte = [0];
    while !words.iter().any(|word| said.ends_with(word)) {
        // A terminal whose other end is closed gives an error. A file ends.
        let count = file.read(&mut byte).map_err(|error| format!("{error} after: {said}"))?;
        ensure(count == 1, || format!("none of {words:?} came: {said}"))?;
        said.push(byte[0].into());
    }
    Ok(said)
}

/// Ctrl-C goes to the guest, like every key except Ctrl-A x. The terminal is restored afterwards.
#[test(whole_matrix())]
fn a_terminal_is_the_guests_but_for_ctrl_a_x() -> Result<(), Failed> {
    let image = &Image::oldest()?;
    let (bed_flags, bed_cmdline) = for_this_bed();
    let (mut master, slave, name) = open_pty()?;
    let stty = |arguments: &[&str]| Command::new("stty").args(["-F", &name]).args(arguments).output();
    stty(&["sane"])?;
    let mut child = Command::new("setsid")
        .args(["-c", VELLUM, "run", "-k", &image.kernel(), "-i", &image.initrd(), "--timeout", "300s"])
        .args(bed_flags)
        .args(["-p", bed_cmdline])
        .stdin(slave.try_clone()?)
        .stdout(slave.try_clone()?)
        .stderr(slave)
        .spawn()?;
    until(&mut master, "\"event\":\"ready\"")?;
    master.write_all(b"\x03{\"do\":\"facts\"}\r")?;
    until(&mut master, &format!("\"clocksource\":\"{CLOCKSOURCE}\""))?;
    master.write_all(b"\x01x")?;
    let status = child.wait()?;
    ensure(status.code() == Some(0), || format!("{status:?}"))?;
    let mode = String::from_utf8(stty(&["-a"])?.stdout)?;
    // busybox prints only settings that differ from the defaults.
    let raw = ["-echo ", "-icanon", "-isig"].into_iter().find(|word| mode.contains(word));
    ensure(raw.is_none(), || format!("the terminal stays raw: {mode}"))
}

#[test(whole_matrix())]
fn serial_on_a_pty_and_into_a_file() -> Result<(), Failed> {
    let image = &Image::oldest()?;
    let (kernel, initrd, scratch) = (image.kernel(), image.initrd(), scratch()?);
    let (bed_flags, bed_cmdline) = for_this_bed();
    let mut child = Command::new(VELLUM)
        .args(["run", "--serial", "pty", "-k", &kernel, "-i", &initrd, "--timeout", "300s"])
        .args(bed_flags)
        .args(["-p", bed_cmdline])
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut line = String::new();
    BufReader::new(child.stderr.take().ok_or("piped")?).read_line(&mut line)?;
    let name = line.trim().strip_prefix("vellum: the serial port is ").ok_or(line.clone())?;
    let mut port = fs::OpenOptions::new().read(true).write(true).open(name)?;
    until(&mut port, "\"event\":\"ready\"")?;
    port.write_all(b"{\"do\":\"power-off\"}\r")?;
    let status = child.wait()?;
    ensure(status.code() == Some(0), || format!("pty: {status:?}"))?;

    let path = scratch.path("console");
    let target = format!("file={}", path.display());
    let flags = |serial| ["-k", &kernel, "-i", &initrd, "--timeout", "300s", "--serial", serial];
    let output = run(&flags(&target), "-- {\"do\":\"facts\"}")?;
    let said = fs::read(&path)?;
    let right = output.status.success() && output.stdout.is_empty();
    ensure(right && matches!(events(&said)[..], [Event::Facts { .. }, Event::Done]), || {
        format!("file: {output:?}: {}", String::from_utf8_lossy(&said))
    })?;
    let output = run(&flags("null"), "-- {\"do\":\"facts\"}")?;
    ensure(output.status.success() && output.stdout.is_empty(), || format!("null: {output:?}"))
}
