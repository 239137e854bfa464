//! Vellum, a lightweight virtual machine monitor for KVM, for people who work on guest memory.
//!
//! # The house
//!
//! | room | what lives there |
//! |---|---|
//! | [`cli`] | one file a subcommand: arguments, and nothing that does work |
//! | [`host`] | what this host offers: KVM, its MMU, huge pages, CPUs; `vellum doctor` |
//! | [`sys`] | every ioctl and system call that no crate wraps: the one room for `unsafe` beyond guest memory |
//! | [`sandbox`] | what a running VMM gives up: seccomp a thread kind, Landlock, privileges |
//! | [`vm`] | a machine: memory, vCPU threads, its life and its end |
//! | [`arch`] | what differs between architectures: layout, boot protocols, registers, tables, interrupt controllers |
//! | [`devices`] | the bus, the PC's own devices, virtio |
//! | [`dirty`] | who wrote which page since somebody last asked |
//! | [`mod@bench`] | one file a benchmark: a workload, a schedule, and its figures |
//! | [`control`] | the control socket: requests, answers, events; and the guest agent's client |
//! | [`workload`] | guests without an OS: code, control block, stamps, and the model that knows what they must have written |
//! | [`report`] | the one result type and its faces: terminal, JSON, HTML |
//!
//! Data flows one way: `cli` to `vm` and `bench` to `dirty`, `workload` and `devices` to `arch` and `host`; nothing below knows what
//! is above.
//!
//! # Where to start reading
//!
//! - How a guest boots: [`arch`], `boot/`; without an OS, [`workload::guest`].
//! - The vCPU loop: [`vm::vcpu`].
//! - What a guest without an OS does: [`workload`], its assembly in `arch/*/workload.rs`.
//! - How dirty pages are collected: [`dirty::DirtyTracker`]; how one that is lost is found: [`dirty::oracle`].
//! - What a machine can be told while it runs: [`control::Do`].
//! - What a result is: [`report::Report`].

pub mod arch;
pub mod bench;
pub mod cli;
pub mod control;
pub mod devices;
pub mod dirty;
pub mod host;
pub mod report;
pub mod sandbox;
pub mod sys;
pub mod vm;
pub mod workload;
