//! What stands between the products of a layer: norms, rotary embedding, activation, embedding.

use gemma4_format::DType;
use gemma4_format::plan::Count;

use crate::activations::Output;
use crate::contract::{args, source};
use crate::packed::{Packed, type_code};
use crate::{Amount, Arch, Kernel, Keys, Unsupported};

/// Adds a product's partial sums to the residual stream and norms the result for the next product.
///
/// `a` = the partial sums added in order; `x = (x + rms(a) · post) · scalar`; `y = rms(x) · next`.
/// Arguments: `sums` `[splits, T, h]`, `post` `[h]`, `scalar` `[1]`, the residual `x` `[T, h]`, `next`
/// `[h]`, `y` `[T, h]` (see [`Output`]), float32 but for the weights, `rows` = T, `eps`. What an instance does
/// without may be null.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddNorm {
    /// Columns, a multiple of 4.
    pub h: u32,
    /// Partial sums; 0 norms the residual as it is.
    pub splits: u32,
    /// Whether the sum is multiplied by a scalar.
    pub scalar: bool,
    /// How `y` is written, if it is.
    pub next: Option<Output>,
    /// Type of `post`, `scalar` and `next`.
    pub weight: DType,
    /// Blocks that share a row, in a cluster: 1, and for compute capability 9.0 and later 2 to 8.
    pub cluster: u32,
}

impl AddNorm {
    /// Blocks for a row of a call of few rows, which leave most of a GPU idle otherwise.
    pub fn cluster(arch: Arch) -> u32 {
        if arch.dependent_launch() { 8 } else { 1 }
    }

    /// The kernel.
    pub fn kernel(&self) -> Result<Kernel, Unsupported> {
        if self.h == 0 || !self.h.is_multiple_of(4) || self.h > 16384 {
            let reason = format!("{} columns: a multiple of 4 up to 16384 is needed", self.h);
            return Err(Unsupported { kernel: "add_norm", reason });
        }
        let output = self.next.unwrap_or(Output::Floats);
        if let Some(reason) = output.refuses(self.h) {
            return Err(Unsupported { kernel: "add_norm", reason });
        }
        let mut defines = output.defines(self.h);
        defines.extend([
            ("H", self.h.to_string()),
            ("SPLITS", self.splits.to_string()),
            ("SCALAR", u32::from(self.scalar).to_string()),
            ("NEXT", u32::from(self.next.is_some()).to_string()),
            ("WEIGHT", type_code(self.weight).to_owned()),
        ]);
        if !(1..=8).contains(&self.cluster) {
            let reason = format!("rows of {} blocks", self.cluster);
            return Err(Unsupported { kernel: "add_norm", reason });
        }
        let warps = self.h.div_ceil(128).div_ceil(self.cluster);
        let threads = warps.div_ceil(warps.div_ceil(24)) * 32;
        let arrays = self.splits + 2 + u32::from(self.next.is_some());
        defines.push(("THREADS", threads.to_string()));
        defines.push(("CLUSTER", self.cluster.to_string()));
        Ok(Kernel {
            source: source!("add_norm.cu"),
            defines,
            symbol: "add_norm",
            grid: [Count::Rows { per: 1, times: self.cluster }, Count::Fixed(1), Count::Fixed(1)],
            block: threads,
            shared: 0,
            args: args![
                Read sums, Read post, Read scalar, Update x, Read next, Write y, U32 rows, F32 eps,
            ],
            dependent_launch: true,
            bytes: Amount { per_row: u64::from(arrays * self.h) * 4, ..Amount::default() },
            operations: Amount { per_row: u64::from(self.h) * 10, ..Amount::default() },
        })
    }
}

/// Norms and rotates q and k, norms v, and writes the rows of K and V.
///
/// Arguments: `qkv` partial sums `[splits, T, (q_heads + kv_heads (+ kv_heads)) · d]`, norm weights
/// `[d]`, `q` float32 `[T, q_heads, d]`, the session `table` and the indices of the `state`, `keys` and
/// `values` in it (rings `[ring, kv_heads, d]` of bfloat16), `ring` rows, `rows` = T, `eps`.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Query heads.
    pub q_heads: u32,
    /// Key and value heads.
    pub kv_heads: u32,
    /// Columns of a head, even.
    pub d: u32,
    /// Angle per position of the pairs that rotate, the first of `d / 2`.
    pub frequencies: Vec<f32>,
    /// The layer has no v: it is k before its norm.
    pub shared_kv: bool,
    /// Columns of a head that the keys' buffer takes; with [`Keys::Rotated`] as many as rotate.
    pub keys: Keys,
    /// Partial sums of the product.
    pub splits: u32,
    /// Type of the norms' weights.
    pub weight: DType,
}

impl Rope {
    /// `base^(−2i/d) / factor` for `i < rotated`, computed in float64.
    pub fn frequencies(base: f32, d: u32, rotated: u32, factor: f32) -> Vec<f32> {
        let angle =
            |i| f64::from(base).powf(-2.0 * f64::from(i) / f64::from(d)) / f64::from(factor);
        (0..rotated).map(|i| angle(i) as f32).collect()
    }

    /// The kernel.
    pub fn kernel(&self) -> Result<Kernel, Unsupported> {
        let unsupported = |reason: String| Err(Unsupported { kernel: "rope", reason });
        if self.d == 0 || !self.d.is_multiple_of(2) || self.d > 512 {
            return unsupported(format!("heads of {} columns: even and at most 512 work", self.d));
        }
        if self.frequencies.is_empty() || self.frequencies.len() > (self.d / 2) as usize {
            return unsupported(format!("{} rotated pairs", self.frequencies.len()));
        }
        let own = matches!(self.keys, Keys::Rotated(n) if n as usize != self.frequencies.len());
        if own || !self.keys.fit(self.d) || (self.keys != Keys::Whole && !self.shared_kv) {
            return unsupported(format!("{:?}", self.keys));
        }
        let heads = self.q_heads + self.kv_heads * if self.shared_kv { 1 } else { 2 };
        let list: Vec<_> = self.frequencies.iter().map(|f| format!("{f:e}f")).collect();
        let columns = u64::from(heads * self.d);
        Ok(Kernel {
            source: source!("rope.cu"),
            defines: vec![
                ("Q_HEADS", self.q_heads.to_string()),
                ("KV_HEADS", self.kv_heads.to_string()),
                ("D", self.d.to_string()),
                ("KEY_COLUMNS", self.keys.columns(self.d).to_string()),
                ("ROTATED", self.frequencies.len().to_string()),
                ("SHARED_KV", u32::from(self.shared_kv).to_string()),
                ("SPLITS", self.splits.to_string()),
                ("WEIGHT", type_code(self.weight).to_owned()),
                ("FREQUENCIES", list.join(", ")),
            ],
            symbol: "rope",
            grid: [
                Count::Fixed(heads.div_ceil(4)),
                Count::Rows { per: 1, times: 1 },
                Count::Fixed(1),
            ],
            block: 128,
            shared: 0,
            args: args![
                Read qkv, Read q_weight, Read k_weight, Write q, Read table, U32 state, U32 keys,
                U32 values, U32 ring, U32 rows, F32 eps,
            ],
            dependent_launch: true,
            bytes: Amount {
                per_row: columns * 4 * u64::from(self.splits + 1),
                ..Amount::default()
            },
            operations: Amount { per_row: columns * 12, ..Amount::default() },
        })
    }
}

/// `gelu_tanh(gate) · up` from partial sums of a weight packed with [`crate::Order::Turns`].
///
/// Arguments: `sums` float32 `[splits, T, 2 · width]`, `y` `[T, width]` (see [`Output`]), `rows` = T.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geglu {
    /// Columns of the result, a multiple of 8.
    pub width: u32,
    /// Partial sums.
    pub splits: u32,
    /// How `y` is written.
    pub output: Output,
}

impl Geglu {
    /// The kernel.
    pub fn kernel(&self) -> Result<Kernel, Unsupported> {
        let unsupported = |reason: String| Err(Unsupported { kernel: "geglu", reason });
        if self.width == 0 || !self.width.is_multiple_of(8) {
            return unsupported(format!("{} columns: a multiple of 8 is needed", self.width));
        }
        if let Some(reason) = self.output.refuses(self.width) {
            return unsupported(reason);
        }
        let width = u64::from(self.width);
        let mut defines = self.output.defines(self.width);
        defines.push(("SPLITS", self.splits.to_string()));
        Ok(Kernel {
            source: source!("geglu.cu"),
            defines,
            symbol: "geglu",
            grid: [
                Count::Fixed(self.width.div_ceil(512)),
                Count::Rows { per: 1, times: 1 },
                Count::Fixed(1),
            ],
            block: 128,
            shared: 0,
            args: args![Read sums, Write y, U32 rows],
            dependent_launch: true,
            bytes: Amount {
                per_row: width * 4 * u64::from(2 * self.splits + 1),
                ..Amount::default()
            },
            operations: Amount { per_row: width * 12, ..Amount::default() },
        })
    }
}

/// Rows of a packed table by token id, times a factor.
///
/// Arguments: `weight` packed, the session `table` and the index of the u32 ids `[T]` in it, `x` float32
/// `[T, k]`, `factor`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Embed {
    /// The table.
    pub weight: Packed,
}

impl Embed {
    /// The kernel.
    pub fn kernel(&self) -> Kernel {
        let mut defines = self.weight.defines();
        defines.push(("N", self.weight.n.to_string()));
        Kernel {
            source: source!("embed.cu"),
            defines,
            symbol: "embed",
            grid: [
                Count::Rows { per: 1, times: 1 },
                Count::Fixed(self.weight.k.div_ceil(256)),
                Count::Fixed(1),
            ],
            block: 256,
            shared: 0,
            args: args![Read weight, Read table, U32 tokens, Write x, F32 factor],
            dependent_launch: true,
            bytes: Amount { per_row: u64::from(self.weight.k) * 5, ..Amount::default() },
            operations: Amount::default(),
        }
    }
}

/// Fills a packed weight with random numbers, for measurements without a data file.
///
/// Arguments: `packed`, `seed`, `spread` (standard deviation of the weights).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Randomize {
    /// The weight.
    pub weight: Packed,
}

impl Randomize {
    /// The kernel.
    pub fn kernel(&self) -> Kernel {
        let mut defines = self.weight.defines();
        defines.push(("N", self.weight.n.to_string()));
        let units = self.weight.tiles() * self.weight.units();
        Kernel {
            source: source!("randomize.cu"),
            defines,
            symbol: "randomize",
            grid: [Count::Fixed(units.div_ceil(8)), Count::Fixed(1), Count::Fixed(1)],
            block: 256,
            shared: 0,
            args: args![Write packed, U32 seed, F32 spread],
            dependent_launch: false,
            bytes: Amount { fixed: self.weight.bytes(), ..Amount::default() },
            operations: Amount::default(),
        }
    }
}
