//! Reading the numbers of a weight, a piece at a time.

use std::ops::Range;

use gemma4_format::Encoding;
use gemma4_format::encoding::{QuantizedBytes, decode_row};

use super::Checkpoint;
use super::header::Shard;
use super::table::Form;
use crate::Result;

impl Checkpoint {
    /// Reads bytes `offset .. offset + out.len()` of part `part` of a weight.
    ///
    /// Parts are those of [`Encoding::parts`], whatever the layout of the checkpoint.
    ///
    /// # Errors
    /// As [`Checkpoint::weight`], or of the file system.
    ///
    /// # Panics
    /// If the weight has no such part, or the range lies outside it.
    pub fn read_part(&self, name: &str, part: usize, offset: u64, out: &mut [u8]) -> Result<()> {
        let (weight, places) = self.entry(name)?;
        let place = places[part];
        assert!(offset + out.len() as u64 <= place.length, "range within the part");
        let shard = &self.shards[place.shard];
        match place.form {
            Form::Same => shard.read(place.start + offset, out),
            Form::Signed => {
                shard.read(place.start + offset, out)?;
                // Adds 128, modulo 256.
                out.iter_mut().for_each(|byte| *byte ^= 0x80);
                Ok(())
            }
            Form::Transposed => {
                let part = &weight.encoding.parts(name, &weight.dims)?[part];
                let (rows, columns, size) = (part.dims[0], part.dims[1], part.dtype.size());
                Transposed { shard, start: place.start, rows, columns, size }.read(offset, out)
            }
        }
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

/// A matrix `[rows, columns]` that a file holds as `[columns, rows]`.
struct Transposed<'a> {
    shard: &'a Shard,
    /// Where it begins in the file.
    start: u64,
    rows: u64,
    columns: u64,
    /// Bytes of an element.
    size: u64,
}

impl Transposed<'_> {
    /// Reads bytes `offset ..` of the matrix. Memory is that of the rows which they touch.
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let size = self.size as usize;
        let stride = self.columns * self.size;
        let first = offset / stride;
        let end = (offset + out.len() as u64).div_ceil(stride);
        let mut rows = vec![0; ((end - first) * stride) as usize];
        let mut column = vec![0; ((end - first) * self.size) as usize];
        for at in 0..self.columns {
            self.shard.read(self.start + (at * self.rows + first) * self.size, &mut column)?;
            let places = rows.chunks_exact_mut(stride as usize);
            for (row, element) in places.zip(column.chunks_exact(size)) {
                row[at as usize * size..][..size].copy_from_slice(element);
            }
        }
        let skipped = (offset - first * stride) as usize;
        out.copy_from_slice(&rows[skipped..][..out.len()]);
        Ok(())
    }
}
