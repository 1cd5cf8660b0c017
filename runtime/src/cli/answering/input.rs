//! Where prompts come from.

use std::fs;
use std::io::{self, Read};
use std::path::Path;

use anyhow::{Context, anyhow, bail};
use serde_json::{Value, json};

use super::arguments::Arguments;
use super::prompt::Prompt;
use crate::text::Messages;

/// A prompt and what is particular about it.
#[derive(Clone, Debug)]
pub(super) struct Job {
    /// The caller's own name for it, handed back with the answer.
    pub(super) id: Option<Value>,
    pub(super) prompt: Prompt,
    pub(super) seed: Option<u64>,
    pub(super) max_new_tokens: Option<u32>,
}

/// The prompts that the flags name.
pub(super) fn read(arguments: &Arguments) -> anyhow::Result<Vec<Job>> {
    let one = |prompt| vec![Job { id: None, prompt, seed: None, max_new_tokens: None }];
    if let Some(path) = &arguments.prompts {
        return jobs(arguments, &read_text(path)?)
            .with_context(|| format!("cannot read `{}`", path.display()));
    }
    if let Some(path) = &arguments.messages {
        let messages = Messages::from_json(&read_text(path)?)
            .with_context(|| format!("cannot read `{}`", path.display()))?;
        return Ok(one(Prompt::Chat(messages)));
    }
    let text = match (&arguments.prompt, &arguments.prompt_file) {
        (Some(prompt), _) => prompt.clone(),
        (None, Some(path)) => read_text(path)?,
        (None, None) => return Ok(Vec::new()),
    };
    Ok(one(prompt(arguments, text)))
}

/// A text as the model is to get it.
fn prompt(arguments: &Arguments, text: String) -> Prompt {
    if arguments.raw_prompt {
        return Prompt::Raw(text);
    }
    let system = arguments.system.iter().map(|s| json!({"role": "system", "content": s}));
    let messages = system.chain([json!({"role": "user", "content": text})]).collect();
    Prompt::Chat(Messages { messages, tools: Vec::new() })
}

/// The prompts of a file with one JSON value on each line; empty lines are skipped.
fn jobs(arguments: &Arguments, text: &str) -> anyhow::Result<Vec<Job>> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let jobs: Vec<Job> = lines
        .map(|(at, line)| job(arguments, line).with_context(|| format!("line {}", at + 1)))
        .collect::<anyhow::Result<_>>()?;
    if jobs.is_empty() {
        bail!("there is no prompt in it");
    }
    Ok(jobs)
}

fn job(arguments: &Arguments, line: &str) -> anyhow::Result<Job> {
    let mut value: Value = serde_json::from_str(line)?;
    let whole = |value: Option<Value>, name: &str| match value {
        None | Some(Value::Null) => Ok(None),
        Some(value) => {
            value.as_u64().map(Some).ok_or_else(|| anyhow!("`{name}` is no whole number"))
        }
    };
    let Some(object) = value.as_object_mut() else {
        let text = value.as_str().ok_or_else(|| anyhow!("neither a string nor an object"))?;
        let prompt = prompt(arguments, text.to_owned());
        return Ok(Job { id: None, prompt, seed: None, max_new_tokens: None });
    };
    let id = object.remove("id");
    let seed = whole(object.remove("seed"), "seed")?;
    let max_new_tokens = whole(object.remove("max_new_tokens"), "max_new_tokens")?
        .map(|count| u32::try_from(count).unwrap_or(u32::MAX));
    let prompt = match object.remove("prompt") {
        Some(Value::String(text)) if !object.contains_key("messages") => prompt(arguments, text),
        Some(_) => bail!("`prompt` is not a string, or stands beside `messages`"),
        None if object.contains_key("messages") => Prompt::Chat(Messages::from_value(value)?),
        None => bail!("neither `prompt` nor `messages`"),
    };
    Ok(Job { id, prompt, seed, max_new_tokens })
}

/// A file's text; that of stdin for `-`.
pub(super) fn read_text(path: &Path) -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    if path.as_os_str() == "-" {
        io::stdin().read_to_end(&mut bytes).context("cannot read stdin")?;
    } else {
        bytes = fs::read(path).with_context(|| format!("cannot read `{}`", path.display()))?;
    }
    String::from_utf8(bytes).with_context(|| format!("`{}` is not UTF-8 text", path.display()))
}
