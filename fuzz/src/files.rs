//! Where targets put files.

use std::fs;
use std::path::PathBuf;

/// A directory of that name for each process, made if need be.
pub(crate) fn directory(name: &str) -> PathBuf {
    let dir = std::env::temp_dir().join(format!("gemma4-fuzz-{}", std::process::id())).join(name);
    fs::create_dir_all(&dir).expect("a directory for the input");
    dir
}

/// Removes the directories of this process.
pub(crate) fn clean() {
    let dir = directory("");
    fs::remove_dir_all(dir).expect("a directory of this process");
}
