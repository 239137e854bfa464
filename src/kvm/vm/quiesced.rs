//! Proof that nothing in this process writes to a machine's memory.

use kvm_ioctls::VcpuFd;

use super::vcpu::{Answer, Error, Vcpu};

/// A stopped machine, for as long as this value lives: vCPUs are out of `KVM_RUN` and handle no
/// exits, and devices do nothing.
///
/// It borrows the vCPUs, so they cannot be resumed meanwhile. The machine stops its devices when it
/// creates this value, and resumes them afterwards.
pub struct Quiesced<'a> {
    vcpus: &'a mut [Vcpu],
}

impl<'a> Quiesced<'a> {
    /// A machine with these `vcpus`, which are paused. `devices` stops other writers of its memory;
    /// `|| ()` if there are none.
    ///
    /// # Errors
    /// A vCPU is not paused.
    pub fn new(vcpus: &'a mut [Vcpu], devices: impl FnOnce()) -> Result<Self, Error> {
        if let Some(vcpu) = vcpus.iter().find(|vcpu| !vcpu.stands_still()) {
            return Err(Error::NotPaused(vcpu.index()));
        }
        // After the vCPUs, which could restart a device.
        devices();
        Ok(Self { vcpus })
    }

    /// Runs `call` on each vCPU's thread, on all at once.
    ///
    /// # Errors
    /// A vCPU has exited.
    pub fn each<R: Send + 'static>(
        &self,
        call: impl Fn(&VcpuFd) -> R + Clone + Send + 'static,
    ) -> Result<Vec<R>, Error> {
        self.each_its_own(|_| call.clone())
    }

    /// Like [`Quiesced::each`], with a separate call for each vCPU number.
    ///
    /// # Errors
    /// A vCPU has exited.
    pub fn each_its_own<R: Send + 'static, C: FnOnce(&VcpuFd) -> R + Send + 'static>(
        &self,
        call: impl Fn(usize) -> C,
    ) -> Result<Vec<R>, Error> {
        each(self.vcpus, call)
    }

    /// Like [`Quiesced::each_its_own`], without the first vCPU.
    ///
    /// # Errors
    /// A vCPU has exited.
    pub fn others_their_own<R: Send + 'static, C: FnOnce(&VcpuFd) -> R + Send + 'static>(
        &self,
        call: impl Fn(usize) -> C,
    ) -> Result<Vec<R>, Error> {
        each(self.vcpus.get(1..).unwrap_or_default(), call)
    }

    /// Runs `call` on the first vCPU's thread.
    ///
    /// # Errors
    /// The vCPU has exited, or there is none.
    pub fn first<R: Send + 'static>(
        &self,
        call: impl FnOnce(&VcpuFd) -> R + Send + 'static,
    ) -> Result<R, Error> {
        self.vcpus.first().ok_or(Error::Gone(0))?.with(call)
    }
}

/// Runs the result of `call` for each of `vcpus` on its own thread, on all at once.
fn each<R: Send + 'static, C: FnOnce(&VcpuFd) -> R + Send + 'static>(
    vcpus: &[Vcpu],
    call: impl Fn(usize) -> C,
) -> Result<Vec<R>, Error> {
    let begun = vcpus.iter().map(|vcpu| vcpu.begin(call(vcpu.index()))).collect::<Result<Vec<_>, _>>()?;
    begun.into_iter().map(Answer::wait).collect()
}
