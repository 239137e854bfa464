//! Input that is typed during the hand-over reaches the guest once, on whichever side it continues.

use std::fs;
use std::io::Write;
use std::process::Stdio;

use support::env::TestEnv;
use support::guests::Code;
use support::hosts::real;
use support::{Failed, LIMIT, ensure, eventually, test};

use crate::relay::{held_back, until_fit};
use crate::{ends_with, succeeds, with};

/// More than the port's FIFO holds.
const TYPED: &[u8] = &[b't'; 200];

/// The guest sends back what it receives. What is typed in the final pass comes back on the target,
/// or on the source if that pass is given up.
#[test(real())]
fn what_is_typed_in_the_final_pass_gets_to_the_guest_once() -> Result<(), Failed> {
    for (moves, irqchip) in [(true, "split"), (false, "kernel")] {
        let env = TestEnv::new()?;
        let [kernel, out, far] = ["kernel", "out", "far"].map(|name| env.path(name));
        fs::write(&kernel, Code::default().echo().elf64())?;
        let line = format!("run --kernel {} --memory 8m --irqchip {irqchip}", kernel.display());
        let mut here = env.start("here", env.command(&line).stdin(Stdio::piped()))?;
        let mut keys = here.child.stdin.take().ok_or("no standard input")?;
        succeeds(&env.vellum(&format!("ctl here serial file={}", out.display()))?)?;
        let comes = |file: &std::path::Path, due: &[u8]| {
            eventually(LIMIT, "it is sent back", || Ok((fs::read(file)? == due).then_some(())))
        };
        keys.write_all(b"before ")?;
        comes(&out, b"before ")?;
        let there = env.receive("there", &format!("--serial file={}", far.display()))?;
        let (client, release) = held_back(&env, until_fit(), "--downtime 1h")?;
        eventually(LIMIT, "it stands still", || {
            Ok((env.standing("there").as_deref() == Some("uncommitted")).then_some(()))
        })?;
        keys.write_all(TYPED)?;
        if moves {
            drop(release);
            with(client.output()?, 0)?;
            let ended = ends_with(here, 15)?;
            comes(&far, TYPED)?;
            ensure(fs::read(&out)? == b"before ", || format!("the source had it, too: {ended:?}"))?;
            succeeds(&env.vellum("ctl there stop")?)?;
            ends_with(there, 0)?;
        } else {
            succeeds(&env.vellum("ctl here migrate-cancel")?)?;
            with(client.output()?, 1)?;
            comes(&out, &[b"before ", TYPED].concat())?;
            keys.write_all(b" after")?;
            comes(&out, &[b"before ", TYPED, b" after"].concat())?;
            ends_with(there, 1)?;
            drop(release);
            succeeds(&env.vellum("ctl here stop")?)?;
            ends_with(here, 0)?;
        }
    }
    Ok(())
}
