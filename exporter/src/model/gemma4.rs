//! The text model, after `Gemma4TextModel` of Hugging Face transformers.
//!
//! What is easy to get wrong: norms multiply by `w`, not `1 + w`; attention scores are not
//! scaled; values pass a weightless norm and are not rotated; in full-attention layers they are
//! the raw key projection; `layer_scalar` multiplies the residual stream too.

use gemma4_format::Dim;

use super::config::{Config, LayerConfig};
use crate::trace::{Buffer, Result, Rope, Store, Tensor, Weight};

/// The text model with its weights and its key and value buffers.
#[derive(Debug)]
pub struct Model {
    embedding: Embedding,
    layers: Vec<Layer>,
    head: Head,
}

impl Model {
    /// Takes the weights named in `config` from a store.
    ///
    /// `max_chunk` is the longest call in tokens: a sliding layer keeps a ring of
    /// `window + max_chunk` rows, enough to rewind one chunk, or what a shorter call has read.
    pub fn new(config: &Config, max_chunk: u32, store: &Store<'_>) -> Result<Self> {
        // In the order of use, which is the order of weights in the file.
        let embedding = Embedding::new(config, store)?;
        let layers = (0..config.layers.len()).map(|i| Layer::new(config, i, max_chunk, store));
        let layers = layers.collect::<Result<_>>()?;
        let tied = (Head::weight_name(store) == EMBEDDING).then_some(&embedding.table);
        let head = Head::new(config, store, tied)?;
        Ok(Self { embedding, layers, head })
    }

    /// Tokens `[T]` at `position..position + T` to the residual stream `[T, H]` after all layers.
    pub fn forward(&self, tokens: &Tensor, position: &Tensor) -> Result<Tensor> {
        let mut x = self.embedding.forward(tokens)?;
        for layer in &self.layers {
            x = layer.forward(&x, position)?;
        }
        Ok(x)
    }

    /// Rows `[N, H]` of the residual stream to logits `[N, V]`.
    pub fn logits(&self, x: &Tensor) -> Result<Tensor> {
        self.head.forward(x)
    }
}

/// Name of the embedding, which is the head too where there is no [`HEAD`].
const EMBEDDING: &str = "embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// Tokens to the residual stream.
#[derive(Debug)]
pub(crate) struct Embedding {
    table: Weight,
    scale: f32,
}

impl Embedding {
    pub(crate) fn new(config: &Config, store: &Store<'_>) -> Result<Self> {
        let table = store.weight(EMBEDDING, &[config.vocab_size, config.hidden_size])?;
        Ok(Self { table, scale: f64::from(config.hidden_size).sqrt() as f32 })
    }

    pub(crate) fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        Ok(tokens.embed(&self.table)?.scale(self.scale)?.labelled("embed"))
    }
}

/// The residual stream to logits.
#[derive(Debug)]
pub(crate) struct Head {
    norm: RmsNorm,
    lm_head: Weight,
    soft_cap: Option<f32>,
}

impl Head {
    /// With the weight `tied`, or else that of [`Head::weight_name`].
    pub(crate) fn new(config: &Config, store: &Store<'_>, tied: Option<&Weight>) -> Result<Self> {
        let norm = RmsNorm::new(config.hidden_size, config.rms_norm_eps, &store.at("norm"))?;
        let dims = [config.vocab_size, config.hidden_size];
        let lm_head = match tied {
            Some(weight) => weight.clone(),
            None => store.weight(Self::weight_name(store), &dims)?,
        };
        Ok(Self { norm, lm_head, soft_cap: config.final_logit_softcapping })
    }

    /// A head in the file wins over `tie_word_embeddings`.
    pub(crate) fn weight_name(store: &Store<'_>) -> &'static str {
        if store.has(HEAD) { HEAD } else { EMBEDDING }
    }

    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let logits = self.norm.forward(x)?.labelled("norm").linear(&self.lm_head)?;
        match self.soft_cap {
            Some(cap) => logits.soft_cap(cap),
            None => Ok(logits),
        }
    }
}

/// One layer, with its key and value buffers.
#[derive(Debug)]
pub(crate) struct Layer {
    /// `layers.N`.
    label: String,
    input_layernorm: RmsNorm,
    self_attn: Attention,
    post_attention_layernorm: RmsNorm,
    pre_feedforward_layernorm: RmsNorm,
    mlp: Mlp,
    post_feedforward_layernorm: RmsNorm,
    layer_scalar: Weight,
}

impl Layer {
    /// The layer of that number.
    pub(crate) fn new(
        config: &Config,
        number: usize,
        max_chunk: u32,
        store: &Store<'_>,
    ) -> Result<Self> {
        let layer = &config.layers[number];
        let store = store.at("layers").at(number);
        let norm =
            |name: &str| RmsNorm::new(config.hidden_size, config.rms_norm_eps, &store.at(name));
        Ok(Self {
            label: format!("layers.{number}"),
            input_layernorm: norm("input_layernorm")?,
            self_attn: Attention::new(config, layer, max_chunk, &store.at("self_attn"))?,
            post_attention_layernorm: norm("post_attention_layernorm")?,
            pre_feedforward_layernorm: norm("pre_feedforward_layernorm")?,
            mlp: Mlp::new(config, &store.at("mlp"))?,
            post_feedforward_layernorm: norm("post_feedforward_layernorm")?,
            layer_scalar: store.weight("layer_scalar", &[1])?,
        })
    }

    pub(crate) fn forward(&self, x: &Tensor, position: &Tensor) -> Result<Tensor> {
        let attended = self.self_attn.forward(&self.input_layernorm.forward(x)?, position)?;
        let x = x.add(&self.post_attention_layernorm.forward(&attended)?)?;
        let fed = self.mlp.forward(&self.pre_feedforward_layernorm.forward(&x)?)?;
        let x = x.add(&self.post_feedforward_layernorm.forward(&fed)?)?;
        Ok(x.scale_by(&self.layer_scalar)?.labelled(&self.label))
    }
}

#[derive(Debug)]
struct Attention {
    q_proj: Weight,
    k_proj: Weight,
    /// `None` where values are made from the key projection.
    v_proj: Option<Weight>,
    o_proj: Weight,
    q_norm: RmsNorm,
    k_norm: RmsNorm,
    eps: f32,
    heads: u32,
    key_value_heads: u32,
    window: Option<u32>,
    rope: Rope,
    keys: Buffer,
    values: Buffer,
}

impl Attention {
    fn new(
        config: &Config,
        layer: &LayerConfig,
        max_chunk: u32,
        store: &Store<'_>,
    ) -> Result<Self> {
        let LayerConfig { window, head_dim, num_key_value_heads, values_from_keys, rope } = *layer;
        let (hidden, heads) = (config.hidden_size, config.num_attention_heads);
        let kv_width = num_key_value_heads * head_dim;
        let projection = |name: &str, n: u32, k: u32| store.at(name).weight("weight", &[n, k]);
        // In the order of use, which is the order of weights in the file.
        let q_proj = projection("q_proj", heads * head_dim, hidden)?;
        let k_proj = projection("k_proj", kv_width, hidden)?;
        let v_proj = match values_from_keys {
            true => None,
            false => Some(projection("v_proj", kv_width, hidden)?),
        };
        let rows = match window {
            Some(window) => Dim::Ring(window + max_chunk),
            None => Dim::Context,
        };
        let buffer = |name: &str| {
            store.buffer(name, [rows, Dim::Fixed(num_key_value_heads), Dim::Fixed(head_dim)])
        };
        Ok(Self {
            q_proj,
            k_proj,
            v_proj,
            o_proj: projection("o_proj", hidden, heads * head_dim)?,
            q_norm: RmsNorm::new(head_dim, config.rms_norm_eps, &store.at("q_norm"))?,
            k_norm: RmsNorm::new(head_dim, config.rms_norm_eps, &store.at("k_norm"))?,
            eps: config.rms_norm_eps,
            heads,
            key_value_heads: num_key_value_heads,
            window,
            rope,
            keys: buffer("keys")?,
            values: buffer("values")?,
        })
    }

    fn forward(&self, x: &Tensor, position: &Tensor) -> Result<Tensor> {
        let q = x.linear(&self.q_proj)?.split_heads(self.heads)?;
        let k = x.linear(&self.k_proj)?.split_heads(self.key_value_heads)?;
        let v = match &self.v_proj {
            Some(v_proj) => x.linear(v_proj)?.split_heads(self.key_value_heads)?,
            None => k.clone(),
        };
        let q = self.q_norm.forward(&q)?.rope(position, self.rope)?;
        let k = self.k_norm.forward(&k)?.rope(position, self.rope)?;
        self.keys.write(&k, position)?;
        self.values.write(&v.rms_norm(None, self.eps)?, position)?;
        q.attention(&self.keys, &self.values, position, self.window, 1.0)?
            .merge_heads()?
            .linear(&self.o_proj)
    }
}

#[derive(Debug)]
struct Mlp {
    gate_proj: Weight,
    up_proj: Weight,
    down_proj: Weight,
}

impl Mlp {
    fn new(config: &Config, store: &Store<'_>) -> Result<Self> {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        Ok(Self {
            gate_proj: store.at("gate_proj").weight("weight", &[inner, hidden])?,
            up_proj: store.at("up_proj").weight("weight", &[inner, hidden])?,
            down_proj: store.at("down_proj").weight("weight", &[hidden, inner])?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.linear(&self.gate_proj)?.geglu(&x.linear(&self.up_proj)?)?.linear(&self.down_proj)
    }
}

#[derive(Debug)]
struct RmsNorm {
    weight: Weight,
    eps: f32,
}

impl RmsNorm {
    fn new(width: u32, eps: f32, store: &Store<'_>) -> Result<Self> {
        Ok(Self { weight: store.weight("weight", &[width])?, eps })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.rms_norm(Some(&self.weight), self.eps)
    }
}
