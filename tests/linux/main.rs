//! Stock Linux kernels as guests: boots, devices, ends, and what people type. They run wherever KVM runs them, on
//! emulated hosts as on metal; `cargo lab test linux` brings hosts and guests.
//!
//! Each guest boots once and is asked for as much as fits, for a boot is what costs. The guests are those below
//! `$VELLUM_GUESTS`. Without `$VELLUM_LINUX=all` only a slice runs: the oldest kernel with every device.

#[path = "../bed/mod.rs"]
mod bed;
mod ends;
mod guest;
mod segments;
mod typed;
mod vmlinux;
mod whole;

use std::process::ExitCode;

use guest::Image;
use harness::{Failed, Need, Trials};

/// A guest with a kernel needs a KVM that runs one; shadow paging without hardware below it does not (kvm_pvm).
fn hardware() -> Need {
    let modules = ["kvm_intel", "kvm_amd"].map(|name| format!("/sys/module/{name}"));
    if modules.iter().any(|path| std::path::Path::new(path).exists()) {
        Ok(())
    } else {
        Err("needs a KVM that runs a stock kernel, kvm-intel or kvm-amd: cargo lab test linux".into())
    }
}

fn main() -> ExitCode {
    let mut trials = Trials::from_args();
    // They weigh processes and count free pages.
    trials.one_at_a_time();
    let possible = bed::kvm().and(hardware());
    let images = Image::all().unwrap_or_else(|why| {
        trials.add("linux_guests", possible.clone().and(Err(why)), || Ok::<(), Failed>(()));
        Vec::new()
    });
    let whole = std::env::var("VELLUM_LINUX").is_ok_and(|value| value == "all");
    let left = || Err("is left to the whole matrix: cargo lab test linux".into());
    let rest = if whole { possible.clone() } else { possible.clone().and(left()) };
    for (at, image) in images.iter().enumerate() {
        for (irqchip, tap) in [("split", whole::Tap::Ours), ("kernel", whole::Tap::Others)] {
            let name = format!("linux_{}_with_every_device_{irqchip}_irqchip", image.version);
            let need = if at == 0 && irqchip == "split" { &possible } else { &rest };
            let image = image.clone();
            trials.add(name, need.clone().and(guest::taps()), move || {
                whole::every_device(&image, irqchip, tap)
            });
        }
        vmlinux::add(&mut trials, image, &rest);
    }
    if let Some(image) = images.first() {
        let mut one = |name: &str, need: Need, test: fn(&Image) -> Result<(), Failed>| {
            let image = image.clone();
            trials.add(name, rest.clone().and(need), move || test(&image));
        };
        one("a_panic_is_status_11_with_registers_and_last_exits", Ok(()), ends::panic);
        one("a_reset_is_status_10", Ok(()), ends::reset);
        one("a_triple_fault_is_status_12_with_registers_and_last_exits", Ok(()), ends::triple_fault);
        one("a_timeout_is_status_124", Ok(()), ends::timeout);
        one("ctrl_c_ends_it_and_gives_huge_pages_back", ends::pages(), ends::interrupt);
        one("ctl_stop_ends_it_with_status_0", Ok(()), ends::stop);
        one("kvmtools_command_line_boots_it", guest::taps(), typed::kvmtool);
        one("the_agent_works_on_the_serial_port_alone", Ok(()), typed::serial_agent);
        one("a_terminal_is_the_guests_but_for_ctrl_a_x", Ok(()), typed::terminal);
        one("serial_on_a_pty_and_into_a_file", Ok(()), typed::pty_and_file);
    }
    trials.run()
}
