//! Gemma 4, written once against [`crate::trace::Tensor`].

pub mod config;
mod gemma4;

pub use config::{Config, LayerConfig};
pub use gemma4::Model;
pub(crate) use gemma4::{Embedding, Head, Layer};
