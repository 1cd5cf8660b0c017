//! Names of tensors: ggml's, and the canonical ones.

/// Tensors of a layer, under `blk.N.` and under `layers.N.`.
const LAYER: [(&str, &str); 14] = [
    ("attn_norm.weight", "input_layernorm.weight"),
    ("attn_q.weight", "self_attn.q_proj.weight"),
    ("attn_k.weight", "self_attn.k_proj.weight"),
    ("attn_v.weight", "self_attn.v_proj.weight"),
    ("attn_output.weight", "self_attn.o_proj.weight"),
    ("attn_q_norm.weight", "self_attn.q_norm.weight"),
    ("attn_k_norm.weight", "self_attn.k_norm.weight"),
    ("post_attention_norm.weight", "post_attention_layernorm.weight"),
    ("ffn_norm.weight", "pre_feedforward_layernorm.weight"),
    ("ffn_gate.weight", "mlp.gate_proj.weight"),
    ("ffn_up.weight", "mlp.up_proj.weight"),
    ("ffn_down.weight", "mlp.down_proj.weight"),
    ("post_ffw_norm.weight", "post_feedforward_layernorm.weight"),
    ("layer_output_scale.weight", "layer_scalar"),
];

/// The embedding, which gives the size of the vocabulary.
pub(super) const EMBEDDING: &str = "token_embd.weight";
/// Divisors of the rotary frequencies, no weight of ours.
pub(super) const ROPE_FACTORS: &str = "rope_freqs.weight";

/// The canonical name of a tensor of a model of so many layers, if it has one.
pub(super) fn canonical(name: &str, layers: u32) -> Option<String> {
    match name {
        EMBEDDING => return Some("embed_tokens.weight".to_owned()),
        "output_norm.weight" => return Some("norm.weight".to_owned()),
        "output.weight" => return Some("lm_head.weight".to_owned()),
        _ => {}
    }
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    let index: u32 = layer.parse().ok()?;
    let (_, canonical) = LAYER.iter().find(|(ggml, _)| *ggml == rest)?;
    // A number is written in one way only.
    (index < layers && index.to_string() == layer).then(|| format!("layers.{index}.{canonical}"))
}

/// The name of a layer's value projection.
pub(super) fn value_projection(layer: u32) -> String {
    format!("blk.{layer}.attn_v.weight")
}
