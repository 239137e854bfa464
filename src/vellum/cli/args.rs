//! Arguments that several subcommands share: memory, CPUs, workloads.

use std::ffi::OsStr;
use std::time::Duration;

use clap::builder::{PossibleValue, TypedValueParser};

use vellum_control::{Compression, Link, Mode, Throttling};
use vellum_guests::program::GuestPage;
use vellum_guests::{Hot, Order, WriteConfig};
use vellum_host::hugepages;
use vellum_kvm::dirty::Method;
use vellum_kvm::memory::{Backing, MemoryConfig};
use vellum_sandbox as sandbox;
use vellum_sys::host::allowed_cpus;
use vellum_sys::keyvalue::{self, KeyValues, list, number, one_of, size};

/// A parser with words that shells offer as completions. It may accept other words too.
#[derive(Clone)]
pub struct Offering<P>(pub P, pub &'static [&'static str]);

impl<P: TypedValueParser> TypedValueParser for Offering<P> {
    type Value = P::Value;

    fn parse_ref(
        &self,
        command: &clap::Command,
        arg: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<P::Value, clap::Error> {
        self.0.parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(self.1.iter().map(PossibleValue::new)))
    }
}

/// A function that parses a value as typed.
type Parse<T> = fn(&str) -> Result<T, String>;

/// The words of `--sandbox`.
pub(crate) const SANDBOX: Offering<Parse<sandbox::Mode>> =
    Offering(|text| text.parse(), &["on", "log", "off"]);
/// The words of `--tracker`.
pub(crate) const TRACKER: Offering<Parse<Tracker>> =
    Offering(tracker, &["bitmap", "manual-protect", "initially-set", "ring"]);
/// The words of `--compress`.
pub(crate) const COMPRESSION: Offering<Parse<Compression>> = Offering(compression, &["zstd"]);
/// The words of `--link`.
pub const LINK: Offering<Parse<Link>> = Offering(link, &["stream", "memfd"]);
/// The words of `--throttle`.
pub(crate) const THROTTLING: Offering<Parse<Throttling>> =
    Offering(throttling, &["off", "steps", "dirty-limit"]);
/// The words of `--mode` of a migration.
pub(crate) const MODE: Offering<Parse<Mode>> = Offering(mode, &["precopy", "postcopy", "hybrid"]);
/// The words of `--backing`.
pub(crate) const BACKING: Offering<Parse<Backing>> = Offering(
    backing,
    &[
        "anonymous",
        "thp",
        "hugetlb-2m",
        "hugetlb-1g",
        "shared-hugetlb-2m",
        "shared-hugetlb-1g",
        "shmem",
        "memfd",
    ],
);

/// `--memory SIZE[,backing=…][,prealloc=on|off][,lock=on|off][,slots=N][,eager-split=SIZE]`.
pub fn memory(text: &str) -> Result<MemoryConfig, String> {
    let keys = &["size", "backing", "prealloc", "lock", "slots", "eager-split"];
    let kv = KeyValues::parse(text, Some("size"), keys).map_err(|e| e.to_string())?;
    let read = || -> Result<MemoryConfig, keyvalue::Error> {
        let mut config = MemoryConfig::new(kv.required("size", |text| size(text, 1 << 20))?);
        if let Some(backing) = kv.with("backing", backing)? {
            config.backing = backing;
        }
        config.prealloc = kv.switch("prealloc")?.unwrap_or(false);
        config.lock = kv.switch("lock")?.unwrap_or(false);
        config.slots = kv.with("slots", |text| number(text, 1..=32_764))?.unwrap_or(1);
        config.eager_split = kv.with("eager-split", |text| size(text, 1))?;
        Ok(config)
    };
    read().map_err(|e| e.to_string())
}

fn mode(text: &str) -> Result<Mode, String> {
    let names = [("precopy", Mode::Precopy), ("postcopy", Mode::Postcopy), ("hybrid", Mode::Hybrid)];
    one_of("mode", text, &names)
}

fn throttling(text: &str) -> Result<Throttling, String> {
    let names =
        [("off", Throttling::Off), ("steps", Throttling::Steps), ("dirty-limit", Throttling::DirtyLimit)];
    one_of("throttle", text, &names)
}

fn link(text: &str) -> Result<Link, String> {
    one_of("link", text, &[("stream", Link::Stream), ("memfd", Link::Memfd)])
}

fn compression(text: &str) -> Result<Compression, String> {
    one_of("compress", text, &[("zstd", Compression::Zstd)])
}

/// Parses what backs memory whose size comes from elsewhere.
pub(crate) fn memory_without_size(text: &str) -> Result<MemoryConfig, String> {
    let kv = KeyValues::parse(text, Some("backing"), &["backing", "prealloc", "lock"])
        .map_err(|e| e.to_string())?;
    let read = || -> Result<MemoryConfig, keyvalue::Error> {
        let mut config = MemoryConfig::new(0);
        if let Some(backing) = kv.with("backing", backing)? {
            config.backing = backing;
        }
        config.prealloc = kv.switch("prealloc")?.unwrap_or(false);
        config.lock = kv.switch("lock")?.unwrap_or(false);
        Ok(config)
    };
    read().map_err(|e| e.to_string())
}

/// How memory is loaded from a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// All of it is read before the guest runs.
    Eager,
    /// Memory maps the files.
    Map,
    /// Pages are read on demand.
    Demand,
}

/// How memory is loaded from a snapshot, and what backs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RestoredMemory {
    /// How it is loaded.
    pub way: Way,
    /// What backs it. The size comes from the snapshot.
    pub config: MemoryConfig,
}

/// Parses `eager`, `map` or `demand`, followed by the keys of [`memory_without_size`].
pub(crate) fn restored_memory(text: &str) -> Result<RestoredMemory, String> {
    let (first, rest) = text.split_once(',').unwrap_or((text, ""));
    let (way, rest) = match first {
        "eager" => (Way::Eager, rest),
        "map" => (Way::Map, rest),
        "demand" => (Way::Demand, rest),
        _ => (Way::Eager, text),
    };
    let config = if rest.is_empty() { MemoryConfig::new(0) } else { memory_without_size(rest)? };
    let private = matches!(config.backing, Backing::Anonymous | Backing::Thp);
    match way {
        Way::Map if config.prealloc || config.lock || !private => {
            Err("map shows files in memory that is anonymous or thp, and neither prealloc nor lock is possible with it".into())
        }
        Way::Demand if config.prealloc => {
            Err("demand brings memory as it is wanted, and prealloc has it there before: eager would work".into())
        }
        way => Ok(RestoredMemory { way, config }),
    }
}

/// Parses the name of a backing: Vellum's or that of the KVM selftests.
pub fn backing(text: &str) -> Result<Backing, String> {
    const NAMES: [(&str, Backing); 9] = [
        ("anonymous", Backing::Anonymous),
        ("thp", Backing::Thp),
        ("anonymous_thp", Backing::Thp),
        ("hugetlb-2m", Backing::Hugetlb(2 << 20)),
        ("hugetlb-1g", Backing::Hugetlb(1 << 30)),
        ("shared-hugetlb-2m", Backing::SharedHugetlb(2 << 20)),
        ("shared-hugetlb-1g", Backing::SharedHugetlb(1 << 30)),
        ("shmem", Backing::Shmem),
        ("memfd", Backing::Memfd),
    ];
    let default =
        || hugepages::default_size().ok_or("this host has no huge pages: see `vellum doctor`".to_owned());
    match text {
        "anonymous_hugetlb" => return default().map(Backing::Hugetlb),
        "shared_hugetlb" => return default().map(Backing::SharedHugetlb),
        _ => {}
    }
    if let Some(page) = text.strip_prefix("anonymous_hugetlb_").or_else(|| text.strip_prefix("hugetlb-")) {
        let page = size(page, 1)?;
        let sizes = hugepages::sizes();
        // Other sizes that this host lacks are refused here. 2 MiB and 1 GiB are common: a shortage
        // of those is reported later, with the command that reserves them.
        if page == 2 << 20 || page == 1 << 30 || sizes.contains(&page) {
            return Ok(Backing::Hugetlb(page));
        }
        let known: Vec<_> = sizes.into_iter().map(vellum_kvm::memory::short_size).collect();
        return Err(format!("this host has no huge pages of that size, but of {}", known.join(", ")));
    }
    one_of("backing", text, &NAMES)
}

/// `--tracker NAME[,entries=N]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tracker {
    /// How the dirty log is collected.
    pub method: Method,
    /// Entries of the dirty ring, if given.
    pub entries: Option<u32>,
}

/// Parses a [`Tracker`]. Whether the host supports it is checked later.
pub fn tracker(text: &str) -> Result<Tracker, String> {
    let kv = KeyValues::parse(text, Some("name"), &["name", "entries", "initially-set"])
        .map_err(|e| e.to_string())?;
    let read = || -> Result<Tracker, keyvalue::Error> {
        let method = kv.required("name", |text| one_of("tracker", text, &Method::NAMES))?;
        let not_ring = "only the ring has entries: leave them out";
        let entries = kv.with("entries", |text| match method {
            Method::Ring => number(text, 1..=u32::MAX),
            _ => Err(not_ring.to_owned()),
        })?;
        kv.with("initially-set", |_| -> Result<(), String> {
            match method {
                Method::Ring => Err(vellum_kvm::dirty::Error::RingWithInitiallySet.to_string()),
                _ => Err("it is a tracker of its own: --tracker initially-set".to_owned()),
            }
        })?;
        Ok(Tracker { method, entries })
    };
    read().map_err(|e| e.to_string())
}

/// The default number of entries of a dirty ring. Every KVM with dirty rings supports it.
pub const RING_ENTRIES: &str = "65536";

/// Parses the number of entries of a dirty ring. The host's limit is checked later.
pub fn ring_entries(text: &str) -> Result<u32, String> {
    number(text, 1..=u32::MAX)
}

/// Parses the number of pages that one `KVM_CLEAR_DIRTY_LOG` covers.
pub fn clear_chunk(text: &str) -> Result<u64, String> {
    match number(text, 64..=1u64 << 31)? {
        pages if pages % 64 == 0 => Ok(pages),
        pages => Err(format!("KVM clears multiples of 64 pages: {} would work", pages.next_multiple_of(64))),
    }
}

/// `--cpus N[,pin=LIST|off]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cpus {
    /// The number of vCPUs.
    pub count: usize,
    /// Where they run, if given.
    pub pin: Option<Pin>,
}

/// Where vCPUs run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pin {
    /// On a CPU each, if one CPU is left over.
    Auto,
    /// Wherever the host schedules them.
    Off,
    /// On these CPUs, one for each vCPU.
    To(Vec<usize>),
}

/// Parses [`Cpus`]. Whether the host has as many CPUs is checked later.
pub fn cpus(text: &str) -> Result<Cpus, String> {
    let kv = KeyValues::parse(text, Some("count"), &["count", "pin"]).map_err(|e| e.to_string())?;
    let read = || -> Result<Cpus, keyvalue::Error> {
        let count = kv.required("count", |text| number(text, 1..=65_536))?;
        let pin = kv.with("pin", |text| match text {
            "off" | "none" => Ok(Pin::Off),
            "on" | "auto" => Ok(Pin::Auto),
            _ => list(text).and_then(|list| match list.len() {
                len if len == count => Ok(Pin::To(list)),
                len => Err(format!("{len} CPUs for {count} vCPUs: name one for each, as in pin=[0,2-3]")),
            }),
        })?;
        Ok(Cpus { count, pin })
    };
    read().map_err(|e| e.to_string())
}

impl Cpus {
    /// The CPU of each vCPU, out of the `allowed` CPUs of this process. `None` if they are not
    /// pinned. `otherwise` applies if `pin=` was not given.
    pub fn pins(&self, otherwise: Pin, allowed: &[usize]) -> Result<Option<Vec<usize>>, String> {
        match self.pin.as_ref().unwrap_or(&otherwise) {
            Pin::Off => Ok(None),
            // One CPU is left for the thread that watches.
            Pin::Auto if self.count < allowed.len() => {
                Ok(Some(allowed[allowed.len() - self.count..].to_vec()))
            }
            Pin::Auto => Ok(None),
            Pin::To(list) => {
                among(list.clone(), allowed).map(Some).map_err(|why| format!("--cpus: pin={why}"))
            }
        }
    }
}

/// The CPUs of `list`, which are all `allowed`.
fn among(list: Vec<usize>, allowed: &[usize]) -> Result<Vec<usize>, String> {
    match list.iter().find(|cpu| !allowed.contains(cpu)) {
        None => Ok(list),
        Some(cpu) => {
            let allowed: Vec<_> = allowed.iter().map(usize::to_string).collect();
            Err(format!("{cpu}: not a CPU that this process may use; those are {}", allowed.join(",")))
        }
    }
}

/// The CPUs of `list`, which this process may all use.
pub(crate) fn usable(list: Vec<usize>) -> Result<Vec<usize>, String> {
    among(list, &allowed_cpus().map_err(|error| error.to_string())?)
}

/// CPUs of this host, at which vCPUs take turns.
#[derive(Clone, Debug)]
pub(crate) struct CpuList(pub Vec<usize>);

/// Parses [`CpuList`].
pub(crate) fn cpu_list(text: &str) -> Result<CpuList, String> {
    keyvalue::list(text).and_then(usable).map(CpuList)
}

/// Parses a CPU that this process may use.
pub fn cpu(text: &str) -> Result<usize, String> {
    usable(vec![keyvalue::number(text, 0..=65_535)?]).map(|cpus| cpus[0])
}

/// A workload with its parameters.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    /// The name.
    pub name: &'static str,
    /// The parameters. Passes and duration have options of their own.
    pub write: WriteConfig,
    /// The page size of the guest's own tables.
    pub page: GuestPage,
    /// Memory is filled with random numbers before the guest starts.
    pub fill: bool,
}

/// The keys of the `write` workload.
pub(crate) const WRITE_KEYS: &[&str] = &[
    "name", "order", "hot", "share", "write", "rate", "warm", "seed", "region", "stride", "page", "latency",
    "fill", "journal",
];

/// The hot set with the percentage in the value of `key`, if given.
pub(crate) fn hot_of(kv: &KeyValues, key: &str) -> Result<Option<Hot>, keyvalue::Error> {
    let percent = |text: &str| number(text.strip_suffix('%').unwrap_or(text), 0.0..=100.0);
    let part = kv.with(key, |text| match percent(text)? {
        part if part > 0.0 && part < 100.0 => Ok(part),
        _ => Err("above 0 and below 100 percent of the pages".to_owned()),
    })?;
    let share = kv.with("share", percent)?;
    match (part, share) {
        (Some(percent), share) => Ok(Some(Hot { percent, share: share.unwrap_or(90.0) })),
        (None, None) => Ok(None),
        (None, Some(_)) => Err(keyvalue::Error::Missing(key.to_owned())),
    }
}

/// `--workload NAME[,key=value…]`.
pub fn workload(text: &str) -> Result<Workload, String> {
    let names = vellum_guests::NAMES.map(|(name, _)| (name, name));
    let typed = text.split(',').next().unwrap_or("");
    let name = one_of("workload", typed.strip_prefix("name=").unwrap_or(typed), &names)?;
    let kv = KeyValues::parse(text, Some("name"), WRITE_KEYS).map_err(|e| e.to_string())?;
    let percent = |text: &str| number(text.strip_suffix('%').unwrap_or(text), 0.0..=100.0);
    let read = || -> Result<Workload, keyvalue::Error> {
        let pages = [("2m", GuestPage::Large), ("4k", GuestPage::Small)];
        let page = kv.with("page", |text| one_of("page size", text, &pages))?.unwrap_or(GuestPage::Large);
        let mut config = WriteConfig::default();
        if let Some(order) = kv.with("order", |text| one_of("order", text, &Order::NAMES))? {
            config.order = order;
        }
        config.hot = hot_of(&kv, "hot")?;
        config.write_percent = kv.with("write", percent)?.unwrap_or(100.0);
        config.rate = kv.with("rate", |text| number(text, 1..=1_000_000_000))?;
        config.seed = kv.with("seed", |text| number(text, 0..=u64::MAX))?.unwrap_or(config.seed);
        config.shared = kv
            .with("region", |text| one_of("region", text, &[("each", false), ("shared", true)]))?
            .unwrap_or(false);
        config.stride = kv
            .with("stride", |text| match size(text, 1)? {
                stride if stride > 0 && stride.is_multiple_of(4096) && stride <= 1 << 30 => Ok(stride),
                _ => Err("a multiple of 4096 up to 1g".to_owned()),
            })?
            .unwrap_or(config.stride);
        config.latency = kv.switch("latency")?.unwrap_or(true);
        config.warm = kv.switch("warm")?.unwrap_or(false);
        config.journal = kv.with("journal", |text| match keyvalue::duration(text)? {
            slice if slice >= Duration::from_millis(1) => Ok(slice),
            _ => Err("1ms or more".to_owned()),
        })?;
        let fill = kv.switch("fill")?.unwrap_or(false);
        Ok(Workload { name, write: config, page, fill })
    };
    read().map_err(|e| e.to_string())
}
