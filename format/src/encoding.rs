//! How the numbers of a weight lie in a `.ptd` file.
//!
//! A weight is dense (one tensor under its own name) or quantized in groups along its last
//! dimension `K`. A quantized weight `NAME` of dims `[N, K]` is two to four tensors:
//!
//! | tensor | dtype | dims | meaning |
//! |---|---|---|---|
//! | `NAME.codes` | U8 | `[N, ceil(K·b/8)]` | low `b = min(bits, 4)` bits of each code for 4, 5, 6 bits: two codes a byte, even column in the low nibble; whole codes for 8 bits |
//! | `NAME.codes_high` | U8 | `[N, ceil(K·(bits−4)/8)]` | 5 and 6 bits only: the remaining high bits, little-endian within a byte |
//! | `NAME.scales` | F32, F16 or BF16 | `[N, K/group]` | scale of each group |
//! | `NAME.zeros` | U8, F16 or BF16 | `[N, K/group]`, for nibbles `[N, ceil(K/group/2)]` | zero point in units of the code |
//! | `NAME.minimums` | F32, F16 or BF16 | `[N, K/group]` | additive minimum |
//!
//! Codes are unsigned, `0 .. 2^bits`. With `s` the group's scale, in float32 arithmetic:
//!
//! | offset | value |
//! |---|---|
//! | [`Offset::Symmetric`] | `(q − 2^(bits−1)) · s` |
//! | [`Offset::Zero`] | `(q − zero) · s` |
//! | [`Offset::Minimum`] | `q · s + minimum` |

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// Element type of a stored tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16.
    BF16,
    /// Unsigned byte.
    U8,
}

impl DType {
    /// Bytes of one element.
    pub fn size(self) -> u64 {
        match self {
            DType::F32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::U8 => 1,
        }
    }

    /// The name that safetensors headers use.
    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "F32",
            DType::F16 => "F16",
            DType::BF16 => "BF16",
            DType::U8 => "U8",
        }
    }

    /// The dtype of a safetensors tensor, if it is one that programs use.
    pub fn from_safetensors(dtype: safetensors::Dtype) -> Option<Self> {
        Some(match dtype {
            safetensors::Dtype::F32 => DType::F32,
            safetensors::Dtype::F16 => DType::F16,
            safetensors::Dtype::BF16 => DType::BF16,
            safetensors::Dtype::U8 => DType::U8,
            _ => return None,
        })
    }

    /// Reads element `index` of little-endian `bytes` as float32 (exact for every dtype).
    ///
    /// # Panics
    /// If the element lies outside `bytes`.
    pub fn read(self, bytes: &[u8], index: usize) -> f32 {
        match self {
            DType::F32 => {
                let at = index * 4;
                f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
            }
            DType::F16 => f16::from_le_bytes([bytes[index * 2], bytes[index * 2 + 1]]).to_f32(),
            DType::BF16 => bf16::from_le_bytes([bytes[index * 2], bytes[index * 2 + 1]]).to_f32(),
            DType::U8 => f32::from(bytes[index]),
        }
    }
}

/// What is added to or subtracted from a code before or after scaling.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Offset {
    /// The zero point is the middle code, `2^(bits−1)`; nothing is stored.
    Symmetric,
    /// A zero point per group, in units of the code.
    Zero(ZeroType),
    /// An additive minimum per group, in units of the weight.
    Minimum(DType),
}

/// How a zero point is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ZeroType {
    /// A whole number 0..=15, two to a byte, even group in the low nibble.
    Nibble,
    /// A whole number 0..=255.
    U8,
    /// Any finite float16.
    F16,
    /// Any finite bfloat16.
    BF16,
}

/// How a weight is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Encoding {
    /// Plain numbers, row-major.
    Dense(DType),
    /// Codes in groups along the last dimension.
    Quantized {
        /// Bits of a code: 4, 5, 6 or 8.
        bits: u8,
        /// Codes that share a scale; divides the last dimension.
        group: u32,
        /// Type of the scales: F32, F16 or BF16.
        scale: DType,
        /// Where zero lies.
        offset: Offset,
    },
}

/// One stored tensor of a weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Name in the data file.
    pub tensor: String,
    /// Element type.
    pub dtype: DType,
    /// Extents, outermost first.
    pub dims: Vec<u64>,
}

impl Part {
    /// Bytes of the tensor.
    pub fn bytes(&self) -> u64 {
        self.dims.iter().product::<u64>() * self.dtype.size()
    }
}

impl Encoding {
    /// The stored tensors of weight `name`, in the order in which its digest reads them.
    ///
    /// Total: any encoding and any dims give parts or an error.
    pub fn parts(&self, name: &str, dims: &[u32]) -> Result<Vec<Part>> {
        let elements = dims.iter().try_fold(1u64, |n, d| n.checked_mul(u64::from(*d)));
        match elements {
            None | Some(0) => return Err(Error::weight(name, format!("impossible dims {dims:?}"))),
            Some(n) if n > 1 << 40 => {
                return Err(Error::weight(name, format!("dims {dims:?} are too large")));
            }
            Some(_) => {}
        }
        if dims.is_empty() || dims.len() > 4 {
            return Err(Error::weight(name, format!("has {} dimensions", dims.len())));
        }
        let (bits, group, scale, offset) = match *self {
            Encoding::Dense(DType::U8) => {
                return Err(Error::weight(name, "plain weights are F32, F16 or BF16"));
            }
            Encoding::Dense(dtype) => {
                let dims = dims.iter().map(|d| u64::from(*d)).collect();
                return Ok(vec![Part { tensor: name.to_owned(), dtype, dims }]);
            }
            Encoding::Quantized { bits, group, scale, offset } => (bits, group, scale, offset),
        };
        let &[n, k] = dims else {
            return Err(Error::weight(name, "a quantized weight has two dimensions"));
        };
        if !matches!(bits, 4 | 5 | 6 | 8) {
            return Err(Error::weight(name, format!("{bits}-bit codes are not supported")));
        }
        if group == 0 || k % group != 0 {
            return Err(Error::weight(name, format!("K = {k} is no multiple of group {group}")));
        }
        if scale == DType::U8 || matches!(offset, Offset::Minimum(DType::U8)) {
            return Err(Error::weight(name, "scales and minimums are F32, F16 or BF16"));
        }
        if bits != 4 && offset == Offset::Zero(ZeroType::Nibble) {
            return Err(Error::weight(name, "nibble zero points need 4-bit codes"));
        }
        let (n, k) = (u64::from(n), u64::from(k));
        let groups = k / u64::from(group);
        let part = |suffix: &str, dtype, columns| Part {
            tensor: format!("{name}.{suffix}"),
            dtype,
            dims: vec![n, columns],
        };
        let high_bits = u64::from(bits.saturating_sub(4));
        let mut parts = vec![match bits {
            8 => part("codes", DType::U8, k),
            _ => part("codes", DType::U8, k.div_ceil(2)),
        }];
        if matches!(bits, 5 | 6) {
            parts.push(part("codes_high", DType::U8, (k * high_bits).div_ceil(8)));
        }
        parts.push(part("scales", scale, groups));
        match offset {
            Offset::Symmetric => {}
            Offset::Zero(ZeroType::Nibble) => {
                parts.push(part("zeros", DType::U8, groups.div_ceil(2)));
            }
            Offset::Zero(ZeroType::U8) => parts.push(part("zeros", DType::U8, groups)),
            Offset::Zero(ZeroType::F16) => parts.push(part("zeros", DType::F16, groups)),
            Offset::Zero(ZeroType::BF16) => parts.push(part("zeros", DType::BF16, groups)),
            Offset::Minimum(dtype) => parts.push(part("minimums", dtype, groups)),
        }
        Ok(parts)
    }

    /// Stored bytes of a weight of these dims.
    pub fn bytes(&self, dims: &[u32]) -> Result<u64> {
        Ok(self.parts("", dims)?.iter().map(Part::bytes).sum())
    }

    /// Stored bits per number, scales and zero points included.
    pub fn bits_per_weight(&self, dims: &[u32]) -> Result<f64> {
        let elements: f64 = dims.iter().map(|d| f64::from(*d)).product();
        Ok(self.bytes(dims)? as f64 * 8.0 / elements)
    }

    /// A short name: `bf16`, or `int4 g32 (bf16 scale, nibble zero)`.
    pub fn describe(&self) -> String {
        match self {
            Encoding::Dense(dtype) => dtype.name().to_lowercase(),
            Encoding::Quantized { bits, group, scale, offset } => {
                let scale = scale.name().to_lowercase();
                let offset = match offset {
                    Offset::Symmetric => String::new(),
                    Offset::Zero(ZeroType::Nibble) => ", nibble zero".to_owned(),
                    Offset::Zero(ZeroType::U8) => ", u8 zero".to_owned(),
                    Offset::Zero(ZeroType::F16) => ", f16 zero".to_owned(),
                    Offset::Zero(ZeroType::BF16) => ", bf16 zero".to_owned(),
                    Offset::Minimum(d) => format!(", {} minimum", d.name().to_lowercase()),
                };
                format!("int{bits} g{group} ({scale} scale{offset})")
            }
        }
    }
}

/// The bytes of one quantized weight, as [`Encoding::parts`] lays them out.
#[derive(Clone, Copy, Debug)]
pub struct QuantizedBytes<'a> {
    /// Tensor `codes`.
    pub codes: &'a [u8],
    /// Tensor `codes_high`, empty unless codes have 5 or 6 bits.
    pub codes_high: &'a [u8],
    /// Tensor `scales`.
    pub scales: &'a [u8],
    /// Tensor `zeros` or `minimums`, empty for symmetric encodings.
    pub offsets: &'a [u8],
}

impl<'a> QuantizedBytes<'a> {
    /// Names the parts of a quantized weight, given in the order of [`Encoding::parts`].
    ///
    /// Returns `None` for a dense encoding or another number of parts.
    pub fn from_parts(encoding: Encoding, parts: &[&'a [u8]]) -> Option<Self> {
        let Encoding::Quantized { bits, offset, .. } = encoding else { return None };
        let mut rest = parts.iter().copied();
        let codes = rest.next()?;
        let codes_high = if matches!(bits, 5 | 6) { rest.next()? } else { &[] };
        let scales = rest.next()?;
        let offsets = if offset == Offset::Symmetric { &[] } else { rest.next()? };
        rest.next().is_none().then_some(Self { codes, codes_high, scales, offsets })
    }
}

/// Decodes row `row` of a quantized weight `[N, K]` into `out` (length `K`).
///
/// This is the contract that every faster kernel is tested against.
///
/// # Panics
/// If `bytes` are shorter than [`Encoding::parts`] says, or `encoding` is dense.
pub fn decode_row(encoding: Encoding, bytes: QuantizedBytes<'_>, row: usize, out: &mut [f32]) {
    let Encoding::Quantized { bits, group, scale, offset } = encoding else {
        panic!("decode_row needs a quantized weight");
    };
    let k = out.len();
    let group = group as usize;
    let groups = k / group;
    let high_bits = usize::from(bits.saturating_sub(4));
    let code_stride = if bits == 8 { k } else { k.div_ceil(2) };
    let high_stride = (k * high_bits).div_ceil(8);
    for (column, value) in out.iter_mut().enumerate() {
        let code = if bits == 8 {
            u32::from(bytes.codes[row * code_stride + column])
        } else {
            let byte = u32::from(bytes.codes[row * code_stride + column / 2]);
            let low = (byte >> (4 * (column % 2))) & 15;
            let high = if high_bits == 0 {
                0
            } else {
                let bit = column * high_bits;
                let at = row * high_stride + bit / 8;
                let mask = (1u32 << high_bits) - 1;
                let word = u32::from(bytes.codes_high[at])
                    | u32::from(bytes.codes_high.get(at + 1).copied().unwrap_or(0)) << 8;
                (word >> (bit % 8)) & mask
            };
            low | high << 4
        };
        let at = column / group;
        let s = scale.read(bytes.scales, row * groups + at);
        let q = code as f32;
        *value = match offset {
            Offset::Symmetric => (q - (1u32 << (bits - 1)) as f32) * s,
            Offset::Zero(zero) => (q - read_zero(zero, bytes.offsets, row, at, groups)) * s,
            Offset::Minimum(dtype) => q * s + dtype.read(bytes.offsets, row * groups + at),
        };
    }
}

/// The zero point of group `at` of row `row`, for rows of `groups` groups.
///
/// # Panics
/// If it lies outside `bytes`.
pub fn read_zero(zero: ZeroType, bytes: &[u8], row: usize, at: usize, groups: usize) -> f32 {
    match zero {
        ZeroType::Nibble => {
            let byte = bytes[row * groups.div_ceil(2) + at / 2];
            f32::from((byte >> (4 * (at % 2))) & 15)
        }
        ZeroType::U8 => f32::from(bytes[row * groups + at]),
        ZeroType::F16 => DType::F16.read(bytes, row * groups + at),
        ZeroType::BF16 => DType::BF16.read(bytes, row * groups + at),
    }
}
