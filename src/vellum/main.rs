//! The `vellum` program; everything it does is in the library.

fn main() -> std::process::ExitCode {
    vellum::cli::main()
}
