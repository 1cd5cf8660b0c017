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
use crate::program::{BufferId, Method, Program, WeightId};
use crate::{Error, Result};

/// Most launches of one method.
pub const MAX_LAUNCHES: usize = 1 << 16;
/// Largest region that a plan may ask for, in bytes.
pub const MAX_REGION: u64 = 1 << 40;
/// Most lowered forms of all methods together.
pub const MAX_FORMS: usize = 256;
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
    /// Packed weights.
    pub packed: Vec<Packed>,
    /// How packed weights are filled, in order.
    pub packs: Vec<Pack>,
    /// Stored tensors that are kept as they are, `(weight, part)`.
    pub resident: Vec<(WeightId, u32)>,
    /// Bytes of a position in each of the program's buffers: as many as kernels lay down, which can
    /// be fewer than the buffer's columns need.
    pub position_bytes: Vec<u32>,
    /// Multiprocessors that grids and scratch memory were planned for: [`Count::Multiprocessors`]
    /// never counts more, however many the device has.
    pub multiprocessors: u32,
    /// Bytes of scratch memory, shared by all methods and sessions; zero when loaded.
    pub scratch: u64,
    /// What calls of the program's methods launch; they end with the logits. A call of `prefill`
    /// that no form takes whole is cut; `verify` has a form for every number of rows.
    pub methods: Vec<Lowered>,
    /// Draws a token from the logits into the session's state and output ring. The launches run
    /// with `T` = the rows by which the position advances: 1 after a decode step, 0 where the
    /// host has set the position.
    pub sample: Vec<Launch>,
}

/// A weight in the form that the kernels read.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Packed {
    /// Size.
    pub bytes: u64,
    /// Kernel that fills it with random numbers, for measurements without a data file. Its
    /// arguments are the address, a seed (u32) and the standard deviation (f32).
    pub randomize: u32,
    /// Blocks of that kernel's launch.
    pub randomize_blocks: u32,
    /// `K` of the weight, from which its usual standard deviation follows.
    pub columns: u32,
}

/// Kernels of a plan that no method launches: they measure what the device can do, and are found
/// by their symbols. A plan may lack them.
pub mod measure {
    /// Reads memory once. Arguments: the address, how many times 16 bytes (u32), and the address
    /// of 4 bytes that nobody needs.
    pub const READ: &str = "measure_read";
    /// Blocks of [`READ`] for each multiprocessor.
    pub const READ_BLOCKS: u32 = 8;
    /// Multiplies bf16 matrices on the tensor cores as fast as instructions can be issued.
    /// Arguments: how many times (u32), and the address of 4 bytes that nobody needs.
    pub const MULTIPLY: &str = "measure_multiply";
    /// Blocks of [`MULTIPLY`] for each multiprocessor.
    pub const MULTIPLY_BLOCKS: u32 = 2;
    /// Multiplications and additions of a block of [`MULTIPLY`] each time.
    pub const OPERATIONS: u64 = 1 << 22;
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
    /// The address of the last row of the call's values: `offset + (T − 1) · stride` bytes into a
    /// place.
    LastRow {
        /// Where the rows lie.
        place: Place,
        /// Of row 0, in bytes.
        offset: u64,
        /// Bytes from one row to the next.
        stride: u64,
    },
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
    /// Scratch memory.
    Scratch,
    /// The addresses of the session's memory; see [`table`].
    Table,
    /// The logits of the last call, `f32[rows, V]` with room for [`Program::logits_rows`]: one of
    /// each row of a `verify`, of other methods one.
    Logits,
    /// The program's stop tokens, `u32[n]`.
    Stops,
}

/// Fills rows of a packed weight from stored tensors, a block of rows at a time.
///
/// The loader copies the same rows of every stored tensor of the sources to the device and
/// launches the kernel with the address of each staged tensor, [`PARTS`] for each of two sources
/// (the same one twice if there is one) in the order codes, high codes, scales, offsets, null
/// where there is none; then the packed weight's address, the first tile to write, the number of
/// tiles, the rows staged, and [`Pack::total_rows`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Pack {
    /// Index into [`Plan::kernels`].
    pub kernel: u32,
    /// Index into [`Plan::packed`].
    pub packed: u32,
    /// One weight, or two whose rows alternate in the packed form.
    pub sources: Vec<WeightId>,
    /// Rows of each source that make a tile.
    pub rows_per_tile: u32,
    /// Tile of the packed weight at which the sources begin.
    pub first_tile: u32,
    /// Rows of the whole packed weight.
    pub total_rows: u32,
    /// Pieces of a tile, each written by a warp.
    pub units_per_tile: u32,
    /// Warps of a block.
    pub warps_per_block: u32,
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
    let largest = plan.packed.iter().map(|p| p.bytes).max().unwrap_or(0).max(plan.scratch);
    if largest > MAX_REGION {
        return fail("a region is too large".to_owned());
    }
    if plan.multiprocessors == 0 || plan.multiprocessors > 4096 {
        return fail(format!("{} multiprocessors", plan.multiprocessors));
    }
    let (known, buffers) = (plan.position_bytes.len(), program.buffers.len());
    if known != buffers || plan.position_bytes.iter().any(|bytes| !(1..=1 << 24).contains(bytes)) {
        return fail(format!("{:?} bytes a position of {buffers} buffers", plan.position_bytes));
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
            || [pack.units_per_tile, pack.warps_per_block, pack.rows_per_tile].contains(&0)
        {
            return fail("a pack refers to nothing".to_owned());
        }
    }
    if plan.packed.iter().any(|p| p.randomize as usize >= plan.kernels.len()) {
        return fail("a packed weight names no kernel".to_owned());
    }
    if plan.methods.len() > MAX_FORMS {
        return fail(format!("{} forms of methods", plan.methods.len()));
    }
    for lowered in &plan.methods {
        check_rows(plan, program, lowered)?;
        check_launches(plan, program, &lowered.method, &lowered.launches)?;
    }
    for required in ["decode", "prefill"] {
        if !plan.methods.iter().any(|m| m.method == required && m.min_rows == 1) {
            return fail(format!("`{required}` is not lowered"));
        }
    }
    if let Some(method) = program.method("verify")
        && let Some(rows) = without_form(plan, method)
    {
        return fail(format!("`verify` has no form for {rows} rows"));
    }
    check_launches(plan, program, "sample", &plan.sample)
}

/// The least number of rows of a call of a method for which there is no lowered form.
fn without_form(plan: &Plan, method: &Method) -> Option<u32> {
    let mut rows = 1;
    let takes = |form: &&Lowered, rows: u32| {
        form.method == method.name && (form.min_rows..=form.max_rows).contains(&rows)
    };
    while let Some(form) = plan.methods.iter().find(|form| takes(form, rows)) {
        rows = form.max_rows + 1;
    }
    (rows <= method.max_rows).then_some(rows)
}

fn check_rows(plan: &Plan, program: &Program, lowered: &Lowered) -> Result<()> {
    let most = program.method(&lowered.method).map_or(0, |m| m.max_rows);
    if lowered.min_rows == 0 || lowered.min_rows > lowered.max_rows || lowered.max_rows > most {
        let place = format!("plan `{}`, method `{}`", plan.target, lowered.method);
        let why = format!("rows {} to {}", lowered.min_rows, lowered.max_rows);
        return Err(Error::invalid(place, why));
    }
    Ok(())
}

fn check_launches(plan: &Plan, program: &Program, method: &str, launches: &[Launch]) -> Result<()> {
    let place = format!("plan `{}`, method `{method}`", plan.target);
    let fail = |why: String| Err(Error::invalid(&place, why));
    if launches.len() > MAX_LAUNCHES {
        return fail(format!("{} launches", launches.len()));
    }
    for (at, launch) in launches.iter().enumerate() {
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
                Argument::LastRow { place, offset, stride } => {
                    let last = u64::from(crate::verify::MAX_ROWS).checked_mul(stride);
                    let end = last.and_then(|bytes| bytes.checked_add(offset));
                    end.is_some()
                        && region_bytes(plan, program, place).is_some_and(|bytes| offset < bytes)
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
        Place::Packed(id) => plan.packed.get(id as usize).map(|p| p.bytes),
        Place::Resident(id) => {
            let (weight, part) = plan.resident.get(id as usize)?;
            let weight = program.weights.get(*weight as usize)?;
            let parts = weight.encoding.parts(&weight.name, &weight.dims).ok()?;
            parts.get(*part as usize).map(crate::encoding::Part::bytes)
        }
        Place::Scratch => Some(plan.scratch),
        Place::Table => Some(8 * u64::from(table::BUFFERS)),
        Place::Logits => Some(4 * u64::from(program.vocab_size) * u64::from(program.logits_rows())),
        Place::Stops => Some(4 * program.text.stop_tokens.len().max(1) as u64),
    }
}

/// The table of a session's memory on the device: 64-bit addresses, so that one captured graph
/// serves every session.
pub mod table {
    /// The session's [`super::state`].
    pub const STATE: u32 = 0;
    /// The ring of drawn tokens, in host memory that the device writes: 64-bit slots, slot
    /// `step mod OUTPUT_SLOTS` receives `(step + 1) << 32 | token`.
    pub const OUTPUT: u32 = 1;
    /// Tokens of a call of `prefill` or `verify`, `u32[T]`.
    pub const TOKENS: u32 = 2;
    /// The first of the program's buffers; the others follow in order.
    pub const BUFFERS: u32 = 3;
    /// Slots of the output ring.
    pub const OUTPUT_SLOTS: u32 = 1024;
}

/// Indices of the 32-bit words of a session's state on the device: what goes from one step to the
/// next without the host.
pub mod state {
    /// The token that the next decode step reads.
    pub const TOKEN: usize = 0;
    /// Position of the first row of the next call.
    pub const POSITION: usize = 1;
    /// [`RUNNING`], [`STOP_TOKEN`] or [`OUT_OF_POSITIONS`]. Unless running, steps change nothing.
    pub const STOPPED: usize = 2;
    /// Tokens drawn so far in this generation.
    pub const STEP: usize = 3;
    /// Seed of the random numbers, two words.
    pub const SEED: usize = 4;
    /// f32; 0 takes the largest logit.
    pub const TEMPERATURE: usize = 6;
    /// Logits that are kept; 0 keeps all.
    pub const TOP_K: usize = 7;
    /// f32; probability that the kept tokens reach.
    pub const TOP_P: usize = 8;
    /// Positions that the buffers hold.
    pub const LIMIT: usize = 9;
    /// Words of a state.
    pub const WORDS: usize = 16;

    /// Steps draw tokens.
    pub const RUNNING: u32 = 0;
    /// The last token is a stop token.
    pub const STOP_TOKEN: u32 = 1;
    /// The next position lies beyond the buffers.
    pub const OUT_OF_POSITIONS: u32 = 2;
}
