//! `--user UID:GID`: drops root after everything has been opened.

use std::io;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};
use vellum_sys::identity;

/// The user and group to switch to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct User {
    /// The user ID.
    pub uid: u32,
    /// The group ID.
    pub gid: u32,
}

impl FromStr for User {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parse = |text: &str| text.parse::<u32>().ok().filter(|&id| id != u32::MAX);
        let (uid, gid) = text.split_once(':').ok_or("UID:GID is expected, two numbers (id -u; id -g)")?;
        match (parse(uid), parse(gid)) {
            (Some(uid), Some(gid)) => Ok(Self { uid, gid }),
            _ => Err("UID:GID is expected, two numbers (id -u; id -g)".into()),
        }
    }
}

/// Why the privileges could not be dropped.
#[derive(Debug, thiserror::Error)]
#[error("{}:{}: {source}; only root may become another user: leave it out", user.uid, user.gid)]
pub struct Error {
    /// The user to switch to.
    pub user: User,
    /// The kernel's error.
    pub source: io::Error,
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        ErrorOrigin::user(Field::User)
    }
}

/// Switches to `user` for good. Main calls this after everything has been opened and before there
/// are threads.
pub fn drop_privileges(user: User) -> Result<(), Error> {
    if identity::effective() == (user.uid, user.gid) && user.uid != 0 {
        return Ok(());
    }
    identity::become_user(user.uid, user.gid).map_err(|source| Error { user, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_two_numbers() {
        assert_eq!("1000:100".parse(), Ok(User { uid: 1000, gid: 100 }));
        for text in ["1000", "root:root", "1:", "-1:0", "4294967295:1", "1:2:3"] {
            assert!(text.parse::<User>().is_err(), "{text}");
        }
    }
}
