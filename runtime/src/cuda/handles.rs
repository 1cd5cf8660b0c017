//! Things of the driver that are given back when dropped. Each holds the context it lives in.
//!
//! Copies and launches are only enqueued: they run in the order of their stream. Memory must not
//! be dropped while a stream still uses it; [`super::engine::Engine`] and [`super::load`] wait
//! before they let go of any.

#![allow(unsafe_code, reason = "the driver is called through its C interface")]

use std::ffi::{CString, c_void};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys::{
    CUevent, CUfunction, CUfunction_attribute, CUgraph, CUgraphExec, CUlaunchAttribute,
    CUlaunchAttributeID, CUlaunchConfig, CUmodule, CUstream, CUstreamCaptureMode,
};
use gemma4_format::plan::{MAX_ARGUMENTS, table};

use super::Calls;
use super::driver::{Driver, Failure};
use super::gpu::Context;
use crate::Result;

/// `CU_STREAM_NON_BLOCKING`: not ordered with the default stream.
const NON_BLOCKING: u32 = 1;
/// `CU_MEMHOSTALLOC_DEVICEMAP`: the device can address it.
const DEVICE_MAP: u32 = 2;

/// Declares that a type of handles may be moved to and used from other threads.
macro_rules! sendable {
    ($($name:ty),*) => {$(
        // SAFETY: handles of the driver belong to a context, not to a thread.
        unsafe impl Send for $name {}
    )*};
}
sendable!(Memory, Pinned, Ring, Stream, Event, Graph, Module, Function);

/// Memory of the device.
pub(super) struct Memory {
    context: Arc<Context>,
    pub(super) address: u64,
}

impl Memory {
    /// Allocates at least one byte, aligned to 256.
    pub(super) fn new(context: &Arc<Context>, bytes: u64) -> Result<Self, Failure> {
        let mut address = 0;
        // SAFETY: `address` is valid for writes.
        unsafe { context.driver.memory_allocate(&mut address, bytes.max(1) as usize) }?;
        Ok(Self { context: Arc::clone(context), address })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: allocated in `new` and freed once.
        let _ = unsafe { self.context.driver.memory_free(self.address) };
    }
}

/// Memory of the host that the device can copy from and to while the host goes on.
pub(super) struct Pinned {
    context: Arc<Context>,
    pointer: *mut u8,
    length: usize,
}

impl Pinned {
    pub(super) fn new(context: &Arc<Context>, length: usize) -> Result<Self, Failure> {
        let mut pointer = ptr::null_mut();
        // SAFETY: `pointer` is valid for writes.
        unsafe { context.driver.host_allocate(&mut pointer, length.max(1), 0) }?;
        let pointer = pointer.cast::<u8>();
        // SAFETY: just allocated with that length.
        unsafe { ptr::write_bytes(pointer, 0, length) };
        Ok(Self { context: Arc::clone(context), pointer, length })
    }

    /// Its bytes. No copy to it may still run.
    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: allocated and initialised with that length, borrowed as `self` is.
        unsafe { std::slice::from_raw_parts(self.pointer, self.length) }
    }

    /// Its bytes. A copy from it that still runs may take what is written here.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: allocated and initialised with that length, borrowed as `self` is.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.length) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: allocated in `new` and freed once.
        let _ = unsafe { self.context.driver.host_free(self.pointer.cast()) };
    }
}

/// The ring of drawn tokens: memory of the host that the device writes, see [`table::OUTPUT`].
pub(super) struct Ring {
    context: Arc<Context>,
    slots: *mut AtomicU64,
    /// Where the device sees it.
    pub(super) address: u64,
}

impl Ring {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self, Failure> {
        let bytes = table::OUTPUT_SLOTS as usize * size_of::<u64>();
        let mut pointer = ptr::null_mut();
        // SAFETY: `pointer` is valid for writes.
        unsafe { context.driver.host_allocate(&mut pointer, bytes, DEVICE_MAP) }?;
        let mut ring = Self { context: Arc::clone(context), slots: pointer.cast(), address: 0 };
        // SAFETY: just allocated, mapped, with that length; `address` is valid for writes.
        unsafe {
            ptr::write_bytes(pointer.cast::<u8>(), 0, bytes);
            context.driver.host_address(&mut ring.address, pointer, 0)?;
        }
        Ok(ring)
    }

    fn slot(&self, step: u32) -> &AtomicU64 {
        // SAFETY: the index is below the number of slots; the memory is aligned and initialised,
        // and everyone, the device included, writes whole slots.
        unsafe { &*self.slots.add((step % table::OUTPUT_SLOTS) as usize) }
    }

    /// Forgets all tokens. Nothing may be running that writes them.
    pub(super) fn clear(&self) {
        (0..table::OUTPUT_SLOTS).for_each(|step| self.slot(step).store(0, Ordering::Relaxed));
    }

    /// The token of a step, counted from 0 since the generation began, if it has been drawn.
    pub(super) fn token(&self, step: u32) -> Option<u32> {
        let slot = self.slot(step).load(Ordering::Acquire);
        (slot >> 32 == u64::from(step) + 1).then_some(slot as u32)
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: allocated in `new` and freed once.
        let _ = unsafe { self.context.driver.host_free(self.slots.cast()) };
    }
}

/// Work of the device in order, and how many calls made it.
pub(super) struct Stream {
    context: Arc<Context>,
    handle: CUstream,
    pub(super) calls: Calls,
}

impl Stream {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self, Failure> {
        let mut handle = ptr::null_mut();
        // SAFETY: `handle` is valid for writes.
        unsafe { context.driver.stream_create(&mut handle, NON_BLOCKING) }?;
        Ok(Self { context: Arc::clone(context), handle, calls: Calls::default() })
    }

    /// Copies the first bytes of pinned memory to the device.
    pub(super) fn copy_in(&mut self, to: u64, from: &Pinned, bytes: usize) -> Result<(), Failure> {
        debug_assert!(bytes <= from.length);
        self.calls.to_device += 1;
        // SAFETY: the source is that long and outlives the stream's work, see the module's text.
        unsafe { self.context.driver.copy_to_device(to, from.pointer.cast(), bytes, self.handle) }
    }

    /// Copies to the first bytes of pinned memory from the device.
    pub(super) fn copy_out(
        &mut self,
        to: &mut Pinned,
        from: u64,
        bytes: usize,
    ) -> Result<(), Failure> {
        debug_assert!(bytes <= to.length);
        self.calls.to_host += 1;
        // SAFETY: the destination is that long and outlives the stream's work, see the module's text.
        unsafe { self.context.driver.copy_to_host(to.pointer.cast(), from, bytes, self.handle) }
    }

    /// Copies bytes to the device and waits for that.
    pub(super) fn write(&mut self, to: u64, from: &[u8]) -> Result<(), Failure> {
        self.calls.to_device += 1;
        let (pointer, bytes) = (from.as_ptr().cast(), from.len());
        // SAFETY: the source is borrowed until the copy is done.
        unsafe { self.context.driver.copy_to_device(to, pointer, bytes, self.handle) }?;
        self.synchronize()
    }

    /// Waits for all work and copies from the device.
    pub(super) fn read(&mut self, from: u64, to: &mut [f32]) -> Result<(), Failure> {
        self.calls.to_host += 1;
        let (pointer, bytes) = (to.as_mut_ptr().cast(), size_of_val(to));
        // SAFETY: the destination is borrowed until the copy is done; any bits are a f32.
        unsafe { self.context.driver.copy_to_host(pointer, from, bytes, self.handle) }?;
        self.synchronize()
    }

    /// Copies from one place of the device to another.
    pub(super) fn copy(&mut self, to: u64, from: u64, bytes: u64) -> Result<(), Failure> {
        self.calls.on_device += 1;
        // SAFETY: addresses of the device cannot harm the host.
        unsafe { self.context.driver.copy_on_device(to, from, bytes as usize, self.handle) }
    }

    /// Fills memory of the device with zeros.
    pub(super) fn zero(&mut self, to: u64, bytes: u64) -> Result<(), Failure> {
        self.calls.on_device += 1;
        // SAFETY: as in `copy`.
        unsafe { self.context.driver.fill(to, 0, bytes as usize, self.handle) }
    }

    /// Waits until all work is done.
    pub(super) fn synchronize(&mut self) -> Result<(), Failure> {
        self.calls.synchronisations += 1;
        // SAFETY: the stream is alive.
        unsafe { self.context.driver.stream_synchronize(self.handle) }
    }

    /// Whether all work is done, without waiting.
    pub(super) fn is_idle(&self) -> Result<bool, Failure> {
        // SAFETY: the stream is alive.
        unsafe { self.context.driver.is_idle(self.handle) }
    }

    /// Launches a kernel. `words` hold its arguments, each from the first byte of a word on. With
    /// `early`, it may start before its predecessor ends: it waits itself where it must.
    pub(super) fn launch(
        &mut self,
        function: Function,
        grid: [u32; 3],
        block: u32,
        shared: u32,
        early: bool,
        words: &[u64],
    ) -> Result<(), Failure> {
        self.calls.kernels += 1;
        let mut pointers = [ptr::null_mut::<c_void>(); MAX_ARGUMENTS];
        for (pointer, word) in pointers.iter_mut().zip(words) {
            *pointer = ptr::from_ref(word).cast_mut().cast();
        }
        // SAFETY: plain C data, for which zero is valid.
        let mut attribute: CUlaunchAttribute = unsafe { std::mem::zeroed() };
        attribute.id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attribute.value.programmaticStreamSerializationAllowed = 1;
        let config = CUlaunchConfig {
            gridDimX: grid[0],
            gridDimY: grid[1],
            gridDimZ: grid[2],
            blockDimX: block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared,
            hStream: self.handle,
            attrs: &mut attribute,
            numAttrs: u32::from(early),
        };
        // SAFETY: the driver reads as many arguments as the function has; that these are the
        // plan's is part of the trust in its machine code. The module is alive as its engine is.
        unsafe {
            self.context.driver.launch(&config, function.0, pointers.as_mut_ptr(), ptr::null_mut())
        }
    }

    /// Notes in an event when the device gets here.
    pub(super) fn record(&mut self, event: &Event) -> Result<(), Failure> {
        // SAFETY: both are alive.
        unsafe { self.context.driver.event_record(event.handle, self.handle) }
    }

    /// Launches a graph.
    pub(super) fn launch_graph(&mut self, graph: &Graph) -> Result<(), Failure> {
        self.calls.graphs += 1;
        // SAFETY: both are alive.
        unsafe { self.context.driver.graph_launch(graph.handle, self.handle) }
    }

    /// Makes a graph of what `body` launches, which does not run.
    pub(super) fn capture(
        &mut self,
        body: impl FnOnce(&mut Self) -> Result<(), Failure>,
    ) -> Result<Graph, Failure> {
        let driver = self.context.driver;
        let calls = self.calls;
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL as u32;
        let mut recorded: CUgraph = ptr::null_mut();
        let mut handle: CUgraphExec = ptr::null_mut();
        // SAFETY: the stream is alive and begins and ends its capture here.
        unsafe { driver.capture_begin(self.handle, mode) }?;
        let launched = body(self);
        // SAFETY: as above; `recorded` is valid for writes.
        let ended = unsafe { driver.capture_end(self.handle, &mut recorded) };
        let recorded = Recorded { driver, handle: recorded };
        self.calls = calls;
        launched.and(ended)?;
        // SAFETY: `handle` is valid for writes, and the graph was just recorded.
        unsafe { driver.graph_instantiate(&mut handle, recorded.handle, 0) }?;
        let graph = Graph { context: Arc::clone(&self.context), handle };
        // SAFETY: both are alive.
        unsafe { driver.graph_upload(graph.handle, self.handle) }?;
        Ok(graph)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: created in `new` and destroyed once.
        let _ = unsafe { self.context.driver.stream_destroy(self.handle) };
    }
}

/// A time on the device.
pub(super) struct Event {
    context: Arc<Context>,
    handle: CUevent,
}

impl Event {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self, Failure> {
        let mut handle = ptr::null_mut();
        // SAFETY: `handle` is valid for writes.
        unsafe { context.driver.event_create(&mut handle, 0) }?;
        Ok(Self { context: Arc::clone(context), handle })
    }

    /// Seconds since an earlier event. The device must have passed both.
    pub(super) fn since(&self, earlier: &Self) -> Result<f64, Failure> {
        let mut milliseconds = 0.0;
        // SAFETY: both events are alive; `milliseconds` is valid for writes.
        unsafe {
            self.context.driver.event_elapsed(&mut milliseconds, earlier.handle, self.handle)
        }?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: created in `new` and destroyed once.
        let _ = unsafe { self.context.driver.event_destroy(self.handle) };
    }
}

/// What a stream would have done, null if its end could not be recorded.
struct Recorded {
    driver: &'static Driver,
    handle: CUgraph,
}

impl Drop for Recorded {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: recorded once and destroyed once.
            let _ = unsafe { self.driver.graph_destroy(self.handle) };
        }
    }
}

/// Launches that the device runs at one call.
pub(super) struct Graph {
    context: Arc<Context>,
    handle: CUgraphExec,
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: instantiated once and released once.
        let _ = unsafe { self.context.driver.graph_release(self.handle) };
    }
}

/// Loaded machine code.
pub(super) struct Module {
    context: Arc<Context>,
    handle: CUmodule,
}

/// An entry point of a [`Module`], valid while that lives.
#[derive(Clone, Copy)]
pub(super) struct Function(CUfunction);

impl Module {
    /// Loads a cubin, or PTX text that ends with a zero.
    ///
    /// # Safety
    /// The image is complete: the driver is not told where it ends.
    pub(super) unsafe fn new(context: &Arc<Context>, image: &[u8]) -> Result<Self, Failure> {
        let mut handle = ptr::null_mut();
        // SAFETY: `handle` is valid for writes; the image is complete as the caller promised.
        unsafe { context.driver.module_load(&mut handle, image.as_ptr().cast()) }?;
        Ok(Self { context: Arc::clone(context), handle })
    }

    pub(super) fn function(&self, symbol: &str) -> Result<Function, Failure> {
        let mut function = ptr::null_mut();
        // A verified plan's symbols hold no zero byte.
        let symbol = CString::new(symbol).unwrap_or_default();
        // SAFETY: the module is alive, the name ends with a zero.
        unsafe {
            self.context.driver.module_function(&mut function, self.handle, symbol.as_ptr())
        }?;
        Ok(Function(function))
    }

    /// An attribute of one of its functions.
    pub(super) fn attribute(
        &self,
        function: Function,
        attribute: CUfunction_attribute,
    ) -> Result<i32, Failure> {
        let mut value = 0;
        // SAFETY: the function is alive as its module is; `value` is valid for writes.
        unsafe {
            self.context.driver.function_attribute(&mut value, attribute as u32, function.0)
        }?;
        Ok(value)
    }

    /// Sets an attribute of one of its functions.
    pub(super) fn set_attribute(
        &self,
        function: Function,
        attribute: CUfunction_attribute,
        value: i32,
    ) -> Result<(), Failure> {
        // SAFETY: the function is alive as its module is.
        unsafe { self.context.driver.set_function_attribute(function.0, attribute as u32, value) }
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: loaded in `new` and unloaded once.
        let _ = unsafe { self.context.driver.module_unload(self.handle) };
    }
}
