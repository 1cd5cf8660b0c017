//! Runs an exported program: reads a prompt, prints the answer as it is generated.

use std::fs;
use std::io::{self, Read, Write};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::Context;
use clap::Parser;
use gemma4_runtime::cli::{self, Files, INTERRUPTED, Placement, Progress, Usage};
use gemma4_runtime::cuda::Calls;
use gemma4_runtime::text::{Chat, ChatTemplate, ControlText, Tokenizer};
use gemma4_runtime::{
    FinishReason, LoadedProgram, OpenDevice, Report, Sampling, Session, SessionOptions,
};
use serde_json::json;

/// Answer a prompt with an exported model.
///
/// Only the generated text goes to stdout. Progress and a short report go to stderr.
#[derive(Parser, Debug)]
#[command(name = "gemma4-run", version, after_help = EXAMPLES)]
struct Arguments {
    #[command(flatten)]
    files: Files,
    /// tokenizer.json to use instead of the one in the program
    #[arg(long = "tokenizer_path", alias = "tokenizer-path", value_name = "FILE")]
    tokenizer_path: Option<PathBuf>,
    /// What to say to the model
    #[arg(long, required_unless_present = "prompt_file")]
    prompt: Option<String>,
    /// Read the prompt from a file, or from stdin if it is `-`
    #[arg(
        long = "prompt_file",
        alias = "prompt-file",
        value_name = "FILE",
        conflicts_with = "prompt"
    )]
    prompt_file: Option<PathBuf>,
    /// Instructions that stand before the conversation
    #[arg(long, conflicts_with = "raw_prompt")]
    system: Option<String>,
    /// Give the prompt to the model as it is, without the chat template
    ///
    /// Control tokens that it spells become control tokens, and the first token of every text
    /// (BOS) is put before it.
    #[arg(long = "raw_prompt", alias = "raw-prompt")]
    raw_prompt: bool,
    /// With --raw_prompt: put no BOS before the prompt
    #[arg(long = "no_bos", alias = "no-bos", requires = "raw_prompt")]
    no_bos: bool,
    /// Stop after this many tokens; by default at the end of the context
    #[arg(long = "max_new_tokens", alias = "max-new-tokens", value_name = "N")]
    max_new_tokens: Option<u32>,
    /// Randomness: 0 always takes the most probable token; by default as the checkpoint says
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    temperature: Option<f32>,
    /// Draw from this many of the most probable tokens; 0 for all
    #[arg(long = "top_k", alias = "top-k", value_name = "K")]
    top_k: Option<u32>,
    /// Draw from the most probable tokens that together have this probability
    #[arg(long = "top_p", alias = "top-p", value_name = "P")]
    top_p: Option<f32>,
    /// Start of the random numbers; the same seed gives the same answer
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    #[command(flatten)]
    placement: Placement,
    /// Write timings and counts to a file, as JSON
    #[arg(long = "stats_json", alias = "stats-json", value_name = "FILE")]
    stats_json: Option<PathBuf>,
    /// Print no report
    #[arg(long, short)]
    quiet: bool,
}

const EXAMPLES: &str = "\
Examples:
  gemma4-run --model_path model.pte --data_path model.ptd --prompt 'Why is the sky blue?'
  gemma4-run --model_path model.pte --data_path model.ptd --prompt_file - --temperature 0 < question.txt

Exit codes: 0 done, 1 error, 2 wrong usage, 3 no usable device or too little memory, 130 interrupted.";

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    cli::run(|| answer(&arguments))
}

fn answer(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let interrupted = cli::interrupt_flag()?;
    let prompt = read_prompt(arguments)?;
    let started = Instant::now();
    let Files { model_path, data_path } = &arguments.files;
    let program = Arc::new(LoadedProgram::map(model_path, data_path)?);
    let tokenizer = tokenizer(arguments, &program)?;
    let ids = encode(arguments, &program, &tokenizer, &prompt)?;
    let sampling = sampling(arguments, &program);
    sampling.check()?;

    let device = arguments.placement.open(program)?;
    let max_context = arguments.placement.max_context;
    let options = SessionOptions { max_context, prefill_chunk: None };
    let mut session = Session::new(device.device(), options)?;
    let load_seconds = started.elapsed().as_secs_f64();

    let outcome =
        generate(arguments, (&device, &mut session), &tokenizer, &ids, sampling, &interrupted)?;
    let stats = Stats {
        device: device.device().describe(),
        on_gpu: matches!(device, OpenDevice::Cuda(_)),
        load: device.cuda().map(|cuda| cuda.load_times().json()),
        memory: device.cuda().map(|cuda| cuda.memory().json()),
        context: session.context(),
        load_seconds,
        report: session.take_report(),
        outcome,
        seed: (sampling.temperature > 0.0).then_some(sampling.seed),
    };
    if !arguments.quiet {
        cli::say(&stats.text());
    }
    if let Some(path) = &arguments.stats_json {
        let json = serde_json::to_string_pretty(&stats.json())?;
        fs::write(path, json + "\n")
            .with_context(|| format!("cannot write `{}`", path.display()))?;
    }
    let interrupted = stats.outcome.reason == FinishReason::Interrupted;
    Ok(ExitCode::from(if interrupted { INTERRUPTED } else { 0 }))
}

fn read_prompt(arguments: &Arguments) -> anyhow::Result<String> {
    if let Some(prompt) = &arguments.prompt {
        return Ok(prompt.clone());
    }
    let path = arguments.prompt_file.as_deref().unwrap_or("-".as_ref());
    let mut bytes = Vec::new();
    if path.as_os_str() == "-" {
        io::stdin().read_to_end(&mut bytes).context("cannot read the prompt from stdin")?;
    } else {
        bytes = fs::read(path).with_context(|| format!("cannot read `{}`", path.display()))?;
    }
    String::from_utf8(bytes).with_context(|| format!("`{}` is not UTF-8 text", path.display()))
}

fn tokenizer(arguments: &Arguments, program: &LoadedProgram) -> anyhow::Result<Tokenizer> {
    let bytes = match &arguments.tokenizer_path {
        Some(path) => {
            fs::read(path).with_context(|| format!("cannot read `{}`", path.display()))?
        }
        None => program.file().tokenizer().to_vec(),
    };
    if let Some(path) = &arguments.tokenizer_path {
        return Tokenizer::from_bytes(&bytes).with_context(|| format!("`{}`", path.display()));
    }
    if bytes.is_empty() {
        let why = "the program holds no tokenizer; give one with --tokenizer_path";
        return Err(Usage(why.to_owned()).into());
    }
    Ok(Tokenizer::from_bytes(&bytes)?)
}

/// The prompt's ids, through the chat template unless it is raw.
fn encode(
    arguments: &Arguments,
    program: &LoadedProgram,
    tokenizer: &Tokenizer,
    prompt: &str,
) -> anyhow::Result<Vec<u32>> {
    let text = &program.program().text;
    if arguments.raw_prompt {
        let bos = text.bos_token.filter(|_| !arguments.no_bos);
        return Ok(tokenizer.encode_raw(prompt, bos)?);
    }
    let source = program.file().chat_template();
    if source.is_empty() {
        let why = "the program holds no chat template: use --raw_prompt, or export it again with \
                   --chat-template FILE";
        return Err(Usage(why.to_owned()).into());
    }
    let spelled = |id: Option<&u32>| id.and_then(|id| tokenizer.id_to_token(*id));
    let bos = spelled(text.bos_token.as_ref()).unwrap_or_default();
    let eos = spelled(text.stop_tokens.first()).unwrap_or_default();
    let variables = [("bos_token", bos.as_str()), ("eos_token", eos.as_str())];
    let template = ChatTemplate::new(source, variables)?;
    let system = arguments.system.iter().map(|s| json!({"role": "system", "content": s}));
    let messages: Vec<_> = system.chain([json!({"role": "user", "content": prompt})]).collect();
    let chat = Chat {
        messages: &messages,
        tools: None,
        enable_thinking: None,
        add_generation_prompt: true,
    };
    Ok(tokenizer.encode_rendered(&template.render(&chat, tokenizer)?)?)
}

fn sampling(arguments: &Arguments, program: &LoadedProgram) -> Sampling {
    let defaults = &program.program().text;
    Sampling {
        temperature: arguments.temperature.unwrap_or(defaults.temperature),
        top_k: arguments.top_k.unwrap_or(defaults.top_k),
        top_p: arguments.top_p.unwrap_or(defaults.top_p),
        seed: arguments.seed.unwrap_or_else(fresh_seed),
    }
}

/// A number that nobody can predict, from the standard library's own source of keys.
fn fresh_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id())
}

/// What came out of a generation.
struct Outcome {
    reason: FinishReason,
    generated: u64,
    first_token_seconds: Option<f64>,
    /// Calls of the GPU's driver between the first token and the last.
    calls: Option<Calls>,
}

fn generate(
    arguments: &Arguments,
    (device, session): (&OpenDevice, &mut Session),
    tokenizer: &Tokenizer,
    ids: &[u32],
    sampling: Sampling,
    interrupted: &AtomicBool,
) -> anyhow::Result<Outcome> {
    let started = Instant::now();
    let mut outcome = Outcome {
        reason: FinishReason::Interrupted,
        generated: 0,
        first_token_seconds: None,
        calls: None,
    };
    let bar = Progress::tokens("reading the prompt");
    let read_all = session.prefill_with(ids, |done, total| {
        bar.set(done as u64, total as u64);
        match interrupted.load(Ordering::Relaxed) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    })?;
    drop(bar);
    if !read_all {
        return Ok(outcome);
    }
    let mut stream = tokenizer.stream(ControlText::Hide);
    let mut stdout = io::stdout().lock();
    let limit = arguments.max_new_tokens.unwrap_or(u32::MAX);
    let mut generation = session.generate(sampling, limit, interrupted)?;
    let mut calls_before = None;
    for token in generation.by_ref() {
        outcome.first_token_seconds.get_or_insert_with(|| started.elapsed().as_secs_f64());
        outcome.generated += 1;
        let calls = device.calls();
        let before = *calls_before.get_or_insert(calls);
        outcome.calls = calls.zip(before).map(|(now, before)| now.since(before));
        print(&mut stdout, &stream.push(token?))?;
    }
    print(&mut stdout, &stream.finish())?;
    print(&mut stdout, "\n")?;
    if let Some(reason) = generation.reason() {
        outcome.reason = reason;
    }
    Ok(outcome)
}

fn print(out: &mut impl Write, text: &str) -> io::Result<()> {
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// What is said about a run.
struct Stats {
    device: String,
    on_gpu: bool,
    context: u32,
    load_seconds: f64,
    /// On a GPU, how long the steps of loading took, and what the program takes of its memory.
    load: Option<serde_json::Value>,
    memory: Option<serde_json::Value>,
    report: Report,
    outcome: Outcome,
    seed: Option<u64>,
}

impl Stats {
    fn reason(&self) -> &'static str {
        match self.outcome.reason {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Interrupted => "interrupted",
        }
    }

    fn text(&self) -> String {
        let report = &self.report;
        let mut lines = vec![
            format!("device: {}, context {} tokens", self.device, self.context),
            format!("load: {:.2} s", self.load_seconds),
            format!(
                "prompt: {} tokens, {:.1} tok/s",
                report.prompt_tokens,
                rate(report.prompt_tokens, report.prefill_seconds)
            ),
        ];
        if let Some(seconds) = self.outcome.first_token_seconds {
            lines.push(format!("time to first token: {:.1} ms", seconds * 1e3));
        }
        lines.push(format!(
            "generated: {} tokens, {:.1} tok/s, finish reason {}",
            self.outcome.generated,
            rate(report.decode_tokens, report.decode_seconds),
            self.reason()
        ));
        if let Some(bytes) = report.peak_memory {
            lines.push(match self.on_gpu {
                true => format!("GPU peak memory usage: {} MiB", bytes.div_ceil(1 << 20)),
                false => format!("peak memory: {}", cli::human_bytes(bytes)),
            });
        }
        if let Some(seed) = self.seed {
            lines.push(format!("seed: {seed}"));
        }
        lines.join("\n") + "\n"
    }

    fn json(&self) -> serde_json::Value {
        let report = &self.report;
        json!({
            "device": self.device,
            "context": self.context,
            "load_seconds": self.load_seconds,
            "prompt_tokens": report.prompt_tokens,
            "prefill_seconds": report.prefill_seconds,
            "prefill_tokens_per_second": rate(report.prompt_tokens, report.prefill_seconds),
            "time_to_first_token_seconds": self.outcome.first_token_seconds,
            "generated_tokens": self.outcome.generated,
            "decode_steps": report.decode_tokens,
            "decode_seconds": report.decode_seconds,
            "decode_tokens_per_second": rate(report.decode_tokens, report.decode_seconds),
            "load": self.load,
            "peak_memory_bytes": report.peak_memory,
            "memory": self.memory,
            "driver_calls_between_tokens": self.outcome.calls.map(|calls| json!({
                "tokens": self.outcome.generated.saturating_sub(1),
                "graph_launches": calls.graphs,
                "kernel_launches": calls.kernels,
                "copies_to_device": calls.to_device,
                "copies_to_host": calls.to_host,
                "synchronisations": calls.synchronisations,
            })),
            "finish_reason": self.reason(),
            "seed": self.seed,
        })
    }
}

fn rate(tokens: u64, seconds: f64) -> f64 {
    if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 }
}
