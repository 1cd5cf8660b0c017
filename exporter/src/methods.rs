//! Traces the methods of a program from the model.

use std::cell::RefCell;
use std::rc::Rc;

use gemma4_format::{Buffer, Encoding, Method};

use crate::model::{Config, Model};
use crate::trace::{Result, Sampling, Store, Tables, Tape, Tensor, WeightSpec};

/// Most tokens of a call of `verify`: as many rows as the products of a decode step take at once.
const MAX_VERIFIED: u32 = 8;

/// Methods over the buffers and weights that they share.
#[derive(Debug)]
pub struct Traced {
    /// `decode`, `prefill` and `verify`.
    pub methods: Vec<Method>,
    /// Named once, used by all.
    pub buffers: Vec<Buffer>,
    /// Name, dims and encoding of each weight, in order of first use.
    pub weights: Vec<(String, Vec<u32>, Encoding)>,
}

/// Traces `decode` (one token a call), `prefill` (up to `max_chunk` tokens a call) and `verify` (up
/// to 8 or `max_chunk` tokens a call, with logits of each).
///
/// Reads no weight: `describe` tells dims and encoding, see [`Store::traced`].
pub fn trace(
    config: &Config,
    max_chunk: u32,
    describe: impl Fn(&str, Option<&[u32]>) -> Option<WeightSpec>,
) -> Result<Traced> {
    let tables = Rc::new(RefCell::new(Tables::default()));
    let model = Model::new(config, max_chunk, &Store::traced(describe, Rc::clone(&tables)))?;
    let methods = vec![
        trace_method(&model, "decode", 1)?,
        trace_method(&model, "prefill", max_chunk)?,
        trace_verify(&model, max_chunk.min(MAX_VERIFIED))?,
    ];
    drop(model);
    let Tables { weights, buffers, .. } = tables.take();
    Ok(Traced { methods, buffers, weights })
}

/// These two are the same lines; they differ in how many rows a call may have.
fn trace_method(model: &Model, name: &str, max_rows: u32) -> Result<Method> {
    let (tape, [tokens, position, temperature, top_k, top_p, seed]) =
        Tape::start(Method::standard_inputs());
    let hidden = model.forward(&tokens, &position)?;
    let logits = model.logits(&hidden.last_row()?)?;
    let next = tokens.advance(&position)?;
    let token = logits.sample(&next, &Sampling { temperature, top_k, top_p, seed })?;
    let outputs: [(&str, &Tensor); 3] =
        [("token", &token), ("position", &next), ("logits", &logits)];
    Ok(tape.finish(name, max_rows, &outputs))
}

/// The same model over the same buffers; nothing is drawn.
fn trace_verify(model: &Model, max_rows: u32) -> Result<Method> {
    let [tokens, position, ..] = Method::standard_inputs();
    let (tape, [tokens, position]) = Tape::start([tokens, position]);
    let logits = model.logits(&model.forward(&tokens, &position)?)?;
    let next = tokens.advance(&position)?;
    Ok(tape.finish("verify", max_rows, &[("position", &next), ("logits", &logits)]))
}
