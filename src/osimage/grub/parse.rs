//! Parses GRUB's script language (GRUB manual, "Writing full configuration files directly") into
//! commands.

/// The maximum nesting depth of blocks.
const MAX_DEPTH: usize = 32;

/// A piece of a word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Literal text.
    Text(String),
    /// The value of a variable. It is split into words unless it is quoted.
    Variable {
        /// Its name.
        name: String,
        /// Whether it is in double quotes.
        quoted: bool,
    },
}

/// A word. A word without pieces is an empty string in quotes.
pub type Word = Vec<Piece>;

/// A command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Words, and a block after `menuentry` and `submenu`.
    Simple(Vec<Word>, Option<Vec<Command>>),
    /// `if` and each `elif`, as condition and body, and the body of `else`.
    If(Vec<(Vec<Command>, Vec<Command>)>, Vec<Command>),
    /// `while` (true) or `until` (false), with condition and body.
    While(bool, Vec<Command>, Vec<Command>),
    /// `for NAME in WORDS`, with the body.
    For(String, Vec<Word>, Vec<Command>),
    /// `function NAME`, with the body.
    Function(String, Vec<Command>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Token {
    Word(Word),
    /// A newline or a semicolon.
    End,
    Open,
    Close,
}

/// Parses a script.
///
/// # Errors
/// The syntax error, as text.
pub fn parse(text: &str) -> Result<Vec<Command>, String> {
    let mut parser = Parser { tokens: tokens(text)?, at: 0, depth: 0 };
    let commands = parser.commands(&[])?;
    match parser.tokens.get(parser.at) {
        None => Ok(commands),
        Some(token) => Err(format!("{token:?} is out of place")),
    }
}

fn tokens(text: &str) -> Result<Vec<Token>, String> {
    let mut tokens = Vec::new();
    let mut word: Option<Word> = None;
    let mut chars = text.chars().peekable();
    let push = |word: &mut Option<Word>, char: char| {
        let word = word.get_or_insert_default();
        match word.last_mut() {
            Some(Piece::Text(text)) => text.push(char),
            _ => word.push(Piece::Text(char.into())),
        }
    };
    while let Some(char) = chars.next() {
        match char {
            ' ' | '\t' | '\r' => tokens.extend(word.take().map(Token::Word)),
            '\n' | ';' => {
                tokens.extend(word.take().map(Token::Word));
                tokens.push(Token::End);
            }
            '{' | '}' if word.is_none() => tokens.push(if char == '{' { Token::Open } else { Token::Close }),
            '#' if word.is_none() => while chars.next_if(|&char| char != '\n').is_some() {},
            '\\' => match chars.next() {
                None | Some('\n') => {}
                Some(char) => push(&mut word, char),
            },
            '\'' => {
                word.get_or_insert_default();
                loop {
                    match chars.next() {
                        None => return Err("a quote is not closed".into()),
                        Some('\'') => break,
                        Some(char) => push(&mut word, char),
                    }
                }
            }
            '"' => {
                word.get_or_insert_default();
                loop {
                    match chars.next() {
                        None => return Err("a quote is not closed".into()),
                        Some('"') => break,
                        Some('\\') => match chars.next() {
                            Some('\n') | None => {}
                            Some(char @ ('$' | '"' | '\\')) => push(&mut word, char),
                            Some(char) => {
                                push(&mut word, '\\');
                                push(&mut word, char);
                            }
                        },
                        Some('$') => match variable(&mut chars)? {
                            Some(name) => {
                                word.get_or_insert_default().push(Piece::Variable { name, quoted: true })
                            }
                            None => push(&mut word, '$'),
                        },
                        Some(char) => push(&mut word, char),
                    }
                }
            }
            '$' => match variable(&mut chars)? {
                Some(name) => word.get_or_insert_default().push(Piece::Variable { name, quoted: false }),
                None => push(&mut word, '$'),
            },
            char => push(&mut word, char),
        }
    }
    tokens.extend(word.map(Token::Word));
    Ok(tokens)
}

/// The name after a `$`. `None` if none follows.
fn variable(chars: &mut std::iter::Peekable<std::str::Chars<'_>>) -> Result<Option<String>, String> {
    let mut name = String::new();
    if chars.next_if_eq(&'{').is_some() {
        loop {
            match chars.next() {
                None | Some('\n') => return Err("${ is not closed".into()),
                Some('}') => return Ok(Some(name)),
                Some(char) => name.push(char),
            }
        }
    }
    if let Some(char) = chars.next_if(|char| char.is_ascii_digit() || "?@*#".contains(*char)) {
        return Ok(Some(char.into()));
    }
    while let Some(char) = chars.next_if(|char| char.is_ascii_alphanumeric() || *char == '_') {
        name.push(char);
    }
    Ok((!name.is_empty()).then_some(name))
}

struct Parser {
    tokens: Vec<Token>,
    at: usize,
    depth: usize,
}

impl Parser {
    /// The text of the token at `at`, if it can be a keyword.
    fn plain(&self, at: usize) -> Option<&str> {
        match self.tokens.get(at)? {
            Token::Word(word) => match &word[..] {
                [Piece::Text(text)] => Some(text),
                _ => None,
            },
            _ => None,
        }
    }

    /// Parses commands up to a word in `ends`, a closing brace or the end. That token is not
    /// consumed.
    fn commands(&mut self, ends: &[&str]) -> Result<Vec<Command>, String> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(format!("blocks are nested deeper than {MAX_DEPTH}"));
        }
        let mut commands = Vec::new();
        loop {
            while self.tokens.get(self.at) == Some(&Token::End) {
                self.at += 1;
            }
            match self.tokens.get(self.at) {
                None | Some(Token::Close) => break,
                _ if self.plain(self.at).is_some_and(|word| ends.contains(&word)) => break,
                _ => commands.push(self.command()?),
            }
        }
        self.depth -= 1;
        Ok(commands)
    }

    fn command(&mut self) -> Result<Command, String> {
        match self.plain(self.at) {
            Some("if") => self.condition(),
            Some(word @ ("while" | "until")) => {
                let positive = word == "while";
                self.at += 1;
                let condition = self.commands(&["do"])?;
                self.expect("do")?;
                let body = self.commands(&["done"])?;
                self.expect("done")?;
                Ok(Command::While(positive, condition, body))
            }
            Some("for") => {
                let name = self.plain(self.at + 1).ok_or("for needs a name")?.to_owned();
                self.at += 2;
                self.expect("in")?;
                let words = self.words();
                while self.tokens.get(self.at) == Some(&Token::End) {
                    self.at += 1;
                }
                self.expect("do")?;
                let body = self.commands(&["done"])?;
                self.expect("done")?;
                Ok(Command::For(name, words, body))
            }
            Some("function") => {
                let name = self.plain(self.at + 1).ok_or("a function needs a name")?.to_owned();
                self.at += 2;
                while self.tokens.get(self.at) == Some(&Token::End) {
                    self.at += 1;
                }
                Ok(Command::Function(name, self.block()?.ok_or("a function needs a block")?))
            }
            _ => {
                let words = self.words();
                if words.is_empty() {
                    return Err(format!("{:?} is out of place", self.tokens.get(self.at)));
                }
                Ok(Command::Simple(words, self.block()?))
            }
        }
    }

    fn condition(&mut self) -> Result<Command, String> {
        self.at += 1;
        let mut branches = Vec::new();
        loop {
            let condition = self.commands(&["then"])?;
            self.expect("then")?;
            branches.push((condition, self.commands(&["elif", "else", "fi"])?));
            let word = self.plain(self.at).unwrap_or_default().to_owned();
            self.at += 1;
            match &word[..] {
                "elif" => {}
                "else" => {
                    let otherwise = self.commands(&["fi"])?;
                    self.expect("fi")?;
                    return Ok(Command::If(branches, otherwise));
                }
                "fi" => return Ok(Command::If(branches, Vec::new())),
                _ => return Err("an if has no fi".into()),
            }
        }
    }

    fn words(&mut self) -> Vec<Word> {
        let mut words = Vec::new();
        while let Some(Token::Word(word)) = self.tokens.get(self.at) {
            words.push(word.clone());
            self.at += 1;
        }
        words
    }

    fn block(&mut self) -> Result<Option<Vec<Command>>, String> {
        if self.tokens.get(self.at) != Some(&Token::Open) {
            return Ok(None);
        }
        self.at += 1;
        let commands = self.commands(&[])?;
        if self.tokens.get(self.at) != Some(&Token::Close) {
            return Err("a block is not closed".into());
        }
        self.at += 1;
        Ok(Some(commands))
    }

    fn expect(&mut self, keyword: &str) -> Result<(), String> {
        if self.plain(self.at) != Some(keyword) {
            return Err(format!("{keyword} is missing"));
        }
        self.at += 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_and_variables() {
        let parsed = parse("linux /boot/$kernel\"a b\"'c $d' ${e}f \"x$y\" # comment\n").unwrap();
        let text = |text: &str| Piece::Text(text.into());
        let variable = |name: &str, quoted| Piece::Variable { name: name.into(), quoted };
        let words = vec![
            vec![text("linux")],
            vec![text("/boot/"), variable("kernel", false), text("a bc $d")],
            vec![variable("e", false), text("f")],
            vec![text("x"), variable("y", true)],
        ];
        assert_eq!(parsed, [Command::Simple(words, None)]);
    }

    #[test]
    fn what_is_not_closed_is_refused() {
        for text in ["if true; then", "menuentry x {", "echo 'a", "echo \"a", "}", "echo ${a", "for x", "{"] {
            assert!(parse(text).is_err(), "{text}");
        }
        let deep = "if true; then\n".repeat(100);
        assert!(parse(&deep).unwrap_err().contains("nested"));
    }
}
