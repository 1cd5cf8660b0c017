//! Writes the launches of each method.

use std::collections::HashMap;
use std::ops::RangeInclusive;

use gemma4_format::plan::{
    Argument, Count, Launch, Lowered, Pack as PackStep, Packed as PackedWeight, Place, table,
};
use gemma4_format::{Program, WeightId};
use gemma4_kernels::{
    AddNorm, Arch, AttentionPrefill, Embed, Epilogue, Geglu, Heads, Kernel, Keys, LinearMany,
    ManyOutput, Output, Packed, Randomize, Rope, Sample, panel_elements,
};

use super::draft::{
    Draft, LOGITS, NULL, Operand, ROWS, STATE, TABLE, in_table, number, packed, real, ring,
};
use super::scratch::Slot;
use super::stages::{Attention, Layer, Stages};
use super::weights::{Packing, in_turns, stacked, vector_type};
use super::{Fusions, Result};

/// Everything of a plan but the compiled modules.
pub(super) struct Schedule {
    /// By index, as launches name them.
    pub(super) kernels: Vec<Kernel>,
    pub(super) packed: Vec<PackedWeight>,
    pub(super) packs: Vec<PackStep>,
    pub(super) resident: Vec<(WeightId, u32)>,
    pub(super) position_bytes: Vec<u32>,
    pub(super) scratch: u64,
    pub(super) methods: Vec<Lowered>,
    pub(super) sample: Vec<Launch>,
}

impl Schedule {
    /// Lowers a program for one architecture.
    pub(super) fn new(
        program: &Program,
        stages: &Stages,
        arch: Arch,
        multiprocessors: u32,
        fusions: Fusions,
    ) -> Result<Self> {
        let mut builder = Builder::new(program, stages, arch, multiprocessors, fusions)?;
        let longest = program.method("prefill").map_or(1, |m| m.max_rows);
        builder.reserve_products(longest);
        builder.decode()?;
        builder.prefill(longest)?;
        builder.verify(program.method("verify").map_or(0, |m| m.max_rows))?;
        builder.sample()?;
        Ok(builder.schedule)
    }
}

/// A packed weight and its place.
#[derive(Clone, Copy)]
pub(super) struct Matrix {
    pub(super) packed: Packed,
    pub(super) id: u32,
}

/// The packed weights of a layer.
pub(super) struct LayerWeights {
    pub(super) qkv: Matrix,
    pub(super) o: Matrix,
    pub(super) gate_up: Matrix,
    pub(super) down: Matrix,
}

pub(super) struct Builder<'a> {
    pub(super) program: &'a Program,
    pub(super) stages: &'a Stages,
    pub(super) arch: Arch,
    pub(super) multiprocessors: u32,
    pub(super) fusions: Fusions,
    schedule: Schedule,
    known: HashMap<Key, u32>,
    resident: HashMap<WeightId, u32>,
    table: Matrix,
    pub(super) head: Matrix,
    pub(super) layers: Vec<LayerWeights>,
    /// Bytes at the start of scratch memory that stay zero between launches.
    ready: u64,
}

/// What makes two kernels the same: source, symbol, defines, shared memory.
type Key = (&'static str, &'static str, Vec<(&'static str, String)>, u32);

impl<'a> Builder<'a> {
    fn new(
        program: &'a Program,
        stages: &'a Stages,
        arch: Arch,
        multiprocessors: u32,
        fusions: Fusions,
    ) -> Result<Self> {
        let schedule = Schedule {
            kernels: Vec::new(),
            packed: Vec::new(),
            packs: Vec::new(),
            resident: Vec::new(),
            position_bytes: vec![0; program.buffers.len()],
            scratch: 0,
            methods: Vec::new(),
            sample: Vec::new(),
        };
        let packing = stacked(program, &[stages.table])?;
        let unset = Matrix { packed: packing.packed, id: 0 };
        let mut builder = Self {
            program,
            stages,
            arch,
            multiprocessors,
            fusions,
            schedule,
            known: HashMap::new(),
            resident: HashMap::new(),
            table: unset,
            head: unset,
            layers: Vec::new(),
            ready: 0,
        };
        builder.table = builder.pack(packing);
        builder.head = match stages.head == stages.table {
            true => builder.table,
            false => builder.pack(stacked(program, &[stages.head])?),
        };
        for layer in &stages.layers {
            let weights = LayerWeights {
                qkv: builder.pack(stacked(program, &layer.attention.projections)?),
                o: builder.pack(stacked(program, &[layer.attention.o])?),
                gate_up: builder.pack(in_turns(program, layer.gate, layer.up)?),
                down: builder.pack(stacked(program, &[layer.down])?),
            };
            builder.layers.push(weights);
            let attention = &layer.attention;
            let columns = builder.heads_of(attention).keys.columns(attention.width);
            let bfloat16 = |columns: u32| attention.kv_heads * columns * 2;
            let position_bytes = &mut builder.schedule.position_bytes;
            position_bytes[attention.keys as usize] = bfloat16(columns);
            position_bytes[attention.values as usize] = bfloat16(attention.width);
        }
        Ok(builder)
    }

    /// Registers a packed weight and the steps that fill it.
    fn pack(&mut self, packing: Packing) -> Matrix {
        let Packing { packed, steps } = packing;
        let randomize = Randomize { weight: packed }.kernel();
        let Count::Fixed(randomize_blocks) = randomize.grid[0] else {
            unreachable!("the grid of `randomize` depends on the weight alone");
        };
        let id = self.schedule.packed.len() as u32;
        let randomize = self.kernel(&randomize);
        self.schedule.packed.push(PackedWeight {
            bytes: packed.bytes(),
            randomize,
            randomize_blocks,
            columns: packed.k,
        });
        for (kernel, mut step) in steps {
            step.kernel = self.kernel(&kernel);
            step.packed = id;
            self.schedule.packs.push(step);
        }
        Matrix { packed, id }
    }

    /// The index of a kernel; equal instances share one.
    fn kernel(&mut self, kernel: &Kernel) -> u32 {
        let key = (kernel.source.name, kernel.symbol, kernel.defines.clone(), kernel.shared);
        let next = self.schedule.kernels.len() as u32;
        *self.known.entry(key).or_insert_with(|| {
            self.schedule.kernels.push(kernel.clone());
            next
        })
    }

    /// A stored vector, kept on the device as it is.
    pub(super) fn vector(&mut self, id: WeightId) -> Operand {
        let next = self.schedule.resident.len() as u32;
        let at = *self.resident.entry(id).or_insert_with(|| {
            self.schedule.resident.push((id, 0));
            next
        });
        Operand::Fixed(Argument::Address(Place::Resident(at), 0))
    }

    pub(super) fn launch(&mut self, draft: &mut Draft, kernel: &Kernel, operands: Vec<Operand>) {
        debug_assert_eq!(operands.len(), kernel.args.len(), "{}", kernel.symbol);
        let index = self.kernel(kernel);
        draft.add(index, kernel.grid, operands);
    }

    pub(super) fn hidden(&self) -> u32 {
        self.table.packed.k
    }

    /// Adds the launches of a method for calls of so many rows.
    pub(super) fn finish(&mut self, draft: Draft, method: &str, rows: RangeInclusive<u32>) {
        let (launches, end) = draft.finish(self.ready);
        self.schedule.scratch = self.schedule.scratch.max(end);
        let (method, (min_rows, max_rows)) = (method.to_owned(), rows.into_inner());
        self.schedule.methods.push(Lowered { method, min_rows, max_rows, launches });
    }

    /// A row whose token stands in the session's state.
    fn decode(&mut self) -> Result<()> {
        self.few_rows("decode", 1..=1, table::STATE)
    }

    /// Scratch memory that every product of many rows leaves zero, at the start.
    fn reserve_products(&mut self, longest: u32) {
        let sms = self.multiprocessors;
        let bytes = |matrix: Matrix| {
            LinearMany::choose(matrix.packed, longest, ManyOutput::F32, self.arch).ready_bytes(sms)
        };
        let matrices = self.layers.iter().flat_map(|w| [w.qkv, w.o, w.gate_up, w.down]);
        self.ready = matrices.map(bytes).max().unwrap_or(0).next_multiple_of(256);
    }

    fn prefill(&mut self, max_rows: u32) -> Result<()> {
        let mut draft = Draft::default();
        let h = self.hidden();
        let room = max_rows.next_multiple_of(8);
        let wide = |columns: u32| u64::from(max_rows) * u64::from(columns);
        let panels = |columns: u32| panel_elements(room, columns) * 2;
        let many =
            |matrix: Matrix, output| LinearMany::choose(matrix.packed, max_rows, output, self.arch);
        let gated = if self.fusions.geglu { ManyOutput::Geglu } else { ManyOutput::F32 };
        let products: Vec<[LinearMany; 4]> = self
            .layers
            .iter()
            .map(|w| {
                [
                    many(w.qkv, ManyOutput::F32),
                    many(w.o, ManyOutput::F32),
                    many(w.gate_up, gated),
                    many(w.down, ManyOutput::F32),
                ]
            })
            .collect();
        let sms = self.multiprocessors;
        let partials = products.iter().flatten().map(|p| p.partial_bytes(sms)).max().unwrap_or(0);
        let partials = draft.slots.add(partials);

        let x = draft.floats(wide(h));
        self.embed(&mut draft, table::TOKENS, x);
        let stages = self.stages;
        let output = Output::Panels { room };
        let mut normed = draft.slots.add(panels(h));
        self.norm(
            &mut draft,
            x,
            stages.layers.first().map_or(stages.norm, |l| l.attention.pre_norm),
            normed,
            output,
        )?;
        for (i, layer) in stages.layers.iter().enumerate() {
            let Layer { attention, .. } = layer;
            let ids = {
                let w = &self.layers[i];
                [w.qkv.id, w.o.id, w.gate_up.id, w.down.id]
            };
            let [qkv, o, gate_up, down] = products[i];
            let product = |builder: &mut Self,
                           draft: &mut Draft,
                           at: usize,
                           linear: LinearMany,
                           input: Slot,
                           bytes: u64|
             -> Result<Slot> {
                let y = draft.slots.add(bytes);
                builder.product_many(draft, linear, ids[at], (y, input, partials), room)?;
                Ok(y)
            };
            let y = product(self, &mut draft, 0, qkv, normed, wide(qkv.weight.n) * 4)?;
            let q = self.rotate(&mut draft, attention, y, 1, max_rows)?;
            let attended = draft.slots.add(panels(attention.heads * attention.width));
            self.attention_many(&mut draft, attention, q, attended, room)?;
            let y = product(self, &mut draft, 1, o, attended, wide(h) * 4)?;
            normed = draft.slots.add(panels(h));
            let next = Some((layer.pre_norm, normed, output));
            self.add_norm(&mut draft, (y, 1), attention.post_norm, None, x, next)?;
            let width = gate_up.weight.n / 2;
            let gated = if self.fusions.geglu {
                product(self, &mut draft, 2, gate_up, normed, panels(width))?
            } else {
                let y = product(self, &mut draft, 2, gate_up, normed, wide(2 * width) * 4)?;
                let gated = draft.slots.add(panels(width));
                self.geglu(&mut draft, Geglu { width, splits: 1, output }, y, gated)?;
                gated
            };
            let y = product(self, &mut draft, 3, down, gated, wide(h) * 4)?;
            let next = match stages.layers.get(i + 1) {
                Some(next) => {
                    normed = draft.slots.add(panels(h));
                    Some((next.attention.pre_norm, normed, output))
                }
                None => None,
            };
            self.add_norm(&mut draft, (y, 1), layer.post_norm, Some(layer.scalar), x, next)?;
        }
        // The head sees the last row only.
        let head = self.few(self.head, 1, Epilogue::SoftCap)?;
        self.normed_head(&mut draft, head, Operand::LastRow(x, u64::from(h) * 4), 1, 0)?;
        self.finish(draft, "prefill", 1..=max_rows);
        Ok(())
    }

    fn sample(&mut self) -> Result<()> {
        let mut draft = Draft::default();
        let sample = Sample { vocabulary: self.program.vocab_size };
        let maxima = draft.slots.add(u64::from(sample.stretches()) * 8);
        self.launch(&mut draft, &sample.maxima()?, vec![LOGITS, Operand::Slot(maxima)]);
        let stops = Operand::Fixed(Argument::Address(Place::Stops, 0));
        let operands = vec![
            LOGITS,
            Operand::Slot(maxima),
            TABLE,
            STATE,
            number(table::OUTPUT),
            number(table::OUTPUT_SLOTS),
            stops,
            number(self.program.text.stop_tokens.len() as u32),
            ROWS,
        ];
        self.launch(&mut draft, &sample.kernel()?, operands);
        let (launches, end) = draft.finish(self.ready);
        self.schedule.scratch = self.schedule.scratch.max(end);
        self.schedule.sample = launches;
        Ok(())
    }

    /// Rows of the embedding table for the tokens at a place of the session's table.
    pub(super) fn embed(&mut self, draft: &mut Draft, tokens: u32, x: Slot) {
        let kernel = Embed { weight: self.table.packed }.kernel();
        let operands = vec![
            packed(self.table.id),
            TABLE,
            number(tokens),
            Operand::Slot(x),
            real(self.stages.embed_scale),
        ];
        self.launch(draft, &kernel, operands);
    }

    /// Blocks that share a row of a norm: several where there are few rows.
    fn cluster(&self, draft: &Draft) -> u32 {
        if draft.few_rows { AddNorm::cluster(self.arch) } else { 1 }
    }

    /// Norms the residual stream as it is.
    pub(super) fn norm(
        &mut self,
        draft: &mut Draft,
        x: Slot,
        norm: WeightId,
        y: Slot,
        output: Output,
    ) -> Result<()> {
        let kernel = AddNorm {
            h: self.hidden(),
            splits: 0,
            scalar: false,
            next: Some(output),
            weight: vector_type(self.program, norm)?,
            cluster: self.cluster(draft),
        }
        .kernel()?;
        let weight = self.vector(norm);
        let eps = real(self.stages.eps);
        let operands =
            vec![NULL, NULL, NULL, Operand::Slot(x), weight, Operand::Slot(y), ROWS, eps];
        self.launch(draft, &kernel, operands);
        Ok(())
    }

    /// Adds a product to the residual stream and norms that for the next one.
    pub(super) fn add_norm(
        &mut self,
        draft: &mut Draft,
        (sums, splits): (Slot, u32),
        post: WeightId,
        scalar: Option<WeightId>,
        x: Slot,
        next: Option<(WeightId, Slot, Output)>,
    ) -> Result<()> {
        let (next, apart) = if self.fusions.add_norm { (next, None) } else { (None, next) };
        let kernel = AddNorm {
            h: self.hidden(),
            splits,
            scalar: scalar.is_some(),
            next: next.map(|(.., output)| output),
            weight: vector_type(self.program, post)?,
            cluster: self.cluster(draft),
        }
        .kernel()?;
        let post = self.vector(post);
        let scalar = scalar.map_or(NULL, |id| self.vector(id));
        let (weight, y) = match next {
            Some((weight, y, _)) => (self.vector(weight), Operand::Slot(y)),
            None => (NULL, NULL),
        };
        let eps = real(self.stages.eps);
        let operands =
            vec![Operand::Slot(sums), post, scalar, Operand::Slot(x), weight, y, ROWS, eps];
        self.launch(draft, &kernel, operands);
        match apart {
            Some((weight, y, output)) => self.norm(draft, x, weight, y, output),
            None => Ok(()),
        }
    }

    /// GEGLU of a product's sums.
    pub(super) fn geglu(
        &mut self,
        draft: &mut Draft,
        geglu: Geglu,
        sums: Slot,
        y: Slot,
    ) -> Result<()> {
        let operands = vec![Operand::Slot(sums), Operand::Slot(y), ROWS];
        self.launch(draft, &geglu.kernel()?, operands);
        Ok(())
    }

    fn product_many(
        &mut self,
        draft: &mut Draft,
        linear: LinearMany,
        id: u32,
        (y, x, partials): (Slot, Slot, Slot),
        room: u32,
    ) -> Result<()> {
        let mut operands = vec![Operand::Slot(y), Operand::Slot(x), packed(id)];
        if linear.hopper {
            let ready = Operand::Fixed(Argument::Address(Place::Scratch, 0));
            operands.extend([Operand::Slot(partials), ready]);
        }
        operands.extend([ROWS, number(room)]);
        self.launch(draft, &linear.kernel()?, operands);
        Ok(())
    }

    /// The heads of a layer as kernels see them.
    pub(super) fn heads_of(&self, attention: &Attention) -> Heads {
        let Attention { heads, kv_heads, width, window, rope, .. } = *attention;
        let keys = match attention.shares_keys() {
            true => Keys::beside_values(width, rope.rotated, self.arch),
            false => Keys::Whole,
        };
        Heads { q_heads: heads, kv_heads, d: width, keys, window }
    }

    /// Norms and rotates queries and keys, norms values, writes the buffers; returns the queries.
    pub(super) fn rotate(
        &mut self,
        draft: &mut Draft,
        attention: &Attention,
        sums: Slot,
        splits: u32,
        max_rows: u32,
    ) -> Result<Slot> {
        let Attention { heads, kv_heads, width, rope, keys, values, .. } = *attention;
        let kernel = Rope {
            q_heads: heads,
            kv_heads,
            d: width,
            frequencies: Rope::frequencies(rope.base, width, rope.rotated, rope.factor),
            shared_kv: attention.shares_keys(),
            keys: self.heads_of(attention).keys,
            splits,
            weight: vector_type(self.program, attention.q_norm)?,
        }
        .kernel()?;
        let q = draft.floats(u64::from(max_rows) * u64::from(heads * width));
        let (q_norm, k_norm) = (self.vector(attention.q_norm), self.vector(attention.k_norm));
        let operands = vec![
            Operand::Slot(sums),
            q_norm,
            k_norm,
            Operand::Slot(q),
            TABLE,
            STATE,
            in_table(keys),
            in_table(values),
            ring(keys),
            ROWS,
            real(self.stages.eps),
        ];
        self.launch(draft, &kernel, operands);
        Ok(q)
    }

    fn attention_many(
        &mut self,
        draft: &mut Draft,
        attention: &Attention,
        q: Slot,
        y: Slot,
        room: u32,
    ) -> Result<()> {
        let Attention { keys, values, scale, .. } = *attention;
        let many = AttentionPrefill::choose(self.heads_of(attention), self.arch);
        let operands = vec![
            Operand::Slot(q),
            TABLE,
            STATE,
            in_table(keys),
            in_table(values),
            ring(keys),
            Operand::Slot(y),
            ROWS,
            number(room),
            real(scale),
        ];
        self.launch(draft, &many.kernel()?, operands);
        Ok(())
    }
}
