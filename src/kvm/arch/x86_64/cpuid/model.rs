//! CPU models: the part of a host's CPU that a guest sees, so that it can move to another CPU.
//!
//! A model is a list of features. A guest with a model sees exactly these: no unnamed features, and
//! no leaves that describe only such. Models do not cover what every x86-64 processor has, and what
//! KVM and a local APIC add. Vendor, family and cache sizes come from the host where the guest was
//! started, and move with it.
//!
//! The levels are those of the x86-64 psABI ("Micro-Architecture Levels"). Compilers and
//! distributions use the same names.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use kvm_bindings::kvm_cpuid_entry2;
use serde::{Deserialize, Serialize};

use super::features::{FEATURES, Feature, KVM_FEATURES, Register, bits};
use super::{Error, HYPERVISOR, TSC_DEADLINE};
use vellum_sys::open;

/// The CPU shown to a guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Model {
    /// Everything that this host's KVM offers.
    #[default]
    Host,
    /// A level of the psABI.
    Level(Level),
    /// The features in a file, with the file's name.
    Listed(String, Arc<Listed>),
}

/// A level of the x86-64 psABI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Every x86-64 processor.
    Baseline,
    /// About 2009: Nehalem.
    V2,
    /// About 2013: Haswell and Excavator.
    V3,
    /// About 2017: Skylake-SP and Zen 4.
    V4,
}

impl Level {
    /// Their names, lowest first.
    pub const NAMES: [(&str, Self); 4] = [
        ("x86-64", Self::Baseline),
        ("x86-64-v2", Self::V2),
        ("x86-64-v3", Self::V3),
        ("x86-64-v4", Self::V4),
    ];

    /// The features that this level adds to the one below.
    fn adds(self) -> &'static [&'static str] {
        match self {
            Self::Baseline => &["fpu", "cx8", "cmov", "mmx", "fxsr", "sse", "sse2", "syscall"],
            Self::V2 => &["cx16", "lahf-lm", "popcnt", "pni", "sse4-1", "sse4-2", "ssse3"],
            // The psABI names OSXSAVE. That is set by an OS that uses XSAVE.
            Self::V3 => &["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"],
            Self::V4 => &["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"],
        }
    }

    /// All features of the level.
    pub fn features(self) -> impl Iterator<Item = &'static str> {
        let below = Self::NAMES.into_iter().map(|(_, level)| level).filter(move |level| *level <= self);
        below.flat_map(Self::adds).copied()
    }

    fn name(self) -> &'static str {
        Self::NAMES.into_iter().find(|(_, level)| *level == self).map_or("", |(name, _)| name)
    }

    /// The highest level without any of these features.
    pub fn without<'a>(features: impl Iterator<Item = &'a str> + Clone) -> Option<&'static str> {
        let has = |level: Self| features.clone().any(|lacks| level.features().any(|name| name == lacks));
        Self::NAMES.into_iter().rev().find(|(_, level)| !has(*level)).map(|(name, _)| name)
    }

    /// The highest level of a CPU with these entries.
    pub fn of(entries: &[kvm_cpuid_entry2]) -> Option<&'static str> {
        Self::NAMES
            .into_iter()
            .rev()
            .find(|(_, level)| Model::Level(*level).lacking(entries).is_empty())
            .map(|(name, _)| name)
    }
}

/// A model file, as written by `vellum doctor`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Listed {
    format: String,
    version: u32,
    /// Feature names. If a host has only some of a feature's bits: `NAME:BITS`, in hexadecimal.
    features: Vec<String>,
}

const FORMAT: &str = "vellum-cpu";
const VERSION: u32 = 1;
/// The maximum size of a file in bytes. All names take some 2 KiB.
const MAX_FILE: u64 = 64 << 10;

impl Listed {
    /// The features of a CPU with these entries.
    pub fn of(entries: &[kvm_cpuid_entry2]) -> Self {
        Self::with(FEATURES.iter().map(|feature| (feature, bits(entries, feature))))
    }

    fn with(has: impl Iterator<Item = (&'static Feature, u32)>) -> Self {
        let word = |(feature, bits): (&'static Feature, u32)| match bits {
            0 => None,
            all if all == feature.bits => Some(feature.name.to_owned()),
            some => Some(format!("{}:{some:#x}", feature.name)),
        };
        Self { format: FORMAT.into(), version: VERSION, features: has.filter_map(word).collect() }
    }

    /// The features that all of these have.
    pub fn common(all: &[Self]) -> Self {
        let all: Vec<_> = all.iter().map(Self::bits).collect();
        let common = |feature: &'static Feature| {
            let of = all.iter().map(|one| one.get(feature.name).copied().unwrap_or(0));
            (feature, of.reduce(|a, b| a & b).unwrap_or(0))
        };
        Self::with(FEATURES.iter().map(common))
    }

    /// Reads a model file.
    ///
    /// # Errors
    /// A message that says what is wrong with the file, and what would work.
    pub fn read(path: &Path) -> Result<Self, String> {
        let wrong = |what: &dyn fmt::Display| format!("{}: {what}", path.display());
        let text = open::read_text(path, MAX_FILE).map_err(|error| {
            wrong(&format_args!(
                "{error}; use host, x86-64-v2, x86-64-v3, x86-64-v4, or a file with a CPU model"
            ))
        })?;
        Self::parse(&text).map_err(|error| wrong(&error))
    }

    /// Parses a model file.
    ///
    /// # Errors
    /// As [`Listed::read`].
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.len() as u64 > MAX_FILE {
            return Err(format!("a CPU model has at most {MAX_FILE} bytes"));
        }
        let listed: Self = serde_json::from_str(text).map_err(|error| format!("not a CPU model: {error}"))?;
        if listed.format != FORMAT || listed.version != VERSION {
            let Self { format, version, .. } = listed;
            return Err(format!(
                "it is {format:?} of version {version}; this program reads {FORMAT:?} of version {VERSION}"
            ));
        }
        listed.features.iter().try_for_each(|word| read_word(word).map(drop))?;
        Ok(listed)
    }

    /// The bits of each listed feature.
    fn bits(&self) -> BTreeMap<&'static str, u32> {
        let mut all = BTreeMap::new();
        for (feature, bits) in self.features.iter().filter_map(|word| read_word(word).ok()) {
            *all.entry(feature.name).or_insert(0) |= bits;
        }
        all
    }
}

/// Parses `NAME` or `NAME:BITS`.
fn read_word(word: &str) -> Result<(&'static Feature, u32), String> {
    let (name, some) = word.split_once(":0x").map_or((word, None), |(name, bits)| (name, Some(bits)));
    let feature = FEATURES.iter().find(|feature| feature.name == name);
    let feature = feature.ok_or_else(|| format!("{word:?}: there is no such feature"))?;
    let bits = some.map_or(Ok(feature.bits), |bits| u32::from_str_radix(bits, 16));
    match bits {
        Ok(bits) if bits != 0 && bits & !feature.bits == 0 => Ok((feature, bits)),
        _ => Err(format!("{word:?}: {name} has the bits {:#x}", feature.bits)),
    }
}

impl std::str::FromStr for Model {
    type Err = String;

    /// `host`, a level, or the path of a model file.
    fn from_str(text: &str) -> Result<Self, String> {
        if text == "host" {
            return Ok(Self::Host);
        }
        match Level::NAMES.into_iter().find(|(name, _)| *name == text) {
            Some((_, level)) => Ok(Self::Level(level)),
            None => Listed::read(Path::new(text)).map(|listed| Self::Listed(text.into(), Arc::new(listed))),
        }
    }
}

impl fmt::Display for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Level(level) => f.write_str(level.name()),
            Self::Listed(name, _) => f.write_str(name),
        }
    }
}

/// Leaf 1 bits that models do not cover. ECX: x2APIC, TSC deadline, OSXSAVE (which KVM derives from
/// CR4) and hypervisor.
const OF_ONE_ECX: u32 = 1 << 21 | TSC_DEADLINE | 1 << 27 | HYPERVISOR;
/// EDX: VME, DE, PSE, TSC, MSR, PAE, MCE, APIC, SEP, MTRR, PGE, MCA, PAT, PSE36, CLFLUSH and HTT,
/// which is topology.
const OF_ONE_EDX: u32 =
    0b1_1110 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 9 | 1 << 11 | 0b11_1111 << 12 & !(1 << 15) | 1 << 19 | 1 << 28;
/// Leaf 0x8000_0001, EDX: SYSCALL, NX and long mode.
const OF_EXTENDED_EDX: u32 = 1 << 11 | 1 << 20 | 1 << 29;
/// Bits of leaf 1 that AMD repeats there (APM vol. 3, E.4.2).
const REPEATED: u32 = 0x0183_f3ff;
/// Leaf 6, EAX: the local APIC's timer does not stop.
const ARAT: u32 = 1 << 2;

/// The leaves that a model keeps, masked. All others have only features outside any model.
const STAY: &[u32] = &[
    0,
    1,
    2,
    4,
    6,
    7,
    0xb,
    0xd,
    0x15,
    0x16,
    0x1f,
    KVM_FEATURES - 1,
    KVM_FEATURES,
    0x8000_0000,
    0x8000_0001,
    0x8000_0002,
    0x8000_0003,
    0x8000_0004,
    0x8000_0005,
    0x8000_0006,
    0x8000_0007,
    0x8000_0008,
    0x8000_001d,
    0x8000_001e,
];

impl Model {
    /// The bits of each feature in the model, by name; `None` for all.
    fn listed(&self) -> Option<BTreeMap<&'static str, u32>> {
        let of = |name: &'static str| {
            let feature = FEATURES.iter().find(|feature| feature.name == name)?;
            Some((feature.name, feature.bits))
        };
        match self {
            Self::Host => None,
            Self::Level(level) => Some(level.features().filter_map(of).collect()),
            Self::Listed(_, listed) => Some(listed.bits()),
        }
    }

    /// The names of the model's features that a CPU with these entries lacks.
    pub fn lacking(&self, entries: &[kvm_cpuid_entry2]) -> Vec<&'static str> {
        let listed = self.listed().unwrap_or_default();
        let lacks = |feature: &&Feature| {
            listed.get(feature.name).is_some_and(|want| want & !bits(entries, feature) != 0)
        };
        FEATURES.iter().filter(lacks).map(|feature| feature.name).collect()
    }

    /// Removes the features outside the model from `entries`.
    ///
    /// # Errors
    /// `entries` lack features of the model.
    pub fn mask(&self, entries: &mut Vec<kvm_cpuid_entry2>) -> Result<(), Error> {
        let Some(listed) = self.listed() else { return Ok(()) };
        let lacking = self.lacking(entries);
        if !lacking.is_empty() {
            let instead =
                Level::of(entries).map_or(String::new(), |level| format!("; {level} would work here"));
            return Err(Error::Lacking(self.to_string(), lacking.join(" "), instead));
        }
        let of = |leaf, subleaf, register| -> u32 {
            let here = FEATURES.iter().filter(|feature| {
                (feature.leaf, feature.subleaf, feature.register) == (leaf, subleaf, register)
            });
            here.filter_map(|feature| listed.get(feature.name)).fold(0, |all, bits| all | bits)
        };
        entries.retain(|entry| STAY.contains(&entry.function));
        // Features in further sub-leaves of leaf 7 have no names.
        entries.retain(|entry| entry.function != 7 || entry.index == 0);
        let components = components(&listed);
        entries.retain(|entry| {
            entry.function != 0xd || entry.index < 2 || components >> entry.index.min(63) & 1 == 1
        });
        let area = area(entries);
        for entry in entries {
            let all = |register| of(entry.function, entry.index, register);
            let [eax, ebx, ecx, edx] = [Register::Eax, Register::Ebx, Register::Ecx, Register::Edx].map(all);
            match (entry.function, entry.index) {
                (1, _) => {
                    (entry.ecx, entry.edx) = (entry.ecx & (ecx | OF_ONE_ECX), entry.edx & (edx | OF_ONE_EDX))
                }
                (6, _) => (entry.eax, entry.ebx, entry.ecx, entry.edx) = (entry.eax & (eax | ARAT), 0, 0, 0),
                (7, _) => {
                    (entry.eax, entry.ebx, entry.ecx, entry.edx) =
                        (0, entry.ebx & ebx, entry.ecx & ecx, entry.edx & edx);
                }
                (0xd, 0) => {
                    let there = u32::from(components != 0);
                    (entry.eax, entry.edx) =
                        (entry.eax & components as u32, entry.edx & (components >> 32) as u32);
                    (entry.ebx, entry.ecx) = (area * there, area * there);
                }
                (0xd, 1) => (entry.eax, entry.ebx, entry.ecx, entry.edx) = (entry.eax & eax, 0, 0, 0),
                (0x8000_0001, _) => {
                    let repeated = REPEATED & (of(1, 0, Register::Edx) | OF_ONE_EDX);
                    (entry.ecx, entry.edx) =
                        (entry.ecx & ecx, entry.edx & (edx | OF_EXTENDED_EDX | repeated));
                }
                (0x8000_0007, _) => (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, entry.edx & edx),
                (0x8000_0008, _) => (entry.ebx, entry.edx) = (entry.ebx & ebx, 0),
                // Levels do not cover what KVM adds.
                (KVM_FEATURES, _) if matches!(self, Self::Listed(..)) => entry.eax &= eax,
                _ => {}
            }
        }
        Ok(())
    }
}

/// The components of a vCPU's extended state that these features use (Intel SDM vol. 1, 13.1).
fn components(listed: &BTreeMap<&'static str, u32>) -> u64 {
    let has = |name| listed.contains_key(name);
    if !has("xsave") {
        return 0;
    }
    let parts = [("avx", 1 << 2), ("avx512f", 0b111 << 5), ("pku", 1 << 9)];
    parts.into_iter().filter(|(name, _)| has(name)).fold(0b11, |all, (_, bits)| all | bits)
}

/// The size in bytes of the XSAVE area of these components in standard form, including the legacy
/// region and the header.
fn area(entries: &[kvm_cpuid_entry2]) -> u32 {
    let parts = entries.iter().filter(|entry| entry.function == 0xd && entry.index >= 2);
    parts.map(|part| part.eax.saturating_add(part.ebx)).fold(576, u32::max)
}

#[cfg(test)]
mod tests {
    use super::super::{Choice, Cpuid};
    use super::*;

    fn entry(function: u32, index: u32, [eax, ebx, ecx, edx]: [u32; 4]) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 { function, index, eax, ebx, ecx, edx, ..Default::default() }
    }

    /// A CPU with every feature but those.
    fn all_but(lacks: &[&str]) -> Vec<kvm_cpuid_entry2> {
        let mut entries = vec![
            entry(0, 0, [0x20, 0x6874_7541, 0, 0]),
            entry(1, 0, [0, 0, !0, !0]),
            entry(6, 0, [!0; 4]),
            entry(7, 0, [2, !0, !0, !0]),
            entry(7, 1, [!0; 4]),
            entry(0xd, 0, [0xe7 | 1 << 9, 2696, 2696, 0]),
            entry(0xd, 1, [0xf, 2696, !0, 0]),
            entry(0xd, 2, [256, 576, 0, 0]),
            entry(0xd, 5, [64, 1088, 0, 0]),
            entry(0xd, 6, [512, 1152, 0, 0]),
            entry(0xd, 7, [1024, 1664, 0, 0]),
            entry(0xd, 9, [8, 2688, 0, 0]),
            entry(0x14, 0, [!0; 4]),
            entry(KVM_FEATURES, 0, [!0, 0, 0, 0]),
            entry(0x8000_0001, 0, [0, 0, !0, !0]),
            entry(0x8000_0007, 0, [0, 0, 0, !0]),
            entry(0x8000_0008, 0, [0x3030, !0, 0, 0]),
            entry(0x8000_000a, 0, [!0; 4]),
        ];
        for feature in FEATURES.iter().filter(|feature| lacks.contains(&feature.name)) {
            let leaf = |entry: &&mut kvm_cpuid_entry2| {
                (entry.function, entry.index) == (feature.leaf, feature.subleaf)
            };
            let leaf = entries.iter_mut().find(leaf).unwrap();
            let register = match feature.register {
                Register::Eax => &mut leaf.eax,
                Register::Ebx => &mut leaf.ebx,
                Register::Ecx => &mut leaf.ecx,
                Register::Edx => &mut leaf.edx,
            };
            *register &= !feature.bits;
        }
        entries
    }

    fn names(entries: &[kvm_cpuid_entry2]) -> Vec<&'static str> {
        FEATURES.iter().filter(|feature| bits(entries, feature) != 0).map(|feature| feature.name).collect()
    }

    /// What a guest of this model sees on `host`.
    fn shown(
        model: Model,
        switched: &str,
        host: &[kvm_cpuid_entry2],
    ) -> Result<Vec<kvm_cpuid_entry2>, Error> {
        let choice = if switched.is_empty() { Choice::default() } else { switched.parse().unwrap() };
        Ok(Cpuid::new(host, &Choice { model, ..choice }, 1, true)?.for_vcpu(0)?.as_slice().to_vec())
    }

    #[test]
    fn every_feature_of_every_level_has_a_name_that_is_known() {
        for (name, level) in Level::NAMES {
            for feature in level.features() {
                assert!(FEATURES.iter().any(|known| known.name == feature), "{name}: {feature}");
            }
        }
        assert_eq!(Level::V4.features().count(), 8 + 7 + 9 + 5);
        for (at, feature) in FEATURES.iter().enumerate() {
            let same = |other: &Feature| {
                other.name == feature.name
                    || (other.leaf, other.subleaf, other.register)
                        == (feature.leaf, feature.subleaf, feature.register)
                        && other.bits & feature.bits != 0
            };
            assert!(!FEATURES[..at].iter().any(same), "{} is there twice", feature.name);
        }
    }

    /// Two hosts with different extra features: a guest sees the same on both, and nothing outside
    /// the model.
    #[test]
    fn a_level_shows_the_same_on_hosts_that_differ_above_it() {
        let hosts = [
            all_but(&["avx512f", "rdtscp", "smap"]),
            all_but(&["sha-ni", "xsaves", "pku", "clzero", "vaes"]),
        ];
        for (level, top, out) in [(Level::V2, "ssse3", "avx"), (Level::V3, "avx2", "avx512f")] {
            let [one, other] = hosts.each_ref().map(|host| shown(Model::Level(level), "", host).unwrap());
            assert_eq!(one, other, "{level:?}");
            let names = names(&one);
            assert!(names.contains(&top) && !names.contains(&out), "{names:?}");
            let only = names.iter().filter(|name| !level.features().any(|has| has == **name));
            // What an OS needs, and what KVM adds.
            let system = [
                "pvclock",
                "nop-io-delay",
                "async-pf",
                "steal-time",
                "pv-eoi",
                "pv-unhalt",
                "pv-tlb-flush",
                "pv-send-ipi",
                "poll-control",
                "pv-sched-yield",
                "x2apic",
                "tsc-deadline-timer",
                "hypervisor",
                "pse",
                "mce",
                "mtrr",
                "pge",
                "mca",
                "pat",
                "clflush",
                "arat",
                "nx",
                "lm",
            ];
            let rest: Vec<_> = only.filter(|name| !system.contains(name)).collect();
            assert!(rest.is_empty(), "{level:?}: {rest:?}");
            assert!(one.iter().all(|entry| ![0x14, 0x8000_000a].contains(&entry.function)));
        }
        let state = |level| {
            let table = shown(Model::Level(level), "", &all_but(&[])).unwrap();
            let zero = *table.iter().find(|entry| (entry.function, entry.index) == (0xd, 0)).unwrap();
            (
                zero.eax,
                zero.ecx,
                table.iter().filter(|entry| entry.function == 0xd && entry.index > 1).count(),
            )
        };
        assert_eq!([Level::V2, Level::V3, Level::V4].map(state), [(0, 0, 0), (7, 832, 1), (0xe7, 2688, 4)]);
    }

    #[test]
    fn what_a_host_lacks_is_named_with_the_level_that_would_work() {
        let host = all_but(&["avx512bw", "avx512vl"]);
        let error = shown(Model::Level(Level::V4), "", &host).unwrap_err().to_string();
        assert_eq!(
            error,
            "x86-64-v4: this host's KVM does not offer avx512bw avx512vl; x86-64-v3 would work here"
        );
        assert_eq!(Level::of(&host), Some("x86-64-v3"));
        assert_eq!(Level::of(&all_but(&["sse2"])), None);
        let without = |lacks: &[&'static str]| Level::without(lacks.iter().copied());
        assert_eq!(without(&["avx2", "avx512f"]), Some("x86-64-v2"));
        assert_eq!((without(&["smap"]), without(&["fpu"])), (Some("x86-64-v4"), None));
    }

    #[test]
    fn features_are_switched_beside_a_model() {
        let table = shown(Model::Level(Level::V2), "+rdtscp,-popcnt,+invtsc", &all_but(&[])).unwrap();
        let names = names(&table);
        assert!(
            ["rdtscp", "invtsc"].iter().all(|name| names.contains(name)) && !names.contains(&"popcnt"),
            "{names:?}"
        );
        assert!(shown(Model::Level(Level::V2), "+avx", &all_but(&["avx"])).is_err());
    }

    #[test]
    fn what_hosts_share_is_a_model_that_each_of_them_has() {
        let hosts = [all_but(&["avx512f", "pv-eoi"]), all_but(&["sha-ni", "pv-unhalt"])];
        let [one, other] = hosts.each_ref().map(|host| Listed::of(host));
        let common = Listed::common(&[one, other]);
        let text = serde_json::to_string(&common).unwrap();
        assert_eq!(Listed::parse(&text).unwrap(), common);
        let model = || Model::Listed("both".into(), Arc::new(common.clone()));
        let [one, other] = hosts.each_ref().map(|host| shown(model(), "", host).unwrap());
        assert_eq!(one, other);
        let names = names(&one);
        assert!(
            names.contains(&"avx2")
                && ["avx512f", "sha-ni", "pv-eoi", "pv-unhalt"].iter().all(|no| !names.contains(no))
        );
        assert!(
            shown(model(), "", &all_but(&["avx2"])).unwrap_err().to_string().contains("does not offer avx2")
        );
    }

    #[test]
    fn a_file_that_is_no_model_is_refused_in_words() {
        let with =
            |features: &str| format!(r#"{{"format":"vellum-cpu","version":1,"features":[{features}]}}"#);
        assert!(Listed::parse(&with(r#""avx","async-pf:0x10""#)).is_ok());
        for (text, says) in [
            ("nonsense".to_owned(), "not a CPU model"),
            (with(r#""avx9""#), "there is no such feature"),
            (with(r#""avx:0x1""#), "has the bits 0x10000000"),
            (with(r#""async-pf:0x0""#), "has the bits"),
            (with(r#""async-pf:0xzz""#), "has the bits"),
            (with("").replace(":1", ":2"), "of version 2"),
            (with("").replace("vellum", "other"), "\"other-cpu\""),
            (with("").replace("features", "feature"), "feature"),
            (" ".repeat(MAX_FILE as usize + 1), "bytes"),
        ] {
            let error = Listed::parse(&text).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }
}
