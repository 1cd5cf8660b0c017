//! The text half of the runtime against Hugging Face's tokenizers and Jinja2.
//!
//! `tests/data` holds a small tokenizer of the released kind, its template, and what those
//! libraries make of them. Tests on further tokenizers and on the released template read the
//! directory that `GEMMA4_FIXTURES` names, and say `not run` without it.

#![allow(clippy::print_stdout, reason = "tests say what they measured and what is not run")]

mod data;
mod hostile;
mod injection;
mod stream;
mod template;
mod thought;
mod tokenizer;
