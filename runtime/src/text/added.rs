//! Tokens that are found in a text by their spelling, before the model sees it.

use std::collections::{HashMap, HashSet};

use tokenizers::AddedVocabulary;

use super::{Result, TextError};

/// The spellings that the tokenizer cuts out of a text, and which of them are control tokens.
#[derive(Debug)]
pub(super) struct AddedTokens {
    ids: HashMap<String, u32>,
    /// Lengths of the spellings in bytes, longest first: the longest match wins.
    lengths: Vec<usize>,
    /// Whether some spelling starts with this byte.
    first: [bool; 256],
    control: HashSet<u32>,
}

/// A stretch of a text, as [`AddedTokens::split`] finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stretch<'a> {
    /// Text between two added tokens, never empty.
    Text(&'a str),
    /// An added token, as it is spelled.
    Token { id: u32, spelling: &'a str },
}

impl AddedTokens {
    /// Collects the tokens that are matched against raw text. Those that the file marks as
    /// `normalized` are left to the tokenizer; a control token must not be one of them.
    pub(super) fn new(vocabulary: &AddedVocabulary) -> Result<Self> {
        let mut added = Self {
            ids: HashMap::new(),
            lengths: Vec::new(),
            first: [false; 256],
            control: HashSet::new(),
        };
        for (&id, token) in vocabulary.get_added_tokens_decoder() {
            if token.special {
                added.control.insert(id);
            }
            if token.normalized && !token.special {
                continue;
            }
            let context = token.normalized || token.single_word || token.lstrip || token.rstrip;
            if context {
                return Err(TextError::UnsupportedTokenizer {
                    feature: format!(
                        "`normalized`, `single_word`, `lstrip` or `rstrip` for the added token `{}`",
                        token.content
                    ),
                });
            }
            if let Some(&first) = token.content.as_bytes().first() {
                added.first[usize::from(first)] = true;
            }
            added.lengths.push(token.content.len());
            added.ids.insert(token.content.clone(), id);
        }
        added.lengths.sort_unstable_by(|a, b| b.cmp(a));
        added.lengths.dedup();
        Ok(added)
    }

    /// Whether an id is that of a control token.
    pub(super) fn is_control(&self, id: u32) -> bool {
        self.control.contains(&id)
    }

    /// The spellings of all control tokens.
    pub(super) fn control_spellings(&self) -> impl Iterator<Item = &str> {
        self.ids
            .iter()
            .filter(|(_, id)| self.is_control(**id))
            .map(|(spelling, _)| spelling.as_str())
    }

    /// The longest added token at the start of `text`: its id and length in bytes.
    pub(super) fn at_start(&self, text: &str) -> Option<(u32, usize)> {
        if !self.first[usize::from(*text.as_bytes().first()?)] {
            return None;
        }
        self.lengths.iter().find_map(|&len| Some((*self.ids.get(text.get(..len)?)?, len)))
    }

    /// Cuts a text at every added token: leftmost first, the longest of those that start there.
    pub(super) fn split<'a>(&self, text: &'a str) -> Vec<Stretch<'a>> {
        let mut stretches = Vec::new();
        let (mut start, mut at) = (0, 0);
        while at < text.len() {
            let found = text.is_char_boundary(at).then(|| self.at_start(&text[at..])).flatten();
            let Some((id, len)) = found else {
                at += 1;
                continue;
            };
            if start < at {
                stretches.push(Stretch::Text(&text[start..at]));
            }
            stretches.push(Stretch::Token { id, spelling: &text[at..at + len] });
            at += len;
            start = at;
        }
        if start < text.len() {
            stretches.push(Stretch::Text(&text[start..]));
        }
        stretches
    }
}
