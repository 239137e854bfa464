//! The messages of a migration, other than pages and state.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Serialize};

pub use vellum_control::Waited;
use vellum_report::printable;

/// The newest supported version of the wire protocol.
pub const VERSION: u32 = 3;
/// The oldest supported version.
pub const OLDEST: u32 = 1;
/// The first version with compressed pages.
pub const COMPRESSES: u32 = 2;
/// The first version that can hand over a machine's memory as a descriptor.
pub const HANDS_OVER: u32 = 3;
/// The first version in which a guest may run on the target before all of its memory is there.
pub const POSTCOPIES: u32 = 3;
/// The only supported compression.
pub const ZSTD: &str = "zstd";

/// The newest version that this side shares with a peer. The argument is the peer's oldest and
/// newest version.
pub(crate) fn common_version([oldest, newest]: [u32; 2]) -> Option<u32> {
    let common = newest.min(VERSION);
    (oldest.max(OLDEST) <= common).then_some(common)
}

/// The migration that a message belongs to. The source chooses it at random. Messages of another
/// session are refused.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SessionId(pub [u8; 16]);

impl SessionId {
    /// A new random number that cannot be guessed.
    ///
    /// # Errors
    /// The kernel has no randomness.
    pub fn random() -> std::io::Result<Self> {
        let mut bytes = [0; 16];
        vellum_sys::random::fill(&mut bytes)?;
        Ok(Self(bytes))
    }
}

impl fmt::Debug for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// One mismatch: what the source has, what the target has, and the remedy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Misfit {
    /// The subject: `memory`, `cpuid avx512f`, `disk1`.
    pub what: String,
    /// The source's value.
    pub source: String,
    /// The target's value.
    pub target: String,
    /// What would make it fit.
    pub remedy: String,
}

impl fmt::Display for Misfit {
    /// Formats it from the source's point of view.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, source, target, remedy } = self;
        write!(f, "{what}: {source} here, {target} there; {remedy}")
    }
}

impl Message {
    /// The message's name on the wire.
    pub fn name(&self) -> String {
        let said = serde_json::to_value(self).ok();
        said.as_ref().and_then(|said| said["say"].as_str()).unwrap_or("a message").to_uppercase()
    }
}

/// The guest's state on the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Standing {
    /// The target has everything and waits for COMMIT.
    Uncommitted,
    /// The guest runs, or has run.
    Ran,
    /// The guest never ran on the target and never will.
    Gone,
}

/// The maximum length of a peer's text that is shown, in characters.
const MAX_SHOWN: usize = 1000;

fn show(text: &mut String) {
    if let Some((end, _)) = text.char_indices().nth(MAX_SHOWN) {
        text.truncate(end);
        text.push_str(" …");
    }
    if let Cow::Owned(shown) = printable(text) {
        *text = shown;
    }
}

/// A message. Messages of the hand-over carry the number of their attempt. A final pass that took
/// too long is given up, and late messages of that attempt are ignored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Message {
    /// The source begins.
    Hello {
        /// The versions of the wire that the source speaks, oldest and newest.
        versions: [u32; 2],
    },
    /// The target knows one of the versions.
    Welcome {
        /// The newest version that both speak.
        version: u32,
        /// Whether the target shares the source's [flag](super::commit_flag).
        #[serde(default)]
        fence: bool,
    },
    /// Describes the machine to be moved.
    Config {
        /// Its configuration. The machine parses it.
        config: serde_json::Value,
        /// The number of connections that carry its pages.
        connections: u32,
        /// The compression of pages, since version 2. The target must support it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        compression: Option<String>,
        /// Whether RAM was handed over as a descriptor with HELLO, since version 3. No pages of RAM
        /// follow then.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        handed: bool,
        /// Whether the guest may run before all of its memory has arrived, since version 3. One
        /// more connection then joins, numbered after the last. Faulting pages are requested and
        /// sent on it.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        postcopy: bool,
    },
    /// The machine fits.
    Fit {},
    /// The machine does not fit.
    Misfit {
        /// Every reason.
        misfits: Vec<Misfit>,
    },
    /// Joins one more connection to a running migration.
    Join {
        /// The connection's number, from 1.
        connection: u32,
    },
    /// The connection has joined.
    Joined {},
    /// This connection's part of a pass has been sent.
    PassEnd {
        /// The pass's number, from 1.
        pass: u32,
        /// How many pages this connection has sent.
        pages: u64,
    },
    /// The final pass was given up. The guest continues on the source, and more passes follow.
    Again {
        /// The number of the next attempt.
        attempt: u32,
    },
    /// All pages and all state have been sent.
    Final {
        /// The attempt that this ends.
        attempt: u32,
        /// How many pages all passes have sent.
        pages: u64,
        /// How many sections of state belong to this attempt.
        sections: u32,
        /// With postcopy, the number of pages that follow while the guest runs on the target. Their
        /// map has been sent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        lacking: Option<u64>,
    },
    /// The target has restored the state and can run the guest.
    Ready {
        /// The attempt, from 1. [`Message::ALIVE`] has 0.
        attempt: u32,
    },
    /// The checksums of every page that may be non-zero have been sent. The target compares them
    /// with its own.
    Compare {
        /// The attempt.
        attempt: u32,
        /// The number of checksummed pages.
        pages: u64,
    },
    /// The answer to COMPARE.
    Compared {
        /// The attempt.
        attempt: u32,
        /// How many pages were compared.
        pages: u64,
        /// How many differ. This includes pages that the source did not mention and that are not
        /// zero.
        wrong: u64,
        /// The guest addresses of the first pages that differ.
        first: Vec<u64>,
    },
    /// The target is to run the guest.
    Commit {
        /// The attempt.
        attempt: u32,
    },
    /// The guest runs on the target.
    Done {},
    /// The target has sent the map of its missing pages. The source is to send them.
    Lacking {
        /// The number of missing pages.
        pages: u64,
    },
    /// No page is missing on the target.
    Complete {
        /// How long each vCPU has waited for pages.
        waited: Waited,
    },
    /// The source has received the outcome and ends.
    Bye {
        /// Input that arrived since the pause for the final pass and that the guest has not been
        /// given.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        typed: Vec<u8>,
    },
    /// After COMMIT: the target cannot run the guest and has never run it.
    Refused {
        /// The reason.
        why: String,
    },
    /// The migration is cancelled.
    Abort {
        /// The reason.
        why: String,
    },
    /// Asks for the outcome.
    Query {},
    /// The answer to QUERY.
    Status {
        /// The guest's state on the target.
        standing: Standing,
    },
}

impl Message {
    /// READY for no attempt. A target repeats it while it populates memory before FIT. Each version
    /// of the wire ignores it.
    pub(crate) const ALIVE: Self = Self::Ready { attempt: 0 };

    /// BYE without input to pass on.
    pub(crate) const BYE: Self = Self::Bye { typed: Vec::new() };

    /// The message with a peer's texts made safe for logs and terminals: each is one line of
    /// limited length.
    pub fn shown(mut self) -> Self {
        match &mut self {
            Self::Refused { why } | Self::Abort { why } => show(why),
            Self::Misfit { misfits } => {
                for Misfit { what, source, target, remedy } in misfits {
                    [what, source, target, remedy].into_iter().for_each(show);
                }
            }
            _ => {}
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_of_a_peer_is_one_line_that_moves_no_cursor() {
        let why = format!("no\nvellum: all is well\u{1b}[2J\u{202e}{}", "x".repeat(1 << 20));
        let misfit =
            Misfit { what: why.clone(), source: why.clone(), target: why.clone(), remedy: why.clone() };
        let [abort, refused] = [Message::Abort { why: why.clone() }, Message::Refused { why }];
        let mut texts = Vec::new();
        for message in [abort, refused, Message::Misfit { misfits: vec![misfit] }] {
            match message.shown() {
                Message::Abort { why } | Message::Refused { why } => texts.push(why),
                Message::Misfit { misfits } => {
                    let Misfit { what, source, target, remedy } = &misfits[0];
                    texts.extend([what, source, target, remedy].map(String::clone));
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(texts.len(), 6);
        for text in texts {
            assert!(text.starts_with("no\\nvellum: all is well\\u{1b}[2J\\u{202e}x"), "{:?}", &text[..60]);
            assert!(text.len() < 2 * MAX_SHOWN && text.ends_with('…'), "{} bytes", text.len());
        }
    }
}
