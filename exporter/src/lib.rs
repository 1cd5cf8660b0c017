//! Turns a Gemma 4 checkpoint into the two files that the runtime executes.

pub mod checkpoint;
pub mod output;
pub mod quantize;

mod error;

pub use error::{Error, Result};
