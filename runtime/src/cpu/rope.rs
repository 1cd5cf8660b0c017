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

#[cfg(test)]
mod tests {
    use super::*;

    fn rotate(kind: Kind, position: u32, x: &[f32]) -> Vec<f32> {
        let mut out = vec![f32::NAN; x.len()];
        Tables::default().rotate(kind, position, x, 1, &mut out).expect("small");
        out
    }

    /// A quarter of the pairs rotates, but pairs stand half a head apart and exponents are those
    /// of the whole head.
    #[test]
    fn a_partial_rotation_leaves_the_other_pairs_alone() {
        let kind = Kind { base: 1e6, factor: 1.0, rotated: 64, width: 512 };
        for one in [0, 5, 63, 64, 255, 256, 319, 320, 511] {
            let mut x = vec![0.0; 512];
            x[one] = 1.0;
            for position in [1, 2047, 131_071] {
                let out = rotate(kind, position, &x);
                let pair = one % 256;
                let rotates = pair < 64;
                for (i, out) in out.iter().enumerate() {
                    if i % 256 != pair || (!rotates && i != one) {
                        assert_eq!(*out, 0.0, "dim {i} from {one}");
                    }
                }
                let frequency = 1e6f64.powf(-2.0 * pair as f64 / 512.0);
                let angle = if rotates { f64::from(position) * frequency } else { 0.0 };
                // The angle is float32, so a far position is that much less exact.
                let exact = 2e-7 * (1.0 + angle);
                assert!((f64::from(out[one]) - angle.cos()).abs() < exact);
            }
        }
    }

    #[test]
    fn positions_add_up_and_frequencies_are_divided() {
        let x: Vec<f32> = (0..16).map(|i| (i as f32).sin()).collect();
        let kind = Kind { base: 100.0, factor: 1.0, rotated: 8, width: 16 };
        let slow = Kind { factor: 8.0, ..kind };
        let (twice, once) = (rotate(kind, 3, &rotate(kind, 4, &x)), rotate(slow, 56, &x));
        for (a, b) in twice.iter().zip(once) {
            assert!((a - b).abs() < 1e-5, "{a} and {b}");
        }
    }

    #[test]
    fn tables_follow_the_call() {
        let mut tables = Tables::default();
        let x: Vec<f32> = (0..32).map(|i| (i as f32).cos()).collect();
        for (position, rows) in [(0, 2), (0, 1), (9, 2), (0, 2)] {
            for base in [10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 10.0] {
                let kind = Kind { base, factor: 1.0, rotated: 8, width: 16 };
                let mut out = vec![0.0; 16 * rows];
                let x = &x[..16 * rows];
                tables.rotate(kind, position, x, 1, &mut out).expect("small");
                for (row, out) in out.chunks(16).enumerate() {
                    let alone = rotate(kind, position + row as u32, &x[16 * row..][..16]);
                    assert_eq!(out, alone);
                }
            }
        }
    }
}
