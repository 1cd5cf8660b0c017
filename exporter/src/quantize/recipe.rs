//! Recipes: ordered rules from the name of a weight to its encoding.

use gemma4_format::encoding::ZeroType;
use gemma4_format::{DType, Encoding, Offset};

use crate::{Error, Result};

/// The embedding, which a tied head reads too.
pub(crate) const EMBEDDING: &str = "embed_tokens.weight";
/// A head of its own.
pub(crate) const HEAD: &str = "lm_head.weight";

/// A named list of rules. The first rule whose pattern matches a weight's name decides; a weight
/// that none matches is kept as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recipe {
    /// Name, for messages and for the files made with it.
    pub name: String,
    /// In order of precedence.
    pub rules: Vec<Rule>,
    /// Whether a model whose head is its embedding gets a head of its own, made from that.
    pub untie_head: bool,
}

/// What happens to the weights of some names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Canonical name of a weight; `*` stands for any characters, none included.
    pub pattern: String,
    /// In which layers.
    pub layers: Layers,
    /// What happens to it.
    pub treatment: Treatment,
}

/// The layers that a rule is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layers {
    /// All of them, and what lies in none.
    All,
    /// The first quarter and the last, each rounded down.
    Edge,
}

/// What happens to a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Treatment {
    /// It is stored as the checkpoint has it.
    Keep,
    /// It is quantized.
    Quantize(Codes, Method),
}

/// An encoding whose group may depend on the weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Codes {
    /// Bits of a code.
    pub bits: u8,
    /// Codes that share a scale.
    pub group: Group,
    /// Type of the scales.
    pub scale: DType,
    /// Where zero lies.
    pub offset: Offset,
}

/// Which codes share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// So many along the last dimension.
    Size(u32),
    /// All of a row.
    Row,
}

/// How scales, zero points and codes are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// The range of codes spans the range of the group's values, zero included.
    MinMax,
    /// Half-quadratic quantization: the scale of min-max, and the zero point with the least error.
    HalfQuadratic,
}

impl Recipe {
    /// Names of the built-in recipes.
    pub const NAMES: [&str; 4] = ["default", "hqq", "torchao-default", "torchao-sensitive"];

    /// The built-in recipe of that name.
    ///
    /// All leave norms and scalars as they are and have projections in INT4 in groups of 32:
    ///
    /// | name | projections | embedding | head |
    /// |---|---|---|---|
    /// | `default` | min-max | INT8, a scale a row | the embedding, or its own in INT8 |
    /// | `hqq` | HQQ | as it is | as it is |
    /// | `torchao-default` | min-max | INT8, a scale a row | INT4 of its own, min-max |
    /// | `torchao-sensitive` | HQQ; v_proj and down_proj of the edge layers INT8 in groups of 32 | INT8, a scale a row | INT4 of its own, HQQ |
    pub fn named(name: &str) -> Result<Self> {
        let min_max = |codes| Treatment::Quantize(codes, Method::MinMax);
        let hqq = Treatment::Quantize(INT4_FRACTION, Method::HalfQuadratic);
        let embedding = Rule::new(EMBEDDING, min_max(INT8_ROW));
        let head = |treatment| Rule::new(HEAD, treatment);
        let projections = |treatment| Rule::new("layers.*_proj.weight", treatment);
        let edge = |pattern| Rule {
            layers: Layers::Edge,
            ..Rule::new(pattern, min_max(Codes { group: Group::Size(32), ..INT8_ROW }))
        };
        let (untie_head, rules) = match name {
            "default" => {
                (false, vec![embedding, head(min_max(INT8_ROW)), projections(min_max(INT4))])
            }
            "hqq" => (false, vec![projections(hqq)]),
            "torchao-default" => {
                (true, vec![embedding, head(min_max(INT4)), projections(min_max(INT4))])
            }
            "torchao-sensitive" => {
                let edges = [edge("layers.*.v_proj.weight"), edge("layers.*.down_proj.weight")];
                (
                    true,
                    [embedding, head(hqq)]
                        .into_iter()
                        .chain(edges)
                        .chain([projections(hqq)])
                        .collect(),
                )
            }
            _ => {
                let known = Self::NAMES.join(", ");
                return Err(Error::UnknownRecipe { name: name.to_owned(), known });
            }
        };
        Ok(Self { name: name.to_owned(), rules, untie_head })
    }

    /// What happens to the weight of that name in a model of so many layers.
    pub fn treatment(&self, name: &str, layers: u32) -> Treatment {
        let rule = self.rules.iter().find(|rule| {
            matches(&rule.pattern, name)
                && match rule.layers {
                    Layers::All => true,
                    Layers::Edge => is_edge(name, layers),
                }
        });
        rule.map_or(Treatment::Keep, |rule| rule.treatment)
    }
}

impl Rule {
    /// For the weights of every layer.
    pub fn new(pattern: &str, treatment: Treatment) -> Self {
        Self { pattern: pattern.to_owned(), layers: Layers::All, treatment }
    }
}

/// Whether a weight lies in the first or the last quarter of the layers.
fn is_edge(name: &str, layers: u32) -> bool {
    let layer = layer_of(name);
    layer.is_some_and(|layer| layer < layers / 4 || layer >= layers - layers / 4)
}

/// The layer of a weight.
pub(crate) fn layer_of(name: &str) -> Option<u32> {
    name.strip_prefix("layers.")?.split('.').next()?.parse().ok()
}

/// INT8 with one scale a row.
const INT8_ROW: Codes =
    Codes { bits: 8, group: Group::Row, scale: DType::BF16, offset: Offset::Symmetric };

/// INT4 in groups of 32 with a whole zero point in a nibble.
const INT4: Codes = Codes {
    bits: 4,
    group: Group::Size(32),
    scale: DType::BF16,
    offset: Offset::Zero(ZeroType::Nibble),
};

/// INT4 in groups of 32 with a fractional zero point.
const INT4_FRACTION: Codes = Codes { offset: Offset::Zero(ZeroType::BF16), ..INT4 };

impl Codes {
    /// The encoding of a weight whose last dimension is `k`.
    pub fn encoding(&self, k: u32) -> Encoding {
        let Self { bits, scale, offset, .. } = *self;
        let group = match self.group {
            Group::Size(size) => size,
            Group::Row => k,
        };
        Encoding::Quantized { bits, group, scale, offset }
    }
}

/// Whether `name` is `pattern` with each `*` replaced by some characters.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((head, rest)) = pattern.split_once('*') else { return pattern == name };
    let Some(tail) = name.strip_prefix(head) else { return false };
    (0..=tail.len()).any(|at| tail.get(at..).is_some_and(|tail| matches(rest, tail)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn star_stands_for_any_characters() {
        for (pattern, name, expected) in [
            ("norm.weight", "norm.weight", true),
            ("norm.weight", "q_norm.weight", false),
            ("*norm.weight", "norm.weight", true),
            ("layers.*_proj.weight", "layers.10.mlp.up_proj.weight", true),
            ("layers.*_proj.weight", "layers.10.mlp.up_proj.weight.x", false),
            ("*.0.*", "layers.0.mlp", true),
            ("*", "", true),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn the_default_recipe_leaves_norms_and_scalars() {
        let recipe = Recipe::named("default").unwrap();
        for name in ["norm.weight", "layers.0.layer_scalar", "layers.0.self_attn.q_norm.weight"] {
            assert_eq!(recipe.treatment(name, 4), Treatment::Keep, "{name}");
        }
        let message = Recipe::named("defualt").unwrap_err().to_string();
        assert!(message.contains("recipes are: default, hqq"), "{message}");
    }

    /// 31B has 60 layers: 0 to 14 and 45 to 59 are edges.
    #[test]
    fn edges_are_a_quarter_of_the_layers_each() {
        let recipe = Recipe::named("torchao-sensitive").unwrap();
        let int8 = |layer: u32, what: &str, layers| match recipe
            .treatment(&format!("layers.{layer}.{what}.weight"), layers)
        {
            Treatment::Quantize(codes, _) => codes.bits == 8,
            Treatment::Keep => panic!("{layer} {what}"),
        };
        for what in ["mlp.down_proj", "self_attn.v_proj"] {
            let found: Vec<u32> = (0..60).filter(|layer| int8(*layer, what, 60)).collect();
            assert_eq!(found, (0..15).chain(45..60).collect::<Vec<_>>(), "{what}");
            assert_eq!((0..3).filter(|layer| int8(*layer, what, 3)).count(), 0);
        }
        assert!(!(0..60).any(|layer| int8(layer, "self_attn.k_proj", 60)));
    }
}
