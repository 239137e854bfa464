//! The header of a vsock packet (virtio 1.2, section 5.10.6), decoded into numbers.
//!
//! `virtio-vsock` has such a header too, but takes a packet's data from one buffer only. Linux 6.7
//! and later send MSG_ZEROCOPY data in several.

/// Bytes of an encoded header.
pub const HEADER: usize = 44;
/// The only supported socket type: VIRTIO_VSOCK_TYPE_STREAM.
pub const STREAM: u16 = 1;
/// The host's address.
pub const HOST_CID: u64 = 2;

/// VIRTIO_VSOCK_OP_*
pub mod op {
    /// Requests a connection.
    pub const REQUEST: u16 = 1;
    /// Accepts a connection.
    pub const RESPONSE: u16 = 2;
    /// The connection does not exist, or has ended.
    pub const RST: u16 = 3;
    /// No more data in one or both directions.
    pub const SHUTDOWN: u16 = 4;
    /// Data.
    pub const RW: u16 = 5;
    /// Only the credit fields.
    pub const CREDIT_UPDATE: u16 = 6;
    /// Asks for a CREDIT_UPDATE.
    pub const CREDIT_REQUEST: u16 = 7;
}

/// VIRTIO_VSOCK_SHUTDOWN_F_RECEIVE: its sender will not receive.
pub const SHUTDOWN_RECEIVE: u32 = 1;
/// VIRTIO_VSOCK_SHUTDOWN_F_SEND: its sender will not send.
pub const SHUTDOWN_SEND: u32 = 2;
/// Both directions.
pub const SHUTDOWN_BOTH: u32 = SHUTDOWN_RECEIVE | SHUTDOWN_SEND;

/// struct virtio_vsock_hdr
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Header {
    pub src_cid: u64,
    pub dst_cid: u64,
    pub src_port: u32,
    pub dst_port: u32,
    pub len: u32,
    pub kind: u16,
    pub op: u16,
    pub flags: u32,
    pub buf_alloc: u32,
    pub fwd_cnt: u32,
}

impl Header {
    /// Decodes a header.
    pub fn parse(raw: &[u8; HEADER]) -> Self {
        let u16_at = |at: usize| u16::from_le_bytes([raw[at], raw[at + 1]]);
        let u32_at = |at: usize| u32::from(u16_at(at)) | u32::from(u16_at(at + 2)) << 16;
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        Header {
            src_cid: u64_at(0),
            dst_cid: u64_at(8),
            src_port: u32_at(16),
            dst_port: u32_at(20),
            len: u32_at(24),
            kind: u16_at(28),
            op: u16_at(30),
            flags: u32_at(32),
            buf_alloc: u32_at(36),
            fwd_cnt: u32_at(40),
        }
    }

    /// Encodes the header.
    pub fn bytes(&self) -> [u8; HEADER] {
        let mut raw = [0; HEADER];
        raw[0..8].copy_from_slice(&self.src_cid.to_le_bytes());
        raw[8..16].copy_from_slice(&self.dst_cid.to_le_bytes());
        raw[16..20].copy_from_slice(&self.src_port.to_le_bytes());
        raw[20..24].copy_from_slice(&self.dst_port.to_le_bytes());
        raw[24..28].copy_from_slice(&self.len.to_le_bytes());
        raw[28..30].copy_from_slice(&self.kind.to_le_bytes());
        raw[30..32].copy_from_slice(&self.op.to_le_bytes());
        raw[32..36].copy_from_slice(&self.flags.to_le_bytes());
        raw[36..40].copy_from_slice(&self.buf_alloc.to_le_bytes());
        raw[40..44].copy_from_slice(&self.fwd_cnt.to_le_bytes());
        raw
    }
}
