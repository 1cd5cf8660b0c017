//! The text files beside the weights.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::Refusal;
use super::header::is_lfs_pointer;
use crate::{Error, Result};

/// Largest text file that is read. The tokenizer of Gemma 4 has 32 MB.
const MAX_TEXT: u64 = 256 << 20;

/// The bytes of a file of the checkpoint, or `None` if there is none.
pub(super) fn read_bytes(dir: &Path, name: &str) -> Result<Option<Vec<u8>>> {
    let path = dir.join(name);
    let file = match File::open(&path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::io("open", &path)(e)),
    };
    let mut bytes = Vec::new();
    file.take(MAX_TEXT + 1).read_to_end(&mut bytes).map_err(Error::io("read", &path))?;
    if is_lfs_pointer(&bytes) {
        return Err(Refusal::LfsPointer { file: name.to_owned() }.at(dir));
    }
    if bytes.len() as u64 > MAX_TEXT {
        return Err(malformed(dir, name, format!("it is larger than {} MiB", MAX_TEXT >> 20)));
    }
    Ok(Some(bytes))
}

/// The text of a file of the checkpoint, or `None` if there is none.
pub(super) fn read(dir: &Path, name: &str) -> Result<Option<String>> {
    let Some(bytes) = read_bytes(dir, name)? else { return Ok(None) };
    String::from_utf8(bytes).map(Some).map_err(|e| malformed(dir, name, e))
}

/// Parses JSON read from the file `name`.
pub(super) fn parse<T: DeserializeOwned>(dir: &Path, name: &str, json: &str) -> Result<T> {
    serde_json::from_str(json).map_err(|e| malformed(dir, name, e))
}

/// The chat template: `chat_template.jinja`, or the older places inside JSON files.
pub(super) fn chat_template(dir: &Path) -> Result<Option<String>> {
    if let Some(template) = read(dir, "chat_template.jinja")? {
        return Ok(Some(template));
    }
    for name in ["chat_template.json", "tokenizer_config.json"] {
        let Some(json) = read(dir, name)? else { continue };
        let json: Value = parse(dir, name, &json)?;
        if let Some(template) = named_template(&json["chat_template"]).map_err(|e| e.at(dir))? {
            return Ok(Some(template));
        }
    }
    Ok(None)
}

/// A template is a string, or a list of `{name, template}` of which `default` is meant.
fn named_template(value: &Value) -> Result<Option<String>, Refusal> {
    let Value::Array(list) = value else { return Ok(value.as_str().map(str::to_owned)) };
    let text = |entry: &Value, key: &str| entry[key].as_str().unwrap_or_default().to_owned();
    match list.iter().find(|entry| list.len() == 1 || entry["name"] == "default") {
        Some(entry) => Ok(Some(text(entry, "template"))),
        None if list.is_empty() => Ok(None),
        None => {
            let names: Vec<_> = list.iter().map(|entry| text(entry, "name")).collect();
            Err(Refusal::Templates { names: names.join(", ") })
        }
    }
}

fn malformed(dir: &Path, name: &str, why: impl ToString) -> Error {
    Refusal::Text { file: name.to_owned(), why: why.to_string() }.at(dir)
}
