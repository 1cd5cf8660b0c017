//! Recipes: ordered rules from the name of a weight to its encoding.

use std::path::Path;

use gemma4_format::{DType, Encoding, Offset};
use serde::Serialize;

use super::recipe_file;
use crate::{Error, Result};

/// The embedding, which a tied head reads too.
pub(crate) const EMBEDDING: &str = "embed_tokens.weight";
/// A head of its own.
pub(crate) const HEAD: &str = "lm_head.weight";

/// A named list of rules. The first rule whose pattern matches a weight's name decides; a weight
/// that none matches is kept as it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Recipe {
    /// Name, for messages and for the files made with it.
    pub name: String,
    /// In order of precedence.
    pub rules: Vec<Rule>,
    /// Whether a model whose head is its embedding gets a head of its own, made from that.
    pub untie_head: bool,
}

/// What happens to the weights of some names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Rule {
    /// Canonical name of a weight; `*` stands for any characters, none included.
    pub pattern: String,
    /// In which layers.
    pub layers: Layers,
    /// What happens to it.
    pub treatment: Treatment,
}

/// The layers that a rule is for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub enum Layers {
    /// All of them, and what lies in none.
    All,
    /// The first quarter and the last, each rounded down.
    Edges,
    /// Those from a first to a last one, both included.
    Ranges(Vec<(u32, u32)>),
}

/// What happens to a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Treatment {
    /// It is stored as the checkpoint has it.
    Keep,
    /// It is quantized.
    Quantize(Codes, Method),
}

/// An encoding whose group may depend on the weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Group {
    /// So many along the last dimension.
    Size(u32),
    /// All of a row.
    Row,
}

/// How scales, zero points and codes are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Method {
    /// The range of codes spans the range of the group's values, zero included.
    MinMax,
    /// Half-quadratic quantization: the scale of min-max, and the zero point with the least error.
    HalfQuadratic,
}

/// Name and text of the built-in recipes.
const BUILT_IN: [(&str, &str); 4] = [
    ("default", include_str!("../../recipes/default.toml")),
    ("hqq", include_str!("../../recipes/hqq.toml")),
    ("torchao-default", include_str!("../../recipes/torchao-default.toml")),
    ("torchao-sensitive", include_str!("../../recipes/torchao-sensitive.toml")),
];

impl Recipe {
    /// The recipe that an argument means: a file if it ends in `.toml`, else a built-in one.
    ///
    /// # Errors
    /// [`Error::Recipe`] with the line of the file, [`Error::UnknownRecipe`], or an error of the
    /// file system.
    pub fn open(argument: &str) -> Result<Self> {
        if !argument.ends_with(".toml") {
            return Self::named(argument);
        }
        let path = Path::new(argument);
        let text = std::fs::read_to_string(path).map_err(Error::io("read", path))?;
        recipe_file::parse(path, &text)
    }

    /// The built-in recipe of that name.
    ///
    /// # Errors
    /// [`Error::UnknownRecipe`].
    pub fn named(name: &str) -> Result<Self> {
        recipe_file::parse(Path::new(name), Self::text(name)?)
    }

    /// The text of a built-in recipe, in the form of a user's own file.
    ///
    /// # Errors
    /// [`Error::UnknownRecipe`].
    pub fn text(name: &str) -> Result<&'static str> {
        let found = BUILT_IN.iter().find(|(known, _)| *known == name);
        found.map(|(_, text)| *text).ok_or_else(|| {
            let known = Self::names().collect::<Vec<_>>().join(", ");
            Error::UnknownRecipe { name: name.to_owned(), known }
        })
    }

    /// Names of the built-in recipes.
    pub fn names() -> impl Iterator<Item = &'static str> {
        BUILT_IN.iter().map(|(name, _)| *name)
    }

    /// Patterns of rules that are for no weight of these names, which may be misspelt. A head of
    /// its own is always one that a model may have.
    pub fn idle_patterns(&self, names: &[&str]) -> impl Iterator<Item = &str> {
        let patterns = self.rules.iter().map(|rule| rule.pattern.as_str());
        patterns.filter(move |pattern| {
            !matches(pattern, HEAD) && !names.iter().any(|name| matches(pattern, name))
        })
    }

    /// BLAKE3, in hex, of all that it says.
    pub fn digest(&self) -> String {
        // Plain data always have a JSON form.
        let text = serde_json::to_string(self).unwrap_or_default();
        blake3::hash(text.as_bytes()).to_hex().to_string()
    }

    /// What happens to the weight of that name in a model of so many layers.
    pub fn treatment(&self, name: &str, layers: u32) -> Treatment {
        let rule = self.rules.iter().find(|rule| {
            matches(&rule.pattern, name)
                && match &rule.layers {
                    Layers::All => true,
                    Layers::Edges => is_edge(name, layers),
                    Layers::Ranges(ranges) => layer_of(name).is_some_and(|layer| {
                        ranges.iter().any(|(first, last)| (*first..=*last).contains(&layer))
                    }),
                }
        });
        rule.map_or(Treatment::Keep, |rule| rule.treatment)
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
