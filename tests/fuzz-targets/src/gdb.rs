//! Packets of a debugger, for a stopped machine without vCPUs.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use event_manager::{EventManager, MutEventSubscriber, SubscriberOps};
use vellum_kvm::memory::{Memory, MemoryConfig};
use vellum_kvm::vm::vcpu::VcpusDebugHandle;
use vellum_machine::gdb::{Debugger, Door, Wish};
use vellum_sys::socket::Listener;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// The target. `cargo fuzz` runs it, and `cargo test` runs it on the corpus.
pub fn gdb(data: &[u8]) {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!("vellum-fuzz-gdb-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let path = std::env::temp_dir().join(name);
    let door = Door::without_kvm(Listener::bind(&path).expect("a socket"), true);
    let memory = Memory::map(vellum_kvm::arch::layout::RAM, MemoryConfig::new(1 << 20)).expect("a MiB");
    let wake = Arc::new(EventFd::new(EFD_NONBLOCK).expect("an eventfd"));
    let slots = memory.slots().to_vec();
    let mut debugger = Debugger::new(door, VcpusDebugHandle::new(&[]), memory.guest.clone(), slots, wake);
    let mut events =
        EventManager::<Arc<std::sync::Mutex<dyn MutEventSubscriber + Send>>>::new().expect("epoll");
    events.add_subscriber(debugger.event_sources().expect("once"));
    let mut client = UnixStream::connect(&path).expect("it listens");
    client.set_nonblocking(true).expect("a socket");
    // The handshake, so that the input is a packet.
    let _ = client.write_all(b"+");
    let _ = client.write_all(data);
    let mut stands = false;
    for _ in 0..64 {
        while events.run_with_timeout(0).expect("epoll") > 0 {}
        match debugger.turn(stands) {
            Wish::Stand => stands = true,
            Wish::Go => stands = false,
            Wish::Nothing => break,
        }
    }
    drop(client);
    while events.run_with_timeout(0).expect("epoll") > 0 {}
    // Whatever was sent, the machine is not stopped after the client has gone.
    for _ in 0..8 {
        match debugger.turn(stands) {
            Wish::Stand => stands = true,
            Wish::Go => stands = false,
            Wish::Nothing => break,
        }
    }
    let _ = std::fs::remove_file(&path);
}
