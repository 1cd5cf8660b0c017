use std::path::PathBuf;

use clap::Args;

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
