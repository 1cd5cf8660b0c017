//! A GPU that does one thing with pieces of a long job: bytes go in, a kernel makes others of
//! them, those come back. It knows nothing of programs.
//!
//! Several pieces can be on their way at once, each in a [`Slot`] with memory and a stream of its
//! own, so that copies and kernels of different pieces overlap.

#![allow(unsafe_code, reason = "the driver is called through its C interface")]

use std::sync::Arc;

use super::driver::Failure;
use super::gpu::{Context, Gpu};
use super::handles::{Function, Memory, Module, Pinned, Stream};
use super::kernels::is_whole_elf;
use crate::{Error, Result};

/// Regions of a slot's memory begin at multiples of this.
const ALIGNMENT: u64 = 256;

/// A GPU that was found and is not used yet.
pub struct FoundGpu(Gpu);

impl FoundGpu {
    /// Finds a GPU by its index or UUID; the first if nothing is said.
    ///
    /// # Errors
    /// [`Error::Device`] if there is no driver, or no such GPU.
    pub fn find(which: Option<&str>) -> Result<Self> {
        Gpu::find(which).map(Self)
    }

    /// The device and its name, for reports.
    pub fn describe(&self) -> String {
        self.0.describe()
    }

    /// Compute capability: major and minor.
    pub fn capability(&self) -> (u32, u32) {
        (self.0.capability.major, self.0.capability.minor)
    }
}

/// A GPU with a kernel.
pub struct Worker {
    gpu: Gpu,
    context: Arc<Context>,
    function: Function,
    block: u32,
    /// What the function belongs to.
    _module: Module,
}

// SAFETY: its handles are only passed to the driver, which may be called from several threads.
unsafe impl Sync for Worker {}

impl Worker {
    /// Loads the kernel `symbol`, which runs in blocks of `block` threads, from a cubin or PTX.
    ///
    /// # Errors
    /// [`Error::Device`] if the GPU can't be used, or does not take the code.
    pub fn open(found: FoundGpu, image: &[u8], symbol: &str, block: u32) -> Result<Self> {
        let gpu = found.0;
        let failed = |what: &str, failure| {
            let (device, why) = (gpu.describe(), gpu.driver.explain(failure));
            Error::Device(format!("{device} {what} ({why})"))
        };
        let context = Context::new(&gpu).map_err(|failure| failed("cannot be used", failure))?;
        let mut text = Vec::new();
        let image = if is_whole_elf(image) {
            image
        } else if image.starts_with(b"\x7fELF") || image.contains(&0) {
            return Err(Error::Device("the kernel's code is neither a whole cubin nor PTX".into()));
        } else {
            text.extend_from_slice(image);
            text.push(0);
            &text
        };
        // SAFETY: PTX ends with a zero; a cubin is complete as its own headers say.
        let module = unsafe { Module::new(&context, image) }
            .map_err(|failure| failed("does not take the kernel's code", failure))?;
        let function = module
            .function(symbol)
            .map_err(|failure| failed(&format!("has no kernel `{symbol}`"), failure))?;
        Ok(Self { gpu, context, function, block, _module: module })
    }

    /// The device and its name, for reports.
    pub fn describe(&self) -> String {
        self.gpu.describe()
    }

    /// Memory for one piece at a time.
    ///
    /// # Errors
    /// [`Error::Device`] if there is not enough of it, or the device fails.
    pub fn slot(&self, sizes: Sizes) -> Result<Slot> {
        let make = || {
            self.context.bind()?;
            Ok(Slot {
                stream: Stream::new(&self.context)?,
                memory: Memory::new(&self.context, sizes.end())?,
                input: Pinned::new(&self.context, sizes.input)?,
                output: Pinned::new(&self.context, sizes.output)?,
                context: Arc::clone(&self.context),
                sizes,
            })
        };
        make().map_err(|failure| self.complain("making room for pieces", failure))
    }

    /// Sends a piece on its way: the first `input` bytes of the slot's input go to the device, the
    /// kernel runs in `grid` blocks, and the first `output` bytes of the output come back.
    /// `words` gives the kernel's arguments, each from the first byte of a word on.
    ///
    /// # Safety
    /// The arguments are those of the kernel, and with them it stays within the slot's regions.
    ///
    /// # Errors
    /// [`Error::Device`] if the device fails.
    ///
    /// # Panics
    /// If the slot is smaller.
    pub unsafe fn start(
        &self,
        mut slot: Slot,
        (input, output): (usize, usize),
        grid: u32,
        words: impl FnOnce(Addresses) -> Vec<u64>,
    ) -> Result<Running> {
        assert!(input <= slot.sizes.input && output <= slot.sizes.output, "a slot of that size");
        let addresses = slot.addresses();
        let words = words(addresses);
        let Slot { context, stream, input: from, output: to, .. } = &mut slot;
        let mut go = || {
            context.bind()?;
            stream.copy_in(addresses.input, from, input)?;
            stream.launch(self.function, [grid, 1, 1], self.block, 0, false, &words)?;
            stream.copy_out(to, addresses.output, output)
        };
        go().map_err(|failure| self.complain("starting a piece", failure))?;
        Ok(Running(slot))
    }

    /// Waits for a piece; its slot then holds the output.
    ///
    /// # Errors
    /// [`Error::Device`] if the device fails.
    pub fn finish(&self, running: Running) -> Result<Slot> {
        let Running(mut slot) = running;
        let wait = |slot: &mut Slot| {
            slot.context.bind()?;
            slot.stream.synchronize()
        };
        match wait(&mut slot) {
            Ok(()) => Ok(slot),
            Err(failure) => Err(self.complain("working on a piece", failure)),
        }
    }

    fn complain(&self, what: &str, failure: Failure) -> Error {
        let (device, why) = (self.gpu.describe(), self.gpu.driver.explain(failure));
        Error::Device(format!("{device} failed in {what} ({why})"))
    }
}

/// Bytes of the regions of a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    /// What goes in.
    pub input: usize,
    /// What the kernel needs besides.
    pub scratch: usize,
    /// What comes back.
    pub output: usize,
}

impl Sizes {
    fn scratch_at(self) -> u64 {
        (self.input as u64).next_multiple_of(ALIGNMENT)
    }

    fn output_at(self) -> u64 {
        (self.scratch_at() + self.scratch as u64).next_multiple_of(ALIGNMENT)
    }

    fn end(self) -> u64 {
        self.output_at() + self.output as u64
    }

    /// Whether each region is at least as large.
    pub fn hold(self, other: Self) -> bool {
        self.input >= other.input && self.scratch >= other.scratch && self.output >= other.output
    }
}

/// Addresses of the regions of a slot on the device, multiples of 256.
#[derive(Clone, Copy, Debug)]
pub struct Addresses {
    /// What went in.
    pub input: u64,
    /// Anything.
    pub scratch: u64,
    /// What comes back.
    pub output: u64,
}

/// Memory for a piece, on the host and on the device, which is not used at the moment.
pub struct Slot {
    context: Arc<Context>,
    stream: Stream,
    memory: Memory,
    input: Pinned,
    output: Pinned,
    sizes: Sizes,
}

impl Slot {
    /// How large it is.
    pub fn sizes(&self) -> Sizes {
        self.sizes
    }

    /// What goes in.
    pub fn input_mut(&mut self) -> &mut [u8] {
        self.input.bytes_mut()
    }

    /// What went in.
    pub fn input(&self) -> &[u8] {
        self.input.bytes()
    }

    /// What came back.
    pub fn output(&self) -> &[u8] {
        self.output.bytes()
    }

    fn addresses(&self) -> Addresses {
        let at = self.memory.address;
        Addresses {
            input: at,
            scratch: at + self.sizes.scratch_at(),
            output: at + self.sizes.output_at(),
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // Nothing may use the memory when it is freed. Nobody could be told of a failure.
        let _ = self.context.bind();
        let _ = self.stream.synchronize();
    }
}

/// A piece on its way.
pub struct Running(Slot);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_follow_one_another_and_are_aligned() {
        let sizes = Sizes { input: 300, scratch: 1, output: 7 };
        assert_eq!((sizes.scratch_at(), sizes.output_at(), sizes.end()), (512, 768, 775));
        let none = Sizes { scratch: 0, ..sizes };
        assert_eq!((none.output_at(), none.end()), (512, 519));
        assert!(sizes.hold(none) && !none.hold(sizes));
    }
}
