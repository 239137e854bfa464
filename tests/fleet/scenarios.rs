//! What happens to a plan on a cluster: scenarios that run in the namespaces.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use support::{Failed, ensure};
use vellum_fleet::merge::{self, Merged};
use vellum_fleet::plan::{self, Plan};
use vellum_fleet::result;
use vellum_report::Status;

use super::cluster::{Cluster, output, vellum};

/// Runs the scenario `name`.
pub fn run(name: &str) -> ExitCode {
    let ended = match name {
        "short" => short(),
        "thousand" => thousand(),
        "deaths" => deaths(),
        "full" => full(),
        "oracle" => oracle(),
        _ => Err(format!("{name}: no such scenario").into()),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}", error.message().unwrap_or("it failed"));
            ExitCode::FAILURE
        }
    }
}

/// A part of a plan: a fast test of the oracle.
fn quick(name: &str, seeds: u64) -> String {
    format!(
        "[[test]]\nname = \"{name}\"\nrun = \"test dirty-log\"\nfeatures = [\"kvm\"]\nseeds = {seeds}\n[test.arguments]\n{SMALL}events = 2000\n"
    )
}

const SMALL: &str = "memory = \"4m\"\nbacking = \"anonymous\"\ntracker = \"bitmap\"\ncpus = 1\n";

/// A part of a plan: a test of this many seconds.
fn slow(name: &str, seconds: u64) -> String {
    format!(
        "[[test]]\nname = \"{name}\"\nrun = \"test dirty-log\"\n[test.arguments]\n{SMALL}duration = \"{seconds}s\"\n"
    )
}

/// A part of a plan: a test that loses a page.
fn planted() -> String {
    format!(
        "[[test]]\nname = \"planted\"\nrun = \"test dirty-log\"\nfirst_seed = 4711\n[test.arguments]\n{SMALL}events = 2000\ninject = \"lose=1\"\n"
    )
}

/// The merged results of a plan, by the library. The command must agree.
fn merged(file: &Path) -> Result<Merged, Failed> {
    let plan = Plan::read(file, &|_| Ok(Some("--seed".into()))).map_err(|error| error.to_string())?;
    let merged =
        merge::merge(&plan, &plan::results(file), &|test, seed, node| format!("{test} {seed} {node}"));
    let said = output(&["fleet", "merge", &file.to_string_lossy()])?;
    let well = match merged.status() {
        Status::Pass => 0,
        Status::Skip => 4,
        _ => 1,
    };
    let text = String::from_utf8_lossy(&said.stdout).into_owned();
    ensure(said.status.code() == Some(well), || format!("merge ended with {}: {text}", said.status))?;
    // Each task is counted once, however many attempts it had.
    let counted: u64 = merged.hosts.values().map(|host| host.tasks).sum();
    ensure(counted == merged.ended && merged.ended <= merged.tasks, || {
        format!("{counted} are counted: {text}")
    })?;
    let (events, alone) = (merged.events.values().map(|events| events.events).sum::<f64>(), events(file)?);
    ensure(events == alone, || format!("{events} events are summed, and the results have {alone}: {text}"))?;
    Ok(merged)
}

/// The events in the last result of each task, read from the files alone.
fn events(file: &Path) -> Result<f64, Failed> {
    let mut last: BTreeMap<u64, ((u64, f64), f64)> = BTreeMap::new();
    for path in results(file)? {
        let bytes = fs::read(&path)?;
        let (header, reports) = result::parse(&bytes).map_err(|why| format!("{}: {why}", path.display()))?;
        let figures = reports.iter().flat_map(|report| &report.figures);
        let events = figures.filter(|figure| figure.label.name == "events" && figure.label.index.is_some());
        let (of, events) = ((header.attempt, header.ended), events.map(|figure| figure.value()).sum());
        let kept = last.entry(header.index).or_insert((of, events));
        if of >= kept.0 {
            *kept = (of, events);
        }
    }
    Ok(last.values().map(|(_, events)| events).sum())
}

/// The result files of a plan.
fn results(file: &Path) -> Result<Vec<PathBuf>, Failed> {
    let mut all = Vec::new();
    for shard in fs::read_dir(plan::results(file)).into_iter().flatten() {
        for entry in fs::read_dir(shard?.path())? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "json") {
                all.push(path);
            }
        }
    }
    Ok(all)
}

fn is_whole(merged: &Merged) -> Result<(), Failed> {
    let gone = (merged.all_missing, merged.vanished.count, merged.refused.count, merged.failed.count);
    ensure(merged.ended == merged.tasks && gone == (0, 0, 0, 0), || format!("{merged:#?}"))
}

/// Two nodes, a lost page, a task that is requeued, and a duplicate result, in a directory whose
/// name is special to a shell and to sbatch.
fn short() -> Result<(), Failed> {
    let cluster = Cluster::start(2)?;
    let text = format!("name = \"short\"\n{}{}{}", slow("slow", 8), planted(), quick("quick", 6));
    let plan = cluster.plan("short %j'; touch pwned; $(touch pwned) \n#SBATCH --wrap=id", &text)?;
    let said = cluster.submit(&plan)?;
    // An array for each set of features. Two of the tests need none.
    ensure(said.contains("8 tasks in 2 arrays"), || said.clone())?;
    let again = cluster.submit(&plan)?;
    ensure(again.contains("0 tasks in 0 arrays"), || again.clone())?;
    let job = cluster.job("the slow task runs", |job| job.index == 0 && job.state == "RUNNING")?;
    cluster.eventually("it has left its mark", |_| Ok(mark(&plan, 0)?.then_some(())))?;
    cluster.client("scontrol", &["requeue", &job.id])?;
    let status = vellum(&["fleet", "status", &plan.to_string_lossy()])?;
    ensure(status.contains("of 8 tasks have a result"), || status.clone())?;
    cluster.drained()?;
    let beside = |name: &str| plan.with_file_name(name).exists() || cluster.dir.join(name).exists();
    ensure(beside("said") && !beside("pwned"), || "a directory's name was taken for more than that".into())?;
    let twice = results(&plan)?.pop().ok_or("no result")?;
    let name = twice.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let (stem, _) = name.rsplit_once('-').ok_or("no name of a result")?;
    fs::copy(&twice, twice.with_file_name(format!("{stem}-twice.json")))?;
    let merged = merged(&plan)?;
    is_whole(&merged)?;
    let lost: Vec<_> = merged.losses.iter().map(|loss| (loss.test.as_str(), loss.seed)).collect();
    ensure(lost == [("planted", 4711)] && merged.all_losses == 1, || format!("{merged:#?}"))?;
    ensure(merged.requeued.count == 1 && merged.doubled.count == 1, || format!("{merged:#?}"))
}

/// A thousand tasks on three nodes, one of which loses a page. The controller dies once, and a node
/// is removed once.
fn thousand() -> Result<(), Failed> {
    let mut cluster = Cluster::start(3)?;
    let text = format!("name = \"thousand\"\n{}{}{}", quick("first", 600), planted(), quick("second", 399));
    let plan = cluster.plan("thousand", &text)?;
    let said = cluster.submit(&plan)?;
    // An array index is at most 500: two arrays for the tests that need a feature, and one for the
    // test that needs none. The controller accepts 900 jobs.
    ensure(said.contains("900 tasks in 3 arrays") && said.contains("100 are left"), || said.clone())?;
    let have = |cluster: &Cluster, so_many: usize| {
        cluster.resume()?;
        Ok((results(&plan)?.len() >= so_many).then_some(()))
    };
    cluster.eventually("200 results", |cluster| have(cluster, 200))?;
    let said = cluster.submit(&plan)?;
    ensure(said.contains("100 tasks in 1 array") && !said.contains("left"), || said.clone())?;
    cluster.kill_controller()?;
    cluster.start_controller()?;
    cluster.eventually("500 results", |cluster| have(cluster, 500))?;
    cluster.client("scontrol", &["update", "NodeName=n2", "State=DOWN", "Reason=test"])?;
    cluster.eventually("600 results", |cluster| have(cluster, 600))?;
    cluster.client("scontrol", &["update", "NodeName=n2", "State=RESUME"])?;
    cluster.drained()?;
    // The controller may have forgotten some when it died.
    cluster.submit(&plan)?;
    cluster.drained()?;
    let all = merged(&plan)?;
    is_whole(&all)?;
    ensure(all.tasks == 1000 && all.all_losses == 1 && all.hosts.len() == 3, || format!("{all:#?}"))?;
    let loss = &all.losses[0];
    println!("1 of {} tasks lost a page: {} with seed {} on {}", all.tasks, loss.test, loss.seed, loss.node);
    let again = ["fleet", "rerun", &plan.to_string_lossy(), "4711", "--times", "5", "--host", &loss.node];
    vellum(&again)?;
    cluster.drained()?;
    let rerun = merged(&cluster.dir.join(format!("thousand/again-planted-4711-5-{}/plan.toml", loss.node)))?;
    let there = rerun.hosts.keys().eq([&loss.node]);
    let tried: Vec<_> = rerun.tried.values().collect();
    ensure(rerun.all_losses == 5 && rerun.ended == 5 && there && tried == [&[5, 5]], || format!("{rerun:#?}"))
}

/// Daemons are killed while a task runs, and a node is set down.
fn deaths() -> Result<(), Failed> {
    let mut cluster = Cluster::start(3)?;
    // A node's daemon dies. The controller requeues its task on another node, and the task that the
    // daemon had started runs on.
    let text = format!("name = \"daemon\"\n{}{}", slow("slow", 40), quick("quick", 12));
    let plan = cluster.plan("daemon", &text)?;
    cluster.submit(&plan)?;
    let first = cluster.job("the slow task runs", |job| job.state == "RUNNING" && job.index == 0)?;
    cluster.eventually("it has left its mark", |_| Ok(mark(&plan, 0)?.then_some(())))?;
    cluster.kill_node(&first.node)?;
    let second = cluster.job("it runs elsewhere", |job| {
        job.id == first.id && job.state == "RUNNING" && job.node != first.node
    })?;
    cluster.drained()?;
    cluster.eventually("both attempts have ended", |_| Ok((results(&plan)?.len() == 14).then_some(())))?;
    let all = merged(&plan)?;
    is_whole(&all)?;
    let named = format!("attempt 0 on {}, attempt 1 on {}", first.node, second.node);
    ensure(all.doubled.first.iter().any(|line| line.contains(&named)), || format!("{named}: {all:#?}"))?;
    println!("slurmd of {} killed: {}", first.node, all.doubled.first.join("; "));
    cluster.start_node(&first.node)?;

    // The controller dies, and a new one continues from its saved state.
    let text = format!("name = \"controller\"\n{}{}", slow("slow", 10), quick("quick", 12));
    let plan = cluster.plan("controller", &text)?;
    cluster.submit(&plan)?;
    cluster.job("the slow task runs", |job| job.state == "RUNNING" && job.index == 0)?;
    cluster.eventually("it has left its mark", |_| Ok(mark(&plan, 0)?.then_some(())))?;
    cluster.kill_controller()?;
    // Without a controller the queue is unknown, and the command says so.
    let status = output(&["fleet", "status", &plan.to_string_lossy()])?;
    ensure(status.status.code() == Some(1), || format!("{status:?}"))?;
    cluster.start_controller()?;
    cluster.drained()?;
    // Tasks that the controller had not saved are lost. The merge names them, and they are
    // submitted again.
    let some = merged(&plan)?;
    ensure(some.ended + some.all_missing + some.vanished.count == 13, || format!("{some:#?}"))?;
    let again = cluster.submit(&plan)?;
    cluster.drained()?;
    let all = merged(&plan)?;
    is_whole(&all)?;
    ensure(all.ended == 13, || format!("{all:#?}"))?;
    println!("slurmctld killed: {} of 13 tasks had a result then; {}", some.ended, again.trim());

    // A node is set down. Its task is ended there, and requeued elsewhere.
    let text = format!("name = \"node\"\n{}{}", slow("slow", 15), quick("quick", 6));
    let plan = cluster.plan("node", &text)?;
    cluster.submit(&plan)?;
    let first = cluster.job("the slow task runs", |job| job.state == "RUNNING" && job.index == 0)?;
    cluster.eventually("it has left its mark", |_| Ok(mark(&plan, 0)?.then_some(())))?;
    cluster
        .client("scontrol", &["update", &format!("NodeName={}", first.node), "State=DOWN", "Reason=test"])?;
    cluster.job("it runs elsewhere", |job| {
        job.id == first.id && job.state == "RUNNING" && job.node != first.node
    })?;
    cluster.drained()?;
    let all = merged(&plan)?;
    is_whole(&all)?;
    ensure(all.requeued.count == 1 && all.ended == 7, || format!("{all:#?}"))?;
    println!("{} set down: {}", first.node, all.requeued.first.join("; "));
    Ok(())
}

/// Whether an attempt of a task has recorded its start.
fn mark(plan: &Path, attempt: u64) -> Result<bool, Failed> {
    let shard = result::shard(&plan::results(plan), 0);
    let names = fs::read_dir(shard).into_iter().flatten().flatten();
    let begun = |name: String| {
        result::named(&name).is_some_and(|(index, of, ended)| (index, of, ended) == (0, attempt, false))
    };
    Ok(names.into_iter().any(|entry| begun(entry.file_name().to_string_lossy().into_owned())))
}

/// The shared directory is on a small file system that fills up.
fn full() -> Result<(), Failed> {
    let cluster = Cluster::start(2)?;
    let disk = cluster.dir.join("disk");
    fs::create_dir(&disk)?;
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=1m", "none"]).arg(&disk).output()?;
    ensure(mounted.status.success(), || format!("{mounted:?}"))?;
    let plan = cluster.plan_in(&disk.join("plan"), &format!("name = \"full\"\n{}", quick("quick", 8)))?;
    // All but a few pages are used: the files of a submission and some start marks fit, but hardly
    // a result.
    let filler = disk.join("filler");
    let mut kept = 1 << 20;
    while fs::write(&filler, vec![0; kept]).is_err() {
        kept -= 4096;
    }
    fs::write(&filler, vec![0; kept - 6 * 4096])?;
    cluster.submit(&plan)?;
    cluster.drained()?;
    let none = merged(&plan)?;
    ensure(none.ended < none.tasks && none.refused.count == 0 && none.failed.count == 0, || {
        format!("{none:#?}")
    })?;
    let named = none.ended + none.all_missing + none.vanished.count;
    ensure(named == none.tasks, || format!("{named} are named: {none:#?}"))?;
    println!(
        "full: {} of {} have a result, {} vanished, {} are missing",
        none.ended, none.tasks, none.vanished.count, none.all_missing
    );
    let temporary = fs::read_dir(result::shard(&plan::results(&plan), 0)).into_iter().flatten().flatten();
    let left: Vec<_> = temporary
        .map(|entry| entry.file_name())
        .filter(|name| name.to_string_lossy().starts_with('.'))
        .collect();
    ensure(left.is_empty(), || format!("{left:?}"))?;
    fs::remove_file(&filler)?;
    cluster.submit(&plan)?;
    cluster.drained()?;
    let all = merged(&plan)?;
    is_whole(&all)?;
    ensure(all.status() == Status::Pass, || format!("{all:#?}"))
}

/// A real use: every tracker on every backing that this host has.
fn oracle() -> Result<(), Failed> {
    let cluster = Cluster::start(3)?;
    let trackers = ["bitmap", "manual-protect", "initially-set", "ring"];
    let tests = trackers.map(|tracker| {
        format!(
            "[[test]]\nname = \"{tracker}\"\nrun = \"test dirty-log\"\nfeatures = [\"kvm\"]\nseeds = 6\nminutes = 20\n\
             [test.arguments]\ntracker = \"{tracker}\"\nmemory = \"32m\"\nevents = \"30k\"\n"
        )
    });
    let plan = cluster.plan("oracle", &format!("name = \"oracle\"\n{}", tests.concat()))?;
    cluster.submit(&plan)?;
    cluster.drained()?;
    let all = merged(&plan)?;
    is_whole(&all)?;
    ensure(all.all_losses == 0 && all.hosts.len() == 3, || format!("{all:#?}"))?;
    for tracker in trackers {
        ensure(all.events.keys().any(|alike| alike.tracker == tracker), || {
            format!("{tracker}: {:#?}", all.events)
        })?;
    }
    println!("{}", vellum(&["fleet", "merge", &plan.to_string_lossy()])?);
    let page = std::env::var("VELLUM_FLEET_PAGE")
        .unwrap_or_else(|_| cluster.dir.join("page.html").display().to_string());
    vellum(&["fleet", "merge", &plan.to_string_lossy(), "--html", &page])?;
    let page = fs::read_to_string(&page)?;
    ensure(cluster.nodes.iter().all(|node| page.contains(&format!("<th>{node}</th>"))), || page.clone())
}
