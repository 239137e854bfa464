//! A memory control group for one test, in version 1 or 2
//! (`Documentation/admin-guide/cgroup-v2.rst`, "Memory"). It tells how much memory of the kernel's
//! own the processes in it take.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::{Failed, Need};

/// In this time the kernel brings `memory.stat` up to date.
const FLUSH: Duration = Duration::from_millis(2500);

/// The group. It is removed on drop, when its processes have ended.
pub struct Group {
    directory: PathBuf,
    /// In version 1, the file with the number. In version 2 it is a line of `memory.stat`.
    own_file: bool,
}

/// Whether a test can have a group.
pub fn memory_group() -> Need {
    Group::new().map(drop)
}

impl Group {
    /// An empty group.
    ///
    /// # Errors
    /// The reason why there is none.
    pub fn new() -> Result<Self, String> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("vellum-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let of = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let own =
            |line: &str| of.lines().find_map(|own| own.split_once(line).map(|(_, path)| path.to_owned()));
        let mut why = "needs a memory control group: none is mounted below /sys/fs/cgroup".to_owned();
        let roots = [("/sys/fs/cgroup/memory", own(":memory:")), ("/sys/fs/cgroup", own("0::"))];
        for (root, own) in roots {
            let root = Path::new(root);
            // Of a container, the path may not be visible. In version 2, a group with processes of its
            // own has no groups with memory below it.
            let own = own.map(|own| root.join(own.trim_start_matches('/')));
            let parents = own.iter().flat_map(|own| own.ancestors()).take_while(|at| at.starts_with(root));
            for parent in parents.filter(|parent| parent.join("cgroup.procs").exists()) {
                let directory = parent.join(&name);
                if let Err(error) = fs::create_dir(&directory) {
                    why = format!("needs a memory control group: {}: {error}", directory.display());
                    continue;
                }
                let own_file = directory.join("memory.kmem.usage_in_bytes").exists();
                let group = Self { directory, own_file };
                match group.kernel_now() {
                    Ok(_) => return Ok(group),
                    Err(error) => {
                        why = format!("needs a memory control group: {}", error.message().unwrap_or(""))
                    }
                }
            }
        }
        Err(why)
    }

    /// A command that runs `program` in it. Its children stay there.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("sh");
        command
            .args(["-c", "echo $$ > \"$0\" && exec \"$@\""])
            .arg(self.directory.join("cgroup.procs"))
            .arg(program);
        command
    }

    /// Limits the memory of its processes to so many bytes.
    pub fn limit(&self, bytes: u64) -> Result<(), Failed> {
        let name = if self.own_file { "memory.limit_in_bytes" } else { "memory.max" };
        Ok(fs::write(self.directory.join(name), bytes.to_string())?)
    }

    /// The bytes of the kernel's own memory that its processes take.
    pub fn kernel(&self) -> Result<u64, Failed> {
        if !self.own_file {
            // A change of less than 64 pages on each CPU is in memory.stat only after the kernel has
            // collected it, which it does every 2 s (FLUSH_TIME in mm/memcontrol.c).
            std::thread::sleep(FLUSH);
        }
        self.kernel_now()
    }

    fn kernel_now(&self) -> Result<u64, Failed> {
        let number = |text: &str| text.trim().parse().ok();
        let (name, found) = if self.own_file {
            let name = "memory.kmem.usage_in_bytes";
            (name, number(&fs::read_to_string(self.directory.join(name))?))
        } else {
            let name = "memory.stat";
            let stat = fs::read_to_string(self.directory.join(name))?;
            (name, stat.lines().find_map(|line| number(line.strip_prefix("kernel ")?)))
        };
        Ok(found.ok_or_else(|| format!("{}: no kernel memory", self.directory.join(name).display()))?)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // This fails while a process is in it, which a failed test may leave.
        let _ = fs::remove_dir(&self.directory);
    }
}
