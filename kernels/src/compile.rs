//! Ahead-of-time compilation with NVRTC, NVIDIA's run-time compiler, which needs no GPU.

mod cubin;
mod nvrtc;

use std::fmt::Write as _;
use std::path::PathBuf;

use thiserror::Error;

use crate::{Arch, Kernel, Source, contract::source};

pub use cubin::Resources;
pub use nvrtc::Nvrtc;

/// Files that a source may `#include` by name.
const HEADERS: [Source; 13] = [
    source!("common.cuh"),
    source!("dequantize.cuh"),
    source!("gelu.cuh"),
    source!("hopper.cuh"),
    source!("linear_output.cuh"),
    source!("output.cuh"),
    source!("packed.cuh"),
    source!("panels.cuh"),
    source!("session.cuh"),
    source!("split.cuh"),
    source!("tensor_core.cuh"),
    source!("wgmma_attention.cuh"),
    source!("wgmma_tokens.cuh"),
];

/// Why a kernel could not be compiled.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// No compiler is installed where one is looked for.
    #[error(
        "no CUDA compiler: libnvrtc was not found in {}; run `make cuda-toolchain`, or set \
         CUDA_HOME to a CUDA toolkit", looked.join(", ")
    )]
    NotFound {
        /// Directories that were searched.
        looked: Vec<String>,
    },
    /// A library was found and can't be used.
    #[error("{}: {reason}", path.display())]
    Unusable {
        /// The library.
        path: PathBuf,
        /// What the loader said.
        reason: String,
    },
    /// The compiler refused a source.
    #[error("{source_name} for {target}: {log}")]
    Refused {
        /// File name.
        source_name: &'static str,
        /// Architecture.
        target: String,
        /// The compiler's messages.
        log: String,
    },
    /// The compiler's output is not a cubin that this crate can read.
    #[error("{source_name} for {target}: unreadable cubin: {reason}")]
    Cubin {
        /// File name.
        source_name: &'static str,
        /// Architecture.
        target: String,
        /// What is wrong.
        reason: &'static str,
    },
}

/// Machine code of one instantiated source.
#[derive(Clone, Debug)]
pub struct Module {
    /// An ELF file for one architecture.
    pub cubin: Vec<u8>,
    /// What each of its kernels takes of a multiprocessor.
    pub resources: Vec<Resources>,
}

impl Nvrtc {
    /// Compiles the source of `kernel` with its defines to machine code of `arch`.
    pub fn cubin(&self, kernel: &Kernel, arch: Arch) -> Result<Module, Error> {
        let cubin = self.build(kernel, arch.name(), nvrtc::Product::Cubin)?;
        let resources = cubin::resources(&cubin).map_err(|reason| Error::Cubin {
            source_name: kernel.source.name,
            target: arch.name().to_owned(),
            reason,
        })?;
        Ok(Module { cubin, resources })
    }

    /// Compiles the source of `kernel` to PTX for compute capability 8.0, which drivers compile
    /// further for architectures that this crate does not know.
    pub fn ptx(&self, kernel: &Kernel) -> Result<Vec<u8>, Error> {
        self.build(kernel, "compute_80", nvrtc::Product::Ptx)
    }

    fn build(
        &self,
        kernel: &Kernel,
        target: &str,
        product: nvrtc::Product,
    ) -> Result<Vec<u8>, Error> {
        let mut text = String::new();
        for (name, value) in &kernel.defines {
            // Writing to a String can't fail.
            let _ = writeln!(text, "#define {name} {value}");
        }
        text.push_str("#line 1\n");
        text.push_str(kernel.source.text);
        let options = [
            format!("--gpu-architecture={target}"),
            "--std=c++17".to_owned(),
            "--device-as-default-execution-space".to_owned(),
        ];
        let refused = |log| Error::Refused {
            source_name: kernel.source.name,
            target: target.to_owned(),
            log,
        };
        self.compile(kernel.source.name, &text, &HEADERS, &options, product).map_err(refused)
    }
}
