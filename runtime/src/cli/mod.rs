//! What the commands have in common: exit codes, progress, interrupts and how text is printed.

pub mod answering;
pub mod evaluation;

mod arguments;
mod faults;
mod interrupt;
mod progress;

use std::io::{self, Write};
use std::process::ExitCode;

pub use arguments::{CpuArguments, Expected, Files, Placement, hex};
pub use interrupt::Interrupt;
pub use progress::Progress;

use crate::text::TextError;
use crate::{Error, ExitClass};

/// Exit code after Ctrl-C.
pub const INTERRUPTED: u8 = 130;

/// Runs a command and turns its outcome into an exit code: an error is one line on stderr, and a
/// reader that closed the pipe is no error. So is one line what can't be returned as an error: that
/// the system has no memory left, or that the mapped weights have become shorter.
pub fn run(command: impl FnOnce() -> anyhow::Result<ExitCode>) -> ExitCode {
    faults::install();
    match command() {
        Ok(code) => code,
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("error: {}\n", sentence(&error)));
            ExitCode::from(exit_class(&error).code())
        }
    }
}

/// A mistake in how a command was called: exit code 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Usage(pub String);

fn exit_class(error: &anyhow::Error) -> ExitClass {
    for cause in error.chain() {
        if let Some(error) = cause.downcast_ref::<Error>() {
            return error.class();
        }
        if cause.is::<Usage>() {
            return ExitClass::Usage;
        }
        let no_thread = matches!(cause.downcast_ref(), Some(TextError::NoThread { .. }));
        if no_thread || cause.downcast_ref::<io::Error>().is_some_and(is_lack_of_memory) {
            return ExitClass::Resources;
        }
    }
    ExitClass::Failure
}

fn is_lack_of_memory(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::OutOfMemory
}

/// Whether a reader of stdout has closed it.
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe)
    })
}

/// Tells something that is no error, on stderr.
pub fn note(text: &str) {
    say(&format!("note: {text}\n"));
}

/// Writes to stderr. That it is full or closed is no reason to end, and nobody could be told.
pub fn say(text: &str) {
    let _ = io::stderr().write_all(text.as_bytes());
}

/// An error with its causes, less those that it has already named itself.
pub fn sentence(error: &anyhow::Error) -> String {
    error.chain().fold(String::new(), |said, cause| match cause.to_string() {
        cause if said.is_empty() => cause,
        cause if said.contains(&cause) => said,
        cause => format!("{said}: {cause}"),
    })
}

/// `1.5 GB`, `12.0 MB`: a size for people, in powers of ten.
pub fn human_bytes(bytes: u64) -> String {
    let units = ["B", "kB", "MB", "GB", "TB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", units[unit]) }
}
