//! Compares what every stage of an export computes, from the checkpoint to the devices.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Parser};
use gemma4_exporter::export::Options;
use gemma4_exporter::lower::Target;
use gemma4_exporter::model::Config;
use gemma4_exporter::output::{Interrupt, Monitor};
use gemma4_exporter::quantize::Recipe;
use gemma4_exporter::source::{self, ModelSource};
use gemma4_exporter::validate::{Bound, Settings, validate};
use gemma4_exporter::{Error, Result};
use gemma4_runtime::cli;
use gemma4_runtime::text::{ControlText, Tokenizer};

/// Check that a model stays the same model on its way from a checkpoint to a device.
///
/// Runs one prompt through six stages: (1) the weights of the source in float32, (2) quantized,
/// (3) the traced graph, (4) the two files on the CPU, (5) the plan for each GPU architecture, (6)
/// the two files on a GPU. Each is compared with the one before; the first that is too far away
/// ends the validation with the layer where it begins. The first three hold the weights of one
/// layer at a time. What a machine can't run is reported as not run.
#[derive(Debug, Parser)]
#[command(name = "gemma4-validate", version, after_long_help = EXAMPLES)]
pub(crate) struct Arguments {
    #[command(flatten)]
    input: Input,

    /// With --model-dir: quantize by a built-in recipe, or a TOML file of your own
    #[arg(long, value_name = "NAME|FILE.toml", conflicts_with_all = ["prequantized", "gguf"])]
    recipe: Option<String>,

    /// Validate the model.pte and model.ptd of this directory instead of exporting them
    #[arg(long, value_name = "DIR", conflicts_with_all = ["output_dir", "arch"])]
    program: Option<PathBuf>,

    /// Keep the files that are exported here [default: a temporary directory]
    #[arg(long, value_name = "DIR")]
    output_dir: Option<PathBuf>,

    /// Compile for these GPU architectures, separated by commas, so that stage 6 can run
    #[arg(long, value_delimiter = ',', value_name = "LIST")]
    arch: Vec<Target>,

    /// What the model reads, as it stands
    #[arg(long, value_name = "TEXT", default_value = "The capital of France is")]
    prompt: String,

    /// Token ids instead of a prompt, separated by commas
    #[arg(long, value_delimiter = ',', value_name = "LIST", conflicts_with = "prompt")]
    ids: Vec<u32>,

    /// Largest divergence that quantization may cause, in nats
    #[arg(long, value_name = "X", default_value_t = 2.0)]
    max_kl: f64,

    /// Print the results as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
#[group(required = true, multiple = false)]
struct Input {
    /// A Hugging Face checkpoint: config.json and model*.safetensors
    #[arg(long, value_name = "DIR")]
    model_dir: Option<PathBuf>,
    /// A bundle made by gemma4-quantize, or by ExecuTorch's script for Gemma 4 (torchao)
    #[arg(long, value_name = "DIR")]
    prequantized: Option<PathBuf>,
    /// A GGUF file of llama.cpp, or any part of a split one
    #[arg(long, value_name = "FILE")]
    gguf: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  gemma4-validate --model-dir gemma-4-31b-it --recipe default
  gemma4-validate --gguf gemma-4-31b-it-Q4_K_M.gguf --program out --json

Exit codes: 0 no stage differs, 1 a stage differs or failed, 2 wrong usage, 130 interrupted";

pub(crate) fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(code) => code,
        Err(error) => {
            cli::say(&format!("error: {}\n", cli::sentence(&error)));
            ExitCode::from(error.downcast_ref().map_or(1, Error::exit_code))
        }
    }
}

fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let interrupt = Interrupt::on_ctrl_c().context("cannot watch for Ctrl-C")?;
    let monitor = Monitor::new(false, interrupt.clone());
    let source = source(&arguments.input)?;
    let tokenizer = source.tokenizer_json()?.map(|bytes| Tokenizer::from_bytes(&bytes));
    let tokenizer = tokenizer.transpose()?;
    let tokens = tokens(arguments, source.as_ref(), tokenizer.as_ref())?;
    let temporary = tempfile::tempdir().map_err(Error::io("create a directory in", "TMPDIR"))?;
    let rows = tokens.len() as u32;
    let settings = Settings {
        tokens,
        options: Options {
            recipe: arguments.recipe.as_deref().map(Recipe::open).transpose()?,
            max_prefill_chunk: (rows > gemma4_exporter::export::DEFAULT_CHUNK).then_some(rows),
            targets: arguments.arch.clone(),
            ..Options::default()
        },
        files: arguments.program.clone(),
        scratch: arguments.output_dir.clone().unwrap_or_else(|| temporary.path().to_owned()),
        quantized: Bound {
            divergence: arguments.max_kl,
            logit: f32::INFINITY,
            hidden: f64::INFINITY,
        },
    };
    let spell = |id: u32| match &tokenizer {
        Some(tokenizer) => format!("{:?}", tokenizer.decode(&[id], ControlText::Show)),
        None => id.to_string(),
    };
    let mut printed = Ok(());
    let report = validate(source.as_ref(), &settings, &monitor, &mut |stage| {
        if !arguments.json && printed.is_ok() {
            printed = io::stdout().write_all(stage.text(&spell).as_bytes());
        }
    })?;
    printed?;
    let text = if arguments.json { report.json(&spell) } else { format!("{report}\n") };
    io::stdout().write_all(text.as_bytes())?;
    interrupt.check()?;
    Ok(ExitCode::from(u8::from(report.failed())))
}

fn source(input: &Input) -> Result<Box<dyn ModelSource>> {
    let Input { model_dir, prequantized, gguf } = input;
    let model_dir = model_dir.clone().map(source::Input::ModelDir);
    let prequantized = prequantized.clone().map(source::Input::Prequantized);
    let input = model_dir.or(prequantized).or(gguf.clone().map(source::Input::Gguf));
    let missing = || Error::Flag { flag: "--model-dir", why: "no input was given".to_owned() };
    input.ok_or_else(missing)?.open()
}

fn tokens(
    arguments: &Arguments,
    source: &dyn ModelSource,
    tokenizer: Option<&Tokenizer>,
) -> anyhow::Result<Vec<u32>> {
    if !arguments.ids.is_empty() {
        return Ok(arguments.ids.clone());
    }
    let Some(tokenizer) = tokenizer else {
        let why = "the source has no tokenizer; give --ids".to_owned();
        return Err(Error::Flag { flag: "--prompt", why }.into());
    };
    let config = Config::parse(source.config_json()).map_err(Error::from)?;
    Ok(tokenizer.encode_raw(&arguments.prompt, config.bos_token_id)?)
}
