//! Calls of few rows: a decode step has one, `verify` up to 8. Every product reads its weight once
//! for all of them.

use std::ops::RangeInclusive;

use gemma4_format::plan::{Argument, Count, Place, table};
use gemma4_kernels::{AddNorm, AttentionFew, Epilogue, Geglu, LinearFew, Output};

use super::Result;
use super::draft::{
    Draft, NULL, Operand, ROWS, STATE, TABLE, in_table, number, packed, real, ring,
};
use super::schedule::{Builder, Matrix};
use super::scratch::Slot;
use super::stages::Attention;
use super::weights::vector_type;

/// Rows that the forms of `verify` are for at most. A product for more rows than a call has does
/// the work of all of them.
const FORMS: [u32; 4] = [1, 2, 4, 8];

impl Builder<'_> {
    /// `verify`, in a form for each range of rows.
    pub(super) fn verify(&mut self, max_rows: u32) -> Result<()> {
        let mut first = 1;
        for last in FORMS.map(|rows| rows.min(max_rows)) {
            if first <= last {
                self.few_rows("verify", first..=last, table::TOKENS)?;
            }
            first = last + 1;
        }
        Ok(())
    }

    /// The product of a packed weight for few rows. It is chosen as for an input that comes split,
    /// so that its sums are the same bit for bit where the input does not.
    pub(super) fn few(&self, matrix: Matrix, rows: u32, epilogue: Epilogue) -> Result<LinearFew> {
        let (arch, sms, rows) = (self.arch, self.multiprocessors, rows.next_power_of_two());
        let chosen = LinearFew::choose(matrix.packed, rows, epilogue, true, arch, sms)?;
        Ok(LinearFew { split_input: self.fusions.split, ..chosen })
    }

    /// The head's product for as many of so many rows as fit into shared memory.
    fn few_of_head(&self, rows: u32) -> Result<LinearFew> {
        match self.few(self.head, rows, Epilogue::SoftCap) {
            Err(_) if rows > 1 => self.few_of_head(rows.next_power_of_two() / 2),
            chosen => chosen,
        }
    }

    /// A method for calls of few rows, whose tokens are at a place of the session's table.
    pub(super) fn few_rows(
        &mut self,
        method: &str,
        rows: RangeInclusive<u32>,
        tokens: u32,
    ) -> Result<()> {
        let mut draft = Draft::of_few_rows();
        let most = *rows.end();
        let x = draft.floats(u64::from(most) * u64::from(self.hidden()));
        self.embed(&mut draft, tokens, x);
        let products = (0..self.layers.len())
            .map(|i| {
                let weights = &self.layers[i];
                let few = |matrix| self.few(matrix, most, Epilogue::Partial);
                Ok([few(weights.qkv)?, few(weights.o)?, few(weights.gate_up)?, few(weights.down)?])
            })
            .collect::<Result<Vec<_>>>()?;
        let head = self.few_of_head(most)?;
        let stages = self.stages;
        let input_of = |i: usize| input(products.get(i).map_or(&head, |p| &p[0]));
        let norm_of = |i: usize| stages.layers.get(i).map_or(stages.norm, |l| l.attention.pre_norm);

        let (output, bytes) = input_of(0);
        let mut normed = draft.slots.add(bytes);
        self.norm(&mut draft, x, norm_of(0), normed, output)?;
        for (i, layer) in stages.layers.iter().enumerate() {
            let [qkv, o, gate_up, down] = products[i];
            let ids = {
                let w = &self.layers[i];
                [w.qkv.id, w.o.id, w.gate_up.id, w.down.id]
            };
            let sums = self.product_few(&mut draft, qkv, ids[0], normed, most);
            let q = self.rotate(&mut draft, &layer.attention, sums, qkv.splits, most)?;
            let attended = self.attention_few(&mut draft, &layer.attention, q, &o, most)?;
            let sums = self.product_few(&mut draft, o, ids[1], attended, most);
            let (output, bytes) = input(&gate_up);
            normed = draft.slots.add(bytes);
            let next = Some((layer.pre_norm, normed, output));
            let splits = o.splits;
            self.add_norm(&mut draft, (sums, splits), layer.attention.post_norm, None, x, next)?;
            let sums = self.product_few(&mut draft, gate_up, ids[2], normed, most);
            let (output, bytes) = input(&down);
            let gated = draft.slots.add(bytes);
            let geglu = Geglu { width: gate_up.weight.n / 2, splits: gate_up.splits, output };
            self.geglu(&mut draft, geglu, sums, gated)?;
            let sums = self.product_few(&mut draft, down, ids[3], gated, most);
            let is_last = i + 1 == stages.layers.len();
            // A head in pieces norms the rows of each.
            let next = (!is_last || most <= head.rows).then(|| {
                let (output, bytes) = input_of(i + 1);
                normed = draft.slots.add(bytes);
                (norm_of(i + 1), normed, output)
            });
            let scalar = Some(layer.scalar);
            let splits = down.splits;
            self.add_norm(&mut draft, (sums, splits), layer.post_norm, scalar, x, next)?;
        }
        if most <= head.rows {
            self.head(&mut draft, head, normed, ROWS, 0)?;
        } else {
            for first in (0..most).step_by(head.rows as usize) {
                let at = Operand::Inside(x, u64::from(first) * u64::from(self.hidden()) * 4);
                self.normed_head(&mut draft, head, at, head.rows.min(most - first), first)?;
            }
        }
        self.finish(draft, method, rows);
        Ok(())
    }

    /// Partial sums of a product.
    fn product_few(
        &mut self,
        draft: &mut Draft,
        linear: LinearFew,
        id: u32,
        x: Slot,
        rows: u32,
    ) -> Slot {
        let sums = u64::from(linear.splits) * u64::from(rows) * u64::from(linear.weight.n);
        let sums = draft.floats(sums);
        // What was chosen for these constants has a kernel.
        if let Ok(kernel) = linear.kernel() {
            let operands = vec![packed(id), Operand::Slot(x), Operand::Slot(sums), ROWS, real(0.0)];
            self.launch(draft, &kernel, operands);
        }
        sums
    }

    /// Attention, left as the output projection reads it.
    fn attention_few(
        &mut self,
        draft: &mut Draft,
        attention: &Attention,
        q: Slot,
        o: &LinearFew,
        rows: u32,
    ) -> Result<Slot> {
        let Attention { heads, width, keys, values, scale, .. } = *attention;
        let (output, bytes) = input(o);
        let device = (self.arch, self.multiprocessors);
        let few = AttentionFew::choose(self.heads_of(attention), rows, output, device);
        let parts = u64::from(few.splits) * u64::from(rows) * u64::from(heads);
        let sums = draft.floats(parts * u64::from(width));
        let stats = draft.floats(parts * 2);
        let operands = vec![
            Operand::Slot(q),
            TABLE,
            STATE,
            in_table(keys),
            in_table(values),
            ring(keys),
            Operand::Slot(sums),
            Operand::Slot(stats),
            ROWS,
            real(scale),
        ];
        self.launch(draft, &few.kernel()?, operands);
        let y = draft.slots.add(bytes);
        let operands =
            vec![Operand::Slot(sums), Operand::Slot(stats), Operand::Slot(y), TABLE, STATE, ROWS];
        self.launch(draft, &few.join()?, operands);
        Ok(y)
    }

    /// Logits of so many rows of the residual stream, which become those from row `first` on.
    pub(super) fn normed_head(
        &mut self,
        draft: &mut Draft,
        head: LinearFew,
        x: Operand,
        rows: u32,
        first: u32,
    ) -> Result<()> {
        let (output, bytes) = input(&head);
        let normed = draft.slots.add(bytes);
        let norm = AddNorm {
            h: self.hidden(),
            splits: 0,
            scalar: false,
            next: Some(output),
            weight: vector_type(self.program, self.stages.norm)?,
            cluster: AddNorm::cluster(self.arch),
        };
        let mut kernel = norm.kernel()?;
        kernel.grid[0] = Count::Fixed(rows * norm.cluster);
        let weight = self.vector(self.stages.norm);
        let (y, count) = (Operand::Slot(normed), number(rows));
        let operands = vec![NULL, NULL, NULL, x, weight, y, count, real(self.stages.eps)];
        self.launch(draft, &kernel, operands);
        self.head(draft, head, normed, count, first)
    }

    /// Logits of normed rows, which become those from row `first` on.
    pub(super) fn head(
        &mut self,
        draft: &mut Draft,
        head: LinearFew,
        x: Slot,
        rows: Operand,
        first: u32,
    ) -> Result<()> {
        let offset = u64::from(first) * u64::from(self.program.vocab_size) * 4;
        let operands = vec![
            packed(self.head.id),
            Operand::Slot(x),
            Operand::Fixed(Argument::Address(Place::Logits, offset)),
            rows,
            real(self.stages.soft_cap),
        ];
        self.launch(draft, &head.kernel()?, operands);
        Ok(())
    }
}

/// How the rows that a product reads are left for it, and their bytes.
fn input(linear: &LinearFew) -> (Output, u64) {
    match linear.split_input {
        true => (Output::Split(linear.split()), linear.split().bytes()),
        false => (Output::Floats, u64::from(linear.rows) * u64::from(linear.weight.k) * 4),
    }
}
