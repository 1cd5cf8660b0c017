//! Writes a Gemma 4 checkpoint of any size with random weights, for tests of memory and speed.
//!
//! ```text
//! cargo run --release --example make_checkpoint -- config.json DIR [--layers N] [--seed N]
//! ```

use std::path::PathBuf;

use anyhow::Context;
use clap::Parser;
use gemma4_exporter::synthetic::write_checkpoint;
use serde_json::Value;

#[derive(Debug, Parser)]
struct Arguments {
    /// config.json of a dense Gemma 4
    config: PathBuf,
    /// Directory to write
    dir: PathBuf,
    /// Number of layers instead of the config's
    #[arg(long)]
    layers: Option<usize>,
    /// The same seed gives the same weights
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let mut config: Value = serde_json::from_slice(&std::fs::read(&arguments.config)?)?;
    if let Some(layers) = arguments.layers {
        let text = match config.get_mut("text_config") {
            Some(text) => text,
            None => &mut config,
        };
        let text = text.as_object_mut().context("the config is no object")?;
        text.insert("num_hidden_layers".to_owned(), layers.into());
        if let Some(Value::Array(types)) = text.get_mut("layer_types") {
            *types = types.iter().cloned().cycle().take(layers).collect();
        }
    }
    write_checkpoint(&config.to_string(), arguments.seed, &arguments.dir)?;
    Ok(())
}
