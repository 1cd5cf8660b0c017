//! Writes a bundle: a directory with the quantized weights and the text files of a checkpoint.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::unfinished::{Finished, Job, Unfinished};
use super::{Quantizer, Recipe, TensorReport};
use crate::checkpoint::{COMPANIONS, Checkpoint, Layout, PROVENANCE, Provenance, Refusal};
use crate::output::{Item, Monitor, Pending, Sink, WeightWriter, lay_out, persist_all};
use crate::{Error, Result};

const PRODUCER: &str = concat!("gemma4-quantize ", env!("CARGO_PKG_VERSION"));

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
/// The bundle is made in a directory beside `output` and renamed when it is complete. A run that
/// ended early, killed or not, is continued without doing finished layers again, if it was of the
/// same checkpoint, recipe and version, on whichever device. Returns what became of each weight.
///
/// # Errors
/// As [`crate::output::write_weights`]; [`Refusal::AlreadyQuantized`]; [`Refusal::UnknownTensors`]
/// for tensors of no language model; [`Error::OutputBusy`] and others that say why `output` can't
/// be used.
pub fn write_bundle(
    checkpoint: &Checkpoint,
    recipe: &Recipe,
    output: &Path,
    existing: Existing,
    quantizer: &Quantizer,
    monitor: &Monitor,
) -> Result<Vec<TensorReport>> {
    if checkpoint.layout() != Layout::HuggingFace {
        return Err(Refusal::AlreadyQuantized.at(checkpoint.dir()));
    }
    let names = ordered_names(checkpoint)?;
    for pattern in recipe.idle_patterns(&names) {
        monitor.note(&format!("the recipe has a rule for `{pattern}`, and no weight is called so"));
    }
    let items = Item::all(checkpoint, names, Some(recipe))?;
    check_output(output, checkpoint.dir(), existing)?;
    let mut unfinished = Unfinished::claim(output)?;
    // Once more: what an interrupted run had moved away may be back.
    check_output(output, checkpoint.dir(), existing)?;
    match fill(checkpoint, recipe, &items, &mut unfinished, quantizer, monitor) {
        Ok(reports) => unfinished.install().map(|()| reports),
        Err(error) => {
            // Of a checkpoint that can't be quantized nothing can be continued.
            unfinished.end_early(!matches!(error, Error::Quantize { .. }), monitor);
            Err(error)
        }
    }
}

/// Makes everything that the bundle holds.
fn fill(
    checkpoint: &Checkpoint,
    recipe: &Recipe,
    items: &[Item],
    unfinished: &mut Unfinished,
    quantizer: &Quantizer,
    monitor: &Monitor,
) -> Result<Vec<TensorReport>> {
    // Read before the long work, so that what is wrong with them is known at once.
    let mut companions = Vec::new();
    for name in COMPANIONS {
        companions.extend(checkpoint.companion(name)?.map(|bytes| (name, bytes)));
    }
    let layout = lay_out(items)?;
    let job = Job {
        producer: PRODUCER.to_owned(),
        source: checkpoint.stamp(),
        recipe: recipe.digest(),
        layout: blake3::Hash::from_bytes(layout.header_digest()).to_hex().to_string(),
    };
    let mut earlier = unfinished.finished(&job, monitor);
    let bundle = unfinished.bundle();
    if earlier.is_empty() || !bundle.is_dir() {
        unfinished.clear()?;
    }
    let file = Sink::open(bundle.join(WEIGHTS))?;
    let writer = WeightWriter { checkpoint, file: &file, quantizer, monitor };
    writer.begin(&layout)?;

    let mut weights = items.iter().zip(&layout.weights).peekable();
    let (mut reports, mut kept) = (Vec::new(), Vec::new());
    while let Some((finished, (item, parts))) = earlier.pop_front().zip(weights.peek().copied()) {
        if !finished.is(&item.name, &writer.written(parts)?) {
            break;
        }
        reports.push(item.report(finished.loss().as_ref()));
        kept.push(finished);
        weights.next();
    }
    if !kept.is_empty() {
        let (done, all) = (kept.len(), items.len());
        monitor.note(&format!("continuing an earlier run: {done} of {all} weights are done"));
    }
    unfinished.begin(&job, &kept)?;
    let mut layer = Vec::new();
    while let Some((item, parts)) = weights.next() {
        let (digest, loss) = writer.write(item, parts)?;
        reports.push(item.report(loss.as_ref()));
        layer.push(Finished::new(&item.name, &digest, loss.as_ref()));
        if weights.peek().is_none_or(|(next, _)| rank(&next.name) != rank(&item.name)) {
            file.sync()?;
            unfinished.add(&layer)?;
            layer.clear();
        }
    }
    monitor.end();

    let provenance = serde_json::json!(Provenance {
        producer: PRODUCER.to_owned(),
        recipe: recipe.name.clone(),
        source: checkpoint.identity().to_owned(),
    });
    companions.push((PROVENANCE, format!("{provenance:#}\n").into_bytes()));
    let pending = |(name, bytes): &(&str, Vec<u8>)| Pending::with_bytes(bundle.join(name), bytes);
    persist_all(companions.iter().map(pending).collect::<Result<Vec<_>>>()?)?;
    Ok(reports)
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
