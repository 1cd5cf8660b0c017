//! Rotary position embedding.

use gemma4_format::Op;

use super::pointwise::pieces;
use crate::{Error, Result};

/// Kinds of rotation whose tables are kept.
const KEPT: usize = 4;

/// Cosines and sines of one call. All layers of a kind rotate by the same angles, so the tables
/// of a few kinds are kept until the position changes.
#[derive(Debug, Default)]
pub(crate) struct Tables {
    position: u32,
    rows: usize,
    kinds: Vec<Table>,
}

#[derive(Debug)]
struct Table {
    kind: Kind,
    /// `(cos, sin)` of the rotating pairs of each row.
    turns: Vec<(f32, f32)>,
}

/// What the angles of a rope node depend on, beside the position.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Kind {
    base: f32,
    factor: f32,
    rotated: usize,
    width: usize,
}

impl Kind {
    /// The kind of a node on heads of `width` numbers; `None` for another operation.
    pub(crate) fn of(op: &Op, width: usize) -> Option<Self> {
        match *op {
            Op::Rope { base, rotated, factor } => {
                Some(Self { base, factor, rotated: rotated as usize, width })
            }
            _ => None,
        }
    }

    /// Angle per position of pair `i`: `base^(−2i/D) / factor`, rounded to float32 after each
    /// step as transformers does.
    fn frequency(&self, i: usize) -> f32 {
        let exponent = (2 * i) as f32 / self.width as f32;
        let power = f64::from(self.base).powf(f64::from(exponent)) as f32;
        1.0 / power / self.factor
    }
}

impl Tables {
    /// Rotates `x [T, heads, width]`, whose first row has position `position`.
    pub(crate) fn rotate(
        &mut self,
        kind: Kind,
        position: u32,
        x: &[f32],
        heads: usize,
        out: &mut [f32],
    ) -> Result<()> {
        let row = heads * kind.width;
        let turns = self.turns(kind, position, x.len() / row)?;
        let half = kind.width / 2;
        pieces(out, row, |first, out| {
            for (at, (x, out)) in
                x[first..].chunks_exact(row).zip(out.chunks_exact_mut(row)).enumerate()
            {
                let turns = &turns[(first / row + at) * kind.rotated..][..kind.rotated];
                let heads = x.chunks_exact(kind.width).zip(out.chunks_exact_mut(kind.width));
                for (x, out) in heads {
                    out.copy_from_slice(x);
                    for (i, (cos, sin)) in turns.iter().enumerate() {
                        let (a, b) = (x[i], x[i + half]);
                        out[i] = a * cos - b * sin;
                        out[i + half] = b * cos + a * sin;
                    }
                }
            }
        });
        Ok(())
    }

    fn turns(&mut self, kind: Kind, position: u32, rows: usize) -> Result<&[(f32, f32)]> {
        if (self.position, self.rows) != (position, rows) {
            (self.position, self.rows) = (position, rows);
            self.kinds.clear();
        }
        let found = match self.kinds.iter().position(|t| t.kind == kind) {
            Some(found) => found,
            None => {
                let table = Table { kind, turns: turns(kind, position, rows)? };
                self.kinds.truncate(KEPT - 1);
                self.kinds.push(table);
                self.kinds.len() - 1
            }
        };
        Ok(&self.kinds[found].turns)
    }
}

fn turns(kind: Kind, position: u32, rows: usize) -> Result<Vec<(f32, f32)>> {
    let mut turns = Vec::new();
    turns.try_reserve_exact(rows * kind.rotated).map_err(|_| Error::Memory {
        what: "the table of rotations".to_owned(),
        need: (rows * kind.rotated) as u64 * 8,
        available: 0,
    })?;
    let frequencies: Vec<f32> = (0..kind.rotated).map(|i| kind.frequency(i)).collect();
    for row in 0..rows as u32 {
        for frequency in &frequencies {
            let angle = f64::from((position + row) as f32 * frequency);
            turns.push((angle.cos() as f32, angle.sin() as f32));
        }
    }
    Ok(turns)
}
