use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::checkpoint::Refusal;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a checkpoint could not be read, quantized or exported.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused.
    #[error("cannot {action} `{}`: {cause}{}", .path.display(), advice(.cause))]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        /// On which file or directory.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
    /// The checkpoint is not one that can be used.
    #[error("`{}` {refusal}", .path.display())]
    Checkpoint {
        /// The directory, as it was given.
        path: PathBuf,
        /// What is wrong with it, and what to do.
        refusal: Box<Refusal>,
    },
    /// The GGUF file is not one that can be used.
    #[error("`{}` {refusal}", .path.display())]
    Gguf {
        /// The file, or the part of a split one.
        path: PathBuf,
        /// What is wrong with it, and what to do.
        refusal: Box<crate::gguf::Refusal>,
    },
    /// A weight can't be stored as it was asked for.
    #[error("tensor `{tensor}` can't be quantized: {why}")]
    Quantize {
        /// Canonical name.
        tensor: String,
        /// What is wrong with it.
        why: String,
    },
    /// The GPU that quantizes failed in the middle of it.
    #[error(
        "tensor `{tensor}` was not quantized: {cause}; run the same command again, or on the CPU \
         with `--device cpu`"
    )]
    OnGpu {
        /// Canonical name.
        tensor: String,
        /// What the runtime says of the GPU.
        cause: gemma4_runtime::Error,
    },
    /// There is no recipe of that name.
    #[error("there is no recipe `{name}`; recipes are: {known}, and files that end in .toml")]
    UnknownRecipe {
        /// As it was asked for.
        name: String,
        /// Those that exist, comma separated.
        known: String,
    },
    /// A recipe's file can't be used.
    #[error("recipe `{}`, line {line}: {why}", .path.display())]
    Recipe {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// What is wrong there, with the key.
        why: String,
    },
    /// The output directory holds something already.
    #[error("output directory `{}` is not empty; choose another or pass --overwrite", .path.display())]
    OutputNotEmpty {
        /// The directory.
        path: PathBuf,
    },
    /// Overwriting would remove what is not ours.
    #[error(
        "`{}` holds `{entry}`, which is no part of a bundle, so --overwrite leaves it alone; \
         choose another directory, or remove it yourself",
        .path.display()
    )]
    OutputForeign {
        /// The directory.
        path: PathBuf,
        /// A file in it that a bundle has not.
        entry: String,
    },
    /// Renaming a file to this name would remove what stands there.
    #[error("`{}` is {what}, which is not overwritten; choose another name", .path.display())]
    OutputNotFile {
        /// The name that a file was to get.
        path: PathBuf,
        /// What has it: `a directory`, ….
        what: &'static str,
    },
    /// Two processes would write one file.
    #[error("`{}` is being written by another process; wait for its end", .path.display())]
    OutputBusy {
        /// The file or directory that the other process has not finished.
        path: PathBuf,
    },
    /// Writing there would destroy what is being read.
    #[error("output directory `{}` holds the checkpoint itself; choose another", .path.display())]
    OutputIsSource {
        /// The directory.
        path: PathBuf,
    },
    /// It can't be renamed.
    #[error(
        "output directory `{}` is a mount point, which can't be replaced as a whole; name a \
         directory inside it",
        .path.display()
    )]
    OutputIsMount {
        /// The directory.
        path: PathBuf,
    },
    /// What was made breaks a rule of the file format.
    #[error(transparent)]
    Format(#[from] gemma4_format::Error),
    /// config.json is not that of a model that can be exported.
    #[error(transparent)]
    Config(#[from] crate::model::config::ConfigError),
    /// generation_config.json can't be used.
    #[error("generation_config.json: {why}")]
    GenerationConfig {
        /// What is wrong with it.
        why: String,
    },
    /// The model could not be traced: weights are missing or of other shapes.
    #[error(transparent)]
    Trace(#[from] crate::trace::Error),
    /// There is no GPU code for the model, or no compiler.
    #[error(transparent)]
    Lower(#[from] crate::lower::Error),
    /// The runtime refused or failed.
    #[error(transparent)]
    Runtime(#[from] gemma4_runtime::Error),
    /// Two executions of one model differ.
    #[error("the runtime's logits differ from candle's by {difference}, more than {tolerance}")]
    Disagrees {
        /// Largest difference of a logit.
        difference: f32,
        /// Largest that is accepted.
        tolerance: f32,
    },
    /// A flag has a value that can't be.
    #[error("{flag}: {why}")]
    Flag {
        /// The flag.
        flag: &'static str,
        /// What is wrong with its value.
        why: String,
    },
    /// Ctrl-C, or a request to terminate.
    #[error("interrupted")]
    Interrupted,
}

impl Error {
    /// Adds the file and what was tried to an error of the system, for `map_err`.
    pub fn io(action: &'static str, path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> Self {
        let path = path.as_ref().to_owned();
        move |cause| Self::Io { action, path, cause }
    }

    /// The exit code that a command ends with.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Interrupted => 130,
            Error::Flag { .. } | Error::UnknownRecipe { .. } => 2,
            Error::OnGpu { cause, .. } => cause.class().code(),
            Error::Runtime(error) => error.class().code(),
            _ => 1,
        }
    }
}

fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull => "; free some space or choose another directory",
        io::ErrorKind::PermissionDenied => "; check its permissions",
        io::ErrorKind::UnexpectedEof => "; the file changed while it was read",
        _ => "",
    }
}
