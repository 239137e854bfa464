//! The arguments that give a guest devices: disks, networks, sockets.

use std::net::Ipv4Addr;

use clap::Args;

use super::keyvalue::{self, KeyValues, number};
use crate::devices::console::Target;
use crate::devices::virtio::blk::BlkConfig;
use crate::devices::virtio::net::NetConfig;
use crate::devices::virtio::vsock::VsockConfig;
use crate::machine::virtio::Config;

/// Devices of a guest with a kernel.
#[derive(Debug, Args)]
#[command(next_help_heading = "Devices")]
pub struct DeviceArgs {
    /// A disk, raw: `PATH[,readonly][,serial=TEXT][,queues=N]`; may be repeated
    #[arg(short, long, value_name = "PATH", value_parser = disk, requires = "kernel")]
    disk: Vec<BlkConfig>,

    /// A network interface on a tap: tap=NAME[,mac=ADDRESS]; with create[,host=ADDRESS/LENGTH] the tap is made; may be
    /// repeated
    #[arg(long, value_name = "tap=NAME", value_parser = net, requires = "kernel")]
    net: Vec<NetConfig>,

    /// The network in kvmtool's words: `mode=none`, or `mode=tap[,tapif=NAME][,guest_mac=ADDRESS][,host_ip=ADDRESS]`
    #[arg(long, value_name = "mode=none|tap", value_parser = network, requires = "kernel")]
    network: Vec<Network>,

    /// Sockets between host and guest, by way of a unix socket: PATH[,cid=N]
    #[arg(long, value_name = "PATH", value_parser = vsock, requires = "kernel")]
    vsock: Option<VsockConfig>,

    /// A virtio console beside the serial port: file=PATH, pty or null
    #[arg(long, value_name = "WHERE", value_parser = console, requires = "kernel")]
    console: Option<Target>,

    /// An entropy source
    #[arg(long, requires = "kernel")]
    rng: bool,

    /// A balloon, inflated by `vellum ctl NAME balloon SIZE`
    #[arg(long, requires = "kernel")]
    balloon: bool,
}

impl DeviceArgs {
    /// What a machine is to be built with.
    pub fn config(self) -> Config {
        let DeviceArgs { disk, mut net, network, vsock, console, rng, balloon } = self;
        net.extend(network.into_iter().filter_map(|network| network.0));
        Config { disks: disk, nets: net, vsock, console, rng, balloon }
    }
}

/// `--disk PATH[,readonly][,serial=TEXT][,queues=N]`; `ro` is kvmtool's word.
pub fn disk(text: &str) -> Result<BlkConfig, String> {
    let keys = &["path", "readonly", "ro", "serial", "queues"];
    let read = || -> Result<BlkConfig, keyvalue::Error> {
        let kv = KeyValues::parse(text, Some("path"), keys)?;
        let mut config = BlkConfig::new(kv.required("path", path)?);
        config.readonly = kv.switch("readonly")?.or(kv.switch("ro")?).unwrap_or(false);
        config.serial = kv.text("serial").map(str::to_owned);
        config.queues = kv.with("queues", |text| number(text, 1..=16))?.unwrap_or(1);
        Ok(config)
    };
    read().map_err(|e| e.to_string())
}

/// `--net tap=NAME[,mac=ADDRESS][,create][,host=ADDRESS/LENGTH]`.
pub fn net(text: &str) -> Result<NetConfig, String> {
    let read = || -> Result<NetConfig, keyvalue::Error> {
        let kv = KeyValues::parse(text, None, &["tap", "mac", "create", "host"])?;
        let host = kv.with("host", host)?;
        Ok(NetConfig {
            tap: kv.required("tap", |text| Ok::<_, String>(text.to_owned()))?,
            create: kv.switch("create")?.unwrap_or(host.is_some()),
            host,
            mac: kv.with("mac", mac)?,
        })
    };
    read().map_err(|e| e.to_string())
}

/// `--network`, which may ask for none.
#[derive(Clone, Debug)]
struct Network(Option<NetConfig>);

/// kvmtool's `--network`. Without `tapif` the tap is made, with its host at 192.168.33.1.
fn network(text: &str) -> Result<Network, String> {
    let keys = &["mode", "tapif", "guest_mac", "host_ip"];
    let read = || -> Result<Network, keyvalue::Error> {
        let kv = KeyValues::parse(text, Some("mode"), keys)?;
        let tap = kv.required("mode", |mode| match mode {
            "none" => Ok(false),
            "tap" => Ok(true),
            _ => Err("none and tap are known"),
        })?;
        let tapif = kv.text("tapif");
        let address = kv.with("host_ip", str::parse::<Ipv4Addr>)?.unwrap_or(Ipv4Addr::new(192, 168, 33, 1));
        let config = NetConfig {
            tap: tapif.unwrap_or("vellum0").into(),
            create: tapif.is_none(),
            host: tapif.is_none().then_some((address, 24)),
            mac: kv.with("guest_mac", mac)?,
        };
        Ok(Network(tap.then_some(config)))
    };
    read().map_err(|e| e.to_string())
}

/// `--vsock PATH[,cid=N]`.
pub fn vsock(text: &str) -> Result<VsockConfig, String> {
    let read = || -> Result<VsockConfig, keyvalue::Error> {
        let kv = KeyValues::parse(text, Some("path"), &["path", "cid"])?;
        let cid = kv.with("cid", |text| number(text, 3..=u32::MAX - 1))?.unwrap_or(3);
        Ok(VsockConfig { path: kv.required("path", path)?, cid })
    };
    read().map_err(|e| e.to_string())
}

fn console(text: &str) -> Result<Target, String> {
    match text.parse() {
        Ok(Target::Terminal) | Err(_) => {
            Err("use file=PATH, pty or null; the terminal is the serial port's".into())
        }
        Ok(target) => Ok(target),
    }
}

fn path(text: &str) -> Result<std::path::PathBuf, &'static str> {
    if text.is_empty() { Err("a path is expected") } else { Ok(text.into()) }
}

fn mac(text: &str) -> Result<[u8; 6], &'static str> {
    const EXPECTED: &str = "an address as in 02:00:00:00:00:01, of one interface (the first byte even)";
    let mut bytes = [0; 6];
    let mut parts = text.split(':');
    for byte in &mut bytes {
        let part = parts.next().filter(|part| part.len() == 2).ok_or(EXPECTED)?;
        *byte = u8::from_str_radix(part, 16).map_err(|_| EXPECTED)?;
    }
    if parts.next().is_some() || bytes[0] & 1 != 0 || bytes == [0; 6] { Err(EXPECTED) } else { Ok(bytes) }
}

fn host(text: &str) -> Result<(Ipv4Addr, u8), &'static str> {
    const EXPECTED: &str = "an address and prefix length as in 192.168.33.1/24";
    let (address, length) = text.split_once('/').ok_or(EXPECTED)?;
    let length = length.parse().ok().filter(|length| *length <= 32).ok_or(EXPECTED)?;
    Ok((address.parse().map_err(|_| EXPECTED)?, length))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_as_people_type_them() {
        assert_eq!(disk("/tmp/a.img").unwrap(), BlkConfig::new("/tmp/a.img"));
        let config = disk("[a,b.img],ro,serial=s1,queues=4").unwrap();
        assert_eq!((config.path.to_str(), config.readonly, config.queues), (Some("a,b.img"), true, 4));
        let config = net("tap=tap0,mac=02:00:00:00:00:0a").unwrap();
        assert_eq!((config.create, config.mac), (false, Some([2, 0, 0, 0, 0, 10])));
        let config = net("tap=tap0,host=10.0.0.1/24").unwrap();
        assert_eq!((config.create, config.host), (true, Some((Ipv4Addr::new(10, 0, 0, 1), 24))));
        assert_eq!(vsock("/tmp/v.sock,cid=9").unwrap().cid, 9);
    }

    #[test]
    fn what_is_wrong_is_named_with_what_is_right() {
        for (result, remedy) in [
            (disk("path=").err(), "a path is expected"),
            (disk("a,queues=17").err(), "1 to 16"),
            (disk("a,raedonly").err(), "did you mean 'readonly'"),
            (net("mac=02:00:00:00:00:01").err(), "'tap=' is missing"),
            (net("tap=a,mac=01:00:00:00:00:01").err(), "first byte even"),
            (net("tap=a,mac=02:0:0:0:0:1").err(), "02:00:00:00:00:01"),
            (net("tap=a,host=10.0.0.1").err(), "192.168.33.1/24"),
            (net("tap=a,host=10.0.0.1/33").err(), "192.168.33.1/24"),
            (vsock("a,cid=2").err(), "3 to"),
            (console("terminal").err(), "file=PATH"),
        ] {
            let message = result.expect("must be refused");
            assert!(message.contains(remedy), "{message}");
        }
    }
}
