//! The packed layout of a weight on the device (`cu/packed.cuh`) and the kernel that writes it.

use gemma4_format::encoding::{DType, Encoding, Offset, ZeroType};
use gemma4_format::plan::Count;

use crate::contract::{args, source};
use crate::{Amount, Kernel, Unsupported};

/// Rows of a tile: packed rows are padded to a multiple of it, and matrices that share a packed
/// weight begin at one.
pub const TILE_ROWS: u32 = 16;
/// Columns of a unit: packed columns are padded to a multiple of it.
pub const UNIT_COLUMNS: u32 = 128;

/// Bits of a stored code of a packed weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codes {
    /// Unsigned, 4 bits.
    Nibble,
    /// Signed, 8 bits (5, 6 and 8 bits in the data file; 4 where a matrix of more bits shares the
    /// weight). The middle code is 0, but codes with a minimum are stored as they are.
    Byte,
    /// bfloat16 numbers, not quantized.
    Bf16,
}

impl Codes {
    fn bits(self) -> u32 {
        match self {
            Codes::Nibble => 4,
            Codes::Byte => 8,
            Codes::Bf16 => 16,
        }
    }
}

/// What is added to the codes of a packed weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PackedOffset {
    /// Nothing: the zero point is the middle code.
    None,
    /// A zero point of 4 bits per group.
    Nibble,
    /// A zero point per group, a number of this type.
    Zero(DType),
    /// An additive minimum per group.
    Minimum(DType),
}

/// How a weight lies on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packed {
    /// Rows, of all merged matrices together.
    pub n: u32,
    /// Columns.
    pub k: u32,
    /// Stored codes.
    pub codes: Codes,
    /// Columns that share a scale: 16 (only of [`Codes::Byte`]), 32, 64 or 128; 0 if a whole row does.
    pub group: u32,
    /// Type of the scales.
    pub scale: DType,
    /// Zero points or minimums.
    pub offset: PackedOffset,
}

/// The number that `cu/common.cuh` gives a type.
pub(crate) fn type_code(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "0",
        DType::F16 => "1",
        DType::BF16 => "2",
        DType::U8 => "3",
    }
}

impl Packed {
    /// The packed layout of a weight `[n, k]` that is stored as `encoding`.
    pub fn new(encoding: Encoding, n: u32, k: u32) -> Result<Self, Unsupported> {
        let unsupported = |reason: String| Unsupported { kernel: "linear_few", reason };
        if n == 0 || k == 0 {
            return Err(unsupported(format!("a weight of dims [{n}, {k}] is empty")));
        }
        let (bits, group, scale, offset) = match encoding {
            Encoding::Dense(DType::BF16) => {
                return Ok(Self {
                    n,
                    k,
                    codes: Codes::Bf16,
                    group: 0,
                    scale: DType::BF16,
                    offset: PackedOffset::None,
                });
            }
            Encoding::Dense(dtype) => {
                let name = dtype.name();
                return Err(unsupported(format!("dense weights must be BF16, not {name}")));
            }
            Encoding::Quantized { bits, group, scale, offset } => (bits, group, scale, offset),
        };
        let codes = if bits == 4 { Codes::Nibble } else { Codes::Byte };
        let group = match group {
            32 | 64 => group,
            16 if codes == Codes::Byte => group,
            // A scale of a whole row is applied once, after all sums.
            whole
                if whole == k && codes == Codes::Byte && !matches!(offset, Offset::Minimum(_)) =>
            {
                0
            }
            multiple if multiple % UNIT_COLUMNS == 0 => UNIT_COLUMNS,
            other => {
                return Err(unsupported(format!(
                    "groups of {other} columns: known are 32, 64, multiples of 128, and for codes \
                     of more than 4 bits 16 and whole rows"
                )));
            }
        };
        let offset = match (offset, codes) {
            (Offset::Symmetric, _) => PackedOffset::None,
            (Offset::Zero(ZeroType::Nibble), _) => PackedOffset::Nibble,
            // Moving the codes to the middle moves the zero point, out of what 16 bits hold.
            (Offset::Zero(_), Codes::Byte) => PackedOffset::Zero(DType::F32),
            (Offset::Zero(ZeroType::F16), _) => PackedOffset::Zero(DType::F16),
            (Offset::Zero(ZeroType::U8 | ZeroType::BF16), _) => PackedOffset::Zero(DType::BF16),
            // Unsigned, they would not fit into signed bytes.
            (Offset::Minimum(_), Codes::Byte) if bits == 8 => {
                return Err(unsupported("8-bit codes with a minimum".to_owned()));
            }
            (Offset::Minimum(dtype), _) => PackedOffset::Minimum(dtype),
        };
        Ok(Self { n, k, codes, group, scale, offset })
    }

    /// The layout of a weight `[n, k]` whose rows are stored in several ways: the smallest that
    /// holds the numbers of each exactly.
    ///
    /// Matrices of one layout keep it. Otherwise codes take 8 bits, groups are the smallest, types
    /// of scales and minimums that differ become float32, and all rows have a zero point or a
    /// minimum where some do.
    ///
    /// # Errors
    /// [`Unsupported`] if there is none: dense beside quantized matrices, or zero points beside
    /// minimums.
    pub fn common(encodings: &[Encoding], n: u32, k: u32) -> Result<Self, Unsupported> {
        let mut layouts = encodings.iter().map(|encoding| Self::new(*encoding, n, k));
        let first = layouts.next().unwrap_or_else(|| {
            let reason = "a weight of no matrices".to_owned();
            Err(Unsupported { kernel: "linear_few", reason })
        })?;
        layouts.try_fold(first, |common, layout| {
            let layout = layout?;
            common.join(&layout).ok_or_else(|| Unsupported {
                kernel: "linear_few",
                reason:
                    "no layout holds both zero points and minimums, or both dense and quantized \
                         rows"
                        .to_owned(),
            })
        })
    }

    /// The smallest layout that holds what both do.
    fn join(&self, other: &Self) -> Option<Self> {
        use PackedOffset::{Minimum, Nibble, None as Nothing, Zero};
        if self == other {
            return Some(*self);
        }
        if self.codes == Codes::Bf16 || other.codes == Codes::Bf16 {
            return None;
        }
        let in_units = |group| if group == 0 { UNIT_COLUMNS } else { group };
        let group = match self.group == other.group {
            true => self.group,
            false => in_units(self.group).min(in_units(other.group)),
        };
        let wider = |a: DType, b: DType| if a == b { a } else { DType::F32 };
        let offset = match (self.offset, other.offset) {
            (Nothing, Nothing) => Nothing,
            (Minimum(a), Minimum(b)) => Minimum(wider(a, b)),
            (Minimum(dtype), Nothing) | (Nothing, Minimum(dtype)) => Minimum(dtype),
            (Nothing | Nibble | Zero(_), Nothing | Nibble | Zero(_)) => Zero(DType::F32),
            (Minimum(_), Nibble | Zero(_)) | (Nibble | Zero(_), Minimum(_)) => return None,
        };
        let scale = wider(self.scale, other.scale);
        Some(Self { codes: Codes::Byte, group, scale, offset, ..*self })
    }

    /// Tiles of 16 rows.
    pub fn tiles(&self) -> u32 {
        self.n.div_ceil(TILE_ROWS)
    }

    /// Units of 128 columns along a row.
    pub fn units(&self) -> u32 {
        self.k.div_ceil(UNIT_COLUMNS)
    }

    /// Groups of a unit that have their own scale.
    pub(crate) fn groups(&self) -> u32 {
        if self.codes == Codes::Bf16 || self.group == 0 { 0 } else { UNIT_COLUMNS / self.group }
    }

    /// Bytes of a unit of 16 rows and 128 columns.
    pub fn unit_bytes(&self) -> u32 {
        let numbers = TILE_ROWS * self.groups();
        let offsets = match self.offset {
            PackedOffset::None => 0,
            PackedOffset::Nibble => numbers / 2,
            PackedOffset::Zero(dtype) | PackedOffset::Minimum(dtype) => {
                numbers * dtype.size() as u32
            }
        };
        let scales = numbers * self.scale.size() as u32;
        let codes = TILE_ROWS * UNIT_COLUMNS * self.codes.bits() / 8;
        (codes + scales + offsets).next_multiple_of(16)
    }

    /// Bytes of the packed weight; its address must be a multiple of 128.
    pub fn bytes(&self) -> u64 {
        let units = u64::from(self.tiles()) * u64::from(self.units());
        let rows = u64::from(self.tiles() * TILE_ROWS);
        let row_scales = if self.codes == Codes::Byte && self.group == 0 { rows * 8 } else { 0 };
        units * u64::from(self.unit_bytes()) + row_scales
    }

    /// Macros of `cu/packed.cuh`.
    pub(crate) fn defines(&self) -> Vec<(&'static str, String)> {
        let (offset, offset_type) = match self.offset {
            PackedOffset::None => ("0", "0"),
            PackedOffset::Nibble => ("1", "0"),
            PackedOffset::Zero(dtype) => ("2", type_code(dtype)),
            PackedOffset::Minimum(dtype) => ("3", type_code(dtype)),
        };
        vec![
            ("K", self.k.to_string()),
            ("BITS", self.codes.bits().to_string()),
            ("GROUP", self.group.to_string()),
            ("SCALE", type_code(self.scale).to_owned()),
            ("OFFSET", offset.to_owned()),
            ("OFFSET_TYPE", offset_type.to_owned()),
        ]
    }
}

/// How the rows of a stored matrix, or of two, follow one another in a packed weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// In order. Both sources of the kernel are the same matrix.
    Rows,
    /// Eight rows of the first matrix (gate), eight of the second (up), and so on, as the GEGLU
    /// epilogue wants them.
    Turns,
    /// The rows that [`Order::Turns`] takes from the first matrix, alone. Both sources of the kernel are it.
    FirstTurns,
    /// Those of the second.
    SecondTurns,
}

/// Rewrites a stored matrix (or two) into a part of a packed weight, once at load.
///
/// Arguments: the stored tensors of both sources (`codes`, or the dense numbers; `codes_high`,
/// `scales`, `offsets`, null where the encoding has none), the whole packed weight, the `first`
/// tile to write, how many `tiles`, the `rows` of each source, and the `n` of the packed weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pack {
    /// How the sources are stored.
    pub source: Encoding,
    /// Where the rows go.
    pub packed: Packed,
    /// How the rows of the sources follow one another.
    pub order: Order,
    /// Rows of each source.
    pub rows: u32,
}

impl Pack {
    /// Tiles that the launch writes.
    pub fn tiles(&self) -> u32 {
        match self.order {
            Order::Rows => self.rows.div_ceil(TILE_ROWS),
            Order::Turns | Order::FirstTurns | Order::SecondTurns => {
                self.rows.div_ceil(TILE_ROWS / 2)
            }
        }
    }

    /// The kernel, if the packed layout holds the numbers of the source.
    pub fn kernel(&self) -> Result<Kernel, Unsupported> {
        let unsupported = |reason: String| Err(Unsupported { kernel: "pack", reason });
        let own = Packed::new(self.source, self.packed.n, self.packed.k)?;
        if own.join(&self.packed) != Some(self.packed) {
            return unsupported(format!("{:?} does not pack into {:?}", self.source, self.packed));
        }
        let (bits, group, scale, (offset, offset_type)) = match self.source {
            Encoding::Dense(dtype) => (16, 1, dtype, ("0", "0")),
            Encoding::Quantized { bits, group, scale, offset } => {
                let offset = match offset {
                    Offset::Symmetric => ("0", "0"),
                    Offset::Zero(ZeroType::Nibble) => ("2", "4"),
                    Offset::Zero(ZeroType::U8) => ("2", "3"),
                    Offset::Zero(ZeroType::F16) => ("2", type_code(DType::F16)),
                    Offset::Zero(ZeroType::BF16) => ("2", type_code(DType::BF16)),
                    Offset::Minimum(dtype) => ("3", type_code(dtype)),
                };
                (bits, group, scale, offset)
            }
        };
        let (tile_stride, half_stride, halves) = match self.order {
            Order::Rows => (16, 8, 3),
            Order::Turns => (8, 0, 3),
            Order::FirstTurns => (8, 0, 1),
            Order::SecondTurns => (8, 0, 2),
        };
        if halves != 3 && self.packed.codes == Codes::Nibble {
            return unsupported("codes of two rows share a byte".to_owned());
        }
        let mut defines = self.packed.defines();
        defines.extend([
            ("SOURCE_BITS", bits.to_string()),
            ("SOURCE_GROUP", group.to_string()),
            ("SOURCE_SCALE", type_code(scale).to_owned()),
            ("SOURCE_OFFSET", offset.to_owned()),
            ("SOURCE_OFFSET_TYPE", offset_type.to_owned()),
            ("TILE_STRIDE", tile_stride.to_string()),
            ("HALF_STRIDE", half_stride.to_string()),
            ("HALVES", halves.to_string()),
        ]);
        let units = self.tiles() * self.packed.units();
        Ok(Kernel {
            source: source!("pack.cu"),
            defines,
            symbol: "pack",
            grid: [Count::Fixed(units.div_ceil(8)), Count::Fixed(1), Count::Fixed(1)],
            block: 256,
            shared: 0,
            args: args![
                Read codes_0, Read codes_high_0, Read scales_0, Read offsets_0,
                Read codes_1, Read codes_high_1, Read scales_1, Read offsets_1,
                Update packed, U32 first, U32 tiles, U32 rows, U32 n,
            ],
            dependent_launch: false,
            bytes: Amount {
                fixed: 2 * u64::from(units) * u64::from(self.packed.unit_bytes()),
                ..Amount::default()
            },
            operations: Amount::default(),
        })
    }
}
