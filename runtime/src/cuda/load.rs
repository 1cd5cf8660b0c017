//! Brings the weights to the device.
//!
//! A block of rows is copied from the mapped file into pinned memory, from there to the device,
//! and packed there. Several blocks are on their way at once, each in a lane of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use gemma4_format::plan::{PARTS, Pack, Plan};
use gemma4_format::{DType, Encoding, Program, Weight};
use half::{bf16, f16};
use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::driver::Failure;
use super::gpu::Context;
use super::handles::{Memory, Pinned, Stream};
use super::kernels::Kernels;
use super::layout::{ALIGNMENT, Layout};
use super::report::LoadTimes;
use crate::{Error, Result};

/// Blocks that are on their way at once.
const LANES: u64 = 4;
/// Bytes of a block, if a tile is not larger. All lanes together stay far below what a program may
/// take beside its weights, keys, values and arena.
const BLOCK: u64 = 16 << 20;
/// Bytes that a thread copies at a time.
const PIECE: usize = 1 << 20;
/// Threads that copy; hashing wants the others.
const THREADS: usize = 4;

/// How the stored tensors of a weight are cut into rows.
struct Shape {
    rows: u32,
    /// Bytes of a row of each part that a pack kernel knows, by its place in the arguments, with
    /// the index of the stored tensor.
    parts: Vec<Part>,
}

#[derive(Clone, Copy)]
struct Part {
    argument: usize,
    stored: usize,
    row_bytes: u64,
}

impl Shape {
    fn new(weight: &Weight) -> Option<Self> {
        let arguments: &[usize] = match weight.encoding {
            Encoding::Quantized { bits: 5 | 6, .. } => &[0, 1, 2, 3],
            _ => &[0, 2, 3],
        };
        let outer = weight.dims.iter().rev().skip(1);
        let rows = outer.map(|d| u64::from(*d)).product::<u64>();
        let stored = weight.encoding.parts(&weight.name, &weight.dims).ok()?;
        let parts = stored.iter().zip(arguments).enumerate();
        let parts = parts.map(|(stored, (part, argument))| Part {
            argument: *argument,
            stored,
            row_bytes: part.bytes() / rows,
        });
        Some(Self { rows: u32::try_from(rows).ok()?, parts: parts.collect() })
    }
}

/// The sources of a pack.
struct Sources {
    shapes: Vec<Shape>,
    rows: u32,
}

impl Sources {
    fn new(program: &Program, pack: &Pack) -> Result<Self, String> {
        let shape = |id: &u32| program.weights.get(*id as usize).and_then(Shape::new);
        let shapes: Option<Vec<Shape>> = pack.sources.iter().map(shape).collect();
        let shapes = shapes.ok_or("a weight cannot be packed")?;
        let rows = shapes.first().map_or(0, |s| s.rows);
        if shapes.iter().any(|s| s.rows != rows) {
            return Err("two weights of different heights cannot be packed together".to_owned());
        }
        Ok(Self { shapes, rows })
    }

    /// Staged bytes of a block of `rows` rows, or more.
    fn bytes(&self, rows: u32) -> u64 {
        let parts = self.shapes.iter().flat_map(|s| &s.parts);
        parts.map(|p| (u64::from(rows) * p.row_bytes).next_multiple_of(ALIGNMENT)).sum()
    }

    /// Most rows, a multiple of a tile's, whose block has at most `capacity` bytes; one tile at
    /// least.
    fn rows_within(&self, capacity: u64, tile: u32) -> u32 {
        let tiles = self.rows.div_ceil(tile).max(1);
        let fits = |n: u32| self.bytes(n.saturating_mul(tile).min(self.rows)) <= capacity;
        let (mut fitting, mut above) = (1, tiles + 1);
        while above - fitting > 1 {
            let middle = fitting + (above - fitting) / 2;
            if fits(middle) { fitting = middle } else { above = middle }
        }
        fitting.saturating_mul(tile)
    }
}

/// Bytes of a lane's buffers: enough for every block.
fn capacity(program: &Program, plan: &Plan, layout: &Layout) -> Result<u64, String> {
    let mut capacity = ALIGNMENT;
    for region in &layout.resident {
        capacity = capacity.max(region.bytes.min(BLOCK));
    }
    for pack in &plan.packs {
        let sources = Sources::new(program, pack)?;
        let rows = sources.rows_within(BLOCK, pack.rows_per_tile).min(sources.rows);
        capacity = capacity.max(sources.bytes(rows));
    }
    Ok(capacity)
}

/// Bytes of device memory that loading needs beside the layout.
pub(super) fn staging(program: &Program, plan: &Plan, layout: &Layout) -> Result<u64, String> {
    Ok(LANES * capacity(program, plan, layout)?.next_multiple_of(ALIGNMENT))
}

/// Some bytes on their way.
struct Block<'a> {
    /// What is staged, and where in the lane's buffer.
    copies: Vec<(usize, &'a [u8])>,
    /// Bytes of the lane's buffer that are used.
    staged: usize,
    then: Then,
}

enum Then {
    /// They stay as they are at an address.
    Keep(u64),
    /// A kernel packs them.
    Pack(Tiles),
}

/// Launch of a pack kernel.
struct Tiles {
    kernel: u32,
    grid: u32,
    /// Where each argument's tensor lies in the lane's buffer.
    offsets: [Option<u64>; 2 * PARTS],
    /// The packed weight, first tile, tiles, rows, rows of the whole.
    rest: [u64; 5],
}

impl Tiles {
    fn words(&self, staging: u64) -> [u64; 2 * PARTS + 5] {
        let mut words = [0; 2 * PARTS + 5];
        for (word, offset) in words.iter_mut().zip(self.offsets) {
            *word = offset.map_or(0, |offset| staging + offset);
        }
        words[2 * PARTS..].copy_from_slice(&self.rest);
        words
    }
}

/// Cuts a pack into blocks. `stored` gives the tensors of a weight.
fn pack_blocks<'a>(
    program: &Program,
    pack: &Pack,
    destination: u64,
    capacity: u64,
    stored: &dyn Fn(u32) -> Vec<&'a [u8]>,
    blocks: &mut Vec<Block<'a>>,
) -> Result<(), String> {
    let sources = Sources::new(program, pack)?;
    let tensors: Vec<Vec<&[u8]>> = pack.sources.iter().map(|id| stored(*id)).collect();
    let step = sources.rows_within(capacity, pack.rows_per_tile);
    let mut start = 0;
    while start < sources.rows {
        let rows = step.min(sources.rows - start);
        let tiles = rows.div_ceil(pack.rows_per_tile);
        let first = pack.first_tile.checked_add(start / pack.rows_per_tile);
        let units = tiles.checked_mul(pack.units_per_tile);
        let (first, units) = first.zip(units).ok_or("a packed weight has too many tiles")?;
        let mut offsets = [None; 2 * PARTS];
        let mut copies = Vec::new();
        let mut end = 0;
        for (source, (shape, tensors)) in sources.shapes.iter().zip(&tensors).enumerate() {
            for part in &shape.parts {
                let from = u64::from(start) * part.row_bytes;
                let length = u64::from(rows) * part.row_bytes;
                let tensor = tensors.get(part.stored).copied().unwrap_or_default();
                let bytes = tensor.get(from as usize..(from + length) as usize);
                copies.push((end as usize, bytes.ok_or("a stored tensor is too short")?));
                offsets[source * PARTS + part.argument] = Some(end);
                end = (end + length).next_multiple_of(ALIGNMENT);
            }
        }
        if sources.shapes.len() == 1 {
            offsets.copy_within(..PARTS, PARTS);
        }
        blocks.push(Block {
            copies,
            staged: end as usize,
            then: Then::Pack(Tiles {
                kernel: pack.kernel,
                grid: units.div_ceil(pack.warps_per_block),
                offsets,
                rest: [
                    destination,
                    first.into(),
                    tiles.into(),
                    rows.into(),
                    pack.total_rows.into(),
                ],
            }),
        });
        start += rows;
    }
    Ok(())
}

/// Cuts bytes that stay as they are into blocks.
fn keep_blocks<'a>(bytes: &'a [u8], to: u64, capacity: u64, blocks: &mut Vec<Block<'a>>) {
    let mut at = to;
    for piece in bytes.chunks(capacity as usize) {
        let staged = piece.len();
        blocks.push(Block { copies: vec![(0, piece)], staged, then: Then::Keep(at) });
        at += staged as u64;
    }
}

/// All blocks that bring a plan's weights to the device.
pub(super) struct Blocks<'a> {
    blocks: Vec<Block<'a>>,
    capacity: u64,
}

impl<'a> Blocks<'a> {
    /// Packs and resident tensors from `stored`, the tensors of a weight.
    pub(super) fn of_plan(
        program: &Program,
        plan: &Plan,
        layout: &Layout,
        stored: &dyn Fn(u32) -> Vec<&'a [u8]>,
    ) -> Result<Self, String> {
        let capacity = capacity(program, plan, layout)?;
        let mut blocks = Vec::new();
        for pack in &plan.packs {
            let region = layout.packed.get(pack.packed as usize).ok_or("a pack has no place")?;
            pack_blocks(program, pack, region.at, capacity, stored, &mut blocks)?;
        }
        for ((weight, part), region) in plan.resident.iter().zip(&layout.resident) {
            let bytes = stored(*weight).get(*part as usize).copied().unwrap_or_default();
            keep_blocks(bytes, region.at, capacity, &mut blocks);
        }
        Ok(Self { blocks, capacity })
    }

    /// Resident tensors alone, given in the plan's order.
    pub(super) fn of_resident(resident: &'a [Vec<u8>], layout: &Layout) -> Self {
        let capacity = resident.iter().map(Vec::len).max().unwrap_or(0).max(1) as u64;
        let mut blocks = Vec::new();
        for (bytes, region) in resident.iter().zip(&layout.resident) {
            keep_blocks(bytes, region.at, capacity, &mut blocks);
        }
        Self { blocks, capacity }
    }

    /// Bytes of all.
    pub(super) fn bytes(&self) -> u64 {
        self.blocks.iter().flat_map(|b| &b.copies).map(|(_, bytes)| bytes.len() as u64).sum()
    }

    /// Brings them to the device and waits until they are there; earlier if `stop` is set.
    /// `progress` is told the bytes of each block. Returns how long it read and uploaded.
    pub(super) fn load(
        &self,
        context: &Arc<Context>,
        kernels: &Kernels,
        stop: &AtomicBool,
        mut progress: impl FnMut(u64),
    ) -> Result<LoadTimes, Failure> {
        let pool = ThreadPoolBuilder::new()
            .num_threads(THREADS.min(std::thread::available_parallelism().map_or(1, usize::from)))
            .thread_name(|i| format!("load-{i}"))
            .build()
            .ok();
        let lane = self.capacity.next_multiple_of(ALIGNMENT);
        let count = LANES.min(self.blocks.len() as u64);
        let staging = Memory::new(context, count * lane)?;
        let mut lanes = (0..count)
            .map(|i| Lane::new(context, staging.address + i * lane, self.capacity))
            .collect::<Result<Vec<_>, _>>()?;
        let mut times = LoadTimes::default();
        let mut result = Ok(());
        for (i, block) in self.blocks.iter().enumerate() {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            let lane = &mut lanes[i % count as usize];
            result = lane.send(block, kernels, pool.as_ref(), &mut times);
            if result.is_err() {
                break;
            }
            progress(block.copies.iter().map(|(_, bytes)| bytes.len() as u64).sum());
        }
        // All lanes must have come to rest before their memory goes.
        let started = Instant::now();
        let ends: Vec<_> = lanes.iter_mut().map(|lane| lane.stream.synchronize()).collect();
        times.upload += started.elapsed().as_secs_f64();
        ends.into_iter().fold(result, Result::and).map(|()| times)
    }
}

/// One way to the device.
struct Lane {
    stream: Stream,
    pinned: Pinned,
    device: u64,
}

impl Lane {
    fn new(context: &Arc<Context>, device: u64, capacity: u64) -> Result<Self, Failure> {
        let stream = Stream::new(context)?;
        Ok(Self { stream, pinned: Pinned::new(context, capacity as usize)?, device })
    }

    fn send(
        &mut self,
        block: &Block<'_>,
        kernels: &Kernels,
        pool: Option<&ThreadPool>,
        times: &mut LoadTimes,
    ) -> Result<(), Failure> {
        let started = Instant::now();
        // The block before may still be read from the same memory.
        self.stream.synchronize()?;
        let free = Instant::now();
        fill(self.pinned.bytes_mut(), &block.copies, pool);
        times.upload += (free - started).as_secs_f64();
        times.read += free.elapsed().as_secs_f64();
        match &block.then {
            Then::Keep(address) => self.stream.copy_in(*address, &self.pinned, block.staged),
            Then::Pack(tiles) => {
                self.stream.copy_in(self.device, &self.pinned, block.staged)?;
                let words = tiles.words(self.device);
                kernels.launch(&mut self.stream, tiles.kernel, [tiles.grid, 1, 1], &words)
            }
        }
    }
}

/// Copies bytes to ascending offsets of `target`, on several threads if there are any.
fn fill(target: &mut [u8], copies: &[(usize, &[u8])], pool: Option<&ThreadPool>) {
    let mut pieces = Vec::new();
    let (mut rest, mut at) = (target, 0);
    for (offset, bytes) in copies {
        let (to, tail) = rest.split_at_mut(offset - at).1.split_at_mut(bytes.len());
        pieces.extend(to.chunks_mut(PIECE).zip(bytes.chunks(PIECE)));
        (rest, at) = (tail, offset + bytes.len());
    }
    match pool {
        Some(pool) if pieces.len() > 1 => {
            pool.install(|| pieces.into_par_iter().for_each(|(to, from)| to.copy_from_slice(from)))
        }
        _ => pieces.into_iter().for_each(|(to, from)| to.copy_from_slice(from)),
    }
}

/// Fills the packed weights with random numbers, for measurements without a data file.
pub(super) fn randomize(
    plan: &Plan,
    layout: &Layout,
    kernels: &Kernels,
    stream: &mut Stream,
    seed: u32,
) -> Result<(), Failure> {
    for (id, (packed, region)) in plan.packed.iter().zip(&layout.packed).enumerate() {
        let seed = seed.wrapping_add(id as u32);
        let deviation = 1.0 / (packed.columns.max(1) as f32).sqrt();
        let words = [region.at, seed.into(), deviation.to_bits().into()];
        kernels.launch(stream, packed.randomize, [packed.randomize_blocks, 1, 1], &words)?;
    }
    stream.synchronize()
}

/// Numbers between 0.9 and 1.1 in place of the resident tensors: norms' weights and scalars.
pub(super) fn random_resident(program: &Program, plan: &Plan, seed: u32) -> Result<Vec<Vec<u8>>> {
    let tensor = |(at, (weight, part)): (usize, &(u32, u32))| {
        let weight = &program.weights[*weight as usize];
        let parts = weight.encoding.parts(&weight.name, &weight.dims);
        let parts = parts.map_err(|e| Error::Device(e.to_string()))?;
        let part = &parts[*part as usize];
        let numbers = (0..part.dims.iter().product::<u64>()).map(|i| {
            let bits =
                crate::sampler::philox([seed, at as u32], [i as u32, (i >> 32) as u32, 0, 0]);
            0.9 + 0.2 * (bits[0] >> 8) as f32 / (1u32 << 24) as f32
        });
        Ok(match part.dtype {
            DType::F32 => numbers.flat_map(f32::to_le_bytes).collect(),
            DType::F16 => numbers.flat_map(|x| f16::from_f32(x).to_le_bytes()).collect(),
            DType::BF16 => numbers.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(),
            DType::U8 => numbers.map(|x| x.to_bits() as u8).collect(),
        })
    };
    plan.resident.iter().enumerate().map(tensor).collect()
}

#[cfg(test)]
mod tests;
