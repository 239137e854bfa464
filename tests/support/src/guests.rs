//! Kernels of a few bytes, assembled by hand.

/// The address that they are linked at.
pub const ORIGIN: u32 = 0x10_0000;

/// Instructions. Those of the methods mean the same in 32-bit and 64-bit mode.
#[derive(Default)]
pub struct Code(pub Vec<u8>);

impl Code {
    /// `mov dx, port; mov al, byte; out dx, al`
    pub fn out(mut self, port: u16, byte: u8) -> Self {
        let [low, high] = port.to_le_bytes();
        self.0.extend([0x66, 0xba, low, high, 0xb0, byte, 0xee]);
        self
    }

    /// Writes `text` to the serial port.
    pub fn print(self, text: &str) -> Self {
        text.bytes().fold(self, |code, byte| code.out(0x3f8, byte))
    }

    /// Powers the machine off by ACPI's sleep control register.
    pub fn power_off(self) -> Self {
        self.out(0x600, 0x34)
    }

    /// `jmp .`: runs for ever.
    pub fn spin(self) -> Self {
        self.bytes(&[0xeb, 0xfe])
    }

    /// Sends back what it receives, for ever.
    pub fn echo(self) -> Self {
        // back: mov dx, 0x3fd; in al, dx; test al, 1; je back
        self.bytes(&[0x66, 0xba, 0xfd, 0x03, 0xec, 0xa8, 1, 0x74, 0xf7])
            // mov dx, 0x3f8; in al, dx; out dx, al; jmp back
            .bytes(&[0x66, 0xba, 0xf8, 0x03, 0xec, 0xee, 0xeb, 0xef])
    }

    /// Other instructions.
    pub fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }

    /// A 64-bit ELF file without notes: entered in 64-bit mode.
    pub fn elf64(&self) -> Vec<u8> {
        elf(&self.0, false)
    }

    /// A 64-bit ELF file with a PVH note: entered in 32-bit mode.
    pub fn pvh(&self) -> Vec<u8> {
        elf(&self.0, true)
    }

    /// A multiboot image with address fields: entered in 32-bit mode.
    pub fn multiboot(&self) -> Vec<u8> {
        let (magic, flags) = (0x1bad_b002u32, 1u32 << 16);
        let checksum = 0u32.wrapping_sub(magic).wrapping_sub(flags);
        let header = [magic, flags, checksum, ORIGIN, ORIGIN, 0, 0, ORIGIN + 32].map(u32::to_le_bytes);
        [header.as_flattened(), &self.0].concat()
    }
}

fn elf(code: &[u8], pvh: bool) -> Vec<u8> {
    let note = [4, 4, 18, u32::from_le_bytes(*b"Xen\0"), ORIGIN].map(u32::to_le_bytes);
    let note = if pvh { note.as_flattened() } else { &[] };
    let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x3e\0\x01\0\0\0".to_vec();
    let origin = u64::from(ORIGIN);
    for word in [origin, 64, 0] {
        file.extend(word.to_le_bytes());
    }
    for half in [0u16, 0, 64, 56, 2, 64, 0, 0] {
        file.extend(half.to_le_bytes());
    }
    let (headers, len) = (64 + 2 * 56u64, code.len() as u64);
    // Flags 5: readable, executable.
    let load = [1 | 5 << 32, headers, origin, origin, len, len, 0x1000];
    let notes = [4, headers + len, 0, 0, note.len() as u64, note.len() as u64, 4];
    for word in load.into_iter().chain(notes) {
        file.extend(word.to_le_bytes());
    }
    file.extend(code);
    file.extend(note);
    file
}
