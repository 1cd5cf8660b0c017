use std::path::Path;

use thiserror::Error;

/// Why a checkpoint is not used. Each sentence follows the checkpoint's path.
#[derive(Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// Nothing is there.
    #[error("does not exist")]
    Absent,
    /// A file instead of a directory.
    #[error("is a file; give the directory that holds it, with config.json beside the weights")]
    File,
    /// A GGUF file, or a directory of them.
    #[error(
        "is a GGUF checkpoint; give the file to gemma4-export with --gguf, or the Hugging Face \
         directory of the model (config.json, tokenizer.json, *.safetensors)"
    )]
    Gguf,
    /// A LoRA or another adapter.
    #[error(
        "is a LoRA adapter (it has adapter_config.json); merge it into its base model first, \
         for example with `merge_and_unload()` of peft, and give the merged checkpoint"
    )]
    Adapter,
    /// The download cache rather than a checkpoint in it.
    #[error("is a Hugging Face cache entry; give the directory below its `snapshots/`")]
    Cache,
    /// No config.json.
    #[error("has no config.json; a checkpoint is a directory with config.json and *.safetensors")]
    NoConfig,
    /// Weights only in PyTorch's pickle format.
    #[error(
        "has its weights only as PyTorch files (`{file}`); save it as safetensors first, \
         for example with `save_pretrained()` of transformers"
    )]
    PyTorch {
        /// One of them.
        file: String,
    },
    /// No weights at all.
    #[error("has neither model.safetensors nor model.safetensors.index.json; incomplete download?")]
    NoWeights,
    /// Shards without the index that lists them.
    #[error("has `{shard}` but no model.safetensors.index.json; incomplete download?")]
    NoIndex {
        /// A shard.
        shard: String,
    },
    /// Two sets of weights.
    #[error(
        "has both model.safetensors and a model.safetensors.index.json that lists other files; \
         remove the one that is not meant"
    )]
    TwoSets,
    /// A file of text or JSON is something else.
    #[error("has a `{file}` that can't be read: {why}")]
    Text {
        /// The file.
        file: String,
        /// What is wrong.
        why: String,
    },
    /// Not Gemma 4.
    #[error(
        "holds {found}; supported are Gemma 4 checkpoints: Gemma4ForConditionalGeneration \
         and Gemma4ForCausalLM"
    )]
    Architecture {
        /// Model type and architectures as config.json names them.
        found: String,
    },
    /// Quantized by somebody else.
    #[error(
        "is quantized with {method} (tensor `{tensor}` is {dtype}), which can't be read; give the \
         bf16 checkpoint that it was made from and quantize that with gemma4-quantize"
    )]
    Quantized {
        /// `quant_method` of the config.
        method: String,
        /// A tensor that shows it.
        tensor: String,
        /// Its element type.
        dtype: String,
    },
    /// A weight in a bundle of torchao that no encoding here holds.
    #[error(
        "is a torchao bundle whose weight `{tensor}` {why}, which is not supported; quantize the \
         bf16 checkpoint with gemma4-quantize instead"
    )]
    Torchao {
        /// Name of the weight.
        tensor: String,
        /// What it has or is.
        why: String,
    },
    /// A bundle of a layout that this build does not know.
    #[error(
        "has `{file}` in layout {found}, and this build reads {}; use a matching version of \
         gemma4, or quantize again",
        gemma4_format::ptd::LAYOUT
    )]
    Layout {
        /// The file.
        file: String,
        /// The layout that it names.
        found: String,
    },
    /// Shards of the index are not there.
    #[error("lacks {missing} of {total} weight files, first `{file}`; incomplete download?")]
    MissingShards {
        /// The first one.
        file: String,
        /// How many.
        missing: usize,
        /// How many the index lists.
        total: usize,
    },
    /// The index leads out of the directory.
    #[error("has an index that lists `{file}`, which is not the name of a file in this directory")]
    ShardName {
        /// The name.
        file: String,
    },
    /// The index and the shards disagree.
    #[error(
        "has an index that does not fit its weight files: {absent} of {total} tensors are not \
         where it says, first `{tensor}` in `{file}`; fetch model.safetensors.index.json again"
    )]
    StaleIndex {
        /// The first tensor.
        tensor: String,
        /// Where it should be.
        file: String,
        /// How many are elsewhere or nowhere.
        absent: usize,
        /// How many the index lists.
        total: usize,
    },
    /// One name, two tensors.
    #[error("has the tensor `{tensor}` twice, in `{first}` and in `{second}`")]
    Duplicate {
        /// Canonical name.
        tensor: String,
        /// File of the one.
        first: String,
        /// File of the other.
        second: String,
    },
    /// A placeholder instead of the file.
    #[error("has a Git LFS pointer instead of `{file}`; fetch the file with `git lfs pull`")]
    LfsPointer {
        /// The file.
        file: String,
    },
    /// Not a safetensors file.
    #[error("has `{file}`, which is no safetensors file: {why}")]
    NotSafetensors {
        /// The file.
        file: String,
        /// How that shows.
        why: String,
    },
    /// A weight file ends early.
    #[error(
        "has a truncated `{file}`: {need} bytes are needed and it has {have}; incomplete download?"
    )]
    Truncated {
        /// The file.
        file: String,
        /// Length that its header calls for.
        need: u64,
        /// Length that it has.
        have: u64,
    },
    /// A weight file goes on after its end.
    #[error("has {extra} bytes too many at the end of `{file}`; fetch it again")]
    Trailing {
        /// The file.
        file: String,
        /// How many.
        extra: u64,
    },
    /// A bundle describes a weight wrongly.
    #[error("describes the weight `{tensor}` wrongly: {why}")]
    Description {
        /// Name of the weight.
        tensor: String,
        /// What is wrong.
        why: String,
    },
    /// Weights that the model needs are not there.
    #[error("lacks {missing} of {total} tensors, first `{tensor}`; incomplete download?")]
    MissingTensors {
        /// The first one.
        tensor: String,
        /// How many.
        missing: usize,
        /// How many the model needs.
        total: usize,
    },
    /// A tensor of a type or shape that no model has.
    #[error(
        "has `{tensor}` as {dtype}{shape:?} in `{file}`; weights are BF16, F16 or F32 with 1 to 4 \
         dimensions, none of them 0"
    )]
    Unusable {
        /// Canonical name.
        tensor: String,
        /// Element type found.
        dtype: String,
        /// Extents found.
        shape: Vec<usize>,
        /// The file.
        file: String,
    },
    /// Tensors that nothing uses: using the rest would be another model.
    #[error("has {count} tensors that this model does not use, first `{tensor}`")]
    UnknownTensors {
        /// The first one.
        tensor: String,
        /// How many.
        count: usize,
    },
    /// Already quantized by us.
    #[error("is quantized already; give the bf16 checkpoint that it was made from")]
    AlreadyQuantized,
    /// Several templates, none of them the default.
    #[error("has several chat templates and none named `default`: {names}")]
    Templates {
        /// Their names.
        names: String,
    },
}

impl Refusal {
    /// The error that says this of the checkpoint `path`.
    pub fn at(self, path: &Path) -> crate::Error {
        crate::Error::Checkpoint { path: path.to_owned(), refusal: Box::new(self) }
    }
}
