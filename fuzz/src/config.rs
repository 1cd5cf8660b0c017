//! The texts beside weights: the parts of the input, between NULs, are config.json,
//! generation_config.json, quantization.json, tokenizer_config.json, an index of shards, and a
//! recipe. A program is traced from config and recipe as for `gemma4-export --random`.

use std::fs;
use std::path::Path;

use gemma4_exporter::checkpoint::Checkpoint;
use gemma4_exporter::export::{Options, export_without_data};
use gemma4_exporter::generation::Generation;
use gemma4_exporter::model::Config;
use gemma4_exporter::output::Monitor;
use gemma4_exporter::quantize::Recipe;
use gemma4_runtime::ProgramFile;

use super::files::directory;
use super::pte::describe;

/// Files that the parts of the input become, in order.
const FILES: [&str; 6] = [
    "config.json",
    "generation_config.json",
    "quantization.json",
    "tokenizer_config.json",
    "model.safetensors.index.json",
    "recipe.toml",
];
/// A bundle's only weight: `norm.weight`, one bf16.
const WEIGHT: &[u8] = br#"{"norm.weight":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}  "#;
/// Layers of a model that is traced; more take longer and do nothing else.
const LAYERS: usize = 32;

/// Runs the target on an input.
pub fn run(input: &[u8]) {
    let dir = directory("config");
    let mut parts = input.split(|byte| *byte == 0);
    for name in FILES {
        match parts.next().filter(|text| !text.is_empty()) {
            Some(text) => fs::write(dir.join(name), text).expect("room for the input"),
            None => drop(fs::remove_file(dir.join(name))),
        }
    }
    let length = (WEIGHT.len() as u64).to_le_bytes();
    let weights = [&length[..], WEIGHT, &[0, 0]].concat();
    fs::write(dir.join("model.safetensors"), weights).expect("room for weights");

    if let Ok(checkpoint) = Checkpoint::open(&dir) {
        let _ = checkpoint.chat_template();
        let _ = checkpoint.tokenizer_json();
    }
    let read = |name: &str| fs::read_to_string(dir.join(name)).ok();
    let _ = Generation::parse(read("generation_config.json").as_deref());
    let recipe = dir.join("recipe.toml");
    let recipe = recipe.to_str().and_then(|path| Recipe::open(path).ok());
    if let Some(config) = read("config.json") {
        trace(&config, recipe, &dir.join("out"));
    }
}

fn trace(config: &str, recipe: Option<Recipe>, out: &Path) {
    if Config::parse(config).map_or(true, |config| config.layers.len() > LAYERS) {
        return;
    }
    let options = Options { recipe, ..Options::default() };
    if let Ok(path) = export_without_data(config, None, &options, out, &Monitor::silent()) {
        let file = ProgramFile::open(&path).expect("what was written can be read");
        describe(file.program());
    }
}
