//! Makes small checkpoints for tests.

use std::fs;
use std::path::{Path, PathBuf};

use half::bf16;
use safetensors::{Dtype, serialize, tensor::TensorView};
use serde_json::{Value, json};

/// A tensor to be written: name, type, shape, bytes.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

impl Tensor {
    /// Of numbers in bf16.
    pub(crate) fn bf16(name: &str, shape: &[usize], values: impl IntoIterator<Item = f32>) -> Self {
        let bytes: Vec<u8> =
            values.into_iter().flat_map(|v| bf16::from_f32(v).to_le_bytes()).collect();
        assert_eq!(bytes.len(), 2 * shape.iter().product::<usize>());
        Self { name: name.to_owned(), dtype: Dtype::BF16, shape: shape.to_vec(), bytes }
    }

    /// Of repeatable numbers between -1 and 1 in bf16.
    pub(crate) fn random(name: &str, shape: &[usize]) -> Self {
        let count = shape.iter().product::<usize>() as u64;
        let seed = name.bytes().fold(7u64, |h, b| h.wrapping_mul(31).wrapping_add(b.into()));
        let values = (0..count).map(|i| {
            let x = (i + seed).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            ((x >> 40) as f32) / ((1u64 << 23) as f32) - 1.0
        });
        Self::bf16(name, shape, values)
    }

    /// Of zero bytes.
    pub(crate) fn zeros(name: &str, dtype: Dtype, shape: &[usize]) -> Self {
        let bytes = vec![0; shape.iter().product::<usize>() * dtype.bitsize() / 8];
        Self { name: name.to_owned(), dtype, shape: shape.to_vec(), bytes }
    }
}

/// The bytes of a safetensors file as transformers writes it.
pub(crate) fn safetensors(tensors: &[Tensor]) -> Vec<u8> {
    safetensors_with(tensors, [("format".to_owned(), "pt".to_owned())])
}

/// The bytes of a safetensors file with such metadata.
pub(crate) fn safetensors_with(
    tensors: &[Tensor],
    metadata: impl IntoIterator<Item = (String, String)>,
) -> Vec<u8> {
    let views = tensors.iter().map(|t| {
        let view = TensorView::new(t.dtype, t.shape.clone(), &t.bytes).unwrap();
        (t.name.clone(), view)
    });
    serialize(views, Some(metadata.into_iter().collect())).unwrap()
}

/// The bytes of a safetensors file with that header and that much data.
pub(crate) fn raw_safetensors(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

/// The language model of the small checkpoints: two layers, K = 64.
pub(crate) fn language_model() -> Vec<Tensor> {
    let mut tensors = vec![
        Tensor::random("model.language_model.embed_tokens.weight", &[96, 64]),
        Tensor::random("model.language_model.norm.weight", &[64]),
    ];
    for layer in 0..2 {
        let name = |rest: &str| format!("model.language_model.layers.{layer}.{rest}");
        tensors.extend([
            Tensor::random(&name("input_layernorm.weight"), &[64]),
            Tensor::random(&name("layer_scalar"), &[1]),
            Tensor::random(&name("mlp.down_proj.weight"), &[64, 128]),
            Tensor::random(&name("mlp.up_proj.weight"), &[128, 64]),
        ]);
    }
    tensors
}

pub(crate) fn config() -> Value {
    json!({
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": {"model_type": "gemma4_text"},
    })
}

pub(crate) fn write(dir: &Path, name: &str, bytes: impl AsRef<[u8]>) {
    fs::write(dir.join(name), bytes).unwrap();
}

/// Writes config.json and model.safetensors.
pub(crate) fn write_checkpoint(dir: &Path, config: &Value, tensors: &[Tensor]) {
    fs::create_dir_all(dir).unwrap();
    write(dir, "config.json", config.to_string());
    write(dir, "model.safetensors", safetensors(tensors));
}

/// Writes config.json, a shard per list of tensors, and the index.
pub(crate) fn write_shards(dir: &Path, shards: &[Vec<Tensor>]) {
    write(dir, "config.json", config().to_string());
    let mut map = serde_json::Map::new();
    for (at, tensors) in shards.iter().enumerate() {
        let file = format!("model-{:05}-of-{:05}.safetensors", at + 1, shards.len());
        write(dir, &file, safetensors(tensors));
        for tensor in tensors {
            map.insert(tensor.name.clone(), file.clone().into());
        }
    }
    write(dir, "model.safetensors.index.json", json!({"weight_map": map}).to_string());
}

/// The directory of fixtures with real data, if the environment names one.
pub(crate) fn fixtures(test: &str) -> Option<PathBuf> {
    let dir = std::env::var_os("GEMMA4_FIXTURES").map(PathBuf::from);
    if dir.is_none() {
        eprintln!("not run: {test} needs GEMMA4_FIXTURES");
    }
    dir
}
