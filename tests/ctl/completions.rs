//! The completion scripts, in the shells that they are for.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use support::env::TestEnv;
use support::hosts::real;
use support::{Failed, Need, ensure, test, tools};

/// What each shell runs: it prints the words that complete `vellum pause we`.
const BASH: &str = "source \"$1\"; COMP_WORDS=(vellum pause we); COMP_CWORD=2; _vellum vellum we pause; \
                    echo \"${COMPREPLY[@]}\"";
/// zsh completes on a terminal alone. This shows that its script is well-formed, that the command
/// asks for machines, and which those are.
const ZSH: &str = "zsh -n \"$1\" || exit 1; grep -q \"machine -- .*:_vellum_machines\" \"$1\" || exit 1; \
                   compdef() { }; source \"$1\"; compadd() { shift; echo $@ }; _vellum_machines";
const FISH: &str = "source $argv[1]; complete -C 'vellum pause we'";

fn shells() -> Need {
    ["zsh", "fish"].into_iter().try_for_each(tools::program)
}

#[test(real(), shells())]
fn each_shell_completes_the_name_of_a_machine() -> Result<(), Failed> {
    let env = TestEnv::new()?;
    let machine = env.run("web", "run --passes 0 --memory 16m")?;
    let beside = Path::new(super::VELLUM).parent().ok_or("no directory")?;
    let path = format!("{}:{}", beside.display(), std::env::var("PATH")?);
    for (shell, flags, line) in
        [("bash", &["-c"][..], BASH), ("zsh", &["-f", "-c"], ZSH), ("fish", &["-c"], FISH)]
    {
        let script = env.path(shell);
        fs::write(&script, env.vellum(&format!("completions {shell}"))?.stdout)?;
        let mut command = Command::new(shell);
        command.args(flags).arg(line);
        if shell != "fish" {
            command.arg(shell);
        }
        command.arg(&script).env("PATH", &path).env("XDG_RUNTIME_DIR", env.dir()).env("HOME", env.dir());
        let output = command.stdin(Stdio::null()).output()?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure(output.status.success() && said.trim() == "web", || format!("{shell}: {output:?}"))?;
    }
    env.ctl("web stop")?;
    machine.end()?;
    Ok(())
}
