//! Running a kernel with the widest vector instructions that the processor has.
//!
//! Kernels are plain loops over arrays of [`LANES`] numbers, inlined into one function for each
//! instruction set, where the compiler turns them into vector instructions. Only products of
//! bytes, for which compilers have no loop, are written for each set. Results depend on the
//! instruction set only in that one without fused multiply-add rounds products.

#![allow(unsafe_code, reason = "instructions are used that were found to be there")]

#[cfg(target_arch = "x86_64")]
mod x86;

use std::env;

#[cfg(target_arch = "x86_64")]
use self::x86::{Avx2, Avx512Vnni};
use super::blocks::{from_bf16, from_f16};
use crate::{Error, Result};

/// Numbers that are summed side by side: the sums of a kernel have this many parts.
pub(crate) const LANES: usize = 16;

/// One number for each lane.
pub(crate) type Lanes = [f32; LANES];

/// Bytes that are multiplied at once: four for each lane.
pub(crate) const BYTES: usize = 4 * LANES;

/// Forces an instruction set by its name, for tests and measurements.
const VARIABLE: &str = "GEMMA4_CPU";

/// How an instruction set multiplies and adds.
pub(crate) trait Arithmetic {
    /// Whether there are 32 registers of 64 bytes.
    const WIDE: bool;

    /// `a · b + c`.
    fn multiply_add(a: f32, b: f32, c: f32) -> f32;

    /// Four bytes, or an integer of 32 bits, for each lane.
    type Bytes: Copy;
    /// A float32 for each lane.
    type Floats: Copy;

    /// Asks for memory that will be read soon; where it lies does not matter.
    fn prefetch(_: *const u8) {}
    /// Takes bytes.
    fn bytes(bytes: &[u8; BYTES]) -> Self::Bytes;
    /// Takes bytes with a sign.
    fn signed(bytes: &[i8; BYTES]) -> Self::Bytes;
    /// The low and the high half of each byte.
    fn halves(bytes: Self::Bytes) -> [Self::Bytes; 2];
    /// Zeros.
    fn zero() -> Self::Bytes;
    /// Integers times 256.
    fn shift(integers: Self::Bytes) -> Self::Bytes;
    /// Adds to each lane's integer its four products of a code and a digit, from -128 to 127.
    ///
    /// Exact, modulo 2^32. `WHOLE` says that codes may take all values of a byte; else they are
    /// below 64.
    fn dot<const WHOLE: bool>(
        integers: Self::Bytes,
        codes: Self::Bytes,
        digits: Self::Bytes,
    ) -> Self::Bytes;
    /// Integers as floats.
    fn floats(integers: Self::Bytes) -> Self::Floats;
    /// The nearest whole numbers, even ones of two; of magnitudes below 2^31.
    fn whole(floats: Self::Floats) -> [i32; LANES];
    /// Exact values of float16 numbers.
    fn float16(numbers: &[[u8; 2]; LANES]) -> Self::Floats;
    /// Exact values of bfloat16 numbers.
    fn bfloat16(numbers: &[[u8; 2]; LANES]) -> Self::Floats;
    /// Bytes as floats.
    fn whole_bytes(bytes: &[u8; LANES]) -> Self::Floats;
    /// Takes floats.
    fn lanes(lanes: &Lanes) -> Self::Floats;
    /// Gives floats.
    fn array(floats: Self::Floats) -> Lanes;
    /// The same float in each of a number of neighbouring lanes: 4 for four scales, 2 for eight.
    fn spread<const SCALES: usize>(scales: &[f32; SCALES]) -> Self::Floats;
    /// `a · b`.
    fn multiply(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `a · b + c`.
    fn add_product(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
}

/// What every processor of this kind has. Fused multiply-add is part of that on AArch64;
/// elsewhere the compiler would call a slow function for it.
pub(crate) struct Baseline;

impl Arithmetic for Baseline {
    const WIDE: bool = false;
    type Bytes = [u8; BYTES];
    type Floats = Lanes;

    #[inline(always)]
    fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
        if cfg!(target_arch = "aarch64") { a.mul_add(b, c) } else { a * b + c }
    }

    fn bytes(bytes: &[u8; BYTES]) -> [u8; BYTES] {
        *bytes
    }

    fn signed(bytes: &[i8; BYTES]) -> [u8; BYTES] {
        bytes.map(i8::cast_unsigned)
    }

    #[inline(never)]
    fn halves(bytes: [u8; BYTES]) -> [[u8; BYTES]; 2] {
        let mut halves = [bytes; 2];
        for low in &mut halves[0] {
            *low &= 15;
        }
        for high in &mut halves[1] {
            *high >>= 4;
        }
        halves
    }

    fn zero() -> [u8; BYTES] {
        [0; BYTES]
    }

    #[inline(never)]
    fn shift(mut integers: [u8; BYTES]) -> [u8; BYTES] {
        for integer in integers.as_chunks_mut().0 {
            *integer = (i32::from_ne_bytes(*integer) << 8).to_ne_bytes();
        }
        integers
    }

    #[inline(never)]
    fn dot<const WHOLE: bool>(
        mut integers: [u8; BYTES],
        codes: [u8; BYTES],
        digits: [u8; BYTES],
    ) -> [u8; BYTES] {
        let codes = codes.as_chunks::<4>().0.iter().zip(digits.as_chunks::<4>().0);
        for (integer, (codes, digits)) in integers.as_chunks_mut().0.iter_mut().zip(codes) {
            let mut sum = i32::from_ne_bytes(*integer);
            for (code, digit) in codes.iter().zip(digits) {
                sum = sum.wrapping_add(i32::from(*code) * i32::from(digit.cast_signed()));
            }
            *integer = sum.to_ne_bytes();
        }
        integers
    }

    #[inline(never)]
    fn floats(integers: [u8; BYTES]) -> Lanes {
        let mut floats = [0.0; LANES];
        for (float, integer) in floats.iter_mut().zip(integers.as_chunks().0) {
            *float = i32::from_ne_bytes(*integer) as f32;
        }
        floats
    }

    #[inline(never)]
    fn whole(floats: Lanes) -> [i32; LANES] {
        floats.map(|float| float.round_ties_even() as i32)
    }

    #[inline(never)]
    fn float16(numbers: &[[u8; 2]; LANES]) -> Lanes {
        numbers.map(from_f16)
    }

    #[inline(never)]
    fn bfloat16(numbers: &[[u8; 2]; LANES]) -> Lanes {
        numbers.map(from_bf16)
    }

    #[inline(never)]
    fn whole_bytes(bytes: &[u8; LANES]) -> Lanes {
        bytes.map(f32::from)
    }

    fn lanes(lanes: &Lanes) -> Lanes {
        *lanes
    }

    fn array(floats: Lanes) -> Lanes {
        floats
    }

    #[inline(never)]
    fn spread<const SCALES: usize>(scales: &[f32; SCALES]) -> Lanes {
        let mut lanes = [0.0; LANES];
        for (at, lane) in lanes.iter_mut().enumerate() {
            *lane = scales[at * SCALES / LANES];
        }
        lanes
    }

    #[inline(never)]
    fn multiply(mut a: Lanes, b: Lanes) -> Lanes {
        for (a, b) in a.iter_mut().zip(b) {
            *a *= b;
        }
        a
    }

    #[inline(never)]
    fn add_product(a: Lanes, b: Lanes, mut c: Lanes) -> Lanes {
        accumulate::<Self>(&mut c, &a, &b);
        c
    }
}

/// A computation that is compiled once for each instruction set.
pub(crate) trait Kernel {
    /// Does it. Must be `#[inline(always)]`, as must be all that it calls in its loops.
    fn run<A: Arithmetic>(self);
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Set {
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Baseline,
}

/// An instruction set that this processor has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Isa(Set);

impl Isa {
    /// The best one, or the one that the environment names.
    pub(crate) fn detect() -> Result<Self> {
        let all = Self::all();
        let Some(name) = env::var_os(VARIABLE).filter(|name| !name.is_empty()) else {
            return Ok(all[0]);
        };
        let name = name.to_string_lossy();
        all.iter().copied().find(|isa| isa.name() == name).ok_or_else(|| {
            let names: Vec<&str> = all.iter().map(|isa| isa.name()).collect();
            let names = names.join(", ");
            Error::Device(format!("{VARIABLE}={name}: this processor has {names}"))
        })
    }

    /// All of them, the best first.
    pub(crate) fn all() -> Vec<Self> {
        let mut sets = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            if avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vnni")
            {
                sets.push(Self(Set::Avx512Vnni));
            }
            if avx2 {
                sets.push(Self(Set::Avx2));
            }
        }
        sets.push(Self(Set::Baseline));
        sets
    }

    /// Name for reports.
    pub(crate) fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Set::Avx512Vnni => "avx512-vnni",
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => "avx2",
            Set::Baseline => env::consts::ARCH,
        }
    }

    /// Runs a kernel with these instructions.
    pub(crate) fn run<K: Kernel>(self, kernel: K) {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `all` hands this value out only where the processor has all that the
            // function enables.
            Set::Avx512Vnni => unsafe { avx512_vnni(kernel) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Set::Avx2 => unsafe { avx2(kernel) },
            Set::Baseline => kernel.run::<Baseline>(),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn avx512_vnni<K: Kernel>(kernel: K) {
    kernel.run::<Avx512Vnni>();
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn avx2<K: Kernel>(kernel: K) {
    kernel.run::<Avx2>();
}

/// Adds `a · b` to the sums, lane by lane.
#[inline(always)]
pub(crate) fn accumulate<A: Arithmetic>(sums: &mut Lanes, a: &Lanes, b: &Lanes) {
    for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
        *sum = A::multiply_add(*a, *b, *sum);
    }
}

/// The sum of all lanes, as a tree of fixed shape.
#[inline(always)]
pub(crate) fn total(mut sums: Lanes) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            sums[i] += sums[i + half];
        }
        half /= 2;
    }
    sums[0]
}
