//! What the target checks when a machine arrives: that its TSC fits, and that all of its memory can
//! be populated.

use std::fs;
use std::os::raw::c_ulong;
use std::process::Command;
use std::sync::mpsc::channel;

use serde_json::Value;
use support::env::{TestEnv, patient};
use support::guests::Code;
use support::hosts::{huge_pages, real};
use support::{Failed, LIMIT, ensure, eventually, test};
use vellum_migration::message::Message;

use crate::relay::{Part, changed, changed_back};
use crate::{ends_with, every_page_is_right, kib, succeeds, with};

/// KVM_CAP_TSC_CONTROL (include/uapi/linux/kvm.h).
const TSC_CONTROL: c_ulong = 60;

/// The TSC frequency that the relay gives the guest: a percentage of that of this host's guests.
fn planted(khz: &Value, percent: u64) -> Value {
    khz.as_u64().map(|khz| khz * percent / 100).into()
}

/// The guest has a TSC of another frequency, a higher or a lower one. If the host cannot scale
/// TSCs, the target refuses it and both frequencies are named. If the target allows it, it arrives.
/// KVM itself would accept a higher frequency and emulate it.
#[test(real())]
fn a_tsc_of_another_frequency_is_refused_unless_that_is_allowed() -> Result<(), Failed> {
    let scales = vellum_kvm::vm::open()?.check_extension_raw(TSC_CONTROL) > 0;
    for percent in [110, 90] {
        let env = TestEnv::new()?;
        let (relay, json) = (env.path("relay.in"), env.path("json"));
        let here = env.run("here", "run --memory 8m --passes 0 --workload write,rate=1000")?;
        let other = move |part: &mut Part| match part {
            Part::Message(Message::Config { config, .. }) => {
                config["tsc_khz"] = planted(&config["tsc_khz"], percent)
            }
            Part::Section(name, state) if name == "vcpu0" => {
                state["tsc_khz"] = planted(&state["tsc_khz"], percent)
            }
            _ => (),
        };
        let line = format!("migrate here --to unix:{}", relay.display());
        if !scales {
            let there = env.receive("there", "")?;
            changed(&relay, env.path("there.in"), other)?;
            let refused = with(env.vellum(&line)?, 1)?;
            let said = String::from_utf8_lossy(&refused.stderr).into_owned();
            let khz =
                |at: &str| said.split(&format!(" kHz {at}")).next()?.rsplit(' ').next()?.parse::<u64>().ok();
            let both = khz("here").zip(khz("there"));
            let named = both.is_some_and(|(here, there)| (there * percent / 100).abs_diff(here) <= 1);
            ensure(named && said.contains("TSC: ") && said.lines().count() == 1, || said.clone())?;
            ensure(env.standing("here").as_deref() == Some("running"), || "it does not run on".into())?;
            ends_with(there, 1)?;
            fs::remove_file(&relay)?;
        }
        let allows = env.receive("allows", &format!("--tsc-mismatch allow --json {}", json.display()))?;
        changed(&relay, env.path("allows.in"), other)?;
        succeeds(&env.vellum(&line)?)?;
        ends_with(here, 15)?;
        succeeds(&env.vellum("ctl allows stop")?)?;
        ends_with(allows, 0)?;
        every_page_is_right(&json)?;
    }
    Ok(())
}

/// A machine with a shared directory of this host moves, as long as its guest has not mounted that.
#[test(real())]
fn a_machine_with_a_directory_that_is_not_mounted_moves() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let (kernel, shared) = (env.path("kernel"), env.path("shared"));
    fs::write(&kernel, Code::default().spin().elf64())?;
    fs::create_dir(&shared)?;
    let share = format!("--serial null --share {}:data,as-root", shared.display());
    let here = env.run("here", &format!("run --kernel {} --memory 16m {share}", kernel.display()))?;
    let there = env.receive("there", &share)?;
    succeeds(&env.migrate("here", "there", "")?)?;
    with(here.end_with(&["vellum-guard", "vellum-share"])?, 15)?;
    ensure(env.standing("there").as_deref() == Some("running"), || "it does not run there".into())?;
    succeeds(&env.vellum("ctl there stop")?)?;
    with(there.end_with(&["vellum-guard", "vellum-share"])?, 0).map(drop)
}

/// A machine with a disk overlay can be neither migrated nor saved. The flag is named, and the
/// machine runs on.
#[test(real())]
fn a_machine_with_a_disk_overlay_stays() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let (kernel, disk) = (env.path("kernel"), env.path("disk"));
    fs::write(&kernel, Code::default().spin().elf64())?;
    fs::write(&disk, vec![0; 1 << 20])?;
    let disk = format!("--disk {},overlay=discard", disk.display());
    let here =
        env.run("here", &format!("run --kernel {} --memory 16m --serial null {disk}", kernel.display()))?;
    let snapshot = format!("snapshot here {}", env.path("snap").display());
    for line in [&format!("migrate here --to unix:{}", env.path("nobody").display()), &snapshot] {
        let said = String::from_utf8(with(env.vellum(line)?, 2)?.stderr)?;
        let named = said.contains("--disk: disk0: ") && said.contains("neither saved nor moved");
        ensure(named && said.lines().count() == 1, || said.clone())?;
    }
    // Requests of other clients are refused too.
    let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
    let mut client = vellum_control::client::Client::connect(&env.socket("here"))?;
    let asked = r#"{"downtime_ms":1,"timeout_ms":1,"chain":"x","number":0}"#;
    let asked = vellum_control::Do::Snapshot(serde_json::from_str(asked)?);
    let descriptors = [&ours, &theirs, &ours].map(std::os::fd::AsFd::as_fd);
    let refused = client.ask_with(&asked, &descriptors).err().map(|error| error.to_string());
    ensure(refused.as_ref().is_some_and(|why| why.contains("disk0: ")), || format!("{refused:?}"))?;
    ensure(env.standing("here").as_deref() == Some("running"), || "it does not run on".into())?;
    succeeds(&env.vellum("ctl here stop")?)?;
    with(here.end()?, 0).map(drop)
}

/// The resident KiB of those mappings of process `pid` that are at least `least` KiB large.
fn resident(pid: u32, least: u64) -> Result<u64, Failed> {
    let maps = fs::read_to_string(format!("/proc/{pid}/smaps"))?;
    let of = |name: &str| -> Vec<u64> { maps.lines().filter_map(|line| kib(line, name)).collect() };
    let (sizes, plain) = (of("Size:"), of("Rss:"));
    let huge =
        of("Private_Hugetlb:").into_iter().zip(of("Shared_Hugetlb:")).map(|(own, shared)| own + shared);
    let there = sizes.iter().zip(plain.into_iter().zip(huge));
    Ok(there.filter(|(size, _)| **size >= least).map(|(_, (plain, huge))| plain + huge).sum())
}

/// With prealloc all memory is populated before the target is ready, on each backing, even if the
/// guest has barely touched it.
#[test(real())]
fn memory_is_there_before_the_target_is_ready_where_that_is_asked_for() -> Result<(), Failed> {
    there_before_ready(&["anonymous", "memfd"])
}

#[test(real(), huge_pages(2 << 20, MIB / 2))]
fn huge_pages_are_there_before_the_target_is_ready() -> Result<(), Failed> {
    there_before_ready(&["hugetlb-2m"])
}

/// The guest's memory in MiB.
const MIB: u64 = 64;

fn there_before_ready(backings: &[&str]) -> Result<(), Failed> {
    for backing in backings {
        for prealloc in ["on", "off"] {
            let env = TestEnv::new()?;
            let kernel = env.path("kernel");
            fs::write(&kernel, Code::default().spin().elf64())?;
            let line = format!("run --kernel {} --memory {MIB}m --serial null", kernel.display());
            let here = env.run("here", &line)?;
            let memory = format!("--serial null --memory backing={backing},prealloc={prealloc}");
            let there = env.receive("there", &memory)?;
            // While the target populates memory, it says so with READY for no attempt.
            let (release, until) = channel::<()>();
            changed_back(&env.path("relay.in"), env.path("there.in"), move |part| {
                if let Part::Message(Message::Ready { attempt: 1.. }) = part {
                    // The end of the sender is the release.
                    let _ = until.recv();
                }
            })?;
            let to = env.path("relay.in");
            let line = format!("migrate here --to unix:{} {}", to.display(), patient("--downtime 1h"));
            let client = env.migration_client(&line)?;
            eventually(LIMIT, "it is ready", || {
                Ok((env.standing("there").as_deref() == Some("uncommitted")).then_some(()))
            })?;
            let there_is = resident(there.child.id(), MIB << 10)?;
            ensure((there_is >= MIB << 10) == (prealloc == "on"), || {
                format!("{backing}, prealloc={prealloc}: {there_is} KiB of {MIB} MiB are there")
            })?;
            drop(release);
            with(client.output()?, 0)?;
            ends_with(here, 15)?;
            succeeds(&env.vellum("ctl there stop")?)?;
            ends_with(there, 0)?;
        }
    }
    Ok(())
}

/// More memory than the host has is refused before a page is sent. A target that gets a signal
/// while it populates memory ends at once.
#[test(real())]
fn memory_that_cannot_all_be_there_is_refused_and_a_signal_ends_populating() -> Result<(), Failed> {
    let meminfo = fs::read_to_string("/proc/meminfo")?;
    let available =
        meminfo.lines().find_map(|line| kib(line, "MemAvailable:")).ok_or("no MemAvailable")? >> 20;
    let env = TestEnv::new()?;
    let kernel = env.path("kernel");
    fs::write(&kernel, Code::default().spin().elf64())?;
    let run = |name: &str, gib: u64| {
        env.run(name, &format!("run --kernel {} --memory {gib}g --serial null", kernel.display()))
    };
    let large = run("large", available + 2)?;
    let there = env.receive("there", "--serial null --memory anonymous,prealloc")?;
    let refused = with(env.migrate("large", "there", "")?, 1)?;
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure(
        said.contains("memory: ") && said.contains(" is more than the ") && said.lines().count() == 1,
        || said.clone(),
    )?;
    ensure(env.standing("large").as_deref() == Some("running"), || "it does not run on".into())?;
    ends_with(there, 1)?;
    drop(large);
    let _here = run("here", (available / 2).max(1))?;
    let there = env.receive("there", "--serial null --memory anonymous,prealloc")?;
    let client = env.migration_client(&format!(
        "migrate here --liveness 1h --to unix:{}",
        env.path("there.in").display()
    ))?;
    // Part of the memory is populated, but far from all.
    eventually(LIMIT, "it populates", || Ok((resident(there.child.id(), 1 << 20)? > 0).then_some(())))?;
    let standing = env.standing("there");
    ensure(standing.as_deref() == Some("incoming"), || format!("it is {standing:?}"))?;
    succeeds(&Command::new("kill").args(["-INT", &there.child.id().to_string()]).output()?)?;
    ends_with(there, 128 + 2)?;
    with(client.output()?, 1)?;
    ensure(env.standing("here").as_deref() == Some("running"), || "it does not run on".into())
}
