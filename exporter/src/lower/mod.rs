//! Lowers the portable graph of a program to kernel launches, for chosen GPU architectures.
//!
//! `stages` finds the layers in the graph, `weights` decides how weights are packed, `schedule`
//! (and `few` for calls of few rows) writes the launches of each method into a `draft`, whose scratch
//! memory `scratch` plans, and the kernels that they need are compiled here. No GPU is needed.

mod draft;
mod few;
mod fusions;
mod schedule;
mod scratch;
mod stages;
#[cfg(test)]
mod tests;
mod weights;

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use gemma4_format::Program;
use gemma4_format::plan::{self, Plan};
use gemma4_kernels::compile::{self, Nvrtc};
use gemma4_kernels::{Arch, Kernel, Unsupported, measure};
use rayon::prelude::*;
use thiserror::Error;

pub use fusions::Fusions;
use schedule::Schedule;
use stages::Stages;

/// Why a program has no plan for a GPU.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The graph has a shape for which there are no kernels.
    #[error("no GPU code for this model: {0}")]
    Graph(String),
    /// A kernel can't be instantiated with the model's dims.
    #[error("no GPU code for this model: {0}")]
    Unsupported(#[from] Unsupported),
    /// No compiler, or it failed.
    #[error(transparent)]
    Compile(#[from] compile::Error),
    /// Unknown target.
    #[error("{0}")]
    Target(String),
}

type Result<T, E = Error> = std::result::Result<T, E>;

/// What a plan is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Machine code of one architecture.
    Machine(Arch),
    /// PTX of the portable kernels, compiled by the driver of a GPU that is newer than this code.
    Ptx,
}

impl Target {
    /// Those that a program is compiled for where nobody asks for others.
    ///
    /// `sm_86` is among them because code for `sm_80` may use more shared memory than a GPU of
    /// compute capability 8.6 has.
    pub const DEFAULT: [Target; 6] = [
        Target::Machine(Arch::Sm80),
        Target::Machine(Arch::Sm86),
        Target::Machine(Arch::Sm89),
        Target::Machine(Arch::Sm90a),
        Target::Machine(Arch::Sm120),
        Target::Ptx,
    ];

    /// The architecture whose kernels and limits are planned for: for PTX those with the least
    /// shared memory, since it is to run anywhere.
    fn arch(self) -> Arch {
        match self {
            Target::Machine(arch) => arch,
            Target::Ptx => Arch::Sm86,
        }
    }

    /// Shared memory that one block may use, in bytes.
    pub fn shared_per_block(self) -> u32 {
        self.arch().shared_per_block()
    }

    /// Multiprocessors of the largest GPU of the architecture: grids and scratch are planned for
    /// so many.
    fn multiprocessors(self) -> u32 {
        match self {
            Target::Machine(Arch::Sm80) => 108,
            Target::Machine(Arch::Sm86) => 84,
            Target::Machine(Arch::Sm89) => 144,
            Target::Machine(Arch::Sm90 | Arch::Sm90a) => 132,
            Target::Machine(Arch::Sm100) => 148,
            Target::Machine(Arch::Sm120) => 188,
            Target::Ptx => 144,
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Machine(arch) => arch.fmt(f),
            Target::Ptx => f.write_str("compute_80"),
        }
    }
}

impl FromStr for Target {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name {
            "ptx" | "compute_80" => Ok(Target::Ptx),
            _ => name
                .parse()
                .map(Target::Machine)
                .map_err(|why: String| format!("{why}; `ptx` is for GPUs not yet known")),
        }
    }
}

/// Plans and the modules that they refer to.
#[derive(Debug, Default)]
pub struct Lowered {
    /// One for each target.
    pub plans: Vec<Plan>,
    /// Machine code or PTX.
    pub modules: Vec<Vec<u8>>,
}

/// Lowers and compiles a program for each target.
///
/// Calls `progress` with the number of kernels compiled and of all, from several threads.
///
/// # Errors
/// [`Error::Graph`] and [`Error::Unsupported`] say which part of the model has no kernel;
/// [`Error::Compile`] if there is no compiler or it refuses.
pub fn lower(
    program: &Program,
    targets: &[Target],
    fusions: Fusions,
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Result<Lowered> {
    let stages = Stages::find(program)?;
    let schedules = targets
        .iter()
        .map(|target| {
            let arch = target.arch();
            let sms = target.multiprocessors();
            let mut schedule = Schedule::new(program, &stages, arch, sms, fusions)?;
            schedule.kernels.extend(measure(arch));
            Ok(schedule)
        })
        .collect::<Result<Vec<_>>>()?;
    let total = schedules.iter().map(|s| distinct_sources(&s.kernels).len()).sum();
    let nvrtc = Nvrtc::find()?;
    let done = std::sync::atomic::AtomicUsize::new(0);
    let mut lowered = Lowered::default();
    for (target, schedule) in targets.iter().zip(schedules) {
        let sources = distinct_sources(&schedule.kernels);
        let instances: Vec<Instance> = sources.keys().cloned().collect();
        let modules: Vec<Vec<u8>> = sources
            .values()
            .collect::<Vec<_>>()
            .into_par_iter()
            .map(|kernel| {
                let module = match target {
                    Target::Machine(arch) => nvrtc.cubin(kernel, *arch)?.cubin,
                    Target::Ptx => nvrtc.ptx(kernel)?,
                };
                let done = done.fetch_add(1, std::sync::atomic::Ordering::Relaxed) + 1;
                progress(done, total);
                Ok(module)
            })
            .collect::<Result<_>>()?;
        let first = lowered.modules.len();
        let index = |kernel: &Kernel| {
            let at = instances.iter().position(|source| *source == instance(kernel));
            (first + at.unwrap_or(0)) as u32
        };
        let compiler = format!("NVRTC {}.{}", nvrtc.version().0, nvrtc.version().1);
        lowered.plans.push(assemble(*target, schedule, compiler, index));
        lowered.modules.extend(modules);
    }
    Ok(lowered)
}

/// The plans that [`lower`] would make, without code: no compiler is needed.
///
/// Every plan refers to one module, which does not exist.
///
/// # Errors
/// [`Error::Graph`] and [`Error::Unsupported`].
pub fn plans_without_code(
    program: &Program,
    targets: &[Target],
    fusions: Fusions,
) -> Result<Vec<Plan>> {
    let stages = Stages::find(program)?;
    let plan = |target: &Target| {
        let (arch, multiprocessors) = (target.arch(), target.multiprocessors());
        let schedule = Schedule::new(program, &stages, arch, multiprocessors, fusions)?;
        Ok(assemble(*target, schedule, "none".to_owned(), |_| 0))
    };
    targets.iter().map(plan).collect()
}

/// `module` tells the index of a kernel's module.
fn assemble(
    target: Target,
    schedule: Schedule,
    compiler: String,
    module: impl Fn(&Kernel) -> u32,
) -> Plan {
    let kernels = schedule.kernels.iter().map(|kernel| plan::Kernel {
        module: module(kernel),
        symbol: kernel.symbol.to_owned(),
        block: kernel.block,
        shared: kernel.shared,
        overlaps: kernel.dependent_launch && target.arch().dependent_launch(),
    });
    Plan {
        target: target.to_string(),
        compiler,
        kernels: kernels.collect(),
        packed: schedule.packed,
        packs: schedule.packs,
        resident: schedule.resident,
        position_bytes: schedule.position_bytes,
        multiprocessors: target.multiprocessors(),
        scratch: schedule.scratch,
        methods: schedule.methods,
        sample: schedule.sample,
    }
}

/// What a module is compiled from.
type Instance = (&'static str, Vec<(&'static str, String)>);

fn instance(kernel: &Kernel) -> Instance {
    (kernel.source.name, kernel.defines.clone())
}

/// One kernel of each module, in a fixed order.
fn distinct_sources(kernels: &[Kernel]) -> BTreeMap<Instance, &Kernel> {
    kernels.iter().map(|kernel| (instance(kernel), kernel)).collect()
}
