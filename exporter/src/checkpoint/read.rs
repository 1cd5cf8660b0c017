//! Reading the numbers of a weight, a piece at a time.

use gemma4_format::{DType, Encoding};

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
            Form::TransposedNibbles(dtype) => {
                let Encoding::Quantized { group, .. } = weight.encoding else { return Ok(()) };
                let (rows, columns) = (weight.dims[0], weight.dims[1] / group);
                let (rows, columns) = (u64::from(rows), u64::from(columns));
                let start = place.start;
                let floats = Transposed { shard, start, rows, columns, size: dtype.size() };
                // Whole rows around what is wanted.
                let stride = columns.div_ceil(2);
                let first = offset / stride;
                let count = (offset + out.len() as u64).div_ceil(stride) - first;
                let mut numbers = vec![0; (count * columns * dtype.size()) as usize];
                floats.read(first * columns * dtype.size(), &mut numbers)?;
                let packed = pack_nibbles(dtype, &numbers, columns as usize);
                out.copy_from_slice(&packed[(offset - first * stride) as usize..][..out.len()]);
                Ok(())
            }
        }
    }
}

/// Rows of whole numbers 0..=15 as nibbles, the even column in the low one.
fn pack_nibbles(dtype: DType, numbers: &[u8], columns: usize) -> Vec<u8> {
    let row_bytes = columns * dtype.size() as usize;
    let rows = numbers.chunks_exact(row_bytes);
    let nibble =
        |row: &[u8], at: usize| if at < columns { dtype.read(row, at) as u8 & 15 } else { 0 };
    rows.flat_map(|row| {
        (0..columns).step_by(2).map(move |at| nibble(row, at) | nibble(row, at + 1) << 4)
    })
    .collect()
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
