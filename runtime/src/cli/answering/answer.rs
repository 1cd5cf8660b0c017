//! One answer: reading the prompt, drawing tokens, and where it ends.

use std::io;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use super::repetition::Repetition;
use crate::text::{Part, StopStrings, ThoughtStream, Tokenizer};
use crate::{FinishReason, LogitRules, Logprobs, Report, Sampling, Session};

/// What is asked.
#[derive(Clone, Debug)]
pub(super) struct Request {
    /// The whole prompt.
    pub(super) ids: Vec<u32>,
    pub(super) sampling: Sampling,
    pub(super) rules: LogitRules,
    pub(super) max_new_tokens: u32,
    pub(super) stop_strings: Vec<String>,
    pub(super) detect_loops: bool,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Stop,
    Length,
    StopString,
    Interrupted,
    Loop,
}

impl End {
    /// The name in reports and JSON.
    pub(super) fn name(self) -> &'static str {
        match self {
            End::Stop => "stop",
            End::Length => "length",
            End::StopString => "stop_string",
            End::Interrupted => "interrupted",
            End::Loop => "loop",
        }
    }
}

/// What happens on the way.
#[derive(Debug)]
pub(super) enum Event<'a> {
    /// So many tokens of the prompt have been read, of all that are new.
    Read(usize, usize),
    /// A token was drawn.
    Drawn,
    /// Text is complete.
    Part(&'a Part),
}

/// What came out.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    pub(super) text: String,
    pub(super) thought: String,
    /// Tokens drawn, without the stop token.
    pub(super) ids: Vec<u32>,
    /// One for each token, if they were asked for.
    pub(super) logprobs: Vec<Logprobs>,
    pub(super) end: End,
    /// Tokens of the prompt that were in the context already.
    pub(super) reused_tokens: usize,
    pub(super) first_token_seconds: Option<f64>,
    pub(super) report: Report,
}

impl Answer {
    /// Nothing yet, as if the user had interrupted before anything was read.
    pub(super) fn interrupted() -> Self {
        Self {
            text: String::new(),
            thought: String::new(),
            ids: Vec::new(),
            logprobs: Vec::new(),
            end: End::Interrupted,
            reused_tokens: 0,
            first_token_seconds: None,
            report: Report::default(),
        }
    }
}

/// Answers in a session, whose context may hold the beginning of the prompt already.
pub(super) fn answer(
    session: &mut Session,
    tokenizer: &Tokenizer,
    request: &Request,
    interrupted: &AtomicBool,
    mut watch: impl FnMut(Event<'_>) -> io::Result<()>,
) -> anyhow::Result<Answer> {
    let started = Instant::now();
    let reused = session.reuse(&request.ids) as usize;
    let mut answer = Answer { reused_tokens: reused, ..Answer::interrupted() };
    let read = session.prefill_with(&request.ids[reused..], |done, total| {
        let told = watch(Event::Read(done, total));
        match interrupted.load(Ordering::Relaxed) || told.is_err() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    })?;
    if read {
        watch(Event::Read(request.ids.len() - reused, request.ids.len() - reused))?;
        let thoughts = ThoughtStream::after(tokenizer, &request.ids);
        let writer = Writer {
            thoughts,
            stops: StopStrings::new(request.stop_strings.iter().cloned()),
            answer: &mut answer,
            watch: &mut watch,
        };
        draw(session, request, interrupted, started, writer)?;
    }
    answer.report = session.take_report();
    Ok(answer)
}

fn draw<W: FnMut(Event<'_>) -> io::Result<()>>(
    session: &mut Session,
    request: &Request,
    interrupted: &AtomicBool,
    started: Instant,
    mut writer: Writer<'_, W>,
) -> anyhow::Result<()> {
    let Request { sampling, rules, max_new_tokens, .. } = request;
    let mut repetition = request.detect_loops.then(Repetition::default);
    let mut generation = session.generate_by(*sampling, rules, *max_new_tokens, interrupted)?;
    while let Some(token) = generation.next() {
        let token = token?;
        let answer = &mut *writer.answer;
        answer.first_token_seconds.get_or_insert_with(|| started.elapsed().as_secs_f64());
        answer.ids.push(token);
        answer.logprobs.extend(generation.logprobs().cloned());
        (writer.watch)(Event::Drawn)?;
        if writer.push(token)? {
            writer.answer.end = End::StopString;
            return Ok(());
        }
        if repetition.as_mut().is_some_and(|repetition| repetition.push(token)) {
            writer.answer.end = End::Loop;
            break;
        }
    }
    match generation.reason() {
        Some(FinishReason::Stop) => writer.answer.end = End::Stop,
        Some(FinishReason::Length) => writer.answer.end = End::Length,
        Some(FinishReason::Interrupted) | None => {}
    }
    writer.finish()
}

/// Text on its way from ids to whoever watches.
struct Writer<'a, W> {
    thoughts: ThoughtStream,
    /// For the answer; thoughts have no stop strings.
    stops: StopStrings,
    answer: &'a mut Answer,
    watch: &'a mut W,
}

impl<W: FnMut(Event<'_>) -> io::Result<()>> Writer<'_, W> {
    /// Whether a stop string was found.
    fn push(&mut self, id: u32) -> anyhow::Result<bool> {
        let parts = self.thoughts.push(id);
        self.parts(parts)
    }

    fn finish(mut self) -> anyhow::Result<()> {
        let parts = self.thoughts.finish();
        if self.parts(parts)? {
            self.answer.end = End::StopString;
            return Ok(());
        }
        let held = self.stops.finish();
        self.tell(Part::Answer(held))
    }

    fn parts(&mut self, parts: Vec<Part>) -> anyhow::Result<bool> {
        for part in parts {
            let (part, found) = match part {
                Part::Answer(text) => {
                    let (text, found) = self.stops.push(&text);
                    (Part::Answer(text), found)
                }
                thought => (thought, false),
            };
            self.tell(part)?;
            if found {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn tell(&mut self, part: Part) -> anyhow::Result<()> {
        let (text, all) = match &part {
            Part::Answer(text) => (text, &mut self.answer.text),
            Part::Thought(text) => (text, &mut self.answer.thought),
        };
        if !text.is_empty() {
            all.push_str(text);
            (self.watch)(Event::Part(&part))?;
        }
        Ok(())
    }
}
