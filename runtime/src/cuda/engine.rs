//! A loaded program on one GPU: its memory, its kernels, and whose turn it is.
//!
//! All work goes through one stream, so it happens in the order in which it was asked for, also
//! where sessions take turns. A failure of the driver ends everything: whatever comes after it
//! is refused with the same sentence.

mod measure;

use std::sync::Arc;

use gemma4_format::Program;
use gemma4_format::plan::{Plan, state};

use super::Calls;
use super::arguments::{Launches, Resolver, lowered};
use super::driver::Failure;
use super::gpu::{Context, Gpu};
use super::handles::{Graph, Memory, Pinned, Ring, Stream};
use super::kernels::Kernels;
use super::layout::{Layout, Region, STATE_BYTES, logits_bytes};
use super::report::{LoadTimes, MemoryUse};
use crate::{Error, LoadedProgram, Result, Sampling};

/// Words of a session's state.
type State = [u32; state::WORDS];

/// One loaded program. Fields are dropped in order: what works before what it works on.
pub(super) struct Engine {
    decode: Step,
    generate: Step,
    /// `verify` of 1 row, of 2, … up to as many as it takes.
    verify: Vec<Step>,
    /// Draws the first token of a generation.
    first: Launches,
    kernels: Kernels,
    /// Sessions that nobody uses.
    free: Vec<Slot>,
    /// Where the logits of each session are.
    logits: Vec<Logits>,
    /// The session whose addresses stand in the table.
    active: Option<usize>,
    fault: Option<String>,
    /// Free bytes of the device when the context was made, and the fewest seen since.
    free_memory: (u64, u64),
    /// Bytes that were expected to be taken at most.
    predicted: u64,
    load_times: LoadTimes,
    layout: Layout,
    settings: Settings,
    stream: Stream,
    _memory: Memory,
    context: Arc<Context>,
    program: Arc<LoadedProgram>,
}

/// What an engine was made with.
pub(super) struct Settings {
    /// Index of the plan.
    pub(super) plan: usize,
    pub(super) gpu: Gpu,
    /// Tokens of each session.
    pub(super) context: u32,
    /// Whether steps run as graphs.
    pub(super) graphs: bool,
}

/// What an engine is made of.
pub(super) struct Parts {
    pub(super) context: Arc<Context>,
    pub(super) kernels: Kernels,
    pub(super) memory: Memory,
    pub(super) layout: Layout,
    pub(super) stream: Stream,
    /// Free bytes when the context was made, and the fewest since.
    pub(super) free_memory: (u64, u64),
    /// Bytes that were expected to be taken at most.
    pub(super) predicted: u64,
    pub(super) load_times: LoadTimes,
}

/// A step of some number of rows, of all sessions: its launches, and the graph of them.
struct Step {
    launches: Launches,
    graph: Option<Graph>,
}

/// Host memory of a session, and which one it is.
pub(super) struct Slot {
    index: usize,
    upload: Pinned,
    pub(super) ring: Ring,
}

/// Where a session's logits are, and how many rows.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Logits {
    /// Nobody will ask for them.
    Unused,
    /// Where kernels leave them.
    Shared(u32),
    /// In the session's own memory.
    Saved(u32),
}

impl Engine {
    /// Prepares everything that does not depend on a call. The weights are in place.
    ///
    /// # Errors
    /// [`Error::Device`] if the plan does not resolve, or a trial step fails.
    pub(super) fn new(
        program: Arc<LoadedProgram>,
        settings: Settings,
        parts: Parts,
    ) -> Result<Self> {
        let Parts { context, kernels, memory, layout, stream, free_memory, predicted, load_times } =
            parts;
        let plan = &program.file().plans()[settings.plan];
        let resolver = resolver(program.program(), plan, &layout, &settings);
        let resolve = |method: &str, list, rows| {
            resolver.resolve(list, rows).map_err(|why| unresolved(plan, method, &why))
        };
        let (decode, _) = lowered(plan, "decode", 1)
            .ok_or_else(|| unresolved(plan, "decode", "it has no form for one row"))?;
        let generate = [decode.launches.as_slice(), &plan.sample].concat();
        let (decode, generate) =
            (resolve("decode", &decode.launches, 1)?, resolve("decode", &generate, 1)?);
        let first = resolve("sample", &plan.sample, 0)?;
        let step = |launches| Step { launches, graph: None };
        let most = program.program().method("verify").map_or(0, |m| m.max_rows);
        let verify = (1..=most).map(|rows| {
            let (form, _) = lowered(plan, "verify", rows)
                .ok_or_else(|| unresolved(plan, "verify", "it has no form for so few rows"))?;
            Ok(step(resolve("verify", &form.launches, rows)?))
        });
        let verify = verify.collect::<Result<_>>()?;
        for form in &plan.methods {
            resolve(&form.method, &form.launches, form.min_rows)?;
            resolve(&form.method, &form.launches, form.max_rows)?;
        }
        let logits = vec![Logits::Unused; layout.sessions.len()];
        let mut engine = Self {
            decode: step(decode),
            generate: step(generate),
            verify,
            first,
            kernels,
            free: Vec::new(),
            logits,
            active: None,
            fault: None,
            free_memory,
            predicted,
            load_times,
            layout,
            settings,
            stream,
            _memory: memory,
            context,
            program,
        };
        engine.run("the first step", Self::prepare)?;
        Ok(engine)
    }

    /// Uploads what is constant, runs steps that change nothing, and makes graphs.
    fn prepare(&mut self) -> Result<(), Failure> {
        let stops = &self.program.program().text.stop_tokens;
        let stops: Vec<u8> = stops.iter().flat_map(|t| t.to_le_bytes()).collect();
        self.stream.write(self.layout.stops.at, &stops)?;
        for (index, session) in self.layout.sessions.iter().enumerate().rev() {
            let ring = Ring::new(&self.context)?;
            let table: Vec<u8> =
                session.addresses(ring.address).iter().flat_map(|a| a.to_le_bytes()).collect();
            self.stream.write(session.table.at, &table)?;
            let upload = Pinned::new(&self.context, session.state.bytes as usize)?;
            self.free.push(Slot { index, upload, ring });
        }
        // Loads kernels that the driver loads late, and finds code that does not run here.
        if let Some(mut slot) = self.free.pop() {
            let mut stopped = State::default();
            stopped[state::STOPPED] = state::STOP_TOKEN;
            self.activate(&slot)?;
            self.upload(&mut slot, &stopped, &[])?;
            for step in [&self.generate].into_iter().chain(&self.verify) {
                self.kernels.play(&mut self.stream, &step.launches)?;
            }
            self.stream.synchronize()?;
            self.free.push(slot);
        }
        if self.settings.graphs {
            let steps = [&mut self.decode, &mut self.generate];
            for step in steps.into_iter().chain(&mut self.verify) {
                let (kernels, launches) = (&self.kernels, &step.launches);
                let graph = self.stream.capture(|stream| kernels.play(stream, launches))?;
                step.graph = Some(graph);
            }
        }
        self.stream.synchronize()?;
        self.stream.calls = Calls::default();
        Ok(())
    }

    /// Calls the driver, unless it has failed before.
    fn run<T>(
        &mut self,
        what: &str,
        body: impl FnOnce(&mut Self) -> Result<T, Failure>,
    ) -> Result<T> {
        if let Some(fault) = &self.fault {
            return Err(Error::Device(fault.clone()));
        }
        self.context.bind().and_then(|()| body(self)).map_err(|failure| {
            let plan = &self.program.file().plans()[self.settings.plan];
            let fault = self.settings.gpu.complain(plan, what, failure);
            self.fault = Some(fault.clone());
            Error::Device(fault)
        })
    }

    /// Hands out a session with empty buffers.
    pub(super) fn open(&mut self) -> Result<Slot> {
        let sessions = self.layout.sessions.len();
        let slot = self.free.pop().ok_or_else(|| {
            Error::Device(format!(
                "all {sessions} sessions that were planned for are in use; plan for more with \
                 `--max_sessions`"
            ))
        })?;
        let buffers = self.layout.sessions[slot.index].buffers_span();
        self.run("a new session", |engine| engine.stream.zero(buffers.at, buffers.bytes))?;
        Ok(slot)
    }

    /// Takes a session back. Nothing of it may be running.
    pub(super) fn close(&mut self, slot: Slot) {
        self.logits[slot.index] = Logits::Unused;
        self.free.push(slot);
    }

    /// Runs `prefill` on the first tokens and waits for it; returns how many these were.
    pub(super) fn prefill(
        &mut self,
        slot: &mut Slot,
        tokens: &[u32],
        position: u32,
        limit: u32,
    ) -> Result<usize> {
        let program = Arc::clone(&self.program);
        let plan = &program.file().plans()[self.settings.plan];
        let (form, rows) = lowered(plan, "prefill", tokens.len() as u32)
            .ok_or_else(|| unresolved(plan, "prefill", "it has no form for so few rows"))?;
        let launches = resolver(program.program(), plan, &self.layout, &self.settings)
            .resolve(&form.launches, rows)
            .map_err(|why| unresolved(plan, "prefill", &why))?;
        let taken = rows as usize;
        self.run("`prefill`", |engine| {
            engine.activate(slot)?;
            engine.upload(slot, &running(position, limit), &tokens[..taken])?;
            engine.kernels.play(&mut engine.stream, &launches)?;
            engine.logits[slot.index] = Logits::Shared(1);
            engine.stream.synchronize()
        })?;
        Ok(taken)
    }

    /// Runs `decode` on a given token and waits for it.
    pub(super) fn decode(
        &mut self,
        slot: &mut Slot,
        token: u32,
        position: u32,
        limit: u32,
    ) -> Result<()> {
        let mut state = running(position, limit);
        state[state::TOKEN] = token;
        self.run("`decode`", |engine| {
            engine.activate(slot)?;
            engine.upload(slot, &state, &[])?;
            engine.decode.launch(&engine.kernels, &mut engine.stream)?;
            engine.logits[slot.index] = Logits::Shared(1);
            engine.stream.synchronize()
        })
    }

    /// Runs `verify` on given tokens and waits for it.
    pub(super) fn verify(
        &mut self,
        slot: &mut Slot,
        tokens: &[u32],
        position: u32,
        limit: u32,
    ) -> Result<()> {
        let rows = tokens.len();
        if !(1..=self.verify.len()).contains(&rows) {
            let (asked, maximum) = (rows as u32, self.verify.len() as u32);
            return Err(Error::Verify { asked, maximum });
        }
        self.run("`verify`", |engine| {
            engine.activate(slot)?;
            engine.upload(slot, &running(position, limit), tokens)?;
            engine.verify[rows - 1].launch(&engine.kernels, &mut engine.stream)?;
            engine.logits[slot.index] = Logits::Shared(rows as u32);
            engine.stream.synchronize()
        })
    }

    /// Waits for a row of the logits of the session's last call.
    pub(super) fn logits(&mut self, slot: &Slot, row: u32) -> Result<Vec<f32>> {
        if row >= self.rows(slot) {
            return Err(Error::NoLogits);
        }
        let program = self.program.program();
        let mut logits = vec![0.0; program.vocab_size as usize];
        let offset = u64::from(row) * logits_bytes(program);
        self.run("copying logits", |engine| {
            engine.activate(slot)?;
            engine.stream.read(engine.layout.logits.at + offset, &mut logits)
        })?;
        Ok(logits)
    }

    /// Rows of logits of the session's last call that can be asked for.
    fn rows(&self, slot: &Slot) -> u32 {
        match self.logits[slot.index] {
            Logits::Unused => 0,
            Logits::Shared(rows) | Logits::Saved(rows) => rows,
        }
    }

    /// Sets a session's state and draws the first token of a generation.
    pub(super) fn start(
        &mut self,
        slot: &mut Slot,
        position: u32,
        sampling: &Sampling,
        limit: u32,
    ) -> Result<()> {
        let mut state = running(position, limit);
        [state[state::SEED], state[state::SEED + 1]] = sampling.seed_words();
        state[state::TEMPERATURE] = sampling.temperature.to_bits();
        state[state::TOP_K] = sampling.top_k;
        state[state::TOP_P] = sampling.top_p.to_bits();
        // What draws a token reads row 0.
        let last = self.rows(slot).saturating_sub(1);
        let row_bytes = logits_bytes(self.program.program());
        self.run("`sample`", |engine| {
            engine.activate(slot)?;
            if last > 0 {
                let logits = engine.layout.logits.at;
                engine.stream.copy(logits, logits + u64::from(last) * row_bytes, row_bytes)?;
            }
            slot.ring.clear();
            engine.upload(slot, &state, &[])?;
            engine.logits[slot.index] = Logits::Unused;
            engine.kernels.play(&mut engine.stream, &engine.first)
        })
    }

    /// Enqueues one step of a generation.
    pub(super) fn step(&mut self, slot: &Slot) -> Result<()> {
        self.run("`decode`", |engine| {
            engine.activate(slot)?;
            engine.generate.launch(&engine.kernels, &mut engine.stream)
        })
    }

    /// Whether all that was enqueued is done. Fails if the device has.
    pub(super) fn is_idle(&mut self) -> Result<bool> {
        self.run("`decode`", |engine| engine.stream.is_idle())
    }

    /// Waits until all that was enqueued is done.
    pub(super) fn wait(&mut self) -> Result<()> {
        self.run("`decode`", |engine| engine.stream.synchronize())
    }

    /// Calls of the driver since the program was loaded.
    pub(super) fn calls(&self) -> Calls {
        self.stream.calls
    }

    /// Most bytes of the device's memory that were taken at once since the context was made, as
    /// far as it was looked at.
    pub(super) fn peak_memory(&mut self) -> Option<u64> {
        let free = self.run("asking for memory", |engine| engine.context.free_memory());
        let (start, least) = self.free_memory;
        let least = free.map_or(least, |free| free.min(least));
        self.free_memory.1 = least;
        Some(start.saturating_sub(least))
    }

    /// What the program takes of the device's memory.
    pub(super) fn memory(&mut self) -> MemoryUse {
        let bytes = |regions: &[Region]| regions.iter().map(|region| region.bytes).sum::<u64>();
        let weights = bytes(&self.layout.packed) + bytes(&self.layout.resident);
        let buffers = self.layout.sessions.iter().map(|session| bytes(&session.buffers)).sum();
        MemoryUse {
            weights,
            buffers,
            arena: self.layout.bytes - weights - buffers,
            predicted: self.predicted,
            peak: self.peak_memory().unwrap_or(0),
        }
    }

    /// How long loading took.
    pub(super) fn load_times(&self) -> LoadTimes {
        self.load_times
    }

    /// Lets kernels see a session's memory, and its logits if they may be asked for.
    fn activate(&mut self, slot: &Slot) -> Result<(), Failure> {
        let index = slot.index;
        if self.active == Some(index) {
            return Ok(());
        }
        let shared = self.layout.logits;
        let row_bytes = logits_bytes(self.program.program());
        if let Some(other) = self.active
            && let Logits::Shared(rows) = self.logits[other]
        {
            let saved = self.layout.sessions[other].logits;
            self.stream.copy(saved.at, shared.at, u64::from(rows) * row_bytes)?;
            self.logits[other] = Logits::Saved(rows);
        }
        // From here until the copies are enqueued, nobody's memory is in the table for sure.
        self.active = None;
        let session = &self.layout.sessions[index];
        self.stream.copy(self.layout.table.at, session.table.at, self.layout.table.bytes)?;
        if let Logits::Saved(rows) = self.logits[index] {
            self.stream.copy(shared.at, session.logits.at, u64::from(rows) * row_bytes)?;
            self.logits[index] = Logits::Shared(rows);
        }
        self.active = Some(index);
        Ok(())
    }

    /// Brings state and tokens to the device in one copy. None from this slot may be running.
    fn upload(&mut self, slot: &mut Slot, state: &State, tokens: &[u32]) -> Result<(), Failure> {
        let words = state.iter().chain(tokens);
        for (to, word) in slot.upload.bytes_mut().chunks_exact_mut(4).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        let bytes = STATE_BYTES as usize + 4 * tokens.len();
        let to = self.layout.sessions[slot.index].state.at;
        self.stream.copy_in(to, &slot.upload, bytes)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // Memory must not go while something works on it; a failed device does no more.
        let _ = self.context.bind();
        let _ = self.stream.synchronize();
    }
}

impl Step {
    fn launch(&self, kernels: &Kernels, stream: &mut Stream) -> Result<(), Failure> {
        match &self.graph {
            Some(graph) => stream.launch_graph(graph),
            None => kernels.play(stream, &self.launches),
        }
    }
}

/// The state of a session that reads its next row at `position`.
fn running(position: u32, limit: u32) -> State {
    let mut state = State::default();
    state[state::POSITION] = position;
    state[state::STOPPED] = state::RUNNING;
    state[state::LIMIT] = limit;
    state
}

fn resolver<'a>(
    program: &'a Program,
    plan: &Plan,
    layout: &'a Layout,
    settings: &Settings,
) -> Resolver<'a> {
    let multiprocessors = settings.gpu.multiprocessors.min(plan.multiprocessors);
    Resolver { program, layout, context: settings.context, multiprocessors }
}

fn unresolved(plan: &Plan, method: &str, why: &str) -> Error {
    Error::Device(format!("the program's plan for {} cannot run `{method}`: {why}", plan.target))
}
