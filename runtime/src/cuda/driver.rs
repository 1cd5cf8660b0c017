//! Every entry point of the NVIDIA driver that this crate calls.
//!
//! They are looked up once, together, so that a driver that lacks one is refused with a sentence
//! before anything runs. Their result is read as a plain number: newer drivers return codes that
//! no list of today names.

#![allow(unsafe_code, reason = "the driver is called through its C interface")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUgraph, CUgraphExec,
    CUlaunchConfig, CUmodule, CUstream, CUuuid,
};

use crate::{Error, Result};

/// Lowest version of the driver's interface that has all that is used here, as
/// `1000 · major + 10 · minor`.
const MINIMUM_VERSION: i32 = 12_000;
/// `CUDA_SUCCESS`.
const SUCCESS: u32 = 0;
/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: u32 = 2;
/// `CUDA_ERROR_NO_DEVICE`.
const NO_DEVICE: u32 = 100;
/// `CUDA_ERROR_INVALID_IMAGE`, `_NO_BINARY_FOR_GPU`, `_INVALID_PTX`, `_UNSUPPORTED_PTX_VERSION`.
const FOREIGN_CODE: [u32; 4] = [200, 209, 218, 222];
/// `CUDA_ERROR_NOT_READY`.
const NOT_READY: u32 = 600;

/// Declares the table of entry points, and one method for each that turns its result into a
/// [`Failure`].
macro_rules! entry_points {
    ($($name:ident = $symbol:literal ($($argument:ident: $type:ty),*);)*) => {
        struct Functions {
            $($name: unsafe extern "C" fn($($type),*) -> u32,)*
        }

        impl Functions {
            /// Looks everything up in the driver's library, or names what is missing.
            fn look_up() -> Result<Self, &'static str> {
                // SAFETY: the library was found present; loading the driver has no preconditions.
                let library = unsafe { sys::culib() };
                $(
                    // SAFETY: the signature is that of the driver's documented interface.
                    let symbol = unsafe {
                        library.get::<unsafe extern "C" fn($($type),*) -> u32>(
                            concat!($symbol, "\0").as_bytes(),
                        )
                    };
                    let $name = *symbol.map_err(|_| $symbol)?;
                )*
                Ok(Self { $($name,)* })
            }
        }

        impl Driver {
            $(
                #[doc = concat!("`", $symbol, "`.\n\n# Safety\nAs the driver's manual says.")]
                pub(super) unsafe fn $name(&self, $($argument: $type),*) -> Result<(), Failure> {
                    // SAFETY: as the caller promised.
                    let code = unsafe { (self.functions.$name)($($argument),*) };
                    if code == SUCCESS { Ok(()) } else { Err(Failure { call: $symbol, code, kernel: None }) }
                }
            )*
        }
    };
}

entry_points! {
    init = "cuInit"(flags: c_uint);
    version = "cuDriverGetVersion"(version: *mut c_int);
    error_name = "cuGetErrorName"(code: u32, name: *mut *const c_char);
    error_text = "cuGetErrorString"(code: u32, text: *mut *const c_char);

    device_count = "cuDeviceGetCount"(count: *mut c_int);
    device = "cuDeviceGet"(device: *mut CUdevice, index: c_int);
    device_name = "cuDeviceGetName"(name: *mut c_char, length: c_int, device: CUdevice);
    device_uuid = "cuDeviceGetUuid_v2"(uuid: *mut CUuuid, device: CUdevice);
    device_attribute = "cuDeviceGetAttribute"(value: *mut c_int, attribute: u32, device: CUdevice);

    context_retain = "cuDevicePrimaryCtxRetain"(context: *mut CUcontext, device: CUdevice);
    context_release = "cuDevicePrimaryCtxRelease_v2"(device: CUdevice);
    context_set = "cuCtxSetCurrent"(context: CUcontext);

    memory_info = "cuMemGetInfo_v2"(free: *mut usize, total: *mut usize);
    memory_allocate = "cuMemAlloc_v2"(address: *mut CUdeviceptr, bytes: usize);
    memory_free = "cuMemFree_v2"(address: CUdeviceptr);
    host_allocate = "cuMemHostAlloc"(pointer: *mut *mut c_void, bytes: usize, flags: c_uint);
    host_address =
        "cuMemHostGetDevicePointer_v2"(address: *mut CUdeviceptr, pointer: *mut c_void, flags: c_uint);
    host_free = "cuMemFreeHost"(pointer: *mut c_void);

    copy_to_device = "cuMemcpyHtoDAsync_v2"(
        to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream
    );
    copy_to_host = "cuMemcpyDtoHAsync_v2"(
        to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream
    );
    copy_on_device = "cuMemcpyDtoDAsync_v2"(
        to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream
    );
    fill = "cuMemsetD8Async"(to: CUdeviceptr, value: u8, bytes: usize, stream: CUstream);

    stream_create = "cuStreamCreate"(stream: *mut CUstream, flags: c_uint);
    stream_destroy = "cuStreamDestroy_v2"(stream: CUstream);
    stream_synchronize = "cuStreamSynchronize"(stream: CUstream);
    stream_query = "cuStreamQuery"(stream: CUstream);

    event_create = "cuEventCreate"(event: *mut CUevent, flags: c_uint);
    event_record = "cuEventRecord"(event: CUevent, stream: CUstream);
    event_elapsed =
        "cuEventElapsedTime"(milliseconds: *mut f32, start: CUevent, end: CUevent);
    event_destroy = "cuEventDestroy_v2"(event: CUevent);

    module_load = "cuModuleLoadData"(module: *mut CUmodule, image: *const c_void);
    module_unload = "cuModuleUnload"(module: CUmodule);
    module_function =
        "cuModuleGetFunction"(function: *mut CUfunction, module: CUmodule, name: *const c_char);
    function_attribute =
        "cuFuncGetAttribute"(value: *mut c_int, attribute: u32, function: CUfunction);
    set_function_attribute =
        "cuFuncSetAttribute"(function: CUfunction, attribute: u32, value: c_int);
    launch = "cuLaunchKernelEx"(
        config: *const CUlaunchConfig, function: CUfunction, arguments: *mut *mut c_void,
        extra: *mut *mut c_void
    );

    capture_begin = "cuStreamBeginCapture_v2"(stream: CUstream, mode: u32);
    capture_end = "cuStreamEndCapture"(stream: CUstream, graph: *mut CUgraph);
    graph_destroy = "cuGraphDestroy"(graph: CUgraph);
    graph_instantiate = "cuGraphInstantiateWithFlags"(
        executable: *mut CUgraphExec, graph: CUgraph, flags: c_ulonglong
    );
    graph_upload = "cuGraphUpload"(executable: CUgraphExec, stream: CUstream);
    graph_launch = "cuGraphLaunch"(executable: CUgraphExec, stream: CUstream);
    graph_release = "cuGraphExecDestroy"(executable: CUgraphExec);
}

/// The driver of this machine, started.
pub(super) struct Driver {
    functions: Functions,
    /// Version of its interface, as [`MINIMUM_VERSION`].
    version: i32,
}

/// What the driver answered instead of success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    call: &'static str,
    code: u32,
    /// The kernel that was to be launched, index into the plan's.
    kernel: Option<u32>,
}

impl Failure {
    /// The same, of the launch of a kernel.
    pub(super) fn of_kernel(self, kernel: u32) -> Self {
        Self { kernel: Some(kernel), ..self }
    }

    /// Index of the kernel that was to be launched, if it was a launch that failed.
    pub(super) fn kernel(self) -> Option<u32> {
        self.kernel
    }

    /// Whether the GPU, or the host for it, has too little memory.
    pub(super) fn is_out_of_memory(self) -> bool {
        self.code == OUT_OF_MEMORY
    }

    /// Whether the driver does not know what to do with machine code.
    pub(super) fn is_of_foreign_code(self) -> bool {
        FOREIGN_CODE.contains(&self.code)
    }
}

impl Driver {
    /// Loads and starts the driver, once in a process.
    ///
    /// # Errors
    /// [`Error::Device`] if there is no driver, it is too old, or it sees no GPU.
    pub(super) fn get() -> Result<&'static Self> {
        static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();
        DRIVER.get_or_init(Self::start).as_ref().map_err(|why| Error::Device(why.clone()))
    }

    fn start() -> Result<Self, String> {
        // SAFETY: looks for the library by its usual names; the driver may be loaded at any time.
        if !unsafe { sys::is_culib_present() } {
            return Err("no NVIDIA driver was found (libcuda); install one, or use the CPU with \
                        `--device cpu`"
                .to_owned());
        }
        let old = |why: String| {
            let (major, minor) = (MINIMUM_VERSION / 1000, MINIMUM_VERSION % 1000 / 10);
            format!(
                "the NVIDIA driver is too old: {why}; one for CUDA {major}.{minor} or later is needed"
            )
        };
        let functions = Functions::look_up().map_err(|name| old(format!("it has no `{name}`")))?;
        let mut driver = Self { functions, version: 0 };
        // SAFETY: the first call, as it must be.
        unsafe { driver.init(0) }.map_err(|failure| match failure.code {
            NO_DEVICE => {
                "the NVIDIA driver sees no GPU; use the CPU with `--device cpu`".to_owned()
            }
            _ => format!(
                "the NVIDIA driver cannot start ({}); use the CPU with `--device cpu`",
                driver.explain(failure)
            ),
        })?;
        let mut version = 0;
        // SAFETY: `version` is valid for writes.
        unsafe { driver.version(&mut version) }.map_err(|failure| driver.explain(failure))?;
        driver.version = version;
        if !driver.is_for(MINIMUM_VERSION) {
            return Err(old(format!("it is for CUDA {}", driver.describe())));
        }
        Ok(driver)
    }

    /// Whether it is for this version of CUDA or a later one, as `1000 · major + 10 · minor`.
    pub(super) fn is_for(&self, version: i32) -> bool {
        self.version >= version
    }

    /// Version of CUDA that it is for, for example `12.8`.
    pub(super) fn describe(&self) -> String {
        format!("{}.{}", self.version / 1000, self.version % 1000 / 10)
    }

    /// Which call failed and the driver's words for it.
    pub(super) fn explain(&self, failure: Failure) -> String {
        let mut name = std::ptr::null();
        let mut text = std::ptr::null();
        // SAFETY: both pointers are valid for writes; an unknown code fails and leaves null.
        let answers = unsafe {
            (self.error_name(failure.code, &mut name), self.error_text(failure.code, &mut text))
        };
        let word = |answer: Result<(), Failure>, word: *const c_char| {
            if answer.is_err() || word.is_null() {
                return "unknown".to_owned();
            }
            // SAFETY: not null, so a static string of the driver.
            unsafe { CStr::from_ptr(word) }.to_string_lossy().into_owned()
        };
        let (name, text) = (word(answers.0, name), word(answers.1, text));
        format!("{}: {name} ({}), {text}", failure.call, failure.code)
    }

    /// Whether all work of a stream is done.
    ///
    /// # Safety
    /// The stream is alive.
    pub(super) unsafe fn is_idle(&self, stream: CUstream) -> Result<bool, Failure> {
        // SAFETY: as the caller promised.
        match unsafe { self.stream_query(stream) } {
            Ok(()) => Ok(true),
            Err(Failure { code: NOT_READY, .. }) => Ok(false),
            Err(failure) => Err(failure),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_driver_is_told_so() {
        // SAFETY: only looks for the library.
        if unsafe { sys::is_culib_present() } {
            return;
        }
        let error = Driver::get().err().expect("there is no driver");
        assert_eq!(error.class().code(), 3);
        assert!(error.to_string().contains("no NVIDIA driver"), "{error}");
        assert!(error.to_string().contains("--device cpu"), "{error}");
    }
}
