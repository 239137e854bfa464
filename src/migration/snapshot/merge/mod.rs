//! Merges a chain of points into one. The pages that a restore would produce are written as a full
//! point, which replaces the last point of the chain.
//!
//! That point keeps its state and its number, so later points and a machine with dirty tracking
//! since then still fit. Its new files have new names. Until the manifest is renamed, the old files
//! are unchanged.

use std::path::Path;

use super::Error;
use super::layer::{self, Layers, Reader, Writer};
use super::manifest::{self, Point};
use super::source::{Chosen, Source};
use super::store::Store;
use vellum_sys::file::is_locked;

/// Merges the points that point `to`, or the newest, depends on into that point. Returns the number
/// of the first of them, and the merged point.
///
/// # Errors
/// If there is nothing to merge, a file is damaged, a machine uses the point, or there is no room,
/// the directory is unchanged. If only the final sync of the directory fails, the merge is done but
/// may not survive a crash.
pub fn merge(dir: &Path, to: Option<u32>) -> Result<(u32, Point), Error> {
    // The source is opened before the store: `Store::open` would create a missing directory. The
    // store's lock keeps other writers out from here on.
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
        // This process's own lock belongs to the same open file, so it does not count.
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
