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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gelu_agrees_with_float64() {
        for i in -4000..4000 {
            let x = i as f32 / 300.0;
            let wide = f64::from(x);
            let root = (2.0 / std::f64::consts::PI).sqrt();
            let wanted = wide / 2.0 * (1.0 + (root * (wide + 0.044715 * wide.powi(3))).tanh());
            assert!((f64::from(gelu_tanh(x)) - wanted).abs() < 1e-6 * wide.abs().max(1.0), "{x}");
        }
    }

    #[test]
    fn a_norm_is_accurate_beside_one_huge_number() {
        let mut x: Vec<f32> = (0..5376).map(|i| (i as f32).sin()).collect();
        x[17] = 1e5;
        let mut out = vec![0.0; 2 * x.len()];
        let rows = [&x[..], &x[..]].concat();
        rms_norm(&rows, x.len(), 1e-6, None, &mut out);
        let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / 5376.0;
        for (out, x) in out.iter().zip(&rows) {
            let wanted = f64::from(*x) / (mean + 1e-6).sqrt();
            assert!((f64::from(*out) - wanted).abs() <= 2e-7 * wanted.abs());
        }
    }

    #[test]
    fn pieces_cover_everything_once() {
        for (rows, width) in [(1, 1), (7, 3), (1, 20_000), (40_000, 1), (999, 77)] {
            let mut out = vec![0.0; rows * width];
            pieces(&mut out, width, |first, piece| {
                assert!(first % width == 0 && piece.len() % width == 0);
                piece.iter_mut().enumerate().for_each(|(i, x)| *x += (first + i) as f32);
            });
            assert!(out.iter().enumerate().all(|(i, x)| *x == i as f32));
        }
    }
}
