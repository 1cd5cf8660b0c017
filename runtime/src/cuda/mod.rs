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
mod costs;
mod driver;
mod engine;
mod gpu;
mod handles;
mod kernels;
mod layout;
mod load;
mod place;
mod report;
mod session;
mod target;
#[cfg(test)]
mod testing;
mod worker;

use std::sync::{Arc, Mutex};

use gemma4_format::plan::Plan;

use self::engine::{Engine, Settings};
use self::gpu::Gpu;
pub use self::report::{Call, LoadTimes, MemoryUse, Profile, Timed};
use self::session::{CudaSession, lock};
use self::target::Target;
pub use self::worker::{Addresses, FoundGpu, Running, Sizes, Slot, Worker};
use crate::program::Progress;
use crate::roofline::Speed;
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
    /// Index of the plan.
    plan: usize,
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
        let (index, target) = choose(program.file(), &gpu)?;
        let settings = Settings { plan: index, gpu, context, graphs: options.graphs };
        let parts = place::place(&program, &settings, target, options, progress)?;
        let plan = &program.file().plans()[index];
        let description = format!(
            "{} ({} of {} multiprocessors, code for {})",
            settings.gpu.describe(),
            settings.gpu.multiprocessors.min(plan.multiprocessors),
            settings.gpu.multiprocessors,
            plan.target
        );
        let engine = Engine::new(Arc::clone(&program), settings, parts)?;
        let engine = Arc::new(Mutex::new(engine));
        Ok(Self { program, engine, description, context, plan: index })
    }

    /// What the GPU does.
    pub fn plan(&self) -> &Plan {
        &self.program.file().plans()[self.plan]
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

    /// What the program takes of the GPU's memory.
    pub fn memory(&self) -> MemoryUse {
        lock(&self.engine).memory()
    }

    /// How long loading took.
    pub fn load_times(&self) -> LoadTimes {
        lock(&self.engine).load_times()
    }

    /// Measures how fast the GPU reads the weights and multiplies; `None` if the program has no
    /// kernels for that. Logits of open sessions are lost.
    ///
    /// # Errors
    /// [`Error::Device`] if the device fails.
    pub fn speed(&self) -> Result<Option<Speed>> {
        lock(&self.engine).speed()
    }

    /// Times the kernels of a call after `depth` tokens, averaged over `steps` calls.
    ///
    /// # Errors
    /// [`Error::Device`] if all sessions are in use, or the device fails; [`Error::Context`] if
    /// the call does not fit the context.
    pub fn profile(&self, call: Call, depth: u32, steps: u32) -> Result<Profile> {
        let rows = if let Call::Prefill(rows) = call { rows.max(1) } else { 1 };
        let asked = depth.saturating_add(rows);
        if asked > self.context {
            return Err(Error::Context { asked, maximum: self.context });
        }
        lock(&self.engine).profile(call, depth, steps)
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
        if context > self.context {
            return Err(Error::Device(format!(
                "the program was loaded for contexts of up to {} tokens, not {context}",
                self.context
            )));
        }
        Ok(Box::new(CudaSession::new(Arc::clone(&self.engine), context)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_counted_from_a_point_on() {
        let earlier = Calls { kernels: 5, graphs: 1, ..Calls::default() };
        let later = Calls { kernels: 9, graphs: 2, synchronisations: 3, ..earlier };
        let expected = Calls { kernels: 4, graphs: 1, synchronisations: 3, ..Calls::default() };
        assert_eq!(later.since(earlier), expected);
    }
}
