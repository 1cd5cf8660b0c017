//! Keeps what people wrote from becoming control tokens when a template prints it.
//!
//! A control token counts only if the template wrote its first character. So every character in
//! people's strings that can begin a control token is replaced, before rendering, by a mark: a
//! private-use character that occurs nowhere else. Templates may trim, cut and join the strings
//! as they like; afterwards the control tokens that are still spelled are the template's own,
//! and the marks become the characters they stood for.

use std::collections::{BTreeSet, HashSet};
use std::ops::Range;

use serde_json::Value;

use super::added::{AddedTokens, Stretch};
use super::{Result, TextError};

/// A conversation as the template prints it, remembering which control tokens are the template's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendered {
    text: String,
    pieces: Vec<Piece>,
}

/// A stretch of a rendered conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Piece {
    /// A token that the template spelled.
    Token(u32),
    /// A byte range of the text in which no spelling counts as a control token.
    Text(Range<usize>),
}

impl Rendered {
    /// The whole text, as the template printed it.
    pub fn text(&self) -> &str {
        &self.text
    }

    pub(super) fn pieces(&self) -> &[Piece] {
        &self.pieces
    }
}

/// The marks of one rendering.
pub(super) struct Guard<'a> {
    added: &'a AddedTokens,
    /// `(first character of some control token, its mark)`.
    marks: Vec<(char, char)>,
}

impl<'a> Guard<'a> {
    /// Chooses marks that occur neither in `values` nor in `source`, the template.
    ///
    /// # Errors
    /// [`TextError::NoMarkLeft`] if each of Unicode's 137 468 private-use characters occurs.
    pub(super) fn new<'v>(
        added: &'a AddedTokens,
        values: impl IntoIterator<Item = &'v Value>,
        source: &str,
    ) -> Result<Self> {
        let mut used: HashSet<char> = private_use(source).collect();
        for value in values {
            for_each_string(value, &mut |text| used.extend(private_use(text)));
        }
        let firsts: BTreeSet<char> =
            added.control_spellings().filter_map(|spelling| spelling.chars().next()).collect();
        let mut free = PRIVATE_USE.into_iter().flatten().rev().filter(|mark| !used.contains(mark));
        let marks = firsts
            .into_iter()
            .map(|first| free.next().map(|mark| (first, mark)).ok_or(TextError::NoMarkLeft))
            .collect::<Result<_>>()?;
        Ok(Self { added, marks })
    }

    /// Marks a text, except where one of the spellings in `keep` stands.
    pub(super) fn hide(&self, text: &str, keep: &[&str]) -> String {
        let mut hidden = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(c) = rest.chars().next() {
            let mark = self.marks.iter().find(|(first, _)| *first == c).map(|(_, mark)| *mark);
            let kept = mark.and_then(|_| keep.iter().find(|kept| rest.starts_with(**kept)));
            let taken = kept.map_or(c.len_utf8(), |kept| kept.len());
            match kept {
                Some(kept) => hidden.push_str(kept),
                None => hidden.push(mark.unwrap_or(c)),
            }
            rest = &rest[taken..];
        }
        hidden
    }

    /// Marks every string of a JSON value, keys of objects included.
    pub(super) fn hide_in(&self, value: &Value, keep: &[&str]) -> Value {
        match value {
            Value::String(text) => Value::String(self.hide(text, keep)),
            Value::Array(items) => items.iter().map(|item| self.hide_in(item, keep)).collect(),
            Value::Object(map) => map
                .iter()
                .map(|(key, item)| (self.hide(key, keep), self.hide_in(item, keep)))
                .collect(),
            Value::Null | Value::Bool(_) | Value::Number(_) => value.clone(),
        }
    }

    /// Cuts a rendering at the control tokens spelled in it and takes the marks back.
    pub(super) fn reveal(&self, printed: &str) -> Rendered {
        let mut rendered =
            Rendered { text: String::with_capacity(printed.len()), pieces: Vec::new() };
        for stretch in self.added.split(printed) {
            let start = rendered.text.len();
            match stretch {
                Stretch::Token { id, spelling } => {
                    rendered.text.push_str(spelling);
                    rendered.pieces.push(Piece::Token(id));
                }
                Stretch::Text(text) => {
                    rendered.text.extend(text.chars().map(|c| self.unmark(c)));
                    rendered.pieces.push(Piece::Text(start..rendered.text.len()));
                }
            }
        }
        rendered
    }

    fn unmark(&self, c: char) -> char {
        self.marks.iter().find(|(_, mark)| *mark == c).map_or(c, |(first, _)| *first)
    }
}

/// The control tokens spelled in the strings of a value.
pub(super) fn spelled_in<'a>(value: &Value, added: &'a AddedTokens, found: &mut BTreeSet<&'a str>) {
    for_each_string(value, &mut |text| {
        for spelling in added.control_spellings() {
            if text.contains(spelling) {
                found.insert(spelling);
            }
        }
    });
}

/// The number of values in a value, itself included.
pub(super) fn count(value: &Value) -> u64 {
    let within: u64 = match value {
        Value::Array(items) => items.iter().map(count).sum(),
        Value::Object(map) => map.values().map(count).sum(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => 0,
    };
    1 + within
}

/// Bytes of all strings in a value, keys of objects included.
pub(super) fn bytes(value: &Value) -> usize {
    let mut bytes = 0;
    for_each_string(value, &mut |text| bytes += text.len());
    bytes
}

fn for_each_string(value: &Value, visit: &mut impl FnMut(&str)) {
    match value {
        Value::String(text) => visit(text),
        Value::Array(items) => items.iter().for_each(|item| for_each_string(item, visit)),
        Value::Object(map) => {
            for (key, item) in map {
                visit(key);
                for_each_string(item, visit);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

const PRIVATE_USE: [std::ops::RangeInclusive<char>; 3] =
    ['\u{E000}'..='\u{F8FF}', '\u{F0000}'..='\u{FFFFD}', '\u{100000}'..='\u{10FFFD}'];

/// Whether a character may serve as a mark.
pub(super) fn is_private_use(c: char) -> bool {
    PRIVATE_USE.iter().any(|range| range.contains(&c))
}

fn private_use(text: &str) -> impl Iterator<Item = char> {
    text.chars().filter(|&c| is_private_use(c))
}
