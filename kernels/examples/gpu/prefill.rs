//! Times the kernels of a prefill call of Gemma 4 31B, on random weights in our default recipe.

use std::collections::HashMap;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use gemma4_format::encoding::{DType, Encoding, Offset, ZeroType};
use gemma4_kernels::{
    AddNorm, Arch, AttentionPrefill, Heads, Kernel, Keys, LinearMany, ManyOutput, Output, Packed,
    Randomize, Rope, panel_elements,
};

use crate::case::cubin_name;
use crate::device::{Buffer, Function, Gpu, Value};
use crate::layer::state_at;

const H: u32 = 5376;
const WIDTH: u32 = 21504;
/// Rows that panels have room for.
const ROOM: u32 = 2048;
/// Rows of the buffers of layers without a window.
const CONTEXT: u32 = 34_816;
const WINDOW: u32 = 1024;
const ROWS: [u32; 4] = [417, 512, 1024, 2048];
const DEPTHS: [u32; 4] = [0, 2048, 8192, 32_768];

const INT4: Encoding = Encoding::Quantized {
    bits: 4,
    group: 32,
    scale: DType::BF16,
    offset: Offset::Zero(ZeroType::Nibble),
};

/// Query heads, key and value heads, and columns of a head, of layers with a window and without.
const HEADS: [(u32, u32, u32); 2] = [(32, 16, 256), (32, 4, 512)];

/// Every kernel of a layer.
#[derive(Clone)]
struct Layer {
    norm: Kernel,
    qkv: LinearMany,
    rope: Kernel,
    attention: Kernel,
    attention_operations: u64,
    o: LinearMany,
    gate_up: LinearMany,
    down: LinearMany,
}

impl Layer {
    fn new(full: bool, rows: u32, arch: Arch) -> Self {
        let (q_heads, kv_heads, d) = HEADS[usize::from(full)];
        let columns = (q_heads + kv_heads * if full { 1 } else { 2 }) * d;
        let rotated = if full { 64 } else { 128 };
        let keys = match full {
            true => Keys::beside_values(d, rotated, arch),
            false => Keys::Whole,
        };
        let linear =
            |n, k, output| LinearMany::choose(Packed::new(INT4, n, k).unwrap(), rows, output, arch);
        let rope = Rope {
            q_heads,
            kv_heads,
            d,
            frequencies: Rope::frequencies(if full { 1e6 } else { 1e4 }, d, rotated, 1.0),
            shared_kv: full,
            keys,
            splits: 1,
            weight: DType::BF16,
        };
        let window = (!full).then_some(WINDOW);
        let attention =
            AttentionPrefill::choose(Heads { q_heads, kv_heads, d, keys, window }, arch);
        Self {
            norm: AddNorm {
                h: H,
                splits: 1,
                scalar: true,
                next: Some(Output::Panels { room: ROOM }),
                weight: DType::BF16,
                cluster: 1,
            }
            .kernel()
            .unwrap(),
            qkv: linear(columns, H, ManyOutput::F32),
            rope: rope.kernel().unwrap(),
            attention: attention.kernel().unwrap(),
            attention_operations: 4 * u64::from(q_heads * d),
            o: linear(H, q_heads * d, ManyOutput::F32),
            gate_up: linear(2 * WIDTH, H, ManyOutput::Geglu),
            down: linear(H, WIDTH, ManyOutput::F32),
        }
    }

    fn linears(&self) -> [LinearMany; 4] {
        [self.qkv, self.o, self.gate_up, self.down]
    }

    fn kernels(&self) -> Vec<Kernel> {
        let mut kernels: Vec<Kernel> =
            self.linears().iter().map(|linear| linear.kernel().unwrap()).collect();
        kernels.extend([&self.norm, &self.rope, &self.attention].map(Clone::clone));
        for linear in self.linears() {
            kernels.push(Randomize { weight: linear.weight }.kernel());
        }
        kernels
    }
}

const ARCHES: [Arch; 2] = [Arch::Sm90a, Arch::Sm90];

pub(crate) fn kernels() -> Vec<(Arch, Kernel)> {
    let mut kernels = Vec::new();
    for arch in ARCHES {
        for rows in ROWS {
            for full in [false, true] {
                let of_layer = Layer::new(full, rows, arch).kernels();
                kernels.extend(of_layer.into_iter().map(|kernel| (arch, kernel)));
            }
        }
    }
    kernels
}

/// Memory of a call.
struct Memory {
    weights: [[Buffer; 4]; 2],
    partials: Buffer,
    ready: Buffer,
    norm: Buffer,
    x: Buffer,
    panels: Buffer,
    wide: Buffer,
    sums: Buffer,
    q: Buffer,
    states: [Buffer; 2],
    tables: [Buffer; 2],
}

struct Bench<'a> {
    gpu: &'a Gpu,
    directory: &'a Path,
    arch: Arch,
    functions: HashMap<(String, &'static str), Function>,
    memory: Memory,
}

impl Bench<'_> {
    fn function(&mut self, kernel: &Kernel) -> Function {
        let name = cubin_name(kernel, self.arch);
        let path = self.directory.join(&name);
        *self.functions.entry((name, kernel.symbol)).or_insert_with(|| self.gpu.load(&path, kernel))
    }

    fn launch(&mut self, kernel: &Kernel, rows: u32, values: &[Value]) {
        let function = self.function(kernel);
        self.gpu.launch(kernel, function, rows, values);
    }

    fn linear(&mut self, linear: &LinearMany, rows: u32, y: Buffer, x: Buffer, weight: Buffer) {
        let mut values = vec![Value::At(y.at), Value::At(x.at), Value::At(weight.at)];
        if linear.hopper {
            values.extend([Value::At(self.memory.partials.at), Value::At(self.memory.ready.at)]);
        }
        values.extend([Value::U32(rows), Value::U32(ROOM)]);
        self.launch(&linear.kernel().unwrap(), rows, &values);
    }

    fn attention(&mut self, layer: &Layer, full: bool, rows: u32) {
        let ring = if full { CONTEXT } else { WINDOW + ROOM };
        let (memory, table) = (&self.memory, self.memory.tables[usize::from(full)]);
        let values = [
            Value::At(memory.q.at),
            Value::At(table.at),
            Value::U32(0),
            Value::U32(1),
            Value::U32(2),
            Value::U32(ring),
            Value::At(memory.wide.at),
            Value::U32(rows),
            Value::U32(ROOM),
            Value::F32(1.0),
        ];
        self.launch(&layer.attention, rows, &values);
    }

    /// The norm that precedes a product.
    fn norm(&mut self, layer: &Layer, rows: u32) {
        let Memory { sums, norm, x, panels, .. } = self.memory;
        let mut values = [sums, norm, norm, x, norm, panels].map(|b| Value::At(b.at)).to_vec();
        values.extend([Value::U32(rows), Value::F32(1e-6)]);
        self.launch(&layer.norm, rows, &values);
    }

    fn rope(&mut self, layer: &Layer, full: bool, rows: u32) {
        let Memory { sums, norm, q, tables, .. } = self.memory;
        let ring = if full { CONTEXT } else { WINDOW + ROOM };
        let values = [
            Value::At(sums.at),
            Value::At(norm.at),
            Value::At(norm.at),
            Value::At(q.at),
            Value::At(tables[usize::from(full)].at),
            Value::U32(0),
            Value::U32(1),
            Value::U32(2),
            Value::U32(ring),
            Value::U32(rows),
            Value::F32(1e-6),
        ];
        self.launch(&layer.rope, rows, &values);
    }

    fn layer(&mut self, layer: &Layer, full: bool, rows: u32) {
        let [qkv, o, gate_up, down] = self.memory.weights[usize::from(full)];
        let Memory { panels, wide, sums, .. } = self.memory;
        self.norm(layer, rows);
        self.linear(&layer.qkv, rows, sums, panels, qkv);
        self.rope(layer, full, rows);
        self.attention(layer, full, rows);
        self.linear(&layer.o, rows, sums, wide, o);
        self.norm(layer, rows);
        self.linear(&layer.gate_up, rows, wide, panels, gate_up);
        self.linear(&layer.down, rows, sums, wide, down);
    }

    /// Milliseconds of what `body` launches, after a pause in which the chip cools.
    fn time(&mut self, runs: usize, body: impl FnOnce(&mut Self)) -> f32 {
        sleep(Duration::from_millis(100));
        let gpu = self.gpu;
        let graph = gpu.capture(|| body(self));
        gpu.time(&graph, runs)
    }

    fn at_depth(&mut self, depth: u32) {
        for state in self.memory.states {
            self.gpu.write(state, &state_at(depth));
        }
    }

    fn products(&mut self, rows: u32) {
        let mut line = format!("{} T {rows:4} TFLOP/s", self.arch);
        let mut total = 0.0;
        for full in [false, true] {
            let layer = Layer::new(full, rows, self.arch);
            let layers = if full { 10.0 } else { 50.0 };
            for (i, linear) in layer.linears().into_iter().enumerate() {
                let weight = self.memory.weights[usize::from(full)][i];
                let Memory { panels, wide, sums, .. } = self.memory;
                let (x, y) = match i {
                    0 => (panels, sums),
                    2 => (panels, wide),
                    _ => (wide, sums),
                };
                self.linear(&linear, rows, y, x, weight);
                let ms = self.time(5, |bench| {
                    for _ in 0..4 {
                        bench.linear(&linear, rows, y, x, weight);
                    }
                }) / 4.0;
                total += ms * layers;
                let operations = 2.0 * f64::from(linear.weight.n) * f64::from(linear.weight.k);
                let rate = operations * f64::from(rows) / f64::from(ms) / 1e9;
                line += &format!("  {}x{} {rate:.0}", linear.weight.n, linear.weight.k);
            }
        }
        println!("{line} | products {total:.1} ms, {:.0} tok/s", rows as f32 / total * 1e3);
    }

    fn attentions(&mut self, rows: u32) {
        for depth in DEPTHS {
            self.at_depth(depth);
            let mut line = format!("{} T {rows} depth {depth:5}", self.arch);
            for full in [false, true] {
                let layer = Layer::new(full, rows, self.arch);
                self.attention(&layer, full, rows);
                let ms = self.time(5, |bench| bench.attention(&layer, full, rows));
                let seen = |t: u32| u64::from(if full { t + 1 } else { (t + 1).min(WINDOW) });
                let keys: u64 = (depth..depth + rows).map(seen).sum();
                let rate = (keys * layer.attention_operations) as f64 / f64::from(ms) / 1e9;
                line +=
                    &format!("  D {}: {ms:.3} ms {rate:.0} TFLOP/s", HEADS[usize::from(full)].2);
            }
            println!("{line}");
        }
    }

    /// What stands between products and attention.
    fn others(&mut self, rows: u32) {
        let [window, full] = [false, true].map(|full| Layer::new(full, rows, self.arch));
        self.norm(&window, rows);
        self.rope(&window, false, rows);
        self.rope(&full, true, rows);
        let norm = self.time(5, |bench| bench.norm(&window, rows));
        let ropes = [
            self.time(5, |bench| bench.rope(&window, false, rows)),
            self.time(5, |bench| bench.rope(&full, true, rows)),
        ];
        println!("{} T {rows}: norm {norm:.4} ms, ropes {ropes:.4?} ms", self.arch);
    }

    /// All layers of one call.
    fn call(&mut self, rows: u32, depth: u32) {
        self.at_depth(depth);
        let layers = [false, true].map(|full| Layer::new(full, rows, self.arch));
        let ms = self.time(3, |bench| {
            for layer in 0..60 {
                let full = layer % 6 == 5;
                bench.layer(&layers[usize::from(full)], full, rows);
            }
        });
        let rate = rows as f32 / ms * 1e3;
        println!("{} call of {rows} rows at {depth}: {ms:.1} ms, {rate:.0} tok/s", self.arch);
    }
}

/// bfloat16 numbers of magnitude 0.008 to 0.9 and either sign.
fn small(count: u64) -> Vec<u16> {
    (0..count).map(|i| 0x3c00 | (i * 7919 % 0x23f) as u16 | (i as u16 & 1) << 15).collect()
}

fn memory(gpu: &Gpu, random: impl Fn(Packed) -> Buffer) -> Memory {
    let floats = |columns: u32| {
        let columns = columns as usize;
        let values: Vec<f32> = (0..ROOM as usize * columns)
            .map(|i| ((i * 7919 % 2003) as f32 - 1001.0) / 1001.0)
            .collect();
        gpu.upload(&values)
    };
    let states = [0, 1].map(|_| gpu.upload(&state_at(0)));
    let tables = [0, 1].map(|full: usize| {
        let (_, kv_heads, d) = HEADS[full];
        let rows = if full == 1 { CONTEXT } else { WINDOW + ROOM };
        let size = u64::from(rows) * u64::from(kv_heads * d);
        let (keys, values) = (gpu.upload(&small(size)), gpu.upload(&small(size)));
        gpu.upload(&[states[full].at, keys.at, values.at])
    });
    let any = Layer::new(false, 256, Arch::Sm90a).qkv;
    Memory {
        weights: [false, true]
            .map(|full| Layer::new(full, 512, Arch::Sm90a).linears().map(|l| random(l.weight))),
        partials: gpu.poisoned(any.partial_bytes(gpu.sms) as usize),
        ready: gpu.upload(&vec![0u32; any.ready_bytes(gpu.sms) as usize / 4]),
        norm: gpu.upload(&vec![0x3f80u16; H as usize]),
        x: floats(H),
        panels: gpu.upload(&small(panel_elements(ROOM, H))),
        wide: gpu.upload(&small(panel_elements(ROOM, WIDTH))),
        sums: floats(18_432),
        q: floats(16_384),
        states,
        tables,
    }
}

pub(crate) fn run(directory: &Path, what: &str) {
    let gpu = Gpu::open();
    for arch in ARCHES {
        let random = |weight: Packed| {
            let kernel = Randomize { weight }.kernel();
            let function = gpu.load(&directory.join(cubin_name(&kernel, arch)), &kernel);
            let buffer = gpu.poisoned(weight.bytes() as usize);
            let values = [Value::At(buffer.at), Value::U32(1), Value::F32(0.02)];
            gpu.launch(&kernel, function, 1, &values);
            buffer
        };
        let memory = memory(&gpu, random);
        let mut bench = Bench { gpu: &gpu, directory, arch, functions: HashMap::new(), memory };
        for rows in ROWS {
            if "products".contains(what) {
                bench.products(rows);
            }
        }
        for rows in [512, 2048] {
            if "attention".contains(what) {
                bench.attentions(rows);
            }
            if "others".contains(what) {
                bench.others(rows);
            }
        }
        for (rows, depth) in
            [(417, 0), (512, 0), (2048, 0), (2048, 2048), (512, 32_256), (2048, 30_720)]
        {
            if "calls".contains(what) {
                bench.call(rows, depth);
            }
        }
    }
}
