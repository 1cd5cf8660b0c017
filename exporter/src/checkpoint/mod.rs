//! Reads a checkpoint: a Hugging Face directory, a bundle of `gemma4-quantize`, or one of torchao.
//!
//! Opening reads the headers of all weight files and checks that the checkpoint is whole and of
//! a kind that can be used; a [`Refusal`] says what is wrong and what to do. Weights are then
//! read piece by piece with `pread`, so memory does not grow with the model.
//!
//! Weights have canonical names, without the prefix of the language model:
//! `embed_tokens.weight`, `norm.weight`, `layers.N.…`, `lm_head.weight`.

mod admission;
mod folder;
mod header;
mod names;
mod read;
mod refusal;
mod table;
mod text;
mod torchao;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use gemma4_format::Encoding;
use serde_json::Value;

use crate::Result;
use header::Shard;
use table::{Entry, Table};

pub use refusal::Refusal;

/// Files that a bundle takes over from the checkpoint it is made from, where they exist.
pub const COMPANIONS: [&str; 6] = [
    folder::CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
];

/// File of a bundle that says how it was made, as [`Provenance`].
pub const PROVENANCE: &str = "quantization.json";

/// How a bundle was made.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Provenance {
    /// Program and version.
    pub producer: String,
    /// Name of the recipe.
    pub recipe: String,
    /// [`Checkpoint::identity`] of the checkpoint it was made from.
    pub source: String,
}

/// Which layout a checkpoint has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Dense tensors under Hugging Face's names.
    HuggingFace,
    /// Written by `gemma4-quantize`: canonical names, in the layout of a `.ptd`.
    Bundle,
    /// Written by ExecuTorch's script for Gemma 4: torchao's quantized tensors, taken apart.
    Torchao,
}

impl Layout {
    /// The name that [`gemma4_format::Source::layout`] holds.
    pub fn name(self) -> &'static str {
        match self {
            Layout::HuggingFace => "huggingface",
            Layout::Bundle => "gemma4-quantize",
            Layout::Torchao => "torchao",
        }
    }
}

/// A weight as the checkpoint has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceWeight {
    /// Extents, outermost first.
    pub dims: Vec<u32>,
    /// How its numbers are stored.
    pub encoding: Encoding,
}

/// An open checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    layout: Layout,
    config: String,
    generation_config: Option<String>,
    provenance: Option<Provenance>,
    identity: String,
    shards: Vec<Shard>,
    table: Table,
}

impl Checkpoint {
    /// Opens the checkpoint in directory `dir` and checks that it is whole.
    ///
    /// # Errors
    /// [`crate::Error::Checkpoint`] with a [`Refusal`], or an error of the file system.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        let refuse = |refusal: Refusal| refusal.at(dir);
        folder::recognise(dir)?;
        let config = text::read(dir, folder::CONFIG)?.ok_or_else(|| refuse(Refusal::NoConfig))?;
        let config_json: Value = text::parse(dir, folder::CONFIG, &config)?;
        admission::check_architecture(&config_json).map_err(refuse)?;

        let weights = folder::weight_files(dir)?;
        let shards: Vec<Shard> =
            weights.files.iter().map(|file| Shard::open(dir, file)).collect::<Result<_>>()?;
        let layout = table::layout(&shards).map_err(refuse)?;
        table::check_index(&shards, &weights.index).map_err(refuse)?;
        let table = Table::new(dir, &shards, layout)?;
        if let Some(method) = admission::quantization(&config_json) {
            table.refuse_integers(&shards, &method).map_err(refuse)?;
        }

        let provenance = match layout {
            Layout::HuggingFace | Layout::Torchao => None,
            Layout::Bundle => match text::read(dir, PROVENANCE)? {
                Some(json) => Some(text::parse(dir, PROVENANCE, &json)?),
                None => None,
            },
        };
        Ok(Self {
            dir: dir.to_owned(),
            layout,
            identity: identity(&config, &shards),
            generation_config: text::read(dir, "generation_config.json")?,
            config,
            provenance,
            shards,
            table,
        })
    }

    /// The directory, as it was given.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Which layout it has.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// The text of config.json.
    pub fn config_json(&self) -> &str {
        &self.config
    }

    /// The text of generation_config.json, if there is one.
    pub fn generation_config(&self) -> Option<&str> {
        self.generation_config.as_deref()
    }

    /// How the bundle of `gemma4-quantize` was made; `None` for other checkpoints.
    pub fn provenance(&self) -> Option<&Provenance> {
        self.provenance.as_ref()
    }

    /// The bytes of tokenizer.json, if there is one.
    pub fn tokenizer_json(&self) -> Result<Option<Vec<u8>>> {
        self.companion("tokenizer.json")
    }

    /// The bytes of a file beside the weights, one of [`COMPANIONS`], if there is one.
    pub fn companion(&self, name: &str) -> Result<Option<Vec<u8>>> {
        text::read_bytes(&self.dir, name)
    }

    /// The chat template, if there is one: of chat_template.jinja, or in tokenizer_config.json
    /// as a string or as the entry `default` of a list.
    pub fn chat_template(&self) -> Result<Option<String>> {
        text::chat_template(&self.dir)
    }

    /// BLAKE3, in hex, of config.json and of the headers of the weight files in order of name.
    /// The same for every copy of the checkpoint, wherever it lies.
    pub fn identity(&self) -> &str {
        &self.identity
    }

    /// What changes when a weight file is written, even if its header, and so the identity, stays:
    /// a digest, in hex, of the identity and of the times and lengths of the files.
    pub fn stamp(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        hasher.update(self.identity.as_bytes());
        for Shard { name, stamp: (length, seconds, nanoseconds), .. } in &self.shards {
            hasher.update(format!("{name} {length} {seconds} {nanoseconds}\n").as_bytes());
        }
        hasher.finalize().to_hex().to_string()
    }

    /// Canonical names of all weights, sorted; those of vision and audio towers are left out.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.table.entries.keys().map(String::as_str)
    }

    /// Whether there is a weight of that name.
    pub fn contains(&self, name: &str) -> bool {
        self.table.entries.contains_key(name)
    }

    /// Dims and encoding of a weight.
    ///
    /// # Errors
    /// [`Refusal::MissingTensors`] if there is none, [`Refusal::Unusable`] if its type or shape is
    /// none that a model has.
    pub fn weight(&self, name: &str) -> Result<&SourceWeight> {
        Ok(self.entry(name)?.0)
    }

    /// Refuses a checkpoint that lacks some of the weights `wanted`, or has them in a type that
    /// can't be used.
    pub fn require<'a>(&self, wanted: impl IntoIterator<Item = &'a str>) -> Result<()> {
        let wanted: Vec<&str> = wanted.into_iter().collect();
        let mut missing = wanted.iter().filter(|name| !self.contains(name));
        if let Some(first) = missing.next() {
            return Err(self.refuse(Refusal::MissingTensors {
                tensor: (*first).to_owned(),
                missing: 1 + missing.count(),
                total: wanted.len(),
            }));
        }
        wanted.into_iter().try_for_each(|name| self.entry(name).map(|_| ()))
    }

    /// Names of the weights that are not in `known`.
    pub fn unused<'a>(&'a self, known: &'a BTreeSet<&str>) -> impl Iterator<Item = &'a str> {
        self.names().filter(|name| !known.contains(name))
    }

    /// Refuses a checkpoint that has weights beyond those `known`: leaving them out would be
    /// another model.
    pub fn refuse_unused(&self, known: &BTreeSet<&str>) -> Result<()> {
        let mut unused = self.unused(known);
        match unused.next() {
            None => Ok(()),
            Some(first) => {
                let (tensor, count) = (first.to_owned(), 1 + unused.count());
                Err(self.refuse(Refusal::UnknownTensors { tensor, count }))
            }
        }
    }

    fn entry(&self, name: &str) -> Result<(&SourceWeight, &[table::Place])> {
        match self.table.entries.get(name) {
            Some(Entry::Usable(weight, places)) => Ok((weight, places)),
            Some(Entry::Unusable { dtype, shape, shard }) => Err(self.refuse(Refusal::Unusable {
                tensor: name.to_owned(),
                dtype: format!("{dtype:?}"),
                shape: shape.clone(),
                file: self.shards[*shard].name.clone(),
            })),
            None => {
                let tensor = name.to_owned();
                Err(self.refuse(Refusal::MissingTensors { tensor, missing: 1, total: 1 }))
            }
        }
    }

    fn refuse(&self, refusal: Refusal) -> crate::Error {
        refusal.at(&self.dir)
    }
}

fn identity(config: &str, shards: &[Shard]) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(blake3::hash(config.as_bytes()).as_bytes());
    for shard in shards {
        hasher.update(shard.digest.as_bytes());
    }
    hasher.finalize().to_hex().to_string()
}
