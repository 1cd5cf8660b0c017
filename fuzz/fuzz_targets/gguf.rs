//! A GGUF file: the input is its header, and zeros follow as data.

#![no_main]

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

use gemma4_exporter::gguf::{Gguf, tokenizer_json};
use gemma4_exporter::model::Config;
use gemma4_exporter::source::ModelSource;
use libfuzzer_sys::fuzz_target;

/// Bytes of zeros behind the header; sparse, so they cost nothing.
const DATA: u64 = 2 << 20;
/// Bytes that are read of each part of a weight.
const READ: u64 = 4096;

fuzz_target!(init: on_this_thread(), |header: &[u8]| {
    let path = path();
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
});

/// One file for each process.
fn path() -> PathBuf {
    std::env::temp_dir().join(format!("gemma4-fuzz-{}.gguf", std::process::id()))
}

/// Blocks are converted on rayon's threads; to change threads takes longer than to convert a few.
fn on_this_thread() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread();
    pool.build_global().expect("the first pool of the process");
}
