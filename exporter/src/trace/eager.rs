//! One candle arm per operation: the reference that every device is compared with.

use std::cell::RefCell;
use std::rc::Rc;

use candle_core::{D, DType, Device, Tensor as Numbers};
use candle_nn::ops::{rms_norm, softmax_last_dim};
use gemma4_format::{Extents, Fact, Op};

use super::{Error, Repr, Result, Tensor};

/// One eager call: the extents that symbolic dims stand for, and what was seen on the way.
#[derive(Debug)]
pub struct EagerCall {
    extents: Extents,
    observed: RefCell<Vec<(String, Numbers)>>,
}

impl EagerCall {
    /// A call of `rows` tokens with buffers of `context` tokens.
    pub fn new(rows: u32, context: u32) -> Rc<Self> {
        let extents = Extents { rows, context };
        Rc::new(Self { extents, observed: RefCell::new(Vec::new()) })
    }

    /// An input of the call.
    pub fn input(self: &Rc<Self>, fact: Fact, numbers: Numbers) -> Tensor {
        Tensor { fact, repr: Repr::Eager(numbers, Rc::clone(self)) }
    }

    /// Labelled values of the call, in order.
    pub fn observed(&self) -> Vec<(String, Numbers)> {
        self.observed.borrow().clone()
    }

    pub(super) fn observe(&self, label: &str, numbers: &Numbers) {
        self.observed.borrow_mut().push((label.to_owned(), numbers.clone()));
    }

    /// Every eager run also tests the shape rules.
    pub(super) fn check(&self, op: &Op, fact: &Fact, numbers: &Numbers) -> Result<()> {
        let dims: Vec<usize> = fact.dims.iter().map(|d| d.resolve(self.extents) as usize).collect();
        if numbers.dims() != dims {
            let found = numbers.dims();
            return Err(Error::Shape(format!("{}: candle gave {found:?}, not {fact}", op.name())));
        }
        Ok(())
    }
}

/// Computes one operation; operands are shaped as [`Op::infer`] demands.
pub(crate) fn eval(op: &Op, args: &[&Numbers]) -> Result<Option<Numbers>> {
    let result = match (op, args) {
        (Op::Embed, [tokens, table]) => table.index_select(tokens, 0)?,
        (Op::Advance, [tokens, position]) => {
            Numbers::new(&[first(position)? + tokens.dim(0)? as u32], &Device::Cpu)?
        }
        (Op::Scale { factor }, [x]) => x.affine(f64::from(*factor), 0.0)?,
        (Op::ScaleByWeight, [x, weight]) => x.broadcast_mul(weight)?,
        (Op::Add, [a, b]) => (*a + *b)?,
        (Op::RmsNorm { eps }, [x]) => {
            rms_norm(x, &Numbers::ones(x.dim(D::Minus1)?, DType::F32, &Device::Cpu)?, *eps)?
        }
        (Op::RmsNorm { eps }, [x, weight]) => rms_norm(x, weight, *eps)?,
        (Op::Linear, [x, weight]) => x.matmul(&weight.t()?)?,
        (Op::SplitHeads { heads }, [x]) => {
            let (rows, width) = x.dims2()?;
            x.reshape((rows, *heads as usize, width / *heads as usize))?
        }
        (Op::MergeHeads, [x]) => x.flatten_from(1)?,
        (Op::Rope { base, rotated, factor }, [x, position]) => {
            rope(x, first(position)?, *base, *rotated, *factor)?
        }
        (Op::BufferWrite, [buffer, x, position]) => {
            write_rows(buffer, x, first(position)? as usize)?;
            return Ok(None);
        }
        (Op::Attention { window, scale }, [q, keys, values, position]) => {
            attention(q, keys, values, first(position)?, *window, *scale)?
        }
        (Op::GeGlu, [gate, up]) => (gate.gelu()? * *up)?,
        (Op::LastRow, [x]) => x.narrow(0, x.dim(0)? - 1, 1)?,
        (Op::SoftCap { cap }, [x]) => {
            let cap = f64::from(*cap);
            ((*x / cap)?.tanh()? * cap)?
        }
        (Op::Sample, _) => {
            return Err(Error::Shape("sample: eager runs end at the logits".to_owned()));
        }
        _ => return Err(Error::Shape(format!("{}: {} operands", op.name(), args.len()))),
    };
    Ok(Some(result))
}

fn first(x: &Numbers) -> Result<u32> {
    Ok(x.to_vec1::<u32>()?[0])
}

fn rope(x: &Numbers, position: u32, base: f32, rotated: u32, factor: f32) -> Result<Numbers> {
    let (rows, _, width) = x.dims3()?;
    let half = width / 2;
    let angles = (0..rows).flat_map(|row| {
        let at = (position + row as u32) as f32;
        (0..half).map(move |i| {
            if i >= rotated as usize {
                return 0.0;
            }
            let exponent = (2 * i) as f32 / width as f32;
            at * (1.0 / base.powf(exponent) / factor)
        })
    });
    let angles = Numbers::from_iter(angles, &Device::Cpu)?.reshape((rows, half))?;
    // candle wants [batch, heads, rows, width].
    let x = x.transpose(0, 1)?.unsqueeze(0)?.contiguous()?;
    let turned = candle_nn::rotary_emb::rope(&x, &angles.cos()?, &angles.sin()?)?;
    Ok(turned.squeeze(0)?.transpose(0, 1)?.contiguous()?)
}

/// Rows go to `(position + t) mod R`, split where they wrap.
fn write_rows(buffer: &Numbers, x: &Numbers, position: usize) -> Result<()> {
    let (capacity, rows) = (buffer.dim(0)?, x.dim(0)?);
    let mut done = 0;
    while done < rows {
        let slot = (position + done) % capacity;
        let run = (rows - done).min(capacity - slot);
        buffer.slice_set(&x.narrow(0, done, run)?.contiguous()?, 0, slot)?;
        done += run;
    }
    Ok(())
}

fn attention(
    q: &Numbers,
    keys: &Numbers,
    values: &Numbers,
    position: u32,
    window: Option<u32>,
    scale: f32,
) -> Result<Numbers> {
    let (rows, heads, _) = q.dims3()?;
    let (capacity, groups, _) = keys.dims3()?;
    let end = position + rows as u32;
    let start = window.map_or(0, |w| (position + 1).saturating_sub(w));
    let slots: Vec<u32> = (start..end).map(|p| p % capacity as u32).collect();
    let slots = Numbers::new(slots, &Device::Cpu)?;
    // [heads, keys, width]: every key head serves heads / groups query heads.
    let gather = |buffer: &Numbers| -> Result<Numbers> {
        let rows = buffer.index_select(&slots, 0)?.transpose(0, 1)?;
        let (groups_, n, width) = rows.dims3()?;
        let rows = rows.unsqueeze(1)?.expand((groups_, heads / groups, n, width))?;
        Ok(rows.reshape((heads, n, width))?)
    };
    let (k, v) = (gather(keys)?, gather(values)?);
    let mask: Vec<f32> = (position..end)
        .flat_map(|query| {
            (start..end).map(move |key| {
                let seen = key <= query && window.is_none_or(|w| query - key < w);
                if seen { 0.0 } else { f32::NEG_INFINITY }
            })
        })
        .collect();
    let mask = Numbers::from_vec(mask, (rows, (end - start) as usize), &Device::Cpu)?;
    let q = q.transpose(0, 1)?.contiguous()?;
    let scores = (q.matmul(&k.transpose(1, 2)?.contiguous()?)? * f64::from(scale))?;
    let weights = softmax_last_dim(&scores.broadcast_add(&mask)?)?;
    Ok(weights.matmul(&v.contiguous()?)?.transpose(0, 1)?.contiguous()?)
}
