//! What tracing writes down.

use std::cell::RefCell;
use std::rc::Rc;

use gemma4_exporter::methods::trace;
use gemma4_exporter::model::Config;
use gemma4_exporter::synthetic::TINY_CONFIG;
use gemma4_exporter::trace::{EagerCall, Error, Store, Tables, Tape, WeightSpec};
use gemma4_format::{DType, Dim, Encoding, Fact, Program, Source, TextDefaults, Weight};

fn dense(_: &str, wanted: Option<&[u32]>) -> Option<WeightSpec> {
    let encoding = Encoding::Dense(DType::BF16);
    wanted.map(|dims| WeightSpec { dims: dims.to_vec(), encoding })
}

#[test]
fn the_text_form_of_a_tiny_program() {
    let config = Config::parse(TINY_CONFIG).unwrap();
    let traced = trace(&config, 8, dense).unwrap();
    let weights = traced.weights.into_iter();
    let program = Program {
        source: Source {
            architecture: config.architecture,
            recipe: "none".to_owned(),
            ..Source::default()
        },
        text: TextDefaults { top_p: 1.0, ..TextDefaults::default() },
        vocab_size: config.vocab_size,
        max_context: 256,
        weights: weights
            .map(|(name, dims, encoding)| Weight { name, dims, encoding, digest: [0; 32] })
            .collect(),
        buffers: traced.buffers,
        methods: traced.methods,
        data_header: [0; 32],
        data_length: 0,
    };
    gemma4_format::verify::verify(&program).unwrap();
    insta::assert_snapshot!(program);
}

/// 31B's 60 layers, without reading or allocating a weight.
#[test]
fn tracing_31b_takes_less_than_a_second() {
    let config = Config::parse(include_str!("../configs/gemma-4-31b.json")).unwrap();
    let started = std::time::Instant::now();
    let traced = trace(&config, 512, dense).unwrap();
    assert!(started.elapsed().as_secs_f64() < 1.0);
    let numbers: u64 = traced
        .weights
        .iter()
        .map(|(_, dims, _)| dims.iter().map(|d| u64::from(*d)).product::<u64>())
        .sum();
    assert_eq!(numbers, 30_697_345_340);
    let full = traced.buffers.iter().filter(|b| matches!(b.dims[0], Dim::Context)).count();
    assert_eq!((full, traced.buffers.len()), (20, 120), "keys and values of 10 of 60 layers");
}

#[test]
fn numbers_in_a_trace_and_two_traces_are_refused() {
    let tables = Rc::new(RefCell::new(Tables::default()));
    let store = Store::traced(dense, tables);
    let weight = store.weight("w", &[16, 8]).unwrap();
    let fact = || Fact::f32([Dim::Rows, Dim::Fixed(8)]);
    let (_tape, [a]) = Tape::start([("a", fact())]);
    let (_other, [b]) = Tape::start([("b", fact())]);
    assert!(a.linear(&weight).is_ok());
    assert!(matches!(a.add(&b), Err(Error::Mixed { op: "add" })));
    let zeros =
        candle_core::Tensor::zeros((3, 8), candle_core::DType::F32, &candle_core::Device::Cpu);
    let eager = EagerCall::new(3, 16).input(fact(), zeros.unwrap());
    assert!(matches!(a.add(&eager), Err(Error::Mixed { .. })));
    assert!(matches!(eager.linear(&weight), Err(Error::Mixed { op: "linear" })));
}

#[test]
fn missing_and_misshapen_weights_are_named() {
    let config = Config::parse(TINY_CONFIG).unwrap();
    let without = |name: &str, wanted: Option<&[u32]>| {
        if name == "layers.1.mlp.up_proj.weight" { None } else { dense(name, wanted) }
    };
    let error = trace(&config, 8, without).unwrap_err().to_string();
    assert!(error.contains("layers.1.mlp.up_proj.weight"), "{error}");
    let wide = |name: &str, wanted: Option<&[u32]>| {
        let mut spec = dense(name, wanted)?;
        if name == "norm.weight" {
            spec.dims = vec![65];
        }
        Some(spec)
    };
    let error = trace(&config, 8, wide).unwrap_err().to_string();
    assert!(error.contains("norm.weight") && error.contains("[65]"), "{error}");
}
