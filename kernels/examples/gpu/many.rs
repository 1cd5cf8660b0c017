//! `to_panels`, `linear_many`, `attention_prefill` against float64.

use gemma4_format::DType;
use gemma4_kernels::{
    AddNorm, Arch, AttentionPrefill, Heads, Kernel, Keys, LinearMany, ManyOutput, Order, Output,
    Pack, Packed, ToPanels, panel_elements, panel_index,
};
use half::bf16;

use crate::case::{Case, Outcome};
use crate::device::{Buffer, Gpu, Value};
use crate::layer::{state_at, whole_key};
use crate::linear::{Mixed, Stored, encodings, pack};
use crate::numbers::{Random, distance, from_bf16, to_bf16};

/// Room of panels for `rows` rows, with some to spare.
pub(crate) fn room(rows: u32) -> u32 {
    rows.next_multiple_of(8) + 16
}

fn round(x: f32) -> f32 {
    bf16::from_f32(x).to_f32()
}

/// Rows as panels; what no row covers is NaN.
pub(crate) fn panels(x: &[f32], columns: u32, room: u32) -> Vec<u16> {
    let mut out = vec![0xffff; panel_elements(room, columns) as usize];
    for (row, x) in (0..).zip(x.chunks_exact(columns as usize)) {
        for column in 0..columns.next_multiple_of(64) {
            let value = x.get(column as usize).copied().unwrap_or(0.0);
            out[panel_index(row, column, room) as usize] = bf16::from_f32(value).to_bits();
        }
    }
    out
}

fn to_panels(k: u32, rows: u32, arch: Arch) -> Case {
    let kernel = ToPanels { k }.kernel().unwrap();
    let name = format!("many rows to panels {k} T={rows}");
    Case::new(name, arch, vec![kernel.clone()], move |gpu, functions| {
        let x = Random(3).normals((rows * k) as usize);
        let out = gpu.poisoned(panel_elements(room(rows), k) as usize * 2);
        let values = [
            Value::At(gpu.upload(&x).at),
            Value::At(out.at),
            Value::U32(rows),
            Value::U32(room(rows)),
        ];
        gpu.launch(&kernel, functions[0], rows, &values);
        let wrong = gpu
            .download::<u16>(out)
            .iter()
            .zip(panels(&x, k, room(rows)))
            .filter(|(got, wanted)| **got != *wanted)
            .count();
        Outcome { error: wrong as f64, limit: 0.0 }
    })
}

/// The norm that writes panels gives what the one that writes rows gives, rounded.
fn norm_panels(h: u32, rows: u32, arch: Arch) -> Case {
    let kernels = [Output::Floats, Output::Panels { room: room(rows) }].map(|next| {
        let next = Some(next);
        AddNorm { h, splits: 2, scalar: true, next, weight: DType::BF16, cluster: 1 }
            .kernel()
            .unwrap()
    });
    let name = format!("many norms to panels {h} T={rows}");
    Case::new(name, arch, kernels.to_vec(), move |gpu, functions| {
        let mut random = Random(4);
        let count = (rows * h) as usize;
        let sums = gpu.upload(&random.normals(2 * count));
        let [post, scalar, next] =
            [h, 1, h].map(|n| gpu.upload(&to_bf16(&random.normals(n as usize))));
        let x = random.normals(count);
        let out = gpu.poisoned(count * 4);
        let out_panels = gpu.poisoned(panel_elements(room(rows), h) as usize * 2);
        for (i, y) in [out, out_panels].into_iter().enumerate() {
            let mut values: Vec<Value> =
                [sums, post, scalar, gpu.upload(&x), next, y].map(|b| Value::At(b.at)).to_vec();
            values.extend([Value::U32(rows), Value::F32(1e-6)]);
            gpu.launch(&kernels[i], functions[i], rows, &values);
        }
        let wanted = panels(&gpu.download::<f32>(out), h, room(rows));
        let got = gpu.download::<u16>(out_panels);
        let wrong = got.iter().zip(wanted).filter(|(got, wanted)| **got != *wanted).count();
        Outcome { error: wrong as f64, limit: 0.0 }
    })
}

/// Launches a product with fresh scratch. Returns `y`.
pub(crate) fn launch(
    gpu: &Gpu,
    linear: &LinearMany,
    kernel: &Kernel,
    function: crate::device::Function,
    (x, weight, rows): (Buffer, Buffer, u32),
) -> Buffer {
    let n = linear.weight.n;
    let bytes = match linear.output {
        ManyOutput::F32 => u64::from(rows * n) * 4,
        ManyOutput::Bf16 => u64::from(rows * n) * 2,
        ManyOutput::Geglu => panel_elements(room(rows), n / 2) * 2,
    };
    let y = gpu.poisoned(bytes as usize);
    let ready = gpu.upload(&vec![0u32; linear.ready_bytes(gpu.sms) as usize / 4]);
    let mut values = vec![Value::At(y.at), Value::At(x.at), Value::At(weight.at)];
    if linear.hopper {
        let partials = gpu.poisoned(linear.partial_bytes(gpu.sms) as usize);
        values.extend([Value::At(partials.at), Value::At(ready.at)]);
    }
    values.extend([Value::U32(rows), Value::U32(room(rows))]);
    gpu.launch(kernel, function, rows, &values);
    // A second launch finds the scratch as the first one left it.
    gpu.launch(kernel, function, rows, &values);
    assert!(gpu.download::<u32>(ready).iter().all(|word| *word == 0));
    y
}

fn dot(weights: &[f32], x: &[f32]) -> f64 {
    weights.iter().zip(x).map(|(w, x)| f64::from(round(*w)) * f64::from(round(*x))).sum()
}

/// A product of `rows` rows, of which some outputs are compared.
fn product(
    (name, encoding): (&str, gemma4_format::Encoding),
    n: u32,
    k: u32,
    rows: u32,
    output: ManyOutput,
    arch: Arch,
) -> Case {
    let packed = Packed::new(encoding, n, k).unwrap();
    let (order, source_rows) =
        if output == ManyOutput::Geglu { (Order::Turns, n / 2) } else { (Order::Rows, n) };
    let pack_case = Pack { source: encoding, packed, order, rows: source_rows };
    let linear = LinearMany::choose(packed, rows, output, arch);
    let kernels = vec![pack_case.kernel().unwrap(), linear.kernel().unwrap()];
    let kernel = kernels[1].clone();
    let name = format!("many {name} [{n}, {k}] T={rows}/{} {output:?}", linear.tokens);
    Case::new(name, arch, kernels, move |gpu, functions| {
        let mut random = Random(u64::from(n * 31 + k + rows));
        let sources =
            [0, 1].map(|_| Stored::random(encoding, source_rows as usize, k as usize, &mut random));
        let second = if output == ManyOutput::Geglu { &sources[1] } else { &sources[0] };
        let packed = pack(gpu, &pack_case, functions[0], [&sources[0], second]);
        let x = match output {
            ManyOutput::Geglu => {
                random.normals((rows * k) as usize).iter().map(|x| x * 0.1).collect()
            }
            _ => random.activations(rows as usize, k as usize),
        };
        let x_at = gpu.upload(&panels(&x, k, room(rows)));
        let y = launch(gpu, &linear, &kernel, functions[1], (x_at, packed, rows));
        let bytes: Vec<u8> = gpu.download(y);
        let read = |at: u64| {
            let at = at as usize;
            match output {
                ManyOutput::F32 => f32::from_le_bytes([0, 1, 2, 3].map(|i| bytes[at * 4 + i])),
                _ => from_bf16(u16::from_le_bytes([0, 1].map(|i| bytes[at * 2 + i]))),
            }
        };
        let width = if output == ManyOutput::Geglu { n / 2 } else { n };
        let place = |row, column| match output {
            ManyOutput::Geglu => panel_index(row, column, room(rows)),
            _ => u64::from(row) * u64::from(width) + u64::from(column),
        };
        let unwritten = (0..rows)
            .flat_map(|row| (0..width).map(move |column| (row, column)))
            .any(|(row, column)| read(place(row, column)).is_nan());
        let (mut got, mut wanted) = (vec![], vec![]);
        let row_step = (rows as usize / 24).max(1);
        for column in (0..width).step_by((width as usize / 40).max(1)).chain([width - 1]) {
            let weights = sources[0].row(column as usize);
            let ups = second.row(column as usize);
            for row in (0..rows).step_by(row_step).chain([rows - 1]) {
                let x = &x[(row * k) as usize..((row + 1) * k) as usize];
                got.push(read(place(row, column)));
                let sum = dot(&weights, x);
                wanted.push(if output == ManyOutput::Geglu {
                    let inner =
                        (2.0 / std::f64::consts::PI).sqrt() * (sum + 0.044715 * sum.powi(3));
                    0.5 * sum * (1.0 + inner.tanh()) * dot(&ups, x)
                } else {
                    sum
                });
            }
        }
        let error = if unwritten { f64::INFINITY } else { distance(&got, &wanted) };
        // Tensor cores cut off the bits of a float32 sum that do not fit.
        Outcome { error, limit: if output == ManyOutput::F32 { 4e-5 } else { 3e-3 } }
    })
}

/// Rows of two matrices that are stored in different ways.
fn mixed(encodings: [gemma4_format::Encoding; 2], t: u32, arch: Arch) -> Case {
    let (rows, k) = (144u32, 640u32);
    let mixed = Mixed::new(encodings, rows, k, false);
    let linear = LinearMany::choose(mixed.packed, t, ManyOutput::F32, arch);
    let mut kernels = mixed.kernels();
    kernels.push(linear.kernel().unwrap());
    let kernel = kernels[2].clone();
    let name = format!("many gguf mixed T={t}/{}", linear.tokens);
    Case::new(name, arch, kernels, move |gpu, functions| {
        let mut random = Random(u64::from(t));
        let (matrices, packed) = mixed.pack(gpu, functions, &mut random);
        let x = random.activations(t as usize, k as usize);
        let x_at = gpu.upload(&panels(&x, k, room(t)));
        let y = launch(gpu, &linear, &kernel, functions[2], (x_at, packed, t));
        let y: Vec<f32> = gpu.download(y);
        let (mut got, mut wanted) = (vec![], vec![]);
        for column in 0..2 * rows as usize {
            let weights = matrices[column / rows as usize].row(column % rows as usize);
            for (row, x) in x.chunks_exact(k as usize).enumerate() {
                got.push(y[row * 2 * rows as usize + column]);
                wanted.push(dot(&weights, x));
            }
        }
        Outcome { error: distance(&got, &wanted), limit: 4e-5 }
    })
}

fn attention(case: AttentionPrefill, rows: u32, position: u32, ring: u32, arch: Arch) -> Case {
    let kernel = case.kernel().unwrap();
    let Heads { q_heads, kv_heads, d, keys: held, window } = case.heads;
    let name = format!(
        "prefill attention {q_heads}/{kv_heads} D={d} {held:?} W={window:?} T={rows} @{position} \
         R={ring}"
    );
    Case::new(name, arch, vec![kernel.clone()], move |gpu, functions| {
        let mut random = Random(u64::from(position) + 1);
        let (t, width) = (rows as usize, q_heads * d);
        let [q_heads, kv_heads, d, key_d] =
            [q_heads, kv_heads, d, held.columns(d)].map(|n| n as usize);
        let q: Vec<f32> = random.normals(t * q_heads * d).iter().map(|x| x * 0.2).collect();
        let filled = (position + rows).min(ring) as usize * kv_heads;
        // Slots that were never written hold NaNs.
        let [keys, values] = [key_d, d].map(|columns| {
            let mut bits = to_bf16(&random.normals(filled * columns));
            bits.resize(ring as usize * kv_heads * columns, 0x7fff);
            bits
        });
        let table = gpu.upload(&[
            gpu.upload(&state_at(position)).at,
            gpu.upload(&keys).at,
            gpu.upload(&values).at,
        ]);
        let y = gpu.poisoned(panel_elements(room(rows), width) as usize * 2);
        let arguments = [
            Value::At(gpu.upload(&q).at),
            Value::At(table.at),
            Value::U32(0),
            Value::U32(1),
            Value::U32(2),
            Value::U32(ring),
            Value::At(y.at),
            Value::U32(rows),
            Value::U32(room(rows)),
            Value::F32(1.0),
        ];
        gpu.launch(&kernel, functions[0], rows, &arguments);
        let panels: Vec<u16> = gpu.download(y);
        let (mut got, mut wanted) = (vec![], vec![]);
        let heads = if position + rows > 1000 { 5 } else { 1 };
        for row in (0..t).step_by((t / 16).max(1)).chain([t - 1]) {
            for head in (0..q_heads).step_by(heads) {
                let q = &q[(row * q_heads + head) * d..][..d];
                let now = position + row as u32;
                let first = window.map_or(0, |w| (now + 1).saturating_sub(w));
                let row_of = |p: u32| (p % ring) as usize * kv_heads + head / (q_heads / kv_heads);
                let scores: Vec<f64> = (first..=now)
                    .map(|p| {
                        let (own, shared) = (&keys[row_of(p) * key_d..], &values[row_of(p) * d..]);
                        let key = whole_key(own, shared, key_d, d);
                        let products = q.iter().zip(&key);
                        products.map(|(q, k)| f64::from(round(*q)) * f64::from(from_bf16(*k))).sum()
                    })
                    .collect();
                let largest = scores.iter().copied().fold(f64::MIN, f64::max);
                let mut out = vec![0.0; d];
                let mut total = 0.0;
                for (score, p) in scores.iter().zip(first..) {
                    let weight = (score - largest).exp();
                    total += weight;
                    for (out, v) in out.iter_mut().zip(&values[row_of(p) * d..][..d]) {
                        *out += weight * f64::from(from_bf16(*v));
                    }
                }
                for (column, out) in (0..).zip(out) {
                    let at = panel_index(row as u32, head as u32 * d as u32 + column, room(rows));
                    got.push(from_bf16(panels[at as usize]));
                    wanted.push(out / total);
                }
            }
        }
        Outcome { error: distance(&got, &wanted), limit: 4e-3 }
    })
}

fn products(arch: Arch) -> Vec<Case> {
    let mut cases = Vec::new();
    for encoding in encodings(640) {
        cases.push(product(encoding, 264, 640, 137, ManyOutput::F32, arch));
    }
    for (name, encoding) in encodings(256).into_iter().filter(|(name, _)| name.contains("gguf")) {
        cases.push(product((name, encoding), 512, 256, 70, ManyOutput::Geglu, arch));
        cases.push(product((name, encoding), 512, 2048, 300, ManyOutput::F32, arch));
    }
    let minimum = gemma4_format::Offset::Minimum(DType::F32);
    let gguf = |bits, group, offset| gemma4_format::Encoding::Quantized {
        bits,
        group,
        scale: DType::F32,
        offset,
    };
    let mixed_types = [gguf(4, 32, minimum), gguf(6, 16, gemma4_format::Offset::Symmetric)];
    cases.extend([9, 137].map(|t| mixed(mixed_types, t, arch)));
    let nibble = encodings(5376)[0];
    for rows in [1, 2, 7, 8, 9, 16, 31, 64, 65, 127, 128, 129, 255, 257, 417, 512] {
        cases.push(product(nibble, 128, 256, rows, ManyOutput::F32, arch));
    }
    for (n, k) in [(8, 32), (128, 96), (512, 192), (2048, 768), (256, 512)] {
        cases.push(product(nibble, n, k, 70, ManyOutput::F32, arch));
        cases.push(product(nibble, n, k, 70, ManyOutput::Bf16, arch));
    }
    for (n, k, rows) in [(416, 256, 33), (1536, 256, 257), (384, 128, 9)] {
        cases.push(product(nibble, n, k, rows, ManyOutput::Geglu, arch));
    }
    for (n, k, rows) in [(16384, 5376, 417), (5376, 8192, 512), (5376, 21504, 300)] {
        cases.push(product(nibble, n, k, rows, ManyOutput::F32, arch));
    }
    cases.push(product(nibble, 43008, 5376, 417, ManyOutput::Geglu, arch));
    cases.push(product(nibble, 5376, 5376, 2048, ManyOutput::F32, arch));
    cases
}

pub(crate) fn cases(arch: Arch) -> Vec<Case> {
    let mut cases = Vec::new();
    for (k, rows) in [(32, 3), (192, 65), (5376, 417)] {
        cases.push(to_panels(k, rows, arch));
        cases.push(norm_panels(k, rows, arch));
    }
    cases.extend(products(arch));
    let held = |q_heads, kv_heads, d, keys, window| {
        AttentionPrefill::choose(Heads { q_heads, kv_heads, d, keys, window }, arch)
    };
    let heads = |q, kv, d, window| held(q, kv, d, Keys::Whole, window);
    let rotated = |q, kv, d, n| held(q, kv, d, Keys::Rotated(n), None);
    for rows in [1, 2, 7, 31, 64, 65, 129, 257] {
        for position in [0, 5, 31, 32, 33, 100] {
            let window = heads(8, 4, 32, Some(32));
            cases.push(attention(window, rows, position, 32 + rows - 1, arch));
        }
        cases.push(attention(heads(4, 1, 64, None), rows, 300, 1024, arch));
        cases.push(attention(heads(16, 1, 128, None), rows, 7, 512, arch));
        cases.push(attention(rotated(4, 1, 128, 16), rows, 300, 1024, arch));
    }
    for (rows, position) in [(1, 0), (65, 0), (512, 0), (130, 1000), (417, 3000)] {
        cases.push(attention(heads(32, 16, 256, Some(1024)), rows, position, 1535, arch));
        cases.push(attention(heads(32, 4, 512, None), rows, position, 4096, arch));
        cases.push(attention(rotated(32, 4, 512, 64), rows, position, 4096, arch));
    }
    cases
}
