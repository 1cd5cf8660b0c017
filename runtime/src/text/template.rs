use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use minijinja::Environment;
use serde_json::Value;

use super::confined::{Bounds, Stopped, confined};
use super::engine::{Output, environment, explain};
use super::guard::{Guard, Rendered, bytes, count, spelled_in};
use super::{Result, TextError, Tokenizer};

const NAME: &str = "chat_template";

/// Bytes of source. Released templates have some 20 thousand, and the engine's compiler takes
/// time in proportion to the square of an expression's length.
const MAX_SOURCE: usize = 64 << 10;

/// Bytes of stack for each byte of source; a level of an expression takes at least two of them.
const STACK_PER_SOURCE_BYTE: usize = 1024;

/// Bytes of stack for each step of a rendering. The engine was seen to take up to 640 for each
/// level of a value, and every level costs a step to make.
const STACK_PER_STEP: usize = 1024;

/// Bounds of a stack in bytes.
const STACK: RangeInclusive<usize> = 8 << 20..=4 << 30;

/// Bytes of heap for compiling a template, and for rendering one besides what the conversation
/// takes. Rendering with the released ones was seen to take up to 250 kB for a short conversation.
const MEMORY: usize = 64 << 20;

/// Bytes of heap for each byte of a conversation: the copies of it in different forms.
const MEMORY_PER_BYTE: usize = 64;

/// Bytes of heap for each value of a conversation.
const MEMORY_PER_VALUE: usize = 2048;

/// For what the engine does without counting steps, as comparing what it has nested.
const TIME: Duration = Duration::from_secs(30);

/// Time for each step; one is 50 nanoseconds where it does little.
const TIME_PER_STEP: Duration = Duration::from_micros(5);

/// A conversation to be rendered.
#[derive(Clone, Copy, Debug)]
pub struct Chat<'a> {
    /// Messages in the shape of OpenAI's chat API: objects with `role`, `content` (text, or a
    /// list of parts) and whatever else the template reads. Arguments of tool calls may be
    /// objects or, as that API has them, objects written as a string.
    pub messages: &'a [Value],
    /// Declarations of tools in the same API's shape.
    pub tools: Option<&'a [Value]>,
    /// Whether the model should think first; `None` leaves it to the template.
    pub enable_thinking: Option<bool>,
    /// Whether the model is to answer: ends the text with the beginning of its turn.
    pub add_generation_prompt: bool,
}

/// A Jinja2 chat template, set up as Hugging Face's `apply_chat_template` does.
///
/// Differences that remain: `{% generation %}`, the filters `batch`, `slice`, `format`, `indent`
/// and the method `format` are unknown; `strftime_now` gives UTC; `~` prints booleans and none in
/// lower case; a loop over none is empty; map keys that contain the first character of a control
/// token may sort elsewhere in `dictsort`.
///
/// Templates are untrusted: one that runs or recurses without end is an error, and so is one that
/// takes more memory or time than a conversation of that size needs. What it held by then, 64 MiB
/// for a short conversation, stays allocated until the process ends.
#[derive(Debug)]
pub struct ChatTemplate(Arc<Compiled>);

#[derive(Debug)]
struct Compiled {
    environment: Environment<'static>,
    source: String,
}

impl ChatTemplate {
    /// Compiles a template. `variables` are strings it may print, such as `bos_token` and
    /// `eos_token`; one that is missing prints as nothing.
    ///
    /// # Errors
    /// [`TextError::Template`] with the line of a syntax error.
    pub fn new<'v>(
        source: &str,
        variables: impl IntoIterator<Item = (&'v str, &'v str)>,
    ) -> Result<Self> {
        if source.len() > MAX_SOURCE {
            let reason = format!("{} bytes of source, more than {MAX_SOURCE}", source.len());
            return Err(TextError::Template { line: None, reason });
        }
        let source = source.replace("\r\n", "\n").replace('\r', "\n");
        let mut environment = environment();
        for (name, value) in variables {
            environment.add_global(name.to_owned(), value.to_owned());
        }
        let bounds = Bounds {
            stack: stack(source.len() * STACK_PER_SOURCE_BYTE),
            memory: MEMORY,
            time: TIME,
        };
        let compiled = confined(NAME, bounds, move || {
            environment
                .add_template_owned(NAME, source.clone())
                .map_err(|error| explain(&error, 0))?;
            Ok(Compiled { environment, source })
        });
        Ok(Self(Arc::new(compiled.map_err(stopped)??)))
    }

    /// Prints a conversation.
    ///
    /// Strings of messages and tools never give control tokens: spelled ones stay text. Only in
    /// the assistant's own messages a spelling counts if the template acts on it, as by taking
    /// a thought out of the history.
    ///
    /// # Errors
    /// [`TextError::Refused`] in the template's words, [`TextError::Template`] if it fails on
    /// these messages, [`TextError::Runaway`] if it does not end.
    pub fn render(&self, chat: &Chat<'_>, tokenizer: &Tokenizer) -> Result<Rendered> {
        let values = chat.messages.iter().chain(chat.tools.unwrap_or_default());
        let (count, bytes) = values
            .fold((0, 0), |(values, length), value| (values + count(value), length + bytes(value)));
        let steps = steps(count, chat.messages.len() as u64);
        let size = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
        let bounds = Bounds {
            stack: stack(size(steps).saturating_mul(STACK_PER_STEP)),
            memory: MEMORY
                .saturating_add(bytes.saturating_mul(MEMORY_PER_BYTE))
                .saturating_add(size(count).saturating_mul(MEMORY_PER_VALUE)),
            time: TIME + TIME_PER_STEP * u32::try_from(steps).unwrap_or(u32::MAX),
        };
        let renderer = Renderer {
            template: Arc::clone(&self.0),
            steps,
            messages: chat.messages.iter().map(open_arguments).collect(),
            tools: chat.tools.map(<[Value]>::to_vec),
            enable_thinking: chat.enable_thinking,
            add_generation_prompt: chat.add_generation_prompt,
            tokenizer: tokenizer.clone(),
        };
        confined(NAME, bounds, move || renderer.render()).map_err(stopped)?
    }
}

fn stopped(stopped: Stopped) -> TextError {
    match stopped {
        Stopped::Bound(limit) => TextError::Runaway { line: None, limit },
        Stopped::NoThread { stack, source } => TextError::NoThread { stack, source },
        Stopped::Panicked => TextError::Template { line: None, reason: stopped.to_string() },
    }
}

/// Steps of the engine that a conversation may take. Templates look at every string, and some
/// at all messages before each: the released ones were seen to take 200 n + 4 n² for n messages
/// and some 50 for each value of a tool's declaration.
fn steps(values: u64, messages: u64) -> u64 {
    200_000 + 500 * values + 20 * messages.saturating_mul(messages)
}

fn stack(bytes: usize) -> usize {
    bytes.clamp(*STACK.start(), *STACK.end())
}

/// One conversation on its way through the template, perhaps several times.
struct Renderer {
    template: Arc<Compiled>,
    steps: u64,
    messages: Vec<Value>,
    tools: Option<Vec<Value>>,
    enable_thinking: Option<bool>,
    add_generation_prompt: bool,
    tokenizer: Tokenizer,
}

impl Renderer {
    /// Renders with all spellings guarded, then finds out on which the template acts: those that
    /// change the text if they are left in the assistant's messages.
    fn render(&self) -> Result<Rendered> {
        let mut environment = self.template.environment.clone();
        environment.set_fuel(Some(self.steps));
        let values = self.messages.iter().chain(self.tools.iter().flatten());
        let guard = Guard::new(self.tokenizer.added(), values, &self.template.source)?;
        let print = |keep: &[&str]| self.print(&environment, &guard, keep);
        let guarded = print(&[])?;
        let mut spelled = BTreeSet::new();
        for message in self.messages.iter().filter(|message| is_assistant(message)) {
            spelled_in(message, self.tokenizer.added(), &mut spelled);
        }
        if spelled.is_empty() {
            return Ok(guarded);
        }
        let spelled: Vec<&str> = spelled.into_iter().collect();
        let open = print(&spelled)?;
        if open.text() == guarded.text() {
            return Ok(guarded);
        }
        let mut acted_on = Vec::new();
        for spelling in spelled {
            if print(&[spelling])?.text() != guarded.text() {
                acted_on.push(spelling);
            }
        }
        if acted_on.is_empty() { Ok(open) } else { print(&acted_on) }
    }

    /// Renders once, leaving the spellings in `keep` in the assistant's messages.
    fn print(
        &self,
        environment: &Environment<'static>,
        guard: &Guard<'_>,
        keep: &[&str],
    ) -> Result<Rendered> {
        let messages: Vec<Value> = self
            .messages
            .iter()
            .map(|message| guard.hide_in(message, if is_assistant(message) { keep } else { &[] }))
            .collect();
        let hide_tool = |tool| guard.hide_in(tool, &[]);
        let tools: Option<Vec<Value>> =
            self.tools.as_ref().map(|tools| tools.iter().map(hide_tool).collect());
        let mut context = BTreeMap::from([
            ("messages", Value::from(messages)),
            ("tools", tools.map_or(Value::Null, Value::from)),
            ("documents", Value::Null),
            ("add_generation_prompt", Value::from(self.add_generation_prompt)),
        ]);
        if let Some(enable_thinking) = self.enable_thinking {
            context.insert("enable_thinking", Value::from(enable_thinking));
        }
        let mut output = Output::default();
        environment
            .get_template(NAME)
            .and_then(|template| template.render_captured_to(context, &mut output).map(drop))
            .map_err(|error| explain(&error, self.steps))?;
        Ok(guard.reveal(&output.into_string()))
    }
}

fn is_assistant(message: &Value) -> bool {
    matches!(message.get("role").and_then(Value::as_str), Some("assistant" | "model"))
}

/// Reads arguments of tool calls that are written as a string, which templates can't.
fn open_arguments(message: &Value) -> Value {
    let mut message = message.clone();
    let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
    for call in calls.into_iter().flatten() {
        let Some(arguments) = call.pointer_mut("/function/arguments") else { continue };
        let object = arguments.as_str().and_then(|text| serde_json::from_str(text).ok());
        if let Some(object) = object.filter(Value::is_object) {
            *arguments = object;
        }
    }
    message
}
