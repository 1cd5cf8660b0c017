//! The model run by candle, with the weights of one layer at a time.

use candle_core::{Device, Tensor as Numbers};
use gemma4_format::{Dim, Fact};

use super::compare::Run;
use super::weights::{Weights, blocks};
use crate::model::{Config, Embedding, Head, Layer};
use crate::output::Monitor;
use crate::trace::{EagerCall, Store, Tensor, WeightSpec};
use crate::{Error, Result, trace};

/// Runs a prompt from position 0.
pub(super) fn run(
    config: &Config,
    weights: &Weights<'_>,
    tokens: &[u32],
    monitor: &Monitor,
) -> Result<Run> {
    let rows = tokens.len() as u32;
    let call = EagerCall::new(rows, rows);
    let describe = |name: &str, _: Option<&[u32]>| weights.describe(name);
    let load = |name: &str| weights.load(name);
    let store = Store::eager(describe, load, rows);
    let position = input(&call, Fact::u32([Dim::Fixed(1)]), vec![0])?;

    let mut x = embed(config, weights, tokens, &call)?;
    for number in 0..config.layers.len() {
        monitor.weight(&format!("layers.{number}"), "by candle");
        monitor.advance(0)?;
        x = Layer::new(config, number, rows, &store)?.forward(&x, &position)?;
    }
    let last = x.last_row()?;
    let logits = logits(config, weights, &last, monitor)?;
    let mut hidden: Vec<(String, Vec<f32>)> = Vec::new();
    for (label, numbers) in call.observed() {
        // Every block of the head has looked at the last norm.
        if hidden.last().is_none_or(|(last, _)| *last != label) {
            hidden.push((label, flat(&numbers)?));
        }
    }
    Ok(Run { logits, hidden })
}

fn input(call: &std::rc::Rc<EagerCall>, fact: Fact, ids: Vec<u32>) -> Result<Tensor> {
    let count = ids.len();
    let numbers = Numbers::from_vec(ids, count, &Device::Cpu).map_err(trace::Error::from)?;
    Ok(call.input(fact, numbers))
}

/// The tokens' rows are the whole table of a model with a smaller vocabulary.
fn embed(
    config: &Config,
    weights: &Weights<'_>,
    tokens: &[u32],
    call: &std::rc::Rc<EagerCall>,
) -> Result<Tensor> {
    let rows = tokens.len() as u32;
    let config = Config { vocab_size: rows, ..config.clone() };
    let load = |name: &str| {
        let row = |id: &u32| weights.rows(name, u64::from(*id)..u64::from(*id) + 1);
        Ok(tokens.iter().map(row).collect::<Result<Vec<_>, _>>()?.concat())
    };
    let describe = |name: &str, _: Option<&[u32]>| fewer_rows(weights, name, rows);
    let embedding = Embedding::new(&config, &Store::eager(describe, load, rows))?;
    let ids = input(call, Fact::u32([Dim::Rows]), (0..rows).collect())?;
    Ok(embedding.forward(&ids)?)
}

/// Each block of the head's rows is the head of a model with a smaller vocabulary.
fn logits(
    config: &Config,
    weights: &Weights<'_>,
    last: &Tensor,
    monitor: &Monitor,
) -> Result<Vec<f32>> {
    let mut logits = Vec::with_capacity(config.vocab_size as usize);
    for rows in blocks(u64::from(config.vocab_size), config.hidden_size) {
        monitor.advance(0)?;
        let count = (rows.end - rows.start) as u32;
        let config = Config { vocab_size: count, ..config.clone() };
        let load = |name: &str| match name {
            "norm.weight" => weights.load(name),
            _ => weights.rows(name, rows.clone()),
        };
        let describe = |name: &str, _: Option<&[u32]>| match name {
            "norm.weight" => weights.describe(name),
            _ => fewer_rows(weights, name, count),
        };
        let head = Head::new(&config, &Store::eager(describe, load, 1), None)?;
        logits.extend(flat(&head.forward(last)?.into_numbers()?)?);
    }
    Ok(logits)
}

fn fewer_rows(weights: &Weights<'_>, name: &str, rows: u32) -> Option<WeightSpec> {
    let mut spec = weights.describe(name)?;
    spec.dims[0] = rows;
    Some(spec)
}

/// All numbers, row-major.
pub(super) fn flat(numbers: &Numbers) -> Result<Vec<f32>> {
    let flat = numbers.flatten_all().and_then(|numbers| numbers.to_vec1());
    flat.map_err(|e| Error::from(trace::Error::from(e)))
}
