//! Products of bytes with the instructions of x86-64.
//!
//! The types here are used by functions alone that enable the features they need: every call of
//! an instruction below relies on that.

use std::arch::x86_64::*;
use std::mem::transmute;

use super::{Arithmetic, BYTES, LANES, Lanes};

/// Vectors of 64 bytes, with instructions for four products at once.
pub(crate) struct Avx512Vnni;
/// Vectors of 32 bytes.
pub(crate) struct Avx2;

impl Arithmetic for Avx512Vnni {
    const WIDE: bool = true;
    type Bytes = __m512i;
    type Floats = __m512;

    #[inline(always)]
    fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }

    #[inline(always)]
    fn prefetch(at: *const u8) {
        // SAFETY: a hint that may name any address; SSE.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }

    #[inline(always)]
    fn bytes(bytes: &[u8; BYTES]) -> __m512i {
        // SAFETY: reads the 64 bytes of the array; AVX-512 F.
        unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
    }

    #[inline(always)]
    fn signed(bytes: &[i8; BYTES]) -> __m512i {
        // SAFETY: reads the 64 bytes of the array; AVX-512 F.
        unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
    }

    #[inline(always)]
    fn halves(bytes: __m512i) -> [__m512i; 2] {
        // SAFETY: AVX-512 BW.
        unsafe {
            let mask = _mm512_set1_epi8(15);
            let high = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), mask);
            [_mm512_and_si512(bytes, mask), high]
        }
    }

    #[inline(always)]
    fn zero() -> __m512i {
        // SAFETY: AVX-512 F.
        unsafe { _mm512_setzero_si512() }
    }

    #[inline(always)]
    fn shift(integers: __m512i) -> __m512i {
        // SAFETY: AVX-512 F.
        unsafe { _mm512_slli_epi32(integers, 8) }
    }

    #[inline(always)]
    fn dot<const WHOLE: bool>(integers: __m512i, codes: __m512i, digits: __m512i) -> __m512i {
        // SAFETY: AVX-512 F and VNNI.
        unsafe { _mm512_dpbusd_epi32(integers, codes, digits) }
    }

    #[inline(always)]
    fn floats(integers: __m512i) -> __m512 {
        // SAFETY: AVX-512 F.
        unsafe { _mm512_cvtepi32_ps(integers) }
    }

    #[inline(always)]
    fn whole(floats: __m512) -> [i32; LANES] {
        // SAFETY: both are 16 integers of 32 bits; AVX-512 F.
        unsafe { transmute(_mm512_cvtps_epi32(floats)) }
    }

    #[inline(always)]
    fn float16(numbers: &[[u8; 2]; LANES]) -> __m512 {
        // SAFETY: reads the 32 bytes of the array; AVX-512 F.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(numbers.as_ptr().cast())) }
    }

    #[inline(always)]
    fn bfloat16(numbers: &[[u8; 2]; LANES]) -> __m512 {
        // SAFETY: reads the 32 bytes of the array; AVX-512 F.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(numbers.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))
        }
    }

    #[inline(always)]
    fn whole_bytes(bytes: &[u8; LANES]) -> __m512 {
        // SAFETY: reads the 16 bytes of the array; AVX-512 F.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(bytes.as_ptr().cast()))) }
    }

    #[inline(always)]
    fn lanes(lanes: &Lanes) -> __m512 {
        // SAFETY: reads the 16 floats of the array; AVX-512 F.
        unsafe { _mm512_loadu_ps(lanes.as_ptr()) }
    }

    #[inline(always)]
    fn array(floats: __m512) -> Lanes {
        // SAFETY: both are 16 floats.
        unsafe { transmute(floats) }
    }

    #[inline(always)]
    fn spread<const SCALES: usize>(scales: &[f32; SCALES]) -> __m512 {
        // SAFETY: reads as many floats as there are; AVX-512 F and DQ.
        unsafe {
            if SCALES == 4 {
                let four = _mm512_broadcast_f32x4(_mm_loadu_ps(scales.as_ptr()));
                let at = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
                _mm512_permutexvar_ps(at, four)
            } else {
                assert!(SCALES == 8);
                let eight = _mm512_castps256_ps512(_mm256_loadu_ps(scales.as_ptr()));
                let at = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
                _mm512_permutexvar_ps(at, eight)
            }
        }
    }

    #[inline(always)]
    fn multiply(a: __m512, b: __m512) -> __m512 {
        // SAFETY: AVX-512 F.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn add_product(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: AVX-512 F.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
}

impl Arithmetic for Avx2 {
    const WIDE: bool = false;
    type Bytes = [__m256i; 2];
    type Floats = [__m256; 2];

    #[inline(always)]
    fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }

    #[inline(always)]
    fn prefetch(at: *const u8) {
        // SAFETY: a hint that may name any address; SSE.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }

    #[inline(always)]
    fn bytes(bytes: &[u8; BYTES]) -> [__m256i; 2] {
        // SAFETY: reads the 64 bytes of the array; AVX2.
        unsafe {
            let at = bytes.as_ptr().cast();
            [_mm256_loadu_si256(at), _mm256_loadu_si256(at.add(1))]
        }
    }

    #[inline(always)]
    fn signed(bytes: &[i8; BYTES]) -> [__m256i; 2] {
        // SAFETY: reads the 64 bytes of the array; AVX2.
        unsafe {
            let at = bytes.as_ptr().cast();
            [_mm256_loadu_si256(at), _mm256_loadu_si256(at.add(1))]
        }
    }

    #[inline(always)]
    fn halves([a, b]: [__m256i; 2]) -> [[__m256i; 2]; 2] {
        // SAFETY: AVX2.
        unsafe {
            let mask = _mm256_set1_epi8(15);
            let low = [_mm256_and_si256(a, mask), _mm256_and_si256(b, mask)];
            let (a, b) = (_mm256_srli_epi16(a, 4), _mm256_srli_epi16(b, 4));
            [low, [_mm256_and_si256(a, mask), _mm256_and_si256(b, mask)]]
        }
    }

    #[inline(always)]
    fn zero() -> [__m256i; 2] {
        // SAFETY: AVX2.
        unsafe { [_mm256_setzero_si256(); 2] }
    }

    #[inline(always)]
    fn shift([a, b]: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: AVX2.
        unsafe { [_mm256_slli_epi32(a, 8), _mm256_slli_epi32(b, 8)] }
    }

    #[inline(always)]
    fn dot<const WHOLE: bool>(
        [a, b]: [__m256i; 2],
        codes: [__m256i; 2],
        digits: [__m256i; 2],
    ) -> [__m256i; 2] {
        // SAFETY: AVX2.
        unsafe {
            [
                _mm256_add_epi32(a, quads::<WHOLE>(codes[0], digits[0])),
                _mm256_add_epi32(b, quads::<WHOLE>(codes[1], digits[1])),
            ]
        }
    }

    #[inline(always)]
    fn floats([a, b]: [__m256i; 2]) -> [__m256; 2] {
        // SAFETY: AVX2.
        unsafe { [_mm256_cvtepi32_ps(a), _mm256_cvtepi32_ps(b)] }
    }

    #[inline(always)]
    fn whole([a, b]: [__m256; 2]) -> [i32; LANES] {
        // SAFETY: both are 16 integers of 32 bits; AVX2.
        unsafe { transmute([_mm256_cvtps_epi32(a), _mm256_cvtps_epi32(b)]) }
    }

    #[inline(always)]
    fn float16(numbers: &[[u8; 2]; LANES]) -> [__m256; 2] {
        // SAFETY: reads the 32 bytes of the array; F16C.
        unsafe {
            let at = numbers.as_ptr().cast();
            [_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at.add(1)))]
        }
    }

    #[inline(always)]
    fn bfloat16(numbers: &[[u8; 2]; LANES]) -> [__m256; 2] {
        // SAFETY: reads the 32 bytes of the array; AVX2.
        unsafe {
            let at = numbers.as_ptr().cast();
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(at));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(at.add(1)));
            let (low, high) = (_mm256_slli_epi32(low, 16), _mm256_slli_epi32(high, 16));
            [_mm256_castsi256_ps(low), _mm256_castsi256_ps(high)]
        }
    }

    #[inline(always)]
    fn whole_bytes(bytes: &[u8; LANES]) -> [__m256; 2] {
        // SAFETY: reads the 16 bytes of the array; AVX2.
        unsafe {
            let bytes = _mm_loadu_si128(bytes.as_ptr().cast());
            let low = _mm256_cvtepu8_epi32(bytes);
            let high = _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8));
            [_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)]
        }
    }

    #[inline(always)]
    fn lanes(lanes: &Lanes) -> [__m256; 2] {
        // SAFETY: reads the 16 floats of the array; AVX2.
        unsafe { [_mm256_loadu_ps(lanes.as_ptr()), _mm256_loadu_ps(lanes.as_ptr().add(8))] }
    }

    #[inline(always)]
    fn array(floats: [__m256; 2]) -> Lanes {
        // SAFETY: both are 16 floats.
        unsafe { transmute(floats) }
    }

    #[inline(always)]
    fn spread<const SCALES: usize>(scales: &[f32; SCALES]) -> [__m256; 2] {
        // SAFETY: reads as many floats as there are; AVX2.
        unsafe {
            if SCALES == 4 {
                let four = _mm256_castps128_ps256(_mm_loadu_ps(scales.as_ptr()));
                let low = _mm256_set_epi32(1, 1, 1, 1, 0, 0, 0, 0);
                let high = _mm256_set_epi32(3, 3, 3, 3, 2, 2, 2, 2);
                [_mm256_permutevar8x32_ps(four, low), _mm256_permutevar8x32_ps(four, high)]
            } else {
                assert!(SCALES == 8);
                let eight = _mm256_loadu_ps(scales.as_ptr());
                let low = _mm256_set_epi32(3, 3, 2, 2, 1, 1, 0, 0);
                let high = _mm256_set_epi32(7, 7, 6, 6, 5, 5, 4, 4);
                [_mm256_permutevar8x32_ps(eight, low), _mm256_permutevar8x32_ps(eight, high)]
            }
        }
    }

    #[inline(always)]
    fn multiply(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: AVX2.
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn add_product(a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: AVX2 and FMA.
        unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
    }
}

/// Sums of four products. Those of two stay within 16 bits, since codes, or their halves, are
/// below 64.
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
unsafe fn quads<const WHOLE: bool>(codes: __m256i, digits: __m256i) -> __m256i {
    // SAFETY: the caller's.
    unsafe {
        if !WHOLE {
            return _mm256_madd_epi16(_mm256_maddubs_epi16(codes, digits), _mm256_set1_epi16(1));
        }
        let mask = _mm256_set1_epi8(15);
        let low = _mm256_maddubs_epi16(_mm256_and_si256(codes, mask), digits);
        let high = _mm256_and_si256(_mm256_srli_epi16(codes, 4), mask);
        let high = _mm256_maddubs_epi16(high, digits);
        _mm256_add_epi32(
            _mm256_madd_epi16(low, _mm256_set1_epi16(1)),
            _mm256_madd_epi16(high, _mm256_set1_epi16(16)),
        )
    }
}
