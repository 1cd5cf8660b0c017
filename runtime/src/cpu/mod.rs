//! The CPU device: executes the portable graph in float32, buffers included. Quantized weights
//! are multiplied with [`Activations`] as integers.
//!
//! It is the reference for other devices. A row's result depends on the tokens up to it and on
//! the instruction set, never on how many rows one call has or on the number of threads: a
//! prompt read at once, in chunks or token by token gives the same bits.

mod arena;
mod attention;
mod blocks;
mod codes;
mod digits;
mod execution;
mod isa;
mod linear;
mod measure;
mod plan;
mod pointwise;
mod products;
mod rope;

use std::sync::Arc;

use gemma4_format::{Operand, WeightId};
use rayon::{ThreadPool, ThreadPoolBuilder};

use self::blocks::Matrix;
pub use self::digits::Activations;
pub use self::execution::{Entry, Execution, Observer};
use self::isa::Isa;
use crate::program::no_threads;
use crate::{Device, DeviceSession, Error, LoadedProgram, Result};

/// A program on the CPU. Clones share everything.
#[derive(Clone, Debug)]
pub struct Cpu(Arc<Shared>);

/// How the CPU computes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Threads; 0 for one for each processor.
    pub threads: usize,
    /// What weights of codes are multiplied with.
    pub activations: Activations,
}

#[derive(Debug)]
struct Shared {
    program: Arc<LoadedProgram>,
    threads: ThreadPool,
    isa: Isa,
    activations: Activations,
    /// Weights of one dimension as float32, empty for others, by id.
    vectors: Vec<Vec<f32>>,
}

impl Cpu {
    /// Uses one thread for each processor.
    pub fn new(program: Arc<LoadedProgram>) -> Result<Self> {
        Self::with_threads(program, 0)
    }

    /// Uses so many threads; 0 for one for each processor.
    pub fn with_threads(program: Arc<LoadedProgram>, threads: usize) -> Result<Self> {
        Self::with_options(program, Options { threads, ..Options::default() })
    }

    /// As the options say.
    pub fn with_options(program: Arc<LoadedProgram>, options: Options) -> Result<Self> {
        let Options { threads, activations } = options;
        let isa = Isa::detect()?;
        if !program.has_weights() {
            return Err(Error::Device("the CPU needs the program's data file".to_owned()));
        }
        let threads = ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("cpu-{i}"))
            .build()
            .map_err(|error| no_threads(&error))?;
        let vectors = decode_vectors(&program)?;
        Ok(Self(Arc::new(Shared { program, threads, isa, activations, vectors })))
    }

    /// Allocates an execution for `context` tokens and calls of up to `chunk` rows, both at
    /// least 1 and within the program's maxima. [`crate::Session`] is the safer way to one.
    pub fn execution(&self, context: u32, chunk: u32) -> Result<Execution> {
        Execution::new(self.clone(), context, chunk)
    }

    fn matrix(&self, id: WeightId) -> Matrix<'_> {
        let weight = &self.0.program.program().weights[id as usize];
        let columns = weight.dims.last().copied().unwrap_or(1) as usize;
        let rows = weight.dims.iter().rev().skip(1).map(|d| *d as usize).product();
        let parts = self.0.program.weights().parts(id);
        Matrix { encoding: weight.encoding, rows, columns, parts }
    }
}

/// Decodes the weights that are used as vectors: norms and scalars.
fn decode_vectors(loaded: &LoadedProgram) -> Result<Vec<Vec<f32>>> {
    let program = loaded.program();
    let mut vectors = vec![Vec::new(); program.weights.len()];
    for arg in program.methods.iter().flat_map(|m| &m.nodes).flat_map(|n| &n.args) {
        let Operand::Weight(id) = arg else { continue };
        let (weight, vector) = (&program.weights[*id as usize], &mut vectors[*id as usize]);
        let (&[length], gemma4_format::Encoding::Dense(dtype)) =
            (&weight.dims[..], weight.encoding)
        else {
            continue;
        };
        if !vector.is_empty() {
            continue;
        }
        vector.try_reserve_exact(length as usize).map_err(|_| Error::Memory {
            what: format!("weight `{}`", weight.name),
            need: u64::from(length) * 4,
            available: 0,
        })?;
        if let [bytes] = loaded.weights().parts(*id)[..] {
            vector.extend((0..length as usize).map(|at| dtype.read(bytes, at)));
        }
    }
    Ok(vectors)
}

impl Device for Cpu {
    fn program(&self) -> &Arc<LoadedProgram> {
        &self.0.program
    }

    fn describe(&self) -> String {
        let threads = self.0.threads.current_num_threads();
        let plural = if threads == 1 { "" } else { "s" };
        format!("cpu ({threads} thread{plural}, {})", self.0.isa.name())
    }

    fn open_session(&self, context: u32, chunk: u32) -> Result<Box<dyn DeviceSession>> {
        Ok(Box::new(self.execution(context, chunk)?))
    }
}
