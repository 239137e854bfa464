//! `vmx`: Bochs emulates an Intel processor with VMX, so kvm-intel runs in it, with or without EPT
//! and PML.
//!
//! Bochs comes from the Debian source package of a later suite. It is built here without its
//! debugger, which makes it twice as fast. Its BIOS and a boot loader are Debian's, unpacked but
//! not installed. Bochs cannot load a kernel directly, so the host boots from a disk. Its second
//! serial port writes to a FIFO.

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Emulated, Emulator, Pace, Ports, Request, Results, Start, image};
use crate::architecture::Architecture;
use crate::cache::Cache;
use crate::debian::{self, Archive};
use crate::hosts::doctor;
use crate::{Error, Result, tool};

/// The bed.
pub const HOST: Emulated = Emulated(&Vmx);

struct Vmx;

impl Emulator for Vmx {
    fn name(&self) -> &'static str {
        "vmx"
    }

    fn about(&self) -> &'static str {
        "Bochs emulating Intel's VMX"
    }

    fn purpose(&self) -> &'static str {
        "emulated Intel host: EPT, PML and shadow paging (Bochs, built from Debian's source)"
    }

    /// The programs that build Bochs and its disks.
    fn programs(&self) -> &'static [&'static str] {
        &["apt-get", "dpkg-deb", "tar", "xz", "make", "g++", "busybox", "syslinux", "mcopy", "mkfs.fat"]
    }

    fn modules(&self) -> &'static [&'static str] {
        &["kvm_intel"]
    }

    fn mode(&self, second_stage: bool) -> String {
        format!("ept={}", u8::from(second_stage))
    }

    fn parameters(&self, second_stage: bool) -> Vec<String> {
        // Bochs 3.0's skylake_x advertises APIC virtualization that kvm-intel cannot use.
        vec![format!("kvm_intel.{}", self.mode(second_stage)), "kvm_intel.enable_apicv=0".into()]
    }

    fn ports(&self) -> Ports {
        Ports { console: "ttyS0", results: "ttyS1" }
    }

    fn nanoseconds_per_instruction(&self) -> f64 {
        1e9 / IPS as f64
    }

    fn has_pml(&self) -> std::result::Result<(), &'static str> {
        Ok(())
    }

    fn has_pace(&self, pace: Pace) -> std::result::Result<(), &'static str> {
        match pace {
            Pace::Counted | Pace::Races => Ok(()),
            Pace::Real => Err("Bochs's clock counts instructions; leave it out, or use svm"),
        }
    }

    fn takes_turns(&self) -> bool {
        true
    }

    fn ready(&self) -> Result<()> {
        match doctor::install_line(&doctor::missing(self.programs())) {
            None => image::busybox().map(drop),
            Some(line) => Err(Error::Package(format!("vmx: what builds and boots Bochs is missing: {line}"))),
        }
    }

    /// A constant, because this laboratory always builds Bochs in the same way.
    fn version(&self) -> Result<String> {
        Ok("Bochs, built by this laboratory".into())
    }

    fn command(&self, start: &Start) -> Result<(Command, Results)> {
        if start.request.wire.is_some() {
            return Err(Error::Usage("vmx hosts have no network: use svm".into()));
        }
        let results = start.dir.join("results");
        let command = Bochs::get(start.cache)?.command(start, &results)?;
        Ok((command, Results::Fifo(results)))
    }
}

const SUITE: &[&str] = &["trixie"];
/// Packages whose files are used from where they are unpacked.
const DATA: [&str; 3] = ["bochsbios", "vgabios", "syslinux-common"];
const CONFIGURE: [&str; 15] = [
    "--enable-cpu-level=6",
    "--enable-x86-64",
    "--enable-vmx=2",
    "--enable-svm",
    "--enable-avx",
    "--enable-evex",
    "--enable-pci",
    "--enable-smp",
    "--enable-all-optimizations",
    "--with-nogui",
    "--disable-debugger",
    "--disable-plugins",
    "--enable-large-ramfile",
    "--enable-a20-pin",
    "--disable-docbook",
];

/// Instructions per second of the emulated clock.
const IPS: u64 = 50_000_000;

/// The offset of the disk's only partition: 1 MiB, as is common.
const PARTITION: u64 = 1 << 20;
const SECTOR: u64 = 512;

/// Bochs and its data files.
struct Bochs {
    program: PathBuf,
    data: PathBuf,
}

impl Bochs {
    /// Fetches and builds it if need be.
    fn get(cache: &Cache) -> Result<Self> {
        Vmx.ready()?;
        let package = debian::recorded(cache, "bochs", || {
            Archive::open(cache, Architecture::X86, SUITE)?.resolve("bochs")
        })?;
        let built = cache.entry(&format!("bochs/{}", package.version), |out| {
            cache.need_mib(600)?;
            let source = out.join("source");
            fs::create_dir(&source).map_err(Error::file("create", &source))?;
            let tarball = Archive::open(cache, Architecture::X86, SUITE)?.download_source("bochs", out)?;
            tool::output(
                Command::new("tar")
                    .arg("-xf")
                    .arg(&tarball)
                    .args(["--strip-components=1", "-C"])
                    .arg(&source),
            )?;
            eprintln!("lab: building Bochs {} (some 5 minutes of CPU time)", package.version);
            tool::output(Command::new("./configure").args(CONFIGURE).current_dir(&source))?;
            let jobs = std::thread::available_parallelism().map_or(1, usize::from);
            tool::output(Command::new("make").arg(format!("-j{jobs}")).current_dir(&source))?;
            fs::rename(source.join("bochs"), out.join("bochs")).map_err(Error::file("keep", "bochs"))?;
            fs::remove_dir_all(&source).map_err(Error::file("remove", &source))
        })?;
        let data = cache.entry("bochs/data", |out| {
            let archive = Archive::open(cache, Architecture::X86, SUITE)?;
            for name in DATA {
                let deb = archive.download(&archive.resolve(name)?, out)?;
                debian::unpack(&deb, out)?;
                fs::remove_file(&deb).map_err(Error::file("remove", &deb))?;
            }
            Ok(())
        })?;
        Ok(Self { program: built.join("bochs"), data })
    }

    /// The command line for a host. Creates its disk and configuration in the start's directory.
    /// The results line is written to `results`.
    fn command(&self, start: &Start, results: &Path) -> Result<Command> {
        let disk = start.dir.join("disk.img");
        self.make_disk(&disk, start.request, start.initrd)?;
        fifo(results)?;
        let config = start.dir.join("bochsrc");
        let text = self.config(start.request, &disk, &start.console(), results);
        fs::write(&config, text).map_err(Error::file("write", &config))?;
        let mut command = Command::new(&self.program);
        command.arg("-q").arg("-f").arg(&config).arg("-log").arg("/dev/null").current_dir(start.dir);
        Ok(command)
    }

    fn config(&self, request: &Request, disk: &Path, console: &Path, results: &Path) -> String {
        // Of these two models only the first has PML.
        let model = if request.pml { "corei7_skylake_x" } else { "broadwell_ult" };
        let (data, disk) = (self.data.display(), disk.display());
        let (console, results) = (console.display(), results.display());
        let memory = request.memory_mib;
        let cpus = if request.pace == Pace::Races { 2 } else { 1 };
        // Bochs keeps at most this much guest memory in its own memory, and the rest in a file once
        // it is touched.
        let kept = memory.min(2048);
        format!(
            "display_library: nogui\n\
             cpu: model={model}, count={cpus}, ips={IPS}, reset_on_triple_fault=0, ignore_bad_msrs=1\n\
             memory: guest={memory}, host={kept}\n\
             romimage: file={data}/usr/share/bochs/BIOS-bochs-latest\n\
             vgaromimage: file={data}/usr/share/vgabios/vgabios.bin\n\
             clock: sync=none, time0=946684800\n\
             pci: enabled=1, chipset=i440fx\n\
             ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14\n\
             ata0-master: type=disk, path={disk}, mode=volatile\n\
             boot: disk\n\
             com1: enabled=1, mode=file, dev={console}\n\
             com2: enabled=1, mode=file, dev={results}\n\
             panic: action=fatal\nerror: action=ignore\ninfo: action=ignore\ndebug: action=ignore\n"
        )
    }

    /// Makes a disk that boots `request`'s kernel: one FAT partition with syslinux.
    fn make_disk(&self, disk: &Path, request: &Request, initrd: &Path) -> Result<()> {
        let size = |path: &Path| fs::metadata(path).map(|meta| meta.len()).map_err(Error::file("read", path));
        // syslinux and every BIOS support FAT16, which needs at least 4,085 clusters.
        let bytes = (size(request.kernel.image())? + size(initrd)? + (8 << 20))
            .max(32 << 20)
            .next_multiple_of(1 << 20);
        let file = File::create(disk).map_err(Error::file("create", disk))?;
        file.set_len(PARTITION + bytes).map_err(Error::file("size", disk))?;
        let sectors = bytes / SECTOR;
        let mut table = self.data.clone();
        table.push("usr/lib/syslinux/mbr/mbr.bin");
        let mut boot = fs::read(&table).map_err(Error::file("read", &table))?;
        boot.resize(446, 0);
        // One active partition of type 0x0e (FAT16, LBA). The CHS fields mean "too large for CHS".
        boot.extend([0x80, 0xfe, 0xff, 0xff, 0x0e, 0xfe, 0xff, 0xff]);
        boot.extend(((PARTITION / SECTOR) as u32).to_le_bytes());
        boot.extend((sectors as u32).to_le_bytes());
        boot.resize(510, 0);
        boot.extend([0x55, 0xaa]);
        let mut file = OpenOptions::new().write(true).open(disk).map_err(Error::file("open", disk))?;
        file.seek(SeekFrom::Start(0))
            .and_then(|_| file.write_all(&boot))
            .map_err(Error::file("write", disk))?;
        let offset = (PARTITION / SECTOR).to_string();
        let mut mkfs = Command::new(tool::need("mkfs.fat")?);
        mkfs.args(["-F", "16", "-h", &offset, "--offset", &offset]).arg(disk).arg((bytes / 1024).to_string());
        tool::output(&mut mkfs)?;
        tool::output(
            Command::new("syslinux").args(["--install", "--offset", &PARTITION.to_string()]).arg(disk),
        )?;
        let config = disk.with_file_name("syslinux.cfg");
        // Bochs's TSC counts instructions. One of the two models advertises another TSC rate in
        // CPUID.16H, with which the timers' seconds would differ from the host's.
        let line = format!(
            "DEFAULT linux\nLABEL linux\n  KERNEL vmlinuz\n  APPEND initrd=initrd {} tsc=reliable tsc_early_khz={}\n",
            request.command_line(),
            IPS / 1000
        );
        fs::write(&config, line).map_err(Error::file("write", &config))?;
        for (from, to) in [(request.kernel.image(), "vmlinuz"), (initrd, "initrd"), (&config, "syslinux.cfg")]
        {
            let mut copy = Command::new("mcopy");
            copy.arg("-i").arg(format!("{}@@{PARTITION}", disk.display())).arg(from).arg(format!("::{to}"));
            tool::output(&mut copy)?;
        }
        Ok(())
    }
}

fn fifo(path: &Path) -> Result<()> {
    let name = CString::new(path.as_os_str().as_bytes()).expect("paths hold no NUL");
    // SAFETY: `name` is NUL-terminated and outlives the call.
    match unsafe { libc::mkfifo(name.as_ptr(), 0o600) } {
        0 => Ok(()),
        _ => Err(Error::file("create", path)(std::io::Error::last_os_error())),
    }
}
