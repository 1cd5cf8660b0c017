//! Rows of a weight matrix as blocks of 32 numbers.
//!
//! A block is two [`Lanes`]. Codes of 4, 5 and 6 bits lie two to a byte, so their blocks have the
//! even columns first and the odd ones after; [`Order`] says which, and activations are put in
//! the same order once for all rows. Every value equals that of
//! [`gemma4_format::encoding::decode_row`] bit for bit.

use std::marker::PhantomData;

use gemma4_format::encoding::{QuantizedBytes, ZeroType, decode_row};
use gemma4_format::{DType, Encoding, Offset};

use super::isa::{LANES, Lanes};

/// Columns of a block.
pub(crate) const BLOCK: usize = 2 * LANES;

/// Where the columns of a block stand in its lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// As they are.
    Natural,
    /// Columns 0, 2, 4, … 30, then 1, 3, 5, … 31.
    EvenOdd,
}

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

    /// Numbers that one row's parameters or decoded values take.
    pub(crate) fn scratch(&self) -> usize {
        match self.layout() {
            Layout::Decoded => self.blocks() * BLOCK,
            Layout::Dense(_) => 0,
            Layout::Codes { .. } => 2 * self.blocks(),
        }
    }

    pub(crate) fn order(&self) -> Order {
        match self.layout() {
            Layout::Codes { bits: 4..=6, .. } => Order::EvenOdd,
            _ => Order::Natural,
        }
    }

    /// How rows are read: block by block where groups consist of whole blocks.
    pub(crate) fn layout(&self) -> Layout {
        match self.encoding {
            Encoding::Dense(dtype) if self.columns.is_multiple_of(BLOCK) => Layout::Dense(dtype),
            Encoding::Quantized { bits, group, offset, .. }
                if group.is_multiple_of(BLOCK as u32) =>
            {
                Layout::Codes { bits, minimum: matches!(offset, Offset::Minimum(_)) }
            }
            _ => Layout::Decoded,
        }
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
    /// Codes of so many bits, with additive minimums or with zero points.
    Codes { bits: u8, minimum: bool },
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
fn from_bf16(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

/// Exact conversion of a float16, without branches so that it vectorises.
#[inline(always)]
fn from_f16(bytes: [u8; 2]) -> f32 {
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
    /// Numbers in the order of a matrix, whole blocks.
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

/// Codes of `BITS` bits in groups of whole blocks.
#[derive(Clone, Copy)]
pub(crate) struct CodeRows<'a, const BITS: usize, const MINIMUM: bool> {
    pub(crate) matrix: &'a Matrix<'a>,
    pub(crate) bytes: QuantizedBytes<'a>,
    pub(crate) group: usize,
    pub(crate) scale: DType,
    pub(crate) offset: Offset,
}

#[derive(Clone, Copy)]
pub(crate) struct CodeRow<'s, const BITS: usize, const MINIMUM: bool> {
    /// Low four bits, or whole codes for 8 bits, as 16 bytes each.
    codes: &'s [[u8; LANES]],
    high: &'s [u8],
    /// Scale and offset of each block.
    scales: &'s [f32],
    offsets: &'s [f32],
}

impl<const BITS: usize, const MINIMUM: bool> Rows for CodeRows<'_, BITS, MINIMUM> {
    type Row<'s>
        = CodeRow<'s, BITS, MINIMUM>
    where
        Self: 's;

    #[inline(always)]
    fn row<'s>(self, row: usize, scratch: &'s mut [f32]) -> CodeRow<'s, BITS, MINIMUM>
    where
        Self: 's,
    {
        let columns = self.matrix.columns;
        let groups = columns / self.group;
        let (scales, offsets) = scratch.split_at_mut(columns / BLOCK);
        let per_group = self.group / BLOCK;
        spread_dtype(self.scale, self.bytes.scales, row * groups, groups, per_group, scales);
        let bytes = self.bytes.offsets;
        match self.offset {
            Offset::Symmetric => offsets.fill((1u32 << (BITS - 1)) as f32),
            Offset::Minimum(dtype) => {
                spread_dtype(dtype, bytes, row * groups, groups, per_group, offsets);
            }
            Offset::Zero(ZeroType::F16) => {
                spread_dtype(DType::F16, bytes, row * groups, groups, per_group, offsets);
            }
            Offset::Zero(ZeroType::BF16) => {
                spread_dtype(DType::BF16, bytes, row * groups, groups, per_group, offsets);
            }
            Offset::Zero(ZeroType::U8) => {
                spread_dtype(DType::U8, bytes, row * groups, groups, per_group, offsets);
            }
            Offset::Zero(ZeroType::Nibble) => {
                let bytes = &bytes[row * groups.div_ceil(2)..];
                for (pair, byte) in offsets.chunks_mut(2 * per_group).zip(bytes) {
                    let (even, odd) = pair.split_at_mut(per_group);
                    even.fill(f32::from(byte & 15));
                    odd.fill(f32::from(byte >> 4));
                }
            }
        }
        let code_bytes = if BITS == 8 { columns } else { columns / 2 };
        let high_bytes = columns * BITS.saturating_sub(4) / 8;
        CodeRow {
            codes: self.bytes.codes[row * code_bytes..][..code_bytes].as_chunks().0,
            high: if matches!(BITS, 5 | 6) {
                &self.bytes.codes_high[row * high_bytes..][..high_bytes]
            } else {
                &[]
            },
            scales,
            offsets,
        }
    }
}

/// Writes `count` numbers from element `first` on, each `times` times.
#[inline(always)]
fn spread_dtype(
    dtype: DType,
    bytes: &[u8],
    first: usize,
    count: usize,
    times: usize,
    out: &mut [f32],
) {
    let size = dtype.size() as usize;
    let bytes = &bytes[first * size..][..count * size];
    match dtype {
        DType::F32 => spread(bytes.as_chunks().0, times, out, f32::from_le_bytes),
        DType::F16 => spread(bytes.as_chunks().0, times, out, from_f16),
        DType::BF16 => spread(bytes.as_chunks().0, times, out, from_bf16),
        DType::U8 => spread(bytes.as_chunks().0, times, out, |[byte]| f32::from(byte)),
    }
}

#[inline(always)]
fn spread<const SIZE: usize>(
    elements: &[[u8; SIZE]],
    times: usize,
    out: &mut [f32],
    convert: impl Fn([u8; SIZE]) -> f32,
) {
    if times == 1 {
        for (out, element) in out.iter_mut().zip(elements) {
            *out = convert(*element);
        }
    } else {
        for (out, element) in out.chunks_mut(times).zip(elements) {
            out.fill(convert(*element));
        }
    }
}

impl<const BITS: usize, const MINIMUM: bool> Blocks for CodeRow<'_, BITS, MINIMUM> {
    #[inline(always)]
    fn block(&self, at: usize) -> [Lanes; 2] {
        let (scale, offset) = (self.scales[at], self.offsets[at]);
        let mut codes = [[0i32; LANES]; 2];
        if BITS == 8 {
            for (codes, bytes) in codes.iter_mut().zip(&self.codes[2 * at..2 * at + 2]) {
                for (code, byte) in codes.iter_mut().zip(bytes) {
                    *code = i32::from(*byte);
                }
            }
        } else {
            let low = &self.codes[at];
            let [even, odd] = &mut codes;
            for ((even, odd), byte) in even.iter_mut().zip(odd).zip(low) {
                *even = i32::from(byte & 15);
                *odd = i32::from(byte >> 4);
            }
        }
        if BITS == 5 {
            let bits = self.high.as_chunks::<4>().0[at];
            let bits = u32::from_le_bytes(bits);
            let [even, odd] = &mut codes;
            for (i, (even, odd)) in even.iter_mut().zip(odd).enumerate() {
                *even |= ((bits >> (2 * i)) as i32 & 1) << 4;
                *odd |= ((bits >> (2 * i + 1)) as i32 & 1) << 4;
            }
        }
        if BITS == 6 {
            let bits = self.high.as_chunks::<8>().0[at];
            let bits = u64::from_le_bytes(bits);
            let [even, odd] = &mut codes;
            for (i, (even, odd)) in even.iter_mut().zip(odd).enumerate() {
                *even |= ((bits >> (4 * i)) as i32 & 3) << 4;
                *odd |= ((bits >> (4 * i + 2)) as i32 & 3) << 4;
            }
        }
        let mut numbers = [[0.0; LANES]; 2];
        for (numbers, codes) in numbers.iter_mut().zip(&codes) {
            for (number, code) in numbers.iter_mut().zip(codes) {
                let code = *code as f32;
                *number = if MINIMUM { code * scale + offset } else { (code - offset) * scale };
            }
        }
        numbers
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
