//! `vellum disk`: disk images as files. The work is in [`vellum_disk::copy`] and
//! [`vellum_osimage`].

use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use super::failure::Failure;
use super::output::print;
use super::run_flags::FLAGS;
use vellum_devices::virtio::blk::{self, BlkConfig};
use vellum_disk::copy::Target;
use vellum_disk::{qcow2, size_text};
use vellum_kvm::vm::lifecycle::Exit;
use vellum_osimage::VolumeInfo;
use vellum_osimage::confined::{self, About, Failed};
use vellum_sandbox::Mode;
use vellum_sys::{file, keyvalue};

/// Bytes of a sector.
const SECTOR: u64 = 512;

/// Create, convert and inspect disk images
#[derive(Debug, Args)]
pub(crate) struct DiskArgs {
    #[command(subcommand)]
    what: DiskCommand,
}

#[derive(Debug, Subcommand)]
enum DiskCommand {
    /// Print an image's format, size and partitions, and the kernel that `vellum run -d` boots
    #[command(after_help = "Example:\n  vellum disk info debian-12.qcow2")]
    Info {
        /// The image
        image: PathBuf,
        #[command(flatten)]
        beside: BesideArgs,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Create an empty image
    #[command(after_help = "Example:\n  vellum disk create data.qcow2 20g")]
    Create {
        /// The new file
        image: PathBuf,
        /// Its size, as in 20g
        #[arg(value_parser = |text: &str| keyvalue::size(text, 1 << 20))]
        size: u64,
        /// Its format [default: qcow2 for a name that ends so, otherwise raw]
        #[arg(short, long, value_name = "FORMAT")]
        format: Option<DiskFormat>,
    },
    /// Copy a disk into a new image of another format
    #[command(after_help = "Example:\n  vellum disk convert debian-12.qcow2 debian-12.raw")]
    Convert {
        /// The image, raw or qcow2
        from: PathBuf,
        /// The new file
        to: PathBuf,
        /// The new file's format [default: qcow2 for a name that ends so, otherwise raw]
        #[arg(short, long, value_name = "FORMAT")]
        format: Option<DiskFormat>,
        #[command(flatten)]
        beside: BesideArgs,
    },
}

/// The other files of a qcow2 image.
#[derive(Debug, Args)]
struct BesideArgs {
    /// The backing file of a qcow2 image
    #[arg(long, value_name = "FILE")]
    backing: Option<PathBuf>,
    /// The external data file of a qcow2 image
    #[arg(long, value_name = "FILE")]
    data_file: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DiskFormat {
    Raw,
    Qcow2,
}

impl DiskFormat {
    fn of(path: &Path) -> Self {
        match path.extension().and_then(|end| end.to_str()) {
            Some("qcow2") => Self::Qcow2,
            _ => Self::Raw,
        }
    }
}

/// What `vellum disk info` prints.
#[derive(Serialize)]
struct Info {
    format: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<u32>,
    bytes: u64,
    allocated_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    cluster_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    snapshots: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    backing: Option<String>,
    partitions: Vec<VolumeInfo>,
    boots: Result<About, String>,
}

/// Runs `vellum disk`.
pub(crate) fn run(args: &DiskArgs) -> Result<Exit, Failure> {
    match &args.what {
        DiskCommand::Info { image, beside, json } => info(image, beside, *json)?,
        DiskCommand::Create { image, size, format } => {
            check_size(*size)?;
            let format = format.unwrap_or_else(|| DiskFormat::of(image));
            if format == DiskFormat::Qcow2 && *size > qcow2::MAX_DISK {
                return Err(Failure::usage(qcow2::Error::Large(*size)));
            }
            let written = |file| target(file, format, *size).and_then(|mut target| target.finish());
            create(image, |file| {
                written(file).map_err(|error| Failure::host(format!("{}: {error}", image.display())))
            })?;
        }
        DiskCommand::Convert { from, to, format, beside } => {
            convert(from, beside, to, format.unwrap_or_else(|| DiskFormat::of(to)))?;
        }
    }
    Ok(Exit::PowerOff)
}

fn config(image: &Path, beside: &BesideArgs) -> BlkConfig {
    let BesideArgs { backing, data_file } = beside;
    BlkConfig {
        readonly: true,
        backing: backing.clone(),
        data_file: data_file.clone(),
        ..BlkConfig::new(image)
    }
}

fn refuse(error: &blk::BlkError) -> Failure {
    let failure = Failure::of(error, FLAGS);
    // The error names `--disk` and its keys, which this command does not have.
    let mut message = failure.message.trim_start_matches("--disk: ").to_owned();
    for (key, flag) in [
        (", or add `force` to use it as raw", ""),
        ("`backing=FILE`", "`--backing FILE`"),
        ("`data-file=FILE`", "`--data-file FILE`"),
    ] {
        message = message.replace(key, flag);
    }
    Failure { message, ..failure }
}

fn info(path: &Path, beside: &BesideArgs, json: bool) -> Result<(), Failure> {
    let files = blk::Files::open(&config(path, beside)).map_err(|error| refuse(&error))?;
    let open = || {
        let header = files.header().map_err(|error| refuse(&error).message)?;
        let image = files.image().map_err(|error| refuse(&error).message)?;
        Ok((image, header))
    };
    let (examined, header) = confined::find(Mode::On, open).map_err(|failed| match failed {
        Failed::Open(why) => Failure::usage(why),
        Failed::Work(why) => Failure::usage(format!("{}: {why}", path.display())),
    })?;
    let info = Info {
        format: if header.is_some() { "qcow2" } else { "raw" },
        version: header.as_ref().map(|header| header.version),
        bytes: examined.bytes,
        allocated_bytes: fs::metadata(path).map_err(Failure::host)?.blocks() * SECTOR,
        cluster_bytes: header.as_ref().map(|header| header.cluster),
        snapshots: header.as_ref().map(|header| header.snapshots),
        backing: header.and_then(|header| header.backing),
        partitions: examined.volumes,
        boots: examined.boots.map(|found| found.about),
    };
    let text = match json {
        true => serde_json::to_string_pretty(&info).map_err(Failure::host)? + "\n",
        false => describe(path, &info),
    };
    print(text).map(drop)
}

fn describe(path: &Path, info: &Info) -> String {
    let mut lines = match &info.boots {
        Ok(about) => {
            let system = about.system.as_deref().unwrap_or("a system whose root is not read");
            vec![format!("{}: boots {system}", path.display())]
        }
        Err(_) => vec![format!("{}: nothing in it boots without a kernel beside it", path.display())],
    };
    let version = info.version.map_or(String::new(), |version| format!(" version {version}"));
    let mut about = format!("{}{version}, {} large", info.format, size_text(info.bytes));
    about += &format!(", {} allocated", size_text(info.allocated_bytes));
    if let Some(cluster) = info.cluster_bytes {
        about += &format!(", clusters of {}", size_text(cluster));
    }
    if let Some(count) = info.snapshots.filter(|&count| count > 0) {
        about += &format!(", {count} snapshots inside");
    }
    if let Some(backing) = &info.backing {
        about += &format!(", backing file {backing:?}");
    }
    lines.push(format!("  image      {about}"));
    for volume in &info.partitions {
        let name = if volume.number == 0 { "disk".into() } else { format!("partition {}", volume.number) };
        let label = if volume.label.is_empty() { String::new() } else { format!(" {:?}", volume.label) };
        lines.push(format!("  {name:<10} {:>9}  {}{label}", size_text(volume.bytes), volume.content));
    }
    match &info.boots {
        Ok(about) => lines.extend([
            format!("  kernel     {}, by {}", about.kernel, about.place),
            format!(
                "  initrd     {}",
                if about.initrd_bytes == 0 { "none".into() } else { size_text(about.initrd_bytes) }
            ),
            format!("  cmdline    {}", about.cmdline),
            match about.has_cloud_init {
                Some(true) => "  cloud-init yes: --login makes a user".into(),
                Some(false) => "  cloud-init no".into(),
                None => "  cloud-init unknown".into(),
            },
        ]),
        Err(why) => lines.push(format!("  kernel     {why}")),
    }
    lines.join("\n") + "\n"
}

fn check_size(size: u64) -> Result<(), Failure> {
    match size > 0 && size.is_multiple_of(SECTOR) {
        true => Ok(()),
        false => Err(Failure::usage(format!(
            "a disk has a positive multiple of {SECTOR} bytes, as in 20g, not {size}"
        ))),
    }
}

fn target(file: File, format: DiskFormat, size: u64) -> io::Result<Target> {
    match format {
        DiskFormat::Raw => Target::raw(file, size),
        DiskFormat::Qcow2 => Target::qcow2(file, size),
    }
}

/// Creates the file `path`, which must not exist, with the content that `work` writes. The file gets
/// its name at the end: what an end of this process would leave could be taken for a whole image.
fn create(path: &Path, work: impl FnOnce(File) -> Result<(), Failure>) -> Result<(), Failure> {
    let refuse = |error: io::Error| match error.kind() {
        io::ErrorKind::AlreadyExists => {
            Failure::usage(format!("{}: it exists, and nothing is written over it", path.display()))
        }
        _ => Failure::usage(format!("{}: {error}", path.display())),
    };
    match path.symlink_metadata() {
        _ if path.as_os_str().as_bytes().ends_with(b"/") => {
            return Err(refuse(io::ErrorKind::IsADirectory.into()));
        }
        Ok(_) => return Err(refuse(io::ErrorKind::AlreadyExists.into())),
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(refuse(error)),
        Err(_) => {}
    }
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    match file::unnamed_with(directory.unwrap_or(Path::new(".")), 0o666) {
        Ok(file) => {
            work(file.try_clone().map_err(refuse)?)?;
            file::name(&file, path).map_err(refuse)
        }
        // The file system has only files with names.
        Err(error) if error.kind() == io::ErrorKind::Unsupported => {
            let mut options = File::options();
            options.read(true).write(true).create_new(true);
            work(options.open(path).map_err(refuse)?).inspect_err(|_| {
                let _ = fs::remove_file(path);
            })
        }
        Err(error) => Err(refuse(error)),
    }
}

fn convert(from: &Path, beside: &BesideArgs, to: &Path, format: DiskFormat) -> Result<(), Failure> {
    let files = blk::Files::open(&config(from, beside)).map_err(|error| refuse(&error))?;
    let open = || {
        let image = files.image().map_err(|error| refuse(&error).message)?;
        let named = |why: String| format!("{}: {why}", from.display());
        let size = image.size().map_err(|error| named(error.to_string()))?;
        check_size(size).map_err(|failure| named(failure.message))?;
        Ok(image)
    };
    let style = ProgressStyle::with_template("{bytes}/{total_bytes} {bar:40} {bytes_per_sec}");
    let bar = ProgressBar::no_length().with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let show = |at, size| {
        bar.set_length(size);
        bar.set_position(at);
    };
    let done = create(to, |file| {
        confined::convert(Mode::On, open, |size| target(file, format, size), show).map_err(|failed| {
            match failed {
                Failed::Open(why) => Failure::usage(why),
                Failed::Work(why) => Failure::host(format!("{}: {why}", to.display())),
            }
        })
    });
    bar.finish_and_clear();
    done
}
