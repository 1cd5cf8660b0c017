//! Runs an exported program: reads a prompt, prints the answer as it is generated.

use std::process::ExitCode;

use clap::Parser;
use gemma4_runtime::cli::{self, answering};

pub(crate) fn main() -> ExitCode {
    let arguments = answering::Arguments::parse();
    cli::run(|| answering::run(arguments))
}
