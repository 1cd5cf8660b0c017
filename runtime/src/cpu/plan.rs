//! A method prepared for execution: the fact and the place of every value.

use gemma4_format::{Dim, Extents, Fact, Method, Op, Operand, Program, ValueId, ValueType};

use super::arena::{Lifetime, place};
use super::digits::Activations;
use super::linear;
use crate::{Error, Result};

/// Where one value lies.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    /// Type and shape.
    pub(crate) fact: Fact,
    /// Index of its first number in the block of its type.
    pub(crate) offset: usize,
}

/// The values of one method for calls of up to a number of rows.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// By value id.
    pub(crate) places: Vec<Place>,
    /// The result of each node that has one.
    pub(crate) results: Vec<Option<ValueId>>,
    /// Length of the block of float32 values.
    pub(crate) reals: u64,
    /// Length of the block of u32 values.
    pub(crate) integers: u64,
    /// Numbers and bytes of scratch that the largest linear nodes need.
    pub(crate) scratch: (u64, u64),
}

impl Plan {
    /// Plans a verified method.
    pub(crate) fn new(
        program: &Program,
        method: &Method,
        extents: Extents,
        activations: Activations,
    ) -> Result<Self> {
        let facts = program
            .values(method)
            .map_err(|(node, why)| Error::Device(format!("node {node} cannot run: {why}")))?;
        let results = results(method);
        let uses = Uses::new(method, &results, facts.len());
        let mut offsets = vec![0; facts.len()];
        let mut lengths = [0; 2];
        for (length, dtype) in lengths.iter_mut().zip([ValueType::F32, ValueType::U32]) {
            // Values that share another's memory come after it and take its offset.
            let owners: Vec<usize> = (0..facts.len())
                .filter(|id| facts[*id].dtype == dtype && uses.owner[*id] == *id)
                .collect();
            let lifetime = |id: &usize| Lifetime {
                size: facts[*id].elements(extents).unwrap_or(u64::MAX),
                first: uses.first[*id],
                last: uses.last[*id],
            };
            let lifetimes: Vec<Lifetime> = owners.iter().map(lifetime).collect();
            let (placed, total) = place(&lifetimes).ok_or_else(too_large)?;
            for (id, offset) in owners.iter().zip(placed) {
                offsets[*id] = usize::try_from(offset).map_err(|_| too_large())?;
            }
            *length = total;
        }
        let places = facts
            .iter()
            .enumerate()
            .map(|(id, fact)| Place { fact: fact.clone(), offset: offsets[uses.owner[id]] })
            .collect();
        let scratch = scratch(program, method, &facts, extents, activations);
        Ok(Self { places, results, reals: lengths[0], integers: lengths[1], scratch })
    }
}

fn too_large() -> Error {
    Error::Memory { what: "the values of a call".to_owned(), need: u64::MAX, available: 0 }
}

/// Which value each node computes.
fn results(method: &Method) -> Vec<Option<ValueId>> {
    let mut next = method.inputs.len() as ValueId;
    let mut result = |op: &Op| {
        let id = (!matches!(op, Op::BufferWrite)).then_some(next);
        next += ValueId::from(id.is_some());
        id
    };
    method.nodes.iter().map(|node| result(&node.op)).collect()
}

/// When each value is written and last read, and whose memory it lies in.
struct Uses {
    first: Vec<usize>,
    last: Vec<usize>,
    owner: Vec<usize>,
}

impl Uses {
    fn new(method: &Method, results: &[Option<ValueId>], values: usize) -> Self {
        let mut uses =
            Self { first: vec![0; values], last: vec![0; values], owner: (0..values).collect() };
        for (at, (node, result)) in method.nodes.iter().zip(results).enumerate() {
            let at = at + 1;
            for arg in &node.args {
                if let Operand::Value(id) = arg {
                    uses.read(*id as usize, at);
                }
            }
            let Some(result) = result.map(|id| id as usize) else { continue };
            uses.first[result] = at;
            uses.last[result] = at;
            // These change the shape alone.
            if let (Op::SplitHeads { .. } | Op::MergeHeads, [Operand::Value(id)]) =
                (&node.op, &node.args[..])
            {
                uses.owner[result] = uses.owner[*id as usize];
            }
        }
        for output in &method.outputs {
            uses.read(output.value as usize, method.nodes.len() + 1);
        }
        // A caller may look at its inputs as long as the call lasts.
        for input in 0..method.inputs.len() {
            uses.read(input, method.nodes.len() + 1);
        }
        uses
    }

    fn read(&mut self, value: usize, at: usize) {
        let owner = self.owner[value];
        self.last[owner] = self.last[owner].max(at);
    }
}

fn scratch(
    program: &Program,
    method: &Method,
    facts: &[Fact],
    extents: Extents,
    activations: Activations,
) -> (u64, u64) {
    let mut most = (0, 0);
    for node in &method.nodes {
        let (Op::Linear, [Operand::Value(x), Operand::Weight(w)]) = (&node.op, &node.args[..])
        else {
            continue;
        };
        let rows = facts[*x as usize].dims.first().map_or(1, |d: &Dim| d.resolve(extents));
        let dims = &program.weights[*w as usize].dims;
        let extent = |at: usize| dims.get(at).map_or(1, |d| u64::from(*d));
        let needs = linear::scratch(activations, u64::from(rows), extent(0), extent(1));
        most = (needs.0.max(most.0), needs.1.max(most.1));
    }
    most
}
