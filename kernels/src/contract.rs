//! What a kernel promises to whoever launches it.

use gemma4_format::plan::Count;
use thiserror::Error;

/// A CUDA C++ source file of this crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Source {
    /// File name under `cu/`.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
}

/// Names a file under `cu/` and includes its text.
macro_rules! source {
    ($name:literal) => {
        $crate::Source { name: $name, text: include_str!(concat!("../cu/", $name)) }
    };
}
pub(crate) use source;

/// One kernel: what to compile, how to launch it, what it costs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// File to compile.
    pub source: Source,
    /// Macros that instantiate it, in the order in which the compiler gets them.
    pub defines: Vec<(&'static str, String)>,
    /// Function to launch; one instantiated source may have several.
    pub symbol: &'static str,
    /// Blocks in x, y and z.
    pub grid: [Count; 3],
    /// Threads of a block.
    pub block: u32,
    /// Dynamic shared memory of a block, bytes.
    pub shared: u32,
    /// Arguments in order.
    pub args: Vec<Arg>,
    /// Whether the kernel waits for its predecessor itself (`griddepcontrol.wait`) before it reads
    /// what that wrote, so that it may be launched with programmatic stream serialization.
    pub dependent_launch: bool,
    /// Bytes that a launch must move through device memory.
    pub bytes: Amount,
    /// Multiplications and additions of a launch.
    pub operations: Amount,
}

/// An argument of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arg {
    /// Name in the source.
    pub name: &'static str,
    /// Type and direction.
    pub kind: ArgKind,
}

/// Type of an argument: an 8-byte device address, or a 4-byte number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArgKind {
    /// Address of memory that is only read.
    Read,
    /// Address of memory that is only written.
    Write,
    /// Address of memory that is read and written.
    Update,
    /// Unsigned 32-bit number.
    U32,
    /// 32-bit float.
    F32,
}

/// Shorthand for a list of arguments: `args![Read x, Write y, U32 rows]`.
macro_rules! args {
    ($($kind:ident $name:ident),* $(,)?) => {
        vec![$($crate::Arg { name: stringify!($name), kind: $crate::ArgKind::$kind }),*]
    };
}
pub(crate) use args;

/// A count that may grow with the rows of a call and with the filled context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    /// Independent of the call.
    pub fixed: u64,
    /// For each row.
    pub per_row: u64,
    /// For each position that attention reads.
    pub per_position: u64,
}

/// Why a kernel can't be instantiated with the given constants.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{kernel}: {reason}")]
pub struct Unsupported {
    /// The kernel.
    pub kernel: &'static str,
    /// What is wrong with which constant.
    pub reason: String,
}
