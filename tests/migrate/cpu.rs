//! CPU models: a guest has the features of its model and migrates with them. A host that lacks some
//! names them.

use std::fs;

use serde_json::Value;
use support::env::TestEnv;
use support::hosts::{kvm, real};
use support::{Failed, ensure, test};
use vellum_migration::message::Message;

use crate::relay::{Part, changed};
use crate::{ends_with, every_page_is_right, succeeds, with};

/// The model that `vellum doctor` prints with these arguments, and the names of its features.
fn model(env: &TestEnv, arguments: &str) -> Result<(String, Vec<String>), Failed> {
    let output = env.vellum(&format!("doctor {arguments}"))?;
    succeeds(&output)?;
    let text = String::from_utf8(output.stdout)?;
    let file: Value = serde_json::from_str(&text)?;
    let features = file["features"].as_array().ok_or("no features")?;
    Ok((text, features.iter().filter_map(|name| name.as_str().map(str::to_owned)).collect()))
}

#[test(kvm())]
fn a_guest_of_a_level_moves_there_and_back() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let doctor = String::from_utf8(env.vellum("doctor")?.stdout)?;
    // The highest level of this KVM. It may be a low one.
    let mut levels = doctor.split_whitespace().filter_map(|word| word.strip_suffix(';'));
    let level = levels.find(|word| word.starts_with("x86-64"));
    let level = level.ok_or_else(|| format!("no CPU model: {doctor}"))?;
    let workload = "--passes 0 --workload write,order=random,rate=20000";
    let line = format!("run --cpus 2 --memory 8m --cpu {level} --cpuid -pv-eoi {workload}");
    let mut here = env.run("m0", &line)?;
    for at in 1..3 {
        let json = env.path(&format!("{at}.json"));
        let there = env.receive(&format!("m{at}"), &format!("--json {}", json.display()))?;
        let how = "--verify --downtime 1s --timeout 5s,then=force";
        succeeds(&env.migrate(&format!("m{}", at - 1), &format!("m{at}"), how)?)?;
        ends_with(here, 15)?;
        here = there;
    }
    succeeds(&env.vellum("ctl m2 stop")?)?;
    ends_with(here, 0)?;
    every_page_is_right(&env.path("2.json"))
}

/// A model with a feature that this host lacks names the feature, the flag and what would work. A
/// file that is no model is refused.
#[test(real())]
fn a_model_that_this_host_lacks_is_refused_by_name() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let (text, here) = model(&env, "--cpu-json")?;
    // Features of AMD's Bulldozer and of recent Intel CPUs. No CPU has all of them.
    let lacks = ["fma4", "xop", "tbm", "movdir64b", "waitpkg"];
    let lacks = lacks.into_iter().find(|name| !here.iter().any(|has| has == name));
    let lacks = lacks.ok_or("this host has everything")?;
    let file = env.path("more.json");
    fs::write(&file, text.replace("\"features\": [", &format!("\"features\": [\n    \"{lacks}\",")))?;
    fs::write(env.path("none.json"), "{}")?;
    let more = format!("--cpu {}", file.display());
    let none = format!("--cpu {}", env.path("none.json").display());
    let offers = format!("does not offer {lacks};");
    for (flag, says) in [
        (more.as_str(), [&more, &offers, "would work here"]),
        (none.as_str(), ["--cpu", "none.json", "not a CPU model"]),
        ("--cpu x86-64-v9", ["--cpu", "x86-64-v9", "use host, x86-64-v2"]),
    ] {
        let refused = with(env.vellum(&format!("run --memory 8m {flag}"))?, 2)?;
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        ensure(says.iter().all(|part| said.contains(part)) && said.lines().count() == 1, || said.clone())?;
    }
    let refused = with(env.vellum(&format!("doctor --cpu-common {}", env.path("none.json").display()))?, 2)?;
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure(said.contains("--cpu-common") && said.lines().count() == 1, || said.clone())
}

/// The common model of two hosts, one of which lacks a feature of this host. A guest with it runs
/// here.
#[test(real())]
fn what_hosts_share_is_a_model() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let (text, here) = model(&env, "--cpu-json")?;
    let mut other: Value = serde_json::from_str(&text)?;
    let usual = ["avx2", "popcnt", "rdtscp", "clflushopt", "3dnowprefetch"];
    let lacks =
        here.iter().find(|name| usual.contains(&name.as_str())).ok_or("this host has none of them")?;
    other["features"].as_array_mut().ok_or("no list")?.retain(|name| name != lacks.as_str());
    let [one, two, both] = ["one", "two", "both"].map(|name| env.path(name));
    fs::write(&one, &text)?;
    fs::write(&two, other.to_string())?;
    let (common, features) = model(&env, &format!("--cpu-common {} {}", one.display(), two.display()))?;
    ensure(features.len() == here.len() - 1 && !features.contains(lacks), || common.clone())?;
    fs::write(&both, &common)?;
    succeeds(&env.vellum(&format!("run --memory 8m --cpu {}", both.display()))?)
}

/// A guest with features that the target lacks stays. All of them are named, with the flag that
/// avoids this.
#[test(real())]
fn features_that_a_target_lacks_are_named_with_the_flag() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let here = env.run("here", "run --memory 8m --passes 0 --workload write,rate=1000")?;
    let there = env.receive("there", "")?;
    let relay = env.path("relay.in");
    changed(&relay, env.path("there.in"), |part| {
        if let Part::Message(Message::Config { config, .. }) = part
            && let Some(leaves) = config["cpuid"].as_array_mut()
            && let Some(leaf) = leaves.iter_mut().find(|leaf| leaf[0] == 1 && leaf[3] == 0x80)
        {
            // Bits 16 and 21 of ECX, the word at 20 of a struct kvm_cpuid_entry2: FMA4 and TBM,
            // which current CPUs lack.
            leaf[22] = (leaf[22].as_u64().unwrap_or(0) | 1 << 0 | 1 << 5).into();
        }
    })?;
    let refused = with(env.migrate("here", "relay", "")?, 1)?;
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    let named =
        ["CPU features ", "fma4, tbm: present here, missing there", "-fma4", "vellum run --cpu x86-64-v2"];
    ensure(named.iter().all(|part| said.contains(part)), || said.clone())?;
    ends_with(there, 1)?;
    ensure(env.standing("here").as_deref() == Some("running"), || "it does not run on".into())?;
    succeeds(&env.vellum("ctl here stop")?)?;
    ends_with(here, 0).map(drop)
}
