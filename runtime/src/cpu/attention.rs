//! Attention of some query rows over the keys and values of one layer.

use rayon::prelude::*;

use super::isa::{Arithmetic, Isa, Kernel, LANES, accumulate, total};

/// Keys whose scores are computed before their values are added up.
const KEYS: usize = 64;
/// Multiplications below which a task is not worth another thread.
const TASK: usize = 1 << 16;

/// The extents and attributes of one attention node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Query heads.
    pub(crate) heads: usize,
    /// Key heads; divides `heads`.
    pub(crate) groups: usize,
    /// Width of a head.
    pub(crate) width: usize,
    /// Position of the first query row.
    pub(crate) position: usize,
    /// Keys that a query sees, itself included.
    pub(crate) window: Option<u32>,
    /// Multiplies the scores.
    pub(crate) scale: f32,
}

impl Shape {
    /// The first position that the query at `position` sees.
    fn oldest(&self, position: usize) -> usize {
        match self.window {
            Some(window) => (position + 1).saturating_sub(window as usize),
            None => 0,
        }
    }
}

/// `q [T, heads, width]`, `keys` and `values [R, groups, width]`, `out` as `q`.
///
/// The key of position `j` lies in row `j mod R`. Keys are taken in the order of their positions,
/// whatever rows they lie in, so a result depends on nothing but the position.
pub(crate) fn attention(
    isa: Isa,
    shape: Shape,
    q: &[f32],
    keys: &[f32],
    values: &[f32],
    out: &mut [f32],
) {
    let rows = q.len() / (shape.heads * shape.width);
    let head = |(at, (q, out)): (usize, (&[f32], &mut [f32]))| {
        let (row, head) = (at / shape.heads, at % shape.heads);
        isa.run(Head { shape, row, head, q, keys, values, out });
    };
    let last = shape.position + rows - 1;
    let work = q.len() * (last + 1 - shape.oldest(last)) * 2;
    if work <= TASK {
        q.chunks_exact(shape.width)
            .zip(out.chunks_exact_mut(shape.width))
            .enumerate()
            .for_each(head);
    } else {
        q.par_chunks_exact(shape.width)
            .zip(out.par_chunks_exact_mut(shape.width))
            .enumerate()
            .for_each(head);
    }
}

/// One head of one query row.
struct Head<'a> {
    shape: Shape,
    row: usize,
    head: usize,
    q: &'a [f32],
    keys: &'a [f32],
    values: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for Head<'_> {
    /// The softmax is computed in one pass: sums are relative to the largest score so far.
    #[inline(always)]
    fn run<A: Arithmetic>(self) {
        let Self { shape, row, head, q, keys, values, out } = self;
        let width = shape.width;
        let stride = shape.groups * width;
        let first = head / (shape.heads / shape.groups) * width;
        let ring = keys.len() / stride;
        let position = shape.position + row;
        let (mut largest, mut sum) = (f32::NEG_INFINITY, 0.0f32);
        out.fill(0.0);
        let mut next = shape.oldest(position);
        while next <= position {
            let count = KEYS.min(position + 1 - next);
            let at = |j: usize| (next + j) % ring * stride + first;
            let mut scores = [0.0; KEYS];
            for (j, score) in scores[..count].iter_mut().enumerate() {
                *score = shape.scale * dot::<A>(q, &keys[at(j)..][..width]);
            }
            let higher = scores[..count].iter().copied().fold(largest, f32::max);
            let factor = (largest - higher).exp();
            sum *= factor;
            out.iter_mut().for_each(|x| *x *= factor);
            largest = higher;
            for (j, score) in scores[..count].iter().enumerate() {
                let weight = (score - largest).exp();
                sum += weight;
                for (x, value) in out.iter_mut().zip(&values[at(j)..][..width]) {
                    *x = A::multiply_add(weight, *value, *x);
                }
            }
            next += count;
        }
        out.iter_mut().for_each(|x| *x /= sum);
    }
}

#[inline(always)]
fn dot<A: Arithmetic>(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0; LANES];
    let (a, a_rest) = a.as_chunks();
    let (b, b_rest) = b.as_chunks();
    for (a, b) in a.iter().zip(b) {
        accumulate::<A>(&mut sums, a, b);
    }
    for (sum, (a, b)) in sums.iter_mut().zip(a_rest.iter().zip(b_rest)) {
        *sum = A::multiply_add(*a, *b, *sum);
    }
    total(sums)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: usize, step: f32) -> Vec<f32> {
        (0..count).map(|i| (i as f32 * step).sin()).collect()
    }

    /// Softmax in float64 over the keys that the definition names.
    fn reference(shape: Shape, q: &[f32], keys: &[f32], values: &[f32]) -> Vec<f64> {
        let Shape { heads, groups, width, .. } = shape;
        let ring = keys.len() / groups / width;
        let mut out = Vec::new();
        for (at, q) in q.chunks(width).enumerate() {
            let (p, group) = (shape.position + at / heads, at % heads / (heads / groups));
            let seen = (0..=p).filter(|j| shape.window.is_none_or(|w| p - j < w as usize));
            let row = |j: usize| (j % ring * groups + group) * width;
            let mut sums = vec![0.0; width];
            let mut total = 0.0;
            for j in seen {
                let dot = |(a, b): (&f32, &f32)| f64::from(*a) * f64::from(*b);
                let score = q.iter().zip(&keys[row(j)..]).map(dot).sum::<f64>();
                let weight = (score * f64::from(shape.scale)).exp();
                total += weight;
                for (sum, v) in sums.iter_mut().zip(&values[row(j)..]) {
                    *sum += weight * f64::from(*v);
                }
            }
            out.extend(sums.iter().map(|x| x / total));
        }
        out
    }

    #[test]
    fn agrees_with_float64_in_every_shape() {
        for (heads, groups, width, position, rows, window, ring) in [
            (1, 1, 2, 0, 1, None, 4),
            (4, 2, 20, 0, 9, None, 16),
            (4, 1, 16, 200, 3, None, 300),
            (2, 2, 256, 1000, 5, Some(100), 105),
            (8, 1, 512, 70, 2, None, 72),
            (2, 1, 16, 5, 4, Some(1), 4),
            (2, 1, 16, 129, 4, Some(64), 67),
            (2, 1, 16, 129, 4, Some(65), 68),
        ] {
            let shape = Shape { heads, groups, width, position, window, scale: 0.25 };
            let q = numbers(rows * heads * width, 0.37);
            let keys = numbers(ring * groups * width, 0.11);
            let values = numbers(ring * groups * width, 0.73);
            let wanted = reference(shape, &q, &keys, &values);
            for isa in Isa::all() {
                let mut out = vec![f32::NAN; q.len()];
                attention(isa, shape, &q, &keys, &values, &mut out);
                for (found, wanted) in out.iter().zip(&wanted) {
                    assert!((f64::from(*found) - wanted).abs() < 3e-6, "{shape:?} {isa:?}");
                }
            }
        }
    }

    /// Scores far beyond what `exp` of a float32 can hold.
    #[test]
    fn large_scores_do_not_overflow() {
        let shape =
            Shape { heads: 1, groups: 1, width: 16, position: 199, window: None, scale: 500.0 };
        let (q, mut keys, values) = (vec![1.0; 16], numbers(3200, 0.01), numbers(3200, 0.2));
        keys[123 * 16..124 * 16].fill(2.0);
        let mut out = vec![0.0; 16];
        attention(Isa::all()[0], shape, &q, &keys, &values, &mut out);
        for (found, wanted) in out.iter().zip(&values[123 * 16..]) {
            assert_eq!(found, wanted);
        }
    }
}
