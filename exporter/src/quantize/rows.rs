//! Quantizes all rows of a weight, a block at a time, on the CPU.

use gemma4_format::DType;
use rayon::prelude::*;

use super::RowQuantizer;
use super::report::Loss;
use crate::Result;
use crate::output::stream;

/// Rows are quantized in blocks of at most so many numbers (64 MiB of float32).
const BLOCK: u64 = 16 << 20;

/// The rows of a weight that is to be quantized.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows<'a> {
    pub(crate) quantizer: &'a RowQuantizer,
    /// Type of the numbers.
    pub(crate) dtype: DType,
    /// How many there are.
    pub(crate) count: u64,
    /// Bytes of a row in each part of the encoding.
    pub(crate) strides: &'a [usize],
}

/// Consecutive rows that were quantized.
#[derive(Debug)]
pub(crate) struct Quantized<'a> {
    /// Number of the first.
    pub(crate) first: u64,
    /// The bytes of each part of the encoding.
    pub(crate) parts: Vec<&'a [u8]>,
    /// What each row has lost.
    pub(crate) losses: Vec<Loss>,
}

impl Rows<'_> {
    /// Bytes of a row before.
    pub(crate) fn bytes(&self) -> usize {
        self.quantizer.k * self.dtype.size() as usize
    }

    /// Quantizes all rows. `read` gives bytes from an offset on; `consume` gets blocks in order.
    ///
    /// # Errors
    /// As [`RowQuantizer::quantize`], and those of `read` and `consume`.
    pub(super) fn quantize(
        &self,
        read: impl Fn(u64, &mut [u8]) -> Result<()> + Sync,
        mut consume: impl FnMut(Quantized<'_>) -> Result<()> + Send,
    ) -> Result<()> {
        let row_bytes = self.bytes() as u64;
        let block = (BLOCK / self.quantizer.k as u64).clamp(1, self.count);
        let mut parts: Vec<Vec<u8>> =
            self.strides.iter().map(|stride| vec![0; stride * block as usize]).collect();
        stream(self.count * row_bytes, block * row_bytes, read, |offset, source| {
            let first = offset / row_bytes;
            let losses = self.quantize_block(first, source, &mut parts)?;
            let bytes = |(part, stride): (_, &usize)| -> &[u8] {
                let part: &Vec<u8> = part;
                &part[..losses.len() * stride]
            };
            let parts = parts.iter().zip(self.strides).map(bytes).collect();
            consume(Quantized { first, parts, losses })
        })
    }

    /// Quantizes the rows of `source`, in parallel, into the first bytes of each part.
    ///
    /// # Errors
    /// As [`RowQuantizer::quantize`], of the first row that has one.
    pub(crate) fn quantize_block(
        &self,
        first: u64,
        source: &[u8],
        parts: &mut [Vec<u8>],
    ) -> Result<Vec<Loss>> {
        let mut outputs: Vec<Vec<&mut [u8]>> = Vec::new();
        outputs.resize_with(source.len() / self.bytes(), Vec::new);
        for (part, stride) in parts.iter_mut().zip(self.strides) {
            let rows = part.chunks_exact_mut(*stride);
            outputs.iter_mut().zip(rows).for_each(|(output, row)| output.push(row));
        }
        let losses: Vec<Result<Loss>> = source
            .par_chunks_exact(self.bytes())
            .zip(outputs)
            .enumerate()
            .map_init(
                || self.quantizer.scratch(),
                |scratch, (row, (source, mut output))| {
                    let row = first + row as u64;
                    self.quantizer.quantize(row, source, self.dtype, &mut output, scratch)
                },
            )
            .collect();
        losses.into_iter().collect()
    }
}
