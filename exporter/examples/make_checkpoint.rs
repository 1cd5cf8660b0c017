//! Writes a Gemma 4 checkpoint of any size with random weights, for tests of memory and speed.
//!
//! ```text
//! cargo run --release --example make_checkpoint -- config.json DIR [--layers N] [--seed N] [--shard-mb N]
//! ```
//!
//! The config is that of a dense Gemma 4 (`config.json` of a Hugging Face repository); `--layers`
//! replaces its number of layers. DIR gets config.json, bf16 shards and their index.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use clap::Parser;
use half::bf16;
use serde_json::{Map, Value, json};

/// Standard deviation of matrices, as models are initialised.
const DEVIATION: f32 = 0.02;

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
    /// Size of a shard in megabytes
    #[arg(long, default_value_t = 1000)]
    shard_mb: u64,
}

/// A tensor to be made: its name, its extents, and the mean of its numbers.
struct Tensor {
    name: String,
    shape: Vec<u64>,
    mean: f32,
}

impl Tensor {
    fn elements(&self) -> u64 {
        self.shape.iter().product()
    }
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let mut config: Value = serde_json::from_slice(&fs::read(&arguments.config)?)?;
    let text = match config.get_mut("text_config") {
        Some(text) => text,
        None => &mut config,
    };
    if let Some(layers) = arguments.layers {
        text["num_hidden_layers"] = layers.into();
        let types = text["layer_types"].as_array().context("no layer_types")?.clone();
        ensure!(!types.is_empty(), "layer_types is empty");
        text["layer_types"] = types.into_iter().cycle().take(layers).collect();
    }
    let tensors = tensors(text)?;
    fs::create_dir_all(&arguments.dir)?;
    fs::write(arguments.dir.join("config.json"), format!("{config:#}\n"))?;

    let mut shards: Vec<Vec<&Tensor>> = vec![Vec::new()];
    let mut size = 0;
    for tensor in &tensors {
        let bytes = 2 * tensor.elements();
        if size > 0 && size + bytes > arguments.shard_mb * 1_000_000 {
            shards.push(Vec::new());
            size = 0;
        }
        size += bytes;
        shards.last_mut().context("there is a shard")?.push(tensor);
    }
    let mut index = Map::new();
    let mut random = Random(arguments.seed);
    for (at, shard) in shards.iter().enumerate() {
        let file = format!("model-{:05}-of-{:05}.safetensors", at + 1, shards.len());
        write_shard(&arguments.dir.join(&file), shard, &mut random)?;
        index.extend(shard.iter().map(|t| (t.name.clone(), Value::from(file.as_str()))));
        eprintln!("{file}");
    }
    let index = json!({"metadata": {}, "weight_map": index});
    fs::write(arguments.dir.join("model.safetensors.index.json"), format!("{index:#}\n"))?;
    Ok(())
}

/// The tensors of the text model that the config describes.
fn tensors(config: &Value) -> anyhow::Result<Vec<Tensor>> {
    let number = |key: &str| {
        config[key].as_u64().with_context(|| format!("the config has no number `{key}`"))
    };
    let or = |key: &str, other: u64| config[key].as_u64().unwrap_or(other);
    let (hidden, inner) = (number("hidden_size")?, number("intermediate_size")?);
    let (heads, head_dim) = (number("num_attention_heads")?, number("head_dim")?);
    let kv_heads = number("num_key_value_heads")?;
    let mut tensors = Vec::new();
    let mut add = |name: String, shape: &[u64], mean: f32| {
        let name = format!("model.language_model.{name}");
        tensors.push(Tensor { name, shape: shape.to_vec(), mean });
    };
    add("embed_tokens.weight".to_owned(), &[number("vocab_size")?, hidden], 0.0);
    for layer in 0..number("num_hidden_layers")? as usize {
        let full = config["layer_types"][layer] == "full_attention";
        let (head_dim, kv_heads) = match full {
            true => (or("global_head_dim", head_dim), or("num_global_key_value_heads", kv_heads)),
            false => (head_dim, kv_heads),
        };
        let mut matrix = |name: &str, rows, columns| {
            add(format!("layers.{layer}.{name}.weight"), &[rows, columns], 0.0);
        };
        matrix("self_attn.q_proj", heads * head_dim, hidden);
        matrix("self_attn.k_proj", kv_heads * head_dim, hidden);
        if !(full && config["attention_k_eq_v"] == true) {
            matrix("self_attn.v_proj", kv_heads * head_dim, hidden);
        }
        matrix("self_attn.o_proj", hidden, heads * head_dim);
        matrix("mlp.gate_proj", inner, hidden);
        matrix("mlp.up_proj", inner, hidden);
        matrix("mlp.down_proj", hidden, inner);
        for (norm, length) in [
            ("self_attn.q_norm", head_dim),
            ("self_attn.k_norm", head_dim),
            ("input_layernorm", hidden),
            ("post_attention_layernorm", hidden),
            ("pre_feedforward_layernorm", hidden),
            ("post_feedforward_layernorm", hidden),
        ] {
            add(format!("layers.{layer}.{norm}.weight"), &[length], 1.0);
        }
        add(format!("layers.{layer}.layer_scalar"), &[1], 1.0);
    }
    add("norm.weight".to_owned(), &[hidden], 1.0);
    Ok(tensors)
}

fn write_shard(path: &Path, tensors: &[&Tensor], random: &mut Random) -> anyhow::Result<()> {
    let mut header = Map::new();
    header.insert("__metadata__".to_owned(), json!({"format": "pt"}));
    let mut end = 0;
    for tensor in tensors {
        let start = end;
        end += 2 * tensor.elements();
        let entry = json!({"dtype": "BF16", "shape": tensor.shape, "data_offsets": [start, end]});
        header.insert(tensor.name.clone(), entry);
    }
    let mut header = Value::from(header).to_string();
    header += &" ".repeat(header.len().next_multiple_of(8) - header.len());
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    for tensor in tensors {
        for _ in 0..tensor.elements() {
            let value = tensor.mean + DEVIATION * random.normal();
            file.write_all(&bf16::from_f32(value).to_le_bytes())?;
        }
    }
    Ok(file.into_inner()?.sync_all()?)
}

/// SplitMix64.
struct Random(u64);

impl Random {
    /// Nearly normal, mean 0 and deviation 1: the sum of four uniform numbers.
    fn normal(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^= x >> 31;
        let sum: u32 = (0..4).map(|at| (x >> (16 * at)) as u32 & 0xFFFF).sum();
        // Each of the four has deviation 2^16 / √12.
        (sum as f32 / 65536.0 - 2.0) * 3f32.sqrt()
    }
}
