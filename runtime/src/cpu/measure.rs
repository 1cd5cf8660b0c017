//! Times what the processor can do.

use std::time::Instant;

use rayon::prelude::*;

use super::Cpu;
use super::isa::{Arithmetic, Isa, Kernel, LANES, Lanes, accumulate, total};
use crate::roofline::Speed;

/// Bytes that a measurement of reading reads at least, if need be the same ones again.
const READ_BYTES: usize = 2 << 30;
/// How often it reads the same ones at most.
const REPEATS: usize = 64;
/// Bytes that a thread reads at a time.
const PIECE: usize = 1 << 20;
/// Sets of lanes that a thread multiplies, again and again: they stay in its core's cache.
const CACHED: usize = 256;
/// How often.
const MULTIPLICATIONS: u32 = 20_000;
/// Sums that a thread keeps in registers where there are enough of them.
const WIDE: usize = 12;
/// Sums elsewhere.
const NARROW: usize = 6;
/// Measurements, of which the best counts: threads and clock need a while to wake.
const TRIES: u32 = 3;

impl Cpu {
    /// How fast all threads read the weights, and multiply float32 numbers of their caches.
    ///
    /// Takes a few seconds.
    pub fn speed(&self) -> Speed {
        let shared = &self.0;
        let ids = 0..shared.program.program().weights.len() as u32;
        let parts: Vec<&[u8]> = ids.flat_map(|id| shared.program.weights().parts(id)).collect();
        let bytes = parts.iter().map(|part| part.len()).sum::<usize>().max(1);
        let repeats = READ_BYTES.div_ceil(bytes).min(REPEATS);
        let isa = shared.isa;
        let read = shared.threads.install(|| {
            best(|| {
                for _ in 0..repeats {
                    let pieces = parts.par_iter().flat_map(|part| part.par_chunks(PIECE));
                    std::hint::black_box(
                        pieces.map(|piece| read(isa, piece)).reduce(|| 0, |a, b| a ^ b),
                    );
                }
            })
        });
        let (operations, multiply) = shared.threads.install(|| {
            let mut operations = 0.0;
            let seconds = best(|| {
                let threads = rayon::broadcast(|_| multiply(isa));
                operations = threads.iter().sum();
            });
            (operations, seconds)
        });
        Speed { read: (bytes * repeats) as f64 / read, multiply: operations / multiply }
    }
}

/// Seconds of the fastest of some runs.
fn best(mut body: impl FnMut()) -> f64 {
    let run = |_| {
        let started = Instant::now();
        body();
        started.elapsed().as_secs_f64()
    };
    (0..TRIES).map(run).fold(f64::INFINITY, f64::min)
}

/// A number that depends on all bytes.
fn read(isa: Isa, bytes: &[u8]) -> u8 {
    let mut result = 0;
    isa.run(Reading { bytes, result: &mut result });
    result
}

/// Multiplies and adds for a while, and returns how many operations that were.
fn multiply(isa: Isa) -> f64 {
    let mut operations = 0.0;
    isa.run(Multiplying { operations: &mut operations });
    operations
}

struct Reading<'a> {
    bytes: &'a [u8],
    result: &'a mut u8,
}

impl Kernel for Reading<'_> {
    #[inline(always)]
    fn run<A: Arithmetic>(self) {
        let mut sum = [0; 256];
        for block in self.bytes.as_chunks::<256>().0 {
            for (sum, byte) in sum.iter_mut().zip(block) {
                *sum ^= byte;
            }
        }
        *self.result = sum.iter().fold(0, |a, b| a ^ b);
    }
}

struct Multiplying<'a> {
    operations: &'a mut f64,
}

impl Kernel for Multiplying<'_> {
    #[inline(always)]
    fn run<A: Arithmetic>(self) {
        let data = [[0.5; LANES]; CACHED];
        let mut sums = 0;
        for _ in 0..MULTIPLICATIONS {
            sums = if A::WIDE { product::<A, WIDE>(&data) } else { product::<A, NARROW>(&data) };
        }
        let each = (2 * LANES * CACHED * sums) as f64;
        *self.operations = each * f64::from(MULTIPLICATIONS);
    }
}

/// Multiplies all data with as many numbers as there are sums, and returns how many these are.
#[inline(always)]
fn product<A: Arithmetic, const SUMS: usize>(data: &[Lanes; CACHED]) -> usize {
    let data = std::hint::black_box(data);
    let weights = std::hint::black_box(&[[0.25; LANES]; SUMS]);
    let mut sums: [Lanes; SUMS] = [[0.0; LANES]; SUMS];
    for x in data {
        for (sum, weight) in sums.iter_mut().zip(weights) {
            accumulate::<A>(sum, x, weight);
        }
    }
    std::hint::black_box(sums.map(total));
    SUMS
}
