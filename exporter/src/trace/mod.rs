//! A tensor that either computes with candle or records a trace.
//!
//! Model code is written once against [`Tensor`], [`Weight`] and [`Buffer`]. Each holds numbers (a
//! `candle_core::Tensor`) or a name in a program under construction. Every operation passes one
//! door, `bind`: it infers the result's shape with the rule that the loader of a file uses too,
//! then computes or appends a node. A traced program therefore never reads a weight, and the same
//! lines of model code are the reference that it is compared with.
//!
//! A dim has no `==` and a position is a tensor, so model code cannot depend on the length of a
//! call or on the step: one traced `prefill` serves every length, one `decode` every step.

mod eager;
mod store;
mod tape;

use std::rc::Rc;

use gemma4_format::{ArgFact, Dim, Fact, Op, Operand};
use thiserror::Error;

pub use eager::EagerCall;
pub(crate) use eager::eval;
pub use store::{Store, WeightSpec};
pub use tape::{Tables, Tape};

/// Result of building or running a model.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a model could not be traced or run eagerly.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// An operation does not take these operands.
    #[error("{0}")]
    Shape(String),
    /// Operands of two traces, or of a trace and an eager run.
    #[error("{op}: operands of different traces, or numbers in a trace; load them as weights")]
    Mixed {
        /// The operation.
        op: &'static str,
    },
    /// The checkpoint lacks a weight.
    #[error("the checkpoint has no tensor `{name}`")]
    MissingWeight {
        /// Its canonical name.
        name: String,
    },
    /// The checkpoint has a weight of other dims.
    #[error("tensor `{name}` has the shape {found:?}; the config asks for {wanted:?}")]
    WeightShape {
        /// Its canonical name.
        name: String,
        /// Dims in the checkpoint.
        found: Vec<u32>,
        /// Dims that the model wants.
        wanted: Vec<u32>,
    },
    /// The bytes of a weight could not be read.
    #[error("tensor `{name}`: {why}")]
    Load {
        /// Its canonical name.
        name: String,
        /// What went wrong.
        why: String,
    },
    /// candle refused an operation.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// A value of a call.
#[derive(Clone, Debug)]
pub struct Tensor {
    fact: Fact,
    repr: Repr,
}

#[derive(Clone, Debug)]
enum Repr {
    Eager(candle_core::Tensor, Rc<EagerCall>),
    Traced(u32, Tape),
}

/// An immutable tensor of the checkpoint.
#[derive(Clone, Debug)]
pub struct Weight {
    name: String,
    dims: Vec<u32>,
    repr: WeightRepr,
}

#[derive(Clone, Debug)]
enum WeightRepr {
    /// Decoded to float32.
    Eager(candle_core::Tensor),
    Traced(u32),
}

/// A mutable tensor `[rows, heads, head_dim]` that outlives a call.
#[derive(Clone, Debug)]
pub struct Buffer {
    dims: Vec<Dim>,
    repr: BufferRepr,
}

#[derive(Clone, Debug)]
enum BufferRepr {
    /// Written in place; clones share the storage.
    Eager(candle_core::Tensor),
    Traced(u32),
}

/// Rotary embedding of one kind of layer; see [`Op::Rope`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// `rope_theta`.
    pub base: f32,
    /// Pairs that rotate.
    pub rotated: u32,
    /// Divides the frequencies.
    pub factor: f32,
}

/// What an operation is applied to.
enum Arg<'a> {
    Value(&'a Tensor),
    Weight(&'a Weight),
    Buffer(&'a Buffer),
}

impl Tensor {
    /// Rows of an embedding table `[V, H]` for tokens `[T]`.
    pub fn embed(&self, table: &Weight) -> Result<Tensor> {
        value(Op::Embed, &[Arg::Value(self), Arg::Weight(table)])
    }

    /// The position after a call: `position + T`, for `self` the tokens.
    pub fn advance(&self, position: &Tensor) -> Result<Tensor> {
        value(Op::Advance, &[Arg::Value(self), Arg::Value(position)])
    }

    /// `self · factor`.
    pub fn scale(&self, factor: f32) -> Result<Tensor> {
        value(Op::Scale { factor }, &[Arg::Value(self)])
    }

    /// `self · weight` for a weight of one number.
    pub fn scale_by(&self, weight: &Weight) -> Result<Tensor> {
        value(Op::ScaleByWeight, &[Arg::Value(self), Arg::Weight(weight)])
    }

    /// `self + other`, equal shapes.
    pub fn add(&self, other: &Tensor) -> Result<Tensor> {
        value(Op::Add, &[Arg::Value(self), Arg::Value(other)])
    }

    /// Root-mean-square normalisation along the last dim, times a weight if there is one.
    pub fn rms_norm(&self, weight: Option<&Weight>, eps: f32) -> Result<Tensor> {
        match weight {
            Some(w) => value(Op::RmsNorm { eps }, &[Arg::Value(self), Arg::Weight(w)]),
            None => value(Op::RmsNorm { eps }, &[Arg::Value(self)]),
        }
    }

    /// `self · weightᵀ`: `[T, K]` by `[N, K]` gives `[T, N]`.
    pub fn linear(&self, weight: &Weight) -> Result<Tensor> {
        value(Op::Linear, &[Arg::Value(self), Arg::Weight(weight)])
    }

    /// `[T, heads·D]` to `[T, heads, D]`.
    pub fn split_heads(&self, heads: u32) -> Result<Tensor> {
        value(Op::SplitHeads { heads }, &[Arg::Value(self)])
    }

    /// `[T, heads, D]` to `[T, heads·D]`.
    pub fn merge_heads(&self) -> Result<Tensor> {
        value(Op::MergeHeads, &[Arg::Value(self)])
    }

    /// Rotary position embedding of `[T, heads, D]`.
    pub fn rope(&self, position: &Tensor, rope: Rope) -> Result<Tensor> {
        let Rope { base, rotated, factor } = rope;
        value(Op::Rope { base, rotated, factor }, &[Arg::Value(self), Arg::Value(position)])
    }

    /// Attention of queries `[T, heads, D]` over key and value buffers; see [`Op::Attention`].
    pub fn attention(
        &self,
        keys: &Buffer,
        values: &Buffer,
        position: &Tensor,
        window: Option<u32>,
        scale: f32,
    ) -> Result<Tensor> {
        value(
            Op::Attention { window, scale },
            &[Arg::Value(self), Arg::Buffer(keys), Arg::Buffer(values), Arg::Value(position)],
        )
    }

    /// `gelu_tanh(self) · up`.
    pub fn geglu(&self, up: &Tensor) -> Result<Tensor> {
        value(Op::GeGlu, &[Arg::Value(self), Arg::Value(up)])
    }

    /// The last row of `[T, H]`, as `[1, H]`.
    pub fn last_row(&self) -> Result<Tensor> {
        value(Op::LastRow, &[Arg::Value(self)])
    }

    /// `cap · tanh(self / cap)`.
    pub fn soft_cap(&self, cap: f32) -> Result<Tensor> {
        value(Op::SoftCap { cap }, &[Arg::Value(self)])
    }

    /// Draws a token from logits `[1, V]`; see [`Op::Sample`].
    pub fn sample(&self, position: &Tensor, sampling: &Sampling) -> Result<Tensor> {
        let Sampling { temperature, top_k, top_p, seed } = sampling;
        let args = [self, position, temperature, top_k, top_p, seed].map(Arg::Value);
        value(Op::Sample, &args)
    }

    /// Names this value for people and tests.
    pub fn labelled(self, label: &str) -> Self {
        match &self.repr {
            Repr::Eager(numbers, call) => call.observe(label, numbers),
            Repr::Traced(id, tape) => tape.label(*id, label),
        }
        self
    }

    /// The numbers of an eager value.
    pub fn into_numbers(self) -> Result<candle_core::Tensor> {
        match self.repr {
            Repr::Eager(numbers, _) => Ok(numbers),
            Repr::Traced(..) => Err(Error::Mixed { op: "into_numbers" }),
        }
    }
}

impl Buffer {
    /// Writes rows `position .. position + T`, modulo the buffer's rows.
    pub fn write(&self, x: &Tensor, position: &Tensor) -> Result<()> {
        bind(Op::BufferWrite, &[Arg::Buffer(self), Arg::Value(x), Arg::Value(position)])?;
        Ok(())
    }
}

impl Weight {
    /// Canonical name.
    pub fn name(&self) -> &str {
        &self.name
    }
}

/// How a token is drawn: inputs of a method.
#[derive(Clone, Debug)]
pub struct Sampling {
    /// f32 `[1]`.
    pub temperature: Tensor,
    /// u32 `[1]`.
    pub top_k: Tensor,
    /// f32 `[1]`.
    pub top_p: Tensor,
    /// u32 `[2]`.
    pub seed: Tensor,
}

fn value(op: Op, args: &[Arg<'_>]) -> Result<Tensor> {
    let name = op.name();
    bind(op, args)?.ok_or_else(|| Error::Shape(format!("{name} has no result")))
}

/// The one door of all operations.
fn bind(op: Op, args: &[Arg<'_>]) -> Result<Option<Tensor>> {
    let facts: Vec<ArgFact<'_>> = args
        .iter()
        .map(|arg| match arg {
            Arg::Value(t) => ArgFact::Value(&t.fact),
            Arg::Weight(w) => ArgFact::Weight(&w.dims),
            Arg::Buffer(b) => ArgFact::Buffer(&b.dims),
        })
        .collect();
    let fact = op.infer(&facts).map_err(Error::Shape)?;
    let first = args.iter().find_map(|arg| match arg {
        Arg::Value(t) => Some(&t.repr),
        _ => None,
    });
    match first {
        Some(Repr::Traced(_, tape)) => record(op, args, fact, tape),
        Some(Repr::Eager(_, call)) => compute(&op, args, fact, call),
        None => Err(Error::Mixed { op: op.name() }),
    }
}

fn record(op: Op, args: &[Arg<'_>], fact: Option<Fact>, tape: &Tape) -> Result<Option<Tensor>> {
    let operands: Option<Vec<Operand>> = args
        .iter()
        .map(|arg| match arg {
            Arg::Value(Tensor { repr: Repr::Traced(id, other), .. }) if tape.same(other) => {
                Some(Operand::Value(*id))
            }
            Arg::Weight(Weight { repr: WeightRepr::Traced(id), .. }) => Some(Operand::Weight(*id)),
            Arg::Buffer(Buffer { repr: BufferRepr::Traced(id), .. }) => Some(Operand::Buffer(*id)),
            _ => None,
        })
        .collect();
    let operands = operands.ok_or(Error::Mixed { op: op.name() })?;
    let id = tape.append(op, operands, fact.is_some());
    Ok(fact.map(|fact| Tensor { fact, repr: Repr::Traced(id, tape.clone()) }))
}

fn compute(
    op: &Op,
    args: &[Arg<'_>],
    fact: Option<Fact>,
    call: &Rc<EagerCall>,
) -> Result<Option<Tensor>> {
    let numbers: Option<Vec<&candle_core::Tensor>> = args
        .iter()
        .map(|arg| match arg {
            Arg::Value(Tensor { repr: Repr::Eager(x, other), .. }) if Rc::ptr_eq(call, other) => {
                Some(x)
            }
            Arg::Weight(Weight { repr: WeightRepr::Eager(x), .. }) => Some(x),
            Arg::Buffer(Buffer { repr: BufferRepr::Eager(x), .. }) => Some(x),
            _ => None,
        })
        .collect();
    let numbers = numbers.ok_or(Error::Mixed { op: op.name() })?;
    let result = eager::eval(op, &numbers)?;
    let Some((fact, result)) = fact.zip(result) else { return Ok(None) };
    call.check(op, &fact, &result)?;
    Ok(Some(Tensor { fact, repr: Repr::Eager(result, Rc::clone(call)) }))
}
