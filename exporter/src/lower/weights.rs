//! How the program's weights become packed ones.

use gemma4_format::plan::Pack as PackStep;
use gemma4_format::{DType, Encoding, Program, Weight, WeightId};
use gemma4_kernels::{Kernel, Order, Pack, Packed, TILE_ROWS};

use super::{Error, Result};

/// Matrices that share a packed weight, and how they are brought into it.
pub(super) struct Packing {
    pub(super) packed: Packed,
    /// Kernel and step; the step's ids of kernel and packed weight are still to be filled in.
    pub(super) steps: Vec<(Kernel, PackStep)>,
}

/// Stacks matrices: the rows of the first, then those of the next.
pub(super) fn stacked(program: &Program, ids: &[WeightId]) -> Result<Packing> {
    let packed = common(program, ids)?;
    let mut first_tile = 0;
    let mut steps = Vec::new();
    for id in ids {
        let Weight { name, dims, encoding, .. } = &program.weights[*id as usize];
        let rows = dims[0];
        if ids.len() > 1 && !rows.is_multiple_of(TILE_ROWS) {
            let why = format!("`{name}` has {rows} rows, no multiple of {TILE_ROWS}");
            return Err(Error::Graph(why));
        }
        let pack = Pack { source: *encoding, packed, order: Order::Rows, rows };
        steps.push(step(&pack, vec![*id], TILE_ROWS, first_tile)?);
        first_tile += pack.tiles();
    }
    Ok(Packing { packed, steps })
}

/// Gate and up, eight rows of each in turn.
pub(super) fn in_turns(program: &Program, gate: WeightId, up: WeightId) -> Result<Packing> {
    let packed = common(program, &[gate, up])?;
    let encoding = |id: WeightId| program.weights[id as usize].encoding;
    let rows = packed.n / 2;
    let turns =
        |source, order, ids| step(&Pack { source, packed, order, rows }, ids, TILE_ROWS / 2, 0);
    let steps = if encoding(gate) == encoding(up) {
        vec![turns(encoding(gate), Order::Turns, vec![gate, up])?]
    } else {
        vec![
            turns(encoding(gate), Order::FirstTurns, vec![gate])?,
            turns(encoding(up), Order::SecondTurns, vec![up])?,
        ]
    };
    Ok(Packing { packed, steps })
}

fn step(
    pack: &Pack,
    sources: Vec<WeightId>,
    rows_per_tile: u32,
    first_tile: u32,
) -> Result<(Kernel, PackStep)> {
    let kernel = pack.kernel()?;
    let step = PackStep {
        kernel: 0,
        packed: 0,
        sources,
        rows_per_tile,
        first_tile,
        total_rows: pack.packed.n,
        units_per_tile: pack.packed.units(),
        warps_per_block: kernel.block / 32,
    };
    Ok((kernel, step))
}

/// The layout that holds the rows of all matrices exactly.
fn common(program: &Program, ids: &[WeightId]) -> Result<Packed> {
    let weight = |id: &WeightId| &program.weights[*id as usize];
    let first = weight(&ids[0]);
    let mut n = 0u32;
    for weight in ids.iter().map(weight) {
        if weight.dims[1] != first.dims[1] {
            return Err(Error::Graph(format!(
                "`{}` has {} columns and `{}` {}; they multiply the same activations",
                first.name, first.dims[1], weight.name, weight.dims[1]
            )));
        }
        n = n
            .checked_add(weight.dims[0])
            .ok_or_else(|| Error::Graph(format!("`{}` has too many rows", weight.name)))?;
    }
    let encodings: Vec<Encoding> = ids.iter().map(|id| weight(id).encoding).collect();
    match encodings.iter().position(|encoding| *encoding != first.encoding) {
        None => Ok(Packed::new(first.encoding, n, first.dims[1])?),
        Some(other) => Packed::common(&encodings, n, first.dims[1]).map_err(|why| {
            let other = weight(&ids[other]);
            Error::Graph(format!(
                "`{}` is {} and `{}` is {}; on a GPU they share a packed weight, and {}",
                first.name,
                first.encoding.describe(),
                other.name,
                other.encoding.describe(),
                why.reason
            ))
        }),
    }
}

/// Type of a vector that is read as it is stored.
pub(super) fn vector_type(program: &Program, id: WeightId) -> Result<DType> {
    let weight = &program.weights[id as usize];
    match weight.encoding {
        Encoding::Dense(dtype) => Ok(dtype),
        Encoding::Quantized { .. } => {
            Err(Error::Graph(format!("`{}` is quantized; it must be dense", weight.name)))
        }
    }
}
