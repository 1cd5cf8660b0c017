//! Kernels that measure a device.

use gemma4_format::plan::{Count, measure};

use crate::contract::{args, source};
use crate::{Amount, Arch, Kernel};

/// The kernels by which a runtime measures what a device can do: [`measure::READ`] and
/// [`measure::MULTIPLY`], whose contract stands there.
pub fn measure(arch: Arch) -> [Kernel; 2] {
    let kernel = |symbol, blocks, args| Kernel {
        source: source!("measure.cu"),
        defines: vec![("WARPGROUPS", u32::from(arch == Arch::Sm90a).to_string())],
        symbol,
        grid: [
            Count::Multiprocessors { times: blocks, share: 1, limit: u32::MAX },
            Count::Fixed(1),
            Count::Fixed(1),
        ],
        block: 256,
        shared: 0,
        args,
        dependent_launch: false,
        bytes: Amount::default(),
        operations: Amount::default(),
    };
    [
        kernel(measure::READ, measure::READ_BLOCKS, args![Read from, U32 chunks, Write sink]),
        kernel(measure::MULTIPLY, measure::MULTIPLY_BLOCKS, args![U32 iterations, Write sink]),
    ]
}
