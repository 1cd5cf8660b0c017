//! What an export reads, whatever it is stored in.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::PathBuf;

use gemma4_format::Encoding;
use gemma4_format::encoding::{Part, QuantizedBytes, decode_row};
use rayon::prelude::*;

use crate::checkpoint::{Checkpoint, Layout, SourceWeight};
use crate::gguf::Gguf;
use crate::{Error, Result};

/// A model's config, text files and weights, under canonical names.
///
/// Implementations check what they read when they are opened; errors name the file.
pub trait ModelSource: Sync {
    /// The name that [`gemma4_format::Source::layout`] holds.
    fn layout(&self) -> &'static str;
    /// BLAKE3, in hex, of what tells this model from others; the same for every copy.
    fn identity(&self) -> &str;
    /// How the weights were quantized; `None` for a source of dense weights.
    fn recipe(&self) -> Option<&str>;
    /// A text that [`crate::model::Config::parse`] reads.
    fn config_json(&self) -> &str;
    /// The text of a generation_config.json, if there is one.
    fn generation_config(&self) -> Option<&str>;
    /// The bytes of a tokenizer.json, if there is one.
    fn tokenizer_json(&self) -> Result<Option<Vec<u8>>>;
    /// The chat template, if there is one.
    fn chat_template(&self) -> Result<Option<String>>;
    /// Canonical names of all weights, sorted.
    fn names(&self) -> Vec<&str>;
    /// Dims and encoding of a weight; an error if there is none or it can't be used.
    fn weight(&self, name: &str) -> Result<&SourceWeight>;
    /// Reads bytes `offset .. offset + out.len()` of part `part` of a weight, in the layout of
    /// [`gemma4_format::Encoding::parts`].
    ///
    /// # Panics
    /// If the weight has no such part, or the range lies outside it.
    fn read_part(&self, name: &str, part: usize, offset: u64, out: &mut [u8]) -> Result<()>;
    /// Reads rows of a weight as float32, decoding quantized ones: `rows.len() · K` numbers, `K`
    /// being the last of its dims and a row its slice along it.
    ///
    /// # Errors
    /// As [`ModelSource::weight`], or of the file system.
    ///
    /// # Panics
    /// If the weight has fewer rows.
    fn read_rows_f32(&self, name: &str, rows: Range<u64>) -> Result<Vec<f32>> {
        let weight = self.weight(name)?;
        let parts = weight.encoding.parts(name, &weight.dims)?;
        let total = rows_of(&weight.dims);
        assert!(rows.start <= rows.end && rows.end <= total, "rows of the weight");
        let read = |(at, part): (usize, &Part)| {
            let stride = part.bytes() / total;
            let mut bytes = vec![0; ((rows.end - rows.start) * stride) as usize];
            self.read_part(name, at, rows.start * stride, &mut bytes).map(|()| bytes)
        };
        let parts = parts.iter().enumerate().map(read).collect::<Result<Vec<_>>>()?;
        let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
        Ok(decode_rows(weight.encoding, weight.dims.last().copied().unwrap_or(1), &parts))
    }
    /// Refuses weights beyond those `known`: leaving them out would be another model.
    fn refuse_unused(&self, known: &BTreeSet<&str>) -> Result<()>;
}

/// A source as the flags of the commands name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// `--model-dir`: a Hugging Face directory.
    ModelDir(PathBuf),
    /// `--prequantized`: a bundle of `gemma4-quantize` or of torchao.
    Prequantized(PathBuf),
    /// `--gguf`: a GGUF file.
    Gguf(PathBuf),
}

impl Input {
    /// Opens it.
    ///
    /// # Errors
    /// As [`Checkpoint::open`] and [`Gguf::open`]; [`Error::Flag`] for a directory that another
    /// flag takes.
    pub fn open(&self) -> Result<Box<dyn ModelSource>> {
        let (dir, flag, other) = match self {
            Input::Gguf(file) => return Ok(Box::new(Gguf::open(file)?)),
            Input::ModelDir(dir) => (dir, "--model-dir", "--prequantized"),
            Input::Prequantized(dir) => (dir, "--prequantized", "--model-dir"),
        };
        let checkpoint = Checkpoint::open(dir)?;
        let quantized = checkpoint.layout() != Layout::HuggingFace;
        if quantized != matches!(self, Input::Prequantized(_)) {
            let why = format!("`{}` is of the other kind; use {other}", dir.display());
            return Err(Error::Flag { flag, why });
        }
        Ok(Box::new(checkpoint))
    }
}

/// Rows of a weight: its slices along the last dim.
pub(crate) fn rows_of(dims: &[u32]) -> u64 {
    dims.iter().rev().skip(1).map(|d| u64::from(*d)).product()
}

/// The numbers of whole rows of `k`, whose bytes are given for each part of the encoding.
pub(crate) fn decode_rows(encoding: Encoding, k: u32, parts: &[&[u8]]) -> Vec<f32> {
    match encoding {
        Encoding::Dense(dtype) => {
            let count = parts[0].len() / dtype.size() as usize;
            (0..count).into_par_iter().map(|at| dtype.read(parts[0], at)).collect()
        }
        Encoding::Quantized { .. } => {
            let Some(bytes) = QuantizedBytes::from_parts(encoding, parts) else {
                return Vec::new();
            };
            let code_bytes = encoding.parts("", &[1, k]).map_or(1, |parts| parts[0].bytes());
            let rows = bytes.codes.len() / code_bytes as usize;
            let mut numbers = vec![0.0; rows * k as usize];
            let rows = numbers.par_chunks_exact_mut(k as usize).enumerate();
            rows.for_each(|(row, out)| decode_row(encoding, bytes, row, out));
            numbers
        }
    }
}

impl ModelSource for Checkpoint {
    fn layout(&self) -> &'static str {
        self.layout().name()
    }

    fn identity(&self) -> &str {
        self.identity()
    }

    fn recipe(&self) -> Option<&str> {
        match self.layout() {
            Layout::HuggingFace => None,
            Layout::Torchao => Some("torchao"),
            Layout::Bundle => Some(self.provenance().map_or("none", |made| &made.recipe)),
        }
    }

    fn config_json(&self) -> &str {
        self.config_json()
    }

    fn generation_config(&self) -> Option<&str> {
        self.generation_config()
    }

    fn tokenizer_json(&self) -> Result<Option<Vec<u8>>> {
        self.tokenizer_json()
    }

    fn chat_template(&self) -> Result<Option<String>> {
        self.chat_template()
    }

    fn names(&self) -> Vec<&str> {
        self.names().collect()
    }

    fn weight(&self, name: &str) -> Result<&SourceWeight> {
        self.weight(name)
    }

    fn read_part(&self, name: &str, part: usize, offset: u64, out: &mut [u8]) -> Result<()> {
        self.read_part(name, part, offset, out)
    }

    fn refuse_unused(&self, known: &BTreeSet<&str>) -> Result<()> {
        self.refuse_unused(known)
    }
}
