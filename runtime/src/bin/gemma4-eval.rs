//! Measures an exported program against other implementations.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;
use clap::{Parser, Subcommand};
use gemma4_runtime::cli::{self, Files, Progress, Usage};
use gemma4_runtime::{DeviceChoice, LoadedProgram, Session, SessionOptions, cuda};
use safetensors::tensor::{Dtype, TensorView};

/// Measure an exported model.
#[derive(Parser, Debug)]
#[command(name = "gemma4-eval", version)]
struct Arguments {
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
        files: Files,
        /// Token ids, separated by commas
        #[arg(long, value_delimiter = ',', required = true, value_name = "A,B,…")]
        ids: Vec<u32>,
        /// How many of them prefill reads
        #[arg(long, default_value_t = 1, value_name = "N")]
        prefill: usize,
        /// safetensors file to write, with the tensor `logits`, F32 [rows, vocabulary]
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
        /// Tokens that one call of prefill reads; by default as exported
        #[arg(long = "prefill_chunk", alias = "prefill-chunk", value_name = "N")]
        prefill_chunk: Option<u32>,
        /// Tokens to make room for; by default all that the program allows
        #[arg(long = "max_context", alias = "max-context", value_name = "N")]
        max_context: Option<u32>,
        /// auto, cpu, cuda, cuda:N or cuda:GPU-UUID
        #[arg(long, default_value = "auto", value_name = "DEVICE")]
        device: DeviceChoice,
    },
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    cli::run(|| {
        let Command::Logits { files, ids, prefill, out, prefill_chunk, max_context, device } =
            arguments.command;
        if prefill == 0 || prefill > ids.len() {
            let why = format!("--prefill {prefill} is not between 1 and the {} ids", ids.len());
            return Err(Usage(why).into());
        }
        let bar = Progress::bytes("loading");
        let program = LoadedProgram::map(&files.model_path, &files.data_path)?;
        let vocabulary = program.program().vocab_size as usize;
        let options = cuda::Options { max_context, ..cuda::Options::default() };
        let progress = |done, total| bar.set(done, total);
        let device = device.open(Arc::new(program), options, &progress, &cli::note)?;
        drop(bar);
        let mut session =
            Session::new(device.device(), SessionOptions { max_context, prefill_chunk })?;
        session.prefill(&ids[..prefill])?;
        let mut rows = session.logits()?;
        for id in &ids[prefill..] {
            session.decode(*id)?;
            rows.extend(session.logits()?);
        }
        let bytes: Vec<u8> = rows.iter().flat_map(|x| x.to_le_bytes()).collect();
        let shape = vec![rows.len() / vocabulary, vocabulary];
        let logits = TensorView::new(Dtype::F32, shape, &bytes)?;
        let file = safetensors::serialize([("logits", logits)], None)?;
        fs::write(&out, file).with_context(|| format!("cannot write `{}`", out.display()))?;
        Ok(ExitCode::SUCCESS)
    })
}
