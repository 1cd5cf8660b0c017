//! Conversations as ids.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::Value;

use super::arguments::Arguments;
use crate::LoadedProgram;
use crate::cli::Usage;
use crate::text::{Chat, ChatTemplate, ControlText, Messages, TextError, Tokenizer};

/// Looks whether the user has interrupted, while something is encoded.
const LOOK: Duration = Duration::from_millis(20);

/// Bytes of stack of the thread that waits for an encoding.
const STACK: usize = 2 << 20;

/// A prompt before it is encoded.
#[derive(Clone, Debug)]
pub(super) enum Prompt {
    /// To be answered by the chat template.
    Chat(Messages),
    /// To be continued as it is.
    Raw(String),
}

/// Turns prompts into ids. Clones share everything.
#[derive(Clone, Debug)]
pub(super) struct Prompter {
    tokenizer: Tokenizer,
    template: Option<Arc<ChatTemplate>>,
    enable_thinking: Option<bool>,
    bos: Option<u32>,
    /// Tokens that the context holds.
    room: u32,
}

impl Prompter {
    /// Takes tokenizer and template of the program, or those that the flags name.
    pub(super) fn new(arguments: &Arguments, program: &LoadedProgram) -> anyhow::Result<Self> {
        let tokenizer = tokenizer(arguments, program)?;
        let text = &program.program().text;
        let spelled = |id: Option<&u32>| id.and_then(|id| tokenizer.id_to_token(*id));
        let bos = spelled(text.bos_token.as_ref()).unwrap_or_default();
        let eos = spelled(text.stop_tokens.first()).unwrap_or_default();
        let variables = [("bos_token", bos.as_str()), ("eos_token", eos.as_str())];
        let template = match program.file().chat_template() {
            "" if !arguments.raw_prompt => {
                let why = "the program holds no chat template: use --raw_prompt, or export it \
                           again with --chat-template FILE";
                return Err(Usage(why.to_owned()).into());
            }
            "" => None,
            _ if arguments.raw_prompt => None,
            source => Some(Arc::new(ChatTemplate::new(source, variables)?)),
        };
        Ok(Self {
            tokenizer,
            template,
            enable_thinking: arguments.enable_thinking(),
            bos: text.bos_token.filter(|_| !arguments.no_bos),
            // A context of 0 is refused where the session opens, by the flag's name.
            room: arguments
                .placement
                .max_context
                .filter(|context| *context > 0)
                .unwrap_or(program.program().max_context),
        })
    }

    pub(super) fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The ids of a prompt, with the model's turn begun.
    pub(super) fn encode(&self, prompt: &Prompt) -> anyhow::Result<Vec<u32>> {
        match (prompt, &self.template) {
            (Prompt::Chat(conversation), Some(template)) => {
                let Messages { messages, tools } = conversation;
                self.check_length(last_question(messages).len())?;
                let chat = Chat {
                    messages,
                    tools: (!tools.is_empty()).then_some(tools.as_slice()),
                    enable_thinking: self.enable_thinking,
                    add_generation_prompt: true,
                };
                let rendered = template.render(&chat, &self.tokenizer)?;
                self.check_length(rendered.text().len())?;
                Ok(self.tokenizer.encode_rendered(&rendered)?)
            }
            (Prompt::Chat(_), None) => {
                let why = "`messages` need the chat template, and --raw_prompt does without";
                Err(Usage(why.to_owned()).into())
            }
            (Prompt::Raw(text), _) => {
                self.check_length(text.len())?;
                Ok(self.tokenizer.encode_raw(text, self.bos)?)
            }
        }
    }

    /// Refuses a text that can't fit before any time is spent on its tokens.
    fn check_length(&self, bytes: usize) -> anyhow::Result<()> {
        let fewest = self.tokenizer.fewest_ids(bytes);
        if fewest <= u64::from(self.room) {
            return Ok(());
        }
        bail!(
            "the prompt has {bytes} bytes, which are {fewest} tokens or more, and the context \
             holds {}; shorten the prompt or choose a longer context",
            self.room
        )
    }

    /// As [`Prompter::encode`], or `None` as soon as the user interrupts: a prompt of many
    /// megabytes takes seconds, and its encoding can't be stopped but by leaving it alone.
    pub(super) fn encode_or_interrupt(
        &self,
        prompt: Prompt,
        interrupted: &AtomicBool,
    ) -> anyhow::Result<Option<Vec<u32>>> {
        let (sender, receiver) = mpsc::channel();
        let prompter = self.clone();
        thread::Builder::new()
            .name("encode".to_owned())
            .stack_size(STACK)
            .spawn(move || {
                // Nobody waits any more after an interrupt.
                let _ = sender.send(prompter.encode(&prompt));
            })
            .map_err(|source| TextError::NoThread { stack: STACK, source })?;
        loop {
            match receiver.recv_timeout(LOOK) {
                Ok(ids) => return ids.map(Some),
                Err(mpsc::RecvTimeoutError::Timeout) if interrupted.load(Ordering::Relaxed) => {
                    return Ok(None);
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(error) => return Err(error).context("the prompt can't be encoded"),
            }
        }
    }

    /// The ids' text, control tokens spelled out.
    pub(super) fn spell(&self, ids: &[u32]) -> String {
        self.tokenizer.decode(ids, ControlText::Show)
    }
}

/// The text that every template prints: what the user said last, but for spaces around it.
fn last_question(messages: &[Value]) -> &str {
    let last = messages.last().filter(|message| message["role"] == "user");
    last.and_then(|message| message["content"].as_str()).unwrap_or_default().trim()
}

fn tokenizer(arguments: &Arguments, program: &LoadedProgram) -> anyhow::Result<Tokenizer> {
    if let Some(path) = &arguments.tokenizer_path {
        let bytes = fs::read(path).with_context(|| format!("cannot read `{}`", path.display()))?;
        return Tokenizer::from_bytes(&bytes).with_context(|| format!("`{}`", path.display()));
    }
    match program.file().tokenizer() {
        [] => {
            let why = "the program holds no tokenizer; give one with --tokenizer_path";
            Err(Usage(why.to_owned()).into())
        }
        bytes => Ok(Tokenizer::from_bytes(bytes)?),
    }
}
