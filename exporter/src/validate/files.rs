//! The two files of a program, run on the devices of the runtime.

use std::sync::Arc;

use gemma4_runtime::cpu::{Cpu, Entry};
use gemma4_runtime::cuda::{self, Cuda};
use gemma4_runtime::{DeviceSession, LoadedProgram, Sampling, Session, SessionOptions};

use super::compare::Run;
use crate::{Error, Result};

/// Runs a prompt on the CPU, in one call of `prefill`.
///
/// # Errors
/// [`Error::Flag`] if the program reads fewer tokens at a time; errors of the runtime.
pub fn run_on_cpu(program: &Arc<LoadedProgram>, tokens: &[u32]) -> Result<Run> {
    let rows = tokens.len() as u32;
    let most = program.program().method("prefill").map_or(1, |method| method.max_rows);
    if rows > most {
        let why = format!("{rows} tokens, and one call of the program reads up to {most}");
        return Err(Error::Flag { flag: "--prompt", why });
    }
    let mut execution = Cpu::new(Arc::clone(program))?.execution(rows, rows)?;
    let mut hidden = Vec::new();
    let mut observe = |label: &str, _: &[u32], numbers: &[f32]| {
        hidden.push((label.to_owned(), numbers.to_vec()));
    };
    execution.run_observed(Entry::Prefill, tokens, 0, &Sampling::GREEDY, &mut observe)?;
    Ok(Run { logits: execution.logits(0)?, hidden })
}

/// Runs a prompt on the first GPU, which does not show its layers.
///
/// # Errors
/// Errors of the runtime.
pub fn run_on_gpu(program: &Arc<LoadedProgram>, tokens: &[u32]) -> Result<Run> {
    let device = Cuda::open(Arc::clone(program), None, cuda::Options::default(), &|_, _| {})?;
    let mut session = Session::new(&device, SessionOptions::default())?;
    session.prefill(tokens)?;
    Ok(Run { logits: session.logits()?, hidden: Vec::new() })
}

/// The GPU that would run a program, or why none does.
pub(super) fn gpu(program: &LoadedProgram) -> std::result::Result<String, String> {
    if program.file().plans().is_empty() {
        return Err("the files have no code for a GPU; --arch compiles for one".to_owned());
    }
    cuda::available(program.file(), None).map_err(|e| e.to_string())
}
