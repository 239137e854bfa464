//! One argument of a command. It may be any bytes: in JSON it is a string if it is UTF-8, and
//! otherwise an array of its bytes.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// One argument of a command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Argument(pub OsString);

impl Argument {
    /// The argument as text, if it is UTF-8.
    pub fn text(&self) -> Option<&str> {
        self.0.to_str()
    }
}

impl fmt::Display for Argument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.display().fmt(f)
    }
}

impl AsRef<OsStr> for Argument {
    fn as_ref(&self) -> &OsStr {
        &self.0
    }
}

impl<T: Into<OsString>> From<T> for Argument {
    fn from(word: T) -> Self {
        Self(word.into())
    }
}

impl Serialize for Argument {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.text() {
            Some(text) => serializer.serialize_str(text),
            None => self.0.as_bytes().serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Argument {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = Argument;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, or an array of bytes")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Argument, E> {
                Ok(text.into())
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Argument, A::Error> {
                let mut bytes = Vec::new();
                while let Some(byte) = sequence.next_element()? {
                    bytes.push(byte);
                }
                Ok(Argument(OsString::from_vec(bytes)))
            }
        }
        deserializer.deserialize_any(Either)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_a_string_where_it_is_text_and_its_bytes_else() {
        let words: Vec<Argument> = vec!["é\n".into(), OsString::from_vec(b"a\xff".to_vec()).into()];
        let line = serde_json::to_string(&words).unwrap();
        assert_eq!(line, r#"["é\n",[97,255]]"#);
        assert_eq!(serde_json::from_str::<Vec<Argument>>(&line).unwrap(), words);
        // Agents of older versions accept only strings.
        let refused = serde_json::from_str::<Vec<String>>(&line).unwrap_err().to_string();
        assert!(refused.contains("expected a string"), "{refused}");
        for wrong in ["7", "[256]", "{}"] {
            assert!(serde_json::from_str::<Argument>(wrong).is_err(), "{wrong}");
        }
    }
}
