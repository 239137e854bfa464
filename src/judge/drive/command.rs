//! Any program, by a command: its standard output is the console, and it ends when the machine
//! does.

use std::fs::{self, File};
use std::process::Command;

use super::process::Process;
use super::{DISK, FIRST, Round, Scenario, Trouble, cannot};
use crate::image::{Format, image};

/// What a command's words may have, and what each is replaced with: four formats of the image, its
/// disk and its options, and the machine's vCPUs and MiB.
pub const PLACEHOLDERS: [&str; 8] =
    ["{elf}", "{bzimage}", "{flat}", "{image}", "{disk}", "{cmdline}", "{cpus}", "{memory}"];

pub(super) fn run(round: &Round, scenario: Scenario) -> Result<(), Trouble> {
    if scenario != Scenario::Boot {
        return cannot("a command can do nothing but boot", "--scenario boot");
    }
    for (name, format) in Format::NAMES {
        fs::write(round.path(name), image(format)).map_err(Trouble::io("the image"))?;
    }
    let path = |name: &str| round.path(name).display().to_string();
    let setup = round.setup;
    let values = [
        path("elf"),
        path("bzimage"),
        path("flat"),
        path("image"),
        path(DISK),
        setup.cmdline.clone(),
        setup.cpus.to_string(),
        setup.memory.to_string(),
    ];
    let words = setup.command.iter().map(|word| {
        PLACEHOLDERS.iter().zip(&values).fold(word.clone(), |word, (name, value)| word.replace(name, value))
    });
    let words: Vec<String> = words.collect();
    let Some((program, arguments)) = words.split_first() else {
        return Err(Trouble::failed("the command is empty"));
    };
    let console = File::create(round.path(FIRST)).map_err(Trouble::io("the console"))?;
    let mut command = Command::new(program);
    let error = round.path("first.err");
    Process::start_with(command.args(arguments), error, console.into())?.ended(setup.limit)
}
