//! Small programs built by hand, and their files.

#![allow(dead_code, reason = "each test uses a part of this")]

pub(crate) mod reference;

use std::path::PathBuf;
use std::sync::Arc;

use gemma4_format::encoding::ZeroType;
use gemma4_format::ptd::Layout;
use gemma4_format::pte::{self, Pte};
use gemma4_format::{
    Buffer, DType, Dim, Encoding, Input, Method, Node, Offset, Op, Operand, Output, Program,
    Source, TextDefaults, Weight,
};
use gemma4_runtime::LoadedProgram;
use tempfile::TempDir;

/// Uniform numbers from a linear congruential generator (Knuth, MMIX).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 32) as u32
    }

    pub(crate) fn below(&mut self, n: u32) -> u32 {
        self.bits() % n
    }

    /// In `-1 .. 1`.
    pub(crate) fn real(&mut self) -> f32 {
        self.bits() as f32 / (1u64 << 31) as f32 - 1.0
    }

    pub(crate) fn tokens(&mut self, count: usize, vocabulary: u32) -> Vec<u32> {
        (0..count).map(|_| self.below(vocabulary)).collect()
    }
}

pub(crate) const BF16: Encoding = Encoding::Dense(DType::BF16);
pub(crate) const F32: Encoding = Encoding::Dense(DType::F32);
pub(crate) const INT4: Encoding = Encoding::Quantized {
    bits: 4,
    group: 32,
    scale: DType::BF16,
    offset: Offset::Zero(ZeroType::Nibble),
};

/// INT8 with one scale per row of `k` numbers.
pub(crate) fn int8(k: u32) -> Encoding {
    Encoding::Quantized { bits: 8, group: k, scale: DType::BF16, offset: Offset::Symmetric }
}

/// Random stored bytes of a weight whose values are about `size`.
pub(crate) fn random_parts(
    random: &mut Random,
    encoding: Encoding,
    dims: &[u32],
    size: f32,
) -> Vec<Vec<u8>> {
    let store = |dtype: DType, x: f32| match dtype {
        DType::F32 => x.to_le_bytes().to_vec(),
        DType::F16 => half::f16::from_f32(x).to_le_bytes().to_vec(),
        DType::BF16 => half::bf16::from_f32(x).to_le_bytes().to_vec(),
        DType::U8 => vec![x as u8],
    };
    let parts = encoding.parts("w", dims).expect("an encoding of these dims");
    let mut numbers = |part: &gemma4_format::encoding::Part, f: &mut dyn FnMut(f32) -> f32| {
        let count = part.dims.iter().product::<u64>();
        (0..count).flat_map(|_| store(part.dtype, f(random.real()))).collect::<Vec<u8>>()
    };
    let half = match encoding {
        Encoding::Quantized { bits, .. } => (1u32 << (bits - 1)) as f32,
        Encoding::Dense(_) => 1.0,
    };
    let stored = |part: &gemma4_format::encoding::Part| match part.tensor.as_str() {
        "w.scales" => numbers(part, &mut |x| size / half * (1.5 + x)),
        "w.zeros" if part.dtype != DType::U8 => numbers(part, &mut |x| half + x * half / 4.0),
        "w.zeros" if half > 8.0 => numbers(part, &mut |x| (half + x * half / 4.0).round()),
        "w.minimums" => numbers(part, &mut |x| size * (x - 1.0)),
        "w.codes" | "w.codes_high" | "w.zeros" => numbers(part, &mut |x| (x + 1.0) * 127.9),
        _ => numbers(part, &mut |x| x * size),
    };
    parts.iter().map(stored).collect()
}

/// What the small model is made of.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) seed: u64,
    pub(crate) vocabulary: u32,
    pub(crate) hidden: u32,
    pub(crate) inner: u32,
    pub(crate) window: u32,
    pub(crate) ring: u32,
    pub(crate) chunk: u32,
    pub(crate) max_context: u32,
    /// Encoding of the linear weights.
    pub(crate) linear: Encoding,
    /// Encoding of the embedding, which is the head too.
    pub(crate) embedding: Encoding,
    pub(crate) stop_tokens: Vec<u32>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            seed: 1,
            vocabulary: 97,
            hidden: 64,
            inner: 96,
            window: 7,
            ring: 7 + 8 - 1,
            chunk: 8,
            max_context: 200,
            linear: INT4,
            embedding: int8(64),
            stop_tokens: vec![],
        }
    }
}

/// A program with the stored bytes of its weights.
pub(crate) struct Model {
    pub(crate) program: Program,
    pub(crate) parts: Vec<Vec<Vec<u8>>>,
}

/// The two files of a model, removed when dropped.
pub(crate) struct Files {
    pub(crate) directory: TempDir,
    pub(crate) pte: PathBuf,
    pub(crate) ptd: PathBuf,
}

impl Model {
    /// Two layers: the first with a window and a ring, the second over all positions with its
    /// values taken from the keys' projection.
    pub(crate) fn new(config: &Config) -> Self {
        let mut builder = Builder {
            random: Random(config.seed),
            model: Self { program: empty_program(config), parts: Vec::new() },
        };
        for name in ["decode", "prefill", "verify"] {
            builder.method(config, name);
        }
        builder.model
    }

    /// Writes both files. Digests are computed here, so parts may be changed before.
    pub(crate) fn write(&mut self) -> Files {
        let named: Vec<_> = self
            .program
            .weights
            .iter()
            .map(|w| (w.name.clone(), w.dims.clone(), w.encoding))
            .collect();
        let layout = Layout::new(&named).expect("a layout");
        let mut data = vec![0; layout.length as usize];
        data[..layout.header.len()].copy_from_slice(&layout.header);
        for ((weight, placed), parts) in
            self.program.weights.iter_mut().zip(&layout.weights).zip(&self.parts)
        {
            let mut hasher = blake3::Hasher::new();
            for ((_, offset), bytes) in placed.iter().zip(parts) {
                data[*offset as usize..][..bytes.len()].copy_from_slice(bytes);
                hasher.update(bytes);
            }
            weight.digest = *hasher.finalize().as_bytes();
        }
        self.program.data_header = layout.header_digest();
        self.program.data_length = layout.length;
        let pte = Pte {
            program: self.program.clone(),
            tokenizer: b"{}".to_vec(),
            chat_template: "{{ messages }}".to_owned(),
            plans: Vec::new(),
            modules: Vec::new(),
        };
        let directory = tempfile::tempdir().expect("a temporary directory");
        let files = Files {
            pte: directory.path().join("model.pte"),
            ptd: directory.path().join("model.ptd"),
            directory,
        };
        std::fs::write(&files.pte, pte::encode(&pte).expect("a valid program")).expect("written");
        std::fs::write(&files.ptd, data).expect("written");
        files
    }

    /// Writes and opens it. The files are deleted; the map keeps their bytes.
    pub(crate) fn load(&mut self) -> Arc<LoadedProgram> {
        let files = self.write();
        Arc::new(LoadedProgram::open(&files.pte, &files.ptd, &|_, _| {}).expect("opens"))
    }
}

fn empty_program(config: &Config) -> Program {
    let buffer = |name: &str, rows, heads, width| Buffer {
        name: name.to_owned(),
        dims: vec![rows, Dim::Fixed(heads), Dim::Fixed(width)],
    };
    let ring = Dim::Ring(config.ring);
    Program {
        source: Source::default(),
        text: TextDefaults {
            bos_token: Some(2),
            stop_tokens: config.stop_tokens.clone(),
            temperature: 1.0,
            top_k: 64,
            top_p: 0.95,
        },
        vocab_size: config.vocabulary,
        max_context: config.max_context,
        weights: vec![],
        buffers: vec![
            buffer("layers.0.keys", ring, 2, 16),
            buffer("layers.0.values", ring, 2, 16),
            buffer("layers.1.keys", Dim::Context, 1, 32),
            buffer("layers.1.values", Dim::Context, 1, 32),
        ],
        methods: vec![],
        data_header: [0; 32],
        data_length: 0,
    }
}

struct Builder {
    random: Random,
    model: Model,
}

impl Builder {
    fn weight(&mut self, name: &str, dims: &[u32], encoding: Encoding, size: f32) -> Operand {
        let weights = &mut self.model.program.weights;
        if let Some(id) = weights.iter().position(|w| w.name == name) {
            return Operand::Weight(id as u32);
        }
        let parts = random_parts(&mut self.random, encoding, dims, size);
        weights.push(Weight {
            name: name.to_owned(),
            dims: dims.to_vec(),
            encoding,
            digest: [0; 32],
        });
        self.model.parts.push(parts);
        Operand::Weight(weights.len() as u32 - 1)
    }

    fn method(&mut self, config: &Config, name: &str) {
        let draws = name != "verify";
        let mut inputs = Method::standard_inputs()
            .map(|(name, fact)| Input { name: name.to_owned(), fact })
            .to_vec();
        inputs.truncate(if draws { 6 } else { 2 });
        let [tokens, position, temperature, top_k, top_p, seed] =
            std::array::from_fn(|i| Operand::Value(i as u32));
        let mut graph = Graph { next: inputs.len() as u32, nodes: vec![], position };
        let (h, v) = (config.hidden, config.vocabulary);
        let table = self.weight("embed.weight", &[v, h], config.embedding, 0.5);
        let mut x = graph.add(Op::Embed, &[tokens, table], "");
        x = graph.add(Op::Scale { factor: 2.0 }, &[x], "embedding");
        for layer in 0..2 {
            x = self.layer(config, &mut graph, layer, x);
        }
        if draws {
            x = graph.add(Op::LastRow, &[x], "");
        }
        let norm = self.weight("norm.weight", &[h], BF16, 1.0);
        x = graph.add(NORM, &[x, norm], "last_hidden");
        x = graph.add(Op::Linear, &[x, table], "");
        let logits = graph.add(Op::SoftCap { cap: 30.0 }, &[x], "logits");
        let after = graph.add(Op::Advance, &[tokens, position], "");
        let mut outputs = vec![("position", after), ("logits", logits)];
        if draws {
            let inputs = [logits, after, temperature, top_k, top_p, seed];
            outputs.push(("token", graph.add(Op::Sample, &inputs, "")));
        }
        let output = |(name, value): (&str, Operand)| match value {
            Operand::Value(value) => Output { name: name.to_owned(), value },
            _ => unreachable!("outputs are values"),
        };
        self.model.program.methods.push(Method {
            name: name.to_owned(),
            max_rows: if name == "decode" { 1 } else { config.chunk },
            inputs,
            nodes: graph.nodes,
            outputs: outputs.into_iter().map(output).collect(),
        });
    }

    fn layer(&mut self, config: &Config, graph: &mut Graph, layer: u32, x: Operand) -> Operand {
        let full = layer == 1;
        let (heads, groups, width) = if full { (2, 1, 32) } else { (4, 2, 16) };
        let (h, inner) = (config.hidden, config.inner);
        let mut weight = |part: &str, dims: &[u32]| {
            let name = format!("layers.{layer}.{part}.weight");
            match dims {
                [_] => self.weight(&name, dims, BF16, 1.0),
                _ => self.weight(&name, dims, config.linear, 0.3),
            }
        };
        let norms: [Operand; 4] = ["input", "after_attention", "before_mlp", "after_mlp"]
            .map(|part| weight(&format!("{part}_norm"), &[h]));
        let head_norms = ["q_norm", "k_norm"].map(|part| weight(part, &[width]));
        let q_proj = weight("q_proj", &[heads * width, h]);
        let k_proj = weight("k_proj", &[groups * width, h]);
        let v_proj = weight(if full { "k_proj" } else { "v_proj" }, &[groups * width, h]);
        let o_proj = weight("o_proj", &[h, heads * width]);
        let gate_proj = weight("gate_proj", &[inner, h]);
        let up_proj = weight("up_proj", &[inner, h]);
        let down_proj = weight("down_proj", &[h, inner]);
        let scalar = weight("layer_scalar", &[1]);

        let rope = match full {
            true => Op::Rope { base: 1e6, rotated: 4, factor: 1.0 },
            false => Op::Rope { base: 1e4, rotated: width / 2, factor: 1.0 },
        };
        let position = graph.position;
        let normed = graph.add(NORM, &[x, norms[0]], "");
        let split = |graph: &mut Graph, w, heads| {
            let y = graph.add(Op::Linear, &[normed, w], "");
            graph.add(Op::SplitHeads { heads }, &[y], "")
        };
        let q = split(graph, q_proj, heads);
        let q = graph.add(NORM, &[q, head_norms[0]], "");
        let q = graph.add(rope.clone(), &[q, position], "");
        let k = split(graph, k_proj, groups);
        let v = if full { k } else { split(graph, v_proj, groups) };
        let k = graph.add(NORM, &[k, head_norms[1]], "");
        let k = graph.add(rope, &[k, position], "");
        let v = graph.add(NORM, &[v], "");
        let (keys, values) = (Operand::Buffer(2 * layer), Operand::Buffer(2 * layer + 1));
        graph.effect(Op::BufferWrite, &[keys, k, position]);
        graph.effect(Op::BufferWrite, &[values, v, position]);
        let window = (!full).then_some(config.window);
        let y = graph.add(
            Op::Attention { window, scale: 1.0 },
            &[q, keys, values, position],
            &format!("layers.{layer}.attention"),
        );
        let y = graph.add(Op::MergeHeads, &[y], "");
        let y = graph.add(Op::Linear, &[y, o_proj], "");
        let y = graph.add(NORM, &[y, norms[1]], "");
        let x = graph.add(Op::Add, &[x, y], "");
        let normed = graph.add(NORM, &[x, norms[2]], "");
        let gate = graph.add(Op::Linear, &[normed, gate_proj], "");
        let up = graph.add(Op::Linear, &[normed, up_proj], "");
        let y = graph.add(Op::GeGlu, &[gate, up], "");
        let y = graph.add(Op::Linear, &[y, down_proj], "");
        let y = graph.add(NORM, &[y, norms[3]], "");
        let x = graph.add(Op::Add, &[x, y], "");
        graph.add(Op::ScaleByWeight, &[x, scalar], &format!("layers.{layer}"))
    }
}

const NORM: Op = Op::RmsNorm { eps: 1e-6 };

struct Graph {
    next: u32,
    nodes: Vec<Node>,
    position: Operand,
}

impl Graph {
    fn add(&mut self, op: Op, args: &[Operand], label: &str) -> Operand {
        self.nodes.push(Node { op, args: args.to_vec(), label: label.to_owned() });
        self.next += 1;
        Operand::Value(self.next - 1)
    }

    fn effect(&mut self, op: Op, args: &[Operand]) {
        self.nodes.push(Node { op, args: args.to_vec(), label: String::new() });
    }
}
