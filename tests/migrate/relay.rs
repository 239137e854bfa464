//! A relay between source and target that cuts or holds their connection.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use serde_json::Value;
use support::env::{Process, TestEnv};
use support::{Failed, LIMIT, ensure, eventually};
use vellum_migration::message::{Message, SessionId};
use vellum_migration::wire::{Decoder, Encoder, Frame, HEADER, Header, Section};
use vellum_sys::mmap::PAGE_SIZE;

/// What a relay does to the first connection.
pub enum RelayFault {
    None,
    /// Cuts it after this many bytes to the target, or back.
    Cut {
        back: bool,
        after: u64,
    },
    /// Holds what comes back after this many bytes, until a message arrives or its sender is
    /// dropped.
    Hold {
        after: u64,
        until: Receiver<()>,
    },
}

/// The bytes of these messages on a link.
pub fn bytes(messages: &[Message]) -> u64 {
    let mut encoder = Encoder::new(SessionId([0; 16]));
    messages.iter().map(|message| encoder.message(message).len() as u64).sum()
}

/// The bytes that the target sends before READY.
pub fn until_fit() -> u64 {
    bytes(&[Message::Welcome { version: 1, fence: false }, Message::Fit {}])
}

/// Carries bytes from one unix socket to another. Returns the bytes of each direction.
pub fn relay(from: PathBuf, to: PathBuf, fault: RelayFault) -> Result<Arc<[AtomicU64; 2]>, Failed> {
    let listener = UnixListener::bind(from)?;
    let carried = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
    let counts = carried.clone();
    std::thread::spawn(move || {
        let mut fault = fault;
        while let Ok((source, _)) = listener.accept() {
            let Ok(target) = UnixStream::connect(&to) else { continue };
            let (cut, mut hold) = match std::mem::replace(&mut fault, RelayFault::None) {
                RelayFault::None => (None, None),
                RelayFault::Cut { back, after } => (Some((back, after)), None),
                RelayFault::Hold { after, until } => (None, Some((after, until))),
            };
            for (at, back) in [false, true].into_iter().enumerate() {
                let (Ok(here), Ok(there)) = (source.try_clone(), target.try_clone()) else { continue };
                let (mut from, mut to) = if back { (there, here) } else { (here, there) };
                let mut left = cut.filter(|(of, _)| *of == back).map(|(_, bytes)| bytes);
                let mut hold = hold.take_if(|_| back);
                let counts = counts.clone();
                std::thread::spawn(move || {
                    let mut buffer = vec![0; 64 << 10];
                    while let Ok(count @ 1..) = from.read(&mut buffer) {
                        let pass = left.map_or(count, |left| count.min(left as usize));
                        let mut rest = &buffer[..pass];
                        let before = counts[at].fetch_add(pass as u64, Ordering::Relaxed);
                        let mut sent = Ok(());
                        if let Some((after, until)) = hold.take_if(|(after, _)| before + pass as u64 > *after)
                        {
                            let (first, second) = rest.split_at(after.saturating_sub(before) as usize);
                            sent = to.write_all(first);
                            // An error means that the sender was dropped.
                            let _ = until.recv();
                            rest = second;
                        }
                        let sent = sent.and_then(|()| to.write_all(rest));
                        left = left.map(|left| left - pass as u64);
                        if sent.is_err() || left == Some(0) {
                            break;
                        }
                    }
                    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
                });
            }
        }
    });
    Ok(carried)
}

/// Starts a migration from `here` to `there` whose answers are held after `after` bytes, until the
/// sender is dropped.
pub fn held_back(env: &TestEnv, after: u64, more: &str) -> Result<(Process, Sender<()>), Failed> {
    let (release, until) = channel();
    relay(env.path("relay.in"), env.path("there.in"), RelayFault::Hold { after, until })?;
    let line =
        format!("migrate here --to unix:{} {}", env.path("relay.in").display(), support::env::patient(more));
    Ok((env.migration_client(&line)?, release))
}

/// Reads the next frame. Returns its header, and its raw bytes.
pub fn next_frame(from: &mut UnixStream, decoder: &mut Decoder) -> std::io::Result<(Header, Vec<u8>)> {
    let mut raw = vec![0; HEADER];
    from.read_exact(&mut raw)?;
    let head = raw.first_chunk().expect("as many bytes as a header has");
    let header = decoder.header(head).map_err(std::io::Error::other)?;
    raw.resize(HEADER + header.len as usize, 0);
    from.read_exact(&mut raw[HEADER..])?;
    Ok((header, raw))
}

/// Starts a migration that the target has taken while the source does not know it. Returns the
/// client, and a sender that releases the answers when it is dropped.
pub fn unconfirmed(env: &TestEnv) -> Result<(Process, Sender<()>), Failed> {
    let after = until_fit() + bytes(&[Message::Ready { attempt: 1 }]);
    let held = held_back(env, after, "--liveness 1h")?;
    eventually(LIMIT, "the target runs", || {
        Ok((env.standing("there").as_deref() == Some("running")).then_some(()))
    })?;
    let standing = env.standing("here");
    ensure(standing.as_deref() == Some("handover-unconfirmed"), || format!("it is {standing:?}"))?;
    Ok(held)
}

/// A part of a stream that can be read and changed.
pub enum Part {
    Message(Message),
    /// The name and the content.
    Section(String, Value),
}

/// Carries one connection from `from` to `to`, with `change` applied to what goes to the target.
pub fn changed(from: &Path, to: PathBuf, change: impl Fn(&mut Part) + Send + 'static) -> Result<(), Failed> {
    changed_one_way(from, to, false, change)
}

/// Carries one connection from `from` to `to`, with `change` applied to what comes back.
pub fn changed_back(
    from: &Path,
    to: PathBuf,
    change: impl Fn(&mut Part) + Send + 'static,
) -> Result<(), Failed> {
    changed_one_way(from, to, true, change)
}

fn changed_one_way(
    from: &Path,
    to: PathBuf,
    back: bool,
    change: impl Fn(&mut Part) + Send + 'static,
) -> Result<(), Failed> {
    let listener = UnixListener::bind(from)?;
    std::thread::spawn(move || -> std::io::Result<()> {
        let (here, there) = (listener.accept()?.0, UnixStream::connect(&to)?);
        let (mut source, mut target) = if back { (there, here) } else { (here, there) };
        let (mut into, mut of) = (source.try_clone()?, target.try_clone()?);
        std::thread::spawn(move || {
            let _ = std::io::copy(&mut of, &mut into);
            into.shutdown(Shutdown::Both)
        });
        let mut decoder = Decoder::new(None, PAGE_SIZE as u32);
        let mut encoder = Encoder::new(SessionId([0; 16]));
        loop {
            let next = next_frame(&mut source, &mut decoder);
            let (header, raw) = next.inspect_err(|_| drop(target.shutdown(Shutdown::Both)))?;
            encoder.set_session(decoder.session().expect("a frame has come"));
            let payload = &raw[HEADER..];
            let frame = match decoder.payload(&header, payload).map_err(std::io::Error::other)? {
                Frame::Message(message) => {
                    let mut part = Part::Message(message);
                    change(&mut part);
                    let Part::Message(message) = part else { continue };
                    encoder.message(&message)
                }
                Frame::Section(Section { name, version, body }) => {
                    let mut part = Part::Section(name.to_owned(), serde_json::from_slice(body)?);
                    change(&mut part);
                    let Part::Section(name, state) = part else { continue };
                    let body = serde_json::to_vec(&state)?;
                    encoder.section(&Section { name: &name, version, body: &body })
                }
                _ => [&encoder.header(header.kind, &[payload])[..], payload].concat(),
            };
            target.write_all(&frame)?;
        }
    });
    Ok(())
}

/// Like [`held_back`]. The receiver tells when the source has given up a final pass.
pub fn held_back_until_again(
    env: &TestEnv,
    after: u64,
) -> Result<(Process, Sender<()>, Receiver<()>), Failed> {
    let ((release, until), (said, again)) = (channel(), channel());
    relay(env.path("middle.in"), env.path("there.in"), RelayFault::Hold { after, until })?;
    changed(&env.path("relay.in"), env.path("middle.in"), move |part| {
        if let Part::Message(Message::Again { .. }) = part {
            // The caller waits for one message only.
            let _ = said.send(());
        }
    })?;
    let line = format!("migrate here --liveness 5m --to unix:{}", env.path("relay.in").display());
    Ok((env.migration_client(&line)?, release, again))
}
