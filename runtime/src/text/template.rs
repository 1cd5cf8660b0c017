use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

use minijinja::Environment;
use serde_json::Value;

use super::engine::{Output, environment, explain};
use super::guard::{Guard, Rendered, count, spelled_in};
use super::stack::with_stack;
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
/// Templates are untrusted: one that runs or recurses without end is an error. What a single
/// operation does to a huge value is not bounded, though: by doubling a string, or by listing
/// `[0] * 10**15`, a template can use up the machine's memory.
#[derive(Debug)]
pub struct ChatTemplate {
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
        with_stack(stack(source.len() * STACK_PER_SOURCE_BYTE), move || {
            environment
                .add_template_owned(NAME, source.clone())
                .map_err(|error| explain(&error, 0))?;
            Ok(Self { environment, source })
        })
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
        let steps = steps(chat);
        let bytes = usize::try_from(steps).unwrap_or(usize::MAX).saturating_mul(STACK_PER_STEP);
        with_stack(stack(bytes), || {
            let mut environment = self.environment.clone();
            environment.set_fuel(Some(steps));
            Renderer::new(self, &environment, steps, chat, tokenizer)?.render()
        })
    }
}

/// Steps of the engine that a conversation may take. Templates look at every string, and some
/// at all messages before each: the released ones were seen to take 200 n + 4 n² for n messages
/// and some 50 for each value of a tool's declaration.
fn steps(chat: &Chat<'_>) -> u64 {
    let tools = chat.tools.unwrap_or_default();
    let values: u64 = chat.messages.iter().chain(tools).map(count).sum();
    let messages = chat.messages.len() as u64;
    200_000 + 500 * values + 20 * messages.saturating_mul(messages)
}

fn stack(bytes: usize) -> usize {
    bytes.clamp(*STACK.start(), *STACK.end())
}

/// One conversation on its way through the template, perhaps several times.
struct Renderer<'a> {
    environment: &'a Environment<'static>,
    steps: u64,
    chat: &'a Chat<'a>,
    messages: Vec<Value>,
    tokenizer: &'a Tokenizer,
    guard: Guard<'a>,
}

impl<'a> Renderer<'a> {
    fn new(
        template: &ChatTemplate,
        environment: &'a Environment<'static>,
        steps: u64,
        chat: &'a Chat<'a>,
        tokenizer: &'a Tokenizer,
    ) -> Result<Self> {
        let messages: Vec<Value> = chat.messages.iter().map(open_arguments).collect();
        let values = messages.iter().chain(chat.tools.unwrap_or_default());
        let guard = Guard::new(tokenizer.added(), values, &template.source)?;
        Ok(Self { environment, steps, chat, messages, tokenizer, guard })
    }

    /// Renders with all spellings guarded, then finds out on which the template acts: those that
    /// change the text if they are left in the assistant's messages.
    fn render(&self) -> Result<Rendered> {
        let guarded = self.print(&[])?;
        let mut spelled = BTreeSet::new();
        for message in self.messages.iter().filter(|message| is_assistant(message)) {
            spelled_in(message, self.tokenizer.added(), &mut spelled);
        }
        if spelled.is_empty() {
            return Ok(guarded);
        }
        let spelled: Vec<&str> = spelled.into_iter().collect();
        let open = self.print(&spelled)?;
        if open.text() == guarded.text() {
            return Ok(guarded);
        }
        let mut acted_on = Vec::new();
        for spelling in spelled {
            if self.print(&[spelling])?.text() != guarded.text() {
                acted_on.push(spelling);
            }
        }
        if acted_on.is_empty() { Ok(open) } else { self.print(&acted_on) }
    }

    /// Renders once, leaving the spellings in `keep` in the assistant's messages.
    fn print(&self, keep: &[&str]) -> Result<Rendered> {
        let messages: Vec<Value> = self
            .messages
            .iter()
            .map(|message| {
                self.guard.hide_in(message, if is_assistant(message) { keep } else { &[] })
            })
            .collect();
        let hide_tool = |tool| self.guard.hide_in(tool, &[]);
        let tools: Option<Vec<Value>> =
            self.chat.tools.map(|tools| tools.iter().map(hide_tool).collect());
        let mut context = BTreeMap::from([
            ("messages", Value::from(messages)),
            ("tools", tools.map_or(Value::Null, Value::from)),
            ("documents", Value::Null),
            ("add_generation_prompt", Value::from(self.chat.add_generation_prompt)),
        ]);
        if let Some(enable_thinking) = self.chat.enable_thinking {
            context.insert("enable_thinking", Value::from(enable_thinking));
        }
        let mut output = Output::default();
        self.environment
            .get_template(NAME)
            .and_then(|template| template.render_captured_to(context, &mut output).map(drop))
            .map_err(|error| explain(&error, self.steps))?;
        Ok(self.guard.reveal(&output.into_string()))
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
