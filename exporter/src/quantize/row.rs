//! Quantizes rows of a weight into the bytes of its parts.

use gemma4_format::encoding::ZeroType;
use gemma4_format::{DType, Encoding, Offset};
use half::{bf16, f16};

use super::report::Loss;
use super::{Method, hqq, min_max};
use crate::{Error, Result};

/// Sums over the groups of a row that are taken side by side, as a GPU's warps do.
const SUMS: usize = 8;

/// Quantizes the rows of one weight.
#[derive(Clone, Debug)]
pub(crate) struct RowQuantizer {
    pub(super) tensor: String,
    pub(super) bits: u8,
    pub(super) group: usize,
    pub(super) scale: DType,
    pub(super) offset: Offset,
    pub(super) method: Method,
    pub(super) k: usize,
}

/// Memory that a thread uses again for every row.
#[derive(Debug)]
pub(crate) struct Scratch {
    values: Vec<f32>,
    codes: Vec<u8>,
}

impl RowQuantizer {
    /// For the weight `tensor`, `[N, K]`, in `encoding`.
    ///
    /// # Errors
    /// [`Error::Quantize`] if the encoding can't hold such a weight, or the method can't make it.
    pub(crate) fn new(
        tensor: &str,
        dims: &[u32],
        encoding: Encoding,
        method: Method,
    ) -> Result<Self> {
        let refuse = |why: &str| Error::Quantize { tensor: tensor.to_owned(), why: why.to_owned() };
        let (&[_, k], Encoding::Quantized { bits, group, scale, offset }) = (dims, encoding) else {
            return Err(refuse(&format!("its dims are {dims:?}, and codes need two")));
        };
        if group == 0 || k % group != 0 {
            return Err(refuse(&format!(
                "its rows have {k} numbers, which is no multiple of the group size {group}"
            )));
        }
        encoding.parts(tensor, dims)?;
        if !matches!(bits, 4 | 6 | 8) || !matches!(scale, DType::BF16 | DType::F32) {
            return Err(refuse("codes are made with 4, 6 or 8 bits and with BF16 or F32 scales"));
        }
        if matches!(offset, Offset::Minimum(_)) {
            return Err(refuse("codes are made with zero points, not minimums"));
        }
        let fraction = matches!(offset, Offset::Zero(ZeroType::F16 | ZeroType::BF16));
        if method == Method::HalfQuadratic && !fraction {
            return Err(refuse("HQQ needs zero points that can be fractions: F16 or BF16"));
        }
        let (tensor, group, k) = (tensor.to_owned(), group as usize, k as usize);
        Ok(Self { tensor, bits, group, scale, offset, method, k })
    }

    pub(crate) fn scratch(&self) -> Scratch {
        Scratch { values: vec![0.0; self.k], codes: vec![0; self.k] }
    }

    /// Quantizes one row: `source` has its `K` numbers in `dtype`, `parts` the bytes of this row
    /// in each part of the encoding.
    ///
    /// # Errors
    /// [`Error::Quantize`] if a number is not finite, or so large that its scale is not.
    pub(crate) fn quantize(
        &self,
        row: u64,
        source: &[u8],
        dtype: DType,
        parts: &mut [&mut [u8]],
        scratch: &mut Scratch,
    ) -> Result<Loss> {
        let Scratch { values, codes } = scratch;
        decode_dense(dtype, source, values);
        if values.iter().fold(false, |bad, value| bad | !value.is_finite()) {
            let column = values.iter().position(|value| !value.is_finite()).unwrap_or(0);
            return Err(self.refuse(format!("row {row}, column {column} is {}", values[column])));
        }
        let mut losses = [Loss::default(); SUMS];
        let symmetric = self.offset == Offset::Symmetric;
        let groups = values.chunks_exact(self.group).zip(codes.chunks_exact_mut(self.group));
        // Codes and zero points that share a byte are set with `|=`.
        parts.iter_mut().for_each(|part| part.fill(0));
        // Codes of 6 bits have a part of their own for the two high ones.
        let scales = if self.bits == 6 { 2 } else { 1 };
        for (at, (values, codes)) in groups.enumerate() {
            let range = min_max::choose(values, self.bits, symmetric, self.scale);
            if !range.scale.is_finite() {
                return Err(self.refuse(format!("row {row} has numbers too large for a scale")));
            }
            let parameters = match self.method {
                Method::MinMax => {
                    min_max::encode(values, self.bits, range, self.scale, codes);
                    range
                }
                Method::HalfQuadratic => {
                    hqq::encode(values, self.bits, range, |zero| self.stored_zero(zero), codes)
                }
            };
            losses[at % SUMS].add(&Loss::of_codes(
                values,
                codes,
                parameters.zero,
                parameters.scale,
            ));
            write_float(self.scale, parts[scales], at, parameters.scale);
            if let Offset::Zero(zero) = self.offset {
                write_zero(zero, parts[scales + 1], at, parameters.zero);
            }
        }
        if self.bits == 8 {
            parts[0].copy_from_slice(codes);
        } else {
            for (pair, byte) in codes.chunks(2).zip(parts[0].iter_mut()) {
                *byte = pair[0] & 15 | (pair.get(1).copied().unwrap_or(0) & 15) << 4;
            }
        }
        if self.bits == 6 {
            for (four, byte) in codes.chunks(4).zip(parts[1].iter_mut()) {
                *byte = four.iter().rev().fold(0, |byte, code| byte << 2 | code >> 4);
            }
        }
        let mut loss = Loss::default();
        losses.iter().for_each(|sum| loss.add(sum));
        Ok(loss)
    }

    /// The nearest zero point that the encoding holds.
    fn stored_zero(&self, zero: f32) -> f32 {
        match self.offset {
            Offset::Zero(ZeroType::BF16) => bf16::from_f32(zero).to_f32(),
            Offset::Zero(ZeroType::F16) => f16::from_f32(zero).to_f32(),
            _ => zero.round_ties_even(),
        }
    }

    fn refuse(&self, why: String) -> Error {
        Error::Quantize { tensor: self.tensor.clone(), why }
    }
}

fn decode_dense(dtype: DType, bytes: &[u8], values: &mut [f32]) {
    if dtype == DType::BF16 {
        for (value, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
            *value = bf16::from_le_bytes(*bytes).to_f32();
        }
    } else {
        for (at, value) in values.iter_mut().enumerate() {
            *value = dtype.read(bytes, at);
        }
    }
}

fn write_float(dtype: DType, bytes: &mut [u8], at: usize, value: f32) {
    match dtype {
        DType::F32 => bytes[at * 4..][..4].copy_from_slice(&value.to_le_bytes()),
        DType::F16 => bytes[at * 2..][..2].copy_from_slice(&f16::from_f32(value).to_le_bytes()),
        DType::BF16 => bytes[at * 2..][..2].copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
        DType::U8 => bytes[at] = value as u8,
    }
}

/// Writes a zero point that its type holds into bytes that were zero.
fn write_zero(zero: ZeroType, bytes: &mut [u8], at: usize, value: f32) {
    match zero {
        ZeroType::Nibble => bytes[at / 2] |= (value as u8) << (4 * (at % 2)),
        ZeroType::U8 => write_float(DType::U8, bytes, at, value),
        ZeroType::F16 => write_float(DType::F16, bytes, at, value),
        ZeroType::BF16 => write_float(DType::BF16, bytes, at, value),
    }
}
