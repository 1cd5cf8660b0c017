//! Running the nodes of a method.

use std::ops::Range;

use gemma4_format::{BufferId, Dim, Extents, Fact, Method, Node, Op, Operand, ValueId, ValueType};

use super::Cpu;
use super::attention::{Shape, attention};
use super::linear::{Scratch, linear};
use super::plan::Plan;
use super::pointwise::{gelu_tanh, map, rms_norm, zip};
use super::rope::{Kind, Tables};
use crate::memory::{self, Floats, Numbers};
use crate::sampler::sample;
use crate::{DeviceSession, Error, Result, Sampling};

/// Told the label, the extents and the numbers of each labelled float32 value when it is computed.
pub type Observer<'a> = &'a mut (dyn FnMut(&str, &[u32], &[f32]) + Send);

/// A method of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// One row, whose token is drawn from the whole context.
    Decode,
    /// A chunk of a prompt.
    Prefill,
    /// A few tokens, each of which has logits afterwards.
    Verify,
}

impl Entry {
    fn name(self) -> &'static str {
        match self {
            Entry::Decode => "decode",
            Entry::Prefill => "prefill",
            Entry::Verify => "verify",
        }
    }
}

/// The buffers of one session, and memory for the values of one call.
#[derive(Debug)]
pub struct Execution {
    cpu: Cpu,
    context: u32,
    chunk: u32,
    plans: Plans,
    /// By id; `[rows, heads, width]` each.
    buffers: Vec<Floats>,
    memory: Memory,
    /// What the last call was and how many rows it had, for the place of its outputs.
    last: (Entry, u32),
    generation: Option<Running>,
}

/// Memory that a call works in.
#[derive(Debug)]
struct Memory {
    reals: Floats,
    integers: Vec<u32>,
    scratch: Floats,
    digits: Numbers<i8>,
    tables: Tables,
}

/// A generation between `start` and `finish`.
#[derive(Clone, Copy, Debug)]
struct Running {
    sampling: Sampling,
    /// Position of the next token to be drawn.
    position: u32,
    /// The token drawn last.
    token: Option<u32>,
}

impl Execution {
    pub(crate) fn new(cpu: Cpu, context: u32, chunk: u32) -> Result<Self> {
        let program = cpu.0.program.program();
        let plans = Plans::new(&cpu, context, chunk)?;
        let extents = Extents { rows: 1, context };
        let size = |dims: &Vec<Dim>| Fact::f32(dims.clone()).elements(extents).unwrap_or(u64::MAX);
        let sizes: Vec<u64> = program.buffers.iter().map(|b| size(&b.dims)).collect();
        let (reals, scratch) = (plans.most(|p| p.reals), plans.most(|p| p.scratch.0));
        let digits = plans.most(|p| p.scratch.1);
        let total = sizes.iter().fold(reals.saturating_add(scratch), |n, s| n.saturating_add(*s));
        let what = format!("a session with a context of {context} tokens");
        memory::require(&what, total.saturating_mul(4).saturating_add(digits))?;
        let buffers =
            sizes.iter().map(|size| Floats::zeroed(&what, *size)).collect::<Result<_>>()?;
        let mut integers = Vec::new();
        let count = plans.most(|p| p.integers);
        integers.try_reserve_exact(count as usize).map_err(|_| Error::Memory {
            what: what.clone(),
            need: count.saturating_mul(4),
            available: 0,
        })?;
        integers.resize(count as usize, 0);
        let memory = Memory {
            reals: Floats::zeroed(&what, reals)?,
            integers,
            scratch: Floats::zeroed(&what, scratch)?,
            digits: Numbers::zeroed(&what, digits)?,
            tables: Tables::default(),
        };
        let last = (Entry::Prefill, 1);
        Ok(Self { cpu, context, chunk, plans, buffers, memory, last, generation: None })
    }

    /// Numbers in one row of a buffer.
    fn row_length(&self, buffer: BufferId) -> usize {
        let dims = &self.cpu.0.program.program().buffers[buffer as usize].dims;
        let extents = Extents { rows: 1, context: self.context };
        dims.iter().skip(1).map(|dim| dim.resolve(extents) as usize).product()
    }

    /// Runs a method on the tokens of positions `position ..` and returns its output `token`, 0 of
    /// a method that draws none.
    ///
    /// Checks what [`crate::Session`] checks, except that earlier positions hold keys.
    pub fn run(
        &mut self,
        entry: Entry,
        tokens: &[u32],
        position: u32,
        sampling: &Sampling,
    ) -> Result<u32> {
        self.run_observed(entry, tokens, position, sampling, &mut |_, _, _| {})
    }

    /// As [`Execution::run`], showing every labelled value to `observer`.
    pub fn run_observed(
        &mut self,
        entry: Entry,
        tokens: &[u32],
        position: u32,
        sampling: &Sampling,
        observer: Observer<'_>,
    ) -> Result<u32> {
        self.check(entry, tokens, position)?;
        let cpu = self.cpu.clone();
        let method = method(&cpu, entry)?;
        let plan = self.plans.of(entry)?;
        self.last = (entry, tokens.len() as u32);
        let extents = Extents { rows: tokens.len() as u32, context: self.context };
        let mut call = Call {
            cpu: &cpu,
            plan,
            extents,
            position,
            memory: &mut self.memory,
            buffers: &mut self.buffers,
        };
        for (id, input) in method.inputs.iter().enumerate() {
            call.give(id as ValueId, &input.name, tokens, sampling);
        }
        // Inside the pool, parallel loops start without waking this thread each time.
        cpu.0.threads.install(|| {
            for (node, result) in method.nodes.iter().zip(&plan.results) {
                call.execute(node, *result)?;
                if let Some(id) = result
                    && !node.label.is_empty()
                    && plan.places[*id as usize].fact.dtype == ValueType::F32
                {
                    let dims = &plan.places[*id as usize].fact.dims;
                    let dims: Vec<u32> = dims.iter().map(|d| d.resolve(extents)).collect();
                    observer(&node.label, &dims, call.real(*id));
                }
            }
            Ok::<(), Error>(())
        })?;
        Ok(method.output("token").map_or(0, |id| call.integer(id)))
    }

    fn check(&self, entry: Entry, tokens: &[u32], position: u32) -> Result<()> {
        let vocabulary = self.cpu.0.program.program().vocab_size;
        if let Some(token) = tokens.iter().find(|token| **token >= vocabulary) {
            return Err(Error::Token { token: *token, vocabulary });
        }
        let maximum = match entry {
            Entry::Decode => 1,
            Entry::Prefill => self.chunk,
            Entry::Verify => method(&self.cpu, entry)?.max_rows,
        };
        let rows = tokens.len() as u64;
        if rows == 0 {
            return Err(Error::EmptyPrompt);
        }
        if rows > u64::from(maximum) {
            let asked = u32::try_from(rows).unwrap_or(u32::MAX);
            return Err(Error::Chunk { asked, maximum });
        }
        if u64::from(position) + rows > u64::from(self.context) {
            let (present, context) = (position, self.context);
            return Err(Error::ContextFull { tokens: rows, present, context });
        }
        Ok(())
    }
}

fn method(cpu: &Cpu, entry: Entry) -> Result<&Method> {
    cpu.0.program.program().method(entry.name()).ok_or_else(|| missing(entry))
}

fn missing(entry: Entry) -> Error {
    Error::Device(format!("the program has no method `{}`", entry.name()))
}

/// The methods for calls of a session.
#[derive(Debug)]
struct Plans {
    decode: Plan,
    prefill: Plan,
    /// Where the program has this method.
    verify: Option<Plan>,
}

impl Plans {
    fn new(cpu: &Cpu, context: u32, chunk: u32) -> Result<Self> {
        let program = cpu.0.program.program();
        let plan =
            |method, rows| Plan::new(program, method, Extents { rows, context }, cpu.0.activations);
        let verify = program.method(Entry::Verify.name());
        Ok(Self {
            decode: plan(method(cpu, Entry::Decode)?, 1)?,
            prefill: plan(method(cpu, Entry::Prefill)?, chunk)?,
            verify: verify.map(|m| plan(m, m.max_rows.min(context))).transpose()?,
        })
    }

    fn of(&self, entry: Entry) -> Result<&Plan> {
        match entry {
            Entry::Decode => Ok(&self.decode),
            Entry::Prefill => Ok(&self.prefill),
            Entry::Verify => self.verify.as_ref().ok_or_else(|| missing(entry)),
        }
    }

    /// The most of something that one of them needs.
    fn most(&self, count: impl Fn(&Plan) -> u64) -> u64 {
        [&self.decode, &self.prefill].into_iter().chain(&self.verify).map(count).max().unwrap_or(0)
    }
}

impl Execution {
    /// Logits after the last token of the last call.
    fn last_logits(&mut self) -> Result<Vec<f32>> {
        match self.last {
            (Entry::Verify, rows) => self.logits(rows - 1),
            _ => self.logits(0),
        }
    }
}

impl DeviceSession for Execution {
    fn prefill(&mut self, tokens: &[u32], position: u32) -> Result<()> {
        self.run(Entry::Prefill, tokens, position, &Sampling::GREEDY).map(|_| ())
    }

    fn decode(&mut self, token: u32, position: u32) -> Result<()> {
        self.run(Entry::Decode, &[token], position, &Sampling::GREEDY).map(|_| ())
    }

    fn verify(&mut self, tokens: &[u32], position: u32) -> Result<()> {
        self.run(Entry::Verify, tokens, position, &Sampling::GREEDY).map(|_| ())
    }

    fn logits(&mut self, row: u32) -> Result<Vec<f32>> {
        let (entry, rows) = self.last;
        let id = method(&self.cpu, entry)?.output("logits").ok_or(Error::NoLogits)?;
        let place = &self.plans.of(entry)?.places[id as usize];
        let extents = Extents { rows, context: self.context };
        let length = self.cpu.0.program.program().vocab_size as usize;
        let count = place.fact.elements(extents).unwrap_or(0) as usize;
        let logits = &self.memory.reals.as_slice()[place.offset..][..count];
        let row = logits.chunks_exact(length).nth(row as usize).ok_or(Error::NoLogits)?;
        Ok(row.to_vec())
    }

    fn start(&mut self, position: u32, sampling: &Sampling, _: u32) -> Result<()> {
        self.generation = Some(Running { sampling: *sampling, position, token: None });
        Ok(())
    }

    fn next_token(&mut self) -> Result<u32> {
        let Running { sampling, position, token } = self.generation.ok_or(Error::NoLogits)?;
        let token = match token {
            None => sample(&self.last_logits()?, position, &sampling),
            Some(token) => self.run(Entry::Decode, &[token], position - 1, &sampling)?,
        };
        self.generation = Some(Running { sampling, position: position + 1, token: Some(token) });
        Ok(token)
    }

    fn read_buffer(&mut self, buffer: BufferId, rows: u32) -> Result<Vec<u8>> {
        let length = rows as usize * self.row_length(buffer);
        let floats = self.buffers[buffer as usize].as_slice().get(..length);
        let floats = floats.ok_or_else(|| Error::Device(NO_ROWS.to_owned()))?;
        Ok(floats.iter().flat_map(|x| x.to_le_bytes()).collect())
    }

    fn write_buffer(&mut self, buffer: BufferId, rows: &[u8]) -> Result<()> {
        let floats = self.buffers[buffer as usize].as_mut_slice().get_mut(..rows.len() / 4);
        let floats = floats.ok_or_else(|| Error::Device(NO_ROWS.to_owned()))?;
        for (x, bytes) in floats.iter_mut().zip(rows.chunks_exact(4)) {
            *x = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<u32> {
        // The token drawn last has been read by no step.
        Ok(self.generation.take().map_or(0, |running| running.position - 1))
    }
}

const NO_ROWS: &str = "a buffer of the CPU has fewer rows than were asked for";

/// One call of a method.
struct Call<'a> {
    cpu: &'a Cpu,
    plan: &'a Plan,
    extents: Extents,
    position: u32,
    memory: &'a mut Memory,
    buffers: &'a mut [Floats],
}

impl Call<'_> {
    fn range(&self, id: ValueId) -> Range<usize> {
        let place = &self.plan.places[id as usize];
        let length = place.fact.elements(self.extents).unwrap_or(0) as usize;
        place.offset..place.offset + length
    }

    fn real(&self, id: ValueId) -> &[f32] {
        &self.memory.reals.as_slice()[self.range(id)]
    }

    /// The only number of a u32 value, or its first.
    fn integer(&self, id: ValueId) -> u32 {
        self.memory.integers[self.range(id)].first().copied().unwrap_or(0)
    }

    fn extent(&self, id: ValueId, axis: usize) -> usize {
        let dims = &self.plan.places[id as usize].fact.dims;
        dims.get(axis).map_or(1, |d| d.resolve(self.extents) as usize)
    }

    fn last_extent(&self, id: ValueId) -> usize {
        self.extent(id, self.plan.places[id as usize].fact.dims.len() - 1)
    }

    fn vector(&self, weight: u32) -> &[f32] {
        &self.cpu.0.vectors[weight as usize]
    }

    /// Writes an input of the method.
    fn give(&mut self, id: ValueId, name: &str, tokens: &[u32], sampling: &Sampling) {
        let range = self.range(id);
        let Memory { reals, integers, .. } = &mut *self.memory;
        let reals = reals.as_mut_slice();
        match name {
            "tokens" => integers[range].copy_from_slice(tokens),
            "position" => integers[range.start] = self.position,
            "temperature" => reals[range.start] = sampling.temperature,
            "top_k" => integers[range.start] = sampling.top_k,
            "top_p" => reals[range.start] = sampling.top_p,
            "seed" => integers[range].copy_from_slice(&sampling.seed_words()),
            _ => {}
        }
    }

    /// The result's memory, the values to be read, and the scratch.
    fn split(&mut self, out: ValueId) -> (&mut [f32], Around<'_>, Scratch<'_>) {
        let range = self.range(out);
        let Memory { reals, scratch, digits, .. } = &mut *self.memory;
        let (before, rest) = reals.as_mut_slice().split_at_mut(range.start);
        let (out, after) = rest.split_at_mut(range.len());
        let scratch = Scratch { numbers: scratch.as_mut_slice(), bytes: digits.as_mut_slice() };
        (out, Around { before, after, skipped: range.end }, scratch)
    }

    fn execute(&mut self, node: &Node, result: Option<ValueId>) -> Result<()> {
        use Operand::{Buffer, Value, Weight};
        let cpu = self.cpu;
        match (&node.op, &node.args[..], result) {
            (Op::Embed, &[Value(tokens), Weight(table)], Some(out)) => {
                let matrix = cpu.matrix(table);
                let tokens = self.memory.integers[self.range(tokens)].to_vec();
                let (out, ..) = self.split(out);
                for (row, token) in out.chunks_exact_mut(matrix.columns).zip(tokens) {
                    matrix.decode(token as usize, row);
                }
            }
            (Op::Advance, _, Some(out)) => {
                let at = self.range(out).start;
                self.memory.integers[at] = self.position + self.extents.rows;
            }
            (Op::Scale { factor }, &[Value(x)], Some(out)) => {
                let (x, factor) = (self.range(x), *factor);
                let (out, values, _) = self.split(out);
                map(values.get(x), out, |x| x * factor);
            }
            (Op::ScaleByWeight, &[Value(x), Weight(w)], Some(out)) => {
                let (x, factor) = (self.range(x), self.vector(w)[0]);
                let (out, values, _) = self.split(out);
                map(values.get(x), out, |x| x * factor);
            }
            (Op::SoftCap { cap }, &[Value(x)], Some(out)) => {
                let (x, cap) = (self.range(x), *cap);
                let (out, values, _) = self.split(out);
                map(values.get(x), out, |x| cap * (x / cap).tanh());
            }
            (Op::Add, &[Value(a), Value(b)], Some(out)) => {
                let (a, b) = (self.range(a), self.range(b));
                let (out, values, _) = self.split(out);
                zip(values.get(a), values.get(b), out, |a, b| a + b);
            }
            (Op::GeGlu, &[Value(gate), Value(up)], Some(out)) => {
                let (gate, up) = (self.range(gate), self.range(up));
                let (out, values, _) = self.split(out);
                zip(values.get(gate), values.get(up), out, |gate, up| gelu_tanh(gate) * up);
            }
            (Op::RmsNorm { eps }, &[Value(x), ref weight @ ..], Some(out)) => {
                let width = self.last_extent(x);
                let weight = match weight {
                    [Weight(w)] => Some(cpu.0.vectors[*w as usize].as_slice()),
                    _ => None,
                };
                let x = self.range(x);
                let (out, values, _) = self.split(out);
                rms_norm(values.get(x), width, *eps, weight, out);
            }
            (Op::Linear, &[Value(x), Weight(w)], Some(out)) => {
                let (matrix, x) = (cpu.matrix(w), self.range(x));
                let (out, values, scratch) = self.split(out);
                linear(cpu.0.isa, cpu.0.activations, &matrix, values.get(x), out, scratch);
            }
            (Op::Rope { .. }, &[Value(x), _], Some(out)) => self.rope(&node.op, x, out)?,
            (Op::BufferWrite, &[Buffer(buffer), Value(x), _], None) => self.write(buffer, x),
            (
                Op::Attention { window, scale },
                &[Value(q), Buffer(keys), Buffer(values), _],
                Some(out),
            ) => {
                let (heads, width) = (self.extent(q, 1), self.extent(q, 2));
                let buffers = &cpu.0.program.program().buffers;
                let groups = buffers[keys as usize].dims.get(1).and_then(|d| d.fixed());
                let shape = Shape {
                    heads,
                    groups: groups.unwrap_or(1) as usize,
                    width,
                    position: self.position as usize,
                    window: *window,
                    scale: *scale,
                };
                self.attend(shape, q, keys, values, out);
            }
            (Op::LastRow, &[Value(x)], Some(out)) => {
                let x = self.range(x);
                let (out, values, _) = self.split(out);
                let x = values.get(x);
                out.copy_from_slice(&x[x.len() - out.len()..]);
            }
            (Op::Sample, args, Some(out)) => self.sample(args, out),
            // A change of shape alone: the result lies in its operand's memory.
            (Op::SplitHeads { .. } | Op::MergeHeads, ..) => {}
            _ => {
                let name = node.op.name();
                return Err(Error::Device(format!("the CPU device cannot run `{name}`")));
            }
        }
        Ok(())
    }

    fn rope(&mut self, op: &Op, x: ValueId, out: ValueId) -> Result<()> {
        let (heads, width) = (self.extent(x, 1), self.extent(x, 2));
        let (x, range) = (self.range(x), self.range(out));
        let Some(kind) = Kind::of(op, width) else { return Ok(()) };
        let Memory { reals, tables, .. } = &mut *self.memory;
        let (before, rest) = reals.as_mut_slice().split_at_mut(range.start);
        let (out, after) = rest.split_at_mut(range.len());
        let values = Around { before, after, skipped: range.end };
        tables.rotate(kind, self.position, values.get(x), heads, out)
    }

    fn write(&mut self, buffer: u32, x: ValueId) {
        let row = self.extent(x, 1) * self.extent(x, 2);
        let x = &self.memory.reals.as_slice()[self.range(x)];
        let buffer = self.buffers[buffer as usize].as_mut_slice();
        let rows = buffer.len() / row;
        for (at, x) in x.chunks_exact(row).enumerate() {
            let slot = (self.position as usize + at) % rows;
            buffer[slot * row..][..row].copy_from_slice(x);
        }
    }

    fn attend(&mut self, shape: Shape, q: ValueId, keys: u32, values: u32, out: ValueId) {
        let (q, range) = (self.range(q), self.range(out));
        let (before, rest) = self.memory.reals.as_mut_slice().split_at_mut(range.start);
        let (out, after) = rest.split_at_mut(range.len());
        let around = Around { before, after, skipped: range.end };
        let buffer = |id: u32| self.buffers[id as usize].as_slice();
        attention(self.cpu.0.isa, shape, around.get(q), buffer(keys), buffer(values), out);
    }

    fn sample(&mut self, args: &[Operand], out: ValueId) {
        let &[
            Operand::Value(logits),
            Operand::Value(position),
            Operand::Value(temperature),
            Operand::Value(top_k),
            Operand::Value(top_p),
            Operand::Value(seed),
        ] = args
        else {
            return;
        };
        let seed = &self.memory.integers[self.range(seed)];
        let sampling = Sampling::from_inputs(
            self.real(temperature)[0],
            self.integer(top_k),
            self.real(top_p)[0],
            [seed[0], seed[1]],
        );
        let token = sample(self.real(logits), self.integer(position), &sampling);
        let at = self.range(out).start;
        self.memory.integers[at] = token;
    }
}

/// All values but the one that is being written.
struct Around<'a> {
    before: &'a [f32],
    after: &'a [f32],
    /// Index of the first number of `after`.
    skipped: usize,
}

impl Around<'_> {
    /// A value, which the planner has kept apart from the one being written.
    fn get(&self, range: Range<usize>) -> &[f32] {
        if range.start >= self.skipped {
            &self.after[range.start - self.skipped..range.end - self.skipped]
        } else {
            &self.before[range]
        }
    }
}

#[cfg(test)]
mod tests;
