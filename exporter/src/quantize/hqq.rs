//! Half-quadratic quantization (HQQ) of one group: the zero point moves to where codes fit best.
//!
//! After Badri and Shaji, *Half-Quadratic Quantization of Large Machine Learning Models* (2023).
//! The scale `s` stays that of min-max, and the zero point `z`, a fraction, starts at `−min / s`.
//! Each iteration takes in turn
//!
//! - the codes `q = clip(round(w / s + z), 0, n)`, with `n = 2^bits − 1`;
//! - the errors that are to stay, `e = sign(r) · max(|r| − |r|^(p−1) / β, 0)` of the residuals
//!   `r = w − (q − z) · s`: the proximal step of the norm `|r|^p`, which keeps outliers from moving
//!   the zero point;
//! - the zero point, the mean of `q − (w − e) / s`;
//!
//! and multiplies `β` by `κ`. It ends when the sum of squared residuals no longer falls. Codes are
//! chosen once more after the zero point is rounded to its stored type. Arithmetic is float32, in
//! the order of [`super::lanes`].

use super::lanes::{LANES, blocks, power, round_even, total};
use super::min_max::{Parameters, largest_code};

/// `p` of the norm.
const NORM: f32 = 0.7;
/// `β` of the first iteration.
const BETA: f32 = 10.0;
/// `κ`, by which `β` grows.
const KAPPA: f32 = 1.01;
const ITERATIONS: usize = 20;
/// Below this the proximal step gives 0 for every `β`, the largest being 12.1.
const NEGLIGIBLE: f32 = 0.14;

/// Moves the zero point of finite `values`, whose range min-max has found to need `start`, and
/// writes their codes. `round` gives the nearest zero point that can be stored.
pub(super) fn encode(
    values: &[f32],
    bits: u8,
    start: Parameters,
    round: impl Fn(f32) -> f32,
    codes: &mut [u8],
) -> Parameters {
    let levels = largest_code(bits);
    let scale = start.scale;
    let reciprocal = 1.0 / scale;
    let code = |value: f32, zero: f32| round_even(value * reciprocal + zero).clamp(0.0, levels);
    // Not `f32::min`, which may take either zero.
    let low = values.iter().fold(0.0, |low, value| if *value < low { *value } else { low });
    let mut zero = (-low * reciprocal).clamp(0.0, levels);
    let (mut best, mut least) = (zero, f32::INFINITY);
    let mut beta = BETA;
    for _ in 0..ITERATIONS {
        let (mut squares, mut sums) = ([0.0; LANES], [0.0; LANES]);
        blocks(values, |_, values| {
            // What the mean is of, where no error stays.
            let (mut terms, mut outliers) = ([0.0; LANES], false);
            let lanes = terms.iter_mut().zip(&mut squares);
            for (value, (term, squares)) in values.iter().zip(lanes) {
                let code = code(*value, zero);
                let residual = value - (code - zero) * scale;
                *squares += residual * residual;
                *term = code - value * reciprocal;
                outliers |= residual.abs() > NEGLIGIBLE;
            }
            if outliers {
                for (value, term) in values.iter().zip(&mut terms) {
                    let code = code(*value, zero);
                    let kept = shrink(value - (code - zero) * scale, beta);
                    *term = code - (value - kept) * reciprocal;
                }
            }
            sums.iter_mut().zip(terms).take(values.len()).for_each(|(sum, term)| *sum += term);
        });
        let squares = total(squares);
        if squares >= least {
            break;
        }
        (best, least) = (zero, squares);
        zero = total(sums) / values.len() as f32;
        beta *= KAPPA;
    }
    let zero = round(best);
    for (value, out) in values.iter().zip(codes) {
        *out = code(*value, zero) as u8;
    }
    Parameters { scale, zero }
}

/// The proximal step of a residual.
#[inline(always)]
fn shrink(residual: f32, beta: f32) -> f32 {
    let size = residual.abs();
    (size - power(size, NORM - 1.0) / beta).max(0.0).copysign(residual)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantize::Loss;
    use crate::quantize::min_max;
    use crate::synthetic::Random;
    use gemma4_format::DType;
    use half::bf16;

    fn both(values: &[f32]) -> [Loss; 2] {
        let start = min_max::choose(values, 4, false, DType::BF16);
        let mut codes = vec![0; values.len()];
        min_max::encode(values, 4, start, DType::BF16, &mut codes);
        let min_max = Loss::of_codes(values, &codes, start.zero, start.scale);
        let round = |zero| bf16::from_f32(zero).to_f32();
        let Parameters { scale, zero } = encode(values, 4, start, round, &mut codes);
        assert_eq!(scale, start.scale);
        assert_eq!(zero, round(zero));
        [min_max, Loss::of_codes(values, &codes, zero, scale)]
    }

    #[test]
    fn it_loses_less_than_min_max() {
        let mut random = Random::new(7);
        let (mut min_max, mut hqq) = (Loss::default(), Loss::default());
        for _ in 0..200 {
            let values: Vec<f32> = (0..32).map(|_| random.normal() * 0.02).collect();
            let [a, b] = both(&values);
            min_max.add(&a);
            hqq.add(&b);
        }
        let gain = hqq.snr_db().unwrap() - min_max.snr_db().unwrap();
        assert!(gain > 0.5, "{gain} dB");
    }

    /// The scale holds a step of 1; all values lie a third beside the whole numbers.
    #[test]
    fn the_zero_point_is_the_shift_of_the_values() {
        let values: Vec<f32> = (0..16).map(|at| (at as f32 - 5.0 + 1.0 / 3.0) * 0.5).collect();
        let [_, hqq] = both(&values);
        assert!(hqq.max_error < 0.5 * 0.02, "{}", hqq.max_error);
    }

    #[test]
    fn zeros_and_one_sided_groups_stay_in_range() {
        assert_eq!(both(&[0.0; 32])[1].noise, 0.0);
        for sign in [1.0, -1.0] {
            let values: Vec<f32> = (0..32).map(|at| sign * (100.0 + at as f32)).collect();
            let [_, hqq] = both(&values);
            assert!(hqq.max_error <= 131.0 / 15.0, "{}", hqq.max_error);
        }
    }
}
