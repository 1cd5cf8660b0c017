//! The parts of `tokenizer.json` on which exact ids and exact streaming depend.
//!
//! The `tokenizers` crate reads the file too, and far more than this; but some of what it accepts
//! it answers with a panic, and for some kinds a text can't be encoded in pieces or an id decoded
//! by itself. This schema admits byte-pair models whose decoder is a list of replacements, byte
//! fallback and fusion, and names anything else.

use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::{Result, TextError};

/// `tokenizer.json`, as far as it is checked here.
#[derive(Deserialize)]
pub(super) struct TokenizerFile {
    normalizer: Option<Normalizer>,
    pre_tokenizer: Option<PreTokenizer>,
    decoder: Option<Decoder>,
    model: Model,
}

#[derive(Deserialize)]
#[serde(tag = "type")]
enum Normalizer {
    Replace { pattern: Pattern },
    Sequence { normalizers: Vec<Normalizer> },
}

#[derive(Deserialize)]
#[serde(tag = "type")]
enum PreTokenizer {
    Split { pattern: Pattern },
    Sequence { pretokenizers: Vec<PreTokenizer> },
}

#[derive(Deserialize)]
#[serde(tag = "type")]
enum Decoder {
    Sequence { decoders: Vec<Decoder> },
    Replace { pattern: Pattern, content: String },
    ByteFallback,
    Fuse,
}

/// Regular expressions are left out: they may backtrack for ever on a text made for it.
#[derive(Deserialize)]
enum Pattern {
    String(String),
}

#[derive(Deserialize)]
struct Model {
    #[serde(rename = "type")]
    kind: Option<String>,
    dropout: Option<f32>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    vocab: LongestKey,
    merges: Vec<MergeLen>,
}

/// A literal replacement that the decoder makes in every token: `(from, to)`.
pub(super) type Replacement = (String, String);

impl TokenizerFile {
    /// Parses and checks the file; gives the replacements of its decoder, in order.
    pub(super) fn check(bytes: &[u8]) -> Result<Vec<Replacement>> {
        let file: Self = serde_json::from_slice(bytes)
            .map_err(|error| TextError::BadTokenizer { reason: error.to_string() })?;
        file.model.check()?;
        if let Some(normalizer) = &file.normalizer {
            normalizer.check()?;
        }
        if let Some(pre_tokenizer) = &file.pre_tokenizer {
            pre_tokenizer.check()?;
        }
        match file.decoder {
            Some(Decoder::Sequence { decoders }) => replacements(decoders),
            _ => Err(unsupported("a decoder other than `Sequence`")),
        }
    }
}

impl Model {
    fn check(&self) -> Result<()> {
        if let Some(kind) = self.kind.as_deref().filter(|kind| *kind != "BPE") {
            return Err(unsupported(&format!("the model `{kind}`")));
        }
        if self.dropout.is_some_and(|p| p != 0.0) {
            return Err(unsupported("`dropout`"));
        }
        let affix = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        if affix(&self.continuing_subword_prefix) || affix(&self.end_of_word_suffix) {
            return Err(unsupported("`continuing_subword_prefix` or `end_of_word_suffix`"));
        }
        // The crate copies each merged token into a buffer of the longest entry's length.
        match self.merges.iter().position(|merge| merge.0 > self.vocab.0) {
            None => Ok(()),
            Some(index) => Err(TextError::BadTokenizer {
                reason: format!("merge {index} makes a token that is not in the vocabulary"),
            }),
        }
    }
}

impl Normalizer {
    fn check(&self) -> Result<()> {
        match self {
            Self::Replace { pattern } => pattern.check(),
            Self::Sequence { normalizers } => normalizers.iter().try_for_each(Self::check),
        }
    }
}

impl PreTokenizer {
    fn check(&self) -> Result<()> {
        match self {
            Self::Split { pattern } => pattern.check(),
            Self::Sequence { pretokenizers } => pretokenizers.iter().try_for_each(Self::check),
        }
    }
}

impl Pattern {
    fn check(&self) -> Result<()> {
        let Self::String(text) = self;
        if text.is_empty() { Err(unsupported("an empty pattern")) } else { Ok(()) }
    }
}

/// The replacements of `Replace*, ByteFallback, Fuse`, the only order that is decoded here.
fn replacements(decoders: Vec<Decoder>) -> Result<Vec<Replacement>> {
    let mut found = Vec::new();
    let mut rest = decoders.into_iter();
    for decoder in rest.by_ref() {
        match decoder {
            Decoder::Replace { pattern, content } => {
                pattern.check()?;
                let Pattern::String(from) = pattern;
                found.push((from, content));
            }
            Decoder::ByteFallback => {
                return match (rest.next(), rest.next()) {
                    (Some(Decoder::Fuse), None) => Ok(found),
                    _ => Err(unsupported("a decoder that does not end in `ByteFallback`, `Fuse`")),
                };
            }
            Decoder::Sequence { .. } | Decoder::Fuse => break,
        }
    }
    Err(unsupported("a decoder that is not `Replace`s, `ByteFallback`, `Fuse`"))
}

fn unsupported(feature: &str) -> TextError {
    TextError::UnsupportedTokenizer { feature: feature.to_owned() }
}

/// The length in bytes of a map's longest key. The values are only skipped.
struct LongestKey(usize);

impl<'de> Deserialize<'de> for LongestKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(LongestKeyVisitor)
    }
}

struct LongestKeyVisitor;

impl<'de> Visitor<'de> for LongestKeyVisitor {
    type Value = LongestKey;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map from tokens to ids")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut longest = 0;
        while let Some((StrLen(len), _)) = map.next_entry::<StrLen, IgnoredAny>()? {
            longest = longest.max(len);
        }
        Ok(LongestKey(longest))
    }
}

/// The length in bytes of a string that is not kept.
struct StrLen(usize);

impl<'de> Deserialize<'de> for StrLen {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(LenVisitor::<StrLen>(PhantomData))
    }
}

/// The length in bytes of the token that a merge makes: `"left right"` or `["left", "right"]`.
struct MergeLen(usize);

impl<'de> Deserialize<'de> for MergeLen {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(LenVisitor::<MergeLen>(PhantomData))
    }
}

struct LenVisitor<T>(PhantomData<T>);

impl<'de> Visitor<'de> for LenVisitor<StrLen> {
    type Value = StrLen;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a token")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        Ok(StrLen(text.len()))
    }
}

impl<'de> Visitor<'de> for LenVisitor<MergeLen> {
    type Value = MergeLen;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a pair of tokens")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        Ok(MergeLen(text.len().saturating_sub(1)))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut total = 0;
        while let Some(StrLen(len)) = seq.next_element()? {
            total += len;
        }
        Ok(MergeLen(total))
    }
}
