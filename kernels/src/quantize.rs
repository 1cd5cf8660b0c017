//! Quantizing rows of a weight, before there is a program.

use gemma4_format::encoding::ZeroType;
use gemma4_format::plan::Count;
use gemma4_format::{DType, Offset};

use crate::contract::{args, source};
use crate::{Amount, Kernel};

/// Bytes that the kernel writes for each row beside its codes, scales and zero points: the sums of
/// squares of its values and of what they lost, both float64, the largest loss, a float32, and
/// whether the row was refused, 32 bits: it has a number that is not finite, or too large.
pub const QUANTIZED_ROW_BYTES: usize = 24;

/// The kernel that quantizes rows of any weight; a block takes a row.
///
/// `source` is `[rows, k]` of `source_type`, and `codes` as many bytes: with 8 bits the part of the
/// encoding, else scratch. The others are parts of the encoding; `zeros` is scratch of a byte a
/// group where zero points take 4 bits, which go to `nibbles`. What the encoding lacks may be null.
/// `half_quadratic` is 0 for min-max. Types are those of [`number_type`] and [`zero_type`].
pub fn quantize() -> Kernel {
    Kernel {
        source: source!("quantize.cu"),
        defines: Vec::new(),
        symbol: "quantize",
        grid: [Count::Rows { per: 1, times: 1 }, Count::Fixed(1), Count::Fixed(1)],
        block: 256,
        shared: 0,
        args: args![
            Read source, Write codes, Write low, Write high, Write scales, Write zeros,
            Write nibbles, Write rows, U32 k, U32 group, U32 code_bits, U32 source_type,
            U32 scale_type, U32 zero_type, U32 half_quadratic,
        ],
        dependent_launch: false,
        bytes: Amount::default(),
        operations: Amount::default(),
    }
}

/// The number of a type of weights or scales.
pub fn number_type(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::BF16 => 2,
        DType::U8 => 3,
    }
}

/// The number of a type of zero points; `None` for minimums, which the kernel does not make.
pub fn zero_type(offset: Offset) -> Option<u32> {
    match offset {
        Offset::Zero(ZeroType::F16) => Some(number_type(DType::F16)),
        Offset::Zero(ZeroType::BF16) => Some(number_type(DType::BF16)),
        Offset::Zero(ZeroType::U8) => Some(number_type(DType::U8)),
        Offset::Zero(ZeroType::Nibble) => Some(4),
        Offset::Symmetric => Some(5),
        Offset::Minimum(_) => None,
    }
}
