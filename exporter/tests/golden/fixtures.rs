//! The fixtures: checkpoints, and what transformers computed for them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use gemma4_exporter::checkpoint::Checkpoint;
use gemma4_exporter::export::{Options, export};
use gemma4_exporter::model::Config;
use gemma4_exporter::output::Monitor;
use gemma4_exporter::reference::Reference;
use gemma4_exporter::source::ModelSource;
use gemma4_exporter::trace::WeightSpec;
use gemma4_runtime::cpu::Cpu;
use gemma4_runtime::{LoadedProgram, Session, SessionOptions};
use safetensors::SafeTensors;

pub(crate) const PROMPTS: [&str; 6] = ["p1", "p5", "p31", "p33", "p64", "p200"];

/// A path under `ci/`.
pub(crate) fn ci(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../ci").join(path)
}

pub(crate) fn tiny_31b() -> Checkpoint {
    Checkpoint::open(ci("fixtures/tiny-31b")).unwrap()
}

pub(crate) fn tiny_chat() -> Checkpoint {
    Checkpoint::open(ci("models/tiny-chat-int4")).unwrap()
}

/// `golden/<name>/golden.safetensors` and `golden.json`.
pub(crate) struct Golden {
    bytes: Vec<u8>,
    pub(crate) json: serde_json::Value,
}

impl Golden {
    pub(crate) fn tiny_31b() -> Self {
        Self::read(&ci("fixtures/golden/tiny-31b"))
    }

    /// The golden data in a directory.
    pub(crate) fn read(dir: &Path) -> Self {
        let read = |name: &str| std::fs::read(dir.join(name)).unwrap();
        let json = serde_json::from_slice(&read("golden.json")).unwrap();
        Self { bytes: read("golden.safetensors"), json }
    }

    /// A tensor as float32, if there is one of that name.
    pub(crate) fn f32(&self, name: &str) -> Option<Vec<f32>> {
        let tensors = SafeTensors::deserialize(&self.bytes).unwrap();
        let data = tensors.tensor(name).ok()?.data();
        Some(data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect())
    }

    pub(crate) fn ids(&self, prompt: &str) -> Vec<u32> {
        ids(&self.json["prompts"][prompt]["input_ids"])
    }
}

pub(crate) fn json(path: &str) -> serde_json::Value {
    serde_json::from_str(&std::fs::read_to_string(ci(path)).unwrap()).unwrap()
}

pub(crate) fn ids(value: &serde_json::Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// Exports a checkpoint with the given chunk and loads the two files.
pub(crate) fn exported(checkpoint: &Checkpoint, chunk: u32) -> Arc<LoadedProgram> {
    let dir = tempfile::tempdir().unwrap();
    let options = Options { max_prefill_chunk: Some(chunk), ..Options::default() };
    let files = export(checkpoint, &options, dir.path(), &Monitor::silent()).unwrap();
    Arc::new(LoadedProgram::open(&files.program, &files.data, &|_, _| {}).unwrap())
}

/// A session on the CPU.
pub(crate) fn session(program: &Arc<LoadedProgram>, options: SessionOptions) -> Session {
    Session::new(&Cpu::new(Arc::clone(program)).unwrap(), options).unwrap()
}

/// candle over a dense checkpoint; a call may have `chunk` rows.
pub(crate) fn dense_reference(checkpoint: &Checkpoint, config: &Config, chunk: u32) -> Reference {
    let describe = |name: &str, _: Option<&[u32]>| {
        let weight = checkpoint.contains(name).then(|| checkpoint.weight(name).unwrap())?;
        Some(WeightSpec { dims: weight.dims.clone(), encoding: weight.encoding })
    };
    let load = |name: &str| {
        let dims = &checkpoint.weight(name).unwrap().dims;
        let rows = dims[..dims.len() - 1].iter().map(|d| u64::from(*d)).product();
        checkpoint.read_rows_f32(name, 0..rows).map_err(|e| e.to_string())
    };
    Reference::new(config, chunk, 512, describe, load).unwrap()
}

pub(crate) fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Index of the largest, the lowest among equals.
pub(crate) fn argmax(logits: &[f32]) -> u32 {
    let best = (0..logits.len()).rev().max_by(|a, b| logits[*a].total_cmp(&logits[*b]));
    best.unwrap() as u32
}
