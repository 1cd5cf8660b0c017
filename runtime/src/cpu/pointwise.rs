//! Operations on single numbers, pairs and rows.

use rayon::prelude::*;

/// Numbers below which a task is not worth another thread.
const TASK: usize = 1 << 13;

/// Calls `work` with pieces of `out` and the index of each one's first number. Pieces consist of
/// whole rows of `width` numbers.
pub(crate) fn pieces(
    out: &mut [f32],
    width: usize,
    work: impl Fn(usize, &mut [f32]) + Send + Sync,
) {
    let size = TASK.div_ceil(width) * width;
    if out.len() <= size {
        work(0, out);
    } else {
        out.par_chunks_mut(size).enumerate().for_each(|(at, out)| work(at * size, out));
    }
}

/// `f(x)` for each number.
pub(crate) fn map(x: &[f32], out: &mut [f32], f: impl Fn(f32) -> f32 + Send + Sync) {
    pieces(out, 1, |first, out| {
        for (out, x) in out.iter_mut().zip(&x[first..]) {
            *out = f(*x);
        }
    });
}

/// `f(a, b)` for each pair of numbers.
pub(crate) fn zip(
    a: &[f32],
    b: &[f32],
    out: &mut [f32],
    f: impl Fn(f32, f32) -> f32 + Send + Sync,
) {
    pieces(out, 1, |first, out| {
        for (out, (a, b)) in out.iter_mut().zip(a[first..].iter().zip(&b[first..])) {
            *out = f(*a, *b);
        }
    });
}

/// `x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))`: Hendrycks, Gimpel: Gaussian Error Linear Units
/// (2016), the approximation.
pub(crate) fn gelu_tanh(x: f32) -> f32 {
    const ROOT: f32 = 0.797_884_6;
    0.5 * x * (1.0 + (ROOT * (x + 0.044715 * x * x * x)).tanh())
}

/// `x / sqrt(mean(x²) + eps)`, times `weight` if there is one, for each row of `width` numbers.
pub(crate) fn rms_norm(x: &[f32], width: usize, eps: f32, weight: Option<&[f32]>, out: &mut [f32]) {
    pieces(out, width, |first, out| {
        let rows = x[first..].chunks_exact(width);
        for (x, out) in rows.zip(out.chunks_exact_mut(width)) {
            let factor = 1.0 / (mean_of_squares(x) + eps).sqrt();
            match weight {
                Some(weight) => {
                    for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
                        *out = x * factor * w;
                    }
                }
                None => out.iter_mut().zip(x).for_each(|(out, x)| *out = x * factor),
            }
        }
    });
}

/// Summed in float64: a row has a few numbers far larger than the rest.
fn mean_of_squares(x: &[f32]) -> f32 {
    let mut sums = [0.0f64; 8];
    let (chunks, rest) = x.as_chunks::<8>();
    for chunk in chunks {
        for (sum, x) in sums.iter_mut().zip(chunk) {
            *sum += f64::from(*x) * f64::from(*x);
        }
    }
    for (sum, x) in sums.iter_mut().zip(rest) {
        *sum += f64::from(*x) * f64::from(*x);
    }
    (sums.iter().sum::<f64>() / x.len() as f64) as f32
}
