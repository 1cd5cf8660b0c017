//! The traced graph, interpreted node by node with candle.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor as Numbers};
use gemma4_format::{Extents, Method, Op, Operand, Program};

use super::compare::Run;
use super::eager::flat;
use super::weights::{Weights, blocks};
use crate::output::Monitor;
use crate::source::rows_of;
use crate::trace::{self, eval};
use crate::{Error, Result};

/// Runs the program's `prefill` on a prompt, from position 0 up to the logits.
///
/// A weight is read when its node comes, in blocks of rows, and dropped after it; a value after
/// its last use.
///
/// # Errors
/// [`Error::Trace`] if a node can't be computed or a weight can't be read.
pub fn run_traced(
    program: &Program,
    weights: &Weights<'_>,
    tokens: &[u32],
    monitor: &Monitor,
) -> Result<Run> {
    let broken = |why: &str| Error::from(trace::Error::Shape(why.to_owned()));
    let method = program.method("prefill").ok_or_else(|| broken("there is no `prefill`"))?;
    let logits = method.output("logits").ok_or_else(|| broken("there is no output `logits`"))?;
    let mut interpreter = Interpreter::new(program, method, weights, tokens)?;
    let mut hidden = Vec::new();
    for (at, node) in method.nodes.iter().enumerate() {
        if matches!(node.op, Op::Sample) {
            break;
        }
        monitor.weight(&node.label, node.op.name());
        monitor.advance(0)?;
        if let Some(numbers) = interpreter.node(&node.op, &node.args)? {
            if !node.label.is_empty() {
                hidden.push((node.label.clone(), flat(&numbers)?));
            }
            interpreter.values.push(Some(numbers));
        }
        interpreter.forget(at, logits);
    }
    let logits = interpreter.values.get(logits as usize).cloned().flatten();
    let logits = flat(&logits.ok_or_else(|| broken("the logits were not computed"))?)?;
    Ok(Run { logits, hidden })
}

struct Interpreter<'a> {
    program: &'a Program,
    weights: &'a Weights<'a>,
    /// By id; `None` once nobody needs them.
    values: Vec<Option<Numbers>>,
    buffers: HashMap<u32, Numbers>,
    extents: Extents,
    /// Values and buffers by the node that uses them last.
    last_uses: HashMap<usize, Vec<Operand>>,
}

impl<'a> Interpreter<'a> {
    fn new(
        program: &'a Program,
        method: &'a Method,
        weights: &'a Weights<'a>,
        tokens: &[u32],
    ) -> Result<Self> {
        let rows = tokens.len() as u32;
        let tokens = Numbers::new(tokens, &Device::Cpu).map_err(trace::Error::from)?;
        let position = Numbers::new(&[0u32], &Device::Cpu).map_err(trace::Error::from)?;
        let mut values = vec![None; method.inputs.len()];
        for (name, value) in [("tokens", tokens), ("position", position)] {
            if let Some(input) = method.input(name) {
                values[input as usize] = Some(value);
            }
        }
        let mut last: Vec<(Operand, usize)> = Vec::new();
        for (at, node) in method.nodes.iter().enumerate() {
            for arg in &node.args {
                match last.iter_mut().find(|(operand, _)| operand == arg) {
                    Some((_, node)) => *node = at,
                    None => last.push((*arg, at)),
                }
            }
        }
        let mut last_uses: HashMap<usize, Vec<Operand>> = HashMap::new();
        last.into_iter().for_each(|(arg, at)| last_uses.entry(at).or_default().push(arg));
        let extents = Extents { rows, context: rows };
        Ok(Self { program, weights, values, buffers: HashMap::new(), extents, last_uses })
    }

    fn node(&mut self, op: &Op, args: &[Operand]) -> Result<Option<Numbers>> {
        match (op, args) {
            (Op::Embed, [Operand::Value(tokens), Operand::Weight(table)]) => {
                self.embed(*tokens, *table).map(Some)
            }
            (Op::Linear, [Operand::Value(x), Operand::Weight(weight)]) => {
                self.linear(*x, *weight).map(Some)
            }
            _ => {
                let numbers = args.iter().map(|arg| self.operand(*arg));
                let numbers = numbers.collect::<Result<Vec<_>>>()?;
                Ok(eval(op, &numbers.iter().collect::<Vec<_>>())?)
            }
        }
    }

    /// Reads the rows of the tokens alone.
    fn embed(&mut self, tokens: u32, table: u32) -> Result<Numbers> {
        let tokens = self.operand(Operand::Value(tokens))?;
        let ids = tokens.to_vec1::<u32>().map_err(trace::Error::from)?;
        let weight = &self.program.weights[table as usize];
        let rows = ids.iter().map(|id| self.rows(table, u64::from(*id)..u64::from(*id) + 1));
        let rows = rows.collect::<Result<Vec<_>>>()?;
        let width = weight.dims.last().map_or(1, |width| *width as usize);
        let rows = Numbers::cat(&rows, 0).and_then(|rows| rows.reshape((ids.len(), width)));
        let count = ids.len() as u32;
        let ids = Numbers::arange(0, count, &Device::Cpu).map_err(trace::Error::from)?;
        let embedded = eval(&Op::Embed, &[&ids, &rows.map_err(trace::Error::from)?])?;
        embedded.ok_or_else(|| trace::Error::Shape("embed has no result".to_owned()).into())
    }

    /// Reads and multiplies a block of rows at a time.
    fn linear(&mut self, x: u32, weight: u32) -> Result<Numbers> {
        let x = self.operand(Operand::Value(x))?;
        let dims = &self.program.weights[weight as usize].dims;
        let mut columns = Vec::new();
        for rows in blocks(rows_of(dims), dims.last().copied().unwrap_or(1)) {
            let block = self.rows(weight, rows)?;
            columns.extend(eval(&Op::Linear, &[&x, &block])?);
        }
        Ok(Numbers::cat(&columns, 1).map_err(trace::Error::from)?)
    }

    fn operand(&mut self, operand: Operand) -> Result<Numbers> {
        match operand {
            Operand::Value(id) => {
                self.values.get(id as usize).cloned().flatten().ok_or_else(|| {
                    trace::Error::Shape(format!("value {id} was not computed")).into()
                })
            }
            Operand::Weight(id) => {
                let dims = &self.program.weights[id as usize].dims;
                let total = rows_of(dims);
                let shape: Vec<usize> = dims.iter().map(|d| *d as usize).collect();
                Ok(self.rows(id, 0..total)?.reshape(shape).map_err(trace::Error::from)?)
            }
            Operand::Buffer(id) => {
                if let Some(buffer) = self.buffers.get(&id) {
                    return Ok(buffer.clone());
                }
                let dims = &self.program.buffers[id as usize].dims;
                let shape: Vec<usize> =
                    dims.iter().map(|dim| dim.resolve(self.extents) as usize).collect();
                let zeros = Numbers::zeros(shape, DType::F32, &Device::Cpu);
                let zeros = zeros.map_err(trace::Error::from)?;
                self.buffers.insert(id, zeros.clone());
                Ok(zeros)
            }
        }
    }

    /// Rows of a weight as a matrix.
    fn rows(&self, id: u32, rows: std::ops::Range<u64>) -> Result<Numbers> {
        let weight = &self.program.weights[id as usize];
        let (count, name) = ((rows.end - rows.start) as usize, weight.name.clone());
        let numbers = self.weights.rows(&weight.name, rows);
        let numbers = numbers.map_err(|why| trace::Error::Load { name, why })?;
        let width = weight.dims.last().map_or(1, |width| *width as usize);
        Ok(Numbers::from_vec(numbers, (count, width), &Device::Cpu).map_err(trace::Error::from)?)
    }

    /// Drops what no later node uses.
    fn forget(&mut self, node: usize, logits: u32) {
        for operand in self.last_uses.remove(&node).unwrap_or_default() {
            match operand {
                Operand::Value(id) if id != logits => {
                    if let Some(value) = self.values.get_mut(id as usize) {
                        *value = None;
                    }
                }
                Operand::Buffer(id) => drop(self.buffers.remove(&id)),
                _ => {}
            }
        }
    }
}
