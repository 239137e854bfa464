//! The reader of result files. Any result can be shown in every form without a panic, and written
//! and read again.

use std::path::Path;

use vellum_report::terminal::{Extent, Form};
use vellum_report::view::View;
use vellum_report::{compare, html, json, terminal};

/// The target. `cargo fuzz` runs it, and `cargo test` runs it on the corpus.
pub fn report(data: &[u8]) {
    let Ok(results) = json::parse(data, Path::new("fuzz")) else { return };
    for form in [Form::Text(80), Form::Markdown] {
        for extent in [Extent::Short("More"), Extent::Whole] {
            let text = terminal::render(&results, form, extent);
            assert!(!text.contains('\u{1b}'), "a result moves the cursor");
            assert!(form != Form::Markdown || !text.contains("<script"), "a result brings a script");
        }
    }
    let page = html::render(&results);
    assert!(!page.contains("<script"), "a result brings a script");
    let views = [View::Ktap, View::Junit, View::Kcidb { origin: "fuzz".into() }];
    for view in views {
        let text = view.render(&results).unwrap();
        assert!(!text.contains('\u{1b}'), "a result moves the cursor: {view:?}");
        // Markup has a meaning only in XML.
        assert!(!matches!(view, View::Junit) || !text.contains("<script"), "a result brings a script");
    }
    let side = compare::Side { name: "fuzz", results: &results };
    if let Ok(comparison) = compare::compare(side, side) {
        for (form, extent) in [(Form::Text(80), Extent::Whole), (Form::Markdown, Extent::Short("More"))] {
            assert!(!comparison.render(form, extent).contains('\u{1b}'), "a result moves the cursor");
        }
        assert!(!html::comparison(&comparison).contains("<script"), "a result brings a script");
    }
    for result in &results {
        let again = json::parse(&serde_json::to_vec(result).unwrap(), Path::new("again")).unwrap();
        assert_eq!(again, std::slice::from_ref(result));
    }
}
