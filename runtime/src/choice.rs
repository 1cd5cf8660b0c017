//! Which device runs a program.

use std::str::FromStr;
use std::sync::Arc;

use crate::cpu::{self, Cpu};
use crate::cuda::{self, Calls, Cuda, Weights};
use crate::program::Progress;
use crate::roofline::Speed;
use crate::{Device, Error, LoadedProgram, Result};

/// What a user asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    /// A GPU if there is one and the program has code for it, else the CPU.
    Auto,
    /// The host's processor.
    Cpu,
    /// A GPU, by index or UUID; the first where nothing is said.
    Cuda(Option<String>),
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once(':') {
            None if text == "auto" => Ok(DeviceChoice::Auto),
            None if text == "cpu" => Ok(DeviceChoice::Cpu),
            None if text == "cuda" => Ok(DeviceChoice::Cuda(None)),
            Some(("cuda", which)) if !which.is_empty() => {
                Ok(DeviceChoice::Cuda(Some(which.to_owned())))
            }
            _ => Err("a device is auto, cpu, cuda, cuda:N or cuda:GPU-UUID".to_owned()),
        }
    }
}

/// A program on the device that was chosen.
pub enum OpenDevice {
    /// On the host's processor.
    Cpu(Cpu),
    /// On a GPU.
    Cuda(Cuda),
}

impl OpenDevice {
    /// What sessions are opened on.
    pub fn device(&self) -> &dyn Device {
        match self {
            OpenDevice::Cpu(cpu) => cpu,
            OpenDevice::Cuda(cuda) => cuda,
        }
    }

    /// Measures how fast the device reads weights and multiplies; `None` if a GPU's program has no
    /// kernels for that.
    ///
    /// # Errors
    /// [`Error::Device`] if the device fails.
    pub fn speed(&self) -> Result<Option<Speed>> {
        match self {
            OpenDevice::Cpu(cpu) => Ok(Some(cpu.speed())),
            OpenDevice::Cuda(cuda) => cuda.speed(),
        }
    }

    /// The GPU; `None` on the CPU.
    pub fn cuda(&self) -> Option<&Cuda> {
        match self {
            OpenDevice::Cpu(_) => None,
            OpenDevice::Cuda(cuda) => Some(cuda),
        }
    }

    /// Calls of the GPU's driver so far; `None` on the CPU.
    pub fn calls(&self) -> Option<Calls> {
        match self {
            OpenDevice::Cpu(_) => None,
            OpenDevice::Cuda(cuda) => Some(cuda.calls()),
        }
    }
}

impl DeviceChoice {
    /// Brings a mapped program onto the device and verifies its weights on the way.
    ///
    /// `options` are for a GPU, `cpu` for the CPU. With [`DeviceChoice::Auto`], `note` is told why a GPU that the
    /// program has code for is not used. That memory is short is never a reason for the CPU.
    ///
    /// # Errors
    /// [`Error::Device`] if there is no such device, or the program has no code for it;
    /// [`Error::Memory`] if it does not fit; [`Error::Corrupted`] if weights are damaged.
    pub fn open(
        &self,
        program: Arc<LoadedProgram>,
        options: cuda::Options,
        cpu: cpu::Options,
        progress: Progress<'_>,
        note: &dyn Fn(&str),
    ) -> Result<OpenDevice> {
        let which = match self {
            DeviceChoice::Cpu => None,
            DeviceChoice::Cuda(which) => Some(which.as_deref()),
            DeviceChoice::Auto if program.file().plans().is_empty() => None,
            DeviceChoice::Auto => match cuda::available(program.file(), None) {
                Ok(_) => Some(None),
                Err(why) => {
                    note(&format!("using the CPU: {why}"));
                    None
                }
            },
        };
        if let Some(which) = which {
            if cpu.activations != cpu::Activations::default() {
                let why = "activations of 8 bits are for the CPU (`--device cpu`), not for a GPU";
                match self {
                    DeviceChoice::Auto => note(why),
                    _ => return Err(Error::Device(why.to_owned())),
                }
            }
            return Ok(OpenDevice::Cuda(Cuda::open(program, which, options, progress)?));
        }
        if options.weights != Weights::File {
            let why = "random weights are made on a GPU; the CPU needs the data file";
            return Err(Error::Device(why.to_owned()));
        }
        program.verify_data(progress)?;
        Ok(OpenDevice::Cpu(Cpu::with_options(program, cpu)?))
    }
}
