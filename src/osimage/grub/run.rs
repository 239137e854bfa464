//! Executes GRUB's scripts: variables, conditions, functions, the search for a partition, and the
//! menu.

use std::collections::BTreeMap;
use std::rc::Rc;

use super::environment;
use super::parse::{Command, Piece, Word, parse};
use crate::bls;
use crate::{Disk, Entry, MAX_CONFIG};

/// The maximum number of commands that a script may run. It ends endless loops.
const MAX_STEPS: usize = 200_000;
/// The maximum nesting depth of functions, files and menus.
const MAX_DEPTH: usize = 24;
/// The maximum number of entries in a menu.
const MAX_ENTRIES: usize = 1024;
/// The maximum length of a variable's value in bytes. Longer values become empty.
const MAX_VALUE: usize = 64 << 10;
/// The maximum length of all values together. A value beyond it becomes empty.
const MAX_VALUES: usize = 16 << 20;
/// The maximum length of a command in bytes, with the values of its variables.
const MAX_COMMAND: usize = 1 << 20;
/// The maximum number of words that are compared by one `test`.
const MAX_COMPARED: usize = 64;

/// An entry of the menu. Its commands have not been run.
#[derive(Clone)]
struct Item {
    title: String,
    id: Option<String>,
    is_submenu: bool,
    body: Rc<Vec<Command>>,
}

/// A script and its state.
pub struct Script<'d> {
    disk: &'d Disk,
    variables: BTreeMap<String, String>,
    /// The length of all values.
    stored: usize,
    functions: BTreeMap<String, Rc<Vec<Command>>>,
    menu: Vec<Item>,
    /// The kernel and, below, the command line and initrds of the last `linux` and `initrd`.
    kernel: Option<(usize, String)>,
    cmdline: String,
    initrds: Vec<(usize, String)>,
    steps: usize,
    depth: usize,
}

/// Whether a command succeeded. An error ends the script.
type Success = Result<bool, String>;

impl<'d> Script<'d> {
    /// The state of a script of volume `at`, with GRUB's own variables.
    pub fn new(disk: &'d Disk, at: usize, prefix: &str) -> Self {
        let device = device(disk, at);
        let platform = if cfg!(target_arch = "x86_64") { "pc" } else { "efi" };
        let features =
            ["200_final", "all_video_module", "chainloader_bpb", "default_font_path", "menuentry_id"]
                .into_iter()
                .chain([
                    "menuentry_options",
                    "nativedisk_cmd",
                    "ntldr",
                    "platform_search_hint",
                    "timeout_style",
                ]);
        let mut variables: BTreeMap<String, String> =
            features.map(|name| (format!("feature_{name}"), "y".into())).collect();
        let own = [
            ("root", device.clone()),
            ("prefix", format!("({device}){prefix}")),
            ("config_directory", format!("({device}){prefix}")),
            ("cmdpath", format!("({device}){prefix}")),
            ("grub_platform", platform.into()),
            ("grub_cpu", if cfg!(target_arch = "x86_64") { "x86_64" } else { "arm64" }.into()),
        ];
        variables.extend(own.map(|(name, value)| (name.to_owned(), value)));
        Self {
            disk,
            stored: variables.values().map(String::len).sum(),
            variables,
            functions: BTreeMap::new(),
            menu: Vec::new(),
            kernel: None,
            cmdline: String::new(),
            initrds: Vec::new(),
            steps: 0,
            depth: 0,
        }
    }

    /// Runs `text`.
    pub fn run(&mut self, text: &str) -> Result<(), String> {
        let commands = parse(text)?;
        self.all(&commands).map(drop)
    }

    /// What the entries of the menu boot: the default and the fallback, then all in order.
    pub fn entries(mut self) -> Result<Vec<Entry>, String> {
        if self.kernel.is_some() {
            // A script without a menu.
            return Ok(self.booted("".into()).into_iter().collect());
        }
        if self.menu.is_empty() {
            return Err("its menu has no entry".into());
        }
        let default = self.variables.get("default").cloned().unwrap_or_default();
        let fallback = self.variables.get("fallback").cloned().unwrap_or_default();
        let mut entries = Vec::new();
        let menu = self.menu.clone();
        for chosen in [default, fallback] {
            let first = chosen.split_whitespace().next().map_or("0", |_| &chosen[..]);
            entries.extend(self.choose(&menu, first)?);
        }
        for item in &menu {
            entries.extend(self.enter(item, "0")?);
        }
        if entries.is_empty() { Err("no entry of its menu names a kernel".into()) } else { Ok(entries) }
    }

    /// Runs the entry of `menu` that `chosen` names by number, title or ID. Text after a `>`
    /// chooses in a submenu.
    fn choose(&mut self, menu: &[Item], chosen: &str) -> Result<Option<Entry>, String> {
        let (name, rest) = chosen.split_once('>').unwrap_or((chosen, "0"));
        let number = name.trim().parse::<usize>().ok();
        let named = |item: &&Item| item.title == name || item.id.as_deref() == Some(name);
        let item = menu.iter().find(named).or_else(|| menu.get(number?)).cloned();
        item.map_or(Ok(None), |item| self.enter(&item, rest))
    }

    /// Runs an entry. If it is a submenu, `rest` chooses one of its entries.
    fn enter(&mut self, item: &Item, rest: &str) -> Result<Option<Entry>, String> {
        (self.kernel, self.cmdline, self.initrds) = (None, String::new(), Vec::new());
        let before = (self.variables.clone(), self.stored, std::mem::take(&mut self.menu));
        self.set("chosen", item.title.clone());
        let ran = self.deeper(|script| script.all(&item.body));
        let menu = std::mem::take(&mut self.menu);
        let entry = match ran {
            Ok(_) if item.is_submenu => self.deeper(|script| script.choose(&menu, rest)),
            // If a command failed, there may be no kernel.
            Ok(_) => Ok(self.booted(item.title.clone())),
            Err(why) => Err(why),
        };
        (self.variables, self.stored, self.menu) = before;
        entry
    }

    fn booted(&mut self, title: String) -> Option<Entry> {
        let kernel = self.kernel.take()?;
        let title = if title.is_empty() { kernel.1.clone() } else { title };
        let (initrds, cmdline) = (std::mem::take(&mut self.initrds), std::mem::take(&mut self.cmdline));
        Some(Entry { title, kernel, initrds, cmdline })
    }

    fn deeper<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T, String>) -> Result<T, String> {
        if self.depth == MAX_DEPTH {
            return Err(format!("functions, files and menus are nested deeper than {MAX_DEPTH}"));
        }
        self.depth += 1;
        let done = work(self);
        self.depth -= 1;
        done
    }

    fn all(&mut self, commands: &[Command]) -> Success {
        let mut success = true;
        for command in commands {
            success = self.command(command)?;
        }
        Ok(success)
    }

    fn command(&mut self, command: &Command) -> Success {
        self.steps += 1;
        if self.steps > MAX_STEPS {
            return Err(format!("it runs more than {MAX_STEPS} commands"));
        }
        match command {
            Command::Simple(words, block) => {
                let words = self.expand(words)?;
                self.deeper(|script| script.simple(&words, block.as_ref()))
            }
            Command::If(branches, otherwise) => {
                for (condition, body) in branches {
                    if self.all(condition)? {
                        return self.all(body);
                    }
                }
                self.all(otherwise)
            }
            Command::While(positive, condition, body) => {
                while self.all(condition)? == *positive {
                    self.all(body)?;
                    self.steps += 1;
                    if self.steps > MAX_STEPS {
                        return Err(format!("it runs more than {MAX_STEPS} commands"));
                    }
                }
                Ok(true)
            }
            Command::For(name, words, body) => {
                let words = self.expand(words)?;
                for word in words {
                    self.set(name, word);
                    self.all(body)?;
                }
                Ok(true)
            }
            Command::Function(name, body) => {
                self.functions.insert(name.clone(), Rc::new(body.clone()));
                Ok(true)
            }
        }
    }

    fn set(&mut self, name: &str, mut value: String) {
        self.stored -= self.value(name).len();
        if value.len() > MAX_VALUE || self.stored + value.len() > MAX_VALUES {
            value.clear();
        }
        self.stored += value.len();
        self.variables.insert(name.to_owned(), value);
    }

    fn value(&self, name: &str) -> &str {
        self.variables.get(name).map_or("", String::as_str)
    }

    /// Expands words into words: the value of an unquoted variable is split at white space.
    fn expand(&self, of: &[Word]) -> Result<Vec<String>, String> {
        let (mut words, mut left) = (Vec::new(), MAX_COMMAND);
        for word in of {
            let mut current = if word.is_empty() { Some(String::new()) } else { None };
            for piece in word {
                let (text, split) = match piece {
                    Piece::Text(text) => (text.as_str(), false),
                    Piece::Variable { name, quoted } => (self.value(name), !quoted),
                };
                let rest = left.checked_sub(text.len());
                left = rest.ok_or_else(|| format!("a command is longer than {MAX_COMMAND} bytes"))?;
                if !split {
                    current.get_or_insert_default().push_str(text);
                    continue;
                }
                if text.starts_with(char::is_whitespace) {
                    words.extend(current.take());
                }
                for (at, part) in text.split_whitespace().enumerate() {
                    if at > 0 {
                        words.extend(current.take());
                    }
                    current.get_or_insert_default().push_str(part);
                }
                if text.ends_with(char::is_whitespace) {
                    words.extend(current.take());
                }
            }
            words.extend(current);
        }
        Ok(words)
    }

    /// Replaces `$name` in text, such as the options of a boot loader entry.
    fn expand_text(&self, text: &str) -> String {
        // The text is not a script: only its variables are replaced.
        match parse(&format!("x \"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))) {
            Ok(commands) => match &commands[..] {
                [Command::Simple(words, None)] if words.len() == 2 => {
                    self.expand(&words[1..]).unwrap_or_default().concat()
                }
                _ => text.into(),
            },
            Err(_) => text.into(),
        }
    }

    fn simple(&mut self, words: &[String], block: Option<&Vec<Command>>) -> Success {
        let Some((name, arguments)) = words.split_first() else { return Ok(true) };
        if let Some(body) = self.functions.get(name).cloned() {
            for (at, argument) in arguments.iter().enumerate() {
                self.set(&(at + 1).to_string(), argument.clone());
            }
            return self.all(&body);
        }
        if let Some((variable, value)) = name.split_once('=')
            && is_name(variable)
        {
            self.set(variable, value.to_owned());
            return Ok(true);
        }
        match &name[..] {
            "set" => {
                for argument in arguments {
                    if let Some((name, value)) = argument.split_once('=') {
                        self.set(name, value.to_owned());
                    }
                }
                Ok(true)
            }
            "unset" => {
                for argument in arguments {
                    self.stored -= self.variables.remove(argument).map_or(0, |value| value.len());
                }
                Ok(true)
            }
            "load_env" => Ok(self.load_env(arguments)),
            "search" | "search.fs_uuid" | "search.fs_label" | "search.file" => {
                Ok(self.search(name, arguments))
            }
            "test" => Ok(self.test(arguments)),
            "[" => match arguments.split_last() {
                Some((end, inner)) if end == "]" => Ok(self.test(inner)),
                _ => Err("[ has no ]".into()),
            },
            "false" => Ok(false),
            "not" | "!" => Ok(!self.deeper(|script| script.simple(arguments, block))?),
            "configfile" | "source" | "." | "normal" => match arguments.first() {
                Some(path) => self.source(path, name == "configfile" || name == "normal"),
                None => Ok(true),
            },
            "menuentry" | "submenu" => {
                self.add(arguments, block, name == "submenu")?;
                Ok(true)
            }
            "blscfg" => Ok(self.entries_of_bls()),
            "linux" | "linux16" | "linuxefi" => {
                let Some((path, options)) = arguments.split_first() else { return Ok(false) };
                self.kernel = self.path(path);
                self.cmdline = options.join(" ");
                self.initrds.clear();
                Ok(self.kernel.is_some())
            }
            "initrd" | "initrd16" | "initrdefi" => {
                self.initrds = arguments.iter().filter_map(|path| self.path(path)).collect();
                Ok(self.initrds.len() == arguments.len())
            }
            // These need something that a virtual machine lacks, or ask the user.
            "keystatus" | "background_image" | "loadfont" | "serial" | "cpuid" | "sleep" | "read"
            | "regexp" | "chainloader" | "multiboot" | "multiboot2" | "devicetree" | "hdparm" | "lsefi" => {
                Ok(false)
            }
            // All others affect the display or the disk, or do nothing.
            _ => Ok(true),
        }
    }

    /// Splits `(hd0,gpt2)/path` into the volume and the path. Without a device it is `root`.
    fn path(&self, text: &str) -> Option<(usize, String)> {
        let (device, path) = match text.strip_prefix('(') {
            Some(rest) => rest.split_once(')')?,
            None => (self.value("root"), text),
        };
        Some((volume(self.disk, device)?, path.to_owned()))
    }

    fn source(&mut self, path: &str, new_menu: bool) -> Success {
        let Some(file) = self.path(path) else { return Ok(false) };
        let Ok(text) = self.disk.read(&file, MAX_CONFIG) else { return Ok(false) };
        if new_menu {
            self.menu.clear();
            if let Some((directory, _)) = path.rsplit_once('/') {
                let directory = if path.starts_with('(') {
                    directory.to_owned()
                } else {
                    format!("({}){directory}", self.value("root"))
                };
                self.set("config_directory", directory);
            }
        }
        let commands = parse(&String::from_utf8_lossy(&text))?;
        self.all(&commands)
    }

    fn load_env(&mut self, arguments: &[String]) -> bool {
        let mut path = format!("{}/grubenv", self.value("prefix"));
        let mut names = Vec::new();
        let mut words = arguments.iter();
        while let Some(word) = words.next() {
            match &word[..] {
                "-f" | "--file" => path = words.next().cloned().unwrap_or_default(),
                "-s" | "--skip-sig" => {}
                word => match word.strip_prefix("--file=") {
                    Some(file) => path = file.into(),
                    None => names.push(word.to_owned()),
                },
            }
        }
        let Some(file) = self.path(&path) else { return false };
        let Ok(text) = self.disk.read(&file, MAX_CONFIG) else { return false };
        for (name, value) in environment(&String::from_utf8_lossy(&text)) {
            if names.is_empty() || names.contains(&name) {
                self.set(&name, value);
            }
        }
        true
    }

    fn search(&mut self, name: &str, arguments: &[String]) -> bool {
        let mut by = match name {
            "search.fs_uuid" => "uuid",
            "search.fs_label" => "label",
            _ => "file",
        };
        let (mut variable, mut wanted) = ("root".to_owned(), Vec::new());
        let mut words = arguments.iter().peekable();
        while let Some(word) = words.next() {
            match &word[..] {
                "-u" | "--fs-uuid" => by = "uuid",
                "-l" | "--label" => by = "label",
                "-f" | "--file" => by = "file",
                "-s" | "--set" => {}
                "-n" | "--no-floppy" => {}
                "-h" | "--hint" => drop(words.next()),
                word if word.starts_with("--hint") || word.starts_with("--efidisk") => {}
                word => match word.strip_prefix("--set=") {
                    Some(name) => variable = name.into(),
                    None => wanted.push(word.to_owned()),
                },
            }
        }
        // The forms are `search.fs_uuid VALUE VARIABLE HINT` and `search --set VARIABLE … VALUE`.
        let Some(value) = (if name == "search" { wanted.last() } else { wanted.first() }).cloned() else {
            return false;
        };
        if name != "search" && wanted.len() > 1 {
            variable = wanted[1].clone();
        } else if name == "search" && wanted.len() > 1 {
            variable = wanted[0].clone();
        }
        let found = self.disk.readable().find(|(_, _, files)| match by {
            "uuid" => files.uuid().eq_ignore_ascii_case(&value),
            "label" => files.label() == value,
            _ => files.exists(&value),
        });
        match found {
            Some((at, ..)) => {
                let device = device(self.disk, at);
                self.set(&variable, device);
                true
            }
            None => false,
        }
    }

    /// GRUB's version of test(1).
    fn test(&self, words: &[String]) -> bool {
        if words.len() > MAX_COMPARED {
            return false;
        }
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        // `-a` binds tighter than `-o`.
        words
            .split(|word| *word == "-o")
            .any(|part| part.split(|word| *word == "-a").all(|part| self.primary(part)))
    }

    fn primary(&self, words: &[&str]) -> bool {
        let on_disk = |path: &str| {
            self.path(path)
                .and_then(|(at, path)| Some((self.disk.volumes.get(at)?.content.as_ref().ok()?, path)))
        };
        match words {
            ["!", rest @ ..] => !self.primary(rest),
            ["(", inner @ .., ")"] => self.primary(inner),
            ["-n", text] => !text.is_empty(),
            ["-z", text] => text.is_empty(),
            ["-d", path] => on_disk(path).is_some_and(|(files, path)| files.is_directory(&path)),
            ["-e", path] => on_disk(path).is_some_and(|(files, path)| files.exists(&path)),
            ["-f", path] => {
                on_disk(path).is_some_and(|(files, path)| files.exists(&path) && !files.is_directory(&path))
            }
            ["-s", path] => on_disk(path).is_some_and(|(files, path)| {
                files.read(&path, MAX_CONFIG).is_ok_and(|text| !text.is_empty())
            }),
            [one, "=" | "==", two] => one == two,
            [one, "!=", two] => one != two,
            [one, "<", two] => one < two,
            [one, ">", two] => one > two,
            [one, operator @ ("-eq" | "-ne" | "-lt" | "-le" | "-gt" | "-ge"), two] => {
                match (one.parse::<i64>(), two.parse::<i64>()) {
                    (Ok(one), Ok(two)) => match *operator {
                        "-eq" => one == two,
                        "-ne" => one != two,
                        "-lt" => one < two,
                        "-le" => one <= two,
                        "-gt" => one > two,
                        _ => one >= two,
                    },
                    _ => false,
                }
            }
            [text] => !text.is_empty(),
            _ => false,
        }
    }

    fn add(
        &mut self,
        arguments: &[String],
        block: Option<&Vec<Command>>,
        is_submenu: bool,
    ) -> Result<(), String> {
        let (mut title, mut id) = (None, None);
        let mut words = arguments.iter();
        while let Some(word) = words.next() {
            match &word[..] {
                "--id" | "$menuentry_id_option" => id = words.next().cloned(),
                "--class" | "--users" | "--hotkey" | "--source" => drop(words.next()),
                word if word.starts_with("--") => {
                    if let Some(value) = word.strip_prefix("--id=") {
                        id = Some(value.to_owned());
                    }
                }
                _ if title.is_none() => title = Some(word.clone()),
                _ => {}
            }
        }
        if self.menu.len() == MAX_ENTRIES {
            return Err(format!("its menu has more than {MAX_ENTRIES} entries"));
        }
        let body = Rc::new(block.cloned().unwrap_or_default());
        self.menu.push(Item { title: title.unwrap_or_default(), id, is_submenu, body });
        Ok(())
    }

    /// Fedora's `blscfg`: adds the boot loader entries to the menu.
    fn entries_of_bls(&mut self) -> bool {
        let volumes = ["boot", "root"].map(|name| volume(self.disk, self.value(name)));
        let mut places = Vec::new();
        for at in volumes.into_iter().flatten() {
            places.extend(bls::DIRECTORIES.map(|directory| (at, directory.to_owned())));
            let set = self.value("blsdir");
            if !set.is_empty() {
                places.insert(0, (at, set.to_owned()));
            }
        }
        for (at, directory) in places {
            let items = bls::items(self.disk, at, &directory);
            if items.is_empty() {
                continue;
            }
            for item in items {
                if self.menu.len() >= MAX_ENTRIES {
                    return false;
                }
                let Some(linux) = item.linux else { continue };
                let device = device(self.disk, at);
                let text = |text: String| vec![Piece::Text(text)];
                let on = |path: &str| text(format!("({device}){path}"));
                let mut linux = vec![text("linux".into()), on(&linux)];
                linux.extend(
                    self.expand_text(&item.options).split_whitespace().map(|option| text(option.into())),
                );
                let mut body = vec![Command::Simple(linux, None)];
                let initrds: Vec<String> = item.initrds.iter().map(|path| self.expand_text(path)).collect();
                let mut words = vec![text("initrd".into())];
                words.extend(initrds.iter().filter(|path| !path.is_empty()).map(|path| on(path)));
                if words.len() > 1 {
                    body.push(Command::Simple(words, None));
                }
                let title = if item.title.is_empty() { item.id.clone() } else { item.title };
                self.menu.push(Item { title, id: Some(item.id), is_submenu: false, body: Rc::new(body) });
            }
            return true;
        }
        false
    }
}

/// Whether `text` is a valid name of a variable.
fn is_name(text: &str) -> bool {
    let mut chars = text.chars();
    chars.next().is_some_and(|first| first.is_ascii_alphabetic() || first == '_')
        && chars.all(|char| char.is_ascii_alphanumeric() || char == '_')
}

/// GRUB's name of a volume.
fn device(disk: &Disk, at: usize) -> String {
    match disk.volumes.get(at).map(|volume| volume.partition.number) {
        Some(number) if number > 0 => format!("hd0,{number}"),
        _ => "hd0".into(),
    }
}

/// The volume with GRUB's name `device`: `hd0,gpt1`, `hd0,msdos1`, `hd0,1` or `hd0`.
fn volume(disk: &Disk, device: &str) -> Option<usize> {
    let number = match device.split_once(',') {
        None => 0,
        Some((_, partition)) => {
            partition.trim_start_matches("gpt").trim_start_matches("msdos").parse::<u32>().ok()?
        }
    };
    disk.volumes.iter().position(|volume| volume.partition.number == number)
}
