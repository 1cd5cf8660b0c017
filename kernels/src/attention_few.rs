//! Attention of a few rows over the filled part of a ring of keys and values.

use crate::activations::Output;
use crate::contract::{args, source};
use crate::{Amount, Arch, Heads, Kernel, Keys, Unsupported};
use gemma4_format::plan::Count;

/// Grouped-query attention of 1 to 8 rows, split over keys, and the kernel that joins the splits.
///
/// [`AttentionFew::kernel`]: `q` float32 `[T, q_heads, d]`, the session `table` and the indices of
/// `state`, `keys`, `values` in it, `ring` rows of the buffers (at least `window + T − 1` where there is
/// a window), `sums` float32 `[splits, T, q_heads, d]`, `stats` float32 `[splits, T, q_heads, 2]`, `rows`
/// = T, the `scale` of the scores.
/// [`AttentionFew::join`]: `sums`, `stats`, `y` `[T, q_heads · d]` (see [`Output`]), `table`, `state`, `rows`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionFew {
    /// The layer's heads.
    pub heads: Heads,
    /// Most rows of a call, 1 to 8.
    pub rows: u32,
    /// Most blocks among which the keys of a head are divided.
    pub splits: u32,
    /// Blocks of keys that fit into shared memory beside one another: 1, or 2 where [`Keys::Rotated`].
    pub stages: u32,
    /// How the join writes its result.
    pub output: Output,
}

impl AttentionFew {
    /// Enough splits for a device of `sms` multiprocessors, and no more than a window has blocks; as
    /// many stages as `arch` has room for.
    pub fn choose(heads: Heads, rows: u32, output: Output, (arch, sms): (Arch, u32)) -> Self {
        let (splits, stages) = (1, if heads.keys == Keys::Whole { 1 } else { 2 });
        let mut attention = Self { heads, rows, splits, stages, output };
        if attention.shared() > arch.shared_per_block() {
            attention.stages = 1;
        }
        let filling = (2 * sms).div_ceil(heads.kv_heads.max(1)).clamp(1, 64);
        let blocks = heads
            .window
            .map_or(u32::MAX, |window| (window + rows - 1).div_ceil(attention.block_keys()));
        attention.splits = filling.min(blocks);
        attention
    }

    /// Keys that a block handles at a time.
    fn block_keys(&self) -> u32 {
        if self.heads.d > 256 { 32 } else { 64 }
    }

    fn shared(&self) -> u32 {
        let (keys, pitch) = (self.block_keys(), self.heads.d + 8);
        let tile = keys * (pitch + self.heads.key_columns() + 8) * 2;
        16 * pitch * 2 + self.stages * tile + 16 * (keys + 8) * 2 + 16 * (keys + 4) * 4 + 16 * 4
    }

    fn defines(&self) -> Vec<(&'static str, String)> {
        let mut defines = self.output.defines(self.heads.width());
        defines.extend(self.heads.defines());
        defines.extend([
            ("STAGES", self.stages.to_string()),
            ("ROWS", self.rows.to_string()),
            ("KEYS", self.block_keys().to_string()),
            ("SPLITS", self.splits.to_string()),
        ]);
        defines
    }

    fn check(&self) -> Result<(), Unsupported> {
        let unsupported = |reason: String| Err(Unsupported { kernel: "attention_few", reason });
        let stages = if self.heads.keys == Keys::Whole { 1 } else { 2 };
        if let Some(reason) = self.heads.refused() {
            return unsupported(reason);
        }
        if !(1..=8).contains(&self.rows) || self.splits == 0 || !(1..=stages).contains(&self.stages)
        {
            return unsupported(format!("{self:?}"));
        }
        if let Some(reason) = self.output.refuses(self.heads.width()) {
            return unsupported(reason);
        }
        Ok(())
    }

    /// The kernel of the splits.
    pub fn kernel(&self) -> Result<Kernel, Unsupported> {
        self.check()?;
        let queries = self.heads.q_heads / self.heads.kv_heads * self.rows;
        let results = u64::from(self.heads.width()) * 4;
        Ok(Kernel {
            source: source!("attention_few.cu"),
            defines: self.defines(),
            symbol: "attention_few",
            grid: [
                Count::Fixed(self.splits),
                Count::Fixed(self.heads.kv_heads),
                Count::Fixed(queries.div_ceil(16)),
            ],
            block: 128,
            shared: self.shared(),
            args: args![
                Read q, Read table, U32 state, U32 keys, U32 values, U32 ring, Write sums,
                Write stats, U32 rows, F32 scale,
            ],
            dependent_launch: true,
            bytes: Amount {
                per_row: results * 2,
                per_position: self.heads.position_bytes(),
                ..Amount::default()
            },
            operations: Amount {
                per_position: u64::from(self.heads.width()) * 4,
                ..Amount::default()
            },
        })
    }

    /// The kernel that adds the splits in order.
    pub fn join(&self) -> Result<Kernel, Unsupported> {
        self.check()?;
        Ok(Kernel {
            source: source!("attention_few.cu"),
            defines: self.defines(),
            symbol: "attention_join",
            grid: [
                Count::Fixed(self.heads.width().div_ceil(128)),
                Count::Rows { per: 1, times: 1 },
                Count::Fixed(1),
            ],
            block: 128,
            shared: 0,
            args: args![Read sums, Read stats, Write y, Read table, U32 state, U32 rows],
            dependent_launch: true,
            bytes: Amount { per_row: u64::from(self.heads.width()) * 8, ..Amount::default() },
            operations: Amount::default(),
        })
    }
}
