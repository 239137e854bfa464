//! The control socket: a server on its event loop, clients beside it. No KVM, no guest.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use event_manager::{EventManager, MutEventSubscriber, SubscriberOps};
use serde_json::{Value, json};
use vellum::control::client::{Client, Error};
use vellum::control::server::{Asked, Control};
use vellum::control::{Do, Event, MAX_LINE};

/// A machine that answers `status` with its path, refuses `resume`, tells of `pause`, and ends at `stop`.
fn machine(name: &str) -> (PathBuf, JoinHandle<()>) {
    let path = std::env::temp_dir().join(format!("vellum-control-{}-{name}", std::process::id()));
    let (ask, asked): (_, Receiver<Asked>) = channel();
    let control = Control::bind(&path, ask).unwrap();
    let told = path.clone();
    let thread = std::thread::spawn(move || {
        let listeners = control.listeners();
        let mut events = EventManager::<Arc<Mutex<dyn MutEventSubscriber + Send>>>::new().unwrap();
        events.add_subscriber(Arc::new(Mutex::new(control)));
        loop {
            events.run().unwrap();
            while let Ok(asked) = asked.try_recv() {
                match asked.what {
                    Do::Status {} => asked.answer(Ok(json!({"path": told}))),
                    Do::Pause {} => {
                        listeners.tell(&Event::Paused { us: 5 });
                        asked.answer(Ok(json!({})));
                    }
                    Do::Stop {} => return asked.answer(Ok(json!({}))),
                    _ => asked.answer(Err("not today".into())),
                }
            }
        }
    });
    (path, thread)
}

#[test]
fn requests_are_answered_by_their_numbers_and_events_reach_who_listens() {
    let (path, thread) = machine("talk");
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let mut listener = Client::connect(&path).unwrap();
    listener.ask(&Do::Events {}).unwrap();
    let mut client = Client::connect(&path).unwrap();
    assert_eq!(client.ask(&Do::Status {}).unwrap(), json!({"path": path}));
    let Err(Error::Refused(reason)) = client.ask(&Do::Resume {}) else { panic!("must be refused") };
    assert_eq!(reason, "not today");
    client.ask(&Do::Pause {}).unwrap();
    assert_eq!(listener.line().unwrap(), json!({"event": "paused", "us": 5}));
    client.ask(&Do::Stop {}).unwrap();
    thread.join().unwrap();
    assert!(!path.exists(), "the socket goes with the machine");
    assert!(matches!(Client::connect(&path), Err(Error::Connect { .. })));
}

#[test]
fn nonsense_costs_its_sender_an_error_or_the_connection_and_nobody_else_anything() {
    let (path, thread) = machine("nonsense");
    let mut stream = UnixStream::connect(&path).unwrap();
    // Three lines in pieces, the last of them good.
    for piece in ["{\"id\":9,\"do\":\"pau", "nse\"}\nnot json\n{\"id\":10,\"do\":\"sta", "tus\"}\n"] {
        stream.write_all(piece.as_bytes()).unwrap();
    }
    let mut lines = BufReader::new(&stream).lines();
    let mut next = || serde_json::from_str::<Value>(&lines.next().unwrap().unwrap()).unwrap();
    let (first, second, third) = (next(), next(), next());
    assert!(first["id"] == 9 && first["error"].is_string(), "{first}");
    assert!(second["id"] == 0 && second["error"].is_string(), "{second}");
    assert!(third["id"] == 10 && third["ok"].is_object(), "{third}");

    // A line without an end.
    let mut endless = UnixStream::connect(&path).unwrap();
    let _ = endless.write_all(&vec![b'x'; MAX_LINE + 8192]);
    let mut rest = Vec::new();
    let _ = endless.read_to_end(&mut rest);
    assert!(rest.is_empty(), "hung up without a word");

    // More clients than there is room for; those that are told so are gone, the others stay.
    let crowd: Vec<_> = (0..40).map(|_| UnixStream::connect(&path).unwrap()).collect();
    let mut refused = UnixStream::connect(&path).unwrap();
    let mut answer = String::new();
    refused.read_to_string(&mut answer).unwrap();
    assert!(answer.contains("too many"), "{answer}");
    drop((crowd, stream));
    // Their going is seen before the next one comes, or soon after.
    while Client::connect(&path).and_then(|mut client| client.ask(&Do::Stop {})).is_err() {}
    thread.join().unwrap();
}
