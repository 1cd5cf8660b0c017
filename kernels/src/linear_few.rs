//! Linear layers for 1 to 8 rows: decode, and the verification of a few drafted tokens.

use crate::activations::Split;
use crate::contract::{args, source};
use crate::packed::{Codes, Packed};
use crate::{Amount, Arch, Kernel, Unsupported};
use gemma4_format::plan::Count;

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
}

/// `y[T, n] = x[T, k] · Wᵀ` for a packed weight and `1 <= T <= rows`.
///
/// Arguments: `weight` packed, `x` (float32 `[T, k]`, or [`LinearFew::split`]), `y` float32 (see [`Epilogue`]), `rows` = T and
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
    /// `x` comes as [`LinearFew::split`] says; else as float32, and every block splits it.
    pub split_input: bool,
    /// Streams of the bulk copy engine (sm_90 and later), or plain loads.
    pub ring: Option<Ring>,
}

/// Shared memory of a block of compute capability 9.0. More than half of a multiprocessor's, so that
/// no two blocks of a launch meet on one multiprocessor while another has none; and room is left
/// for the small kernels between two products, so that the next product's weights stream in
/// while they run.
const BULK_SHARED: u32 = 218 * 1024;
/// Shared memory of a block where blocks may have 99 KiB.
const PORTABLE_SHARED: u32 = 96 * 1024;
/// Splits that are tried.
const MOST_SPLITS: u32 = 16;

impl LinearFew {
    /// The launch for `weight` and calls of at most `rows` rows that keeps the warps of a device of
    /// `sms` multiprocessors most evenly busy.
    ///
    /// Where activations of the whole of `k` must fit and do not, their second part is given up.
    pub fn choose(
        weight: Packed,
        rows: u32,
        epilogue: Epilogue,
        split_input: bool,
        arch: Arch,
        sms: u32,
    ) -> Result<Self, Unsupported> {
        let bulk = arch == Arch::Sm90a;
        let room = if bulk { BULK_SHARED } else { PORTABLE_SHARED };
        let most_splits = if epilogue == Epilogue::Partial { MOST_SPLITS } else { 1 };
        // Fewer warps do not keep the schedulers busy; more have too few registers.
        let warps = match (bulk, rows) {
            (false, _) => [8..=8, 8..=8],
            (true, 1 | 2) => [14..=24, 8..=13],
            (true, _) => [14..=16, 8..=13],
        };
        for (parts, warps) in [2, 1].into_iter().flat_map(|parts| warps.clone().map(|w| (parts, w)))
        {
            let mut best: Option<(f64, Self)> = None;
            for splits in 1..=most_splits.min(weight.units()) {
                for warps in warps.clone() {
                    let mut candidate = Self {
                        weight,
                        rows,
                        parts,
                        splits,
                        warps,
                        epilogue,
                        split_input,
                        ring: None,
                    };
                    if bulk {
                        candidate.ring = candidate.largest_ring(room);
                    }
                    if candidate.shared() > room || candidate.ring.is_some() != bulk {
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
        Err(Unsupported {
            kernel: "linear_few",
            reason: format!(
                "{rows} rows of {} columns do not fit in shared memory with {epilogue:?}",
                weight.k
            ),
        })
    }

    /// Time in bytes at the pace of a multiprocessor's share of memory: what the busiest one reads,
    /// or the latency of the units that a warp walks one after another if that is longer; and what
    /// the partial sums cost the block that adds them.
    fn relative_time(&self, sms: u32) -> f64 {
        const LATENCY: f64 = 5400.0;
        let blocks = (sms / self.splits).max(1);
        let rounds = self.weight.tiles().div_ceil(blocks * self.warps);
        let units = f64::from(rounds * self.weight.units().div_ceil(self.splits));
        let instructions = (2 * self.rows * self.split().parts).div_ceil(8);
        let walk = units * LATENCY * (0.6 + 0.4 * f64::from(instructions));
        let read = units * f64::from(self.warps * self.weight.unit_bytes());
        // A warp takes about half a microsecond for the 128 columns of a row that it splits.
        let splitting = match self.split_input {
            true => 0,
            false => {
                (self.weight.units().div_ceil(self.splits) * self.rows).div_ceil(self.warps)
                    * 12_000
            }
        };
        read.max(walk) + f64::from(splitting + self.splits * self.weight.n.min(8192))
    }

    /// The ring that fills `room` bytes of shared memory beside the activations.
    fn largest_ring(&self, room: u32) -> Option<Ring> {
        let room = room.checked_sub(self.activation_bytes() + 1024)? / self.warps;
        let stage_units = if self.weight.unit_bytes() < 2048 { 2 } else { 1 };
        let stages = (room / (self.weight.unit_bytes() * stage_units)).min(8);
        (stages >= 2).then_some(Ring { stages, stage_units })
    }

    /// The layout of `x` that the kernel multiplies.
    pub fn split(&self) -> Split {
        Split {
            k: self.weight.k,
            rows: self.rows,
            parts: if self.dense() { 1 } else { self.parts },
            sums: self.weight.groups().max(1),
            dense: self.dense(),
        }
    }

    /// Bytes of activations in shared memory.
    fn activation_bytes(&self) -> u32 {
        let units = self.weight.units().div_ceil(self.splits);
        (units * self.split().unit_bytes()).next_multiple_of(128)
    }

    fn dense(&self) -> bool {
        self.weight.codes == Codes::Bf16
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
        if self.epilogue == Epilogue::Geglu && !self.weight.n.is_multiple_of(16) {
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
        let ring = self.ring.unwrap_or(Ring { stages: 1, stage_units: 1 });
        let mut defines = self.weight.defines();
        defines.extend(self.split().defines());
        defines.extend([
            ("N", self.weight.n.to_string()),
            ("SPLIT_INPUT", u32::from(self.split_input).to_string()),
            ("SPLITS", self.splits.to_string()),
            ("WARPS", self.warps.to_string()),
            ("EPILOGUE", epilogue.to_owned()),
            ("BULK", u32::from(self.ring.is_some()).to_string()),
            ("STAGES", ring.stages.to_string()),
            ("STAGE_UNITS", ring.stage_units.to_string()),
        ]);
        let weight = self.weight.bytes();
        let outputs = u64::from(self.weight.n) * 4 * u64::from(self.splits);
        let numbers = u64::from(self.weight.n) * u64::from(self.weight.k);
        Ok(Kernel {
            source: source!("linear_few.cu"),
            defines,
            symbol: "linear_few",
            grid: [
                Count::Multiprocessors {
                    // As many blocks as the kernel's registers allow.
                    times: if self.ring.is_some() || self.rows == 8 || self.weight.groups() == 8 {
                        1
                    } else {
                        2
                    },
                    share: self.splits,
                    limit: self.weight.tiles().div_ceil(self.warps),
                },
                Count::Fixed(self.splits),
                Count::Fixed(1),
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
