//! Reading the numbers of a weight, a piece at a time.

use std::ops::Range;
use std::os::unix::fs::FileExt;

use gemma4_format::Encoding;
use gemma4_format::encoding::{QuantizedBytes, decode_row};

use super::Checkpoint;
use crate::{Error, Result};

impl Checkpoint {
    /// Reads bytes `offset .. offset + out.len()` of part `part` of a weight, as it is stored.
    ///
    /// Parts are those of [`Encoding::parts`].
    ///
    /// # Errors
    /// As [`Checkpoint::weight`], or of the file system.
    ///
    /// # Panics
    /// If the weight has no such part, or the range lies outside it.
    pub fn read_part(&self, name: &str, part: usize, offset: u64, out: &mut [u8]) -> Result<()> {
        let place = self.entry(name)?.1[part];
        assert!(offset + out.len() as u64 <= place.length, "range within the part");
        let shard = &self.shards[place.shard];
        shard
            .file
            .read_exact_at(out, place.start + offset)
            .map_err(Error::io("read", self.dir.join(&shard.name)))
    }

    /// Reads rows of a weight as float32, decoding quantized ones: `rows.len() · K` numbers, `K`
    /// being the last of its dims and a row its slice along it.
    ///
    /// # Errors
    /// As [`Checkpoint::weight`], or of the file system.
    ///
    /// # Panics
    /// If the weight has fewer rows.
    pub fn read_rows_f32(&self, name: &str, rows: Range<u64>) -> Result<Vec<f32>> {
        let (weight, places) = self.entry(name)?;
        let k = weight.dims.last().copied().unwrap_or(1) as usize;
        let total = weight.dims.iter().map(|d| u64::from(*d)).product::<u64>() / k as u64;
        assert!(rows.start <= rows.end && rows.end <= total, "rows of the weight");
        let count = (rows.end - rows.start) as usize;
        let mut parts = Vec::with_capacity(places.len());
        for (part, place) in places.iter().enumerate() {
            let stride = place.length / total;
            let mut bytes = vec![0; count * stride as usize];
            self.read_part(name, part, rows.start * stride, &mut bytes)?;
            parts.push(bytes);
        }
        let mut values = vec![0.0; count * k];
        match weight.encoding {
            Encoding::Dense(dtype) => {
                for (at, value) in values.iter_mut().enumerate() {
                    *value = dtype.read(&parts[0], at);
                }
            }
            encoding => {
                let slices: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
                if let Some(bytes) = QuantizedBytes::from_parts(encoding, &slices) {
                    for (row, out) in values.chunks_exact_mut(k).enumerate() {
                        decode_row(encoding, bytes, row, out);
                    }
                }
            }
        }
        Ok(values)
    }
}
