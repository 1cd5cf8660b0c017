//! Whole models against Hugging Face transformers in float32, and executions against each other.

mod chat;
mod fixtures;
mod hidden;
mod logits;
mod quality;
mod window;
