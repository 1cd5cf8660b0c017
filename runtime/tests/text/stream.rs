use std::time::{Duration, Instant};

use gemma4_runtime::text::{ControlText, Tokenizer};
use proptest::prelude::*;

use crate::data;

const BOTH: [ControlText; 2] = [ControlText::Hide, ControlText::Show];

fn pieces(tokenizer: &Tokenizer, ids: &[u32], control: ControlText) -> Vec<String> {
    let mut stream = tokenizer.stream(control);
    let mut pieces: Vec<String> = ids.iter().map(|&id| stream.push(id)).collect();
    pieces.push(stream.finish());
    pieces
}

/// The ids of a text's bytes, spelled as byte tokens.
fn bytes(tokenizer: &Tokenizer, bytes: &[u8]) -> Vec<u32> {
    bytes.iter().map(|byte| tokenizer.token_to_id(&format!("<0x{byte:02X}>")).unwrap()).collect()
}

#[test]
fn characters_come_whole() {
    let tokenizer = data::tokenizer();
    for text in ["👩‍👩‍👧‍👦", "한국어", "עברית", "e\u{301}", "🏴󠁧󠁢󠁷󠁬󠁳󠁿 a 🧿b", "\u{FFFD}"]
    {
        for ids in [tokenizer.encode_raw(text, None).unwrap(), bytes(&tokenizer, text.as_bytes())] {
            let pieces = pieces(&tokenizer, &ids, ControlText::Hide);
            assert_eq!(pieces.concat(), text);
            let replaced = pieces.iter().any(|piece| piece.contains('\u{FFFD}'));
            assert_eq!(replaced, text == "\u{FFFD}");
        }
    }
}

/// Text must appear while it is generated, not at the end.
#[test]
fn text_is_not_held_back() {
    let tokenizer = data::tokenizer();
    let ids = tokenizer.encode_raw("Hello, world! 🧿 and on", None).unwrap();
    let mut stream = tokenizer.stream(ControlText::Hide);
    let shown: String = ids.iter().map(|&id| stream.push(id)).collect();
    assert_eq!(shown, "Hello, world! 🧿 and on");
    assert_eq!(stream.finish(), "");
}

#[test]
fn an_incomplete_tail_is_flushed_as_the_decoder_does() {
    let (tokenizer, reference) = (data::tokenizer(), data::reference());
    for tail in [&b"\xE5"[..], b"\xE5\x8F", b"\xE5\x8F\xAB\xE5", b"\xFF", b"a\xC3"] {
        let ids = bytes(&tokenizer, tail);
        let pieces = pieces(&tokenizer, &ids, ControlText::Hide);
        assert_eq!(pieces.concat(), reference.decode(&ids, true).unwrap());
        assert_eq!(pieces.last().unwrap().chars().count(), tail.len());
    }
}

#[test]
fn control_tokens_are_shown_only_on_demand() {
    let tokenizer = data::tokenizer();
    for (id, spelling) in data::control_tokens() {
        assert_eq!(tokenizer.decode(&[id], ControlText::Hide), "");
        assert_eq!(tokenizer.decode(&[id], ControlText::Show), spelling);
    }
    let unknown = [u32::MAX, 9_999_999];
    assert_eq!(tokenizer.decode(&unknown, ControlText::Show), "");
}

#[test]
fn a_stream_can_be_used_again_after_finish() {
    let tokenizer = data::tokenizer();
    let mut stream = tokenizer.stream(ControlText::Hide);
    let half = bytes(&tokenizer, b"\xC3");
    assert_eq!(stream.push(half[0]) + &stream.finish(), "\u{FFFD}");
    let ids = bytes(&tokenizer, "é".as_bytes());
    assert_eq!(stream.push(ids[0]) + &stream.push(ids[1]) + &stream.finish(), "é");
}

#[test]
fn time_grows_with_the_number_of_ids_only() {
    let tokenizer = data::tokenizer();
    for ids in [bytes(&tokenizer, &[0x80; 1 << 20]), vec![1227; 1 << 20]] {
        let start = Instant::now();
        let text = tokenizer.decode(&ids, ControlText::Hide);
        let time = start.elapsed();
        println!("2^20 ids of {:?} in {time:?}", ids[0]);
        assert!(!text.is_empty() && time < Duration::from_secs(10), "{time:?}");
    }
}

fn any_id() -> impl Strategy<Value = u32> {
    // Byte tokens lie side by side in the vocabulary; the last range has ids outside it.
    let first = data::tokenizer().token_to_id("<0x00>").unwrap();
    prop_oneof![
        4 => first..first + 256,
        2 => first + 0xC2..first + 0xF5,
        3 => 0u32..2048,
        1 => 0u32..110,
        1 => 2040u32..2100,
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn pieces_are_the_batch_decode(ids in proptest::collection::vec(any_id(), 0..40)) {
        let (tokenizer, reference) = (data::tokenizer(), data::reference());
        for control in BOTH {
            let expected = reference.decode(&ids, control == ControlText::Hide).unwrap();
            prop_assert_eq!(pieces(&tokenizer, &ids, control).concat(), expected);
        }
    }

    #[test]
    fn text_survives_a_round_trip(text in r"[^<▁]{0,60}") {
        let tokenizer = data::tokenizer();
        let ids = tokenizer.encode_raw(&text, None).unwrap();
        prop_assert_eq!(pieces(&tokenizer, &ids, ControlText::Hide).concat(), text);
    }
}
