//! The operations of the portable graph, and the one rule for the shape of each result.

use serde::{Deserialize, Serialize};

use crate::dim::{Dim, Fact, ValueType};

/// An operation. Attributes are data; operands stand in the [`crate::Node`].
///
/// Shapes below use `T` for rows of the call, `R` for rows of a buffer, `h` heads, `D` the head
/// dimension. All arithmetic is float32; a device that rounds anywhere says where in its plan.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Op {
    /// `(tokens u32[T], table [V, H]) -> [T, H]`: rows of an embedding table. Every token must
    /// be below `V`; the runtime checks that before a call.
    Embed,
    /// `(tokens u32[T], position u32[1]) -> u32[1]`: the position after this call,
    /// `position + T`.
    Advance,
    /// `(x) -> x · factor`.
    Scale {
        /// A finite constant.
        factor: f32,
    },
    /// `(x, w [1]) -> x · w`.
    ScaleByWeight,
    /// `(a, b) -> a + b`, equal shapes.
    Add,
    /// `(x [.., D]) -> x / sqrt(mean(x²) + eps)`, and with a weight `(x [.., D], w [D])` that
    /// times `w`.
    RmsNorm {
        /// Added to the mean of squares; positive.
        eps: f32,
    },
    /// `(x [T, K], w [N, K]) -> [T, N]`: `x · wᵀ`, dense or quantized.
    Linear,
    /// `(x [T, h·D]) -> [T, h, D]`.
    SplitHeads {
        /// `h`.
        heads: u32,
    },
    /// `(x [T, h, D]) -> [T, h·D]`.
    MergeHeads,
    /// `(x [T, h, D], position u32[1]) -> [T, h, D]`: rotary embedding in the half-split form.
    ///
    /// Row `t` has the angle `(position + t) · f_i` for pair `(i, i + D/2)`, with
    /// `f_i = base^(−2i/D) / factor` for `i < rotated` and 0 (the pair is left as it is) beyond.
    Rope {
        /// `rope_theta`; at least 1.
        base: f32,
        /// Pairs that rotate, at most `D/2`.
        rotated: u32,
        /// Divides every frequency; positive.
        factor: f32,
    },
    /// `(buffer [R, h, D], x [T, h, D], position u32[1])`, no result: row `t` of `x` goes to row
    /// `(position + t) mod R`. The only mutation.
    BufferWrite,
    /// `(q [T, h, D], keys [R, g, D], values [R, g, D], position u32[1]) -> [T, h, D]`:
    /// grouped-query attention of rows `position .. position + T` over the buffers.
    ///
    /// Query head `i` reads key head `i / (h/g)`. The query at position `p` sees the keys at
    /// positions `p − window + 1 ..= p` (all of `0 ..= p` without a window). The key of position
    /// `j` lies in row `j mod R`.
    Attention {
        /// How many keys a query sees, itself included; `None` for all.
        window: Option<u32>,
        /// Multiplies the scores.
        scale: f32,
    },
    /// `(gate [T, I], up [T, I]) -> gelu_tanh(gate) · up`, with
    /// `gelu_tanh(x) = x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))`.
    GeGlu,
    /// `(x [T, H]) -> [1, H]`: the last row.
    LastRow,
    /// `(x) -> cap · tanh(x / cap)`.
    SoftCap {
        /// Positive.
        cap: f32,
    },
    /// `(logits [1, V], position u32[1], temperature [1], top_k u32[1], top_p [1], seed u32[2])
    /// -> u32[1]`: one token id.
    ///
    /// Temperature 0 takes the largest logit, the lowest id among equals. Otherwise logits are
    /// divided by the temperature; the `top_k` largest stay (0 keeps all); of these the smallest
    /// set of most probable ones whose probabilities sum to at least `top_p`; one is drawn with
    /// a uniform number from Philox 4x32-10, keyed by `seed`, counter `position` (that of the
    /// token being drawn): the first id up to which the share of the probabilities exceeds
    /// `(x₁ 2³² + x₀) / 2⁶⁴`, where `x₀` and `x₁` are the first words of the block.
    Sample,
}

/// What an operand of a node is, as far as shapes go.
#[derive(Clone, Copy, Debug)]
pub enum ArgFact<'a> {
    /// A value computed in this call.
    Value(&'a Fact),
    /// Dims of a weight.
    Weight(&'a [u32]),
    /// Dims of a buffer.
    Buffer(&'a [Dim]),
}

impl Op {
    /// Name in the text form and in messages.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Embed => "embed",
            Op::Advance => "advance",
            Op::Scale { .. } => "scale",
            Op::ScaleByWeight => "scale_by_weight",
            Op::Add => "add",
            Op::RmsNorm { .. } => "rms_norm",
            Op::Linear => "linear",
            Op::SplitHeads { .. } => "split_heads",
            Op::MergeHeads => "merge_heads",
            Op::Rope { .. } => "rope",
            Op::BufferWrite => "buffer_write",
            Op::Attention { .. } => "attention",
            Op::GeGlu => "geglu",
            Op::LastRow => "last_row",
            Op::SoftCap { .. } => "soft_cap",
            Op::Sample => "sample",
        }
    }

    /// The fact of the result, `None` for an operation that has none.
    ///
    /// The only shape rule: the tracer, eager runs and the verifier of a loaded file call it.
    /// Total: any attributes and operands give a fact or a sentence.
    pub fn infer(&self, args: &[ArgFact<'_>]) -> Result<Option<Fact>, String> {
        use ArgFact::{Buffer, Value, Weight};
        self.check_attributes()?;
        match (self, args) {
            (Op::Embed, [Value(tokens), Weight([_, h])]) if is_tokens(tokens) => {
                Ok(Some(Fact::f32([tokens.dims[0], Dim::Fixed(*h)])))
            }
            (Op::Advance, [Value(tokens), Value(position)])
                if is_tokens(tokens) && is_scalar(position, ValueType::U32) =>
            {
                Ok(Some((*position).clone()))
            }
            (Op::Scale { .. } | Op::SoftCap { .. }, [Value(x)]) if is_real(x) => {
                Ok(Some((*x).clone()))
            }
            (Op::ScaleByWeight, [Value(x), Weight([1])]) if is_real(x) => Ok(Some((*x).clone())),
            (Op::Add, [Value(a), Value(b)]) if is_real(a) && a.same(b) => Ok(Some((*a).clone())),
            (Op::RmsNorm { .. }, [Value(x)]) if is_real(x) && last_fixed(x).is_some() => {
                Ok(Some((*x).clone()))
            }
            (Op::RmsNorm { .. }, [Value(x), Weight([d])])
                if is_real(x) && last_fixed(x) == Some(*d) =>
            {
                Ok(Some((*x).clone()))
            }
            (Op::Linear, [Value(x), Weight([n, k])])
                if is_real(x) && x.dims.len() == 2 && last_fixed(x) == Some(*k) =>
            {
                Ok(Some(Fact::f32([x.dims[0], Dim::Fixed(*n)])))
            }
            (Op::SplitHeads { heads }, [Value(x)])
                if is_real(x)
                    && x.dims.len() == 2
                    && last_fixed(x).is_some_and(|n| n.is_multiple_of(*heads)) =>
            {
                let width = last_fixed(x).unwrap_or(0) / heads;
                Ok(Some(Fact::f32([x.dims[0], Dim::Fixed(*heads), Dim::Fixed(width)])))
            }
            (Op::MergeHeads, [Value(x)]) if is_real(x) => {
                let [_, heads, width] = heads_of(&x.dims).ok_or_else(|| self.complaint(args))?;
                let merged = heads.checked_mul(width).ok_or_else(|| self.complaint(args))?;
                Ok(Some(Fact::f32([x.dims[0], Dim::Fixed(merged)])))
            }
            (Op::Rope { rotated, .. }, [Value(x), Value(position)])
                if is_real(x) && is_scalar(position, ValueType::U32) =>
            {
                match heads_of(&x.dims) {
                    Some([_, _, width]) if width % 2 == 0 && *rotated <= width / 2 => {
                        Ok(Some((*x).clone()))
                    }
                    _ => Err(self.complaint(args)),
                }
            }
            (Op::BufferWrite, [Buffer(buffer), Value(x), Value(position)])
                if is_real(x)
                    && is_scalar(position, ValueType::U32)
                    && same_row_shape(buffer, &x.dims) =>
            {
                Ok(None)
            }
            (Op::Attention { .. }, [Value(q), Buffer(keys), Buffer(values), Value(position)])
                if is_real(q)
                    && is_scalar(position, ValueType::U32)
                    && same_row_shape(keys, values)
                    && keys[0].same(values[0]) =>
            {
                match (heads_of(&q.dims), heads_of(keys)) {
                    (Some([_, h, d]), Some([_, g, e]))
                        if d == e && g > 0 && h.is_multiple_of(g) =>
                    {
                        Ok(Some((*q).clone()))
                    }
                    _ => Err(self.complaint(args)),
                }
            }
            (Op::GeGlu, [Value(gate), Value(up)]) if is_real(gate) && gate.same(up) => {
                Ok(Some((*gate).clone()))
            }
            (Op::LastRow, [Value(x)]) if is_real(x) && x.dims.len() == 2 => {
                Ok(Some(Fact::f32([Dim::Fixed(1), x.dims[1]])))
            }
            (
                Op::Sample,
                [
                    Value(logits),
                    Value(position),
                    Value(temperature),
                    Value(k),
                    Value(p),
                    Value(seed),
                ],
            ) if is_real(logits)
                && matches!(logits.dims[..], [Dim::Fixed(1), Dim::Fixed(_)])
                && is_scalar(position, ValueType::U32)
                && is_scalar(temperature, ValueType::F32)
                && is_scalar(k, ValueType::U32)
                && is_scalar(p, ValueType::F32)
                && seed.dtype == ValueType::U32
                && matches!(seed.dims[..], [Dim::Fixed(2)]) =>
            {
                Ok(Some(Fact::u32([Dim::Fixed(1)])))
            }
            _ => Err(self.complaint(args)),
        }
    }

    fn check_attributes(&self) -> Result<(), String> {
        let positive = |name: &str, x: f32| {
            if x.is_finite() && x > 0.0 {
                Ok(())
            } else {
                Err(format!("{}: {name} = {x} is not a positive number", self.name()))
            }
        };
        match *self {
            Op::Scale { factor } if !factor.is_finite() => {
                Err(format!("scale: factor = {factor} is not a number"))
            }
            Op::RmsNorm { eps } => positive("eps", eps),
            Op::SoftCap { cap } => positive("cap", cap),
            Op::SplitHeads { heads: 0 } => Err("split_heads: 0 heads".to_owned()),
            Op::Rope { base, factor, .. } => {
                positive("factor", factor)?;
                if base.is_finite() && base >= 1.0 {
                    Ok(())
                } else {
                    Err(format!("rope: base = {base} is below 1"))
                }
            }
            Op::Attention { window: Some(0), .. } => Err("attention: a window of 0".to_owned()),
            Op::Attention { scale, .. } => positive("scale", scale),
            _ => Ok(()),
        }
    }

    fn complaint(&self, args: &[ArgFact<'_>]) -> String {
        let args: Vec<String> = args
            .iter()
            .map(|arg| match arg {
                ArgFact::Value(fact) => fact.to_string(),
                ArgFact::Weight(dims) => format!("weight {dims:?}"),
                ArgFact::Buffer(dims) => format!("buffer {}", Fact::f32(dims.to_vec())),
            })
            .collect();
        format!("{} does not take ({})", self.name(), args.join(", "))
    }
}

fn is_real(fact: &Fact) -> bool {
    fact.dtype == ValueType::F32 && !fact.dims.is_empty()
}

fn is_tokens(fact: &Fact) -> bool {
    fact.dtype == ValueType::U32 && fact.dims.len() == 1
}

fn is_scalar(fact: &Fact, dtype: ValueType) -> bool {
    fact.dtype == dtype && matches!(fact.dims[..], [Dim::Fixed(1)])
}

fn last_fixed(fact: &Fact) -> Option<u32> {
    fact.dims.last()?.fixed()
}

/// `[rows, heads, width]` of a value or buffer split into heads; rows as 0 where not fixed.
fn heads_of(dims: &[Dim]) -> Option<[u32; 3]> {
    let [rows, heads, width] = dims else { return None };
    Some([rows.fixed().unwrap_or(0), heads.fixed()?, width.fixed()?])
}

fn same_row_shape(a: &[Dim], b: &[Dim]) -> bool {
    matches!((a, b), ([_, g, d], [_, h, e]) if g.same(*h) && d.same(*e))
}
