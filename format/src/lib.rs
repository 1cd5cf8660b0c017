//! What an exported program is, and how it lies in its two files.
//!
//! A program is a set of [`Method`]s (`decode`, `prefill`) over shared mutable [`Buffer`]s and
//! immutable [`Weight`]s. `model.pte` ([`pte`]) holds the program, the tokenizer and the chat
//! template; `model.ptd` ([`ptd`]) holds the bytes of the weights and is a safetensors file.
//! `format/FORMAT.md` documents both so that somebody else can write a reader.
//!
//! Every byte of both files is untrusted: decoding never panics, never allocates more than the
//! file's own length justifies, and ends in [`verify::verify`], which always runs. After it,
//! a device may rely on every index, shape and attribute.

#![forbid(unsafe_code)]

pub mod encoding;
pub mod plan;
pub mod ptd;
pub mod pte;
pub mod stats;
pub mod verify;

mod dim;
mod error;
mod op;
mod program;
mod text_form;

pub use dim::{Dim, Extents, Fact, ValueType};
pub use encoding::{DType, Encoding, Offset};
pub use error::{Error, Result};
pub use op::{ArgFact, Op};
pub use program::{
    Buffer, BufferId, Digest, Input, Method, Node, Operand, Output, Program, Source, TextDefaults,
    ValueId, Weight, WeightId,
};
