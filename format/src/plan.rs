//! What a GPU does: a program lowered to kernel launches for one architecture.
//!
//! A plan is compiled ahead of time. It names memory by [`Place`], extents by [`Count`], and says
//! for each method which kernels run in which order. The loader allocates every place once,
//! fills the packed weights by running [`Pack`]s, and from then on only launches.
//!
//! Kernels are machine code, which cannot be checked: whoever runs a program for a GPU trusts
//! where it comes from. Everything else here is checked by [`verify`].

use serde::{Deserialize, Serialize};

use crate::dim::Extents;
use crate::program::{BufferId, Program, WeightId};
use crate::{Error, Result};

/// Most launches of one method.
pub const MAX_LAUNCHES: usize = 1 << 16;
/// Largest region that a plan may ask for, in bytes.
pub const MAX_REGION: u64 = 1 << 40;
/// Most arguments of a kernel.
pub const MAX_ARGUMENTS: usize = 64;

/// A program for one GPU architecture.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// What the machine code is for: `sm_80`, `sm_90a`, …; or `compute_80` for PTX, which newer
    /// GPUs' drivers compile when the program is loaded.
    pub target: String,
    /// Compiler and version.
    pub compiler: String,
    /// Kernels that are launched.
    pub kernels: Vec<Kernel>,
    /// Bytes of each packed weight.
    pub packed: Vec<u64>,
    /// How packed weights are filled, in order.
    pub packs: Vec<Pack>,
    /// Stored tensors that are kept as they are, `(weight, part)`.
    pub resident: Vec<(WeightId, u32)>,
    /// Bytes of one element of the keys and values.
    pub buffer_element: u32,
    /// Bytes of scratch memory, shared by all methods and sessions.
    pub scratch: u64,
    /// What calls of the program's methods launch.
    pub methods: Vec<Lowered>,
}

/// One entry point of a module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kernel {
    /// Index of the module's section in the file.
    pub module: u32,
    /// Function name.
    pub symbol: String,
    /// Threads of a block.
    pub block: u32,
    /// Dynamic shared memory of a block, bytes.
    pub shared: u32,
    /// Whether it waits for its predecessor itself, so that it may be launched before that ends
    /// (programmatic dependent launch).
    pub overlaps: bool,
}

/// One launch.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Launch {
    /// Index into [`Plan::kernels`].
    pub kernel: u32,
    /// Blocks in x, y and z.
    pub grid: [Count; 3],
    /// Arguments in order: addresses have 8 bytes, numbers 4.
    pub arguments: Vec<Argument>,
}

/// A number that is known when a call is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Count {
    /// Known at export.
    Fixed(u32),
    /// `ceil(T / per) · times`, for the `T` rows of the call.
    Rows {
        /// Rows that share a unit; not 0.
        per: u32,
        /// Units for each such set.
        times: u32,
    },
    /// `ceil(S / per) · times`, for the context length `S`.
    Context {
        /// Positions that share a unit; not 0.
        per: u32,
        /// Units for each such set.
        times: u32,
    },
    /// `clamp(P · times / share, 1, limit)`, for the `P` multiprocessors of the device.
    Multiprocessors {
        /// Units for each multiprocessor.
        times: u32,
        /// Parts into which another dimension of the grid divides the device; not 0.
        share: u32,
        /// Units that have work; not 0.
        limit: u32,
    },
}

impl Count {
    /// The number, or `None` if it does not fit 32 bits.
    pub fn resolve(self, extents: Extents, multiprocessors: u32) -> Option<u32> {
        match self {
            Count::Fixed(n) => Some(n),
            Count::Rows { per, times } => extents.rows.div_ceil(per).checked_mul(times),
            Count::Context { per, times } => extents.context.div_ceil(per).checked_mul(times),
            Count::Multiprocessors { times, share, limit } => {
                Some((multiprocessors.checked_mul(times)? / share).clamp(1, limit))
            }
        }
    }

    fn is_valid(self) -> bool {
        match self {
            Count::Fixed(_) => true,
            Count::Rows { per, .. } | Count::Context { per, .. } => per > 0,
            Count::Multiprocessors { share, limit, .. } => share > 0 && limit > 0,
        }
    }
}

/// An argument of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Argument {
    /// The address `offset` bytes into a place.
    Address(Place, u64),
    /// The null address: an operand that this instance does not read.
    Null,
    /// A number.
    U32(u32),
    /// A number.
    F32(f32),
    /// A number known when the call is made.
    Count(Count),
    /// Rows of a buffer, `R`.
    BufferRows(BufferId),
}

/// Memory that exists while a program is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Place {
    /// A packed weight, index into [`Plan::packed`].
    Packed(u32),
    /// A stored tensor kept as it is, index into [`Plan::resident`].
    Resident(u32),
    /// A buffer of the session.
    Buffer(BufferId),
    /// Scratch memory.
    Scratch,
    /// State of the session; see [`state`].
    State,
    /// Tokens of a call, `u32[T]`; for `decode` the state's token.
    Tokens,
    /// The logits of the last call, `f32[V]`, of the session.
    Logits,
}

/// Fills rows of a packed weight from stored tensors, a block of rows at a time.
///
/// The loader copies the same `rows` of every stored tensor of the sources to the device and
/// launches the kernel with: the address of each staged tensor, [`PARTS`] for each of the two
/// sources in the order codes, high codes, scales, offsets, null where there is none; then
/// `packed`, `first_tile`, `tiles`, `rows`, `total_rows`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Pack {
    /// Index into [`Plan::kernels`].
    pub kernel: u32,
    /// Index into [`Plan::packed`].
    pub packed: u32,
    /// One weight, or two whose rows alternate in the packed form.
    pub sources: Vec<WeightId>,
    /// First tile of 16 packed rows that is written.
    pub first_tile: u32,
    /// Rows of the whole packed weight.
    pub total_rows: u32,
    /// Warps (tiles by units along `K`) that share a block of the launch, for its grid.
    pub units_per_block: u32,
    /// Units along `K` of a tile.
    pub units: u32,
}

/// Stored tensors of a weight as a [`Pack`] kernel takes them.
pub const PARTS: usize = 4;

/// A method for calls of some number of rows.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Lowered {
    /// Name of a method of the program.
    pub method: String,
    /// Fewest rows of a call.
    pub min_rows: u32,
    /// Most rows of a call.
    pub max_rows: u32,
    /// Launches in order.
    pub launches: Vec<Launch>,
}

/// Checks a plan against its program. `modules` is the number of module sections in the file.
pub fn verify(plan: &Plan, program: &Program, modules: u32) -> Result<()> {
    let fail = |why: String| Err(Error::invalid(format!("plan `{}`", plan.target), why));
    let named = |name: &str| {
        !name.is_empty() && name.len() <= 128 && name.chars().all(|c| c.is_ascii_graphic())
    };
    if !named(&plan.target) {
        return fail("the target has no name".to_owned());
    }
    for kernel in &plan.kernels {
        if kernel.module >= modules || !named(&kernel.symbol) {
            return fail(format!("kernel `{}` is in no module", kernel.symbol));
        }
        if kernel.block == 0 || kernel.block > 1024 || kernel.shared > 1 << 20 {
            return fail(format!("kernel `{}` has an impossible block", kernel.symbol));
        }
    }
    let sizes = plan.packed.iter().chain([&plan.scratch]);
    if sizes.clone().any(|bytes| *bytes > MAX_REGION) {
        return fail("a region is too large".to_owned());
    }
    if !matches!(plan.buffer_element, 1 | 2 | 4) {
        return fail(format!("elements of {} bytes", plan.buffer_element));
    }
    for (weight, part) in &plan.resident {
        let parts = program.weights.get(*weight as usize).and_then(|w| {
            let parts = w.encoding.parts(&w.name, &w.dims).ok()?;
            parts.get(*part as usize).map(|_| ())
        });
        if parts.is_none() {
            return fail(format!("part {part} of weight {weight} does not exist"));
        }
    }
    for pack in &plan.packs {
        let known = pack.sources.iter().all(|id| (*id as usize) < program.weights.len());
        if pack.kernel as usize >= plan.kernels.len()
            || pack.packed as usize >= plan.packed.len()
            || !(1..=2).contains(&pack.sources.len())
            || !known
            || pack.units == 0
            || pack.units_per_block == 0
        {
            return fail("a pack refers to nothing".to_owned());
        }
    }
    for lowered in &plan.methods {
        check_method(plan, program, lowered)?;
    }
    Ok(())
}

fn check_method(plan: &Plan, program: &Program, lowered: &Lowered) -> Result<()> {
    let place = format!("plan `{}`, method `{}`", plan.target, lowered.method);
    let fail = |why: String| Err(Error::invalid(&place, why));
    let most = program.method(&lowered.method).map_or(0, |m| m.max_rows);
    if lowered.min_rows == 0 || lowered.min_rows > lowered.max_rows || lowered.max_rows > most {
        return fail(format!("rows {} to {}", lowered.min_rows, lowered.max_rows));
    }
    if lowered.launches.len() > MAX_LAUNCHES {
        return fail(format!("{} launches", lowered.launches.len()));
    }
    for (at, launch) in lowered.launches.iter().enumerate() {
        if launch.kernel as usize >= plan.kernels.len() {
            return fail(format!("launch {at} is of no kernel"));
        }
        if launch.arguments.len() > MAX_ARGUMENTS {
            return fail(format!("launch {at} has {} arguments", launch.arguments.len()));
        }
        if !launch.grid.iter().all(|count| count.is_valid()) {
            return fail(format!("launch {at} has an impossible grid"));
        }
        for argument in &launch.arguments {
            let valid = match *argument {
                Argument::Address(place, offset) => {
                    region_bytes(plan, program, place).is_some_and(|bytes| offset < bytes)
                }
                Argument::BufferRows(id) => (id as usize) < program.buffers.len(),
                Argument::Count(count) => count.is_valid(),
                Argument::Null | Argument::U32(_) | Argument::F32(_) => true,
            };
            if !valid {
                return fail(format!("launch {at}: {argument:?} points at nothing"));
            }
        }
    }
    Ok(())
}

/// Bytes of a place, as far as they are known without a session.
fn region_bytes(plan: &Plan, program: &Program, place: Place) -> Option<u64> {
    match place {
        Place::Packed(id) => plan.packed.get(id as usize).copied(),
        Place::Resident(id) => {
            let (weight, part) = plan.resident.get(id as usize)?;
            let weight = program.weights.get(*weight as usize)?;
            let parts = weight.encoding.parts(&weight.name, &weight.dims).ok()?;
            parts.get(*part as usize).map(crate::encoding::Part::bytes)
        }
        // Kernels index buffers themselves; a plan only names their beginning.
        Place::Buffer(id) => program.buffers.get(id as usize).map(|_| 1),
        Place::Scratch => Some(plan.scratch),
        Place::State => Some(state::BYTES),
        Place::Tokens => Some(4),
        Place::Logits => Some(4 * u64::from(program.vocab_size)),
    }
}

/// The state of a session on the device: what goes from one step to the next without the host.
///
/// Little-endian words at fixed offsets in bytes.
pub mod state {
    /// u32: the token that the next `decode` reads.
    pub const TOKEN: u64 = 0;
    /// u32: the position of the first row of the next call.
    pub const POSITION: u64 = 4;
    /// Bytes of the whole block.
    pub const BYTES: u64 = 4096;
}
