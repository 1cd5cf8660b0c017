//! The text config of a Gemma 4 checkpoint, in one form whatever style the file has.
//!
//! Released repositories say `global_head_dim` and `num_global_key_value_heads`; a config saved
//! again by transformers 5.17 has a `per_layer_config` map instead. Both give one
//! [`LayerConfig`] per layer here, and the model reads nothing else.

use std::collections::BTreeMap;

use serde::Deserialize;
use thiserror::Error;

use crate::trace::Rope;

/// Why a config cannot be used.
#[derive(Debug, Error)]
#[error("config.json: {0}")]
pub struct ConfigError(String);

/// What the text model needs to know.
#[derive(Clone, Debug)]
pub struct Config {
    /// First entry of `architectures`.
    pub architecture: String,
    /// `V`.
    pub vocab_size: u32,
    /// `H`, width of the residual stream.
    pub hidden_size: u32,
    /// `I`, width of the gated feed-forward.
    pub intermediate_size: u32,
    /// Query heads of every layer.
    pub num_attention_heads: u32,
    /// Added to the mean of squares in every norm.
    pub rms_norm_eps: f32,
    /// Cap of the final logits, if there is one.
    pub final_logit_softcapping: Option<f32>,
    /// Longest context in tokens that the checkpoint was made for.
    pub max_position_embeddings: u32,
    /// First token of every text.
    pub bos_token_id: Option<u32>,
    /// Ids that end a text, from every place in the config.
    pub eos_token_ids: Vec<u32>,
    /// One per layer, in order.
    pub layers: Vec<LayerConfig>,
}

/// What differs between layers.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerConfig {
    /// Keys that a query sees, itself included; `None` in full-attention layers.
    pub window: Option<u32>,
    /// Width of a head.
    pub head_dim: u32,
    /// Key and value heads.
    pub num_key_value_heads: u32,
    /// Whether values are made from the key projection (there is no `v_proj`).
    pub values_from_keys: bool,
    /// Position embedding.
    pub rope: Rope,
}

#[derive(Deserialize)]
struct File {
    #[serde(default)]
    architectures: Option<Vec<String>>,
    text_config: Option<serde_json::Value>,
    eos_token_id: Option<OneOrMany>,
}

#[derive(Clone, Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(u32),
    Many(Vec<u32>),
}

#[derive(Deserialize)]
struct Text {
    vocab_size: u32,
    hidden_size: u32,
    intermediate_size: u32,
    num_hidden_layers: u32,
    num_attention_heads: u32,
    num_key_value_heads: u32,
    head_dim: u32,
    rms_norm_eps: f32,
    max_position_embeddings: u32,
    sliding_window: Option<u32>,
    layer_types: Option<Vec<String>>,
    rope_parameters: Option<BTreeMap<String, RopeParameters>>,
    hidden_activation: Option<String>,
    final_logit_softcapping: Option<f32>,
    bos_token_id: Option<u32>,
    eos_token_id: Option<OneOrMany>,
    global_head_dim: Option<u32>,
    num_global_key_value_heads: Option<u32>,
    per_layer_config: Option<BTreeMap<String, PerLayer>>,
    #[serde(default)]
    attention_k_eq_v: Option<bool>,
    #[serde(default)]
    attention_bias: Option<bool>,
    #[serde(default)]
    enable_moe_block: Option<bool>,
    #[serde(default)]
    num_kv_shared_layers: Option<u32>,
    #[serde(default)]
    hidden_size_per_layer_input: Option<u32>,
    #[serde(default)]
    use_bidirectional_attention: Option<serde_json::Value>,
}

#[derive(Deserialize)]
struct RopeParameters {
    rope_type: String,
    rope_theta: f32,
    partial_rotary_factor: Option<f32>,
    factor: Option<f32>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct PerLayer {
    head_dim: Option<u32>,
    num_key_value_heads: Option<u32>,
}

impl Config {
    /// Reads `config.json`, of `Gemma4ForConditionalGeneration` or of the plain text model.
    pub fn parse(json: &str) -> Result<Self, ConfigError> {
        let value: serde_json::Value = serde_json::from_str(json).map_err(complain)?;
        let file: File = serde_json::from_value(value.clone()).map_err(complain)?;
        let text = file.text_config.unwrap_or(value);
        let text: Text = serde_json::from_value(text).map_err(complain)?;
        refuse_unsupported(&text)?;
        let mut eos_token_ids = Vec::new();
        for ids in [file.eos_token_id, text.eos_token_id.clone()].into_iter().flatten() {
            match ids {
                OneOrMany::One(id) => eos_token_ids.push(id),
                OneOrMany::Many(ids) => eos_token_ids.extend(ids),
            }
        }
        let extents = [
            ("vocab_size", text.vocab_size),
            ("hidden_size", text.hidden_size),
            ("intermediate_size", text.intermediate_size),
            ("num_hidden_layers", text.num_hidden_layers),
            ("num_attention_heads", text.num_attention_heads),
            ("max_position_embeddings", text.max_position_embeddings),
        ];
        for (name, extent) in extents {
            if extent == 0 || extent > 1 << 24 {
                return Err(ConfigError(format!("`{name}` is {extent}")));
            }
        }
        if text.num_hidden_layers > 4096 {
            return Err(ConfigError(format!("{} layers", text.num_hidden_layers)));
        }
        let layers: Result<_, _> =
            (0..text.num_hidden_layers).map(|index| layer(&text, index)).collect();
        Ok(Self {
            architecture: file
                .architectures
                .and_then(|names| names.into_iter().next())
                .unwrap_or_else(|| "Gemma4ForCausalLM".to_owned()),
            vocab_size: text.vocab_size,
            hidden_size: text.hidden_size,
            intermediate_size: text.intermediate_size,
            num_attention_heads: text.num_attention_heads,
            rms_norm_eps: text.rms_norm_eps,
            final_logit_softcapping: text.final_logit_softcapping,
            max_position_embeddings: text.max_position_embeddings,
            bos_token_id: text.bos_token_id,
            eos_token_ids,
            layers: layers?,
        })
    }
}

fn layer(text: &Text, index: u32) -> Result<LayerConfig, ConfigError> {
    let is_last = index + 1 == text.num_hidden_layers;
    let kind = match &text.layer_types {
        Some(types) if types.len() != text.num_hidden_layers as usize => {
            return Err(ConfigError(format!(
                "`layer_types` has {} entries for {} layers",
                types.len(),
                text.num_hidden_layers
            )));
        }
        Some(types) => types[index as usize].as_str(),
        // Every sixth layer sees everything where the config does not say otherwise.
        None if (index + 1).is_multiple_of(6) => "full_attention",
        None => "sliding_attention",
    };
    // The last layer is full whatever the list says, as in transformers.
    let full = match kind {
        "full_attention" => true,
        "sliding_attention" => is_last,
        other => return Err(ConfigError(format!("layer {index} is of unknown type `{other}`"))),
    };
    let window = match text.sliding_window {
        _ if full => None,
        Some(window) if window > 0 => Some(window),
        _ => return Err(ConfigError("`sliding_window` is missing".to_owned())),
    };
    let values_from_keys = full && text.attention_k_eq_v.unwrap_or(false);
    let own = text.per_layer_config.as_ref().and_then(|map| map.get(&index.to_string()));
    let head_dim = own
        .and_then(|layer| layer.head_dim)
        .or(text.global_head_dim.filter(|_| full))
        .unwrap_or(text.head_dim);
    let num_key_value_heads = own
        .and_then(|layer| layer.num_key_value_heads)
        .or(text.num_global_key_value_heads.filter(|_| values_from_keys))
        .unwrap_or(text.num_key_value_heads);
    if num_key_value_heads == 0 || !text.num_attention_heads.is_multiple_of(num_key_value_heads) {
        return Err(ConfigError(format!(
            "layer {index}: {} query heads do not divide among {num_key_value_heads} key heads",
            text.num_attention_heads
        )));
    }
    if head_dim == 0 || !head_dim.is_multiple_of(2) || head_dim > 4096 {
        return Err(ConfigError(format!("layer {index}: a head of width {head_dim}")));
    }
    let rope = rope(text, if full { "full_attention" } else { "sliding_attention" }, head_dim)?;
    Ok(LayerConfig { window, head_dim, num_key_value_heads, values_from_keys, rope })
}

fn rope(text: &Text, kind: &str, head_dim: u32) -> Result<Rope, ConfigError> {
    let parameters = text
        .rope_parameters
        .as_ref()
        .and_then(|map| map.get(kind))
        .ok_or_else(|| ConfigError(format!("`rope_parameters` has no `{kind}`")))?;
    let half = head_dim / 2;
    let rotated = match parameters.rope_type.as_str() {
        "default" => half,
        // Exponents are over the whole head: the frequencies beyond `rotated` are zero.
        "proportional" => {
            let factor = parameters.partial_rotary_factor.unwrap_or(1.0);
            if !(0.0..=1.0).contains(&factor) {
                return Err(ConfigError(format!("`partial_rotary_factor` is {factor}")));
            }
            (f64::from(factor) * f64::from(head_dim) / 2.0) as u32
        }
        other => return Err(ConfigError(format!("`rope_type` `{other}` is not supported"))),
    };
    Ok(Rope { base: parameters.rope_theta, rotated, factor: parameters.factor.unwrap_or(1.0) })
}

/// Features of other family members, and of other families, refused by name.
fn refuse_unsupported(text: &Text) -> Result<(), ConfigError> {
    let not_yet = |feature: &str| Err(ConfigError(format!("{feature} are not supported yet")));
    if text.enable_moe_block == Some(true) {
        return not_yet("mixture-of-experts blocks (`enable_moe_block`, as in 26B-A4B)");
    }
    if text.hidden_size_per_layer_input.is_some_and(|n| n > 0) {
        return not_yet("per-layer embeddings (`hidden_size_per_layer_input`, as in E2B and E4B)");
    }
    if text.num_kv_shared_layers.is_some_and(|n| n > 0) {
        return not_yet("layers that share keys and values (`num_kv_shared_layers`)");
    }
    if text.attention_bias == Some(true) {
        return not_yet("biases in attention (`attention_bias`)");
    }
    match text.hidden_activation.as_deref() {
        None | Some("gelu_pytorch_tanh") => {}
        Some(other) => {
            return Err(ConfigError(format!("`hidden_activation` `{other}` is not supported")));
        }
    }
    // "vision" concerns image tokens only; text stays causal.
    match &text.use_bidirectional_attention {
        None | Some(serde_json::Value::Null | serde_json::Value::Bool(false)) => Ok(()),
        Some(serde_json::Value::String(kind)) if kind == "vision" => Ok(()),
        Some(other) => Err(ConfigError(format!(
            "`use_bidirectional_attention` {other} is not supported: this is no causal text model"
        ))),
    }
}

fn complain(error: serde_json::Error) -> ConfigError {
    ConfigError(error.to_string())
}
