//! The config of a model, from the keys of its GGUF file.
//!
//! `attention.key_length` and `rope.freq_base` are those of full-attention layers, their `_swa`
//! twins those of sliding ones. Whether values are made from the key projection shows in the
//! absence of `attn_v`, and how many pairs full layers rotate in the tensor `rope_freqs`.

use serde_json::{Map, Value, json};

use super::Refusal;
use super::metadata::Metadata;
use super::tokenizer;

/// What of the tensors the config depends on.
pub(super) struct Facts<'a> {
    /// Rows of the embedding.
    pub(super) vocab_size: u32,
    /// Whether a layer has a value projection.
    pub(super) has_values: &'a dyn Fn(u32) -> bool,
    /// The tensor `rope_freqs`, if there is one.
    pub(super) rope_factors: Option<Vec<f32>>,
}

/// Divisor of a frequency that becomes none.
const NOT_ROTATED: f32 = 1e30;

/// Refuses other architectures, and the features of other members of the family.
pub(super) fn check_supported(metadata: &Metadata) -> Result<(), Refusal> {
    let found = metadata.str("general.architecture")?;
    if found != "gemma4" {
        return Err(Refusal::Architecture { found: found.to_owned() });
    }
    let features = [
        ("mixture-of-experts blocks, as in 26B-A4B", "gemma4.expert_count"),
        ("per-layer embeddings, as in E2B and E4B", "gemma4.embedding_length_per_layer_input"),
        ("layers that share keys and values", "gemma4.attention.shared_kv_layers"),
    ];
    for (feature, key) in features {
        if metadata.optional_u32(key)?.is_some_and(|count| count > 0) {
            return Err(Refusal::Feature { feature, key: key.to_owned() });
        }
    }
    let key = "gemma4.rope.scaling.type";
    match metadata.optional_str(key)? {
        None | Some("none") => Ok(()),
        Some(kind) => Err(Refusal::key(key, format!("`{kind}` is not supported"))),
    }
}

/// Number of layers.
pub(super) fn layers(metadata: &Metadata) -> Result<u32, Refusal> {
    let key = "gemma4.block_count";
    match metadata.u32(key)? {
        count @ 1..=4096 => Ok(count),
        count => Err(Refusal::key(key, format!("{count} layers"))),
    }
}

/// A config.json that [`crate::model::Config::parse`] reads.
pub(super) fn config_json(metadata: &Metadata, facts: &Facts<'_>) -> Result<String, Refusal> {
    let layers = layers(metadata)?;
    let sliding = sliding(metadata, layers)?;
    let heads = metadata.per_layer("gemma4.attention.head_count_kv", layers)?;
    let full_width = head_width(metadata, "")?;
    let sliding_width = head_width(metadata, "_swa")?;
    let per_layer: Map<String, Value> = (0..)
        .zip(sliding.iter().zip(&heads))
        .map(|(layer, (sliding, heads)): (u32, _)| {
            let width = if *sliding { sliding_width } else { full_width };
            (layer.to_string(), json!({"head_dim": width, "num_key_value_heads": heads}))
        })
        .collect();
    let kind = |sliding: &bool| if *sliding { "sliding_attention" } else { "full_attention" };
    let config = json!({
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "vocab_size": facts.vocab_size,
        "hidden_size": metadata.u32("gemma4.embedding_length")?,
        "intermediate_size": uniform(metadata, "gemma4.feed_forward_length", layers)?,
        "num_hidden_layers": layers,
        "num_attention_heads": uniform(metadata, "gemma4.attention.head_count", layers)?,
        "num_key_value_heads": heads[0],
        "head_dim": sliding_width,
        "per_layer_config": per_layer,
        "attention_k_eq_v": values_from_keys(&sliding, facts)?,
        "rms_norm_eps": metadata.f32("gemma4.attention.layer_norm_rms_epsilon")?,
        "max_position_embeddings": metadata.u32("gemma4.context_length")?,
        "sliding_window": metadata.u32("gemma4.attention.sliding_window")?,
        "layer_types": sliding.iter().map(kind).collect::<Vec<_>>(),
        "rope_parameters": {
            "full_attention": full_rope(metadata, facts, full_width)?,
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": metadata.f32("gemma4.rope.freq_base_swa")?,
            },
        },
        "final_logit_softcapping": metadata.optional_f32("gemma4.final_logit_softcapping")?,
        "bos_token_id": tokenizer::bos(metadata, facts.vocab_size)?,
        "eos_token_id": tokenizer::stops(metadata, facts.vocab_size)?,
    });
    Ok(config.to_string())
}

/// A generation_config.json with the sampling defaults, as far as the file has some.
pub(super) fn generation_config(metadata: &Metadata) -> Result<String, Refusal> {
    let config = json!({
        "temperature": metadata.optional_f32("general.sampling.temp")?,
        "top_k": metadata.optional_u32("general.sampling.top_k")?,
        "top_p": metadata.optional_f32("general.sampling.top_p")?,
    });
    Ok(config.to_string())
}

/// Which layers have a window.
fn sliding(metadata: &Metadata, layers: u32) -> Result<Vec<bool>, Refusal> {
    let key = "gemma4.attention.sliding_window_pattern";
    let pattern: Vec<bool> =
        metadata.integers(key, layers as usize)?.into_iter().map(|flag| flag != 0).collect();
    // Gemma's own code makes the last layer full whatever its config says.
    match pattern.last() {
        Some(true) => Err(Refusal::key(key, "the last layer is a sliding one")),
        _ => Ok(pattern),
    }
}

/// A number that all layers have in common.
fn uniform(metadata: &Metadata, key: &str, layers: u32) -> Result<u32, Refusal> {
    let values = metadata.per_layer(key, layers)?;
    match values.iter().find(|value| **value != values[0]) {
        None => Ok(values[0]),
        Some(other) => {
            let why = format!("layers with {} and with {other} can't be mixed yet", values[0]);
            Err(Refusal::key(key, why))
        }
    }
}

/// Width of a head, for keys, values and rotation alike.
fn head_width(metadata: &Metadata, suffix: &str) -> Result<u32, Refusal> {
    let width = metadata.u32(&format!("gemma4.attention.key_length{suffix}"))?;
    for name in ["attention.value_length", "rope.dimension_count"] {
        let key = format!("gemma4.{name}{suffix}");
        let other = metadata.optional_u32(&key)?.unwrap_or(width);
        if other != width {
            return Err(Refusal::Key { key, why: format!("{other}, where keys have {width}") });
        }
    }
    Ok(width)
}

/// Whether full-attention layers make values from the key projection.
fn values_from_keys(sliding: &[bool], facts: &Facts<'_>) -> Result<bool, Refusal> {
    let full = (0..).zip(sliding).filter(|(_, sliding)| !**sliding).map(|(layer, _)| layer);
    let mut found = full.map(|layer: u32| (layer, (facts.has_values)(layer)));
    let Some((_, first)) = found.next() else { return Ok(false) };
    match found.find(|(_, has)| *has != first) {
        None => Ok(!first),
        Some((layer, _)) => Err(Refusal::MissingTensor {
            tensor: super::names::value_projection(match first {
                true => layer,
                false => sliding.iter().position(|sliding| !sliding).unwrap_or(0) as u32,
            }),
        }),
    }
}

/// Position embedding of full-attention layers, whose heads have `width` numbers.
fn full_rope(metadata: &Metadata, facts: &Facts<'_>, width: u32) -> Result<Value, Refusal> {
    let theta = metadata.f32("gemma4.rope.freq_base")?;
    let Some(factors) = &facts.rope_factors else {
        return Ok(json!({"rope_type": "default", "rope_theta": theta}));
    };
    let wrong =
        |why: String| Refusal::Tensor { tensor: super::names::ROPE_FACTORS.to_owned(), why };
    if factors.len() as u64 * 2 != u64::from(width) {
        return Err(wrong(format!("it has {} numbers for heads of {width}", factors.len())));
    }
    let rotated = factors.iter().take_while(|factor| **factor == 1.0).count();
    if let Some(other) = factors[rotated..].iter().find(|factor| **factor != NOT_ROTATED) {
        return Err(wrong(format!("it has {other}, where pairs have 1 or, unrotated, 1e30")));
    }
    // The config's reader truncates `factor · width / 2`.
    let half = f64::from(width) / 2.0;
    let factor = (rotated as f64 / half) as f32;
    let short = ((f64::from(factor) * half) as usize) < rotated;
    let factor = if short { factor.next_up() } else { factor };
    Ok(json!({
        "rope_type": "proportional",
        "rope_theta": theta,
        "partial_rotary_factor": factor,
    }))
}
