//! `gemma4-eval`: measures a program against other implementations.

mod divergence;
mod golden;
mod likelihood;
mod tensors;

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;
use clap::{Args, Parser, Subcommand};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;

use super::{CpuArguments, Files, Progress, Usage};
use crate::{DeviceChoice, OpenDevice, Session, SessionOptions, cuda};

/// Measure an exported model.
#[derive(Parser, Debug)]
#[command(name = "gemma4-eval", version)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Write the logits for given token ids
    ///
    /// Row 0 is the distribution after the first N ids (--prefill), read in one call; every
    /// further id is read by a decode step and gives another row.
    Logits {
        #[command(flatten)]
        place: Place,
        /// Token ids, separated by commas
        #[arg(long, value_delimiter = ',', required = true, value_name = "A,B,…")]
        ids: Vec<u32>,
        /// How many of them prefill reads
        #[arg(long, default_value_t = 1, value_name = "N")]
        prefill: usize,
        /// safetensors file to write, with the tensors `logits`, F32 [rows, vocabulary], and
        /// `ids`, U32 [ids]
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
    },
    /// Measure how well the model predicts a text: perplexity
    ///
    /// Windows over the text's tokens, each read after what stands before every text (BOS, or the
    /// beginning of the model's turn with --templated). Every token is predicted once, in the
    /// first window that it is in; a window begins N tokens after the one before (--stride).
    Nll(likelihood::Arguments),
    /// Measure how far the logits are from those of another implementation: KL divergence
    ///
    /// The reference is a safetensors file with `logits`, F32, F16 or BF16 [rows, vocabulary]:
    /// row j is the distribution after the first n − rows + j + 1 of n ids.
    Kl(divergence::Arguments),
    /// Compare with Hugging Face transformers, in a directory of golden.safetensors and golden.json
    Golden(golden::Arguments),
}

/// What a measurement runs on.
#[derive(Args, Clone, Debug)]
struct Place {
    #[command(flatten)]
    files: Files,
    /// Tokens that one call of prefill reads; by default as exported
    #[arg(long = "prefill_chunk", alias = "prefill-chunk", value_name = "N")]
    prefill_chunk: Option<u32>,
    /// Tokens to make room for; by default all that the program allows
    #[arg(long = "max_context", alias = "max-context", value_name = "N")]
    max_context: Option<u32>,
    /// auto, cpu, cuda, cuda:N or cuda:GPU-UUID
    #[arg(long, default_value = "auto", value_name = "DEVICE")]
    device: DeviceChoice,
    #[command(flatten)]
    cpu: CpuArguments,
    /// Print no notes
    #[arg(long, short)]
    quiet: bool,
}

impl Place {
    /// Brings the program to the device.
    fn open(&self) -> anyhow::Result<OpenDevice> {
        let bar = if self.quiet { Progress::hidden() } else { Progress::bytes("loading") };
        let program = self.files.map()?;
        let options = cuda::Options { max_context: self.max_context, ..cuda::Options::default() };
        let progress = |done, total| bar.set(done, total);
        let note = |text: &str| {
            if !self.quiet {
                super::note(text);
            }
        };
        let cpu = self.cpu.options();
        Ok(self.device.open(Arc::new(program), options, cpu, &progress, &note)?)
    }

    fn session(&self, device: &OpenDevice) -> anyhow::Result<Session> {
        let Self { max_context, prefill_chunk, .. } = *self;
        Ok(Session::new(device.device(), SessionOptions { max_context, prefill_chunk })?)
    }
}

/// Runs the command.
///
/// # Errors
/// Whatever keeps the measurement from being made.
pub fn run(arguments: Arguments) -> anyhow::Result<ExitCode> {
    match arguments.command {
        Command::Logits { place, ids, prefill, out } => {
            if prefill == 0 || prefill > ids.len() {
                let why = format!("--prefill {prefill} is not between 1 and the {} ids", ids.len());
                return Err(Usage(why).into());
            }
            let device = place.open()?;
            let mut session = place.session(&device)?;
            let vocabulary = device.device().program().program().vocab_size as usize;
            let mut bytes = Vec::new();
            rows(&mut session, &ids, prefill, |logits| {
                bytes.extend(logits.iter().flat_map(|x| x.to_le_bytes()));
            })?;
            let shape = vec![ids.len() - prefill + 1, vocabulary];
            let logits = TensorView::new(Dtype::F32, shape, &bytes)?;
            let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
            let ids = TensorView::new(Dtype::U32, vec![ids.len()], &bytes)?;
            let file = safetensors::serialize([("logits", logits), ("ids", ids)], None)?;
            fs::write(&out, file).with_context(|| format!("cannot write `{}`", out.display()))?;
        }
        Command::Nll(arguments) => print(&likelihood::run(&arguments)?)?,
        Command::Kl(arguments) => print(&divergence::run(&arguments)?)?,
        Command::Golden(arguments) => {
            let (report, within) = golden::run(&arguments)?;
            print(&report)?;
            return Ok(ExitCode::from(u8::from(!within)));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Shows the logits after the first `prefill` ids, and after each further one.
fn rows(
    session: &mut Session,
    ids: &[u32],
    prefill: usize,
    mut each: impl FnMut(Vec<f32>),
) -> anyhow::Result<()> {
    session.reset();
    session.prefill(&ids[..prefill])?;
    each(session.logits()?);
    for id in &ids[prefill..] {
        session.decode(*id)?;
        each(session.logits()?);
    }
    Ok(())
}

/// Natural logarithms of the probabilities that logits stand for, in float64.
fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let below = |logit: &f32| f64::from(*logit) - f64::from(largest);
    let total: f64 = logits.iter().map(|logit| below(logit).exp()).sum();
    logits.iter().map(|logit| below(logit) - total.ln()).collect()
}

fn print(report: &Value) -> anyhow::Result<()> {
    use std::io::Write;
    writeln!(std::io::stdout(), "{}", serde_json::to_string_pretty(report)?)?;
    Ok(())
}
