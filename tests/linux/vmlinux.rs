//! The same kernels as ELF images, by both of their entries, and on memory whose huge mappings
//! KVM's counters prove.

use guest_agent::{Event, MemoryWork, Pattern, Request};
use support::hosts;
use support::{Failed, Need, Tests, ensure};

use crate::guest::{CLOCKSOURCE, Guest, Image};

/// The MiB that the guest writes, so that KVM maps them.
const MIB: u64 = 256;
/// 2 MiB pages: 1 GiB.
const PAGES: u64 = 512;

pub fn add(tests: &mut Tests, image: &Image, need: &Need) {
    let reserved = hosts::huge_pages(2 << 20, PAGES);
    for (protocol, backing, pages) in [("linux64", "thp", Ok(())), ("pvh", "hugetlb-2m", reserved)] {
        let name = format!("linux_{}_vmlinux_by_{protocol}_on_{backing}", image.version);
        let vmlinux = image.vmlinux();
        let need = need.clone().and(vmlinux.clone().map(drop)).and(pages);
        let image = image.clone();
        tests.add(name, need, move || boots(&image, &vmlinux?, protocol, backing));
    }
}

fn boots(image: &Image, vmlinux: &str, protocol: &str, backing: &str) -> Result<(), Failed> {
    let memory = format!("1g,backing={backing}");
    let flags = ["--protocol", protocol, "--cpus", "2", "--memory", &memory, "--loglevel", "debug"];
    let mut guest = Guest::start_elf(image, vmlinux, &flags)?;
    guest.ready()?;
    let facts = guest.ask_one(&Request::Facts)?;
    ensure(
        matches!(&facts, Event::Facts { cpus: 2, clocksource, .. } if clocksource == CLOCKSOURCE),
        || format!("{facts:?}"),
    )?;
    let work =
        MemoryWork { mib: MIB, rate_mib: 0, pattern: Pattern::Sequential, seconds: 1, seed: 0, until: None };
    let event = guest.ask_one(&Request::Memory(work))?;
    ensure(matches!(event, Event::Memory { wrong: 0, .. }), || format!("{event:?}"))?;
    let ended = guest.power_off()?.with(0)?;
    let count = |name: &str| {
        let prefix = format!("KVM's {name} ");
        ended.errors.lines().find_map(|line| line.split_once(&prefix)?.1.parse::<u64>().ok()).unwrap_or(0)
    };
    // At least half of the written memory is mapped by 2 MiB pages. With shadow paging the guest's
    // own small mappings cost some.
    let (large, small) = (count("pages_2m"), count("pages_4k"));
    eprintln!("{large} mappings of 2 MiB, {small} of 4 KiB");
    ensure(large >= MIB / 4, || format!("{large} mappings of 2 MiB, {small} of 4 KiB:\n{}", ended.errors))
}
