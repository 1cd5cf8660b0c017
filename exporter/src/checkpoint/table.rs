//! The table of a checkpoint's weights: canonical name to type, shape and place.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use gemma4_format::ptd::{Description, LAYOUT, LAYOUT_KEY};
use gemma4_format::{DType, Encoding};
use safetensors::Dtype;

use super::header::{Shard, Tensor};
use super::{Layout, Refusal, SourceWeight, names, torchao};
use crate::Result;

/// Where one part of a weight lies.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    /// Index of the file.
    pub(super) shard: usize,
    /// First byte in it.
    pub(super) start: u64,
    /// Bytes.
    pub(super) length: u64,
    /// What lies there.
    pub(super) form: Form,
}

impl Place {
    /// Of a whole tensor.
    pub(super) fn new(shard: usize, tensor: &Tensor, form: Form) -> Self {
        Self { shard, start: tensor.start, length: tensor.length, form }
    }
}

/// How a part of a weight is written in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// As [`Encoding::parts`] describes it.
    Same,
    /// As signed bytes, which are 128 less.
    Signed,
    /// As `[columns, rows]` instead of `[rows, columns]`.
    Transposed,
    /// Whole numbers 0..=15, two to a byte in the part, as transposed floats of this type.
    TransposedNibbles(DType),
}

/// Tensors under canonical names, each with the index of its file.
pub(super) type Found<'a> = BTreeMap<String, (usize, &'a Tensor)>;

/// A weight, or a tensor that can't be one.
#[derive(Debug)]
pub(super) enum Entry {
    /// With the places of its parts, in the order of [`Encoding::parts`].
    Usable(SourceWeight, Vec<Place>),
    /// Of a type or shape that no model has. Refused only when it is asked for.
    Unusable { dtype: Dtype, shape: Vec<usize>, shard: usize },
}

#[derive(Debug)]
pub(super) struct Table {
    /// Under canonical names.
    pub(super) entries: BTreeMap<String, Entry>,
}

/// The layout that the metadata of the files tell.
pub(super) fn layout(shards: &[Shard]) -> Result<Layout, Refusal> {
    let mut layout = Layout::HuggingFace;
    for shard in shards {
        if shard.metadata.contains_key(torchao::NAMES_KEY) {
            return Ok(Layout::Torchao);
        }
        match shard.metadata.get(LAYOUT_KEY) {
            None => {}
            Some(found) if found == LAYOUT => layout = Layout::Bundle,
            Some(found) => {
                let (file, found) = (shard.name.clone(), found.clone());
                return Err(Refusal::Layout { file, found });
            }
        }
    }
    Ok(layout)
}

/// Checks that each tensor is in the file that the index names. An empty index says nothing.
pub(super) fn check_index(
    shards: &[Shard],
    index: &BTreeMap<String, String>,
) -> Result<(), Refusal> {
    let by_name: BTreeMap<&str, &Shard> = shards.iter().map(|s| (s.name.as_str(), s)).collect();
    let mut absent = index.iter().filter(|(tensor, file)| {
        !by_name.get(file.as_str()).is_some_and(|s| s.tensors.contains_key(*tensor))
    });
    match absent.next() {
        None => Ok(()),
        Some((tensor, file)) => Err(Refusal::StaleIndex {
            tensor: tensor.clone(),
            file: file.clone(),
            absent: 1 + absent.count(),
            total: index.len(),
        }),
    }
}

impl Table {
    /// The weights of the checkpoint in `dir`, whose files are `shards`.
    pub(super) fn new(dir: &Path, shards: &[Shard], layout: Layout) -> Result<Self> {
        let mut found = find(shards, layout).map_err(|refusal| refusal.at(dir))?;
        let mut entries = BTreeMap::new();
        match layout {
            Layout::HuggingFace => {}
            Layout::Bundle => take_quantized(shards, &mut found, &mut entries)
                .map_err(|refusal| refusal.at(dir))?,
            Layout::Torchao => torchao::take_quantized(dir, shards, &mut found, &mut entries)?,
        }
        for (name, (shard, tensor)) in found {
            let entry = dense(&name, shard, tensor);
            if entries.insert(name.clone(), entry).is_some() {
                let why = "a dense tensor has its name".to_owned();
                return Err(Refusal::Description { tensor: name, why }.at(dir));
            }
        }
        Ok(Self { entries })
    }

    /// Refuses a checkpoint whose config says that it is quantized, if a tensor shows it.
    pub(super) fn refuse_integers(&self, shards: &[Shard], method: &str) -> Result<(), Refusal> {
        for (name, entry) in &self.entries {
            let Entry::Unusable { dtype, shard, .. } = entry else { continue };
            if !matches!(dtype, Dtype::BF16 | Dtype::F16 | Dtype::F32) {
                return Err(Refusal::Quantized {
                    method: method.to_owned(),
                    tensor: name.clone(),
                    dtype: format!("{dtype:?} in `{}`", shards[*shard].name),
                });
            }
        }
        Ok(())
    }
}

/// The tensors of all files, less those that are no weights of the language model.
fn find(shards: &[Shard], layout: Layout) -> Result<Found<'_>, Refusal> {
    let mut found = Found::new();
    for (at, shard) in shards.iter().enumerate() {
        for (name, tensor) in &shard.tensors {
            let canonical = match layout {
                Layout::Bundle if name.starts_with("__pad.") => continue,
                Layout::Bundle => name,
                Layout::HuggingFace | Layout::Torchao if names::is_tower(name) => continue,
                Layout::HuggingFace | Layout::Torchao => names::canonical(name),
            };
            if let Some((first, _)) = found.insert(canonical.to_owned(), (at, tensor)) {
                return Err(Refusal::Duplicate {
                    tensor: canonical.to_owned(),
                    first: shards[first].name.clone(),
                    second: shard.name.clone(),
                });
            }
        }
    }
    Ok(found)
}

fn dense(name: &str, shard: usize, tensor: &Tensor) -> Entry {
    let dims: Option<Vec<u32>> = tensor.shape.iter().map(|d| u32::try_from(*d).ok()).collect();
    let encoding = DType::from_safetensors(tensor.dtype).map(Encoding::Dense);
    if let (Some(dims), Some(encoding)) = (dims, encoding)
        && encoding.parts(name, &dims).is_ok()
    {
        let place = Place::new(shard, tensor, Form::Same);
        return Entry::Usable(SourceWeight { dims, encoding }, vec![place]);
    }
    Entry::Unusable { dtype: tensor.dtype, shape: tensor.shape.clone(), shard }
}

/// Moves the tensors of the quantized weights, which the metadata describe, from `found`.
fn take_quantized(
    shards: &[Shard],
    found: &mut Found<'_>,
    entries: &mut BTreeMap<String, Entry>,
) -> Result<(), Refusal> {
    let mut taken = BTreeSet::new();
    for (name, json) in shards.iter().flat_map(|shard| &shard.metadata) {
        if name == LAYOUT_KEY {
            continue;
        }
        let wrong = |why: String| Refusal::Description { tensor: name.clone(), why };
        let Description { encoding, dims } =
            serde_json::from_str(json).map_err(|e| wrong(e.to_string()))?;
        let mut places = Vec::new();
        for part in encoding.parts(name, &dims).map_err(|e| wrong(e.to_string()))? {
            let lacking = || wrong(format!("there is no tensor `{}`", part.tensor));
            let (shard, tensor) = *found.get(&part.tensor).ok_or_else(lacking)?;
            let shape = tensor.shape.iter().map(|d| *d as u64);
            if DType::from_safetensors(tensor.dtype) != Some(part.dtype)
                || !shape.eq(part.dims.iter().copied())
            {
                let (dtype, dims) = (part.dtype.name(), &part.dims);
                return Err(wrong(format!("tensor `{}` is not {dtype}{dims:?}", part.tensor)));
            }
            places.push(Place::new(shard, tensor, Form::Same));
            if !taken.insert(part.tensor.clone()) {
                return Err(wrong(format!("tensor `{}` belongs to two weights", part.tensor)));
            }
        }
        if entries
            .insert(name.clone(), Entry::Usable(SourceWeight { dims, encoding }, places))
            .is_some()
        {
            return Err(wrong("it is described twice".to_owned()));
        }
    }
    found.retain(|name, _| !taken.contains(name));
    Ok(())
}
