//! Writes the weights of a checkpoint as a `.ptd` file, in one pass and in little memory.

use std::ops::Range;
use std::path::Path;

use gemma4_format::encoding::Part;
use gemma4_format::ptd::Layout;
use gemma4_format::{DType, Digest, Encoding};

use super::{Monitor, Pending, Sink};
use crate::quantize::{
    EMBEDDING, HEAD, Loss, Method, Quantizer, Recipe, RowQuantizer, Rows, TensorReport, Treatment,
    layer_of,
};
use crate::source::{ModelSource, decode_rows};
use crate::{Error, Result};

/// Bytes that are copied at a time.
pub(super) const COPY_BLOCK: u64 = 8 << 20;

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

    /// What became of it, with that loss if it was quantized.
    pub(crate) fn report(&self, loss: Option<&Loss>) -> TensorReport {
        TensorReport::new(&self.name, &self.dims, self.encoding, loss)
    }

    /// Rows of it in float32, as they will be read from the file that it is written to.
    ///
    /// # Errors
    /// As [`write_weights`].
    ///
    /// # Panics
    /// If it has fewer rows.
    pub fn rows_f32(&self, checkpoint: &dyn ModelSource, rows: Range<u64>) -> Result<Vec<f32>> {
        let Some(method) = self.method else {
            return checkpoint.read_rows_f32(&self.source, rows);
        };
        let quantizer = RowQuantizer::new(&self.name, &self.dims, self.encoding, method)?;
        let (dtype, k) = (self.source_type(checkpoint)?, self.dims[1]);
        let stride = u64::from(k) * dtype.size();
        let count = (rows.end - rows.start) as usize;
        let mut source = vec![0; count * stride as usize];
        checkpoint.read_part(&self.source, 0, rows.start * stride, &mut source)?;
        let strides = self.encoding.parts(&self.name, &[1, k])?;
        let strides: Vec<usize> = strides.iter().map(|part| part.bytes() as usize).collect();
        let mut parts: Vec<Vec<u8>> = strides.iter().map(|bytes| vec![0; bytes * count]).collect();
        let block = Rows { quantizer: &quantizer, dtype, count: count as u64, strides: &strides };
        block.quantize_block(rows.start, &source, &mut parts)?;
        let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
        Ok(decode_rows(self.encoding, k, &parts))
    }

    /// The type of the numbers that it is quantized from.
    fn source_type(&self, checkpoint: &dyn ModelSource) -> Result<DType> {
        match checkpoint.weight(&self.source)?.encoding {
            Encoding::Dense(dtype) => Ok(dtype),
            Encoding::Quantized { .. } => {
                let why = "it is quantized already".to_owned();
                Err(Error::Quantize { tensor: self.name.clone(), why })
            }
        }
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
/// checkpoints give equal bytes, whatever the number of threads and whatever quantizes.
///
/// # Errors
/// Errors of reading and writing, [`Error::Quantize`] for numbers that can't be quantized,
/// [`Error::OnGpu`], [`Error::Interrupted`].
pub fn write_weights(
    checkpoint: &dyn ModelSource,
    items: &[Item],
    target: &Path,
    quantizer: &Quantizer,
    monitor: &Monitor,
) -> Result<Written> {
    let layout = lay_out(items)?;
    let file = Pending::create(target)?;
    let writer = WeightWriter { checkpoint, file: file.sink(), quantizer, monitor };
    writer.begin(&layout)?;
    let (mut digests, mut reports) = (Vec::new(), Vec::new());
    for (item, parts) in items.iter().zip(&layout.weights) {
        let (digest, loss) = writer.write(item, parts)?;
        digests.push(digest);
        reports.push(item.report(loss.as_ref()));
    }
    monitor.end();
    Ok(Written { file, header: layout.header_digest(), length: layout.length, digests, reports })
}

/// Where the parts of each item go.
pub(crate) fn lay_out(items: &[Item]) -> Result<Layout> {
    let described: Vec<_> =
        items.iter().map(|item| (item.name.clone(), item.dims.clone(), item.encoding)).collect();
    Ok(Layout::new(&described)?)
}

/// Writes weights, one at a time, to a file.
pub(crate) struct WeightWriter<'a> {
    pub(crate) checkpoint: &'a dyn ModelSource,
    pub(crate) file: &'a Sink,
    pub(crate) quantizer: &'a Quantizer,
    pub(crate) monitor: &'a Monitor,
}

/// The parts of a weight with their offsets in the file.
type Parts = [(Part, u64)];

impl WeightWriter<'_> {
    /// Writes the header and sets the length of the file; other bytes that it has are kept.
    pub(crate) fn begin(&self, layout: &Layout) -> Result<()> {
        self.file.set_length(layout.length)?;
        self.file.write_at(&layout.header, 0)?;
        self.monitor.begin(layout.weights.iter().flatten().map(|(part, _)| part.bytes()).sum());
        Ok(())
    }

    /// Writes a weight; returns the digest of its bytes and, if it was quantized, its loss.
    pub(crate) fn write(&self, item: &Item, parts: &Parts) -> Result<(Digest, Option<Loss>)> {
        self.monitor.weight(&item.name, &item.encoding.describe());
        match item.method {
            None => Ok((self.copy(item, parts)?, None)),
            Some(method) => {
                let (digest, loss) = self.quantize(item, parts, method)?;
                Ok((digest, Some(loss)))
            }
        }
    }

    /// The digest of what the file has in the place of a weight.
    pub(crate) fn written(&self, parts: &Parts) -> Result<Digest> {
        self.digest(
            parts,
            |_, place, offset, block| self.file.read_at(block, place + offset),
            |_, _| Ok(()),
        )
    }

    fn copy(&self, item: &Item, parts: &Parts) -> Result<Digest> {
        let read = |index, _, offset, block: &mut [u8]| {
            self.checkpoint.read_part(&item.source, index, offset, block)
        };
        self.digest(parts, read, |place, block| self.file.write_at(block, place))
    }

    /// Streams all parts from `read`, which is told their index, place, and an offset in them, to
    /// `write`, which is told the place of the block.
    fn digest(
        &self,
        parts: &Parts,
        read: impl Fn(usize, u64, u64, &mut [u8]) -> Result<()> + Sync,
        write: impl Fn(u64, &[u8]) -> Result<()> + Sync,
    ) -> Result<Digest> {
        let mut hasher = blake3::Hasher::new();
        for (index, (part, place)) in parts.iter().enumerate() {
            stream(
                part.bytes(),
                COPY_BLOCK,
                |offset, block| read(index, *place, offset, block),
                |offset, block| {
                    hasher.update_rayon(block);
                    write(place + offset, block)?;
                    self.monitor.advance(block.len() as u64)
                },
            )?;
        }
        Ok(*hasher.finalize().as_bytes())
    }

    /// Codes go to the file as they are made. The digest wants scales and zero points after all
    /// codes, so those, an eighth of the bytes or less, are collected in memory.
    fn quantize(&self, item: &Item, parts: &Parts, method: Method) -> Result<(Digest, Loss)> {
        let Item { name, source, dims, encoding, .. } = item;
        let quantizer = RowQuantizer::new(name, dims, *encoding, method)?;
        let dtype = item.source_type(self.checkpoint)?;
        let rows = u64::from(dims[0]);
        let strides: Vec<usize> =
            parts.iter().map(|(part, _)| (part.bytes() / rows) as usize).collect();
        let mut others: Vec<Vec<u8>> =
            parts[1..].iter().map(|(part, _)| vec![0; part.bytes() as usize]).collect();
        let mut hasher = blake3::Hasher::new();
        let mut loss = Loss::default();
        self.quantizer.quantize(
            Rows { quantizer: &quantizer, dtype, count: rows, strides: &strides },
            |offset, block| self.checkpoint.read_part(source, 0, offset, block),
            |rows| {
                let codes = rows.parts[0];
                hasher.update_rayon(codes);
                self.file.write_at(codes, parts[0].1 + rows.first * strides[0] as u64)?;
                let others = others.iter_mut().zip(&strides[1..]);
                for (part, (bytes, stride)) in rows.parts[1..].iter().zip(others) {
                    bytes[rows.first as usize * stride..][..part.len()].copy_from_slice(part);
                }
                // In the order of rows: the sum does not depend on threads or blocks.
                rows.losses.iter().for_each(|row| loss.add(row));
                self.monitor.advance(codes.len() as u64)
            },
        )?;
        for (bytes, (_, place)) in others.iter().zip(&parts[1..]) {
            hasher.update_rayon(bytes);
            self.file.write_at(bytes, *place)?;
            self.monitor.advance(bytes.len() as u64)?;
        }
        Ok((*hasher.finalize().as_bytes(), loss))
    }
}

/// Passes `total` bytes, `block` at a time, from `read` to `consume`, reading ahead by a block.
pub(crate) fn stream(
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
