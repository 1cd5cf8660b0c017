//! What the name of a tensor in a checkpoint says.

/// Tensors of the vision and audio towers: a text model skips them.
const TOWERS: [&str; 5] = [
    "model.vision_tower.",
    "model.embed_vision.",
    "model.audio_tower.",
    "model.embed_audio.",
    "model.multi_modal_projector.",
];

/// Prefixes of the language model, the longer one first.
const PREFIXES: [&str; 2] = ["model.language_model.", "model."];

/// Whether a tensor of a Hugging Face checkpoint belongs to a tower.
pub(super) fn is_tower(name: &str) -> bool {
    TOWERS.iter().any(|prefix| name.starts_with(prefix))
}

/// The name without the prefix of the language model; other names stay as they are.
pub(super) fn canonical(name: &str) -> &str {
    PREFIXES.iter().find_map(|prefix| name.strip_prefix(prefix)).unwrap_or(name)
}
