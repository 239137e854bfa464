//! A network of this program's own, so that the tests do not depend on the host's: an interface
//! whose other end does not answer, a default route, and a resolver on loopback, which the tests
//! provide.

use std::net::Ipv4Addr;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::{env, fs, process};

use support::Need;

/// Set if the program runs in that network.
const VARIABLE: &str = "VELLUM_TEST_NETWORK";

/// The addresses of the host, its gateway and its resolver.
pub const HOST: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 10);
pub const GATEWAY: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
pub const RESOLVER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 53);

/// The script that creates the network. `$0` is a file that is mounted over resolv.conf. The
/// gateway itself is unreachable at once, not after a timeout.
const MADE: &str = "rm=$0; ip link set lo up && ip link add host0 type veth peer name wire0 && ip address add 192.0.2.10/24 dev host0 \
    && ip link set host0 up && ip link set wire0 up && ip route add default via 192.0.2.1 && ip route add unreachable 192.0.2.1 \
    && mount --bind \"$0\" /etc/resolv.conf && rm \"$rm\" && exec \"$@\"";

/// Runs `command` in such a network.
fn within(command: &[String]) -> Option<Command> {
    let resolv = env::temp_dir().join(format!("vellum-resolv-{}", process::id()));
    fs::write(&resolv, format!("nameserver {RESOLVER}\n")).ok()?;
    let mut unshare = Command::new("unshare");
    unshare.args(["--net", "--mount", "sh", "-c", MADE]).arg(resolv).args(command).env(VARIABLE, "");
    Some(unshare)
}

/// Runs the program again in such a network, if one can be created.
pub fn enter() {
    if env::var_os(VARIABLE).is_some() {
        return;
    }
    let can = within(&["true".into()]).and_then(|mut command| command.output().ok());
    if !can.is_some_and(|output| output.status.success()) {
        return;
    }
    let program = env::current_exe().expect("a program has a name").to_string_lossy().into_owned();
    let again: Vec<String> = std::iter::once(program).chain(env::args().skip(1)).collect();
    if let Some(mut command) = within(&again) {
        let error = command.exec();
        panic!("unshare, which worked a moment ago: {error}");
    }
}

/// Requires such a network.
pub fn network() -> Need {
    ["unshare", "ip"].into_iter().try_for_each(support::tools::program)?;
    let remedy = "needs a network of its own: root, and veth interfaces";
    env::var_os(VARIABLE).map(drop).ok_or_else(|| remedy.into())
}
