//! What is checked: kernels to compile, and a run that compares them with float64.

use gemma4_kernels::{Arch, Kernel};

use crate::device::{Function, Gpu};

/// A distance and what it may be.
pub(crate) struct Outcome {
    pub(crate) error: f64,
    pub(crate) limit: f64,
}

type Run = Box<dyn Fn(&Gpu, &[Function]) -> Outcome>;

pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) arch: Arch,
    pub(crate) kernels: Vec<Kernel>,
    pub(crate) run: Run,
}

impl Case {
    pub(crate) fn new(
        name: String,
        arch: Arch,
        kernels: Vec<Kernel>,
        run: impl Fn(&Gpu, &[Function]) -> Outcome + 'static,
    ) -> Self {
        Self { name, arch, kernels, run: Box::new(run) }
    }
}

/// The file of a kernel's cubin.
pub(crate) fn cubin_name(kernel: &Kernel, arch: Arch) -> String {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let text = format!("{} {arch} {:?}", kernel.source.name, kernel.defines);
    for byte in text.bytes() {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    }
    format!("{hash:016x}.cubin")
}
