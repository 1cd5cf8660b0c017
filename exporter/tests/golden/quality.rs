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

/// The same weights in the same bits, chosen with and without a search for the zero point.
#[test]
fn hqq_is_nearer_to_bf16_than_min_max() {
    let Some(fixtures) = std::env::var_os("GEMMA4_FIXTURES").map(PathBuf::from) else {
        eprintln!("not run: hqq_is_nearer_to_bf16_than_min_max needs GEMMA4_FIXTURES");
        return;
    };
    let checkpoint = Checkpoint::open(fixtures.join("ckpt/tiny-chat")).unwrap();
    let golden = json("fixtures/golden/tiny-chat/golden.json");
    let texts: Vec<Vec<u32>> = golden["text"]
        .as_array()
        .unwrap()
        .iter()
        .map(|text| [ids(&text["prompt_ids"]), ids(&text["output_ids"])].concat())
        .collect();
    assert!(texts.iter().map(Vec::len).sum::<usize>() > 700);
    let exact = log_probabilities(&checkpoint, None, &texts);
    let measure = |recipe: Recipe| {
        let name = recipe.name.clone();
        let kl = divergence(&exact, &log_probabilities(&checkpoint, Some(recipe), &texts));
        eprintln!("{name}: KL to bf16 {kl:.4}");
        kl
    };
    let hqq = Recipe::named("hqq").unwrap();
    let mut min_max = Recipe { name: "hqq's weights by min-max".to_owned(), ..hqq.clone() };
    for rule in &mut min_max.rules {
        if let Treatment::Quantize(codes, _) = rule.treatment {
            let codes = Codes { offset: Offset::Zero(ZeroType::Nibble), ..codes };
            rule.treatment = Treatment::Quantize(codes, Method::MinMax);
        }
    }
    assert!(measure(hqq) < measure(min_max));
    let named = |name| measure(Recipe::named(name).unwrap());
    assert!(named("torchao-sensitive") < named("torchao-default"));
    named("default");
}
