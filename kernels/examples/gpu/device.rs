//! A GPU through the driver alone: memory, modules, launches, graphs, time.

#![allow(unsafe_code, reason = "the driver is called through its C interface")]

use gemma4_format::Extents;
use std::ffi::{CStr, CString, c_char, c_void};
use std::path::Path;
use std::ptr;

use cudarc::driver::sys::{self, CUresult};
use gemma4_kernels::{ArgKind, Kernel};

/// A value of a kernel's argument.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Value {
    /// Device address.
    At(u64),
    /// Unsigned number.
    U32(u32),
    /// Float.
    F32(f32),
}

pub(crate) struct Gpu {
    stream: sys::CUstream,
    pub(crate) sms: u32,
}

/// Memory that lives until the process ends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buffer {
    pub(crate) at: u64,
    bytes: usize,
}

#[derive(Clone, Copy)]
pub(crate) struct Function(sys::CUfunction);

pub(crate) struct Graph(sys::CUgraphExec);

fn check(status: CUresult) {
    if status == CUresult::CUDA_SUCCESS {
        return;
    }
    let mut text: *const c_char = ptr::null();
    // SAFETY: the driver writes a pointer to a static string.
    unsafe { sys::cuGetErrorString(status, &mut text) };
    let text = if text.is_null() {
        "unknown".into()
    } else {
        // SAFETY: not null, so the driver's static string.
        unsafe { CStr::from_ptr(text) }.to_string_lossy()
    };
    panic!("CUDA: {status:?}: {text}");
}

impl Gpu {
    pub(crate) fn open() -> Self {
        let (mut device, mut context, mut stream) = (0, ptr::null_mut(), ptr::null_mut());
        let mut sms = 0;
        // SAFETY: every pointer is valid for writes; calls follow in the order the driver wants.
        unsafe {
            check(sys::cuInit(0));
            check(sys::cuDeviceGet(&mut device, 0));
            check(sys::cuDevicePrimaryCtxRetain(&mut context, device));
            check(sys::cuCtxSetCurrent(context));
            check(sys::cuStreamCreate(&mut stream, 1));
            let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
            check(sys::cuDeviceGetAttribute(&mut sms, attribute, device));
        }
        Self { stream, sms: sms as u32 }
    }

    /// Memory of `bytes` bytes, filled with NaNs.
    pub(crate) fn poisoned(&self, bytes: usize) -> Buffer {
        let mut at = 0;
        // SAFETY: `at` is valid for writes; the fill stays inside the allocation.
        unsafe {
            check(sys::cuMemAlloc_v2(&mut at, bytes.max(1)));
            check(sys::cuMemsetD8_v2(at, 0xff, bytes.max(1)));
            // Fills and copies run on another stream, and may still run when their calls return.
            check(sys::cuCtxSynchronize());
        }
        Buffer { at, bytes }
    }

    pub(crate) fn upload<T: Copy>(&self, data: &[T]) -> Buffer {
        let bytes = size_of_val(data);
        let buffer = self.poisoned(bytes);
        if bytes > 0 {
            // SAFETY: source and destination have `bytes` bytes.
            unsafe {
                check(sys::cuMemcpyHtoD_v2(buffer.at, data.as_ptr().cast(), bytes));
                check(sys::cuCtxSynchronize());
            }
        }
        buffer
    }

    pub(crate) fn write<T: Copy>(&self, buffer: Buffer, data: &[T]) {
        let bytes = size_of_val(data);
        assert!(bytes <= buffer.bytes);
        // SAFETY: the destination has at least `bytes` bytes.
        unsafe {
            check(sys::cuMemcpyHtoD_v2(buffer.at, data.as_ptr().cast(), bytes));
            check(sys::cuCtxSynchronize());
        }
    }

    pub(crate) fn download<T: Copy + Default>(&self, buffer: Buffer) -> Vec<T> {
        self.wait();
        let mut data = vec![T::default(); buffer.bytes / size_of::<T>()];
        let bytes = size_of_val(&data[..]);
        // SAFETY: source and destination have `bytes` bytes.
        unsafe { check(sys::cuMemcpyDtoH_v2(data.as_mut_ptr().cast(), buffer.at, bytes)) };
        data
    }

    pub(crate) fn load(&self, cubin: &Path, kernel: &Kernel) -> Function {
        let image = std::fs::read(cubin).unwrap_or_else(|e| panic!("{}: {e}", cubin.display()));
        let symbol = CString::new(kernel.symbol).unwrap();
        let (mut module, mut function) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: `image` is a whole cubin, made by this program's `compile`.
        unsafe {
            check(sys::cuModuleLoadData(&mut module, image.as_ptr().cast::<c_void>()));
            check(sys::cuModuleGetFunction(&mut function, module, symbol.as_ptr()));
            let attribute =
                sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            check(sys::cuFuncSetAttribute(function, attribute, kernel.shared as i32));
            let carveout =
                sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
            check(sys::cuFuncSetAttribute(function, carveout, 100));
        }
        Function(function)
    }

    /// Launches `kernel` for `rows` rows; early if its contract allows that.
    pub(crate) fn launch(&self, kernel: &Kernel, function: Function, rows: u32, values: &[Value]) {
        assert_eq!(values.len(), kernel.args.len(), "{}", kernel.symbol);
        let mut words = [0u64; 16];
        for ((word, value), arg) in words.iter_mut().zip(values).zip(&kernel.args) {
            *word = match (value, arg.kind) {
                (Value::At(at), ArgKind::Read | ArgKind::Write | ArgKind::Update) => *at,
                (Value::U32(n), ArgKind::U32) => u64::from(*n),
                (Value::F32(x), ArgKind::F32) => u64::from(x.to_bits()),
                _ => panic!("{}: {} gets {value:?}", kernel.symbol, arg.name),
            };
        }
        let mut pointers: Vec<*mut c_void> =
            words[..values.len()].iter_mut().map(|word| ptr::from_mut(word).cast()).collect();
        // SAFETY: an all-zero attribute is valid for every kind.
        let mut attribute: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
        attribute.id =
            sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attribute.value.programmaticStreamSerializationAllowed = 1;
        let grid = kernel.grid.map(|count| {
            let extents = Extents { rows, context: 0 };
            count.resolve(extents, self.sms).expect("a grid of 32 bits")
        });
        // SAFETY: as above.
        let mut config: sys::CUlaunchConfig = unsafe { std::mem::zeroed() };
        (config.gridDimX, config.gridDimY, config.gridDimZ) = (grid[0], grid[1], grid[2]);
        (config.blockDimX, config.blockDimY, config.blockDimZ) = (kernel.block, 1, 1);
        config.sharedMemBytes = kernel.shared;
        config.hStream = self.stream;
        config.attrs = &mut attribute;
        config.numAttrs = u32::from(kernel.dependent_launch);
        // SAFETY: the arguments were checked against the contract of the function.
        let status = unsafe {
            sys::cuLaunchKernelEx(&config, function.0, pointers.as_mut_ptr(), ptr::null_mut())
        };
        check(status);
    }

    pub(crate) fn wait(&self) {
        // SAFETY: the stream is alive.
        check(unsafe { sys::cuStreamSynchronize(self.stream) });
    }

    /// Captures what `body` launches.
    pub(crate) fn capture(&self, body: impl FnOnce()) -> Graph {
        let (mut graph, mut exec) = (ptr::null_mut(), ptr::null_mut());
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: begin and end stand on the same stream; pointers are valid for writes.
        unsafe {
            check(sys::cuStreamBeginCapture_v2(self.stream, mode));
            body();
            check(sys::cuStreamEndCapture(self.stream, &mut graph));
            check(sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0));
        }
        Graph(exec)
    }

    /// Milliseconds of a graph: the median of `runs`.
    pub(crate) fn time(&self, graph: &Graph, runs: usize) -> f32 {
        let (mut start, mut end) = (ptr::null_mut(), ptr::null_mut());
        let mut times: Vec<f32> = (0..=runs)
            .map(|_| {
                let mut time = 0.0;
                // SAFETY: graph, stream and events are alive.
                unsafe {
                    check(sys::cuEventCreate(&mut start, 0));
                    check(sys::cuEventCreate(&mut end, 0));
                    check(sys::cuEventRecord(start, self.stream));
                    check(sys::cuGraphLaunch(graph.0, self.stream));
                    check(sys::cuEventRecord(end, self.stream));
                    check(sys::cuEventSynchronize(end));
                    check(sys::cuEventElapsedTime_v2(&mut time, start, end));
                }
                time
            })
            .collect();
        times.remove(0);
        times.sort_by(f32::total_cmp);
        times[runs / 2]
    }
}
