//! The GPUs of this machine, and the context in which one is used.

#![allow(unsafe_code, reason = "the driver is called through its C interface")]

use std::ffi::c_char;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{CUcontext, CUdevice, CUdevice_attribute as Attribute, CUuuid};
use gemma4_format::plan::Plan;

use super::driver::{Driver, Failure};
use super::target::Capability;
use crate::{Error, Result};

/// A GPU and what is known of it before it is used.
#[derive(Clone)]
pub(super) struct Gpu {
    pub(super) driver: &'static Driver,
    device: CUdevice,
    pub(super) index: u32,
    pub(super) name: String,
    /// `GPU-` and the bytes in hex, as `nvidia-smi -L` shows it.
    uuid: String,
    pub(super) capability: Capability,
    pub(super) multiprocessors: u32,
    /// Most shared memory of a block, in bytes.
    pub(super) shared_memory: u32,
}

impl Gpu {
    /// Finds a GPU by its index or UUID, which may be shortened; the first if nothing is said.
    ///
    /// # Errors
    /// [`Error::Device`] if there is no driver, or no such GPU.
    pub(super) fn find(which: Option<&str>) -> Result<Self> {
        let all = Self::list()?;
        let Some(which) = which else {
            let none = || Error::Device("the NVIDIA driver shows no GPU".to_owned());
            return all.into_iter().next().ok_or_else(none);
        };
        let found = select(which, &all.iter().map(|g| g.uuid.as_str()).collect::<Vec<_>>());
        match found {
            Some(index) => Ok(all[index].clone()),
            None => {
                let known: Vec<String> =
                    all.iter().map(|g| format!("{} {} {}", g.index, g.uuid, g.name)).collect();
                let known = known.join("; ");
                Err(Error::Device(format!(
                    "`cuda:{which}` is no GPU of this machine, or several; it has: {known}"
                )))
            }
        }
    }

    fn list() -> Result<Vec<Self>> {
        let driver = Driver::get()?;
        let query = || {
            let mut count = 0;
            // SAFETY: `count` is valid for writes.
            unsafe { driver.device_count(&mut count) }?;
            (0..count).map(|index| Self::query(driver, index)).collect::<Result<_, Failure>>()
        };
        query().map_err(|failure| {
            let why = driver.explain(failure);
            Error::Device(format!("cannot ask for the GPUs of this machine ({why})"))
        })
    }

    fn query(driver: &'static Driver, index: i32) -> Result<Self, Failure> {
        let mut device = 0;
        let mut name: [c_char; 128] = [0; 128];
        let mut uuid = CUuuid { bytes: [0; 16] };
        // SAFETY: all pointers are valid for writes of the sizes given.
        unsafe {
            driver.device(&mut device, index)?;
            driver.device_name(name.as_mut_ptr(), name.len() as i32 - 1, device)?;
            driver.device_uuid(&mut uuid, device)?;
        }
        let attribute = |attribute: Attribute| {
            let mut value = 0;
            // SAFETY: `value` is valid for writes.
            unsafe { driver.device_attribute(&mut value, attribute as u32, device) }?;
            Ok(u32::try_from(value).unwrap_or(0))
        };
        let name = name.iter().map(|c| *c as u8).take_while(|c| *c != 0).collect::<Vec<u8>>();
        Ok(Self {
            driver,
            device,
            index: index as u32,
            name: String::from_utf8_lossy(&name).into_owned(),
            uuid: format_uuid(uuid.bytes.map(|c| c as u8)),
            capability: Capability {
                major: attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                minor: attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            },
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_memory: attribute(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            )?,
        })
    }

    /// What went wrong, in one sentence: `what` it failed in, and the kernel of `plan` if it was
    /// a launch.
    pub(super) fn complain(&self, plan: &Plan, what: &str, failure: Failure) -> String {
        let kernel = failure.kernel().and_then(|id| plan.kernels.get(id as usize));
        let kernel = kernel.map_or(String::new(), |k| format!(", kernel `{}`", k.symbol));
        let why = self.driver.explain(failure);
        let advice = match failure.is_out_of_memory() {
            true => {
                "; free memory of the GPU, which other processes may hold, or use the CPU with \
                     `--device cpu`"
            }
            false => "",
        };
        format!("{} failed in {what}{kernel} ({why}){advice}", self.describe())
    }

    /// The device and its name, for reports.
    pub(super) fn describe(&self) -> String {
        format!("cuda:{} {}", self.index, self.name)
    }
}

/// The index of the one GPU that is meant.
fn select(which: &str, uuids: &[&str]) -> Option<usize> {
    if let Ok(index) = which.parse::<usize>() {
        return (index < uuids.len()).then_some(index);
    }
    let wanted = hex_digits(which)?;
    let mut matching = (0..uuids.len())
        .filter(|i| hex_digits(uuids[*i]).is_some_and(|digits| digits.starts_with(&wanted)));
    let first = matching.next()?;
    matching.next().is_none().then_some(first)
}

/// The digits of `GPU-…` or `MIG-…`, if there are any.
fn hex_digits(uuid: &str) -> Option<String> {
    let digits = uuid.strip_prefix("GPU-").or_else(|| uuid.strip_prefix("MIG-"))?;
    let digits = digits.replace('-', "").to_ascii_lowercase();
    (!digits.is_empty() && digits.bytes().all(|b| b.is_ascii_hexdigit())).then_some(digits)
}

fn format_uuid(bytes: [u8; 16]) -> String {
    let mut text = "GPU".to_owned();
    for (at, byte) in bytes.iter().enumerate() {
        if matches!(at, 0 | 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

/// The primary context of a GPU, released when dropped.
///
/// Whatever lives in it holds it, so it goes last.
pub(super) struct Context {
    pub(super) driver: &'static Driver,
    device: CUdevice,
    handle: CUcontext,
}

// SAFETY: the driver's contexts may be used from any thread.
unsafe impl Send for Context {}
// SAFETY: as above, and from several at once.
unsafe impl Sync for Context {}

impl Context {
    /// Makes the context and binds it to the calling thread.
    pub(super) fn new(gpu: &Gpu) -> Result<Arc<Self>, Failure> {
        let mut handle = ptr::null_mut();
        // SAFETY: `handle` is valid for writes, and the driver gave the device.
        unsafe { gpu.driver.context_retain(&mut handle, gpu.device) }?;
        let context = Self { driver: gpu.driver, device: gpu.device, handle };
        context.bind()?;
        Ok(Arc::new(context))
    }

    /// Makes it the context of the calling thread, in which all calls of the driver act.
    pub(super) fn bind(&self) -> Result<(), Failure> {
        // SAFETY: the context is alive.
        unsafe { self.driver.context_set(self.handle) }
    }

    /// Free bytes of the GPU's memory.
    pub(super) fn free_memory(&self) -> Result<u64, Failure> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are valid for writes.
        unsafe { self.driver.memory_info(&mut free, &mut total) }?;
        Ok(free as u64)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once in `new`; nothing that lives in it is left.
        let _ = unsafe { self.driver.context_release(self.device) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "GPU-01234567-89ab-cdef-0123-456789abcdef";
    const B: &str = "GPU-01234567-0000-cdef-0123-456789abcdef";

    #[test]
    fn uuids_are_written_as_the_driver_tools_do() {
        let bytes = [
            0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef, 0x01, 0x23, 0x45, 0x67, 0x89, 0xab,
            0xcd, 0xef,
        ];
        assert_eq!(format_uuid(bytes), A);
    }

    #[test]
    fn a_gpu_is_chosen_by_index_or_uuid() {
        let all = [A, B];
        assert_eq!(select("0", &all), Some(0));
        assert_eq!(select("1", &all), Some(1));
        assert_eq!(select("2", &all), None);
        assert_eq!(select(A, &all), Some(0));
        assert_eq!(select(&B.replace("abcdef", "ABCDEF"), &all), Some(1));
        assert_eq!(select("GPU-01234567-0", &all), Some(1));
        assert_eq!(select("GPU-01234567", &all), None, "two match");
        for text in ["", "-1", "GPU-", "GPU-xyz", "first", "01234567"] {
            assert_eq!(select(text, &all[..1]), None, "{text}");
        }
    }
}
