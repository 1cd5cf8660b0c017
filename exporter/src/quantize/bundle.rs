//! Writes a bundle: a directory with the quantized weights and the text files of a checkpoint.

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use tempfile::TempDir;

use super::{Recipe, TensorReport};
use crate::checkpoint::{COMPANIONS, Checkpoint, Layout, PROVENANCE, Provenance, Refusal};
use crate::output::{Item, Monitor, Pending, parent, persist_all, sync_dir, write_weights};
use crate::{Error, Result};

/// The file of a bundle that holds its weights.
const WEIGHTS: &str = "model.safetensors";

/// What happens to an output directory that holds something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// An error.
    Refuse,
    /// A bundle is replaced once the new one is complete; anything else is an error.
    Replace,
}

/// Quantizes `checkpoint` by `recipe` into the directory `output`.
///
/// The bundle is made in a directory beside `output` and renamed when it is complete: whatever
/// fails before, nothing is lost and nothing is left. Returns what became of each weight.
///
/// # Errors
/// As [`write_weights`]; [`Refusal::AlreadyQuantized`]; [`Refusal::UnknownTensors`] for tensors
/// of no language model; errors that say why `output` can't be used.
pub fn write_bundle(
    checkpoint: &Checkpoint,
    recipe: &Recipe,
    output: &Path,
    existing: Existing,
    monitor: &Monitor,
) -> Result<Vec<TensorReport>> {
    if checkpoint.layout() != Layout::HuggingFace {
        return Err(Refusal::AlreadyQuantized.at(checkpoint.dir()));
    }
    check_output(output, checkpoint.dir(), existing)?;
    let items = Item::all(checkpoint, ordered_names(checkpoint)?, Some(recipe))?;

    let dir = parent(output);
    fs::create_dir_all(dir).map_err(Error::io("create directory", dir))?;
    let made = sibling(dir)?;
    let written = write_weights(checkpoint, &items, &made.path().join(WEIGHTS), monitor)?;
    let mut files = vec![written.file];
    for name in COMPANIONS {
        if let Some(bytes) = checkpoint.companion(name)? {
            files.push(Pending::with_bytes(made.path().join(name), &bytes)?);
        }
    }
    let provenance = serde_json::json!(Provenance {
        producer: concat!("gemma4-quantize ", env!("CARGO_PKG_VERSION")).to_owned(),
        recipe: recipe.name.clone(),
        source: checkpoint.identity().to_owned(),
    });
    let provenance = format!("{provenance:#}\n");
    files.push(Pending::with_bytes(made.path().join(PROVENANCE), provenance.as_bytes())?);
    persist_all(files)?;
    install(made, output, dir)?;
    Ok(written.reports)
}

/// Refuses an output directory whose contents would be lost.
fn check_output(output: &Path, source: &Path, existing: Existing) -> Result<()> {
    let path = || output.to_owned();
    let entries = match fs::read_dir(output) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(Error::io("list", output))?,
    };
    let real = |path: &Path| fs::canonicalize(path).map_err(Error::io("find", path));
    if real(source)?.starts_with(real(output)?) {
        return Err(Error::OutputIsSource { path: path() });
    }
    let device = |path: &Path| fs::metadata(path).map(|m| m.dev()).map_err(Error::io("find", path));
    if device(output)? != device(&real(output)?.join(".."))? {
        return Err(Error::OutputIsMount { path: path() });
    }
    for entry in entries {
        let entry = entry.map_err(Error::io("list", output))?.file_name();
        if existing == Existing::Refuse {
            return Err(Error::OutputNotEmpty { path: path() });
        }
        let entry = entry.to_string_lossy().into_owned();
        let ours = [WEIGHTS, PROVENANCE].into_iter().chain(COMPANIONS);
        if !ours.collect::<BTreeSet<_>>().contains(entry.as_str()) {
            return Err(Error::OutputForeign { path: path(), entry });
        }
    }
    Ok(())
}

/// A temporary directory beside the output, on the same file system.
fn sibling(dir: &Path) -> Result<TempDir> {
    tempfile::Builder::new()
        .prefix(".gemma4-")
        .suffix(".tmp")
        .permissions(Permissions::from_mode(0o777))
        .tempdir_in(dir)
        .map_err(Error::io("create a directory in", dir))
}

/// Gives the finished directory its name, in place of what has it.
fn install(made: TempDir, output: &Path, dir: &Path) -> Result<()> {
    let replaced = sibling(dir)?;
    let had_one = match fs::rename(output, replaced.path()) {
        Ok(()) => true,
        Err(e) if e.kind() == io::ErrorKind::NotFound => false,
        Err(e) => return Err(Error::io("replace", output)(e)),
    };
    if let Err(e) = fs::rename(made.path(), output) {
        if had_one {
            fs::rename(replaced.path(), output).map_err(Error::io("restore", output))?;
        }
        return Err(Error::io("create", output)(e));
    }
    // It is no longer there under the name that dropping it would remove.
    let _ = made.keep();
    sync_dir(dir)
}

/// The names of all weights in the order in which a model uses them.
fn ordered_names(checkpoint: &Checkpoint) -> Result<Vec<&str>> {
    let mut names = Vec::new();
    let mut unknown = Vec::new();
    for name in checkpoint.names() {
        match rank(name) {
            Some(rank) => names.push((rank, name)),
            None => unknown.push(name),
        }
    }
    if let Some(first) = unknown.first() {
        let (tensor, count) = ((*first).to_owned(), unknown.len());
        return Err(Refusal::UnknownTensors { tensor, count }.at(checkpoint.dir()));
    }
    names.sort();
    Ok(names.into_iter().map(|(_, name)| name).collect())
}

/// Where in a language model a weight stands: before the layers, in which layer, or after them.
fn rank(name: &str) -> Option<(u8, u32)> {
    let (root, rest) = name.split_once('.')?;
    Some(match root {
        "embed_tokens" => (0, 0),
        "embed_tokens_per_layer" | "per_layer_model_projection" | "per_layer_projection_norm" => {
            (1, 0)
        }
        "layers" => (2, rest.split('.').next()?.parse().ok()?),
        "norm" => (3, 0),
        "lm_head" => (4, 0),
        _ => return None,
    })
}
