//! A file on disk that says which machines are saved. It outlives a kexec, even one whose next kernel
//! has lost the machines.

use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::super::client::failure;
use super::super::failure::Failure;
use super::super::line::VERSION;
use vellum_control::names;
use vellum_migration::live_update;

/// The machines of a session that have not run since they were saved.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Note {
    /// The version of the Vellum that saved them.
    pub vellum: String,
    /// The version of its format.
    pub format: u32,
    /// The boot in which they were saved.
    boot: String,
    /// The process that keeps them saved in that boot.
    holder: u32,
    /// Their names.
    pub machines: Vec<String>,
}

/// A number of this boot (boot_id in Documentation/admin-guide/sysctl/kernel.rst).
fn boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

const START: &str = "live-update-";

fn path(session: &str) -> PathBuf {
    names::state_directory().join(format!("{START}{session}.json"))
}

impl Note {
    /// Writes down that these machines are saved by the process `holder`. When it returns, the file is on disk.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(session: &str, holder: u32, machines: Vec<String>) -> Result<(), Failure> {
        names::make_state_directory().map_err(failure)?;
        let (vellum, format) = (VERSION.into(), live_update::VERSION);
        Self { vellum, format, boot: boot(), holder, machines }.put(session)
    }

    fn put(&self, session: &str) -> Result<(), Failure> {
        let path = path(session);
        let failed = |error: std::io::Error| Failure::host(format!("{}: {error}", path.display()));
        let new = path.with_extension("new");
        let mut file = File::create(&new).map_err(failed)?;
        let bytes = serde_json::to_vec(self).map_err(Failure::host)?;
        file.write_all(&bytes).and_then(|()| file.sync_all()).map_err(failed)?;
        fs::rename(new, &path).map_err(failed)?;
        File::open(names::state_directory()).and_then(|directory| directory.sync_all()).map_err(failed)
    }

    /// What is written down of this session, if it can be read.
    pub fn read(session: &str) -> Option<Self> {
        serde_json::from_slice(&fs::read(path(session)).ok()?).ok()
    }

    /// All sessions, with what is written down.
    pub fn all() -> Vec<(String, Self)> {
        let Ok(entries) = fs::read_dir(names::state_directory()) else { return Vec::new() };
        let session = |name: &str| Some(name.strip_prefix(START)?.strip_suffix(".json")?.to_owned());
        let names = entries.filter_map(|entry| session(entry.ok()?.file_name().to_str()?));
        names.filter_map(|session| Self::read(&session).map(|note| (session, note))).collect()
    }

    /// Removes what is written down of this session.
    pub fn remove(session: &str) {
        let _ = fs::remove_file(path(session));
    }

    /// Removes one machine: it has run, or will not.
    pub fn remove_machine(session: &str, name: &str) {
        let Some(mut note) = Self::read(session) else { return };
        note.machines.retain(|machine| machine != name);
        match note.machines.is_empty() {
            true => Self::remove(session),
            // Nothing is lost with it but a message.
            false => drop(note.put(session)),
        }
    }

    /// Whether the machines were saved before this boot.
    pub fn is_of_another_boot(&self) -> bool {
        self.boot != boot()
    }

    /// Whether a kexec can still bring the machines, or has brought them. A holder that was killed has
    /// not removed its note.
    pub fn is_valid(&self) -> bool {
        self.is_of_another_boot() || fs::exists(format!("/proc/{}", self.holder)).unwrap_or(true)
    }
}
