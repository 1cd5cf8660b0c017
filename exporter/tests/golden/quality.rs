//! What the recipes cost: how far the quantized model is from the one in bf16.

use std::path::PathBuf;

use gemma4_exporter::checkpoint::Checkpoint;
use gemma4_exporter::export::{Options, export};
use gemma4_exporter::output::Monitor;
use gemma4_exporter::quantize::{Codes, Method, Recipe, Treatment};
use gemma4_format::Offset;
use gemma4_format::encoding::ZeroType;
use gemma4_runtime::{LoadedProgram, SessionOptions};

use super::fixtures::{ids, json, session};

/// Log-probabilities of every next token of every text.
fn log_probabilities(
    checkpoint: &Checkpoint,
    recipe: Option<Recipe>,
    texts: &[Vec<u32>],
) -> Vec<Vec<f64>> {
    let dir = tempfile::tempdir().unwrap();
    let options = Options { recipe, ..Options::default() };
    let files = export(checkpoint, &options, dir.path(), &Monitor::silent()).unwrap();
    let program = LoadedProgram::open(&files.program, &files.data, &|_, _| {}).unwrap();
    let mut session = session(&program.into(), SessionOptions::default());
    let mut rows = Vec::new();
    for text in texts {
        session.reset();
        for token in text {
            session.decode(*token).unwrap();
            let logits: Vec<f64> = session.logits().unwrap().into_iter().map(f64::from).collect();
            let largest = logits.iter().copied().fold(f64::MIN, f64::max);
            let sum: f64 = logits.iter().map(|logit| (logit - largest).exp()).sum();
            rows.push(logits.iter().map(|logit| logit - largest - sum.ln()).collect());
        }
    }
    rows
}

/// Mean of `Σ p ln(p / q)` over the rows.
fn divergence(p: &[Vec<f64>], q: &[Vec<f64>]) -> f64 {
    let row =
        |p: &[f64], q: &[f64]| -> f64 { p.iter().zip(q).map(|(p, q)| p.exp() * (p - q)).sum() };
    p.iter().zip(q).map(|(p, q)| row(p, q)).sum::<f64>() / p.len() as f64
}

/// tiny-chat in bf16, and what it says of the texts.
struct Exact {
    checkpoint: Checkpoint,
    texts: Vec<Vec<u32>>,
    rows: Vec<Vec<f64>>,
}

impl Exact {
    /// `None`, with a line that says so, without the fixtures.
    fn new(test: &str) -> Option<Self> {
        let Some(fixtures) = std::env::var_os("GEMMA4_FIXTURES").map(PathBuf::from) else {
            eprintln!("not run: {test} needs GEMMA4_FIXTURES");
            return None;
        };
        let checkpoint = Checkpoint::open(fixtures.join("ckpt/tiny-chat")).unwrap();
        let golden = json("fixtures/golden/tiny-chat/golden.json");
        let texts = golden["text"].as_array().unwrap().iter();
        let texts: Vec<Vec<u32>> = texts
            .map(|text| [ids(&text["prompt_ids"]), ids(&text["output_ids"])].concat())
            .collect();
        assert!(texts.iter().map(Vec::len).sum::<usize>() > 700);
        let rows = log_probabilities(&checkpoint, None, &texts);
        Some(Self { checkpoint, texts, rows })
    }

    /// The divergence that a recipe causes.
    fn measure(&self, recipe: Recipe) -> f64 {
        let name = recipe.name.clone();
        let rows = log_probabilities(&self.checkpoint, Some(recipe), &self.texts);
        let kl = divergence(&self.rows, &rows);
        eprintln!("{name}: KL to bf16 {kl:.4}");
        kl
    }
}

/// The same weights in the same bits, chosen with and without a search for the zero point.
#[test]
fn hqq_is_nearer_to_bf16_than_min_max() {
    let Some(exact) = Exact::new("hqq_is_nearer_to_bf16_than_min_max") else { return };
    let hqq = Recipe::named("hqq").unwrap();
    let mut min_max = Recipe { name: "hqq's weights by min-max".to_owned(), ..hqq.clone() };
    for rule in &mut min_max.rules {
        if let Treatment::Quantize(codes, _) = rule.treatment {
            let codes = Codes { offset: Offset::Zero(ZeroType::Nibble), ..codes };
            rule.treatment = Treatment::Quantize(codes, Method::MinMax);
        }
    }
    assert!(exact.measure(hqq) < exact.measure(min_max));
    let named = |name| exact.measure(Recipe::named(name).unwrap());
    assert!(named("torchao-sensitive") < named("torchao-default"));
}

/// The default recipe, changed as a user would change it.
#[test]
fn smaller_groups_and_more_bits_are_nearer_to_bf16() {
    let Some(exact) = Exact::new("smaller_groups_and_more_bits_are_nearer_to_bf16") else { return };
    let dir = tempfile::tempdir().unwrap();
    let changed = |name: &str, from: &str, to: &str| {
        let path = dir.path().join(format!("{name}.toml"));
        let text = Recipe::text("default").unwrap().replace("name = \"default\"", "");
        std::fs::write(&path, text.replace(from, to)).unwrap();
        exact.measure(Recipe::open(path.to_str().unwrap()).unwrap())
    };
    let default = changed("default", "", "");
    let groups =
        [changed("groups of 64", "= 32", "= 64"), changed("groups of 128", "= 32", "= 128")];
    assert!(default < groups[0] && groups[0] < groups[1]);
    let six = changed("embedding in INT6", "bits = 8", "bits = 6");
    let four = changed("embedding in INT4", "bits = 8\ngroup = \"row\"", "bits = 4\ngroup = 32");
    assert!(default < four);
    let eight = changed("projections in INT8", "bits = 4", "bits = 8");
    assert!(eight < 0.05 * default && six < 2.0 * default, "{eight} {six}");
}
