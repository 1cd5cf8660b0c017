//! Values as Python prints them.
//!
//! Chat templates are written against Jinja2, where `{{ none }}` prints `None`, a filter for
//! strings takes any value by its `str()`, and Hugging Face's `tojson` is Python's `json.dumps`.

use std::fmt::Write;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use super::guard;

/// Deepest nesting of a value that is printed; JSON from outside has at most 128 levels.
const MAX_DEPTH: usize = 200;

/// Bytes of one printed value. Sequences may be lazy and longer than memory: `[0] * 10**15`.
const MAX_LEN: usize = 64 << 20;

/// `str(value)`, and nothing for an undefined value.
pub(super) fn str(value: &Value) -> Result<String, Error> {
    match value.as_str() {
        Some(text) => Ok(text.to_owned()),
        None if value.is_undefined() => Ok(String::new()),
        None => {
            let mut text = String::new();
            repr(&mut text, value, 0)?;
            Ok(text)
        }
    }
}

/// `str(value).strip()` or `.strip(characters)`.
pub(super) fn trim(value: &Value, characters: Option<&str>) -> Result<String, Error> {
    let text = str(value)?;
    Ok(match characters {
        Some(characters) => text.trim_matches(|c| characters.contains(c)),
        None => text.trim_matches(is_space),
    }
    .to_owned())
}

/// `str.isspace`: besides Unicode's white space also the four separators of ASCII.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1C}'..='\u{1F}').contains(&c)
}

/// Hugging Face's filter `tojson(indent=None, sort_keys=False, ensure_ascii=False)`.
pub(super) fn tojson(value: &Value, options: Kwargs) -> Result<String, Error> {
    let mut json = Json {
        text: String::new(),
        indent: options.get::<Option<usize>>("indent")?,
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    if json.indent.is_some_and(|indent| indent > 64) {
        return Err(Error::new(ErrorKind::InvalidOperation, "tojson: indent must be at most 64"));
    }
    json.write(value, 0)?;
    Ok(json.text)
}

fn repr(text: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
    check_size(text, depth)?;
    match value.kind() {
        ValueKind::None => text.push_str("None"),
        ValueKind::Bool => text.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => number(text, value)?,
        ValueKind::String => quoted(text, value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable => {
            text.push('[');
            for (index, item) in value.try_iter()?.enumerate() {
                text.push_str(if index > 0 { ", " } else { "" });
                repr(text, &item, depth + 1)?;
            }
            text.push(']');
        }
        ValueKind::Map => {
            text.push('{');
            for (index, key) in value.try_iter()?.enumerate() {
                text.push_str(if index > 0 { ", " } else { "" });
                repr(text, &key, depth + 1)?;
                text.push_str(": ");
                repr(text, &value.get_item(&key)?, depth + 1)?;
            }
            text.push('}');
        }
        _ => display(text, value),
    }
    Ok(())
}

/// A string literal: in single quotes, or in double ones if that saves escapes.
fn quoted(text: &mut String, content: &str) {
    let quote = if content.contains('\'') && !content.contains('"') { '"' } else { '\'' };
    text.push(quote);
    for c in content.chars() {
        match c {
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            '\\' => text.push_str("\\\\"),
            c if c == quote => text.extend(['\\', c]),
            c if c.is_control() || (c != ' ' && c.is_whitespace()) => match u32::from(c) {
                code @ ..=0xFF => push(text, format_args!("\\x{code:02x}")),
                code => push(text, format_args!("\\u{code:04x}")),
            },
            c => text.push(c),
        }
    }
    text.push(quote);
}

/// `repr` of an int or float. Both languages print the shortest digits that read back as the
/// same float and change to exponents at 1e-4 and 1e16; Python signs and pads the exponent.
fn number(text: &mut String, value: &Value) -> Result<(), Error> {
    if value.is_integer() {
        display(text, value);
        return Ok(());
    }
    let float = format!("{:?}", f64::try_from(value.clone())?);
    match float.split_once('e') {
        None => text.push_str(if float == "NaN" { "nan" } else { &float }),
        Some((digits, exponent)) => {
            let (sign, exponent) = match exponent.strip_prefix('-') {
                Some(exponent) => ('-', exponent),
                None => ('+', exponent),
            };
            push(text, format_args!("{digits}e{sign}{exponent:0>2}"));
        }
    }
    Ok(())
}

struct Json {
    text: String,
    indent: Option<usize>,
    sort_keys: bool,
    ensure_ascii: bool,
}

impl Json {
    fn write(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        check_size(&self.text, depth)?;
        match value.kind() {
            ValueKind::None => self.text.push_str("null"),
            ValueKind::Bool => self.text.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.number(value)?,
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?;
                self.list(['[', ']'], items, depth, |json, item| json.write(item, depth + 1))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                self.list(['{', '}'], keys.into_iter(), depth, |json, key| {
                    json.string(&str(key)?);
                    json.text.push_str(": ");
                    json.write(&value.get_item(key)?, depth + 1)
                })?;
            }
            kind => {
                let reason = format!("tojson: {kind} is not JSON");
                return Err(Error::new(ErrorKind::InvalidOperation, reason));
            }
        }
        Ok(())
    }

    fn list(
        &mut self,
        [open, close]: [char; 2],
        items: impl Iterator<Item = Value>,
        depth: usize,
        mut write: impl FnMut(&mut Self, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.text.push(open);
        let mut empty = true;
        for (index, item) in items.enumerate() {
            empty = false;
            match (index, self.indent) {
                (0, None) => {}
                (_, None) => self.text.push_str(", "),
                (0, Some(_)) => self.new_line(depth + 1),
                (_, Some(_)) => {
                    self.text.push(',');
                    self.new_line(depth + 1);
                }
            }
            write(self, &item)?;
        }
        if !empty && self.indent.is_some() {
            self.new_line(depth);
        }
        self.text.push(close);
        Ok(())
    }

    fn new_line(&mut self, depth: usize) {
        self.text.push('\n');
        let columns = self.indent.unwrap_or_default() * depth;
        self.text.extend(std::iter::repeat_n(' ', columns));
    }

    fn number(&mut self, value: &Value) -> Result<(), Error> {
        let mut text = String::new();
        number(&mut text, value)?;
        self.text.push_str(match text.as_str() {
            "nan" => "NaN",
            "inf" => "Infinity",
            "-inf" => "-Infinity",
            finite => finite,
        });
        Ok(())
    }

    /// A string literal. Private-use characters may be a guard's marks and stay as they are.
    fn string(&mut self, content: &str) {
        self.text.push('"');
        for c in content.chars() {
            match c {
                '"' => self.text.push_str("\\\""),
                '\\' => self.text.push_str("\\\\"),
                '\n' => self.text.push_str("\\n"),
                '\r' => self.text.push_str("\\r"),
                '\t' => self.text.push_str("\\t"),
                '\u{8}' => self.text.push_str("\\b"),
                '\u{C}' => self.text.push_str("\\f"),
                c if c < ' ' || (self.ensure_ascii && c > '~' && !guard::is_private_use(c)) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        push(&mut self.text, format_args!("\\u{unit:04x}"));
                    }
                }
                c => self.text.push(c),
            }
        }
        self.text.push('"');
    }
}

fn check_size(text: &str, depth: usize) -> Result<(), Error> {
    let what = match (text.len() > MAX_LEN, depth > MAX_DEPTH) {
        (false, false) => return Ok(()),
        (true, _) => "long",
        (false, true) => "deeply nested",
    };
    Err(Error::new(ErrorKind::InvalidOperation, format!("a value is too {what} to be printed")))
}

fn display(text: &mut String, value: &Value) {
    push(text, format_args!("{value}"));
}

/// Writing to a `String` can't fail.
fn push(text: &mut String, arguments: std::fmt::Arguments<'_>) {
    let _ = text.write_fmt(arguments);
}
