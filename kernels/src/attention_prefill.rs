//! Attention of many rows over the filled part of a ring of keys and values, on the tensor cores.

use crate::contract::{args, source};
use crate::{Amount, Arch, Heads, Kernel, Keys, Unsupported};
use gemma4_format::plan::Count;

/// Grouped-query attention of the rows of a call, whose keys and values are already in the ring.
///
/// Arguments: `q` float32 `[T, q_heads, d]`, the session `table` and the indices of `state`, `keys`, `values`
/// in it, `ring` rows of the buffers (at least `window + T − 1` where there is a window, else every
/// position so far), `y` bfloat16 panels of `q_heads * d` columns, `rows` = T, the `panel_rows` that they
/// have room for, the `scale` of the scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionPrefill {
    /// The layer's heads.
    pub heads: Heads,
    /// How the portable kernel divides its work; `None` for the kernel of exactly sm_90a (`wgmma`, heads of
    /// 256 and 512 columns).
    pub tiling: Option<Tiling>,
}

/// Queries and keys that a block holds, and how its warps share them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiling {
    /// Tiles of 16 queries of a warp: 1 or 2.
    pub row_tiles: u32,
    /// Warps along the queries.
    pub row_warps: u32,
    /// Warps that share the same queries, each with its keys of S and its dims of O.
    pub column_warps: u32,
    /// Keys at a time, at least 16 for each column of warps.
    pub keys: u32,
    /// Tiles of so many keys in shared memory: 1, or 2 where [`Keys::Rotated`].
    pub stages: u32,
}

impl Tiling {
    /// The largest tiling of heads of `d` columns that fits a block's shared memory on `arch`.
    fn choose(heads: Heads, arch: Arch) -> Self {
        let Heads { d, keys, .. } = heads;
        let room = arch.shared_per_block() / 1024;
        let (row_tiles, row_warps, column_warps, tile_keys) = match (d, room) {
            (..=128, _) => (1, 4, 1, 64),
            (256, 160..) => (2, 4, 2, 64),
            (256, _) => (1, 4, 2, 32),
            (_, 220..) => (2, 2, 4, 64),
            (_, 160..) => (1, 4, 2, 32),
            (_, _) if keys != Keys::Whole => (1, 2, 2, 32),
            (_, _) => (1, 1, 2, 32),
        };
        let stages = if keys == Keys::Whole { 1 } else { 2 };
        let tiling = Self { row_tiles, row_warps, column_warps, keys: tile_keys, stages };
        match tiling.shared(heads) > arch.shared_per_block() {
            true => Self { stages: 1, ..tiling },
            false => tiling,
        }
    }

    fn queries(&self) -> u32 {
        16 * self.row_tiles * self.row_warps
    }

    fn shared(&self, heads: Heads) -> u32 {
        let queries = self.queries();
        let row = |columns: u32| columns * 2 + 16;
        let tile = self.keys * (row(heads.key_columns()) + row(heads.d));
        let exchanged = queries * row(self.keys) + self.column_warps * queries * 4;
        queries * row(heads.d)
            + self.stages * tile
            + if self.column_warps > 1 { exchanged } else { 0 }
    }

    fn fits(&self, Heads { d, keys, .. }: Heads) -> bool {
        (self.stages == 1 || keys != Keys::Whole)
            && matches!(self.stages, 1 | 2)
            && matches!(self.row_tiles, 1 | 2)
            && self.row_warps > 0
            && self.column_warps > 0
            && self.row_warps * self.column_warps <= 16
            && self.keys.is_multiple_of(16 * self.column_warps)
            && d.is_multiple_of(16 * self.column_warps)
    }

    fn defines(&self) -> [(&'static str, String); 5] {
        [
            ("ROW_TILES", self.row_tiles.to_string()),
            ("ROW_WARPS", self.row_warps.to_string()),
            ("COLUMN_WARPS", self.column_warps.to_string()),
            ("BLOCK_KEYS", self.keys.to_string()),
            ("STAGES", self.stages.to_string()),
        ]
    }
}

/// Shared memory of the Hopper kernel: queries and tiles of 64 keys and values fill 192 KiB, or 208 KiB with
/// two tiles of values and one of what keys have of their own; heads of 512 columns also exchange weights
/// and maxima.
fn hopper_shared(d: u32, keys: Keys) -> u32 {
    let exchanged = if d > 256 { 64 * (64 * 2 + 16) } else { 0 };
    let tiles = if keys == Keys::Whole { 192 } else { 208 };
    tiles * 1024 + exchanged + 512
}

impl AttentionPrefill {
    /// The attention of a layer, tiled for `arch`.
    pub fn choose(heads: Heads, arch: Arch) -> Self {
        let hopper = arch == Arch::Sm90a && matches!(heads.d, 256 | 512);
        let tiling = (!hopper).then(|| Tiling::choose(heads, arch));
        Self { heads, tiling }
    }

    /// The kernel, if its dims are among the known.
    pub fn kernel(&self) -> Result<Kernel, Unsupported> {
        let unsupported = |reason: String| Err(Unsupported { kernel: "attention_prefill", reason });
        if let Some(reason) = self.heads.refused() {
            return unsupported(reason);
        }
        let Heads { q_heads, d, keys, .. } = self.heads;
        let mut defines = self.heads.defines().to_vec();
        let (source, queries, block, shared) = match self.tiling {
            Some(tiling) if tiling.fits(self.heads) => {
                defines.extend(tiling.defines());
                let threads = 32 * tiling.row_warps * tiling.column_warps;
                let source = source!("attention_prefill.cu");
                (source, tiling.queries(), threads, tiling.shared(self.heads))
            }
            None if matches!(d, 256 | 512) && keys.fit_hopper(d) => {
                let queries = if d == 256 { 128 } else { 64 };
                let shared = hopper_shared(d, keys);
                (source!("attention_prefill_sm90.cu"), queries, 384, shared)
            }
            tiling => {
                return unsupported(format!("{tiling:?} with heads of {d} columns, {keys:?}"));
            }
        };
        let width = u64::from(self.heads.width());
        Ok(Kernel {
            source,
            defines,
            symbol: "attention_prefill",
            grid: [Count::Fixed(q_heads), Count::Rows { per: queries, times: 1 }, Count::Fixed(1)],
            block,
            shared,
            args: args![
                Read q, Read table, U32 state, U32 keys, U32 values, U32 ring, Write y, U32 rows,
                U32 panel_rows, F32 scale,
            ],
            dependent_launch: true,
            bytes: Amount {
                per_row: width * 6,
                per_position: self.heads.position_bytes(),
                ..Amount::default()
            },
            operations: Amount { per_position: width * 4, ..Amount::default() },
        })
    }
}
