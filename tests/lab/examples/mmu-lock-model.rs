//! A model of what a lock costs a guest with many vCPUs, from its cost with one: faults that queue
//! for it.
//!
//!     cargo run -p lab --example mmu-lock-model -- kernel-patches/5.10/tdp-mmu-parallel-faults/model.toml
//!
//! Each vCPU is a customer of a closed network of queues. It thinks (runs in the guest, exits, has
//! its page found) and then passes stations that serve one vCPU at a time: the mutually exclusive
//! sections under a lock, and the cache line of a shared lock. Mean value analysis gives the time
//! of a fault with N vCPUs. It is exact for service times without memory and close enough for
//! others, because the limits agree: N = 1, and one saturated station. `MODEL.md` beside the data
//! says what the model leaves out.

use std::path::PathBuf;
use std::process::ExitCode;

use serde::Deserialize;

/// The data of the model.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Data {
    /// The numbers of vCPUs to compute.
    vcpus: Vec<u32>,
    /// Assumed costs of moving a cache line from one CPU to another, in instructions. Not measured.
    line_transfer: Vec<f64>,
    workload: Vec<Workload>,
}

/// A benchmark, on one kernel.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Workload {
    name: String,
    kernel: String,
    /// All instructions from one fault of a vCPU to its next.
    instructions: f64,
    /// Those of them under mmu_lock that exclude all other vCPUs.
    exclusive: f64,
    /// Writes to mmu_lock's cache line, to take and to release it.
    line_writes: f64,
    /// Instructions under each other lock that all vCPUs share and that admits one at a time.
    others: Vec<f64>,
    /// Writes to mmap_lock's cache line by readers.
    mmap_line_writes: f64,
}

impl Workload {
    /// The stations at which vCPUs queue, in instructions of service: mmu_lock's first, then the
    /// host's own.
    fn stations(&self, line_transfer: f64) -> Vec<f64> {
        let lines = [self.line_writes, self.mmap_line_writes].map(|writes| writes * line_transfer);
        [self.exclusive, lines[0], lines[1]].into_iter().chain(self.others.iter().copied()).collect()
    }
}

/// The number of mmu_lock's stations in `Workload::stations`.
const OF_MMU_LOCK: usize = 2;

/// The time of a fault with `vcpus` vCPUs, in instructions, and its part at each station.
fn cycle(think: f64, stations: &[f64], vcpus: u32) -> (f64, Vec<f64>) {
    let mut queues = vec![0.0; stations.len()];
    let mut result = (think, queues.clone());
    for n in 1..=vcpus {
        // An arriving vCPU finds the queue that the others form without it.
        let stays: Vec<f64> =
            stations.iter().zip(&queues).map(|(service, queue)| service * (1.0 + queue)).collect();
        let time = think + stays.iter().sum::<f64>();
        for (queue, stay) in queues.iter_mut().zip(&stays) {
            *queue = f64::from(n) / time * stay;
        }
        result = (time, stays);
    }
    result
}

fn print(data: &Data) {
    for line_transfer in &data.line_transfer {
        println!("\nMoving a cache line takes the time of {line_transfer} instructions.");
        println!(
            "{:<16} {:<8} {:>6} | {:>14} {:>9} {:>10} | {:>14} {:>9}",
            "", "", "", "mmu_lock alone", "", "waits", "and the host's", ""
        );
        println!(
            "{:<16} {:<8} {:>6} | {:>14} {:>9} {:>10} | {:>14} {:>9}",
            "workload", "kernel", "vCPUs", "a fault takes", "slower", "for it", "a fault takes", "slower"
        );
        for workload in &data.workload {
            for &vcpus in &data.vcpus {
                // A single vCPU finds all lines in its own cache.
                let all = workload.stations(if vcpus == 1 { 0.0 } else { *line_transfer });
                let own = &all[..OF_MMU_LOCK];
                let (time, stays) = cycle(workload.instructions - workload.exclusive, own, vcpus);
                let waits: f64 = stays.iter().sum::<f64>() - own.iter().sum::<f64>();
                let held: f64 = workload.exclusive + workload.others.iter().sum::<f64>();
                let (with_host, _) = cycle(workload.instructions - held, &all, vcpus);
                println!(
                    "{:<16} {:<8} {vcpus:>6} | {time:>14.0} {:>8.1}x {:>8.1} % | {with_host:>14.0} {:>8.1}x",
                    workload.name,
                    workload.kernel,
                    time / workload.instructions,
                    100.0 * waits / time,
                    with_host / workload.instructions
                );
            }
        }
    }
}

fn main() -> ExitCode {
    let Some(path) = std::env::args_os().nth(1).map(PathBuf::from) else {
        eprintln!(
            "mmu-lock-model: name the file with the data: kernel-patches/5.10/tdp-mmu-parallel-faults/model.toml"
        );
        return ExitCode::from(2);
    };
    let text = match std::fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) => {
            eprintln!("mmu-lock-model: {}: {error}", path.display());
            return ExitCode::from(2);
        }
    };
    match toml::from_str(&text) {
        Ok(data) => print(&data),
        Err(error) => {
            eprintln!("mmu-lock-model: {}: {error}", path.display());
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_vcpu_waits_for_nobody() {
        assert_eq!(cycle(900.0, &[100.0, 0.0], 1), (1000.0, vec![100.0, 0.0]));
    }

    #[test]
    fn a_saturated_station_serves_one_after_the_other() {
        let (time, _) = cycle(900.0, &[100.0], 400);
        assert!((time / (400.0 * 100.0) - 1.0).abs() < 0.001, "{time}");
    }

    #[test]
    fn two_vcpus_meet_as_often_as_chance_has_it() {
        // By hand: the second vCPU finds the first at the station with probability 0.1.
        let (time, _) = cycle(900.0, &[100.0], 2);
        assert!((time - 1010.0).abs() < 1e-9, "{time}");
    }

    #[test]
    fn what_is_shared_scales() {
        assert_eq!(cycle(1000.0, &[0.0, 0.0], 416).0, 1000.0);
    }
}
