//! The NVIDIA GPU: runs a program's plan with the driver alone.
//!
//! Everything is allocated and prepared when a program is loaded. From then on the device holds
//! what goes from one step to the next, and the host only asks for steps: between two tokens of
//! a generation it copies nothing and waits for nothing but the token, which the device writes
//! into memory of the host.
//!
//! Sessions share kernels, graphs, scratch memory and one stream. Kernels find a session's
//! memory through a table of addresses, which is rewritten when another session's turn comes.

mod arguments;
mod driver;
mod engine;
mod gpu;
mod handles;
mod kernels;
mod layout;
mod load;
mod session;
mod target;
#[cfg(test)]
mod testing;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use gemma4_format::plan::Plan;

use self::driver::Failure;
use self::engine::{Engine, Parts, Settings};
use self::gpu::{Context, Gpu};
use self::handles::{Memory, Stream};
use self::kernels::Kernels;
use self::layout::{Layout, Request};
use self::load::Blocks;
use self::session::{CudaSession, lock};
use self::target::Target;
use crate::program::Progress;
use crate::{Device, DeviceSession, Error, LoadedProgram, ProgramFile, Result};

/// What can be chosen about a GPU device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Tokens of context of each session; the exported maximum if not given.
    pub max_context: Option<u32>,
    /// Sessions that can be open at once; not 0.
    pub sessions: u32,
    /// Whether steps run as graphs: faster, but a debugger sees less of them.
    pub graphs: bool,
    /// Where the weights come from.
    pub weights: Weights,
}

impl Default for Options {
    fn default() -> Self {
        Self { max_context: None, sessions: 1, graphs: true, weights: Weights::File }
    }
}

/// Where the weights come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// The data file, which is verified while it is loaded unless it was before.
    File,
    /// Random numbers of a usual size, from a seed: for measurements without a data file.
    Random(u32),
}

/// Calls of the driver, counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// Kernels launched one by one.
    pub kernels: u64,
    /// Graphs launched.
    pub graphs: u64,
    /// Copies from the host to the device.
    pub to_device: u64,
    /// Copies from the device to the host.
    pub to_host: u64,
    /// Copies and fills within the device.
    pub on_device: u64,
    /// Times that the host waited for the device. Looking for a token is none.
    pub synchronisations: u64,
}

impl Calls {
    /// What was called after `earlier` was taken.
    pub fn since(self, earlier: Self) -> Self {
        Self {
            kernels: self.kernels - earlier.kernels,
            graphs: self.graphs - earlier.graphs,
            to_device: self.to_device - earlier.to_device,
            to_host: self.to_host - earlier.to_host,
            on_device: self.on_device - earlier.on_device,
            synchronisations: self.synchronisations - earlier.synchronisations,
        }
    }
}

/// The GPU that [`Cuda::open`] would use for a program, in a few words.
///
/// # Errors
/// [`Error::Device`] says why there is none: no driver, no such GPU, or no code for it.
pub fn available(file: &ProgramFile, which: Option<&str>) -> Result<String> {
    let gpu = Gpu::find(which)?;
    choose(file, &gpu)?;
    Ok(gpu.describe())
}

/// The plan for a GPU.
fn choose(file: &ProgramFile, gpu: &Gpu) -> Result<(usize, Target)> {
    let plans = file.plans();
    target::choose(plans, gpu.capability).ok_or_else(|| {
        let path = file.path().display().to_string();
        Error::Device(target::refusal(&path, plans, &gpu.name, gpu.capability))
    })
}

/// A program on a GPU.
pub struct Cuda {
    program: Arc<LoadedProgram>,
    engine: Arc<Mutex<Engine>>,
    description: String,
    context: u32,
}

impl Cuda {
    /// Loads a program onto a GPU: `which` is its index or UUID (`GPU-…`), the first if not
    /// given. Allocates all that its sessions will need; `progress` is told bytes of the weights.
    ///
    /// # Errors
    /// [`Error::Device`] if there is no driver, no such GPU or no code for it, or if it fails;
    /// [`Error::Memory`] if the sessions do not fit; [`Error::Context`] if `max_context` is 0 or
    /// above the exported maximum; [`Error::Corrupted`] if the weights are not the program's.
    pub fn open(
        program: Arc<LoadedProgram>,
        which: Option<&str>,
        options: Options,
        progress: Progress<'_>,
    ) -> Result<Self> {
        let maximum = program.program().max_context;
        let context = options.max_context.unwrap_or(maximum);
        if context == 0 || context > maximum {
            return Err(Error::Context { asked: context, maximum });
        }
        if options.weights == Weights::File && !program.has_weights() {
            return Err(Error::Device("the program was opened without its data file".to_owned()));
        }
        let gpu = Gpu::find(which)?;
        let (plan, target) = choose(program.file(), &gpu)?;
        let settings = Settings { plan, gpu, context, graphs: options.graphs };
        let parts = place(&program, &settings, target, options, progress)?;
        let plan = &program.file().plans()[plan];
        let description = format!(
            "{} ({} of {} multiprocessors, code for {})",
            settings.gpu.describe(),
            settings.gpu.multiprocessors.min(plan.multiprocessors),
            settings.gpu.multiprocessors,
            plan.target
        );
        let engine = Engine::new(Arc::clone(&program), settings, parts)?;
        Ok(Self { program, engine: Arc::new(Mutex::new(engine)), description, context })
    }

    /// Tokens of context of each session.
    pub fn context(&self) -> u32 {
        self.context
    }

    /// Calls of the driver since the program was loaded.
    pub fn calls(&self) -> Calls {
        lock(&self.engine).calls()
    }

    /// Most bytes of the GPU's memory that were taken at once since the program began to load,
    /// as the driver's free memory shows it.
    pub fn peak_memory(&self) -> Option<u64> {
        lock(&self.engine).peak_memory()
    }
}

impl Device for Cuda {
    fn program(&self) -> &Arc<LoadedProgram> {
        &self.program
    }

    fn describe(&self) -> String {
        self.description.clone()
    }

    fn open_session(&self, context: u32, _chunk: u32) -> Result<Box<dyn DeviceSession>> {
        if context == 0 || context > self.context {
            return Err(Error::Context { asked: context, maximum: self.context });
        }
        Ok(Box::new(CudaSession::new(Arc::clone(&self.engine), context)?))
    }
}

/// Makes a context with kernels, memory and weights in it.
fn place(
    program: &Arc<LoadedProgram>,
    settings: &Settings,
    target: Target,
    options: Options,
    progress: Progress<'_>,
) -> Result<Parts> {
    let Settings { gpu, .. } = settings;
    let file = program.file();
    let plan = &file.plans()[settings.plan];
    let failed = |failure: Failure| {
        let why = gpu.driver.explain(failure);
        Error::Device(format!("{} cannot load the program ({why})", gpu.describe()))
    };
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
    request.check(&gpu.describe(), context.free_memory().map_err(failed)?)?;
    let memory = Memory::new(&context, layout.bytes).map_err(failed)?;
    let layout = lay_out(memory.address)?;
    let mut stream = Stream::new(&context).map_err(failed)?;
    stream.zero(memory.address, layout.bytes).map_err(failed)?;
    stream.synchronize().map_err(failed)?;
    let least = AtomicU64::new(start);
    let loader = Loader { context: &context, kernels: &kernels, layout: &layout, least: &least };
    match options.weights {
        Weights::File => loader.from_file(program, plan, progress, failed)?,
        Weights::Random(seed) => loader.random(program, plan, &mut stream, seed, failed)?,
    }
    let free = context.free_memory().map_err(failed)?;
    let free_memory = (start, least.into_inner().min(free));
    Ok(Parts { context, kernels, memory, layout, stream, free_memory })
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
    fn from_file(
        &self,
        program: &LoadedProgram,
        plan: &Plan,
        progress: Progress<'_>,
        failed: impl Fn(Failure) -> Error,
    ) -> Result<()> {
        let stored = |id| program.weights().parts(id);
        let blocks = Blocks::of_plan(program.program(), plan, self.layout, &stored)
            .map_err(Error::Device)?;
        let meter = Meter::new(blocks.bytes(), program.is_verified(), progress);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let verification = (!program.is_verified()).then(|| {
                scope.spawn(|| {
                    let verified = program.verify_data(&|done, all| meter.verified(done, all));
                    stop.store(verified.is_err(), Ordering::Relaxed);
                    verified
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
                None => Ok(()),
                Some(Ok(verified)) => verified,
                Some(Err(panic)) => std::panic::resume_unwind(panic),
            };
            verified.and(loaded.map_err(failed))
        })
    }

    fn random(
        &self,
        program: &LoadedProgram,
        plan: &Plan,
        stream: &mut Stream,
        seed: u32,
        failed: impl Fn(Failure) -> Error,
    ) -> Result<()> {
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

    #[test]
    fn calls_are_counted_from_a_point_on() {
        let earlier = Calls { kernels: 5, graphs: 1, ..Calls::default() };
        let later = Calls { kernels: 9, graphs: 2, synchronisations: 3, ..earlier };
        let expected = Calls { kernels: 4, graphs: 1, synchronisations: 3, ..Calls::default() };
        assert_eq!(later.since(earlier), expected);
    }
}
