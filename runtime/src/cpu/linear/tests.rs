use gemma4_format::encoding::ZeroType;
use gemma4_format::{Encoding, Offset};
use rayon::ThreadPoolBuilder;

use super::super::blocks::Matrix;
use super::*;

fn noise(seed: &mut u64) -> u32 {
    *seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    (*seed >> 40) as u32
}

/// Bytes that are small finite numbers in every float type, and any codes.
fn bytes(part: &gemma4_format::encoding::Part, seed: &mut u64) -> Vec<u8> {
    let count = part.dims.iter().product::<u64>();
    let mut bytes = Vec::new();
    for _ in 0..count {
        let x = noise(seed) as f32 / (1u32 << 23) as f32 - 1.0;
        match part.dtype {
            DType::F32 => bytes.extend(x.to_le_bytes()),
            DType::F16 => bytes.extend(half::f16::from_f32(x).to_le_bytes()),
            DType::BF16 => bytes.extend(half::bf16::from_f32(x).to_le_bytes()),
            DType::U8 => bytes.push(noise(seed) as u8),
        }
    }
    bytes
}

fn encodings(k: u32) -> Vec<Encoding> {
    let mut all = vec![
        Encoding::Dense(DType::F32),
        Encoding::Dense(DType::F16),
        Encoding::Dense(DType::BF16),
    ];
    let offsets = [
        Offset::Symmetric,
        Offset::Zero(ZeroType::Nibble),
        Offset::Zero(ZeroType::U8),
        Offset::Zero(ZeroType::F16),
        Offset::Zero(ZeroType::BF16),
        Offset::Minimum(DType::F16),
        Offset::Minimum(DType::F32),
    ];
    for bits in [4, 5, 6, 8] {
        for group in [16, 32, 64, 128, k] {
            for (at, offset) in offsets.into_iter().enumerate() {
                let scale = [DType::F32, DType::F16, DType::BF16][at % 3];
                all.push(Encoding::Quantized { bits, group, scale, offset });
            }
        }
    }
    all.retain(|e| e.parts("w", &[1, k]).is_ok());
    all
}

fn product(isa: Isa, activations: Activations, matrix: &Matrix<'_>, x: &[f32]) -> Vec<f32> {
    let rows = x.len() / matrix.columns;
    let extents = (rows as u64, matrix.rows as u64, matrix.columns as u64);
    let (numbers, bytes) = scratch(activations, extents.0, extents.1, extents.2);
    // What was in memory before must not matter.
    let (mut numbers, mut bytes) = (vec![f32::NAN; numbers as usize], vec![77; bytes as usize]);
    let mut out = vec![f32::NAN; rows * matrix.rows];
    let scratch = Scratch { numbers: &mut numbers, bytes: &mut bytes };
    linear(isa, activations, matrix, x, &mut out, scratch);
    out
}

#[test]
fn products_agree_with_float64_and_do_not_depend_on_the_number_of_rows() {
    let mut seed = 1;
    for k in [32, 33, 96, 160, 256] {
        for encoding in encodings(k) {
            let (n, k) = (13, k as usize);
            let parts = encoding.parts("w", &[n, k as u32]).expect("valid");
            let stored: Vec<Vec<u8>> = parts.iter().map(|p| bytes(p, &mut seed)).collect();
            let parts = stored.iter().map(|p| p.as_slice()).collect();
            let matrix = Matrix { encoding, rows: n as usize, columns: k, parts };
            let x: Vec<f32> = (0..11 * k).map(|i| (i as f32 * 0.37).sin()).collect();
            let mut row = vec![0.0; k];
            for isa in Isa::all() {
                let whole = product(isa, Activations::Float32, &matrix, &x);
                for (t, x) in x.chunks(k).enumerate() {
                    let alone = product(isa, Activations::Float32, &matrix, x);
                    let together = &whole[t * n as usize..][..n as usize];
                    assert_eq!(alone, together, "{encoding:?}, K = {k}, row {t}, {isa:?}");
                    for (n, found) in alone.iter().enumerate() {
                        matrix.decode(n, &mut row);
                        let terms = || x.iter().zip(&row).map(|(x, w)| f64::from(x * w));
                        let (sum, size): (f64, f64) = (terms().sum(), terms().map(f64::abs).sum());
                        let apart = (f64::from(*found) - sum).abs();
                        assert!(apart <= 1e-6 * size, "{encoding:?}, K = {k}: {found} for {sum}");
                    }
                }
            }
        }
    }
}

/// With one column that is 1 and the others 0, a product is the decoded weight itself: of dense
/// weights bit for bit, of codes as exactly as float32 multiplies.
#[test]
fn decoded_weights_are_those_of_the_contract() {
    let mut seed = 2;
    let k = 64;
    for encoding in encodings(k as u32) {
        let parts = encoding.parts("w", &[5, k as u32]).expect("valid");
        let stored: Vec<Vec<u8>> = parts.iter().map(|p| bytes(p, &mut seed)).collect();
        let parts = stored.iter().map(|p| p.as_slice()).collect();
        let matrix = Matrix { encoding, rows: 5, columns: k, parts };
        let mut unit = vec![0.0; k * k];
        (0..k).for_each(|i| unit[i * k + i] = 1.0);
        let mut row = vec![0.0; k];
        for isa in Isa::all() {
            let found = product(isa, Activations::Float32, &matrix, &unit);
            for n in 0..5 {
                matrix.decode(n, &mut row);
                let largest = row.iter().fold(0.0f32, |most, w| most.max(w.abs()));
                let bound = if matrix.codes().is_some() { 1e-6 * largest } else { 0.0 };
                for (column, weight) in row.iter().enumerate() {
                    let apart = (found[column * 5 + n] - *weight).abs();
                    assert!(apart <= bound, "{encoding:?} {isa:?}: {apart} of {largest}");
                }
            }
        }
    }
}

/// Each activation is off by half a 127th of the largest one of its 16 columns at most.
#[test]
fn activations_of_8_bits_are_rounded_and_no_more() {
    let mut seed = 4;
    let (n, k) = (7, 160);
    for encoding in encodings(k as u32) {
        let parts = encoding.parts("w", &[n, k as u32]).expect("valid");
        let stored: Vec<Vec<u8>> = parts.iter().map(|p| bytes(p, &mut seed)).collect();
        let parts = stored.iter().map(|p| p.as_slice()).collect();
        let matrix = Matrix { encoding, rows: n as usize, columns: k, parts };
        if matrix.codes().is_none() {
            continue;
        }
        let x: Vec<f32> = (0..3 * k).map(|i| (i as f32 * 0.37).sin() * (i % 50) as f32).collect();
        let mut row = vec![0.0; k];
        let mut answers = Vec::new();
        for isa in Isa::all() {
            let whole = product(isa, Activations::Int8, &matrix, &x);
            for (t, x) in x.chunks(k).enumerate() {
                let alone = product(isa, Activations::Int8, &matrix, x);
                assert_eq!(alone, whole[t * n as usize..][..n as usize], "{encoding:?} {isa:?}");
                for (n, found) in alone.iter().enumerate() {
                    matrix.decode(n, &mut row);
                    let (mut sum, mut bound) = (0.0, 0.0);
                    for (x, w) in x.chunks(16).zip(row.chunks(16)) {
                        let largest = x.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                        for (x, w) in x.iter().zip(w) {
                            sum += f64::from(x * w);
                            bound += f64::from(w.abs() * (largest / 254.0 + 1e-6 * x.abs()));
                        }
                    }
                    let apart = (f64::from(*found) - sum).abs();
                    assert!(apart <= 1.01 * bound + 1e-4, "{encoding:?}: {found} for {sum}");
                }
            }
            answers.push(whole);
        }
        // Not that nothing was rounded.
        assert_ne!(answers[0], product(Isa::all()[0], Activations::Float32, &matrix, &x));
    }
}

#[test]
fn large_products_are_shared_among_threads_without_changing_a_bit() {
    let mut seed = 3;
    // More rows and steps than are multiplied at a time; the last step is not a whole one.
    let (n, k, rows) = (150, 2208, 35);
    for bits in [4, 5, 6, 8] {
        let (scale, offset) = (DType::BF16, Offset::Zero(ZeroType::U8));
        let encoding = Encoding::Quantized { bits, group: 32, scale, offset };
        let parts = encoding.parts("w", &[n, k as u32]).expect("valid");
        let stored: Vec<Vec<u8>> = parts.iter().map(|p| bytes(p, &mut seed)).collect();
        let parts = stored.iter().map(|p| p.as_slice()).collect();
        let matrix = Matrix { encoding, rows: n as usize, columns: k, parts };
        let x: Vec<f32> = (0..rows * k).map(|i| (i as f32 * 0.37).sin()).collect();
        for isa in Isa::all() {
            let run = |threads: usize, x: &[f32]| {
                let pool = ThreadPoolBuilder::new().num_threads(threads).build().expect("threads");
                pool.install(|| product(isa, Activations::Float32, &matrix, x))
            };
            let once = run(1, &x);
            assert_eq!(run(4, &x), once, "{encoding:?}, {isa:?}");
            for (t, x) in x.chunks(k).enumerate().step_by(17) {
                assert_eq!(run(3, x), once[t * n as usize..][..n as usize], "{bits} bits, {t}");
            }
        }
    }
}
