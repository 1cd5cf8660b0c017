//! Ids against Hugging Face's tokenizers and llama.cpp's.

use gemma4_exporter::gguf::{self, Gguf};
use gemma4_exporter::source::ModelSource;
use gemma4_runtime::text::{ControlText, Tokenizer};
use serde_json::Value;

use crate::support::{fixtures, model, strings, text};

const BOS: u32 = 2;

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

#[test]
fn merges_that_make_no_token_are_left_out() {
    let (_dir, path) = model().write();
    let bytes = gguf::tokenizer_json(path).unwrap().unwrap();
    let tokenizer = Tokenizer::from_bytes(&bytes).unwrap();
    assert_eq!(tokenizer.encode_raw("abc a<bos>", None).unwrap(), [31, 7, 32, 5, 2]);
    assert!(tokenizer.is_control(4) && !tokenizer.is_control(31));
}

#[test]
fn tokenizers_that_are_not_gemmas_are_refused() {
    let refused = |key: &str, value: Vec<u8>| {
        let mut file = model();
        file.set(key, value);
        let (_dir, path) = file.write();
        gguf::tokenizer_json(path).unwrap_err().to_string()
    };
    let error = refused("tokenizer.ggml.model", text("llama"));
    assert!(error.contains("`llama` is not that of Gemma 4"), "{error}");
    let error = refused("tokenizer.ggml.merges", strings(&["a b", "ab"]));
    assert!(error.contains("merge 1, `ab`, is no pair"), "{error}");
    let error = refused("tokenizer.ggml.tokens", strings(&["a", "b"]));
    assert!(error.contains("`tokenizer.ggml.token_type`") && error.contains("64"), "{error}");
    let error = refused("tokenizer.ggml.tokens", strings(&["a"; 64]));
    assert!(error.contains("0 and 1 are both `a`"), "{error}");
}

#[test]
fn ids_and_text_are_hugging_faces() {
    let Some(fixtures) = fixtures("the tokenizer of a GGUF file") else { return };
    let gguf = Gguf::open(fixtures.join("gguf/tiny-31b-F16.gguf")).unwrap();
    let tokenizer = Tokenizer::from_bytes(&gguf.tokenizer_json().unwrap().unwrap()).unwrap();
    let cases = std::fs::read(fixtures.join("golden/tiny-31b/tokenizer_cases.json")).unwrap();
    let cases: Value = serde_json::from_slice(&cases).unwrap();
    for case in cases["cases"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let wanted = ids(&case["ids"]);
        assert_eq!(tokenizer.encode_raw(text, None).unwrap(), wanted, "{text:?}");
        assert_eq!(tokenizer.decode(&wanted, ControlText::Show), case["decoded"], "{text:?}");
        let hidden = tokenizer.decode(&wanted, ControlText::Hide);
        assert_eq!(hidden, case["decoded_skip_special"], "{text:?}");
        if wanted.first() != Some(&BOS) {
            let with_bos = tokenizer.encode_raw(text, Some(BOS)).unwrap();
            assert_eq!(with_bos, ids(&case["ids_with_bos"]), "{text:?}");
        }
    }
    for case in cases["chats"].as_array().unwrap() {
        let rendered = case["rendered"].as_str().unwrap();
        assert_eq!(tokenizer.encode_raw(rendered, None).unwrap(), ids(&case["ids"]));
    }
    let template = std::fs::read_to_string(fixtures.join("ckpt/tiny-31b/chat_template.jinja"));
    assert_eq!(gguf.chat_template().unwrap(), template.ok());
}

/// The strings of llama.cpp's own test of this vocabulary, and the ids that it expects.
#[test]
fn ids_of_the_real_vocabulary_are_llama_cpps() {
    let Some(fixtures) = fixtures("the vocabulary of Gemma 4") else { return };
    let path = fixtures.join("gemma4/ggml-vocab-gemma-4.gguf");
    let read = |ending| std::fs::read_to_string(path.with_extension(ending)).unwrap();
    let tokenizer = Tokenizer::from_bytes(&gguf::tokenizer_json(&path).unwrap().unwrap()).unwrap();
    assert_eq!(tokenizer.vocab_size(), 262_144);
    let (inputs, outputs) = (read("gguf.inp"), read("gguf.out"));
    let inputs: Vec<&str> = inputs.split("\n__ggml_vocab_test__\n").collect();
    let outputs: Vec<Vec<u32>> = outputs
        .lines()
        .map(|line| line.split_whitespace().map(|id| id.parse().unwrap()).collect())
        .collect();
    assert!(inputs.len() >= 46 && outputs.len() >= 46, "{} {}", inputs.len(), outputs.len());
    for (text, wanted) in inputs.iter().zip(&outputs) {
        assert_eq!(tokenizer.encode_raw(text, None).unwrap(), *wanted, "{text:?}");
    }
    // A name that a tokenizer without byte-pair ranks takes apart.
    assert_eq!(tokenizer.encode_raw(" Linus", None).unwrap(), [9684, 605]);
}
