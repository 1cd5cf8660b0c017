use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use gemma4_runtime::text::{ChatTemplate, ControlText, StopIds, TextError, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::data::{self, BOS};

/// Every case of a `tokenizer_cases.json`: made by `tokenizers` and transformers, which agree.
fn check_cases(tokenizer: &Tokenizer, template: &ChatTemplate, cases: &Value) {
    for case in cases["cases"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let ids = data::ids(&case["ids"]);
        assert_eq!(tokenizer.encode_raw(text, None).unwrap(), ids, "{text:?}");
        assert_eq!(tokenizer.decode(&ids, ControlText::Show), case["decoded"], "{text:?}");
        let hidden = tokenizer.decode(&ids, ControlText::Hide);
        assert_eq!(hidden, case["decoded_skip_special"], "{text:?}");
        if ids.first() != Some(&BOS) {
            let with_bos = data::ids(&case["ids_with_bos"]);
            assert_eq!(tokenizer.encode_raw(text, Some(BOS)).unwrap(), with_bos, "{text:?}");
        }
    }
    for case in cases["chats"].as_array().unwrap() {
        let messages = case["messages"].as_array().unwrap();
        let thinking = case["enable_thinking"].as_bool();
        let chat = gemma4_runtime::text::Chat { enable_thinking: thinking, ..data::chat(messages) };
        let rendered = template.render(&chat, tokenizer).unwrap();
        assert_eq!(rendered.text(), case["rendered"]);
        assert_eq!(tokenizer.encode_rendered(&rendered).unwrap(), data::ids(&case["ids"]));
    }
}

#[test]
fn ids_and_text_are_hugging_faces() {
    let cases = data::read_json(&data::path("tokenizer_cases.json"));
    check_cases(&data::tokenizer(), &data::template(), &cases);
}

#[test]
fn ids_and_text_are_hugging_faces_in_other_checkpoints() {
    let Some(fixtures) = data::fixtures("tokenizers of other checkpoints") else { return };
    for name in ["tiny-31b", "tiny-26b-a4b", "tiny-e2b"] {
        let (tokenizer, template) = checkpoint(&fixtures.join("ckpt").join(name));
        let cases = fixtures.join("golden").join(name).join("tokenizer_cases.json");
        check_cases(&tokenizer, &template, &data::read_json(&cases));
    }
    let (tokenizer, template) = checkpoint(&fixtures.join("ckpt/tiny-chat"));
    let golden = data::read_json(&fixtures.join("golden/tiny-chat/golden.json"));
    for case in golden["chat"].as_array().unwrap() {
        let messages = [data::user(case["question"].clone())];
        let rendered = template.render(&data::chat(&messages), &tokenizer).unwrap();
        let prompt = tokenizer.encode_rendered(&rendered).unwrap();
        assert_eq!(prompt, data::ids(&case["prompt_ids"]));
        let answer = tokenizer.decode(&data::ids(&case["output_ids"]), ControlText::Hide);
        assert_eq!(answer, case["text"]);
    }
}

fn checkpoint(directory: &Path) -> (Tokenizer, ChatTemplate) {
    let bytes = fs::read(directory.join("tokenizer.json")).unwrap();
    let source = fs::read_to_string(directory.join("chat_template.jinja")).unwrap();
    (Tokenizer::from_bytes(&bytes).unwrap(), data::compile(&source).unwrap())
}

#[test]
fn bos_comes_once() {
    let tokenizer = data::tokenizer();
    for (text, bos) in [("a", Some(BOS)), ("<bos>a", Some(BOS)), ("<bos>a", None)] {
        let ids = tokenizer.encode_raw(text, bos).unwrap();
        assert_eq!(ids.iter().filter(|&&id| id == BOS).count(), 1, "{text:?}");
        assert_eq!(ids[0], BOS);
    }
    assert_eq!(tokenizer.encode_raw("", Some(BOS)).unwrap(), [BOS]);
    assert!(tokenizer.encode_raw("", None).unwrap().is_empty());
    assert!(!tokenizer.encode_raw("a", None).unwrap().contains(&BOS));
}

#[test]
fn the_vocabulary_can_be_asked() {
    let (tokenizer, reference) = (data::tokenizer(), data::reference());
    assert_eq!(tokenizer.vocab_size(), reference.get_vocab_size(true));
    let control = data::control_tokens();
    for id in 0..=u32::try_from(tokenizer.vocab_size()).unwrap() {
        assert_eq!(tokenizer.id_to_token(id), reference.id_to_token(id));
        assert_eq!(tokenizer.is_control(id), control.iter().any(|(control, _)| *control == id));
    }
    assert!(control.len() > 20);
    assert_eq!(tokenizer.token_to_id("<turn|>"), Some(106));
    assert_eq!(tokenizer.token_to_id("no such token"), None);
    assert_eq!(tokenizer.id_to_token(u32::MAX), None);
}

#[test]
fn stop_ids_are_a_union() {
    let mut stops: StopIds = [106, 1].into_iter().collect();
    stops.extend([50, 106]);
    assert_eq!(stops.as_slice(), [1, 50, 106]);
    assert!(stops.contains(50) && !stops.contains(2));
    assert!(!StopIds::default().contains(1));
}

/// The tokenizer file with one field replaced.
fn altered(pointer: &str, value: Value) -> Result<Tokenizer, TextError> {
    let mut file = data::read_json(&data::path("tokenizer.json"));
    *file.pointer_mut(pointer).unwrap() = value;
    Tokenizer::from_bytes(&serde_json::to_vec(&file).unwrap())
}

#[test]
fn other_bytes_are_refused_by_name() {
    let file = fs::read(data::path("tokenizer.json")).unwrap();
    let mut truncated =
        vec![&file[..0], &file[..1], &file[..file.len() / 2], &file[..file.len() - 1]];
    truncated.extend([&b"null"[..], b"{}", b"[]", b"\xff\xfe", b"PK\x03\x04", b"{\"model\":{}}"]);
    for bytes in truncated {
        let error = Tokenizer::from_bytes(bytes).unwrap_err();
        assert!(matches!(error, TextError::BadTokenizer { .. }), "{error}");
        assert!(error.to_string().contains("tokenizer.json"), "{error}");
    }
    let deep = "[".repeat(100_000);
    assert!(Tokenizer::from_bytes(deep.as_bytes()).is_err());
}

#[test]
fn contradictory_models_are_errors() {
    let merge = |merge: Value| altered("/model/merges/0", merge).unwrap_err();
    for error in [
        merge(json!(["a".repeat(50), "b".repeat(50)])),
        merge(json!(["a", "no such token"])),
        merge(json!([1, 2])),
        merge(json!("a  b")),
        altered("/model/vocab", json!({})).unwrap_err(),
        altered("/added_tokens/0/content", json!(7)).unwrap_err(),
    ] {
        assert!(matches!(error, TextError::BadTokenizer { .. }), "{error}");
    }
}

#[test]
fn unsupported_settings_are_named() {
    let metaspace = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"});
    let regex = json!({"type": "Split", "pattern": {"Regex": "(a*)*b"}, "behavior": "Isolated"});
    for (pointer, value, named) in [
        ("/pre_tokenizer", metaspace.clone(), "Metaspace"),
        ("/pre_tokenizer", regex, "Regex"),
        ("/decoder", metaspace, "Metaspace"),
        ("/decoder", Value::Null, "decoder"),
        ("/decoder/decoders", json!([{"type": "ByteFallback"}]), "Fuse"),
        ("/decoder/decoders", json!([{"type": "Fuse"}, {"type": "ByteFallback"}]), "Replace"),
        ("/normalizer", json!({"type": "Lowercase"}), "Lowercase"),
        ("/model/type", json!("Unigram"), "Unigram"),
        ("/model/dropout", json!(0.1), "dropout"),
        ("/model/continuing_subword_prefix", json!("##"), "continuing_subword_prefix"),
        ("/added_tokens/0/lstrip", json!(true), "<pad>"),
        ("/added_tokens/0/normalized", json!(true), "<pad>"),
    ] {
        let error = altered(pointer, value).unwrap_err().to_string();
        assert!(error.contains("tokenizer.json") && error.contains(named), "{pointer}: {error}");
    }
}

/// A file that was saved while it truncated and padded must not shorten prompts here.
#[test]
fn truncation_and_padding_of_the_file_do_not_apply() {
    let truncation =
        json!({"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0});
    let tokenizer = altered("/truncation", truncation).unwrap();
    let text = "a prompt of many more tokens than three";
    let whole = data::tokenizer().encode_raw(text, None).unwrap();
    assert_eq!(tokenizer.encode_raw(text, None).unwrap(), whole);
}

/// Models of this kind don't split at spaces, so every long text is one word to them.
#[test]
fn a_megabyte_without_a_space_takes_bounded_time() {
    let tokenizer = data::tokenizer();
    for unit in ["a", "ab", "<", "<|", "\n", "\0", "é", "\u{1234}", "<|turn>", "the "] {
        let text = unit.repeat((1 << 20) / unit.len());
        let start = Instant::now();
        let ids = tokenizer.encode_raw(&text, None).unwrap();
        let time = start.elapsed();
        println!("1 MiB of {unit:?}: {} ids in {time:?}", ids.len());
        assert!(time < Duration::from_secs(20), "{unit:?}: {time:?}");
        assert_eq!(tokenizer.decode(&ids, ControlText::Show), text);
    }
}

proptest! {
    #[test]
    fn raw_prompts_encode_as_in_the_reference(text in text_with_markers()) {
        let (tokenizer, reference) = (data::tokenizer(), data::reference());
        let expected = reference.encode(text.as_str(), false).unwrap();
        prop_assert_eq!(tokenizer.encode_raw(&text, None).unwrap(), expected.get_ids());
    }
}

/// Texts in which control tokens, halves of them and other characters follow each other.
pub(crate) fn text_with_markers() -> impl Strategy<Value = String> {
    let marker = r"<bos>|<\|turn>|<turn\|>|<\|channel>|<channel\|>|<\|.\|>|<\|tu|rn>|<|\||>|<0x0A>";
    let other = r"[a-zA-Z ,.\n\t]{1,8}|\PC|\p{Co}|[\x00-\x1f]";
    proptest::collection::vec(prop_oneof![marker, other], 0..24).prop_map(|parts| parts.concat())
}

/// Each of these makes a text ten times as long before it is cut into tokens.
#[test]
fn normalizers_that_let_a_text_explode_are_stopped() {
    let grow = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "a".repeat(10)});
    let chain = json!({"type": "Sequence", "normalizers": vec![grow; 18]});
    let tokenizer = altered("/normalizer", chain).unwrap();
    let error = tokenizer.encode_raw("a", None).unwrap_err();
    assert!(error.to_string().contains("bytes of memory"), "{error}");
    assert_eq!(
        tokenizer.encode_raw("b", None).unwrap(),
        data::tokenizer().encode_raw("b", None).unwrap()
    );
}

#[test]
fn no_text_gives_fewer_ids_than_its_length_promises() {
    let tokenizer = data::tokenizer();
    let longest = (0..tokenizer.vocab_size() as u32).filter_map(|id| tokenizer.id_to_token(id));
    let longest = longest.max_by_key(String::len).unwrap();
    assert_eq!(tokenizer.fewest_ids(longest.len()), 1);
    assert_eq!(tokenizer.fewest_ids(longest.len() + 1), 2);
    for text in [longest.repeat(9).as_str(), "the cat\u{0}\u{10FFFF} sat", &" ".repeat(999), ""] {
        let ids = tokenizer.encode_raw(text, None).unwrap().len() as u64;
        assert!(tokenizer.fewest_ids(text.len()) <= ids, "{text:?}");
    }
    // Where text may vanish or be unknown, nothing is promised.
    let vanishing = json!({"type": "Replace", "pattern": {"String": "a"}, "content": ""});
    assert_eq!(altered("/normalizer", vanishing).unwrap().fewest_ids(1 << 30), 0);
    assert_eq!(altered("/model/byte_fallback", json!(false)).unwrap().fewest_ids(1 << 30), 0);
    assert_eq!(altered("/added_tokens/0/rstrip", json!(true)).map_or(0, |t| t.fewest_ids(9)), 0);
}
