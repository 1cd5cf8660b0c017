//! Perplexity of a text.

use std::fs;
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use serde_json::{Value, json};

use super::{Place, log_softmax, rows};
use crate::LoadedProgram;
use crate::cli::{Progress, Usage};
use crate::text::{Chat, ChatTemplate, Tokenizer};

#[derive(Args, Debug)]
pub(super) struct Arguments {
    #[command(flatten)]
    place: Place,
    /// The text, in UTF-8
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// Tokens from one window to the next; by default a window's length, so that none overlap
    #[arg(long, value_name = "N")]
    stride: Option<usize>,
    /// Tokens of a window, what stands before every text included; by default the context
    #[arg(long, value_name = "N")]
    window: Option<usize>,
    /// Let the text be the model's answer to a request for it, in the chat template: what models
    /// that were trained to chat are to be measured by
    #[arg(long)]
    templated: bool,
}

/// Sum over a text, in nats.
#[derive(Debug, Default)]
struct Sum {
    nll: f64,
    tokens: usize,
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<Value> {
    let path = &arguments.text;
    let text =
        fs::read_to_string(path).with_context(|| format!("cannot read `{}`", path.display()))?;
    let device = arguments.place.open()?;
    let program = device.device().program();
    let tokenizer = Tokenizer::from_bytes(program.file().tokenizer())?;
    let ids = tokenizer.encode_raw(&text, None)?;
    let before = prefix(program, &tokenizer, arguments.templated)?;
    let mut session = arguments.place.session(&device)?;
    let window = arguments.window.unwrap_or(session.context() as usize);
    let room = window.saturating_sub(before.len());
    let stride = arguments.stride.unwrap_or(room);
    if window > session.context() as usize || room == 0 || stride == 0 || stride > room {
        let why = format!(
            "--window {window} and --stride {stride} do not fit: a window holds {} tokens before \
             the text, the stride is at most the rest, and the context holds {} tokens",
            before.len(),
            session.context()
        );
        return Err(Usage(why).into());
    }
    if ids.is_empty() || (before.is_empty() && ids.len() == 1) {
        return Err(Usage(format!("`{}` has no token to predict", path.display())).into());
    }
    let bar = if arguments.place.quiet { Progress::hidden() } else { Progress::tokens("reading") };
    let mut sum = Sum::default();
    let mut done = 0;
    for start in (0..).map(|at| at * stride) {
        let end = ids.len().min(start + room);
        let input = [&before[..], &ids[start..end]].concat();
        // The first token of all has nothing before it where there is no BOS.
        let first = (before.len() + done - start).max(1);
        let mut at = first;
        rows(&mut session, &input[..input.len() - 1], first, |logits| {
            sum.nll -= log_softmax(&logits)[input[at] as usize];
            sum.tokens += 1;
            at += 1;
            bar.set((start + at - before.len()) as u64, ids.len() as u64);
        })?;
        done = end;
        if end == ids.len() {
            break;
        }
    }
    let mean = sum.nll / sum.tokens as f64;
    Ok(json!({
        "tokens": sum.tokens,
        "nll": sum.nll,
        "mean_nll": mean,
        "perplexity": mean.exp(),
        "bits_per_byte": sum.nll / std::f64::consts::LN_2 / text.len() as f64,
        "window": window,
        "stride": stride,
        "templated": arguments.templated,
    }))
}

/// What stands before each window: BOS, or a conversation up to the model's answer.
fn prefix(
    program: &LoadedProgram,
    tokenizer: &Tokenizer,
    templated: bool,
) -> anyhow::Result<Vec<u32>> {
    let bos = program.program().text.bos_token;
    if !templated {
        return Ok(bos.into_iter().collect());
    }
    let bos = bos.and_then(|id| tokenizer.id_to_token(id)).unwrap_or_default();
    let variables = [("bos_token", bos.as_str()), ("eos_token", "")];
    let template = ChatTemplate::new(program.file().chat_template(), variables)?;
    let messages = [json!({"role": "user", "content": "Write a text."})];
    let chat = Chat {
        messages: &messages,
        tools: None,
        enable_thinking: Some(false),
        add_generation_prompt: true,
    };
    Ok(tokenizer.encode_rendered(&template.render(&chat, tokenizer)?)?)
}
