//! Quantizes a Gemma 4 checkpoint into a bundle that `gemma4-export --prequantized` takes.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;
use gemma4_exporter::checkpoint::Checkpoint;
use gemma4_exporter::model::Config;
use gemma4_exporter::output::{Interrupt, Monitor, Pending, persist_all};
use gemma4_exporter::quantize::{Existing, QuantizeOn, Recipe, json, summary, table, write_bundle};
use gemma4_runtime::{DeviceChoice, cli};

/// Quantize a Gemma 4 checkpoint
///
/// Reads a Hugging Face directory (config.json and *.safetensors in bf16) and writes a directory
/// with the quantized weights and copies of config, tokenizer and chat template. Reads a block of
/// rows at a time, so memory does not depend on the size of the model. A run that was killed or
/// interrupted is continued by the same command.
#[derive(Debug, Parser)]
#[command(name = "gemma4-quantize", version, override_usage = USAGE, after_long_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// Hugging Face directory of the checkpoint
    #[arg(long, value_name = "DIR", required_unless_present = "print_recipe")]
    model_dir: Option<PathBuf>,

    /// Directory to write; it appears when everything is done
    #[arg(long, value_name = "DIR", required_unless_present = "print_recipe")]
    output: Option<PathBuf>,

    /// Which weight gets which encoding: a built-in recipe, or a TOML file of your own
    ///
    /// `default`: projections in INT4, groups of 32, with a bf16 scale and a 4-bit zero point
    /// (4.625 bits per weight); embedding and head in INT8, one scale a row; norms as they are.
    ///
    /// `hqq`: projections in INT4 with fractional zero points that a search has placed (5 bits per
    /// weight); everything else as it is.
    ///
    /// `torchao-default`, `torchao-sensitive`: what ExecuTorch's script makes of the same names; a
    /// head of its own in INT4, and in the second HQQ, with v_proj and down_proj of the first and
    /// the last quarter of the layers in INT8.
    ///
    /// A file has the same form as what --print-recipe prints: rules of which the first that
    /// matches a weight's name and layer decides its method, bits and group size.
    #[arg(long, value_name = "NAME|FILE.toml", default_value = "default")]
    recipe: String,

    /// Print a built-in recipe, to start one of your own from
    #[arg(long, value_name = "NAME", exclusive = true)]
    print_recipe: Option<String>,

    /// Write bits, signal-to-noise ratio and largest error of every weight and of every class of
    /// weights to this file, as JSON
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,

    /// Replace the output directory if it is a bundle
    #[arg(long)]
    overwrite: bool,

    /// What quantizes: auto, cpu, cuda, cuda:N or cuda:GPU-UUID
    ///
    /// `auto` takes the GPU if there is one and the CUDA compiler (NVRTC) is found, in GEMMA4_CUDA,
    /// CUDA_HOME, .cuda or /usr/local/cuda, and else the CPU. Both make the same bytes.
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    device: DeviceChoice,

    /// The kernel for the GPU, compiled ahead: a cubin or PTX
    #[arg(long, value_name = "FILE", hide = true)]
    kernel: Option<PathBuf>,

    /// Threads that read, write and, on the CPU, quantize [default: one per core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,

    /// Print a line per weight instead of a progress bar, and at the end what each has lost
    #[arg(long, short)]
    verbose: bool,
}

const USAGE: &str = "\
gemma4-quantize [OPTIONS] --model-dir <DIR> --output <DIR>
       gemma4-quantize --print-recipe <NAME>";

const EXAMPLES: &str = "\
Example:
  hf download google/gemma-4-31B-it --local-dir gemma-4-31b-it
  gemma4-quantize --model-dir gemma-4-31b-it --output gemma-4-31b-int4
  gemma4-export --prequantized gemma-4-31b-int4 --output-dir out

A recipe of your own:
  gemma4-quantize --print-recipe default > mine.toml
  gemma4-quantize --model-dir gemma-4-31b-it --output gemma-4-31b-mine --recipe mine.toml

Exit codes: 0 done, 1 error, 2 wrong usage, 3 no usable device, 130 interrupted";

pub(crate) fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            cli::say(&format!("error: {}\n", cli::sentence(&error)));
            let code = error.downcast_ref().map_or(1, gemma4_exporter::Error::exit_code);
            ExitCode::from(code)
        }
    }
}

fn run(arguments: Arguments) -> anyhow::Result<()> {
    if let Some(name) = &arguments.print_recipe {
        io::stdout().write_all(Recipe::text(name)?.as_bytes())?;
        return Ok(());
    }
    let interrupt = Interrupt::on_ctrl_c().context("cannot watch for Ctrl-C")?;
    let monitor = Monitor::new(arguments.verbose, interrupt);
    let Arguments {
        model_dir,
        output,
        recipe,
        report,
        overwrite,
        device,
        kernel,
        threads,
        verbose,
        ..
    } = arguments;
    let (model_dir, output) = (model_dir.unwrap_or_default(), output.unwrap_or_default());
    let recipe = Recipe::open(&recipe)?;
    let on = QuantizeOn { device, kernel };
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads.map_or(0, usize::from))
        .build()
        .context("cannot start the threads")?;
    let checkpoint = Checkpoint::open(model_dir)?;
    // Refuses what could not be exported afterwards.
    Config::parse(checkpoint.config_json()).map_err(gemma4_exporter::Error::from)?;
    // Created first, so that a place that can't be written is known before the work.
    let report = report.map(Pending::create).transpose()?;
    let quantizer = on.open(&|text| monitor.note(text))?;
    let existing = if overwrite { Existing::Replace } else { Existing::Refuse };
    let weights = pool
        .install(|| write_bundle(&checkpoint, &recipe, &output, existing, &quantizer, &monitor))?;
    if let Some(report) = report {
        report.write_at(json(&recipe.name, &weights).as_bytes(), 0)?;
        persist_all([report])?;
    }
    if verbose {
        cli::say(&table(&weights));
    }
    cli::say(&summary(&weights));
    Ok(())
}
