//! The flags of an emulated host, which several commands have.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Args};
use lab::architecture::Architecture;
use lab::artifacts::Kernel;
use lab::cache::Cache;
use lab::hosts::{Emulated, HostKernel, Pace, Request};
use lab::{Error, Result};

/// The flags of an emulated host.
#[derive(Args)]
pub struct Host {
    /// The host's kernel: Debian's 6.1, 6.12, 7.2 or 7.3, or a bzImage (on Arm: an Image) with KVM
    /// built in, or with KVM's modules in the directory `modules` beside it
    #[arg(long, default_value = "6.1")]
    kernel: String,
    /// Nested paging: 1 uses it, 0 makes KVM shadow the guest's page tables
    #[arg(long, visible_alias = "ept", value_name = "0|1", default_value = "1", value_parser = switch, action = ArgAction::Set)]
    npt: bool,
    /// On vmx: a processor with page-modification logging
    #[arg(long)]
    pml: bool,
    /// On svm and arm64: the processor's model by QEMU's name, such as max,pauth=off on Arm
    /// [default: EPYC, cortex-a76 or cortex-a72]
    #[arg(long, value_name = "MODEL")]
    cpu: Option<String>,
    /// On arm64: a board with a GICv2, which its guests then have too
    #[arg(long)]
    gicv2: bool,
    /// One CPU in real time, for Linux guests, instead of a CPU whose clock counts instructions
    #[arg(long, conflicts_with = "multi")]
    real_time: bool,
    /// Two CPUs in parallel, for races; on vmx they take turns of 16 instructions
    #[arg(long)]
    multi: bool,
    /// The host's memory in MiB
    #[arg(long, value_name = "MIB", default_value_t = 2048, value_parser = clap::value_parser!(u32).range(128..=65536))]
    memory: u32,
    /// Huge pages that the host reserves at boot
    #[arg(long, value_name = "N", default_value_t = 0)]
    hugepages: u32,
    /// Their size: 2M, 1G, on Arm 32M or 512M with host pages of 16 or 64 KiB
    #[arg(long, value_name = "SIZE", default_value = "2M")]
    hugepage_size: String,
    /// A module parameter such as kvm.eager_page_split=N, or nopcid for an x86 processor without
    /// PCIDs
    #[arg(long, value_name = "MODULE.NAME=VALUE")]
    param: Vec<String>,
    /// A kernel that can take the host's place: the command calls `bed-kexec NAME` and is run again
    /// by that kernel, with VELLUM_KEXECS=1. The host's kernel must hand memory over, as those of
    /// the variant live-update do
    #[arg(long, value_name = "NAME=IMAGE", value_parser = next)]
    next: Vec<(String, PathBuf)>,
    /// A file of this machine and its path in the host
    #[arg(long, value_name = "FILE:PATH", value_parser = shipped)]
    file: Vec<(PathBuf, String)>,
    /// Seconds until the host is ended with exit code 124, not counting those in which the emulator
    /// waits for a CPU of this machine
    #[arg(long, value_name = "SECONDS", default_value_t = 1200)]
    time_limit: u64,
}

/// Parses a switch.
pub fn switch(text: &str) -> std::result::Result<bool, String> {
    match text {
        "0" => Ok(false),
        "1" => Ok(true),
        _ => Err("0 and 1 are known".into()),
    }
}

fn shipped(text: &str) -> std::result::Result<(PathBuf, String), String> {
    match text.split_once(':') {
        Some((from, to)) if to.starts_with('/') => Ok((from.into(), to.to_owned())),
        _ => Err("the form is FILE:PATH, where PATH is absolute: disk.img:/disk.img".into()),
    }
}

fn next(text: &str) -> std::result::Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((name, image)) if !name.is_empty() && !name.contains('/') => Ok((name.to_owned(), image.into())),
        _ => Err("the form is NAME=IMAGE: 7.3=bzImage".into()),
    }
}

impl Host {
    /// The host that the flags describe.
    pub fn request(self, cache: &Cache, bed: Emulated) -> Result<Request> {
        let kernel = if Kernel::known().any(|version| version == self.kernel) {
            HostKernel::Debian(Kernel::debian_for(cache, bed.architecture(), &self.kernel)?)
        } else {
            let path = PathBuf::from(&self.kernel);
            if !path.is_file() {
                let known: Vec<&str> = Kernel::known().collect();
                return Err(Error::Usage(format!(
                    "--kernel {}: neither a file nor one of Debian's: {}",
                    self.kernel,
                    known.join(", ")
                )));
            }
            HostKernel::Image(path)
        };
        if let Some((_, file)) = self.next.iter().find(|(_, file)| !file.is_file()) {
            return Err(Error::Usage(format!("--next {}: no such file", file.display())));
        }
        if !self.next.is_empty() && bed.name() == "vmx" {
            return Err(Error::Usage(
                "--next: Bochs' hosts have no disk that outlives a kernel; use svm".into(),
            ));
        }
        if let Some((file, _)) = self.file.iter().find(|(file, _)| !file.is_file()) {
            return Err(Error::Usage(format!("--file {}: no such file", file.display())));
        }
        let pace = match (self.multi, self.real_time) {
            (true, _) => Pace::Races,
            (_, true) => Pace::Real,
            _ => Pace::Counted,
        };
        let flag = if self.multi { "--multi" } else { "--real-time" };
        bed.has_pace(pace).map_err(|why| Error::Usage(format!("{flag}: {why}")))?;
        has_pml(bed, self.pml)?;
        if self.gicv2 && bed.architecture() != Architecture::Arm {
            return Err(Error::Usage("--gicv2: boards of Arm's have a GIC; use arm64".into()));
        }
        if self.cpu.is_some() && bed.name() == "vmx" {
            return Err(Error::Usage("--cpu: Bochs' model goes by --pml; svm and arm64 take one".into()));
        }
        Ok(Request {
            host: bed,
            cpu: self.cpu,
            pml: self.pml,
            gicv2: self.gicv2,
            second_stage: self.npt,
            pace,
            memory_mib: self.memory,
            hugepages: self.hugepages,
            hugepage_size: self.hugepage_size,
            parameters: self.param,
            next: self.next,
            files: self.file,
            time_limit: Duration::from_secs(self.time_limit),
            ..Request::new(kernel)
        })
    }
}

/// Checks that hosts like `bed` have a processor with page-modification logging if it is `wanted`.
pub fn has_pml(bed: Emulated, wanted: bool) -> Result<()> {
    if wanted { bed.has_pml().map_err(|why| Error::Usage(format!("--pml: {why}"))) } else { Ok(()) }
}
