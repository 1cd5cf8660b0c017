//! The edge of the sliding window, seen from outside.

use gemma4_exporter::checkpoint::Checkpoint;
use gemma4_exporter::model::Config;
use gemma4_exporter::synthetic::{TINY_CONFIG, write_checkpoint};
use gemma4_runtime::Sampling;
use gemma4_runtime::cpu::{Cpu, Entry};

use super::fixtures::{dense_reference, exported};

/// Output of layer 0 at the last of `length` positions, for two texts that differ in token 0 only.
fn moved(run: &dyn Fn(&[u32]) -> Vec<f32>, length: u32) -> bool {
    let text = |first: u32| -> Vec<u32> { [first].into_iter().chain(100..99 + length).collect() };
    run(&text(7)) != run(&text(8))
}

#[test]
fn token_0_is_seen_at_distance_window_minus_1_and_not_at_window() {
    let dir = tempfile::tempdir().unwrap();
    write_checkpoint(TINY_CONFIG, 3, dir.path()).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let config = Config::parse(TINY_CONFIG).unwrap();
    let window = config.layers[0].window.unwrap();
    let hidden = config.hidden_size as usize;

    let candle = |tokens: &[u32]| {
        let observed = dense_reference(&checkpoint, &config, 64).run(tokens, 0).unwrap().observed;
        let (_, numbers) = observed.iter().find(|(label, _)| label == "layers.0").unwrap();
        numbers.get(tokens.len() - 1).unwrap().to_vec1::<f32>().unwrap()
    };
    let device = Cpu::new(exported(&checkpoint, 64)).unwrap();
    let cpu = |tokens: &[u32]| {
        let mut last = Vec::new();
        let mut session = device.execution(64, 64).unwrap();
        session
            .run_observed(Entry::Prefill, tokens, 0, &Sampling::GREEDY, &mut |label, _, numbers| {
                if label == "layers.0" {
                    last = numbers[numbers.len() - hidden..].to_vec();
                }
            })
            .unwrap();
        last
    };
    for (name, run) in [("candle", &candle as &dyn Fn(&[u32]) -> Vec<f32>), ("cpu", &cpu)] {
        assert!(moved(run, window), "{name}: position {} sees token 0", window - 1);
        assert!(!moved(run, window + 1), "{name}: position {window} does not");
    }
}
