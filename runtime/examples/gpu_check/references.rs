//! What transformers computes in float32 and in bfloat16, from `ci/references/make_references.py`.

use std::fs;
use std::path::Path;

use anyhow::{Context, ensure};
use safetensors::SafeTensors;
use serde_json::Value;

use crate::bundle::{Model, Passage, Truth, floats};
use crate::compare::Bound;

/// Largest distance that is allowed, as a share of what transformers has in bfloat16.
const MAX_SHARE: f64 = 1.25;
/// Largest distance of the CPU device from transformers in float32.
const FLOAT32: f32 = 5e-3;

/// The references of all models.
pub(crate) struct References {
    models: Value,
    tensors: Vec<u8>,
}

impl References {
    /// Reads them from a directory, if they are there.
    pub(crate) fn open(directory: &Path) -> anyhow::Result<Option<Self>> {
        let path = directory.join("references.json");
        if !path.exists() {
            return Ok(None);
        }
        let read = |path: &Path| {
            fs::read(path).with_context(|| format!("cannot read `{}`", path.display()))
        };
        let models = serde_json::from_slice(&read(&path)?)?;
        Ok(Some(Self { models, tensors: read(&directory.join("references.safetensors"))? }))
    }

    /// How far a device may be from float32 on a text.
    pub(crate) fn bound(&self, model: Model, text: &str) -> anyhow::Result<Bound> {
        let distances = &self.models["models"][model.name()][text];
        let number = |key: &str| {
            let missing = || format!("no reference for {} `{text}`", model.name());
            distances[key].as_f64().with_context(missing)
        };
        let max = MAX_SHARE * number("max")?;
        Ok(Bound { max: max as f32, mean: number("mean")?, kl: number("kl")? })
    }

    /// Compares the float32 rows that devices are held to with those of transformers.
    pub(crate) fn check(&self, truth: &Truth) -> anyhow::Result<String> {
        let tensors = SafeTensors::deserialize(&self.tensors)?;
        let mut largest = 0.0f32;
        for passage in &truth.passages {
            let name = |tensor: &str| format!("{}/{}/{tensor}", truth.model.name(), passage.name);
            let numbers = |tensor: &str| anyhow::Ok(floats(&tensors.tensor(&name(tensor))?));
            let ids: Vec<usize> = tensors
                .tensor(&name("top_ids"))?
                .data()
                .chunks_exact(4)
                .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]) as usize)
                .collect();
            let found = farthest(
                passage,
                &ids,
                &numbers("top")?,
                &numbers("logsumexp")?,
                &numbers("last")?,
            );
            largest = largest.max(found.with_context(|| format!("`{}`", passage.name))?);
        }
        let found = format!("max {largest:.5} of {FLOAT32}");
        ensure!(largest <= FLOAT32, "the CPU device is too far from transformers: {found}");
        Ok(found)
    }
}

/// Largest distance of a passage's rows from a reference: the largest logits of each row, the
/// logarithm of the sum of all exponentials, and the whole last row.
fn farthest(
    passage: &Passage,
    ids: &[usize],
    top: &[f32],
    logsumexp: &[f32],
    last: &[f32],
) -> anyhow::Result<f32> {
    let rows = &passage.rows;
    let each = ids.len() / rows.len().max(1);
    ensure!(
        logsumexp.len() == rows.len() && ids.len() == top.len() && each * rows.len() == ids.len(),
        "the reference has {} rows, not {}",
        logsumexp.len(),
        rows.len()
    );
    let row = rows.last().context("no rows")?;
    ensure!(row.len() == last.len(), "the reference has {} logits a row", last.len());
    let mut largest = row.iter().zip(last).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    for (i, row) in rows.iter().enumerate() {
        let best = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = row.iter().map(|x| f64::from(x - best).exp()).sum();
        largest = largest.max((best + sum.ln() as f32 - logsumexp[i]).abs());
        for (id, value) in ids.iter().zip(top).skip(i * each).take(each) {
            let logit = row.get(*id).context("an id is outside the vocabulary")?;
            largest = largest.max((logit - value).abs());
        }
    }
    Ok(largest)
}
