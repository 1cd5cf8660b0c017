//! The `.ptd` data file: a safetensors file whose tensors are aligned for a device.
//!
//! Tensors lie in order of first use. The header is padded with spaces so that data starts on a
//! [`DATA_ALIGNMENT`] boundary; every tensor starts on a [`TENSOR_ALIGNMENT`] boundary. The
//! safetensors format allows no holes, so gaps are U8 tensors of zeros named `__pad.N`.
//! `__metadata__` describes each quantized weight (see [`Description`]); it names no program, and
//! several programs may share one file. `gemma4-quantize` writes its bundles in this layout too.

use std::collections::HashMap;

use safetensors::tensor::Metadata;
use serde::{Deserialize, Serialize};

use crate::encoding::{DType, Encoding, Part};
use crate::program::{Digest, Weight};
use crate::{Error, Result};

/// Data starts on a multiple of this in the file: a page.
pub const DATA_ALIGNMENT: u64 = 4096;
/// Every tensor starts on a multiple of this: the alignment of GPU allocations.
pub const TENSOR_ALIGNMENT: u64 = 256;
/// Largest header that is read, in bytes.
pub const MAX_HEADER: u64 = 64 << 20;
/// `__metadata__` key that marks a file of this layout.
pub const LAYOUT_KEY: &str = "gemma4.layout";
/// Its value.
pub const LAYOUT: &str = "1";

/// What `__metadata__` says, as JSON under the weight's name, of each quantized weight.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// How its tensors are to be read.
    pub encoding: Encoding,
    /// `[N, K]`.
    pub dims: Vec<u32>,
}

/// Where each tensor of a file to be written goes.
#[derive(Clone, Debug)]
pub struct Layout {
    /// The first bytes of the file: length word and padded JSON.
    pub header: Vec<u8>,
    /// Per weight given to [`Layout::new`], its parts with their offsets in the file.
    pub weights: Vec<Vec<(Part, u64)>>,
    /// Length of the whole file in bytes. Bytes between tensors are zero.
    pub length: u64,
}

impl Layout {
    /// Lays out weights `(name, dims, encoding)` in the order given.
    pub fn new(weights: &[(String, Vec<u32>, Encoding)]) -> Result<Self> {
        let mut metadata = serde_json::Map::new();
        metadata.insert(LAYOUT_KEY.to_owned(), LAYOUT.into());
        let mut tensors = serde_json::Map::new();
        let mut placed: Vec<Vec<(Part, u64)>> = Vec::with_capacity(weights.len());
        let mut end = 0u64;
        let mut pads = 0;
        for (name, dims, encoding) in weights {
            if matches!(encoding, Encoding::Quantized { .. }) {
                let text =
                    serde_json::to_string(&Description { encoding: *encoding, dims: dims.clone() });
                let text = text.map_err(|e| Error::weight(name, e))?;
                metadata.insert(name.clone(), text.into());
            }
            let mut parts = Vec::new();
            for part in encoding.parts(name, dims)? {
                let start = end.next_multiple_of(TENSOR_ALIGNMENT);
                if start > end {
                    insert(&mut tensors, format!("__pad.{pads}"), DType::U8, &[start - end], end)?;
                    pads += 1;
                }
                end = insert(&mut tensors, part.tensor.clone(), part.dtype, &part.dims, start)?;
                parts.push((part, start));
            }
            placed.push(parts);
        }
        metadata.sort_keys();
        let mut json = serde_json::Map::new();
        json.insert("__metadata__".to_owned(), metadata.into());
        json.append(&mut tensors);
        let mut json = serde_json::to_string(&json).map_err(|e| Error::malformed("header", e))?;
        let data = (8 + json.len() as u64).next_multiple_of(DATA_ALIGNMENT);
        let padding = (data - 8) as usize - json.len();
        json.extend(std::iter::repeat_n(' ', padding));
        let mut header = ((data - 8).to_le_bytes()).to_vec();
        header.extend(json.into_bytes());
        for (_, offset) in placed.iter_mut().flatten() {
            *offset += data;
        }
        Ok(Self { header, weights: placed, length: data + end })
    }

    /// BLAKE3 of the header, as [`crate::Program::data_header`] holds it.
    pub fn header_digest(&self) -> Digest {
        *blake3::hash(&self.header).as_bytes()
    }
}

fn insert(
    tensors: &mut serde_json::Map<String, serde_json::Value>,
    name: String,
    dtype: DType,
    dims: &[u64],
    start: u64,
) -> Result<u64> {
    let end = start + dims.iter().product::<u64>() * dtype.size();
    let entry = serde_json::json!({
        "dtype": dtype.name(), "shape": dims, "data_offsets": [start, end],
    });
    if tensors.insert(name.clone(), entry).is_some() {
        return Err(Error::weight(name, "stands twice"));
    }
    Ok(end)
}

/// The header of a data file.
#[derive(Clone, Debug)]
pub struct Header {
    tensors: HashMap<String, Tensor>,
    /// Byte ranges of the file that belong to pads.
    pads: Vec<(u64, u64)>,
    digest: Digest,
    length: u64,
}

#[derive(Clone, Debug)]
struct Tensor {
    dtype: Option<DType>,
    dims: Vec<u64>,
    /// Byte range in the file.
    range: (u64, u64),
}

impl Header {
    /// Number of bytes at the start of a file that [`Header::parse`] needs, from its first 8.
    pub fn size(file_length: u64, first: [u8; 8]) -> Result<u64> {
        if first.starts_with(b"GGUF") {
            return Err(Error::WrongKind { what: "a GGUF file", wanted: "a data file (`.ptd`)" });
        }
        if first == crate::pte::MAGIC {
            return Err(Error::WrongKind {
                what: "a program (`.pte`)",
                wanted: "a data file (`.ptd`)",
            });
        }
        if &first[4..8] == b"ET12" || &first[4..8] == b"FT01" {
            return Err(Error::WrongKind {
                what: "an ExecuTorch file",
                wanted: "a data file (`.ptd`)",
            });
        }
        let json = u64::from_le_bytes(first);
        if json > MAX_HEADER {
            return Err(Error::malformed("the header", format!("its length is {json}")));
        }
        let size = json + 8;
        if size > file_length {
            return Err(Error::Truncated { need: size, have: file_length });
        }
        Ok(size)
    }

    /// Parses the first [`Header::size`] bytes of a file of `file_length` bytes.
    pub fn parse(bytes: &[u8], file_length: u64) -> Result<Self> {
        // The crate checks that offsets follow one another without gap or overlap and agree with
        // dtype and shape.
        let json = bytes.get(8..).unwrap_or_default();
        let metadata: Metadata =
            serde_json::from_slice(json).map_err(|e| Error::malformed("the header", e))?;
        let data = bytes.len() as u64;
        let mut tensors = HashMap::new();
        let mut pads = Vec::new();
        // Offsets are below the end of the data, so the sums below can't overflow once this one did not.
        let end = data
            .checked_add(metadata.data_len() as u64)
            .ok_or_else(|| Error::malformed("the header", "its tensors are too long"))?;
        for (name, info) in metadata.tensors() {
            let range = (data + info.data_offsets.0 as u64, data + info.data_offsets.1 as u64);
            if name.starts_with("__pad.") {
                pads.push(range);
                continue;
            }
            let dims = info.shape.iter().map(|d| *d as u64).collect();
            let dtype = DType::from_safetensors(info.dtype);
            tensors.insert(name, Tensor { dtype, dims, range });
        }
        pads.sort_unstable();
        if file_length < end {
            return Err(Error::Truncated { need: end, have: file_length });
        }
        if file_length > end {
            return Err(Error::Trailing { extra: file_length - end });
        }
        Ok(Self { tensors, pads, digest: *blake3::hash(bytes).as_bytes(), length: file_length })
    }

    /// Whether this is the file with which a program was exported.
    pub fn check(&self, header: &Digest, length: u64) -> Result<()> {
        if self.digest != *header || self.length != length {
            return Err(Error::OtherWeights { found: short(&self.digest), wanted: short(header) });
        }
        Ok(())
    }

    /// Byte ranges `(start, end)` in the file of the parts of a weight.
    pub fn locate(&self, weight: &Weight) -> Result<Vec<(u64, u64)>> {
        let mut ranges = Vec::new();
        for part in weight.encoding.parts(&weight.name, &weight.dims)? {
            let tensor = self.tensors.get(&part.tensor).ok_or_else(|| {
                Error::weight(
                    &weight.name,
                    format!("the data file has no tensor `{}`", part.tensor),
                )
            })?;
            if tensor.dtype != Some(part.dtype) || tensor.dims != part.dims {
                return Err(Error::weight(
                    &weight.name,
                    format!("tensor `{}` is not {}{:?}", part.tensor, part.dtype.name(), part.dims),
                ));
            }
            if tensor.range.0 % TENSOR_ALIGNMENT != 0 {
                return Err(Error::weight(&weight.name, "is not aligned"));
            }
            ranges.push(tensor.range);
        }
        Ok(ranges)
    }

    /// Byte ranges that must be zero.
    pub fn pads(&self) -> &[(u64, u64)] {
        &self.pads
    }
}

fn short(digest: &Digest) -> String {
    digest[..6].iter().map(|b| format!("{b:02x}")).collect()
}
