//! Extents and shapes of values, some of which are known only when a program runs.

use std::fmt;

use serde::{Deserialize, Serialize};

/// One extent of a value or buffer.
///
/// Deliberately not `PartialEq`: model code that could ask `if rows == 1` would bake the length
/// of one call into the traced program. Shape rules compare with [`Dim::same`].
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Dim {
    /// Known at export.
    Fixed(u32),
    /// `T`: the number of tokens (rows) of this call.
    Rows,
    /// `S`: the context length in tokens, chosen when the program is loaded.
    Context,
    /// `min(n, S)`: rows of a ring that a sliding-window layer writes modulo its length.
    Ring(u32),
}

/// The numbers that symbolic extents stand for in one call.
#[derive(Clone, Copy, Debug)]
pub struct Extents {
    /// `T`, tokens of this call.
    pub rows: u32,
    /// `S`, tokens of context that the session's buffers can hold.
    pub context: u32,
}

impl Dim {
    /// Whether two extents are equal for every call.
    pub fn same(self, other: Dim) -> bool {
        match (self, other) {
            (Dim::Fixed(a), Dim::Fixed(b)) | (Dim::Ring(a), Dim::Ring(b)) => a == b,
            (Dim::Rows, Dim::Rows) | (Dim::Context, Dim::Context) => true,
            _ => false,
        }
    }

    /// The extent if it is known at export.
    pub fn fixed(self) -> Option<u32> {
        match self {
            Dim::Fixed(n) => Some(n),
            _ => None,
        }
    }

    /// The extent in a call.
    pub fn resolve(self, extents: Extents) -> u32 {
        match self {
            Dim::Fixed(n) => n,
            Dim::Rows => extents.rows,
            Dim::Context => extents.context,
            Dim::Ring(n) => n.min(extents.context),
        }
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Dim::Fixed(n) => write!(f, "{n}"),
            Dim::Rows => f.write_str("T"),
            Dim::Context => f.write_str("S"),
            Dim::Ring(n) => write!(f, "min({n}, S)"),
        }
    }
}

/// Element type of a value. Devices may hold values narrower (see the plan of a device); the
/// portable graph is defined in these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ValueType {
    /// A real number, computed in float32.
    F32,
    /// A token id, a position or a bit pattern.
    U32,
}

/// Type and shape of a value.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Fact {
    /// Element type.
    pub dtype: ValueType,
    /// Extents, outermost first.
    pub dims: Vec<Dim>,
}

impl Fact {
    /// A float32 value of the given extents.
    pub fn f32(dims: impl Into<Vec<Dim>>) -> Self {
        Self { dtype: ValueType::F32, dims: dims.into() }
    }

    /// An unsigned integer value of the given extents.
    pub fn u32(dims: impl Into<Vec<Dim>>) -> Self {
        Self { dtype: ValueType::U32, dims: dims.into() }
    }

    /// Whether type, rank and every extent agree.
    pub fn same(&self, other: &Fact) -> bool {
        self.dtype == other.dtype
            && self.dims.len() == other.dims.len()
            && self.dims.iter().zip(&other.dims).all(|(a, b)| a.same(*b))
    }

    /// Number of elements in a call, or `None` if it does not fit 64 bits.
    pub fn elements(&self, extents: Extents) -> Option<u64> {
        self.dims.iter().try_fold(1u64, |n, d| n.checked_mul(u64::from(d.resolve(extents))))
    }
}

impl fmt::Display for Fact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.dtype {
            ValueType::F32 => "f32",
            ValueType::U32 => "u32",
        })?;
        f.write_str("[")?;
        for (i, dim) in self.dims.iter().enumerate() {
            let separator = if i == 0 { "" } else { ", " };
            write!(f, "{separator}{dim}")?;
        }
        f.write_str("]")
    }
}
