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

use bed::{Need, both, trial};
use guest::Image;
use libtest_mimic::{Arguments, Failed};

/// A guest with a kernel needs a KVM that runs one; shadow paging without hardware below it does not (kvm_pvm).
fn hardware() -> Need {
    let modules = ["kvm_intel", "kvm_amd"].map(|name| format!("/sys/module/{name}"));
    if modules.iter().any(|path| std::path::Path::new(path).exists()) {
        Ok(())
    } else {
        Err("needs a KVM that runs a stock kernel, kvm-intel or kvm-amd: cargo lab test linux".into())
    }
}

fn main() {
    let mut args = Arguments::from_args();
    // They weigh processes and count free pages.
    args.test_threads = Some(1);
    let need = || both(bed::kvm(), hardware());
    let (images, missing) = match Image::all() {
        Ok(images) => (images, Ok(())),
        Err(why) => (Vec::new(), Err(why)),
    };
    let mut trials = Vec::new();
    if images.is_empty() {
        trials.push(trial("linux_guests", both(need(), missing), || Ok(())));
    }
    let whole = std::env::var("VELLUM_LINUX").is_ok_and(|value| value == "all");
    let rest =
        || if whole { need() } else { Err("is left to the whole matrix: cargo lab test linux".into()) };
    for (at, image) in images.iter().enumerate() {
        for (irqchip, tap) in [("split", whole::Tap::Ours), ("kernel", whole::Tap::Others)] {
            let name = format!("linux_{}_with_every_device_{irqchip}_irqchip", image.version);
            let need = if at == 0 && irqchip == "split" { need() } else { rest() };
            let image = image.clone();
            trials.push(trial(&name, both(need, guest::taps()), move || {
                whole::every_device(&image, irqchip, tap)
            }));
        }
        trials.extend(vmlinux::trials(image, rest()));
    }
    if let Some(image) = images.first() {
        let mut one = |name: &str, need: Need, test: fn(&Image) -> Result<(), Failed>| {
            let image = image.clone();
            trials.push(trial(name, need, move || test(&image)));
        };
        one("a_panic_is_status_11_with_registers_and_last_exits", rest(), ends::panic);
        one("a_reset_is_status_10", rest(), ends::reset);
        one("a_triple_fault_is_status_12_with_registers_and_last_exits", rest(), ends::triple_fault);
        one("a_timeout_is_status_124", rest(), ends::timeout);
        one("ctrl_c_ends_it_and_gives_huge_pages_back", both(rest(), ends::pages()), ends::interrupt);
        one("ctl_stop_ends_it_with_status_0", rest(), ends::stop);
        one("kvmtools_command_line_boots_it", both(rest(), guest::taps()), typed::kvmtool);
        one("the_agent_works_on_the_serial_port_alone", rest(), typed::serial_agent);
        one("a_terminal_is_the_guests_but_for_ctrl_a_x", rest(), typed::terminal);
        one("serial_on_a_pty_and_into_a_file", rest(), typed::pty_and_file);
    }
    libtest_mimic::run(&args, trials).exit();
}
