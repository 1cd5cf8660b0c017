//! `x · wᵀ` with dense or quantized weights.
//!
//! Weights of codes are multiplied with activations in digits ([`super::products`]), others with
//! float32 numbers: every output is the sum over blocks of 32 columns, in order, in 16 lanes that
//! are added up at the end. It does not depend on how many rows `x` has, nor on which thread
//! computes it.

use gemma4_format::DType;
use rayon::prelude::*;

use super::blocks::{
    BLOCK, Bf16, Blocks, DecodedRows, DenseRows, F16, F32, FloatRow, Layout, Matrix, Rows,
};
use super::codes::CodeMatrix;
use super::digits::{Activations, Extent, Packing};
use super::isa::{Arithmetic, Isa, Kernel, LANES, Lanes, accumulate, total};
use super::products;

/// Weight rows that are multiplied side by side.
const SIDE: usize = products::SIDE;
/// Bytes of decoded weights below which a task is not worth another thread.
const TASK: usize = 1 << 17;
/// Bytes of decoded weights that should stay in a core's cache.
const CACHE: usize = 256 << 10;

/// Memory that [`linear`] works in.
pub(crate) struct Scratch<'a> {
    pub(crate) numbers: &'a mut [f32],
    pub(crate) bytes: &'a mut [i8],
}

/// Numbers and bytes of scratch that [`linear`] needs for `rows` rows of `x` and `[n, k]` weights
/// of any encoding.
pub(crate) fn scratch(activations: Activations, rows: u64, n: u64, k: u64) -> (u64, u64) {
    // Whole steps of both kinds.
    let columns = k.next_multiple_of(BLOCK as u64 * 4);
    let turned = if rows > 1 { rows.saturating_mul(n) } else { 0 };
    let extent = |planes| Extent::new(columns as usize, planes).numbers() as u64;
    let packed = columns.max(extent(1)).max(extent(2));
    let digits = columns.saturating_mul(activations.digits() as u64);
    (rows.saturating_mul(packed).saturating_add(turned), rows.saturating_mul(digits))
}

/// `x [T, K]`, `out [T, N]`; `scratch` as the function of that name says.
pub(crate) fn linear(
    isa: Isa,
    activations: Activations,
    matrix: &Matrix<'_>,
    x: &[f32],
    out: &mut [f32],
    scratch: Scratch<'_>,
) {
    let rows = x.len() / matrix.columns;
    if let Some(codes) = matrix.codes() {
        let extent = codes.extent();
        let digits = activations.digits();
        let (numbers, turned) = scratch.numbers.split_at_mut(rows * extent.numbers());
        let bytes = &mut scratch.bytes[..rows * extent.bytes(digits)];
        digitize(isa, digits, codes, x, bytes, numbers);
        let per_row = extent.steps * codes.planes() * LANES * 4;
        share(matrix.rows, rows, per_row, out, turned, |first, out| {
            let job = products::Job { matrix: codes, first, bytes, numbers, rows, out };
            job.run(isa, digits);
        });
    } else {
        let width = matrix.blocks() * BLOCK;
        let (packed, turned) = scratch.numbers.split_at_mut(rows * width);
        pack(x, matrix.columns, packed);
        share(matrix.rows, rows, 4 * width, out, turned, |first, out| {
            multiply(isa, Job { matrix, first, x: packed, rows, out });
        });
    }
}

/// Calls `work` with the first weight row and the results, `[weight rows, rows]`, of pieces of
/// the `n` weight rows, which take `size` bytes each when they are decoded.
fn share(
    n: usize,
    rows: usize,
    size: usize,
    out: &mut [f32],
    turned: &mut [f32],
    work: impl Fn(usize, &mut [f32]) + Send + Sync,
) {
    if rows == 1 {
        return tasks(out, (TASK / size).next_multiple_of(SIDE).max(SIDE), work);
    }
    let turned = &mut turned[..rows * n];
    let per_task = (CACHE / size / SIDE).max(1) * SIDE;
    tasks(turned, per_task * rows, |first, out| work(first / rows, out));
    let turned = &*turned;
    out.par_chunks_mut(n).enumerate().for_each(|(row, out)| {
        for (n, out) in out.iter_mut().enumerate() {
            *out = turned[n * rows + row];
        }
    });
}

/// Calls `work` with pieces of `out` of `size` numbers and the index of the first; on this
/// thread alone if there is one piece.
fn tasks(out: &mut [f32], size: usize, work: impl Fn(usize, &mut [f32]) + Send + Sync) {
    if out.len() <= size {
        work(0, out);
    } else {
        out.par_chunks_mut(size).enumerate().for_each(|(at, out)| work(at * size, out));
    }
}

/// Turns all rows of activations into digits.
fn digitize(
    isa: Isa,
    digits: usize,
    codes: CodeMatrix<'_>,
    x: &[f32],
    bytes: &mut [i8],
    numbers: &mut [f32],
) {
    let extent = codes.extent();
    let row = |((x, bytes), numbers)| match (codes.planes(), digits) {
        (1, 1) => isa.run(Packing::<1, 1> { x, extent, bytes, numbers }),
        (1, _) => isa.run(Packing::<1, 3> { x, extent, bytes, numbers }),
        (_, 1) => isa.run(Packing::<2, 1> { x, extent, bytes, numbers }),
        (_, _) => isa.run(Packing::<2, 3> { x, extent, bytes, numbers }),
    };
    if x.len() == codes.columns {
        return row(((x, bytes), numbers));
    }
    x.par_chunks_exact(codes.columns)
        .zip(bytes.par_chunks_exact_mut(extent.bytes(digits)))
        .zip(numbers.par_chunks_exact_mut(extent.numbers()))
        .for_each(row);
}

/// Fills up the last block of each row with zeros.
fn pack(x: &[f32], columns: usize, packed: &mut [f32]) {
    let width = columns.next_multiple_of(BLOCK);
    for (x, packed) in x.chunks_exact(columns).zip(packed.chunks_exact_mut(width)) {
        packed[..columns].copy_from_slice(x);
        packed[columns..].fill(0.0);
    }
}

/// Some weight rows times all rows of `x`.
struct Job<'a> {
    matrix: &'a Matrix<'a>,
    /// The first weight row.
    first: usize,
    /// Packed activations, whole blocks a row.
    x: &'a [f32],
    /// Rows of `x`.
    rows: usize,
    /// `[weight rows, rows]`.
    out: &'a mut [f32],
}

/// Does a job with the kernel of the matrix's layout.
fn multiply(isa: Isa, job: Job<'_>) {
    let matrix = job.matrix;
    match matrix.layout() {
        Layout::Dense(DType::F32) => isa.run((DenseRows::<F32>::new(matrix), job)),
        Layout::Dense(DType::BF16) => isa.run((DenseRows::<Bf16>::new(matrix), job)),
        Layout::Dense(DType::F16) => isa.run((DenseRows::<F16>::new(matrix), job)),
        _ => isa.run((DecodedRows { matrix }, job)),
    }
}

impl<R: Rows> Kernel for (R, Job<'_>) {
    #[inline(always)]
    fn run<A: Arithmetic>(self) {
        let (source, job) = self;
        if job.rows == 1 { one_row::<A, R>(source, job) } else { many_rows::<A, R>(source, job) }
    }
}

/// Decodes weights in registers.
#[inline(always)]
fn one_row<A: Arithmetic, R: Rows>(source: R, job: Job<'_>) {
    let Job { matrix, first, x, out, .. } = job;
    let blocks = matrix.blocks();
    let x = [FloatRow::new(x)];
    let size = matrix.scratch();
    let mut scratch = vec![0.0; SIDE * size];
    let mut n = first;
    let (sides, rest) = out.as_chunks_mut::<SIDE>();
    for out in sides {
        // Written out because closures would not be compiled for the instruction set.
        let (a, scratch) = scratch.split_at_mut(size);
        let (b, scratch) = scratch.split_at_mut(size);
        let (c, d) = scratch.split_at_mut(size);
        let rows =
            [source.row(n, a), source.row(n + 1, b), source.row(n + 2, c), source.row(n + 3, d)];
        [*out] = tile::<A, _, 1, SIDE>(rows, x, blocks);
        n += SIDE;
    }
    for out in rest {
        [[*out]] = tile::<A, _, 1, 1>([source.row(n, &mut scratch[..size])], x, blocks);
        n += 1;
    }
}

/// Decodes weights to memory once and uses them for all rows of `x`.
#[inline(always)]
fn many_rows<A: Arithmetic, R: Rows>(source: R, job: Job<'_>) {
    let Job { matrix, first, x, rows, out } = job;
    let blocks = matrix.blocks();
    let width = blocks * BLOCK;
    let count = out.len() / rows;
    let mut scratch = vec![0.0; matrix.scratch()];
    let mut decoded = vec![0.0; count * width];
    for (n, decoded) in decoded.chunks_exact_mut(width).enumerate() {
        let row = source.row(first + n, &mut scratch);
        for (at, block) in decoded.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
            let [a, b] = row.block(at);
            block[..LANES].copy_from_slice(&a);
            block[LANES..].copy_from_slice(&b);
        }
    }
    let weight = |n: usize| FloatRow::new(&decoded[n * width..][..width]);
    let input = |t: usize| FloatRow::new(&x[t * width..][..width]);
    let mut tiles = Tiles { out, rows, count };
    let mut t = 0;
    while t < rows {
        if A::WIDE && t + 4 <= rows {
            tiles.column::<A, 4, 4>(t, weight, input, blocks);
            t += 4;
        } else if t + 2 <= rows {
            tiles.column::<A, 2, 2>(t, weight, input, blocks);
            t += 2;
        } else {
            tiles.column::<A, 1, 4>(t, weight, input, blocks);
            t += 1;
        }
    }
}

/// Where products of many rows go.
struct Tiles<'a> {
    out: &'a mut [f32],
    rows: usize,
    /// Weight rows.
    count: usize,
}

impl Tiles<'_> {
    /// Multiplies rows `t .. t + T` with all weight rows, `N` at a time.
    #[inline(always)]
    fn column<'w, A: Arithmetic, const T: usize, const N: usize>(
        &mut self,
        t: usize,
        weight: impl Fn(usize) -> FloatRow<'w>,
        input: impl Fn(usize) -> FloatRow<'w>,
        blocks: usize,
    ) {
        let x: [FloatRow<'_>; T] = std::array::from_fn(|i| input(t + i));
        let mut n = 0;
        while n + N <= self.count {
            let sums = tile::<A, _, T, N>(std::array::from_fn(|i| weight(n + i)), x, blocks);
            self.store(n, t, sums);
            n += N;
        }
        while n < self.count {
            self.store(n, t, tile::<A, _, T, 1>([weight(n)], x, blocks));
            n += 1;
        }
    }

    #[inline(always)]
    fn store<const T: usize, const N: usize>(&mut self, n: usize, t: usize, sums: [[f32; N]; T]) {
        for (i, sums) in sums.iter().enumerate() {
            for (j, sum) in sums.iter().enumerate() {
                self.out[(n + j) * self.rows + t + i] = *sum;
            }
        }
    }
}

/// Products of `T` rows of `x` with `N` weight rows.
#[inline(always)]
fn tile<A: Arithmetic, B: Blocks, const T: usize, const N: usize>(
    weights: [B; N],
    x: [FloatRow<'_>; T],
    blocks: usize,
) -> [[f32; N]; T] {
    let mut sums = [[[0.0; LANES]; N]; T];
    for at in 0..blocks {
        let inputs: [[Lanes; 2]; T] = std::array::from_fn(|t| x[t].block(at));
        for (n, weight) in weights.iter().enumerate() {
            let [a, b] = weight.block(at);
            for (sums, [x, y]) in sums.iter_mut().zip(&inputs) {
                accumulate::<A>(&mut sums[n], &a, x);
                accumulate::<A>(&mut sums[n], &b, y);
            }
        }
    }
    sums.map(|sums| sums.map(total))
}

#[cfg(test)]
mod tests;
