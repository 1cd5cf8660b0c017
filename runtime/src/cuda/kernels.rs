//! A plan's kernels on the device.

#![allow(unsafe_code, reason = "the driver is called through its C interface")]

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

use cudarc::driver::sys::CUfunction_attribute as Attribute;
use gemma4_format::plan::{self, Plan};

use super::arguments::Launches;
use super::driver::Failure;
use super::gpu::{Context, Gpu};
use super::handles::{Function, Module, Stream};
use super::target::Target;
use crate::{Error, Result};

/// First major version of compute capability whose kernels can wait for their predecessor.
const OVERLAPPING: u32 = 9;
/// First version of CUDA whose graphs can hold kernels that start before their predecessor ends.
const OVERLAPPING_GRAPHS: i32 = 12_030;

/// Kernels in the plan's order.
pub(super) struct Kernels {
    kernels: Vec<Kernel>,
    /// What the functions belong to.
    _modules: BTreeMap<u32, Module>,
}

struct Kernel {
    function: Function,
    block: u32,
    shared: u32,
    early: bool,
}

impl Kernels {
    /// Loads the modules that a plan uses, and checks its kernels against the GPU.
    ///
    /// # Errors
    /// [`Error::Device`] if the driver does not take a module, or a kernel asks for more than the
    /// GPU has.
    pub(super) fn load(
        context: &Arc<Context>,
        gpu: &Gpu,
        plan: &Plan,
        target: Target,
        images: &[Vec<u8>],
    ) -> Result<Self> {
        let overlapping =
            target.capability.major >= OVERLAPPING && gpu.driver.is_for(OVERLAPPING_GRAPHS);
        let mut modules = BTreeMap::new();
        let mut kernels = Vec::with_capacity(plan.kernels.len());
        for kernel in &plan.kernels {
            let module = match modules.entry(kernel.module) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(slot) => {
                    let image = images.get(kernel.module as usize).map_or(&[][..], Vec::as_slice);
                    slot.insert(load_module(context, gpu, plan, target, image)?)
                }
            };
            let function = prepare(module, gpu, kernel)?;
            kernels.push(Kernel {
                function,
                block: kernel.block,
                shared: kernel.shared,
                early: kernel.overlaps && overlapping,
            });
        }
        Ok(Self { kernels, _modules: modules })
    }

    /// Launches one kernel; a verified plan has it.
    pub(super) fn launch(
        &self,
        stream: &mut Stream,
        kernel: u32,
        grid: [u32; 3],
        words: &[u64],
    ) -> Result<(), Failure> {
        let Kernel { function, block, shared, early, .. } = self.kernels[kernel as usize];
        stream
            .launch(function, grid, block, shared, early, words)
            .map_err(|failure| failure.of_kernel(kernel))
    }

    /// Launches a list in order.
    pub(super) fn play(&self, stream: &mut Stream, launches: &Launches) -> Result<(), Failure> {
        launches
            .iter()
            .try_for_each(|(launch, words)| self.launch(stream, launch.kernel, launch.grid, words))
    }
}

fn load_module(
    context: &Arc<Context>,
    gpu: &Gpu,
    plan: &Plan,
    target: Target,
    image: &[u8],
) -> Result<Module> {
    let mut text = Vec::new();
    let image = if target.ptx {
        text.extend_from_slice(image);
        text.push(0);
        &text
    } else if is_whole_elf(image) {
        image
    } else {
        let target = &plan.target;
        return Err(Error::Device(format!("the program's code for {target} is no whole cubin")));
    };
    // SAFETY: PTX ends with a zero; a cubin is complete as its own headers say.
    unsafe { Module::new(context, image) }.map_err(|failure| {
        if !failure.is_of_foreign_code() {
            return Error::Device(gpu.complain(plan, "loading the program's code", failure));
        }
        let driver = context.driver;
        Error::Device(format!(
            "the NVIDIA driver, which is for CUDA {}, does not take the code for {} made by {} \
             ({}); a newer driver may",
            driver.describe(),
            plan.target,
            plan.compiler,
            driver.explain(failure)
        ))
    })
}

/// Looks a kernel up and lets it use the shared memory that it needs.
fn prepare(module: &Module, gpu: &Gpu, kernel: &plan::Kernel) -> Result<Function> {
    let name = &kernel.symbol;
    let failed = |failure| {
        let why = gpu.driver.explain(failure);
        Error::Device(format!("cannot prepare the kernel `{name}` ({why})"))
    };
    let function = module.function(name).map_err(failed)?;
    let attribute = |attribute| module.attribute(function, attribute).map_err(failed);
    let threads = attribute(Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?;
    if i64::from(kernel.block) > i64::from(threads) {
        return Err(Error::Device(format!(
            "the kernel `{name}` wants blocks of {} threads, and this GPU runs {threads}",
            kernel.block
        )));
    }
    let fixed = attribute(Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?;
    let shared = i64::from(kernel.shared) + i64::from(fixed);
    if shared > i64::from(gpu.shared_memory) {
        return Err(Error::Device(format!(
            "the kernel `{name}` wants {shared} bytes of shared memory, and this GPU has {}",
            gpu.shared_memory
        )));
    }
    let set = |attribute, value| module.set_attribute(function, attribute, value).map_err(failed);
    set(Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel.shared as i32)?;
    // One division of the cache for all, so that a kernel can start beside its predecessor.
    set(Attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100)?;
    Ok(function)
}

/// Whether bytes are a 64-bit ELF file all of whose headers and sections lie within them.
pub(super) fn is_whole_elf(bytes: &[u8]) -> bool {
    check_elf(bytes).is_some()
}

fn check_elf(bytes: &[u8]) -> Option<()> {
    const NO_BITS: u64 = 8;
    let number = |at: u64, size: usize| {
        let at = usize::try_from(at).ok()?;
        let mut word = [0; 8];
        word[..size].copy_from_slice(bytes.get(at..at.checked_add(size)?)?);
        Some(u64::from_le_bytes(word))
    };
    let inside =
        |at: u64, length: u64| at.checked_add(length).is_some_and(|end| end <= bytes.len() as u64);
    // 64-bit, little-endian.
    if !bytes.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let segments = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
    let sections = (number(40, 8)?, number(58, 2)?, number(60, 2)?);
    for (at, size, count) in [segments, sections] {
        if !inside(at, size * count) {
            return None;
        }
    }
    let (at, size, count) = sections;
    for header in (0..count).map(|i| at + i * size) {
        let (kind, offset, length) =
            (number(header + 4, 4)?, number(header + 24, 8)?, number(header + 32, 8)?);
        if kind != NO_BITS && !inside(offset, length) {
            return None;
        }
    }
    (count > 0).then_some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An ELF file of two sections: one of `length` bytes, one without bits.
    fn elf(length: u64) -> Vec<u8> {
        let mut bytes = vec![0; 64];
        bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
        bytes[40..48].copy_from_slice(&64u64.to_le_bytes());
        bytes[58..60].copy_from_slice(&64u16.to_le_bytes());
        bytes[60..62].copy_from_slice(&2u16.to_le_bytes());
        for (kind, length) in [(1u32, length), (8, 1 << 40)] {
            let mut header = vec![0; 64];
            header[4..8].copy_from_slice(&kind.to_le_bytes());
            header[24..32].copy_from_slice(&192u64.to_le_bytes());
            header[32..40].copy_from_slice(&length.to_le_bytes());
            bytes.extend(header);
        }
        bytes.extend(vec![7; 10]);
        bytes
    }

    #[test]
    fn a_cubin_is_complete_or_refused() {
        assert!(is_whole_elf(&elf(10)));
        assert!(!is_whole_elf(&elf(11)));
        assert!(!is_whole_elf(&elf(u64::MAX)));
        let whole = elf(10);
        for length in 0..whole.len() {
            assert!(!is_whole_elf(&whole[..length]), "{length} bytes");
        }
        assert!(!is_whole_elf(b"//\n.version 8.0\n.target sm_80\n"));
    }
}
