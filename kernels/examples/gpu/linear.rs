//! `pack`, `linear_few`, `embed` against rows decoded by the format crate.

use gemma4_format::encoding::{DType, Encoding, Offset, QuantizedBytes, ZeroType, decode_row};
use gemma4_kernels::{
    AddNorm, Arch, Embed, Epilogue, Kernel, LinearFew, Order, Output, Pack, Packed,
};

use crate::case::{Case, Outcome};
use crate::device::{Buffer, Gpu, Value};
use crate::numbers::{Random, bytes_of, distance, from_bf16};

/// A random stored matrix.
pub(crate) struct Stored {
    encoding: Encoding,
    k: usize,
    codes: Vec<u8>,
    high: Vec<u8>,
    scales: Vec<u8>,
    offsets: Vec<u8>,
}

impl Stored {
    pub(crate) fn random(encoding: Encoding, n: usize, k: usize, random: &mut Random) -> Self {
        let mut stored =
            Self { encoding, k, codes: vec![], high: vec![], scales: vec![], offsets: vec![] };
        let Encoding::Quantized { bits, group, scale, offset } = encoding else {
            stored.codes = bytes_of(DType::BF16, &random.normals(n * k));
            return stored;
        };
        let mut bytes = |count: usize| (0..count).map(|_| random.next() as u8).collect::<Vec<_>>();
        let groups = k / group as usize;
        stored.codes = bytes(n * if bits == 8 { k } else { k.div_ceil(2) });
        stored.high = bytes(n * (k * usize::from(bits.saturating_sub(4))).div_ceil(8));
        if bits == 8 {
            stored.high.clear();
        }
        let scales: Vec<f32> = (0..n * groups).map(|_| 0.01 + 0.02 * random.uniform()).collect();
        stored.scales = bytes_of(scale, &scales);
        let middle = f32::from(1u16 << (bits - 1));
        stored.offsets = match offset {
            Offset::Symmetric => vec![],
            Offset::Zero(ZeroType::Nibble) => {
                (0..n * groups.div_ceil(2)).map(|_| random.next() as u8).collect()
            }
            Offset::Zero(ZeroType::U8) => (0..n * groups).map(|_| random.next() as u8).collect(),
            Offset::Zero(zero) => {
                let dtype = if zero == ZeroType::F16 { DType::F16 } else { DType::BF16 };
                let zeros: Vec<f32> =
                    (0..n * groups).map(|_| middle + 3.0 * random.normal()).collect();
                bytes_of(dtype, &zeros)
            }
            Offset::Minimum(dtype) => {
                let minimums: Vec<f32> =
                    (0..n * groups).map(|_| -0.01 * middle * random.uniform()).collect();
                bytes_of(dtype, &minimums)
            }
        };
        stored
    }

    pub(crate) fn row(&self, row: usize) -> Vec<f32> {
        let k = self.k;
        if let Encoding::Dense(_) = self.encoding {
            let pairs = self.codes[row * k * 2..(row + 1) * k * 2].chunks_exact(2);
            return pairs.map(|b| from_bf16(u16::from_le_bytes([b[0], b[1]]))).collect();
        }
        let mut out = vec![0.0; k];
        let bytes = QuantizedBytes {
            codes: &self.codes,
            codes_high: &self.high,
            scales: &self.scales,
            offsets: &self.offsets,
        };
        decode_row(self.encoding, bytes, row, &mut out);
        out
    }

    fn upload(&self, gpu: &Gpu) -> [Value; 4] {
        [&self.codes, &self.high, &self.scales, &self.offsets]
            .map(|bytes| Value::At(gpu.upload(bytes).at))
    }
}

fn quantized(bits: u8, group: u32, scale: DType, offset: Offset) -> Encoding {
    Encoding::Quantized { bits, group, scale, offset }
}

pub(crate) fn encodings(k: u32) -> Vec<(&'static str, Encoding)> {
    use DType::{BF16, F16, F32};
    vec![
        ("int4 g32 nibble", quantized(4, 32, BF16, Offset::Zero(ZeroType::Nibble))),
        ("int4 g64 nibble", quantized(4, 64, BF16, Offset::Zero(ZeroType::Nibble))),
        ("int4 g128 nibble", quantized(4, 128, F32, Offset::Zero(ZeroType::Nibble))),
        ("int4 g32 u8", quantized(4, 32, BF16, Offset::Zero(ZeroType::U8))),
        ("int4 g32 bf16", quantized(4, 32, BF16, Offset::Zero(ZeroType::BF16))),
        ("int4 g64 f16", quantized(4, 64, F16, Offset::Zero(ZeroType::F16))),
        ("Q4_0", quantized(4, 32, F16, Offset::Symmetric)),
        ("Q4_1", quantized(4, 32, F16, Offset::Minimum(F16))),
        ("Q8_0", quantized(8, 32, F16, Offset::Symmetric)),
        ("gguf Q5_1", quantized(5, 32, F16, Offset::Minimum(F16))),
        ("gguf Q4_K", quantized(4, 32, F32, Offset::Minimum(F32))),
        ("gguf Q5_K", quantized(5, 32, F32, Offset::Minimum(F32))),
        ("gguf Q6_K", quantized(6, 16, F32, Offset::Symmetric)),
        ("gguf g16 minimum", quantized(6, 16, BF16, Offset::Minimum(BF16))),
        ("int5 g32", quantized(5, 32, BF16, Offset::Zero(ZeroType::U8))),
        ("int6 g64", quantized(6, 64, BF16, Offset::Symmetric)),
        ("int8 rows", quantized(8, k, BF16, Offset::Symmetric)),
        ("int8 rows zero", quantized(8, k, F32, Offset::Zero(ZeroType::U8))),
        ("bf16", Encoding::Dense(DType::BF16)),
    ]
}

/// Packs one stored matrix, or two in turns, on the device.
pub(crate) fn pack(
    gpu: &Gpu,
    case: &Pack,
    function: crate::device::Function,
    sources: [&Stored; 2],
) -> Buffer {
    let packed = gpu.poisoned(case.packed.bytes() as usize);
    pack_into(gpu, case, function, sources, (packed, 0));
    packed
}

/// The same into tiles of a packed weight, from one of them on.
pub(crate) fn pack_into(
    gpu: &Gpu,
    case: &Pack,
    function: crate::device::Function,
    sources: [&Stored; 2],
    (packed, first_tile): (Buffer, u32),
) {
    let mut values = Vec::new();
    for source in sources {
        values.extend(source.upload(gpu));
    }
    values.extend([Value::At(packed.at), Value::U32(first_tile), Value::U32(case.tiles())]);
    values.extend([Value::U32(case.rows), Value::U32(case.packed.n)]);
    gpu.launch(&case.kernel().unwrap(), function, 1, &values);
}

/// Matrices of one product that are stored in two ways, one below the other (`Rows`) or in turns.
#[derive(Clone, Copy)]
pub(crate) struct Mixed {
    pub(crate) packed: Packed,
    parts: [Pack; 2],
}

impl Mixed {
    /// Each of `rows` rows, a multiple of 16.
    pub(crate) fn new(encodings: [Encoding; 2], rows: u32, k: u32, turns: bool) -> Self {
        let packed = Packed::common(&encodings, 2 * rows, k).unwrap();
        let orders = match turns {
            true => [Order::FirstTurns, Order::SecondTurns],
            false => [Order::Rows; 2],
        };
        let part = |i: usize| Pack { source: encodings[i], packed, order: orders[i], rows };
        Self { packed, parts: [part(0), part(1)] }
    }

    pub(crate) fn kernels(&self) -> Vec<Kernel> {
        self.parts.iter().map(|part| part.kernel().unwrap()).collect()
    }

    /// Random matrices and both of them packed; `functions` are those of [`Self::kernels`].
    pub(crate) fn pack(
        &self,
        gpu: &Gpu,
        functions: &[crate::device::Function],
        random: &mut Random,
    ) -> ([Stored; 2], Buffer) {
        let buffer = gpu.poisoned(self.packed.bytes() as usize);
        let matrices = [0, 1].map(|i: usize| {
            let part = &self.parts[i];
            let (rows, k) = (part.rows as usize, self.packed.k as usize);
            let stored = Stored::random(part.source, rows, k, random);
            let below = part.order == Order::Rows && i == 1;
            let first_tile = if below { part.tiles() } else { 0 };
            pack_into(gpu, part, functions[i], [&stored, &stored], (buffer, first_tile));
            stored
        });
        (matrices, buffer)
    }
}

fn mixed(name: &str, encodings: [Encoding; 2], turns: bool, t: u32, arch: Arch) -> Case {
    let (rows, k) = (112u32, 640u32);
    let mixed = Mixed::new(encodings, rows, k, turns);
    let linear = LinearFew::choose(mixed.packed, t, Epilogue::Partial, false, arch, 132).unwrap();
    let kernel = linear.kernel().unwrap();
    let mut kernels = mixed.kernels();
    kernels.push(kernel.clone());
    let name = format!("linear gguf mixed {name} turns={turns} T={t}");
    Case::new(name, arch, kernels, move |gpu, functions| {
        let mut random = Random(u64::from(t));
        let (matrices, packed) = mixed.pack(gpu, functions, &mut random);
        let x = random.activations(t as usize, k as usize);
        let n = 2 * rows as usize;
        let y = gpu.poisoned((linear.splits * t) as usize * n * 4);
        let values = [
            Value::At(packed.at),
            Value::At(gpu.upload(&x).at),
            Value::At(y.at),
            Value::U32(t),
            Value::F32(0.0),
        ];
        gpu.launch(&kernel, functions[2], t, &values);
        let parts: Vec<f32> = gpu.download(y);
        let (mut got, mut wanted) = (Vec::new(), Vec::new());
        for row in 0..n {
            let (matrix, at) = match turns {
                true => (row / 8 % 2, row / 16 * 8 + row % 8),
                false => (row / rows as usize, row % rows as usize),
            };
            let weights = matrices[matrix].row(at);
            for r in 0..t as usize {
                let sums =
                    (0..linear.splits as usize).map(|s| parts[(s * t as usize + r) * n + row]);
                got.push(sums.sum());
                let x = &x[r * k as usize..(r + 1) * k as usize];
                let products = weights.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x));
                wanted.push(products.sum());
            }
        }
        Outcome { error: distance(&got, &wanted), limit: 1e-6 }
    })
}

fn product(name: &str, encoding: Encoding, n: u32, k: u32, rows: u32, t: u32, arch: Arch) -> Case {
    let packed = Packed::new(encoding, n, k).unwrap();
    let pack_case = Pack { source: encoding, packed, order: Order::Rows, rows: n };
    let linear = LinearFew::choose(packed, rows, Epilogue::Partial, false, arch, 132).unwrap();
    let kernels = vec![pack_case.kernel().unwrap(), linear.kernel().unwrap()];
    let kernel = kernels[1].clone();
    let name = format!("linear {name} [{n}, {k}] T={t}/{rows} s{}", linear.splits);
    Case::new(name, arch, kernels, move |gpu, functions| {
        let mut random = Random(u64::from(n * 31 + k + rows));
        let stored = Stored::random(encoding, n as usize, k as usize, &mut random);
        let x = random.activations(t as usize, k as usize);
        let packed = pack(gpu, &pack_case, functions[0], [&stored, &stored]);
        let x_at = gpu.upload(&x);
        let y = gpu.poisoned((linear.splits * t * n * 4) as usize);
        let values = [
            Value::At(packed.at),
            Value::At(x_at.at),
            Value::At(y.at),
            Value::U32(t),
            Value::F32(0.0),
        ];
        gpu.launch(&kernel, functions[1], t, &values);
        let parts: Vec<f32> = gpu.download(y);
        let size = (t * n) as usize;
        let step = (n as usize / 200).max(1);
        let (mut got, mut wanted) = (Vec::new(), Vec::new());
        for row in (0..n as usize).step_by(step) {
            let weights = stored.row(row);
            for r in 0..t as usize {
                let at = r * n as usize + row;
                got.push((0..linear.splits as usize).map(|s| parts[s * size + at]).sum());
                let x = &x[r * k as usize..(r + 1) * k as usize];
                let products = weights.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x));
                wanted.push(products.sum());
            }
        }
        let limit = if matches!(encoding, Encoding::Dense(_)) { 2e-5 } else { 1e-6 };
        Outcome { error: distance(&got, &wanted), limit }
    })
}

fn geglu(rows: u32, arch: Arch) -> Case {
    let encoding = encodings(256)[0].1;
    let (width, k) = (152u32, 256u32);
    let packed = Packed::new(encoding, 2 * width, k).unwrap();
    let pack_case = Pack { source: encoding, packed, order: Order::Turns, rows: width };
    let linear = LinearFew::choose(packed, rows, Epilogue::Geglu, false, arch, 132).unwrap();
    let kernels = vec![pack_case.kernel().unwrap(), linear.kernel().unwrap()];
    let kernel = kernels[1].clone();
    Case::new(format!("linear geglu T={rows}"), arch, kernels, move |gpu, functions| {
        let mut random = Random(5);
        let matrices =
            [0, 1].map(|_| Stored::random(encoding, width as usize, k as usize, &mut random));
        let x = random.normals((rows * k) as usize);
        let packed = pack(gpu, &pack_case, functions[0], [&matrices[0], &matrices[1]]);
        let x_at = gpu.upload(&x);
        let y = gpu.poisoned((rows * width * 4) as usize);
        let values = [
            Value::At(packed.at),
            Value::At(x_at.at),
            Value::At(y.at),
            Value::U32(rows),
            Value::F32(0.0),
        ];
        gpu.launch(&kernel, functions[1], rows, &values);
        let got: Vec<f32> = gpu.download(y);
        let mut wanted = Vec::new();
        for r in 0..rows as usize {
            let x = &x[r * k as usize..(r + 1) * k as usize];
            for column in 0..width as usize {
                let [gate, up] = [0, 1].map(|i: usize| {
                    let row = matrices[i].row(column);
                    row.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum::<f64>()
                });
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044715 * gate.powi(3));
                wanted.push(0.5 * gate * (1.0 + inner.tanh()) * up);
            }
        }
        Outcome { error: distance(&got, &wanted), limit: 2e-6 }
    })
}

/// A norm that leaves its result split, and the product that reads it.
fn chain(name: &str, encoding: Encoding, k: u32, rows: u32, t: u32, arch: Arch) -> Case {
    let n = 100u32;
    let packed = Packed::new(encoding, n, k).unwrap();
    let pack_case = Pack { source: encoding, packed, order: Order::Rows, rows: n };
    let linear = LinearFew::choose(packed, rows, Epilogue::Partial, true, arch, 132).unwrap();
    let next = Some(Output::Split(linear.split()));
    let norm = AddNorm { h: k, splits: 0, scalar: false, next, weight: DType::F32, cluster: 1 };
    let kernels =
        vec![pack_case.kernel().unwrap(), norm.kernel().unwrap(), linear.kernel().unwrap()];
    let (norm, product) = (kernels[1].clone(), kernels[2].clone());
    let name = format!("norm and linear {name} [{n}, {k}] T={t}/{rows}");
    Case::new(name, arch, kernels, move |gpu, functions| {
        let mut random = Random(u64::from(k + rows));
        let stored = Stored::random(encoding, n as usize, k as usize, &mut random);
        let x = random.activations(t as usize, k as usize);
        let packed = pack(gpu, &pack_case, functions[0], [&stored, &stored]);
        let split = gpu.poisoned(linear.split().bytes() as usize);
        let y = gpu.poisoned((linear.splits * t * n * 4) as usize);
        let none = Value::At(0);
        let ones = gpu.upload(&vec![1.0f32; k as usize]);
        let values = [
            none,
            none,
            none,
            Value::At(gpu.upload(&x).at),
            Value::At(ones.at),
            Value::At(split.at),
            Value::U32(t),
            Value::F32(1e-6),
        ];
        gpu.launch(&norm, functions[1], t, &values);
        let values = [
            Value::At(packed.at),
            Value::At(split.at),
            Value::At(y.at),
            Value::U32(t),
            Value::F32(0.0),
        ];
        gpu.launch(&product, functions[2], t, &values);
        let parts: Vec<f32> = gpu.download(y);
        let size = (t * n) as usize;
        let got: Vec<f32> = (0..size)
            .map(|i| (0..linear.splits as usize).map(|s| parts[s * size + i]).sum())
            .collect();
        let mut wanted = Vec::new();
        for r in 0..t as usize {
            let x: Vec<f64> =
                x[r * k as usize..][..k as usize].iter().map(|x| f64::from(*x)).collect();
            let inverse =
                (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + 1e-6).sqrt().recip();
            for row in 0..n as usize {
                let weights = stored.row(row);
                wanted.push(weights.iter().zip(&x).map(|(w, x)| f64::from(*w) * x * inverse).sum());
            }
        }
        let limit = if matches!(encoding, Encoding::Dense(_)) { 2e-5 } else { 1e-6 };
        Outcome { error: distance(&got, &wanted), limit }
    })
}

fn embed(name: &str, encoding: Encoding, arch: Arch) -> Case {
    let (n, k) = (100u32, 256u32);
    let packed = Packed::new(encoding, n, k).unwrap();
    let pack_case = Pack { source: encoding, packed, order: Order::Rows, rows: n };
    let kernel = Embed { weight: packed }.kernel();
    let kernels = vec![pack_case.kernel().unwrap(), kernel.clone()];
    Case::new(format!("embed {name}"), arch, kernels, move |gpu, functions| {
        let stored = Stored::random(encoding, n as usize, k as usize, &mut Random(9));
        let packed = pack(gpu, &pack_case, functions[0], [&stored, &stored]);
        let ids = [3u32, 99, 0, 17, 8];
        let table = gpu.upload(&[0u64, gpu.upload(&ids).at]);
        let x = gpu.poisoned(ids.len() * k as usize * 4);
        let values = [
            Value::At(packed.at),
            Value::At(table.at),
            Value::U32(1),
            Value::At(x.at),
            Value::F32(16.0),
        ];
        gpu.launch(&kernel, functions[1], ids.len() as u32, &values);
        let got: Vec<f32> = gpu.download(x);
        let wanted: Vec<f64> = ids
            .iter()
            .flat_map(|id| stored.row(*id as usize))
            .map(|x| f64::from(x) * 16.0)
            .collect();
        Outcome { error: distance(&got, &wanted), limit: 1e-7 }
    })
}

pub(crate) fn cases(arch: Arch) -> Vec<Case> {
    let mut cases = Vec::new();
    for (name, encoding) in encodings(640) {
        cases.push(product(name, encoding, 100, 640, 1, 1, arch));
        cases.push(product(name, encoding, 100, 640, 4, 3, arch));
    }
    for rows in [1, 2, 4, 8] {
        let int4 = encodings(5376)[0].1;
        let int8 = quantized(8, 5376, DType::BF16, Offset::Symmetric);
        cases.push(product("int4 g32 nibble", int4, 5376, 21504, rows, rows, arch));
        cases.push(product("int4 g32 nibble", int4, 16384, 5376, rows, rows, arch));
        cases.push(product("int8 rows", int8, 8192, 5376, rows, rows, arch));
        cases.push(product("bf16", Encoding::Dense(DType::BF16), 512, 5376, rows, rows, arch));
        cases.push(geglu(rows, arch));
        let q6_k = quantized(6, 16, DType::F32, Offset::Symmetric);
        cases.push(product("gguf Q6_K", q6_k, 8192, 5376, rows, rows, arch));
        cases.push(product("gguf Q6_K", q6_k, 1344, 21504, rows, rows, arch));
        let q4_k = quantized(4, 32, DType::F32, Offset::Minimum(DType::F32));
        cases.push(mixed("Q4_K, Q6_K", [q4_k, q6_k], false, rows, arch));
        cases.push(mixed("Q4_K, Q6_K", [q4_k, q6_k], true, rows, arch));
        let int8 = quantized(8, 640, DType::F32, Offset::Symmetric);
        let int4 = encodings(640)[0].1;
        cases.push(mixed("int4, int8 rows", [int4, int8], false, rows, arch));
    }
    for (name, encoding) in encodings(640) {
        cases.push(chain(name, encoding, 640, 1, 1, arch));
        cases.push(chain(name, encoding, 640, 8, 5, arch));
    }
    cases.push(chain("int4 g32 nibble", encodings(96)[0].1, 96, 2, 2, arch));
    for (name, encoding) in encodings(256) {
        cases.push(embed(name, encoding, arch));
    }
    cases
}
