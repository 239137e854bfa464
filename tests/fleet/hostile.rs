//! Plans, directories, host names and results that try to inject commands or markup.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use support::{Failed, ensure, test};
use vellum_fleet::result;

use super::cluster::output;

const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");

/// An empty directory for a test.
fn fresh(name: &str) -> Result<PathBuf, Failed> {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("fleet-{name}"));
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir)?;
    Ok(dir)
}

/// Checks that it ended with this status and one line, which contains all of `words`.
fn one_line(output: &Output, status: i32, words: &[&str]) -> Result<(), Failed> {
    let text = String::from_utf8_lossy(&output.stderr);
    let right = output.status.code() == Some(status) && text.lines().count() == 1;
    ensure(right && words.iter().all(|word| text.contains(word)), || format!("{words:?}: {output:?}"))
}

const PLAN: &str = "name = \"n\"\n[[test]]\nname = \"a\"\nrun = \"test dirty-log\"\n[test.arguments]\nmemory = \"4m\"\nevents = 2000\n\
    cpus = 1\nbacking = \"anonymous\"\ntracker = \"bitmap\"\ninject = \"lose=1\"\n";

#[test()]
fn a_plan_that_would_not_work_is_one_line() -> Result<(), Failed> {
    let dir = fresh("lines")?;
    let file = dir.join("plan.toml");
    for (from, to, words) in [
        ("events = 2000", "evnets = 2000", &["plan.toml", "evnets", "did you mean 'events'"][..]),
        ("run = ", "rnu = ", &["rnu", "did you mean 'run'"]),
        ("dirty-log", "dirty-logs", &["dirty-logs", "did you mean 'dirty-log'"]),
        ("run = ", "features = [\"tdp_mm\"]\nrun = ", &["tdp_mm", "did you mean 'tdp_mmu'"]),
        ("memory = \"4m\"", "memory = \"$(touch pwned)\"", &["--memory"]),
        ("memory = \"4m\"", "json = \"/etc/passwd\"", &["set by the fleet"]),
        ("dirty-log", "dirty-log; touch pwned", &["as in \"test dirty-log\""]),
        ("name = \"a\"", "name = \"../a\"", &["letters, digits"]),
        ("name = \"a\"", "name = \"a\\n#SBATCH --wrap=id\"", &["letters, digits"]),
        ("name = \"n\"", "name = ", &["plan.toml"]),
    ] {
        let planted = PLAN.replacen(from, to, 1);
        ensure(planted != PLAN, || from.into())?;
        fs::write(&file, planted)?;
        one_line(&output(&["fleet", "plan", &file.to_string_lossy()])?, 2, words)?;
    }
    ensure(!Path::new("pwned").exists(), || "a shell has read a plan".into())?;
    one_line(
        &output(&["fleet", "merge", &dir.join("none.toml").to_string_lossy()])?,
        2,
        &["none.toml", "TOML"],
    )?;
    fs::remove_dir_all(dir)?;
    Ok(())
}

#[test()]
fn without_slurm_its_package_is_named_and_plain_commands_are_offered() -> Result<(), Failed> {
    let dir = fresh("none")?;
    let (file, into) = (dir.join("written.toml"), dir.join("a b"));
    fs::write(&file, PLAN)?;
    let planned = output(&["fleet", "plan", &file.to_string_lossy(), "--into", &into.to_string_lossy()])?;
    ensure(planned.status.success(), || format!("{planned:?}"))?;
    let plan = into.join("plan.toml");
    let without =
        Command::new(VELLUM).args(["fleet", "submit"]).arg(&plan).env("PATH", "/nowhere").output()?;
    one_line(&without, 1, &["apt-get install slurm-client", "--commands shell", "ssh"])?;
    // The offered command works as printed.
    let said = String::from_utf8_lossy(&without.stderr).into_owned();
    let offered = said.split('`').nth(1).ok_or("nothing is offered")?.to_owned();
    let dir_of_vellum = Path::new(VELLUM).parent().unwrap_or(Path::new("/"));
    let path = format!("{}:{}", dir_of_vellum.display(), std::env::var("PATH").unwrap_or_default());
    let shell = Command::new("sh").args(["-c", &offered]).env("PATH", path).output()?;
    let wanted = format!("vellum fleet task '{}' 0\n", plan.canonicalize()?.display());
    ensure(String::from_utf8_lossy(&shell.stdout) == wanted, || format!("{offered}: {shell:?}"))?;
    fs::remove_dir_all(dir)?;
    Ok(())
}

#[test(super::kvm())]
fn directories_hosts_and_results_that_try_to_inject_do_nothing() -> Result<(), Failed> {
    let dir = fresh("hostile")?;
    // If a shell runs any of it, files in this directory show it.
    let into = dir.join("x'; touch pwned; $(touch pwned) `touch pwned` \"");
    let file = dir.join("written.toml");
    fs::write(&file, PLAN)?;
    let planned = output(&["fleet", "plan", &file.to_string_lossy(), "--into", &into.to_string_lossy()])?;
    ensure(planned.status.success(), || format!("{planned:?}"))?;
    let plan = into.join("plan.toml");
    let node = "<b onclick=x>$(touch pwned)\u{1b}[2J; touch pwned\n#SBATCH --wrap=id ../../..";
    let bin = Path::new(VELLUM).parent().unwrap_or(Path::new("/"));
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap_or_default());
    let run = |script: &str| {
        Command::new("sh")
            .args(["-c", script])
            .current_dir(&dir)
            .env("PATH", &path)
            .env("SLURMD_NODENAME", node)
            .output()
    };
    // ssh passes its words to a shell, joined by spaces.
    for (form, before) in [("shell", ""), ("ssh", "ssh() { shift; sh -c \"$*\"; }; ssh host ")] {
        let commands = output(&[
            "fleet",
            "plan",
            &plan.to_string_lossy(),
            "--into",
            &into.to_string_lossy(),
            "--commands",
            form,
        ])?;
        let script = format!("{before}{}", String::from_utf8_lossy(&commands.stdout));
        let ran = run(&script)?;
        // The test loses a page on request.
        ensure(ran.status.code() == Some(1), || format!("{script}: {ran:?}"))?;
    }
    let shard = result::shard(&vellum_fleet::plan::results(&plan), 0);
    let results = fs::read_dir(&shard)?.count();
    ensure(results == 2, || format!("{results} results"))?;
    fs::write(shard.join("00000000-0-<script>.json"), "x")?;
    std::os::unix::fs::symlink("/etc/passwd", shard.join("00000000-7-link.json"))?;
    fs::write(shard.join("00000000-8-cut.json"), "{\"fleet\":1,\"plan\":\"\u{1b}[2J<script>\"")?;
    let text = output(&["fleet", "merge", &plan.to_string_lossy()])?;
    let page = output(&["fleet", "merge", &plan.to_string_lossy(), "--html", "-"])?;
    for shown in [&text, &page] {
        let said = String::from_utf8_lossy(&shown.stdout);
        ensure(shown.status.code() == Some(1) && said.contains("LOST"), || format!("{shown:?}"))?;
        ensure(!said.contains('\u{1b}') && !said.contains("root:"), || said.to_string())?;
        for refused in ["symbolic link", "cut short", "not the name of a result"] {
            ensure(said.contains(refused), || format!("{refused}: {said}"))?;
        }
    }
    let page = String::from_utf8_lossy(&page.stdout).into_owned();
    ensure(!page.contains("<script") && !page.contains("<b onclick"), || page.clone())?;
    // The offered command that tries the seed again is a single command.
    let said = String::from_utf8_lossy(&text.stdout).into_owned();
    let again =
        said.lines().find_map(|line| line.trim().strip_prefix("$ ")).ok_or("no command is offered")?;
    let ran = run(again)?;
    ensure(ran.status.code() == Some(1), || format!("{again}: {ran:?}"))?;
    let pwned = Command::new("find").arg(&dir).args(["-name", "pwned"]).output()?;
    ensure(pwned.stdout.is_empty() && !Path::new("pwned").exists(), || format!("{pwned:?}"))?;
    fs::remove_dir_all(dir)?;
    Ok(())
}
