//! The weights of a source, or what a recipe makes of them, a few rows at a time.

use std::collections::HashMap;
use std::ops::Range;

use crate::Result;
use crate::output::Item;
use crate::quantize::Recipe;
use crate::source::{ModelSource, rows_of};
use crate::trace::WeightSpec;

/// Numbers that are decoded at a time (64 MiB of float32).
const BLOCK: u64 = 16 << 20;

/// Weights in float32 by name.
pub struct Weights<'a> {
    source: &'a dyn ModelSource,
    items: HashMap<String, Item>,
}

impl<'a> Weights<'a> {
    /// The weights of a source as they are, or as a recipe quantizes them.
    ///
    /// # Errors
    /// As [`Item::all`].
    pub fn new(source: &'a dyn ModelSource, recipe: Option<&Recipe>) -> Result<Self> {
        let items = Item::all(source, source.names(), recipe)?;
        let items = items.into_iter().map(|item| (item.name.clone(), item)).collect();
        Ok(Self { source, items })
    }

    /// Dims and encoding of a weight, if there is one.
    pub fn describe(&self, name: &str) -> Option<WeightSpec> {
        let Item { dims, encoding, .. } = self.items.get(name)?;
        Some(WeightSpec { dims: dims.clone(), encoding: *encoding })
    }

    /// Some rows of a weight, row-major.
    ///
    /// # Errors
    /// A sentence if there is no such weight, or it can't be read.
    pub fn rows(&self, name: &str, rows: Range<u64>) -> Result<Vec<f32>, String> {
        let item = self.items.get(name).ok_or("there is no such weight")?;
        item.rows_f32(self.source, rows).map_err(|e| e.to_string())
    }

    /// A whole weight, row-major.
    ///
    /// # Errors
    /// As [`Weights::rows`].
    pub fn load(&self, name: &str) -> Result<Vec<f32>, String> {
        let dims = self.items.get(name).map(|item| item.dims.as_slice()).unwrap_or_default();
        let total = rows_of(dims);
        let mut numbers = Vec::new();
        for rows in blocks(total, dims.last().copied().unwrap_or(1)) {
            let block = self.rows(name, rows)?;
            if numbers.is_empty() {
                numbers.reserve_exact(dims.iter().map(|d| *d as usize).product());
            }
            numbers.extend(block);
        }
        Ok(numbers)
    }
}

/// Consecutive ranges of all rows of `k` numbers, each of no more than a block.
pub(super) fn blocks(rows: u64, k: u32) -> impl Iterator<Item = Range<u64>> {
    let step = (BLOCK / u64::from(k.max(1))).max(1);
    (0..rows).step_by(step as usize).map(move |first| first..(first + step).min(rows))
}
