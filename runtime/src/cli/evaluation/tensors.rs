//! Tensors of other implementations' files.

use std::fs;
use std::path::Path;

use anyhow::{Context, anyhow, bail};
use half::{bf16, f16};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};

/// A safetensors file in memory.
pub(super) struct File(Vec<u8>);

impl File {
    pub(super) fn read(path: &Path) -> anyhow::Result<Self> {
        fs::read(path).map(Self).with_context(|| format!("cannot read `{}`", path.display()))
    }

    pub(super) fn tensors(&self) -> anyhow::Result<SafeTensors<'_>> {
        Ok(SafeTensors::deserialize(&self.0)?)
    }
}

/// Numbers of a floating type, in order.
pub(super) fn floats(tensor: &TensorView<'_>) -> anyhow::Result<Vec<f32>> {
    let halves = || tensor.data().chunks_exact(2).map(|b| [b[0], b[1]]);
    Ok(match tensor.dtype() {
        Dtype::F32 => {
            let words = tensor.data().chunks_exact(4).map(|b| [b[0], b[1], b[2], b[3]]);
            words.map(f32::from_le_bytes).collect()
        }
        Dtype::BF16 => halves().map(|b| bf16::from_le_bytes(b).to_f32()).collect(),
        Dtype::F16 => halves().map(|b| f16::from_le_bytes(b).to_f32()).collect(),
        other => bail!("{other:?} is neither F32 nor F16 nor BF16"),
    })
}

/// Token ids, of 32 or 64 bits.
pub(super) fn ids(tensor: &TensorView<'_>) -> anyhow::Result<Vec<u32>> {
    let width = match tensor.dtype() {
        Dtype::I32 | Dtype::U32 => 4,
        Dtype::I64 | Dtype::U64 => 8,
        other => bail!("{other:?} is no type of token ids"),
    };
    let id = |bytes: &[u8]| {
        let id = bytes.iter().rev().fold(0u64, |id, byte| id << 8 | u64::from(*byte));
        u32::try_from(id).map_err(|_| anyhow!("a token id is negative or too large"))
    };
    tensor.data().chunks_exact(width).map(id).collect()
}
