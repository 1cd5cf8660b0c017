//! Loads an exported program and runs it on a device.
//!
//! A program comes from [`LoadedProgram::open`], goes onto a device ([`cpu::Cpu`], [`cuda::Cuda`]) and is
//! run by [`Session`]s. Nothing here knows a model: what is computed stands in the program.
//!
//! ```no_run
//! use std::path::Path;
//! use std::sync::{Arc, atomic::AtomicBool};
//! use gemma4_runtime::{LoadedProgram, Sampling, Session, SessionOptions, cpu::Cpu};
//!
//! # fn main() -> gemma4_runtime::Result<()> {
//! let program = LoadedProgram::open(Path::new("model.pte"), Path::new("model.ptd"), &|_, _| {})?;
//! let device = Cpu::new(Arc::new(program))?;
//! let mut session = Session::new(&device, SessionOptions::default())?;
//! session.prefill(&[2, 105, 2364])?;
//! let stop = AtomicBool::new(false);
//! for token in session.generate(Sampling::GREEDY, 100, &stop)? {
//!     let _id = token?;
//! }
//! # Ok(())
//! # }
//! ```

// Programs that unit tests share with the tests in `tests/`.
#[cfg(test)]
extern crate self as gemma4_runtime;

pub mod cli;
pub mod cpu;
pub mod cuda;
pub mod device;
pub mod memory;
pub mod program;
pub mod roofline;
pub mod sampler;
pub mod session;
pub mod text;

mod allocation;
mod choice;
mod error;

pub use choice::{DeviceChoice, OpenDevice};
pub use device::{Device, DeviceSession};
pub use error::{Error, ExitClass, Result};
pub use program::{LoadedProgram, ProgramFile, WeightFile};
pub use sampler::Sampling;
pub use session::{
    FinishReason, Generation, LogitRules, Logprobs, Report, Session, SessionOptions,
};
