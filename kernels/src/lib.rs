//! GPU kernels: CUDA C++ templates under `cu/`, a contract for each, and their ahead-of-time
//! compilation.
//!
//! A kernel is a struct of instantiation constants (`K`, `head_dim`, `group`, ...). Its `kernel`
//! method either returns a [`Kernel`] (plain data: what to compile, how to launch it, what it
//! moves) or an [`Unsupported`] that says why these constants have none. [`compile`] turns a
//! [`Kernel`] into machine code for an [`Arch`] with NVRTC; no GPU is needed for that, and whoever
//! launches the result needs only [`Kernel`]'s launch half and never sees a compiler.
//!
//! Conventions of all kernels:
//! - the residual stream, projections' outputs and sums are float32; what a product reads is
//!   float32 or already cut into the integers that it multiplies ([`Split`]); K and V are bfloat16;
//! - products of many rows read bfloat16 activations in panels ([`panel_index`]), and attention of
//!   many rows and GEGLU leave theirs so;
//! - sums that several blocks share are written as partial sums and added in a fixed order, so
//!   equal input gives equal output;
//! - a position is read from device memory, where it is the index of the call's first row;
//!   the slot of position `p` in a buffer of `R` rows is `p % R`;
//! - a window of `W` keeps keys with `0 <= q - k < W`.

pub mod compile;

mod activations;
mod arch;
mod attention_few;
mod attention_prefill;
mod contract;
mod heads;
mod layer;
mod linear_few;
mod linear_many;
mod measure;
mod packed;
mod quantize;
mod session;

pub use activations::{Output, Split};
pub use arch::Arch;
pub use attention_few::AttentionFew;
pub use attention_prefill::{AttentionPrefill, Tiling};
pub use contract::{Amount, Arg, ArgKind, Kernel, Source, Unsupported};
pub use heads::{Heads, Keys};
pub use layer::{AddNorm, Embed, Geglu, Randomize, Rope};
pub use linear_few::{Epilogue, LinearFew, Ring};
pub use linear_many::{
    LinearMany, ManyOutput, PANEL_COLUMNS, ToPanels, panel_elements, panel_index,
};
pub use measure::measure;
pub use packed::{Codes, Order, Pack, Packed, PackedOffset, TILE_ROWS, UNIT_COLUMNS};
pub use quantize::{QUANTIZED_ROW_BYTES, number_type, quantize, zero_type};
pub use session::Sample;
