//! The book's page about Linux guests, as a reader enters it.

use std::fs;
use std::os::unix::fs::symlink;

use support::page;
use support::{Failed, test};

use crate::VELLUM;
use crate::guest::Image;
use crate::whole_matrix;

#[test(whole_matrix())]
fn the_tutorial_of_a_linux_guest() -> Result<(), Failed> {
    let image = Image::oldest()?;
    page::run("linux_guest", include_str!("../../docs/src/tutorials/linux-guest.md"), VELLUM, |dir| {
        let guest = dir.join("guest");
        fs::create_dir(&guest)?;
        symlink(image.kernel(), guest.join("vmlinuz"))?;
        Ok(symlink(image.initrd(), guest.join("initrd"))?)
    })
}
