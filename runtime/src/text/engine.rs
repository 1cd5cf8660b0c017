//! The template engine, set up as Hugging Face sets up Jinja2, and its limits.

use std::io;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::{TextError, clock, python};

/// Bytes of one rendering: some 16 million tokens, more than any context holds.
const MAX_OUTPUT: usize = 64 << 20;

/// Filters that allocate as much as a number in the template says.
const UNBOUNDED_FILTERS: [&str; 4] = ["batch", "slice", "format", "indent"];

/// An engine with the filters, tests, functions and methods that chat templates use.
pub(super) fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_debug(false);
    environment.set_formatter(|out, _, value| Ok(out.write_str(&python::str(value)?)?));
    environment.set_unknown_method_callback(call_method);
    for name in UNBOUNDED_FILTERS {
        environment.remove_filter(name);
    }
    environment.add_filter("string", |value: Value| python::str(&value));
    environment.add_filter("upper", |value: Value| Ok(python::str(&value)?.to_uppercase()));
    environment.add_filter("lower", |value: Value| Ok(python::str(&value)?.to_lowercase()));
    environment.add_filter("trim", |value: Value, characters: Option<String>| {
        python::trim(&value, characters.as_deref())
    });
    environment
        .add_filter("tojson", |value: Value, options: Kwargs| python::tojson(&value, options));
    environment.add_test("sequence", |value: Value| {
        use ValueKind::{Iterable, Map, Seq, String};
        matches!(value.kind(), String | Seq | Map | Iterable)
    });
    environment.add_function("raise_exception", |message: String| -> Result<String, Error> {
        Err(invalid(message.clone()).with_source(Refusal(message)))
    });
    environment.add_function("strftime_now", |format: String| {
        clock::strftime_now(&format).map_err(invalid)
    });
    environment
}

/// Python's methods of strings, lists and dicts, where the engine's own differ or don't end.
fn call_method(
    state: &State<'_, '_>,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    match (value.as_str(), method, arguments) {
        (Some(text), "strip", []) => Ok(text.trim_matches(python::is_space).into()),
        (Some(text), "lstrip", []) => Ok(text.trim_start_matches(python::is_space).into()),
        (Some(text), "rstrip", []) => Ok(text.trim_end_matches(python::is_space).into()),
        (Some(text), "count", [part]) if part.as_str() == Some("") => {
            Ok((text.chars().count() + 1).into())
        }
        (Some(_), "format", _) => Err(ErrorKind::UnknownMethod.into()),
        _ => unknown_method_callback(state, value, method, arguments),
    }
}

fn invalid(reason: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}

/// The template called `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refusal(String);

/// A buffer for output that refuses to grow without end.
#[derive(Default)]
pub(super) struct Output(Vec<u8>);

impl Output {
    /// What was written. The engine writes only UTF-8.
    pub(super) fn into_string(self) -> String {
        String::from_utf8(self.0).unwrap_or_else(|error| error.to_string())
    }
}

impl io::Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() > MAX_OUTPUT - self.0.len() {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The engine's error as one of ours; `steps` is the limit that the engine had.
pub(super) fn explain(error: &Error, steps: u64) -> TextError {
    let line = error.line();
    let mut sources = std::iter::successors(Some(error as &dyn std::error::Error), |e| e.source());
    if let Some(Refusal(message)) = sources.find_map(|source| source.downcast_ref()) {
        return TextError::Refused { message: message.clone() };
    }
    match error.kind() {
        ErrorKind::OutOfFuel => TextError::Runaway { line, limit: format!("{steps} steps") },
        ErrorKind::WriteFailure => {
            TextError::Runaway { line, limit: format!("{MAX_OUTPUT} bytes of output") }
        }
        kind => {
            let detail = error.detail().map_or(String::new(), |detail| format!(": {detail}"));
            TextError::Template { line, reason: format!("{kind}{detail}") }
        }
    }
}
