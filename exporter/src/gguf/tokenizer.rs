//! The tokenizer of a GGUF file as a tokenizer.json.
//!
//! The file's tokenizer is named `gemma4`: byte pairs in the order of the merges, with bytes for
//! what has no token. Its scores are not used. Ids are those of Hugging Face's file.

use std::collections::HashMap;

use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use super::Refusal;
use super::metadata::{Metadata, Strings};

const MODEL: &str = "tokenizer.ggml.model";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";

/// Token types whose tokens are cut out of a text before pairs are merged. Converters give those
/// that a chat program may show (`<|channel>`) the type "user defined".
const UNKNOWN: u32 = 2;
const CONTROL: u32 = 3;
const USER_DEFINED: u32 = 4;

/// Tokens after which another has to speak. Files name only one end of text by its id, while the
/// released generation_config.json has these, too.
const ENDS_OF_TURN: [&str; 2] = ["<turn|>", "<|tool_response>"];

#[derive(Serialize)]
struct TokenizerFile<'a> {
    version: &'static str,
    truncation: Option<()>,
    padding: Option<()>,
    added_tokens: Vec<AddedToken<'a>>,
    normalizer: Value,
    pre_tokenizer: Value,
    post_processor: Option<()>,
    decoder: Value,
    model: Model<'a>,
}

#[derive(Serialize)]
struct AddedToken<'a> {
    id: u32,
    content: &'a str,
    single_word: bool,
    lstrip: bool,
    rstrip: bool,
    normalized: bool,
    special: bool,
}

#[derive(Serialize)]
struct Model<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    dropout: Option<f32>,
    unk_token: Option<&'a str>,
    continuing_subword_prefix: Option<&'static str>,
    end_of_word_suffix: Option<&'static str>,
    fuse_unk: bool,
    byte_fallback: bool,
    ignore_merges: bool,
    #[serde(serialize_with = "by_id")]
    vocab: &'a Strings,
    merges: Vec<(&'a str, &'a str)>,
}

fn by_id<S: Serializer>(tokens: &Strings, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(tokens.iter().zip(0u32..))
}

/// The text of a tokenizer.json, or `None` if the file has no tokenizer.
pub(super) fn tokenizer_json(metadata: &Metadata) -> Result<Option<Vec<u8>>, Refusal> {
    let Some(kind) = metadata.optional_str(MODEL)? else { return Ok(None) };
    if kind != "gemma4" {
        let why = format!("`{kind}` is not that of Gemma 4, `gemma4`; convert the model again");
        return Err(Refusal::key(MODEL, why));
    }
    let tokens = metadata.strings(TOKENS)?;
    let types = metadata.integers(TYPES, tokens.len())?;
    let mut ids = HashMap::with_capacity(tokens.len());
    for (token, id) in tokens.iter().zip(0u32..) {
        if let Some(first) = ids.insert(token, id) {
            return Err(Refusal::key(TOKENS, format!("{first} and {id} are both `{token}`")));
        }
    }
    let added_tokens = tokens.iter().zip(0..).zip(&types);
    let added_tokens = added_tokens
        .filter(|(_, kind)| matches!(**kind, UNKNOWN | CONTROL | USER_DEFINED))
        .map(|((content, id), _)| AddedToken {
            id,
            content,
            single_word: false,
            lstrip: false,
            rstrip: false,
            normalized: false,
            special: true,
        })
        .collect();
    let unknown = token_id(metadata, "unknown", tokens.len() as u32)?;
    let file = TokenizerFile {
        version: "1.0",
        truncation: None,
        padding: None,
        added_tokens,
        normalizer: json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"}),
        pre_tokenizer: json!({
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": false,
        }),
        post_processor: None,
        decoder: json!({
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        }),
        model: Model {
            kind: "BPE",
            dropout: None,
            unk_token: unknown.and_then(|id| tokens.iter().nth(id as usize)),
            continuing_subword_prefix: None,
            end_of_word_suffix: None,
            fuse_unk: true,
            byte_fallback: true,
            ignore_merges: false,
            vocab: tokens,
            merges: merges(metadata.strings(MERGES)?, &ids)?,
        },
    };
    serde_json::to_vec(&file).map(Some).map_err(|e| Refusal::key(TOKENS, e.to_string()))
}

/// The merges, without those that touch a string that is no token: they can never happen.
fn merges<'a>(
    merges: &'a Strings,
    ids: &HashMap<&str, u32>,
) -> Result<Vec<(&'a str, &'a str)>, Refusal> {
    let mut found = Vec::new();
    let mut joined = String::new();
    for (index, merge) in merges.iter().enumerate() {
        // A first character that is a space belongs to the left token.
        let first = merge.chars().next().map_or(0, char::len_utf8);
        let Some(space) = merge[first..].find(' ').map(|at| at + first) else {
            return Err(Refusal::key(MERGES, format!("merge {index}, `{merge}`, is no pair")));
        };
        let (left, right) = (&merge[..space], &merge[space + 1..]);
        joined.clear();
        joined.extend([left, right]);
        if [left, right, &joined].iter().all(|token| ids.contains_key(token)) {
            found.push((left, right));
        }
    }
    Ok(found)
}

/// Id of the first token of a text.
///
/// `add_bos_token` is not read: Gemma 4 needs it whatever the file says.
pub(super) fn bos(metadata: &Metadata, vocab_size: u32) -> Result<Option<u32>, Refusal> {
    token_id(metadata, "bos", vocab_size)
}

/// Ids that end an answer, ascending.
pub(super) fn stops(metadata: &Metadata, vocab_size: u32) -> Result<Vec<u32>, Refusal> {
    let mut ids = Vec::new();
    for name in ["eos", "eot", "eom"] {
        ids.extend(token_id(metadata, name, vocab_size)?);
    }
    if metadata.contains(TOKENS) {
        let tokens = metadata.strings(TOKENS)?.iter().zip(0..vocab_size);
        ids.extend(tokens.filter(|(token, _)| ENDS_OF_TURN.contains(token)).map(|(_, id)| id));
    }
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

fn token_id(metadata: &Metadata, name: &str, vocab_size: u32) -> Result<Option<u32>, Refusal> {
    let key = format!("tokenizer.ggml.{name}_token_id");
    match metadata.optional_u32(&key)? {
        Some(id) if id >= vocab_size => {
            Err(Refusal::Key { key, why: format!("{id} is outside a vocabulary of {vocab_size}") })
        }
        id => Ok(id),
    }
}
