//! A small program and plan that tests share.

use gemma4_format::plan::{Count, Kernel, Launch, Lowered, Packed, Plan};
use gemma4_format::{
    Buffer, DType, Dim, Encoding, Method, Offset, Program, Source, TextDefaults, Weight,
    encoding::ZeroType,
};

/// Two weights (`matrix`, 4 bits, `[80, 64]`, and `norm`, bf16 `[64]`), a ring and a full buffer.
pub(super) fn program() -> Program {
    let int4 = Encoding::Quantized {
        bits: 4,
        group: 32,
        scale: DType::BF16,
        offset: Offset::Zero(ZeroType::Nibble),
    };
    let weight = |name: &str, dims: &[u32], encoding| Weight {
        name: name.to_owned(),
        dims: dims.to_vec(),
        encoding,
        digest: [0; 32],
    };
    let buffer = |name: &str, rows| Buffer {
        name: name.to_owned(),
        dims: vec![rows, Dim::Fixed(2), Dim::Fixed(16)],
    };
    Program {
        source: Source::default(),
        text: TextDefaults { stop_tokens: vec![1, 5], ..TextDefaults::default() },
        vocab_size: 97,
        max_context: 200,
        weights: vec![
            weight("matrix", &[80, 64], int4),
            weight("norm", &[64], Encoding::Dense(DType::BF16)),
        ],
        buffers: vec![buffer("ring", Dim::Ring(14)), buffer("full", Dim::Context)],
        methods: Vec::new(),
        data_header: [0; 32],
        data_length: 0,
    }
}

/// A method `verify` of so many rows, without what it does.
pub(super) fn verify(max_rows: u32) -> Method {
    Method {
        name: "verify".to_owned(),
        max_rows,
        inputs: Vec::new(),
        nodes: Vec::new(),
        outputs: Vec::new(),
    }
}

/// A plan of [`program`] for some architecture.
pub(super) fn plan_for(target: &str) -> Plan {
    let launch = Launch { kernel: 0, grid: [Count::Fixed(1); 3], arguments: Vec::new() };
    let lowered = |method: &str, max_rows| Lowered {
        method: method.to_owned(),
        min_rows: 1,
        max_rows,
        launches: vec![launch.clone()],
    };
    Plan {
        target: target.to_owned(),
        compiler: "a compiler".to_owned(),
        kernels: vec![Kernel {
            module: 0,
            symbol: "kernel".to_owned(),
            block: 256,
            shared: 0,
            overlaps: false,
        }],
        packed: vec![Packed { bytes: 4096, randomize: 0, randomize_blocks: 1, columns: 64 }],
        packs: Vec::new(),
        resident: vec![(1, 0)],
        position_bytes: vec![64, 64],
        multiprocessors: 132,
        scratch: 8192,
        methods: vec![lowered("decode", 1), lowered("prefill", 8)],
        sample: vec![launch.clone()],
    }
}
