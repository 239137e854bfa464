//! A command in a guest that is there for nothing else: its standard streams, its status, and the directories of its host's that it has.

use std::fs;
use std::io::Write;
use std::process::{Command, Stdio};

use harness::{Failed, ensure, trial};

use crate::guest::{Image, Scratch, VELLUM, for_this_bed, noise};
use crate::{guests, whole_matrix};

#[trial(whole_matrix())]
fn a_command_has_its_streams_and_its_status() -> Result<(), Failed> {
    streams("", 300_000)
}

/// The same by a port of a virtio console, in a guest whose kernel refuses vsock's driver. It is more than all that lies between can hold.
#[trial(whole_matrix())]
fn a_command_has_its_streams_where_there_is_no_vsock() -> Result<(), Failed> {
    streams("module_blacklist=vmw_vsock_virtio_transport", 5_000_000)
}

/// What goes in comes out again, and its end; what is said of errors comes apart, and the status last.
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

/// One guest with a directory of each kind: data both ways, what is refused, and what the host has of it afterwards.
#[trial(guests())]
fn directories_of_the_host_are_mounted() -> Result<(), Failed> {
    let (image, scratch) = (Image::oldest()?, Scratch::new());
    let data = noise(23, 3_000_000);
    for name in ["ro", "rw", "overlay"] {
        fs::create_dir_all(scratch.path(name))?;
        fs::write(scratch.path(name).join("data"), &data)?;
    }
    let (flags, cmdline) = for_this_bed();
    let mut command = Command::new(VELLUM);
    command.args(["run", "--kernel", &image.kernel(), "--initrd", &image.initrd(), "--timeout", "900s"]);
    for name in ["ro", "rw", "overlay"] {
        let as_root = if vellum::sys::host::is_root() { ",as-root" } else { "" };
        command.args(["--share", &format!("{},{name}{as_root}", scratch.path(name).display())]);
    }
    // A share that the guest mounts a second time is as it was: the server keeps it, and not the guest's kernel.
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
