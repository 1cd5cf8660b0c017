//! Compares the bundles that a GPU and the CPU make, byte by byte, and times the GPU.
//!
//! ```text
//! cargo run --release --example quantize_check -- check
//! cargo run --release --example quantize_check -- bench MODEL_DIR
//! ```
#![allow(clippy::print_stdout, reason = "its output is its purpose")]

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, ensure};
use clap::{Args, Parser, Subcommand};
use gemma4_exporter::checkpoint::Checkpoint;
use gemma4_exporter::output::Monitor;
use gemma4_exporter::quantize::{
    Codes, Existing, Group, Layers, Method, QuantizeOn, Quantizer, Recipe, Rule, Treatment, json,
    write_bundle,
};
use gemma4_exporter::synthetic::{Random, TINY_CONFIG};
use gemma4_format::encoding::ZeroType;
use gemma4_format::{DType, Offset};
use gemma4_runtime::{DeviceChoice, cli};
use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::TensorView;

#[derive(Debug, Parser)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Weights of every kind in every encoding, on the CPU and on the device
    Check(On),
    /// Time the device on a checkpoint, by the recipes `default` and `hqq`
    Bench {
        /// Hugging Face directory
        model_dir: PathBuf,
        #[command(flatten)]
        on: On,
    },
}

#[derive(Args, Debug)]
struct On {
    /// What is compared with the CPU, or timed
    #[arg(long, default_value = "cuda")]
    device: DeviceChoice,
    /// The kernel, compiled ahead
    #[arg(long)]
    kernel: Option<PathBuf>,
}

impl On {
    fn open(self) -> anyhow::Result<Quantizer> {
        Ok(QuantizeOn { device: self.device, kernel: self.kernel }.open(&cli::note)?)
    }
}

fn main() -> anyhow::Result<()> {
    match Arguments::parse().command {
        Command::Check(on) => check(&on.open()?),
        Command::Bench { model_dir, on } => bench(&model_dir, &on.open()?),
    }
}

/// The last layer has rows of an odd number of columns, which share one scale.
const ODD: u32 = KINDS.len() as u32;

fn check(quantizer: &Quantizer) -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let mut compared = 0;
    for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
        let source = dir.path().join("source");
        write_source(&source, dtype, None)?;
        let checkpoint = Checkpoint::open(&source)?;
        for recipe in recipes() {
            let what = || format!("{dtype:?}, {}", recipe.name);
            let on = |name: &str, quantizer| {
                let out = dir.path().join(name);
                let monitor = Monitor::silent();
                write_bundle(&checkpoint, &recipe, &out, Existing::Replace, quantizer, &monitor)
                    .map(|reports| (out, json(&recipe.name, &reports)))
                    .with_context(what)
            };
            let (ours, our_report) = on("device", quantizer)?;
            let (theirs, their_report) = on("cpu", &Quantizer::Cpu)?;
            let read = |dir: PathBuf| fs::read(dir.join("model.safetensors"));
            let (ours, theirs) = (read(ours)?, read(theirs)?);
            ensure!(ours.len() == theirs.len(), "{}: sizes differ", what());
            let differing = ours.iter().zip(&theirs).filter(|(a, b)| a != b).count();
            ensure!(differing == 0, "{}: {differing} of {} bytes differ", what(), ours.len());
            ensure!(our_report == their_report, "{}: reports differ", what());
            compared += 1;
        }
        for bad in [f32::NAN, f32::INFINITY] {
            write_source(&source, dtype, Some(bad))?;
            let checkpoint = Checkpoint::open(&source)?;
            let refusal = |quantizer| {
                let (out, monitor) = (dir.path().join("refused"), Monitor::silent());
                let recipe = Recipe::named("default")?;
                write_bundle(&checkpoint, &recipe, &out, Existing::Replace, quantizer, &monitor)
                    .err()
                    .map(|error| error.to_string())
                    .context("a number that is not finite was taken")
            };
            let (ours, theirs) = (refusal(quantizer)?, refusal(&Quantizer::Cpu)?);
            ensure!(ours == theirs, "`{ours}`, but on the CPU `{theirs}`");
        }
    }
    println!("ok: {compared} bundles are the same to the last byte");
    Ok(())
}

/// How the numbers of a weight are made from normal ones, of which this is the `at`th.
type Kind = fn(u64, f32) -> f32;

const KINDS: [Kind; 8] = [
    |_, n| n * 0.02,
    |_, n| n * 30.0,
    |_, n| 100.0 + n.abs() * 30.0,
    |_, n| -0.01 - n.abs() * 1e-3,
    |at, _| if at.is_multiple_of(3) { -0.0 } else { 0.0 },
    |_, n| n * 1e-7,
    |_, n| n * 1e4,
    |at, n| if at % 37 == 5 { n * 100.0 } else { n * 0.02 },
];

/// A checkpoint whose layers have a weight each, of one kind. With `bad`, that stands in one.
fn write_source(dir: &Path, dtype: Dtype, bad: Option<f32>) -> anyhow::Result<()> {
    let mut random = Random::new(7);
    let mut tensors = Vec::new();
    let odd: Kind = |_, n| n * n * n;
    for (layer, kind) in KINDS.into_iter().chain([odd]).enumerate() {
        // Several pieces of one weight, and a last one that is shorter.
        let (rows, k) = match layer {
            0 if dtype == Dtype::BF16 => (90_001, 96),
            _ if layer as u32 == ODD => (257, 67),
            _ => (257, 96),
        };
        let mut bytes = Vec::new();
        for at in 0..rows * k {
            let number = match bad {
                Some(bad) if layer == 3 && at >= 2 * k + 5 => bad,
                _ => kind(at, random.normal()),
            };
            match dtype {
                Dtype::F32 => bytes.extend(number.to_le_bytes()),
                Dtype::F16 => bytes.extend(f16::from_f32(number).to_le_bytes()),
                _ => bytes.extend(bf16::from_f32(number).to_le_bytes()),
            }
        }
        let name = format!("model.language_model.layers.{layer}.mlp.up_proj.weight");
        tensors.push((name, vec![rows as usize, k as usize], bytes));
    }
    fs::create_dir_all(dir)?;
    fs::write(dir.join("config.json"), TINY_CONFIG)?;
    let views = tensors.iter().map(|(name, shape, bytes)| {
        TensorView::new(dtype, shape.clone(), bytes).map(|view| (name, view))
    });
    let views = views.collect::<Result<Vec<_>, _>>()?;
    safetensors::serialize_to_file(views, None, &dir.join("model.safetensors"))?;
    Ok(())
}

/// Every way in which weights can be quantized.
fn recipes() -> Vec<Recipe> {
    let fractions = [Offset::Zero(ZeroType::F16), Offset::Zero(ZeroType::BF16)];
    let whole = [Offset::Symmetric, Offset::Zero(ZeroType::U8)];
    let nibble = [Offset::Zero(ZeroType::Nibble)];
    let mut recipes = Vec::new();
    for (bits, nibbles) in [(4, &nibble[..]), (6, &[]), (8, &[])] {
        let offsets = fractions.iter().chain(&whole).chain(nibbles);
        let min_max = offsets.map(|offset| (*offset, Method::MinMax));
        let hqq = fractions.iter().map(|offset| (*offset, Method::HalfQuadratic));
        for (offset, method) in min_max.chain(hqq) {
            for scale in [DType::BF16, DType::F32] {
                for group in [Group::Size(32), Group::Size(3), Group::Row] {
                    let rule = |layers, group| Rule {
                        pattern: "layers.*".to_owned(),
                        layers,
                        treatment: Treatment::Quantize(
                            Codes { bits, group, scale, offset },
                            method,
                        ),
                    };
                    let odd = Layers::Ranges(vec![(ODD, ODD)]);
                    recipes.push(Recipe {
                        name: format!("{bits} {group:?} {scale:?} {offset:?} {method:?}"),
                        rules: vec![rule(odd, Group::Row), rule(Layers::All, group)],
                        untie_head: false,
                    });
                }
            }
        }
    }
    recipes
}

fn bench(model_dir: &Path, quantizer: &Quantizer) -> anyhow::Result<()> {
    let checkpoint = Checkpoint::open(model_dir)?;
    let (mut of_layers, mut others, mut layers) = (0, 0, 0);
    for name in checkpoint.names() {
        let weight = checkpoint.weight(name)?;
        let bytes = weight.encoding.bytes(&weight.dims)?;
        match name.strip_prefix("layers.").and_then(|rest| rest.split('.').next()) {
            Some(layer) => {
                of_layers += bytes;
                layers = layers.max(layer.parse::<u64>()? + 1);
            }
            None => others += bytes,
        }
    }
    let bytes = (of_layers + others) as f64;
    let sixty = of_layers as f64 / layers.max(1) as f64 * 60.0 + others as f64;
    let dir = tempfile::tempdir()?;
    for name in ["default", "hqq"] {
        let (recipe, out) = (Recipe::named(name)?, dir.path().join("bundle"));
        let monitor = Monitor::silent();
        let start = Instant::now();
        write_bundle(&checkpoint, &recipe, &out, Existing::Replace, quantizer, &monitor)?;
        let seconds = start.elapsed().as_secs_f64();
        println!(
            "{name}: {:.2} GB in {seconds:.2} s, {:.2} GB/s; {:.0} s for 60 layers ({:.1} GB)",
            bytes / 1e9,
            bytes / 1e9 / seconds,
            sixty / bytes * seconds,
            sixty / 1e9
        );
    }
    Ok(())
}
