//! Products of codes and activations in digits.
//!
//! For each step and lane, the products of codes and digits add up to one exact integer. Its
//! product with the scales of its unit is added to the lane's float32 sum, which began with the
//! zero points' or minimums' share; the lanes are added up at the end. Nothing of that depends
//! on how many rows there are, nor on which thread computes them.

use std::ops::Range;

use super::codes::{CodeMatrix, Codes, SCRATCH, Stored, Unpacked};
use super::digits::{Digits, Extent};
use super::isa::{Arithmetic, BYTES, Isa, Kernel, LANES, Lanes, total};

/// Weight rows that are multiplied side by side.
pub(crate) const SIDE: usize = 4;
/// Steps whose weights and activations stay in a core's first cache.
const STEPS: usize = 14;
/// Rows of activations whose sums stay in its second one.
const ROWS: usize = 32;

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
            (4, 1, 1) => isa.run(InPlace::<4, 2, 1>(self)),
            (4, 1, _) => isa.run(InPlace::<4, 2, 3>(self)),
            (8, 1, 1) => isa.run(InPlace::<8, 1, 1>(self)),
            (8, 1, _) => isa.run(InPlace::<8, 1, 3>(self)),
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

    /// Writes products of activations `t .. t + T` with weight rows `n .. n + N`.
    #[inline(always)]
    fn store<A: Arithmetic, const T: usize, const N: usize>(
        &mut self,
        n: usize,
        t: usize,
        sums: [[A::Floats; N]; T],
    ) {
        for (i, sums) in sums.into_iter().enumerate() {
            for (j, sums) in sums.into_iter().enumerate() {
                self.out[(n + j) * self.rows + t + i] = total(A::array(sums));
            }
        }
    }
}

/// Codes times one row of `D` digits: read once, as they lie in the file.
struct InPlace<'a, const BITS: u8, const P: usize, const D: usize>(Job<'a>);

impl<const BITS: u8, const P: usize, const D: usize> Kernel for InPlace<'_, BITS, P, D> {
    #[inline(always)]
    fn run<A: Arithmetic>(self) {
        let mut job = self.0;
        let count = job.count();
        let mut scratch = vec![0.0; SIDE * SCRATCH * job.matrix.extent().units];
        let mut n = 0;
        while n + SIDE <= count {
            in_place::<A, BITS, P, D, SIDE>(&mut job, n, &mut scratch);
            n += SIDE;
        }
        while n < count {
            in_place::<A, BITS, P, D, 1>(&mut job, n, &mut scratch);
            n += 1;
        }
    }
}

/// Products with weight rows `n .. n + N`.
#[inline(always)]
fn in_place<A: Arithmetic, const BITS: u8, const P: usize, const D: usize, const N: usize>(
    job: &mut Job<'_>,
    n: usize,
    scratch: &mut [f32],
) {
    let (matrix, extent) = (job.matrix, job.matrix.extent());
    let x = Digits::<P, D>::new(extent, 0, job.bytes, job.numbers);
    let row = job.first + n;
    let mut weights = [Stored::<P>::EMPTY; N];
    let scratch = scratch.chunks_exact_mut(SCRATCH * extent.units);
    for (i, (weight, scratch)) in weights.iter_mut().zip(scratch).enumerate() {
        *weight = Stored::new::<A>(matrix, row + i, N, scratch);
    }
    let whole = weights[0].len();
    let mut sums = begin::<A, _, P, D, 1, N>(&weights, &[x]);
    sums = add::<A, _, BITS, P, D, 1, N>(sums, weights, [x], 0..whole);
    if whole < extent.steps {
        let mut codes = [[0; BYTES]; N];
        for (i, (weight, codes)) in weights.iter_mut().zip(&mut codes).enumerate() {
            *weight = weight.last(matrix, row + i, codes);
        }
        let x = x.part(whole..extent.steps);
        sums = add::<A, _, BITS, P, D, 1, N>(sums, weights, [x], 0..1);
    }
    job.store::<A, 1, N>(n, 0, sums);
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
        let mut sums = vec![[0.0; LANES]; most * job.rows.min(ROWS)];
        let mut done = 0;
        while done < count {
            let most = most.min(count - done);
            for n in 0..most {
                let codes = &mut codes[n * size..][..size];
                let scratch = &mut scratch[n * numbers..][..numbers];
                job.matrix.unpack::<A>(job.first + done + n, codes, scratch);
            }
            let mut first = 0;
            while first < job.rows {
                let rows = ROWS.min(job.rows - first);
                let mut from = 0;
                while from < steps {
                    let block = Block {
                        codes: &codes[..most * size],
                        scratch: &scratch[..most * numbers],
                        done,
                        first,
                        rows,
                        steps: from..steps.min(from + STEPS),
                    };
                    block.multiply::<A, BITS, P, D>(&mut job, &mut sums);
                    from += STEPS;
                }
                first += rows;
            }
            done += most;
        }
    }
}

/// Some steps of unpacked weight rows and of `rows` rows of activations.
struct Block<'a> {
    codes: &'a [u8],
    scratch: &'a [f32],
    /// The first weight row of the job.
    done: usize,
    /// The first row of activations.
    first: usize,
    rows: usize,
    steps: Range<usize>,
}

impl Block<'_> {
    /// Adds products to the `sums`, `[rows, weight rows]`.
    #[inline(always)]
    fn multiply<A: Arithmetic, const BITS: u8, const P: usize, const D: usize>(
        &self,
        job: &mut Job<'_>,
        sums: &mut [Lanes],
    ) {
        let mut t = 0;
        while t < self.rows {
            if A::WIDE && t + 2 <= self.rows {
                self.side::<A, BITS, P, D, 2>(job, sums, t);
                t += 2;
            } else {
                self.side::<A, BITS, P, D, 1>(job, sums, t);
                t += 1;
            }
        }
    }

    /// Does so for rows `t .. t + T`.
    #[inline(always)]
    fn side<A: Arithmetic, const BITS: u8, const P: usize, const D: usize, const T: usize>(
        &self,
        job: &mut Job<'_>,
        sums: &mut [Lanes],
        t: usize,
    ) {
        let count = self.codes.len() / (job.matrix.extent().steps * P * BYTES);
        let mut n = 0;
        while n + SIDE <= count {
            self.tile::<A, BITS, P, D, T, SIDE>(job, sums, t, n);
            n += SIDE;
        }
        while n < count {
            self.tile::<A, BITS, P, D, T, 1>(job, sums, t, n);
            n += 1;
        }
    }

    /// Does so for these and weight rows `n .. n + N`.
    #[inline(always)]
    fn tile<
        A: Arithmetic,
        const BITS: u8,
        const P: usize,
        const D: usize,
        const T: usize,
        const N: usize,
    >(
        &self,
        job: &mut Job<'_>,
        sums: &mut [Lanes],
        t: usize,
        n: usize,
    ) {
        let extent = job.matrix.extent();
        let (size, numbers) = (extent.steps * P * BYTES, SCRATCH * extent.units);
        let count = self.codes.len() / size;
        let mut weights = [Unpacked::<P>::EMPTY; N];
        let codes = self.codes[n * size..].chunks_exact(size);
        let scratch = self.scratch[n * numbers..].chunks_exact(numbers);
        for (weight, (codes, scratch)) in weights.iter_mut().zip(codes.zip(scratch)) {
            *weight = Unpacked::new(codes, scratch);
        }
        let row = self.first + t;
        let mut x = [Digits::<P, D>::new(extent, row, job.bytes, job.numbers); T];
        for (i, x) in x.iter_mut().enumerate().skip(1) {
            *x = Digits::new(extent, row + i, job.bytes, job.numbers);
        }
        let mut tile = if self.steps.start == 0 {
            begin::<A, _, P, D, T, N>(&weights, &x)
        } else {
            let mut tile = [[A::lanes(&[0.0; LANES]); N]; T];
            for (i, tile) in tile.iter_mut().enumerate() {
                for (tile, sums) in tile.iter_mut().zip(&sums[(t + i) * count + n..][..N]) {
                    *tile = A::lanes(sums);
                }
            }
            tile
        };
        tile = add::<A, _, BITS, P, D, T, N>(tile, weights, x, self.steps.clone());
        if self.steps.end == extent.steps {
            return job.store::<A, T, N>(self.done + n, row, tile);
        }
        for (i, tile) in tile.into_iter().enumerate() {
            for (tile, sums) in tile.into_iter().zip(&mut sums[(t + i) * count + n..][..N]) {
                *sums = A::array(tile);
            }
        }
    }
}

/// The share of zero points and minimums.
#[inline(always)]
fn begin<
    A: Arithmetic,
    C: Codes<P>,
    const P: usize,
    const D: usize,
    const T: usize,
    const N: usize,
>(
    weights: &[C; N],
    x: &[Digits<'_, P, D>; T],
) -> [[A::Floats; N]; T] {
    let mut sums = [[A::lanes(&[0.0; LANES]); N]; T];
    let count = x[0].sums.len();
    let (mut factors, mut units) = ([&[][..]; N], [&[][..]; T]);
    for (factors, weight) in factors.iter_mut().zip(weights) {
        *factors = &weight.factors()[..count];
    }
    for (units, x) in units.iter_mut().zip(x) {
        *units = &x.sums[..count];
    }
    for at in 0..count {
        for (sums, units) in sums.iter_mut().zip(&units) {
            for (sum, factors) in sums.iter_mut().zip(&factors) {
                *sum = A::add_product(A::lanes(&factors[at]), A::lanes(&units[at]), *sum);
            }
        }
    }
    sums
}

/// Adds the products of some steps.
#[inline(always)]
fn add<
    A: Arithmetic,
    C: Codes<P>,
    const BITS: u8,
    const P: usize,
    const D: usize,
    const T: usize,
    const N: usize,
>(
    mut sums: [[A::Floats; N]; T],
    mut weights: [C; N],
    mut x: [Digits<'_, P, D>; T],
    steps: Range<usize>,
) -> [[A::Floats; N]; T] {
    for weight in &mut weights {
        *weight = weight.part(steps.clone());
    }
    for x in &mut x {
        *x = x.part(steps.clone());
    }
    for step in 0..steps.end - steps.start {
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
            let scales = weight.scales::<A>(step);
            for (sums, (digits, units)) in sums.iter_mut().zip(digits.iter().zip(&units)) {
                let products = product::<A, BITS, P, D>(&codes, digits);
                sums[i] = A::add_product(A::multiply(products, *units), scales, sums[i]);
            }
        }
    }
    sums
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
