//! The quantized weights of a bundle that ExecuTorch's script for Gemma 4 writes with torchao.
//!
//! The metadata list the weights and describe each in JSON: its class, the attributes of the class,
//! and the tensors that it consists of. Those of the weight `M.L` are `M._L_qdata`,
//! `M._L_scale` and `M._L_zero_point`, in any of the bundle's files. For `[N, K]` in groups of `G`:
//!
//! | class | `qdata` | `scale` | `zero_point` | encoding |
//! |---|---|---|---|---|
//! | `Int4Tensor` | U8 `[N, K/2]`, even column in the low nibble | float `[K/G, N]` | float `[K/G, N]` | 4 bits, zero points in nibbles if all are whole and fit, else floats |
//! | `IntxUnpackedToInt8Tensor` | I8 `[N, K]` | float `[N, K/G]` | I8 or float `[N, K/G]` | 8 bits, symmetric if all zero points are 0, else U8 zero points |
//!
//! In both, a code `q` stands for `(q − zero) · scale`; our codes of 8 bits, and their zero points,
//! are 128 more. No number is rounded. Whatever else a class can say is refused.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use gemma4_format::encoding::ZeroType;
use gemma4_format::{DType, Encoding, Offset};
use safetensors::Dtype;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::header::{Shard, Tensor};
use super::table::{Entry, Form, Found, Place};
use super::{Refusal, SourceWeight, names};
use crate::{Error, Result};

/// Key of the metadata with the JSON list of the names of all weights.
pub(super) const NAMES_KEY: &str = "tensor_names";

/// The tensors of a quantized weight.
const PARTS: [&str; 3] = ["qdata", "scale", "zero_point"];

/// Bytes of zero points that are read at a time.
const BLOCK: u64 = 1 << 20;

/// Moves the tensors of the quantized weights from `found` to `entries`.
pub(super) fn take_quantized(
    dir: &Path,
    shards: &[Shard],
    found: &mut Found<'_>,
    entries: &mut BTreeMap<String, Entry>,
) -> Result<()> {
    let mut taken = BTreeSet::new();
    for (name, json) in descriptions(shards).map_err(|refusal| refusal.at(dir))? {
        if names::is_tower(name) {
            continue;
        }
        let name = names::canonical(name);
        let class = serde_json::from_str(json).map_err(|e| {
            Refusal::Description { tensor: name.to_owned(), why: e.to_string() }.at(dir)
        })?;
        let weight = Described { dir, shards, found, name, class };
        let Some((source, places)) = weight.quantized()? else { continue };
        taken.extend(PARTS.map(|part| weight.tensor_name(part)));
        if entries.insert(name.to_owned(), Entry::Usable(source, places)).is_some() {
            return Err(weight.wrong("it is described twice"));
        }
    }
    found.retain(|name, _| !taken.contains(name));
    Ok(())
}

/// Name and description of every weight that the metadata of the files list together.
fn descriptions(shards: &[Shard]) -> Result<BTreeMap<&str, &str>, Refusal> {
    let mut listed = BTreeSet::new();
    for shard in shards {
        let Some(json) = shard.metadata.get(NAMES_KEY) else { continue };
        let names: Vec<String> = serde_json::from_str(json).map_err(|e| Refusal::Text {
            file: shard.name.clone(),
            why: format!("its metadata `{NAMES_KEY}` list no names: {e}"),
        })?;
        listed.extend(names);
    }
    let mut descriptions = BTreeMap::new();
    for (name, json) in shards.iter().flat_map(|shard| &shard.metadata) {
        if !listed.remove(name) {
            // Listed and seen already, or a note about the file such as its format.
            match descriptions.get(name.as_str()) {
                Some(first) if *first != json.as_str() => {
                    let why = "it is described twice".to_owned();
                    return Err(Refusal::Description { tensor: name.clone(), why });
                }
                _ => continue,
            }
        }
        descriptions.insert(name.as_str(), json.as_str());
    }
    match listed.pop_first() {
        None => Ok(descriptions),
        Some(tensor) => {
            let why = format!("`{NAMES_KEY}` lists it and the metadata do not describe it");
            Err(Refusal::Description { tensor, why })
        }
    }
}

/// What the metadata say of a weight.
#[derive(Debug, Deserialize)]
struct Class {
    #[serde(rename = "_type")]
    name: String,
    #[serde(rename = "_data", default)]
    attributes: BTreeMap<String, Value>,
    #[serde(rename = "_tensor_data_names", default)]
    parts: Vec<String>,
}

/// A weight that the metadata describe.
struct Described<'a> {
    dir: &'a Path,
    shards: &'a [Shard],
    found: &'a Found<'a>,
    /// Canonical.
    name: &'a str,
    class: Class,
}

type Quantized = (SourceWeight, Vec<Place>);

impl Described<'_> {
    /// Encoding and places of the weight's parts; `None` if it is an ordinary tensor.
    fn quantized(&self) -> Result<Option<Quantized>> {
        match self.class.name.as_str() {
            "Tensor" if self.found.contains_key(self.name) => Ok(None),
            "Tensor" => Err(self.wrong("there is no tensor of this name")),
            "Int4Tensor" => self.int4().map(Some),
            "IntxUnpackedToInt8Tensor" => self.int8().map(Some),
            other => Err(self.unsupported(format!("is of class `{other}`"))),
        }
    }

    fn int4(&self) -> Result<Quantized> {
        self.check(&["activation_dtype", "block_size", "shape"])?;
        if let Some(dtype) = self.dtype("activation_dtype")
            && !matches!(dtype, "bfloat16" | "float16" | "float32")
        {
            return Err(self.unsupported(format!("wants activations in {dtype}")));
        }
        let dims: [u32; 2] = self.attribute("shape")?;
        let zero = self.float_zero(self.tensor("zero_point")?.1.dtype)?;
        let (group, scale) = (self.group()?, self.scale()?);
        let encoding =
            |zero| Encoding::Quantized { bits: 4, group, scale, offset: Offset::Zero(zero) };
        let mut source = SourceWeight { dims: dims.to_vec(), encoding: encoding(zero) };
        let forms = [Form::Same, Form::Transposed, Form::Transposed];
        let mut places = self.places(source.encoding, &dims, forms)?;
        let dtype = if zero == ZeroType::F16 { DType::F16 } else { DType::BF16 };
        if self.all_nibbles(places[2], dtype)? {
            source.encoding = encoding(ZeroType::Nibble);
            places[2].form = Form::TransposedNibbles(dtype);
            let parts = source.encoding.parts(self.name, &dims).map_err(|e| self.wrong(e))?;
            places[2].length = parts[2].bytes();
        }
        Ok((source, places))
    }

    fn int8(&self) -> Result<Quantized> {
        self.check(&["activation_quantization", "block_size", "dtype", "target_dtype"])?;
        let quantized = self.class.attributes.get("activation_quantization");
        if let Some(method) = quantized.filter(|method| !method.is_null()) {
            return Err(self.unsupported(format!("quantizes activations ({method})")));
        }
        match self.dtype("target_dtype") {
            Some("int8") => {}
            Some(other) => return Err(self.unsupported(format!("has codes of type {other}"))),
            None => return Err(self.wrong("it has no `target_dtype`")),
        }
        let shape = &self.tensor("qdata")?.1.shape;
        let dims: Option<Vec<u32>> = shape.iter().map(|d| u32::try_from(*d).ok()).collect();
        let dims = dims.ok_or_else(|| self.wrong(format!("impossible dims {shape:?}")))?;
        let (zero, form) = match self.tensor("zero_point")?.1.dtype {
            Dtype::I8 => (ZeroType::U8, Form::Signed),
            other => (self.float_zero(other)?, Form::Same),
        };
        let (group, scale) = (self.group()?, self.scale()?);
        let encoding = |offset| Encoding::Quantized { bits: 8, group, scale, offset };
        let mut source = SourceWeight { encoding: encoding(Offset::Zero(zero)), dims };
        let forms = [Form::Signed, Form::Same, form];
        let mut places = self.places(source.encoding, &source.dims, forms)?;
        if self.all_zero(places[2])? {
            source.encoding = encoding(Offset::Symmetric);
            places.pop();
        } else if zero != ZeroType::U8 {
            return Err(self.unsupported("has 8-bit codes and zero points that are no integers"));
        }
        Ok((source, places))
    }

    /// Where the three parts of an encoding lie. Checks types and shapes.
    fn places(&self, encoding: Encoding, dims: &[u32], forms: [Form; 3]) -> Result<Vec<Place>> {
        let parts = encoding.parts(self.name, dims).map_err(|e| self.wrong(e))?;
        let mut places = Vec::with_capacity(parts.len());
        for ((mut part, form), name) in parts.into_iter().zip(forms).zip(PARTS) {
            if form == Form::Transposed {
                part.dims.reverse();
            }
            let (shard, tensor) = self.tensor(name)?;
            let right_type = match form {
                Form::Signed => tensor.dtype == Dtype::I8,
                _ => DType::from_safetensors(tensor.dtype) == Some(part.dtype),
            };
            if !right_type || !tensor.shape.iter().map(|d| *d as u64).eq(part.dims.iter().copied())
            {
                let (tensor_name, found) = (self.tensor_name(name), &tensor.shape);
                return Err(self.wrong(format!(
                    "tensor `{tensor_name}` is {:?}{found:?} and should have the shape {:?}",
                    tensor.dtype, part.dims
                )));
            }
            places.push(Place::new(shard, tensor, form));
        }
        Ok(places)
    }

    /// Whether all bytes of a part are zero.
    fn all_zero(&self, place: Place) -> Result<bool> {
        self.all(place, |bytes| bytes.iter().all(|byte| *byte == 0))
    }

    /// Whether all numbers of a part are whole and fit 4 bits, as min-max makes them.
    fn all_nibbles(&self, place: Place, dtype: DType) -> Result<bool> {
        self.all(place, |bytes| {
            let count = bytes.len() / dtype.size() as usize;
            let mut zeros = (0..count).map(|at| dtype.read(bytes, at));
            zeros.all(|zero| zero.fract() == 0.0 && (0.0..=15.0).contains(&zero))
        })
    }

    /// Whether all blocks of a part, of whole numbers, are such ones.
    fn all(&self, place: Place, holds: impl Fn(&[u8]) -> bool) -> Result<bool> {
        let mut block = vec![0; BLOCK.min(place.length) as usize];
        let mut done = 0;
        while done < place.length {
            let bytes = &mut block[..BLOCK.min(place.length - done) as usize];
            self.shards[place.shard].read(place.start + done, bytes)?;
            if !holds(bytes) {
                return Ok(false);
            }
            done += bytes.len() as u64;
        }
        Ok(true)
    }

    /// Refuses attributes beyond those `known`, and other parts than [`PARTS`].
    fn check(&self, known: &[&str]) -> Result<()> {
        let mut attributes = self.class.attributes.iter();
        let unknown =
            attributes.find(|(key, value)| !known.contains(&key.as_str()) && !value.is_null());
        if let Some((key, _)) = unknown {
            return Err(self.unsupported(format!("has an attribute `{key}`")));
        }
        let parts = &self.class.parts;
        if let Some(part) = parts.iter().find(|part| !PARTS.contains(&part.as_str())) {
            return Err(self.unsupported(format!("has a part `{part}`")));
        }
        match PARTS.iter().find(|part| !parts.iter().any(|p| p == **part)) {
            None => Ok(()),
            Some(part) => Err(self.wrong(format!("it has no part `{part}`"))),
        }
    }

    /// The group size, of blocks that are pieces of rows.
    fn group(&self) -> Result<u32> {
        match *self.attribute::<Vec<u32>>("block_size")?.as_slice() {
            [1, group] => Ok(group),
            ref other => Err(self.unsupported(format!("has blocks of {other:?}, not [1, G],"))),
        }
    }

    /// Type of the scales.
    fn scale(&self) -> Result<DType> {
        match self.tensor("scale")?.1.dtype {
            Dtype::BF16 => Ok(DType::BF16),
            Dtype::F16 => Ok(DType::F16),
            Dtype::F32 => Ok(DType::F32),
            other => Err(self.unsupported(format!("has scales of type {other:?}"))),
        }
    }

    fn float_zero(&self, dtype: Dtype) -> Result<ZeroType> {
        match dtype {
            Dtype::BF16 => Ok(ZeroType::BF16),
            Dtype::F16 => Ok(ZeroType::F16),
            other => Err(self.unsupported(format!("has zero points of type {other:?}"))),
        }
    }

    fn attribute<T: DeserializeOwned>(&self, key: &str) -> Result<T> {
        let value = self.class.attributes.get(key).cloned().unwrap_or_default();
        serde_json::from_value(value).map_err(|e| self.wrong(format!("`{key}`: {e}")))
    }

    /// The name of a torch dtype.
    fn dtype(&self, key: &str) -> Option<&str> {
        self.class.attributes.get(key)?["_data"].as_str()
    }

    fn tensor(&self, part: &str) -> Result<(usize, &Tensor)> {
        let name = self.tensor_name(part);
        let found = self.found.get(&name).copied();
        found.ok_or_else(|| self.wrong(format!("there is no tensor `{name}`")))
    }

    fn tensor_name(&self, part: &str) -> String {
        match self.name.rsplit_once('.') {
            Some((module, leaf)) => format!("{module}._{leaf}_{part}"),
            None => format!("_{}_{part}", self.name),
        }
    }

    /// The description contradicts itself or the tensors.
    fn wrong(&self, why: impl ToString) -> Error {
        let (tensor, why) = (self.name.to_owned(), why.to_string());
        Refusal::Description { tensor, why }.at(self.dir)
    }

    /// The description is one that torchao can make and this reader does not know.
    fn unsupported(&self, why: impl Into<String>) -> Error {
        Refusal::Torchao { tensor: self.name.to_owned(), why: why.into() }.at(self.dir)
    }
}
