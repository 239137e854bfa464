//! The attribute `#[test]`, which `support` re-exports.

use proc_macro::{TokenStream, TokenTree};

/// Makes a function a test of its program, under its own name. `support::test` says how to use it.
#[proc_macro_attribute]
pub fn test(needs: TokenStream, function: TokenStream) -> TokenStream {
    let Some(name) = name_of(&function) else {
        return "::core::compile_error!(\"a test is a function\");".parse().expect("an item");
    };
    let needs: String =
        split(needs).iter().map(|need| format!("let need: ::support::Need = {need}; need?;")).collect();
    let declared = format!(
        "::support::inventory::submit! {{ ::support::Declared {{
            name: \"{name}\",
            need: || {{ {needs} ::core::result::Result::Ok(()) }},
            test: || ::support::Ends::end({name}()),
        }} }}"
    );
    let declared: TokenStream = declared.parse().expect("an item");
    function.into_iter().chain(declared).collect()
}

fn name_of(function: &TokenStream) -> Option<String> {
    let mut tokens = function.clone().into_iter();
    tokens.find(|token| matches!(token, TokenTree::Ident(word) if word.to_string() == "fn"))?;
    tokens.next().map(|name| name.to_string())
}

/// The parts of `list` between commas.
fn split(list: TokenStream) -> Vec<TokenStream> {
    let is_comma = |token: &TokenTree| matches!(token, TokenTree::Punct(mark) if mark.as_char() == ',');
    let tokens: Vec<TokenTree> = list.into_iter().collect();
    let parts = tokens.split(is_comma).filter(|part| !part.is_empty());
    parts.map(|part| part.iter().cloned().collect()).collect()
}
