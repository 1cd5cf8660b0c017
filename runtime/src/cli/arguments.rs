use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;

use super::{Progress, note};
use crate::{DeviceChoice, LoadedProgram, OpenDevice, Result, cuda};

/// Where a program lies.
#[derive(Args, Clone, Debug)]
pub struct Files {
    /// The program, written by gemma4-export
    #[arg(long = "model_path", alias = "model-path", value_name = "FILE.pte")]
    pub model_path: PathBuf,
    /// Its weights
    #[arg(long = "data_path", alias = "data-path", value_name = "FILE.ptd")]
    pub data_path: PathBuf,
}

/// Where a program runs, and what it makes room for there.
#[derive(Args, Clone, Debug)]
pub struct Placement {
    /// Tokens of prompt and answer to make room for; by default all that the program allows
    #[arg(long = "max_context", alias = "max-context", value_name = "N")]
    pub max_context: Option<u32>,
    /// On a GPU: conversations to make room for, each with a context of its own
    #[arg(
        long = "max_sessions",
        alias = "max-sessions",
        default_value_t = 1,
        value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub max_sessions: u32,
    /// auto, cpu, cuda, cuda:N or cuda:GPU-UUID
    #[arg(long, default_value = "auto", value_name = "DEVICE")]
    pub device: DeviceChoice,
    /// On a GPU: launch kernels one by one instead of as a graph, for debuggers
    #[arg(long = "no_graphs", alias = "no-graphs")]
    pub no_graphs: bool,
}

impl Placement {
    /// Brings the weights of a mapped program to the device; with a bar, and notes, on stderr
    /// unless `quiet`.
    ///
    /// # Errors
    /// Those of [`DeviceChoice::open`].
    pub fn open(&self, program: Arc<LoadedProgram>, quiet: bool) -> Result<OpenDevice> {
        let bar = if quiet { Progress::hidden() } else { Progress::bytes("loading") };
        let options = cuda::Options {
            max_context: self.max_context,
            sessions: self.max_sessions,
            graphs: !self.no_graphs,
            ..cuda::Options::default()
        };
        let progress = |done, total| bar.set(done, total);
        let note = |text: &str| {
            if !quiet {
                note(text);
            }
        };
        self.device.open(program, options, &progress, &note)
    }
}
