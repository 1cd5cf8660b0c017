//! What lies in the directory: which kind of checkpoint it is, and which files hold its weights.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::Path;

use serde::Deserialize;

use super::{Refusal, text};
use crate::{Error, Result};

pub(super) const CONFIG: &str = "config.json";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The files that hold the weights.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct WeightFiles {
    /// Names in the directory, sorted.
    pub(super) files: Vec<String>,
    /// Tensor to file, if an index says so.
    pub(super) index: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// Recognises what is no checkpoint directory.
pub(super) fn recognise(path: &Path) -> Result<()> {
    let refused = |refusal: Refusal| Err(refusal.at(path));
    let metadata = match fs::metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return refused(Refusal::Absent),
        metadata => metadata.map_err(Error::io("open", path))?,
    };
    if !metadata.is_dir() {
        let gguf = path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"));
        return refused(if gguf { Refusal::Gguf } else { Refusal::File });
    }
    let names = list(path)?;
    if names.contains("adapter_config.json") {
        return refused(Refusal::Adapter);
    }
    if names.contains(CONFIG) {
        return Ok(());
    }
    refused(if names.iter().any(|name| name.ends_with(".gguf")) {
        Refusal::Gguf
    } else if names.contains("snapshots") && names.contains("refs") {
        Refusal::Cache
    } else {
        Refusal::NoConfig
    })
}

/// Finds the weights: one file, or shards with an index.
pub(super) fn weight_files(dir: &Path) -> Result<WeightFiles> {
    let refused = |refusal: Refusal| Err(refusal.at(dir));
    let names = list(dir)?;
    let single = names.contains(SINGLE);
    let Some(text) = text::read(dir, INDEX)? else {
        return match single {
            true => Ok(WeightFiles { files: vec![SINGLE.to_owned()], index: BTreeMap::new() }),
            false => refused(no_weights(&names)),
        };
    };
    let Index { weight_map: index } = text::parse(dir, INDEX, &text)?;
    let files: BTreeSet<&String> = index.values().collect();
    if files.is_empty() {
        return refused(Refusal::NoWeights);
    }
    if let Some(file) = files.iter().find(|file| !is_plain_name(file)) {
        return refused(Refusal::ShardName { file: (*file).clone() });
    }
    if single && files.iter().any(|file| *file != SINGLE) {
        return refused(Refusal::TwoSets);
    }
    let missing: Vec<_> = files.iter().filter(|file| !names.contains(**file)).collect();
    if let Some(first) = missing.first() {
        let (missing, total) = (missing.len(), files.len());
        return refused(Refusal::MissingShards { file: (**first).clone(), missing, total });
    }
    Ok(WeightFiles { files: files.into_iter().cloned().collect(), index })
}

fn no_weights(names: &BTreeSet<String>) -> Refusal {
    let find = |suffixes: &[&str]| {
        names.iter().find(|name| suffixes.iter().any(|s| name.ends_with(s))).cloned()
    };
    if let Some(shard) = find(&[".safetensors"]) {
        Refusal::NoIndex { shard }
    } else if names.iter().any(|name| name.ends_with(".gguf")) {
        Refusal::Gguf
    } else if let Some(file) = find(&[".bin", ".pt", ".pth"]) {
        Refusal::PyTorch { file }
    } else {
        Refusal::NoWeights
    }
}

/// Whether a name from the index stays within the directory.
fn is_plain_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    let first = components.next();
    matches!(first, Some(std::path::Component::Normal(part)) if part == name)
        && components.next().is_none()
}

fn list(dir: &Path) -> Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(dir).map_err(Error::io("list", dir))? {
        let entry = entry.map_err(Error::io("list", dir))?;
        names.insert(entry.file_name().to_string_lossy().into_owned());
    }
    Ok(names)
}
