use super::*;
use crate::Image;
use crate::power::{self, Guest, base, file};

#[test]
fn a_file_that_was_made_in_vain_is_gone_and_one_that_was_there_stays() {
    let path = std::env::temp_dir().join(format!("vellum-overlay-{}", std::process::id()));
    let vain = || with_file(&path, |error| error.to_string(), |_| Err::<(), _>("full".to_owned()));
    assert_eq!(vain().unwrap_err(), "full");
    assert!(!path.exists());
    with_file(&path, |error| error, |file| file.write_all_at(b"x", 0)).unwrap();
    assert_eq!(vain().unwrap_err(), "full");
    assert_eq!(std::fs::read(&path).unwrap(), b"x");
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_base_that_is_too_large_for_a_map_is_refused() {
    let refused = Overlay::new(Base::Raw(file(b"")), 1 << 50, None, file(b""), false);
    assert!(matches!(refused, Err(Error::Large(bytes)) if bytes == 1 << 50));
}

#[test]
fn what_was_flushed_outlives_a_loss_of_power() {
    let original = base(97 * 512);
    let bytes = original.len() as u64;
    let under = file(&original);
    let open = |over| Overlay::new(Base::Raw(under.try_clone().unwrap()), bytes, None, over, true).unwrap();
    let header = Identity::of(&under, bytes).unwrap().header(bytes);
    let trace = |image: &Image| match image {
        Image::Over(overlay) => overlay.trace.clone(),
        _ => panic!("it is an overlay"),
    };
    let image = |over| Image::Over(Box::new(open(over)));
    let over = file(&[]);
    let first = image(over.try_clone().unwrap());
    let mut begin = header.to_vec();
    begin.resize(over.metadata().unwrap().len() as usize, 0);
    let again = |files: Vec<File>| image(files.into_iter().next().unwrap());
    power::is_survived(first, &original, &[begin], 1000, &trace, &again);
    let mut left = vec![0; original.len()];
    under.read_exact_at(&mut left, 0).unwrap();
    assert_eq!(left, original);
}

/// The kernel tells of lost pages once. Their blocks must never be in the map on the medium.
#[test]
fn after_a_sync_that_failed_the_map_is_never_written() {
    let original = base(64 * 512);
    let under = file(&original);
    let mut overlay = Overlay::new(Base::Raw(under), original.len() as u64, None, file(&[]), true).unwrap();
    overlay.zero(0, BLOCK).unwrap();
    overlay.medium = Medium::failed();
    overlay.trace.clear();
    for _ in 0..2 {
        assert_eq!(overlay.flush().unwrap_err().raw_os_error(), Some(libc::EIO));
    }
    assert!(overlay.trace.is_empty());
}

#[test]
fn what_is_no_overlay_of_this_base_is_refused() {
    let original = base(64 * 512);
    let under = file(&original);
    let bytes = original.len() as u64;
    let new = |over: &File| {
        Overlay::new(Base::Raw(under.try_clone().unwrap()), bytes, None, over.try_clone().unwrap(), true)
            .map(drop)
    };
    let over = file(&[]);
    new(&over).unwrap();
    new(&over).unwrap();
    over.set_len(over.metadata().unwrap().len() - 1).unwrap();
    assert!(matches!(new(&over), Err(Error::Short { .. })));
    assert!(matches!(new(&file(&[7; 10_000])), Err(Error::Other)));
    assert!(matches!(new(&file(&[7; 10])), Err(Error::Other)));
    let mut header = [0; HEADER];
    over.read_exact_at(&mut header, 0).unwrap();
    header[8] = 3;
    assert!(matches!(new(&file(&header)), Err(Error::Version(3))));
    under.write_all_at(b"x", 0).unwrap();
    let moved = file(&[]);
    new(&moved).unwrap();
    under.set_len(65 * 512).unwrap();
    let grown = Overlay::new(Base::Raw(under.try_clone().unwrap()), 65 * 512, None, moved, true);
    assert!(matches!(grown.map(drop), Err(Error::Base { bytes: 32768, now_bytes: 33280, .. })));
}

#[test]
fn a_disk_is_larger_than_its_base_and_stays_so() {
    let original = base(10 * 512);
    let (under, over, guest) = (file(&original), file(&[]), Guest::new());
    let new = |wanted| {
        let base = Base::Raw(under.try_clone().unwrap());
        Overlay::new(base, 10 * 512, wanted, over.try_clone().unwrap(), true)
    };
    assert!(matches!(new(Some(9 * 512)).map(drop), Err(Error::Size { .. })));
    let mut overlay = Image::Over(Box::new(new(Some(100 * 512)).unwrap()));
    let mut expected = original.clone();
    expected.resize(100 * 512, 0);
    assert_eq!(guest.read(&overlay, 0, expected.len()), expected);
    // Across the end of the base, and beyond it.
    for (at, len) in [(9 * 512, 1024), (50 * 512, 512)] {
        guest.write(&mut overlay, at, &vec![7; len]);
        expected[at as usize..][..len].fill(7);
    }
    assert_eq!(guest.read(&overlay, 0, expected.len()), expected);
    drop(overlay);
    for wanted in [None, Some(100 * 512)] {
        let again = new(wanted).unwrap();
        assert_eq!(again.size(), 100 * 512);
        let mut bytes = vec![0; expected.len()];
        again.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(bytes, expected);
        assert!(again.read_exact_at(&mut bytes, 1).is_err());
    }
    assert!(matches!(new(Some(101 * 512)).map(drop), Err(Error::Size { .. })));
}
