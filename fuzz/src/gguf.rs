//! A GGUF file: the input is its header, and zeros follow as data.

use std::fs::File;
use std::io::Write;

use gemma4_exporter::gguf::{Gguf, tokenizer_json};
use gemma4_exporter::model::Config;
use gemma4_exporter::source::ModelSource;

use super::files::directory;

/// Bytes of zeros behind the header; sparse, so they cost nothing.
const DATA: u64 = 2 << 20;
/// Bytes that are read of each part of a weight.
const READ: u64 = 4096;

/// Runs the target on an input.
pub fn run(header: &[u8]) {
    let path = directory("gguf").join("model.gguf");
    let mut file = File::create(&path).expect("a file for the input");
    file.write_all(header).expect("room for the input");
    file.set_len(header.len() as u64 + DATA).expect("a sparse file");
    let _ = tokenizer_json(&path);
    let Ok(gguf) = Gguf::open(&path) else { return };
    let _ = Config::parse(gguf.config_json());
    let _ = gguf.chat_template();
    for name in gguf.names() {
        let Ok(weight) = gguf.weight(name) else { continue };
        let parts = weight.encoding.parts(name, &weight.dims).unwrap_or_default();
        for (at, part) in parts.iter().enumerate() {
            let mut bytes = vec![0; part.bytes().min(READ) as usize];
            let _ = gguf.read_part(name, at, 0, &mut bytes);
        }
    }
}
