use thiserror::Error;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why bytes were refused. Callers add the file's path.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The file is something else, which is named.
    #[error("this is {what}, not {wanted}")]
    WrongKind {
        /// What the file was recognised as.
        what: &'static str,
        /// What was asked for.
        wanted: &'static str,
    },
    /// The file ends early.
    #[error("the file is truncated: {need} bytes are needed and it has {have}")]
    Truncated {
        /// Bytes that the file must have.
        need: u64,
        /// Bytes that it has.
        have: u64,
    },
    /// The file goes on after its end.
    #[error("{extra} bytes follow the end of the file's contents")]
    Trailing {
        /// Bytes too many.
        extra: u64,
    },
    /// Written by a newer exporter, or by an incompatible one.
    #[error(
        "format version {major}.{minor} is not supported (this build reads {}.0 to {}.{}); \
         use a matching version of gemma4, or export again",
        crate::pte::MAJOR,
        crate::pte::MAJOR,
        crate::pte::MINOR
    )]
    Version {
        /// Major version found.
        major: u16,
        /// Minor version found.
        minor: u16,
    },
    /// A feature that this build does not know.
    #[error("the file needs features that this build does not know (bits {bits:#x})")]
    Features {
        /// The unknown bits.
        bits: u64,
    },
    /// A checksum does not agree.
    #[error("{what} is corrupted: its checksum does not agree")]
    Corrupted {
        /// Which part of the file.
        what: String,
    },
    /// The bytes decode to nothing sensible.
    #[error("{what} is malformed: {why}")]
    Malformed {
        /// Which part of the file.
        what: String,
        /// What is wrong with it.
        why: String,
    },
    /// The program breaks a rule of its own types.
    #[error("invalid program: {place}: {why}")]
    Invalid {
        /// Method and node, weight or buffer.
        place: String,
        /// The rule that is broken.
        why: String,
    },
    /// A weight is not in the data file as the program says.
    #[error("weight `{name}`: {why}")]
    Weight {
        /// Name of the weight.
        name: String,
        /// What disagrees.
        why: String,
    },
    /// The two files do not belong together.
    #[error(
        "these are other weights than the program was exported with \
         (header digest {found}, the program wants {wanted}); export again or pass the right file"
    )]
    OtherWeights {
        /// First hex digits of the digest found.
        found: String,
        /// First hex digits of the digest that the program holds.
        wanted: String,
    },
}

impl Error {
    pub(crate) fn malformed(what: impl Into<String>, why: impl ToString) -> Self {
        Self::Malformed { what: what.into(), why: why.to_string() }
    }

    pub(crate) fn weight(name: impl Into<String>, why: impl ToString) -> Self {
        Self::Weight { name: name.into(), why: why.to_string() }
    }

    pub(crate) fn invalid(place: impl Into<String>, why: impl ToString) -> Self {
        Self::Invalid { place: place.into(), why: why.to_string() }
    }
}
