//! The keys of a GGUF file and their values.

use std::collections::BTreeMap;

use super::Refusal;

/// Type of a number, and its code in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scalar {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    U64,
    I64,
    F64,
}

/// Codes of the values that are no numbers.
pub(super) const STRING: u32 = 8;
pub(super) const ARRAY: u32 = 9;

impl Scalar {
    pub(super) fn from_code(code: u32) -> Option<Self> {
        Some(match code {
            0 => Self::U8,
            1 => Self::I8,
            2 => Self::U16,
            3 => Self::I16,
            4 => Self::U32,
            5 => Self::I32,
            6 => Self::F32,
            7 => Self::Bool,
            10 => Self::U64,
            11 => Self::I64,
            12 => Self::F64,
            _ => return None,
        })
    }

    /// Bytes of one.
    pub(super) fn size(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 => 8,
        }
    }

    /// The whole number in `bytes`; truth is 1. `None` for one that is not whole.
    fn integer(self, bytes: &[u8]) -> Option<i128> {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        let unsigned = u64::from_le_bytes(word);
        let unused = 64 - 8 * bytes.len() as u32;
        match self {
            Self::F32 | Self::F64 => None,
            Self::I8 | Self::I16 | Self::I32 | Self::I64 => {
                Some(i128::from((unsigned << unused) as i64 >> unused))
            }
            Self::Bool => Some(i128::from(unsigned != 0)),
            Self::U8 | Self::U16 | Self::U32 | Self::U64 => Some(i128::from(unsigned)),
        }
    }
}

/// Strings, one behind the other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Strings {
    text: String,
    /// Where each ends.
    ends: Vec<usize>,
}

impl Strings {
    pub(super) fn push(&mut self, string: &str) {
        self.text.push_str(string);
        self.ends.push(self.text.len());
    }

    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(super) fn iter(&self) -> impl ExactSizeIterator<Item = &str> + Clone {
        self.ends.iter().enumerate().map(|(at, end)| {
            let start = if at == 0 { 0 } else { self.ends[at - 1] };
            &self.text[start..*end]
        })
    }
}

/// Value of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Value {
    /// A number, as its bytes.
    Number(Scalar, Vec<u8>),
    String(String),
    /// Numbers, as their bytes.
    Numbers(Scalar, Vec<u8>),
    Strings(Strings),
}

/// All keys of a file.
#[derive(Clone, Debug, Default)]
pub(super) struct Metadata(pub(super) BTreeMap<String, Value>);

impl Metadata {
    pub(super) fn contains(&self, key: &str) -> bool {
        self.0.contains_key(key)
    }

    pub(super) fn u32(&self, key: &str) -> Result<u32, Refusal> {
        self.optional_u32(key)?.ok_or_else(|| missing(key))
    }

    /// A whole number of any type.
    pub(super) fn optional_u32(&self, key: &str) -> Result<Option<u32>, Refusal> {
        let Some(value) = self.0.get(key) else { return Ok(None) };
        let number = match value {
            Value::Number(scalar, bytes) => scalar.integer(bytes),
            _ => None,
        };
        match number.and_then(|number| u32::try_from(number).ok()) {
            Some(number) => Ok(Some(number)),
            None => Err(Refusal::key(key, "it is no whole number of 32 bits")),
        }
    }

    pub(super) fn f32(&self, key: &str) -> Result<f32, Refusal> {
        self.optional_f32(key)?.ok_or_else(|| missing(key))
    }

    /// A finite float32.
    pub(super) fn optional_f32(&self, key: &str) -> Result<Option<f32>, Refusal> {
        let Some(value) = self.0.get(key) else { return Ok(None) };
        let number = match value {
            Value::Number(Scalar::F32, bytes) => {
                bytes.first_chunk().copied().map(f32::from_le_bytes)
            }
            _ => None,
        };
        match number.filter(|number| number.is_finite()) {
            Some(number) => Ok(Some(number)),
            None => Err(Refusal::key(key, "it is no finite float32")),
        }
    }

    pub(super) fn optional_str(&self, key: &str) -> Result<Option<&str>, Refusal> {
        match self.0.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(Refusal::key(key, "it is no string")),
        }
    }

    pub(super) fn str(&self, key: &str) -> Result<&str, Refusal> {
        self.optional_str(key)?.ok_or_else(|| missing(key))
    }

    pub(super) fn strings(&self, key: &str) -> Result<&Strings, Refusal> {
        match self.0.get(key) {
            None => Err(missing(key)),
            Some(Value::Strings(strings)) => Ok(strings),
            Some(_) => Err(Refusal::key(key, "it is no array of strings")),
        }
    }

    /// An array of `count` whole numbers or truth values.
    pub(super) fn integers(&self, key: &str, count: usize) -> Result<Vec<u32>, Refusal> {
        let (scalar, bytes) = match self.0.get(key) {
            None => return Err(missing(key)),
            Some(Value::Numbers(scalar, bytes)) => (*scalar, bytes),
            Some(_) => return Err(Refusal::key(key, "it is no array of numbers")),
        };
        let found = bytes.len() / scalar.size();
        if found != count {
            return Err(Refusal::key(key, format!("it has {found} entries, not {count}")));
        }
        let whole = |bytes| scalar.integer(bytes).and_then(|number| u32::try_from(number).ok());
        bytes
            .chunks_exact(scalar.size())
            .map(|bytes| {
                whole(bytes).ok_or_else(|| Refusal::key(key, "it has an entry that is no u32"))
            })
            .collect()
    }

    /// One number per layer: an array, or a number that holds for all.
    pub(super) fn per_layer(&self, key: &str, layers: u32) -> Result<Vec<u32>, Refusal> {
        match self.0.get(key) {
            Some(Value::Number(..)) => Ok(vec![self.u32(key)?; layers as usize]),
            _ => self.integers(key, layers as usize),
        }
    }
}

fn missing(key: &str) -> Refusal {
    Refusal::MissingKey { key: key.to_owned() }
}
