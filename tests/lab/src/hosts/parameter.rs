//! Module parameters, `MODULE.NAME=VALUE`, and some of the kernel's own words: checks whether one
//! is in force in the running kernel.

use std::fs;

/// Parameters that the kernel reads before module parameters exist. They have no file in sysfs. KVM
/// logs their effect.
const EARLY: [&str; 1] = ["kvm-arm.mode"];

/// Kernel words that remove a CPU flag, with that flag.
const FEATURES: [(&str, &str); 1] = [("nopcid", "pcid")];

/// Why `parameter` is not in force, or `None` if it is. The kernel ignores names that it does not
/// know.
pub fn refused(parameter: &str) -> Option<String> {
    if let Some((_, flag)) = FEATURES.iter().find(|(word, _)| *word == parameter) {
        return match fs::read_to_string("/proc/cpuinfo") {
            Ok(text) if !has(&text, flag) => None,
            _ => Some(format!("{parameter}: the processor has {flag} all the same")),
        };
    }
    let form = || parameter.split_once('.').and_then(|(module, rest)| Some((module, rest.split_once('=')?)));
    let Some((module, (name, value))) = form() else {
        return Some(format!("{parameter}: the form is MODULE.NAME=VALUE, or {}", FEATURES[0].0));
    };
    if EARLY.contains(&format!("{module}.{name}").as_str()) {
        return None;
    }
    let file = format!("/sys/module/{}/parameters/{name}", module.replace('-', "_"));
    let Ok(present) = fs::read_to_string(&file) else {
        return Some(format!("{parameter}: this kernel has no such parameter"));
    };
    let (present, value) = (switch(&present), switch(value));
    // The kernel may print values other than switches differently from how they were set.
    let switches = [&present, &value].iter().all(|text| ["Y", "N"].contains(text));
    (switches && present != value).then(|| format!("{parameter}: it is {present}"))
}

/// Whether a processor in `cpuinfo` has `flag`.
fn has(cpuinfo: &str, flag: &str) -> bool {
    cpuinfo
        .lines()
        .filter(|line| line.starts_with("flags"))
        .any(|line| line.split_whitespace().any(|word| word == flag))
}

/// Normalises a switch. The kernel prints Y and N, and also accepts 1 and 0.
fn switch(text: &str) -> &str {
    match text.trim() {
        "1" | "Y" | "y" | "on" => "Y",
        "0" | "N" | "n" | "off" => "N",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_kernel_has_is_refused() {
        assert!(refused("no_such_module.flag=1").unwrap().contains("has no such parameter"));
        assert_eq!(refused("kvm-arm.mode=nested"), None);
        assert!(refused("kvm=1").unwrap().contains("the form is"));
        assert!(refused("kvm.x").unwrap().contains("the form is"));
    }

    #[test]
    fn a_flag_is_a_word_of_its_own() {
        let cpuinfo = "model name : pcid\nflags\t\t: fpu invpcid pse\n";
        assert!(has(cpuinfo, "invpcid") && !has(cpuinfo, "pcid"));
    }

    #[test]
    fn a_switch_has_two_spellings() {
        assert_eq!((switch("1\n"), switch("Y\n")), ("Y", "Y"));
        assert_eq!((switch("0"), switch("N")), ("N", "N"));
        assert_eq!(switch("never\n"), "never");
    }
}
