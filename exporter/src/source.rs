//! What an export reads, whatever it is stored in.

use std::collections::BTreeSet;

use crate::Result;
use crate::checkpoint::{Checkpoint, Layout, SourceWeight};

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
    /// Refuses weights beyond those `known`: leaving them out would be another model.
    fn refuse_unused(&self, known: &BTreeSet<&str>) -> Result<()>;
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
