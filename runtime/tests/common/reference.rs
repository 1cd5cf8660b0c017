//! A program in scalar float64 over a whole sequence at once: no buffers, no chunks, no rings.
//! Keys and values are kept by position, and every op is written as its definition reads.

use std::collections::HashMap;

use gemma4_format::encoding::{QuantizedBytes, decode_row};
use gemma4_format::{Encoding, Op, Operand};

use super::Model;

/// `[rows][numbers]`; heads of a row lie one after another.
type Rows = Vec<Vec<f64>>;

/// Labelled values of a run over all tokens.
pub(crate) fn run(model: &Model, tokens: &[u32]) -> HashMap<String, Rows> {
    let weights: Vec<Rows> = (0..model.program.weights.len()).map(|id| weight(model, id)).collect();
    let method = model.program.method("prefill").expect("a prefill");
    let facts = model.program.values(method).expect("facts");
    let mut values: Vec<Rows> = vec![vec![]; method.inputs.len()];
    let mut buffers: HashMap<u32, Rows> = HashMap::new();
    let mut labelled = HashMap::new();
    for node in &method.nodes {
        let value = |at: usize| match node.args[at] {
            Operand::Value(id) => &values[id as usize],
            _ => panic!("no value"),
        };
        let weight = |at: usize| match node.args[at] {
            Operand::Weight(id) => &weights[id as usize],
            _ => panic!("no weight"),
        };
        let buffer = |at: usize| match node.args[at] {
            Operand::Buffer(id) => id,
            _ => panic!("no buffer"),
        };
        let extent = |at: usize, axis: usize| match node.args[at] {
            Operand::Value(id) => facts[id as usize].dims[axis].fixed().expect("fixed") as usize,
            _ => panic!("no value"),
        };
        let each = |x: &Rows, f: &dyn Fn(f64) -> f64| -> Rows {
            x.iter().map(|row| row.iter().map(|x| f(*x)).collect()).collect()
        };
        let pairs = |a: &Rows, b: &Rows, f: &dyn Fn(f64, f64) -> f64| -> Rows {
            a.iter()
                .zip(b)
                .map(|(a, b)| a.iter().zip(b).map(|(a, b)| f(*a, *b)).collect())
                .collect()
        };
        let result: Rows = match &node.op {
            Op::Embed => tokens.iter().map(|t| weight(1)[*t as usize].clone()).collect(),
            Op::Advance | Op::Sample => vec![],
            Op::Scale { factor } => each(value(0), &|x| x * f64::from(*factor)),
            Op::ScaleByWeight => each(value(0), &|x| x * weight(1)[0][0]),
            Op::Add => pairs(value(0), value(1), &|a, b| a + b),
            Op::RmsNorm { eps } => {
                let axis = if let Operand::Value(id) = node.args[0] {
                    facts[id as usize].dims.len() - 1
                } else {
                    panic!("no value")
                };
                let width = extent(0, axis);
                let norm = |x: &[f64]| {
                    let mean = x.iter().map(|x| x * x).sum::<f64>() / width as f64;
                    let scaled = |(i, x): (usize, &f64)| {
                        let w = if node.args.len() == 2 { weight(1)[0][i] } else { 1.0 };
                        x / (mean + f64::from(*eps)).sqrt() * w
                    };
                    x.iter().enumerate().map(scaled).collect::<Vec<f64>>()
                };
                value(0).iter().map(|row| row.chunks(width).flat_map(norm).collect()).collect()
            }
            Op::Linear => {
                let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
                let row = |x: &Vec<f64>| weight(1).iter().map(|w| dot(x, w)).collect();
                value(0).iter().map(row).collect()
            }
            Op::SplitHeads { .. } | Op::MergeHeads => value(0).clone(),
            Op::Rope { base, rotated, factor } => {
                let width = extent(0, 2);
                let turn = |position: usize, x: &[f64]| {
                    let mut y = x.to_vec();
                    for i in 0..*rotated as usize {
                        let exponent = -2.0 * i as f64 / width as f64;
                        let angle =
                            position as f64 * f64::from(*base).powf(exponent) / f64::from(*factor);
                        let (a, b) = (x[i], x[i + width / 2]);
                        y[i] = a * angle.cos() - b * angle.sin();
                        y[i + width / 2] = b * angle.cos() + a * angle.sin();
                    }
                    y
                };
                let rows = value(0).iter().enumerate();
                rows.map(|(p, row)| row.chunks(width).flat_map(|x| turn(p, x)).collect()).collect()
            }
            Op::BufferWrite => {
                buffers.insert(buffer(0), value(1).clone());
                continue;
            }
            Op::Attention { window, scale } => {
                let (heads, width) = (extent(0, 1), extent(0, 2));
                let (keys, all) = (&buffers[&buffer(1)], &buffers[&buffer(2)]);
                let groups = keys[0].len() / width;
                let row = |p: usize, q: &Vec<f64>| -> Vec<f64> {
                    let head = |head: usize| {
                        let at = head / (heads / groups) * width;
                        let q = &q[head * width..][..width];
                        let seen = |j: &usize| window.is_none_or(|w| p - j < w as usize);
                        let seen: Vec<usize> = (0..=p).filter(seen).collect();
                        let score = |j: &usize| {
                            let k = &keys[*j][at..][..width];
                            (q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>() * f64::from(*scale))
                                .exp()
                        };
                        let weights: Vec<f64> = seen.iter().map(score).collect();
                        let total: f64 = weights.iter().sum();
                        (0..width)
                            .map(move |d| {
                                let terms =
                                    seen.iter().zip(&weights).map(|(j, w)| w * all[*j][at + d]);
                                terms.sum::<f64>() / total
                            })
                            .collect::<Vec<f64>>()
                    };
                    (0..heads).flat_map(head).collect()
                };
                value(0).iter().enumerate().map(|(p, q)| row(p, q)).collect()
            }
            Op::GeGlu => pairs(value(0), value(1), &|gate, up| {
                let inner = gate + 0.044715 * gate.powi(3);
                let root = (2.0 / std::f64::consts::PI).sqrt();
                gate / 2.0 * (1.0 + (root * inner).tanh()) * up
            }),
            Op::LastRow => vec![value(0).last().expect("a row").clone()],
            Op::SoftCap { cap } => {
                each(value(0), &|x| f64::from(*cap) * (x / f64::from(*cap)).tanh())
            }
        };
        if !node.label.is_empty() {
            labelled.insert(node.label.clone(), result.clone());
        }
        values.push(result);
    }
    labelled
}

/// A weight as rows of float64.
fn weight(model: &Model, id: usize) -> Rows {
    let weight = &model.program.weights[id];
    let parts: Vec<&[u8]> = model.parts[id].iter().map(|p| p.as_slice()).collect();
    let columns = *weight.dims.last().expect("dims") as usize;
    let rows = weight.dims.iter().rev().skip(1).product::<u32>() as usize;
    let row = |row: usize| -> Vec<f64> {
        let mut numbers = vec![0.0; columns];
        match weight.encoding {
            Encoding::Dense(dtype) => {
                for (i, x) in numbers.iter_mut().enumerate() {
                    *x = dtype.read(parts[0], row * columns + i);
                }
            }
            encoding => {
                let bytes = QuantizedBytes::from_parts(encoding, &parts).expect("parts");
                decode_row(encoding, bytes, row, &mut numbers);
            }
        }
        numbers.into_iter().map(f64::from).collect()
    };
    (0..rows).map(row).collect()
}
