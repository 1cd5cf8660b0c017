//! `x · wᵀ` with dense or quantized weights.
//!
//! Every output is the sum over blocks of 32 columns, in order, in 16 lanes that are added up at
//! the end. It does not depend on how many rows `x` has, nor on which thread computes it.

use gemma4_format::encoding::QuantizedBytes;
use gemma4_format::{DType, Encoding};
use rayon::prelude::*;

use super::blocks::{
    BLOCK, Bf16, Blocks, CodeRows, DecodedRows, DenseRows, F16, F32, FloatRow, Layout, Matrix,
    Order, Rows,
};
use super::isa::{Arithmetic, Isa, Kernel, LANES, Lanes, accumulate, total};

/// Weight rows that are multiplied side by side.
const SIDE: usize = 4;
/// Multiplications below which a task is not worth another thread.
const TASK: usize = 1 << 17;
/// Bytes of decoded weights that should stay in a core's cache.
const CACHE: usize = 256 << 10;

/// Numbers of scratch that [`linear`] needs for `rows` rows of `x` and `[n, k]` weights.
pub(crate) fn scratch(rows: u64, n: u64, k: u64) -> u64 {
    let packed = rows.saturating_mul(k.next_multiple_of(BLOCK as u64));
    packed.saturating_add(if rows > 1 { rows.saturating_mul(n) } else { 0 })
}

/// `x [T, K]`, `out [T, N]`; `scratch` as the function of that name says.
pub(crate) fn linear(
    isa: Isa,
    matrix: &Matrix<'_>,
    x: &[f32],
    out: &mut [f32],
    scratch: &mut [f32],
) {
    let rows = x.len() / matrix.columns;
    let width = matrix.blocks() * BLOCK;
    let (packed, scratch) = scratch.split_at_mut(rows * width);
    pack(x, matrix.columns, matrix.order(), packed);
    if rows == 1 {
        let per_task = (TASK / width).next_multiple_of(SIDE).max(SIDE);
        tasks(out, per_task, |first, out| {
            multiply(isa, Job { matrix, first, x: packed, rows, out });
        });
        return;
    }
    let turned = &mut scratch[..rows * matrix.rows];
    let per_task = (CACHE / 4 / width / SIDE).max(1) * SIDE;
    tasks(turned, per_task * rows, |first, out| {
        multiply(isa, Job { matrix, first: first / rows, x: packed, rows, out });
    });
    let turned = &*turned;
    out.par_chunks_mut(matrix.rows).enumerate().for_each(|(row, out)| {
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

/// Puts activations in the order of the weights and fills up the last block with zeros.
fn pack(x: &[f32], columns: usize, order: Order, packed: &mut [f32]) {
    let width = columns.next_multiple_of(BLOCK);
    for (x, packed) in x.chunks_exact(columns).zip(packed.chunks_exact_mut(width)) {
        if order == Order::Natural {
            packed[..columns].copy_from_slice(x);
            packed[columns..].fill(0.0);
            continue;
        }
        // Rows in this order consist of whole blocks.
        for (x, packed) in x.as_chunks::<BLOCK>().0.iter().zip(packed.as_chunks_mut::<BLOCK>().0) {
            for i in 0..LANES {
                packed[i] = x[2 * i];
                packed[LANES + i] = x[2 * i + 1];
            }
        }
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
    match (matrix.layout(), matrix.encoding) {
        (Layout::Dense(DType::F32), _) => isa.run((DenseRows::<F32>::new(matrix), job)),
        (Layout::Dense(DType::BF16), _) => isa.run((DenseRows::<Bf16>::new(matrix), job)),
        (Layout::Dense(DType::F16), _) => isa.run((DenseRows::<F16>::new(matrix), job)),
        (Layout::Codes { bits, minimum }, Encoding::Quantized { group, scale, offset, .. }) => {
            let Some(bytes) = QuantizedBytes::from_parts(matrix.encoding, &matrix.parts) else {
                return;
            };
            let group = group as usize;
            macro_rules! codes {
                ($bits:literal, $minimum:literal) => {{
                    let rows = CodeRows::<$bits, $minimum> { matrix, bytes, group, scale, offset };
                    isa.run((rows, job))
                }};
            }
            match (bits, minimum) {
                (4, false) => codes!(4, false),
                (4, true) => codes!(4, true),
                (5, false) => codes!(5, false),
                (5, true) => codes!(5, true),
                (6, false) => codes!(6, false),
                (6, true) => codes!(6, true),
                (_, false) => codes!(8, false),
                (_, true) => codes!(8, true),
            }
        }
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
