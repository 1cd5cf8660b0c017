//! Rows of quantized weights as codes, and what turns sums of them into products.

use gemma4_format::encoding::{QuantizedBytes, ZeroType};
use gemma4_format::{DType, Encoding, Offset};

use super::blocks::{from_bf16, from_f16};
use super::digits::{Extent, UNIT};
use super::isa::{Arithmetic, BYTES, Lanes};

/// Numbers of scratch that a unit of a row takes.
pub(crate) const SCRATCH: usize = 4;

/// A weight of codes whose groups consist of whole units.
#[derive(Clone, Copy)]
pub(crate) struct CodeMatrix<'a> {
    pub(crate) columns: usize,
    bytes: QuantizedBytes<'a>,
    bits: u8,
    group: usize,
    scale: DType,
    offset: Offset,
}

impl<'a> CodeMatrix<'a> {
    /// `None` for other encodings.
    pub(crate) fn new(encoding: Encoding, columns: usize, parts: &[&'a [u8]]) -> Option<Self> {
        let Encoding::Quantized { bits, group, scale, offset } = encoding else { return None };
        let (group, bytes) = (group as usize, QuantizedBytes::from_parts(encoding, parts)?);
        let whole = group.is_multiple_of(UNIT);
        whole.then_some(Self { columns, bytes, bits, group, scale, offset })
    }

    /// Bits of a code.
    pub(crate) fn bits(&self) -> u8 {
        self.bits
    }

    /// Vectors of codes of a step: codes below 8 bits lie two to a byte.
    pub(crate) fn planes(&self) -> usize {
        if self.bits == 8 { 1 } else { 2 }
    }

    pub(crate) fn extent(&self) -> Extent {
        Extent::new(self.columns, self.planes())
    }

    /// Writes one code to a byte, plane by plane in each step, and the parameters; `scratch` has
    /// [`SCRATCH`] numbers for each unit.
    #[inline(always)]
    pub(crate) fn unpack<A: Arithmetic>(&self, row: usize, codes: &mut [u8], scratch: &mut [f32]) {
        self.parameters::<A>(row, scratch);
        let columns = self.columns;
        if self.bits == 8 {
            let (codes, rest) = codes.split_at_mut(columns);
            codes.copy_from_slice(&self.bytes.codes[row * columns..][..columns]);
            return rest.fill(0);
        }
        // Bytes of columns beyond the last have digits of zero, but must be codes.
        codes.fill(0);
        split(&self.bytes.codes[row * (columns / 2)..][..columns / 2], codes);
        let size = columns / 8 * usize::from(self.bits - 4);
        match self.bits {
            5 => add_fifth(&self.bytes.codes_high[row * size..][..size], codes),
            6 => add_sixth(&self.bytes.codes_high[row * size..][..size], codes),
            _ => {}
        }
    }

    /// Writes the scale of each unit, and what its sum of activations is multiplied with: minus
    /// the scaled zero point, or the minimum. Both end in zeros, and are the first two quarters
    /// of `scratch`.
    #[inline(always)]
    fn parameters<A: Arithmetic>(&self, row: usize, scratch: &mut [f32]) {
        let groups = self.columns / self.group;
        let first = row * groups;
        let (units, rest) = scratch.split_at_mut(scratch.len() / 2);
        let (scales, factors) = rest.split_at_mut(rest.len() / 2);
        let (scales, factors) = (&mut scales[..groups], &mut factors[..groups]);
        read(self.scale, self.bytes.scales, first, scales);
        let bytes = self.bytes.offsets;
        match self.offset {
            Offset::Symmetric => factors.fill((1u32 << (self.bits - 1)) as f32),
            Offset::Minimum(dtype) => read(dtype, bytes, first, factors),
            Offset::Zero(ZeroType::F16) => read(DType::F16, bytes, first, factors),
            Offset::Zero(ZeroType::BF16) => read(DType::BF16, bytes, first, factors),
            Offset::Zero(ZeroType::U8) => read(DType::U8, bytes, first, factors),
            Offset::Zero(ZeroType::Nibble) => {
                let bytes = &bytes[row * groups.div_ceil(2)..][..groups.div_ceil(2)];
                let (pairs, last) = factors.as_chunks_mut::<2>();
                for (pair, byte) in pairs.iter_mut().zip(bytes) {
                    *pair = [f32::from(byte & 15), f32::from(byte >> 4)];
                }
                if let ([last], [.., byte]) = (last, bytes) {
                    *last = f32::from(byte & 15);
                }
            }
        }
        if !matches!(self.offset, Offset::Minimum(_)) {
            for (factor, scale) in factors.iter_mut().zip(&*scales) {
                *factor *= -*scale;
            }
        }
        let (scales_of_units, factors_of_units) = units.split_at_mut(units.len() / 2);
        spread::<A>(scales, self.group / UNIT, scales_of_units);
        spread::<A>(factors, self.group / UNIT, factors_of_units);
    }
}

/// Writes each number `times` times, and zeros after them.
#[inline(always)]
fn spread<A: Arithmetic>(numbers: &[f32], times: usize, out: &mut [f32]) {
    let (out, rest) = out.split_at_mut(numbers.len() * times);
    rest.fill(0.0);
    // Groups of 32 and 64 columns are so many that they want vectors.
    let done = match times {
        2 => spread_lanes::<A, 8>(numbers, out),
        4 => spread_lanes::<A, 4>(numbers, out),
        _ => 0,
    };
    for (out, number) in out.chunks_mut(times).zip(numbers).skip(done) {
        out.fill(*number);
    }
}

/// Spreads as many numbers as there are whole [`Lanes`] of them, and returns how many.
#[inline(always)]
fn spread_lanes<A: Arithmetic, const SCALES: usize>(numbers: &[f32], out: &mut [f32]) -> usize {
    let numbers = numbers.as_chunks::<SCALES>().0;
    for (out, numbers) in out.as_chunks_mut().0.iter_mut().zip(numbers) {
        *out = A::array(A::spread(numbers));
    }
    numbers.len() * SCALES
}

/// Reads numbers from element `first` on.
#[inline(always)]
fn read(dtype: DType, bytes: &[u8], first: usize, out: &mut [f32]) {
    let size = dtype.size() as usize;
    let bytes = &bytes[first * size..][..out.len() * size];
    match dtype {
        DType::F32 => convert(bytes.as_chunks().0, out, f32::from_le_bytes),
        DType::F16 => convert(bytes.as_chunks().0, out, from_f16),
        DType::BF16 => convert(bytes.as_chunks().0, out, from_bf16),
        DType::U8 => convert(bytes.as_chunks().0, out, |[byte]| f32::from(byte)),
    }
}

#[inline(always)]
fn convert<const SIZE: usize>(
    elements: &[[u8; SIZE]],
    out: &mut [f32],
    convert: impl Fn([u8; SIZE]) -> f32,
) {
    for (out, element) in out.iter_mut().zip(elements) {
        *out = convert(*element);
    }
}

/// Splits bytes into even and odd columns, 64 of each in turn.
#[inline(always)]
fn split(low: &[u8], codes: &mut [u8]) {
    for (low, codes) in low.chunks(BYTES).zip(codes.chunks_exact_mut(2 * BYTES)) {
        let (even, odd) = codes.split_at_mut(BYTES);
        for ((even, odd), byte) in even.iter_mut().zip(odd).zip(low) {
            *even = byte & 15;
            *odd = byte >> 4;
        }
    }
}

/// Adds the fifth bits of codes.
#[inline(always)]
fn add_fifth(high: &[u8], codes: &mut [u8]) {
    for (high, codes) in high.chunks(BYTES / 4).zip(codes.chunks_exact_mut(2 * BYTES)) {
        let (even, odd) = codes.split_at_mut(BYTES);
        let (even, odd) = (even.as_chunks_mut::<4>().0, odd.as_chunks_mut::<4>().0);
        for ((even, odd), bits) in even.iter_mut().zip(odd).zip(high) {
            for at in 0..4 {
                even[at] |= (bits >> (2 * at) & 1) << 4;
                odd[at] |= (bits >> (2 * at + 1) & 1) << 4;
            }
        }
    }
}

/// Adds the fifth and sixth bits of codes.
#[inline(always)]
fn add_sixth(high: &[u8], codes: &mut [u8]) {
    for (high, codes) in high.chunks(BYTES / 2).zip(codes.chunks_exact_mut(2 * BYTES)) {
        let (even, odd) = codes.split_at_mut(BYTES);
        let (even, odd) = (even.as_chunks_mut::<2>().0, odd.as_chunks_mut::<2>().0);
        for ((even, odd), bits) in even.iter_mut().zip(odd).zip(high) {
            *even = [even[0] | (bits & 3) << 4, even[1] | (bits >> 4 & 3) << 4];
            *odd = [odd[0] | (bits >> 2 & 3) << 4, odd[1] | (bits >> 6) << 4];
        }
    }
}

/// One row of weights, whose steps are as those of [`super::digits::Digits`].
pub(crate) trait Codes<const P: usize>: Copy {
    /// Codes of a step.
    fn codes<A: Arithmetic>(&self, step: usize) -> [A::Bytes; P];
    /// Scales of the units.
    fn scales(&self) -> &[f32];
    /// What sums of units are multiplied with.
    fn factors(&self) -> &[Lanes];
}

/// Scales and factors in the scratch of a row.
#[inline(always)]
fn parts(scratch: &[f32]) -> (&[f32], &[Lanes]) {
    let (scales, factors) = scratch[..scratch.len() / 2].split_at(scratch.len() / 4);
    (scales, factors.as_chunks().0)
}

/// How far ahead of the codes that are read the memory is asked for more.
const AHEAD: usize = 8 << 10;

/// A row of codes of 4 bits as it lies in the file.
#[derive(Clone, Copy)]
pub(crate) struct Nibbles<'s> {
    codes: &'s [[u8; BYTES]],
    /// What is left after whole steps.
    rest: [u8; BYTES],
    scales: &'s [f32],
    factors: &'s [Lanes],
}

impl<'s> Nibbles<'s> {
    /// `scratch` has [`SCRATCH`] numbers for each unit.
    #[inline(always)]
    pub(crate) fn new<A: Arithmetic>(
        matrix: CodeMatrix<'s>,
        row: usize,
        scratch: &'s mut [f32],
    ) -> Self {
        matrix.parameters::<A>(row, scratch);
        let (scales, factors) = parts(scratch);
        let size = matrix.columns / 2;
        let (codes, last) = matrix.bytes.codes[row * size..][..size].as_chunks();
        let mut rest = [0; BYTES];
        rest[..last.len()].copy_from_slice(last);
        Self { codes, rest, scales, factors }
    }
}

impl Codes<2> for Nibbles<'_> {
    #[inline(always)]
    fn codes<A: Arithmetic>(&self, step: usize) -> [A::Bytes; 2] {
        let codes = self.codes.get(step).unwrap_or(&self.rest);
        A::prefetch(codes.as_ptr().wrapping_add(AHEAD));
        A::halves(A::bytes(codes))
    }

    #[inline(always)]
    fn scales(&self) -> &[f32] {
        self.scales
    }

    #[inline(always)]
    fn factors(&self) -> &[Lanes] {
        self.factors
    }
}

/// A row with one code to a byte.
#[derive(Clone, Copy)]
pub(crate) struct Unpacked<'s, const P: usize> {
    codes: &'s [[[u8; BYTES]; P]],
    scales: &'s [f32],
    factors: &'s [Lanes],
}

impl<'s, const P: usize> Unpacked<'s, P> {
    /// What [`CodeMatrix::unpack`] wrote.
    pub(crate) fn new(codes: &'s [u8], scratch: &'s [f32]) -> Self {
        let (scales, factors) = parts(scratch);
        Self { codes: codes.as_chunks().0.as_chunks().0, scales, factors }
    }
}

impl<const P: usize> Codes<P> for Unpacked<'_, P> {
    #[inline(always)]
    fn codes<A: Arithmetic>(&self, step: usize) -> [A::Bytes; P] {
        let mut codes = [A::zero(); P];
        for (codes, bytes) in codes.iter_mut().zip(&self.codes[step]) {
            *codes = A::bytes(bytes);
        }
        codes
    }

    #[inline(always)]
    fn scales(&self) -> &[f32] {
        self.scales
    }

    #[inline(always)]
    fn factors(&self) -> &[Lanes] {
        self.factors
    }
}
