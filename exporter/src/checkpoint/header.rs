//! The header of one safetensors file.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use gemma4_format::ptd::MAX_HEADER;
use safetensors::Dtype;
use safetensors::tensor::Metadata;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};

use super::Refusal;
use crate::{Error, Result};

/// A file of weights, open, with where its tensors lie.
#[derive(Debug)]
pub(super) struct Shard {
    /// Name within the checkpoint's directory.
    pub(super) name: String,
    path: PathBuf,
    file: File,
    /// Under the names of the file.
    pub(super) tensors: BTreeMap<String, Tensor>,
    pub(super) metadata: BTreeMap<String, String>,
    /// BLAKE3 of the header's bytes.
    pub(super) digest: blake3::Hash,
    /// Length in bytes, and when it was written: seconds and nanoseconds.
    pub(super) stamp: (u64, i64, i64),
}

/// A tensor of a file.
#[derive(Clone, Debug)]
pub(super) struct Tensor {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    /// First byte in the file.
    pub(super) start: u64,
    /// Bytes.
    pub(super) length: u64,
}

impl Shard {
    /// Opens `name` in `dir` and checks its header against the length of the file.
    pub(super) fn open(dir: &Path, name: &str) -> Result<Self> {
        let path = dir.join(name);
        let file = File::open(&path).map_err(Error::io("open", &path))?;
        let found = file.metadata().map_err(Error::io("read", &path))?;
        let length = found.len();
        let stamp = (length, found.mtime(), found.mtime_nsec());
        let mut first = vec![0; length.min(64) as usize];
        file.read_exact_at(&mut first, 0).map_err(Error::io("read", &path))?;
        let size = header_size(name, &first, length).map_err(|refusal| refusal.at(dir))?;
        let mut header = vec![0; size as usize];
        file.read_exact_at(&mut header, 0).map_err(Error::io("read", &path))?;
        let (tensors, metadata) =
            parse(name, &header, length).map_err(|refusal| refusal.at(dir))?;
        let digest = blake3::hash(&header);
        Ok(Self { name: name.to_owned(), path, file, tensors, metadata, digest, stamp })
    }

    /// Reads the bytes of the file from `offset` on.
    pub(super) fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(out, offset).map_err(Error::io("read", &self.path))
    }
}

/// Whether these are the first bytes of the text that Git stores instead of a large file.
pub(super) fn is_lfs_pointer(first: &[u8]) -> bool {
    first.starts_with(b"version https://git-lfs")
}

/// Bytes of the length word and the JSON behind it.
fn header_size(name: &str, first: &[u8], length: u64) -> Result<u64, Refusal> {
    let file = name.to_owned();
    if is_lfs_pointer(first) {
        return Err(Refusal::LfsPointer { file });
    }
    let Some(word) = first.first_chunk::<8>() else {
        return Err(Refusal::Truncated { file, need: 8, have: length });
    };
    let json = u64::from_le_bytes(*word);
    if first.starts_with(b"GGUF") {
        return Err(Refusal::NotSafetensors { file, why: "it is a GGUF file".to_owned() });
    }
    if json > MAX_HEADER {
        let why = format!("its header would have {json} bytes");
        return Err(Refusal::NotSafetensors { file, why });
    }
    if json + 8 > length {
        return Err(Refusal::Truncated { file, need: json + 8, have: length });
    }
    Ok(json + 8)
}

type Parsed = (BTreeMap<String, Tensor>, BTreeMap<String, String>);

fn parse(name: &str, header: &[u8], length: u64) -> Result<Parsed, Refusal> {
    let malformed = |why: String| Refusal::NotSafetensors { file: name.to_owned(), why };
    let json = header.get(8..).unwrap_or_default();
    // The crate checks that the data of the tensors follow one another without gap or overlap and
    // agree with dtype and shape. It does not see a name that stands twice.
    let parsed: Metadata = serde_json::from_slice(json).map_err(|e| malformed(e.to_string()))?;
    if let Some(tensor) = repeated_key(json) {
        let file = name.to_owned();
        return Err(Refusal::Duplicate { tensor, first: file.clone(), second: file });
    }
    let data = header.len() as u64;
    let need = data
        .checked_add(parsed.data_len() as u64)
        .ok_or_else(|| malformed("its tensors are too large".to_owned()))?;
    if length < need {
        return Err(Refusal::Truncated { file: name.to_owned(), need, have: length });
    }
    if length > need {
        return Err(Refusal::Trailing { file: name.to_owned(), extra: length - need });
    }
    let tensors = parsed.tensors().into_iter().map(|(name, info)| {
        let (start, end) = (info.data_offsets.0 as u64, info.data_offsets.1 as u64);
        let (dtype, shape) = (info.dtype, info.shape.clone());
        (name, Tensor { dtype, shape, start: data + start, length: end - start })
    });
    let metadata = parsed.metadata().clone().unwrap_or_default().into_iter().collect();
    Ok((tensors.collect(), metadata))
}

/// A key of the JSON object that stands in it twice.
fn repeated_key(json: &[u8]) -> Option<String> {
    struct Repeated;
    impl<'de> Visitor<'de> for Repeated {
        type Value = Option<String>;
        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("an object")
        }
        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut seen = HashSet::new();
            let mut repeated = None;
            while let Some(key) = map.next_key::<String>()? {
                map.next_value::<IgnoredAny>()?;
                if repeated.is_none() && !seen.insert(key.clone()) {
                    repeated = Some(key);
                }
            }
            Ok(repeated)
        }
    }
    serde_json::Deserializer::from_slice(json).deserialize_map(Repeated).ok().flatten()
}
