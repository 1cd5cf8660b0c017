//! The model run by candle in float32: what every device is compared with.

use candle_core::{Device, Tensor as Numbers};
use gemma4_format::{Dim, Fact};

use crate::model::{Config, Model};
use crate::trace::{EagerCall, Result, Store, WeightSpec};

/// The model with its numbers and its buffers.
#[derive(Debug)]
pub struct Reference {
    model: Model,
    context: u32,
}

/// What one call computed.
#[derive(Debug)]
pub struct Computed {
    /// Logits of every row, `[T, V]`.
    pub logits: Numbers,
    /// Labelled values, in order: `embed`, `layers.0`, …, `norm`.
    pub observed: Vec<(String, Numbers)>,
}

impl Reference {
    /// Reads all weights. `describe` and `load` tell a weight's dims and its row-major numbers by
    /// name; buffers hold `context` tokens, and a call may have `max_chunk`.
    pub fn new(
        config: &Config,
        max_chunk: u32,
        context: u32,
        describe: impl Fn(&str, Option<&[u32]>) -> Option<WeightSpec>,
        load: impl Fn(&str) -> std::result::Result<Vec<f32>, String>,
    ) -> Result<Self> {
        let model = Model::new(config, max_chunk, &Store::eager(describe, load, context))?;
        Ok(Self { model, context })
    }

    /// Runs tokens at `position..`; what was run before stays in the buffers.
    pub fn run(&self, tokens: &[u32], position: u32) -> Result<Computed> {
        let call = EagerCall::new(tokens.len() as u32, self.context);
        let tokens = call.input(Fact::u32([Dim::Rows]), Numbers::new(tokens, &Device::Cpu)?);
        let position =
            call.input(Fact::u32([Dim::Fixed(1)]), Numbers::new(&[position], &Device::Cpu)?);
        let logits = self.model.logits(&self.model.forward(&tokens, &position)?)?;
        let logits = logits.into_numbers()?;
        Ok(Computed { logits, observed: call.observed() })
    }
}
