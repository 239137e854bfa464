//! The control socket: a server on its event loop, and clients. No KVM, no guest.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use event_manager::{EventManager, MutEventSubscriber, SubscriberOps};
use serde_json::{Value, json};
use support::{LIMIT, eventually};
use vellum_control::client::{Client, Error};
use vellum_control::operation::News;
use vellum_control::server::{Control, Heard};
use vellum_control::{Do, Event, MAX_LINE};
use vellum_sys::socket::{self, MAX_DESCRIPTORS, SocketError};

/// A machine that answers `status` with its path, refuses `resume`, sends an event at `pause` and
/// the end of an operation at `nmi`, writes into the descriptor of `serial`, and ends at `stop`.
fn machine(name: &str) -> (PathBuf, JoinHandle<()>) {
    let path = std::env::temp_dir().join(format!("vellum-control-{}-{name}", std::process::id()));
    let (hear, heard): (_, Receiver<Heard>) = channel();
    let control = Control::bind(&path, hear).unwrap();
    let told = path.clone();
    let thread = std::thread::spawn(move || {
        let listeners = control.listeners();
        let mut events = EventManager::<Arc<Mutex<dyn MutEventSubscriber + Send>>>::new().unwrap();
        events.add_subscriber(Arc::new(Mutex::new(control)));
        loop {
            events.run().unwrap();
            while let Ok(heard) = heard.try_recv() {
                let Heard::Asked(asked) = heard else { continue };
                match asked.what {
                    Do::Status {} => asked.answer(Ok(json!({"path": told}))),
                    Do::Pause {} => {
                        listeners.tell(&News { id: Some(asked.by.id), event: Event::Paused { us: 5 } });
                        asked.answer(Ok(json!({})));
                    }
                    Do::Serial { .. } => {
                        let [file] = &asked.descriptors[..] else { panic!("{:?}", asked.descriptors) };
                        File::from(file.try_clone().unwrap()).write_all(b"written by the machine").unwrap();
                        asked.answer(Ok(json!({})));
                    }
                    Do::Nmi {} => {
                        let event = Event::Stayed { why: "told to".into() };
                        listeners.tell(&News { id: Some(asked.by.id), event });
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
    let Err(Error::Refused(reason)) = client.ask(&Do::Resume { force: false }) else {
        panic!("must be refused")
    };
    assert_eq!(reason, "not today");
    client.ask(&Do::Pause {}).unwrap();
    let id = client.last_id();
    assert_eq!(listener.line().unwrap(), json!({"event": "paused", "id": id, "us": 5}));
    client.ask(&Do::Stop {}).unwrap();
    thread.join().unwrap();
    assert!(!path.exists(), "the socket goes with the machine");
    assert!(matches!(Client::connect(&path), Err(Error::Connect { .. })));
}

#[test]
fn nonsense_costs_its_sender_an_error_or_the_connection_and_nobody_else_anything() {
    let (path, thread) = machine("nonsense");
    let mut stream = UnixStream::connect(&path).unwrap();
    // Three lines in pieces. The last one is valid.
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

    // More clients than there is room for. Those beyond the limit are told so and disconnected, the
    // others stay.
    let crowd: Vec<_> = (0..40).map(|_| UnixStream::connect(&path).unwrap()).collect();
    let mut refused = UnixStream::connect(&path).unwrap();
    let mut answer = String::new();
    refused.read_to_string(&mut answer).unwrap();
    assert!(answer.contains("too many"), "{answer}");
    drop((crowd, stream));
    // The server sees before or soon after the next connection that they have gone.
    let asked = || Client::connect(&path).and_then(|mut client| client.ask(&Do::Stop {}));
    eventually(LIMIT, "there is room for a client", || Ok(asked().ok())).unwrap();
    thread.join().unwrap();
}

/// Ends the machine and waits for that.
fn stop(path: &std::path::Path, thread: JoinHandle<()>) {
    Client::connect(path).unwrap().ask(&Do::Stop {}).unwrap();
    thread.join().unwrap();
}

#[test]
fn lines_that_are_hostile_are_answered_one_by_one() {
    let (path, thread) = machine("hostile");
    let stream = UnixStream::connect(&path).unwrap();
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    let deep = format!("{{\"id\":1,\"do\":{}", "[".repeat(MAX_LINE / 2));
    let wide = format!("{{\"id\":2,\"do\":\"status\",\"x\":\"{}\"}}", "y".repeat(MAX_LINE / 2));
    for (line, id) in [
        (deep.as_bytes(), 0),
        (wide.as_bytes(), 2),
        (b"{\"id\":3,\"do\":\"\xff\xfe\"}", 0),
        (b"\x00", 0),
        (b"", 0),
        (br#"{"id":18446744073709551616,"do":"status"}"#, 0),
        (br#"{"id":4,"do":"balloon","bytes":-1}"#, 4),
        (br#"{"id":5,"do":"balloon","bytes":1e400}"#, 0),
        (br#"{"id":6,"do":{"status":{}}}"#, 6),
        (br#"{"id":7,"id":8,"do":"resume"}"#, 8),
    ] {
        (&stream).write_all(&[line, b"\n"].concat()).unwrap();
        let answer: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        let said = String::from_utf8_lossy(&line[..line.len().min(60)]);
        assert!(answer["id"] == id && answer["error"].is_string(), "{said}: {answer}");
    }
    // The client chooses its numbers. The same number twice is answered twice.
    (&stream).write_all(b"{\"id\":9,\"do\":\"status\"}\n{\"id\":9,\"do\":\"resume\"}\n").unwrap();
    let answers: Vec<Value> =
        lines.by_ref().take(2).map(|line| serde_json::from_str(&line.unwrap()).unwrap()).collect();
    assert!(answers[0]["id"] == 9 && answers[0]["ok"].is_object(), "{answers:?}");
    assert!(answers[1]["id"] == 9 && answers[1]["error"].is_string(), "{answers:?}");
    stop(&path, thread);
}

/// A slow listener misses no end of an operation, and is told how many other events it missed.
#[test]
fn a_listener_that_does_not_read_misses_no_end_and_knows_how_much_else() {
    let (path, thread) = machine("slow");
    let mut slow = Client::connect(&path).unwrap();
    slow.ask(&Do::Events {}).unwrap();
    let mut listener = Client::connect(&path).unwrap();
    listener.ask(&Do::Events {}).unwrap();
    // A second subscription does not duplicate events.
    listener.ask(&Do::Events {}).unwrap();
    let mut client = Client::connect(&path).unwrap();
    // A unix socket holds some 200 KiB (net.core.wmem_max), and counts each event with more than
    // 500 bytes.
    for _ in 0..2000 {
        client.ask(&Do::Pause {}).unwrap();
        assert_eq!(listener.line().unwrap()["event"], "paused");
    }
    client.ask(&Do::Nmi {}).unwrap();
    let (mut heard, mut missed) = (0, 0);
    loop {
        let line = slow.line().unwrap();
        match line["event"].as_str() {
            Some("paused") => heard += 1,
            Some("missed") => missed += line["events"].as_u64().unwrap(),
            _ => {
                assert_eq!(line, json!({"event": "stayed", "id": client.last_id(), "why": "told to"}));
                break;
            }
        }
    }
    assert!(missed > 0 && heard + missed == 2000, "{heard} heard, {missed} missed");
    // It reads again, and gets events again.
    client.ask(&Do::Pause {}).unwrap();
    assert_eq!(slow.line().unwrap()["event"], "paused");
    stop(&path, thread);
}

/// Two clients of one machine each see the outcome of their own request. A partial line is kept
/// until it is complete.
#[test]
fn a_client_takes_no_events_of_another_s_request() {
    let path = std::env::temp_dir().join(format!("vellum-control-{}-events", std::process::id()));
    let listener = UnixListener::bind(&path).unwrap();
    let mut client = Client::connect_within(&path, std::time::Duration::from_millis(50)).unwrap();
    let (mut machine, _) = listener.accept().unwrap();
    let answers = std::thread::spawn(move || {
        let mut line = String::new();
        BufReader::new(&machine).read_line(&mut line).unwrap();
        let id = serde_json::from_str::<Value>(&line).unwrap()["id"].as_u64().unwrap();
        let others = id ^ 1;
        writeln!(machine, "{{\"event\":\"stayed\",\"id\":{others},\"why\":\"another's\"}}").unwrap();
        writeln!(machine, "{{\"event\":\"resumed\"}}\n{{\"id\":{id},\"ok\":{{}}}}").unwrap();
        write!(machine, "{{\"event\":\"stayed\",\"id\":{id},").unwrap();
        (machine, id)
    });
    client.ask(&Do::Nmi {}).unwrap();
    let (mut machine, id) = answers.join().unwrap();
    assert_eq!(id, client.last_id());
    assert_eq!(client.event_of(Some(id)).unwrap(), json!({"event": "resumed"}));
    assert!(matches!(client.event_of(Some(id)), Err(Error::Silent { .. })), "half a line is none");
    writeln!(machine, "\"why\":\"own\"}}").unwrap();
    client.wait_for_ever();
    assert_eq!(client.event_of(Some(id)).unwrap()["why"], "own");
    std::fs::remove_file(path).unwrap();
}

#[test]
fn descriptors_come_with_the_request_that_takes_them() {
    let (path, thread) = machine("descriptors");
    let place = path.with_extension("file");
    let file = File::create(&place).unwrap();
    let mut client = Client::connect(&path).unwrap();
    client.ask_with(&Do::Serial { truncate: false }, &[file.as_fd()]).unwrap();
    assert_eq!(std::fs::read_to_string(&place).unwrap(), "written by the machine");

    let Err(Error::Refused(error)) = client.ask(&Do::Serial { truncate: false }) else {
        panic!("must be refused")
    };
    assert!(error.contains("needs 1 descriptors"), "{error}");

    // Too many for the request: it uses the first, and the others are refused.
    let stream = UnixStream::connect(&path).unwrap();
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    let mut answer = || serde_json::from_str::<Value>(&lines.next().unwrap().unwrap()).unwrap();
    socket::send(&stream, b"{\"id\":1,\"do\":\"serial\"}\n", &[file.as_fd(); 3]).unwrap();
    let (first, second) = (answer(), answer());
    let mut both = [first, second];
    both.sort_by_key(|answer| answer["id"].as_u64());
    assert!(both[0]["error"].as_str().unwrap().starts_with("2 descriptors"), "{both:?}");
    assert!(both[1]["id"] == 1 && both[1]["ok"].is_object(), "{both:?}");

    // With a request that takes none.
    socket::send(&stream, b"{\"id\":2,\"do\":\"status\"}\n", &[file.as_fd()]).unwrap();
    let mut both = [answer(), answer()];
    both.sort_by_key(|answer| answer["id"].as_u64());
    assert!(both[0]["id"] == 0 && both[1]["id"] == 2 && both[1]["ok"].is_object(), "{both:?}");

    // In the middle of a line that is completed later.
    socket::send(&stream, b"{\"id\":3,", &[file.as_fd()]).unwrap();
    socket::send(&stream, b"\"do\":\"serial\"}\n", &[]).unwrap();
    let third = answer();
    assert!(third["id"] == 3 && third["ok"].is_object(), "{third}");

    // A line that never ends, with descriptors that pile up.
    for _ in 0..MAX_DESCRIPTORS {
        let _ = socket::send(&stream, b" ", &[file.as_fd(); MAX_DESCRIPTORS]);
    }
    assert!(!matches!(lines.next(), Some(Ok(_))), "it must hang up");
    drop(client);

    // None of these descriptors is kept: the machine has its socket, its loop and the last client's
    // connection.
    let mut client = Client::connect(&path).unwrap();
    client.ask(&Do::Status {}).unwrap();
    let held = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let held = held.filter(|entry| std::fs::read_link(entry.path()).is_ok_and(|to| to == place)).count();
    assert_eq!(held, 1, "only this test's own descriptor of the file is open");
    std::fs::remove_file(place).unwrap();
    stop(&path, thread);
}

#[test]
fn more_descriptors_than_a_message_may_have_cost_the_connection() {
    let (path, thread) = machine("many");
    let stream = UnixStream::connect(&path).unwrap();
    let file = File::open("/dev/null").unwrap();
    socket::send(&stream, b"{\"id\":1,\"do\":\"serial\"}\n", &[file.as_fd(); MAX_DESCRIPTORS + 1]).unwrap();
    let mut rest = Vec::new();
    let _ = (&stream).read_to_end(&mut rest);
    assert!(rest.is_empty(), "hung up without a word: {rest:?}");
    stop(&path, thread);
}

#[test]
fn a_socket_that_nobody_serves_is_replaced_and_a_live_one_refused() {
    let path = std::env::temp_dir().join(format!("vellum-control-{}-stale", std::process::id()));
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists(), "the standard library leaves the name");
    let (hear, _heard) = channel();
    let control = Control::bind(&path, hear).unwrap();
    let (hear, _heard) = channel();
    assert!(matches!(Control::bind(&path, hear), Err(SocketError::InUse(_))));
    // The existing socket is still there and works.
    assert!(UnixStream::connect(&path).is_ok());
    drop(control);
    assert!(!path.exists());
    std::fs::write(&path, "").unwrap();
    let (hear, _heard) = channel();
    assert!(matches!(Control::bind(&path, hear), Err(SocketError::NotASocket(_))));
    std::fs::remove_file(path).unwrap();
}
