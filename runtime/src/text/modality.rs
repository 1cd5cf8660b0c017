use super::Tokenizer;

/// Spellings of the control tokens that begin, end and stand for what is no text.
const SPELLINGS: [&str; 7] =
    ["<|image>", "<image|>", "<|image|>", "<|audio>", "<audio|>", "<|audio|>", "<|video|>"];

/// Ids of the control tokens for images, audio and video, as the vocabulary spells them; for
/// checkpoints whose config does not name them.
pub fn modality_ids(tokenizer: &Tokenizer) -> Vec<u32> {
    let ids = SPELLINGS.iter().filter_map(|spelling| tokenizer.token_to_id(spelling));
    ids.filter(|id| tokenizer.is_control(*id)).collect()
}
