//! Writes the weights of a checkpoint as a `.ptd` file, in one pass and in little memory.

use std::path::Path;

use gemma4_format::encoding::Part;
use gemma4_format::ptd::Layout;
use gemma4_format::{DType, Digest, Encoding};
use rayon::prelude::*;

use super::{Monitor, Pending};
use crate::quantize::{
    EMBEDDING, HEAD, Loss, Method, Recipe, RowQuantizer, TensorReport, Treatment, layer_of,
};
use crate::source::ModelSource;
use crate::{Error, Result};

/// Bytes that are copied at a time.
pub(super) const COPY_BLOCK: u64 = 8 << 20;
/// Rows are quantized in blocks of at most so many numbers (64 MiB of float32).
const ROW_BLOCK: u64 = 16 << 20;

/// A weight to be written.
#[derive(Clone, Debug)]
pub struct Item {
    /// Canonical name in the file.
    pub name: String,
    /// The weight of the checkpoint that it is made from.
    source: String,
    /// Extents.
    pub dims: Vec<u32>,
    /// How it will be stored.
    pub encoding: Encoding,
    /// How to quantize it; `None` copies what the checkpoint has.
    method: Option<Method>,
}

impl Item {
    /// The weights of those names as the checkpoint has them, or, with a recipe, as the recipe wants
    /// them, a head of its own included. A weight that is quantized already is always copied.
    ///
    /// # Errors
    /// As [`ModelSource::weight`], and [`Error::Quantize`] if the recipe does not fit a weight.
    pub fn all<'a>(
        checkpoint: &dyn ModelSource,
        names: impl IntoIterator<Item = &'a str>,
        recipe: Option<&Recipe>,
    ) -> Result<Vec<Self>> {
        let known = checkpoint.names();
        let last = known.iter().filter_map(|name| layer_of(name)).max();
        let layers = last.map_or(0, |last| last.saturating_add(1));
        let treatment =
            |name: &str| recipe.map_or(Treatment::Keep, |recipe| recipe.treatment(name, layers));
        let mut items = names
            .into_iter()
            .map(|name| Self::new(checkpoint, name, name, treatment(name)))
            .collect::<Result<Vec<Self>>>()?;
        if recipe.is_some_and(|recipe| recipe.untie_head)
            && !known.contains(&HEAD)
            && items.iter().any(|item| item.name == EMBEDDING)
            && matches!(checkpoint.weight(EMBEDDING)?.encoding, Encoding::Dense(_))
        {
            items.push(Self::new(checkpoint, HEAD, EMBEDDING, treatment(HEAD))?);
        }
        Ok(items)
    }

    /// The weight `source` under the name `name`.
    fn new(
        checkpoint: &dyn ModelSource,
        name: &str,
        source: &str,
        treatment: Treatment,
    ) -> Result<Self> {
        let weight = checkpoint.weight(source)?;
        let (name, source, dims) = (name.to_owned(), source.to_owned(), weight.dims.clone());
        match (weight.encoding, treatment) {
            (Encoding::Dense(_), Treatment::Quantize(codes, method)) => {
                let encoding = codes.encoding(dims.last().copied().unwrap_or(0));
                RowQuantizer::new(&name, &dims, encoding, method)?;
                Ok(Self { name, source, dims, encoding, method: Some(method) })
            }
            (encoding, _) => Ok(Self { name, source, dims, encoding, method: None }),
        }
    }
}

/// A complete data file that waits for its name.
#[derive(Debug)]
pub struct Written {
    /// The file.
    pub file: Pending,
    /// BLAKE3 of its header, as [`gemma4_format::Program::data_header`].
    pub header: Digest,
    /// Its length in bytes.
    pub length: u64,
    /// Per item its digest, as [`gemma4_format::Weight::digest`].
    pub digests: Vec<Digest>,
    /// Per item what became of it; nothing of random weights.
    pub reports: Vec<TensorReport>,
}

/// Writes `items` in their order to the file that is to become `target`.
///
/// Memory stays below a few hundred MiB whatever the size of the model. Equal items from equal
/// checkpoints give equal bytes, whatever the number of threads.
///
/// # Errors
/// Errors of reading and writing, [`Error::Quantize`] for numbers that can't be quantized,
/// [`Error::Interrupted`].
pub fn write_weights(
    checkpoint: &dyn ModelSource,
    items: &[Item],
    target: &Path,
    monitor: &Monitor,
) -> Result<Written> {
    let described: Vec<_> =
        items.iter().map(|item| (item.name.clone(), item.dims.clone(), item.encoding)).collect();
    let layout = Layout::new(&described)?;
    let file = Pending::create(target)?;
    file.set_length(layout.length)?;
    file.write_at(&layout.header, 0)?;
    monitor.begin(layout.weights.iter().flatten().map(|(part, _)| part.bytes()).sum());
    let (mut digests, mut reports) = (Vec::new(), Vec::new());
    for (item, parts) in items.iter().zip(&layout.weights) {
        monitor.weight(&item.name, &item.encoding.describe());
        let writer = WeightWriter { checkpoint, item, parts, file: &file, monitor };
        let (digest, loss) = match item.method {
            None => (writer.copy()?, None),
            Some(method) => writer.quantize(method).map(|(digest, loss)| (digest, Some(loss)))?,
        };
        digests.push(digest);
        reports.push(TensorReport::new(&item.name, &item.dims, item.encoding, loss.as_ref()));
    }
    monitor.end();
    Ok(Written { file, header: layout.header_digest(), length: layout.length, digests, reports })
}

/// What is needed to write one weight.
struct WeightWriter<'a> {
    checkpoint: &'a dyn ModelSource,
    item: &'a Item,
    /// With their offsets in the file.
    parts: &'a [(Part, u64)],
    file: &'a Pending,
    monitor: &'a Monitor,
}

impl WeightWriter<'_> {
    fn copy(&self) -> Result<Digest> {
        let mut hasher = blake3::Hasher::new();
        for (index, (part, place)) in self.parts.iter().enumerate() {
            stream(
                part.bytes(),
                COPY_BLOCK,
                |offset, block| self.checkpoint.read_part(&self.item.source, index, offset, block),
                |offset, block| {
                    hasher.update_rayon(block);
                    self.file.write_at(block, place + offset)?;
                    self.monitor.advance(block.len() as u64)
                },
            )?;
        }
        Ok(*hasher.finalize().as_bytes())
    }

    /// Codes go to the file as they are made. The digest wants scales and zero points after all
    /// codes, so those, an eighth of the bytes or less, are collected in memory.
    fn quantize(&self, method: Method) -> Result<(Digest, Loss)> {
        let Item { name, source, dims, encoding, .. } = self.item;
        let quantizer = RowQuantizer::new(name, dims, *encoding, method)?;
        let Encoding::Dense(dtype) = self.checkpoint.weight(source)?.encoding else {
            let why = "it is quantized already".to_owned();
            return Err(Error::Quantize { tensor: name.clone(), why });
        };
        let (rows, k) = (u64::from(dims[0]), u64::from(dims[1]));
        let row_bytes = k * dtype.size();
        let block_rows = (ROW_BLOCK / k).clamp(1, rows);
        let strides: Vec<usize> =
            self.parts.iter().map(|(part, _)| (part.bytes() / rows) as usize).collect();
        let mut codes = vec![0; block_rows as usize * strides[0]];
        let mut others: Vec<Vec<u8>> =
            self.parts[1..].iter().map(|(part, _)| vec![0; part.bytes() as usize]).collect();
        let mut hasher = blake3::Hasher::new();
        let mut loss = Loss::default();
        stream(
            rows * row_bytes,
            block_rows * row_bytes,
            |offset, block| self.checkpoint.read_part(source, 0, offset, block),
            |offset, block| {
                let first = offset / row_bytes;
                let count = block.len() / row_bytes as usize;
                let codes = &mut codes[..count * strides[0]];
                let rows = RowBlock { quantizer: &quantizer, first, source: block, dtype, count };
                loss.add(&rows.quantize(codes, &mut others, &strides)?);
                hasher.update_rayon(codes);
                self.file.write_at(codes, self.parts[0].1 + first * strides[0] as u64)?;
                self.monitor.advance(codes.len() as u64)
            },
        )?;
        for (bytes, (_, place)) in others.iter().zip(&self.parts[1..]) {
            hasher.update_rayon(bytes);
            self.file.write_at(bytes, *place)?;
            self.monitor.advance(bytes.len() as u64)?;
        }
        Ok((*hasher.finalize().as_bytes(), loss))
    }
}

/// Consecutive rows of a dense weight.
struct RowBlock<'a> {
    quantizer: &'a RowQuantizer,
    /// Number of the first row.
    first: u64,
    source: &'a [u8],
    dtype: DType,
    /// How many rows.
    count: usize,
}

impl RowBlock<'_> {
    /// Quantizes the rows, in parallel, into `codes` of this block and `others` of the weight.
    fn quantize(
        &self,
        codes: &mut [u8],
        others: &mut [Vec<u8>],
        strides: &[usize],
    ) -> Result<Loss> {
        // The bytes of each row: a slice of every part.
        let mut outputs: Vec<Vec<&mut [u8]>> =
            codes.chunks_exact_mut(strides[0]).map(|codes| vec![codes]).collect();
        for (bytes, stride) in others.iter_mut().zip(&strides[1..]) {
            let start = self.first as usize * stride;
            let bytes = &mut bytes[start..start + self.count * stride];
            for (output, part) in outputs.iter_mut().zip(bytes.chunks_exact_mut(*stride)) {
                output.push(part);
            }
        }
        let losses = self
            .source
            .par_chunks_exact(self.source.len() / self.count)
            .zip(outputs)
            .enumerate()
            .map_init(
                || self.quantizer.scratch(),
                |scratch, (row, (source, mut output))| {
                    let row = self.first + row as u64;
                    self.quantizer.quantize(row, source, self.dtype, &mut output, scratch)
                },
            )
            .collect::<Result<Vec<Loss>>>()?;
        // Summed in the order of rows, so that the sum does not depend on the threads.
        let mut sum = Loss::default();
        losses.iter().for_each(|loss| sum.add(loss));
        Ok(sum)
    }
}

/// Passes `total` bytes, `block` at a time, from `read` to `consume`, reading ahead by a block.
pub(super) fn stream(
    total: u64,
    block: u64,
    read: impl Fn(u64, &mut [u8]) -> Result<()> + Sync,
    mut consume: impl FnMut(u64, &[u8]) -> Result<()> + Send,
) -> Result<()> {
    let size = |offset: u64| (total - offset).min(block) as usize;
    let mut current = vec![0; size(0)];
    let mut next = vec![0; if total > block { block as usize } else { 0 }];
    read(0, &mut current)?;
    let mut offset = 0;
    while offset < total {
        let ahead = offset + current.len() as u64;
        next.truncate(size(ahead));
        let (done, got) = rayon::join(
            || consume(offset, &current),
            || if ahead < total { read(ahead, &mut next) } else { Ok(()) },
        );
        done?;
        got?;
        std::mem::swap(&mut current, &mut next);
        offset = ahead;
    }
    Ok(())
}
