//! Finding libnvrtc and calling it.

#![allow(unsafe_code, reason = "NVRTC is called through its C interface")]

use std::env;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr;

use libloading::Library;

use super::Error;
use crate::Source;

type Program = *mut c_void;
type Status = c_int;

/// What to take from a compiled program.
#[derive(Clone, Copy, Debug)]
pub(super) enum Product {
    Cubin,
    Ptx,
}

/// The entry points that are used, with the signatures of `nvrtc.h`.
struct Api {
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status,
    error: unsafe extern "C" fn(Status) -> *const c_char,
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Status,
    destroy: unsafe extern "C" fn(*mut Program) -> Status,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Status,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    log: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    cubin_size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    cubin: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    ptx_size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    ptx: unsafe extern "C" fn(Program, *mut c_char) -> Status,
}

/// A loaded compiler.
pub struct Nvrtc {
    api: Api,
    version: (i32, i32),
    include: Vec<PathBuf>,
    /// Owns the code that `api` points into.
    _library: Library,
}

impl Nvrtc {
    /// Loads the compiler of `GEMMA4_CUDA`, `CUDA_HOME` or `CUDA_PATH` if set, else of `.cuda`
    /// (made by `ci/cuda_toolchain.sh`) in the working directory or in one above the running
    /// program, else of `/usr/local/cuda`.
    pub fn find() -> Result<Self, Error> {
        let mut roots: Vec<PathBuf> = ["GEMMA4_CUDA", "CUDA_HOME", "CUDA_PATH"]
            .iter()
            .filter_map(|name| env::var_os(name).map(PathBuf::from))
            .collect();
        roots.push(PathBuf::from(".cuda"));
        if let Ok(program) = env::current_exe() {
            // `target/release/gemma4-export` of a checkout.
            roots.extend(program.ancestors().skip(1).take(3).map(|above| above.join(".cuda")));
        }
        roots.push(PathBuf::from("/usr/local/cuda"));
        roots
            .iter()
            .find_map(|root| library_in(root).map(|file| Self::load(&file, root)))
            .unwrap_or_else(|| {
                let looked = roots.iter().map(|root| root.display().to_string()).collect();
                Err(Error::NotFound { looked })
            })
    }

    /// Loads the library `file`; headers are those of the toolkit or Python site directory `root`.
    fn load(file: &Path, root: &Path) -> Result<Self, Error> {
        let unusable = |reason: String| Error::Unusable { path: file.to_owned(), reason };
        // SAFETY: libnvrtc's initialisers have no preconditions.
        let library = unsafe { Library::new(file) }.map_err(|error| unusable(error.to_string()))?;
        macro_rules! symbol {
            ($name:literal) => {
                // SAFETY: `Api` declares each function as `nvrtc.h` does, for every release.
                *unsafe { library.get($name) }.map_err(|error| unusable(error.to_string()))?
            };
        }
        let api = Api {
            version: symbol!(b"nvrtcVersion"),
            error: symbol!(b"nvrtcGetErrorString"),
            create: symbol!(b"nvrtcCreateProgram"),
            destroy: symbol!(b"nvrtcDestroyProgram"),
            compile: symbol!(b"nvrtcCompileProgram"),
            log_size: symbol!(b"nvrtcGetProgramLogSize"),
            log: symbol!(b"nvrtcGetProgramLog"),
            cubin_size: symbol!(b"nvrtcGetCUBINSize"),
            cubin: symbol!(b"nvrtcGetCUBIN"),
            ptx_size: symbol!(b"nvrtcGetPTXSize"),
            ptx: symbol!(b"nvrtcGetPTX"),
        };
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both pointers are valid for writes.
        if unsafe { (api.version)(&mut major, &mut minor) } != 0 {
            return Err(unusable("nvrtcVersion failed".to_owned()));
        }
        let include = ["include", "nvidia/cuda_runtime/include", "nvidia/cu13/include"];
        let include = include.into_iter().map(|folder| root.join(folder));
        let include = include.filter(|path| path.is_dir()).collect();
        Ok(Self { api, version: (major, minor), include, _library: library })
    }

    /// Version of the compiler, such as (12, 9).
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Compiles `text`; the error is the compiler's log.
    pub(super) fn compile(
        &self,
        name: &str,
        text: &str,
        headers: &[Source],
        options: &[String],
        product: Product,
    ) -> Result<Vec<u8>, String> {
        let c_string = |s: &str| CString::new(s).map_err(|_| "a NUL byte in the source".to_owned());
        let (name, text) = (c_string(name)?, c_string(text)?);
        let mut all = options.to_vec();
        all.extend(self.include.iter().map(|path| format!("--include-path={}", path.display())));
        let all = all.iter().map(|s| c_string(s)).collect::<Result<Vec<_>, _>>()?;
        let names = headers.iter().map(|h| c_string(h.name)).collect::<Result<Vec<_>, _>>()?;
        let texts = headers.iter().map(|h| c_string(h.text)).collect::<Result<Vec<_>, _>>()?;
        let pointers = |strings: &[CString]| strings.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
        let (all_at, names_at, texts_at) = (pointers(&all), pointers(&names), pointers(&texts));

        let mut program = Handle { api: &self.api, program: ptr::null_mut() };
        // SAFETY: all strings outlive the call, and the counts are the lengths of the arrays.
        let status = unsafe {
            (self.api.create)(
                &mut program.program,
                text.as_ptr(),
                name.as_ptr(),
                headers.len() as c_int,
                texts_at.as_ptr(),
                names_at.as_ptr(),
            )
        };
        self.check(status)?;
        // SAFETY: `program` was created above; the count is the length of the array.
        let status =
            unsafe { (self.api.compile)(program.program, all.len() as c_int, all_at.as_ptr()) };
        if status != 0 {
            let log = self.read(&program, self.api.log_size, self.api.log)?;
            return Err(String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned());
        }
        match product {
            Product::Cubin => self.read(&program, self.api.cubin_size, self.api.cubin),
            Product::Ptx => self.read(&program, self.api.ptx_size, self.api.ptx),
        }
    }

    /// Reads one of a program's outputs.
    fn read(
        &self,
        program: &Handle<'_>,
        size: unsafe extern "C" fn(Program, *mut usize) -> Status,
        get: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    ) -> Result<Vec<u8>, String> {
        let mut length = 0;
        // SAFETY: the program is alive and `length` is valid for writes.
        self.check(unsafe { size(program.program, &mut length) })?;
        let mut bytes = vec![0u8; length];
        // SAFETY: `bytes` has the length that the compiler asked for.
        self.check(unsafe { get(program.program, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }

    fn check(&self, status: Status) -> Result<(), String> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the function returns a static string for every status.
        let text = unsafe { CStr::from_ptr((self.api.error)(status)) };
        Err(text.to_string_lossy().into_owned())
    }
}

/// A program of the compiler, destroyed when dropped.
struct Handle<'a> {
    api: &'a Api,
    program: Program,
}

impl Drop for Handle<'_> {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: the program was created and is not used again.
            unsafe { (self.api.destroy)(&mut self.program) };
        }
    }
}

/// The compiler's library under a toolkit's root or a directory of Python packages.
fn library_in(root: &Path) -> Option<PathBuf> {
    let folders =
        ["lib64", "lib", "targets/x86_64-linux/lib", "nvidia/cuda_nvrtc/lib", "nvidia/cu13/lib"];
    let names = ["libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc.so"];
    folders
        .iter()
        .map(|folder| root.join(folder))
        .find_map(|folder| names.iter().map(|name| folder.join(name)).find(|file| file.is_file()))
}
