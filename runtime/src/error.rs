use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a program could not be loaded or run.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused a file.
    #[error("cannot {action} `{}`: {source}", path.display())]
    Io {
        /// What was tried: `open`, `read`, `map`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The answer of the operating system.
        source: io::Error,
    },
    /// The path names something that is no file.
    #[error("`{}` is {what}, not a file", path.display())]
    NoFile {
        /// The path.
        path: PathBuf,
        /// What stands there.
        what: &'static str,
    },
    /// The file's contents were refused.
    #[error("`{}`: {source}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// Why.
        source: gemma4_format::Error,
    },
    /// Stored bytes are not those that the program was exported with.
    #[error("`{}` is corrupted: {what}; copy or export it again", path.display())]
    Corrupted {
        /// The file.
        path: PathBuf,
        /// Which weight or region, and how that was noticed.
        what: String,
    },
    /// An id that the program has no embedding for.
    #[error("token {token} is outside the vocabulary of {vocabulary} tokens")]
    Token {
        /// The id.
        token: u32,
        /// Ids are below this.
        vocabulary: u32,
    },
    /// A call without tokens.
    #[error("the prompt has no tokens")]
    EmptyPrompt,
    /// More tokens than the session has room for.
    #[error(
        "{tokens} tokens do not fit: the context holds {context} tokens and {present} are in it; \
         shorten the prompt or choose a longer context"
    )]
    ContextFull {
        /// Tokens to be added.
        tokens: u64,
        /// Tokens that are there.
        present: u32,
        /// Tokens that there is room for.
        context: u32,
    },
    /// A context length that the program was not exported for.
    #[error("a context of {asked} tokens is not between 1 and the exported maximum of {maximum}")]
    Context {
        /// The length asked for.
        asked: u32,
        /// Longest context of the program.
        maximum: u32,
    },
    /// A prefill chunk that the program was not exported for.
    #[error("a prefill chunk of {asked} tokens is not between 1 and the exported {maximum}")]
    Chunk {
        /// The length asked for.
        asked: u32,
        /// Rows of the program's `prefill`.
        maximum: u32,
    },
    /// A call of `verify` with more tokens than the program was exported for.
    #[error("{asked} tokens are more than the {maximum} that one call of `verify` takes")]
    Verify {
        /// Tokens of the call.
        asked: u32,
        /// Rows of the program's `verify`.
        maximum: u32,
    },
    /// A sampling parameter outside its range.
    #[error("{name} = {value} is not {wanted}")]
    Sampling {
        /// Parameter.
        name: &'static str,
        /// Its value.
        value: f32,
        /// The range.
        wanted: &'static str,
    },
    /// Logits or a generation were asked for where no call has computed any.
    #[error("there is nothing to continue from: no prompt was read since the last change")]
    NoLogits,
    /// The host has less memory than the session needs.
    #[error(
        "{what} needs {need} bytes of memory and {available} are available; \
         choose a shorter context"
    )]
    Memory {
        /// What was to be allocated.
        what: String,
        /// Bytes needed.
        need: u64,
        /// Bytes that the system says are free, 0 where it only refused.
        available: u64,
    },
    /// A session's file was refused, or could not be written.
    #[error("the saved session can't be used: {why}")]
    SavedSession {
        /// What is wrong with it.
        why: String,
    },
    /// No usable device, or one that lacks something that the program needs.
    #[error("{0}")]
    Device(String),
}

/// What a command's exit code should say of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitClass {
    /// Anything else: 1.
    Failure,
    /// The command was called wrongly: 2.
    Usage,
    /// No usable device, or too little memory: 3.
    Resources,
}

impl ExitClass {
    /// The exit code.
    pub fn code(self) -> u8 {
        match self {
            ExitClass::Failure => 1,
            ExitClass::Usage => 2,
            ExitClass::Resources => 3,
        }
    }
}

impl Error {
    /// Which exit code a command should end with.
    pub fn class(&self) -> ExitClass {
        match self {
            Error::Context { .. }
            | Error::Chunk { .. }
            | Error::Verify { .. }
            | Error::Sampling { .. } => ExitClass::Usage,
            Error::Memory { .. } | Error::Device(_) => ExitClass::Resources,
            Error::Io { source, .. } if source.kind() == io::ErrorKind::OutOfMemory => {
                ExitClass::Resources
            }
            _ => ExitClass::Failure,
        }
    }

    pub(crate) fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { action, path: path.to_owned(), source }
    }

    pub(crate) fn format(path: &Path, source: gemma4_format::Error) -> Self {
        Self::Format { path: path.to_owned(), source }
    }
}
