//! Activations as integers, for products with codes.
//!
//! Each [`UNIT`] of 16 columns has a scale, and its numbers become whole multiples of that, in
//! signed digits of base 256. Three digits hold 24 bits: no number is off by more than 2^-23 of
//! the largest one of its unit, about what float32 itself rounds to. Products with codes are then
//! exact integers, the same on every processor.

use std::ops::Range;

use clap::ValueEnum;

use super::isa::{Arithmetic, BYTES, Kernel, LANES, Lanes};

/// Columns that share a scale.
pub(crate) const UNIT: usize = 16;

/// What activations are multiplied as, where weights are codes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Activations {
    /// Integers as exact as float32.
    #[default]
    Float32,
    /// Integers of 8 bits, with a scale for each 16 columns.
    Int8,
}

impl Activations {
    /// Digits of a number.
    pub(crate) fn digits(self) -> usize {
        match self {
            Activations::Float32 => 3,
            Activations::Int8 => 1,
        }
    }
}

/// Digits of the columns of a step: `P` times 64 columns, of which the first 64 bytes have every
/// `P`-th, the next ones their neighbours. The lowest digits come first.
pub(crate) type Step<const P: usize, const D: usize> = [[[i8; BYTES]; P]; D];

/// How much memory rows of activations take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    /// Steps of a row; columns beyond the last one are zero.
    pub(crate) steps: usize,
    /// Numbers that parameters of units take, filled up to whole [`Lanes`].
    pub(crate) units: usize,
    planes: usize,
}

impl Extent {
    /// Of `columns` columns in `planes` planes.
    pub(crate) fn new(columns: usize, planes: usize) -> Self {
        let steps = columns.div_ceil(planes * BYTES);
        Self { steps, units: (steps * 4 * planes).next_multiple_of(LANES), planes }
    }

    /// Bytes of the digits of a row.
    pub(crate) fn bytes(self, digits: usize) -> usize {
        self.steps * self.planes * digits * BYTES
    }

    /// Numbers that a row has beside its digits.
    pub(crate) fn numbers(self) -> usize {
        self.steps * LANES + self.units
    }
}

/// One row of activations.
#[derive(Clone, Copy)]
pub(crate) struct Digits<'a, const P: usize, const D: usize> {
    pub(crate) steps: &'a [Step<P, D>],
    /// Scales of each lane, by step.
    pub(crate) scales: &'a [Lanes],
    /// Sums of units.
    pub(crate) sums: &'a [Lanes],
}

impl<'a, const P: usize, const D: usize> Digits<'a, P, D> {
    /// Row `row` of what [`Packing`] wrote.
    #[inline(always)]
    pub(crate) fn new(extent: Extent, row: usize, bytes: &'a [i8], numbers: &'a [f32]) -> Self {
        let (size, count) = (extent.bytes(D), extent.numbers());
        let (scales, sums) = numbers[row * count..][..count].split_at(extent.steps * LANES);
        let bytes = bytes[row * size..][..size].as_chunks().0;
        Self {
            steps: bytes.as_chunks().0.as_chunks().0,
            scales: scales.as_chunks().0,
            sums: sums.as_chunks().0,
        }
    }
}

impl<const P: usize, const D: usize> Digits<'_, P, D> {
    /// Only these steps.
    #[inline(always)]
    pub(crate) fn part(self, steps: Range<usize>) -> Self {
        Self { steps: &self.steps[steps.clone()], scales: &self.scales[steps], sums: self.sums }
    }
}

/// Turns one row into digits.
pub(crate) struct Packing<'a, const P: usize, const D: usize> {
    pub(crate) x: &'a [f32],
    pub(crate) extent: Extent,
    pub(crate) bytes: &'a mut [i8],
    pub(crate) numbers: &'a mut [f32],
}

impl<const P: usize, const D: usize> Kernel for Packing<'_, P, D> {
    #[inline(always)]
    fn run<A: Arithmetic>(self) {
        let Self { x, extent, bytes, numbers } = self;
        let (scales, sums) = numbers.split_at_mut(extent.steps * LANES);
        let steps: &mut [Step<P, D>] = bytes.as_chunks_mut().0.as_chunks_mut().0.as_chunks_mut().0;
        let units = x.as_chunks::<UNIT>().0;
        let lanes = LANES / (4 * P);
        sums.fill(0.0);
        for (at, (step, scales)) in
            steps.iter_mut().zip(scales.as_chunks_mut::<LANES>().0).enumerate()
        {
            for unit in 0..4 * P {
                let index = 4 * P * at + unit;
                let x = units.get(index).unwrap_or(&[0.0; UNIT]);
                let (scale, mut whole) = whole::<A, D>(x);
                let mut sum = 0i32;
                for number in whole {
                    sum = sum.wrapping_add(number);
                }
                sums[index] = sum as f32 * scale;
                scales[unit * lanes..][..lanes].fill(scale);
                for digit in step.iter_mut() {
                    for (i, number) in whole.iter_mut().enumerate() {
                        let low = *number as i8;
                        digit[i % P][UNIT / P * unit + i / P] = low;
                        *number = number.wrapping_sub(i32::from(low)) >> 8;
                    }
                }
            }
        }
    }
}

/// A scale, and numbers as multiples of it that fit in `D` digits.
#[inline(always)]
fn whole<A: Arithmetic, const D: usize>(x: &[f32; UNIT]) -> (f32, [i32; UNIT]) {
    let mut largest = 0;
    for x in x {
        largest = largest.max(x.to_bits() & 0x7fff_ffff);
    }
    if largest >= f32::INFINITY.to_bits() {
        // What is not a number must not look like one.
        return (f32::NAN, [0; UNIT]);
    }
    let largest = f32::from_bits(largest);
    let (scale, inverse) = if D == 1 {
        // Below that, the inverse would be infinite.
        if largest < 1e-36 { (0.0, 0.0) } else { (largest / 127.0, 127.0 / largest) }
    } else {
        // A power of two, so that nothing is rounded but to whole numbers. The largest number of
        // three digits is 2^23 / 1.00393.
        let exponent = (largest * 1.004).to_bits() >> 23;
        let exponent = exponent.max(23) - 22;
        (f32::from_bits(exponent << 23), f32::from_bits((254 - exponent) << 23))
    };
    (scale, A::whole(A::multiply(A::lanes(x), A::lanes(&[inverse; UNIT]))))
}
