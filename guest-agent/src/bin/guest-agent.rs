//! The guest agent as a program of its own; `vellum` is it too, where it is PID 1.

fn main() -> std::process::ExitCode {
    guest_agent::init::main()
}
