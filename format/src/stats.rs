//! What a program costs, computed from its types alone.

use std::collections::{BTreeMap, BTreeSet};

use crate::dim::{Dim, Extents, Fact};
use crate::op::Op;
use crate::plan::{Argument, Place, Plan};
use crate::program::{Buffer, Operand, Program, WeightId};

/// Weights of one use and one encoding.
#[derive(Clone, Debug)]
pub struct WeightClass {
    /// How the weights are used: `embedding`, `linear`, `norm`, … or several joined by `+`.
    pub usage: String,
    /// [`crate::Encoding::describe`].
    pub encoding: String,
    /// Number of weights.
    pub tensors: u64,
    /// Numbers that they hold.
    pub elements: u64,
    /// Stored bytes.
    pub bytes: u64,
}

impl WeightClass {
    /// Stored bits per number.
    pub fn bits_per_weight(&self) -> f64 {
        self.bytes as f64 * 8.0 / self.elements as f64
    }
}

/// Groups the weights of a verified program by use and encoding.
pub fn weight_classes(program: &Program) -> Vec<WeightClass> {
    let mut uses: BTreeMap<WeightId, BTreeSet<&'static str>> = BTreeMap::new();
    for node in program.methods.iter().flat_map(|m| &m.nodes) {
        for arg in &node.args {
            if let Operand::Weight(id) = arg {
                uses.entry(*id).or_default().insert(usage(&node.op));
            }
        }
    }
    let mut classes: BTreeMap<(String, String), WeightClass> = BTreeMap::new();
    for (id, weight) in program.weights.iter().enumerate() {
        let usage = match uses.get(&(id as u32)) {
            Some(names) => names.iter().copied().collect::<Vec<_>>().join("+"),
            None => "unused".to_owned(),
        };
        let encoding = weight.encoding.describe();
        let class = classes.entry((usage.clone(), encoding.clone())).or_insert(WeightClass {
            usage,
            encoding,
            tensors: 0,
            elements: 0,
            bytes: 0,
        });
        class.tensors += 1;
        class.elements += weight.dims.iter().map(|d| u64::from(*d)).product::<u64>();
        class.bytes += weight.encoding.bytes(&weight.dims).unwrap_or(0);
    }
    classes.into_values().collect()
}

/// Bytes of weights that one decode step must read: every weight once, but of a table that is
/// only gathered from, one row.
pub fn weight_bytes_per_token(program: &Program) -> u64 {
    let Some(decode) = program.method("decode") else { return 0 };
    let mut whole = BTreeSet::new();
    let mut rows = BTreeSet::new();
    for node in &decode.nodes {
        for arg in &node.args {
            if let Operand::Weight(id) = arg {
                if matches!(node.op, Op::Embed) {
                    rows.insert(*id)
                } else {
                    whole.insert(*id)
                };
            }
        }
    }
    let bytes = |id: &WeightId| {
        let weight = &program.weights[*id as usize];
        weight.encoding.bytes(&weight.dims).unwrap_or(0)
    };
    let row = |id: &WeightId| bytes(id) / u64::from(program.weights[*id as usize].dims[0]);
    whole.iter().map(bytes).sum::<u64>() + rows.difference(&whole).map(row).sum::<u64>()
}

/// Bytes of packed weights that a plan's decode step reads: each once, but none of a table that is
/// only gathered from. They differ from what the data file stores where no kernel reads that as it is.
pub fn packed_bytes_per_token(plan: &Plan) -> u64 {
    let launches = plan.methods.iter().filter(|m| m.method == "decode").flat_map(|m| &m.launches);
    let mut whole = BTreeSet::new();
    for launch in launches {
        let kernel = plan.kernels.get(launch.kernel as usize);
        if kernel.is_none_or(|kernel| kernel.symbol == "embed") {
            continue;
        }
        whole.extend(launch.arguments.iter().filter_map(|argument| match argument {
            Argument::Address(Place::Packed(id), _) => Some(*id),
            _ => None,
        }));
    }
    whole.iter().filter_map(|id| plan.packed.get(*id as usize)).map(|packed| packed.bytes).sum()
}

/// Elements of all buffers at a context length; a device multiplies with its element size.
pub fn buffer_elements(program: &Program, context: u32) -> u64 {
    let extents = Extents { rows: 1, context };
    program
        .buffers
        .iter()
        .map(|b| Fact::f32(b.dims.clone()).elements(extents).unwrap_or(u64::MAX))
        .fold(0, u64::saturating_add)
}

/// Elements by which the buffers grow per token of context, once all rings are full.
pub fn buffer_elements_per_token(program: &Program) -> u64 {
    program
        .buffers
        .iter()
        .filter(|b| matches!(b.dims.first(), Some(Dim::Context)))
        .map(|b| b.dims[1..].iter().filter_map(|d| d.fixed()).map(u64::from).product::<u64>())
        .sum()
}

/// Bytes of a position in each buffer, for a device whose numbers have `element` bytes.
pub fn position_bytes(program: &Program, element: u32) -> Vec<u32> {
    let numbers = |buffer: &Buffer| {
        let dims = buffer.dims.iter().skip(1).map(|dim| dim.fixed().unwrap_or(1));
        dims.fold(element, u32::saturating_mul)
    };
    program.buffers.iter().map(numbers).collect()
}

/// Bytes of all buffers on a GPU at a context length.
pub fn gpu_buffer_bytes(program: &Program, plan: &Plan, context: u32) -> u64 {
    let extents = Extents { rows: 1, context };
    let bytes = |(buffer, bytes): (&Buffer, &u32)| {
        let rows = buffer.dims.first().map_or(0, |rows| rows.resolve(extents));
        u64::from(rows).saturating_mul(u64::from(*bytes))
    };
    program.buffers.iter().zip(&plan.position_bytes).map(bytes).fold(0, u64::saturating_add)
}

/// Bytes by which the buffers on a GPU grow per token of context, once all rings are full.
pub fn gpu_buffer_bytes_per_token(program: &Program, plan: &Plan) -> u64 {
    let grows = |buffer: &Buffer| matches!(buffer.dims.first(), Some(Dim::Context));
    let buffers = program.buffers.iter().zip(&plan.position_bytes);
    buffers.filter(|(buffer, _)| grows(buffer)).map(|(_, bytes)| u64::from(*bytes)).sum()
}

fn usage(op: &Op) -> &'static str {
    match op {
        Op::Embed => "embedding",
        Op::Linear => "linear",
        Op::RmsNorm { .. } => "norm",
        Op::ScaleByWeight => "scalar",
        _ => "other",
    }
}
