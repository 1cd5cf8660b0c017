//! Recipes as TOML.
//!
//! ```toml
//! name = "mine"               # else that of the file
//! untie_head = false          # whether a tied head becomes a weight of its own
//!
//! [[rules]]                   # the first that matches decides; what none matches is kept
//! tensors = "layers.*_proj.weight"
//! layers = "0-14, 45-59"      # or "edges": the first and last quarter; else all
//! method = "min-max"          # or "hqq", or "keep"
//! bits = 4                    # 4, 6 or 8; hqq has 4
//! group = 32                  # 32, 64, 128 or "row": the numbers that share a scale
//! ```
//!
//! Scales are bf16. Min-max in 4 bits has a whole zero point in a nibble, in 6 and 8 bits none;
//! HQQ has a fractional one in bf16.

use std::ops::Range;
use std::path::Path;

use gemma4_format::encoding::ZeroType;
use gemma4_format::{DType, Offset};
use toml::Spanned;
use toml::de::{DeString, DeTable, DeValue};

use super::recipe::{Codes, Group, Layers, Method, Recipe, Rule, Treatment};
use crate::{Error, Result};

/// Parses the text of the file `path`, whose name the recipe has if it names itself nothing else.
pub(super) fn parse(path: &Path, text: &str) -> Result<Recipe> {
    let file = File { path, text };
    let root = DeTable::parse(text)
        .map_err(|e| file.wrong(e.span().unwrap_or_default(), e.message().trim()))?;
    let mut root = Table { file: &file, span: 0..0, table: root.into_inner() };
    let name = match root.string("name")? {
        Some(name) => name.into_inner(),
        None => path.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
    };
    let untie_head = match root.take("untie_head") {
        None => false,
        Some(value) => match value.get_ref() {
            DeValue::Boolean(untie) => *untie,
            _ => return Err(file.wrong(value.span(), "`untie_head` is true or false")),
        },
    };
    let rules = root.required("rules")?;
    let span = rules.span();
    let DeValue::Array(rules) = rules.into_inner() else {
        return Err(file.wrong(span, "`rules` are tables, each beginning with [[rules]]"));
    };
    root.finish()?;
    let rules = rules.into_iter().map(|rule| {
        let span = rule.span();
        match rule.into_inner() {
            DeValue::Table(table) => self::rule(Table { file: &file, span, table }),
            _ => Err(file.wrong(span, "`rules` are tables, each beginning with [[rules]]")),
        }
    });
    Ok(Recipe { name, rules: rules.collect::<Result<_>>()?, untie_head })
}

fn rule(mut table: Table<'_>) -> Result<Rule> {
    let file = table.file;
    let pattern = table.required_string("tensors")?.into_inner();
    let layers = match table.string("layers")? {
        None => Layers::All,
        Some(text) => layers(text.get_ref()).ok_or_else(|| {
            let why = format!(
                "`layers` is \"edges\" or ranges such as \"0-14, 45-59\", not \"{}\"",
                text.get_ref()
            );
            file.wrong(text.span(), why)
        })?,
    };
    let method = table.required_string("method")?;
    let treatment = match method.get_ref().as_str() {
        "keep" => Treatment::Keep,
        "min-max" => quantize(&mut table, Method::MinMax)?,
        "hqq" => quantize(&mut table, Method::HalfQuadratic)?,
        other => {
            let why = format!("`method` is \"min-max\", \"hqq\" or \"keep\", not \"{other}\"");
            return Err(file.wrong(method.span(), why));
        }
    };
    table.finish()?;
    Ok(Rule { pattern, layers, treatment })
}

fn quantize(table: &mut Table<'_>, method: Method) -> Result<Treatment> {
    let file = table.file;
    let bits = table.required("bits")?;
    let offset = match (method, integer(&bits)) {
        (Method::MinMax, Some(4)) => Offset::Zero(ZeroType::Nibble),
        (Method::MinMax, Some(6 | 8)) => Offset::Symmetric,
        (Method::HalfQuadratic, Some(4)) => Offset::Zero(ZeroType::BF16),
        (Method::MinMax, _) => return Err(file.wrong(bits.span(), "`bits` is 4, 6 or 8")),
        (Method::HalfQuadratic, _) => {
            let why = "`bits` is 4 where `method` is \"hqq\"; \"min-max\" has 6 and 8, too";
            return Err(file.wrong(bits.span(), why));
        }
    };
    let group = table.required("group")?;
    let size = match (integer(&group), group.get_ref()) {
        (Some(size @ (32 | 64 | 128)), _) => Group::Size(size),
        (_, DeValue::String(text)) if text == "row" => Group::Row,
        _ => return Err(file.wrong(group.span(), "`group` is 32, 64, 128 or \"row\"")),
    };
    let bits = integer(&bits).and_then(|bits| u8::try_from(bits).ok()).unwrap_or(0);
    Ok(Treatment::Quantize(Codes { bits, group: size, scale: DType::BF16, offset }, method))
}

/// `edges`, or layers and ranges of layers between commas.
fn layers(text: &str) -> Option<Layers> {
    if text == "edges" {
        return Some(Layers::Edges);
    }
    let ranges = text.split(',').map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        (first <= last).then_some((first, last))
    });
    ranges.collect::<Option<_>>().map(Layers::Ranges)
}

fn integer(value: &Spanned<DeValue<'_>>) -> Option<u32> {
    match value.get_ref() {
        DeValue::Integer(number) => u32::from_str_radix(number.as_str(), number.radix()).ok(),
        _ => None,
    }
}

/// For messages.
struct File<'a> {
    path: &'a Path,
    text: &'a str,
}

impl File<'_> {
    fn wrong(&self, at: Range<usize>, why: impl Into<String>) -> Error {
        let before = self.text.as_bytes().get(..at.start).unwrap_or_default();
        let line = 1 + before.iter().filter(|byte| **byte == b'\n').count();
        Error::Recipe { path: self.path.to_owned(), line, why: why.into() }
    }
}

/// A table whose keys are taken one by one.
struct Table<'a> {
    file: &'a File<'a>,
    span: Range<usize>,
    table: DeTable<'a>,
}

impl<'a> Table<'a> {
    fn take(&mut self, key: &str) -> Option<Spanned<DeValue<'a>>> {
        self.table.remove(key)
    }

    fn required(&mut self, key: &str) -> Result<Spanned<DeValue<'a>>> {
        let missing = || self.file.wrong(self.span.clone(), format!("`{key}` is missing"));
        self.table.remove(key).ok_or_else(missing)
    }

    fn string(&mut self, key: &str) -> Result<Option<Spanned<String>>> {
        self.take(key).map(|value| self.text(key, value)).transpose()
    }

    fn required_string(&mut self, key: &str) -> Result<Spanned<String>> {
        let value = self.required(key)?;
        self.text(key, value)
    }

    fn text(&self, key: &str, value: Spanned<DeValue<'_>>) -> Result<Spanned<String>> {
        match value.get_ref() {
            DeValue::String(text) => Ok(Spanned::new(value.span(), text.clone().into_owned())),
            _ => Err(self.file.wrong(value.span(), format!("`{key}` is a string"))),
        }
    }

    /// Refuses keys that nobody took: they may be misspelt.
    fn finish(self) -> Result<()> {
        match self.table.into_iter().min_by_key(|(key, _)| key.span().start) {
            None => Ok(()),
            Some((key, _)) => {
                let key: &Spanned<DeString<'_>> = &key;
                Err(self.file.wrong(key.span(), format!("there is no key `{}`", key.get_ref())))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Recipe> {
        parse(Path::new("dir/mine.toml"), text)
    }

    fn refused(text: &str) -> String {
        parsed(text).unwrap_err().to_string()
    }

    const RULE: &str = "[[rules]]\ntensors = '*'\nmethod = 'min-max'\nbits = 4\ngroup = 32\n";

    #[test]
    fn the_built_in_recipes_are_named_as_they_name_themselves() {
        for name in Recipe::names() {
            assert_eq!(Recipe::named(name).unwrap().name, name);
        }
    }

    #[test]
    fn bits_and_method_say_how_zero_is_stored() {
        for (method, bits, offset) in [
            ("min-max", 4, Offset::Zero(ZeroType::Nibble)),
            ("min-max", 6, Offset::Symmetric),
            ("min-max", 8, Offset::Symmetric),
            ("hqq", 4, Offset::Zero(ZeroType::BF16)),
        ] {
            for (group, size) in [("64", Group::Size(64)), ("'row'", Group::Row)] {
                let text = format!(
                    "[[rules]]\ntensors = 'x'\nmethod = '{method}'\nbits = {bits}\ngroup = {group}"
                );
                let recipe = parsed(&text).unwrap();
                assert_eq!((recipe.name.as_str(), recipe.untie_head), ("mine", false));
                let Treatment::Quantize(codes, _) = recipe.rules[0].treatment else { panic!() };
                assert_eq!((codes.bits, codes.offset, codes.group), (bits, offset, size));
            }
        }
    }

    #[test]
    fn the_first_rule_that_matches_name_and_layer_decides() {
        let recipe = parsed(
            "[[rules]]\ntensors = 'layers.*.v_proj.weight'\nlayers = '0-1, 3'\nmethod = 'keep'\n\
             [[rules]]\ntensors = '*_proj.weight'\nmethod = 'hqq'\nbits = 4\ngroup = 128\n",
        )
        .unwrap();
        let kept: Vec<u32> = (0..5)
            .filter(|n| {
                recipe.treatment(&format!("layers.{n}.v_proj.weight"), 5) == Treatment::Keep
            })
            .collect();
        assert_eq!(kept, [0, 1, 3]);
        assert_ne!(recipe.treatment("layers.0.k_proj.weight", 5), Treatment::Keep);
        assert_eq!(recipe.treatment("norm.weight", 5), Treatment::Keep);
    }

    #[test]
    fn what_is_wrong_is_named_with_file_line_and_key() {
        let rule = |from: &str, to: &str| refused(&RULE.replace(from, to));
        for (said, wanted) in [
            (refused(""), "line 1: `rules` is missing"),
            (refused("name = "), "line 1: "),
            (refused("a = 1\nb = [\n"), "line "),
            (refused("name = 7"), "line 1: `name` is a string"),
            (refused("\nuntie_head = 'no'"), "line 2: `untie_head` is true or false"),
            (refused("rules = 3"), "line 1: `rules` are tables"),
            (refused("rules = [3]"), "line 1: `rules` are tables"),
            (refused(&format!("nmae = 'x'\n{RULE}")), "line 1: there is no key `nmae`"),
            (refused(&format!("{RULE}goup = 32")), "line 6: there is no key `goup`"),
            (rule("tensors = '*'\n", ""), "line 1: `tensors` is missing"),
            (rule("'min-max'", "'awq'"), "line 3: `method` is \"min-max\", \"hqq\" or \"keep\""),
            (rule("'min-max'", "'keep'"), "line 4: there is no key `bits`"),
            (rule("bits = 4", "bits = 5"), "line 4: `bits` is 4, 6 or 8"),
            (rule("bits = 4", "bits = 4.0"), "line 4: `bits` is 4, 6 or 8"),
            (rule("bits = 4\n", ""), "line 1: `bits` is missing"),
            (
                rule("'min-max'\nbits = 4", "'hqq'\nbits = 8"),
                "line 4: `bits` is 4 where `method` is \"hqq\"",
            ),
            (rule("32", "48"), "line 5: `group` is 32, 64, 128 or \"row\""),
            (rule("32", "'column'"), "line 5: `group` is 32"),
            (rule("bits", "layers = '5-2'\nbits"), "line 4: `layers` is \"edges\" or ranges"),
            (rule("bits", "layers = ''\nbits"), "line 4: `layers` is"),
            (rule("bits", "layers = 3\nbits"), "line 4: `layers` is a string"),
            (rule("bits = 4", "bits = 4\nbits = 4"), "line 5: "),
        ] {
            assert!(said.starts_with("recipe `dir/mine.toml`, "), "{said}");
            assert!(said.contains(wanted), "{said}: not {wanted}");
        }
    }
}
