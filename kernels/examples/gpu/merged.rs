//! Products of merged weights against those of the matrices that they were made of: q, k and v one
//! after another, gate and up in turns.
//!
//! A row of a weight is summed in the same order in both, so results are the same bit for bit. On
//! sm_90a a product of many rows deals its tiles out to all multiprocessors and may cut some along
//! the columns, elsewhere for another number of tiles; where it does, float32 sums are added in
//! another order.

use gemma4_format::encoding::{DType, Encoding};
use gemma4_kernels::{
    Arch, Epilogue, Kernel, LinearFew, LinearMany, ManyOutput, Order, Pack, Packed,
};

use crate::case::{Case, Outcome};
use crate::device::{Buffer, Function, Gpu, Value};
use crate::linear::{Stored, encodings, pack_into};
use crate::many;
use crate::numbers::{Random, distance};

/// Matrices of `k` columns, and how one weight holds them.
#[derive(Clone)]
struct Merged {
    name: &'static str,
    encoding: Encoding,
    rows: Vec<u32>,
    k: u32,
    order: Order,
}

impl Merged {
    fn packed(&self, n: u32) -> Packed {
        Packed::new(self.encoding, n, self.k).unwrap()
    }

    fn whole(&self) -> Packed {
        self.packed(self.rows.iter().sum())
    }

    fn parts(&self) -> Vec<Packed> {
        self.rows.iter().map(|n| self.packed(*n)).collect()
    }

    /// The row of the merged weight that holds a row of a matrix.
    fn place(&self, matrix: usize, row: u32) -> u32 {
        match self.order {
            Order::Rows => self.rows[..matrix].iter().sum::<u32>() + row,
            _ => row / 8 * 16 + matrix as u32 * 8 + row % 8,
        }
    }

    /// What packs the merged weight, and what packs each matrix.
    fn packs(&self) -> (Vec<Pack>, Vec<Pack>) {
        let pack = |packed, order, rows| Pack { source: self.encoding, packed, order, rows };
        let together = match self.order {
            Order::Rows => self.rows.iter().map(|n| pack(self.whole(), Order::Rows, *n)).collect(),
            _ => vec![pack(self.whole(), Order::Turns, self.rows[0])],
        };
        let apart = self.parts().into_iter().map(|part| pack(part, Order::Rows, part.n));
        (together, apart.collect())
    }

    fn pack_kernels(&self) -> Vec<Kernel> {
        let (together, apart) = self.packs();
        together.iter().chain(&apart).map(|pack| pack.kernel().unwrap()).collect()
    }

    /// Packs random matrices: merged, and each alone.
    fn pack(&self, gpu: &Gpu, functions: &[Function]) -> (Buffer, Vec<Buffer>) {
        let mut random = Random(u64::from(self.k));
        let stored: Vec<Stored> = self
            .rows
            .iter()
            .map(|n| Stored::random(self.encoding, *n as usize, self.k as usize, &mut random))
            .collect();
        let (together, apart) = self.packs();
        let whole = gpu.poisoned(self.whole().bytes() as usize);
        let mut first_tile = 0;
        for (i, pack) in together.iter().enumerate() {
            let second = if self.order == Order::Turns { 1 } else { i };
            let sources = [&stored[i], &stored[second]];
            pack_into(gpu, pack, functions[i], sources, (whole, first_tile));
            first_tile += pack.tiles();
        }
        let alone = apart.iter().zip(&stored).zip(&functions[together.len()..]);
        let alone = alone.map(|((pack, stored), function)| {
            let packed = gpu.poisoned(pack.packed.bytes() as usize);
            pack_into(gpu, pack, *function, [stored, stored], (packed, 0));
            packed
        });
        (whole, alone.collect())
    }

    /// Results of the merged weight and of the matrices, in the same order; each `[lists, n]`.
    fn pairs(&self, whole: &[f32], parts: &[Vec<f32>]) -> (Vec<f32>, Vec<f32>) {
        let (n, mut a, mut b) = (self.whole().n as usize, Vec::new(), Vec::new());
        for (matrix, part) in parts.iter().enumerate() {
            let rows = self.rows[matrix];
            for (list, of_part) in part.chunks(rows as usize).enumerate() {
                b.extend(of_part);
                a.extend((0..rows).map(|r| whole[list * n + self.place(matrix, r) as usize]));
            }
        }
        (a, b)
    }
}

/// The share of results that are not the same bits.
fn unequal(a: &[f32], b: &[f32]) -> f64 {
    let differing = a.iter().zip(b).filter(|(a, b)| a.to_bits() != b.to_bits() || a.is_nan());
    differing.count() as f64 / a.len() as f64
}

fn few(merged: Merged, rows: u32, arch: Arch) -> Case {
    let whole =
        LinearFew::choose(merged.whole(), rows, Epilogue::Partial, false, arch, 132).unwrap();
    let products: Vec<LinearFew> = [whole]
        .into_iter()
        .chain(merged.parts().into_iter().map(|weight| LinearFew { weight, ..whole }))
        .collect();
    let packs = merged.pack_kernels();
    let first = packs.len();
    let kernels: Vec<Kernel> =
        packs.into_iter().chain(products.iter().map(|p| p.kernel().unwrap())).collect();
    let launched = kernels[first..].to_vec();
    let name = format!("merged {} few T={rows} s{}", merged.name, whole.splits);
    Case::new(name, arch, kernels, move |gpu, functions| {
        let (weight, parts) = merged.pack(gpu, functions);
        let x = Random(7).activations(rows as usize, merged.k as usize);
        let x = gpu.upload(&x);
        let mut results = [weight].into_iter().chain(parts).enumerate().map(|(i, weight)| {
            let linear = products[i];
            let y = gpu.poisoned((linear.splits * rows * linear.weight.n * 4) as usize);
            let values = [
                Value::At(weight.at),
                Value::At(x.at),
                Value::At(y.at),
                Value::U32(rows),
                Value::F32(0.0),
            ];
            gpu.launch(&launched[i], functions[first + i], rows, &values);
            gpu.download(y)
        });
        let whole: Vec<f32> = results.next().unwrap();
        let (a, b) = merged.pairs(&whole, &results.collect::<Vec<_>>());
        Outcome { error: unequal(&a, &b), limit: 0.0 }
    })
}

/// `tokens` of a block, or those that are chosen for so many rows.
fn many(merged: Merged, rows: u32, tokens: Option<u32>, arch: Arch) -> Case {
    let mut whole = LinearMany::choose(merged.whole(), rows, ManyOutput::F32, arch);
    whole.tokens = tokens.unwrap_or(whole.tokens);
    let products: Vec<LinearMany> = [whole]
        .into_iter()
        .chain(merged.parts().into_iter().map(|weight| LinearMany { weight, ..whole }))
        .collect();
    let packs = merged.pack_kernels();
    let first = packs.len();
    let kernels: Vec<Kernel> =
        packs.into_iter().chain(products.iter().map(|p| p.kernel().unwrap())).collect();
    let launched = kernels[first..].to_vec();
    let name = format!("merged {} many T={rows}/{}", merged.name, whole.tokens);
    Case::new(name, arch, kernels, move |gpu, functions| {
        let (weight, parts) = merged.pack(gpu, functions);
        let x = Random(7).activations(rows as usize, merged.k as usize);
        let x = gpu.upload(&many::panels(&x, merged.k, many::room(rows)));
        let mut results = [weight].into_iter().chain(parts).enumerate().map(|(i, weight)| {
            let at = (x, weight, rows);
            let y = many::launch(gpu, &products[i], &launched[i], functions[first + i], at);
            gpu.download(y)
        });
        let whole: Vec<f32> = results.next().unwrap();
        let (a, b) = merged.pairs(&whole, &results.collect::<Vec<_>>());
        // A pair of blocks takes tiles of 256 features.
        let cut = products.iter().any(|p| {
            let tiles = p.weight.n.div_ceil(256) * rows.div_ceil(p.tokens);
            p.hopper && !tiles.is_multiple_of(gpu.sms / 2)
        });
        if !cut {
            return Outcome { error: unequal(&a, &b), limit: 0.0 };
        }
        let b: Vec<f64> = b.into_iter().map(f64::from).collect();
        // Tensor cores cut off the bits of a float32 sum that do not fit.
        Outcome { error: distance(&a, &b), limit: 4e-5 }
    })
}

pub(crate) fn cases(arch: Arch) -> Vec<Case> {
    let int4 = |k| encodings(k)[0].1;
    let int8 = encodings(5376)[11].1;
    let weight = |name, encoding, rows: &[u32], order| Merged {
        name,
        encoding,
        rows: rows.to_vec(),
        k: 5376,
        order,
    };
    let sliding = weight("q|k|v", int4(5376), &[8192, 4096, 4096], Order::Rows);
    let global = weight("q|k", int4(5376), &[16384, 2048], Order::Rows);
    let gate_up = weight("gate|up", int4(5376), &[21504, 21504], Order::Turns);
    let bytes = weight("int8 q|k|v", int8, &[512, 256, 256], Order::Rows);
    let dense = weight("bf16 q|k|v", Encoding::Dense(DType::BF16), &[512, 256, 256], Order::Rows);
    let mut cases = Vec::new();
    for merged in [&sliding, &global, &gate_up, &bytes, &dense] {
        cases.extend([1, 2, 4, 8].map(|rows| few(merged.clone(), rows, arch)));
        cases.push(many(merged.clone(), 417, None, arch));
    }
    // On 132 multiprocessors no tile is cut.
    cases.push(many(sliding, 2112, Some(64), arch));
    cases.push(many(gate_up, 704, Some(64), arch));
    cases
}
