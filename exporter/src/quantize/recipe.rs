//! Recipes: ordered rules from the name of a weight to its encoding.

use gemma4_format::encoding::ZeroType;
use gemma4_format::{DType, Encoding, Offset};

use crate::{Error, Result};

/// A named list of rules. The first rule whose pattern matches a weight's name decides; a weight
/// that none matches is kept as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recipe {
    /// Name, for messages and for the files made with it.
    pub name: String,
    /// In order of precedence.
    pub rules: Vec<Rule>,
}

/// What happens to the weights of some names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Canonical name of a weight; `*` stands for any characters, none included.
    pub pattern: String,
    /// What happens to it.
    pub treatment: Treatment,
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
}

impl Recipe {
    /// Names of the built-in recipes.
    pub const NAMES: [&str; 1] = ["default"];

    /// The built-in recipe of that name.
    pub fn named(name: &str) -> Result<Self> {
        let rules = match name {
            "default" => default_rules(),
            _ => {
                let known = Self::NAMES.join(", ");
                return Err(Error::UnknownRecipe { name: name.to_owned(), known });
            }
        };
        Ok(Self { name: name.to_owned(), rules })
    }

    /// What happens to the weight of that name.
    pub fn treatment(&self, name: &str) -> Treatment {
        let rule = self.rules.iter().find(|rule| matches(&rule.pattern, name));
        rule.map_or(Treatment::Keep, |rule| rule.treatment)
    }
}

/// INT4 in groups of 32 with a whole zero point in a nibble for every projection; INT8 with one
/// scale a row for the embedding, which a tied head reads too, and for a head of its own.
fn default_rules() -> Vec<Rule> {
    let int8 = Codes { bits: 8, group: Group::Row, scale: DType::BF16, offset: Offset::Symmetric };
    let int4 = Codes {
        bits: 4,
        group: Group::Size(32),
        scale: DType::BF16,
        offset: Offset::Zero(ZeroType::Nibble),
    };
    let rule = |pattern: &str, codes| Rule {
        pattern: pattern.to_owned(),
        treatment: Treatment::Quantize(codes, Method::MinMax),
    };
    vec![
        rule("embed_tokens.weight", int8),
        rule("lm_head.weight", int8),
        rule("layers.*_proj.weight", int4),
    ]
}

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
            assert_eq!(recipe.treatment(name), Treatment::Keep, "{name}");
        }
        assert!(Recipe::named("defualt").unwrap_err().to_string().contains("recipes are: default"));
    }
}
