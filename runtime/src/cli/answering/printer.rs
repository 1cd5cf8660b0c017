//! Answers as text, while they are generated.

use std::borrow::Cow;
use std::io::{self, IsTerminal, Write};

use super::arguments::Thoughts;
use crate::text::Part;

const DIM: &str = "\x1b[2m";
const PLAIN: &str = "\x1b[0m";

/// Writes an answer to stdout, and thoughts where they are wanted. Nothing is ever drawn anew.
#[derive(Debug)]
pub(super) struct Printer {
    thoughts: Thoughts,
    /// Whether stdout is a terminal: then control characters of the text are shown, not obeyed.
    terminal: bool,
    colour: bool,
    in_thought: bool,
}

impl Printer {
    /// `thoughts` are dimmed on a terminal, and hidden elsewhere, if nothing is said.
    pub(super) fn new(thoughts: Option<Thoughts>) -> Self {
        let terminal = io::stdout().is_terminal();
        let default = if terminal { Thoughts::Dim } else { Thoughts::Hide };
        let no_colour = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let thoughts = thoughts.unwrap_or(default);
        Self { thoughts, terminal, colour: terminal && !no_colour, in_thought: false }
    }

    /// Writes a piece at once.
    pub(super) fn part(&mut self, part: &Part) -> io::Result<()> {
        match part {
            Part::Answer(text) => {
                self.end_thought()?;
                self.write(text)
            }
            Part::Thought(text) => {
                let begins = !std::mem::replace(&mut self.in_thought, true);
                match self.thoughts {
                    Thoughts::Hide => Ok(()),
                    Thoughts::Stderr => {
                        let text = visible(text, io::stderr().is_terminal());
                        io::stderr().write_all(text.as_bytes())
                    }
                    Thoughts::Dim => {
                        if begins && self.colour {
                            self.raw(DIM)?;
                        }
                        self.write(text)
                    }
                }
            }
        }
    }

    /// Ends the answer's last line.
    pub(super) fn end(&mut self) -> io::Result<()> {
        self.end_thought()?;
        self.raw("\n")
    }

    fn end_thought(&mut self) -> io::Result<()> {
        if !std::mem::take(&mut self.in_thought) {
            return Ok(());
        }
        match self.thoughts {
            Thoughts::Hide => Ok(()),
            Thoughts::Stderr => io::stderr().write_all(b"\n"),
            Thoughts::Dim if self.colour => self.raw(&format!("{PLAIN}\n")),
            Thoughts::Dim => self.raw("\n"),
        }
    }

    fn write(&self, text: &str) -> io::Result<()> {
        self.raw(&visible(text, self.terminal))
    }

    fn raw(&self, text: &str) -> io::Result<()> {
        let mut out = io::stdout().lock();
        out.write_all(text.as_bytes())?;
        out.flush()
    }
}

/// A text with its control characters, but for line feeds and tabs, as `\u{1b}` and the like if
/// it goes to a terminal.
fn visible(text: &str, terminal: bool) -> Cow<'_, str> {
    let obeyed = |c: char| c.is_control() && c != '\n' && c != '\t';
    if !terminal || !text.contains(obeyed) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::new();
    for c in text.chars() {
        if obeyed(c) { shown.extend(c.escape_default()) } else { shown.push(c) }
    }
    Cow::Owned(shown)
}

#[cfg(test)]
mod tests {
    use super::visible;

    #[test]
    fn a_terminal_gets_no_control_sequences() {
        let text = "a\x1b[31m\u{9b}2J\r\n\tb";
        assert_eq!(visible(text, true), "a\\u{1b}[31m\\u{9b}2J\\r\n\tb");
        assert_eq!(visible(text, false), text);
    }
}
