//! `vellum receive`: waits for a machine from `vellum migrate`, and runs it.

use std::net::{TcpListener, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::Args;

use super::failure::Failure;
use super::flags::Flags;
use super::host::{self, HostArgs};
use super::migrate::address::{off_loopback, relay};
use super::{args, take_over};
use crate::session::incoming::Listen;
use crate::session::log::{self, Beside};
use vellum_control::names;
use vellum_kvm::memory::MemoryConfig;
use vellum_kvm::vm::lifecycle::{self, Exit};
use vellum_migration::link::LIVENESS;
use vellum_sys::diagnose::Field;
use vellum_sys::file::inherited;
use vellum_sys::keyvalue;

/// Wait for a machine that `vellum migrate` sends here, and run it
#[derive(Debug, Args)]
#[command(after_help = format!("{}\n\n{}", EXAMPLES, lifecycle::HELP))]
pub struct ReceiveArgs {
    /// Where the source connects: unix:PATH, tcp:HOST:PORT, or fd:N, a connected stream socket.
    /// Without it, the source connects with `vellum migrate --to ssh:HOST:NAME` to the machine of
    /// this name
    #[arg(long, value_name = "ADDRESS", required_unless_present_any = ["name", "relay", "take_over"])]
    listen: Option<Address>,

    /// Let it listen on an address that other hosts reach; anyone on the network can send a machine
    /// and read its memory
    #[arg(long)]
    insecure_network: bool,

    /// How long the source may be silent before it counts as gone
    #[arg(long, value_name = "TIME", value_parser = keyvalue::duration)]
    liveness: Option<Duration>,

    /// Connect standard input and output to the machine of this name that waits here; `vellum
    /// migrate --to ssh:` runs this on the other host
    #[arg(long, value_name = "NAME", conflicts_with_all = ["listen", "name"])]
    relay: Option<String>,

    /// Take over what `vellum ctl NAME upgrade` lists in the file of this descriptor
    #[arg(long, value_name = "N", hide = true, exclusive = true)]
    take_over: Option<i32>,

    #[command(flatten)]
    host: HostArgs,

    /// What backs memory, whose size comes from the source:
    /// `backing=anonymous|thp|hugetlb-2m|hugetlb-1g|shmem|memfd[,prealloc][,lock]`; prealloc
    /// populates all of it before the guest runs
    #[arg(short, long, value_name = "BACKING", value_parser = args::memory_without_size, default_value = "anonymous")]
    memory: MemoryConfig,
}

const EXAMPLES: &str = "\
Examples:
  vellum receive --listen unix:/tmp/there.sock --name web    then: vellum migrate web --to unix:/tmp/there.sock
  vellum receive --name web --disk web.img                   then, on another host: vellum migrate web --to ssh:HOST:web";

/// The address of `--listen`, as typed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Address {
    /// `unix:PATH`
    Unix(PathBuf),
    /// `tcp:HOST:PORT`
    Tcp(String),
    /// `fd:N`
    Descriptor(i32),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("unix", path)) if !path.is_empty() => Ok(Self::Unix(path.into())),
            Some(("tcp", address))
                if address.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok()) =>
            {
                Ok(Self::Tcp(address.into()))
            }
            Some(("fd", number)) if number.parse::<i32>().is_ok_and(|fd| fd > 2) => {
                Ok(Self::Descriptor(number.parse().map_err(|_| "a number is expected")?))
            }
            _ => Err("use unix:PATH, tcp:HOST:PORT, or fd:N with N from 3".into()),
        }
    }
}

/// The flag of each field.
pub(super) const FLAGS: Flags = &[host::FLAGS, host::MEMORY, &[(Field::Listen, "--listen:")]];

/// The socket where the machine of this name waits for a source that connects through `--relay`.
fn waiting_place(name: &str) -> Result<PathBuf, Failure> {
    let socket = names::socket(name).map_err(|error| Failure::of(&error, FLAGS))?;
    Ok(socket.with_extension("incoming"))
}

/// Runs `vellum receive`.
pub fn run(args: ReceiveArgs) -> Result<Exit, Failure> {
    if let Some(file) = args.take_over {
        return take_over::run(file, FLAGS);
    }
    if let Some(name) = &args.relay {
        return relay(&waiting_place(name)?);
    }
    log::start(tracing::Level::INFO, Beside::Console);
    let listen = match (&args.listen, &args.host.name) {
        (Some(Address::Unix(path)), _) => Listen::Unix(path.clone()),
        (Some(Address::Tcp(address)), _) => Listen::Tcp(bind(address, args.insecure_network)?),
        (Some(Address::Descriptor(fd)), _) => Listen::Connected(taken(*fd)?),
        (None, Some(name)) => Listen::Unix(waiting_place(name)?),
        (None, None) => return Err(Failure::usage("--listen ADDRESS says where a source connects")),
    };
    args.host.run(listen, args.memory, args.liveness.unwrap_or(LIVENESS), FLAGS)
}

fn bind(address: &str, insecure: bool) -> Result<TcpListener, Failure> {
    let wrong = |error: &dyn std::fmt::Display| Failure::usage(format!("--listen tcp:{address}: {error}"));
    let resolved = address.to_socket_addrs().map_err(|error| wrong(&error))?.next();
    let resolved = resolved.ok_or_else(|| wrong(&"no such host"))?;
    if !insecure && let Some(why) = off_loopback(&resolved) {
        return Err(wrong(&why));
    }
    let listener = TcpListener::bind(resolved).map_err(|error| wrong(&error))?;
    listener.set_nonblocking(true).map_err(Failure::host)?;
    if let Ok(bound) = listener.local_addr() {
        tracing::info!("listens at tcp:{bound}");
    }
    Ok(listener)
}

/// Takes a descriptor that this process was started with.
fn taken(fd: i32) -> Result<OwnedFd, Failure> {
    inherited(fd).ok_or_else(|| Failure::usage(format!("--listen fd:{fd}: no such descriptor is open")))
}
