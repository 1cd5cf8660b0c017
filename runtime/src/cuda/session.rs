//! A session on a GPU.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::engine::{Engine, Slot};
use crate::{DeviceSession, Error, Result, Sampling};

/// Steps that are enqueued before their token is asked for. Enough to bridge what the host does
/// between two tokens; all of them run for nothing after a stop token.
const AHEAD: u32 = 4;
/// Looks at the ring before the processor is offered to other threads.
const SPINS: u32 = 4096;
/// Looks at the ring between two questions whether the device still works.
const LOOKS: u32 = 1 << 16;

/// One of the sessions that an engine has room for.
pub(super) struct CudaSession {
    engine: Arc<Mutex<Engine>>,
    /// Always there but while it is being dropped.
    slot: Option<Slot>,
    /// Tokens that it was opened for.
    context: u32,
    generation: Option<Generation>,
}

/// Where a generation is.
struct Generation {
    /// Position of its first token.
    position: u32,
    /// Tokens handed out.
    read: u32,
    /// Steps enqueued.
    steps: u32,
    /// Steps that may be enqueued.
    most: u32,
}

impl CudaSession {
    pub(super) fn new(engine: Arc<Mutex<Engine>>, context: u32) -> Result<Self> {
        let slot = lock(&engine).open()?;
        Ok(Self { engine, slot: Some(slot), context, generation: None })
    }

    /// Runs `body` with the engine and this session's slot.
    fn with<T>(&mut self, body: impl FnOnce(&mut Engine, &mut Slot) -> Result<T>) -> Result<T> {
        let slot = self.slot.as_mut().ok_or(Error::NoLogits)?;
        body(&mut lock(&self.engine), slot)
    }

    /// Enqueues steps until enough are ahead of what was read.
    fn top_up(&mut self) -> Result<()> {
        let Some(generation) = &mut self.generation else { return Ok(()) };
        let wanted = generation.most.min(generation.read + AHEAD);
        let slot = self.slot.as_ref().ok_or(Error::NoLogits)?;
        while generation.steps < wanted {
            lock(&self.engine).step(slot)?;
            generation.steps += 1;
        }
        Ok(())
    }

    /// Waits for a token, looking at memory of the host alone but for a question now and then
    /// whether the device still works.
    fn wait_for(&mut self, step: u32) -> Result<u32> {
        let slot = self.slot.as_ref().ok_or(Error::NoLogits)?;
        let mut looks = 0u32;
        loop {
            if let Some(token) = slot.ring.token(step) {
                return Ok(token);
            }
            looks = looks.wrapping_add(1);
            if looks.is_multiple_of(LOOKS) && lock(&self.engine).is_idle()? {
                // The token may have come between the look and the question.
                let none = "the GPU has run all its steps, and a token is missing: the plan's \
                            `sample` did not write it";
                return slot.ring.token(step).ok_or_else(|| Error::Device(none.to_owned()));
            }
            if looks < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
    }
}

impl DeviceSession for CudaSession {
    fn prefill(&mut self, tokens: &[u32], position: u32) -> Result<()> {
        let limit = self.context;
        let mut read = 0;
        while read < tokens.len() {
            let at = position + read as u32;
            read += self.with(|engine, slot| engine.prefill(slot, &tokens[read..], at, limit))?;
        }
        Ok(())
    }

    fn decode(&mut self, token: u32, position: u32) -> Result<()> {
        let limit = self.context;
        self.with(|engine, slot| engine.decode(slot, token, position, limit))
    }

    fn verify(&mut self, tokens: &[u32], position: u32) -> Result<()> {
        let limit = self.context;
        self.with(|engine, slot| engine.verify(slot, tokens, position, limit))
    }

    fn logits(&mut self, row: u32) -> Result<Vec<f32>> {
        self.with(|engine, slot| engine.logits(slot, row))
    }

    fn start(&mut self, position: u32, sampling: &Sampling, limit: u32) -> Result<()> {
        let context = self.context;
        self.with(|engine, slot| engine.start(slot, position, sampling, context))?;
        // The first token takes no step, and a step needs a row to write.
        let most = limit.saturating_sub(1).min(context.saturating_sub(position));
        self.generation = Some(Generation { position, read: 0, steps: 0, most });
        self.top_up()
    }

    fn next_token(&mut self) -> Result<u32> {
        let step = self.generation.as_ref().ok_or(Error::NoLogits)?.read;
        let token = self.wait_for(step)?;
        if let Some(generation) = &mut self.generation {
            generation.read += 1;
        }
        self.top_up()?;
        Ok(token)
    }

    fn finish(&mut self) -> Result<u32> {
        let Some(generation) = self.generation.take() else { return Ok(0) };
        let Generation { position, read, steps, .. } = generation;
        self.with(|engine, slot| {
            engine.wait()?;
            // Each token but the first comes from a step that wrote a row, and every step that
            // wrote one has drawn a token.
            let drawn = (read..=steps).find(|step| slot.ring.token(*step).is_none());
            Ok(position + drawn.unwrap_or(steps + 1).saturating_sub(1))
        })
    }

    fn peak_memory(&self) -> Option<u64> {
        lock(&self.engine).peak_memory()
    }
}

impl Drop for CudaSession {
    fn drop(&mut self) {
        // A device that fails here says so at its next call.
        let _ = self.finish();
        if let Some(slot) = self.slot.take() {
            lock(&self.engine).close(slot);
        }
    }
}

/// The engine, also after a panic of another thread: it holds no half-made state, and the device
/// says itself if it has failed.
pub(super) fn lock(engine: &Mutex<Engine>) -> MutexGuard<'_, Engine> {
    engine.lock().unwrap_or_else(PoisonError::into_inner)
}
