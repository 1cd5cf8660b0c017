//! A session's state on the device, and the kernels that sample the next token into it.
//!
//! Kernels reach a session's memory (state, keys and values of each layer, output ring) through a
//! table of device addresses, so that one captured graph serves every session.

use crate::contract::{args, source};
use crate::{Amount, Kernel, Unsupported};
use gemma4_format::plan::Count;

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
            grid: [Count::Fixed(grid), Count::Fixed(1), Count::Fixed(1)],
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
