//! Quotes commands for shells.

/// Quotes one word for a POSIX shell.
pub fn word(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./=,:+@%".contains(c);
    match !text.is_empty() && text.chars().all(plain) {
        true => text.into(),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

/// Quotes a command for a shell.
pub fn line(words: &[String]) -> String {
    words.iter().map(|text| word(text)).collect::<Vec<_>>().join(" ")
}

/// Quotes a command twice, as one word of an ssh command: ssh joins its words, and a second shell
/// on the host reads them.
pub fn line_for_ssh(words: &[String]) -> String {
    format!("'{}'", line(words).replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::{Command, Stdio};

    use super::*;

    /// The output of a shell script.
    fn shell(script: &str) -> String {
        let mut child =
            Command::new("sh").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a shell");
        child.stdin.take().unwrap().write_all(script.as_bytes()).unwrap();
        String::from_utf8_lossy(&child.wait_with_output().unwrap().stdout).into_owned()
    }

    /// Runs the quoted words through a shell once, and twice as with ssh.
    #[test]
    fn a_shell_reads_back_what_was_meant() {
        let words: Vec<String> =
            ["printf", "%s|", "a b", "$(id)", "`id`", "'; reboot ~ #", "\"", "\\", "é\n", "", "*", "~", "!!"]
                .into_iter()
                .map(String::from)
                .collect();
        let wanted = words[2..].join("|") + "|";
        let twice = shell(&format!("printf %s {}", line_for_ssh(&words)));
        for command in [line(&words), twice] {
            assert_eq!(shell(&command), wanted, "{command}");
        }
    }
}
