//! Reads a GGUF file, with all that an export needs: config, tokenizer, template, weights.
//!
//! Opening reads the header and checks that the file is whole and of a kind that can be used; a
//! [`Refusal`] says what is wrong and what to do. Blocks are converted while they are read, into
//! an encoding that holds their values exactly.

mod blocks;
mod config;
mod header;
mod metadata;
mod names;
mod refusal;
mod split;
mod tokenizer;

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::FileExt;
use std::path::Path;

use rayon::prelude::*;

use crate::checkpoint::SourceWeight;
use crate::source::ModelSource;
use crate::{Error, Result};
use header::{Header, Tensor};

pub use refusal::Refusal;

/// Bytes of blocks that are converted at a time.
const READ: usize = 4 << 20;
/// Blocks that a thread converts at a time.
const TASK: usize = 1 << 10;

/// An open GGUF model.
#[derive(Debug)]
pub struct Gguf {
    /// The parts; the first has the keys.
    parts: Vec<Header>,
    weights: BTreeMap<String, Weight>,
    config: String,
    generation_config: String,
    quantization: String,
    identity: String,
}

#[derive(Debug)]
struct Weight {
    source: SourceWeight,
    tensor: Tensor,
    /// Index of the file.
    part: usize,
}

/// The tokenizer of a GGUF file, which may have no weights, as a tokenizer.json.
///
/// # Errors
/// [`Error::Gguf`], or an error of the file system.
pub fn tokenizer_json(path: impl AsRef<Path>) -> Result<Option<Vec<u8>>> {
    let path = path.as_ref();
    tokenizer::tokenizer_json(&Header::open(path)?.metadata).map_err(|refusal| refusal.at(path))
}

impl Gguf {
    /// Opens a file, or with any part of a split model all of them.
    ///
    /// # Errors
    /// [`Error::Gguf`] with a [`Refusal`], or an error of the file system.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let parts = split::open(path.as_ref())?;
        let first = &parts[0];
        let refused = |refusal: Refusal| refusal.at(&first.path);
        config::check_supported(&first.metadata).map_err(refused)?;
        let layers = config::layers(&first.metadata).map_err(refused)?;
        let (weights, rope_factors) = table(&parts, layers)?;
        let embedding = weights.values().find(|weight| weight.tensor.name == names::EMBEDDING);
        let Some(embedding) = embedding else {
            let tensor = names::EMBEDDING.to_owned();
            return Err(refused(Refusal::MissingTensor { tensor }));
        };
        let has_values = |layer| {
            let name = names::canonical(&names::value_projection(layer), layers);
            name.is_some_and(|name| weights.contains_key(&name))
        };
        let facts = config::Facts {
            vocab_size: embedding.source.dims[0],
            has_values: &has_values,
            rope_factors,
        };
        let config = config::config_json(&first.metadata, &facts).map_err(refused)?;
        let generation_config = config::generation_config(&first.metadata).map_err(refused)?;
        let (quantization, identity) = (quantization(&weights), identity(&parts));
        Ok(Self { parts, weights, config, generation_config, quantization, identity })
    }

    fn first(&self) -> &Header {
        &self.parts[0]
    }

    fn find(&self, name: &str) -> Result<&Weight> {
        self.weights.get(name).ok_or_else(|| {
            Refusal::MissingTensor { tensor: name.to_owned() }.at(&self.first().path)
        })
    }
}

/// Weights under canonical names, and the numbers of `rope_freqs`.
type Table = (BTreeMap<String, Weight>, Option<Vec<f32>>);

fn table(parts: &[Header], layers: u32) -> Result<Table> {
    let mut weights = BTreeMap::new();
    let mut rope_factors = None;
    for (part, header) in parts.iter().enumerate() {
        for tensor in &header.tensors {
            let refused = |refusal: Refusal| refusal.at(&header.path);
            let name = || tensor.name.clone();
            if tensor.name == names::ROPE_FACTORS {
                if rope_factors.replace(numbers(header, tensor)?).is_some() {
                    return Err(refused(Refusal::Duplicate { tensor: name() }));
                }
                continue;
            }
            let canonical = names::canonical(&tensor.name, layers)
                .ok_or_else(|| refused(Refusal::UnknownTensor { tensor: name() }))?;
            let encoding = tensor.kind.encoding();
            encoding.parts(&canonical, &tensor.dims)?;
            let source = SourceWeight { dims: tensor.dims.clone(), encoding };
            let weight = Weight { source, tensor: tensor.clone(), part };
            if weights.insert(canonical, weight).is_some() {
                return Err(refused(Refusal::Duplicate { tensor: name() }));
            }
        }
    }
    Ok((weights, rope_factors))
}

/// The numbers of a short float32 vector.
fn numbers(header: &Header, tensor: &Tensor) -> Result<Vec<f32>> {
    if tensor.kind != blocks::Kind::F32 || tensor.dims.len() != 1 || tensor.length > 1 << 16 {
        let why = format!("it is {}{:?}", tensor.kind.name(), tensor.dims);
        return Err(Refusal::Tensor { tensor: tensor.name.clone(), why }.at(&header.path));
    }
    let mut bytes = vec![0; tensor.length as usize];
    let read = header.file.read_exact_at(&mut bytes, tensor.start);
    read.map_err(Error::io("read", &header.path))?;
    Ok(bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
}

/// The type that most bytes are of.
fn quantization(weights: &BTreeMap<String, Weight>) -> String {
    let mut bytes = BTreeMap::new();
    for Weight { tensor, .. } in weights.values() {
        *bytes.entry(tensor.kind).or_insert(0u64) += tensor.length;
    }
    let most = bytes.iter().max_by_key(|(_, bytes)| **bytes);
    format!("gguf {}", most.map_or("", |(kind, _)| kind.name()))
}

fn identity(parts: &[Header]) -> String {
    let mut hasher = blake3::Hasher::new();
    parts.iter().for_each(|part| {
        hasher.update(part.digest.as_bytes());
    });
    hasher.finalize().to_hex().to_string()
}

impl ModelSource for Gguf {
    fn layout(&self) -> &'static str {
        "gguf"
    }

    /// Of the headers of all parts.
    fn identity(&self) -> &str {
        &self.identity
    }

    fn recipe(&self) -> Option<&str> {
        Some(&self.quantization)
    }

    fn config_json(&self) -> &str {
        &self.config
    }

    fn generation_config(&self) -> Option<&str> {
        Some(&self.generation_config)
    }

    fn tokenizer_json(&self) -> Result<Option<Vec<u8>>> {
        let Header { metadata, path, .. } = self.first();
        tokenizer::tokenizer_json(metadata).map_err(|refusal| refusal.at(path))
    }

    fn chat_template(&self) -> Result<Option<String>> {
        let Header { metadata, path, .. } = self.first();
        let template = metadata.optional_str("tokenizer.chat_template");
        Ok(template.map_err(|refusal| refusal.at(path))?.map(str::to_owned))
    }

    fn names(&self) -> Vec<&str> {
        self.weights.keys().map(String::as_str).collect()
    }

    fn weight(&self, name: &str) -> Result<&SourceWeight> {
        self.find(name).map(|weight| &weight.source)
    }

    fn read_part(&self, name: &str, part: usize, offset: u64, out: &mut [u8]) -> Result<()> {
        let Weight { tensor, part: file, .. } = self.find(name)?;
        let header = &self.parts[*file];
        let Some(converter) = tensor.kind.converter(part) else {
            assert!(part == 0 && offset + out.len() as u64 <= tensor.length, "range of the weight");
            let read = header.file.read_exact_at(out, tensor.start + offset);
            return read.map_err(Error::io("read", &header.path));
        };
        let (stride, bytes) = (converter.stride, tensor.kind.block().bytes as usize);
        let end = offset + out.len() as u64;
        assert!(end <= tensor.length / bytes as u64 * stride as u64, "range within the part");
        let (mut at, mut out) = (offset, out);
        let mut source = Vec::new();
        let mut converted = Vec::new();
        while !out.is_empty() {
            // Whole blocks around what is wanted.
            let first = at / stride as u64;
            let skip = (at % stride as u64) as usize;
            let count = (skip + out.len()).div_ceil(stride).min(READ / bytes);
            source.resize(count * bytes, 0);
            converted.resize(count * stride, 0);
            let read = header.file.read_exact_at(&mut source, tensor.start + first * bytes as u64);
            read.map_err(Error::io("read", &header.path))?;
            let tasks =
                source.par_chunks(TASK * bytes).zip(converted.par_chunks_mut(TASK * stride));
            tasks.for_each(|(source, converted)| {
                let blocks = source.chunks_exact(bytes).zip(converted.chunks_exact_mut(stride));
                blocks.for_each(|(block, out)| converter.convert(block, out));
            });
            let got = (converted.len() - skip).min(out.len());
            let (now, rest) = out.split_at_mut(got);
            now.copy_from_slice(&converted[skip..skip + got]);
            out = rest;
            at += got as u64;
        }
        Ok(())
    }

    fn refuse_unused(&self, known: &BTreeSet<&str>) -> Result<()> {
        match self.weights.iter().find(|(name, _)| !known.contains(name.as_str())) {
            None => Ok(()),
            Some((_, Weight { tensor, part, .. })) => {
                let refusal = Refusal::UnknownTensor { tensor: tensor.name.clone() };
                Err(refusal.at(&self.parts[*part].path))
            }
        }
    }
}
