//! Logits of tiny-31b, as it is and as torchao quantizes it.

use std::path::PathBuf;
use std::sync::Arc;

use gemma4_exporter::checkpoint::Checkpoint;
use gemma4_exporter::model::Config;
use gemma4_runtime::{LoadedProgram, SessionOptions};

use super::fixtures::{
    Golden, PROMPTS, argmax, dense_reference, exported, ids, max_difference, session, tiny_31b,
};

const TOLERANCE: f32 = 1e-3;

#[test]
fn candle_agrees_with_transformers_at_every_position() {
    let (checkpoint, golden) = (tiny_31b(), Golden::tiny_31b());
    let config = Config::parse(checkpoint.config_json()).unwrap();
    let reference = dense_reference(&checkpoint, &config, 256);
    for prompt in PROMPTS {
        let rows = reference.run(&golden.ids(prompt), 0).unwrap().logits.to_vec2::<f32>().unwrap();
        let last = golden.f32(&format!("prompt.{prompt}.last_logits_f32")).unwrap();
        let worst = max_difference(rows.last().unwrap(), &last);
        assert!(worst <= TOLERANCE, "{prompt}: the last row is off by {worst}");
        if let Some(all) = golden.f32(&format!("prompt.{prompt}.logits_f32")) {
            let worst = max_difference(&rows.concat(), &all);
            assert!(worst <= TOLERANCE, "{prompt}: some row is off by {worst}");
        }
    }
}

#[test]
fn cpu_agrees_with_transformers_at_every_position() {
    assert_logits(&exported(&tiny_31b(), 512), &Golden::tiny_31b());
}

/// Every logit of every prompt is that of the golden data.
fn assert_logits(program: &Arc<LoadedProgram>, golden: &Golden) {
    let mut session = session(program, SessionOptions::default());
    for prompt in PROMPTS {
        let tokens = golden.ids(prompt);
        session.reset();
        let mut rows = Vec::new();
        for token in &tokens {
            session.decode(*token).unwrap();
            rows.push(session.logits().unwrap());
        }
        let last = golden.f32(&format!("prompt.{prompt}.last_logits_f32")).unwrap();
        let worst = max_difference(rows.last().unwrap(), &last);
        assert!(worst <= TOLERANCE, "{prompt}: the last row is off by {worst}");
        if let Some(all) = golden.f32(&format!("prompt.{prompt}.logits_f32")) {
            let worst = max_difference(&rows.concat(), &all);
            assert!(worst <= TOLERANCE, "{prompt}: some row is off by {worst}");
        }
    }
}

/// Rings of 32 + 8 rows, so that 200 tokens go round more than three times.
#[test]
fn cpu_prefill_in_chunks_of_every_size_is_prefill_token_by_token() {
    let golden = Golden::tiny_31b();
    let program = exported(&tiny_31b(), 8);
    let tokens = golden.ids("p200");
    let expected = golden.f32("prompt.p200.last_logits_f32").unwrap();
    for chunk in 1..=8 {
        let options = SessionOptions { prefill_chunk: Some(chunk), max_context: None };
        let mut session = session(&program, options);
        session.prefill(&tokens).unwrap();
        let worst = max_difference(&session.logits().unwrap(), &expected);
        assert!(worst <= TOLERANCE, "chunks of {chunk}: off by {worst}");
    }
}

/// Every row of `verify` is that of the golden data, with rings of 32 + 8 rows; tokens that a
/// call has beyond them are wrong and are taken back.
#[test]
fn cpu_verify_of_every_number_of_rows_agrees_with_transformers() {
    let golden = Golden::tiny_31b();
    let program = exported(&tiny_31b(), 8);
    let mut session = session(&program, SessionOptions::default());
    assert_eq!(session.verify_rows(), 8);
    for prompt in PROMPTS {
        let tokens = golden.ids(prompt);
        let last = golden.f32(&format!("prompt.{prompt}.last_logits_f32")).unwrap();
        let all = golden.f32(&format!("prompt.{prompt}.logits_f32"));
        let wrong = &mut golden.ids("p200").into_iter().rev().cycle();
        for count in 1..=8 {
            session.reset();
            let mut rows = Vec::new();
            for right in tokens.chunks(count) {
                let rejected = wrong.take(8 - count.max(4));
                let position = session.position();
                session.verify(&right.iter().copied().chain(rejected).collect::<Vec<_>>()).unwrap();
                for row in 0..right.len() as u32 {
                    rows.push(session.logits_after(row).unwrap());
                }
                assert!(session.rewind(position + right.len() as u32));
            }
            let worst = max_difference(rows.last().unwrap(), &last);
            assert!(worst <= TOLERANCE, "{prompt} by {count}: the last row is off by {worst}");
            if let Some(all) = &all {
                let worst = max_difference(&rows.concat(), all);
                assert!(worst <= TOLERANCE, "{prompt} by {count}: some row is off by {worst}");
            }
        }
    }
}

#[test]
fn cpu_prefill_at_once_is_prefill_in_chunks() {
    let golden = Golden::tiny_31b();
    let program = exported(&tiny_31b(), 256);
    let tokens = golden.ids("p200");
    let mut first: Option<Vec<f32>> = None;
    for chunk in [256, 1, 2, 31, 32, 33, 63, 64, 65, 100, 199, 200] {
        let options = SessionOptions { prefill_chunk: Some(chunk), max_context: None };
        let mut session = session(&program, options);
        session.prefill(&tokens).unwrap();
        let logits = session.logits().unwrap();
        let worst = max_difference(&logits, first.get_or_insert_with(|| logits.clone()));
        assert!(worst <= 1e-4, "chunks of {chunk}: off by {worst}");
    }
}

#[test]
fn cpu_greedy_ids_are_those_of_transformers() {
    assert_greedy(&exported(&tiny_31b(), 512), &Golden::tiny_31b());
}

/// The most probable token after every step is that of the golden data, unless it hardly is.
fn assert_greedy(program: &Arc<LoadedProgram>, golden: &Golden) {
    let mut session = session(program, SessionOptions::default());
    for prompt in PROMPTS {
        let expected = ids(&golden.json["prompts"][prompt]["greedy_ids"]);
        let margins = golden.json["prompts"][prompt]["greedy_margins"].as_array().unwrap();
        assert_eq!(expected.len(), 48);
        session.reset();
        session.prefill(&golden.ids(prompt)).unwrap();
        for (step, (token, margin)) in expected.iter().zip(margins).enumerate() {
            let best = argmax(&session.logits().unwrap());
            if margin.as_f64().unwrap() > f64::from(TOLERANCE) {
                assert_eq!(best, *token, "{prompt}, step {step}");
            }
            session.decode(*token).unwrap();
        }
    }
}

/// ExecuTorch's INT4 bundles: min-max, and HQQ beside INT8. The head is untied in both.
#[test]
fn cpu_agrees_with_transformers_on_the_weights_of_torchao() {
    let Some(fixtures) = std::env::var_os("GEMMA4_FIXTURES").map(PathBuf::from) else {
        eprintln!("not run: the weights of torchao need GEMMA4_FIXTURES");
        return;
    };
    for name in ["tiny-31b-torchao-default", "tiny-31b-torchao-sensitive"] {
        let checkpoint = Checkpoint::open(fixtures.join("ckpt").join(name)).unwrap();
        let program = exported(&checkpoint, 512);
        let source = &program.program().source;
        assert_eq!((source.layout.as_str(), source.recipe.as_str()), ("torchao", "torchao"));
        let golden = Golden::read(&fixtures.join("golden").join(name));
        assert_logits(&program, &golden);
        assert_greedy(&program, &golden);
    }
}
