//! First-boot configuration of a cloud image: files on a small disk labelled CIDATA, which
//! cloud-init's NoCloud source and similar tools look for. The disk is made in memory as ISO 9660
//! (ECMA-119) with Rock Ridge names (SUSP, RRIP), which every such image can read. Plain ISO 9660
//! names are too short for user-data, meta-data and network-config.

mod user_data;

use std::fs::File;
use std::io;
use std::iter;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::blk::Blk;
use super::handoff::{self, Unfit};
use super::{DeviceConfig, Kind, OpenError, VirtioDevice};
use vellum_sys::diagnose::{Diagnose, ErrorOrigin, Field};
use vellum_sys::keyvalue::{self, KeyValues, path};
use vellum_sys::{mmap, open};

/// The seed disk as a kind of device.
pub static KIND: Kind = Kind {
    key: "cloud-init",
    about: "A disk labelled CIDATA that configures a cloud image at its first boot: \
        `user-data=FILE[,meta-data=FILE][,network-config=FILE]`",
    value: Some("user-data=FILE"),
    repeats: false,
    parse: |text| match parse(text) {
        Ok(seed) => Ok(Arc::new(seed)),
        Err(error) => Err(error.to_string()),
    },
    read: |written| Ok(Arc::new(serde_json::from_value::<Seed>(written)?)),
};

/// Bytes of a sector.
const SECTOR: usize = 2048;
/// The maximum size of one file in bytes. Files written by hand are far smaller.
const MAX_FILE: u64 = 16 << 20;
/// The sectors of the volume descriptors, the path tables, the directory and the files.
const DESCRIPTORS: usize = 16;
const PATHS: [usize; 2] = [18, 19];
const DIRECTORY: usize = 20;
const FILES: usize = 21;

/// The files of a seed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Seed {
    /// What cloud-init does.
    pub user_data: PathBuf,
    /// The instance's identity. Without a file, the ID is derived from the user data.
    pub meta_data: Option<PathBuf>,
    /// The network configuration.
    pub network_config: Option<PathBuf>,
}

/// Why the disk cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read.
    #[error("{}: {source}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// A file is larger than [`MAX_FILE`].
    #[error("{} is larger than {} MiB", .0.display(), MAX_FILE >> 20)]
    Large(PathBuf),
    /// cloud-init would silently ignore the user data.
    #[error("{}: cloud-init ignores user data that {found}; {remedy}", .path.display())]
    Ignored {
        /// The file.
        path: PathBuf,
        /// What it is, in words.
        found: String,
        /// What would work.
        remedy: String,
    },
    /// No memory for the disk.
    #[error("memory for the disk: {0}")]
    Memory(io::Error),
}

impl Diagnose for Error {
    fn origin(&self) -> ErrorOrigin {
        match self {
            Self::Memory(_) => ErrorOrigin::host(Field::Device(KIND.key)),
            _ => ErrorOrigin::user(Field::Device(KIND.key)),
        }
    }
}

fn parse(text: &str) -> Result<Seed, keyvalue::Error> {
    let kv = KeyValues::parse(text, None, &["user-data", "meta-data", "network-config"])?;
    Ok(Seed {
        user_data: kv.required("user-data", path)?,
        meta_data: kv.with("meta-data", path)?,
        network_config: kv.with("network-config", path)?,
    })
}

impl DeviceConfig for Seed {
    fn kind(&self) -> &'static Kind {
        &KIND
    }

    fn written(&self) -> io::Result<Value> {
        let mut written = self.clone();
        let Self { user_data, meta_data, network_config } = &mut written;
        handoff::make_absolute(iter::once(user_data).chain(meta_data).chain(network_config))?;
        handoff::write(&written)
    }

    /// The files may have changed, so the finished disk is handed over.
    fn take_over(&self, lent: Vec<OwnedFd>) -> Result<Box<dyn VirtioDevice>, OpenError> {
        let disk = lent.into_iter().next().ok_or_else(|| Unfit::boxed(&KIND, "no descriptor"))?;
        let disk = File::from(disk);
        let bytes = disk.metadata().map(|stat| stat.len());
        let taken = bytes.and_then(|bytes| Blk::in_memory(disk, bytes, KIND.key)).map_err(Error::Memory);
        Ok(Box::new(taken.map_err(|error| Box::new(error) as OpenError)?))
    }

    fn open(&self) -> Result<Box<dyn VirtioDevice>, OpenError> {
        let made =
            make(self).and_then(|(disk, bytes)| Blk::in_memory(disk, bytes, KIND.key).map_err(Error::Memory));
        let disk = made.map_err(|error| Box::new(error) as OpenError)?;
        Ok(Box::new(disk))
    }
}

fn read(path: &Path) -> Result<Vec<u8>, Error> {
    let failed = |source| Error::Read { path: path.into(), source };
    let bytes = open::read(path, MAX_FILE).map_err(failed)?;
    if bytes.len() as u64 > MAX_FILE { Err(Error::Large(path.into())) } else { Ok(bytes) }
}

/// Makes the disk, as a file in memory. Returns the file and its size in bytes.
///
/// # Errors
/// A file cannot be read, or cloud-init would ignore it.
pub fn make(seed: &Seed) -> Result<(File, u64), Error> {
    let user_data = read(&seed.user_data)?;
    user_data::check(&user_data).map_err(|ignored| Error::Ignored {
        path: seed.user_data.clone(),
        found: ignored.found,
        remedy: ignored.remedy,
    })?;
    let meta_data = match &seed.meta_data {
        Some(path) => read(path)?,
        // cloud-init sets up an instance whose ID it has not seen. With a checksum as the ID,
        // changed user data is applied and unchanged user data is not applied again.
        None => {
            let sum = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, &user_data);
            format!("instance-id: vellum-{sum:08x}\n").into_bytes()
        }
    };
    let mut files = vec![("meta-data", "METADATA.;1", meta_data), ("user-data", "USERDATA.;1", user_data)];
    if let Some(path) = &seed.network_config {
        files.insert(1, ("network-config", "NETWORKC.;1", read(path)?));
    }
    let image = image(&files);
    let memory = mmap::memfd(c"cidata", image.len() as u64, None).map_err(Error::Memory)?;
    memory.write_all_at(&image, 0).map_err(Error::Memory)?;
    Ok((memory, image.len() as u64))
}

/// A number in both byte orders (ECMA-119, 7.3.3).
fn both32(number: u32) -> [u8; 8] {
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&number.to_le_bytes());
    bytes[4..].copy_from_slice(&number.to_be_bytes());
    bytes
}

/// A number in both byte orders (7.2.3).
fn both16(number: u16) -> [u8; 4] {
    let mut bytes = [0; 4];
    bytes[..2].copy_from_slice(&number.to_le_bytes());
    bytes[2..].copy_from_slice(&number.to_be_bytes());
    bytes
}

/// The recording time of all files: 2000, because it does not matter (9.1.5).
const WHEN: [u8; 7] = [100, 1, 1, 0, 0, 0, 0];

/// A directory record (9.1), followed by `system`, an even number of bytes of system use fields.
fn record(at: usize, len: usize, flags: u8, name: &[u8], system: &[u8]) -> Vec<u8> {
    let mut record = vec![0, 0];
    record.extend(both32(at as u32));
    record.extend(both32(len as u32));
    record.extend(WHEN);
    record.extend([flags, 0, 0]);
    record.extend(both16(1));
    record.push(name.len() as u8);
    record.extend(name);
    record.resize(record.len().next_multiple_of(2), 0);
    record.extend(system);
    record.resize(record.len().next_multiple_of(2), 0);
    record[0] = record.len() as u8;
    record
}

/// The mode of a file, and its owner, root (RRIP 4.1.1).
fn px(mode: u32, links: u32) -> Vec<u8> {
    let mut field = b"PX\x24\x01".to_vec();
    [mode, links, 0, 0].into_iter().for_each(|number| field.extend(both32(number)));
    field
}

/// The name of a file (RRIP 4.1.4).
fn nm(name: &str) -> Vec<u8> {
    [&[b'N', b'M', 5 + name.len() as u8, 1, 0], name.as_bytes()].concat()
}

/// Where system use fields begin (SUSP 5.3), and that they are Rock Ridge's (5.5).
fn sp_and_er() -> Vec<u8> {
    let id = b"RRIP_1991A";
    let mut fields = b"SP\x07\x01\xbe\xef\x00".to_vec();
    fields.extend([b'E', b'R', 8 + id.len() as u8, 1, id.len() as u8, 0, 0, 1]);
    fields.extend(id);
    fields
}

/// Text, padded with blanks.
fn padded(text: &str, len: usize) -> Vec<u8> {
    let mut bytes = text.as_bytes().to_vec();
    bytes.resize(len, b' ');
    bytes
}

/// A volume with `files`: their names, their ISO 9660 names and their contents, sorted by ISO 9660
/// name.
fn image(files: &[(&str, &str, Vec<u8>)]) -> Vec<u8> {
    let directory = || -> Vec<u8> {
        let itself = [sp_and_er(), px(0o40555, 2)].concat();
        let mut entries = record(DIRECTORY, SECTOR, 2, &[0], &itself);
        entries.extend(record(DIRECTORY, SECTOR, 2, &[1], &px(0o40555, 2)));
        let mut at = FILES;
        for (name, short, data) in files {
            let system = [px(0o100444, 1), nm(name)].concat();
            entries.extend(record(at, data.len(), 0, short.as_bytes(), &system));
            at += data.len().div_ceil(SECTOR);
        }
        entries
    };
    let sectors = FILES + files.iter().map(|(.., data)| data.len().div_ceil(SECTOR)).sum::<usize>();
    // Pad the disk, so that read-ahead does not hit its end.
    let mut image = vec![0; sectors.next_multiple_of(32) * SECTOR];
    let mut put =
        |sector: usize, bytes: &[u8]| image[sector * SECTOR..][..bytes.len()].copy_from_slice(bytes);

    // The primary volume descriptor (8.4), then the set terminator (8.3).
    let mut volume = b"\x01CD001\x01\x00".to_vec();
    volume.extend(padded("LINUX", 32));
    volume.extend(padded("CIDATA", 32));
    volume.extend([0; 8]);
    volume.extend(both32(sectors.next_multiple_of(32) as u32));
    volume.extend([0; 32]);
    volume.extend([both16(1), both16(1), both16(SECTOR as u16)].concat());
    volume.extend(both32(10));
    volume.extend((PATHS[0] as u32).to_le_bytes());
    volume.extend([0; 4]);
    volume.extend((PATHS[1] as u32).to_be_bytes());
    volume.extend([0; 4]);
    volume.extend(record(DIRECTORY, SECTOR, 2, &[0], &[]));
    volume.extend(padded("", 128 * 4 + 37 * 3));
    // Four times that are not specified (8.4.26.1).
    for _ in 0..4 {
        volume.extend(*b"0000000000000000\0");
    }
    volume.push(1);
    put(DESCRIPTORS, &volume);
    put(DESCRIPTORS + 1, b"\xffCD001\x01");
    // Path tables with only the root (9.4), one in each byte order.
    let root = |at: [u8; 4], number: [u8; 2]| [&[1, 0][..], &at, &number, &[0, 0]].concat();
    put(PATHS[0], &root((DIRECTORY as u32).to_le_bytes(), 1u16.to_le_bytes()));
    put(PATHS[1], &root((DIRECTORY as u32).to_be_bytes(), 1u16.to_be_bytes()));
    put(DIRECTORY, &directory());
    let mut at = FILES;
    for (.., data) in files {
        put(at, data);
        at += data.len().div_ceil(SECTOR);
    }
    image
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_has_its_parts_where_the_standard_has_them() {
        let image = image(&[
            ("meta-data", "METADATA.;1", b"a".to_vec()),
            ("user-data", "USERDATA.;1", vec![7; 5000]),
        ]);
        let volume = &image[16 * SECTOR..17 * SECTOR];
        assert_eq!((&volume[..6], &volume[40..46]), (&b"\x01CD001"[..], &b"CIDATA"[..]));
        // The root's record is at byte 157 (counted from 1), the file structure version at 882.
        assert_eq!((volume[156], volume[881]), (34, 1));
        assert_eq!(u32::from_le_bytes(volume[80..84].try_into().unwrap()) as usize * SECTOR, image.len());
        assert_eq!(image[22 * SECTOR..][..5000], vec![7; 5000]);
    }
}
