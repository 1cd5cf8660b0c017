//! Linear layers for many rows, on the tensor cores: prefill.
//!
//! Activations of many rows lie in *panels* (`cu/panels.cuh`): bfloat16, 64 columns at a time, in the
//! order in which the tensor cores read them. [`panel_index`] is their definition.

use crate::contract::{args, source};
use crate::packed::{Codes, Packed, PackedOffset};
use crate::{Amount, Arch, Kernel, Unsupported};
use gemma4_format::DType;
use gemma4_format::plan::Count;

/// Columns of a panel.
pub const PANEL_COLUMNS: u32 = 64;

/// Elements of panels with room for `rows` rows (a multiple of 8) of `columns` columns.
pub fn panel_elements(rows: u32, columns: u32) -> u64 {
    u64::from(rows) * u64::from(columns.next_multiple_of(PANEL_COLUMNS))
}

/// Index of element (`row`, `column`) in panels with room for `rows` rows.
///
/// Panel `column / 64` holds 64 columns of all rows. Of each 16 columns the even pairs come first;
/// chunk `c` of 8 columns of row `t` lies at place `c ^ (t % 8)`.
pub fn panel_index(row: u32, column: u32, rows: u32) -> u64 {
    let pair = column % 16 / 2;
    let chunk = column % PANEL_COLUMNS / 16 * 2 + pair % 2;
    let within = (chunk ^ (row % 8)) * 8 + pair / 2 * 2 + column % 2;
    (u64::from(column / PANEL_COLUMNS) * u64::from(rows) + u64::from(row))
        * u64::from(PANEL_COLUMNS)
        + u64::from(within)
}

/// Rounds float32 rows to bfloat16 panels; columns that complete the last panel become zero.
///
/// Arguments: `x` float32 `[T, k]`, `panels` bfloat16 ([`panel_elements`]), `rows` = T, `panel_rows` that
/// the panels have room for (at least T, a multiple of 8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ToPanels {
    /// Columns, a multiple of 4.
    pub k: u32,
}

impl ToPanels {
    /// The kernel, if rows consist of whole 16-byte vectors.
    pub fn kernel(&self) -> Result<Kernel, Unsupported> {
        if self.k == 0 || !self.k.is_multiple_of(4) {
            let reason = format!("{} columns, no multiple of 4", self.k);
            return Err(Unsupported { kernel: "to_panels", reason });
        }
        let threads = self.k.next_multiple_of(PANEL_COLUMNS) / 16;
        Ok(Kernel {
            source: source!("to_panels.cu"),
            defines: vec![("K", self.k.to_string())],
            symbol: "to_panels",
            grid: [
                Count::Fixed(threads.div_ceil(32)),
                Count::Rows { per: 8, times: 1 },
                Count::Fixed(1),
            ],
            block: 256,
            shared: 0,
            args: args![Read x, Write panels, U32 rows, U32 panel_rows],
            dependent_launch: true,
            bytes: Amount { per_row: u64::from(self.k) * 6, ..Amount::default() },
            operations: Amount::default(),
        })
    }
}

/// What a product of many rows makes of its sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ManyOutput {
    /// `y` float32 `[T, n]`.
    F32,
    /// `y` bfloat16 `[T, n]`.
    Bf16,
    /// `gelu_tanh(gate) * up` of rows packed with [`crate::Order::Turns`]: bfloat16 panels, `n / 2` columns.
    Geglu,
}

/// `y[T, n] = x[T, k] · Wᵀ` for a packed weight and any T, one weight rounded to bfloat16 after
/// dequantization and one sum in float32, in a fixed order for a device's number of multiprocessors.
///
/// Arguments: `y` (see [`ManyOutput`]), `x` bfloat16 panels of `k` columns, `weight` packed; on sm_90a
/// then `partials` ([`LinearMany::partial_bytes`]) and `ready` ([`LinearMany::ready_bytes`], zero when the
/// program is loaded, and again after every launch), scratch that launches of one stream may share; then
/// `rows` = T and the `panel_rows` that all panels have room for (at least T, a multiple of 8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearMany {
    /// The weight; `n` is a multiple of 8, of 16 for [`ManyOutput::Geglu`].
    pub weight: Packed,
    /// Rows of x that a block computes: 32, 64 or 128, on Hopper 64, 96, … 256.
    pub tokens: u32,
    /// What happens to the sums.
    pub output: ManyOutput,
    /// The kernel for exactly sm_90a (`wgmma`), or the portable one.
    pub hopper: bool,
}

/// Blocks that share their copies of x.
const CLUSTER: u32 = 2;
/// Rows of W of a block.
const BLOCK_FEATURES: u32 = 128;
/// Shared memory of the stages of x on Hopper.
const RING_BYTES: u32 = 192 * 1024;
/// Shared memory of the sums on their way out on Hopper.
const STAGING_BYTES: u32 = 8192;
/// Cost of a tile beside that of its rows, in rows: dequantization and starts (measured on an H200).
const TILE_COST: u32 = 256;

impl LinearMany {
    /// The kernel of `arch` that computes `rows` rows fastest.
    pub fn choose(weight: Packed, rows: u32, output: ManyOutput, arch: Arch) -> Self {
        let hopper = arch == Arch::Sm90a;
        let wide_factors = weight.offset == PackedOffset::Minimum(DType::F32);
        let sizes: &[u32] = match (hopper, weight.codes) {
            (true, _) => &[64, 96, 128, 160, 192, 224, 256],
            (false, Codes::Nibble) if !wide_factors => &[32, 64, 128],
            // Wider codes or factors leave too few registers for the sums of 128 rows.
            (false, Codes::Byte) if wide_factors && weight.group == 16 => &[32],
            (false, _) => &[32, 64],
        };
        let cost = |tokens: &u32| u64::from(rows.div_ceil(*tokens)) * u64::from(tokens + TILE_COST);
        let tokens = sizes.iter().copied().min_by_key(cost).unwrap_or(64);
        Self { weight, tokens, output, hopper }
    }

    /// Bytes of the scratch `partials` on a device of `sms` multiprocessors.
    pub fn partial_bytes(&self, sms: u32) -> u64 {
        if self.hopper { u64::from(sms) * u64::from(self.tokens / 2) * 256 * 4 } else { 0 }
    }

    /// Bytes of the scratch `ready` on a device of `sms` multiprocessors.
    pub fn ready_bytes(&self, sms: u32) -> u64 {
        if self.hopper { u64::from(sms) * 4 } else { 0 }
    }

    /// The kernel, if the weight's dims allow it.
    pub fn kernel(&self) -> Result<Kernel, Unsupported> {
        let unsupported = |reason: String| Err(Unsupported { kernel: "linear_many", reason });
        let tokens_known = if self.hopper {
            matches!(self.tokens, 64 | 96 | 128 | 160 | 192 | 224 | 256)
        } else {
            matches!(self.tokens, 32 | 64 | 128)
        };
        if !tokens_known {
            return unsupported(format!("blocks of {} rows", self.tokens));
        }
        let multiple = if self.output == ManyOutput::Geglu { 16 } else { 8 };
        if !self.weight.n.is_multiple_of(multiple) {
            return unsupported(format!("{} features, no multiple of {multiple}", self.weight.n));
        }
        let output = match self.output {
            ManyOutput::F32 => "0",
            ManyOutput::Bf16 => "1",
            ManyOutput::Geglu => "2",
        };
        let mut defines = self.weight.defines();
        defines.extend([
            ("N", self.weight.n.to_string()),
            ("BLOCK_TOKENS", self.tokens.to_string()),
            ("OUTPUT", output.to_owned()),
        ]);
        let stage = self.tokens * 128;
        let features = self.weight.n.div_ceil(BLOCK_FEATURES);
        let (source, grid, block, shared, args);
        if self.hopper {
            defines.push(("CLUSTER", CLUSTER.to_string()));
            source = source!("linear_many_sm90.cu");
            grid = [
                Count::Fixed(CLUSTER),
                Count::Multiprocessors { times: 1, share: CLUSTER, limit: u32::MAX },
                Count::Fixed(1),
            ];
            block = 384;
            shared = (RING_BYTES / stage).min(8) * stage + STAGING_BYTES;
            args = args![
                Write y, Read x, Read weight, Update partials, Update ready, U32 rows, U32 panel_rows,
            ];
        } else {
            source = source!("linear_many.cu");
            let tokens = Count::Rows { per: self.tokens, times: 1 };
            grid = [tokens, Count::Fixed(features), Count::Fixed(1)];
            block = 256;
            shared = 3 * stage;
            args = args![Write y, Read x, Read weight, U32 rows, U32 panel_rows];
        }
        let written = match self.output {
            ManyOutput::F32 => self.weight.n * 4,
            ManyOutput::Bf16 => self.weight.n * 2,
            ManyOutput::Geglu => self.weight.n,
        };
        Ok(Kernel {
            source,
            defines,
            symbol: "linear_many",
            grid,
            block,
            shared,
            args,
            dependent_launch: true,
            bytes: Amount {
                fixed: self.weight.bytes(),
                per_row: u64::from(written) + u64::from(self.weight.k) * 2,
                per_position: 0,
            },
            operations: Amount {
                per_row: 2 * u64::from(self.weight.n) * u64::from(self.weight.k),
                ..Amount::default()
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panels_hold_every_element_once() {
        let (rows, columns) = (24, 192);
        let mut seen = vec![false; panel_elements(rows, columns) as usize];
        for row in 0..rows {
            for column in 0..columns {
                let at = panel_index(row, column, rows) as usize;
                assert!(!seen[at], "({row}, {column})");
                seen[at] = true;
            }
        }
        assert!(seen.iter().all(|seen| *seen));
    }

    #[test]
    fn tokens_of_a_block_follow_the_rows() {
        let weight = Packed {
            n: 256,
            k: 256,
            codes: Codes::Nibble,
            group: 32,
            scale: gemma4_format::DType::BF16,
            offset: crate::PackedOffset::Nibble,
        };
        let tokens = |rows, arch| LinearMany::choose(weight, rows, ManyOutput::F32, arch).tokens;
        assert_eq!([9, 129, 417, 512].map(|rows| tokens(rows, Arch::Sm90a)), [64, 160, 224, 256]);
        assert_eq!([9, 64, 65, 512].map(|rows| tokens(rows, Arch::Sm80)), [32, 64, 128, 128]);
    }
}
