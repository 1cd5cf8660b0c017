//! Programs that lack a fusion, against the one that has all.
//!
//! What a fusion does in one launch is the same arithmetic in the same order as in two, so logits
//! are the same bit for bit.

use anyhow::{Context, ensure};
use gemma4_runtime::{DeviceChoice, Session};

use crate::bundle::{Bundle, Truth};
use crate::compare::same;
use crate::report::Report;
use crate::subject::{Subject, rows};
use crate::verify::verified;

/// As `gemma4-export --without-fusion` names them.
const FUSIONS: [&str; 3] = ["add-norm", "split", "geglu"];

pub(crate) fn run(
    report: &mut Report,
    bundle: &Bundle,
    (device, kernels): (&DeviceChoice, &str),
    fused: &Subject,
    truth: &Truth,
) {
    for fusion in FUSIONS {
        report.check(&format!("without {fusion}"), || {
            let program = bundle.program_without(kernels, truth.model, fusion)?;
            let apart = Subject::open(device, program, true)?;
            equal(fused, &apart, truth)
        });
    }
}

/// Prompts, decode steps, prompts in pieces, and several tokens at once.
fn equal(fused: &Subject, apart: &Subject, truth: &Truth) -> anyhow::Result<String> {
    let mut compared = 0;
    let mut compare = |what: &str, a: Vec<Vec<f32>>, b: Vec<Vec<f32>>| -> anyhow::Result<()> {
        ensure!(a.len() == b.len(), "{what}: {} rows instead of {}", b.len(), a.len());
        for (row, (a, b)) in a.iter().zip(&b).enumerate() {
            ensure!(same(a, b), "{what}: row {row} differs by {:e}", largest(a, b));
        }
        compared += a.len();
        Ok(())
    };
    let [mut one, mut other] = [fused.session()?, apart.session()?];
    for passage in truth.passages.iter().chain([&truth.every]) {
        let read = |session: &mut Session| rows(session, &passage.tokens, passage.prompt);
        compare(&passage.name, read(&mut one)?, read(&mut other)?)?;
    }
    let text = &truth.every.tokens;
    for count in 1..=one.verify_rows() as usize {
        let read = |session: &mut Session| -> anyhow::Result<Vec<Vec<f32>>> {
            session.reset();
            let pieces = text.chunks(count).map(|tokens| verified(session, tokens));
            Ok(pieces.collect::<anyhow::Result<Vec<_>>>()?.concat())
        };
        compare(&format!("verify {count}"), read(&mut one)?, read(&mut other)?)?;
    }
    let window = fused.window().context("no layer has a window")?;
    for chunk in [1, 7, 16, window + 1] {
        let read = |subject: &Subject| {
            rows(&mut subject.session_with(None, Some(chunk))?, text, text.len())
        };
        compare(&format!("chunks of {chunk}"), read(fused)?, read(apart)?)?;
    }
    Ok(format!("{compared} rows, the same bit for bit"))
}

/// The largest distance of two logits.
fn largest(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}
