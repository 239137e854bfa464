//! Linux guests of more than one test program: what a bed needs, and the work that outlives a move.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::{Failed, ensure};

/// The sectors of the disk that is written.
const SECTORS: u64 = 2048;

/// The programs in the guest: one writes each sector of the disk in turn with increasing numbers,
/// one checks the clock.
pub const WORKERS: &str = "\
    (i=0; while i=$((i+1)); do
       printf %-512d $i | dd of=/dev/vda bs=512 seek=$((i % 2048)) conv=notrunc,fsync 2>/dev/null && echo $i > /tmp/flushed.new &&
         mv /tmp/flushed.new /tmp/flushed; done) > /dev/null 2>&1 &
    (last=0; while :; do now=$(cut -d' ' -f1 /proc/uptime | tr -d .)
       [ $now -ge $last ] || echo back from $last to $now >> /tmp/backwards; last=$now; done) > /dev/null 2>&1 &";

/// Flags for the emulated AMD host alone. Its emulator delivers an injected interrupt a second time
/// if its own time slice ends before the guest's next exit, whatever the interrupt flag is (QEMU's
/// svm_helper.c leaves exception_index set behind VMRUN). Without PV EOI that exit comes before the
/// interrupt is acknowledged, and there is no harm. The emulator also has no size for the compacted
/// form of XSAVE, which Linux warns about.
pub fn for_this_bed() -> (&'static [&'static str], &'static str) {
    match std::env::var("VELLUM_BED").as_deref() {
        Ok("svm") => (&["--cpuid=-pv-eoi"], "noxsave"),
        _ => (&[], ""),
    }
}

/// Creates an empty disk.
pub fn empty(disk: &Path) -> Result<(), Failed> {
    Ok(fs::write(disk, vec![0; SECTORS as usize * 512])?)
}

/// Checks that each sector that was flushed up to number `last` holds its number or a later one.
pub fn holds(disk: &Path, last: u64) -> Result<(), Failed> {
    let disk = fs::File::open(disk)?;
    for number in last.saturating_sub(SECTORS).max(1)..=last {
        let mut sector = [0; 512];
        disk.read_exact_at(&mut sector, number % SECTORS * 512)?;
        let text = String::from_utf8_lossy(&sector).trim().to_owned();
        let found: u64 =
            text.parse().map_err(|_| format!("number {number} was flushed, and {text:?} is there"))?;
        let later = found >= number && (found - number).is_multiple_of(SECTORS);
        ensure(later, || format!("number {number} was flushed, and {found} is there"))?;
    }
    Ok(())
}
