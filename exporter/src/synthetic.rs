//! Checkpoints with random weights, for tests and measurements.

use std::fs;
use std::path::Path;

use gemma4_format::{DType, Encoding};
use half::bf16;
use safetensors::tensor::{Dtype, TensorView};

use crate::methods::trace;
use crate::model::Config;
use crate::trace::WeightSpec;
use crate::{Error, Result};

/// Config of a model of two layers, one of each kind, whose window is shorter than its context.
pub const TINY_CONFIG: &str = include_str!("../configs/tiny.json");

/// What SplitMix64 adds to its state for each number.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// 64 bits that look random, of an index: SplitMix64's output at that state.
pub(crate) fn mix(index: u64) -> u64 {
    scramble(index.wrapping_mul(STEP).wrapping_add(STEP))
}

fn scramble(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Numbers from a seed, the same on every machine (SplitMix64).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Starts at a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Nearly normal, mean 0, standard deviation 1: a sum of four uniform numbers.
    pub fn normal(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(STEP);
        let x = scramble(self.0);
        let sum: u32 = (0..4).map(|i| (x >> (16 * i)) as u32 & 0xffff).sum();
        // Each of the four has the deviation 2^16 / √12.
        (sum as f32 / 65536.0 - 2.0) * 3.0f32.sqrt()
    }
}

/// Names and dims of the weights that a model of this config has, in order of use.
pub fn weights_of(config: &Config) -> Result<Vec<(String, Vec<u32>)>> {
    let describe = |_: &str, wanted: Option<&[u32]>| {
        let encoding = Encoding::Dense(DType::BF16);
        wanted.map(|dims| WeightSpec { dims: dims.to_vec(), encoding })
    };
    let weights = trace(config, 1, describe)?.weights;
    Ok(weights.into_iter().map(|(name, dims, _)| (name, dims)).collect())
}

/// Writes a checkpoint of random bf16 weights as a Hugging Face directory: `config.json` and a
/// shard for each gigabyte, with an index.
///
/// Matrices have the standard deviation of a freshly initialised model, norms are near 1.
pub fn write_checkpoint(config_json: &str, seed: u64, dir: &Path) -> Result<()> {
    const SHARD: u64 = 1 << 30;
    let config = Config::parse(config_json)?;
    fs::create_dir_all(dir).map_err(Error::io("create directory", dir))?;
    let mut random = Random::new(seed);
    let mut shards: Vec<Vec<(String, Vec<u32>)>> = vec![Vec::new()];
    let mut bytes = 0;
    for (name, dims) in weights_of(&config)? {
        let size = 2 * dims.iter().map(|d| u64::from(*d)).product::<u64>();
        if bytes > 0 && bytes + size > SHARD {
            shards.push(Vec::new());
            bytes = 0;
        }
        bytes += size;
        if let Some(shard) = shards.last_mut() {
            shard.push((name, dims));
        }
    }
    let mut map = serde_json::Map::new();
    for (at, shard) in shards.iter().enumerate() {
        let file = format!("model-{:05}-of-{:05}.safetensors", at + 1, shards.len());
        let numbers: Vec<(String, Vec<usize>, Vec<u8>)> = shard
            .iter()
            .map(|(name, dims)| {
                let full_name = format!("model.language_model.{name}");
                let shape: Vec<usize> = dims.iter().map(|d| *d as usize).collect();
                let bytes = random_weight(name, &shape, &mut random);
                (full_name, shape, bytes)
            })
            .collect();
        let mut views = Vec::new();
        for (name, shape, bytes) in &numbers {
            map.insert(name.clone(), file.clone().into());
            let view = TensorView::new(Dtype::BF16, shape.clone(), bytes)
                .map_err(|e| Error::Quantize { tensor: name.clone(), why: e.to_string() })?;
            views.push((name.as_str(), view));
        }
        let path = dir.join(&file);
        safetensors::serialize_to_file(views, None, &path)
            .map_err(|e| Error::io("write", &path)(std::io::Error::other(e)))?;
    }
    let index = serde_json::json!({"metadata": {}, "weight_map": map});
    for (name, text) in [
        ("config.json", config_json.to_owned()),
        ("model.safetensors.index.json", index.to_string()),
    ] {
        let path = dir.join(name);
        fs::write(&path, text).map_err(Error::io("write", &path))?;
    }
    Ok(())
}

fn random_weight(name: &str, shape: &[usize], random: &mut Random) -> Vec<u8> {
    let (mean, deviation) = match name {
        _ if name.ends_with("layer_scalar") => (0.8, 0.0),
        _ if shape.len() == 1 => (1.0, 0.2),
        _ => (0.0, 1.0 / (shape[1] as f32).sqrt()),
    };
    let count: usize = shape.iter().product();
    let mut bytes = Vec::with_capacity(2 * count);
    for _ in 0..count {
        bytes.extend(bf16::from_f32(mean + deviation * random.normal()).to_le_bytes());
    }
    bytes
}
