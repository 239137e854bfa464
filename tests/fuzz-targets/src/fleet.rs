//! Plans and results of fleets. An accepted one has tasks with numbers and ranges that fit, can be
//! tried again, and can be written again.

use vellum_fleet::plan::Plan;
use vellum_fleet::result;
use vellum_sys::quote;

/// The target. `cargo fuzz` runs it, and `cargo test` runs it on the corpus.
pub fn fleet(data: &[u8]) {
    if let Ok(text) = std::str::from_utf8(data) {
        plan(text);
    }
    if let Ok((header, reports)) = result::parse(data) {
        let text = result::text(&header, &reports).unwrap();
        assert_eq!(result::parse(&text), Ok((header, reports)), "it is read otherwise than it was written");
    }
    let name = String::from_utf8_lossy(data);
    if let Some((index, attempt, _)) = result::named(&name) {
        assert!(!name.contains(['/', '\u{1b}', '<']) && index.max(attempt) < 1_000_000_000_000, "{name}");
    }
}

fn plan(text: &str) {
    let parse = |text: &str| Plan::parse(text, &|_| Ok(Some("--seed".into())));
    let plan = match parse(text) {
        Ok(plan) => plan,
        Err(why) => return assert!(!why.contains(['\n', '\u{1b}']), "{why:?}"),
    };
    for index in [0, plan.len() / 2, plan.len() - 1] {
        let task = plan.task(index).expect("it is one of the plan's");
        let test = task.test;
        let end = test.first_seed + test.seeds;
        assert!(task.index == index && (1..=test.per_task).contains(&task.count));
        assert!(task.first >= test.first_seed && task.first + task.count <= end && task.round < test.times);
    }
    assert_eq!(plan.task(plan.len()), None);
    for test in &plan.tests {
        let words = test.command(test.first_seed);
        assert!(words.iter().all(|word| !word.contains('\0')), "{words:?}");
        assert!(!quote::line_for_ssh(&words).is_empty());
        let again = parse(&test.again(&plan.name, test.first_seed, 2)).expect("a seed again is a plan");
        assert_eq!((again.len(), again.tests[0].command(test.first_seed)), (2, words));
    }
}
