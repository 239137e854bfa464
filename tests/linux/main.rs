//! Stock Linux kernels as guests: boots, devices, ends, and interactive use. They run on every KVM,
//! on emulated hosts as on real ones. `cargo lab test linux` provides hosts and guests.
//!
//! Each guest boots once and is used for many checks, because booting takes most of the time. The
//! guests are those below `$VELLUM_GUESTS`. Without `$VELLUM_LINUX=all` only a part runs: the
//! oldest kernel with every device. With `root` (or `root,all`) only those tests run whose guest
//! has the root of a host that is not an initramfs.

mod between;
mod bus;
mod cloud;
mod debugged;
mod ends;
mod forks;
mod guest;
mod inside;
mod kexec;
mod launch;
mod moves;
mod pages;
mod passt;
mod root;
mod saves;
mod segments;
mod typed;
mod vmlinux;
mod whole;
mod wires;
mod work;

use std::process::ExitCode;

use support::book::{PAGES, Place};
use support::hosts;
use support::{Failed, Need, Tests};

use guest::{Image, Source, irqchips};

support::vellum!();

/// Requires hardware virtualization below KVM. kvm_pvm's shadow paging without it does not run
/// these kernels. On Arm there is always hardware.
fn hardware() -> Need {
    if cfg!(target_arch = "aarch64") {
        return Ok(());
    }
    let modules = ["kvm_intel", "kvm_amd"].map(|name| format!("/sys/module/{name}"));
    if modules.iter().any(|path| std::path::Path::new(path).exists()) {
        Ok(())
    } else {
        Err("needs a KVM that runs a stock kernel, kvm-intel or kvm-amd: cargo lab test linux".into())
    }
}

/// Requires KVM and a guest for it.
fn guests() -> Need {
    if has_a_root() {
        return Err("is left to hosts without a disk".into());
    }
    hosts::kvm().and_then(|()| hardware()).and_then(|()| Image::all().map(drop))
}

/// Requires a guest, and a run of all tests.
fn whole_matrix() -> Need {
    guests().and_then(|()| more_than_a_slice())
}

fn more_than_a_slice() -> Need {
    match is_asked_for("all") {
        true => Ok(()),
        false => Err("is left to the whole matrix: cargo lab test linux".into()),
    }
}

/// Whether `$VELLUM_LINUX`, a list of words with commas, contains `word`.
fn is_asked_for(word: &str) -> bool {
    std::env::var("VELLUM_LINUX").is_ok_and(|value| value.split(',').any(|asked| asked == word))
}

/// Requires an interrupt controller that takes MSIs from a PCI bus.
fn messages(irqchip: &str) -> Need {
    match irqchip {
        "gicv2" => Err("needs a host with a GICv3, which takes messages".into()),
        _ => Ok(()),
    }
}

/// Whether only the tests for a host with its root on a disk should run.
fn has_a_root() -> bool {
    is_asked_for("root")
}

/// Requires a host whose root is not an initramfs, so that a guest can use it.
fn on_a_root() -> Need {
    hosts::kvm().and_then(|()| hardware()).and_then(|()| Image::all().map(drop))?;
    match has_a_root() {
        true => Ok(()),
        false => {
            Err("needs a host whose root is on a disk: cargo lab test linux, or VELLUM_LINUX=root,all".into())
        }
    }
}

/// Requires such a host, and a run of all tests.
fn all_on_a_root() -> Need {
    on_a_root().and_then(|()| more_than_a_slice())
}

fn main() -> ExitCode {
    if let Some(ended) = launch::in_guest() {
        return ended;
    }
    let mut tests = Tests::from_args();
    // The tests measure processes and count free pages.
    tests.one_at_a_time();
    for page in PAGES.iter().filter(|page| page.place == Place::Linux) {
        tests.add(format!("the_page_{}", page.test()), pages::asked_for(), || pages::is_as_it_says(page));
    }
    let images = Image::all().unwrap_or_default();
    if images.is_empty() {
        tests.add("linux_guests", guests(), || Ok::<(), Failed>(()));
    }
    let need = hosts::kvm().and_then(|()| between::hosts());
    tests.add("a_guest_of_the_whole_cpu_stays_between_hosts", need, between::stays_where_its_cpu_is);
    for (at, image) in images.iter().enumerate() {
        for (&irqchip, tap) in irqchips().iter().zip([whole::Tap::Ours, whole::Tap::Others]) {
            let name = format!("linux_{}_with_every_device_{irqchip}_irqchip", image.version);
            let need = if at == 0 && irqchip == irqchips()[0] { guests() } else { whole_matrix() };
            let image = image.clone();
            tests.add(name, need.and(guest::taps()), move || whole::every_device(&image, irqchip, tap));
        }
        for &irqchip in irqchips() {
            let name = format!("linux_{}_moves_under_load_{irqchip}_irqchip", image.version);
            // An ordinary run migrates one guest, too.
            let need = if at == 0 && irqchip == irqchips()[0] { guests() } else { whole_matrix() };
            let image = image.clone();
            let need = need.and_then(|()| guest::taps()).and_then(|()| wires::bridges());
            tests.add(name, need, move || moves::under_load(&image, irqchip, moves::THERE_AND_BACK));
        }
        for &irqchip in irqchips() {
            let name = format!("linux_{}_goes_on_in_each_other_way_{irqchip}_irqchip", image.version);
            let need = whole_matrix().and_then(|()| guest::taps()).and_then(|()| wires::bridges());
            let image = image.clone();
            tests.add(name, need, move || moves::under_load(&image, irqchip, moves::IN_OTHER_WAYS));
        }
        for &irqchip in irqchips() {
            let name = format!("linux_{}_comes_out_of_a_snapshot_{irqchip}_irqchip", image.version);
            let need = whole_matrix().and_then(|()| guest::taps()).and_then(|()| wires::bridges());
            let image = image.clone();
            tests.add(name, need, move || saves::and_restored(&image, irqchip));
        }
        for &irqchip in irqchips() {
            let name = format!("linux_{}_is_forked_{irqchip}_irqchip", image.version);
            let image = image.clone();
            tests.add(name, whole_matrix(), move || forks::while_it_works(&image, irqchip));
        }
        let name = format!("linux_{}_is_forked_for_commands", image.version);
        let need = if at == 0 { guests() } else { whole_matrix() };
        let guest = image.clone();
        tests.add(name, need, move || forks::for_commands(&guest));
        for &irqchip in irqchips() {
            let name = format!("linux_{}_works_moves_and_comes_back_on_pci_{irqchip}_irqchip", image.version);
            let need = whole_matrix().and_then(|()| guest::taps()).and_then(|()| wires::bridges());
            let need = need.and_then(|()| messages(irqchip));
            let image = image.clone();
            tests.add(name, need, move || bus::works_moves_and_comes_back(&image, irqchip));
        }
        let name = format!("linux_{}_is_dumped", image.version);
        let guest = image.clone();
        tests.add(name, inside::makedumpfile(), move || inside::is_dumped(&guest));
        let name = format!("linux_{}_is_dumped_before_its_modules", image.version);
        let guest = image.clone();
        tests.add(name, inside::makedumpfile(), move || inside::is_dumped_before_its_modules(&guest));
        let name = format!("linux_{}_has_a_network_by_passt_of_the_hosts_root", image.version);
        let guest = image.clone();
        tests.add(name, passt::passt(), move || passt::is_its_network(&guest));
        let name = format!("linux_{}_has_the_hosts_root", image.version);
        let guest = image.clone();
        tests.add(name, whole_matrix(), move || root::is_the_guests(&guest));
        if at == 0 {
            let guest = image.clone();
            tests.add("a_shell_has_the_hosts_root", all_on_a_root(), move || {
                root::a_shell_has_the_terminal(&guest)
            });
        }
        let name = format!("linux_{}_moves_between_hosts", image.version);
        let guest = image.clone();
        let need = guests().and_then(|()| between::hosts());
        tests.add(name, need, move || between::there_and_back(&guest, at as u8));
        vmlinux::add(&mut tests, image, &whole_matrix());
    }
    for (at, kernel) in Source::all().into_iter().enumerate() {
        let name = format!("linux_{}_runs_on_the_hosts_root", kernel.name);
        let need = if at == 0 { on_a_root() } else { all_on_a_root() };
        tests.add(name, need, move || root::is_as_it_was(&kernel));
    }
    for kernel in Source::trees() {
        let name = format!("linux_{}_is_dumped_on_the_hosts_root", kernel.name);
        tests.add(name, all_on_a_root().and_then(|()| inside::has_makedumpfile()), move || {
            inside::of_a_tree_is_dumped(&kernel)
        });
    }
    for kernel in Source::with_modules() {
        let name = format!("linux_{}_modprobe_finds_on_the_hosts_root", kernel.name);
        tests.add(name, all_on_a_root(), move || root::modprobe_finds(&kernel));
    }
    cloud::add(&mut tests);
    tests.run()
}
