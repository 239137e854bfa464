//! A Slurm cluster on this machine: a controller, and nodes whose daemons run side by side.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use support::{Failed, ensure, eventually};

const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");

/// The delay between two looks at the queue. Each look starts a process.
const BETWEEN: Duration = Duration::from_millis(200);

/// A limit for the cluster's operations on a busy machine.
pub const LONG: Duration = Duration::from_secs(25 * 60);

/// A job as squeue shows it.
#[derive(Clone, Debug)]
pub struct Job {
    /// The ID for scontrol.
    pub id: String,
    /// Its task's index in the array.
    pub index: u64,
    /// RUNNING, PENDING, ….
    pub state: String,
    /// The node, or empty if it has none.
    pub node: String,
}

/// The cluster. Its processes end with the namespace.
pub struct Cluster {
    /// The directory of all its files.
    pub dir: PathBuf,
    slurm: PathBuf,
    /// The nodes' names.
    pub nodes: Vec<String>,
    controller: Option<Child>,
    daemons: BTreeMap<String, Child>,
}

impl Cluster {
    /// Starts a cluster, and waits until all nodes are ready.
    pub fn start(nodes: usize) -> Result<Self, Failed> {
        let dir = PathBuf::from(std::env::var("VELLUM_FLEET_DIR").map_err(|_| "no directory")?);
        let slurm = super::directory()?;
        let features = vellum(&["doctor", "--slurm-features"])?;
        ensure(features.starts_with("Feature=") && features.lines().count() == 1, || features.clone())?;
        fs::create_dir_all(dir.join("state"))?;
        fs::create_dir_all(dir.join("spool"))?;
        fs::write(dir.join("slurm.conf"), configuration(&dir, &slurm, nodes, features.trim()))?;
        let nodes = (1..=nodes).map(|n| format!("n{n}")).collect();
        let mut cluster = Self { dir, slurm, nodes, controller: None, daemons: BTreeMap::new() };
        cluster.start_controller()?;
        for node in cluster.nodes.clone() {
            cluster.start_node(&node)?;
        }
        Ok(cluster)
    }

    fn daemon(&self, program: &str, arguments: &[&str], log: &str) -> Result<Child, Failed> {
        let log = File::options().create(true).append(true).open(self.dir.join(log))?;
        let mut command = Command::new(self.slurm.join("usr/sbin").join(program));
        command.arg("-D").args(arguments).stdin(Stdio::null());
        Ok(command.stdout(log.try_clone()?).stderr(log).spawn()?)
    }

    /// Starts the controller with the state that the previous one has saved.
    pub fn start_controller(&mut self) -> Result<(), Failed> {
        self.controller = Some(self.daemon("slurmctld-wlm", &[], "slurmctld.log")?);
        self.eventually("the controller answers", |cluster| {
            Ok(cluster.client("scontrol", &["ping"]).is_ok_and(|said| said.contains("is UP")).then_some(()))
        })
    }

    /// Kills the controller, as a failing machine would.
    pub fn kill_controller(&mut self) -> Result<(), Failed> {
        ended(self.controller.take().ok_or("no controller runs")?)
    }

    /// Starts a node's daemon, and waits until it is ready.
    pub fn start_node(&mut self, node: &str) -> Result<(), Failed> {
        let stepd = self.slurm.join("usr/sbin/slurmstepd-wlm").to_string_lossy().into_owned();
        let daemon = self.daemon("slurmd-wlm", &["-N", node, "-d", &stepd], &format!("{node}.log"))?;
        self.daemons.insert(node.to_owned(), daemon);
        self.eventually("a node is ready", |cluster| {
            let state = cluster.state(node)?;
            Ok(["idle", "mixed", "allocated"].contains(&state.as_str()).then_some(()))
        })
    }

    /// Kills a node's daemon. Its tasks run on.
    pub fn kill_node(&mut self, node: &str) -> Result<(), Failed> {
        ended(self.daemons.remove(node).ok_or("no such daemon runs")?)
    }

    /// A node's state, as in sinfo. A `*` at its end means that the daemon does not answer.
    pub fn state(&self, node: &str) -> Result<String, Failed> {
        Ok(self.client("sinfo", &["--noheader", "--Node", "--nodes", node, "--format=%T"])?.trim().to_owned())
    }

    /// Runs one of Slurm's programs. Returns its output.
    pub fn client(&self, program: &str, arguments: &[&str]) -> Result<String, Failed> {
        said(program, Command::new(program).args(arguments).output()?)
    }

    /// The jobs in the queue.
    pub fn jobs(&self) -> Result<Vec<Job>, Failed> {
        let text = self.client("squeue", &["--noheader", "--array", "--format=%F %K %T %N"])?;
        let job = |line: &str| {
            let mut parts = line.split_whitespace();
            let (array, index, state) = (parts.next()?, parts.next()?, parts.next()?);
            let node = parts.next().unwrap_or_default().to_owned();
            let id = format!("{array}_{index}");
            Some(Job { id, index: index.parse().ok()?, state: state.into(), node })
        };
        Ok(text.lines().filter_map(job).collect())
    }

    /// Waits for a job for which `wanted` is true.
    pub fn job(&self, what: &str, wanted: impl Fn(&Job) -> bool) -> Result<Job, Failed> {
        self.eventually(what, |cluster| Ok(cluster.jobs()?.into_iter().find(|job| wanted(job))))
    }

    /// Waits until the queue is empty.
    pub fn drained(&self) -> Result<(), Failed> {
        self.eventually("the queue is empty", |cluster| {
            cluster.resume()?;
            Ok(cluster.jobs()?.is_empty().then_some(()))
        })
    }

    /// Does what an administrator would do after the controller died: it may assign the number of
    /// an unsaved job a second time. It then drains the nodes that know the first job and holds the
    /// second. This releases and resumes them.
    pub fn resume(&self) -> Result<(), Failed> {
        let text = self.client("squeue", &["--noheader", "--array", "--format=%F_%K %r"])?;
        for held in
            text.lines().filter(|line| line.contains("held")).filter_map(|line| line.split(' ').next())
        {
            self.client("scontrol", &["release", held])?;
        }
        for node in &self.nodes {
            if self.state(node)?.starts_with("drain") {
                self.client("scontrol", &["update", &format!("NodeName={node}"), "State=RESUME"])?;
            }
        }
        Ok(())
    }

    /// Waits with few looks per second, because each look starts processes.
    pub fn eventually<T>(
        &self,
        what: &str,
        mut look: impl FnMut(&Self) -> Result<Option<T>, Failed>,
    ) -> Result<T, Failed> {
        eventually(LONG, what, || {
            let found = look(self)?;
            if found.is_none() {
                thread::sleep(BETWEEN);
            }
            Ok(found)
        })
    }

    /// Puts a plan into a directory beside the cluster's files. Returns its path there.
    pub fn plan(&self, name: &str, text: &str) -> Result<PathBuf, Failed> {
        self.plan_in(&self.dir.join(name), text)
    }

    /// Puts a plan into this directory.
    pub fn plan_in(&self, dir: &Path, text: &str) -> Result<PathBuf, Failed> {
        let file = self.dir.join("written.toml");
        fs::write(&file, text)?;
        vellum(&["fleet", "plan", &file.to_string_lossy(), "--into", &dir.to_string_lossy()])?;
        Ok(dir.join("plan.toml"))
    }

    /// Runs `vellum fleet submit`.
    pub fn submit(&self, plan: &Path) -> Result<String, Failed> {
        vellum(&["fleet", "submit", &plan.to_string_lossy()])
    }
}

fn ended(mut daemon: Child) -> Result<(), Failed> {
    daemon.kill()?;
    daemon.wait()?;
    Ok(())
}

fn said(program: &str, output: Output) -> Result<String, Failed> {
    ensure(output.status.success(), || {
        format!(
            "{program}: {}: {}{}",
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        )
    })?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs `vellum`, which must succeed. Returns its output.
pub fn vellum(arguments: &[&str]) -> Result<String, Failed> {
    said("vellum", output(arguments)?)
}

/// Runs `vellum`.
pub fn output(arguments: &[&str]) -> Result<Output, Failed> {
    Ok(Command::new(VELLUM).args(arguments).output()?)
}

/// slurm.conf, without other services, and with short timeouts. The shortest cred_expire that Slurm
/// accepts is 5. A requeued task waits that long in BeginTime.
fn configuration(dir: &Path, slurm: &Path, nodes: usize, features: &str) -> String {
    let dir = dir.display();
    let plugins = slurm.join("usr/lib/x86_64-linux-gnu/slurm-wlm");
    format!(
        "ClusterName=vellum\n\
         SlurmctldHost=cluster(192.0.2.1)\n\
         SlurmUser=root\n\
         SlurmdUser=root\n\
         AuthType=auth/none\n\
         AuthInfo=cred_expire=5\n\
         CredType=cred/none\n\
         StateSaveLocation={dir}/state\n\
         SlurmdSpoolDir={dir}/spool/%n\n\
         SlurmctldPidFile={dir}/slurmctld.pid\n\
         SlurmdPidFile={dir}/%n.pid\n\
         SlurmdTimeout=5\n\
         SlurmctldTimeout=5\n\
         ReturnToService=1\n\
         ProctrackType=proctrack/linuxproc\n\
         TaskPlugin=task/none\n\
         JobAcctGatherType=jobacct_gather/none\n\
         SelectType=select/linear\n\
         SchedulerType=sched/builtin\n\
         SchedulerParameters=batch_sched_delay=0,sched_interval=2\n\
         SwitchType=switch/none\n\
         MpiDefault=none\n\
         PluginDir={}\n\
         JobCompType=jobcomp/filetxt\n\
         JobCompLoc={dir}/jobcomp\n\
         KillWait=2\n\
         MinJobAge=2\n\
         MaxArraySize=501\n\
         MaxJobCount=900\n\
         NodeName=n[1-{nodes}] NodeAddr=192.0.2.1 NodeHostname=cluster Port=[17001-{}] CPUs=1 {features} State=UNKNOWN\n\
         PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n",
        plugins.display(),
        17000 + nodes
    )
}

/// The ends of the daemons' logs, for a test that failed.
pub fn logs(dir: &Path) -> String {
    let mut all = String::new();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.extension().is_some_and(|extension| extension == "log") {
            let text = fs::read_to_string(&path).unwrap_or_default();
            let lines: Vec<&str> = text.lines().collect();
            all +=
                &format!("\n{}:\n{}\n", path.display(), lines[lines.len().saturating_sub(25)..].join("\n"));
        }
    }
    all
}
