//! Exports a Gemma 4 checkpoint as `model.pte` and `model.ptd`.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Parser, ValueEnum};
use gemma4_exporter::export::{Options, export, export_random, export_without_data};
use gemma4_exporter::lower::{Fusions, Target};
use gemma4_exporter::output::{Interrupt, Monitor};
use gemma4_exporter::quantize::{QuantizeOn, Recipe};
use gemma4_exporter::{Error, Result, source, tiny};
use gemma4_runtime::{DeviceChoice, cli};

/// Export a Gemma 4 checkpoint: what to compute goes to model.pte, the weights to model.ptd.
///
/// Weights are streamed; the process needs less than 1 GiB of memory for any model. Both files
/// appear when both are complete. The same checkpoint and flags give the same bytes.
#[derive(Parser, Debug)]
#[command(name = "gemma4-export", version, after_help = EXAMPLES)]
pub(crate) struct Arguments {
    #[command(flatten)]
    input: Input,
    /// Where model.pte and model.ptd go
    #[arg(long, value_name = "DIR", required_unless_present = "tiny_test")]
    output_dir: Option<PathBuf>,
    /// With --random: where the random numbers begin (default: 1)
    #[arg(long, value_name = "N", requires = "random")]
    seed: Option<u64>,
    /// With --random: write model.pte alone; for gemma4-bench --random-weights, or, with --seed,
    /// for the model.ptd that the same seed gives on another machine
    #[arg(long, requires = "random")]
    no_data: bool,
    /// With --model-dir or --random: quantize on the way, by a built-in recipe or a TOML file of
    /// your own (see gemma4-quantize --help; default: keep the weights as they are)
    #[arg(long, value_name = "NAME|FILE.toml", conflicts_with_all = ["prequantized", "gguf"])]
    recipe: Option<String>,
    /// With --model-dir and --recipe: what quantizes (auto, cpu, cuda, cuda:N or cuda:GPU-UUID;
    /// default: auto, see gemma4-quantize --help)
    #[arg(long, value_name = "DEVICE", requires = "recipe", conflicts_with_all = ["random", "prequantized", "gguf"])]
    device: Option<DeviceChoice>,
    /// The quantizing kernel for the GPU, compiled ahead: a cubin or PTX
    #[arg(long, value_name = "FILE", requires = "recipe", conflicts_with_all = ["random", "prequantized", "gguf"], hide = true)]
    kernel: Option<PathBuf>,
    /// Longest context of the program, in tokens (default: 4096, or the model's if it is shorter)
    #[arg(long, value_name = "N")]
    max_seq_len: Option<u32>,
    /// Most prompt tokens read by one call (default: 512, or the context if it is shorter)
    #[arg(long, value_name = "N")]
    max_prefill_chunk: Option<u32>,
    /// Chat template to use instead of the checkpoint's
    #[arg(long, value_name = "FILE")]
    chat_template: Option<PathBuf>,
    /// generation_config.json to use instead of the checkpoint's
    #[arg(long, value_name = "FILE")]
    generation_config: Option<PathBuf>,
    /// What the program will run on; the CPU is always among it
    #[arg(long, value_enum, default_value_t = Backend::Cpu)]
    backend: Backend,
    /// With --backend cuda: GPU architectures, separated by commas, from sm_80, sm_86, sm_89,
    /// sm_90, sm_90a, sm_100, sm_120 and ptx (default: sm_80,sm_86,sm_89,sm_90a,sm_120,ptx)
    #[arg(long, value_delimiter = ',', value_name = "LIST")]
    arch: Vec<Target>,
    /// Lower without a fusion, to compare with: add-norm, split or geglu
    #[arg(long, value_name = "NAME", value_parser = Fusions::without, requires = "arch", hide = true)]
    without_fusion: Option<Fusions>,
    /// Print a line for each weight
    #[arg(long, short)]
    verbose: bool,
}

/// What a program can run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Backend {
    /// The CPU alone
    Cpu,
    /// NVIDIA GPUs, too: needs the CUDA compiler (`make cuda-toolchain`), but no GPU
    Cuda,
}

#[derive(Args, Debug)]
#[group(required = true, multiple = false)]
struct Input {
    /// A bundle made by gemma4-quantize, or by ExecuTorch's script for Gemma 4 (torchao)
    #[arg(long, value_name = "DIR")]
    prequantized: Option<PathBuf>,
    /// A Hugging Face checkpoint: config.json and model*.safetensors
    #[arg(long, value_name = "DIR")]
    model_dir: Option<PathBuf>,
    /// A GGUF file of llama.cpp, or any part of a split one: numbers, config, tokenizer and chat
    /// template are the file's
    #[arg(long, value_name = "FILE")]
    gguf: Option<PathBuf>,
    /// A config.json: export a model of this shape with random weights, for measurements
    #[arg(long, value_name = "CONFIG.json")]
    random: Option<PathBuf>,
    /// Take a tiny random model through the whole pipeline and compare it with candle
    #[arg(long)]
    tiny_test: bool,
}

const EXAMPLES: &str = "\
Examples:
  gemma4-export --prequantized gemma-4-31b-int4 --output-dir out
  gemma4-export --model-dir gemma-4-31b-it --recipe default --output-dir out --max-seq-len 32768
  gemma4-export --gguf gemma-4-31b-it-Q4_K_M.gguf --output-dir out
  gemma4-export --random exporter/configs/gemma-4-31b.json --recipe default --output-dir out
  gemma4-export --tiny-test

Exit codes: 0 done, 1 error, 2 wrong usage, 3 no usable device, 130 interrupted.";

pub(crate) fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            cli::say(&format!("error: {}\n", cli::sentence(&error)));
            ExitCode::from(error.downcast_ref().map_or(1, Error::exit_code))
        }
    }
}

fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let interrupt = Interrupt::on_ctrl_c().context("cannot watch for Ctrl-C")?;
    let monitor = Monitor::new(arguments.verbose, interrupt);
    if arguments.input.tiny_test {
        let report = tiny::test(arguments.output_dir.as_deref(), &monitor)?;
        writeln!(io::stdout(), "{report}")?;
        return Ok(());
    }
    let read = |path: &Option<PathBuf>| path.as_deref().map(read_text).transpose();
    let options = Options {
        max_seq_len: arguments.max_seq_len,
        max_prefill_chunk: arguments.max_prefill_chunk,
        recipe: arguments.recipe.as_deref().map(Recipe::open).transpose()?,
        quantize_on: QuantizeOn {
            device: arguments.device.clone().unwrap_or(DeviceChoice::Auto),
            kernel: arguments.kernel.clone(),
        },
        chat_template: read(&arguments.chat_template)?,
        generation_config: read(&arguments.generation_config)?,
        targets: targets(arguments)?,
        fusions: arguments.without_fusion.unwrap_or_default(),
    };
    let output_dir = arguments.output_dir.as_deref().unwrap_or(Path::new("."));
    let exported = if let Some(config) = &arguments.input.random {
        let config = read_text(config)?;
        if arguments.no_data {
            let seed = arguments.seed;
            let path = export_without_data(&config, seed, &options, output_dir, &monitor)?;
            cli::say(&format!("wrote {}\n", path.display()));
            return Ok(());
        }
        export_random(&config, arguments.seed.unwrap_or(1), &options, output_dir, &monitor)?
    } else {
        let source = arguments.input.source().context("no input was given")?.open()?;
        export(source.as_ref(), &options, output_dir, &monitor)?
    };
    cli::say(&format!(
        "wrote {} and {} ({:.1} MB)\n",
        exported.program.display(),
        exported.data.display(),
        exported.bytes as f64 / 1e6
    ));
    Ok(())
}

fn targets(arguments: &Arguments) -> Result<Vec<Target>> {
    match arguments.backend {
        Backend::Cpu if arguments.arch.is_empty() => Ok(Vec::new()),
        Backend::Cpu => {
            let why = "is for --backend cuda".to_owned();
            Err(Error::Flag { flag: "--arch", why })
        }
        Backend::Cuda if arguments.arch.is_empty() => Ok(Target::DEFAULT.to_vec()),
        Backend::Cuda => Ok(arguments.arch.clone()),
    }
}

impl Input {
    /// The source of weights; not given with `--random` and `--tiny-test`.
    fn source(&self) -> Option<source::Input> {
        let Self { prequantized, model_dir, gguf, .. } = self;
        let prequantized = prequantized.clone().map(source::Input::Prequantized);
        let model_dir = model_dir.clone().map(source::Input::ModelDir);
        prequantized.or(model_dir).or(gguf.clone().map(source::Input::Gguf))
    }
}

fn read_text(path: &Path) -> Result<String> {
    fs::read_to_string(path).map_err(Error::io("read", path))
}
