use super::Tokenizer;

/// What becomes of control tokens in decoded text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlText {
    /// They leave no trace.
    Hide,
    /// They are spelled out, for people who debug prompts.
    Show,
}

/// Turns ids into text as they are generated.
///
/// All pieces and [`finish`](Self::finish) together are exactly what the tokenizer's decoder
/// gives for all the ids at once. A character never comes in halves: a run of byte tokens is
/// held back until another token ends it, because the decoder judges a run as a whole, as UTF-8
/// or, if it isn't, as one U+FFFD for each byte. A step costs time in proportion to its token.
#[derive(Clone, Debug)]
pub struct TextStream {
    tokenizer: Tokenizer,
    control: ControlText,
    /// The run of byte tokens that has not ended yet.
    run: Vec<u8>,
}

impl TextStream {
    pub(super) fn new(tokenizer: Tokenizer, control: ControlText) -> Self {
        Self { tokenizer, control, run: Vec::new() }
    }

    /// The text that this id completes; empty for a hidden control token, an id outside the
    /// vocabulary, or a byte whose run goes on.
    pub fn push(&mut self, id: u32) -> String {
        if self.control == ControlText::Hide && self.tokenizer.is_control(id) {
            return String::new();
        }
        match self.tokenizer.token(id) {
            None => String::new(),
            Some(Token::Byte(byte)) => {
                self.run.push(byte);
                String::new()
            }
            Some(Token::Text(text)) if self.run.is_empty() => text,
            Some(Token::Text(text)) => self.finish() + &text,
        }
    }

    /// The text still held back, once no id follows. The stream is then as new.
    pub fn finish(&mut self) -> String {
        String::from_utf8(std::mem::take(&mut self.run))
            .unwrap_or_else(|error| "\u{FFFD}".repeat(error.as_bytes().len()))
    }
}

/// One token of the vocabulary, as the decoder sees it.
pub(super) enum Token {
    Text(String),
    Byte(u8),
}

impl Token {
    /// A byte is spelled `<0xHH>`.
    pub(super) fn new(text: String) -> Self {
        let digits = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
        let byte = digits.filter(|digits| digits.len() == 2);
        match byte.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => Self::Byte(byte),
            None => Self::Text(text),
        }
    }
}
