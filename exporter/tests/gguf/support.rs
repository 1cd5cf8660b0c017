//! Writes small GGUF files, and reads weights back.

use std::path::{Path, PathBuf};

use gemma4_exporter::source::ModelSource;
use gemma4_format::Encoding;
use gemma4_format::encoding::{QuantizedBytes, decode_row};

/// Codes of value types.
const U32: u32 = 4;
const I32: u32 = 5;
const F32: u32 = 6;
const BOOL: u32 = 7;
const STRING: u32 = 8;
const ARRAY: u32 = 9;

/// A GGUF file to be written.
#[derive(Clone, Debug)]
pub(crate) struct File {
    /// Key, and the bytes of type and value.
    pub(crate) keys: Vec<(String, Vec<u8>)>,
    pub(crate) tensors: Vec<Tensor>,
}

#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    /// Innermost first, as the file has them.
    pub(crate) dims: Vec<u64>,
    pub(crate) kind: u32,
    pub(crate) bytes: Vec<u8>,
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

pub(crate) fn u32(value: u32) -> Vec<u8> {
    [U32.to_le_bytes(), value.to_le_bytes()].concat()
}

pub(crate) fn f32(value: f32) -> Vec<u8> {
    [F32.to_le_bytes(), value.to_le_bytes()].concat()
}

pub(crate) fn text(value: &str) -> Vec<u8> {
    [STRING.to_le_bytes().to_vec(), string(value)].concat()
}

fn array(kind: u32, count: usize, bytes: Vec<u8>) -> Vec<u8> {
    let mut out = [ARRAY.to_le_bytes(), kind.to_le_bytes()].concat();
    out.extend((count as u64).to_le_bytes());
    out.extend(bytes);
    out
}

pub(crate) fn i32s(values: &[i32]) -> Vec<u8> {
    array(I32, values.len(), values.iter().flat_map(|v| v.to_le_bytes()).collect())
}

pub(crate) fn bools(values: &[bool]) -> Vec<u8> {
    array(BOOL, values.len(), values.iter().map(|v| u8::from(*v)).collect())
}

pub(crate) fn strings(values: &[&str]) -> Vec<u8> {
    array(STRING, values.len(), values.iter().flat_map(|v| string(v)).collect())
}

impl Tensor {
    /// Of repeatable numbers between -1 and 1 in float32; dims outermost first.
    pub(crate) fn random(name: &str, dims: &[u64]) -> Self {
        let count: u64 = dims.iter().product();
        let seed = name.bytes().fold(7u64, |h, b| h.wrapping_mul(31).wrapping_add(b.into()));
        let values = (0..count).map(|i| {
            let x = (i + seed).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            ((x >> 40) as f32) / ((1u64 << 23) as f32) - 1.0
        });
        Self::f32(name, dims, values)
    }

    pub(crate) fn f32(name: &str, dims: &[u64], values: impl IntoIterator<Item = f32>) -> Self {
        let bytes = values.into_iter().flat_map(f32::to_le_bytes).collect();
        Self { name: name.to_owned(), dims: dims.iter().rev().copied().collect(), kind: 0, bytes }
    }
}

/// Layers of [`model`]: a sliding one and a full one without value projection.
pub(crate) const LAYERS: u32 = 2;

/// A whole model: hidden 256, 4 rows of feed-forward, 64 tokens.
pub(crate) fn model() -> File {
    let key = |name: &str, value: Vec<u8>| (name.to_owned(), value);
    let own = |name: &str, value: Vec<u8>| (format!("gemma4.{name}"), value);
    let tokens: Vec<String> = (0..64)
        .map(|id| match id {
            0..5 => ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>"][id].to_owned(),
            5..31 => char::from(b'a' + (id - 5) as u8).to_string(),
            31 => "ab".to_owned(),
            32 => "▁".to_owned(),
            _ => format!("<unused{id}>"),
        })
        .collect();
    let tokens: Vec<&str> = tokens.iter().map(String::as_str).collect();
    let mut types = [1; 64];
    types[..4].fill(3);
    types[4] = 4;
    let keys = vec![
        key("general.architecture", text("gemma4")),
        own("block_count", u32(LAYERS)),
        own("context_length", u32(512)),
        own("embedding_length", u32(256)),
        own("feed_forward_length", u32(4)),
        own("attention.head_count", u32(4)),
        own("attention.head_count_kv", i32s(&[2, 1])),
        own("attention.key_length", u32(64)),
        own("attention.key_length_swa", u32(32)),
        own("attention.sliding_window", u32(16)),
        own("attention.sliding_window_pattern", bools(&[true, false])),
        own("attention.layer_norm_rms_epsilon", f32(1e-6)),
        own("rope.freq_base", f32(1e6)),
        own("rope.freq_base_swa", f32(1e4)),
        own("final_logit_softcapping", f32(30.0)),
        key("tokenizer.ggml.model", text("gemma4")),
        key("tokenizer.ggml.tokens", strings(&tokens)),
        key("tokenizer.ggml.token_type", i32s(&types)),
        // The second makes no token.
        key("tokenizer.ggml.merges", strings(&["a b", "b c"])),
        key("tokenizer.ggml.bos_token_id", u32(2)),
        key("tokenizer.ggml.eos_token_id", u32(1)),
        key("tokenizer.ggml.unknown_token_id", u32(3)),
        key("tokenizer.chat_template", text("{{ messages }}")),
        key("general.sampling.temp", f32(0.5)),
        key("general.sampling.top_k", u32(7)),
    ];
    let rope = [[1.0; 8].as_slice(), &[1e30; 24]].concat();
    let mut tensors = vec![
        Tensor::random("token_embd.weight", &[64, 256]),
        Tensor::random("output_norm.weight", &[256]),
        Tensor::f32("rope_freqs.weight", &[32], rope),
    ];
    for (layer, width, keys) in [(0, 32, 2), (1, 64, 1)] {
        let mut tensor = |name: &str, dims: &[u64]| {
            tensors.push(Tensor::random(&format!("blk.{layer}.{name}.weight"), dims));
        };
        for norm in ["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"] {
            tensor(norm, &[256]);
        }
        tensor("attn_q", &[4 * width, 256]);
        tensor("attn_k", &[keys * width, 256]);
        if layer == 0 {
            tensor("attn_v", &[keys * width, 256]);
        }
        tensor("attn_output", &[256, 4 * width]);
        tensor("attn_q_norm", &[width]);
        tensor("attn_k_norm", &[width]);
        tensor("ffn_gate", &[4, 256]);
        tensor("ffn_up", &[4, 256]);
        tensor("ffn_down", &[256, 4]);
        tensor("layer_output_scale", &[1]);
    }
    File { keys, tensors }
}

impl File {
    /// Puts a value in the place of a key's, or adds the key.
    pub(crate) fn set(&mut self, key: &str, value: Vec<u8>) {
        match self.keys.iter_mut().find(|(name, _)| name == key) {
            Some((_, old)) => *old = value,
            None => self.keys.push((key.to_owned(), value)),
        }
    }

    pub(crate) fn tensor(&mut self, name: &str) -> &mut Tensor {
        self.tensors.iter_mut().find(|tensor| tensor.name == name).unwrap()
    }

    /// Keys and tensors, without the data.
    pub(crate) fn header(&self) -> Vec<u8> {
        let mut out = b"GGUF\x03\0\0\0".to_vec();
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.keys.len() as u64).to_le_bytes());
        for (key, value) in &self.keys {
            out.extend(string(key));
            out.extend(value);
        }
        let mut offset = 0u64;
        for tensor in &self.tensors {
            out.extend(string(&tensor.name));
            out.extend((tensor.dims.len() as u32).to_le_bytes());
            out.extend(tensor.dims.iter().flat_map(|dim| dim.to_le_bytes()));
            out.extend(tensor.kind.to_le_bytes());
            out.extend(offset.to_le_bytes());
            offset += (tensor.bytes.len() as u64).next_multiple_of(32);
        }
        out
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = self.header();
        for tensor in &self.tensors {
            out.resize(out.len().next_multiple_of(32), 0);
            out.extend(&tensor.bytes);
        }
        out
    }

    /// Writes it into a new directory, which goes when the first value is dropped.
    pub(crate) fn write(&self) -> (tempfile::TempDir, PathBuf) {
        write(&self.bytes())
    }
}

/// Writes bytes as `model.gguf` into a new directory.
pub(crate) fn write(bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, bytes).unwrap();
    (dir, path)
}

/// All numbers of a weight, decoded as a program's are.
pub(crate) fn values(source: &dyn ModelSource, name: &str) -> Vec<f32> {
    let weight = source.weight(name).unwrap();
    let parts = weight.encoding.parts(name, &weight.dims).unwrap();
    let bytes: Vec<Vec<u8>> = parts
        .iter()
        .enumerate()
        .map(|(index, part)| {
            let mut bytes = vec![0; part.bytes() as usize];
            source.read_part(name, index, 0, &mut bytes).unwrap();
            bytes
        })
        .collect();
    let slices: Vec<&[u8]> = bytes.iter().map(Vec::as_slice).collect();
    let count = weight.dims.iter().map(|dim| *dim as usize).product();
    if let Encoding::Dense(dtype) = weight.encoding {
        return (0..count).map(|at| dtype.read(slices[0], at)).collect();
    }
    let mut numbers = vec![0.0; count];
    let bytes = QuantizedBytes::from_parts(weight.encoding, &slices).unwrap();
    for (row, out) in numbers.chunks_exact_mut(weight.dims[1] as usize).enumerate() {
        decode_row(weight.encoding, bytes, row, out);
    }
    numbers
}

/// The directory of fixtures outside the repository, or `None` after saying what is not run.
pub(crate) fn fixtures(test: &str) -> Option<PathBuf> {
    let dir = std::env::var_os("GEMMA4_FIXTURES").map(PathBuf::from);
    if dir.is_none() {
        eprintln!("not run: {test} (GEMMA4_FIXTURES is not set)");
    }
    dir
}

/// A file of `tests/gguf/data`.
pub(crate) fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gguf/data").join(name)
}
