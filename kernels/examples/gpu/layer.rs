//! `add_norm`, `rope`, `attention_few`, `geglu` against float64.

use gemma4_format::DType;
use gemma4_format::plan::state;
use gemma4_kernels::{AddNorm, Arch, AttentionFew, Geglu, Heads, Keys, Output, Rope};

use crate::case::{Case, Outcome};
use crate::device::Value;
use crate::numbers::{Random, bytes_of, distance, from_bf16, to_bf16};

const EPS: f64 = 1e-6;

fn rms(x: &[f64]) -> f64 {
    1.0 / (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + EPS).sqrt()
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| f64::from(*x)).collect()
}

pub(crate) fn state_at(position: u32) -> Vec<u32> {
    let mut words = vec![0u32; state::WORDS];
    words[state::POSITION] = position;
    words
}

fn add_norm(
    h: u32,
    splits: u32,
    (rows, cluster): (u32, u32),
    scalar: bool,
    weight: DType,
    arch: Arch,
) -> Case {
    let kernel = AddNorm { h, splits, scalar, next: Some(Output::Floats), weight, cluster }
        .kernel()
        .unwrap();
    let name = format!("add_norm {h} s{splits} T={rows} c{cluster} {}", weight.name());
    Case::new(name, arch, vec![kernel.clone()], move |gpu, functions| {
        let mut random = Random(u64::from(h + splits));
        let (n, t) = (h as usize, rows as usize);
        let sums = random.activations(splits as usize * t, n);
        let x = random.activations(t, n);
        let [post, next] = [0, 1].map(|_| bytes_of(weight, &random.normals(n)));
        let factor = bytes_of(weight, &[0.75]);
        let x_at = gpu.upload(&x);
        let y_at = gpu.poisoned(t * n * 4);
        let values = [
            Value::At(gpu.upload(&sums).at),
            Value::At(gpu.upload(&post).at),
            Value::At(gpu.upload(&factor).at),
            Value::At(x_at.at),
            Value::At(gpu.upload(&next).at),
            Value::At(y_at.at),
            Value::U32(rows),
            Value::F32(EPS as f32),
        ];
        gpu.launch(&kernel, functions[0], rows, &values);
        let (mut wanted_x, mut wanted_y) = (vec![], vec![]);
        for row in 0..t {
            let mut x = wide(&x[row * n..(row + 1) * n]);
            if splits > 0 {
                let a: Vec<f64> = (0..n)
                    .map(|i| {
                        (0..splits as usize).map(|s| f64::from(sums[(s * t + row) * n + i])).sum()
                    })
                    .collect();
                let inverse = rms(&a);
                let factor = if scalar { 0.75 } else { 1.0 };
                for (i, x) in x.iter_mut().enumerate() {
                    *x = (*x + a[i] * inverse * f64::from(weight.read(&post, i))) * factor;
                }
            }
            let inverse = rms(&x);
            wanted_y.extend(
                x.iter().enumerate().map(|(i, x)| x * inverse * f64::from(weight.read(&next, i))),
            );
            wanted_x.extend(x);
        }
        let got_x: Vec<f32> = gpu.download(x_at);
        let got_y: Vec<f32> = gpu.download(y_at);
        let error = distance(&got_x, &wanted_x).max(distance(&got_y, &wanted_y));
        Outcome { error, limit: 1e-6 }
    })
}

fn rope(rope: Rope, rows: u32, position: u32, ring: u32, arch: Arch) -> Case {
    let kernel = rope.kernel().unwrap();
    let name =
        format!("rope {}x{} D={} {:?} @{position}", rope.q_heads, rope.kv_heads, rope.d, rope.keys);
    Case::new(name, arch, vec![kernel.clone()], move |gpu, functions| {
        let mut random = Random(u64::from(position) + 1);
        let (d, t) = (rope.d as usize, rows as usize);
        let (q_heads, kv_heads) = (rope.q_heads as usize, rope.kv_heads as usize);
        let heads = q_heads + kv_heads * if rope.shared_kv { 1 } else { 2 };
        let splits = rope.splits as usize;
        let qkv = random.normals(splits * t * heads * d);
        let [q_weight, k_weight] = [0, 1].map(|_| bytes_of(rope.weight, &random.normals(d)));
        let key_d = rope.keys.columns(rope.d) as usize;
        let sizes = [kv_heads * key_d, kv_heads * d];
        let [keys, values] = sizes.map(|size| gpu.upload(&vec![0u16; ring as usize * size]));
        let table = gpu.upload(&[gpu.upload(&state_at(position)).at, keys.at, values.at]);
        let q = gpu.poisoned(t * q_heads * d * 4);
        let arguments = [
            Value::At(gpu.upload(&qkv).at),
            Value::At(gpu.upload(&q_weight).at),
            Value::At(gpu.upload(&k_weight).at),
            Value::At(q.at),
            Value::At(table.at),
            Value::U32(0),
            Value::U32(1),
            Value::U32(2),
            Value::U32(ring),
            Value::U32(rows),
            Value::F32(EPS as f32),
        ];
        gpu.launch(&kernel, functions[0], rows, &arguments);
        let raw = |row: usize, head: usize| -> Vec<f64> {
            let at = |s: usize, i: usize| ((s * t + row) * heads + head) * d + i;
            (0..d).map(|i| (0..splits).map(|s| f64::from(qkv[at(s, i)])).sum()).collect()
        };
        let turned = |row: usize, head: usize, weight: &[u8]| -> Vec<f64> {
            let x = raw(row, head);
            let inverse = rms(&x);
            let x: Vec<f64> =
                (0..d).map(|i| x[i] * inverse * f64::from(rope.weight.read(weight, i))).collect();
            let mut y = x.clone();
            for (i, frequency) in rope.frequencies.iter().enumerate() {
                let angle = f64::from((position + row as u32) as f32 * frequency);
                let (a, b) = (x[i], x[i + d / 2]);
                y[i] = a * angle.cos() - b * angle.sin();
                y[i + d / 2] = b * angle.cos() + a * angle.sin();
            }
            y
        };
        // What q is multiplied with instead of the k that are left out.
        let k_factor = |i: usize| match i % (d / 2) < key_d / 2 {
            true => 1.0,
            false => f64::from(rope.weight.read(&k_weight, i)),
        };
        let mut wanted_q = vec![];
        let [mut wanted_keys, mut wanted_values] = sizes.map(|n| vec![0.0; ring as usize * n]);
        for row in 0..t {
            for head in 0..q_heads {
                let q = turned(row, head, &q_weight);
                wanted_q.extend(q.iter().enumerate().map(|(i, q)| q * k_factor(i)));
            }
            let slot = (position as usize + row) % ring as usize * kv_heads;
            for head in 0..kv_heads {
                let k = turned(row, q_heads + head, &k_weight);
                let halves = [0, d / 2].map(|from| &k[from..from + key_d / 2]).concat();
                let at = (slot + head) * key_d;
                wanted_keys[at..at + key_d].copy_from_slice(&halves);
                let at = (slot + head) * d;
                let v = raw(row, q_heads + head + if rope.shared_kv { 0 } else { kv_heads });
                let inverse = rms(&v);
                for i in 0..d {
                    wanted_values[at + i] = v[i] * inverse;
                }
            }
        }
        let q: Vec<f32> = gpu.download(q);
        let [keys, values] = [keys, values]
            .map(|at| gpu.download::<u16>(at).into_iter().map(from_bf16).collect::<Vec<f32>>());
        // bfloat16 rounds by 2^-9 at most: 1.7e-3 in the mean.
        let stored = distance(&keys, &wanted_keys).max(distance(&values, &wanted_values));
        Outcome { error: distance(&q, &wanted_q).max(stored * 1e-3), limit: 2.2e-6 }
    })
}

/// A key of `d` columns, of which the buffer of keys holds `key_d`, the first of each half, and that of
/// values the others.
pub(crate) fn whole_key(keys: &[u16], values: &[u16], key_d: usize, d: usize) -> Vec<u16> {
    let own = key_d / 2;
    let half = |h: usize| {
        let shared = &values[h * (d / 2) + own..(h + 1) * (d / 2)];
        [&keys[h * own..(h + 1) * own], shared].concat()
    };
    [half(0), half(1)].concat()
}

fn attention(case: AttentionFew, rows: u32, position: u32, ring: u32, arch: Arch) -> Case {
    let (kernel, join) = (case.kernel().unwrap(), case.join().unwrap());
    let Heads { q_heads, kv_heads, d, keys: held, window } = case.heads;
    let name = format!(
        "attention {q_heads}/{kv_heads} D={d} {held:?} W={window:?} T={rows}/{} @{position} R={ring}",
        case.rows
    );
    let kernels = vec![kernel.clone(), join.clone()];
    Case::new(name, arch, kernels, move |gpu, functions| {
        let mut random = Random(u64::from(position) + 1);
        let t = rows as usize;
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
        let results = case.splits as usize * t * q_heads;
        let (sums, stats) = (gpu.poisoned(results * d * 4), gpu.poisoned(results * 8));
        let y = gpu.poisoned(t * q_heads * d * 4);
        let arguments = [
            Value::At(gpu.upload(&q).at),
            Value::At(table.at),
            Value::U32(0),
            Value::U32(1),
            Value::U32(2),
            Value::U32(ring),
            Value::At(sums.at),
            Value::At(stats.at),
            Value::U32(rows),
            Value::F32(1.0),
        ];
        gpu.launch(&kernel, functions[0], rows, &arguments);
        let arguments = [
            Value::At(sums.at),
            Value::At(stats.at),
            Value::At(y.at),
            Value::At(table.at),
            Value::U32(0),
            Value::U32(rows),
        ];
        gpu.launch(&join, functions[1], rows, &arguments);
        let got: Vec<f32> = gpu.download(y);
        let (mut compared, mut wanted) = (vec![], vec![]);
        for row in 0..t {
            // Every third head of many keys: the reference is slow.
            let step = if position > 10_000 { 5 } else { 1 };
            for head in (0..q_heads).step_by(step) {
                let at = (row * q_heads + head) * d;
                let q = &q[at..at + d];
                let now = position + row as u32;
                let first = window.map_or(0, |w| (now + 1).saturating_sub(w));
                let row_of = |p: u32| (p % ring) as usize * kv_heads + head / (q_heads / kv_heads);
                let scores: Vec<f64> = (first..=now)
                    .map(|p| {
                        let key = whole_key(
                            &keys[row_of(p) * key_d..],
                            &values[row_of(p) * d..],
                            key_d,
                            d,
                        );
                        q.iter()
                            .zip(&key)
                            .map(|(q, k)| f64::from(*q) * f64::from(from_bf16(*k)))
                            .sum()
                    })
                    .collect();
                let largest = scores.iter().copied().fold(f64::MIN, f64::max);
                let mut out = vec![0.0; d];
                let mut total = 0.0;
                for (score, p) in scores.iter().zip(first..) {
                    let weight = (score - largest).exp();
                    total += weight;
                    for (out, v) in out.iter_mut().zip(&values[row_of(p) * d..]) {
                        *out += weight * f64::from(from_bf16(*v));
                    }
                }
                compared.extend_from_slice(&got[at..at + d]);
                wanted.extend(out.iter().map(|x| x / total));
            }
        }
        let halves = q_heads / kv_heads * case.rows as usize <= 8;
        Outcome { error: distance(&compared, &wanted), limit: if halves { 3e-5 } else { 8e-3 } }
    })
}

fn geglu(arch: Arch) -> Case {
    let (width, splits, t) = (152usize, 3usize, 3usize);
    let kernel = Geglu { width: width as u32, splits: splits as u32, output: Output::Floats }
        .kernel()
        .unwrap();
    Case::new("geglu".to_owned(), arch, vec![kernel.clone()], move |gpu, functions| {
        let sums = Random(2).normals(splits * t * 2 * width);
        let y = gpu.poisoned(t * width * 4);
        let values = [Value::At(gpu.upload(&sums).at), Value::At(y.at), Value::U32(t as u32)];
        gpu.launch(&kernel, functions[0], t as u32, &values);
        let mut wanted = vec![];
        for row in 0..t {
            for column in 0..width {
                let at = column / 8 * 16 + column % 8;
                let sum = |at: usize| -> f64 {
                    (0..splits).map(|s| f64::from(sums[(s * t + row) * 2 * width + at])).sum()
                };
                let (gate, up) = (sum(at), sum(at + 8));
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044715 * gate.powi(3));
                wanted.push(0.5 * gate * (1.0 + inner.tanh()) * up);
            }
        }
        Outcome { error: distance(&gpu.download(y), &wanted), limit: 1e-6 }
    })
}

pub(crate) fn cases(arch: Arch) -> Vec<Case> {
    let mut cases = vec![geglu(arch)];
    for (h, splits, rows, scalar, weight) in [
        (5376, 3, 1, true, DType::BF16),
        (5376, 0, 2, false, DType::BF16),
        (256, 2, 8, true, DType::F32),
        (260, 1, 1, false, DType::BF16),
    ] {
        for cluster in [1, 8] {
            cases.push(add_norm(h, splits, (rows, cluster), scalar, weight, arch));
        }
    }
    let weight = DType::BF16;
    let full = |whole: bool, position, rows| {
        let frequencies = Rope::frequencies(1e6, 512, 64, 1.0);
        let case = Rope {
            q_heads: 32,
            kv_heads: 4,
            d: 512,
            frequencies,
            shared_kv: true,
            keys: if whole { Keys::Whole } else { Keys::Rotated(64) },
            splits: 2,
            weight,
        };
        rope(case, rows, position, 2048, arch)
    };
    let sliding = |q_heads, kv_heads, d, position, rows, ring| {
        let frequencies = Rope::frequencies(1e4, d, d / 2, 1.0);
        let case = Rope {
            q_heads,
            kv_heads,
            d,
            frequencies,
            shared_kv: false,
            keys: Keys::Whole,
            splits: 1,
            weight,
        };
        rope(case, rows, position, ring, arch)
    };
    cases.extend([full(true, 0, 1), full(false, 0, 1), full(false, 131_071, 4)]);
    cases.push(sliding(32, 16, 256, 1023, 8, 1100));
    cases.push(sliding(8, 4, 32, 77, 2, 40));
    let mut few = |q_heads, kv_heads, d, rows, t, window: Option<u32>, position, ring| {
        let whole = Heads { q_heads, kv_heads, d, keys: Keys::Whole, window };
        let mut heads = vec![whole];
        if window.is_none() && d >= 64 {
            heads.push(Heads { keys: Keys::Rotated(d.div_ceil(128) * 16), ..whole });
        }
        for heads in heads {
            let case = AttentionFew::choose(heads, rows, Output::Floats, (arch, 132));
            cases.push(attention(case, t, position, ring, arch));
        }
    };
    for position in [0, 1, 63, 64, 1023, 1024, 3333] {
        few(32, 16, 256, 1, 1, Some(1024), position, 1100);
    }
    few(32, 16, 256, 8, 5, Some(1024), 3000, 1100);
    few(32, 16, 256, 4, 4, Some(1024), 1000, 1100);
    for position in [0, 31, 100, 4000, 30_000] {
        few(32, 4, 512, 1, 1, None, position, 32_768);
    }
    few(32, 4, 512, 8, 8, None, 4000, 4096);
    for d in [32, 64, 128] {
        few(8, 4, d, 2, 2, Some(16), 50, 40);
        few(16, 1, d, 4, 3, None, 200, 256);
        few(8, 8, d, 1, 1, Some(129), 300, 200);
    }
    cases
}
