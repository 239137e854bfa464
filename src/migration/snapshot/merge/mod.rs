//! A chain of points becomes one: what a restore would make of them is written as the pages of a full point, which takes the place of the last.
//!
//! The state of that point stays as it is, and so does its number: those that continue it, and a machine that is followed since, find what
//! they expect. Its new files have names of their own, and until the list is renamed nothing of the old has changed.

use std::path::Path;

use super::Error;
use super::layer::{self, Layers, Reader, Writer};
use super::manifest::{self, Point};
use super::source::{Chosen, Source};
use super::store::Store;
use vellum_sys::file::is_locked;

/// Joins the points that point `to`, or the newest, needs, into that one; the first of them, and what came of it.
///
/// # Errors
/// Where there is nothing to join, a file is damaged, a machine is being made of it, or there is no room: all is as it was then. Or where
/// it is done, and the disk does not promise to keep it.
pub fn merge(dir: &Path, to: Option<u32>) -> Result<(u32, Point), Error> {
    // Opened first: nobody else writes from here on, and a directory that is none is not made.
    let source = Source::open(dir)?;
    let store = Store::open(dir)?;
    let Chosen { layers, .. } = source.choose(to)?;
    let unfit = |what: String| Error::Unfit { file: dir.display().to_string(), what };
    let (first, last) = match (layers.first(), layers.last()) {
        (Some((first, _)), Some((last, _))) if first.number != last.number => (first.number, last.clone()),
        (_, last) => {
            let number = last.map_or(0, |(point, _)| point.number);
            return Err(unfit(format!("point {number} is full, and there is nothing to join it with")));
        }
    };
    let pages = last.pages;
    layer::check_room(manifest::NAME, pages)?;
    let mut readers = Vec::with_capacity(layers.len());
    for (point, files) in layers {
        // This process has a lock on it too, by the same open file, which is in nobody's way but others'.
        if is_locked(&files.ram).map_err(Error::io(&format!("ram-{}", point.label()), "its locks"))? {
            return Err(unfit(
                "a machine is being made of it, or shows it as memory; merge it when that is over".into(),
            ));
        }
        readers.push(Reader::new(files.ram, &files.map, &point.label(), pages, point.map_crc)?);
    }
    let layers = Layers(readers);
    let (ram, map) = (store.nameless()?, store.nameless()?);
    let said = |what| Error::io("the merged point", what);
    let mut writer =
        Writer::of_pages(ram.try_clone().map_err(said("its file"))?, pages).map_err(said("its size"))?;
    let mut at = 0;
    while let Some((run, from)) = layers.next(at..pages) {
        at = run.end;
        let buffer = writer.buffer(&run);
        match from {
            Some(layer) => layer.read(run.clone(), buffer)?,
            None => buffer.fill(0),
        }
        writer.store(run).map_err(said("writing pages"))?;
    }
    let layer::Written { present, zero, map_crc, .. } = writer.finish(&map).map_err(said("writing it"))?;
    let merged = Point { full: true, present, zero, map_crc, merged: last.merged + 1, ..last };
    store.replace(first, merged.clone(), &ram, &map)?;
    Ok((first, merged))
}

#[cfg(test)]
mod tests;
