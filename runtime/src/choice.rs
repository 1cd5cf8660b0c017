//! Which device runs a program.

use std::str::FromStr;
use std::sync::Arc;

use crate::cpu::Cpu;
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
            _ => Err("a device is auto, cpu, cuda, cuda:N or cuda:GPU-<uuid>".to_owned()),
        }
    }
}

impl DeviceChoice {
    /// Makes a program's weights reachable for the device chosen.
    ///
    /// # Errors
    /// [`Error::Device`] if there is no such device, or the program has no code for it.
    pub fn open(&self, program: Arc<LoadedProgram>) -> Result<Box<dyn Device>> {
        match self {
            DeviceChoice::Auto | DeviceChoice::Cpu => Ok(Box::new(Cpu::new(program)?)),
            DeviceChoice::Cuda(_) => Err(Error::Device(
                "this program has no code for a GPU; run it with --device cpu".to_owned(),
            )),
        }
    }
}
