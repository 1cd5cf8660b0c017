//! Running a kernel with the widest vector instructions that the processor has.
//!
//! Kernels are plain loops over arrays of [`LANES`] numbers, inlined into one function for each
//! instruction set, where the compiler turns them into vector instructions. Results depend on
//! the instruction set only in that one without fused multiply-add rounds products.

#![allow(unsafe_code, reason = "instructions are used that were found to be there")]

/// Numbers that are summed side by side: the sums of a kernel have this many parts.
pub(crate) const LANES: usize = 16;

/// One number for each lane.
pub(crate) type Lanes = [f32; LANES];

/// How an instruction set multiplies and adds.
pub(crate) trait Arithmetic {
    /// Whether 16 accumulators of [`Lanes`] fit the registers.
    const WIDE: bool;
    /// `a · b + c`.
    fn multiply_add(a: f32, b: f32, c: f32) -> f32;
}

/// With one rounding, and 32 registers of 64 bytes.
pub(crate) struct FusedWide;
/// With one rounding.
pub(crate) struct Fused;
/// With two roundings, where the processor has no fused instruction.
pub(crate) struct Separate;

impl Arithmetic for FusedWide {
    const WIDE: bool = true;
    #[inline(always)]
    fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}

impl Arithmetic for Fused {
    const WIDE: bool = false;
    #[inline(always)]
    fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}

impl Arithmetic for Separate {
    const WIDE: bool = false;
    #[inline(always)]
    fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
        a * b + c
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
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Baseline,
}

/// An instruction set that this processor has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Isa(Set);

impl Isa {
    /// The widest one.
    pub(crate) fn detect() -> Self {
        Self::all()[0]
    }

    /// All of them, the widest first.
    pub(crate) fn all() -> Vec<Self> {
        let mut sets = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            if avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
            {
                sets.push(Self(Set::Avx512));
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
            Set::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => "avx2",
            Set::Baseline => std::env::consts::ARCH,
        }
    }

    /// Runs a kernel with these instructions.
    pub(crate) fn run<K: Kernel>(self, kernel: K) {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `all` hands this value out only where the processor has all that the
            // function enables.
            Set::Avx512 => unsafe { avx512(kernel) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Set::Avx2 => unsafe { avx2(kernel) },
            // Fused multiply-add is part of the baseline of AArch64; elsewhere the compiler
            // would call a slow function for it.
            Set::Baseline if cfg!(target_arch = "aarch64") => kernel.run::<Fused>(),
            Set::Baseline => kernel.run::<Separate>(),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn avx512<K: Kernel>(kernel: K) {
    kernel.run::<FusedWide>();
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn avx2<K: Kernel>(kernel: K) {
    kernel.run::<Fused>();
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
