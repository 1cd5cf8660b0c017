//! How a row of activations is handed to the product that reads it.

/// The layout of activations that [`crate::LinearFew`] multiplies (`cu/split.cuh`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    /// Columns.
    pub k: u32,
    /// Most rows of a call.
    pub rows: u32,
    /// 14-bit parts of an activation: 2 or 1; 1 for dense weights.
    pub parts: u32,
    /// Groups of 128 columns whose sums are needed.
    pub sums: u32,
    /// Two bfloat16 halves rather than limbs.
    pub dense: bool,
}

impl Split {
    /// Bytes of one unit of 128 columns: limbs, and sums and scales.
    pub(crate) fn unit_bytes(&self) -> u32 {
        let virtual_rows = self.rows * self.parts;
        let limbs = 128 * 2 * virtual_rows * if self.dense { 2 } else { 1 };
        limbs + if self.dense { 0 } else { virtual_rows * (self.sums + 1) * 4 }
    }

    /// Bytes of the activations; their address must be a multiple of 16.
    pub fn bytes(&self) -> u64 {
        u64::from(self.k.div_ceil(128)) * u64::from(self.unit_bytes())
    }

    /// Macros of `cu/split.cuh`.
    pub(crate) fn defines(&self) -> Vec<(&'static str, String)> {
        vec![
            ("X_K", self.k.to_string()),
            ("X_ROWS", self.rows.to_string()),
            ("X_PARTS", self.parts.to_string()),
            ("X_SUMS", self.sums.to_string()),
            ("X_DENSE", u32::from(self.dense).to_string()),
        ]
    }
}

/// How a kernel leaves the activations that the next product reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// float32 `[T, k]`.
    Floats,
    /// As [`crate::LinearFew`] multiplies them.
    Split(Split),
    /// As [`crate::LinearMany`] multiplies them: bfloat16 panels ([`crate::panel_index`]).
    Panels {
        /// Rows that the panels have room for, a multiple of 8: the `panel_rows` of their readers.
        room: u32,
    },
}

impl Output {
    /// Macros of `cu/output.cuh` for rows of `k` columns.
    pub(crate) fn defines(&self, k: u32) -> Vec<(&'static str, String)> {
        let unused = Split { k, rows: 1, parts: 1, sums: 1, dense: false };
        let (split, flag, room) = match self {
            Output::Floats => (unused, "0", 0),
            Output::Split(split) => (*split, "1", 0),
            Output::Panels { room } => (unused, "0", *room),
        };
        let mut defines = split.defines();
        defines.extend([("SPLIT_OUTPUT", flag.to_owned()), ("PANEL_ROWS", room.to_string())]);
        defines
    }

    /// Why rows of `k` columns can't be left so, if they can't.
    pub(crate) fn refuses(&self, k: u32) -> Option<String> {
        match self {
            _ if !k.is_multiple_of(4) => Some(format!("{k} columns, no multiple of 4")),
            Output::Split(split) if split.k != k => {
                Some(format!("{k} columns for a product of {}", split.k))
            }
            Output::Panels { room } if *room == 0 || !room.is_multiple_of(8) => {
                Some(format!("panels of {room} rows, no multiple of 8"))
            }
            _ => None,
        }
    }
}
