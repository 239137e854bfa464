//! Built-in guests stay while their host's kernel is replaced. They check every page themselves.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use support::env::TestEnv;
use support::kexec::{self, KEPT};
use support::{Failed, LIMIT, ensure, eventually, test};

const WRITE: &str = "--memory 64m,backing=memfd --workload write,order=random,rate=20000,write=80 --passes 0";

/// The number of kexecs of each machine.
const KEXECS: u32 = 10;

/// A guest writes in each kernel. After the last kexec it ends, and tells whether a page was wrong.
#[test(kexec::host())]
fn a_guest_that_writes_goes_through_ten_kexecs() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let past = kexec::past();
    let result = Path::new(KEPT).join("result.json");
    if past == 0 {
        // The process is lost with its kernel.
        std::mem::forget(env.run("here", &format!("run {WRITE}"))?);
    } else {
        let more = if past == KEXECS { format!("--json {}", result.display()) } else { String::new() };
        // A kernel on a busy emulated host measures another TSC than the one before. It is the same.
        succeeds(&env, &format!("live-update restore here --tsc-mismatch allow {more}"))?;
    }
    let done = if past == 0 { 0 } else { env.done("here")? };
    env.has_written("here", done + 2000)?;
    if past == KEXECS {
        env.ctl("here stop")?;
        return is_right(&result);
    }
    succeeds(&env, "live-update save here --detach")?;
    Err(kexec::go_on())
}

fn succeeds(env: &TestEnv, arguments: &str) -> Result<(), Failed> {
    let output = env.vellum(arguments)?;
    ensure(output.status.success(), || format!("{arguments}: {output:?}"))
}

/// Each page has what the guest wrote, by the guest's own result.
fn is_right(path: &PathBuf) -> Result<(), Failed> {
    let text = eventually(LIMIT, "the guest's result", || {
        let text = fs::read_to_string(path).unwrap_or_default();
        Ok(serde_json::from_str::<Value>(&text).is_ok().then_some(text))
    })?;
    let result: Value = serde_json::from_str(&text)?;
    let figure = |name: &str| {
        let figures = result["figures"].as_array()?;
        figures.iter().find(|figure| figure["name"] == name)?["value"].as_f64()
    };
    ensure(figure("pages_checked") > Some(0.0) && figure("wrong_stamps") == Some(0.0), || text.clone())
}
