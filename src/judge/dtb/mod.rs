//! Reads a device tree blob (Devicetree Specification 0.4). The VMM has written it, so it may say
//! anything: every access is checked, and what makes no sense is an error or left out. The image and
//! the tests share this file.

use crate::schedule::{PAGE, Range};

/// The largest size of a tree that the boot protocol allows.
pub(crate) const MAX_SIZE: u64 = 2 << 20;
/// The end of what the image maps. Devices are below.
pub(crate) const MAPPED: u64 = 512 << 30;
const MAGIC: u32 = 0xd00d_feed;
const BEGIN_NODE: u32 = 1;
const END_NODE: u32 = 2;
const PROPERTY: u32 = 3;
const NOP: u32 = 4;
const END: u32 = 9;
const MAX_DEPTH: usize = 16;
const MAX_PATH: usize = 256;
/// PSCI's CPU_ON for 64 bits.
const CPU_ON: u32 = 0xc400_0003;

/// Up to `N` values. Further ones are left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct List<T, const N: usize> {
    items: [T; N],
    count: usize,
}

impl<T: Copy, const N: usize> List<T, N> {
    /// An empty list.
    pub const fn new(empty: T) -> Self {
        Self { items: [empty; N], count: 0 }
    }

    /// Adds a value.
    pub fn push(&mut self, item: T) {
        if let Some(place) = self.items.get_mut(self.count) {
            *place = item;
            self.count += 1;
        }
    }

    /// Whether there is no place for further values.
    pub(crate) fn is_full(&self) -> bool {
        self.count == N
    }

    /// The values.
    pub fn iter(&self) -> core::slice::Iter<'_, T> {
        self.items.get(..self.count).unwrap_or_default().iter()
    }
}

/// How PSCI is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// By `hvc`.
    Hvc,
    /// By `smc`.
    Smc,
}

/// A serial port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Console {
    /// The address of a PL011.
    Pl011(u64),
    /// A 16550. Register N is at `base` + (N << `shift`), and has `width` bytes.
    Uart {
        /// The first register's address.
        base: u64,
        /// The distance of two registers, as a power of two.
        shift: u32,
        /// Bytes of an access.
        width: u32,
    },
}

/// The interrupt controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gic {
    /// GICv2.
    V2 {
        /// The distributor's address.
        distributor: u64,
        /// The address of the processors' interface.
        cpu: u64,
    },
    /// GICv3, or v4.
    V3 {
        /// The distributor's address.
        distributor: u64,
        /// Where the redistributors are.
        redistributors: List<Range, 4>,
    },
}

/// The first bus of a PCI host bridge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pci {
    /// The configuration space.
    pub configuration: Range,
    /// The memory for registers.
    pub window: Range,
}

/// What the image needs to know of its machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tree {
    /// RAM.
    pub memory: List<Range, 64>,
    /// Memory that is not to be used: of /memreserve/, of /reserved-memory, and the initrd.
    pub reserved: List<Range, 32>,
    /// The affinities of the first processors.
    pub cpus: List<u64, 64>,
    /// The number of all processors.
    pub given: u64,
    /// How PSCI is called.
    pub method: Method,
    /// PSCI's CPU_ON.
    pub cpu_on: u32,
    /// The serial port for output, or else the first one.
    pub console: Option<Console>,
    /// The addresses of virtio-mmio devices.
    pub virtio: List<u64, 64>,
    /// The PCI host bridge.
    pub pci: Option<Pci>,
    /// The interrupt controller.
    pub gic: Option<Gic>,
    /// The number of the virtual timer's private interrupt.
    pub timer: Option<u32>,
}

const NO_RANGE: Range = Range { start: 0, end: 0 };

impl Tree {
    /// A tree that says nothing.
    pub const EMPTY: Self = Self {
        memory: List::new(NO_RANGE),
        reserved: List::new(NO_RANGE),
        cpus: List::new(0),
        given: 0,
        method: Method::Hvc,
        cpu_on: CPU_ON,
        console: None,
        virtio: List::new(0),
        pci: None,
        gic: None,
        timer: None,
    };
}

/// The size of the tree at the start of `bytes`.
pub fn size(bytes: &[u8]) -> Option<u64> {
    let size = u64::from(word(bytes, 4)?);
    (word(bytes, 0)? == MAGIC && size <= MAX_SIZE && size as usize <= bytes.len()).then_some(size)
}

/// Reads the tree at the start of `bytes` into `tree`. Returns the command line.
///
/// # Errors
/// It is no tree, or one that breaks off.
pub fn read<'a>(bytes: &'a [u8], tree: &mut Tree) -> Result<&'a [u8], &'static str> {
    const NONE: &str = "there is no device tree";
    const BROKEN: &str = "the device tree makes no sense";
    let bytes = bytes.get(..size(bytes).ok_or(NONE)? as usize).ok_or(NONE)?;
    *tree = Tree::EMPTY;
    reserve(bytes, tree).ok_or(BROKEN)?;
    // The console and the interrupts need what other nodes say, so all are visited twice.
    let mut named = Named::default();
    walk(bytes, |path, node| named.look(path, node)).ok_or(BROKEN)?;
    if named.initrd.start < named.initrd.end {
        tree.reserved.push(pages(named.initrd));
    }
    let mut is_named = false;
    walk(bytes, |path, node| tree.look(path, node, &named, &mut is_named)).ok_or(BROKEN)?;
    Ok(named.line)
}

/// Memory without holes, as pages, in `out`. Returns the number of ranges. Further ones are left out.
pub fn without<H: Iterator<Item = Range>>(
    memory: &List<Range, 64>,
    holes: impl Fn() -> H,
    out: &mut [Range],
) -> usize {
    let mut count = 0;
    let mut at = 0;
    // One range after the other, lowest first: they may overlap.
    while let Some(start) = next(memory, &holes, at) {
        let inside = memory.iter().filter(|range| range.start <= start && start < range.end);
        let mut end = inside.map(|range| range.end).max().unwrap_or(start);
        end = holes().filter(|hole| hole.start >= start).map(|hole| hole.start).fold(end, u64::min);
        // Ranges that touch are one.
        while let Some(more) = memory.iter().find(|range| range.start <= end && range.end > end)
            && !holes().any(|hole| hole.start <= end && hole.end > end)
        {
            let limit = holes().filter(|hole| hole.start > end).map(|hole| hole.start).min();
            end = limit.map_or(more.end, |limit| limit.min(more.end));
        }
        at = end.max(start + 1);
        let (first, last) = (start.next_multiple_of(PAGE), end & !(PAGE - 1));
        if first < last {
            let Some(place) = out.get_mut(count) else { return count };
            *place = Range { start: first, end: last };
            count += 1;
        }
    }
    count
}

/// The first address from `at` on that is memory and in no hole.
fn next<H: Iterator<Item = Range>>(
    memory: &List<Range, 64>,
    holes: &impl Fn() -> H,
    mut at: u64,
) -> Option<u64> {
    loop {
        let starts = memory.iter().filter(|range| range.end > at);
        at = starts.map(|range| range.start.max(at)).min()?;
        // The end of a hole is behind its start, so this ends.
        match holes().find(|hole| hole.start <= at && at < hole.end) {
            Some(hole) => at = hole.end,
            None => return (at < u64::MAX - PAGE).then_some(at),
        }
    }
}

/// All pages that a range touches.
fn pages(range: Range) -> Range {
    let end = range.end.checked_next_multiple_of(PAGE).unwrap_or(range.end);
    Range { start: range.start & !(PAGE - 1), end }
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

/// The number in the first cells, and what follows them.
fn number(bytes: &[u8], cells: u32) -> Option<(u64, &[u8])> {
    let size = 4 * cells as usize;
    let value = bytes.get(..size)?.iter().fold(0, |number, byte| number << 8 | u64::from(*byte));
    // Larger numbers do not fit, and nothing has them.
    (cells <= 2).then_some((value, &bytes[size..]))
}

/// Reads /memreserve/.
fn reserve(bytes: &[u8], tree: &mut Tree) -> Option<()> {
    let mut rest = bytes.get(word(bytes, 16)? as usize..)?;
    loop {
        let (start, after) = number(rest, 2)?;
        let (size, after) = number(after, 2)?;
        if (start, size) == (0, 0) {
            return Some(());
        }
        if size > 0 {
            tree.reserved.push(pages(Range { start, end: start.saturating_add(size) }));
        }
        rest = after;
    }
}

/// A node with the properties that matter here.
#[derive(Clone, Copy, Default)]
struct Node<'a> {
    /// The cells of its own addresses and sizes, which the parent tells.
    cells: (u32, u32),
    /// The cells of its children's.
    child_cells: (u32, u32),
    /// Whether its addresses are the machine's: the bus above translates nothing.
    is_mapped: bool,
    properties: [Option<&'a [u8]>; NAMES.len()],
}

/// The names of properties, in the order of [`Name`].
const NAMES: [&[u8]; 17] = [
    b"reg",
    b"compatible",
    b"device_type",
    b"status",
    b"method",
    b"cpu_on",
    b"interrupts",
    b"interrupt-names",
    b"#interrupt-cells",
    b"bootargs",
    b"stdout-path",
    b"linux,initrd-start",
    b"linux,initrd-end",
    b"ranges",
    b"reg-shift",
    b"reg-io-width",
    b"#redistributor-regions",
];

#[derive(Clone, Copy)]
enum Name {
    Reg,
    Compatible,
    DeviceType,
    Status,
    Method,
    CpuOn,
    Interrupts,
    InterruptNames,
    InterruptCells,
    Bootargs,
    Stdout,
    InitrdStart,
    InitrdEnd,
    Ranges,
    RegShift,
    RegIoWidth,
    Regions,
}

impl<'a> Node<'a> {
    fn get(&self, name: Name) -> Option<&'a [u8]> {
        self.properties.get(name as usize).copied().flatten()
    }

    /// A property's text, without the zero at its end.
    fn text(&self, name: Name) -> Option<&'a [u8]> {
        self.get(name)?.split(|byte| *byte == 0).next()
    }

    fn word(&self, name: Name) -> Option<u32> {
        word(self.get(name)?, 0)
    }

    fn is_compatible(&self, known: &[&[u8]]) -> bool {
        let list = self.get(Name::Compatible).unwrap_or_default();
        list.split(|byte| *byte == 0).any(|name| known.contains(&name))
    }

    fn is_enabled(&self) -> bool {
        self.text(Name::Status).is_none_or(|status| status == b"okay" || status == b"ok")
    }

    /// The ranges of `reg`, which are the machine's addresses.
    fn ranges(&self) -> impl Iterator<Item = Range> + use<'a> {
        let mut rest = self.get(Name::Reg).filter(|_| self.is_mapped).unwrap_or_default();
        let (address, size) = self.cells;
        core::iter::from_fn(move || {
            let (start, after) = number(rest, address)?;
            let (size, after) = number(after, size)?;
            // No cells at all would not end.
            (after.len() < rest.len()).then(|| {
                rest = after;
                Range { start, end: start.saturating_add(size) }
            })
        })
    }
}

/// Calls `visit` with the path of each node and the node, once its properties are known. Returns
/// `None` if the tree breaks off.
fn walk<'a>(bytes: &'a [u8], mut visit: impl FnMut(&[u8], &Node<'a>)) -> Option<()> {
    let strings = bytes.get(word(bytes, 12)? as usize..)?;
    let mut rest = bytes.get(word(bytes, 8)? as usize..)?;
    let mut path = [0; MAX_PATH];
    // The open nodes and the lengths of their paths, from the root's parent on.
    let mut nodes = [Node::default(); MAX_DEPTH];
    let mut lengths = [0; MAX_DEPTH];
    nodes[0] = Node { child_cells: (2, 1), is_mapped: true, ..Node::default() };
    let mut depth = 0;
    let mut is_visited = true;
    loop {
        let token = word(rest, 0)?;
        rest = rest.get(4..)?;
        if !is_visited && matches!(token, BEGIN_NODE | END_NODE) {
            visit(path.get(..*lengths.get(depth)?)?, nodes.get(depth)?);
            is_visited = true;
        }
        match token {
            NOP => {}
            BEGIN_NODE => {
                let name = rest.split(|byte| *byte == 0).next()?;
                rest = rest.get((name.len() + 1).next_multiple_of(4)..)?;
                let (parent, start) = (nodes.get(depth)?, *lengths.get(depth)?);
                let is_bus = depth < 2 || parent.get(Name::Ranges).is_some_and(<[u8]>::is_empty);
                let node = Node {
                    cells: parent.child_cells,
                    child_cells: (2, 1),
                    is_mapped: parent.is_mapped && is_bus,
                    ..Node::default()
                };
                // The root has no name.
                let separator: &[u8] = if depth == 0 { b"" } else { b"/" };
                let end = start + separator.len() + name.len();
                path.get_mut(start..start + separator.len())?.copy_from_slice(separator);
                path.get_mut(start + separator.len()..end)?.copy_from_slice(name);
                depth += 1;
                *nodes.get_mut(depth)? = node;
                *lengths.get_mut(depth)? = end;
                is_visited = false;
            }
            END_NODE => depth = depth.checked_sub(1)?,
            PROPERTY if !is_visited => {
                let (size, name) = (word(rest, 0)? as usize, word(rest, 4)? as usize);
                let value = rest.get(8..8 + size)?;
                rest = rest.get(8 + size.next_multiple_of(4)..)?;
                let name = strings.get(name..)?.split(|byte| *byte == 0).next()?;
                let node = nodes.get_mut(depth)?;
                match name {
                    b"#address-cells" => node.child_cells.0 = word(value, 0)?,
                    b"#size-cells" => node.child_cells.1 = word(value, 0)?,
                    _ => {
                        if let Some(at) = NAMES.iter().position(|known| *known == name) {
                            *node.properties.get_mut(at)? = Some(value);
                        }
                    }
                }
            }
            END => return (depth == 0).then_some(()),
            _ => return None,
        }
    }
}

const GIC_V2: [&[u8]; 5] =
    [b"arm,gic-400", b"arm,cortex-a15-gic", b"arm,cortex-a9-gic", b"arm,cortex-a7-gic", b"arm,gic-v2"];
const GIC_V3: [&[u8]; 1] = [b"arm,gic-v3"];

/// What other nodes refer to.
#[derive(Default)]
struct Named<'a> {
    line: &'a [u8],
    stdout: &'a [u8],
    initrd: Range,
    interrupt_cells: usize,
}

impl<'a> Named<'a> {
    fn look(&mut self, path: &[u8], node: &Node<'a>) {
        if path == b"/chosen" {
            self.line = node.text(Name::Bootargs).unwrap_or_default();
            let stdout = node.text(Name::Stdout).unwrap_or_default();
            self.stdout = stdout.split(|byte| *byte == b':').next().unwrap_or_default();
            // One cell or two.
            let address = |name| {
                let value = node.get(name).unwrap_or_default();
                number(value, value.len() as u32 / 4).map_or(0, |(address, _)| address)
            };
            self.initrd = Range { start: address(Name::InitrdStart), end: address(Name::InitrdEnd) };
        }
        if node.is_compatible(&GIC_V2) || node.is_compatible(&GIC_V3) {
            self.interrupt_cells = node.word(Name::InterruptCells).unwrap_or(3) as usize;
        }
    }
}

impl Tree {
    fn look(&mut self, path: &[u8], node: &Node<'_>, named: &Named<'_>, is_named: &mut bool) {
        if !node.is_enabled() {
            return;
        }
        let has_type = |kind: &[u8]| node.text(Name::DeviceType) == Some(kind);
        if has_type(b"memory") {
            node.ranges().filter(|range| range.start < range.end).for_each(|range| self.memory.push(range));
        } else if path.starts_with(b"/reserved-memory/") {
            node.ranges().for_each(|range| self.reserved.push(pages(range)));
        } else if has_type(b"cpu") && path.starts_with(b"/cpus/") {
            self.given += 1;
            let affinity = number(node.get(Name::Reg).unwrap_or_default(), node.cells.0);
            self.cpus.push(affinity.map_or(0, |(affinity, _)| affinity));
        } else if node.is_compatible(&[b"arm,psci", b"arm,psci-0.2", b"arm,psci-1.0"]) {
            self.method = if node.text(Name::Method) == Some(b"smc") { Method::Smc } else { Method::Hvc };
            if !node.is_compatible(&[b"arm,psci-0.2", b"arm,psci-1.0"]) {
                self.cpu_on = node.word(Name::CpuOn).unwrap_or(CPU_ON);
            }
        } else if node.is_compatible(&[b"virtio,mmio"]) {
            node.ranges().take(1).filter_map(device).for_each(|base| self.virtio.push(base));
        } else if let Some(console) = console(node) {
            let is_stdout = path == named.stdout;
            if is_stdout || self.console.is_none() && !*is_named {
                self.console = Some(console);
            }
            *is_named |= is_stdout;
        } else if node.is_compatible(&[b"pci-host-ecam-generic"]) {
            self.pci = pci(node);
        } else if let Some(gic) = gic(node) {
            self.gic = Some(gic);
        } else if node.is_compatible(&[b"arm,armv8-timer", b"arm,armv7-timer"]) {
            self.timer = timer(node, named.interrupt_cells);
        }
    }
}

/// The address of a device, which is mapped and aligned.
fn device(range: Range) -> Option<u64> {
    (range.start < MAPPED && range.start.is_multiple_of(4)).then_some(range.start)
}

fn console(node: &Node<'_>) -> Option<Console> {
    let is_pl011 = node.is_compatible(&[b"arm,pl011"]);
    if !is_pl011 && !node.is_compatible(&[b"ns16550a", b"ns16550", b"ns8250", b"snps,dw-apb-uart"]) {
        return None;
    }
    let base = device(node.ranges().next()?)?;
    if is_pl011 {
        return Some(Console::Pl011(base));
    }
    let shift = node.word(Name::RegShift).unwrap_or(0);
    let width = node.word(Name::RegIoWidth).unwrap_or(1);
    (shift <= 4 && [1, 2, 4].contains(&width)).then_some(Console::Uart { base, shift, width })
}

/// A bridge with memory that has the same addresses on its bus.
fn pci(node: &Node<'_>) -> Option<Pci> {
    let configuration =
        node.ranges().next().filter(|range| range.end <= MAPPED && range.start.is_multiple_of(4096))?;
    let mut rest = node.get(Name::Ranges)?;
    let mut window = None;
    // Kind and address on the bus, address, size. Kind 2 is memory below 4 GiB, 3 is any memory.
    while let Some((kind, after)) = number(rest, 1) {
        let (bus, after) = number(after, 2)?;
        let (start, after) = number(after, node.cells.0)?;
        let (size, after) = number(after, 2)?;
        let range = Range { start, end: start.saturating_add(size) };
        if kind >> 25 & 1 == 1 && bus == start && range.end <= MAPPED && window.is_none() {
            window = Some(range);
        }
        rest = after;
    }
    Some(Pci { configuration, window: window? })
}

fn gic(node: &Node<'_>) -> Option<Gic> {
    let mut ranges = node.ranges();
    if node.is_compatible(&GIC_V2) {
        let (distributor, cpu) = (device(ranges.next()?)?, device(ranges.next()?)?);
        return Some(Gic::V2 { distributor, cpu });
    }
    if !node.is_compatible(&GIC_V3) {
        return None;
    }
    let distributor = device(ranges.next()?)?;
    let mut redistributors = List::new(NO_RANGE);
    let regions = node.word(Name::Regions).unwrap_or(1) as usize;
    let is_mapped = |range: &Range| range.end <= MAPPED && range.start.is_multiple_of(0x1_0000);
    ranges.take(regions).filter(is_mapped).for_each(|range| redistributors.push(range));
    Some(Gic::V3 { distributor, redistributors })
}

/// The number of the virtual timer's interrupt: the one named so, or the third.
fn timer(node: &Node<'_>, cells: usize) -> Option<u32> {
    let names = node.get(Name::InterruptNames).unwrap_or_default();
    let at = names.split(|byte| *byte == 0).position(|name| name == b"virt").unwrap_or(2);
    let interrupts = node.get(Name::Interrupts)?;
    let interrupt = interrupts.get(at.checked_mul(cells.checked_mul(4)?)?..)?;
    // A private one: 16 to 31.
    let (kind, number) = (word(interrupt, 0)?, word(interrupt, 4)?);
    (kind == 1 && number < 16).then_some(number + 16)
}

#[cfg(test)]
mod tests;
