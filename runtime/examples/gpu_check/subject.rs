//! A program on a device.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context;
use gemma4_format::{Dim, Op};
use gemma4_runtime::cpu;
use gemma4_runtime::cuda::{self, Calls};
use gemma4_runtime::{
    Device, DeviceChoice, FinishReason, LoadedProgram, OpenDevice, Sampling, Session,
    SessionOptions,
};

/// Temperature 1 and nothing cut off.
pub(crate) fn free(seed: u64) -> Sampling {
    Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, seed }
}

/// What is checked.
pub(crate) struct Subject {
    program: Arc<LoadedProgram>,
    device: OpenDevice,
}

impl Subject {
    /// Brings a program onto a device, with room for two sessions.
    pub(crate) fn open(
        choice: &DeviceChoice,
        program: Arc<LoadedProgram>,
        graphs: bool,
    ) -> anyhow::Result<Self> {
        let options = cuda::Options { sessions: 2, graphs, ..cuda::Options::default() };
        let device = choice.open(
            Arc::clone(&program),
            options,
            cpu::Options::default(),
            &|_, _| {},
            &|_| {},
        )?;
        Ok(Self { program, device })
    }

    pub(crate) fn describe(&self) -> String {
        self.device().describe()
    }

    pub(crate) fn program(&self) -> &Arc<LoadedProgram> {
        &self.program
    }

    pub(crate) fn device(&self) -> &dyn Device {
        self.device.device()
    }

    /// Calls of the driver so far, on a GPU.
    pub(crate) fn calls(&self) -> Option<Calls> {
        self.device.calls()
    }

    /// Most bytes of a GPU's memory that were taken at once, by anybody, since it was opened.
    pub(crate) fn peak_memory(&self) -> Option<u64> {
        self.device.cuda()?.peak_memory()
    }

    /// A session as the program was exported for.
    pub(crate) fn session(&self) -> anyhow::Result<Session> {
        self.session_with(None, None)
    }

    pub(crate) fn session_with(
        &self,
        max_context: Option<u32>,
        prefill_chunk: Option<u32>,
    ) -> anyhow::Result<Session> {
        Ok(Session::new(self.device(), SessionOptions { max_context, prefill_chunk })?)
    }

    /// Keys that a layer with a window looks at.
    pub(crate) fn window(&self) -> Option<u32> {
        let nodes = self.program.program().methods.iter().flat_map(|m| &m.nodes);
        nodes
            .filter_map(
                |node| if let Op::Attention { window, .. } = node.op { window } else { None },
            )
            .min()
    }

    /// Rows of the rings that keep these keys.
    pub(crate) fn ring(&self) -> Option<u32> {
        let buffers = self.program.program().buffers.iter();
        buffers
            .filter_map(
                |b| if let Some(Dim::Ring(rows)) = b.dims.first() { Some(*rows) } else { None },
            )
            .max()
    }
}

/// Logits after each token from the last of the first `prefill` on: these are read as a prompt,
/// the others one by one.
pub(crate) fn rows(
    session: &mut Session,
    tokens: &[u32],
    prefill: usize,
) -> anyhow::Result<Vec<Vec<f32>>> {
    session.reset();
    session.prefill(&tokens[..prefill])?;
    let mut rows = vec![session.logits()?];
    for token in &tokens[prefill..] {
        session.decode(*token)?;
        rows.push(session.logits()?);
    }
    Ok(rows)
}

/// Tokens of an answer, the stop token included, and why it ended.
pub(crate) fn generate(
    session: &mut Session,
    sampling: Sampling,
    count: u32,
) -> anyhow::Result<(Vec<u32>, FinishReason)> {
    let never = AtomicBool::new(false);
    let mut generation = session.generate(sampling, count, &never)?;
    let mut tokens = generation.by_ref().collect::<Result<Vec<u32>, _>>()?;
    let reason = generation.reason().context("the generation has no end")?;
    if reason == FinishReason::Stop {
        tokens.extend(generation.last_token());
    }
    Ok((tokens, reason))
}

/// [`generate`] after a prompt in an empty context.
pub(crate) fn answer(
    session: &mut Session,
    prompt: &[u32],
    sampling: Sampling,
    count: u32,
) -> anyhow::Result<Vec<u32>> {
    session.reset();
    session.prefill(prompt)?;
    Ok(generate(session, sampling, count)?.0)
}
