//! `ssh:` over the test's own server on loopback: a guest migrates, and a connection that is lost
//! in the hand-over is made again.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use support::env::{Process, TestEnv};
use support::hosts::real;
use support::{Failed, LIMIT, Need, ensure, eventually, test, tools};
use vellum_migration::message::Message;

use crate::relay::{bytes, until_fit};
use crate::{ends_with, every_page_is_right, succeeds};

fn needs() -> Need {
    real()?;
    ["ssh", "ssh-keygen", "sshd"].into_iter().try_for_each(tools::program)
}

/// A server on loopback that accepts this user, and an `ssh` that reaches it.
struct Server {
    _sshd: Process,
    bin: PathBuf,
}

impl Server {
    fn start(env: &TestEnv) -> Result<Self, Failed> {
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        for key in ["host_key", "user_key"] {
            let mut make = Command::new("ssh-keygen");
            succeeds(&make.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(env.path(key)).output()?)?;
        }
        fs::copy(env.path("user_key.pub"), env.path("authorized"))?;
        let vellum = Path::new(crate::VELLUM).parent().ok_or("a program has a directory")?;
        let dir = env.dir().display();
        let config = format!(
            "ListenAddress 127.0.0.1\nPort {port}\nHostKey {dir}/host_key\nAuthorizedKeysFile {dir}/authorized\nStrictModes no\n\
             PidFile none\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\n\
             SetEnv XDG_RUNTIME_DIR={dir} PATH={}:/usr/bin:/bin\n",
            vellum.display()
        );
        fs::write(env.path("sshd_config"), config)?;
        // sshd's directory for privilege separation, which is missing if it was never started.
        let _ = fs::create_dir("/run/sshd");
        let path = tools::find("sshd").ok_or("no sshd")?;
        let sshd = Process::spawn(
            Command::new(path).args(["-D", "-e", "-f"]).arg(env.path("sshd_config")).stderr(Stdio::piped()),
        )?;
        let bin = env.path("bin");
        fs::create_dir(&bin)?;
        let client = format!(
            "Host there\n HostName 127.0.0.1\n Port {port}\n IdentityFile {dir}/user_key\n IdentitiesOnly yes\n BatchMode yes\n \
             UserKnownHostsFile {dir}/known\n StrictHostKeyChecking accept-new\n LogLevel ERROR\n"
        );
        fs::write(env.path("ssh_config"), client)?;
        let server = Self { _sshd: sshd, bin };
        server.client(env, "exec /usr/bin/env -i PATH=\"$REST\" ssh -F \"$DIR/ssh_config\" \"$@\"")?;
        eventually(LIMIT, "sshd answers", || {
            Ok(server.ssh(env).args(["there", "true"]).output()?.status.success().then_some(()))
        })?;
        Ok(server)
    }

    /// Writes the script that is `ssh` on [`Self::path`].
    fn client(&self, env: &TestEnv, last: &str) -> Result<(), Failed> {
        let rest = std::env::var("PATH").unwrap_or_default();
        let script = format!("#!/bin/sh\nREST='{rest}' DIR='{}'\n{last}\n", env.dir().display());
        support::executable(&self.bin.join("ssh"), script.as_bytes())
    }

    fn path(&self) -> String {
        format!("{}:{}", self.bin.display(), std::env::var("PATH").unwrap_or_default())
    }

    fn ssh(&self, env: &TestEnv) -> Command {
        let mut command = Command::new(self.bin.join("ssh"));
        command.env("XDG_RUNTIME_DIR", env.dir()).stdin(Stdio::null());
        command
    }

    fn migrate(&self, env: &TestEnv, more: &str) -> Result<Output, Failed> {
        Ok(env
            .command(&format!("migrate here --to ssh:there:there {more}"))
            .env("PATH", self.path())
            .output()?)
    }
}

/// Migrates over one connection, and compressed over three. In the third case the first connection
/// loses what comes back from DONE on and ends. A second connection asks for the outcome.
#[test(needs())]
fn a_guest_moves_by_ssh_and_a_connection_that_is_lost_is_made_anew() -> Result<(), Failed> {
    for (more, cut) in [("", false), ("--connections 3 --compress zstd", false), ("--json", true)] {
        let env = TestEnv::new()?;
        let server = Server::start(&env)?;
        let json = env.path("json");
        let here = env.run("here", "run --memory 8m --passes 0 --workload write,rate=1000")?;
        let there = env.run("there", &format!("receive --json {}", json.display()))?;
        if cut {
            // The first connection ends after READY, and the rest is lost.
            let most = until_fit() + bytes(&[Message::Ready { attempt: 1 }]);
            let first = format!(
                "[ -e \"$DIR/tried\" ] && exec /usr/bin/env -i PATH=\"$REST\" ssh -F \"$DIR/ssh_config\" \"$@\"\n: > \"$DIR/tried\"\n\
                 PATH=\"$REST\" ssh -F \"$DIR/ssh_config\" \"$@\" | dd bs=1 count={most} 2>/dev/null"
            );
            server.client(&env, &first)?;
        }
        let output = server.migrate(&env, more)?;
        succeeds(&output)?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure(said.contains("unconfirmed") == cut, || format!("{output:?}"))?;
        ends_with(here, 15)?;
        ensure(env.standing("there").as_deref() == Some("running"), || {
            format!("{:?}", env.standing("there"))
        })?;
        succeeds(&env.vellum("ctl there stop")?)?;
        ends_with(there, 0)?;
        every_page_is_right(&json)?;
    }
    Ok(())
}
