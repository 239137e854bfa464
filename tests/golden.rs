//! The committed bytes of each version of the wire, and of the state of both kinds of machine. They
//! stay readable as long as their version is supported, and the current code writes those of the
//! newest. A change to the written bytes needs a new version, with its file here.

#![cfg(target_arch = "x86_64")]

use std::path::PathBuf;

use serde_json::Value;
use vellum_fleet::result;
use vellum_guests as guests;
use vellum_linux as machine;
use vellum_machine::Section;
use vellum_migration::message::{
    COMPRESSES, HANDS_OVER, Message, Misfit, POSTCOPIES, SessionId, Standing, VERSION, Waited, ZSTD,
};
use vellum_migration::pack::Packer;
use vellum_migration::wire::{Decoder, Encoder, Frame, HEADER, Kind, Run, SUM, Section as Part, Sum};

const SESSION: SessionId = SessionId(*b"0123456789abcdef");
const PAGE: usize = 4096;

fn golden(name: &str) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Every kind of message.
fn messages(version: u32) -> Vec<Message> {
    let misfit = || Misfit {
        what: "memory".into(),
        source: "2g".into(),
        target: "1g".into(),
        remedy: "more of it".into(),
    };
    let mut all = vec![
        Message::Hello { versions: [1, 1] },
        Message::Welcome { version: 1, fence: true },
        Message::Config {
            config: serde_json::json!({"kind": "pc", "cpus": 2}),
            connections: 2,
            compression: None,
            handed: false,
            postcopy: false,
        },
        Message::Fit {},
        Message::Misfit { misfits: vec![misfit()] },
        Message::Join { connection: 1 },
        Message::Joined {},
        Message::PassEnd { pass: 1, pages: 70 },
        Message::Again { attempt: 2 },
        Message::Final { attempt: 2, pages: 80, sections: 7, lacking: None },
        Message::Ready { attempt: 2 },
        Message::Compare { attempt: 2, pages: 80 },
        Message::Compared { attempt: 2, pages: 80, wrong: 1, first: vec![0x1000] },
        Message::Commit { attempt: 2 },
        Message::Done {},
        Message::Bye { typed: b"ls\r".to_vec() },
        Message::Refused { why: "no".into() },
        Message::Abort { why: "enough".into() },
        Message::Query {},
        Message::Status { standing: Standing::Uncommitted },
        Message::Status { standing: Standing::Ran },
        Message::Status { standing: Standing::Gone },
    ];
    if version >= COMPRESSES {
        let compression = Some(ZSTD.to_owned());
        all.push(Message::Config {
            config: Value::Null,
            connections: 1,
            compression,
            handed: false,
            postcopy: false,
        });
    }
    if version >= HANDS_OVER {
        all.push(Message::Config {
            config: Value::Null,
            connections: 1,
            compression: None,
            handed: true,
            postcopy: false,
        });
    }
    if version >= POSTCOPIES {
        let waited = Waited { vcpus_us: vec![7, 0], faults: 3, median_us: 2, longest_us: 5 };
        all.extend([
            Message::Config {
                config: Value::Null,
                connections: 1,
                compression: None,
                handed: false,
                postcopy: true,
            },
            Message::Final { attempt: 1, pages: 3, sections: 7, lacking: Some(65) },
            Message::Lacking { pages: 512 },
            Message::Complete { waited },
        ]);
    }
    // A new message fails to compile here. Add it to the list above.
    for message in &all {
        match message {
            Message::Hello { .. } | Message::Welcome { .. } | Message::Config { .. } => {}
            Message::Fit {} | Message::Misfit { .. } | Message::Join { .. } | Message::Joined {} => {}
            Message::PassEnd { .. }
            | Message::Again { .. }
            | Message::Final { .. }
            | Message::Ready { .. } => {}
            Message::Compare { .. } | Message::Compared { .. } | Message::Commit { .. } => {}
            Message::Done {} | Message::Bye { .. } | Message::Refused { .. } | Message::Abort { .. } => {}
            Message::Query {} | Message::Status { .. } => {}
            Message::Lacking { .. } | Message::Complete { .. } => {}
        }
    }
    all
}

/// The bytes of a connection: every message, and a frame of each other kind.
fn written() -> Vec<u8> {
    let mut encoder = Encoder::new(SESSION);
    let mut bytes: Vec<u8> = messages(VERSION).iter().flat_map(|message| encoder.message(message)).collect();
    bytes.extend(encoder.section(&Part { name: "vcpu0", version: 1, body: b"{\"a\":1}" }));
    let run = Run { region: 1, pass: 2, first: 7, pages: 2 };
    let page: Vec<u8> = (0..2 * PAGE).map(|at| (at / 3) as u8).collect();
    for (kind, data) in [(Kind::Pages, &page[..]), (Kind::Zeroes, &[])] {
        bytes.extend(encoder.header(kind, &[&run.bytes(), data]));
        bytes.extend(run.bytes());
        bytes.extend(data);
    }
    bytes.extend(encoder.sums(&run, &[9; 2 * SUM]));
    let mut sum = Sum::new();
    [&run.bytes()[..], &page].into_iter().for_each(|part| sum.add(part));
    let own = [sum.finish().to_le_bytes(), [0; 4]].concat();
    let mut packer = Packer::new();
    let packed = packer.pack(&page).expect("it repeats");
    bytes.extend(encoder.header(Kind::Packed, &[&run.bytes(), &own, packed]));
    [&run.bytes()[..], &own, packed].into_iter().for_each(|part| bytes.extend(part));
    let map = Run { region: 0, pass: 1, first: 64, pages: 70 };
    bytes.extend(encoder.missing(&map, &[u64::MAX - 2, 1 << 5]));
    bytes.extend(encoder.wanted(&run));
    bytes
}

#[test]
fn frames_of_every_version_are_read() {
    for version in 1..=VERSION {
        let bytes = golden(&format!("wire-{version}"));
        let (mut decoder, mut rest, mut heard, mut others) =
            (Decoder::new(None, PAGE as u32), &bytes[..], Vec::new(), 0);
        while let Some((head, behind)) = rest.split_first_chunk::<HEADER>() {
            let header = decoder.header(head).unwrap_or_else(|error| panic!("version {version}: {error}"));
            let (payload, behind) = behind.split_at(header.len as usize);
            match decoder.payload(&header, payload) {
                Ok(Frame::Message(message)) => heard.push(message),
                Ok(_) => others += 1,
                Err(error) => panic!("version {version}: {error}"),
            }
            rest = behind;
        }
        assert!(rest.is_empty() && decoder.session() == Some(SESSION));
        let kinds = 4 + usize::from(version >= COMPRESSES) + 2 * usize::from(version >= POSTCOPIES);
        assert_eq!((&heard, others), (&messages(version), kinds), "version {version}");
    }
}

/// `VELLUM_GOLDEN=PATH cargo test --test golden` writes the file of a new version.
#[test]
fn frames_are_written_as_their_version_has_them() {
    let bytes = written();
    if let Some(path) = std::env::var_os("VELLUM_GOLDEN") {
        std::fs::write(path, &bytes).unwrap();
    }
    let same = bytes == golden(&format!("wire-{VERSION}"));
    assert!(
        same,
        "what version {VERSION} of the wire writes has changed: raise message::VERSION, and add its file"
    );
}

/// The file of a fleet's task: a header and a result.
#[test]
fn results_of_a_fleet_are_read_and_written_as_their_version_has_them() {
    for version in 1..=result::VERSION {
        let bytes = golden(&format!("fleet-{version}"));
        let (header, reports) =
            result::parse(&bytes).unwrap_or_else(|why| panic!("version {version}: {why}"));
        assert_eq!((header.index, header.attempt, header.runs[0].seed), (1007, 2, 70), "version {version}");
        assert_eq!((header.node.as_str(), header.job.as_deref(), reports.len()), ("n1", Some("17"), 1));
        let first = |bytes: &[u8]| bytes.split(|&byte| byte == b'\n').next().map(<[u8]>::to_vec);
        let written = first(&result::text(&header, &reports).unwrap());
        let same = version < result::VERSION || written == first(&bytes);
        assert!(same, "the header is written otherwise: raise result::VERSION, and add its file");
    }
}

fn sections(all: Vec<Section>) -> Vec<(String, u16, Value)> {
    let section = |section: Section| {
        let body = serde_json::from_slice(&section.body).expect("it is JSON");
        (section.name, section.version, body)
    };
    all.into_iter().map(section).collect()
}

type Saved = (Value, Vec<(String, u16, Value)>);

/// Reads the saved description and state of a machine, and checks that they are written again
/// without a change.
fn state_is_read_and_written_again(name: &str, again: impl Fn(Value, Vec<Section>) -> (Value, Vec<Section>)) {
    let (description, saved): Saved = serde_json::from_slice(&golden(name)).expect("it is JSON");
    let read = saved.iter().map(|(name, version, body)| Section::new(name.clone(), *version, body)).collect();
    let (described, written) = again(description.clone(), read);
    assert_eq!(described, description, "{name}: a description is written otherwise");
    for (was, is) in saved.iter().zip(&sections(written.clone())) {
        let what = format!(
            "{name}: section {} is written otherwise: it wants a new version, and a file here",
            was.0
        );
        assert_eq!(was, is, "{what}");
    }
    assert_eq!(saved.len(), written.len(), "{name}");
}

#[test]
fn the_state_of_a_pc_is_read_and_written_as_its_version_has_it() {
    // The second machine has a VM generation ID, and the third has its devices on a PCI bus.
    // Neither existed when the first was saved.
    for name in ["pc-1.json", "pc-2.json", "pc-3.json"] {
        state_is_read_and_written_again(name, |description, read| {
            let description = machine::state::Description::from_json(description).expect("it is one");
            let state = machine::state::State::read(read, 1, ["disk0"]).expect("it is one");
            (serde_json::to_value(description).expect("plain data"), state.sections(["disk0"]))
        });
    }
}

#[test]
fn the_state_of_a_built_in_guest_is_read_and_written_as_its_version_has_it() {
    state_is_read_and_written_again("built-in-1.json", |description, read| {
        let description = guests::state::Description::from_json(description).expect("it is one");
        let pages = description.memory / description.write.stride;
        let state = guests::state::State::read(read, description.cpus, pages).expect("it is one");
        (serde_json::to_value(description).expect("plain data"), state.sections())
    });
}
