//! A program: methods over shared buffers and weights.

use serde::{Deserialize, Serialize};

use crate::dim::{Dim, Fact};
use crate::encoding::Encoding;
use crate::op::{ArgFact, Op};

/// A BLAKE3 digest.
pub type Digest = [u8; 32];

/// Index of a value of a method: its inputs first, then the results of its nodes in order.
pub type ValueId = u32;
/// Index into [`Program::weights`].
pub type WeightId = u32;
/// Index into [`Program::buffers`].
pub type BufferId = u32;

/// Everything that a device needs to know, except the bytes of the weights.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Program {
    /// What it was made from.
    pub source: Source,
    /// What a text front end needs beside tokenizer and template.
    pub text: TextDefaults,
    /// Number of token ids; every token given to a method is below it.
    pub vocab_size: u32,
    /// Longest context in tokens that a loader may choose for `S`.
    pub max_context: u32,
    /// Immutable tensors, in order of first use.
    pub weights: Vec<Weight>,
    /// Mutable tensors, shared by all methods and zero at the start of a session.
    pub buffers: Vec<Buffer>,
    /// Entry points. `decode` and `prefill` are always there; `verify`, where it is, reads a few
    /// tokens as `prefill` does and hands back the logits of every one.
    pub methods: Vec<Method>,
    /// BLAKE3 of the data file's header: its first `8 + n` bytes, `n` its first 64-bit word.
    pub data_header: Digest,
    /// Length of the data file in bytes.
    pub data_length: u64,
}

/// Where a program comes from. Holds no path and no date, so that equal inputs give equal bytes.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Source {
    /// Exporter and version.
    pub producer: String,
    /// Architecture as the checkpoint's config names it.
    pub architecture: String,
    /// Layout of the checkpoint, for example `huggingface` or `gemma4-quantize`.
    pub layout: String,
    /// Quantization recipe, or `none`.
    pub recipe: String,
    /// BLAKE3 of the checkpoint's config and tensor headers, in hex.
    pub identity: String,
    /// The checkpoint's config, as JSON.
    pub config: String,
}

/// Defaults of text generation, from the checkpoint.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct TextDefaults {
    /// Prepended to raw prompts.
    pub bos_token: Option<u32>,
    /// Ids that end a generation: the union of all that the checkpoint's files name, sorted.
    pub stop_tokens: Vec<u32>,
    /// Sampling temperature; 0 takes the most probable token.
    pub temperature: f32,
    /// How many of the most probable tokens may be drawn; 0 for all.
    pub top_k: u32,
    /// Probability mass that may be drawn from, in `(0, 1]`.
    pub top_p: f32,
}

/// An immutable tensor.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Weight {
    /// Name without the checkpoint's prefix, for example `layers.0.mlp.up_proj.weight`.
    pub name: String,
    /// Extents; `[N, K]` for a matrix with `K` the dimension that products sum over.
    pub dims: Vec<u32>,
    /// How it is stored.
    pub encoding: Encoding,
    /// BLAKE3 of its stored tensors one after another, in the order of [`Encoding::parts`].
    pub digest: Digest,
}

/// A mutable tensor: the keys or values of one layer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Buffer {
    /// Unique name, for example `layers.0.keys`.
    pub name: String,
    /// `[rows, heads, head_dim]`; rows are [`Dim::Context`] or [`Dim::Ring`].
    pub dims: Vec<Dim>,
}

/// One entry point: nodes in execution order.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Method {
    /// Unique name.
    pub name: String,
    /// Largest `T` of a call.
    pub max_rows: u32,
    /// Values given by the caller.
    pub inputs: Vec<Input>,
    /// Operations; list order is the order of effects.
    pub nodes: Vec<Node>,
    /// Values handed back.
    pub outputs: Vec<Output>,
}

/// A value given by the caller of a method.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Input {
    /// Unique within the method: `tokens`, `position`, and but for `verify` `temperature`, `top_k`,
    /// `top_p`, `seed`.
    pub name: String,
    /// Type and shape.
    pub fact: Fact,
}

/// A value handed back by a method.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Output {
    /// Unique within the method: `position`, `logits`, and but for `verify` `token`.
    pub name: String,
    /// Which value.
    pub value: ValueId,
}

/// One operation with its operands. Its result, if it has one, is the next value.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Node {
    /// What is done.
    pub op: Op,
    /// What it is done to.
    pub args: Vec<Operand>,
    /// Name of the result for people and tests, for example `layers.0`; empty for most.
    pub label: String,
}

/// An operand of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Operand {
    /// A value of this method that stands before.
    Value(ValueId),
    /// A weight of the program.
    Weight(WeightId),
    /// A buffer of the program.
    Buffer(BufferId),
}

impl Program {
    /// The method of that name.
    pub fn method(&self, name: &str) -> Option<&Method> {
        self.methods.iter().find(|m| m.name == name)
    }

    /// Rows of logits that a call leaves at most: all of `verify`, one of any other method.
    pub fn logits_rows(&self) -> u32 {
        self.method("verify").map_or(1, |m| m.max_rows)
    }

    /// Type and shape of every value of a method: inputs, then results.
    ///
    /// On a verified program this never fails.
    pub fn values(&self, method: &Method) -> Result<Vec<Fact>, (usize, String)> {
        let mut values: Vec<Fact> = method.inputs.iter().map(|i| i.fact.clone()).collect();
        for (at, node) in method.nodes.iter().enumerate() {
            let args: Option<Vec<ArgFact<'_>>> =
                node.args.iter().map(|arg| self.arg_fact(*arg, &values)).collect();
            let args = args.ok_or_else(|| (at, "an operand does not exist".to_owned()))?;
            let result = node.op.infer(&args).map_err(|why| (at, why))?;
            values.extend(result);
        }
        Ok(values)
    }

    fn arg_fact<'a>(&'a self, arg: Operand, values: &'a [Fact]) -> Option<ArgFact<'a>> {
        Some(match arg {
            Operand::Value(id) => ArgFact::Value(values.get(id as usize)?),
            Operand::Weight(id) => ArgFact::Weight(&self.weights.get(id as usize)?.dims),
            Operand::Buffer(id) => ArgFact::Buffer(&self.buffers.get(id as usize)?.dims),
        })
    }
}

impl Method {
    /// Names and facts of the inputs of `decode` and `prefill`, in order. Those of `verify`, which
    /// draws nothing, are the first two.
    pub fn standard_inputs() -> [(&'static str, Fact); 6] {
        let one = Dim::Fixed(1);
        [
            ("tokens", Fact::u32([Dim::Rows])),
            ("position", Fact::u32([one])),
            ("temperature", Fact::f32([one])),
            ("top_k", Fact::u32([one])),
            ("top_p", Fact::f32([one])),
            ("seed", Fact::u32([Dim::Fixed(2)])),
        ]
    }

    /// The position of the input of that name, which is also its value id.
    pub fn input(&self, name: &str) -> Option<ValueId> {
        self.inputs.iter().position(|i| i.name == name).map(|i| i as ValueId)
    }

    /// The value of the output of that name.
    pub fn output(&self, name: &str) -> Option<ValueId> {
        self.outputs.iter().find(|o| o.name == name).map(|o| o.value)
    }
}
