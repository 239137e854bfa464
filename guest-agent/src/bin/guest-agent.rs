//! The guest agent as a separate program. `vellum` itself is also the agent when it is PID 1.

fn main() -> std::process::ExitCode {
    guest_agent::init::main()
}
