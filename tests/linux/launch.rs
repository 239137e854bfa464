//! A guest for a single command: its standard streams, its status, and the host's directories.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use support::share::posix;
use support::{Failed, ensure, test};
use vellum_share::Cache;

use crate::VELLUM;
use crate::guest::{Image, for_this_bed, noise, scratch};
use crate::{guests, whole_matrix};

#[test(whole_matrix())]
fn a_command_has_its_streams_and_its_status() -> Result<(), Failed> {
    streams("", 300_000)
}

/// Through a port of a virtio console, in a guest whose kernel refuses vsock's driver. The data is
/// larger than all buffers on the way.
#[test(whole_matrix())]
fn a_command_has_its_streams_where_there_is_no_vsock() -> Result<(), Failed> {
    streams("module_blacklist=vmw_vsock_virtio_transport", 5_000_000)
}

/// Input comes back as output up to its end. Standard error is separate, and the status comes last.
fn streams(params: &str, bytes: usize) -> Result<(), Failed> {
    let image = Image::oldest()?;
    let (flags, cmdline) = for_this_bed();
    let cmdline = format!("{cmdline} {params}");
    let mut command = Command::new(VELLUM);
    command.args(["run", "--kernel", &image.kernel(), "--initrd", &image.initrd(), "--timeout", "900s"]);
    let script = "cat; ls /sys/module | grep -c ^vmw_vsock_virtio_transport$ >&2; exit 7";
    command.args(flags).args(["--params", cmdline.trim(), "--", "sh", "-c", script]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let data = noise(7, bytes);
    let mut stdin = child.stdin.take().expect("piped");
    let sent = data.clone();
    let writer = std::thread::spawn(move || stdin.write_all(&sent));
    let output = child.wait_with_output()?;
    writer.join().expect("it does not panic")?;
    let errors = String::from_utf8_lossy(&output.stderr);
    let with_vsock = u8::from(params.is_empty());
    ensure(output.status.code() == Some(7) && errors == format!("{with_vsock}\n"), || {
        format!("{}: {errors}", output.status)
    })?;
    ensure(output.stdout == data, || format!("{} of {} bytes came back", output.stdout.len(), data.len()))
}

/// The command of a vellum that runs `script` in a guest of the oldest kernel, with `flags`.
fn command(flags: &[&str], params: &str, script: &str) -> Result<Command, Failed> {
    let (image, (bed_flags, bed_cmdline)) = (Image::oldest()?, for_this_bed());
    let mut command = Command::new(VELLUM);
    command.args(["run", "--kernel", &image.kernel(), "--initrd", &image.initrd()]).args(flags);
    let cmdline = format!("{bed_cmdline} {params}");
    command.args(bed_flags).args(["--params", cmdline.trim(), "--", "sh", "-c", script]);
    command.stdin(Stdio::null());
    Ok(command)
}

/// Bytes go through three guests like a shell pipeline.
#[test(whole_matrix())]
fn three_guests_are_one_pipeline() -> Result<(), Failed> {
    let limit = ["--timeout", "900s"];
    let mut children = Vec::new();
    let mut before: Option<Stdio> = None;
    for script in ["gzip -c", "cat", "gunzip -c"] {
        let mut command = command(&limit, "", script)?;
        let stdin = before.take().unwrap_or_else(Stdio::piped);
        let mut child = command.stdin(stdin).stdout(Stdio::piped()).spawn()?;
        if children.len() < 2 {
            before = child.stdout.take().map(Stdio::from);
        }
        children.push(child);
    }
    let data = noise(3, 300_000);
    let mut stdin = children[0].stdin.take().expect("piped");
    let sent = data.clone();
    let writer = std::thread::spawn(move || stdin.write_all(&sent));
    let output = children.pop().expect("the last").wait_with_output()?;
    writer.join().expect("it does not panic")?;
    ensure(output.status.success() && output.stdout == data, || {
        format!("{}: {} of {} bytes came out", output.status, output.stdout.len(), data.len())
    })?;
    for mut child in children {
        let status = child.wait()?;
        ensure(status.success(), || format!("{status}"))?;
    }
    Ok(())
}

/// A command's status may be any number. How the guest itself ended, and why, is in Vellum's
/// messages and in the status file.
#[test(whole_matrix())]
fn a_guest_that_ends_before_its_command_says_why() -> Result<(), Failed> {
    let scratch = scratch()?;
    let file = scratch.path("status").display().to_string();
    // A kernel without its first process looks for a root: one that does not exist, or one that may
    // still appear.
    let (nothing, never) = ("rdinit=/none root=/dev/none", "rdinit=/none root=/dev/none rootwait");
    for (limit, params, script, status, ended, says) in [
        ("900s", "", "exit 11", 11, "\"ended\":\"command\"", ""),
        ("900s", "", "echo c > /proc/sysrq-trigger", 11, "\"ended\":\"machine\"", "sysrq triggered crash"),
        ("900s", nothing, "true", 11, "\"ended\":\"machine\"", "CONFIG_BLK_DEV_INITRD"),
        ("150s", never, "true", 124, "\"ended\":\"machine\"", "Waiting for root device"),
    ] {
        let output = command(&["--timeout", limit, "--status-file", &file], params, script)?.output()?;
        let errors = String::from_utf8_lossy(&output.stderr);
        let told = fs::read_to_string(&file)?;
        let whole = || format!("{script} {params}: {}: {told}: {errors}", output.status);
        ensure(output.status.code() == Some(status) && told.contains(ended), whole)?;
        ensure(told.contains(&format!("\"status\":{status}")) && told.contains(says), whole)?;
        let ended = errors.lines().any(|line| {
            line.starts_with("vellum: the guest has not run its command to the end: ") && line.contains(says)
        });
        let shown = errors.contains("\nvellum: console: ") || errors.starts_with("vellum: console: ");
        ensure(if says.is_empty() { errors.is_empty() } else { ended && shown }, whole)?;
    }
    Ok(())
}

/// One guest with a directory of each kind: data in both directions, refusals, and the result on
/// the host.
#[test(guests())]
fn directories_of_the_host_are_mounted() -> Result<(), Failed> {
    let (image, scratch) = (Image::oldest()?, scratch()?);
    let data = noise(23, 3_000_000);
    for name in ["ro", "rw", "overlay"] {
        fs::create_dir_all(scratch.path(name))?;
        fs::write(scratch.path(name).join("data"), &data)?;
    }
    let (flags, cmdline) = for_this_bed();
    let mut command = Command::new(VELLUM);
    command.args(["run", "--kernel", &image.kernel(), "--initrd", &image.initrd(), "--timeout", "900s"]);
    for name in ["ro", "rw", "overlay"] {
        let as_root = if vellum_sys::host::is_root() { ",as-root" } else { "" };
        command.args(["--share", &format!("{},{name}{as_root}", scratch.path(name).display())]);
    }
    // If the guest mounts a share a second time, its access is unchanged: the server enforces it,
    // not the guest's kernel.
    let script = "cd /mnt && cmp ro/data overlay/data && cp ro/data rw/copy || exit 20
        ! echo x > ro/new || exit 21
        rm overlay/data && mkdir overlay/made && echo x > overlay/made/x || exit 22
        mkdir /second && mount -t virtiofs overlay /second && cmp ro/data /second/data || exit 23
        ! echo x > /second/new || exit 24
        cat rw/copy; exit 7";
    command.args(flags).args(["--params", cmdline, "--", "sh", "-c", script]).stdin(Stdio::null());
    let output = command.output()?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure(output.status.code() == Some(7), || format!("{}: {errors}", output.status))?;
    ensure(output.stdout == data, || format!("{} of {} bytes came back", output.stdout.len(), data.len()))?;
    ensure(fs::read(scratch.path("rw").join("copy"))? == data, || "the guest's copy is another".into())?;
    for name in ["ro", "overlay"] {
        let names: Vec<_> = fs::read_dir(scratch.path(name))?
            .map(|entry| entry.map(|it| it.file_name()))
            .collect::<Result<_, _>>()?;
        ensure(names == ["data"] && fs::read(scratch.path(name).join("data"))? == data, || {
            format!("{name}: {names:?}")
        })?;
    }
    Ok(())
}

/// The first word with which this program is called in a guest. A directory and its caching mode
/// follow.
const IN_GUEST: &str = "checks-of-a-share";
const CACHES: [(&str, Cache); 3] = [("auto", Cache::Auto), ("always", Cache::Always), ("none", Cache::None)];

/// In a guest, runs the checks of POSIX on one of the host's directories. This program does not
/// have vellum's own commands.
pub fn in_guest() -> Option<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [word, dir, cache] = &arguments[..] else { return None };
    if word != IN_GUEST {
        return None;
    }
    let cache = CACHES.iter().find(|(name, _)| name == cache).map(|(_, cache)| *cache);
    match posix::checked(Path::new(dir), cache, true) {
        Ok((done, wrong)) => {
            println!("{done} checks");
            wrong.iter().for_each(|line| println!("{line}"));
            Some(ExitCode::from(u8::from(!wrong.is_empty())))
        }
        Err(error) => {
            println!("{}", error.message().unwrap_or("?"));
            Some(ExitCode::FAILURE)
        }
    }
}

/// The checks of the test `share`, with a guest's own virtiofs instead of /dev/fuse. The guest runs
/// this program.
#[test(whole_matrix())]
fn calls_on_a_share_do_what_posix_says() -> Result<(), Failed> {
    let (image, scratch) = (Image::oldest()?, scratch()?);
    let program = std::env::current_exe()?;
    let directory = program.parent().ok_or("it is in no directory")?;
    let (flags, cmdline) = for_this_bed();
    let mut command = Command::new(VELLUM);
    command.args(["run", "--kernel", &image.kernel(), "--initrd", &image.initrd(), "--timeout", "900s"]);
    command.args(["--share", &format!("{}:tests,as-root", directory.display())]);
    let mut script = String::from("ulimit -n 1024; failed=0");
    for (name, _) in CACHES {
        fs::create_dir_all(scratch.path(name))?;
        let share = format!("{},rw,as-root,setid,devices,cache={name}", scratch.path(name).display());
        command.args(["--share", &share]);
        let file = program.file_name().unwrap_or_default().to_string_lossy();
        script +=
            &format!("; echo {name}: >&2; /mnt/tests/{file} {IN_GUEST} /mnt/{name} {name} >&2 || failed=1");
    }
    script += "; exit $failed";
    command.args(flags).args(["--params", cmdline, "--", "sh", "-c", &script]).stdin(Stdio::null());
    let output = command.output()?;
    ensure(output.status.success(), || {
        format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr))
    })
}
