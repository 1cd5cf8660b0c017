//! Finds the layers in the portable graph.
//!
//! The graph is a list of coarse operations in execution order; kernels do several at once. This
//! walks the list and checks each operand, so that what is lowered is what the graph says; the
//! first operation that is not as expected is named.

use gemma4_format::{BufferId, Method, Op, Operand, Program, ValueId, WeightId};

use super::{Error, Result};

/// The model as kernels see it.
#[derive(Debug, PartialEq)]
pub(super) struct Stages {
    pub(super) table: WeightId,
    pub(super) embed_scale: f32,
    pub(super) layers: Vec<Layer>,
    pub(super) norm: WeightId,
    pub(super) head: WeightId,
    pub(super) soft_cap: f32,
    pub(super) eps: f32,
}

/// One layer.
#[derive(Debug, PartialEq)]
pub(super) struct Layer {
    pub(super) attention: Attention,
    pub(super) pre_norm: WeightId,
    pub(super) gate: WeightId,
    pub(super) up: WeightId,
    pub(super) down: WeightId,
    pub(super) post_norm: WeightId,
    pub(super) scalar: WeightId,
}

/// The attention of a layer, with the norms around it.
#[derive(Debug, PartialEq)]
pub(super) struct Attention {
    pub(super) pre_norm: WeightId,
    /// q, k and, where values have their own, v.
    pub(super) projections: Vec<WeightId>,
    pub(super) q_norm: WeightId,
    pub(super) k_norm: WeightId,
    pub(super) heads: u32,
    pub(super) kv_heads: u32,
    pub(super) width: u32,
    pub(super) rope: Rope,
    pub(super) keys: BufferId,
    pub(super) values: BufferId,
    pub(super) window: Option<u32>,
    pub(super) scale: f32,
    pub(super) o: WeightId,
    pub(super) post_norm: WeightId,
}

impl Attention {
    /// Whether values are the keys before their norm.
    pub(super) fn shares_keys(&self) -> bool {
        self.projections.len() == 2
    }
}

/// Attributes of [`Op::Rope`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Rope {
    pub(super) base: f32,
    pub(super) rotated: u32,
    pub(super) factor: f32,
}

impl Stages {
    /// Reads every method. All must be the same model: `decode` and `prefill` with the logits of
    /// the last row, `verify` with those of all.
    pub(super) fn find(program: &Program) -> Result<Self> {
        let read = |name: &str, last_row| {
            let method = program
                .method(name)
                .ok_or_else(|| Error::Graph(format!("there is no method `{name}`")))?;
            let next = method.inputs.len() as ValueId;
            Walk { program, method, at: 0, next, eps: None }.model(last_row)
        };
        let decode = read("decode", true)?;
        for (name, last_row) in [("prefill", true), ("verify", false)] {
            if read(name, last_row)? != decode {
                let why = format!("`decode` and `{name}` are not the same model");
                return Err(Error::Graph(why));
            }
        }
        Ok(decode)
    }
}

/// A position in the list of operations.
struct Walk<'a> {
    program: &'a Program,
    method: &'a Method,
    at: usize,
    /// Id that the next result will have.
    next: ValueId,
    /// That of all norms.
    eps: Option<f32>,
}

const TOKENS: Operand = Operand::Value(0);
const POSITION: Operand = Operand::Value(1);

impl Walk<'_> {
    fn model(&mut self, last_row: bool) -> Result<Stages> {
        let (table, x) = self.weighted(Op::Embed.name(), TOKENS)?;
        let (op, x) = self.unary("scale", x)?;
        let Op::Scale { factor: embed_scale } = op else { return Err(self.unexpected("scale")) };
        let (mut layers, mut x) = (Vec::new(), x);
        while !self.ends(last_row) {
            let (layer, result) = self.layer(x)?;
            layers.push(layer);
            x = result;
        }
        if last_row {
            x = self.unary("last_row", x)?.1;
        }
        let (norm, x) = self.norm(x)?;
        let (head, x) = self.weighted("linear", value(x))?;
        let (op, _) = self.unary("soft_cap", x)?;
        let Op::SoftCap { cap: soft_cap } = op else { return Err(self.unexpected("soft_cap")) };
        let eps = self.eps.unwrap_or(0.0);
        Ok(Stages { table, embed_scale, layers, norm, head, soft_cap, eps })
    }

    /// Whether the layers are over: what follows is the last row, or the norm before the head.
    fn ends(&self, last_row: bool) -> bool {
        if last_row {
            return self.is("last_row");
        }
        let after = self.method.nodes.get(self.at + 2);
        after.is_some_and(|node| matches!(node.op, Op::SoftCap { .. }))
    }

    fn layer(&mut self, x: ValueId) -> Result<(Layer, ValueId)> {
        let (attention, attended) = self.attention(x)?;
        let x = self.binary("add", x, attended)?;
        let (pre_norm, normed) = self.norm(x)?;
        let (gate, gated) = self.weighted("linear", value(normed))?;
        let (up, upped) = self.weighted("linear", value(normed))?;
        let fed = self.binary("geglu", gated, upped)?;
        let (down, fed) = self.weighted("linear", value(fed))?;
        let (post_norm, fed) = self.norm(fed)?;
        let x = self.binary("add", x, fed)?;
        let (scalar, x) = self.weighted("scale_by_weight", value(x))?;
        Ok((Layer { attention, pre_norm, gate, up, down, post_norm, scalar }, x))
    }

    fn attention(&mut self, x: ValueId) -> Result<(Attention, ValueId)> {
        let (pre_norm, x) = self.norm(x)?;
        let (q_proj, q) = self.weighted("linear", value(x))?;
        let (heads, q) = self.split(q)?;
        let (k_proj, k) = self.weighted("linear", value(x))?;
        let (kv_heads, k) = self.split(k)?;
        let mut projections = vec![q_proj, k_proj];
        let v = if self.is("linear") {
            let (v_proj, v) = self.weighted("linear", value(x))?;
            projections.push(v_proj);
            let (v_heads, v) = self.split(v)?;
            if v_heads != kv_heads {
                return Err(Error::Graph("keys and values have other numbers of heads".to_owned()));
            }
            v
        } else {
            k
        };
        let (q_norm, q) = self.norm(q)?;
        let (rope, q) = self.rope(q)?;
        let (k_norm, k) = self.norm(k)?;
        let (k_rope, k) = self.rope(k)?;
        if rope != k_rope {
            return Err(Error::Graph("queries and keys rotate differently".to_owned()));
        }
        let keys = self.write(k)?;
        let (op, v) = self.unary("rms_norm", v)?;
        if let Op::RmsNorm { eps } = op {
            self.same_eps(eps)?;
        }
        let values = self.write(v)?;
        let expected = [value(q), Operand::Buffer(keys), Operand::Buffer(values), POSITION];
        let (op, attended) = self.take("attention", &expected)?;
        let Op::Attention { window, scale } = op else {
            return Err(self.unexpected("attention"));
        };
        let (_, attended) = self.unary("merge_heads", attended)?;
        let (o, attended) = self.weighted("linear", value(attended))?;
        let (post_norm, attended) = self.norm(attended)?;
        let width = self.program.weights[q_norm as usize].dims[0];
        let attention = Attention {
            pre_norm,
            projections,
            q_norm,
            k_norm,
            heads,
            kv_heads,
            width,
            rope,
            keys,
            values,
            window,
            scale,
            o,
            post_norm,
        };
        Ok((attention, attended))
    }

    fn norm(&mut self, x: ValueId) -> Result<(WeightId, ValueId)> {
        let eps = match self.peek() {
            Some(Op::RmsNorm { eps }) => *eps,
            _ => return Err(self.unexpected("rms_norm")),
        };
        self.same_eps(eps)?;
        self.weighted("rms_norm", value(x))
    }

    fn same_eps(&mut self, eps: f32) -> Result<()> {
        if *self.eps.get_or_insert(eps) != eps {
            return Err(Error::Graph("norms of different eps".to_owned()));
        }
        Ok(())
    }

    fn split(&mut self, x: ValueId) -> Result<(u32, ValueId)> {
        match self.unary("split_heads", x)? {
            (Op::SplitHeads { heads }, result) => Ok((heads, result)),
            _ => Err(self.unexpected("split_heads")),
        }
    }

    fn rope(&mut self, x: ValueId) -> Result<(Rope, ValueId)> {
        match self.take("rope", &[value(x), POSITION])? {
            (Op::Rope { base, rotated, factor }, result) => {
                Ok((Rope { base, rotated, factor }, result))
            }
            _ => Err(self.unexpected("rope")),
        }
    }

    fn write(&mut self, x: ValueId) -> Result<BufferId> {
        let buffer = match self.args() {
            [Operand::Buffer(id), ..] => *id,
            _ => return Err(self.unexpected("buffer_write")),
        };
        self.take("buffer_write", &[Operand::Buffer(buffer), value(x), POSITION])?;
        Ok(buffer)
    }

    fn unary(&mut self, name: &str, x: ValueId) -> Result<(Op, ValueId)> {
        self.take(name, &[value(x)])
    }

    fn binary(&mut self, name: &str, a: ValueId, b: ValueId) -> Result<ValueId> {
        Ok(self.take(name, &[value(a), value(b)])?.1)
    }

    /// An operation on a value and a weight, which is returned with the result.
    fn weighted(&mut self, name: &str, x: Operand) -> Result<(WeightId, ValueId)> {
        let weight = match self.args() {
            [_, Operand::Weight(id)] => *id,
            _ => return Err(self.unexpected(name)),
        };
        let (_, result) = self.take(name, &[x, Operand::Weight(weight)])?;
        Ok((weight, result))
    }

    /// The next operation, which must be of that name and have these operands.
    fn take(&mut self, name: &str, args: &[Operand]) -> Result<(Op, ValueId)> {
        if !self.is(name) || self.args() != args {
            return Err(self.unexpected(name));
        }
        let op = self.peek().cloned().ok_or_else(|| self.unexpected(name))?;
        self.at += 1;
        if !matches!(op, Op::BufferWrite) {
            self.next += 1;
        }
        Ok((op, self.next - 1))
    }

    fn is(&self, name: &str) -> bool {
        self.peek().is_some_and(|op| op.name() == name)
    }

    fn peek(&self) -> Option<&Op> {
        Some(&self.method.nodes.get(self.at)?.op)
    }

    fn args(&self) -> &[Operand] {
        self.method.nodes.get(self.at).map_or(&[], |node| &node.args)
    }

    fn unexpected(&self, wanted: &str) -> Error {
        let found = self.peek().map_or("the end", Op::name);
        let name = &self.method.name;
        Error::Graph(format!(
            "operation {} of `{name}` is {found} where kernels expect {wanted}",
            self.at
        ))
    }
}

fn value(id: ValueId) -> Operand {
    Operand::Value(id)
}
