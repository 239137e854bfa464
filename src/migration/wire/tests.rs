//! Tests of the wire format, frame by frame.

use super::*;
use crate::pack::Packer;

const SESSION: SessionId = SessionId(*b"0123456789abcdef");
const PAGE: u32 = 4096;

fn decode<'a>(decoder: &'a mut Decoder, frame: &'a [u8]) -> Result<Frame<'a>, Error> {
    let header = decoder.header(frame[..HEADER].try_into().unwrap())?;
    decoder.payload(&header, &frame[HEADER..])
}

fn pages(encoder: &mut Encoder, run: &Run, data: &[u8]) -> Vec<u8> {
    let kind = if data.is_empty() { Kind::Zeroes } else { Kind::Pages };
    [&encoder.header(kind, &[&run.bytes(), data])[..], &run.bytes(), data].concat()
}

#[test]
fn what_is_sent_comes() {
    let (mut encoder, mut decoder) = (Encoder::new(SESSION), Decoder::new(None, PAGE));
    let message = Message::Commit { attempt: 2 };
    assert_eq!(decode(&mut decoder, &encoder.message(&message)), Ok(Frame::Message(message)));
    let section = Section { name: "vcpu0", version: 3, body: b"{}" };
    assert_eq!(decode(&mut decoder, &encoder.section(&section)), Ok(Frame::Section(section)));
    let run = Run { region: 1, pass: 2, first: 7, pages: 2 };
    let data = vec![5; 2 * PAGE as usize];
    assert_eq!(decode(&mut decoder, &pages(&mut encoder, &run, &data)), Ok(Frame::Run(run, Some(&data))));
    let many = Run { pages: 1 << 20, ..run };
    assert_eq!(decode(&mut decoder, &pages(&mut encoder, &many, &[])), Ok(Frame::Run(many, None)));
    let sums = [7; 2 * SUM];
    assert_eq!(decode(&mut decoder, &encoder.sums(&run, &sums)), Ok(Frame::Sums(run, &sums)));
    assert!(decode(&mut decoder, &encoder.sums(&run, &sums[1..])).is_err());
    let wide = Run { first: 64, pages: 70, ..run };
    let frame = encoder.missing(&wide, &[5, 1 << 5]);
    assert_eq!(decode(&mut decoder, &frame), Ok(Frame::Missing(wide, vec![5, 1 << 5])));
    assert_eq!(decode(&mut decoder, &encoder.wanted(&run)), Ok(Frame::Wanted(run)));
    assert_eq!(decoder.session(), Some(SESSION));
}

/// A frame of packed pages. Its inner checksum is computed over `summed` instead of `run`.
fn packed(encoder: &mut Encoder, run: &Run, summed: &Run, data: &[u8]) -> Vec<u8> {
    let mut restored = Sum::new();
    [&summed.bytes()[..], data].into_iter().for_each(|part| restored.add(part));
    let own = [restored.finish().to_le_bytes(), [0; 4]].concat();
    let packed = Packer::new().pack(data).expect("it repeats").to_vec();
    let header = encoder.header(Kind::Packed, &[&run.bytes(), &own, &packed]);
    [&header[..], &run.bytes(), &own, &packed].concat()
}

#[test]
fn packed_pages_come_as_they_were_or_not_at_all() {
    let (mut encoder, mut decoder) = (Encoder::new(SESSION), Decoder::new(None, PAGE));
    let run = Run { region: 1, pass: 2, first: 7, pages: 2 };
    let data = vec![5; 2 * PAGE as usize];
    let frame = packed(&mut encoder, &run, &run, &data);
    assert!(frame.len() < 200, "{}", frame.len());
    assert_eq!(decode(&mut decoder, &frame), Ok(Frame::Run(run, Some(&data))));
    // Pages other than those in the checksum.
    let other = packed(&mut encoder, &run, &Run { first: 8, ..run }, &data);
    assert_eq!(decode(&mut decoder, &other), Err(Error::PayloadSum(RUN + data.len())));
    // More or fewer pages than the run says, and more than a frame may have.
    for pages in [1, 3, MAX_PAGES + 1, u32::MAX] {
        let run = Run { pages, ..run };
        let error = decode(&mut decoder, &packed(&mut encoder, &run, &run, &data)).unwrap_err();
        assert!(matches!(error, Error::Malformed(Kind::Packed, _)), "{pages} pages: {error}");
    }
}

#[test]
fn any_bit_that_flips_is_seen() {
    let frame = Encoder::new(SESSION).message(&Message::Ready { attempt: 1 });
    for bit in 0..frame.len() * 8 {
        let mut flipped = frame.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert!(decode(&mut Decoder::new(Some(SESSION), PAGE), &flipped).is_err(), "bit {bit}");
    }
}

#[test]
fn frames_that_are_lost_repeated_or_of_another_session_are_seen() {
    let mut encoder = Encoder::new(SESSION);
    let frames: Vec<_> = (0..3).map(|_| encoder.message(&Message::Query {})).collect();
    let mut decoder = Decoder::new(None, PAGE);
    decode(&mut decoder, &frames[0]).unwrap();
    assert_eq!(decode(&mut decoder.clone(), &frames[0]), Err(Error::Sequence { expected: 1, found: 0 }));
    assert_eq!(decode(&mut decoder.clone(), &frames[2]), Err(Error::Sequence { expected: 1, found: 2 }));
    let mut other = Encoder::new(SessionId([0; 16]));
    other.message(&Message::Query {});
    let error = decode(&mut decoder, &other.message(&Message::Query {})).unwrap_err();
    assert!(matches!(error, Error::Session { .. }), "{error}");
}

#[test]
fn lengths_and_places_are_bounded() {
    let mut encoder = Encoder::new(SESSION);
    let long = vec![1; ((MAX_PAGES + 1) * PAGE) as usize];
    let run = Run { region: 0, pass: 1, first: 0, pages: MAX_PAGES + 1 };
    let error = decode(&mut Decoder::new(None, PAGE), &pages(&mut encoder, &run, &long)).unwrap_err();
    assert!(matches!(error, Error::TooLong { .. }), "{error}");
    let short = Run { pages: 2, ..run };
    let frame = pages(&mut Encoder::new(SESSION), &short, &long[..PAGE as usize]);
    let error = decode(&mut Decoder::new(None, PAGE), &frame).unwrap_err();
    assert!(matches!(error, Error::Malformed(Kind::Pages, _)), "{error}");
    for (region, first, fits) in [(0, 6, true), (0, 7, false), (2, 0, false), (0, u64::MAX, false)] {
        let run = Run { region, pass: 1, first, pages: 2 };
        assert_eq!(run.check(&[8, 8]).is_ok(), fits, "{run:?}");
    }
}

#[test]
fn a_map_has_a_bit_for_each_of_its_pages_and_no_other() {
    let run = Run { region: 0, pass: 1, first: 64, pages: 70 };
    for (run, bits) in [
        (run, vec![0]),
        (run, vec![0; 3]),
        (run, vec![0, 1 << 6]),
        (Run { first: 1, ..run }, vec![0; 2]),
        (Run { pages: u32::MAX, ..run }, vec![0; 2]),
    ] {
        let frame = Encoder::new(SESSION).missing(&run, &bits);
        let error = decode(&mut Decoder::new(None, PAGE), &frame).unwrap_err();
        assert!(matches!(error, Error::Malformed(Kind::Missing, _)), "{run:?}: {error}");
    }
    let whole = Run { pages: MAX_MAPPED, ..run };
    let bits = vec![u64::MAX; (MAX_MAPPED / 64) as usize];
    let frame = Encoder::new(SESSION).missing(&whole, &bits);
    assert_eq!(decode(&mut Decoder::new(None, PAGE), &frame), Ok(Frame::Missing(whole, bits)));
}

/// The first frame as version 1 wrote it. It must stay readable as long as version 1 is supported.
#[test]
fn frames_of_version_1_are_still_read() {
    let frame = Encoder::new(SESSION).message(&Message::Hello { versions: [1, 1] });
    assert_eq!(&frame[HEADER..], br#"{"say":"hello","versions":[1,1]}"#);
    assert_eq!(frame[..4], *b"VLMG");
    // The check value of RFC 3720: CRC32C of the nine digits.
    assert_eq!(sum(b"123456789"), 0xe306_9283);
}
