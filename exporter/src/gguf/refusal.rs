use std::path::Path;

use thiserror::Error;

/// Why a GGUF file is not used. Each sentence follows the file's path.
#[derive(Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// Other bytes.
    #[error("is no GGUF file: it does not begin with `GGUF`")]
    NotGguf,
    /// A placeholder instead of the file.
    #[error("is a Git LFS pointer; fetch the file with `git lfs pull`")]
    LfsPointer,
    /// For machines of the other byte order.
    #[error("is a big-endian GGUF file; convert the model to a little-endian one")]
    BigEndian,
    /// A version that this build does not read.
    #[error("has GGUF version {0}, and this build reads 2 and 3; convert the model again")]
    Version(u32),
    /// The file ends early.
    #[error(
        "is truncated: {what} needs {need} bytes from byte {at} on, and the file ends after \
         {have}; incomplete download?"
    )]
    Truncated {
        /// What is cut off.
        what: String,
        /// Where it begins.
        at: u64,
        /// How many bytes it has.
        need: u64,
        /// Length of the file.
        have: u64,
    },
    /// The header can't be.
    #[error("is malformed: {what} {why}")]
    Malformed {
        /// A key, a tensor or the header.
        what: String,
        /// What is wrong with it.
        why: String,
    },
    /// A key that is needed is not there.
    #[error("lacks the key `{key}`; convert the model again with a current converter")]
    MissingKey {
        /// The key.
        key: String,
    },
    /// A key has a value that can't be used.
    #[error("has a `{key}` that can't be used: {why}")]
    Key {
        /// The key.
        key: String,
        /// What is wrong with it.
        why: String,
    },
    /// Another model.
    #[error("is a model of architecture `{found}`; this exporter reads `gemma4`")]
    Architecture {
        /// As the file names it.
        found: String,
    },
    /// A feature of other family members.
    #[error("has {feature} (`{key}`), which are not supported yet")]
    Feature {
        /// In words.
        feature: &'static str,
        /// The key or tensor that shows it.
        key: String,
    },
    /// A tensor of a type that has no exact encoding here.
    #[error(
        "has `{tensor}` as {found}, which is not supported; take a file of another quantization, \
         such as Q4_0, Q4_K_M, Q5_K_M, Q6_K, Q8_0 or BF16"
    )]
    Type {
        /// The tensor.
        tensor: String,
        /// Its type.
        found: String,
    },
    /// Part of a split model is not there.
    #[error("is a part of a split model, of which `{file}` is missing; incomplete download?")]
    MissingSplit {
        /// The first one missing.
        file: String,
    },
    /// The parts of a split model do not fit each other.
    #[error("does not fit the other parts of its split model: {why}")]
    Split {
        /// How that shows.
        why: String,
    },
    /// One name, two tensors.
    #[error("has the tensor `{tensor}` a second time")]
    Duplicate {
        /// As the file names it.
        tensor: String,
    },
    /// A tensor that the model needs is not there.
    #[error("lacks the tensor `{tensor}`; is it a vocabulary without weights?")]
    MissingTensor {
        /// As the file would name it.
        tensor: String,
    },
    /// Tensors that nothing uses: using the rest would be another model.
    #[error("has the tensor `{tensor}`, which this model does not use")]
    UnknownTensor {
        /// As the file names it.
        tensor: String,
    },
    /// A tensor has numbers that can't be.
    #[error("has a tensor `{tensor}` that can't be used: {why}")]
    Tensor {
        /// As the file names it.
        tensor: String,
        /// What is wrong with it.
        why: String,
    },
}

impl Refusal {
    /// The error that says this of the file `path`.
    pub fn at(self, path: &Path) -> crate::Error {
        crate::Error::Gguf { path: path.to_owned(), refusal: Box::new(self) }
    }

    pub(super) fn key(key: &str, why: impl Into<String>) -> Self {
        Self::Key { key: key.to_owned(), why: why.into() }
    }
}
