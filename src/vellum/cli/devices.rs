//! The arguments for devices: a flag for each of [`KINDS`], `--forward`, and kvmtool's `--network`.

use std::any::Any;
use std::fs::File;
use std::io;
use std::net::Ipv4Addr;
use std::sync::Arc;

use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};

use vellum_control::ChildDevice;
use vellum_devices::virtio::blk::{self, BlkConfig};
use vellum_devices::virtio::console::ConsoleConfig;
use vellum_devices::virtio::fs::FsConfig;
use vellum_devices::virtio::net::user::Forward;
use vellum_devices::virtio::net::{self, NetConfig};
use vellum_devices::virtio::vsock::VsockConfig;
use vellum_devices::virtio::{DeviceConfig, KINDS, Kind, handoff};
use vellum_disk::overlay::{self, Place};
use vellum_linux::virtio::Config;
use vellum_sandbox::Mode;
use vellum_sys::file;
use vellum_sys::keyvalue::{self, KeyValues};

/// The devices of a guest. With `FOR_KERNEL` all except disks require the group `guest`.
#[derive(Clone, Debug, Default)]
pub(crate) struct DeviceArgs<const FOR_KERNEL: bool>(Vec<Arc<dyn DeviceConfig>>, NoNetwork);

/// Whether the user has said that there is no network.
type NoNetwork = bool;

/// Flags with a short form.
const SHORT: &[(&str, char)] = &[("disk", 'd')];

impl<const FOR_KERNEL: bool> DeviceArgs<FOR_KERNEL> {
    /// The devices for the configuration of a machine.
    pub fn config(self) -> Config {
        Config(self.0)
    }

    /// Whether there is a device of this kind.
    pub fn has(&self, kind: &Kind) -> bool {
        self.0.iter().any(|config| config.kind().key == kind.key)
    }

    /// The first disk.
    pub fn disk(&self) -> Option<&BlkConfig> {
        self.0.iter().find_map(|config| (&**config as &dyn Any).downcast_ref())
    }

    /// Replaces the first disk.
    pub fn set_disk(&mut self, disk: BlkConfig) {
        let is_disk = |config: &&mut Arc<dyn DeviceConfig>| config.kind().key == blk::KIND.key;
        if let Some(first) = self.0.iter_mut().find(is_disk) {
            *first = Arc::new(disk);
        }
    }

    /// Whether the flags say nothing of a network.
    pub fn leaves_network_open(&self) -> bool {
        !self.has(&net::KIND) && !self.1
    }

    /// Adds a device at the end.
    pub fn add(&mut self, device: impl DeviceConfig + 'static) {
        self.0.push(Arc::new(device));
    }

    /// Adds devices that another process wrote.
    pub fn add_written(&mut self, devices: Vec<ChildDevice>) -> Result<(), String> {
        for ChildDevice { kind, config } in devices {
            self.0.push(handoff::read(&kind, config)?);
        }
        Ok(())
    }

    /// Whether there is a network that [`forward`](Self::forward) can use.
    pub fn can_forward(&self) -> bool {
        self.served().next().is_some()
    }

    /// Forwards a host port through the first network without a tap. Returns false if there is
    /// none.
    pub fn forward(&mut self, forward: Forward) -> bool {
        for device in &mut self.0 {
            let Some(network) = (&**device as &dyn Any).downcast_ref::<NetConfig>() else { continue };
            let mut network = network.clone();
            if let Some(user) = &mut network.user {
                user.forwards.push(forward);
                *device = Arc::new(network);
                return true;
            }
        }
        false
    }

    /// Adds the forwards of a command line to its one interface that passt serves, which is added if
    /// the command line has no network.
    fn forward_all(&mut self, forwards: Vec<Forward>) -> Result<(), clap::Error> {
        if self.leaves_network_open() {
            self.add(net::parse("user").expect("it is a network"));
        }
        let refuse = |text: &str| {
            Err(clap::Error::raw(clap::error::ErrorKind::InvalidValue, format!("--forward: {text}\n")))
        };
        match self.served().count() {
            0 => refuse("it needs --net user"),
            1 => {
                for forward in forwards {
                    self.forward(forward);
                }
                Ok(())
            }
            _ => refuse("with several of --net user give each its own, as in --net user,forward=8080:80"),
        }
    }

    /// The networks that passt serves.
    fn served(&self) -> impl Iterator<Item = &NetConfig> {
        let networks = self.0.iter().filter_map(|config| (&**config as &dyn Any).downcast_ref());
        networks.filter(|network: &&NetConfig| network.user.is_some())
    }

    /// The disks, by their names.
    fn disks(&mut self) -> impl Iterator<Item = (String, &mut Arc<dyn DeviceConfig>)> {
        let disks = self.0.iter_mut().filter(|config| config.kind().key == blk::KIND.key);
        disks.enumerate().map(|(at, config)| (format!("{}{at}", blk::KIND.key), config))
    }

    /// The flag and the name of each thing of the host that only one machine at a time can have.
    pub fn exclusive(&self) -> Vec<(String, String)> {
        let mut all = Vec::new();
        for config in &self.0 {
            let kind = config.kind().key;
            let config = &**config as &dyn Any;
            let path = if let Some(disk) = config.downcast_ref::<BlkConfig>() {
                match &disk.overlay {
                    Some(Place::File(path)) => Some(path.clone()),
                    None if !disk.readonly => Some(disk.path.clone()),
                    _ => None,
                }
            } else if let Some(vsock) = config.downcast_ref::<VsockConfig>() {
                Some(vsock.path.clone())
            } else if let Some(network) = config.downcast_ref::<NetConfig>() {
                match &network.user {
                    Some(user) => user.socket.clone(),
                    None => Some(network.tap.clone().into()),
                }
            } else {
                None
            };
            all.extend(path.map(|path| (flag(kind), path.display().to_string())));
        }
        all
    }

    /// Whether a network on a tap has no address of its own.
    pub fn lacks_address(&self) -> bool {
        let lacks = |network: &NetConfig| network.user.is_none() && network.mac.is_none();
        self.0.iter().any(|config| (&**config as &dyn Any).downcast_ref().is_some_and(lacks))
    }

    /// Whether what the guest writes to a disk outlives it.
    pub fn keeps_writes(&self) -> bool {
        let keeps = |disk: &BlkConfig| !disk.readonly && disk.overlay != Some(Place::Discard);
        self.0.iter().filter_map(of_disk).any(keeps)
    }

    /// The names of the disks with an overlay.
    pub fn overlays(&mut self) -> Vec<String> {
        let has = |config: &Arc<dyn DeviceConfig>| of_disk(config).is_some_and(|disk| disk.overlay.is_some());
        self.disks().filter(|(_, config)| has(config)).map(|(name, _)| name).collect()
    }

    /// Gives disks overlays that begin as copies of these files, by the names of the disks. Returns
    /// the files that have no name. They are to be open until the disks are.
    ///
    /// # Errors
    /// A disk has no overlay, or the file for it has content.
    pub fn copy_overlays(&mut self, overlays: &[(String, File)]) -> Result<Vec<File>, String> {
        let mut unnamed = Vec::new();
        for (name, config) in self.disks() {
            let Some((_, from)) = overlays.iter().find(|(of, _)| *of == name) else { continue };
            let mut disk = of_disk(config).cloned().ok_or("a disk is none")?;
            let failed = |error: io::Error| format!("{} the overlay of {name}: {error}", flag(blk::KIND.key));
            match &disk.overlay {
                None => return Err(lacks_overlay(&name)),
                Some(Place::File(path)) => overlay::with_file(path, failed, |file| {
                    if file.metadata().map_err(failed)?.len() > 0 {
                        return Err(failed(io::Error::other(format!(
                            "{} has content already; it begins as a copy: name a new file",
                            path.display()
                        ))));
                    }
                    copy(from, &file).map_err(failed)
                })?,
                Some(Place::Discard | Place::Open(_)) => {
                    let file = overlay::unnamed().map_err(failed)?;
                    copy(from, &file).map_err(failed)?;
                    disk.overlay = Some(Place::Open(file::path_of(&file)));
                    unnamed.push(file);
                }
            }
            *config = Arc::new(disk);
        }
        Ok(unnamed)
    }

    /// The shared directories.
    pub fn shares(&self) -> impl Iterator<Item = &FsConfig> {
        self.0.iter().filter_map(|config| (&**config as &dyn Any).downcast_ref())
    }

    /// Removes and returns the console, so that it can share its device with a port.
    pub(crate) fn take_console(&mut self) -> Option<ConsoleConfig> {
        let is_one = |config: &Arc<dyn DeviceConfig>| (&**config as &dyn Any).is::<ConsoleConfig>();
        let at = self.0.iter().position(is_one)?;
        (&*self.0.remove(at) as &dyn Any).downcast_ref().cloned()
    }

    /// Sets the sandbox of the servers of shared directories.
    pub(crate) fn confine(&mut self, sandbox: Mode) {
        for config in &mut self.0 {
            if let Some(share) = (&**config as &dyn Any).downcast_ref::<FsConfig>() {
                *config = Arc::new(FsConfig { sandbox, ..share.clone() });
            }
        }
    }
}

fn of_disk(config: &Arc<dyn DeviceConfig>) -> Option<&BlkConfig> {
    (&**config as &dyn Any).downcast_ref()
}

/// Copies `from`, which other processes copy too, to the empty `to`, with its time.
fn copy(from: &File, to: &File) -> io::Result<()> {
    // Opened anew: the position in a file belongs to the open file.
    let from = File::open(file::path_of(from))?;
    file::copy_into(&from, to)?;
    to.set_modified(from.metadata()?.modified()?)
}

/// The message for a disk of a new machine that has no overlay, where the other machine's has one.
pub(super) fn lacks_overlay(name: &str) -> String {
    format!(
        "{} {name} has an overlay: give the new machine one too: PATH,overlay=discard or overlay=FILE",
        flag(blk::KIND.key)
    )
}

/// The flag of a kind of device, as messages begin with it.
pub fn flag(key: &str) -> String {
    format!("--{key}:")
}

impl<const FOR_KERNEL: bool> Args for DeviceArgs<FOR_KERNEL> {
    fn augment_args(command: Command) -> Command {
        let command = command.next_help_heading("Devices");
        let bound = |arg: Arg| if FOR_KERNEL { arg.requires("guest") } else { arg };
        // A disk may contain the kernel that the other devices require.
        let command = KINDS.iter().fold(command, |command, kind| match kind.key == blk::KIND.key {
            true => command.arg(arg(kind)),
            false => command.arg(bound(arg(kind))),
        });
        let forward =
            Arg::new("forward").long("forward").value_name("[tcp:|udp:][ADDRESS:]HOSTPORT:GUESTPORT");
        let forward = forward.value_parser(forward_of).action(ArgAction::Append);
        let command = command.arg(bound(forward.help(
            "Forward a port of the host to the guest: TCP unless udp: is given, on 127.0.0.1 unless an address is given; through \
             --net user, which is the network if none is given; may be repeated",
        )));
        let about = "The network in kvmtool's words: `mode=none`, or \
            `mode=tap[,tapif=NAME][,guest_mac=ADDRESS][,host_ip=ADDRESS]`";
        let words = Arg::new("network").value_name("mode=none|tap").value_parser(network).help(about);
        command.arg(bound(words.long("network").action(ArgAction::Append)))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

fn arg(kind: &'static Kind) -> Arg {
    let arg = Arg::new(kind.key).long(kind.key);
    let arg = match SHORT.iter().find(|(key, _)| *key == kind.key) {
        Some((_, letter)) => arg.short(*letter),
        None => arg,
    };
    let arg = match kind.value {
        Some(value) => arg.value_name(value).value_parser(kind.parse),
        None => arg.action(ArgAction::SetTrue),
    };
    match kind.repeats {
        true => arg.action(ArgAction::Append).help(format!("{}; may be repeated", kind.about)),
        false => arg.help(kind.about),
    }
}

impl<const FOR_KERNEL: bool> FromArgMatches for DeviceArgs<FOR_KERNEL> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut devices = Vec::new();
        for kind in KINDS {
            if kind.value.is_some() {
                devices.extend(
                    matches.get_many::<Arc<dyn DeviceConfig>>(kind.key).into_iter().flatten().cloned(),
                );
            } else if matches.get_flag(kind.key) {
                devices.push(
                    (kind.parse)("")
                        .map_err(|error| clap::Error::raw(clap::error::ErrorKind::InvalidValue, error))?,
                );
            }
        }
        let networks: Vec<&Network> = matches.get_many("network").into_iter().flatten().collect();
        let has_none = networks.iter().any(|network| network.0.is_none());
        devices.extend(
            networks
                .into_iter()
                .filter_map(|network| Some(Arc::new(network.0.clone()?) as Arc<dyn DeviceConfig>)),
        );
        let mut all = Self(devices, has_none);
        let forwards: Vec<Forward> = matches.get_many("forward").into_iter().flatten().cloned().collect();
        if !forwards.is_empty() {
            all.forward_all(forwards)?;
        }
        Ok(all)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

fn forward_of(text: &str) -> Result<Forward, &'static str> {
    text.parse()
}

/// The value of `--network`. It may be none.
#[derive(Clone, Debug)]
struct Network(Option<NetConfig>);

/// Parses kvmtool's `--network`. Without `tapif` a tap is created, and the host gets 192.168.33.1.
fn network(text: &str) -> Result<Network, String> {
    let keys = &["mode", "tapif", "guest_mac", "host_ip"];
    let read = || -> Result<Network, keyvalue::Error> {
        let kv = KeyValues::parse(text, Some("mode"), keys)?;
        let tap = kv.required("mode", |mode| match mode {
            "none" => Ok(false),
            "tap" => Ok(true),
            "user" => Err("here it is --net user"),
            _ => Err("none and tap are known"),
        })?;
        let tapif = kv.text("tapif");
        let address = kv.with("host_ip", str::parse::<Ipv4Addr>)?.unwrap_or(Ipv4Addr::new(192, 168, 33, 1));
        let config = NetConfig {
            tap: tapif.unwrap_or("vellum0").into(),
            create: tapif.is_none(),
            host: tapif.is_none().then_some((address, 24)),
            mac: kv.with("guest_mac", net::mac)?,
            user: None,
        };
        Ok(Network(tap.then_some(config)))
    };
    read().map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Result<Vec<String>, clap::Error> {
        let command = DeviceArgs::<true>::augment_args(Command::new("run").no_binary_name(true))
            .arg(Arg::new("kernel").long("kernel"))
            .group(clap::ArgGroup::new("guest").args(["kernel", "disk"]).multiple(true));
        let matches = command.try_get_matches_from([&["--kernel", "k"], args].concat())?;
        Ok(DeviceArgs::<true>::from_arg_matches(&matches)?
            .0
            .iter()
            .map(|config| format!("{config:?}"))
            .collect())
    }

    #[test]
    fn no_network_is_an_answer() {
        let leaves_open = |args: &[&str]| {
            let command = DeviceArgs::<true>::augment_args(Command::new("run").no_binary_name(true))
                .arg(Arg::new("kernel").long("kernel"))
                .group(clap::ArgGroup::new("guest").args(["kernel", "disk"]).multiple(true));
            let matches = command.try_get_matches_from([&["-d", "x"], args].concat()).unwrap();
            DeviceArgs::<true>::from_arg_matches(&matches).unwrap().leaves_network_open()
        };
        assert!(leaves_open(&[]));
        assert!(!leaves_open(&["--network", "mode=none"]));
        assert!(!leaves_open(&["--net", "user"]));
    }

    #[test]
    fn devices_as_people_type_them() {
        let words = "-d [a,b.img],ro,serial=s1,queues=4 --net tap=tap0,host=10.0.0.1/24 --disk c --rng --balloon \
            --network none --network mode=tap,guest_mac=02:00:00:00:00:0a --vsock v,cid=9 --console null";
        let found = parse(&words.split_whitespace().collect::<Vec<_>>()).unwrap();
        let expected = [
            r#"BlkConfig { path: "a,b.img", readonly: true, overlay: None, into_image: false, size: None, serial: Some("s1"), queues: 4, format: None, backing: None, data_file: None, force: false }"#,
            r#"BlkConfig { path: "c", readonly: false, overlay: None, into_image: false, size: None, serial: None, queues: 1, format: None, backing: None, data_file: None, force: false }"#,
            r#"NetConfig { tap: "tap0", create: true, host: Some((10.0.0.1, 24)), mac: None, user: None }"#,
            r#"VsockConfig { path: "v", cid: 9, is_named: true }"#,
            "ConsoleConfig(Null)",
            "RngConfig",
            "BalloonConfig",
            r#"NetConfig { tap: "vellum0", create: true, host: Some((192.168.33.1, 24)), mac: Some([2, 0, 0, 0, 0, 10]), user: None }"#,
        ];
        assert_eq!(found, expected);
        assert!(parse(&["--rng", "--rng"]).is_err() && parse(&["--vsock", "a", "--vsock", "b"]).is_err());
    }

    #[test]
    fn what_is_wrong_is_named_with_what_is_right() {
        for (flag, value, remedy) in [
            ("--disk", "path=", "a path is expected"),
            ("--disk", "a,queues=17", "1 to 16"),
            ("--disk", "a,size=1000b", "not a multiple of 512"),
            ("--disk", "a,raedonly", "did you mean 'readonly'"),
            ("--net", "mac=02:00:00:00:00:01", "'tap=' is missing"),
            ("--net", "tap=a,mac=01:00:00:00:00:01", "first byte even"),
            ("--net", "tap=a,mac=02:0:0:0:0:1", "02:00:00:00:00:01"),
            ("--net", "tap=a,host=10.0.0.1", "192.168.33.1/24"),
            ("--net", "tap=a,host=10.0.0.1/33", "192.168.33.1/24"),
            ("--vsock", "a,cid=2", "3 to"),
            ("--console", "terminal", "file=PATH"),
        ] {
            let message = parse(&[flag, value]).expect_err("must be refused").to_string();
            assert!(message.contains(remedy) && message.contains(flag), "{message}");
        }
    }
}
