//! Hidden states of every layer: names the first layer that parts.

use gemma4_exporter::model::Config;
use gemma4_runtime::Sampling;
use gemma4_runtime::cpu::{Cpu, Entry};

use super::fixtures::{Golden, dense_reference, exported, max_difference, tiny_31b};

const TOLERANCE: f32 = 1e-3;

/// The names that the golden file gives to a program's labels.
fn golden_name(label: &str) -> String {
    match label.strip_prefix("layers.") {
        Some(layer) => format!("hidden.layer.{layer}"),
        None if label == "norm" => "hidden.final_norm".to_owned(),
        None => format!("hidden.{label}"),
    }
}

#[test]
fn candle_parts_from_transformers_at_no_layer() {
    let (checkpoint, golden) = (tiny_31b(), Golden::tiny_31b());
    let config = Config::parse(checkpoint.config_json()).unwrap();
    let observed =
        dense_reference(&checkpoint, &config, 64).run(&golden.ids("p33"), 0).unwrap().observed;
    let labels: Vec<&str> = observed.iter().map(|(label, _)| label.as_str()).collect();
    assert_eq!(labels.first(), Some(&"embed"));
    assert_eq!(labels.len(), config.layers.len() + 2, "{labels:?}");
    for (label, numbers) in &observed {
        let expected = golden.f32(&golden_name(label)).unwrap();
        let numbers = numbers.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let worst = max_difference(&numbers, &expected);
        assert!(worst <= TOLERANCE, "the first to part is `{label}`, by {worst}");
    }
}

#[test]
fn cpu_parts_from_transformers_at_no_layer() {
    let golden = Golden::tiny_31b();
    let program = exported(&tiny_31b(), 64);
    let tokens = golden.ids("p33");
    let mut seen = 0;
    let device = Cpu::new(program).unwrap();
    let mut session = device.execution(64, 64).unwrap();
    session
        .run_observed(Entry::Prefill, &tokens, 0, &Sampling::GREEDY, &mut |label, _, numbers| {
            // The last norm sees one row only.
            if label == "norm" {
                return;
            }
            let expected = golden.f32(&golden_name(label)).unwrap();
            let worst = max_difference(numbers, &expected);
            assert!(worst <= TOLERANCE, "the first to part is `{label}`, by {worst}");
            seen += 1;
        })
        .unwrap();
    assert_eq!(seen, 9, "the embedding and eight layers");
}
