//! Measures an exported program against other implementations.

use std::process::ExitCode;

use clap::Parser;
use gemma4_runtime::cli::{self, evaluation};

pub(crate) fn main() -> ExitCode {
    let arguments = evaluation::Arguments::parse();
    cli::run(|| evaluation::run(arguments))
}
