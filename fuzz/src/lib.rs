//! What each fuzz target does with an input: it may refuse it, or use it, and nothing else.
//!
//! `fuzz_targets/` gives these to libFuzzer; `exporter/tests/fuzz.rs` runs them on the stable
//! compiler, with the stored corpus and some mutations of it.

pub mod checkpoint;
pub mod config;
pub mod gguf;
pub mod program;
pub mod ptd;
pub mod pte;
pub mod session;
pub mod template;
pub mod tokenizer;

mod edit;
mod files;
mod plan;
#[path = "../../runtime/tests/common/mod.rs"]
mod small;

/// A target: what it does with an input.
pub type Target = fn(&[u8]);

/// All targets by name.
pub const TARGETS: [(&str, Target); 9] = [
    ("checkpoint", checkpoint::run),
    ("config", config::run),
    ("gguf", gguf::run),
    ("program", program::run),
    ("ptd", ptd::run),
    ("pte", pte::run),
    ("session", session::run),
    ("template", template::run),
    ("tokenizer", tokenizer::run),
];

/// Lets rayon's loops run on the calling thread: to wake another takes longer than most of them.
/// Tests have several callers.
#[cfg(not(test))]
pub fn prepare() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread();
    pool.build_global().expect("the first pool of the process");
}

/// Removes what targets have left in the directory for temporary files.
pub fn clean() {
    files::clean();
}
