//! How much memory the host has, and how much this process has used.

#![allow(unsafe_code, reason = "mapped pages are seen as numbers")]

use std::fs;
use std::marker::PhantomData;

use memmap2::MmapMut;

use crate::{Error, Result};

/// Largest resident set of this process so far in bytes, mapped files included; `None` where the
/// system does not tell.
pub fn peak_resident() -> Option<u64> {
    kib_field(&fs::read_to_string("/proc/self/status").ok()?, "VmHWM:")
}

/// Bytes that can be allocated without swapping, as far as the system tells: what the machine
/// has available, or what is left of the limit of this process's control group. Cached files,
/// mapped weights among them, count as available.
pub fn available() -> Option<u64> {
    let machine = kib_field(&fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:")?;
    Some(left_of_group().map_or(machine, |left| left.min(machine)))
}

fn left_of_group() -> Option<u64> {
    let read = |name: &str| fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok();
    let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
    let cached = read("memory.stat")?
        .lines()
        .find_map(|line| line.strip_prefix("file ")?.trim().parse::<u64>().ok())?;
    let used = number("memory.current")?.saturating_sub(cached);
    Some(number("memory.max")?.saturating_sub(used))
}

/// Fails if the system says that it has less than `need` bytes.
pub(crate) fn require(what: &str, need: u64) -> Result<()> {
    match available() {
        Some(available) if available < need => {
            Err(Error::Memory { what: what.to_owned(), need, available })
        }
        _ => Ok(()),
    }
}

fn kib_field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// A fixed number of numbers, zero at first. Pages take memory when they are first written, and
/// an allocation that the system refuses is an error, never an abort.
#[derive(Debug)]
pub(crate) struct Numbers<T> {
    pages: MmapMut,
    length: usize,
    kind: PhantomData<T>,
}

/// Numbers of float32.
pub(crate) type Floats = Numbers<f32>;

/// A number that any bits are a value of.
///
/// # Safety
/// Any bytes of its size must be a valid value, and no page may be aligned less than it is.
pub(crate) unsafe trait Plain: Copy {}

// SAFETY: any four bytes are a float32, which is aligned to four.
unsafe impl Plain for f32 {}
// SAFETY: any byte is an i8.
unsafe impl Plain for i8 {}

impl<T: Plain> Numbers<T> {
    /// Allocates `length` zeros.
    pub(crate) fn zeroed(what: &str, length: u64) -> Result<Self> {
        let need = length.saturating_mul(size_of::<T>() as u64);
        let refused = || Error::Memory { what: what.to_owned(), need, available: 0 };
        let bytes = usize::try_from(need).map_err(|_| refused())?;
        let pages = MmapMut::map_anon(bytes.max(1)).map_err(|_| refused())?;
        Ok(Self { pages, length: bytes / size_of::<T>(), kind: PhantomData })
    }

    pub(crate) fn as_slice(&self) -> &[T] {
        // SAFETY: the mapping is page-aligned, holds `length` numbers, is initialised (the
        // system hands out zeros), and any bytes are valid; it is borrowed as `self` is.
        unsafe { std::slice::from_raw_parts(self.pages.as_ptr().cast(), self.length) }
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: as in `as_slice`, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.pages.as_mut_ptr().cast(), self.length) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_a_field_of_proc() {
        assert_eq!(kib_field("A:  3 kB\nVmHWM:\t   17 kB\n", "VmHWM:"), Some(17 << 10));
        assert_eq!(kib_field("VmHWM: x kB\n", "VmHWM:"), None);
    }

    #[test]
    fn an_impossible_allocation_is_an_error() {
        for length in [1u64 << 58, u64::MAX] {
            let error = Floats::zeroed("the keys", length).expect_err("must be refused");
            assert_eq!(error.class().code(), 3);
        }
    }

    #[test]
    fn floats_start_as_zeros_and_keep_what_is_written() {
        let mut floats = Floats::zeroed("values", 1000).expect("small");
        assert!(floats.as_slice().iter().all(|x| *x == 0.0));
        floats.as_mut_slice()[999] = 2.0;
        assert_eq!((floats.as_slice().len(), floats.as_slice()[999]), (1000, 2.0));
    }
}
