//! Where the tests' data lies.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use gemma4_runtime::text::{Chat, ChatTemplate, TextError, Tokenizer};
use serde_json::{Value, json};

pub(crate) const BOS: u32 = 2;

/// A file of `tests/data`.
pub(crate) fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

pub(crate) fn read_json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// The directory of fixtures outside the repository, or `None` after saying what is not run.
pub(crate) fn fixtures(test: &str) -> Option<PathBuf> {
    let directory = std::env::var_os("GEMMA4_FIXTURES").map(PathBuf::from);
    if directory.is_none() {
        println!("not run: {test} (GEMMA4_FIXTURES is not set)");
    }
    directory
}

pub(crate) fn tokenizer() -> Tokenizer {
    static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
        Tokenizer::from_bytes(&fs::read(path("tokenizer.json")).unwrap()).unwrap()
    });
    TOKENIZER.clone()
}

/// Hugging Face's tokenizer on the same file: the truth for ids and decoded text.
pub(crate) fn reference() -> &'static tokenizers::Tokenizer {
    static REFERENCE: LazyLock<tokenizers::Tokenizer> =
        LazyLock::new(|| tokenizers::Tokenizer::from_file(path("tokenizer.json")).unwrap());
    &REFERENCE
}

/// The same, told to take spelled control tokens for text.
pub(crate) fn plain_reference() -> &'static tokenizers::Tokenizer {
    static PLAIN: LazyLock<tokenizers::Tokenizer> = LazyLock::new(|| {
        let mut tokenizer = reference().clone();
        tokenizer.set_encode_special_tokens(true);
        tokenizer
    });
    &PLAIN
}

pub(crate) fn template() -> ChatTemplate {
    compile(&fs::read_to_string(path("chat_template.jinja")).unwrap()).unwrap()
}

/// The variables that `make_template_cases.py` gives to Jinja2.
pub(crate) fn compile(source: &str) -> Result<ChatTemplate, TextError> {
    let variables = [
        ("bos_token", "<bos>"),
        ("eos_token", "<eos>"),
        ("unk_token", "<unk>"),
        ("pad_token", "<pad>"),
    ];
    ChatTemplate::new(source, variables)
}

/// A conversation with the defaults of chat programs: thinking off, the model's turn next.
pub(crate) fn chat(messages: &[Value]) -> Chat<'_> {
    Chat { messages, tools: None, enable_thinking: Some(false), add_generation_prompt: true }
}

pub(crate) fn user(content: impl Into<Value>) -> Value {
    json!({"role": "user", "content": content.into()})
}

pub(crate) fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap().try_into().unwrap()).collect()
}

/// Ids and spellings of the control tokens of a tokenizer file.
pub(crate) fn control_tokens() -> Vec<(u32, String)> {
    let file = read_json(&path("tokenizer.json"));
    let tokens = file["added_tokens"].as_array().unwrap();
    tokens
        .iter()
        .map(|t| {
            (t["id"].as_u64().unwrap().try_into().unwrap(), t["content"].as_str().unwrap().into())
        })
        .collect()
}
