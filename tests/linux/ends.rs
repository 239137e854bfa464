//! How a Linux guest can end, and what vellum reports.

use std::fs;

use guest_agent::{Argument, Event, Request};
use support::hosts;
use support::{Failed, Need, ensure, test};
use vellum_control::agent;

use crate::guest::{Ended, Guest, Image};
use crate::whole_matrix;

/// 2 MiB pages of the guest whose huge pages are counted.
const PAGES: u64 = 256;

fn boot(image: &Image, cmdline: &str, flags: &[&str]) -> Result<Guest, Failed> {
    let mut guest = Guest::start(image, cmdline, &[&["--cpus", "2"], flags].concat())?;
    guest.ready()?;
    Ok(guest)
}

/// Runs `line` in the guest, which ends by it.
fn last_words(guest: &mut Guest, line: &str) -> Result<Ended, Failed> {
    let command = ["sh", "-c", line].map(Argument::from).to_vec();
    for event in guest.ask(&Request::Exec { command })? {
        match event {
            Ok(Event::Output { .. }) => {}
            Err(agent::Error::Closed | agent::Error::Socket { .. }) => break,
            other => return Err(format!("`{line}` was answered by {other:?}").into()),
        }
    }
    guest.wait()
}

fn says(ended: &Ended, words: &[&str]) -> Result<(), Failed> {
    for word in words {
        ensure(ended.errors.contains(word), || format!("{word:?} is missing in: {}", ended.errors))?;
    }
    Ok(())
}

#[test(whole_matrix())]
fn a_panic_is_status_11_with_registers_and_last_exits() -> Result<(), Failed> {
    let image = &Image::oldest()?;
    let mut guest = boot(image, "", &[])?;
    let ended = last_words(&mut guest, "echo c > /proc/sysrq-trigger")?.with(11)?;
    // The last exit is the write to the panic device.
    says(&ended, &["the guest has panicked", "rip ", "cr3 ", "io_out@0x505"])
}

#[test(whole_matrix())]
fn a_reset_is_status_10() -> Result<(), Failed> {
    let image = &Image::oldest()?;
    let mut guest = boot(image, "", &[])?;
    let ended = last_words(&mut guest, "reboot -f")?.with(10)?;
    ensure(ended.errors.is_empty(), || format!("a reset is no failure: {}", ended.errors))
}

#[test(whole_matrix())]
fn a_triple_fault_is_status_12_with_registers_and_last_exits() -> Result<(), Failed> {
    let image = &Image::oldest()?;
    let mut guest = boot(image, "reboot=t", &[])?;
    let ended = last_words(&mut guest, "reboot -f")?.with(12)?;
    says(&ended, &["triple fault on vCPU", "rip ", "cr3 ", "shutdown"])
}

#[test(whole_matrix())]
fn a_timeout_is_status_124() -> Result<(), Failed> {
    let image = &Image::oldest()?;
    // Readiness is not awaited: on a busy machine a guest may not be ready before the time limit
    // ends it.
    let mut guest = Guest::start(image, "", &["--cpus", "2", "--timeout", "20s"])?;
    guest.wait()?.with(124).map(drop)
}

#[test(whole_matrix())]
fn ctl_stop_ends_it_with_status_0() -> Result<(), Failed> {
    let image = &Image::oldest()?;
    let mut guest = boot(image, "", &[])?;
    guest.ctl(&["stop"])?;
    guest.wait()?.with(0)?;
    // Its name is free again, and no machine answers to it.
    let output = guest.vellum(&["ctl", guest.name(), "status"])?;
    ensure(output.status.code() == Some(2), || format!("{output:?}"))
}

fn pages() -> Need {
    hosts::huge_pages(2 << 20, PAGES)
}

fn free_pages() -> Result<u64, Failed> {
    Ok(fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")?.trim().parse()?)
}

#[test(whole_matrix(), pages())]
fn ctrl_c_ends_it_and_gives_huge_pages_back() -> Result<(), Failed> {
    let image = &Image::oldest()?;
    let before = free_pages()?;
    let mut guest = boot(image, "", &["--memory", "512m,backing=hugetlb-2m,prealloc"])?;
    let meanwhile = free_pages()?;
    ensure(before - meanwhile == PAGES, || format!("free pages: {before}, then {meanwhile}"))?;
    guest.signal("INT")?;
    guest.wait()?.with(128 + 2)?;
    let after = free_pages()?;
    ensure(before == after, || format!("free pages: {before}, {meanwhile}, then {after}"))
}
