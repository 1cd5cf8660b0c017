//! Rows of quantized weights as codes, and what turns sums of them into products.

use std::ops::Range;
use std::slice;

use gemma4_format::encoding::{QuantizedBytes, ZeroType};
use gemma4_format::{DType, Encoding, Offset};

use super::digits::{Extent, UNIT};
use super::isa::{Arithmetic, BYTES, LANES, Lanes};

/// Numbers of scratch that a unit of a row takes.
pub(crate) const SCRATCH: usize = 4;

/// A weight of codes whose groups consist of whole units.
#[derive(Clone, Copy)]
pub(crate) struct CodeMatrix<'a> {
    pub(crate) columns: usize,
    rows: usize,
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
        let scale_bytes = (columns / group).max(1) * scale.size() as usize;
        let rows = (bytes.scales.len() / scale_bytes).max(1);
        whole.then_some(Self { columns, rows, bytes, bits, group, scale, offset })
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

    /// Asks for the memory of a row's parameters.
    #[inline(always)]
    fn prefetch<A: Arithmetic>(&self, row: usize) {
        for bytes in [self.bytes.scales, self.bytes.offsets] {
            let size = bytes.len() / self.rows;
            for at in (0..size).step_by(BYTES) {
                A::prefetch(bytes.as_ptr().wrapping_add(row * size + at));
            }
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
        let (scales, factors) = (scales.as_chunks_mut().0, factors.as_chunks_mut().0);
        read::<A>(self.scale, self.bytes.scales, first, groups, scales);
        let bytes = self.bytes.offsets;
        match self.offset {
            Offset::Symmetric => factors.fill([(1u32 << (self.bits - 1)) as f32; LANES]),
            Offset::Minimum(dtype) => read::<A>(dtype, bytes, first, groups, factors),
            Offset::Zero(ZeroType::F16) => read::<A>(DType::F16, bytes, first, groups, factors),
            Offset::Zero(ZeroType::BF16) => read::<A>(DType::BF16, bytes, first, groups, factors),
            Offset::Zero(ZeroType::U8) => read::<A>(DType::U8, bytes, first, groups, factors),
            Offset::Zero(ZeroType::Nibble) => {
                let size = groups.div_ceil(2);
                let bytes = bytes[row * size..][..size].chunks(LANES / 2);
                for (factors, bytes) in factors.iter_mut().zip(bytes) {
                    let mut zeros = [0; LANES];
                    for (zeros, byte) in zeros.as_chunks_mut().0.iter_mut().zip(bytes) {
                        *zeros = [byte & 15, byte >> 4];
                    }
                    *factors = A::array(A::whole_bytes(&zeros));
                }
            }
        }
        let lanes = groups.div_ceil(LANES);
        if !matches!(self.offset, Offset::Minimum(_)) {
            let minus = A::lanes(&[-1.0; LANES]);
            for (factors, scales) in factors.iter_mut().zip(&scales[..lanes]) {
                let scales = A::multiply(A::lanes(scales), minus);
                *factors = A::array(A::multiply(A::lanes(factors), scales));
            }
        }
        let (scales, factors) = (scales.as_flattened(), factors.as_flattened());
        let (scales, factors) = (&scales[..groups], &factors[..groups]);
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
    // Groups of 32, 64 and 128 columns are so many that they want vectors.
    let done = match times {
        2 => spread_lanes::<A, 8>(numbers, out),
        4 => spread_lanes::<A, 4>(numbers, out),
        8 => {
            for (out, number) in out.as_chunks_mut().0.iter_mut().zip(numbers) {
                *out = [*number; 8];
            }
            numbers.len()
        }
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

/// Reads `count` numbers from element `first` on; those of the last lanes may be zeros.
#[inline(always)]
fn read<A: Arithmetic>(dtype: DType, bytes: &[u8], first: usize, count: usize, out: &mut [Lanes]) {
    let size = dtype.size() as usize;
    let bytes = &bytes[first * size..][..count * size];
    match dtype {
        DType::F32 => convert::<A, F32, 4>(bytes, out),
        DType::F16 => convert::<A, F16, 2>(bytes, out),
        DType::BF16 => convert::<A, BF16, 2>(bytes, out),
        DType::U8 => convert::<A, U8, 1>(bytes, out),
    }
}

#[inline(always)]
fn convert<A: Arithmetic, N: Number<SIZE>, const SIZE: usize>(bytes: &[u8], out: &mut [Lanes]) {
    let (whole, rest) = bytes.as_chunks().0.as_chunks();
    for (out, numbers) in out.iter_mut().zip(whole) {
        *out = A::array(N::lanes::<A>(numbers));
    }
    if !rest.is_empty() {
        let mut last = [[0; SIZE]; LANES];
        last[..rest.len()].copy_from_slice(rest);
        out[whole.len()] = A::array(N::lanes::<A>(&last));
    }
}

/// How numbers of parameters are stored.
trait Number<const SIZE: usize> {
    /// Their exact values.
    fn lanes<A: Arithmetic>(numbers: &[[u8; SIZE]; LANES]) -> A::Floats;
}

struct F32;
struct F16;
struct BF16;
struct U8;

impl Number<4> for F32 {
    #[inline(always)]
    fn lanes<A: Arithmetic>(numbers: &[[u8; 4]; LANES]) -> A::Floats {
        A::lanes(&numbers.map(f32::from_le_bytes))
    }
}

impl Number<2> for F16 {
    #[inline(always)]
    fn lanes<A: Arithmetic>(numbers: &[[u8; 2]; LANES]) -> A::Floats {
        A::float16(numbers)
    }
}

impl Number<2> for BF16 {
    #[inline(always)]
    fn lanes<A: Arithmetic>(numbers: &[[u8; 2]; LANES]) -> A::Floats {
        A::bfloat16(numbers)
    }
}

impl Number<1> for U8 {
    #[inline(always)]
    fn lanes<A: Arithmetic>(numbers: &[[u8; 1]; LANES]) -> A::Floats {
        A::whole_bytes(&numbers.map(|[byte]| byte))
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

/// A row of weights, whose steps are as those of [`super::digits::Digits`].
pub(crate) trait Codes<const P: usize>: Copy {
    /// A row that is to be set.
    const EMPTY: Self;
    /// Only these steps.
    fn part(self, steps: Range<usize>) -> Self;
    /// Codes of a step.
    fn codes<A: Arithmetic>(&self, step: usize) -> [A::Bytes; P];
    /// The scale of each lane in a step.
    fn scales<A: Arithmetic>(&self, step: usize) -> A::Floats;
    /// What sums of units are multiplied with.
    fn factors(&self) -> &[Lanes];
}

/// What sums of codes become products with.
#[derive(Clone, Copy)]
struct Parameters<'s, const P: usize> {
    /// Scales of the units of each step.
    scales: &'s [[[f32; 4]; P]],
    factors: &'s [Lanes],
}

impl<'s, const P: usize> Parameters<'s, P> {
    const EMPTY: Self = Self { scales: &[], factors: &[] };

    /// What [`CodeMatrix::parameters`] wrote.
    #[inline(always)]
    fn new(scratch: &'s [f32]) -> Self {
        let (scales, factors) = scratch[..scratch.len() / 2].split_at(scratch.len() / 4);
        Self { scales: scales.as_chunks().0.as_chunks().0, factors: factors.as_chunks().0 }
    }

    #[inline(always)]
    fn part(self, steps: Range<usize>) -> Self {
        Self { scales: &self.scales[steps], factors: self.factors }
    }

    #[inline(always)]
    fn scales<A: Arithmetic>(&self, step: usize) -> A::Floats {
        let scales = &self.scales[step];
        match scales.as_flattened().as_chunks::<8>().0 {
            [eight] => A::spread(eight),
            _ => A::spread(&scales[0]),
        }
    }
}

/// A row as it lies in the file: codes of 4 bits in two planes, or codes of 8 bits.
#[derive(Clone, Copy)]
pub(crate) struct Stored<'s, const P: usize> {
    codes: &'s [[u8; BYTES]],
    /// How far ahead of codes that are read the memory is asked for more.
    ahead: usize,
    parameters: Parameters<'s, P>,
}

impl<'s, const P: usize> Stored<'s, P> {
    /// The whole steps of a row. `scratch` has [`SCRATCH`] numbers for each unit; `side` rows
    /// further on are wanted next.
    #[inline(always)]
    pub(crate) fn new<A: Arithmetic>(
        matrix: CodeMatrix<'s>,
        row: usize,
        side: usize,
        scratch: &'s mut [f32],
    ) -> Self {
        matrix.prefetch::<A>(row + side);
        matrix.parameters::<A>(row, scratch);
        let size = matrix.columns / P;
        let codes = matrix.bytes.codes[row * size..][..size].as_chunks().0;
        Self { codes, ahead: side * size, parameters: Parameters::new(scratch) }
    }

    /// Whole steps.
    pub(crate) fn len(&self) -> usize {
        self.codes.len()
    }

    /// What is left after them, as a step.
    #[inline(always)]
    pub(crate) fn last(
        self,
        matrix: CodeMatrix<'s>,
        row: usize,
        codes: &'s mut [u8; BYTES],
    ) -> Self {
        let size = matrix.columns / P;
        let rest = matrix.bytes.codes[row * size..][..size].as_chunks::<BYTES>().1;
        codes[..rest.len()].copy_from_slice(rest);
        let steps = self.codes.len()..self.codes.len() + 1;
        Self { codes: slice::from_ref(codes), ahead: 0, parameters: self.parameters.part(steps) }
    }
}

impl<const P: usize> Codes<P> for Stored<'_, P> {
    const EMPTY: Self = Self { codes: &[], ahead: 0, parameters: Parameters::EMPTY };

    #[inline(always)]
    fn part(self, steps: Range<usize>) -> Self {
        let parameters = self.parameters.part(steps.clone());
        Self { codes: &self.codes[steps], parameters, ..self }
    }

    #[inline(always)]
    fn codes<A: Arithmetic>(&self, step: usize) -> [A::Bytes; P] {
        let codes = &self.codes[step];
        A::prefetch(codes.as_ptr().wrapping_add(self.ahead));
        let mut planes = [A::bytes(codes); P];
        if P == 2 {
            [planes[0], planes[P - 1]] = A::halves(planes[0]);
        }
        planes
    }

    #[inline(always)]
    fn scales<A: Arithmetic>(&self, step: usize) -> A::Floats {
        self.parameters.scales::<A>(step)
    }

    #[inline(always)]
    fn factors(&self) -> &[Lanes] {
        self.parameters.factors
    }
}

/// A row with one code to a byte.
#[derive(Clone, Copy)]
pub(crate) struct Unpacked<'s, const P: usize> {
    codes: &'s [[[u8; BYTES]; P]],
    parameters: Parameters<'s, P>,
}

impl<'s, const P: usize> Unpacked<'s, P> {
    /// What [`CodeMatrix::unpack`] wrote.
    #[inline(always)]
    pub(crate) fn new(codes: &'s [u8], scratch: &'s [f32]) -> Self {
        let parameters = Parameters::new(scratch);
        Self { codes: codes.as_chunks().0.as_chunks().0, parameters }
    }
}

impl<const P: usize> Codes<P> for Unpacked<'_, P> {
    const EMPTY: Self = Self { codes: &[], parameters: Parameters::EMPTY };

    #[inline(always)]
    fn part(self, steps: Range<usize>) -> Self {
        let parameters = self.parameters.part(steps.clone());
        Self { codes: &self.codes[steps], parameters }
    }

    #[inline(always)]
    fn codes<A: Arithmetic>(&self, step: usize) -> [A::Bytes; P] {
        let mut codes = [A::zero(); P];
        for (codes, bytes) in codes.iter_mut().zip(&self.codes[step]) {
            *codes = A::bytes(bytes);
        }
        codes
    }

    #[inline(always)]
    fn scales<A: Arithmetic>(&self, step: usize) -> A::Floats {
        self.parameters.scales::<A>(step)
    }

    #[inline(always)]
    fn factors(&self) -> &[Lanes] {
        self.parameters.factors
    }
}
