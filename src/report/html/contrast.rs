//! The contrast of the style sheet's colours in both schemes, by the formula of WCAG 2.2.

use std::collections::BTreeMap;

/// The style sheet that pages contain.
const CSS: &str = include_str!("style.css");
/// What text may stand on.
const GROUNDS: [&str; 3] = ["page", "card", "bad-page"];
/// Level AA for text, and for lines and shapes that carry meaning (success criteria 1.4.3, 1.4.11).
const TEXT: f64 = 4.5;
const SHAPE: f64 = 3.0;
/// Only decorates: borders, and the grid of plots whose ticks have numbers.
const DECORATION: &str = "rule";

type Colour = [f64; 3];

fn parsed(hex: &str) -> Colour {
    let digits = match hex.len() {
        3 => hex.chars().flat_map(|digit| [digit, digit]).collect(),
        _ => hex.to_owned(),
    };
    [0, 2, 4].map(|at| f64::from(u8::from_str_radix(&digits[at..at + 2], 16).unwrap()) / 255.0)
}

fn luminance(colour: Colour) -> f64 {
    let linear = colour.map(|c| if c <= 0.04045 { c / 12.92 } else { ((c + 0.055) / 1.055).powf(2.4) });
    0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
}

fn contrast(a: Colour, b: Colour) -> f64 {
    let (a, b) = (luminance(a), luminance(b));
    (a.max(b) + 0.05) / (a.min(b) + 0.05)
}

/// The colour of `top` with `opacity` over `ground`.
fn over(top: Colour, opacity: f64, ground: Colour) -> Colour {
    std::array::from_fn(|i| top[i] * opacity + ground[i] * (1.0 - opacity))
}

/// The custom properties of both schemes.
fn schemes() -> [(&'static str, BTreeMap<&'static str, Colour>); 2] {
    let blocks: Vec<&str> =
        CSS.split(":root {").skip(1).map(|rest| rest.split_once('}').unwrap().0).collect();
    let colours = |block: &'static str| {
        let declared = block.split(';').filter_map(|one| one.trim().strip_prefix("--")?.split_once(": #"));
        declared.map(|(name, hex)| (name, parsed(hex))).collect::<BTreeMap<_, _>>()
    };
    let [light, dark] = [0, 1].map(|at| colours(blocks[at]));
    assert!(light.len() > 10 && light.keys().eq(dark.keys()), "{light:?} {dark:?}");
    [("light", light), ("dark", dark)]
}

/// The names in `var(--NAME)` of all declarations of `property`.
fn used_as(property: &str) -> Vec<&'static str> {
    let declarations = CSS.split([';', '{', '}']).map(str::trim);
    let values = declarations.filter_map(|one| one.strip_prefix(property)?.strip_prefix(':'));
    let mut names: Vec<_> = values
        .flat_map(|value| value.split("var(--").skip(1).map(|rest| rest.split_once(')').unwrap().0))
        .collect();
    names.sort_unstable();
    names.dedup();
    names
}

fn at_least(least: f64, what: &str, found: f64) {
    assert!(found >= least, "{what}: {found:.2}, less than {least}");
}

#[test]
fn the_formula_is_that_of_wcag() {
    let [black, white, grey] = ["000", "fff", "767676"].map(parsed);
    assert_eq!(format!("{:.2}", contrast(black, white)), "21.00");
    assert_eq!(format!("{:.2}", contrast(grey, white)), "4.54");
}

#[test]
fn all_text_is_seen_on_whatever_it_may_stand_on() {
    let texts = used_as("color");
    assert!(texts.contains(&"ink") && texts.contains(&"dim") && texts.contains(&"bad"), "{texts:?}");
    for (scheme, colours) in schemes() {
        for (text, ground) in texts.iter().flat_map(|text| GROUNDS.map(|ground| (text, ground))) {
            let what = format!("{scheme}: text in {text} on {ground}");
            at_least(TEXT, &what, contrast(colours[text], colours[ground]));
        }
    }
}

#[test]
fn all_lines_and_shapes_are_seen() {
    let mut shapes = [used_as("stroke"), used_as("fill"), used_as("background")].concat();
    shapes.retain(|name| !GROUNDS.contains(name) && *name != DECORATION);
    shapes.push("good");
    shapes.sort_unstable();
    shapes.dedup();
    let spans: Vec<_> = shapes.iter().filter(|name| name.starts_with('m')).collect();
    assert!(shapes.contains(&"c7") && spans.len() == 3, "{shapes:?}");
    for (scheme, colours) in schemes() {
        for shape in &shapes {
            for ground in ["card", "page"] {
                let what = format!("{scheme}: {shape} on {ground}");
                at_least(SHAPE, &what, contrast(colours[shape], colours[ground]));
            }
            // Lines run over the tint of spans.
            for span in spans.iter().filter(|_| shape.starts_with('c')) {
                let tint = over(colours[*span], crate::plot::TINT, colours["card"]);
                let what = format!("{scheme}: {shape} on the tint of {span}");
                at_least(SHAPE, &what, contrast(colours[shape], tint));
            }
        }
    }
}

#[test]
fn what_has_too_little_contrast_only_decorates() {
    for property in ["color", "fill", "background"] {
        assert!(!used_as(property).contains(&DECORATION), "{property}");
    }
    let strokes = CSS.lines().filter(|line| line.contains("stroke: var(--rule)"));
    assert_eq!(strokes.collect::<Vec<_>>(), ["svg [stroke=\"#000002\"] { stroke: var(--rule); }"]);
}
