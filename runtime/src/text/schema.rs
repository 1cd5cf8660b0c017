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
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    normalizer: Option<Normalizer>,
    pre_tokenizer: Option<PreTokenizer>,
    decoder: Option<Decoder>,
    model: Model,
}

/// An added token, as far as it may swallow text of any length.
#[derive(Deserialize)]
struct AddedToken {
    content: String,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
}

#[derive(Deserialize)]
#[serde(tag = "type")]
enum Normalizer {
    Replace { pattern: Pattern, content: String },
    Sequence { normalizers: Vec<Normalizer> },
}

#[derive(Deserialize)]
#[serde(tag = "type")]
enum PreTokenizer {
    Split { pattern: Pattern, behavior: String },
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
    #[serde(default)]
    byte_fallback: bool,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    vocab: Vocabulary,
    merges: Vec<MergeLen>,
}

/// A literal replacement that the decoder makes in every token: `(from, to)`.
pub(super) type Replacement = (String, String);

/// What is to be known of a file besides what the crate knows.
pub(super) struct Facts {
    /// The replacements of its decoder, in order.
    pub(super) replacements: Vec<Replacement>,
    /// Most bytes of text that one token stands for; `None` where some text gives no token.
    pub(super) longest: Option<u64>,
}

impl TokenizerFile {
    /// Parses and checks the file.
    pub(super) fn check(bytes: &[u8]) -> Result<Facts> {
        let file: Self = serde_json::from_slice(bytes)
            .map_err(|error| TextError::BadTokenizer { reason: error.to_string() })?;
        file.model.check()?;
        if let Some(normalizer) = &file.normalizer {
            normalizer.check()?;
        }
        if let Some(pre_tokenizer) = &file.pre_tokenizer {
            pre_tokenizer.check()?;
        }
        let longest = file.longest();
        match file.decoder {
            Some(Decoder::Sequence { decoders }) => {
                Ok(Facts { replacements: replacements(decoders)?, longest })
            }
            _ => Err(unsupported("a decoder other than `Sequence`")),
        }
    }

    /// Every byte of a text ends up in a token if none is unknown (byte fallback has all 256 of
    /// them), none is removed between words, and none is stripped beside an added token.
    fn longest(&self) -> Option<u64> {
        let removed = self.pre_tokenizer.as_ref().is_some_and(PreTokenizer::removes);
        let stripped = self.added_tokens.iter().any(|token| token.lstrip || token.rstrip);
        let unknown = !self.model.byte_fallback || self.model.vocab.bytes < 256;
        if removed || stripped || unknown {
            return None;
        }
        let added = self.added_tokens.iter().map(|token| token.content.len());
        let longest = added.chain([self.model.vocab.longest]).max().unwrap_or(0) as u64;
        let shrinking = self.normalizer.as_ref().map_or(Some(1), Normalizer::shrinking)?;
        longest.checked_mul(shrinking)
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
        match self.merges.iter().position(|merge| merge.0 > self.vocab.longest) {
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
            Self::Replace { pattern, .. } => pattern.check(),
            Self::Sequence { normalizers } => normalizers.iter().try_for_each(Self::check),
        }
    }

    /// How many times shorter a text may become; `None` if it may vanish.
    fn shrinking(&self) -> Option<u64> {
        match self {
            Self::Replace { pattern: Pattern::String(from), content } => {
                let times = from.len().div_ceil(content.len().max(1)) as u64;
                (!content.is_empty()).then_some(times)
            }
            Self::Sequence { normalizers } => normalizers
                .iter()
                .try_fold(1, |times: u64, next| times.checked_mul(next.shrinking()?)),
        }
    }
}

impl PreTokenizer {
    fn check(&self) -> Result<()> {
        match self {
            Self::Split { pattern, .. } => pattern.check(),
            Self::Sequence { pretokenizers } => pretokenizers.iter().try_for_each(Self::check),
        }
    }

    /// Whether it takes text away.
    fn removes(&self) -> bool {
        match self {
            Self::Split { behavior, .. } => behavior == "Removed",
            Self::Sequence { pretokenizers } => pretokenizers.iter().any(Self::removes),
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

/// What a map's keys are like. The values are only skipped.
#[derive(Default)]
struct Vocabulary {
    /// Bytes of the longest key.
    longest: usize,
    /// How many keys are spelled as bytes are, `<0x0A>`.
    bytes: usize,
}

impl<'de> Deserialize<'de> for Vocabulary {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(VocabularyVisitor)
    }
}

struct VocabularyVisitor;

impl<'de> Visitor<'de> for VocabularyVisitor {
    type Value = Vocabulary;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map from tokens to ids")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut found = Vocabulary::default();
        let mut bytes = [false; 256];
        while let Some((key, _)) = map.next_entry::<Key, IgnoredAny>()? {
            found.longest = found.longest.max(key.length);
            if let Some(byte) = key.byte {
                bytes[usize::from(byte)] = true;
            }
        }
        found.bytes = bytes.into_iter().filter(|found| *found).count();
        Ok(found)
    }
}

/// A token that is not kept.
struct Key {
    /// Its bytes.
    length: usize,
    /// The byte that it is spelled as.
    byte: Option<u8>,
}

impl<'de> Deserialize<'de> for Key {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(LenVisitor::<Key>(PhantomData))
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

impl<'de> Visitor<'de> for LenVisitor<Key> {
    type Value = Key;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a token")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        let digits = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
        let byte = digits.filter(|digits| digits.len() == 2);
        let byte = byte.and_then(|digits| u8::from_str_radix(digits, 16).ok());
        Ok(Key { length: text.len(), byte })
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
        while let Some(Key { length: len, .. }) = seq.next_element()? {
            total += len;
        }
        Ok(MergeLen(total))
    }
}
