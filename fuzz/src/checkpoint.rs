//! A directory with a safetensors file: Hugging Face's, torchao's, or a bundle of ours.
//!
//! The first four bytes of the input are the length of the data, the rest is the JSON header.

use std::fs::{self, File};
use std::io::Write;

use gemma4_exporter::checkpoint::Checkpoint;

use super::files::directory;

const CONFIG: &str = r#"{"model_type": "gemma4", "architectures": ["Gemma4ForCausalLM"]}"#;
/// Longest data; sparse, so it costs nothing.
const DATA: u64 = 64 << 20;
/// Bytes that are read of each part of a weight.
const READ: u64 = 4096;

/// Runs the target on an input.
pub fn run(input: &[u8]) {
    let Some((length, json)) = input.split_first_chunk::<4>() else { return };
    let dir = directory("checkpoint");
    fs::write(dir.join("config.json"), CONFIG).expect("room for the config");
    let mut file = File::create(dir.join("model.safetensors")).expect("a file for the input");
    file.write_all(&(json.len() as u64).to_le_bytes()).expect("room for the input");
    file.write_all(json).expect("room for the input");
    let data = u64::from(u32::from_le_bytes(*length)).min(DATA);
    file.set_len(8 + json.len() as u64 + data).expect("a sparse file");
    let Ok(checkpoint) = Checkpoint::open(&dir) else { return };
    for name in checkpoint.names() {
        let Ok(weight) = checkpoint.weight(name) else { continue };
        let parts = weight.encoding.parts(name, &weight.dims).unwrap_or_default();
        for (at, part) in parts.iter().enumerate() {
            let mut bytes = vec![0; part.bytes().min(READ) as usize];
            let _ = checkpoint.read_part(name, at, 0, &mut bytes);
        }
    }
}
