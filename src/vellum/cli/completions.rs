//! The scripts that complete command lines in shells. clap_complete writes them; it knows no names
//! of machines, which are added here for bash, zsh and fish.

use clap_complete::Shell;

use super::command;

/// Prints the names of running machines, a line each.
const NAMES: &str = "vellum list 2>/dev/null | awk 'NR > 2 { print $1 }'";

/// The script for `shell`.
pub(super) fn script(shell: Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command(), "vellum", &mut script);
    let script = String::from_utf8_lossy(&script).into_owned();
    match shell {
        Shell::Bash => bash(&script),
        Shell::Zsh => zsh(&script),
        Shell::Fish => fish(script),
        _ => script,
    }
}

/// The commands that take a machine's name.
fn commands() -> Vec<String> {
    let definition = command();
    let takes = |command: &&clap::Command| command.get_positionals().any(|arg| arg.get_id() == "machine");
    definition.get_subcommands().filter(takes).map(|command| command.get_name().to_owned()).collect()
}

/// Adds the names to the words of each command that takes one.
fn bash(script: &str) -> String {
    let labels: Vec<String> =
        commands().iter().map(|command| format!("vellum__subcmd__{command})")).collect();
    let mut inside = false;
    let mut out = String::new();
    for line in script.lines() {
        let word = line.trim_start();
        if word.ends_with(')') && word.starts_with("vellum__subcmd__") {
            inside = labels.iter().any(|label| label == word);
        }
        match line.strip_suffix('"').filter(|_| inside && word.starts_with("opts=\"")) {
            Some(options) => out += &format!("{options} $({NAMES})\"\n"),
            None => out += &format!("{line}\n"),
        }
    }
    out
}

/// Has a function offer the names where clap_complete would offer files.
fn zsh(script: &str) -> String {
    let function = format!("_vellum_machines() {{\n    compadd -- ${{(f)\"$({NAMES})\"}}\n}}\n\n");
    let mut out = String::new();
    for line in script.lines() {
        if line.starts_with("if [ \"$funcstack[1]\" = \"_vellum\" ]") {
            out += &function;
        }
        match line.strip_suffix(":_default' \\").filter(|line| line.starts_with("':machine -- ")) {
            Some(argument) => out += &format!("{argument}:_vellum_machines' \\\n"),
            None => out += &format!("{line}\n"),
        }
    }
    out
}

/// Adds a line for each command that takes a name.
fn fish(mut script: String) -> String {
    for command in commands() {
        let at = format!("__fish_vellum_using_subcommand {command}");
        script += &format!("complete -c vellum -n \"{at}\" -f -a \"({})\"\n", NAMES.replace('$', "\\$"));
    }
    script
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a shell completes, and that it is not a file's name.
    #[test]
    fn completions_offer_the_words_that_there_are() {
        let script = script(Shell::Bash);
        for (flag, words) in
            [("--sandbox", "on log off"), ("--tracker", "bitmap manual-protect initially-set ring")]
        {
            let cases: Vec<_> = script.split(&format!("                {flag})\n")).skip(1).collect();
            assert!(!cases.is_empty(), "{flag}");
            assert!(
                cases.iter().all(|case| case
                    .trim_start()
                    .starts_with(&format!("COMPREPLY=($(compgen -W \"{words}\""))),
                "{flag}"
            );
        }
    }

    /// A machine's name is completed by those that there are, and `ctl` by its verbs.
    #[test]
    fn completions_offer_machines_and_verbs() {
        let script = script(Shell::Bash);
        for (command, word) in [("pause", ""), ("exec", ""), ("migrate", "--to"), ("ctl", " balloon ")] {
            let (_, case) = script.split_once(&format!("        vellum__subcmd__{command})\n")).unwrap();
            let options = case.lines().find(|line| line.trim_start().starts_with("opts=")).unwrap();
            assert!(options.contains("vellum list") && options.contains(word), "{command}: {options}");
        }
    }
}
