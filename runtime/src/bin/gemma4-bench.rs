//! Times prefill and decode of an exported program.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use clap::{Parser, ValueEnum};
use gemma4_format::{Program, stats};
use gemma4_runtime::cli::{self, CpuArguments, Expected, Progress, Usage};
use gemma4_runtime::cuda::{self, Call, Profile, Weights};
use gemma4_runtime::roofline::{Speed, Work};
use gemma4_runtime::{DeviceChoice, LoadedProgram, OpenDevice, Sampling, Session, SessionOptions};
use serde_json::{Value, json};

/// Time prefill and decode of an exported model.
///
/// Prints tokens per second (median, and the range of all runs), the bytes of weights, keys and
/// values that had to be read and the operations that had to be done, and the share of the wall
/// that was reached: what the device would do if it only read them at the bandwidth, or computed
/// them at the rate, that the command measures beforehand. `verify` counts
/// every token of a step; beside it stands how many times as long as of one row its step takes.
#[derive(Parser, Debug)]
#[command(name = "gemma4-bench", version, after_help = EXAMPLES)]
pub(crate) struct Arguments {
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
    #[command(flatten)]
    expected: Expected,
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
    #[command(flatten)]
    cpu: CpuArguments,
    /// Tokens to make room for; by default what the measurements need
    #[arg(long = "max_context", alias = "max-context", value_name = "N")]
    max_context: Option<u32>,
    /// On a GPU: launch kernels one by one instead of as a graph
    #[arg(long = "no_graphs", alias = "no-graphs")]
    no_graphs: bool,
    /// On a GPU: time the kernels of each call instead, one after another
    #[arg(long)]
    profile: bool,
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
  gemma4-bench --model_path model.pte --data_path model.ptd --rows 1,2,4,8 -d 0,2048
  gemma4-bench --model_path model.pte --data_path model.ptd -p 2048 -d 0,2048 --profile";

pub(crate) fn main() -> ExitCode {
    let arguments = Arguments::parse();
    cli::run(|| bench(&arguments))
}

/// One measurement: a prompt of some length, tokens generated, or tokens verified, at a depth.
struct Row {
    name: String,
    depth: u32,
    /// Tokens per second of each run.
    rates: Vec<f64>,
    /// What a run must do at least.
    work: Work,
    /// Tokens of a run.
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
    arguments.expected.check(program.file())?;
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
    let cpu = arguments.cpu.options();
    let device =
        arguments.device.open(Arc::clone(&program), options, cpu, &progress, &cli::note)?;
    drop(bar);
    let load_seconds = started.elapsed().as_secs_f64();
    if arguments.profile {
        return profile(arguments, &device);
    }
    let speed = device.speed()?;
    let session = SessionOptions { max_context: Some(context), prefill_chunk: None };
    let mut session = Session::new(device.device(), session)?;

    // On the CPU keys and values are float32.
    let position_bytes = match device.cuda() {
        Some(cuda) => cuda.plan().position_bytes.clone(),
        None => stats::position_bytes(program.program(), 4),
    };
    let mut rows = Vec::new();
    for depth in &arguments.depths {
        for length in &arguments.prompts {
            rows.push(prefill(
                &mut session,
                program.program(),
                *length,
                *depth,
                &position_bytes,
                arguments,
            )?);
        }
        if arguments.tokens > 0 {
            rows.push(decode(&mut session, program.program(), *depth, &position_bytes, arguments)?);
        }
        let mut verified = Vec::new();
        for count in &arguments.rows {
            verified.push(verify(
                &mut session,
                program.program(),
                *count,
                *depth,
                &position_bytes,
                arguments,
            )?);
        }
        compare_steps(&mut verified);
        rows.append(&mut verified);
    }
    let peak = session.take_report().peak_memory;
    let results = Results { device: &device, load_seconds, peak, speed, rows };
    let text = match arguments.output {
        Format::Md => results.markdown(),
        Format::Json => serde_json::to_string_pretty(&results.json())? + "\n",
    };
    io::stdout().write_all(text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

/// Times kernels instead of calls.
fn profile(arguments: &Arguments, device: &OpenDevice) -> anyhow::Result<ExitCode> {
    let Some(cuda) = device.cuda() else {
        return Err(Usage("--profile is for a GPU".to_owned()).into());
    };
    let mut profiles = Vec::new();
    for depth in &arguments.depths {
        let prompts = arguments.prompts.iter().map(|rows| Call::Prefill(*rows));
        for call in prompts.chain((arguments.tokens > 0).then_some(Call::Decode)) {
            profiles.push(cuda.profile(call, *depth, arguments.repetitions)?);
        }
    }
    let text = match arguments.output {
        Format::Md => {
            let tables: Vec<String> = profiles.iter().map(Profile::markdown).collect();
            format!("{}\n\n{}", device.device().describe(), tables.join("\n"))
        }
        Format::Json => {
            let profiles: Vec<Value> = profiles.iter().map(Profile::json).collect();
            let json = json!({ "device": device.device().describe(), "profiles": profiles });
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

/// Makes the context `depth` tokens, those of it that are there already included, and waits until
/// they are read.
fn fill(session: &mut Session, program: &Program, depth: u32) -> anyhow::Result<()> {
    let tokens = text(program, depth);
    let kept = session.reuse(&tokens) as usize;
    if kept < tokens.len() {
        session.prefill(&tokens[kept..])?;
        session.logits()?;
    }
    Ok(())
}

fn prefill(
    session: &mut Session,
    program: &Program,
    length: u32,
    depth: u32,
    position_bytes: &[u32],
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
        work: Work::prefill(program, length, depth, position_bytes),
        tokens: length,
        step: length,
        relative: None,
    })
}

fn decode(
    session: &mut Session,
    program: &Program,
    depth: u32,
    position_bytes: &[u32],
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
    let tokens = arguments.tokens;
    // The keys of the middle step stand for those of all.
    let step = Work::decode(program, depth + tokens / 2, position_bytes);
    let name = format!("decode {tokens}");
    Ok(Row { name, depth, rates, work: step.times(tokens), tokens, step: 1, relative: None })
}

/// Steps of `verify` of so many rows, each of which is taken back, so that all have the same depth.
fn verify(
    session: &mut Session,
    program: &Program,
    count: u32,
    depth: u32,
    position_bytes: &[u32],
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
        work: Work::verify(program, count, depth, position_bytes).times(steps),
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

    /// Seconds of a run with the median rate.
    fn seconds(&self) -> f64 {
        f64::from(self.tokens) / self.median()
    }

    /// Tokens per second of the wall, the share of it that was reached, and what the wall is.
    fn wall(&self, speed: Speed) -> (f64, f64, &'static str) {
        let least = self.work.seconds(speed);
        let kind = if self.work.is_bound_by_memory(speed) { "memory" } else { "arithmetic" };
        (f64::from(self.tokens) / least, least / self.seconds(), kind)
    }

    fn json(&self, speed: Option<Speed>) -> Value {
        let wall = speed.map(|speed| {
            let (tokens, share, kind) = self.wall(speed);
            json!({ "bound": kind, "tokens_per_second": tokens, "reached": share })
        });
        json!({
            "test": self.name,
            "depth": self.depth,
            "tokens": self.tokens,
            "tokens_per_second": self.median(),
            "runs": self.rates,
            "bytes": self.work.bytes,
            "operations": self.work.operations,
            "bytes_per_second": self.work.bytes / self.seconds(),
            "operations_per_second": self.work.operations / self.seconds(),
            "roofline": wall,
            "time_of_one_row": self.relative,
        })
    }
}

/// Everything that was measured.
struct Results<'a> {
    device: &'a OpenDevice,
    load_seconds: f64,
    peak: Option<u64>,
    speed: Option<Speed>,
    rows: Vec<Row>,
}

impl Results<'_> {
    fn json(&self) -> Value {
        let rows: Vec<Value> = self.rows.iter().map(|row| row.json(self.speed)).collect();
        json!({
            "device": self.device.device().describe(),
            "device_bytes_per_second": self.speed.map(|speed| speed.read),
            "device_operations_per_second": self.speed.map(|speed| speed.multiply),
            "load_seconds": self.load_seconds,
            "load": self.device.cuda().map(|cuda| cuda.load_times().json()),
            "peak_memory_bytes": self.peak,
            "memory": self.device.cuda().map(|cuda| cuda.memory().json()),
            "results": rows,
        })
    }

    fn markdown(&self) -> String {
        let peak = self.peak.map_or("unknown".to_owned(), cli::human_bytes);
        let mut lines = vec![self.device.device().describe()];
        lines.push(format!("load {:.2} s, peak memory {peak}", self.load_seconds));
        if let Some(Speed { read, multiply }) = self.speed {
            lines.push(format!(
                "measured: reads {} GB/s, multiplies {} TFLOP/s",
                significant(read / 1e9),
                significant(multiply / 1e12)
            ));
        }
        lines.push(String::new());
        lines.push(
            "| test | depth | tok/s | range | GB/s | TFLOP/s | wall | reached | × one row |"
                .to_owned(),
        );
        lines.push("|---|---|---|---|---|---|---|---|---|".to_owned());
        for row in &self.rows {
            let (least, most) = row.range();
            let (wall, reached) = match self.speed.map(|speed| row.wall(speed)) {
                Some((tokens, share, kind)) => {
                    (format!("{tokens:.0} tok/s, {kind}"), format!("{:.0} %", 100.0 * share))
                }
                None => ("–".to_owned(), "–".to_owned()),
            };
            let relative = row.relative.map_or("–".to_owned(), |times| format!("{times:.2}"));
            lines.push(format!(
                "| {} | {} | {:.1} | {least:.1} to {most:.1} | {} | {} | {wall} | {reached} | {relative} |",
                row.name,
                row.depth,
                row.median(),
                significant(row.work.bytes / row.seconds() / 1e9),
                significant(row.work.operations / row.seconds() / 1e12)
            ));
        }
        lines.join("\n") + "\n"
    }
}

/// A figure with about three digits.
fn significant(x: f64) -> String {
    match x {
        x if x >= 100.0 => format!("{x:.0}"),
        x if x >= 1.0 => format!("{x:.1}"),
        x => format!("{x:.3}"),
    }
}
