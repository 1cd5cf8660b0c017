//! The heads of a layer's attention, and what its buffer of keys holds.

use crate::Arch;

/// Shape of a layer's attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Query heads.
    pub q_heads: u32,
    /// Key and value heads; divides the query heads.
    pub kv_heads: u32,
    /// Columns of a head: 32, 64, 128, 256 or 512.
    pub d: u32,
    /// Columns of them that the keys' buffer holds.
    pub keys: Keys,
    /// Keys that a query sees, itself included; `None` for all.
    pub window: Option<u32>,
}

impl Heads {
    /// Why attention has no kernel for them, if so.
    pub(crate) fn refused(&self) -> Option<String> {
        let Self { q_heads, kv_heads, d, keys, window } = *self;
        if !matches!(d, 32 | 64 | 128 | 256 | 512) {
            return Some(format!("heads of {d} columns: known are 32, 64, 128, 256, 512"));
        }
        if kv_heads == 0 || q_heads == 0 || !q_heads.is_multiple_of(kv_heads) {
            return Some(format!("{q_heads} query heads over {kv_heads}"));
        }
        if window == Some(0) {
            return Some("a window of no keys".to_owned());
        }
        (!keys.fit(d)).then(|| format!("{keys:?} of heads of {d} columns"))
    }

    /// Columns of all query heads.
    pub(crate) fn width(&self) -> u32 {
        self.q_heads * self.d
    }

    /// Columns of a head in the buffer of keys.
    pub(crate) fn key_columns(&self) -> u32 {
        self.keys.columns(self.d)
    }

    /// Bytes of a position of keys and values.
    pub(crate) fn position_bytes(&self) -> u64 {
        u64::from(self.kv_heads * (self.key_columns() + self.d)) * 2
    }

    pub(crate) fn defines(&self) -> [(&'static str, String); 5] {
        [
            ("Q_HEADS", self.q_heads.to_string()),
            ("KV_HEADS", self.kv_heads.to_string()),
            ("D", self.d.to_string()),
            ("KEY_COLUMNS", self.key_columns().to_string()),
            ("WINDOW", self.window.unwrap_or(0).to_string()),
        ]
    }
}

/// Columns of a head that the buffer of keys holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keys {
    /// All.
    Whole,
    /// The first so many of each half of a head: those that rotate.
    ///
    /// For layers whose values are their keys, normed, without the weight of the keys' norm and
    /// without rotation. The other columns of a key are then those of the value times that weight,
    /// which [`crate::Rope`] gives the queries instead.
    Rotated(u32),
}

impl Keys {
    /// For a layer whose values are its keys, with heads of `d` columns of which `rotated` of each
    /// half rotate: without what values hold already, if `arch` has kernels for that.
    pub fn beside_values(d: u32, rotated: u32, arch: Arch) -> Self {
        let keys = Self::Rotated(rotated);
        let hopper = arch == Arch::Sm90a && matches!(d, 256 | 512);
        match keys.fit(d) && (!hopper || keys.fit_hopper(d)) {
            true => keys,
            false => Self::Whole,
        }
    }

    /// Columns of a head.
    pub fn columns(self, d: u32) -> u32 {
        match self {
            Self::Whole => d,
            Self::Rotated(rotated) => 2 * rotated,
        }
    }

    /// Whether the portable kernels know them: instructions take sixteen columns.
    pub(crate) fn fit(self, d: u32) -> bool {
        match self {
            Self::Whole => true,
            Self::Rotated(rotated) => {
                rotated > 0 && rotated.is_multiple_of(16) && 2 * rotated < d && d.is_multiple_of(32)
            }
        }
    }

    /// Whether the kernel on `wgmma` knows them: it takes panels of 64 columns, and two tiles of
    /// values only where heads have 512.
    pub(crate) fn fit_hopper(self, d: u32) -> bool {
        match self {
            Self::Whole => true,
            Self::Rotated(rotated) => self.fit(d) && d == 512 && rotated == 64,
        }
    }
}
