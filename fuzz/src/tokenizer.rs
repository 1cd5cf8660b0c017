//! A tokenizer: the input is a `tokenizer.json`, a NUL, and a text that is encoded with it and
//! decoded again.

use gemma4_runtime::text::{ControlText, Tokenizer};

/// Runs the target on an input.
pub fn run(input: &[u8]) {
    let at = input.iter().position(|byte| *byte == 0).unwrap_or(input.len());
    let (json, text) = input.split_at(at);
    let Ok(tokenizer) = Tokenizer::from_bytes(json) else { return };
    let text = String::from_utf8_lossy(text.get(1..).unwrap_or_default());
    let Ok(ids) = tokenizer.encode_raw(&text, None) else { return };
    assert!(ids.len() as u64 >= tokenizer.fewest_ids(text.len()), "fewer ids than promised");
    for control in [ControlText::Hide, ControlText::Show] {
        let whole = tokenizer.decode(&ids, control);
        let mut stream = tokenizer.stream(control);
        let mut pieces: String = ids.iter().map(|id| stream.push(*id)).collect();
        pieces.push_str(&stream.finish());
        assert_eq!(whole, pieces);
    }
    for id in ids {
        assert!(tokenizer.id_to_token(id).is_some(), "an id that is no token");
        tokenizer.is_control(id);
    }
}
