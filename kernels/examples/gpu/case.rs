//! What is checked: kernels to compile, and a run that compares them with float64.

use gemma4_kernels::{Arch, Kernel};

use crate::device::{Function, Gpu};

/// A distance and what it may be.
pub struct Outcome {
    pub error: f64,
    pub limit: f64,
}

type Run = Box<dyn Fn(&Gpu, &[Function]) -> Outcome>;

pub struct Case {
    pub name: String,
    pub arch: Arch,
    pub kernels: Vec<Kernel>,
    pub run: Run,
}

impl Case {
    pub fn new(
        name: String,
        arch: Arch,
        kernels: Vec<Kernel>,
        run: impl Fn(&Gpu, &[Function]) -> Outcome + 'static,
    ) -> Self {
        Self { name, arch, kernels, run: Box::new(run) }
    }
}

/// The file of a kernel's cubin.
pub fn cubin_name(kernel: &Kernel, arch: Arch) -> String {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let text = format!("{} {arch} {:?}", kernel.source.name, kernel.defines);
    for byte in text.bytes() {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    }
    format!("{hash:016x}.cubin")
}
