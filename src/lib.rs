//! Vellum, a lightweight virtual machine monitor for KVM, for people who work on guest memory.
//!
//! # The house
//!
//! From the top floor down; a room uses those below it and knows nothing of those above. `tests/house.rs` reads every path in the
//! code and fails on one that leads up.
//!
//! | room | what lives there |
//! |---|---|
//! | [`cli`] | one file a subcommand: arguments and the names of flags, and nothing that does work |
//! | [`fleet`] | one plan on many hosts: its tasks, what they leave, and the merge; all that knows Slurm |
//! | [`mod@bench`] | one file a benchmark: a workload, a schedule, and its figures |
//! | [`oracle`] | whether a dirty log loses pages: what judges a tracker, and the tests that ask it |
//! | [`session`] | the process around a machine: signals, privileges, sandbox, control socket, event loop, progress |
//! | [`migration`] | a machine moves to another process: hand-over, wire, plan, and the threads of both sides |
//! | [`snapshot`] | a machine's memory and state in files |
//! | [`machine`] | the PC with a kernel: its board, devices, boot |
//! | [`guests`] | guests without an OS: code, control block, stamps, and the model that knows what they must have written |
//! | [`payload`] | what a session runs: a machine of either kind, as the process around it sees it |
//! | [`dump`] | a machine's memory as a core dump: the ELF file, and what a kernel says of itself |
//! | [`gdb`] | a debugger's way into a machine: GDB's protocol, breakpoints, registers |
//! | [`dirty`] | who wrote which page since somebody last asked: trackers and scan |
//! | [`devices`] | the bus, the PC's own devices, virtio |
//! | [`arch`] | the board: layout, boot protocols, registers, CPUID, tables, interrupt controller |
//! | [`vm`] | KVM's VM: memslots, dirty rings, vCPU threads, counters |
//! | [`share`] | a directory of the host's as a file system of a guest's: FUSE, and the process that serves it |
//! | [`sandbox`] | what a running VMM gives up: seccomp a thread kind, Landlock, privileges |
//! | [`launch`] | what a kernel needs around it so that a command runs in it: modules, initramfs, standard streams |
//! | [`control`] | the control socket: requests, answers, events; and the guest agent's client |
//! | [`memory`] | guest memory: where RAM lies, its mapping, its memslots, the VMM's own write log |
//! | [`report`] | the one result type and its faces: terminal, JSON, HTML |
//! | [`host`] | what this host offers: KVM, its MMU, huge pages, CPUs; `vellum doctor` |
//! | [`fault`] | whose fault an error is, and which field of the configuration it is about |
//! | [`keyvalue`] | `VALUE,key=value,flag`: the form of every argument that has parts |
//! | [`sys`] | every ioctl and system call that no crate wraps: the one room for `unsafe` beyond guest memory |
//! | [`plant`] | mistakes that tests plant, to see that they are found; a release makes none |
//!
//! # Where to start reading
//!
//! - How a guest boots: [`arch`], `boot/`; without an OS, [`guests::guest`].
//! - The vCPU loop: [`vm::vcpu`].
//! - What a guest without an OS does: [`guests`], its assembly in `guests/program/`.
//! - How dirty pages are collected: [`dirty::DirtyTracker`]; how one that is lost is found: [`oracle::judge`].
//! - How a machine moves to another process: [`migration`], whose map is the protocol's too.
//! - How a debugger stops a machine: [`gdb::Debugger`].
//! - How a command runs in a kernel that was just built: [`mod@launch`].
//! - What a machine can be told while it runs: [`control::Do`].
//! - What a result is: [`report::Report`].
//! - How many hosts run one plan: [`fleet::plan`], [`fleet::merge`].

pub mod arch;
pub mod bench;
pub mod cli;
pub mod control;
pub mod devices;
pub mod dirty;
pub mod dump;
pub mod fault;
pub mod fleet;
pub mod gdb;
pub mod guests;
pub mod host;
pub mod keyvalue;
pub mod launch;
pub mod machine;
pub mod memory;
pub mod migration;
pub mod oracle;
pub mod payload;
pub mod plant;
pub mod report;
pub mod sandbox;
pub mod session;
pub mod share;
pub mod snapshot;
pub mod sys;
pub mod vm;
