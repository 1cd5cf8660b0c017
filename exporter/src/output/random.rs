//! Writes a `.ptd` file of random weights, as fast as a disk takes them.

use std::path::Path;

use gemma4_format::encoding::{Part, ZeroType};
use gemma4_format::ptd::Layout;
use gemma4_format::{DType, Digest, Encoding, Offset};
use half::{bf16, f16};
use rayon::prelude::*;

use super::weights::{COPY_BLOCK, stream};
use super::{Monitor, Pending, Written};
use crate::Result;
use crate::synthetic::mix;

/// Bytes that a thread makes at a time.
const PIECE: usize = 1 << 18;

/// Writes weights of these names, dims and encodings to the file that is to become `target`.
///
/// Codes are uniform, and scales such that a matrix `[N, K]` has mean 0 and deviation near `1/√K`,
/// which leaves the size of what it multiplies; vectors are between 0.9 and 1.1. Each number
/// depends on the seed and its place alone, so the bytes do not depend on the threads.
///
/// # Errors
/// Errors of writing, [`crate::Error::Interrupted`].
pub fn write_random_weights(
    weights: &[(String, Vec<u32>, Encoding)],
    seed: u64,
    target: &Path,
    monitor: &Monitor,
) -> Result<Written> {
    let layout = Layout::new(weights)?;
    let file = Pending::create(target)?;
    file.sink().set_length(layout.length)?;
    file.write_at(&layout.header, 0)?;
    let digests = generate(weights, &layout, seed, monitor, |at, block| file.write_at(block, at))?;
    let (header, length) = (layout.header_digest(), layout.length);
    Ok(Written { file, header, length, digests, reports: Vec::new() })
}

/// The digests of the weights that [`write_random_weights`] writes.
///
/// # Errors
/// [`crate::Error::Interrupted`].
pub fn random_digests(
    weights: &[(String, Vec<u32>, Encoding)],
    seed: u64,
    monitor: &Monitor,
) -> Result<Vec<Digest>> {
    generate(weights, &Layout::new(weights)?, seed, monitor, |_, _| Ok(()))
}

/// Makes all weights, passes them block by block with their place in the file to `consume`, and
/// returns their digests.
fn generate(
    weights: &[(String, Vec<u32>, Encoding)],
    layout: &Layout,
    seed: u64,
    monitor: &Monitor,
    consume: impl Fn(u64, &[u8]) -> Result<()> + Sync,
) -> Result<Vec<Digest>> {
    monitor.begin(layout.weights.iter().flatten().map(|(part, _)| part.bytes()).sum());
    let mut digests = Vec::new();
    let mut key = mix(seed);
    for ((name, dims, encoding), parts) in weights.iter().zip(&layout.weights) {
        monitor.weight(name, &encoding.describe());
        let mut hasher = blake3::Hasher::new();
        for (part, place) in parts {
            key = mix(key);
            let numbers = Numbers::new(*encoding, dims, part, key);
            stream(
                part.bytes(),
                COPY_BLOCK,
                |offset, block| {
                    let pieces = block.par_chunks_mut(PIECE).enumerate();
                    pieces.for_each(|(i, out)| numbers.fill(offset + (i * PIECE) as u64, out));
                    Ok(())
                },
                |offset, block| {
                    hasher.update_rayon(block);
                    consume(place + offset, block)?;
                    monitor.advance(block.len() as u64)
                },
            )?;
        }
        digests.push(*hasher.finalize().as_bytes());
    }
    monitor.end();
    Ok(digests)
}

/// What the numbers of a stored tensor are like.
#[derive(Clone, Copy)]
enum Kind {
    /// Bytes of any value: codes.
    Codes,
    /// Nibbles of 7 and 8, the middle of 4-bit codes; the high one of every `row`-th byte is 0 if
    /// there is a `gap`.
    Nibbles { row: u64, gap: bool },
    /// Uniform between `least` and `least + span`.
    Uniform { dtype: DType, least: f32, span: f32 },
}

/// A stored tensor of random numbers.
struct Numbers {
    kind: Kind,
    key: u64,
}

impl Numbers {
    fn new(encoding: Encoding, dims: &[u32], part: &Part, key: u64) -> Self {
        let columns = dims.last().copied().unwrap_or(1);
        let deviation = 1.0 / (columns as f32).sqrt();
        let around = |middle: f32, share: f32| Kind::Uniform {
            dtype: part.dtype,
            least: middle * (1.0 - share),
            span: 2.0 * middle * share,
        };
        let kind = match encoding {
            Encoding::Dense(_) if dims.len() < 2 => around(1.0, 0.1),
            Encoding::Dense(dtype) => {
                let most = 3.0f32.sqrt() * deviation;
                Kind::Uniform { dtype, least: -most, span: 2.0 * most }
            }
            Encoding::Quantized { bits, group, offset, .. } => {
                let codes = (1u32 << bits) as f32;
                // Uniform codes have the deviation codes / √12.
                let scale = 12.0f32.sqrt() / codes * deviation;
                match (part.tensor.rsplit('.').next(), offset) {
                    (Some("scales"), _) => around(scale, 0.25),
                    (Some("zeros"), Offset::Zero(ZeroType::Nibble)) => {
                        let groups = u64::from(columns / group.max(1));
                        Kind::Nibbles { row: groups.div_ceil(2), gap: groups % 2 == 1 }
                    }
                    (Some("zeros"), Offset::Zero(ZeroType::U8)) => {
                        Kind::Uniform { dtype: DType::U8, least: codes / 2.0 - 1.0, span: 2.0 }
                    }
                    (Some("zeros"), _) => around((codes - 1.0) / 2.0, 0.05),
                    (Some("minimums"), _) => around(-scale * (codes - 1.0) / 2.0, 0.25),
                    _ => Kind::Codes,
                }
            }
        };
        Self { kind, key }
    }

    /// 64 random bits of a place.
    fn bits(&self, at: u64) -> u64 {
        mix(self.key ^ at)
    }

    /// Fills bytes that begin at an offset, a multiple of 8, of the tensor.
    fn fill(&self, offset: u64, out: &mut [u8]) {
        match self.kind {
            Kind::Codes => self.fill_words(offset, out, u64::to_le_bytes),
            Kind::Nibbles { row, gap } => {
                let zeros = |bits: u64| (bits & LOWEST_OF_NIBBLES) + SEVENS;
                self.fill_words(offset, out, |bits| zeros(bits).to_le_bytes());
                if gap {
                    let first = (row - 1 + row - offset % row) % row;
                    out.iter_mut()
                        .skip(first as usize)
                        .step_by(row as usize)
                        .for_each(|b| *b &= 15);
                }
            }
            Kind::Uniform { dtype, least, span } => {
                // 16 random bits each: finer than any half-width type.
                let number = |bits: u16| least + span * (f32::from(bits) / 65536.0);
                let at = offset / (4 * dtype.size());
                match dtype {
                    DType::F32 => self.fill_numbers(at, out, |x| number(x).to_le_bytes()),
                    DType::F16 => {
                        self.fill_numbers(at, out, |x| f16::from_f32(number(x)).to_le_bytes());
                    }
                    DType::BF16 => {
                        self.fill_numbers(at, out, |x| bf16::from_f32(number(x)).to_le_bytes());
                    }
                    DType::U8 => self.fill_numbers(at, out, |x| [number(x) as u8]),
                }
            }
        }
    }

    fn fill_words(&self, offset: u64, out: &mut [u8], word: impl Fn(u64) -> [u8; 8]) {
        for (i, bytes) in out.chunks_mut(8).enumerate() {
            let word = word(self.bits(offset / 8 + i as u64));
            bytes.copy_from_slice(&word[..bytes.len()]);
        }
    }
    /// Fills bytes with numbers, four for each word from index `at` on.
    fn fill_numbers<const N: usize>(
        &self,
        at: u64,
        out: &mut [u8],
        number: impl Fn(u16) -> [u8; N],
    ) {
        for (i, four) in out.chunks_mut(4 * N).enumerate() {
            let bits = self.bits(at + i as u64);
            for (lane, bytes) in four.chunks_exact_mut(N).enumerate() {
                bytes.copy_from_slice(&number((bits >> (16 * lane)) as u16));
            }
        }
    }
}

/// The lowest bit of each nibble.
const LOWEST_OF_NIBBLES: u64 = 0x1111_1111_1111_1111;
/// 7 in each nibble.
const SEVENS: u64 = 7 * LOWEST_OF_NIBBLES;

#[cfg(test)]
mod tests {
    use gemma4_format::encoding::{QuantizedBytes, decode_row};

    use super::*;

    const INT4: Encoding = Encoding::Quantized {
        bits: 4,
        group: 32,
        scale: DType::BF16,
        offset: Offset::Zero(ZeroType::Nibble),
    };

    /// All bytes of a weight's part.
    fn bytes(encoding: Encoding, dims: &[u32], part: usize, pieces: usize) -> Vec<u8> {
        let parts = encoding.parts("w", dims).expect("legal");
        let numbers = Numbers::new(encoding, dims, &parts[part], 7);
        let mut bytes = vec![0; parts[part].bytes() as usize];
        let chunks = bytes.chunks_mut(pieces).enumerate();
        chunks.for_each(|(i, out)| numbers.fill((i * pieces) as u64, out));
        bytes
    }

    /// Mean and deviation of the values of a weight, as a reader decodes them.
    fn moments(encoding: Encoding, dims: [u32; 2]) -> (f64, f64) {
        let [rows, columns] = dims.map(|d| d as usize);
        let parts: Vec<Vec<u8>> = (0..encoding.parts("w", &dims).expect("legal").len())
            .map(|part| bytes(encoding, &dims, part, 1 << 12))
            .collect();
        let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
        let mut row = vec![0.0; columns];
        let mut values = Vec::new();
        for i in 0..rows {
            match encoding {
                Encoding::Dense(dtype) => values
                    .extend((0..columns).map(|k| f64::from(dtype.read(parts[0], i * columns + k)))),
                Encoding::Quantized { .. } => {
                    let stored = QuantizedBytes::from_parts(encoding, &parts).expect("its parts");
                    decode_row(encoding, stored, i, &mut row);
                    values.extend(row.iter().map(|x| f64::from(*x)));
                }
            }
        }
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let square = values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / values.len() as f64;
        (mean, square.sqrt())
    }

    #[test]
    fn matrices_of_every_encoding_have_the_deviation_of_a_fresh_model() {
        let quantized =
            |bits, group, scale, offset| Encoding::Quantized { bits, group, scale, offset };
        for encoding in [
            Encoding::Dense(DType::F32),
            Encoding::Dense(DType::F16),
            Encoding::Dense(DType::BF16),
            INT4,
            quantized(8, 1024, DType::BF16, Offset::Symmetric),
            quantized(4, 32, DType::BF16, Offset::Zero(ZeroType::BF16)),
            quantized(4, 64, DType::F16, Offset::Zero(ZeroType::F16)),
            quantized(5, 32, DType::F16, Offset::Zero(ZeroType::U8)),
            quantized(4, 32, DType::F16, Offset::Minimum(DType::F16)),
            quantized(6, 16, DType::F32, Offset::Symmetric),
        ] {
            let (mean, deviation) = moments(encoding, [256, 1024]);
            let wanted = 1.0 / 32.0;
            assert!(mean.abs() < 0.03 * wanted, "{encoding:?}: mean {mean}");
            assert!((deviation / wanted - 1.0).abs() < 0.05, "{encoding:?}: {deviation}");
        }
    }

    #[test]
    fn bytes_do_not_depend_on_how_they_are_cut() {
        // Three groups: the high nibble of every second byte of the zero points is a gap.
        for part in 0..3 {
            let dims = [100, 96];
            let whole = bytes(INT4, &dims, part, 1 << 20);
            assert_eq!(bytes(INT4, &dims, part, 64), whole);
            if part == 2 {
                assert!(whole.chunks_exact(2).all(|zeros| zeros[1] < 16));
                let nibbles = whole.iter().flat_map(|b| [b & 15, b >> 4]);
                assert!(nibbles.filter(|n| *n > 0).all(|n| n == 7 || n == 8));
            }
        }
    }
}
