//! The CPU device against scalar float64, and what it promises about equal bits.

mod common;

use std::collections::HashMap;

use common::{BF16, Config, F32, INT4, Model, Random, int8, reference};
use gemma4_format::encoding::ZeroType;
use gemma4_format::{Buffer, DType, Dim, Encoding, Offset};
use gemma4_runtime::cpu::{Cpu, Entry, Execution};
use gemma4_runtime::{Error, Sampling, Session, SessionOptions};
use proptest::prelude::*;

type Seen = HashMap<String, Vec<Vec<f32>>>;

/// Reads tokens in chunks of these sizes, then one by one, and collects the rows of all labelled
/// values.
fn observe(execution: &mut Execution, tokens: &[u32], chunks: &[usize]) -> Seen {
    let mut seen: Seen = HashMap::new();
    let mut position = 0;
    let mut chunks = chunks.iter().copied();
    while position < tokens.len() {
        let (entry, count) = match chunks.next() {
            Some(count) => (Entry::Prefill, count.min(tokens.len() - position)),
            None => (Entry::Decode, 1),
        };
        let piece = &tokens[position..position + count];
        execution
            .run_observed(
                entry,
                piece,
                position as u32,
                &Sampling::GREEDY,
                &mut |label, dims, x| {
                    let rows = x.chunks(x.len() / dims[0] as usize).map(|row| row.to_vec());
                    seen.entry(label.to_owned()).or_default().extend(rows);
                },
            )
            .expect("runs");
        position += count;
    }
    seen
}

fn distance(found: &[f32], wanted: &[f64]) -> f64 {
    let largest = wanted.iter().fold(1.0f64, |m, x| m.max(x.abs()));
    let apart = |(a, b): (&f32, &f64)| (f64::from(*a) - b).abs();
    found.iter().zip(wanted).map(apart).fold(0.0, f64::max) / largest
}

/// Compares each row of each labelled value, except of those that exist for last rows only.
fn compare(model: &Model, execution: &mut Execution, tokens: &[u32], chunks: &[usize]) {
    let wanted = reference::run(model, tokens);
    let found = observe(execution, tokens, chunks);
    assert_eq!(found.len(), wanted.len());
    for (label, wanted) in &wanted {
        let found = &found[label];
        let last_only = wanted.len() == 1;
        let from = if last_only { found.len() - 1 } else { 0 };
        assert!(last_only || found.len() == wanted.len(), "{label}");
        for (row, (found, wanted)) in found[from..].iter().zip(wanted).enumerate() {
            assert_eq!(found.len(), wanted.len(), "{label}");
            let distance = distance(found, wanted);
            assert!(distance < 2e-5, "{label}, row {row}: off by {distance}");
        }
    }
}

#[test]
fn every_value_agrees_with_float64_through_several_wraps_of_the_ring() {
    let config = Config::default();
    let mut model = Model::new(&config);
    let cpu = Cpu::new(model.load()).expect("a device");
    // The ring has 14 rows.
    for (length, chunks) in [
        (1, vec![1]),
        (6, vec![6]),
        (7, vec![7]),
        (8, vec![8]),
        (9, vec![8, 1]),
        (75, vec![8; 10]),
        (75, vec![3, 8, 1, 8, 8, 5, 8, 8]),
        (75, vec![]),
    ] {
        let tokens = Random(length as u64).tokens(length, config.vocabulary);
        let mut execution = cpu.execution(100, 8).expect("small");
        compare(&model, &mut execution, &tokens, &chunks);
    }
}

#[test]
fn every_encoding_agrees_with_float64() {
    let quantized = |bits, group, scale, offset| Encoding::Quantized { bits, group, scale, offset };
    let zero = Offset::Zero;
    let linear = [
        F32,
        BF16,
        Encoding::Dense(DType::F16),
        INT4,
        quantized(4, 32, DType::BF16, zero(ZeroType::BF16)),
        quantized(4, 32, DType::F16, Offset::Symmetric),
        quantized(4, 32, DType::F16, Offset::Minimum(DType::F16)),
        quantized(4, 16, DType::F32, zero(ZeroType::U8)),
        quantized(5, 32, DType::F16, zero(ZeroType::F16)),
        quantized(6, 16, DType::F16, Offset::Symmetric),
        quantized(6, 32, DType::BF16, Offset::Minimum(DType::F32)),
        quantized(8, 32, DType::F16, Offset::Symmetric),
        quantized(8, 32, DType::BF16, zero(ZeroType::U8)),
    ];
    for (at, linear) in linear.into_iter().enumerate() {
        let embedding = if at % 2 == 0 { int8(64) } else { BF16 };
        let config = Config { linear, embedding, seed: at as u64, ..Config::default() };
        let mut model = Model::new(&config);
        let cpu = Cpu::new(model.load()).expect("a device");
        let tokens = Random(5).tokens(21, config.vocabulary);
        let mut execution = cpu.execution(32, 8).expect("small");
        compare(&model, &mut execution, &tokens, &[8, 5, 1]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// The reference has no ring: it keeps all keys and looks at the last `window` of them.
    #[test]
    fn a_ring_holds_what_its_window_sees_however_the_tokens_come(
        window in 1u32..12,
        chunk in 1u32..9,
        spare in 0u32..4,
        chunks in proptest::collection::vec(1usize..9, 0..30),
        length in 1usize..70,
    ) {
        let ring = window + chunk - 1 + spare;
        let config = Config { window, ring, chunk, ..Config::default() };
        let mut model = Model::new(&config);
        let cpu = Cpu::with_threads(model.load(), 1).expect("a device");
        let mut execution = cpu.execution(100, chunk).expect("small");
        let chunks: Vec<usize> = chunks.into_iter().map(|n| n.min(chunk as usize)).collect();
        let tokens = Random(length as u64).tokens(length, config.vocabulary);
        compare(&model, &mut execution, &tokens, &chunks);
    }
}

#[test]
fn the_window_ends_where_it_should() {
    let config = Config { window: 5, ring: 5 + 8 - 1, ..Config::default() };
    let mut model = Model::new(&config);
    let cpu = Cpu::new(model.load()).expect("a device");
    let attention = |first: u32, chunks: &[usize]| {
        let mut tokens = Random(3).tokens(40, config.vocabulary);
        tokens[0] = first;
        let mut execution = cpu.execution(64, 8).expect("small");
        observe(&mut execution, &tokens, chunks).remove("layers.0.attention").expect("labelled")
    };
    for chunks in [&[8; 5][..], &[]] {
        let (a, b) = (attention(1, chunks), attention(2, chunks));
        for (distance, (a, b)) in a.iter().zip(&b).enumerate() {
            let moved = a != b;
            assert_eq!(moved, distance < 5, "at distance {distance}");
        }
    }
}

#[test]
fn chunks_and_threads_change_no_bit() {
    let config = Config { hidden: 256, inner: 640, embedding: int8(256), ..Config::default() };
    for linear in [INT4, BF16, int8_any(64), F32] {
        let mut model = Model::new(&Config { linear, ..config.clone() });
        let program = model.load();
        let tokens = Random(11).tokens(41, config.vocabulary);
        let run = |threads: usize, chunks: &[usize]| {
            let cpu = Cpu::with_threads(program.clone(), threads).expect("a device");
            let mut execution = cpu.execution(64, 8).expect("small");
            let mut seen = observe(&mut execution, &tokens, chunks);
            let last = seen.remove("logits").and_then(|mut rows| rows.pop());
            seen.retain(|label, _| label.starts_with("layers"));
            (seen, last)
        };
        let once = run(1, &[8; 6]);
        for (threads, chunks) in
            [(1, &[][..]), (2, &[1, 2, 3, 4, 5, 6, 7, 8, 8]), (3, &[8; 6]), (2, &[3; 20])]
        {
            assert!(run(threads, chunks) == once, "{threads} threads, chunks {chunks:?}");
        }
    }
}

fn int8_any(group: u32) -> Encoding {
    Encoding::Quantized { bits: 8, group, scale: DType::F32, offset: Offset::Symmetric }
}

#[test]
fn a_context_shorter_than_the_ring_agrees_too() {
    let config = Config::default();
    let mut model = Model::new(&config);
    let cpu = Cpu::new(model.load()).expect("a device");
    for context in [1, 5, 9, 13, 14, 15] {
        let tokens = Random(9).tokens(context, config.vocabulary);
        let chunk = context.min(8);
        let mut execution = cpu.execution(context as u32, chunk as u32).expect("small");
        compare(&model, &mut execution, &tokens, &vec![chunk; context]);
    }
}

#[test]
fn hostile_sizes_are_errors() {
    let mut model = Model::new(&Config { max_context: 1 << 24, ..Config::default() });
    // 2^24 positions of 2^14 numbers are a tebibyte.
    model.program.buffers.push(Buffer {
        name: "spare".to_owned(),
        dims: vec![Dim::Context, Dim::Fixed(1 << 10), Dim::Fixed(1 << 4)],
    });
    let cpu = Cpu::new(model.load()).expect("a device");
    let open = |max_context| {
        Session::new(&cpu, SessionOptions { max_context, ..SessionOptions::default() })
    };
    let error = open(None).err().expect("no machine has that much");
    assert!(matches!(error, Error::Memory { need, .. } if need >= 1 << 40), "{error}");
    assert_eq!(error.class().code(), 3);
    assert_eq!(open(Some(32)).expect("fits").context(), 32);
}
