//! Puts a program onto a GPU: kernels, memory, weights.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use gemma4_format::plan::Plan;

use super::driver::Failure;
use super::engine::{Parts, Settings};
use super::gpu::Context;
use super::handles::{Memory, Stream};
use super::kernels::Kernels;
use super::layout::{Layout, Request};
use super::load::{self, Blocks};
use super::report::LoadTimes;
use super::target::Target;
use super::{Options, Weights};
use crate::program::Progress;
use crate::{Error, LoadedProgram, Result};

/// Makes a context with kernels, memory and weights in it, if all of that fits.
pub(super) fn place(
    program: &Arc<LoadedProgram>,
    settings: &Settings,
    target: Target,
    options: Options,
    progress: Progress<'_>,
) -> Result<Parts> {
    let Settings { gpu, .. } = settings;
    let file = program.file();
    let plan = &file.plans()[settings.plan];
    let failed = |failure| Error::Device(gpu.complain(plan, "loading the program", failure));
    let started = Instant::now();
    let context = Context::new(gpu).map_err(failed)?;
    let start = context.free_memory().map_err(failed)?;
    let kernels = Kernels::load(&context, gpu, plan, target, file.modules())?;
    let lay_out = |base| {
        Layout::new(program.program(), plan, settings.context, options.sessions, base)
            .ok_or_else(|| Error::Device("the program's sizes exceed 64 bits".to_owned()))
    };
    let layout = lay_out(0)?;
    let staging = match options.weights {
        Weights::File => load::staging(program.program(), plan, &layout).map_err(Error::Device)?,
        Weights::Random(_) => 0,
    };
    let request = Request {
        program: program.program(),
        plan,
        context: settings.context,
        sessions: options.sessions,
        staging,
    };
    let available = context.free_memory().map_err(failed)?;
    request.check(&gpu.describe(), available)?;
    let code = start.saturating_sub(available);
    let predicted = request.bytes(settings.context).unwrap_or(u64::MAX).saturating_add(code);
    let memory = Memory::new(&context, layout.bytes).map_err(failed)?;
    let layout = lay_out(memory.address)?;
    let mut stream = Stream::new(&context).map_err(failed)?;
    stream.zero(memory.address, layout.bytes).map_err(failed)?;
    stream.synchronize().map_err(failed)?;
    let least = AtomicU64::new(start);
    let prepare = started.elapsed().as_secs_f64();
    let started = Instant::now();
    let loader = Loader { context: &context, kernels: &kernels, layout: &layout, least: &least };
    let mut load_times = match options.weights {
        Weights::File => loader.file(program, plan, progress, failed)?,
        Weights::Random(seed) => loader.random(program, plan, &mut stream, seed, failed)?,
    };
    load_times.prepare = prepare;
    load_times.weights = started.elapsed().as_secs_f64();
    let free = context.free_memory().map_err(failed)?;
    let free_memory = (start, least.into_inner().min(free));
    Ok(Parts { context, kernels, memory, layout, stream, free_memory, predicted, load_times })
}

/// Where weights are to be brought.
struct Loader<'a> {
    context: &'a Arc<Context>,
    kernels: &'a Kernels,
    layout: &'a Layout,
    /// Fewest free bytes seen.
    least: &'a AtomicU64,
}

impl Loader<'_> {
    /// Loads the data file, and verifies it meanwhile if that was not done.
    fn file(
        &self,
        program: &LoadedProgram,
        plan: &Plan,
        progress: Progress<'_>,
        failed: impl Fn(Failure) -> Error,
    ) -> Result<LoadTimes> {
        let stored = |id| program.weights().parts(id);
        let blocks = Blocks::of_plan(program.program(), plan, self.layout, &stored)
            .map_err(Error::Device)?;
        let meter = Meter::new(blocks.bytes(), program.is_verified(), progress);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let verification = (!program.is_verified()).then(|| {
                scope.spawn(|| {
                    let started = Instant::now();
                    let verified = program.verify_data(&|done, all| meter.verified(done, all));
                    stop.store(verified.is_err(), Ordering::Relaxed);
                    verified.map(|()| started.elapsed().as_secs_f64())
                })
            });
            let mut first = true;
            let loaded = blocks.load(self.context, self.kernels, &stop, |bytes| {
                if std::mem::take(&mut first) {
                    self.note_memory();
                }
                meter.copied(bytes);
            });
            let verified = match verification.map(|thread| thread.join()) {
                None => Ok(0.0),
                Some(Ok(verified)) => verified,
                Some(Err(panic)) => std::panic::resume_unwind(panic),
            };
            let verify = verified?;
            Ok(LoadTimes { verify, ..loaded.map_err(failed)? })
        })
    }

    fn random(
        &self,
        program: &LoadedProgram,
        plan: &Plan,
        stream: &mut Stream,
        seed: u32,
        failed: impl Fn(Failure) -> Error,
    ) -> Result<LoadTimes> {
        load::randomize(plan, self.layout, self.kernels, stream, seed).map_err(&failed)?;
        let resident = load::random_resident(program.program(), plan, seed)?;
        let blocks = Blocks::of_resident(&resident, self.layout);
        let never = AtomicBool::new(false);
        blocks.load(self.context, self.kernels, &never, |_| ()).map_err(failed)
    }

    /// Looks at the device's memory while that for loading is allocated.
    fn note_memory(&self) {
        if let Ok(free) = self.context.free_memory() {
            self.least.fetch_min(free, Ordering::Relaxed);
        }
    }
}

/// Makes one measure of progress from two: bytes of the weights that are both loaded and verified.
struct Meter<'a> {
    total: u64,
    copied: AtomicU64,
    verified: AtomicU64,
    progress: Progress<'a>,
}

impl<'a> Meter<'a> {
    fn new(total: u64, is_verified: bool, progress: Progress<'a>) -> Self {
        let verified = AtomicU64::new(if is_verified { total } else { 0 });
        Self { total, copied: AtomicU64::new(0), verified, progress }
    }

    fn copied(&self, bytes: u64) {
        self.copied.fetch_add(bytes, Ordering::Relaxed);
        self.report();
    }

    /// The file has bytes that no block brings to the device, so their share counts.
    fn verified(&self, done: u64, all: u64) {
        let share = u128::from(done) * u128::from(self.total) / u128::from(all.max(1));
        self.verified.fetch_max(share as u64, Ordering::Relaxed);
        self.report();
    }

    fn report(&self) {
        let done = self.copied.load(Ordering::Relaxed).min(self.verified.load(Ordering::Relaxed));
        (self.progress)(done, self.total);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn progress_is_that_of_the_slower_of_loading_and_verifying() {
        let seen = Mutex::new(Vec::new());
        let progress = |done: u64, all: u64| seen.lock().expect("no panic").push((done, all));
        let meter = Meter::new(100, false, &progress);
        meter.copied(60);
        meter.verified(10, 200);
        meter.verified(200, 200);
        meter.copied(40);
        assert_eq!(*seen.lock().expect("no panic"), [(0, 100), (5, 100), (60, 100), (100, 100)]);
    }

    #[test]
    fn progress_of_verified_weights_is_that_of_loading() {
        let seen = AtomicU64::new(0);
        let progress = |done: u64, _| seen.store(done, Ordering::Relaxed);
        Meter::new(100, true, &progress).copied(60);
        assert_eq!(seen.into_inner(), 60);
    }
}
