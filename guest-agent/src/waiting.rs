//! A guest that waits for its command, while copies of it are made. A copy gets one command with
//! [`Fresh`]: it reseeds its random numbers, sets its clock, mounts its directories, runs the
//! command, and powers off.
//!
//! Directories are mounted by the copy, not before. A mounted directory has state in the host's file
//! server: the nodes and the open files that the guest's kernel knows by number. Each copy has a
//! server of its own, which would have to open the same files under the same numbers, also those
//! that were renamed or removed meanwhile. A mount takes a few requests, and has none of that.

use std::fs::File;
use std::io::{self, BufReader};
use std::sync::{Mutex, PoisonError};

use crate::children::Children;
use crate::{Fresh, Launch, Mounts, init, mounts, stream, sys};

/// What the guest has not done yet for its command. Nothing, if it does not wait for one.
#[derive(Default)]
pub struct Waiting(Mutex<Option<Mounts>>);

impl Waiting {
    /// Of a guest that mounts these for its command.
    pub fn with(mounts: Mounts) -> Self {
        Self(Mutex::new(Some(mounts)))
    }

    /// Runs `launch`. If the guest waits for it, the guest powers off afterwards.
    ///
    /// # Errors
    /// The other end has disconnected.
    pub fn launch(
        &self,
        launch: Launch,
        input: BufReader<File>,
        output: File,
        children: &Children,
    ) -> io::Result<()> {
        let Some(fresh) = &launch.fresh else { return stream::run(Ok(launch), input, output, children) };
        let mounts = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let is_awaited = mounts.is_some();
        let ready = fresh.take().and_then(|()| mounts.map_or(Ok(()), |asked| mount(&asked, children)));
        let ran = stream::run(ready.map(|()| launch), input, output, children);
        if is_awaited {
            println!("agent: {}", sys::power_off());
        }
        ran
    }
}

fn mount(asked: &Mounts, children: &Children) -> io::Result<()> {
    if let Some(failed) = mounts::of_command(asked)? {
        println!("agent: module {failed}");
    }
    mounts::more();
    init::install_busybox(children)
}

impl Fresh {
    fn take(&self) -> io::Result<()> {
        let named = |what| move |error: io::Error| io::Error::new(error.kind(), format!("{what}: {error}"));
        sys::reseed(&self.seed).map_err(named("its random numbers"))?;
        sys::set_realtime(self.realtime_ns).map_err(named("its clock"))
    }
}
