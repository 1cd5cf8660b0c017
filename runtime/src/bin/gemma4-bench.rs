//! Times prefill and decode of an exported program.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use clap::{Parser, ValueEnum};
use gemma4_format::{Dim, Extents, Fact, Op, Operand, Program, stats};
use gemma4_runtime::cli::{self, Progress, Usage};
use gemma4_runtime::cuda::{self, Weights};
use gemma4_runtime::{DeviceChoice, LoadedProgram, OpenDevice, Sampling, Session, SessionOptions};
use serde_json::{Value, json};

/// Time prefill and decode of an exported model.
///
/// Prints tokens per second (median, and the range of all runs), and what of the device's memory
/// bandwidth and arithmetic that takes: bytes are the weights, keys and values that a step must
/// read once; operations are two for each weight and row. `verify` counts every token of a step;
/// beside it stands how many times as long as of one row its step takes.
#[derive(Parser, Debug)]
#[command(name = "gemma4-bench", version, after_help = EXAMPLES)]
struct Arguments {
    /// The program, written by gemma4-export
    #[arg(long = "model_path", alias = "model-path", value_name = "FILE.pte")]
    model_path: PathBuf,
    /// Its weights
    #[arg(
        long = "data_path",
        alias = "data-path",
        value_name = "FILE.ptd",
        required_unless_present = "random_weights"
    )]
    data_path: Option<PathBuf>,
    /// On a GPU: fill the weights with random numbers from this seed instead of reading them
    #[arg(long = "random-weights", value_name = "SEED", conflicts_with = "data_path")]
    random_weights: Option<u32>,
    /// Prompt lengths to read
    #[arg(
        short = 'p',
        value_delimiter = ',',
        default_value = "512",
        value_name = "LIST",
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    prompts: Vec<u32>,
    /// Tokens to generate
    #[arg(short = 'n', default_value_t = 128, value_name = "N")]
    tokens: u32,
    /// Tokens in the context before each measurement
    #[arg(short = 'd', value_delimiter = ',', default_value = "0", value_name = "LIST")]
    depths: Vec<u32>,
    /// Tokens to read at once with logits of each, as when drafted ones are checked: up to 8
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "LIST",
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    rows: Vec<u32>,
    /// Repetitions
    #[arg(
        short = 'r',
        default_value_t = 5,
        value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    repetitions: u32,
    /// auto, cpu, cuda, cuda:N or cuda:GPU-UUID
    #[arg(long, default_value = "auto", value_name = "DEVICE")]
    device: DeviceChoice,
    /// Tokens to make room for; by default what the measurements need
    #[arg(long = "max_context", alias = "max-context", value_name = "N")]
    max_context: Option<u32>,
    /// On a GPU: launch kernels one by one instead of as a graph
    #[arg(long = "no_graphs", alias = "no-graphs")]
    no_graphs: bool,
    /// How to print the results
    #[arg(short = 'o', value_enum, default_value_t = Format::Md)]
    output: Format,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// A Markdown table
    Md,
    /// JSON
    Json,
}

const EXAMPLES: &str = "\
Examples:
  gemma4-bench --model_path model.pte --data_path model.ptd -p 512,2048 -n 128 -d 0,2048
  gemma4-bench --model_path 31b.pte --random-weights 1 -p 2048 -n 256 -o json
  gemma4-bench --model_path model.pte --data_path model.ptd --rows 1,2,4,8 -d 0,2048";

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    cli::run(|| bench(&arguments))
}

/// One measurement: a prompt of some length, tokens generated, or tokens verified, at a depth.
struct Row {
    name: String,
    depth: u32,
    /// Tokens per second of each run.
    rates: Vec<f64>,
    /// Bytes that a step must read, for decode and verify.
    bytes: u64,
    /// Operations of the whole measurement, for prefill.
    operations: f64,
    tokens: u32,
    /// Tokens of a step, for decode and verify.
    step: u32,
    /// Time of a step as a multiple of one of a single row, where that was measured.
    relative: Option<f64>,
}

fn bench(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let started = Instant::now();
    let program = Arc::new(match &arguments.data_path {
        Some(data) => LoadedProgram::map(&arguments.model_path, data)?,
        None => LoadedProgram::without_weights(&arguments.model_path)?,
    });
    let lengths = arguments.prompts.iter().chain(&arguments.rows).copied();
    let longest = lengths.chain([arguments.tokens]).max().unwrap_or(1);
    let deepest = arguments.depths.iter().copied().max().unwrap_or(0);
    let needed = longest.saturating_add(deepest).saturating_add(8);
    let maximum = program.program().max_context;
    if needed > maximum {
        let why = format!(
            "the measurements need a context of {needed} tokens; the program has {maximum}"
        );
        return Err(Usage(why).into());
    }
    let most = program.program().method("verify").map_or(0, |m| m.max_rows);
    if let Some(count) = arguments.rows.iter().find(|count| **count > most) {
        let why = format!("--rows {count}: the program verifies at most {most} tokens at once");
        return Err(Usage(why).into());
    }
    let context = arguments.max_context.unwrap_or(needed);
    let options = cuda::Options {
        max_context: Some(context),
        graphs: !arguments.no_graphs,
        weights: arguments.random_weights.map_or(Weights::File, Weights::Random),
        ..cuda::Options::default()
    };
    let bar = Progress::bytes("loading");
    let progress = |done, total| bar.set(done, total);
    let device = arguments.device.open(Arc::clone(&program), options, &progress, &cli::note)?;
    drop(bar);
    let session = SessionOptions { max_context: Some(context), prefill_chunk: None };
    let mut session = Session::new(device.device(), session)?;
    let load_seconds = started.elapsed().as_secs_f64();

    let mut rows = Vec::new();
    for depth in &arguments.depths {
        for length in &arguments.prompts {
            rows.push(prefill(&mut session, program.program(), *length, *depth, arguments)?);
        }
        if arguments.tokens > 0 {
            rows.push(decode(&mut session, program.program(), *depth, arguments)?);
        }
        let mut verified = Vec::new();
        for count in &arguments.rows {
            verified.push(verify(&mut session, program.program(), *count, *depth, arguments)?);
        }
        compare_steps(&mut verified);
        rows.append(&mut verified);
    }
    let peak = session.take_report().peak_memory;
    let text = match arguments.output {
        Format::Md => markdown(&device, load_seconds, peak, &rows),
        Format::Json => {
            let rows: Vec<Value> = rows.iter().map(Row::json).collect();
            let json = json!({
                "device": device.device().describe(),
                "load_seconds": load_seconds,
                "peak_memory_bytes": peak,
                "results": rows,
            });
            serde_json::to_string_pretty(&json)? + "\n"
        }
    };
    io::stdout().write_all(text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

/// Token ids that repeat late.
fn text(program: &Program, length: u32) -> Vec<u32> {
    let vocabulary = u64::from(program.vocab_size);
    (0..u64::from(length)).map(|i| ((i * 7919 + 13) % vocabulary) as u32).collect()
}

/// Puts `depth` tokens into an empty context and waits until they are read.
fn fill(session: &mut Session, program: &Program, depth: u32) -> anyhow::Result<()> {
    session.reset();
    if depth > 0 {
        session.prefill(&text(program, depth))?;
        session.logits()?;
    }
    Ok(())
}

fn prefill(
    session: &mut Session,
    program: &Program,
    length: u32,
    depth: u32,
    arguments: &Arguments,
) -> anyhow::Result<Row> {
    let tokens = text(program, length);
    let mut rates = Vec::new();
    // The first run warms up.
    for run in 0..=arguments.repetitions {
        fill(session, program, depth)?;
        let started = Instant::now();
        session.prefill(&tokens)?;
        session.logits()?;
        if run > 0 {
            rates.push(f64::from(length) / started.elapsed().as_secs_f64());
        }
    }
    Ok(Row {
        name: format!("prefill {length}"),
        depth,
        rates,
        bytes: 0,
        operations: 2.0 * products(program) as f64 * f64::from(length),
        tokens: length,
        step: length,
        relative: None,
    })
}

fn decode(
    session: &mut Session,
    program: &Program,
    depth: u32,
    arguments: &Arguments,
) -> anyhow::Result<Row> {
    let never = AtomicBool::new(false);
    let mut rates = Vec::new();
    for run in 0..=arguments.repetitions {
        fill(session, program, depth)?;
        session.prefill(&text(program, 1))?;
        session.logits()?;
        let mut drawn = 0;
        let mut started = Instant::now();
        // Random weights may draw a stop token: then the generation goes on from there.
        while drawn <= arguments.tokens {
            let left = arguments.tokens + 1 - drawn;
            for token in session.generate(Sampling::GREEDY, left, &never)? {
                token?;
                if drawn == 0 {
                    started = Instant::now();
                }
                drawn += 1;
            }
            if session.position() >= session.context() {
                break;
            }
            drawn += u32::from(drawn == 0);
        }
        if run > 0 && drawn > 1 {
            rates.push(f64::from(drawn - 1) / started.elapsed().as_secs_f64());
        }
    }
    let bytes = stats::weight_bytes_per_token(program) + read_per_step(program, depth);
    Ok(Row {
        name: format!("decode {}", arguments.tokens),
        depth,
        rates,
        bytes,
        operations: 0.0,
        tokens: arguments.tokens,
        step: 1,
        relative: None,
    })
}

/// Steps of `verify` of so many rows, each of which is taken back, so that all have the same depth.
fn verify(
    session: &mut Session,
    program: &Program,
    count: u32,
    depth: u32,
    arguments: &Arguments,
) -> anyhow::Result<Row> {
    let tokens = text(program, count);
    let steps = arguments.tokens.div_ceil(count).max(1);
    let mut rates = Vec::new();
    fill(session, program, depth)?;
    for run in 0..=arguments.repetitions {
        let started = Instant::now();
        for _ in 0..steps {
            session.verify(&tokens)?;
            anyhow::ensure!(session.rewind(depth), "the tokens of a step cannot be taken back");
        }
        if run > 0 {
            rates.push(f64::from(steps * count) / started.elapsed().as_secs_f64());
        }
    }
    Ok(Row {
        name: format!("verify {count}"),
        depth,
        rates,
        bytes: stats::weight_bytes_per_token(program) + read_per_step(program, depth),
        operations: 0.0,
        tokens: steps * count,
        step: count,
        relative: None,
    })
}

/// Says of each how long a step takes compared with one of a single row, if there is that.
fn compare_steps(rows: &mut [Row]) {
    let Some(one) = rows.iter().find(|row| row.step == 1).map(Row::median) else { return };
    for row in rows {
        row.relative = Some(one * f64::from(row.step) / row.median());
    }
}

/// Numbers of all matrices that every row of a prefill is multiplied with; the head is not.
fn products(program: &Program) -> u64 {
    let Some(prefill) = program.method("prefill") else { return 0 };
    let dims = |arg: &Operand| match arg {
        Operand::Weight(id) => {
            program.weights[*id as usize].dims.iter().map(|d| u64::from(*d)).product()
        }
        _ => 0u64,
    };
    let linear = |op: &Op| matches!(op, Op::Linear);
    let of_rows = prefill.nodes.iter().take_while(|n| !matches!(n.op, Op::LastRow));
    of_rows.filter(|n| linear(&n.op)).flat_map(|n| n.args.last()).map(dims).sum()
}

/// Bytes of bfloat16 keys and values that a step at a depth reads.
fn read_per_step(program: &Program, depth: u32) -> u64 {
    let mut bytes = 0;
    let Some(decode) = program.method("decode") else { return 0 };
    for node in &decode.nodes {
        let Op::Attention { window, .. } = node.op else { continue };
        for arg in &node.args {
            let Operand::Buffer(id) = arg else { continue };
            let mut dims = program.buffers[*id as usize].dims.clone();
            dims[0] = Dim::Fixed(window.unwrap_or(u32::MAX).min(depth + 1));
            let extents = Extents { rows: 1, context: depth };
            bytes += 2 * Fact::f32(dims).elements(extents).unwrap_or(0);
        }
    }
    bytes
}

impl Row {
    fn median(&self) -> f64 {
        let mut rates = self.rates.clone();
        rates.sort_by(f64::total_cmp);
        rates.get(rates.len() / 2).copied().unwrap_or(0.0)
    }

    fn range(&self) -> (f64, f64) {
        let least = self.rates.iter().copied().fold(f64::INFINITY, f64::min);
        (least, self.rates.iter().copied().fold(0.0, f64::max))
    }

    fn bytes_per_second(&self) -> f64 {
        self.bytes as f64 * self.median() / f64::from(self.step)
    }

    fn operations_per_second(&self) -> f64 {
        self.operations * self.median() / f64::from(self.tokens.max(1))
    }

    fn json(&self) -> Value {
        json!({
            "test": self.name,
            "depth": self.depth,
            "tokens_per_second": self.median(),
            "runs": self.rates,
            "bytes_per_step": self.bytes,
            "bytes_per_second": self.bytes_per_second(),
            "operations_per_second": self.operations_per_second(),
            "time_of_one_row": self.relative,
        })
    }
}

fn markdown(device: &OpenDevice, load_seconds: f64, peak: Option<u64>, rows: &[Row]) -> String {
    let mut lines = vec![
        format!("{}, load {load_seconds:.2} s", device.device().describe()),
        format!("peak memory {}", peak.map_or("unknown".to_owned(), cli::human_bytes)),
        String::new(),
        "| test | depth | tok/s | range | GB/s | TFLOP/s | × one row |".to_owned(),
        "|---|---|---|---|---|---|---|".to_owned(),
    ];
    for row in rows {
        let (least, most) = row.range();
        lines.push(format!(
            "| {} | {} | {:.1} | {least:.1} to {most:.1} | {} | {} | {} |",
            row.name,
            row.depth,
            row.median(),
            significant(row.bytes_per_second() / 1e9),
            significant(row.operations_per_second() / 1e12),
            row.relative.map_or("–".to_owned(), |times| format!("{times:.2}"))
        ));
    }
    lines.join("\n") + "\n"
}

/// A figure with about three digits; a dash for what does not apply.
fn significant(x: f64) -> String {
    match x {
        0.0 => "–".to_owned(),
        x if x >= 100.0 => format!("{x:.0}"),
        x if x >= 1.0 => format!("{x:.1}"),
        x => format!("{x:.3}"),
    }
}
