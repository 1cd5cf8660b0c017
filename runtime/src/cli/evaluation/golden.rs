//! Comparison with Hugging Face transformers, in a directory as this project's fixtures are.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, anyhow};
use clap::Args;
use serde_json::{Map, Value, json};

use super::divergence::Distances;
use super::tensors::{File, floats, ids};
use super::{Place, rows};
use crate::Session;
use crate::sampler::argmax;

/// Margin of a greedy step below which the order of the two best tokens says nothing.
const MARGIN: f64 = 0.05;

#[derive(Args, Debug)]
pub(super) struct Arguments {
    #[command(flatten)]
    place: Place,
    /// Directory with golden.safetensors (`prompt.P.input_ids`, `prompt.P.logits_f32`,
    /// `prompt.P.last_logits_f32`) and golden.json (`greedy_ids`, `greedy_margins`)
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// Fail if a logit differs by more
    #[arg(long = "max_error", alias = "max-error", value_name = "X")]
    max_error: Option<f64>,
}

/// The report, and whether all is within the allowed error.
pub(super) fn run(arguments: &Arguments) -> anyhow::Result<(Value, bool)> {
    let file = File::read(&arguments.directory.join("golden.safetensors"))?;
    let tensors = file.tensors()?;
    let path = arguments.directory.join("golden.json");
    let text = fs::read(&path).with_context(|| format!("cannot read `{}`", path.display()))?;
    let notes: Value =
        serde_json::from_slice(&text).with_context(|| format!("`{}`", path.display()))?;
    let device = arguments.place.open()?;
    let vocabulary = device.device().program().program().vocab_size as usize;
    let mut session = arguments.place.session(&device)?;

    let mut names: Vec<(usize, String)> = Vec::new();
    for name in tensors.names() {
        let prompt = name.strip_prefix("prompt.").and_then(|n| n.strip_suffix(".input_ids"));
        if let Some(prompt) = prompt {
            names.push((tensors.tensor(name)?.shape().iter().product(), prompt.to_owned()));
        }
    }
    names.sort();
    let mut prompts = Map::new();
    let mut within = !names.is_empty();
    for (_, name) in names {
        let tensor = |kind: &str| tensors.tensor(&format!("prompt.{name}.{kind}"));
        let prompt = ids(&tensor("input_ids")?)?;
        let theirs = floats(&tensor("logits_f32").or_else(|_| tensor("last_logits_f32"))?)?;
        let count = theirs.len() / vocabulary;
        if prompt.is_empty()
            || count * vocabulary != theirs.len()
            || count == 0
            || count > prompt.len()
        {
            return Err(anyhow!("prompt {name}: {} logits are no rows of it", theirs.len()));
        }
        let mut distances = Distances::default();
        let mut expected = theirs.chunks_exact(vocabulary);
        rows(&mut session, &prompt, prompt.len() - count + 1, |ours| {
            distances.add(expected.next().unwrap_or_default(), &ours);
        })?;
        within &= arguments.max_error.is_none_or(|most| distances.largest() <= most);
        let mut report = distances.report();
        let greedy = greedy(&mut session, &notes["prompts"][&name])?;
        if let (Some(report), Some(greedy)) = (report.as_object_mut(), greedy) {
            report.insert("greedy".to_owned(), greedy);
        }
        prompts.insert(name, report);
    }
    Ok((json!({"prompts": prompts, "within": within}), within))
}

/// Feeds their greedy tokens, after a prompt that was read, and counts how often ours is the same.
fn greedy(session: &mut Session, notes: &Value) -> anyhow::Result<Option<Value>> {
    let (Some(theirs), Some(margins)) =
        (notes["greedy_ids"].as_array(), notes["greedy_margins"].as_array())
    else {
        return Ok(None);
    };
    let (mut steps, mut agreed, mut decisive, mut agreed_decisive) = (0, 0, 0, 0);
    for (id, margin) in theirs.iter().zip(margins) {
        let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
        let id = id.ok_or_else(|| anyhow!("golden.json: `greedy_ids` has no token id"))?;
        let same = u32::from(argmax(&session.logits()?) == id);
        let clear = u32::from(margin.as_f64().unwrap_or_default() > MARGIN);
        (steps, agreed) = (steps + 1, agreed + same);
        (decisive, agreed_decisive) = (decisive + clear, agreed_decisive + same * clear);
        session.decode(id)?;
    }
    Ok(Some(json!({
        "steps": steps,
        "agreed": agreed,
        "decisive_steps": decisive,
        "agreed_decisive": agreed_decisive,
    })))
}
