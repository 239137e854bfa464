//! The book's pages about Linux guests, as a reader enters them.

use std::fs;
use std::os::unix::fs::symlink;

use support::book::Page;
use support::{Failed, Need, page};

use crate::VELLUM;
use crate::guest::Image;
use crate::{guests, more_than_a_slice};

/// Requires a guest, and a run of all tests or of the whole book.
pub fn asked_for() -> Need {
    let whole_book = std::env::var_os("VELLUM_BOOK").is_some_and(|value| value == "all");
    guests().and_then(|()| if whole_book { Ok(()) } else { more_than_a_slice() })
}

/// Runs `page` with the oldest guest under the names that pages use.
pub fn is_as_it_says(one: &'static Page) -> Result<(), Failed> {
    let image = Image::oldest()?;
    page::run(one, VELLUM, |dir| {
        fs::create_dir(dir.join("guest"))?;
        for (target, names) in
            [(image.kernel(), ["bzImage", "guest/vmlinuz"]), (image.initrd(), ["initrd.gz", "guest/initrd"])]
        {
            names.iter().try_for_each(|name| symlink(&target, dir.join(name)))?;
        }
        Ok(())
    })
}
