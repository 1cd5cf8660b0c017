//! A small valid program: one attention layer over a ring, a tied head.

use gemma4_format::encoding::ZeroType;
use gemma4_format::pte::Pte;
use gemma4_format::{
    Buffer, DType, Dim, Encoding, Input, Method, Node, Offset, Op, Operand, Output, Program,
    Source, TextDefaults, Weight,
};

const INT4: Encoding = Encoding::Quantized {
    bits: 4,
    group: 32,
    scale: DType::BF16,
    offset: Offset::Zero(ZeroType::Nibble),
};

/// Name, dims and encoding of the weights, in order.
pub(crate) fn weights() -> Vec<(String, Vec<u32>, Encoding)> {
    let bf16 = Encoding::Dense(DType::BF16);
    [
        ("embed_tokens.weight", vec![96, 64], INT4),
        ("input_norm.weight", vec![64], bf16),
        ("k_proj.weight", vec![32, 64], bf16),
    ]
    .map(|(name, dims, encoding)| (name.to_owned(), dims, encoding))
    .to_vec()
}

/// A program over [`weights`].
pub(crate) fn program() -> Program {
    let weights = weights()
        .into_iter()
        .map(|(name, dims, encoding)| Weight { name, dims, encoding, digest: [7; 32] })
        .collect();
    let buffer = |name: &str| Buffer {
        name: name.to_owned(),
        dims: vec![Dim::Ring(16), Dim::Fixed(2), Dim::Fixed(16)],
    };
    Program {
        source: Source { architecture: "Test".to_owned(), ..Source::default() },
        text: TextDefaults {
            bos_token: Some(2),
            stop_tokens: vec![1, 50],
            temperature: 1.0,
            top_k: 64,
            top_p: 0.95,
        },
        vocab_size: 96,
        max_context: 128,
        weights,
        buffers: vec![buffer("keys"), buffer("values")],
        methods: vec![method("decode", 1), method("prefill", 8)],
        data_header: [3; 32],
        data_length: 4096,
    }
}

/// The same program in its container.
pub(crate) fn pte() -> Pte {
    Pte {
        program: program(),
        tokenizer: b"{}".to_vec(),
        chat_template: "{{ messages }}".to_owned(),
        plans: Vec::new(),
        modules: Vec::new(),
    }
}

fn method(name: &str, max_rows: u32) -> Method {
    use Operand::{Buffer, Value, Weight};
    let inputs =
        Method::standard_inputs().map(|(name, fact)| Input { name: name.to_owned(), fact });
    let rope = Op::Rope { base: 1e4, rotated: 8, factor: 1.0 };
    let nodes = [
        (Op::Embed, vec![Value(0), Weight(0)]),      // %6 [T, 64]
        (Op::Scale { factor: 8.0 }, vec![Value(6)]), // %7
        (Op::RmsNorm { eps: 1e-6 }, vec![Value(7), Weight(1)]), // %8
        (Op::Linear, vec![Value(8), Weight(2)]),     // %9 [T, 32]
        (Op::SplitHeads { heads: 2 }, vec![Value(9)]), // %10 [T, 2, 16]
        (rope, vec![Value(10), Value(1)]),           // %11
        (Op::BufferWrite, vec![Buffer(0), Value(11), Value(1)]),
        (Op::BufferWrite, vec![Buffer(1), Value(10), Value(1)]),
        (Op::SplitHeads { heads: 4 }, vec![Value(7)]), // %12 [T, 4, 16]
        (
            Op::Attention { window: Some(8), scale: 1.0 },
            vec![Value(12), Buffer(0), Buffer(1), Value(1)],
        ), // %13
        (Op::MergeHeads, vec![Value(13)]),             // %14 [T, 64]
        (Op::Add, vec![Value(14), Value(7)]),          // %15
        (Op::LastRow, vec![Value(15)]),                // %16 [1, 64]
        (Op::Linear, vec![Value(16), Weight(0)]),      // %17 [1, 96]
        (Op::SoftCap { cap: 30.0 }, vec![Value(17)]),  // %18
        (Op::Advance, vec![Value(0), Value(1)]),       // %19
        (Op::Sample, vec![Value(18), Value(19), Value(2), Value(3), Value(4), Value(5)]), // %20
    ]
    .map(|(op, args)| Node { op, args, label: String::new() });
    let outputs = [("token", 20), ("position", 19), ("logits", 18)]
        .map(|(name, value)| Output { name: name.to_owned(), value });
    Method {
        name: name.to_owned(),
        max_rows,
        inputs: inputs.to_vec(),
        nodes: nodes.to_vec(),
        outputs: outputs.to_vec(),
    }
}
