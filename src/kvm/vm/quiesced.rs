//! Proof that nothing in this process writes to a machine's memory.

use kvm_ioctls::VcpuFd;

use super::vcpu::{Answer, Error, Vcpu};

/// A machine that stands still for as long as this lives: its vCPUs are out of `KVM_RUN` and of what their exits mean, and its
/// devices do nothing.
///
/// It borrows the vCPUs, so that nobody can resume them meanwhile. Devices are the machine's: it stops them when it makes this,
/// and lets them go on after it is done with it.
pub struct Quiesced<'a> {
    vcpus: &'a mut [Vcpu],
}

impl<'a> Quiesced<'a> {
    /// Of a machine with these `vcpus`, which are paused. `devices` stops whatever else writes to its memory; `|| ()` where there
    /// is nothing else.
    ///
    /// # Errors
    /// Where a vCPU is not paused.
    pub fn new(vcpus: &'a mut [Vcpu], devices: impl FnOnce()) -> Result<Self, Error> {
        if let Some(vcpu) = vcpus.iter().find(|vcpu| !vcpu.stands_still()) {
            return Err(Error::NotPaused(vcpu.index()));
        }
        // After the vCPUs, which could start a device again.
        devices();
        Ok(Self { vcpus })
    }

    /// Runs `call` for each vCPU, all at once, each on its own thread.
    ///
    /// # Errors
    /// Where a vCPU has exited.
    pub fn each<R: Send + 'static>(
        &self,
        call: impl Fn(&VcpuFd) -> R + Clone + Send + 'static,
    ) -> Result<Vec<R>, Error> {
        self.each_its_own(|_| call.clone())
    }

    /// As [`Quiesced::each`], where each vCPU, by its number, has a call of its own.
    ///
    /// # Errors
    /// Where a vCPU has exited.
    pub fn each_its_own<R: Send + 'static, C: FnOnce(&VcpuFd) -> R + Send + 'static>(
        &self,
        call: impl Fn(usize) -> C,
    ) -> Result<Vec<R>, Error> {
        each(self.vcpus, call)
    }

    /// The same for all but the first.
    ///
    /// # Errors
    /// Where one has exited.
    pub fn others_their_own<R: Send + 'static, C: FnOnce(&VcpuFd) -> R + Send + 'static>(
        &self,
        call: impl Fn(usize) -> C,
    ) -> Result<Vec<R>, Error> {
        each(self.vcpus.get(1..).unwrap_or_default(), call)
    }

    /// Runs `call` for the first vCPU, on its own thread.
    ///
    /// # Errors
    /// Where it has exited, or there is none.
    pub fn first<R: Send + 'static>(
        &self,
        call: impl FnOnce(&VcpuFd) -> R + Send + 'static,
    ) -> Result<R, Error> {
        self.vcpus.first().ok_or(Error::Gone(0))?.with(call)
    }
}

/// Runs what `call` gives for each of `vcpus` on its own thread, on all of them at once.
fn each<R: Send + 'static, C: FnOnce(&VcpuFd) -> R + Send + 'static>(
    vcpus: &[Vcpu],
    call: impl Fn(usize) -> C,
) -> Result<Vec<R>, Error> {
    let begun = vcpus.iter().map(|vcpu| vcpu.begin(call(vcpu.index()))).collect::<Result<Vec<_>, _>>()?;
    begun.into_iter().map(Answer::wait).collect()
}
