//! The dirty log as bitmaps: `KVM_GET_DIRTY_LOG`, and `KVM_CLEAR_DIRTY_LOG` where protection is manual.

use std::sync::Arc;

use kvm_bindings::{KVM_DIRTY_LOG_INITIALLY_SET, KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE};
use kvm_ioctls::VmFd;

use super::{DirtyTracker, Error, Method, Slots, scan, sys};
use crate::vm::Vm;
use crate::vm::quiesced::Quiesced;

/// Pages that one `KVM_CLEAR_DIRTY_LOG` can name: a 32-bit count, a multiple of 64.
const MOST: u64 = (u32::MAX - 63) as u64;

/// One of the three methods that use bitmaps.
#[derive(Debug)]
pub struct LogTracker {
    method: Method,
    chunk: u64,
    vm: Arc<VmFd>,
    slots: Slots,
}

impl LogTracker {
    /// Sets KVM to `method`.
    pub(super) fn new(
        method: Method,
        vm: &Vm,
        quiesced: &Quiesced<'_>,
        chunk: Option<u64>,
    ) -> Result<Self, Error> {
        method.check(&vm.fd)?;
        let bits = match method {
            Method::ManualProtect => KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE,
            Method::InitiallySet => KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE | KVM_DIRTY_LOG_INITIALLY_SET,
            Method::Bitmap | Method::Ring => 0,
        };
        if sys::manual_protect_bits(&vm.fd) != 0 {
            let call = "KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2";
            sys::set_manual_protect(&vm.fd, bits).map_err(|source| Error::Ioctl { call, source })?;
        }
        let chunk = chunk.unwrap_or(MOST).clamp(64, MOST) / 64 * 64;
        Ok(Self { method, chunk, vm: vm.fd.clone(), slots: Slots::new(vm, quiesced)? })
    }
}

impl DirtyTracker for LogTracker {
    fn method(&self) -> Method {
        self.method
    }

    fn slots(&self) -> &Slots {
        &self.slots
    }

    fn slots_mut(&mut self) -> &mut Slots {
        &mut self.slots
    }

    fn get(&mut self) -> Result<(), Error> {
        self.slots.fetch()
    }

    fn clear(&mut self) -> Result<(), Error> {
        if self.method.is_manual() {
            for log in &self.slots.logs {
                let mut first = 0;
                for part in log.words.chunks((self.chunk / 64) as usize) {
                    let pages = self.chunk.min(log.pages() - first);
                    // A clean chunk has nothing to protect.
                    if !scan::is_clean(part) {
                        sys::clear_log(&self.vm, log.slot.id(), first, pages as u32, part).map_err(
                            |source| Error::Slot { call: "KVM_CLEAR_DIRTY_LOG", slot: log.slot.id(), source },
                        )?;
                    }
                    first += pages;
                }
            }
        }
        self.slots.merge_own();
        Ok(())
    }
}
