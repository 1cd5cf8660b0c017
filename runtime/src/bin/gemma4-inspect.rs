//! Tells what is in an exported program, and checks its weights.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use gemma4_format::{Dim, Extents, Program, pte, stats};
use gemma4_runtime::cli::{self, Progress};
use gemma4_runtime::{ProgramFile, WeightFile};
use serde_json::{Value, json};

/// Tell what is in an exported program.
#[derive(Parser, Debug)]
#[command(name = "gemma4-inspect", version, after_help = EXAMPLES)]
pub(crate) struct Arguments {
    /// The program
    #[arg(value_name = "FILE.pte")]
    program: PathBuf,
    /// Print JSON instead of text
    #[arg(long)]
    json: bool,
    /// Print the methods' graphs too
    #[arg(long, conflicts_with = "json")]
    graph: bool,
    /// Check every digest of the data file
    #[arg(long, value_name = "FILE.ptd")]
    verify: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  gemma4-inspect model.pte
  gemma4-inspect model.pte --verify model.ptd
  gemma4-inspect model.pte --graph | less";

pub(crate) fn main() -> ExitCode {
    let arguments = Arguments::parse();
    cli::run(|| inspect(&arguments))
}

fn inspect(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let file = ProgramFile::open(&arguments.program)?;
    let verified = match &arguments.verify {
        Some(path) => {
            let progress = Progress::bytes("verifying");
            let weights = WeightFile::map(path, file.program())?;
            weights.verify(file.program(), &|done, total| progress.set(done, total))?;
            true
        }
        None => false,
    };
    let mut text = if arguments.json {
        serde_json::to_string_pretty(&as_json(&file, verified))? + "\n"
    } else {
        as_text(&file, verified)
    };
    if arguments.graph {
        text += &format!("\n{}", file.program());
    }
    io::stdout().write_all(text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

fn as_text(file: &ProgramFile, verified: bool) -> String {
    let program = file.program();
    let (source, text) = (&program.source, &program.text);
    let bos = text.bos_token.map_or_else(|| "none".to_owned(), |id| id.to_string());
    // The file may be a stranger's: nothing in it reaches a terminal as a control sequence.
    let [producer, architecture, layout, identity, recipe] =
        [&source.producer, &source.architecture, &source.layout, &source.identity, &source.recipe]
            .map(|text| text.escape_debug().to_string());
    let mut lines = vec![
        format!("program id      {}", cli::hex(file.id())),
        format!("format          {}.{}", pte::MAJOR, pte::MINOR),
        format!("producer        {producer}"),
        format!("architecture    {architecture}"),
        format!("checkpoint      {layout} {identity}"),
        format!("recipe          {recipe}"),
        format!("vocabulary      {} tokens", program.vocab_size),
        format!("context         up to {} tokens", program.max_context),
        format!("stop tokens     {:?}, first token {bos}", text.stop_tokens),
        format!(
            "sampling        temperature {}, top_k {}, top_p {}",
            text.temperature, text.top_k, text.top_p
        ),
        format!(
            "text            tokenizer {}, chat template {}",
            cli::human_bytes(file.tokenizer().len() as u64),
            cli::human_bytes(file.chat_template().len() as u64)
        ),
        format!("targets         {}", targets(file).join(", ")),
        String::new(),
        "weights".to_owned(),
    ];
    for class in stats::weight_classes(program) {
        lines.push(format!(
            "  {:<18} {:<34} {:>5} tensors {:>10} {:>6.3} bits",
            class.usage,
            class.encoding,
            class.tensors,
            cli::human_bytes(class.bytes),
            class.bits_per_weight()
        ));
    }
    lines.push(format!(
        "  read per token     {}",
        cli::human_bytes(stats::weight_bytes_per_token(program))
    ));
    for plan in file.plans() {
        let bytes = cli::human_bytes(stats::packed_bytes_per_token(plan));
        lines.push(format!("    on {:<15} {bytes}", plan.target.escape_debug().to_string()));
    }
    lines.push("\nkeys and values: a token beyond the windows, and all at full length".to_owned());
    for (device, per_token, full) in kv_bytes(file) {
        let [per_token, full] = [per_token, full].map(cli::human_bytes);
        lines.push(format!(
            "  on {:<15} {per_token:>10} {full:>10}",
            device.escape_debug().to_string()
        ));
    }
    for (rows, count) in buffer_rows(program) {
        lines.push(format!("  {count} buffers of {rows} rows"));
    }
    lines.push("\nmethods".to_owned());
    for method in &program.methods {
        lines.push(format!(
            "  {:<18} up to {} rows, {} operations",
            method.name,
            method.max_rows,
            method.nodes.len()
        ));
    }
    if verified {
        lines.push("\nthe data file is intact: every digest agrees".to_owned());
    }
    lines.join("\n") + "\n"
}

/// Devices that the program has code for.
fn targets(file: &ProgramFile) -> Vec<&str> {
    let plans = file.plans().iter().map(|plan| plan.target.as_str());
    ["cpu"].into_iter().chain(plans).collect()
}

/// Bytes of keys and values on the CPU and for each target: of a token once all rings are full, and
/// at the longest context.
fn kv_bytes(file: &ProgramFile) -> Vec<(String, u64, u64)> {
    let (program, context) = (file.program(), file.program().max_context);
    let per_token = 4 * stats::buffer_elements_per_token(program);
    let cpu = ("cpu".to_owned(), per_token, 4 * stats::buffer_elements(program, context));
    let gpus = file.plans().iter().map(|plan| {
        let per_token = stats::gpu_buffer_bytes_per_token(program, plan);
        (plan.target.clone(), per_token, stats::gpu_buffer_bytes(program, plan, context))
    });
    [cpu].into_iter().chain(gpus).collect()
}

/// How many buffers have how many rows, in order of appearance.
fn buffer_rows(program: &Program) -> Vec<(String, usize)> {
    let mut counts: Vec<(String, usize)> = Vec::new();
    for buffer in &program.buffers {
        let Some(rows) = buffer.dims.first().map(Dim::to_string) else { continue };
        match counts.iter_mut().find(|(known, _)| *known == rows) {
            Some((_, count)) => *count += 1,
            None => counts.push((rows, 1)),
        }
    }
    counts
}

fn as_json(file: &ProgramFile, verified: bool) -> Value {
    let program = file.program();
    let (source, text) = (&program.source, &program.text);
    let extents = Extents { rows: 1, context: program.max_context };
    let classes: Vec<Value> = stats::weight_classes(program)
        .into_iter()
        .map(|class| {
            json!({
                "usage": class.usage,
                "encoding": class.encoding,
                "tensors": class.tensors,
                "elements": class.elements,
                "bytes": class.bytes,
                "bits_per_weight": class.bits_per_weight(),
            })
        })
        .collect();
    let buffers: Vec<Value> = program
        .buffers
        .iter()
        .map(|b| {
            let dims: Vec<u32> = b.dims.iter().map(|d| d.resolve(extents)).collect();
            json!({"name": b.name, "rows": b.dims[0].to_string(), "dims_at_full_length": dims})
        })
        .collect();
    let methods: Vec<Value> = program
        .methods
        .iter()
        .map(|m| json!({"name": m.name, "max_rows": m.max_rows, "operations": m.nodes.len()}))
        .collect();
    json!({
        "id": cli::hex(file.id()),
        "format": [pte::MAJOR, pte::MINOR],
        "source": {
            "producer": source.producer,
            "architecture": source.architecture,
            "layout": source.layout,
            "identity": source.identity,
            "recipe": source.recipe,
            "config": serde_json::from_str::<Value>(&source.config).unwrap_or(Value::Null),
        },
        "vocab_size": program.vocab_size,
        "max_context": program.max_context,
        "stop_tokens": text.stop_tokens,
        "bos_token": text.bos_token,
        "sampling": {
            "temperature": text.temperature, "top_k": text.top_k, "top_p": text.top_p,
        },
        "tokenizer_bytes": file.tokenizer().len(),
        "chat_template_bytes": file.chat_template().len(),
        "targets": targets(file),
        "weights": classes,
        "weight_bytes_per_token": stats::weight_bytes_per_token(program),
        "packed_bytes_per_token": file
            .plans()
            .iter()
            .map(|plan| (plan.target.clone(), json!(stats::packed_bytes_per_token(plan))))
            .collect::<serde_json::Map<_, _>>(),
        "kv_bytes": kv_bytes(file)
            .into_iter()
            .map(|(device, per_token, full)| {
                (device, json!({ "per_token": per_token, "at_full_length": full }))
            })
            .collect::<serde_json::Map<_, _>>(),
        "buffers": buffers,
        "methods": methods,
        "data_length": program.data_length,
        "verified": verified,
    })
}
