//! Attention of many rows over the filled part of a ring of keys and values, on the tensor cores.

use crate::contract::{args, source};
use crate::{Amount, Arch, Kernel, Unsupported};
use gemma4_format::plan::Count;

/// Grouped-query attention of the rows of a call, whose keys and values are already in the ring.
///
/// Arguments: `q` float32 `[T, q_heads, d]`, the session `table` and the indices of `state`, `keys`, `values`
/// in it, `ring` rows of the buffers (at least `window + T − 1` where there is a window, else every
/// position so far), `y` bfloat16 panels of `q_heads * d` columns, `rows` = T, the `panel_rows` that they
/// have room for, the `scale` of the scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionPrefill {
    /// Query heads.
    pub q_heads: u32,
    /// Key and value heads; divides the query heads.
    pub kv_heads: u32,
    /// Columns of a head: 32, 64, 128, 256 or 512.
    pub d: u32,
    /// Keys that a query sees, itself included; `None` for all.
    pub window: Option<u32>,
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
}

impl Tiling {
    /// The largest tiling of heads of `d` columns that fits a block's shared memory on `arch`.
    fn choose(d: u32, arch: Arch) -> Self {
        let room = arch.shared_per_block() / 1024;
        let (row_tiles, row_warps, column_warps, keys) = match (d, room) {
            (..=128, _) => (1, 4, 1, 64),
            (256, 160..) => (2, 4, 2, 64),
            (256, _) => (1, 4, 2, 32),
            (_, 220..) => (2, 2, 4, 64),
            (_, 160..) => (1, 4, 2, 32),
            (_, _) => (1, 1, 2, 32),
        };
        Self { row_tiles, row_warps, column_warps, keys }
    }

    fn queries(&self) -> u32 {
        16 * self.row_tiles * self.row_warps
    }

    fn shared(&self, d: u32) -> u32 {
        let Tiling { column_warps, keys, .. } = *self;
        let queries = self.queries();
        let exchanged = queries * (keys * 2 + 16) + column_warps * queries * 4;
        (queries + 2 * keys) * (d * 2 + 16) + if column_warps > 1 { exchanged } else { 0 }
    }

    fn fits(&self, d: u32) -> bool {
        matches!(self.row_tiles, 1 | 2)
            && self.row_warps > 0
            && self.column_warps > 0
            && self.row_warps * self.column_warps <= 16
            && self.keys.is_multiple_of(16 * self.column_warps)
            && d.is_multiple_of(16 * self.column_warps)
    }

    fn defines(&self) -> [(&'static str, String); 4] {
        [
            ("ROW_TILES", self.row_tiles.to_string()),
            ("ROW_WARPS", self.row_warps.to_string()),
            ("COLUMN_WARPS", self.column_warps.to_string()),
            ("BLOCK_KEYS", self.keys.to_string()),
        ]
    }
}

/// Shared memory of the Hopper kernel: queries and tiles of 64 keys and values fill 192 KiB; heads of 512
/// columns also exchange weights and maxima.
fn hopper_shared(d: u32) -> u32 {
    let exchanged = if d > 256 { 64 * (64 * 2 + 16) } else { 0 };
    192 * 1024 + exchanged + 512
}

impl AttentionPrefill {
    /// The attention of a layer, tiled for `arch`.
    pub fn choose(q_heads: u32, kv_heads: u32, d: u32, window: Option<u32>, arch: Arch) -> Self {
        let hopper = arch == Arch::Sm90a && matches!(d, 256 | 512);
        let tiling = (!hopper).then(|| Tiling::choose(d, arch));
        Self { q_heads, kv_heads, d, window, tiling }
    }

    /// The kernel, if its dims are among the known.
    pub fn kernel(&self) -> Result<Kernel, Unsupported> {
        let unsupported = |reason: String| Err(Unsupported { kernel: "attention_prefill", reason });
        if !matches!(self.d, 32 | 64 | 128 | 256 | 512) {
            return unsupported(format!(
                "heads of {} columns: known are 32, 64, 128, 256, 512",
                self.d
            ));
        }
        if self.kv_heads == 0 || self.q_heads == 0 || !self.q_heads.is_multiple_of(self.kv_heads) {
            return unsupported(format!("{} query heads over {}", self.q_heads, self.kv_heads));
        }
        if self.window == Some(0) {
            return unsupported("a window of no keys".to_owned());
        }
        let mut defines = vec![
            ("D", self.d.to_string()),
            ("Q_HEADS", self.q_heads.to_string()),
            ("KV_HEADS", self.kv_heads.to_string()),
            ("WINDOW", self.window.unwrap_or(0).to_string()),
        ];
        let (source, queries, block, shared) = match self.tiling {
            Some(tiling) if tiling.fits(self.d) => {
                defines.extend(tiling.defines());
                let threads = 32 * tiling.row_warps * tiling.column_warps;
                let source = source!("attention_prefill.cu");
                (source, tiling.queries(), threads, tiling.shared(self.d))
            }
            None if matches!(self.d, 256 | 512) => {
                let queries = if self.d == 256 { 128 } else { 64 };
                (source!("attention_prefill_sm90.cu"), queries, 384, hopper_shared(self.d))
            }
            tiling => return unsupported(format!("{tiling:?} with heads of {} columns", self.d)),
        };
        let width = u64::from(self.q_heads * self.d);
        Ok(Kernel {
            source,
            defines,
            symbol: "attention_prefill",
            grid: [
                Count::Fixed(self.q_heads),
                Count::Rows { per: queries, times: 1 },
                Count::Fixed(1),
            ],
            block,
            shared,
            args: args![
                Read q, Read table, U32 state, U32 keys, U32 values, U32 ring, Write y, U32 rows,
                U32 panel_rows, F32 scale,
            ],
            dependent_launch: true,
            bytes: Amount {
                per_row: width * 6,
                per_position: u64::from(self.kv_heads * self.d) * 4,
                ..Amount::default()
            },
            operations: Amount { per_position: width * 4, ..Amount::default() },
        })
    }
}
