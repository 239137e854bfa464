use super::*;

/// A tree under construction: its structure and its strings.
#[derive(Default)]
struct Builder {
    structure: Vec<u8>,
    strings: Vec<u8>,
    reserved: Vec<[u64; 2]>,
}

impl Builder {
    fn word(&mut self, word: u32) {
        self.structure.extend(word.to_be_bytes());
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.structure.extend(bytes);
        self.structure.resize(self.structure.len().next_multiple_of(4), 0);
    }

    fn begin(&mut self, name: &str) -> &mut Self {
        self.word(BEGIN_NODE);
        self.bytes(format!("{name}\0").as_bytes());
        self
    }

    fn end(&mut self) -> &mut Self {
        self.word(END_NODE);
        self
    }

    fn property(&mut self, name: &str, value: &[u8]) -> &mut Self {
        self.word(PROPERTY);
        self.word(value.len() as u32);
        self.word(self.strings.len() as u32);
        self.strings.extend(format!("{name}\0").bytes());
        self.bytes(value);
        self
    }

    fn text(&mut self, name: &str, value: &str) -> &mut Self {
        self.property(name, format!("{value}\0").as_bytes())
    }

    fn cells(&mut self, name: &str, cells: &[u32]) -> &mut Self {
        let value: Vec<u8> = cells.iter().flat_map(|cell| cell.to_be_bytes()).collect();
        self.property(name, &value)
    }

    /// The root, with two cells for addresses and sizes.
    fn root() -> Self {
        let mut builder = Self::default();
        builder.begin("").cells("#address-cells", &[2]).cells("#size-cells", &[2]);
        builder
    }

    fn build(&mut self) -> Vec<u8> {
        self.end().word(END);
        let mut reserved = Vec::new();
        self.reserved.push([0; 2]);
        self.reserved.iter().flatten().for_each(|number| reserved.extend(number.to_be_bytes()));
        let structure = 40 + reserved.len();
        let strings = structure + self.structure.len();
        let total = strings + self.strings.len();
        let header = [MAGIC, total as u32, structure as u32, strings as u32, 40, 17, 16, 0, 0, 0];
        let header = header.iter().flat_map(|word| word.to_be_bytes());
        header.chain(reserved).chain(self.structure.clone()).chain(self.strings.clone()).collect()
    }
}

fn tree(builder: &mut Builder) -> Tree {
    let mut tree = Tree::EMPTY;
    read(&builder.build(), &mut tree).unwrap();
    tree
}

fn judged(tree: &Tree) -> Vec<(u64, u64)> {
    let mut ranges = [NO_RANGE; 8];
    let count = without(&tree.memory, || tree.reserved.iter().copied(), &mut ranges);
    ranges[..count].iter().map(|range| (range.start, range.end)).collect()
}

#[test]
fn memory_is_what_is_in_no_hole() {
    let mut builder = Builder::root();
    builder.reserved.push([0x4010_0000, 0x800]);
    builder.begin("memory@40000000").text("device_type", "memory");
    // Two ranges that touch, and one that overlaps.
    builder.cells("reg", &[0, 0x4000_0000, 0, 0x10_0000, 0, 0x4010_0000, 0, 0x10_0000]).end();
    builder.begin("memory@80").text("device_type", "memory");
    builder.cells("reg", &[0, 0x401f_0000, 0, 0x2_0000, 1, 0, 0, 0x1000]).end();
    builder.begin("memory@off").text("device_type", "memory").text("status", "disabled");
    builder.cells("reg", &[2, 0, 0, 0x1000]).end();
    builder.begin("reserved-memory").cells("#address-cells", &[1]).cells("#size-cells", &[1]);
    builder.property("ranges", &[]).begin("x@4000f123").cells("reg", &[0x4000_f123, 1]).end().end();
    let expected = [
        (0x4000_0000, 0x4000_f000),
        (0x4001_0000, 0x4010_0000),
        (0x4010_1000, 0x4021_0000),
        (0x1_0000_0000, 0x1_0000_1000),
    ];
    assert_eq!(judged(&tree(&mut builder)), expected);
}

#[test]
fn an_initrd_is_reserved_and_the_command_line_is_found() {
    let mut builder = Builder::root();
    builder.begin("chosen").text("bootargs", "seed=3").cells("linux,initrd-start", &[0x1000]);
    builder.cells("linux,initrd-end", &[0, 0x2001]).end();
    let bytes = builder.build();
    let mut tree = Tree::EMPTY;
    assert_eq!(read(&bytes, &mut tree), Ok(&b"seed=3"[..]));
    let reserved: Vec<_> = tree.reserved.iter().copied().collect();
    assert_eq!(reserved, [Range { start: 0x1000, end: 0x3000 }]);
}

#[test]
fn the_console_is_the_one_that_is_named() {
    let mut builder = Builder::root();
    builder.begin("serial@1000").text("compatible", "ns16550a").cells("reg", &[0, 0x1000, 0, 8]);
    builder.cells("reg-shift", &[2]).cells("reg-io-width", &[4]).end();
    builder.begin("pl011@2000").property("compatible", b"arm,pl011\0arm,primecell\0");
    builder.cells("reg", &[0, 0x2000, 0, 0x1000]).end();
    builder.begin("pl011@3000").text("compatible", "arm,pl011").cells("reg", &[0, 0x3000, 0, 8]).end();
    let mut other =
        Builder { structure: builder.structure.clone(), strings: builder.strings.clone(), reserved: vec![] };
    let first = Console::Uart { base: 0x1000, shift: 2, width: 4 };
    assert_eq!(tree(&mut builder).console, Some(first));
    other.begin("chosen").text("stdout-path", "/pl011@2000:115200n8").end();
    assert_eq!(tree(&mut other).console, Some(Console::Pl011(0x2000)));
}

/// A node on a bus that translates addresses is left alone, because its registers are elsewhere.
#[test]
fn addresses_behind_a_bus_count_if_it_translates_nothing() {
    for (ranges, found) in [(&[][..], 1), (&[0, 0, 0, 0x5000, 0, 0x1000][..], 0)] {
        let mut builder = Builder::root();
        builder.begin("bus").cells("#address-cells", &[2]).cells("#size-cells", &[2]);
        builder.cells("ranges", ranges).begin("virtio@1000").text("compatible", "virtio,mmio");
        builder.cells("reg", &[0, 0x1000, 0, 0x200]).end().end();
        assert_eq!(tree(&mut builder).virtio.iter().count(), found);
    }
}

#[test]
fn trees_of_qemu_are_read() {
    let v2 = include_bytes!("../../../tests/fuzz/corpus/dtb/qemu-gicv2");
    let v3 = include_bytes!("../../../tests/fuzz/corpus/dtb/qemu-gicv3");
    let mut tree = Tree::EMPTY;
    assert_eq!(read(v2, &mut tree), Ok(&b"passes=2 seed=7"[..]));
    assert_eq!((tree.given, tree.method, tree.timer), (3, Method::Hvc, Some(27)));
    assert_eq!(tree.gic, Some(Gic::V2 { distributor: 0x800_0000, cpu: 0x801_0000 }));
    assert_eq!(tree.console, Some(Console::Pl011(0x900_0000)));
    assert_eq!(judged(&tree), [(0x4000_0000, 0x4800_0000)]);
    assert_eq!(read(v3, &mut tree), Ok(&b"passes=2 seed=7"[..]));
    assert_eq!((tree.given, tree.method, tree.virtio.iter().count()), (4, Method::Smc, 32));
    assert_eq!(tree.cpus.iter().copied().collect::<Vec<_>>(), [0, 1, 2, 3]);
    let pci = tree.pci.unwrap();
    assert_eq!(pci.window, Range { start: 0x1000_0000, end: 0x3eff_0000 });
    assert_eq!(pci.configuration.end - pci.configuration.start, 256 << 20);
    let Some(Gic::V3 { distributor, redistributors }) = tree.gic else { panic!("{:?}", tree.gic) };
    let first = redistributors.iter().next().unwrap();
    assert_eq!((distributor, first.start), (0x800_0000, 0x80a_0000));
}

#[test]
fn what_is_no_tree_is_refused() {
    let whole = Builder::root().build();
    let mut tree = Tree::EMPTY;
    for length in 0..whole.len() {
        // Cut, with a header that says so.
        let mut cut = whole[..length].to_vec();
        if length >= 8 {
            cut[4..8].copy_from_slice(&(length as u32).to_be_bytes());
        }
        // Strings are the last part, and of names no one asks for.
        let is_read = read(&cut, &mut tree).is_ok();
        assert!(!is_read || length > whole.len() - 30, "{length} of {}", whole.len());
    }
    assert!(read(&whole, &mut tree).is_ok());
    assert!(read(&[0; 64], &mut tree).is_err());
}
