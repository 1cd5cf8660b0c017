//! Quantizes all rows of a weight on a GPU.
//!
//! Rows are cut into pieces. While one is read, others are copied and computed, and an earlier one
//! is written; the arithmetic is that of the CPU, see `kernels/cu/quantize.cu`.

#![allow(unsafe_code, reason = "a kernel writes where its arguments say")]

use std::collections::VecDeque;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use gemma4_format::Offset;
use gemma4_format::encoding::ZeroType;
use gemma4_kernels::compile::Nvrtc;
use gemma4_kernels::{Arch, QUANTIZED_ROW_BYTES, number_type, quantize, zero_type};
use gemma4_runtime::cuda::{Addresses, FoundGpu, Running, Sizes, Slot, Worker};
use rayon::prelude::*;

use super::report::Loss;
use super::{Method, Quantized, Rows};
use crate::{Error, Result};

/// Numbers of a piece.
const PIECE: u64 = 8 << 20;
/// Pieces at once: one is read, one is with the GPU, one is written.
const SLOTS: usize = 3;
/// Bytes that a thread reads at a time.
const READ: usize = 2 << 20;

/// A GPU with the kernel that quantizes.
pub struct Gpu {
    worker: Worker,
    /// Used again for the next weight.
    slots: Mutex<Vec<Slot>>,
}

impl Gpu {
    /// Finds a GPU and loads the kernel from a file, or compiles it for that GPU.
    pub(super) fn open(which: Option<&str>, kernel: Option<&Path>) -> Result<Self> {
        let found = FoundGpu::find(which)?;
        let image = match kernel {
            Some(file) => std::fs::read(file).map_err(Error::io("read", file))?,
            None => compile(found.capability()).map_err(|error| {
                let why = format!("{error}, or use the CPU with `--device cpu`");
                gemma4_runtime::Error::Device(why)
            })?,
        };
        let kernel = quantize();
        let worker = Worker::open(found, &image, kernel.symbol, kernel.block)?;
        Ok(Self { worker, slots: Mutex::default() })
    }

    pub(super) fn describe(&self) -> String {
        self.worker.describe()
    }

    /// As [`super::Quantizer::quantize`].
    pub(super) fn quantize(
        &self,
        rows: Rows<'_>,
        read: impl Fn(u64, &mut [u8]) -> Result<()> + Sync,
        mut consume: impl FnMut(Quantized<'_>) -> Result<()> + Send,
    ) -> Result<()> {
        let most = (PIECE / rows.quantizer.k as u64).clamp(1, rows.count);
        let on_gpu = |cause| Error::OnGpu { tensor: rows.quantizer.tensor.clone(), cause };
        let mut free =
            self.take_slots(Piece { rows, count: most as usize }.sizes()).map_err(on_gpu)?;
        let mut running = VecDeque::new();
        let mut next = 0;
        while next < rows.count || !running.is_empty() {
            let slot = if next < rows.count { free.pop() } else { None };
            let oldest = if slot.is_none() || free.is_empty() { running.pop_front() } else { None };
            let count = most.min(rows.count - next);
            let piece = Piece { rows, count: count as usize };
            let (started, done) = rayon::join(
                || {
                    slot.map(|mut slot| {
                        let input = &mut slot.input_mut()[..piece.count * rows.bytes()];
                        let offset = next * rows.bytes() as u64;
                        input
                            .par_chunks_mut(READ)
                            .enumerate()
                            .try_for_each(|(at, bytes)| read(offset + (at * READ) as u64, bytes))?;
                        piece.start(&self.worker, slot).map_err(on_gpu)
                    })
                },
                || {
                    oldest.map(|(first, piece, running): (u64, Piece<'_>, Running)| {
                        let slot = self.worker.finish(running).map_err(on_gpu)?;
                        consume(piece.quantized(first, &slot)?)?;
                        Ok::<_, Error>(slot)
                    })
                },
            );
            free.extend(done.transpose()?);
            if let Some(started) = started.transpose()? {
                running.push_back((next, piece, started));
                next += count;
            }
        }
        self.slots.lock().unwrap_or_else(PoisonError::into_inner).append(&mut free);
        Ok(())
    }

    /// Slots of at least that size.
    fn take_slots(&self, needed: Sizes) -> Result<Vec<Slot>, gemma4_runtime::Error> {
        let slots = std::mem::take(&mut *self.slots.lock().unwrap_or_else(PoisonError::into_inner));
        let known = slots.first().map(Slot::sizes).unwrap_or_default();
        if slots.len() == SLOTS && known.hold(needed) {
            return Ok(slots);
        }
        drop(slots);
        let sizes = Sizes {
            input: known.input.max(needed.input),
            scratch: known.scratch.max(needed.scratch),
            output: known.output.max(needed.output),
        };
        (0..SLOTS).map(|_| self.worker.slot(sizes)).collect()
    }
}

/// The kernel for a GPU of that compute capability.
fn compile((major, minor): (u32, u32)) -> Result<Vec<u8>, gemma4_kernels::compile::Error> {
    let (nvrtc, kernel) = (Nvrtc::find()?, quantize());
    let runs = |arch: &Arch| arch.capability().0 == major && arch.capability().1 <= minor;
    match Arch::ALL.into_iter().filter(runs).max_by_key(|arch| arch.capability()) {
        Some(arch) => nvrtc.cubin(&kernel, arch).map(|module| module.cubin),
        None => nvrtc.ptx(&kernel),
    }
}

/// Consecutive rows of a weight that go to the GPU together.
#[derive(Clone, Copy)]
struct Piece<'a> {
    rows: Rows<'a>,
    count: usize,
}

impl<'a> Piece<'a> {
    /// Where in a slot's output each part of the encoding begins, and then the sums of the rows.
    fn places(&self) -> (Vec<usize>, usize) {
        let mut end = 0;
        let mut place = |stride: &usize| {
            let begin = end;
            end += (self.count * stride).next_multiple_of(16);
            begin
        };
        (self.rows.strides.iter().map(&mut place).collect(), end)
    }

    fn sizes(&self) -> Sizes {
        let numbers = self.count * self.rows.quantizer.k;
        Sizes {
            input: self.count * self.rows.bytes(),
            // A byte for each code, and one for each zero point.
            scratch: numbers + numbers / self.rows.quantizer.group,
            output: self.places().1 + self.count * QUANTIZED_ROW_BYTES,
        }
    }

    fn start(&self, worker: &Worker, slot: Slot) -> Result<Running, gemma4_runtime::Error> {
        let Sizes { input, output, .. } = self.sizes();
        // SAFETY: the arguments are those of `quantize`, for as many rows as there are blocks; the
        // slot is as large as they need.
        unsafe { worker.start(slot, (input, output), self.count as u32, |at| self.arguments(at)) }
    }

    /// Those of [`quantize`].
    fn arguments(&self, at: Addresses) -> Vec<u64> {
        let weight = self.rows.quantizer;
        let (places, sums) = self.places();
        let part = |index: usize| at.output + places[index] as u64;
        let zero_bytes = at.scratch + (self.count * weight.k) as u64;
        let (codes, low) = if weight.bits == 8 { (part(0), 0) } else { (at.scratch, part(0)) };
        let (high, scales) = if weight.bits == 6 { (part(1), 2) } else { (0, 1) };
        let last = places.len() - 1;
        let zero_type = zero_type(weight.offset);
        let (zeros, nibbles) = match weight.offset {
            _ if last == scales => (0, 0),
            Offset::Zero(ZeroType::Nibble) => (zero_bytes, part(last)),
            _ => (part(last), 0),
        };
        vec![
            at.input,
            codes,
            low,
            high,
            part(scales),
            zeros,
            nibbles,
            at.output + sums as u64,
            weight.k as u64,
            weight.group as u64,
            weight.bits.into(),
            number_type(self.rows.dtype).into(),
            number_type(weight.scale).into(),
            // A `RowQuantizer` has no minimums.
            zero_type.unwrap_or_default().into(),
            u64::from(weight.method == Method::HalfQuadratic),
        ]
    }

    /// What came back.
    fn quantized<'s>(&self, first: u64, slot: &'s Slot) -> Result<Quantized<'s>> {
        let (places, sums) = self.places();
        let output = slot.output();
        let losses = output[sums..].as_chunks::<QUANTIZED_ROW_BYTES>().0[..self.count]
            .iter()
            .enumerate()
            .map(|(row, sums)| match loss(sums) {
                Some(loss) => Ok(loss),
                None => Err(self.refusal(first, row, slot.input())),
            })
            .collect::<Result<_>>()?;
        let part = |(place, stride): (&usize, &usize)| &output[*place..][..self.count * stride];
        let parts = places.iter().zip(self.rows.strides).map(part).collect();
        Ok(Quantized { first, parts, losses })
    }

    /// Why a row was refused, which the CPU can tell.
    fn refusal(&self, first: u64, row: usize, source: &[u8]) -> Error {
        let bytes = self.rows.bytes();
        let source = &source[row * bytes..][..bytes];
        let mut parts: Vec<Vec<u8>> = self.rows.strides.iter().map(|n| vec![0; *n]).collect();
        let row = first + row as u64;
        match self.rows.quantize_block(row, source, &mut parts) {
            Err(error) => error,
            Ok(_) => Error::OnGpu {
                tensor: self.rows.quantizer.tensor.clone(),
                cause: gemma4_runtime::Error::Device(format!(
                    "the GPU refuses row {row}, which the CPU does not"
                )),
            },
        }
    }
}

/// The sums of a row as the kernel writes them; `None` if it refused the row.
fn loss(sums: &[u8; QUANTIZED_ROW_BYTES]) -> Option<Loss> {
    let word = |at: usize| u32::from_le_bytes([sums[at], sums[at + 1], sums[at + 2], sums[at + 3]]);
    let double = |at| f64::from_bits(u64::from(word(at)) | u64::from(word(at + 4)) << 32);
    let loss = Loss { signal: double(0), noise: double(8), max_error: f32::from_bits(word(16)) };
    (word(20) == 0).then_some(loss)
}

#[cfg(test)]
mod tests {
    use gemma4_format::{DType, Encoding};

    use super::*;
    use crate::quantize::RowQuantizer;

    #[test]
    fn the_kernel_gets_a_place_for_each_part() {
        let arguments = |bits, offset, method| {
            let encoding = Encoding::Quantized { bits, group: 32, scale: DType::BF16, offset };
            let quantizer = RowQuantizer::new("w", &[3, 96], encoding, method).unwrap();
            let parts = encoding.parts("w", &[1, 96]).unwrap();
            let strides: Vec<usize> = parts.iter().map(|part| part.bytes() as usize).collect();
            let rows =
                Rows { quantizer: &quantizer, dtype: DType::BF16, count: 3, strides: &strides };
            let at = Addresses { input: 1 << 20, scratch: 2 << 20, output: 3 << 20 };
            Piece { rows, count: 3 }.arguments(at)
        };
        let (input, scratch, output) = (1 << 20, 2 << 20, 3 << 20);
        let (low, scales, nibbles, sums) = (output, output + 144, output + 176, output + 192);
        assert_eq!(
            arguments(4, Offset::Zero(ZeroType::Nibble), Method::MinMax),
            [input, scratch, low, 0, scales, scratch + 288, nibbles, sums, 96, 32, 4, 2, 2, 4, 0]
        );
        let (high, scales, sums) = (output + 144, output + 224, output + 256);
        assert_eq!(
            arguments(6, Offset::Symmetric, Method::MinMax),
            [input, scratch, low, high, scales, 0, 0, sums, 96, 32, 6, 2, 2, 5, 0]
        );
        let (scales, zeros, sums) = (output + 288, output + 320, output + 352);
        assert_eq!(
            arguments(8, Offset::Zero(ZeroType::BF16), Method::HalfQuadratic),
            [input, output, 0, 0, scales, zeros, 0, sums, 96, 32, 8, 2, 2, 2, 1]
        );
    }

    #[test]
    fn the_sums_of_a_row_are_read_as_they_are_written() {
        let mut sums = [0; QUANTIZED_ROW_BYTES];
        sums[..8].copy_from_slice(&2.5f64.to_le_bytes());
        sums[8..16].copy_from_slice(&0.1f64.to_le_bytes());
        sums[16..20].copy_from_slice(&0.3f32.to_le_bytes());
        let expected = Loss { signal: 2.5, noise: 0.1, max_error: 0.3 };
        assert_eq!(loss(&sums), Some(expected));
        sums[20] = 1;
        assert_eq!(loss(&sums), None);
    }
}
