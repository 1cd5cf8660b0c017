//! One conversation: what is in the context, and what comes next.

mod modalities;
mod rules;
mod saved;

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use gemma4_format::{Buffer, Dim, Extents, Op, Operand, Program};

use self::rules::HostDraws;
pub use self::rules::{LogitRules, Logprobs, MAX_LOGPROBS};
use crate::{Device, DeviceSession, Error, LoadedProgram, Result, Sampling, memory, sampler};

/// What can be chosen about a session.
#[derive(Clone, Copy, Debug, Default)]
pub struct SessionOptions {
    /// Tokens of context, prompts and answers together; the exported maximum if not given.
    pub max_context: Option<u32>,
    /// Tokens that one call of `prefill` reads; the exported maximum if not given.
    pub prefill_chunk: Option<u32>,
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token was drawn.
    Stop,
    /// The number of tokens asked for was reached, or the context is full.
    Length,
    /// The caller's flag was set.
    Interrupted,
}

/// What was done, and how long it took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Report {
    /// Tokens read by `prefill`.
    pub prompt_tokens: u64,
    /// Seconds in `prefill`, until the first token of the answer where one was drawn.
    pub prefill_seconds: f64,
    /// Decode steps: tokens drawn, but for the first of each generation, which costs no step.
    pub decode_tokens: u64,
    /// Seconds in decode steps.
    pub decode_seconds: f64,
    /// Largest memory used so far in bytes: of the device, or of the process where the device
    /// has none of its own.
    pub peak_memory: Option<u64>,
}

/// What the next token can be drawn from.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Next {
    /// Nothing was computed at this position.
    Nothing,
    /// The device holds the logits of so many of the last tokens in the context, at least one.
    Logits(u32),
    /// This token was drawn and is not in the context.
    Token(u32),
}

/// A ring and the longest window that looks at it.
#[derive(Clone, Copy, Debug)]
struct Ring {
    rows: u32,
    window: u32,
}

/// The context of one conversation on a device.
///
/// Sessions of one program are independent of each other.
pub struct Session {
    program: Arc<LoadedProgram>,
    device: Box<dyn DeviceSession>,
    context: u32,
    chunk: u32,
    /// Tokens whose keys are in the buffers.
    tokens: Vec<u32>,
    /// Position after the last one written since the buffers were clean.
    written: u32,
    rings: Vec<Ring>,
    /// Tokens that are never drawn.
    suppressed: Vec<u32>,
    next: Next,
    report: Report,
}

impl Session {
    /// Allocates a session on a device.
    ///
    /// Fails with [`Error::Context`] or [`Error::Chunk`] if an option is 0 or above what the
    /// program was exported for, with [`Error::Memory`] if the session does not fit.
    pub fn new(device: &dyn Device, options: SessionOptions) -> Result<Self> {
        let loaded = Arc::clone(device.program());
        let program = loaded.program();
        let maximum = program.max_context;
        let context = options.max_context.unwrap_or(maximum);
        if context == 0 || context > maximum {
            return Err(Error::Context { asked: context, maximum });
        }
        let maximum = program.method("prefill").map_or(1, |m| m.max_rows);
        let chunk = options.prefill_chunk.unwrap_or(maximum);
        if chunk == 0 || chunk > maximum {
            return Err(Error::Chunk { asked: chunk, maximum });
        }
        let chunk = chunk.min(context);
        let rings = rings(program, context);
        let suppressed = modalities::token_ids(&program.source.config, program.vocab_size);
        Ok(Self {
            device: device.open_session(context, chunk)?,
            program: loaded,
            context,
            chunk,
            tokens: Vec::new(),
            written: 0,
            rings,
            suppressed,
            next: Next::Nothing,
            report: Report::default(),
        })
    }

    /// Tokens that are never drawn, ascending: at first those that stand for images, audio and
    /// video in the checkpoint's config, since a program takes text alone.
    pub fn suppressed(&self) -> &[u32] {
        &self.suppressed
    }

    /// Adds tokens that are never drawn; ids outside the vocabulary are left out.
    pub fn suppress(&mut self, tokens: impl IntoIterator<Item = u32>) {
        let vocabulary = self.program.program().vocab_size;
        self.suppressed.extend(tokens.into_iter().filter(|token| *token < vocabulary));
        self.suppressed.sort_unstable();
        self.suppressed.dedup();
    }

    /// Tokens that the context has room for.
    pub fn context(&self) -> u32 {
        self.context
    }

    /// Tokens that are in the context: the position of the next one.
    pub fn position(&self) -> u32 {
        self.tokens.len() as u32
    }

    /// The tokens that are in the context. The last token of a generation is not: it has been
    /// drawn, but not been read.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Reads a prompt, after what is already in the context.
    ///
    /// Fails with [`Error::ContextFull`] before anything is read if it does not fit.
    pub fn prefill(&mut self, tokens: &[u32]) -> Result<()> {
        self.prefill_with(tokens, |_, _| ControlFlow::Continue(())).map(|_| ())
    }

    /// As [`Session::prefill`], calling `progress` with the tokens read and all before each call
    /// of the device. When it says to break, the tokens read so far stay in the context and
    /// `false` comes back.
    pub fn prefill_with(
        &mut self,
        tokens: &[u32],
        mut progress: impl FnMut(usize, usize) -> ControlFlow<()>,
    ) -> Result<bool> {
        if tokens.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        self.check_room(tokens.len() as u64)?;
        self.check_tokens(tokens)?;
        for (at, chunk) in tokens.chunks(self.chunk as usize).enumerate() {
            if progress(at * self.chunk as usize, tokens.len()).is_break() {
                return Ok(false);
            }
            let position = self.position();
            self.next = Next::Nothing;
            self.written = self.written.max(position + chunk.len() as u32);
            let start = Instant::now();
            self.device.prefill(chunk, position)?;
            self.report.prefill_seconds += start.elapsed().as_secs_f64();
            self.report.prompt_tokens += chunk.len() as u64;
            self.tokens.extend_from_slice(chunk);
            self.next = Next::Logits(1);
        }
        Ok(true)
    }

    /// Reads one given token with a decode step.
    pub fn decode(&mut self, token: u32) -> Result<()> {
        self.check_room(1)?;
        self.check_tokens(&[token])?;
        let start = Instant::now();
        self.read(token)?;
        self.report.decode_seconds += start.elapsed().as_secs_f64();
        self.report.decode_tokens += 1;
        Ok(())
    }

    /// A decode step on a token that was checked.
    fn read(&mut self, token: u32) -> Result<()> {
        let position = self.position();
        self.next = Next::Nothing;
        self.written = self.written.max(position + 1);
        self.device.decode(token, position)?;
        self.tokens.push(token);
        self.next = Next::Logits(1);
        Ok(())
    }

    /// Reads a few given tokens at once and keeps the logits after each of them, for a caller that
    /// may take some back: a drafted continuation of which the model agrees with the beginning.
    ///
    /// [`Session::logits_after`] has the logits, and [`Session::rewind`] takes tokens back; it never
    /// refuses to take back those of the last `verify`. Times and tokens are in no [`Report`].
    ///
    /// Fails with [`Error::Verify`] if there are more tokens than [`Session::verify_rows`], and as
    /// [`Session::prefill`].
    pub fn verify(&mut self, tokens: &[u32]) -> Result<()> {
        if tokens.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        let (rows, maximum) = (tokens.len() as u64, self.verify_rows());
        if rows > u64::from(maximum) {
            let asked = u32::try_from(rows).unwrap_or(u32::MAX);
            return Err(Error::Verify { asked, maximum });
        }
        self.check_room(rows)?;
        self.check_tokens(tokens)?;
        let (position, rows) = (self.position(), tokens.len() as u32);
        self.next = Next::Nothing;
        self.written = self.written.max(position + rows);
        self.device.verify(tokens, position)?;
        self.tokens.extend_from_slice(tokens);
        self.next = Next::Logits(rows);
        Ok(())
    }

    /// Tokens that one [`Session::verify`] takes; 0 where the program has no such method.
    pub fn verify_rows(&self) -> u32 {
        self.program.program().method("verify").map_or(0, |m| m.max_rows)
    }

    /// Logits after the last token read by [`Session::prefill`], [`Session::decode`] or
    /// [`Session::verify`]; length of the vocabulary. Fails with [`Error::NoLogits`] after anything
    /// else, a generation included.
    pub fn logits(&mut self) -> Result<Vec<f32>> {
        match self.next {
            Next::Logits(rows) => self.device.logits(rows - 1),
            _ => Err(Error::NoLogits),
        }
    }

    /// Logits after token `row` of the last [`Session::verify`], from 0; length of the vocabulary.
    /// Fails with [`Error::NoLogits`] if it had fewer tokens, or after anything else.
    pub fn logits_after(&mut self, row: u32) -> Result<Vec<f32>> {
        match self.next {
            Next::Logits(rows) if row < rows => self.device.logits(row),
            _ => Err(Error::NoLogits),
        }
    }

    /// Draws tokens until a stop token, `max_new_tokens`, the end of the context, or until `stop`
    /// is set. The stop token itself is not handed out.
    ///
    /// Prompts and answers together may have as many tokens as the context. The last token drawn
    /// is not in the context afterwards: the next prompt has to begin with it, or another
    /// generation reads it and goes on.
    pub fn generate<'a>(
        &'a mut self,
        sampling: Sampling,
        max_new_tokens: u32,
        stop: &'a AtomicBool,
    ) -> Result<Generation<'a>> {
        self.generate_by(sampling, &LogitRules::default(), max_new_tokens, stop)
    }

    /// As [`Session::generate`], with rules for the logits. Rules that are not neutral draw on the
    /// host, with the same results on every device.
    pub fn generate_by<'a>(
        &'a mut self,
        sampling: Sampling,
        rules: &LogitRules,
        max_new_tokens: u32,
        stop: &'a AtomicBool,
    ) -> Result<Generation<'a>> {
        sampling.check()?;
        rules.check(self.program.program().vocab_size)?;
        if self.next == Next::Nothing {
            return Err(Error::NoLogits);
        }
        if let Next::Token(token) = self.next
            && max_new_tokens > 0
            && self.position() < self.context
        {
            self.decode(token)?;
        }
        let position = self.position();
        let left = match self.next {
            Next::Logits(_) => max_new_tokens.min(self.context - position),
            _ => 0,
        };
        let host = (!rules.is_neutral()).then(|| {
            HostDraws::new(sampling, rules.clone(), self.suppressed.clone(), &self.tokens)
        });
        let running = left > 0;
        if running && host.is_none() {
            self.device.start(position, &sampling, left)?;
        }
        Ok(Generation {
            source: host.map_or(Source::Device { sampling, started: running }, Source::Host),
            session: self,
            stop,
            left,
            running,
            last: None,
            logprobs: None,
            reason: None,
        })
    }

    /// Makes the context a prefix of `tokens` that is as long as possible, without the last of
    /// them, and returns its length: [`Session::prefill`] of the rest then gives the logits.
    ///
    /// It is the common prefix of `tokens` and of what is in the context, or 0 if that can't be
    /// taken back to ([`Session::rewind`]).
    pub fn reuse(&mut self, tokens: &[u32]) -> u32 {
        let same = self.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        let same = same.min(tokens.len().saturating_sub(1)) as u32;
        if !self.rewind(same) {
            self.reset();
        }
        self.position()
    }

    /// Draws the next token anew where the device drew a suppressed one: from the remaining
    /// tokens, by a random number of another key. So a token is drawn as often as if suppressed
    /// ones had no probability, and devices need not know of them.
    fn redraw(&mut self, sampling: &Sampling) -> Result<u32> {
        let tokens = self.tokens.clone();
        let kept = self.reuse(&tokens) as usize;
        match &tokens[kept..] {
            [last] => self.read(*last)?,
            rest => self.prefill(rest)?,
        }
        let mut logits = self.device.logits(0)?;
        rules::suppress(&mut logits, &self.suppressed);
        let sampling = Sampling { seed: !sampling.seed, ..*sampling };
        Ok(sampler::sample(&logits, self.position(), &sampling))
    }

    /// Takes tokens back, so that `to` are left in the context.
    ///
    /// Returns false, and changes nothing, if there are fewer, or if keys that later tokens will
    /// look at have been overwritten in a ring: a ring of `R` rows under a window of `W` gives
    /// back at most `R − W + 1` tokens once it is full.
    pub fn rewind(&mut self, to: u32) -> bool {
        let held = |ring: &Ring| {
            let oldest = u64::from((to + 1).saturating_sub(ring.window));
            oldest + u64::from(ring.rows) >= u64::from(self.written)
        };
        if to > self.position() || !self.rings.iter().all(held) {
            return false;
        }
        if to < self.position() || matches!(self.next, Next::Token(_)) {
            self.next = Next::Nothing;
        }
        self.tokens.truncate(to as usize);
        true
    }

    /// Empties the context.
    pub fn reset(&mut self) {
        self.tokens.clear();
        self.written = 0;
        self.next = Next::Nothing;
    }

    /// What was done since the session began or the last call of this.
    pub fn take_report(&mut self) -> Report {
        let peak_memory = self.device.peak_memory().or_else(memory::peak_resident);
        Report { peak_memory, ..std::mem::take(&mut self.report) }
    }

    fn check_room(&self, tokens: u64) -> Result<()> {
        let (present, context) = (self.position(), self.context);
        if tokens > u64::from(context - present) {
            return Err(Error::ContextFull { tokens, present, context });
        }
        Ok(())
    }

    fn check_tokens(&self, tokens: &[u32]) -> Result<()> {
        let vocabulary = self.program.program().vocab_size;
        match tokens.iter().find(|token| **token >= vocabulary) {
            Some(token) => Err(Error::Token { token: *token, vocabulary }),
            None => Ok(()),
        }
    }
}

/// Who draws the tokens of a generation.
#[derive(Debug)]
enum Source {
    /// The device, which feeds each token back itself once it was started.
    Device { sampling: Sampling, started: bool },
    /// This process, from logits that it asks for.
    Host(HostDraws),
}

/// Tokens of one answer, drawn as they are asked for.
///
/// After the last one, or an error, [`Generation::reason`] says why it ended.
pub struct Generation<'a> {
    session: &'a mut Session,
    stop: &'a AtomicBool,
    /// Tokens that may still be drawn.
    left: u32,
    source: Source,
    /// Whether more may be drawn; false after an error.
    running: bool,
    /// The token drawn last.
    last: Option<u32>,
    logprobs: Option<Logprobs>,
    reason: Option<FinishReason>,
}

impl Generation<'_> {
    /// Why it ended, `None` before the end and after an error.
    pub fn reason(&self) -> Option<FinishReason> {
        self.reason
    }

    /// The token drawn last: after [`FinishReason::Stop`], the stop token.
    pub fn last_token(&self) -> Option<u32> {
        self.last
    }

    /// Log-probabilities of the token drawn last, if the rules ask for them.
    pub fn logprobs(&self) -> Option<&Logprobs> {
        self.logprobs.as_ref()
    }

    fn draw(&mut self) -> Result<u32> {
        let first = self.last.is_none();
        let start = Instant::now();
        let token = self.draw_token()?;
        // A device may still be reading the prompt when the first token is asked for.
        let report = &mut self.session.report;
        match first {
            true => report.prefill_seconds += start.elapsed().as_secs_f64(),
            false => {
                report.decode_seconds += start.elapsed().as_secs_f64();
                report.decode_tokens += 1;
            }
        }
        self.session.next = Next::Token(token);
        self.last = Some(token);
        self.left -= 1;
        Ok(token)
    }

    fn draw_token(&mut self) -> Result<u32> {
        let session = &mut *self.session;
        let next = std::mem::replace(&mut session.next, Next::Nothing);
        match &mut self.source {
            Source::Host(draws) => {
                let row = match (self.last, next) {
                    (Some(read), _) => {
                        session.read(read)?;
                        0
                    }
                    (None, Next::Logits(rows)) => rows - 1,
                    (None, _) => return Err(Error::NoLogits),
                };
                let logits = session.device.logits(row)?;
                let (token, logprobs) = draws.draw(logits, session.position());
                self.logprobs = logprobs;
                Ok(token)
            }
            Source::Device { sampling, started } => {
                let mut read = self.last;
                if !*started && let Some(token) = read.take() {
                    session.read(token)?;
                    session.device.start(session.position(), sampling, self.left)?;
                    *started = true;
                }
                let token = session.device.next_token()?;
                // The step that draws a token has read the one before.
                session.tokens.extend(read);
                if !session.suppressed.contains(&token) {
                    return Ok(token);
                }
                let sampling = *sampling;
                self.end()?;
                self.session.redraw(&sampling)
            }
        }
    }

    /// Takes the device out of its generation.
    fn end(&mut self) -> Result<()> {
        if let Source::Device { started, .. } = &mut self.source
            && std::mem::take(started)
        {
            let written = self.session.device.finish()?;
            self.session.written = self.session.written.max(written);
        }
        Ok(())
    }

    fn end_with(&mut self, reason: FinishReason) -> Option<Result<u32>> {
        let ended = self.end();
        self.reason = ended.is_ok().then_some(reason);
        ended.err().map(Err)
    }
}

impl Iterator for Generation<'_> {
    type Item = Result<u32>;

    fn next(&mut self) -> Option<Result<u32>> {
        if self.reason.is_some() {
            return None;
        }
        if self.stop.load(Ordering::Relaxed) {
            return self.end_with(FinishReason::Interrupted);
        }
        if self.left == 0 {
            return self.end_with(FinishReason::Length);
        }
        if !self.running {
            return None;
        }
        match self.draw() {
            Err(error) => {
                self.running = false;
                let _ = self.end();
                Some(Err(error))
            }
            Ok(token) if self.session.program.program().text.stop_tokens.contains(&token) => {
                self.end_with(FinishReason::Stop)
            }
            Ok(token) => Some(Ok(token)),
        }
    }
}

impl Drop for Generation<'_> {
    fn drop(&mut self) {
        // A device that fails here fails again at the next call, which can say so.
        let _ = self.end();
    }
}

/// Rings that can wrap in a context of this length, with the windows that look at them.
fn rings(program: &Program, context: u32) -> Vec<Ring> {
    let extents = Extents { rows: 1, context };
    let rows = |buffer: &Buffer| match buffer.dims.first() {
        Some(dim @ Dim::Ring(_)) => Some(dim.resolve(extents)).filter(|rows| *rows < context),
        _ => None,
    };
    let mut rings = Vec::new();
    for node in program.methods.iter().flat_map(|m| &m.nodes) {
        let Op::Attention { window: Some(window), .. } = node.op else { continue };
        for arg in &node.args {
            if let Operand::Buffer(id) = arg
                && let Some(rows) = program.buffers.get(*id as usize).and_then(rows)
            {
                rings.push(Ring { rows, window });
            }
        }
    }
    rings
}
