//! GGUF files: values, configs and tokenizers against gguf-py, llama.cpp and transformers, and
//! what is refused.

mod blocks;
mod command;
mod hostile;
mod model;
mod support;
mod tokenizer;
