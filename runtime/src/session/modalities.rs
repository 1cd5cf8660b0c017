//! Tokens that stand for what a program can't take.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

/// Begin, end and placeholder of images, audio and video, as Hugging Face's configs name them.
const KEYS: [&str; 9] = [
    "image_token_id",
    "boi_token_id",
    "eoi_token_id",
    "audio_token_id",
    "boa_token_id",
    "eoa_token_id",
    "eoa_token_index",
    "video_token_id",
    "image_token_index",
];

/// The ids below `vocabulary` that the checkpoint's config, a JSON object, names for other
/// modalities than text; ascending.
pub(super) fn token_ids(config: &str, vocabulary: u32) -> Vec<u32> {
    let config: Map<String, Value> = serde_json::from_str(config).unwrap_or_default();
    let ids = KEYS.iter().filter_map(|key| config.get(*key)?.as_u64()?.try_into().ok());
    let ids: BTreeSet<u32> = ids.filter(|id| *id < vocabulary).collect();
    ids.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::token_ids;

    #[test]
    fn ids_are_taken_from_the_config() {
        let config = r#"{"image_token_id": 9, "boi_token_id": 7, "eoa_token_id": 8,
                         "eoa_token_index": 8, "eos_token_id": 1, "video_token_id": 10,
                         "audio_token_id": -1, "boa_token_id": null}"#;
        assert_eq!(token_ids(config, 10), [7, 8, 9]);
        assert!(token_ids("no JSON", 10).is_empty() && token_ids("[7]", 10).is_empty());
    }
}
