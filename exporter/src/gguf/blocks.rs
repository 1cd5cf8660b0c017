//! ggml's tensor types, and their blocks as parts of an [`Encoding`].
//!
//! A block holds 32 or 256 neighbouring numbers of a row. Each becomes codes, scales and minimums
//! of an encoding that has exactly the block's values: scales of K-quants are products of a
//! float16 and a 6- or 8-bit number, formed in float32 as ggml's `dequantize_row_*` do. Block
//! layouts are those of ggml's `ggml-common.h`.

use gemma4_format::{DType, Encoding, Offset};
use half::f16;

/// Type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
}

/// Size of a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    /// Numbers in it.
    pub(super) elements: u32,
    /// Bytes of it.
    pub(super) bytes: u32,
}

/// Most numbers of a block.
const LARGEST: usize = 256;

impl Kind {
    /// The type of that code, or the name of one that is not supported.
    pub(super) fn from_code(code: u32) -> Result<Self, &'static str> {
        Ok(match code {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            6 => Self::Q5_0,
            7 => Self::Q5_1,
            8 => Self::Q8_0,
            12 => Self::Q4K,
            13 => Self::Q5K,
            14 => Self::Q6K,
            30 => Self::Bf16,
            9 => return Err("Q8_1"),
            10 => return Err("Q2_K"),
            11 => return Err("Q3_K"),
            15 => return Err("Q8_K"),
            16 => return Err("IQ2_XXS"),
            17 => return Err("IQ2_XS"),
            18 => return Err("IQ3_XXS"),
            19 => return Err("IQ1_S"),
            20 => return Err("IQ4_NL"),
            21 => return Err("IQ3_S"),
            22 => return Err("IQ2_S"),
            23 => return Err("IQ4_XS"),
            24..=27 => return Err("whole numbers"),
            28 => return Err("F64"),
            29 => return Err("IQ1_M"),
            34 => return Err("TQ1_0"),
            35 => return Err("TQ2_0"),
            39 => return Err("MXFP4"),
            40 => return Err("NVFP4"),
            _ => return Err("a type that this build does not know"),
        })
    }

    /// As ggml calls it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
        }
    }

    pub(super) fn block(self) -> Block {
        let (elements, bytes) = match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::Bf16 => (1, 2),
            Self::Q4_0 => (32, 2 + 16),
            Self::Q4_1 => (32, 2 + 2 + 16),
            Self::Q5_0 => (32, 2 + 4 + 16),
            Self::Q5_1 => (32, 2 + 2 + 4 + 16),
            Self::Q8_0 => (32, 2 + 32),
            Self::Q4K => (256, 2 + 2 + 12 + 128),
            Self::Q5K => (256, 2 + 2 + 12 + 32 + 128),
            Self::Q6K => (256, 128 + 64 + 16 + 2),
        };
        Block { elements, bytes }
    }

    /// The encoding that holds its values exactly.
    pub(super) fn encoding(self) -> Encoding {
        let quantized =
            |bits, group, scale, offset| Encoding::Quantized { bits, group, scale, offset };
        let (half, single) = (Offset::Minimum(DType::F16), Offset::Minimum(DType::F32));
        match self {
            Self::F32 => Encoding::Dense(DType::F32),
            Self::F16 => Encoding::Dense(DType::F16),
            Self::Bf16 => Encoding::Dense(DType::BF16),
            Self::Q4_0 => quantized(4, 32, DType::F16, Offset::Symmetric),
            Self::Q4_1 => quantized(4, 32, DType::F16, half),
            Self::Q5_0 => quantized(5, 32, DType::F16, Offset::Symmetric),
            Self::Q5_1 => quantized(5, 32, DType::F16, half),
            Self::Q8_0 => quantized(8, 32, DType::F16, Offset::Symmetric),
            Self::Q4K => quantized(4, 32, DType::F32, single),
            Self::Q5K => quantized(5, 32, DType::F32, single),
            Self::Q6K => quantized(6, 16, DType::F32, Offset::Symmetric),
        }
    }

    /// Bytes that a block gives to each part of a quantized encoding, in the order of
    /// [`Encoding::parts`]. Rows are whole blocks, so a part is its blocks' bytes in turn.
    fn strides(self) -> Vec<(Part, usize)> {
        let elements = self.block().elements as usize;
        let Encoding::Quantized { bits, group, scale, offset } = self.encoding() else {
            return Vec::new();
        };
        let groups = elements / group as usize;
        let low = if bits == 8 { 8 } else { 4 };
        let mut strides = vec![(Part::Codes, elements * low / 8)];
        if matches!(bits, 5 | 6) {
            strides.push((Part::High, elements * usize::from(bits - 4) / 8));
        }
        strides.push((Part::Scales, groups * scale.size() as usize));
        if let Offset::Minimum(dtype) = offset {
            strides.push((Part::Minimums, groups * dtype.size() as usize));
        }
        strides
    }

    /// A converter of blocks into part `part` of the encoding; `None` for dense numbers, which
    /// are stored as they are.
    ///
    /// # Panics
    /// If the encoding has no such part.
    pub(super) fn converter(self, part: usize) -> Option<Converter> {
        if matches!(self.encoding(), Encoding::Dense(_)) {
            return None;
        }
        let (part, stride) = self.strides()[part];
        Some(Converter { kind: self, part, stride })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Codes,
    High,
    Scales,
    Minimums,
}

/// Turns blocks into the bytes of one part.
#[derive(Clone, Copy, Debug)]
pub(super) struct Converter {
    kind: Kind,
    part: Part,
    /// Bytes of the part that a block gives.
    pub(super) stride: usize,
}

impl Converter {
    /// Converts one block into `stride` bytes.
    pub(super) fn convert(&self, block: &[u8], out: &mut [u8]) {
        let mut codes = [0; LARGEST];
        let elements = self.kind.block().elements as usize;
        match self.part {
            Part::Codes => {
                read_codes(self.kind, block, &mut codes);
                if self.kind == Kind::Q8_0 {
                    out.copy_from_slice(&codes[..elements]);
                } else {
                    for (byte, pair) in out.iter_mut().zip(codes.as_chunks().0) {
                        let [even, odd] = *pair;
                        *byte = even & 15 | odd << 4;
                    }
                }
            }
            Part::High => {
                read_codes(self.kind, block, &mut codes);
                let bits = if self.kind == Kind::Q6K { 2 } else { 1 };
                for (byte, codes) in out.iter_mut().zip(codes.chunks_exact(8 / bits)) {
                    let shifted =
                        codes.iter().enumerate().map(|(at, code)| (code >> 4) << (at * bits));
                    *byte = shifted.fold(0, |byte, high| byte | high);
                }
            }
            Part::Scales => scales(self.kind, block, out),
            Part::Minimums => minimums(self.kind, block, out),
        }
    }
}

/// The codes of a block, in the order of its numbers.
fn read_codes(kind: Kind, block: &[u8], codes: &mut [u8; LARGEST]) {
    match kind {
        Kind::F32 | Kind::F16 | Kind::Bf16 => {}
        Kind::Q4_0 => nibbles(&block[2..], codes),
        Kind::Q4_1 => nibbles(&block[4..], codes),
        Kind::Q5_0 => fives(&block[2..], codes),
        Kind::Q5_1 => fives(&block[4..], codes),
        // Signed codes: the middle one is 128 here.
        Kind::Q8_0 => {
            for (code, byte) in codes.iter_mut().zip(&block[2..34]) {
                *code = byte ^ 0x80;
            }
        }
        Kind::Q4K => {
            for (codes, bytes) in codes.chunks_exact_mut(64).zip(block[16..].chunks_exact(32)) {
                nibbles_of(bytes, codes);
            }
        }
        Kind::Q5K => {
            let (high, low) = block[16..].split_at(32);
            let chunks = codes.chunks_exact_mut(64).zip(low.chunks_exact(32));
            for (at, (codes, bytes)) in chunks.enumerate() {
                nibbles_of(bytes, codes);
                for (column, code) in codes.iter_mut().enumerate() {
                    let bit = 2 * at + column / 32;
                    *code |= (high[column % 32] >> bit & 1) << 4;
                }
            }
        }
        Kind::Q6K => {
            let (low, high) = (&block[..128], &block[128..192]);
            for (at, code) in codes.iter_mut().enumerate() {
                let (half, quarter, column) = (at / 128, at % 128 / 32, at % 32);
                let nibble =
                    low[64 * half + 32 * (quarter % 2) + column] >> (4 * (quarter / 2)) & 15;
                let rest = high[32 * half + column] >> (2 * quarter) & 3;
                *code = nibble | rest << 4;
            }
        }
    }
}

/// 16 bytes whose low nibbles are codes 0..16 and whose high nibbles are codes 16..32.
fn nibbles(bytes: &[u8], codes: &mut [u8; LARGEST]) {
    nibbles_of(&bytes[..16], &mut codes[..32]);
}

fn nibbles_of(bytes: &[u8], codes: &mut [u8]) {
    let (first, second) = codes.split_at_mut(bytes.len());
    for ((first, second), byte) in first.iter_mut().zip(second).zip(bytes) {
        *first = byte & 15;
        *second = byte >> 4;
    }
}

/// 32 fifth bits, then 16 bytes of nibbles.
fn fives(bytes: &[u8], codes: &mut [u8; LARGEST]) {
    nibbles(&bytes[4..], codes);
    for (at, code) in codes[..32].iter_mut().enumerate() {
        *code |= (bytes[at / 8] >> (at % 8) & 1) << 4;
    }
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

fn scales(kind: Kind, block: &[u8], out: &mut [u8]) {
    match kind {
        Kind::Q4K | Kind::Q5K => {
            let d = half_at(block, 0);
            let pairs = six_bit_pairs(&block[4..16]);
            for (out, (scale, _)) in out.as_chunks_mut().0.iter_mut().zip(pairs) {
                *out = (d * f32::from(scale)).to_le_bytes();
            }
        }
        Kind::Q6K => {
            let d = half_at(block, 208);
            for (out, scale) in out.as_chunks_mut().0.iter_mut().zip(&block[192..208]) {
                *out = (d * f32::from(scale.cast_signed())).to_le_bytes();
            }
        }
        _ => out.copy_from_slice(&block[..2]),
    }
}

fn minimums(kind: Kind, block: &[u8], out: &mut [u8]) {
    if matches!(kind, Kind::Q4K | Kind::Q5K) {
        let d = half_at(block, 2);
        let pairs = six_bit_pairs(&block[4..16]);
        for (out, (_, minimum)) in out.as_chunks_mut().0.iter_mut().zip(pairs) {
            *out = (-(d * f32::from(minimum))).to_le_bytes();
        }
    } else {
        out.copy_from_slice(&block[2..4]);
    }
}

/// Eight scales and eight minimums of 6 bits in 12 bytes: four of each with their own byte, the
/// others with a nibble in the last four bytes and two bits above the first eight.
fn six_bit_pairs(bytes: &[u8]) -> impl Iterator<Item = (u8, u8)> {
    (0..8).map(|at| match at {
        0..4 => (bytes[at] & 63, bytes[at + 4] & 63),
        _ => {
            let low = bytes[at + 4];
            (low & 15 | bytes[at - 4] >> 6 << 4, low >> 4 | bytes[at] >> 6 << 4)
        }
    })
}
