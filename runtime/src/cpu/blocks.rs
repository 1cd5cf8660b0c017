//! Rows of a weight matrix as blocks of 32 float32 numbers.
//!
//! A block is two [`Lanes`]. Every value equals that of
//! [`gemma4_format::encoding::decode_row`] bit for bit.

use std::marker::PhantomData;

use gemma4_format::encoding::{QuantizedBytes, decode_row};
use gemma4_format::{DType, Encoding};

use super::codes::CodeMatrix;
use super::isa::{LANES, Lanes};

/// Columns of a block.
pub(crate) const BLOCK: usize = 2 * LANES;

/// A weight matrix `[rows, columns]` in a mapped file.
#[derive(Clone, Debug)]
pub(crate) struct Matrix<'a> {
    pub(crate) encoding: Encoding,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    /// Its stored tensors, in the order of [`Encoding::parts`].
    pub(crate) parts: Vec<&'a [u8]>,
}

impl Matrix<'_> {
    /// Blocks of a row; the last one is filled up with zeros.
    pub(crate) fn blocks(&self) -> usize {
        self.columns.div_ceil(BLOCK)
    }

    /// Numbers that one decoded row takes, unless it is read in place.
    pub(crate) fn scratch(&self) -> usize {
        match self.layout() {
            Layout::Decoded => self.blocks() * BLOCK,
            Layout::Dense(_) => 0,
        }
    }

    /// How rows are read: block by block where they consist of whole blocks.
    pub(crate) fn layout(&self) -> Layout {
        match self.encoding {
            Encoding::Dense(dtype) if self.columns.is_multiple_of(BLOCK) => Layout::Dense(dtype),
            _ => Layout::Decoded,
        }
    }

    /// As codes, if it has them in groups that suit.
    pub(crate) fn codes(&self) -> Option<CodeMatrix<'_>> {
        CodeMatrix::new(self.encoding, self.columns, &self.parts)
    }

    /// Decodes one row; `out` has as many numbers as the matrix has columns.
    pub(crate) fn decode(&self, row: usize, out: &mut [f32]) {
        match self.encoding {
            Encoding::Dense(dtype) => {
                let bytes = self.part_row(0, row, self.columns * dtype.size() as usize);
                for (at, value) in out.iter_mut().enumerate() {
                    *value = dtype.read(bytes, at);
                }
            }
            encoding => {
                if let Some(bytes) = QuantizedBytes::from_parts(encoding, &self.parts) {
                    decode_row(encoding, bytes, row, out);
                }
            }
        }
    }

    /// Row `row` of stored tensor `part`, whose rows have `stride` bytes.
    #[inline(always)]
    fn part_row(&self, part: usize, row: usize, stride: usize) -> &[u8] {
        &self.parts[part][row * stride..][..stride]
    }
}

/// How the blocks of a matrix are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// Numbers of this type.
    Dense(DType),
    /// By decoding the row first.
    Decoded,
}

/// The rows of a matrix whose layout is known when the kernel is compiled.
pub(crate) trait Rows: Copy + Send + Sync {
    /// One row.
    type Row<'s>: Blocks
    where
        Self: 's;
    /// Prepares a row; `scratch` has [`Matrix::scratch`] numbers.
    fn row<'s>(self, row: usize, scratch: &'s mut [f32]) -> Self::Row<'s>
    where
        Self: 's;
}

/// One row.
pub(crate) trait Blocks: Copy {
    /// The numbers of block `at`.
    fn block(&self, at: usize) -> [Lanes; 2];
}

/// Numbers of type `D`, little-endian.
#[derive(Clone, Copy)]
pub(crate) struct DenseRows<'a, D> {
    matrix: &'a Matrix<'a>,
    stored: PhantomData<D>,
}

impl<'a, D> DenseRows<'a, D> {
    pub(crate) fn new(matrix: &'a Matrix<'a>) -> Self {
        Self { matrix, stored: PhantomData }
    }
}

/// A float type as it is stored.
pub(crate) trait Stored: Copy + Send + Sync {
    /// The bytes of [`LANES`] numbers.
    type Chunk: Copy;
    /// Splits bytes into chunks.
    fn chunks(bytes: &[u8]) -> &[Self::Chunk];
    /// Exact conversion.
    fn lanes(chunk: &Self::Chunk) -> Lanes;
    /// Bytes of a number.
    const SIZE: usize;
}

#[derive(Clone, Copy)]
pub(crate) struct F32;
#[derive(Clone, Copy)]
pub(crate) struct Bf16;
#[derive(Clone, Copy)]
pub(crate) struct F16;

impl Stored for F32 {
    type Chunk = [u8; 64];
    const SIZE: usize = 4;
    #[inline(always)]
    fn chunks(bytes: &[u8]) -> &[[u8; 64]] {
        bytes.as_chunks().0
    }
    #[inline(always)]
    fn lanes(chunk: &[u8; 64]) -> Lanes {
        let mut lanes = [0.0; LANES];
        for (lane, bytes) in lanes.iter_mut().zip(chunk.as_chunks().0) {
            *lane = f32::from_le_bytes(*bytes);
        }
        lanes
    }
}

impl Stored for Bf16 {
    type Chunk = [u8; 32];
    const SIZE: usize = 2;
    #[inline(always)]
    fn chunks(bytes: &[u8]) -> &[[u8; 32]] {
        bytes.as_chunks().0
    }
    #[inline(always)]
    fn lanes(chunk: &[u8; 32]) -> Lanes {
        let mut lanes = [0.0; LANES];
        for (lane, bytes) in lanes.iter_mut().zip(chunk.as_chunks().0) {
            *lane = from_bf16(*bytes);
        }
        lanes
    }
}

impl Stored for F16 {
    type Chunk = [u8; 32];
    const SIZE: usize = 2;
    #[inline(always)]
    fn chunks(bytes: &[u8]) -> &[[u8; 32]] {
        bytes.as_chunks().0
    }
    #[inline(always)]
    fn lanes(chunk: &[u8; 32]) -> Lanes {
        let mut lanes = [0.0; LANES];
        for (lane, bytes) in lanes.iter_mut().zip(chunk.as_chunks().0) {
            *lane = from_f16(*bytes);
        }
        lanes
    }
}

/// Exact conversion of a bfloat16.
#[inline(always)]
pub(crate) fn from_bf16(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

/// Exact conversion of a float16, without branches so that it vectorises.
#[inline(always)]
pub(crate) fn from_f16(bytes: [u8; 2]) -> f32 {
    let half = u32::from(u16::from_le_bytes(bytes));
    let sign = (half & 0x8000) << 16;
    let magnitude = half & 0x7fff;
    // The exponent bias grows from 15 to 127; the product also normalises subnormals.
    let number = f32::from_bits(magnitude << 13) * f32::from_bits((127 + 112) << 23);
    let beyond = if magnitude >= 0x7c00 { 0x7f80_0000 } else { 0 };
    f32::from_bits(number.to_bits() | beyond | sign)
}

impl<D: Stored> Rows for DenseRows<'_, D> {
    type Row<'s>
        = DenseRow<'s, D>
    where
        Self: 's;

    #[inline(always)]
    fn row<'s>(self, row: usize, _: &'s mut [f32]) -> DenseRow<'s, D>
    where
        Self: 's,
    {
        DenseRow { chunks: D::chunks(self.matrix.part_row(0, row, self.matrix.columns * D::SIZE)) }
    }
}

#[derive(Clone, Copy)]
pub(crate) struct DenseRow<'s, D: Stored> {
    chunks: &'s [D::Chunk],
}

impl<D: Stored> Blocks for DenseRow<'_, D> {
    #[inline(always)]
    fn block(&self, at: usize) -> [Lanes; 2] {
        [D::lanes(&self.chunks[2 * at]), D::lanes(&self.chunks[2 * at + 1])]
    }
}

/// A row that was decoded to float32.
#[derive(Clone, Copy)]
pub(crate) struct DecodedRows<'a> {
    pub(crate) matrix: &'a Matrix<'a>,
}

#[derive(Clone, Copy)]
pub(crate) struct FloatRow<'s> {
    chunks: &'s [Lanes],
}

impl<'s> FloatRow<'s> {
    /// Whole blocks of numbers.
    #[inline(always)]
    pub(crate) fn new(numbers: &'s [f32]) -> Self {
        Self { chunks: numbers.as_chunks().0 }
    }
}

impl Rows for DecodedRows<'_> {
    type Row<'s>
        = FloatRow<'s>
    where
        Self: 's;

    fn row<'s>(self, row: usize, scratch: &'s mut [f32]) -> FloatRow<'s>
    where
        Self: 's,
    {
        let (numbers, padding) = scratch.split_at_mut(self.matrix.columns);
        self.matrix.decode(row, numbers);
        padding.fill(0.0);
        FloatRow::new(scratch)
    }
}

impl Blocks for FloatRow<'_> {
    #[inline(always)]
    fn block(&self, at: usize) -> [Lanes; 2] {
        [self.chunks[2 * at], self.chunks[2 * at + 1]]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_float16_and_bfloat16_is_converted_exactly() {
        for bits in 0..=u16::MAX {
            let bytes = bits.to_le_bytes();
            for (found, wanted) in [
                (from_f16(bytes), half::f16::from_bits(bits).to_f32()),
                (from_bf16(bytes), half::bf16::from_bits(bits).to_f32()),
            ] {
                let same = found.to_bits() == wanted.to_bits();
                assert!(same || (found.is_nan() && wanted.is_nan()), "{bits:#x}");
            }
        }
    }
}
