//! What the two sides of a migration say to each other, beside pages and state.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Serialize};

pub use vellum_control::Waited;
use vellum_report::printable;

/// The newest version of the wire that is spoken here.
pub const VERSION: u32 = 3;
/// The oldest.
pub const OLDEST: u32 = 1;
/// The first in which pages may be compressed.
pub const COMPRESSES: u32 = 2;
/// The first in which a machine's memory may be handed over as a descriptor.
pub const HANDS_OVER: u32 = 3;
/// The first in which a guest may run on the target before all of its memory is there.
pub const POSTCOPIES: u32 = 3;
/// The compression that there is.
pub const ZSTD: &str = "zstd";

/// The newest version that a peer which speaks `versions`, oldest and newest, shares with this one.
pub(crate) fn common_version([oldest, newest]: [u32; 2]) -> Option<u32> {
    let common = newest.min(VERSION);
    (oldest.max(OLDEST) <= common).then_some(common)
}

/// Which migration a message belongs to: random, chosen by the source. Another one's messages are refused.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SessionId(pub [u8; 16]);

impl SessionId {
    /// A number that nobody has had and nobody can guess.
    ///
    /// # Errors
    /// Where the kernel has no randomness.
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

/// One thing that does not fit: what the source has, what the target has, and what would help.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Misfit {
    /// What it is about: `memory`, `cpuid avx512f`, `disk1`.
    pub what: String,
    /// What the source has.
    pub source: String,
    /// What the target has.
    pub target: String,
    /// What would make it fit.
    pub remedy: String,
}

impl fmt::Display for Misfit {
    /// As the source says it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, source, target, remedy } = self;
        write!(f, "{what}: {source} here, {target} there; {remedy}")
    }
}

impl Message {
    /// What it is called on the wire.
    pub fn name(&self) -> String {
        let said = serde_json::to_value(self).ok();
        said.as_ref().and_then(|said| said["say"].as_str()).unwrap_or("a message").to_uppercase()
    }
}

/// What became of the guest on the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Standing {
    /// It has everything and waits for COMMIT.
    Uncommitted,
    /// It runs, or has run.
    Ran,
    /// It never ran here and never will.
    Gone,
}

/// The longest text of a peer's that is shown, in characters.
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

/// A message. Those of the hand-over carry the attempt that they are about: a final pass that took too long is given up, and what
/// is still under way of it means nothing to the next one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Message {
    /// The source begins.
    Hello {
        /// The versions of the wire that it speaks, oldest and newest.
        versions: [u32; 2],
    },
    /// The target knows one of the versions.
    Welcome {
        /// The newest that both speak.
        version: u32,
        /// Whether it shares the source's [flag](super::commit_flag).
        #[serde(default)]
        fence: bool,
    },
    /// What the machine is that wants to move.
    Config {
        /// Its configuration, which the machine reads.
        config: serde_json::Value,
        /// Over how many connections its pages come.
        connections: u32,
        /// How they may be compressed, from version 2 on: the name of one that the target must know.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        compression: Option<String>,
        /// Whether its RAM has come as a descriptor with HELLO, from version 3 on: no page of that follows.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        handed: bool,
        /// Whether the guest may have to run before all of its memory has come, from version 3 on. One more connection joins then, as the
        /// number behind the last: pages that somebody waits for are asked for and come on that.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        postcopy: bool,
    },
    /// It fits.
    Fit {},
    /// It does not.
    Misfit {
        /// Every reason.
        misfits: Vec<Misfit>,
    },
    /// One more connection of a migration that is under way.
    Join {
        /// Its number, from 1.
        connection: u32,
    },
    /// It is one.
    Joined {},
    /// A pass over memory has been sent, as far as this connection has it.
    PassEnd {
        /// Its number, from 1.
        pass: u32,
        /// How many pages have been sent on it.
        pages: u64,
    },
    /// The final pass was given up: the guest runs on on the source, and more passes follow.
    Again {
        /// The attempt that comes next.
        attempt: u32,
    },
    /// All pages and all state have been sent.
    Final {
        /// Which attempt this ends.
        attempt: u32,
        /// How many pages have been sent in all passes.
        pages: u64,
        /// How many sections of state belong to this attempt.
        sections: u32,
        /// Where memory follows while the guest runs on the target: how many pages of it, the map of which has been sent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        lacking: Option<u64>,
    },
    /// The target has restored it and could run it.
    Ready {
        /// Of which attempt.
        attempt: u32,
    },
    /// The sums of every page that may be other than zero have been sent: are they the target's?
    Compare {
        /// Of which attempt.
        attempt: u32,
        /// How many pages they were.
        pages: u64,
    },
    /// The answer.
    Compared {
        /// Of which attempt.
        attempt: u32,
        /// How many pages were compared.
        pages: u64,
        /// How many differ, those among them that the source says nothing of and that are not zero.
        wrong: u64,
        /// The guest addresses of the first of these.
        first: Vec<u64>,
    },
    /// The target shall run it.
    Commit {
        /// Of which attempt.
        attempt: u32,
    },
    /// It runs on the target.
    Done {},
    /// The target has sent the map of the pages that it lacks: the source is to send them.
    Lacking {
        /// How many.
        pages: u64,
    },
    /// The target lacks nothing any more.
    Complete {
        /// For how long each vCPU has waited for pages.
        waited: Waited,
    },
    /// The source has understood, and ends.
    Bye {
        /// What was typed for the guest from the pause for the final pass on, which it has not been given.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        typed: Vec<u8>,
    },
    /// After COMMIT: the target cannot run it, and has never run it.
    Refused {
        /// Why.
        why: String,
    },
    /// The migration is off.
    Abort {
        /// Why.
        why: String,
    },
    /// What became of it?
    Query {},
    /// The answer.
    Status {
        /// What became of it.
        standing: Standing,
    },
}

impl Message {
    /// The last word, with nothing to pass on.
    pub(crate) const BYE: Self = Self::Bye { typed: Vec::new() };

    /// As it came from a peer, whose reasons go into logs and onto terminals: each is one line of a length that can be read.
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
