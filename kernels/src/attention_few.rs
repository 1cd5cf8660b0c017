//! Attention of a few rows over the filled part of a ring of keys and values.

use crate::activations::Output;
use crate::contract::{args, source};
use crate::{Amount, Kernel, Unsupported};
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
    /// Query heads.
    pub q_heads: u32,
    /// Key and value heads; divides the query heads.
    pub kv_heads: u32,
    /// Columns of a head: 32, 64, 128, 256 or 512.
    pub d: u32,
    /// Most rows of a call, 1 to 8.
    pub rows: u32,
    /// Keys that a query sees, itself included; `None` for all.
    pub window: Option<u32>,
    /// Most blocks among which the keys of a head are divided.
    pub splits: u32,
    /// How the join writes its result.
    pub output: Output,
}

impl AttentionFew {
    /// Enough splits for a device of `sms` multiprocessors, and no more than a window has blocks.
    pub fn choose(
        q_heads: u32,
        kv_heads: u32,
        d: u32,
        rows: u32,
        window: Option<u32>,
        output: Output,
        sms: u32,
    ) -> Self {
        let mut attention = Self { q_heads, kv_heads, d, rows, window, splits: 1, output };
        let filling = (2 * sms).div_ceil(kv_heads.max(1)).clamp(1, 64);
        let blocks =
            window.map_or(u32::MAX, |window| (window + rows - 1).div_ceil(attention.keys()));
        attention.splits = filling.min(blocks);
        attention
    }

    /// Keys that a block handles at a time.
    fn keys(&self) -> u32 {
        if self.d > 256 { 32 } else { 64 }
    }

    fn shared(&self) -> u32 {
        let (keys, pitch) = (self.keys(), self.d + 8);
        16 * pitch * 2 + 2 * keys * pitch * 2 + 16 * (keys + 8) * 2 + 16 * (keys + 4) * 4 + 16 * 4
    }

    fn defines(&self) -> Vec<(&'static str, String)> {
        let mut defines = self.output.defines(self.q_heads * self.d);
        defines.extend([
            ("Q_HEADS", self.q_heads.to_string()),
            ("KV_HEADS", self.kv_heads.to_string()),
            ("D", self.d.to_string()),
            ("ROWS", self.rows.to_string()),
            ("KEYS", self.keys().to_string()),
            ("SPLITS", self.splits.to_string()),
            ("WINDOW", self.window.unwrap_or(0).to_string()),
        ]);
        defines
    }

    fn check(&self) -> Result<(), Unsupported> {
        let unsupported = |reason: String| Err(Unsupported { kernel: "attention_few", reason });
        if !matches!(self.d, 32 | 64 | 128 | 256 | 512) {
            return unsupported(format!(
                "heads of {} columns: known are 32, 64, 128, 256, 512",
                self.d
            ));
        }
        if self.kv_heads == 0 || !self.q_heads.is_multiple_of(self.kv_heads) {
            return unsupported(format!("{} query heads over {}", self.q_heads, self.kv_heads));
        }
        if !(1..=8).contains(&self.rows) || self.splits == 0 || self.window == Some(0) {
            return unsupported(format!("{self:?}"));
        }
        if let Some(reason) = self.output.refuses(self.q_heads * self.d) {
            return unsupported(reason);
        }
        Ok(())
    }

    /// The kernel of the splits.
    pub fn kernel(&self) -> Result<Kernel, Unsupported> {
        self.check()?;
        let queries = self.q_heads / self.kv_heads * self.rows;
        let results = u64::from(self.q_heads * self.d) * 4;
        Ok(Kernel {
            source: source!("attention_few.cu"),
            defines: self.defines(),
            symbol: "attention_few",
            grid: [
                Count::Fixed(self.splits),
                Count::Fixed(self.kv_heads),
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
                per_position: u64::from(self.kv_heads * self.d) * 4,
                ..Amount::default()
            },
            operations: Amount {
                per_position: u64::from(self.q_heads * self.d) * 4,
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
                Count::Fixed((self.q_heads * self.d).div_ceil(128)),
                Count::Rows { per: 1, times: 1 },
                Count::Fixed(1),
            ],
            block: 128,
            shared: 0,
            args: args![Read sums, Read stats, Write y, Read table, U32 state, U32 rows],
            dependent_launch: true,
            bytes: Amount { per_row: u64::from(self.q_heads * self.d) * 8, ..Amount::default() },
            operations: Amount::default(),
        })
    }
}
