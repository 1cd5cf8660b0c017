//! The flags of `gemma4-run`.

use std::path::PathBuf;

use clap::{ArgGroup, Parser, ValueEnum};

use crate::cli::{Files, Placement};
use crate::{LogitRules, Sampling};
use gemma4_format::TextDefaults;

/// Answer a prompt with an exported model.
///
/// Only the generated text goes to stdout. Progress and a short report go to stderr.
#[derive(Parser, Clone, Debug)]
#[command(
    name = "gemma4-run",
    version,
    after_help = EXAMPLES,
    group = ArgGroup::new("input").required(true)
)]
pub struct Arguments {
    #[command(flatten)]
    pub(super) files: Files,
    /// tokenizer.json to use instead of the one in the program
    #[arg(long = "tokenizer_path", alias = "tokenizer-path", value_name = "FILE")]
    pub(super) tokenizer_path: Option<PathBuf>,

    /// What to say to the model
    #[arg(long, group = "input", help_heading = "Input")]
    pub(super) prompt: Option<String>,
    /// Read the prompt from a file, or from stdin if it is `-`
    #[arg(
        long = "prompt_file",
        alias = "prompt-file",
        value_name = "FILE",
        group = "input",
        help_heading = "Input"
    )]
    pub(super) prompt_file: Option<PathBuf>,
    /// Answer a conversation in the shape of OpenAI's chat API: a JSON list of messages, or an
    /// object with `messages` and `tools`; `-` for stdin
    #[arg(long, value_name = "FILE", group = "input", help_heading = "Input")]
    pub(super) messages: Option<PathBuf>,
    /// Answer many prompts, each in a context of its own
    ///
    /// A line each: a JSON string, or an object with `prompt` or `messages` (and `tools`) and
    /// perhaps `id`, `seed` and `max_new_tokens`; `-` for stdin.
    #[arg(long, value_name = "FILE", group = "input", help_heading = "Input")]
    pub(super) prompts: Option<PathBuf>,
    /// Talk with the model; /help tells the commands
    #[arg(long, short, group = "input", help_heading = "Input")]
    pub(super) interactive: bool,
    /// Instructions that stand before the conversation
    #[arg(long, conflicts_with_all = ["raw_prompt", "messages"], help_heading = "Input")]
    pub(super) system: Option<String>,
    /// Give the prompt to the model as it is, without the chat template
    ///
    /// Control tokens that it spells become control tokens, and the first token of every text
    /// (BOS) is put before it.
    #[arg(
        long = "raw_prompt",
        alias = "raw-prompt",
        conflicts_with_all = ["messages", "interactive"],
        help_heading = "Input"
    )]
    pub(super) raw_prompt: bool,
    /// With --raw_prompt: put no BOS before the prompt
    #[arg(long = "no_bos", alias = "no-bos", requires = "raw_prompt", help_heading = "Input")]
    pub(super) no_bos: bool,
    /// Whether the model is to think first; by default as the chat template says
    #[arg(long, value_name = "on|off", conflicts_with = "raw_prompt", help_heading = "Input")]
    pub(super) thinking: Option<Switch>,
    /// With --interactive: file of the lines typed, by default in the user's state directory
    #[arg(long, value_name = "FILE", requires = "interactive", help_heading = "Input")]
    pub(super) history: Option<PathBuf>,

    /// Stop after this many tokens; by default at the end of the context
    #[arg(
        long = "max_new_tokens",
        alias = "max-new-tokens",
        value_name = "N",
        help_heading = "Generation"
    )]
    pub(super) max_new_tokens: Option<u32>,
    /// Randomness: 0 always takes the most probable token; by default as the checkpoint says
    #[arg(long, value_name = "X", allow_negative_numbers = true, help_heading = "Generation")]
    pub(super) temperature: Option<f32>,
    /// Draw from this many of the most probable tokens; 0 for all
    #[arg(long = "top_k", alias = "top-k", value_name = "K", help_heading = "Generation")]
    pub(super) top_k: Option<u32>,
    /// Draw from the most probable tokens that together have this probability
    #[arg(long = "top_p", alias = "top-p", value_name = "P", help_heading = "Generation")]
    pub(super) top_p: Option<f32>,
    /// Draw no token less probable than this share of the most probable one
    #[arg(
        long = "min_p",
        alias = "min-p",
        value_name = "P",
        default_value_t = 0.0,
        hide_default_value = true,
        allow_negative_numbers = true,
        help_heading = "Generation"
    )]
    pub(super) min_p: f32,
    /// Make tokens of the context less probable by dividing their positive logits
    #[arg(
        long = "repetition_penalty",
        alias = "repetition-penalty",
        value_name = "X",
        default_value_t = 1.0,
        hide_default_value = true,
        allow_negative_numbers = true,
        help_heading = "Generation"
    )]
    pub(super) repetition_penalty: f32,
    /// Add a number to the logit of a token, `-inf` to forbid it; several with commas
    #[arg(
        long = "logit_bias",
        alias = "logit-bias",
        value_name = "ID=X",
        value_delimiter = ',',
        value_parser = bias,
        help_heading = "Generation"
    )]
    pub(super) logit_bias: Vec<(u32, f32)>,
    /// Start of the random numbers; the same seed gives the same answer
    #[arg(long, value_name = "N", help_heading = "Generation")]
    pub(super) seed: Option<u64>,
    /// End the answer before this text; may be given several times
    #[arg(long, value_name = "STRING", allow_hyphen_values = true, help_heading = "Generation")]
    pub(super) stop: Vec<String>,
    /// End an answer that repeats itself without end
    #[arg(long = "detect_loops", alias = "detect-loops", help_heading = "Generation")]
    pub(super) detect_loops: bool,

    #[command(flatten)]
    pub(super) placement: Placement,
    /// Continue a context that was saved: what the prompt has in common with it is not read again
    #[arg(
        long = "load_session",
        alias = "load-session",
        value_name = "FILE",
        conflicts_with = "prompts",
        help_heading = "Device"
    )]
    pub(super) load_session: Option<PathBuf>,
    /// Save the context at the end, for --load_session with the same program; on the CPU alone
    #[arg(
        long = "save_session",
        alias = "save-session",
        value_name = "FILE",
        conflicts_with = "prompts",
        help_heading = "Device"
    )]
    pub(super) save_session: Option<PathBuf>,

    /// text as it is generated, or JSON: a document, or a line for each prompt
    #[arg(
        long,
        value_enum,
        default_value_t,
        conflicts_with = "interactive",
        help_heading = "Output"
    )]
    pub(super) output: Format,
    /// With JSON: log-probabilities of each token and of the N most probable ones
    #[arg(long, value_name = "N", conflicts_with = "interactive", help_heading = "Output")]
    pub(super) logprobs: Option<u32>,
    /// What becomes of the model's thoughts: `dim` on stdout, `hide`, or `stderr`; by default
    /// dim on a terminal and hidden elsewhere
    #[arg(long, value_enum, help_heading = "Output")]
    pub(super) thoughts: Option<Thoughts>,
    /// Write timings and counts to a file, as JSON
    #[arg(long = "stats_json", alias = "stats-json", value_name = "FILE", help_heading = "Output")]
    pub(super) stats_json: Option<PathBuf>,
    /// Print no report and no notes
    #[arg(long, short, conflicts_with = "verbose", help_heading = "Output")]
    pub(super) quiet: bool,
    /// Print each prompt as the model gets it
    #[arg(long, short, help_heading = "Output")]
    pub(super) verbose: bool,
}

const EXAMPLES: &str = "\
Examples:
  gemma4-run --model_path model.pte --data_path model.ptd --prompt 'Why is the sky blue?'
  gemma4-run --model_path model.pte --data_path model.ptd --interactive
  gemma4-run --model_path model.pte --data_path model.ptd --prompt_file - --temperature 0 < question.txt
  gemma4-run --model_path model.pte --data_path model.ptd --prompts prompts.jsonl --output jsonl

Exit codes: 0 done, 1 error, 2 wrong usage, 3 no usable device or too little memory, 130 interrupted.";

/// A setting of two.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Switch {
    /// Yes.
    On,
    /// No.
    Off,
}

/// How answers are written to stdout.
#[derive(ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Format {
    /// The text alone, as it is generated.
    #[default]
    Text,
    /// One JSON document.
    Json,
    /// One JSON object for each prompt, on a line.
    Jsonl,
}

/// What becomes of thoughts in text.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Thoughts {
    /// On stdout, dimmed where it is a terminal.
    Dim,
    /// Nowhere.
    Hide,
    /// On stderr.
    Stderr,
}

fn bias(text: &str) -> Result<(u32, f32), String> {
    let parsed = text
        .split_once('=')
        .and_then(|(id, bias)| Some((id.trim().parse().ok()?, bias.trim().parse().ok()?)));
    parsed.ok_or_else(|| "a bias is written ID=X, for example 106=-5 or 106=-inf".to_owned())
}

impl Arguments {
    /// Whether the template is told to think, to not think, or nothing.
    pub(super) fn enable_thinking(&self) -> Option<bool> {
        self.thinking.map(|switch| switch == Switch::On)
    }

    /// How tokens are drawn; what no flag says, the checkpoint does.
    pub(super) fn sampling(&self, defaults: &TextDefaults, seed: u64) -> Sampling {
        Sampling {
            temperature: self.temperature.unwrap_or(defaults.temperature),
            top_k: self.top_k.unwrap_or(defaults.top_k),
            top_p: self.top_p.unwrap_or(defaults.top_p),
            seed: self.seed.unwrap_or(seed),
        }
    }

    /// What is done to the logits.
    pub(super) fn rules(&self) -> LogitRules {
        LogitRules {
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            bias: self.logit_bias.clone(),
            logprobs: self.logprobs,
        }
    }
}
