//! A command in a guest that is there for nothing else: its standard streams, and its status.

use std::io::Write;
use std::process::{Command, Stdio};

use harness::{Failed, ensure, trial};

use crate::guest::{Image, VELLUM, for_this_bed, noise};
use crate::whole_matrix;

#[trial(whole_matrix())]
fn a_command_has_its_streams_and_its_status() -> Result<(), Failed> {
    let image = Image::oldest()?;
    let (flags, cmdline) = for_this_bed();
    let mut command = Command::new(VELLUM);
    command.args(["run", "--kernel", &image.kernel(), "--initrd", &image.initrd(), "--timeout", "900s"]);
    command.args(flags).args(["--params", cmdline, "--", "sh", "-c", "cat; echo no >&2; exit 7"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let data = noise(7, 300_000);
    let mut stdin = child.stdin.take().expect("piped");
    let sent = data.clone();
    let writer = std::thread::spawn(move || stdin.write_all(&sent));
    let output = child.wait_with_output()?;
    writer.join().expect("it does not panic")?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure(output.status.code() == Some(7) && errors == "no\n", || format!("{}: {errors}", output.status))?;
    ensure(output.stdout == data, || format!("{} of {} bytes came back", output.stdout.len(), data.len()))
}
