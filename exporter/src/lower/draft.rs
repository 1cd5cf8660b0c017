//! Launches of one method under construction, before scratch memory is planned.

use gemma4_format::BufferId;
use gemma4_format::plan::{Argument, Count, Launch, Place, table};

use super::scratch::{Slot, Slots};

/// An operand of a launch, before scratch memory is planned.
#[derive(Clone, Copy)]
pub(super) enum Operand {
    /// A value in scratch memory.
    Slot(Slot),
    /// So many bytes into a value in scratch memory.
    Inside(Slot, u64),
    /// The last row of a value of so many bytes a row.
    LastRow(Slot, u64),
    /// Anything else.
    Fixed(Argument),
}

/// Launches of one method under construction.
#[derive(Default)]
pub(super) struct Draft {
    launches: Vec<(u32, [Count; 3], Vec<Operand>)>,
    /// Calls have few rows, of which each is normed by several blocks.
    pub(super) few_rows: bool,
    /// Its values.
    pub(super) slots: Slots,
}

pub(super) const ROWS: Operand = Operand::Fixed(Argument::Count(Count::Rows { per: 1, times: 1 }));
pub(super) const NULL: Operand = Operand::Fixed(Argument::Null);
pub(super) const TABLE: Operand = Operand::Fixed(Argument::Address(Place::Table, 0));
pub(super) const LOGITS: Operand = Operand::Fixed(Argument::Address(Place::Logits, 0));
pub(super) const STATE: Operand = number(table::STATE);

pub(super) const fn number(n: u32) -> Operand {
    Operand::Fixed(Argument::U32(n))
}

pub(super) const fn real(x: f32) -> Operand {
    Operand::Fixed(Argument::F32(x))
}

/// The index of a buffer in the session's table.
pub(super) fn in_table(buffer: BufferId) -> Operand {
    number(table::BUFFERS + buffer)
}

pub(super) fn ring(buffer: BufferId) -> Operand {
    Operand::Fixed(Argument::BufferRows(buffer))
}

impl Draft {
    /// For calls of few rows.
    pub(super) fn of_few_rows() -> Self {
        Self { few_rows: true, ..Self::default() }
    }

    /// Appends a launch of a kernel.
    pub(super) fn add(&mut self, kernel: u32, grid: [Count; 3], operands: Vec<Operand>) {
        let launch = self.launches.len();
        for operand in &operands {
            if let Operand::Slot(slot) | Operand::Inside(slot, _) | Operand::LastRow(slot, _) =
                operand
            {
                self.slots.touch(*slot, launch);
            }
        }
        self.launches.push((kernel, grid, operands));
    }

    /// A new value of float32 numbers.
    pub(super) fn floats(&mut self, count: u64) -> Slot {
        self.slots.add(count * 4)
    }

    /// The launches with their addresses, and the end of scratch memory, whose first `base` bytes
    /// they leave alone.
    pub(super) fn finish(self, base: u64) -> (Vec<Launch>, u64) {
        let (offsets, end) = self.slots.place(base);
        let argument = |operand: &Operand| match *operand {
            Operand::Slot(slot) => Argument::Address(Place::Scratch, Slots::offset(&offsets, slot)),
            Operand::Inside(slot, bytes) => {
                let offset = Slots::offset(&offsets, slot) + bytes;
                Argument::Address(Place::Scratch, offset)
            }
            Operand::LastRow(slot, stride) => {
                let offset = Slots::offset(&offsets, slot);
                Argument::LastRow { place: Place::Scratch, offset, stride }
            }
            Operand::Fixed(argument) => argument,
        };
        let launches = self
            .launches
            .iter()
            .map(|(kernel, grid, operands)| Launch {
                kernel: *kernel,
                grid: *grid,
                arguments: operands.iter().map(argument).collect(),
            })
            .collect();
        (launches, end)
    }
}

/// The address of a packed weight.
pub(super) fn packed(id: u32) -> Operand {
    Operand::Fixed(Argument::Address(Place::Packed(id), 0))
}
