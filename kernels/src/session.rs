//! A session's state on the device, and the kernels that sample the next token into it.
//!
//! Kernels reach a session's memory (state, keys and values of each layer, output ring) through a
//! table of device addresses, so that one captured graph serves every session.

use crate::contract::{args, source};
use crate::{Amount, Extent, Kernel, Unsupported};

/// Indices of the 32-bit words of a session's state.
pub mod state {
    /// Last token, the input of the next decode step.
    pub const TOKEN: usize = 0;
    /// Index of the next call's first row.
    pub const POSITION: usize = 1;
    /// [`RUNNING`], [`STOP_TOKEN`] or [`OUT_OF_POSITIONS`]; unless running, steps change nothing.
    pub const STOPPED: usize = 2;
    /// Tokens sampled so far.
    pub const STEP: usize = 3;
    /// Seed of the random numbers, two words.
    pub const SEED: usize = 4;
    /// float32; 0 takes the largest logit.
    pub const TEMPERATURE: usize = 6;
    /// Logits that are kept; 0 keeps all.
    pub const TOP_K: usize = 7;
    /// float32; probability that the kept tokens reach.
    pub const TOP_P: usize = 8;
    /// Positions that the buffers hold.
    pub const LIMIT: usize = 9;
    /// Words of a state.
    pub const WORDS: usize = 16;

    /// Steps sample.
    pub const RUNNING: u32 = 0;
    /// The last token is a stop token.
    pub const STOP_TOKEN: u32 = 1;
    /// The next position lies beyond the buffers.
    pub const OUT_OF_POSITIONS: u32 = 2;
}

/// Samples the next token and steps the state.
///
/// [`Sample::maxima`]: `logits` float32 `[vocabulary]`, `maxima` u32 `[stretches, 2]`.
/// [`Sample::kernel`]: those, the session `table`, the indices of `state` and of the `output` ring of
/// `ring_slots` 64-bit slots (slot `step % ring_slots` receives `(step + 1) << 32 | token`), `stops` u32
/// `[stop_count]`, and the `rows` by which the position advances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Number of logits.
    pub vocabulary: u32,
}

/// Logits that share a maximum.
const STRETCH: u32 = 256;

impl Sample {
    /// Maxima: two words each.
    pub fn stretches(&self) -> u32 {
        self.vocabulary.div_ceil(STRETCH)
    }

    fn build(
        &self,
        symbol: &'static str,
        grid: u32,
        block: u32,
        args: Vec<crate::Arg>,
    ) -> Result<Kernel, Unsupported> {
        if self.vocabulary == 0 || self.vocabulary > 1 << 24 {
            let reason = format!("{} logits: 1 to 2^24 work", self.vocabulary);
            return Err(Unsupported { kernel: "sample", reason });
        }
        Ok(Kernel {
            source: source!("sample.cu"),
            defines: vec![("VOCABULARY", self.vocabulary.to_string())],
            symbol,
            grid: [Extent::Fixed(grid), Extent::Fixed(1), Extent::Fixed(1)],
            block,
            shared: 0,
            args,
            dependent_launch: true,
            bytes: Amount { fixed: u64::from(self.vocabulary) * 4, ..Amount::default() },
            operations: Amount::default(),
        })
    }

    /// The kernel that finds the largest logit of each stretch of 256.
    pub fn maxima(&self) -> Result<Kernel, Unsupported> {
        let grid = self.stretches().div_ceil(8);
        self.build("sample_maxima", grid, 256, args![Read logits, Write maxima])
    }

    /// The kernel that picks the token.
    pub fn kernel(&self) -> Result<Kernel, Unsupported> {
        let args = args![
            Read logits, Read maxima, Read table, U32 state, U32 output, U32 ring_slots, Read stops,
            U32 stop_count, U32 rows,
        ];
        self.build("sample", 1, 1024, args)
    }
}
