//! The part common to all architectures' code: operand names for the control block's fields, and
//! the location of the code's bytes in this program. Operands of one architecture follow its lines,
//! after a semicolon.

use super::Code;

/// The `write` workload, with [`Control`](crate::control::Control).
macro_rules! write_section {
    ($($line:literal),+; $($own:ident = const $value:expr),* $(,)?) => {
        std::arch::global_asm!(
            $($line),+,
            seed = const ::std::mem::offset_of!($crate::control::Control, seed),
            written = const ::std::mem::offset_of!($crate::control::Control, written),
            shuffle = const ::std::mem::offset_of!($crate::control::Control, shuffle),
            started = const ::std::mem::offset_of!($crate::control::Control, started),
            ended = const ::std::mem::offset_of!($crate::control::Control, ended),
            pages = const ::std::mem::offset_of!($crate::control::Control, pages),
            done = const ::std::mem::offset_of!($crate::control::Control, done),
            pass_start = const ::std::mem::offset_of!($crate::control::Control, pass_start),
            stop = const ::std::mem::offset_of!($crate::control::Control, stop),
            flags = const ::std::mem::offset_of!($crate::control::Control, flags),
            hot_pages = const ::std::mem::offset_of!($crate::control::Control, hot_pages),
            hot_below = const ::std::mem::offset_of!($crate::control::Control, hot_below),
            order = const ::std::mem::offset_of!($crate::control::Control, order),
            shuffle_mul = const ::std::mem::offset_of!($crate::control::Control, shuffle_mul),
            shuffle_add = const ::std::mem::offset_of!($crate::control::Control, shuffle_add),
            shuffle_mask = const ::std::mem::offset_of!($crate::control::Control, shuffle_mask),
            stride = const ::std::mem::offset_of!($crate::control::Control, stride),
            region = const ::std::mem::offset_of!($crate::control::Control, region),
            first_page = const ::std::mem::offset_of!($crate::control::Control, first_page),
            write_below = const ::std::mem::offset_of!($crate::control::Control, write_below),
            writer = const ::std::mem::offset_of!($crate::control::Control, writer),
            distinct = const ::std::mem::offset_of!($crate::control::Control, distinct),
            interval = const ::std::mem::offset_of!($crate::control::Control, interval),
            burst = const ::std::mem::offset_of!($crate::control::Control, burst),
            epoch = const ::std::mem::offset_of!($crate::control::Control, epoch),
            slowest = const ::std::mem::offset_of!($crate::control::Control, slowest),
            latency = const ::std::mem::offset_of!($crate::control::Control, latency),
            phase = const ::std::mem::offset_of!($crate::control::Control, phase),
            slice_shift = const ::std::mem::offset_of!($crate::control::Control, slice_shift),
            warm = const ::std::mem::offset_of!($crate::control::Control, warm),
            origin = const ::std::mem::offset_of!($crate::control::Control, origin),
            last = const ::std::mem::offset_of!($crate::control::Control, last),
            gap_before = const ::std::mem::offset_of!($crate::control::Control, gap_before),
            gap = const ::std::mem::offset_of!($crate::control::Control, gap),
            gap_end = const ::std::mem::offset_of!($crate::control::Control, gap_end),
            writing = const ::std::mem::offset_of!($crate::control::Control, writing),
            seen = const ::std::mem::offset_of!($crate::control::Control, seen),
            entered_gap = const ::std::mem::offset_of!($crate::control::Control, entered_gap),
            entered = const ::std::mem::offset_of!($crate::control::Control, entered),
            slices = const ::std::mem::offset_of!($crate::control::Control, slices),
            pass = const ::std::mem::offset_of!($crate::control::Control, pass),
            pass_ends = const ::std::mem::offset_of!($crate::control::Control, pass_ends),
            passes = const ::std::mem::offset_of!($crate::control::Control, passes),
            doorbell = const ::std::mem::offset_of!($crate::control::Control, doorbell),
            s_writer = const ::std::mem::offset_of!($crate::stamp::Stamp, writer),
            s_epoch = const ::std::mem::offset_of!($crate::stamp::Stamp, epoch),
            s_page = const ::std::mem::offset_of!($crate::stamp::Stamp, page),
            DRAW = const $crate::control::flags::DRAW,
            TIMED = const $crate::control::flags::LATENCY | $crate::control::flags::JOURNAL,
            JOURNAL = const $crate::control::flags::JOURNAL,
            LAST_SLICE = const $crate::control::SLICES - 1,
            BUCKETS = const $crate::control::BUCKETS,
            LOCKSTEP = const $crate::control::flags::LOCKSTEP,
            RETURN = const $crate::control::flags::RETURN,
            RANDOM = const $crate::control::order::RANDOM,
            DONE = const $crate::control::doorbell::DONE,
            PASS = const $crate::control::doorbell::PASS,
            STOPPED = const $crate::control::doorbell::STOPPED,
            SUB_BITS = const $crate::control::SUB_BITS,
            SUB = const 1u64 << $crate::control::SUB_BITS,
            PASS_MASK = const $crate::control::PASS_ENDS - 1,
            $($own = const $value,)*
        );
    };
}

/// The workload on page tables, with [`Tables`](crate::tables::Tables).
macro_rules! tables_section {
    ($($line:literal),+; $($own:ident = const $value:expr),* $(,)?) => {
        std::arch::global_asm!(
            $($line),+,
            command = const ::std::mem::offset_of!($crate::tables::Tables, command),
            doorbell = const ::std::mem::offset_of!($crate::tables::Tables, doorbell),
            tables_va = const ::std::mem::offset_of!($crate::tables::Tables, tables_va),
            tables_gpa = const ::std::mem::offset_of!($crate::tables::Tables, tables_gpa),
            count = const ::std::mem::offset_of!($crate::tables::Tables, count),
            first = const ::std::mem::offset_of!($crate::tables::Tables, first),
            step = const ::std::mem::offset_of!($crate::tables::Tables, step),
            visits = const ::std::mem::offset_of!($crate::tables::Tables, visits),
            pages = const ::std::mem::offset_of!($crate::tables::Tables, pages),
            frames = const ::std::mem::offset_of!($crate::tables::Tables, frames),
            window = const ::std::mem::offset_of!($crate::tables::Tables, window),
            shared = const ::std::mem::offset_of!($crate::tables::Tables, shared),
            home = const ::std::mem::offset_of!($crate::tables::Tables, home),
            switches = const ::std::mem::offset_of!($crate::tables::Tables, switches),
            reads = const ::std::mem::offset_of!($crate::tables::Tables, reads),
            ticks = const ::std::mem::offset_of!($crate::tables::Tables, ticks),
            TOUCH = const $crate::tables::Command::Touch as u64,
            FREE = const $crate::tables::Command::Free as u64,
            TABLE_SHIFT = const $crate::tables::TABLE_BYTES.trailing_zeros(),
            $($own = const $value,)*
        );
    };
}

/// The touching workload, with [`Touch`](crate::touch::Touch).
macro_rules! touch_section {
    ($($line:literal),+; $($own:ident = const $value:expr),* $(,)?) => {
        std::arch::global_asm!(
            $($line),+,
            ticks = const ::std::mem::offset_of!($crate::touch::Touch, ticks),
            blocks = const ::std::mem::offset_of!($crate::touch::Touch, blocks),
            region = const ::std::mem::offset_of!($crate::touch::Touch, region),
            stride = const ::std::mem::offset_of!($crate::touch::Touch, stride),
            first = const ::std::mem::offset_of!($crate::touch::Touch, first),
            access = const ::std::mem::offset_of!($crate::touch::Touch, access),
            block = const ::std::mem::offset_of!($crate::touch::Touch, block),
            offset = const ::std::mem::offset_of!($crate::touch::Touch, offset),
            run = const ::std::mem::offset_of!($crate::touch::Touch, run),
            doorbell = const ::std::mem::offset_of!($crate::touch::Touch, doorbell),
            $($own = const $value,)*
        );
    };
}

unsafe extern "C" {
    static vellum_workload_write: u8;
    static vellum_workload_write_guest: u8;
    static vellum_workload_write_end: u8;
    static vellum_workload_tables: u8;
    static vellum_workload_tables_end: u8;
    static vellum_workload_touch: u8;
    static vellum_workload_touch_end: u8;
}

/// The code of the `write` workload.
pub fn write_code() -> Code {
    between(
        &raw const vellum_workload_write,
        &raw const vellum_workload_write_guest,
        &raw const vellum_workload_write_end,
    )
}

/// The code of [`crate::tables`], which needs [`Privilege::Kernel`](super::Privilege::Kernel).
pub fn tables_code() -> Code {
    let start = &raw const vellum_workload_tables;
    between(start, start, &raw const vellum_workload_tables_end)
}

/// The code of [`crate::touch`].
pub fn touch_code() -> Code {
    let start = &raw const vellum_workload_touch;
    between(start, start, &raw const vellum_workload_touch_end)
}

fn between(start: *const u8, entry: *const u8, end: *const u8) -> Code {
    // SAFETY: the three are labels of one section above, in this order, in memory that is never
    // written.
    let (bytes, entry) = unsafe {
        (std::slice::from_raw_parts(start, end.offset_from(start) as usize), entry.offset_from(start) as u64)
    };
    Code { bytes, entry }
}
