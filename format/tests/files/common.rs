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
        methods: vec![method("decode", 1), method("prefill", 8), method("verify", 4)],
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

/// A method, of which all but `verify` draw a token from the logits of the last row.
fn method(name: &str, max_rows: u32) -> Method {
    use Operand::{Buffer, Value, Weight};
    let draws = name != "verify";
    let mut inputs = Method::standard_inputs()
        .map(|(name, fact)| Input { name: name.to_owned(), fact })
        .to_vec();
    inputs.truncate(if draws { 6 } else { 2 });
    // The result of the n-th node that has one.
    let result = |n: u32| Value(inputs.len() as u32 + n);
    let rope = Op::Rope { base: 1e4, rotated: 8, factor: 1.0 };
    let mut nodes = vec![
        (Op::Embed, vec![Value(0), Weight(0)]),       // 0 [T, 64]
        (Op::Scale { factor: 8.0 }, vec![result(0)]), // 1
        (Op::RmsNorm { eps: 1e-6 }, vec![result(1), Weight(1)]), // 2
        (Op::Linear, vec![result(2), Weight(2)]),     // 3 [T, 32]
        (Op::SplitHeads { heads: 2 }, vec![result(3)]), // 4 [T, 2, 16]
        (rope, vec![result(4), Value(1)]),            // 5
        (Op::BufferWrite, vec![Buffer(0), result(5), Value(1)]),
        (Op::BufferWrite, vec![Buffer(1), result(4), Value(1)]),
        (Op::SplitHeads { heads: 4 }, vec![result(1)]), // 6 [T, 4, 16]
        (
            Op::Attention { window: Some(8), scale: 1.0 },
            vec![result(6), Buffer(0), Buffer(1), Value(1)],
        ), // 7
        (Op::MergeHeads, vec![result(7)]),              // 8 [T, 64]
        (Op::Add, vec![result(8), result(1)]),          // 9
        (Op::Advance, vec![Value(0), Value(1)]),        // 10
    ];
    let mut outputs = vec![("position", result(10))];
    if draws {
        nodes.extend([
            (Op::LastRow, vec![result(9)]),                // 11 [1, 64]
            (Op::Linear, vec![result(11), Weight(0)]),     // 12 [1, 96]
            (Op::SoftCap { cap: 30.0 }, vec![result(12)]), // 13
            (Op::Sample, vec![result(13), result(10), Value(2), Value(3), Value(4), Value(5)]), // 14
        ]);
        outputs.extend([("token", result(14)), ("logits", result(13))]);
    } else {
        nodes.extend([
            (Op::Linear, vec![result(9), Weight(0)]),      // 11 [T, 96]
            (Op::SoftCap { cap: 30.0 }, vec![result(11)]), // 12
        ]);
        outputs.push(("logits", result(12)));
    }
    let output = |(name, value): (&str, Operand)| match value {
        Value(value) => Output { name: name.to_owned(), value },
        _ => unreachable!("outputs are values"),
    };
    Method {
        name: name.to_owned(),
        max_rows,
        nodes: nodes
            .into_iter()
            .map(|(op, args)| Node { op, args, label: String::new() })
            .collect(),
        outputs: outputs.into_iter().map(output).collect(),
        inputs,
    }
}
