//! What quantizes: the CPU, or a GPU. Both make the same bytes.

use std::path::PathBuf;

use gemma4_runtime::DeviceChoice;

use super::gpu::Gpu;
use super::{Quantized, Rows};
use crate::Result;

/// What a user asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuantizeOn {
    /// The device. [`DeviceChoice::Auto`] takes a GPU if there are one and a CUDA compiler.
    pub device: DeviceChoice,
    /// Code of the kernel for the GPU, a cubin or PTX, which then needs no compiler.
    pub kernel: Option<PathBuf>,
}

impl Default for QuantizeOn {
    fn default() -> Self {
        Self { device: DeviceChoice::Cpu, kernel: None }
    }
}

/// A device that is ready to quantize.
pub enum Quantizer {
    /// The host's processor.
    Cpu,
    /// A GPU.
    Gpu(Box<Gpu>),
}

impl QuantizeOn {
    /// Prepares the device. `note` is told which it is, and why it is no GPU where one would do.
    ///
    /// # Errors
    /// What a GPU lacks that was asked for: [`crate::Error::Runtime`], or an error of the file
    /// system for the kernel.
    pub fn open(&self, note: &dyn Fn(&str)) -> Result<Quantizer> {
        let which = match &self.device {
            DeviceChoice::Cpu => return Ok(Quantizer::Cpu),
            DeviceChoice::Auto => None,
            DeviceChoice::Cuda(which) => which.as_deref(),
        };
        match Gpu::open(which, self.kernel.as_deref()) {
            Ok(gpu) => {
                note(&format!("quantizing on {}", gpu.describe()));
                Ok(Quantizer::Gpu(Box::new(gpu)))
            }
            Err(why) if self.device == DeviceChoice::Auto => {
                note(&format!("quantizing on the CPU: {why}"));
                Ok(Quantizer::Cpu)
            }
            Err(why) => Err(why),
        }
    }
}

impl Quantizer {
    /// Quantizes all rows of a weight. `read` gives bytes from an offset on; `consume` gets blocks
    /// of rows in order.
    ///
    /// # Errors
    /// [`crate::Error::Quantize`] of the first row that has a number which is not finite, or too
    /// large for a scale; [`crate::Error::OnGpu`]; those of `read` and `consume`.
    pub(crate) fn quantize(
        &self,
        rows: Rows<'_>,
        read: impl Fn(u64, &mut [u8]) -> Result<()> + Sync,
        consume: impl FnMut(Quantized<'_>) -> Result<()> + Send,
    ) -> Result<()> {
        match self {
            Quantizer::Cpu => rows.quantize(read, consume),
            Quantizer::Gpu(gpu) => gpu.quantize(rows, read, consume),
        }
    }
}
