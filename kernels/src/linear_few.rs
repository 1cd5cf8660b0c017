//! Linear layers for 1 to 8 rows: decode, and the verification of a few drafted tokens.

use crate::contract::{args, source};
use crate::packed::{Codes, Packed};
use crate::{Amount, Arch, Extent, Kernel, Unsupported};

/// What happens to the sums of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Epilogue {
    /// Partial sums `[splits, T, n]` are written; whoever reads them adds them in order.
    Partial,
    /// `gelu_tanh(gate) * up` of rows packed with [`crate::Order::Turns`]: `[T, n / 2]`. Only without splits.
    Geglu,
    /// `cap * tanh(y / cap)`: `[T, n]`. Only without splits.
    SoftCap,
}

/// The weight stream of each warp, where the bulk copy engine feeds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ring {
    /// Stages of the ring.
    pub stages: u32,
    /// Units of a stage.
    pub stage_units: u32,
    /// Bytes beyond the ring that are asked to come into L2 before the predecessor has ended.
    pub l2_ahead: u32,
}

/// `y[T, n] = x[T, k] · Wᵀ` for a packed weight and `1 <= T <= rows`.
///
/// Arguments: `weight` packed, `x` float32 `[T, k]`, `y` float32 (see [`Epilogue`]), `rows` = T and
/// the `cap` of [`Epilogue::SoftCap`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearFew {
    /// The weight.
    pub weight: Packed,
    /// Most rows of a call: 1, 2, 4 or 8.
    pub rows: u32,
    /// 14-bit parts of an activation: 2 (28 bits below the largest of 128 columns) or 1.
    pub parts: u32,
    /// Parts into which the columns are cut.
    pub splits: u32,
    /// Warps of a block.
    pub warps: u32,
    /// What happens to the sums.
    pub epilogue: Epilogue,
    /// Streams of the bulk copy engine (sm_90 and later), or plain loads.
    pub ring: Option<Ring>,
}

/// Shared memory of a block that lets two blocks share a multiprocessor of compute capability 9.0:
/// the next kernel's weights stream in while this one ends.
pub const HALF_OF_SHARED: u32 = 113 * 1024;
/// Shared memory of a block that has a multiprocessor of compute capability 9.0 to itself.
const ALL_SHARED: u32 = 226 * 1024;
/// Shared memory of the activations of a block, where blocks may have 99 KiB.
const PORTABLE_SHARED: u32 = 96 * 1024;
/// Splits that are tried.
const MOST_SPLITS: u32 = 16;

impl LinearFew {
    /// The launch for `weight` and calls of at most `rows` rows that keeps the warps of a device of
    /// `sms` multiprocessors most evenly busy.
    ///
    /// Where the activations of the whole of `k` must fit beside one another and do not, the second
    /// block's room is given up, then the second part of the activations.
    pub fn choose(
        weight: Packed,
        rows: u32,
        epilogue: Epilogue,
        arch: Arch,
        sms: u32,
    ) -> Result<Self, Unsupported> {
        let bulk = arch == Arch::Sm90a;
        let rooms: &[u32] = match (bulk, epilogue) {
            (false, _) => &[PORTABLE_SHARED],
            (true, Epilogue::Partial) => &[HALF_OF_SHARED],
            (true, _) => &[HALF_OF_SHARED, ALL_SHARED],
        };
        let most_splits = if epilogue == Epilogue::Partial { MOST_SPLITS } else { 1 };
        for parts in [2, 1] {
            for room in rooms {
                let mut best: Option<(f64, Self)> = None;
                for splits in 1..=most_splits.min(weight.units()) {
                    for warps in if bulk { 6..=16 } else { 8..=8 } {
                        let mut candidate =
                            Self { weight, rows, parts, splits, warps, epilogue, ring: None };
                        if bulk {
                            candidate.ring = candidate.largest_ring(*room);
                        }
                        if candidate.shared() > *room || candidate.ring.is_some() != bulk {
                            continue;
                        }
                        let cost = candidate.relative_time(sms);
                        if best.is_none_or(|(least, _)| cost < least) {
                            best = Some((cost, candidate));
                        }
                    }
                }
                if let Some((_, candidate)) = best {
                    return Ok(candidate);
                }
            }
        }
        Err(Unsupported {
            kernel: "linear_few",
            reason: format!(
                "{rows} rows of {} columns do not fit in shared memory with {epilogue:?}",
                weight.k
            ),
        })
    }

    /// Bytes that the busiest multiprocessor reads, and what reading the partial sums costs the one
    /// that adds them, in bytes at the pace of weights.
    fn relative_time(&self, sms: u32) -> f64 {
        let blocks = (sms / self.splits).max(1);
        let rounds = self.weight.tiles().div_ceil(blocks * self.warps);
        let units = rounds * self.weight.units().div_ceil(self.splits) * self.warps;
        let sums = self.splits * self.weight.n.min(8192) * self.rows;
        f64::from(units) * f64::from(self.weight.unit_bytes()) + f64::from(sums)
    }

    /// The ring that fills `room` bytes of shared memory beside the activations.
    pub fn largest_ring(&self, room: u32) -> Option<Ring> {
        let room = room.checked_sub(self.activation_bytes() + 1024)? / self.warps;
        let stage_units = if self.weight.unit_bytes() < 2048 { 2 } else { 1 };
        let stages = (room / (self.weight.unit_bytes() * stage_units)).min(6);
        (stages >= 2).then_some(Ring { stages, stage_units, l2_ahead: 0 })
    }

    /// Bytes of activations in shared memory.
    fn activation_bytes(&self) -> u32 {
        let units = self.weight.units().div_ceil(self.splits);
        let virtual_rows = self.rows * self.parts();
        let limbs = 128 * 2 * virtual_rows * if self.dense() { 2 } else { 1 };
        let sums = self.weight.groups().max(1);
        let numbers = if self.dense() { 0 } else { virtual_rows * (sums + 1) * 4 };
        (units * (limbs + numbers)).next_multiple_of(128)
    }

    fn dense(&self) -> bool {
        self.weight.codes == Codes::Bf16
    }

    fn parts(&self) -> u32 {
        if self.dense() { 1 } else { self.parts }
    }

    fn shared(&self) -> u32 {
        let ring = self.ring.map_or(0, |ring| {
            self.warps * ring.stages * ring.stage_units * self.weight.unit_bytes()
        });
        self.activation_bytes() + ring
    }

    /// The kernel.
    pub fn kernel(&self) -> Result<Kernel, Unsupported> {
        let unsupported = |reason: String| Err(Unsupported { kernel: "linear_few", reason });
        if !matches!(self.rows, 1 | 2 | 4 | 8) {
            return unsupported(format!("{} rows: known are 1, 2, 4 and 8", self.rows));
        }
        if !matches!(self.parts, 1 | 2) {
            return unsupported(format!("{} parts: known are 1 and 2", self.parts));
        }
        if self.splits == 0 || self.splits > self.weight.units() {
            return unsupported(format!("{} splits of {} columns", self.splits, self.weight.k));
        }
        if self.splits > 1 && self.epilogue != Epilogue::Partial {
            return unsupported(format!("{:?} with {} splits", self.epilogue, self.splits));
        }
        if self.epilogue == Epilogue::Geglu && self.weight.n % 16 != 0 {
            return unsupported(format!(
                "gate and up of {} rows, no multiple of 8",
                self.weight.n / 2
            ));
        }
        let epilogue = match self.epilogue {
            Epilogue::Partial => "0",
            Epilogue::Geglu => "1",
            Epilogue::SoftCap => "2",
        };
        let ring = self.ring.unwrap_or(Ring { stages: 1, stage_units: 1, l2_ahead: 0 });
        let mut defines = self.weight.defines();
        defines.extend([
            ("N", self.weight.n.to_string()),
            ("ROWS", self.rows.to_string()),
            ("PARTS", self.parts().to_string()),
            ("SPLITS", self.splits.to_string()),
            ("WARPS", self.warps.to_string()),
            ("EPILOGUE", epilogue.to_owned()),
            ("BULK", u32::from(self.ring.is_some()).to_string()),
            ("STAGES", ring.stages.to_string()),
            ("STAGE_UNITS", ring.stage_units.to_string()),
            ("L2_AHEAD", ring.l2_ahead.to_string()),
        ]);
        let weight = self.weight.bytes();
        let outputs = u64::from(self.weight.n) * 4 * u64::from(self.splits);
        let numbers = u64::from(self.weight.n) * u64::from(self.weight.k);
        Ok(Kernel {
            source: source!("linear_few.cu"),
            defines,
            symbol: "linear_few",
            grid: [
                Extent::Sms {
                    times: if self.ring.is_some() { 1 } else { 2 },
                    share: self.splits,
                    limit: self.weight.tiles().div_ceil(self.warps),
                },
                Extent::Fixed(self.splits),
                Extent::Fixed(1),
            ],
            block: self.warps * 32,
            shared: self.shared(),
            args: args![Read weight, Read x, Write y, U32 rows, F32 cap],
            dependent_launch: true,
            bytes: Amount {
                fixed: weight,
                per_row: outputs + u64::from(self.weight.k) * 4,
                per_position: 0,
            },
            operations: Amount { per_row: 2 * numbers, ..Amount::default() },
        })
    }
}
