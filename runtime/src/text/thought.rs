//! Thoughts told apart from the answer, by token ids.

use super::{ControlText, TextStream, Tokenizer};

/// Spellings of the control tokens that open and close a thought, and the name that a thought
/// begins with, on a line of its own.
const DELIMITERS: [(&str, &str, &str); 1] = [("<|channel>", "<channel|>", "thought\n")];

/// A piece of what the model says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Text for the reader.
    Answer(String),
    /// Text that the model wrote for itself.
    Thought(String),
}

/// Turns ids into text as they are generated, thoughts apart from the answer.
///
/// Only ids delimit a thought: a spelling in the text does not. A closer without an opener and an
/// opener inside a thought leave no trace; a thought that is never closed goes on to the end. All
/// pieces together are what [`TextStream`]s give for the ids between the delimiters. A vocabulary
/// without delimiters has no thoughts.
#[derive(Clone, Debug)]
pub struct ThoughtStream {
    text: TextStream,
    delimiters: Option<Delimiters>,
    inside: bool,
    /// The beginning of a thought while it may still be its name.
    name: Option<String>,
}

#[derive(Clone, Copy, Debug)]
struct Delimiters {
    open: u32,
    close: u32,
    name: &'static str,
}

impl Delimiters {
    fn of(tokenizer: &Tokenizer) -> Option<Self> {
        DELIMITERS.iter().find_map(|(open, close, name)| {
            let id =
                |spelling| tokenizer.token_to_id(spelling).filter(|id| tokenizer.is_control(*id));
            Some(Self { open: id(open)?, close: id(close)?, name })
        })
    }

    fn is(&self, id: u32) -> bool {
        id == self.open || id == self.close
    }
}

impl ThoughtStream {
    /// A stream for what follows `prompt`, which may end within a thought.
    pub fn after(tokenizer: &Tokenizer, prompt: &[u32]) -> Self {
        let delimiters = Delimiters::of(tokenizer);
        let inside = delimiters.is_some_and(|delimiters| {
            let last = prompt.iter().rev().find(|id| delimiters.is(**id));
            last.is_some_and(|id| *id == delimiters.open)
        });
        let text = tokenizer.stream(ControlText::Hide);
        Self { text, delimiters, inside, name: None }
    }

    /// Whether a thought is open.
    pub fn is_inside(&self) -> bool {
        self.inside
    }

    /// The text that this id completes, in order: often one piece, none while a character is
    /// incomplete.
    pub fn push(&mut self, id: u32) -> Vec<Part> {
        match self.delimiters.filter(|delimiters| delimiters.is(id)) {
            None => {
                let text = self.text.push(id);
                self.part(text).into_iter().collect()
            }
            Some(delimiters) => {
                let parts = self.finish();
                let opens = id == delimiters.open;
                if opens && !self.inside {
                    self.name = Some(String::new());
                }
                self.inside = opens;
                parts
            }
        }
    }

    /// The text still held back, once no id follows.
    pub fn finish(&mut self) -> Vec<Part> {
        let text = self.text.finish();
        let part = self.part(text);
        let name = self.name.take().filter(|name| !name.is_empty()).map(Part::Thought);
        part.into_iter().chain(name).collect()
    }

    fn part(&mut self, text: String) -> Option<Part> {
        if text.is_empty() {
            return None;
        }
        if !self.inside {
            return Some(Part::Answer(text));
        }
        let text = match (self.name.take(), self.delimiters) {
            (Some(begun), Some(Delimiters { name, .. })) => {
                let begun = begun + &text;
                if name.starts_with(&begun) && name != begun {
                    self.name = Some(begun);
                    return None;
                }
                begun.strip_prefix(name).unwrap_or(&begun).to_owned()
            }
            _ => text,
        };
        Some(text).filter(|text| !text.is_empty()).map(Part::Thought)
    }
}
