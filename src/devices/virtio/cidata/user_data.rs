//! Predicts what cloud-init does with user data, by its own rules (cloudinit/user_data.py,
//! cloudinit/handlers/, cloudinit/templater.py). cloud-init unpacks gzip. Data with `MIME-Version:`
//! near its start is a MIME message. Other data is classified by how it begins, ignoring case and
//! leading blanks. Unknown data is ignored, with only a line in the guest's log.

use std::io::Read;

/// How many bytes of unpacked data are examined.
const MAX_FILE: u64 = 64 << 20;
/// A MIME message has its version within this many bytes.
const MIME_WITHIN: usize = 4096;

/// The beginnings of user data (INCLUSION_TYPES_MAP), in lower case. A beginning also covers longer
/// ones that start with it.
const BEGINNINGS: [&str; 6] =
    ["#cloud-config", "#!", "#include", "#cloud-boothook", "#part-handler", "## template: jinja"];
/// The beginnings that a template's result may have. A template cannot be of another kind.
const YIELDS: [&str; 2] = ["#cloud-config", "#!"];
/// Spellings to suggest for a line that is similar to one of them.
const MEANT: [&str; 8] = [
    "#cloud-config",
    "#include",
    "#include-once",
    "#cloud-boothook",
    "#cloud-config-archive",
    "#cloud-config-jsonp",
    "#part-handler",
    "## template: jinja",
];

/// Why cloud-init would ignore user data.
#[derive(Debug, PartialEq, Eq)]
pub struct Ignored {
    /// What was found, in words.
    pub found: String,
    /// What would work.
    pub remedy: String,
}

/// Checks that cloud-init uses `data`, or that `data` is empty.
///
/// # Errors
/// Why cloud-init would ignore it.
pub fn check(data: &[u8]) -> Result<(), Ignored> {
    if !data.starts_with(&[0x1f, 0x8b]) {
        return check_plain(data);
    }
    let mut unpacked = Vec::new();
    let reader = flate2::read::MultiGzDecoder::new(data);
    match reader.take(MAX_FILE).read_to_end(&mut unpacked) {
        Ok(_) => check_plain(&unpacked).map_err(|Ignored { found, remedy }| Ignored {
            found: format!("is gzip data that {found}"),
            remedy,
        }),
        Err(error) => Err(Ignored {
            found: format!("is gzip data that cannot be unpacked ({error})"),
            remedy: "pack it again".into(),
        }),
    }
}

fn check_plain(data: &[u8]) -> Result<(), Ignored> {
    let start = data[..data.len().min(MIME_WITHIN)].to_ascii_lowercase();
    let has = |what: &[u8]| start.windows(what.len()).any(|window| window == what);
    if has(b"mime-version:") {
        let refused = |_| Ignored {
            found: "is a MIME message that is not UTF-8".into(),
            remedy: "encode its parts, as `cloud-init devel make-mime` does".into(),
        };
        return str::from_utf8(data).map(drop).map_err(refused);
    }
    let text = String::from_utf8_lossy(data);
    let shown = text.trim_start_matches(is_blank);
    if shown.is_empty() {
        return Ok(());
    }
    let begins = begins(shown);
    if begins.starts_with("## template: jinja") {
        return check_template(&text);
    }
    if BEGINNINGS.iter().any(|known| begins.starts_with(known)) {
        return Ok(());
    }
    let first: String = shown.lines().next().unwrap_or_default().trim_end().chars().take(60).collect();
    let typed = first.to_lowercase().replace(' ', "");
    let slips = |meant: &&str| strsim::osa_distance(&typed, &meant.replace(' ', ""));
    let meant = MEANT.into_iter().min_by_key(slips).expect("there are some");
    let remedy = if begins.starts_with('\u{feff}') {
        "remove the byte order mark before it".into()
    } else if begins.starts_with("content-type:") {
        format!("a MIME message has a line 'MIME-Version: 1.0' within its first {MIME_WITHIN} bytes")
    } else if slips(&meant) <= 2 && typed.len() > 4 {
        format!("did you mean '{meant}'?")
    } else {
        "its first line is '#cloud-config', or that of a script".into()
    };
    Err(Ignored { found: format!("begins with '{}'", first.escape_debug()), remedy })
}

/// The characters that Python's str.lstrip() strips.
fn is_blank(one: char) -> bool {
    one.is_whitespace() || ('\x1c'..='\x1f').contains(&one)
}

fn begins(text: &str) -> String {
    text.chars().take(64).collect::<String>().to_lowercase()
}

/// A template is recognised by its first line, which has no blanks before it. Its kind is that of
/// its result.
fn check_template(text: &str) -> Result<(), Ignored> {
    let ignored = |found: String, remedy: &str| Err(Ignored { found, remedy: remedy.into() });
    if text.starts_with(is_blank) {
        return ignored("has blanks before its '## template: jinja'".into(), "remove them");
    }
    let (first, rest) = text.split_once('\n').unwrap_or((text, ""));
    let kind = first.split_once(':').map_or("", |(_, kind)| kind).trim_matches(is_blank);
    if !kind.eq_ignore_ascii_case("jinja") {
        let shown: String = kind.chars().take(40).collect();
        return ignored(
            format!("is a template of kind '{}'", shown.escape_debug()),
            "its first line is '## template: jinja'",
        );
    }
    let rest = rest.trim_start_matches(is_blank);
    // A tag's result is only known when it is rendered.
    if rest.is_empty() || rest.starts_with('{') || YIELDS.iter().any(|known| begins(rest).starts_with(known))
    {
        // `#cloud-config` is a prefix of the archive's name.
        return match begins(rest).starts_with("#cloud-config-archive") {
            true => ignored(
                "is a template of an archive".into(),
                "use '#cloud-config' or '#!' below its first line",
            ),
            false => Ok(()),
        };
    }
    let second: String = rest.lines().next().unwrap_or_default().chars().take(60).collect();
    ignored(
        format!("is a template of '{}'", second.escape_debug()),
        "use '#cloud-config' or '#!' below its first line",
    )
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn packed(data: &[u8]) -> Vec<u8> {
        let mut writer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        writer.write_all(data).unwrap();
        writer.finish().unwrap()
    }

    /// What cloud-init accepts, and what it ignores with a part of the remedy.
    #[test]
    fn user_data_is_taken_as_cloud_init_takes_it() {
        let far = |bytes: usize| {
            [&b"From: a\n".repeat(bytes / 8)[..], b"MIME-Version: 1.0\n\n#!/bin/sh\n"].concat()
        };
        let good: &[&[u8]] = &[
            b"#cloud-config\nusers: []\n",
            b"#cloud-config",
            b"#cloud-config # a comment\n",
            b"#cloud-config\r\nusers: []\r\n",
            b"#Cloud-Config\n",
            b"#CLOUD-CONFIG\n",
            b"\n#cloud-config\n",
            b"\n\n \t\r\n#cloud-config\n",
            b"   #cloud-config\n",
            b"\x0b\x0c#cloud-config\n",
            "\u{a0}\u{2003}#cloud-config\n".as_bytes(),
            b"\x1c\x1f#cloud-config\n",
            b"#cloud-configuration\n",
            b"#cloud-config:\n",
            b"#cloud-config-archive\n- a\n",
            b"#cloud-config-jsonp\n[]\n",
            b"#cloud-config\n\xff\xfe\n",
            b"#!/bin/sh\n",
            b"#! /usr/bin/env python3\n",
            b"#!",
            b"\n  #!/bin/bash\n",
            b"#include\nhttps://example.org/a\n",
            b"#include https://example.org/a\n",
            b"#INCLUDE\n",
            b"#include-once\n",
            b"#cloud-boothook\n#!/bin/sh\n",
            b"#part-handler\n",
            b"## template: jinja\n#cloud-config\n",
            b"## Template: Jinja\n#!/bin/sh\n",
            b"## template: jinja \n\n#cloud-config\n",
            b"## template: jinja\n{% if 1 %}\n#cloud-config\n{% endif %}\n",
            b"## template: jinja\n",
            b"MIME-Version: 1.0\nContent-Type: text/cloud-config\n\n",
            b"mime-version: 1.0\n",
            b"Content-Type: multipart/mixed; boundary=\"x\"\nMIME-Version: 1.0\n\n--x\n",
            b"From nobody\nSubject: a\nX-MIME-Version: 1.0\n",
            &far(4000),
            b"",
            b"\n",
            b" \t\n\n",
            &packed(b"#cloud-config\n"),
            &packed(b"\n#!/bin/sh\n"),
            &packed(b"MIME-Version: 1.0\n"),
            &packed(b""),
            &[packed(b"#cloud-"), packed(b"config\n")].concat(),
        ];
        for data in good {
            assert_eq!(check(data), Ok(()), "{:?}", String::from_utf8_lossy(data));
        }
        let bad: &[(&[u8], &str)] = &[
            (b"#cloudconfig\n", "did you mean '#cloud-config'?"),
            (b"# cloud-config\n", "did you mean '#cloud-config'?"),
            (b"#cloud-confg\n", "did you mean '#cloud-config'?"),
            (b"##template:jinja\n#cloud-config\n", "did you mean '## template: jinja'?"),
            (b"users: []\n", "its first line is '#cloud-config'"),
            (b"# a comment\n#cloud-config\n", "its first line is '#cloud-config'"),
            (b"#upstart-job\n", "its first line is"),
            (b"\xef\xbb\xbf#cloud-config\n", "byte order mark"),
            (b"\0#cloud-config\n", "did you mean"),
            (b"Content-Type: multipart/mixed; boundary=\"x\"\n\n--x\n", "'MIME-Version: 1.0'"),
            (&far(4096), "its first line is"),
            (b"MIME-Version: 1.0\n\n\xff\n", "encode its parts"),
            (b"## template: jinja2\n#cloud-config\n", "its first line is '## template: jinja'"),
            (b"\n## template: jinja\n#cloud-config\n", "remove them"),
            (b"## template: jinja\nusers: []\n", "below its first line"),
            (b"## template: jinja\n#cloud-config-archive\n", "below its first line"),
            (b"## template: jinja\n#include\n", "below its first line"),
            (b"#cloud_config-\x1b[31m\n", "first line"),
            (&packed(b"users: []\n"), "its first line is"),
            (&packed(&packed(b"#cloud-config\n")), "its first line is"),
            (&packed(b"#cloud-config\n")[..20], "pack it again"),
            (b"\x1f\x8b", "pack it again"),
            (b"\xfd7zXZ\0", "its first line is"),
        ];
        for (data, says) in bad {
            let shown = String::from_utf8_lossy(data).into_owned();
            let Ignored { found, remedy } = check(data).expect_err(&shown);
            assert!(remedy.contains(says), "{shown:?}: {found}; {remedy}");
            assert!(!found.contains(|one: char| one.is_control()), "{found:?}");
        }
    }
}
