//! Times what the device can do, and the kernels of a call one by one.

use gemma4_format::plan::measure::{MULTIPLY, MULTIPLY_BLOCKS, OPERATIONS, READ, READ_BLOCKS};
use gemma4_format::plan::state;

use super::{Engine, Slot, lowered, resolver, running, unresolved};
use crate::Result;
use crate::cuda::costs::Costs;
use crate::cuda::driver::Failure;
use crate::cuda::handles::Event;
use crate::cuda::report::{Call, Profile, Timed};
use crate::roofline::Speed;

/// Bytes that a measurement of reading reads at least, if need be the same ones again.
const READ_BYTES: u64 = 8 << 30;
/// Times that a block multiplies in a measurement.
const MULTIPLICATIONS: u32 = 20_000;
/// Measurements, of which the best counts: others wait for the clock to rise.
const TRIES: u32 = 4;

impl Engine {
    /// How fast the device reads the weights, and multiplies on its tensor cores; `None` if the
    /// plan has no kernels to measure that. No session's logits survive it.
    pub(in crate::cuda) fn speed(&mut self) -> Result<Option<Speed>> {
        let plan = &self.program.file().plans()[self.settings.plan];
        let find = |symbol| plan.kernels.iter().position(|kernel| kernel.symbol == symbol);
        let (Some(read), Some(multiply)) = (find(READ), find(MULTIPLY)) else { return Ok(None) };
        let (read, multiply) = (read as u32, multiply as u32);
        let multiprocessors = self.settings.gpu.multiprocessors;
        let weights = self.layout.packed.iter().chain(&self.layout.resident);
        let at = weights.clone().map(|region| region.at).min().unwrap_or(self.layout.logits.at);
        let end = weights.map(|region| region.end()).max().unwrap_or(at);
        let chunks = u32::try_from((end - at) / 16).unwrap_or(u32::MAX).max(1);
        let sink = self.layout.logits.at;
        self.run("measuring the device", |engine| {
            engine.logits.fill(super::Logits::Unused);
            let repeats = READ_BYTES.div_ceil(16 * u64::from(chunks)) as u32;
            let words = [at, chunks.into(), sink];
            let seconds = engine.time(read, multiprocessors * READ_BLOCKS, &words, repeats)?;
            let bytes = 16.0 * f64::from(chunks) * f64::from(repeats);
            let blocks = multiprocessors * MULTIPLY_BLOCKS;
            let words = [MULTIPLICATIONS.into(), sink];
            let busy = engine.time(multiply, blocks, &words, 1)?;
            let operations = OPERATIONS as f64 * f64::from(blocks) * f64::from(MULTIPLICATIONS);
            Ok(Some(Speed { read: bytes / seconds, multiply: operations / busy }))
        })
    }

    /// Seconds of so many launches of a kernel in a row.
    fn time(
        &mut self,
        kernel: u32,
        blocks: u32,
        words: &[u64],
        launches: u32,
    ) -> Result<f64, Failure> {
        let events = [Event::new(&self.context)?, Event::new(&self.context)?];
        let mut best = f64::INFINITY;
        for _ in 0..TRIES {
            self.stream.record(&events[0])?;
            for _ in 0..launches {
                self.kernels.launch(&mut self.stream, kernel, [blocks, 1, 1], words)?;
            }
            self.stream.record(&events[1])?;
            self.stream.synchronize()?;
            best = best.min(events[1].since(&events[0])?);
        }
        Ok(best)
    }

    /// Times each kernel of a call that follows `depth` tokens, on average over `steps` of them.
    ///
    /// Kernels run one after another with a note of the time in between, so none overlaps the
    /// next as in a graph.
    ///
    /// # Errors
    /// As [`Engine::open`] and the call itself.
    pub(in crate::cuda) fn profile(
        &mut self,
        call: Call,
        depth: u32,
        steps: u32,
    ) -> Result<Profile> {
        let mut slot = self.open()?;
        let profile = self.profile_in(&mut slot, call, depth, steps.max(1));
        self.close(slot);
        profile
    }

    fn profile_in(
        &mut self,
        slot: &mut Slot,
        call: Call,
        depth: u32,
        steps: u32,
    ) -> Result<Profile> {
        let program = std::sync::Arc::clone(&self.program);
        let plan = &program.file().plans()[self.settings.plan];
        let (method, rows) = match call {
            Call::Decode => ("decode", 1),
            Call::Prefill(rows) => ("prefill", rows.max(1)),
        };
        let (form, rows) = lowered(plan, method, rows)
            .ok_or_else(|| unresolved(plan, method, "it has no form for so few rows"))?;
        let mut launches = form.launches.clone();
        if call == Call::Decode {
            launches.extend_from_slice(&plan.sample);
        }
        let resolved = resolver(program.program(), plan, &self.layout, &self.settings)
            .resolve(&launches, rows)
            .map_err(|why| unresolved(plan, method, &why))?;
        let vocabulary = u64::from(program.program().vocab_size);
        let tokens: Vec<u32> =
            (0..u64::from(rows)).map(|i| ((i * 7919 + 13) % vocabulary) as u32).collect();
        let mut state = running(depth, self.settings.context);
        state[state::TOKEN] = tokens[0];
        let given = if call == Call::Decode { &[][..] } else { &tokens };
        let mut seconds = vec![0.0; launches.len()];
        let mut graph_seconds = 0.0;
        self.run("a profile", |engine| {
            engine.activate(slot)?;
            engine.logits[slot.index] = super::Logits::Unused;
            let events = (0..=launches.len())
                .map(|_| Event::new(&engine.context))
                .collect::<Result<Vec<_>, _>>()?;
            // The first step warms up.
            for step in 0..=steps {
                engine.upload(slot, &state, given)?;
                engine.stream.record(&events[0])?;
                for ((launch, words), event) in resolved.iter().zip(&events[1..]) {
                    engine.kernels.launch(&mut engine.stream, launch.kernel, launch.grid, words)?;
                    engine.stream.record(event)?;
                }
                engine.stream.synchronize()?;
                for (sum, pair) in seconds.iter_mut().zip(events.windows(2)) {
                    *sum += if step > 0 { pair[1].since(&pair[0])? } else { 0.0 };
                }
            }
            // The same in the way it runs otherwise.
            for step in 0..=steps {
                engine.upload(slot, &state, given)?;
                engine.stream.record(&events[0])?;
                match call {
                    Call::Decode => engine.generate.launch(&engine.kernels, &mut engine.stream)?,
                    Call::Prefill(_) => engine.kernels.play(&mut engine.stream, &resolved)?,
                }
                engine.stream.record(&events[1])?;
                engine.stream.synchronize()?;
                graph_seconds += if step > 0 { events[1].since(&events[0])? } else { 0.0 };
            }
            Ok(())
        })?;
        let costs = Costs { program: program.program(), plan, rows, depth };
        let steps = f64::from(steps);
        let mut profile =
            Profile { rows, depth, whole_seconds: graph_seconds / steps, kernels: Vec::new() };
        for (launch, seconds) in launches.iter().zip(seconds) {
            let name = costs.name(launch);
            let at = profile.kernels.iter().position(|timed| timed.name == name);
            let at = at.unwrap_or_else(|| {
                profile.kernels.push(Timed { name, launches: 0, seconds: 0.0, bytes: 0 });
                profile.kernels.len() - 1
            });
            let timed = &mut profile.kernels[at];
            timed.launches += 1;
            timed.seconds += seconds / steps;
            timed.bytes += costs.bytes(launch);
        }
        Ok(profile)
    }
}
