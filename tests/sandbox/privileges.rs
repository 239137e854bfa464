//! The privileges of each thread and process that root starts. SECURITY.md's table is compared with
//! /proc/PID/task/*/status.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Stdio;

use rustix::thread::CapabilitySet;
use support::env::TestEnv;
use support::hosts::kvm;
use support::{Failed, Need, ensure, test};
use vellum_sandbox::{Mode, ThreadKind};

use super::{helper, root};

/// The privileges of a thread, from the table or from the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Privileges {
    /// The effective and the permitted set.
    capabilities: CapabilitySet,
    /// Whether the bounding set is empty. `no_new` is `no_new_privs`, and `filter` is whether there
    /// is a seccomp filter.
    unbound: bool,
    no_new: bool,
    filter: bool,
}

/// The table of SECURITY.md. The key is its first column.
fn table() -> Result<BTreeMap<String, Privileges>, Failed> {
    let text = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/SECURITY.md"))?;
    let start = text.find("| thread or process |").ok_or("SECURITY.md has no table of privileges")?;
    let rows = text[start..].lines().skip(2).take_while(|line| line.starts_with('|'));
    let read = |row: &str| {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [who, capabilities, no_new, filter, _] = cells[..] else {
            return Err(Failed::from(format!("no row of five cells: {row}")));
        };
        let mut all = CapabilitySet::empty();
        for name in capabilities.split(", ").filter(|&name| name != "none") {
            let name = name.trim_matches('`').strip_prefix("CAP_").ok_or_else(|| format!("{row}: {name}"))?;
            all |= CapabilitySet::from_name(name).ok_or_else(|| format!("{row}: {name}"))?;
        }
        let is = |cell: &str| cell == "yes";
        let (no_new, filter) = (is(no_new), is(filter));
        Ok((who.to_owned(), Privileges { capabilities: all, unbound: true, no_new, filter }))
    };
    rows.map(read).collect()
}

/// The name and the privileges of the thread whose directory in /proc is `path`, as the kernel
/// reports them.
fn look(path: &Path) -> Result<(String, Privileges), Failed> {
    let status = fs::read_to_string(path.join("status"))?;
    let field = |name: &str| {
        let value = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(":\t"));
        value.map(str::to_owned).ok_or_else(|| Failed::from(format!("no {name} in {status}")))
    };
    let set =
        |name| Ok::<_, Failed>(CapabilitySet::from_bits_retain(u64::from_str_radix(&field(name)?, 16)?));
    let (permitted, others) = (set("CapPrm")?, [set("CapInh")?, set("CapAmb")?]);
    ensure(set("CapEff")? == permitted && others.iter().all(|set| set.is_empty()), || status.clone())?;
    let privileges = Privileges {
        capabilities: permitted,
        unbound: set("CapBnd")?.is_empty(),
        no_new: field("NoNewPrivs")? == "1",
        filter: field("Seccomp")? == "2",
    };
    Ok((field("Name")?, privileges))
}

/// All threads of the process `pid`.
fn threads(pid: u32) -> Result<Vec<(String, Privileges)>, Failed> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task"))?;
    tasks.map(|task| look(&task?.path())).collect()
}

fn compare(table: &BTreeMap<String, Privileges>, row: &str, is: &Privileges) -> Result<(), Failed> {
    let says = table.get(row).ok_or_else(|| format!("SECURITY.md has no row '{row}'"))?;
    ensure(says == is, || format!("{row}: SECURITY.md says {says:?}, the kernel {is:?}"))
}

/// Needs the capabilities that the tests check. The root of a container may lack them, and then
/// they cannot be kept.
fn all_of_root() -> Need {
    root()?;
    let has = rustix::thread::capabilities(None).map_err(|error| error.to_string())?.permitted;
    let needed =
        CapabilitySet::IPC_LOCK | CapabilitySet::SETPCAP | CapabilitySet::SYS_ADMIN | CapabilitySet::MKNOD;
    if has.contains(needed) {
        Ok(())
    } else {
        Err(format!("needs all of root's capabilities, and has {has:?}"))
    }
}

#[test(all_of_root())]
fn each_kind_of_thread_keeps_what_the_table_says() -> Result<(), Failed> {
    let table = table()?;
    // The file server is tested below. Its row depends on how it serves.
    for kind in ThreadKind::ALL.into_iter().filter(|&kind| kind != ThreadKind::FileServer) {
        let mut command = helper(kind, "wait", Mode::On);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut ready = String::new();
        BufReader::new(child.stdout.take().ok_or("no output")?).read_line(&mut ready)?;
        let threads = threads(child.id());
        drop(child.stdin.take());
        child.wait()?;
        let name = format!("test-{kind}");
        let own =
            threads?.into_iter().rfind(|(is, _)| name.starts_with(is.as_str()) || is.starts_with("sandbox"));
        compare(&table, &kind.to_string(), &own.ok_or("no such thread")?.1)?;
    }
    Ok(())
}

#[test(all_of_root())]
fn a_share_s_writes_clear_setuid_bits() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let path = env.path("program");
    fs::write(&path, "x")?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o6755))?;
    let file = fs::File::options().write(true).open(&path)?;
    let output =
        helper(ThreadKind::Share, "write", Mode::On).stdin(file.as_fd().try_clone_to_owned()?).output()?;
    let mode = fs::metadata(&path)?.mode() & 0o7777;
    ensure(output.status.success() && fs::read(&path)? == b"written" && mode == 0o755, || {
        format!("{mode:o}, {output:?}")
    })
}

#[test(kvm().and(all_of_root()))]
fn a_machine_s_threads_and_processes_keep_what_the_table_says() -> Result<(), Failed> {
    let table = table()?;
    let env = TestEnv::new()?;
    let (kernel, disk, shared) = (env.path("kernel"), env.path("disk"), env.path("shared"));
    fs::write(&kernel, support::guests::Code::default().spin().elf64())?;
    fs::write(&disk, vec![0; 1 << 20])?;
    fs::create_dir(&shared)?;
    for (options, row) in [
        ("rw,user=65534:65534", "file-server, `user=`"),
        ("ro,as-root", "file-server, `as-root`"),
        ("rw,as-root", "file-server, `as-root,rw`"),
        (
            "rw,as-root,setid,devices,privileged-xattrs",
            "file-server, `as-root,rw,setid,devices,privileged-xattrs`",
        ),
    ] {
        let mut command = env.command("run -m 16m -k");
        command
            .arg(&kernel)
            .arg("-d")
            .arg(&disk)
            .arg("--share")
            .arg(format!("{}:s,{options}", shared.display()));
        let machine = env.start("privileged", &mut command)?;
        // The guest never uses its devices, so their threads have not started.
        for (name, is) in threads(machine.child.id())? {
            let row = if name.starts_with("vcpu") { "vcpu" } else { "main" };
            compare(&table, row, &is)?;
        }
        for (process, row) in [("vellum-guard", "guard"), ("vellum-share", row)] {
            let pid = machine.started(process).ok_or_else(|| format!("there is no {process}"))?;
            for (_, is) in threads(pid)? {
                compare(&table, row, &is)?;
            }
        }
    }
    Ok(())
}
