use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use gemma4_format::Digest;

use super::{Progress, Usage, note};
use crate::cpu::{self, Activations};
use crate::{DeviceChoice, LoadedProgram, OpenDevice, ProgramFile, Result, cuda};

/// Where a program lies.
#[derive(Args, Clone, Debug)]
pub struct Files {
    /// The program, written by gemma4-export
    #[arg(long = "model_path", alias = "model-path", value_name = "FILE.pte")]
    pub model_path: PathBuf,
    /// Its weights
    #[arg(long = "data_path", alias = "data-path", value_name = "FILE.ptd")]
    pub data_path: PathBuf,
    /// Which program it has to be.
    #[command(flatten)]
    pub expected: Expected,
}

impl Files {
    /// Opens both files and makes sure that they are the program that was expected. The weights
    /// are not read yet.
    ///
    /// # Errors
    /// Those of [`LoadedProgram::map`] and [`Expected::check`].
    pub fn map(&self) -> anyhow::Result<LoadedProgram> {
        let program = LoadedProgram::map(&self.model_path, &self.data_path)?;
        self.expected.check(program.file())?;
        Ok(program)
    }
}

/// Which program a file has to hold.
#[derive(Args, Clone, Debug, Default)]
pub struct Expected {
    /// Refuse any other program than the one with this id, which gemma4-inspect tells
    #[arg(
        long = "expect_program",
        alias = "expect-program",
        value_name = "ID",
        value_parser = program_id
    )]
    pub expect_program: Option<Digest>,
}

impl Expected {
    /// Compares the id that was asked for, if one was, with that of a program. It covers every
    /// byte of the `.pte`, and through it the digest of every weight.
    ///
    /// # Errors
    /// If the file holds another program; both ids are in the sentence.
    pub fn check(&self, file: &ProgramFile) -> anyhow::Result<()> {
        match self.expect_program {
            Some(expected) if expected != *file.id() => anyhow::bail!(
                "`{}` holds the program {}, not the expected {}; it was not run",
                file.path().display(),
                hex(file.id()),
                hex(&expected)
            ),
            _ => Ok(()),
        }
    }
}

/// Reads an id as [`hex`] writes it.
fn program_id(text: &str) -> Result<Digest, Usage> {
    let wrong = || Usage("a program's id is 64 hexadecimal digits".to_owned());
    let mut id = Digest::default();
    if text.len() != 2 * id.len() || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(wrong());
    }
    for (byte, digits) in id.iter_mut().zip(text.as_bytes().chunks(2)) {
        let digits = str::from_utf8(digits).map_err(|_| wrong())?;
        *byte = u8::from_str_radix(digits, 16).map_err(|_| wrong())?;
    }
    Ok(id)
}

/// Bytes as hexadecimal digits, in lower case.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// How the CPU computes.
#[derive(Args, Clone, Copy, Debug)]
pub struct CpuArguments {
    /// On the CPU: what quantized weights are multiplied with
    #[arg(
        long = "cpu_activations",
        alias = "cpu-activations",
        value_enum,
        default_value_t,
        value_name = "TYPE"
    )]
    pub cpu_activations: Activations,
}

impl CpuArguments {
    /// With one thread for each processor.
    pub fn options(self) -> cpu::Options {
        cpu::Options { activations: self.cpu_activations, ..cpu::Options::default() }
    }
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
    /// How the CPU computes.
    #[command(flatten)]
    pub cpu: CpuArguments,
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
        self.device.open(program, options, self.cpu.options(), &progress, &note)
    }
}
