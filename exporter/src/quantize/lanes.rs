//! Arithmetic that a GPU repeats to the last bit (`kernels/cu/quantize.cu`): sums in an order that
//! a warp can take, and a power made of multiplications and additions.

use std::f32::consts::LN_2;

/// Numbers of a group that are summed side by side.
pub(super) const LANES: usize = 32;

/// One number for each lane.
pub(super) type Lanes = [f32; LANES];

/// The sum of all lanes: of the two halves, of the halves of that, and so on.
pub(super) fn total(mut lanes: Lanes) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        let (low, high) = lanes.split_at_mut(half);
        low.iter_mut().zip(high).for_each(|(low, high)| *low += *high);
        half /= 2;
    }
    lanes[0]
}

/// Calls `body` for blocks of at most [`LANES`] values; it is compiled for whole blocks, too.
#[inline(always)]
pub(super) fn blocks(values: &[f32], mut body: impl FnMut(usize, &[f32])) {
    let (whole, rest) = values.as_chunks::<LANES>();
    whole.iter().enumerate().for_each(|(at, block)| body(at * LANES, block));
    if !rest.is_empty() {
        body(whole.len() * LANES, rest);
    }
}

/// Added to a number below 2^22, it leaves that number rounded to even in the low bits: what
/// `round_ties_even` gives, without a call per number on processors of the oldest kind.
pub(super) const ROUND: f32 = (3 << 22) as f32;

/// The nearest whole number, the even of two equally near; for numbers below 2^22.
#[inline(always)]
pub(super) fn round_even(value: f32) -> f32 {
    (value + ROUND) - ROUND
}

/// `x^exponent` for a normal number `x` and an exponent between −0.9 and 0.9.
///
/// `x = 2^e · m` with `m` between `√½` and `√2`; `log2 m = 2 / ln 2 · artanh f` with
/// `f = (m − 1) / (m + 1)`, below 0.172; `2^y` is the exponential series of what is left of `y`
/// beside a whole number. Both series end where a float32 does.
#[inline(always)]
pub(super) fn power(x: f32, exponent: f32) -> f32 {
    const SQRT_HALF: u32 = 0x3f35_04f3;
    let e = (x.to_bits().wrapping_sub(SQRT_HALF) as i32) >> 23;
    let m = f32::from_bits(x.to_bits().wrapping_sub((e as u32) << 23));
    let f = (m - 1.0) / (m + 1.0);
    let s = f * f;
    let series = (((0.320_598_9 * s + 0.412_198_57) * s + 0.577_078_04) * s + 0.961_796_7) * s;
    let y = ((series + 2.885_39) * f + e as f32) * exponent;
    let whole = round_even(y);
    let r = y - whole;
    let power = (((1.525_273_4e-5 * r + 1.540_353e-4) * r + 1.333_355_8e-3) * r + 9.618_129e-3) * r;
    let power = (((power + 5.550_411e-2) * r + 2.402_265e-1) * r + LN_2) * r + 1.0;
    power * f32::from_bits((whole as i32 + 127).cast_unsigned() << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_power_is_right_to_a_few_units_in_the_last_place() {
        // Where the logarithm is 127, its rounding and that of the product are up to 36 units alone.
        for (exponent, sizes, allowed) in [(-0.3, -3..7, 4.0), (-0.3, -120..127, 48.0)] {
            for x in
                sizes.flat_map(|e| (0..999).map(move |i| 2f32.powi(e) * (1.0 + i as f32 / 999.0)))
            {
                let exact = f64::from(x).powf(f64::from(exponent));
                let unit = f64::from((exact as f32).next_up()) - f64::from(exact as f32);
                let off = (f64::from(power(x, exponent)) - exact).abs() / unit;
                assert!(off <= allowed, "{x}: {off} units");
            }
        }
    }

    #[test]
    fn lanes_are_added_in_halves() {
        let mut lanes = [0.0; LANES];
        // 2^24 + 1 is no float32: in order, each of the ones would be lost, and so only the first two.
        lanes[0] = (1 << 24) as f32;
        lanes[16..].fill(1.0);
        assert_eq!(total(lanes), (1 << 24) as f32 + 14.0);
    }
}
