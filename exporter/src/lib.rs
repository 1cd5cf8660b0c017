//! Turns a Gemma 4 checkpoint into a program: `model.pte` and `model.ptd`.
//!
//! [`checkpoint`] reads it, or [`gguf`] a GGUF file; [`quantize`] turns weights into codes,
//! [`export`] writes the files.
//! [`model`] is Gemma 4, written once against [`trace::Tensor`]; [`methods`] traces it, and
//! [`mod@reference`] runs it with candle. [`lower`] turns the graph into kernel launches for GPUs, and
//! [`validate`] compares what every stage of all that computes.

pub mod checkpoint;
pub mod export;
pub mod generation;
pub mod gguf;
pub mod lower;
pub mod methods;
pub mod model;
pub mod output;
pub mod quantize;
pub mod reference;
pub mod source;
pub mod synthetic;
pub mod tiny;
pub mod trace;
pub mod validate;

mod error;

pub use error::{Error, Result};
