//! Products of codes and activations in digits.
//!
//! For each step and lane, the products of codes and digits add up to one exact integer. Its
//! product with the scales of its unit is added to the lane's float32 sum, which began with the
//! zero points' or minimums' share; the lanes are added up at the end. Nothing of that depends
//! on how many rows there are, nor on which thread computes them.

use super::codes::{CodeMatrix, Codes, Nibbles, SCRATCH, Unpacked};
use super::digits::{Digits, Extent};
use super::isa::{Arithmetic, BYTES, Isa, Kernel, LANES, total};

/// Weight rows that are multiplied side by side.
pub(crate) const SIDE: usize = 4;

/// Some weight rows times all rows of activations.
pub(crate) struct Job<'a> {
    pub(crate) matrix: CodeMatrix<'a>,
    /// The first weight row.
    pub(crate) first: usize,
    /// Digits of all rows, and the numbers beside them.
    pub(crate) bytes: &'a [i8],
    pub(crate) numbers: &'a [f32],
    /// Rows of activations.
    pub(crate) rows: usize,
    /// `[weight rows, rows]`.
    pub(crate) out: &'a mut [f32],
}

impl Job<'_> {
    /// Does it, with activations of so many digits.
    pub(crate) fn run(self, isa: Isa, digits: usize) {
        match (self.matrix.bits(), self.rows, digits) {
            (4, 1, 1) => isa.run(InPlace::<1>(self)),
            (4, 1, _) => isa.run(InPlace::<3>(self)),
            (4 | 5, _, 1) => isa.run(Panel::<5, 2, 1>(self)),
            (4 | 5, _, _) => isa.run(Panel::<5, 2, 3>(self)),
            (6, _, 1) => isa.run(Panel::<6, 2, 1>(self)),
            (6, _, _) => isa.run(Panel::<6, 2, 3>(self)),
            (_, _, 1) => isa.run(Panel::<8, 1, 1>(self)),
            (_, _, _) => isa.run(Panel::<8, 1, 3>(self)),
        }
    }

    fn count(&self) -> usize {
        self.out.len() / self.rows
    }
}

/// Codes of 4 bits times one row of `D` digits: read once, as they lie in the file.
struct InPlace<'a, const D: usize>(Job<'a>);

impl<const D: usize> Kernel for InPlace<'_, D> {
    #[inline(always)]
    fn run<A: Arithmetic>(self) {
        let mut job = self.0;
        let size = SCRATCH * job.matrix.extent().units;
        let (matrix, first, count) = (job.matrix, job.first, job.count());
        let mut scratch = vec![0.0; SIDE * size];
        let mut n = 0;
        while n + SIDE <= count {
            // Written out because closures would not be compiled for the instruction set.
            let (a, rest) = scratch.split_at_mut(size);
            let (b, rest) = rest.split_at_mut(size);
            let (c, d) = rest.split_at_mut(size);
            let at = first + n;
            let weights = [
                Nibbles::new::<A>(matrix, at, a),
                Nibbles::new::<A>(matrix, at + 1, b),
                Nibbles::new::<A>(matrix, at + 2, c),
                Nibbles::new::<A>(matrix, at + 3, d),
            ];
            tile::<A, _, 4, 2, D, 1, SIDE>(&mut job, weights, n, 0);
            n += SIDE;
        }
        while n < count {
            let weights = [Nibbles::new::<A>(matrix, first + n, &mut scratch[..size])];
            tile::<A, _, 4, 2, D, 1, 1>(&mut job, weights, n, 0);
            n += 1;
        }
    }
}

/// Codes of up to `BITS` bits in `P` planes times rows of `D` digits: unpacked to a core's cache
/// for all rows.
struct Panel<'a, const BITS: u8, const P: usize, const D: usize>(Job<'a>);

impl<const BITS: u8, const P: usize, const D: usize> Kernel for Panel<'_, BITS, P, D> {
    #[inline(always)]
    fn run<A: Arithmetic>(self) {
        let mut job = self.0;
        let Extent { steps, units, .. } = job.matrix.extent();
        let (size, numbers) = (steps * P * BYTES, SCRATCH * units);
        let count = job.count();
        // One row of activations needs few weight rows at a time.
        let most = if job.rows == 1 { SIDE.min(count) } else { count };
        let (mut codes, mut scratch) = (vec![0; most * size], vec![0.0; most * numbers]);
        let mut done = 0;
        while done < count {
            let most = most.min(count - done);
            for n in 0..most {
                let codes = &mut codes[n * size..][..size];
                let scratch = &mut scratch[n * numbers..][..numbers];
                job.matrix.unpack::<A>(job.first + done + n, codes, scratch);
            }
            let mut t = 0;
            while t < job.rows {
                let mut n = 0;
                let wide = A::WIDE && t + 2 <= job.rows;
                while n + SIDE <= most {
                    let mut weights = [Unpacked::<P>::new(&[], &[]); SIDE];
                    for (i, weight) in weights.iter_mut().enumerate() {
                        let codes = &codes[(n + i) * size..][..size];
                        *weight = Unpacked::new(codes, &scratch[(n + i) * numbers..][..numbers]);
                    }
                    if wide {
                        tile::<A, _, BITS, P, D, 2, SIDE>(&mut job, weights, done + n, t);
                    } else {
                        tile::<A, _, BITS, P, D, 1, SIDE>(&mut job, weights, done + n, t);
                    }
                    n += SIDE;
                }
                let rows = if wide { 2 } else { 1 };
                for n in n..most {
                    let codes = &codes[n * size..][..size];
                    let weight = Unpacked::<P>::new(codes, &scratch[n * numbers..][..numbers]);
                    for t in t..t + rows {
                        tile::<A, _, BITS, P, D, 1, 1>(&mut job, [weight], done + n, t);
                    }
                }
                t += rows;
            }
            done += most;
        }
    }
}

/// Products of activations `t .. t + T` with weight rows `n .. n + N`.
#[inline(always)]
fn tile<
    A: Arithmetic,
    C: Codes<P>,
    const BITS: u8,
    const P: usize,
    const D: usize,
    const T: usize,
    const N: usize,
>(
    job: &mut Job<'_>,
    weights: [C; N],
    n: usize,
    t: usize,
) {
    let extent = job.matrix.extent();
    let mut x = [Digits::<P, D>::new(extent, t, job.bytes, job.numbers); T];
    for (i, x) in x.iter_mut().enumerate().skip(1) {
        *x = Digits::new(extent, t + i, job.bytes, job.numbers);
    }
    let mut sums = [[A::lanes(&[0.0; LANES]); N]; T];
    for (x, sums) in x.iter().zip(&mut sums) {
        for (weight, sum) in weights.iter().zip(sums) {
            for (factors, units) in weight.factors().iter().zip(x.sums) {
                *sum = A::add_product(A::lanes(factors), A::lanes(units), *sum);
            }
        }
    }
    for step in 0..extent.steps {
        // Held in registers for all weight rows.
        let mut digits = [[[A::zero(); P]; D]; T];
        let mut units = [A::lanes(&[0.0; LANES]); T];
        for (x, (digits, units)) in x.iter().zip(digits.iter_mut().zip(&mut units)) {
            *units = A::lanes(&x.scales[step]);
            for (digits, bytes) in digits.iter_mut().zip(&x.steps[step]) {
                for (digits, bytes) in digits.iter_mut().zip(bytes) {
                    *digits = A::signed(bytes);
                }
            }
        }
        for (i, weight) in weights.iter().enumerate() {
            let codes = weight.codes::<A>(step);
            let scales = scales::<A, P>(weight.scales(), step);
            for (sums, (digits, units)) in sums.iter_mut().zip(digits.iter().zip(&units)) {
                let products = product::<A, BITS, P, D>(&codes, digits);
                sums[i] = A::add_product(A::multiply(products, *units), scales, sums[i]);
            }
        }
    }
    for (i, sums) in sums.into_iter().enumerate() {
        for (j, sums) in sums.into_iter().enumerate() {
            job.out[(n + j) * job.rows + t + i] = total(A::array(sums));
        }
    }
}

/// The scale of each lane.
#[inline(always)]
fn scales<A: Arithmetic, const P: usize>(scales: &[f32], step: usize) -> A::Floats {
    if P == 1 {
        A::spread(&scales.as_chunks::<4>().0[step])
    } else {
        A::spread(&scales.as_chunks::<8>().0[step])
    }
}

/// Sums of the products of a step in each lane.
#[inline(always)]
fn product<A: Arithmetic, const BITS: u8, const P: usize, const D: usize>(
    codes: &[A::Bytes; P],
    digits: &[[A::Bytes; P]; D],
) -> A::Floats {
    // Where three digits would not fit 32 bits, the highest ones are added as floats.
    let apart = D == 3 && BITS >= 6;
    let low = if apart { D - 1 } else { D };
    let mut sums = A::zero();
    for d in (0..low).rev() {
        if d + 1 < low {
            sums = A::shift(sums);
        }
        for (codes, digits) in codes.iter().zip(&digits[d]) {
            sums = dot::<A, BITS>(sums, *codes, *digits);
        }
    }
    let products = A::floats(sums);
    if !apart {
        return products;
    }
    let mut sums = A::zero();
    for (codes, digits) in codes.iter().zip(&digits[D - 1]) {
        sums = dot::<A, BITS>(sums, *codes, *digits);
    }
    A::add_product(A::floats(sums), A::lanes(&[65536.0; LANES]), products)
}

#[inline(always)]
fn dot<A: Arithmetic, const BITS: u8>(
    sums: A::Bytes,
    codes: A::Bytes,
    digits: A::Bytes,
) -> A::Bytes {
    if BITS == 8 {
        A::dot::<true>(sums, codes, digits)
    } else {
        A::dot::<false>(sums, codes, digits)
    }
}
