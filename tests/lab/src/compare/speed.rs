//! The cost of a command in a guest (`cargo lab speed`): the program `guest-commands` in one
//! emulated host with nested paging, whose clock counts instructions. The guest boots a kernel in
//! its build tree.

use std::time::Duration;

use crate::artifacts::{Kernel, Programs, files_below};
use crate::cache::Cache;
use crate::hosts::wire::Frame;
use crate::hosts::{self, HostKernel, Request, svm};
use crate::kernel::{Base, build, variants};
use crate::{Error, Result};

/// The base of the guests' kernel.
const BASE: &str = "7.2";
/// The path of the kernel tree in the host.
const TREE: &str = "/tree";

/// Measures in an emulated host. `frames` receives the host's output.
pub fn of_commands(cache: &Cache, frames: impl FnMut(&Frame)) -> Result<()> {
    svm::HOST.ready()?;
    build::require_tools()?;
    let tree = build::build(cache, Base::named(BASE)?, &[], Some(variants::GUEST))?.tree();
    let programs = Programs::build()?;
    let mut request = Request::new(HostKernel::Debian(Kernel::debian(cache, "6.1")?));
    (request.host, request.second_stage, request.memory_mib) = (svm::HOST, true, 4096);
    request.time_limit = Duration::from_secs(60 * 60);
    request.files.push((programs.guest_commands.clone(), "/bin/guest-commands".into()));
    for file in files_below(std::slice::from_ref(&tree), |_| true)? {
        let within = file.strip_prefix(&tree).unwrap_or(&file).display().to_string();
        request.files.push((file, format!("{TREE}/{within}")));
    }
    let nanoseconds = svm::HOST.nanoseconds_per_instruction().to_string();
    let line = ["guest-commands", "--tree", TREE, "--nanoseconds", &nanoseconds];
    request.commands.push(line.map(str::to_owned).to_vec());
    match hosts::run(cache, &programs, &request, frames)?.code() {
        0 => Ok(()),
        code => Err(Error::Refused(format!("guest-commands ended with {code}; it says above why"))),
    }
}
