//! The header of one GGUF file: keys, and where the tensors lie.
//!
//! The layout is that of ggml's `docs/gguf.md`, versions 2 and 3, little-endian. Every length and
//! count is compared with what is left of the file before anything is allocated for it.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::Refusal;
use super::blocks::Kind;
use super::metadata::{ARRAY, Metadata, STRING, Scalar, Strings, Value};
use crate::{Error, Result};

/// Longest header that is read. That of Gemma 4, with its vocabulary, has 16 MB.
const MAX_HEADER: u64 = 256 << 20;
/// Longest name of a key or tensor.
const MAX_NAME: u64 = 1 << 16;
/// Where the data of tensors start, if the file does not say otherwise.
const ALIGNMENT: u32 = 32;
/// Bytes of the smallest key (its length, type and value) and tensor (length, dims, type, offset).
const MIN_KEY: u64 = 8 + 4 + 1;
const MIN_TENSOR: u64 = 8 + 4 + 4 + 8;

/// An open file.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) path: PathBuf,
    pub(super) file: File,
    pub(super) metadata: Metadata,
    /// In the order of the file.
    pub(super) tensors: Vec<Tensor>,
    /// BLAKE3 of the header's bytes.
    pub(super) digest: blake3::Hash,
}

/// A tensor of a file.
#[derive(Clone, Debug)]
pub(super) struct Tensor {
    /// As the file has it.
    pub(super) name: String,
    pub(super) kind: Kind,
    /// Extents, outermost first.
    pub(super) dims: Vec<u32>,
    /// First byte in the file.
    pub(super) start: u64,
    /// Bytes.
    pub(super) length: u64,
}

impl Header {
    /// Opens a file and checks its header against its length.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(Error::io("open", path))?;
        let length = file.metadata().map_err(Error::io("read", path))?.len();
        let input = BufReader::with_capacity(1 << 20, At { file: &file, offset: 0 });
        let mut reader = Reader {
            path,
            input,
            position: 0,
            length,
            what: "the header".to_owned(),
            hasher: blake3::Hasher::new(),
        };
        let (keys, tensors) = reader.preamble()?;
        let metadata = reader.metadata(keys)?;
        let tensors = reader.tensors(tensors, &metadata)?;
        let digest = reader.hasher.finalize();
        Ok(Self { path: path.to_owned(), file, metadata, tensors, digest })
    }
}

/// Reads a file from an offset on.
struct At<'a> {
    file: &'a File,
    offset: u64,
}

impl Read for At<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read_at(out, self.offset)?;
        self.offset += count as u64;
        Ok(count)
    }
}

struct Reader<'a> {
    path: &'a Path,
    input: BufReader<At<'a>>,
    position: u64,
    /// Of the file.
    length: u64,
    /// What is being read, for errors.
    what: String,
    hasher: blake3::Hasher,
}

impl Reader<'_> {
    fn refuse(&self, refusal: Refusal) -> Error {
        refusal.at(self.path)
    }

    fn malformed(&self, why: impl Into<String>) -> Error {
        self.refuse(Refusal::Malformed { what: self.what.clone(), why: why.into() })
    }

    /// Refuses what can't be in the rest of the file.
    fn justify(&self, need: u64) -> Result<()> {
        if need > self.length - self.position {
            return Err(self.refuse(Refusal::Truncated {
                what: self.what.clone(),
                at: self.position,
                need,
                have: self.length,
            }));
        }
        if need > MAX_HEADER.saturating_sub(self.position) {
            return Err(self.malformed(format!("makes a header above {} MiB", MAX_HEADER >> 20)));
        }
        Ok(())
    }

    fn fill(&mut self, out: &mut [u8]) -> Result<()> {
        self.justify(out.len() as u64)?;
        self.input.read_exact(out).map_err(Error::io("read", self.path))?;
        self.position += out.len() as u64;
        self.hasher.update(out);
        Ok(())
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn bytes(&mut self, count: u64) -> Result<Vec<u8>> {
        self.justify(count)?;
        let mut bytes = vec![0; count as usize];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn string(&mut self) -> Result<String> {
        let count = self.u64()?;
        let bytes = self.bytes(count)?;
        String::from_utf8(bytes).map_err(|_| self.malformed("is no UTF-8"))
    }

    fn name(&mut self) -> Result<String> {
        let count = self.u64()?;
        if count > MAX_NAME {
            return Err(self.malformed(format!("has a name of {count} bytes")));
        }
        let bytes = self.bytes(count)?;
        String::from_utf8(bytes).map_err(|_| self.malformed("has a name that is no UTF-8"))
    }

    /// Magic and version; counts of keys and of tensors.
    fn preamble(&mut self) -> Result<(u64, u64)> {
        let magic: [u8; 4] = self.array()?;
        match &magic {
            b"GGUF" => {}
            b"vers" => return Err(self.refuse(Refusal::LfsPointer)),
            _ => return Err(self.refuse(Refusal::NotGguf)),
        }
        match self.u32()? {
            2 | 3 => {}
            version if matches!(version.swap_bytes(), 1..=3) => {
                return Err(self.refuse(Refusal::BigEndian));
            }
            version => return Err(self.refuse(Refusal::Version(version))),
        }
        let tensors = self.u64()?;
        let keys = self.u64()?;
        self.justify(
            keys.saturating_mul(MIN_KEY).saturating_add(tensors.saturating_mul(MIN_TENSOR)),
        )?;
        Ok((keys, tensors))
    }

    /// Keys in the wild stand twice at times: that is refused only if they say two things.
    fn metadata(&mut self, count: u64) -> Result<Metadata> {
        let mut metadata = Metadata::default();
        for index in 0..count {
            self.what = format!("key {index}");
            let key = self.name()?;
            self.what = format!("the key `{key}`");
            let code = self.u32()?;
            let value = self.value(code)?;
            if metadata.0.get(&key).is_some_and(|first| *first != value) {
                return Err(self.malformed("stands twice, with two values"));
            }
            metadata.0.insert(key, value);
        }
        Ok(metadata)
    }

    fn value(&mut self, code: u32) -> Result<Value> {
        match code {
            STRING => self.string().map(Value::String),
            ARRAY => {
                let code = self.u32()?;
                let count = self.u64()?;
                if code == STRING {
                    return self.strings(count).map(Value::Strings);
                }
                let scalar = self.scalar(code)?;
                let bytes = self.bytes(count.saturating_mul(scalar.size() as u64))?;
                Ok(Value::Numbers(scalar, bytes))
            }
            code => {
                let scalar = self.scalar(code)?;
                Ok(Value::Number(scalar, self.bytes(scalar.size() as u64)?))
            }
        }
    }

    fn scalar(&self, code: u32) -> Result<Scalar> {
        Scalar::from_code(code).ok_or_else(|| self.malformed(format!("has a value of type {code}")))
    }

    fn strings(&mut self, count: u64) -> Result<Strings> {
        self.justify(count.saturating_mul(8))?;
        let mut strings = Strings::default();
        let mut bytes = Vec::new();
        for _ in 0..count {
            let length = self.u64()?;
            self.justify(length)?;
            bytes.resize(length as usize, 0);
            self.fill(&mut bytes)?;
            let string = str::from_utf8(&bytes).map_err(|_| self.malformed("is no UTF-8"))?;
            strings.push(string);
        }
        Ok(strings)
    }

    fn tensors(&mut self, count: u64, metadata: &Metadata) -> Result<Vec<Tensor>> {
        let refused = |refusal: Refusal| refusal.at(self.path);
        let alignment = metadata.optional_u32("general.alignment").map_err(refused)?;
        let alignment = u64::from(alignment.unwrap_or(ALIGNMENT));
        if !alignment.is_power_of_two() {
            let why = format!("{alignment} is no power of two");
            return Err(self.refuse(Refusal::key("general.alignment", why)));
        }
        let mut names = HashSet::new();
        let mut tensors = Vec::new();
        for index in 0..count {
            self.what = format!("tensor {index}");
            let tensor = self.tensor(alignment)?;
            if !names.insert(tensor.name.clone()) {
                return Err(self.refuse(Refusal::Duplicate { tensor: tensor.name }));
            }
            tensors.push(tensor);
        }
        let data = self.position.next_multiple_of(alignment);
        for tensor in &mut tensors {
            self.what = format!("the tensor `{}`", tensor.name);
            let end = data.checked_add(tensor.start).and_then(|at| at.checked_add(tensor.length));
            if end.is_none_or(|end| end > self.length) {
                return Err(self.refuse(Refusal::Truncated {
                    what: self.what.clone(),
                    at: data.saturating_add(tensor.start),
                    need: tensor.length,
                    have: self.length,
                }));
            }
            tensor.start += data;
        }
        let mut sorted: Vec<&Tensor> = tensors.iter().collect();
        sorted.sort_by_key(|tensor| tensor.start);
        for pair in sorted.windows(2) {
            if pair[0].start + pair[0].length > pair[1].start {
                self.what = format!("the tensor `{}`", pair[1].name);
                return Err(self.malformed(format!("overlaps `{}`", pair[0].name)));
            }
        }
        Ok(tensors)
    }

    /// A tensor whose start is still that within the data.
    fn tensor(&mut self, alignment: u64) -> Result<Tensor> {
        let name = self.name()?;
        self.what = format!("the tensor `{name}`");
        let rank = self.u32()?;
        if !(1..=4).contains(&rank) {
            return Err(self.malformed(format!("has {rank} dimensions")));
        }
        let mut dims = Vec::new();
        let mut elements = 1u64;
        for _ in 0..rank {
            let dim = self.u64()?;
            let narrow = u32::try_from(dim).ok().filter(|dim| *dim > 0);
            let product = elements.checked_mul(dim);
            let (Some(narrow), Some(product)) = (narrow, product) else {
                return Err(self.malformed(format!("has a dimension of {dim}")));
            };
            elements = product;
            dims.push(narrow);
        }
        let code = self.u32()?;
        let start = self.u64()?;
        let kind = Kind::from_code(code).map_err(|found| {
            self.refuse(Refusal::Type { tensor: name.clone(), found: found.to_owned() })
        })?;
        let block = kind.block();
        if dims[0] % block.elements != 0 {
            let why = format!("has rows of {} numbers, no multiple of {}", dims[0], block.elements);
            return Err(self.malformed(why));
        }
        if start % alignment != 0 {
            return Err(self.malformed(format!("starts at {start}, no multiple of {alignment}")));
        }
        let length = (elements / u64::from(block.elements))
            .checked_mul(u64::from(block.bytes))
            .ok_or_else(|| self.malformed("is too large"))?;
        dims.reverse();
        Ok(Tensor { name, kind, dims, start, length })
    }
}
