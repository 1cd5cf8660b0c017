//! Min-max quantization of one group: the range of codes spans the range of the values.
//!
//! With `n = 2^bits − 1` and the scale rounded to its stored type before codes are chosen:
//!
//! | offset | scale `s` | zero point | code |
//! |---|---|---|---|
//! | zero point | `(max − min) / n`, 0 within `min..max` | `clip(−round(min / s), 0, n)` | `clip(round(w · r) + zero, 0, n)` |
//! | symmetric | `max|w| / (n / 2)` | `2^(bits−1)` | `clip(round(w · r) + zero, 0, n)` |
//!
//! where `r` is the reciprocal of the stored scale, rounded to the scale's type too, and `round`
//! takes the even of two equally near. Arithmetic is float32. These are the numbers of torchao's
//! affine quantization with a bf16 scale, to the last bit.

use gemma4_format::DType;
use half::bf16;

use super::lanes::ROUND;

/// Smallest scale: a group of zeros has this, zero point 0 (or the middle), and decodes to zeros.
const SMALLEST_SCALE: f32 = f32::EPSILON;

/// Scale and zero point of a group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Parameters {
    /// Representable in the scale's stored type.
    pub(super) scale: f32,
    /// In units of the code; a whole number in the range of codes from min-max.
    pub(super) zero: f32,
}

/// Chooses scale and zero point for finite `values`.
pub(super) fn choose(values: &[f32], bits: u8, symmetric: bool, scale_type: DType) -> Parameters {
    let levels = largest_code(bits);
    let (low, high) = range(values);
    if symmetric {
        let scale = (high.max(-low) / (levels / 2.0)).max(SMALLEST_SCALE);
        return Parameters { scale: round_to(scale_type, scale), zero: (levels + 1.0) / 2.0 };
    }
    let scale = ((high - low) / levels).max(SMALLEST_SCALE);
    let zero = (-(low / scale).round_ties_even()).clamp(0.0, levels);
    Parameters { scale: round_to(scale_type, scale), zero }
}

/// Writes the code of each of the values for which the parameters were chosen.
pub(super) fn encode(
    values: &[f32],
    bits: u8,
    Parameters { scale, zero }: Parameters,
    scale_type: DType,
    codes: &mut [u8],
) {
    let levels = largest_code(bits) as i32;
    let reciprocal = round_to(scale_type, 1.0 / scale);
    let shift = zero as i32 - ROUND.to_bits() as i32;
    for (value, code) in values.iter().zip(codes) {
        let rounded = (value * reciprocal + ROUND).to_bits() as i32;
        *code = (rounded + shift).clamp(0, levels) as u8;
    }
}

/// Least and largest of the values and of zero.
fn range(values: &[f32]) -> (f32, f32) {
    // Eight at a time, so that the compiler can use vectors: it must keep the order of one chain.
    let (mut low, mut high) = ([0f32; 8], [0f32; 8]);
    for chunk in values.chunks(8) {
        for ((low, high), value) in low.iter_mut().zip(&mut high).zip(chunk) {
            *low = if value < low { *value } else { *low };
            *high = if value > high { *value } else { *high };
        }
    }
    (low.into_iter().fold(0.0, f32::min), high.into_iter().fold(0.0, f32::max))
}

/// The largest code of so many bits.
pub(super) fn largest_code(bits: u8) -> f32 {
    ((1u32 << bits) - 1) as f32
}

/// The nearest number that the type holds; for the types that scales have here.
fn round_to(scale_type: DType, value: f32) -> f32 {
    match scale_type {
        DType::BF16 => bf16::from_f32(value).to_f32(),
        _ => value,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn codes(values: &[f32], symmetric: bool, bits: u8) -> (Parameters, Vec<u8>) {
        let parameters = choose(values, bits, symmetric, DType::BF16);
        let mut codes = vec![0; values.len()];
        encode(values, bits, parameters, DType::BF16, &mut codes);
        (parameters, codes)
    }

    #[test]
    fn zeros_stay_zero() {
        let (p, q) = codes(&[0.0; 32], false, 4);
        assert_eq!((p.zero, q), (0.0, vec![0; 32]));
        let (p, q) = codes(&[0.0; 32], true, 8);
        assert_eq!((p.zero, q), (128.0, vec![128; 32]));
    }

    #[test]
    fn zero_is_within_the_range_of_one_sided_groups() {
        let (p, q) = codes(&[7.5, 15.0], false, 4);
        assert_eq!((p.scale, p.zero, q), (1.0, 0.0, vec![8, 15]));
        let (p, q) = codes(&[-7.5, -15.0], false, 4);
        assert_eq!((p.scale, p.zero, q), (1.0, 15.0, vec![7, 0]));
    }

    #[test]
    fn halves_round_to_even() {
        let (p, q) = codes(&[0.5, 1.5, 2.5, 15.0], false, 4);
        assert_eq!((p.scale, q), (1.0, vec![0, 2, 2, 15]));
    }

    #[test]
    fn both_ends_of_symmetric_codes_occur() {
        let (p, q) = codes(&[-127.5, 127.5, 0.0], true, 8);
        assert_eq!((p.scale, q), (1.0, vec![0, 255, 128]));
    }
}
