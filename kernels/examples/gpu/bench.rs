//! Times the kernels of a decode step of Gemma 4 31B, on random weights in our default recipe.

use std::collections::HashMap;
use std::path::Path;

use gemma4_format::encoding::{DType, Encoding, Offset, ZeroType};
use gemma4_format::plan::state;
use gemma4_kernels::{
    AddNorm, Arch, AttentionFew, Embed, Epilogue, Geglu, Heads, Kernel, Keys, LinearFew, Output,
    Packed, Randomize, Rope, Sample,
};

use crate::case::cubin_name;
use crate::device::{Buffer, Function, Gpu, Value};

const ARCH: Arch = Arch::Sm90a;
/// Bytes a second that an H200 reads.
const WALL: f64 = 4548e9;
const LAYERS: u32 = 60;
const H: u32 = 5376;
const WIDTH: u32 = 21504;
const VOCABULARY: u32 = 262_144;
const CONTEXT: u32 = 4096;

const INT4: Encoding = Encoding::Quantized {
    bits: 4,
    group: 32,
    scale: DType::BF16,
    offset: Offset::Zero(ZeroType::Nibble),
};
const HEAD: Encoding =
    Encoding::Quantized { bits: 8, group: H, scale: DType::BF16, offset: Offset::Symmetric };

/// Most rows of a step.
const ROWS: [u32; 4] = [1, 2, 4, 8];

#[derive(Clone, Copy)]
struct Linears {
    qkv: [LinearFew; 2],
    o: [LinearFew; 2],
    gate_up: LinearFew,
    down: LinearFew,
    head: LinearFew,
}

fn packed(n: u32, k: u32) -> Packed {
    Packed::new(if n == VOCABULARY { HEAD } else { INT4 }, n, k).unwrap()
}

impl Linears {
    fn new(rows: u32) -> Self {
        let choose = |n, k, epilogue| {
            LinearFew::choose(packed(n, k), rows, epilogue, true, ARCH, 132).unwrap()
        };
        Self {
            qkv: [16384, 18432].map(|n| choose(n, H, Epilogue::Partial)),
            o: [8192, 16384].map(|k| choose(H, k, Epilogue::Partial)),
            gate_up: choose(2 * WIDTH, H, Epilogue::Partial),
            down: choose(H, WIDTH, Epilogue::Partial),
            head: choose(VOCABULARY, H, Epilogue::SoftCap),
        }
    }

    fn all(&self) -> [LinearFew; 7] {
        [self.qkv[0], self.qkv[1], self.o[0], self.o[1], self.gate_up, self.down, self.head]
    }
}

/// Every kernel of a step.
struct Step {
    linears: Linears,
    embed: Kernel,
    first_norm: Kernel,
    rope: [Kernel; 2],
    attention: [AttentionFew; 2],
    after_attention: [Kernel; 2],
    geglu: Kernel,
    after_layer: Kernel,
    last_norm: Kernel,
    sample: Sample,
}

impl Step {
    fn new(rows: u32) -> Self {
        let linears = Linears::new(rows);
        let norm = |splits, scalar, linear: LinearFew| {
            let next = Some(Output::Split(linear.split()));
            AddNorm {
                h: H,
                splits,
                scalar,
                next,
                weight: DType::BF16,
                cluster: AddNorm::cluster(ARCH),
            }
            .kernel()
            .unwrap()
        };
        let heads = |full: bool| match full {
            true => Heads {
                q_heads: 32,
                kv_heads: 4,
                d: 512,
                keys: Keys::beside_values(512, 64, ARCH),
                window: None,
            },
            false => {
                Heads { q_heads: 32, kv_heads: 16, d: 256, keys: Keys::Whole, window: Some(1024) }
            }
        };
        let rope = |full: bool| {
            let Heads { kv_heads, d, keys, .. } = heads(full);
            let (base, rotated) = if full { (1e6, 64) } else { (1e4, 128) };
            Rope {
                q_heads: 32,
                kv_heads,
                d,
                frequencies: Rope::frequencies(base, d, rotated, 1.0),
                shared_kv: full,
                keys,
                splits: linears.qkv[usize::from(full)].splits,
                weight: DType::BF16,
            }
            .kernel()
            .unwrap()
        };
        Self {
            embed: Embed { weight: linears.head.weight }.kernel(),
            first_norm: norm(0, false, linears.qkv[0]),
            rope: [rope(false), rope(true)],
            attention: [
                AttentionFew::choose(
                    heads(false),
                    rows,
                    Output::Split(linears.o[0].split()),
                    (ARCH, 132),
                ),
                AttentionFew::choose(
                    heads(true),
                    rows,
                    Output::Split(linears.o[1].split()),
                    (ARCH, 132),
                ),
            ],
            after_attention: [0, 1]
                .map(|i: usize| norm(linears.o[i].splits, false, linears.gate_up)),
            geglu: Geglu {
                width: WIDTH,
                splits: linears.gate_up.splits,
                output: Output::Split(linears.down.split()),
            }
            .kernel()
            .unwrap(),
            after_layer: norm(linears.down.splits, true, linears.qkv[0]),
            last_norm: norm(linears.down.splits, true, linears.head),
            sample: Sample { vocabulary: VOCABULARY },
            linears,
        }
    }

    fn kernels(&self) -> Vec<Kernel> {
        let mut kernels: Vec<Kernel> =
            self.linears.all().iter().map(|linear| linear.kernel().unwrap()).collect();
        kernels.extend(
            [&self.embed, &self.first_norm, &self.after_layer, &self.last_norm].map(Clone::clone),
        );
        kernels.extend(self.rope.clone());
        kernels.extend(self.after_attention.clone());
        kernels.push(self.geglu.clone());
        for attention in self.attention {
            kernels.extend([attention.kernel().unwrap(), attention.join().unwrap()]);
        }
        kernels.extend([self.sample.maxima().unwrap(), self.sample.kernel().unwrap()]);
        kernels
    }
}

pub(crate) fn kernels() -> Vec<Kernel> {
    let mut kernels = Vec::new();
    for rows in ROWS {
        kernels.extend(Step::new(rows).kernels());
    }
    for linear in Linears::new(1).all() {
        kernels.push(Randomize { weight: linear.weight }.kernel());
    }
    kernels
}

struct Bench<'a> {
    gpu: &'a Gpu,
    directory: &'a Path,
    functions: HashMap<(String, &'static str), Function>,
}

impl Bench<'_> {
    fn function(&mut self, kernel: &Kernel) -> Function {
        let name = cubin_name(kernel, ARCH);
        let path = self.directory.join(&name);
        *self.functions.entry((name, kernel.symbol)).or_insert_with(|| self.gpu.load(&path, kernel))
    }

    fn random(&mut self, weight: Packed, seed: u32) -> Buffer {
        let kernel = Randomize { weight }.kernel();
        let function = self.function(&kernel);
        let buffer = self.gpu.poisoned(weight.bytes() as usize);
        let values = [Value::At(buffer.at), Value::U32(seed), Value::F32(0.02)];
        self.gpu.launch(&kernel, function, 1, &values);
        buffer
    }
}

struct Layer {
    full: bool,
    qkv: Buffer,
    o: Buffer,
    gate_up: Buffer,
    down: Buffer,
}

/// One launch of a step.
struct Launch {
    kernel: Kernel,
    function: Function,
    values: Vec<Value>,
}

struct Model {
    layers: Vec<Layer>,
    head: Buffer,
    ones: Buffer,
    table: Buffer,
    state: Buffer,
    stops: Buffer,
    scratch: [Buffer; 8],
}

impl Model {
    fn new(bench: &mut Bench<'_>) -> Self {
        let gpu = bench.gpu;
        let full = |layer: u32| layer % 6 == 5;
        let layers: Vec<Layer> = (0..LAYERS)
            .map(|i| {
                let heads = if full(i) { 32 * 512 } else { 32 * 256 };
                Layer {
                    full: full(i),
                    qkv: bench.random(packed(if full(i) { 18432 } else { 16384 }, H), i),
                    o: bench.random(packed(H, heads), i),
                    gate_up: bench.random(packed(2 * WIDTH, H), i),
                    down: bench.random(packed(H, WIDTH), i),
                }
            })
            .collect();
        let state = gpu.upload(&[0u32; state::WORDS]);
        let mut table = vec![state.at, gpu.poisoned(1024 * 8).at];
        for layer in &layers {
            let row = if layer.full { 4 * 512 } else { 16 * 256 };
            let ring = if layer.full { CONTEXT } else { 1024 + 512 };
            let rows = vec![0x3c00u16; row * ring as usize];
            table.extend([gpu.upload(&rows).at, gpu.upload(&rows).at]);
        }
        // Residual, normed row, products, queries, attention sums, statistics, attention, logits.
        let floats: [usize; 8] = [
            8 * H as usize,
            8 * WIDTH as usize,
            8 * 700_000,
            8 * 16384,
            64 * 8 * 16384,
            64 * 8 * 64,
            8 * 32768,
            8 * VOCABULARY as usize,
        ];
        let numbers: Vec<f32> = (0..8 * WIDTH).map(|i| (i % 97) as f32 / 48.0 - 1.0).collect();
        let scratch = floats.map(|n| gpu.poisoned(n * 4));
        gpu.write(scratch[0], &numbers[..8 * H as usize]);
        gpu.write(scratch[1], &numbers);
        gpu.write(scratch[4], &numbers);
        gpu.write(scratch[6], &numbers[..8 * 16384]);
        Self {
            layers,
            head: bench.random(packed(VOCABULARY, H), 99),
            ones: gpu.upload(&vec![0x3f80u16; H as usize]),
            table: gpu.upload(&table),
            state,
            stops: gpu.upload(&[u32::MAX]),
            scratch,
        }
    }

    /// The launches of one step; only its products if `products`.
    fn step(&self, bench: &mut Bench<'_>, step: &Step, rows: u32, products: bool) -> Vec<Launch> {
        let [x, normed, sums, q, parts, stats, attended, logits] =
            self.scratch.map(|b| Value::At(b.at));
        let (ones, table) = (Value::At(self.ones.at), Value::At(self.table.at));
        let (t, eps, none) = (Value::U32(rows), Value::F32(1e-6), Value::At(0));
        let mut launches = Vec::new();
        let mut add = |essential: bool, kernel: &Kernel, values: &[Value]| {
            if essential || !products {
                let function = bench.function(kernel);
                launches.push(Launch { kernel: kernel.clone(), function, values: values.to_vec() });
            }
        };
        let linear = |weight: Buffer, input: Value, output: Value| {
            [Value::At(weight.at), input, output, t, Value::F32(30.0)]
        };
        add(
            false,
            &step.embed,
            &[Value::At(self.head.at), table, Value::U32(0), x, Value::F32(73.3)],
        );
        add(false, &step.first_norm, &[none, none, none, x, ones, normed, t, eps]);
        for (i, layer) in self.layers.iter().enumerate() {
            let full = usize::from(layer.full);
            let index = |which: u32| Value::U32(2 + 2 * i as u32 + which);
            let ring = Value::U32(if layer.full { CONTEXT } else { 1024 + 512 });
            let state = Value::U32(0);
            let products = &step.linears;
            add(true, &products.qkv[full].kernel().unwrap(), &linear(layer.qkv, normed, sums));
            add(
                false,
                &step.rope[full],
                &[sums, ones, ones, q, table, state, index(0), index(1), ring, t, eps],
            );
            let attention = step.attention[full];
            let values =
                [q, table, state, index(0), index(1), ring, parts, stats, t, Value::F32(1.0)];
            add(false, &attention.kernel().unwrap(), &values);
            add(false, &attention.join().unwrap(), &[parts, stats, attended, table, state, t]);
            add(true, &products.o[full].kernel().unwrap(), &linear(layer.o, attended, sums));
            add(false, &step.after_attention[full], &[sums, ones, none, x, ones, normed, t, eps]);
            // The activation takes the place of the sums of attention, which have been read.
            let activation = parts;
            add(true, &products.gate_up.kernel().unwrap(), &linear(layer.gate_up, normed, sums));
            add(false, &step.geglu, &[sums, activation, t]);
            add(true, &products.down.kernel().unwrap(), &linear(layer.down, activation, sums));
            let after =
                if i + 1 == self.layers.len() { &step.last_norm } else { &step.after_layer };
            add(false, after, &[sums, ones, ones, x, ones, normed, t, eps]);
        }
        add(true, &step.linears.head.kernel().unwrap(), &linear(self.head, normed, logits));
        let maxima = stats;
        add(false, &step.sample.maxima().unwrap(), &[logits, maxima]);
        let values = [
            logits,
            maxima,
            table,
            Value::U32(0),
            Value::U32(1),
            Value::U32(1024),
            Value::At(self.stops.at),
            Value::U32(1),
            t,
        ];
        add(false, &step.sample.kernel().unwrap(), &values);
        launches
    }
}

fn play(gpu: &Gpu, launches: &[Launch], rows: u32) {
    for launch in launches {
        gpu.launch(&launch.kernel, launch.function, rows, &launch.values);
    }
}

fn report(name: &str, ms: f32, bytes: u64) {
    let rate = bytes as f64 / f64::from(ms) * 1e3;
    println!("{name:44} {:9.1} us {:6.0} GB/s {:5.1} %", ms * 1e3, rate / 1e9, rate / WALL * 100.0);
}

pub(crate) fn run(directory: &Path) {
    let gpu = Gpu::open();
    let mut bench = Bench { gpu: &gpu, directory, functions: HashMap::new() };
    let model = Model::new(&mut bench);
    gpu.wait();
    for rows in ROWS {
        let step = Step::new(rows);
        println!("== {rows} rows");
        let launches = model.step(&mut bench, &step, rows, true);
        for linear in step.linears.all() {
            let kernel = linear.kernel().unwrap();
            let alone: Vec<Launch> = launches
                .iter()
                .filter(|launch| launch.kernel == kernel)
                .map(|l| Launch {
                    kernel: l.kernel.clone(),
                    function: l.function,
                    values: l.values.clone(),
                })
                .collect();
            let graph = gpu.capture(|| play(&gpu, &alone, rows));
            let name = format!(
                "{}x{} s{} w{} {:?}",
                linear.weight.n,
                linear.weight.k,
                linear.splits,
                linear.warps,
                linear.ring.map(|r| r.stages)
            );
            report(&name, gpu.time(&graph, 5) / alone.len() as f32, linear.weight.bytes());
        }
        let bytes: u64 = launches.iter().map(|launch| launch.kernel.bytes.fixed).sum();
        let graph = gpu.capture(|| play(&gpu, &launches, rows));
        report("products of a step", gpu.time(&graph, 9), bytes);
        let launches = model.step(&mut bench, &step, rows, false);
        let graph = gpu.capture(|| play(&gpu, &launches, rows));
        for position in [100, 2000] {
            let mut words = [0u32; state::WORDS];
            words[state::POSITION] = position;
            words[state::LIMIT] = 1 << 20;
            gpu.write(model.state, &words);
            let ms = gpu.time(&graph, 9);
            report(&format!("step at {position}, {} launches", launches.len()), ms, bytes);
            let words: Vec<u32> = gpu.download(model.state);
            assert_eq!(words[state::STEP], 10, "steps did not happen");
        }
        let mut symbols: Vec<&str> = launches.iter().map(|launch| launch.kernel.symbol).collect();
        symbols.sort_unstable();
        symbols.dedup();
        for symbol in symbols {
            let rest: Vec<Launch> = launches
                .iter()
                .filter(|launch| launch.kernel.symbol != symbol)
                .map(|l| Launch {
                    kernel: l.kernel.clone(),
                    function: l.function,
                    values: l.values.clone(),
                })
                .collect();
            let graph = gpu.capture(|| play(&gpu, &rest, rows));
            let ms = gpu.time(&graph, 5);
            report(&format!("step at 2000 without {}", symbol), ms, bytes);
        }
    }
}
