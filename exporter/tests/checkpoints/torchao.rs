//! Bundles of torchao: what their weights are, and which are refused.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::support::*;
use gemma4_exporter::Error;
use gemma4_exporter::checkpoint::{Checkpoint, Layout, Refusal};
use gemma4_exporter::output::Monitor;
use gemma4_exporter::quantize::{Existing, Quantizer, Recipe, write_bundle};
use gemma4_exporter::source::ModelSource;
use gemma4_format::encoding::ZeroType;
use gemma4_format::{DType, Encoding, Offset};
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};

const INT4: &str = "layers.0.mlp.up_proj.weight";
const INT8: &str = "layers.0.mlp.down_proj.weight";
const EMBED: &str = "embed_tokens.weight";
const NORM: &str = "norm.weight";

/// A bundle under construction.
struct Bundle {
    /// By the names of weights.
    descriptions: BTreeMap<String, Value>,
    tensors: Vec<Tensor>,
}

fn part_name(weight: &str, part: &str) -> String {
    let (module, leaf) = weight.rsplit_once('.').unwrap();
    format!("{module}._{leaf}_{part}")
}

fn torch_dtype(name: &str) -> Value {
    json!({"_type": "torch.dtype", "_data": name})
}

fn bytes(name: &str, dtype: Dtype, shape: [usize; 2], value: impl Fn(usize) -> u8) -> Tensor {
    let bytes = (0..shape[0] * shape[1]).map(value).collect();
    Tensor { name: name.to_owned(), dtype, shape: shape.to_vec(), bytes }
}

impl Bundle {
    /// Every class, with sizes that tell rows from columns and groups from both.
    fn new() -> Self {
        let mut bundle = Self { descriptions: BTreeMap::new(), tensors: Vec::new() };
        bundle.int4(INT4, [6, 128], 32);
        bundle.int8(EMBED, [10, 64], 64, |_| 0);
        bundle.int8(INT8, [4, 96], 32, |at| [0, 127, 128, 255, 3][at % 5]);
        bundle.descriptions.insert(NORM.to_owned(), json!({"_type": "Tensor"}));
        bundle.tensors.push(Tensor::random(NORM, &[64]));
        bundle
    }

    /// Fractional zero points and transposed scales.
    fn int4(&mut self, name: &str, [n, k]: [usize; 2], group: usize) {
        let data = json!({
            "activation_dtype": torch_dtype("bfloat16"), "block_size": [1, group], "shape": [n, k],
        });
        self.describe(name, "Int4Tensor", data);
        let groups = k / group;
        let zeros = (0..groups * n).map(|at| at as f32 * 0.4375 + 0.6875);
        self.tensors.extend([
            bytes(&part_name(name, "qdata"), Dtype::U8, [n, k / 2], |at| (at * 37 + at / 64) as u8),
            Tensor::random(&part_name(name, "scale"), &[groups, n]),
            Tensor::bf16(&part_name(name, "zero_point"), &[groups, n], zeros),
        ]);
    }

    fn int8(&mut self, name: &str, [n, k]: [usize; 2], group: usize, zero: fn(usize) -> u8) {
        let data = json!({
            "target_dtype": torch_dtype("int8"), "block_size": [1, group],
            "dtype": torch_dtype("bfloat16"), "activation_quantization": null,
        });
        self.describe(name, "IntxUnpackedToInt8Tensor", data);
        let shape = [n, k / group];
        self.tensors.extend([
            bytes(&part_name(name, "qdata"), Dtype::I8, [n, k], |at| (at * 57 + at / 64) as u8),
            Tensor::random(&part_name(name, "scale"), &shape),
            bytes(&part_name(name, "zero_point"), Dtype::I8, shape, zero),
        ]);
    }

    fn describe(&mut self, name: &str, class: &str, data: Value) {
        let parts = ["qdata", "scale", "zero_point"];
        let description = json!({"_type": class, "_data": data, "_tensor_data_names": parts});
        self.descriptions.insert(name.to_owned(), description);
    }

    fn tensor(&mut self, name: &str) -> &mut Tensor {
        self.tensors.iter_mut().find(|tensor| tensor.name == name).unwrap()
    }

    fn metadata(&self, of: impl Fn(&str) -> bool) -> Vec<(String, String)> {
        let chosen = || self.descriptions.iter().filter(|(name, _)| of(name));
        let names: Vec<&String> = chosen().map(|(name, _)| name).collect();
        chosen()
            .map(|(name, description)| (name.clone(), description.to_string()))
            .chain([("tensor_names".to_owned(), json!(names).to_string())])
            .collect()
    }

    fn write(&self, dir: &Path) {
        write(dir, "config.json", config().to_string());
        let file = safetensors_with(&self.tensors, self.metadata(|_| true));
        write(dir, "model.safetensors", file);
    }

    /// Opens what an edit makes of the bundle.
    fn edited(edit: impl FnOnce(&mut Self)) -> Result<Checkpoint, Refusal> {
        let dir = tempfile::tempdir().unwrap();
        let mut bundle = Self::new();
        edit(&mut bundle);
        bundle.write(dir.path());
        Checkpoint::open(dir.path()).map_err(|error| match error {
            Error::Checkpoint { refusal, .. } => *refusal,
            other => panic!("{other}"),
        })
    }

    /// `(q − z) · s` of a weight, by the layout of its class.
    fn values(&self, name: &str) -> Vec<f32> {
        let tensor = |name: &str| self.tensors.iter().find(|t| t.name == name).unwrap();
        let read = |tensor: &Tensor, at: usize| match tensor.dtype {
            Dtype::I8 => f32::from(tensor.bytes[at] as i8),
            dtype => DType::from_safetensors(dtype).unwrap().read(&tensor.bytes, at),
        };
        let description = &self.descriptions[name];
        if description["_type"] == "Tensor" {
            let tensor = tensor(name);
            return (0..tensor.shape.iter().product()).map(|at| read(tensor, at)).collect();
        }
        let part = |part: &str| tensor(&part_name(name, part));
        let (codes, scale, zero) = (part("qdata"), part("scale"), part("zero_point"));
        let group = description["_data"]["block_size"][1].as_u64().unwrap() as usize;
        let int4 = description["_type"] == "Int4Tensor";
        let (n, k) = (codes.shape[0], codes.shape[1] * if int4 { 2 } else { 1 });
        let mut values = Vec::with_capacity(n * k);
        for (row, column) in (0..n).flat_map(|row| (0..k).map(move |column| (row, column))) {
            let (q, at) = if int4 {
                let byte = codes.bytes[row * k / 2 + column / 2];
                let nibble = if column % 2 == 0 { byte & 15 } else { byte >> 4 };
                (f32::from(nibble), column / group * n + row)
            } else {
                (read(codes, row * k + column), row * (k / group) + column / group)
            };
            values.push((q - read(zero, at)) * read(scale, at));
        }
        values
    }

    /// A bundle that somebody else wrote, in one file.
    fn read(path: &Path) -> Self {
        let bytes = fs::read(path).unwrap();
        let metadata = SafeTensors::read_metadata(&bytes).unwrap().1.metadata().clone().unwrap();
        let names: Vec<String> = serde_json::from_str(&metadata["tensor_names"]).unwrap();
        let parsed = |name: &String| serde_json::from_str(&metadata[name]).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let tensors = tensors.iter().map(|(name, view)| Tensor {
            name: name.to_owned(),
            dtype: view.dtype(),
            shape: view.shape().to_vec(),
            bytes: view.data().to_vec(),
        });
        Self {
            descriptions: names.iter().map(|name| (name.clone(), parsed(name))).collect(),
            tensors: tensors.collect(),
        }
    }

    /// Every weight of the checkpoint has every bit of the bundle's.
    fn assert_same_values(&self, checkpoint: &Checkpoint) {
        assert_eq!(checkpoint.layout(), Layout::Torchao);
        assert!(checkpoint.names().eq(self.descriptions.keys()));
        for name in self.descriptions.keys() {
            let dims = &checkpoint.weight(name).unwrap().dims;
            let rows = dims[..dims.len() - 1].iter().map(|d| u64::from(*d)).product();
            let found = checkpoint.read_rows_f32(name, 0..rows).unwrap();
            let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            assert!(bits(found) == bits(self.values(name)), "{name}");
        }
    }
}

#[test]
fn every_class_is_read_exactly() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = Bundle::new();
    bundle.write(dir.path());
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    bundle.assert_same_values(&checkpoint);
    let quantized =
        |bits, group, offset| Encoding::Quantized { bits, group, scale: DType::BF16, offset };
    for (name, encoding) in [
        (INT4, quantized(4, 32, Offset::Zero(ZeroType::BF16))),
        (EMBED, quantized(8, 64, Offset::Symmetric)),
        (INT8, quantized(8, 32, Offset::Zero(ZeroType::U8))),
        (NORM, Encoding::Dense(DType::BF16)),
    ] {
        assert_eq!(checkpoint.weight(name).unwrap().encoding, encoding, "{name}");
    }
}

/// Min-max makes whole zero points. Five groups end in the middle of a byte.
#[test]
fn whole_zero_points_take_a_nibble_each() {
    let dir = tempfile::tempdir().unwrap();
    let mut bundle = Bundle::new();
    let name = "layers.1.mlp.up_proj.weight";
    bundle.int4(name, [6, 160], 32);
    let zero = part_name(name, "zero_point");
    *bundle.tensor(&zero) = Tensor::bf16(&zero, &[5, 6], (0..30).map(|at| (at * 7 % 16) as f32));
    bundle.write(dir.path());
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    bundle.assert_same_values(&checkpoint);
    let zero_type = |name: &str| match checkpoint.weight(name).unwrap().encoding {
        Encoding::Quantized { offset: Offset::Zero(zero), .. } => zero,
        other => panic!("{other:?}"),
    };
    assert_eq!((zero_type(name), zero_type(INT4)), (ZeroType::Nibble, ZeroType::BF16));
    let read = |offset: usize, length: usize| {
        let mut bytes = vec![0; length];
        checkpoint.read_part(name, 2, offset as u64, &mut bytes).unwrap();
        bytes
    };
    let whole = read(0, 18);
    for offset in 0..18 {
        for end in offset..=18 {
            assert_eq!(read(offset, end - offset), whole[offset..end], "{offset}..{end}");
        }
    }

    for odd in [16.0, -1.0, 0.5, f32::NAN] {
        let zeros = (0..30).map(|at| if at == 17 { odd } else { 3.0 });
        *bundle.tensor(&zero) = Tensor::bf16(&zero, &[5, 6], zeros);
        bundle.write(dir.path());
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let Encoding::Quantized { offset, .. } = checkpoint.weight(name).unwrap().encoding else {
            panic!()
        };
        assert_eq!(offset, Offset::Zero(ZeroType::BF16), "{odd}");
    }
}

/// An export reads parts in blocks that end anywhere.
#[test]
fn any_range_of_a_transposed_part_is_that_range() {
    let dir = tempfile::tempdir().unwrap();
    Bundle::new().write(dir.path());
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let read = |offset: usize, length: usize| {
        let mut bytes = vec![0; length];
        checkpoint.read_part(INT4, 1, offset as u64, &mut bytes).unwrap();
        bytes
    };
    let length = 6 * 4 * 2;
    let whole = read(0, length);
    for offset in 0..length {
        for end in offset..=length {
            assert_eq!(read(offset, end - offset), whole[offset..end], "{offset}..{end}");
        }
    }
}

#[test]
fn parts_and_descriptions_may_lie_in_any_file() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = Bundle::new();
    write(dir.path(), "config.json", config().to_string());
    let mut map = serde_json::Map::new();
    for (shard, file) in ["a.safetensors", "b.safetensors"].into_iter().enumerate() {
        // Alternating, so that no weight has all its parts in one file.
        let tensors: Vec<Tensor> = bundle.tensors.iter().skip(shard).step_by(2).cloned().collect();
        map.extend(tensors.iter().map(|t| (t.name.clone(), file.into())));
        let metadata = bundle.metadata(|name| (name == INT4) == (shard == 0));
        write(dir.path(), file, safetensors_with(&tensors, metadata));
    }
    write(dir.path(), "model.safetensors.index.json", json!({"weight_map": map}).to_string());
    bundle.assert_same_values(&Checkpoint::open(dir.path()).unwrap());
}

#[test]
fn the_bundles_of_executorch_are_read_exactly() {
    let Some(fixtures) = fixtures("the_bundles_of_executorch_are_read_exactly") else { return };
    for name in ["tiny-31b-torchao-default", "tiny-31b-torchao-sensitive"] {
        let dir = fixtures.join("ckpt").join(name);
        let bundle = Bundle::read(&dir.join("model.safetensors"));
        assert_eq!(bundle.descriptions.len(), 113, "{name}");
        bundle.assert_same_values(&Checkpoint::open(dir).unwrap());
    }
}

#[test]
fn what_no_encoding_holds_is_refused_by_name() {
    fn data<'a>(bundle: &'a mut Bundle, name: &str) -> &'a mut Value {
        &mut bundle.descriptions.get_mut(name).unwrap()["_data"]
    }
    type Edit = fn(&mut Bundle);
    let cases: [(&str, &str, Edit); 11] = [
        (INT4, "a part `act_pre_scale`", |b| {
            let parts = json!(["qdata", "scale", "zero_point", "act_pre_scale"]);
            b.descriptions.get_mut(INT4).unwrap()["_tensor_data_names"] = parts;
        }),
        (INT4, "blocks of [2, 32]", |b| data(b, INT4)["block_size"] = json!([2, 32])),
        (INT8, "blocks of [32]", |b| data(b, INT8)["block_size"] = json!([32])),
        (INT8, "codes of type int5", |b| data(b, INT8)["target_dtype"] = torch_dtype("int5")),
        (INT8, "quantizes activations (\"int8_asym_per_token\")", |b| {
            data(b, INT8)["activation_quantization"] = json!("int8_asym_per_token");
        }),
        (INT4, "activations in float8_e4m3fn", |b| {
            data(b, INT4)["activation_dtype"] = torch_dtype("float8_e4m3fn");
        }),
        (INT4, "an attribute `permutation`", |b| data(b, INT4)["permutation"] = json!([1, 0])),
        (NORM, "class `Float8Tensor`", |b| {
            b.descriptions.get_mut(NORM).unwrap()["_type"] = json!("Float8Tensor");
        }),
        (INT4, "zero points of type F32", |b| {
            let name = part_name(INT4, "zero_point");
            *b.tensor(&name) = Tensor::zeros(&name, Dtype::F32, &[4, 6]);
        }),
        (INT4, "scales of type U8", |b| {
            let name = part_name(INT4, "scale");
            *b.tensor(&name) = Tensor::zeros(&name, Dtype::U8, &[4, 6]);
        }),
        (EMBED, "zero points that are no integers", |b| {
            let name = part_name(EMBED, "zero_point");
            *b.tensor(&name) = Tensor::random(&name, &[10, 1]);
        }),
    ];
    for (name, word, edit) in cases {
        let refusal = Bundle::edited(edit).unwrap_err();
        let Refusal::Torchao { tensor, why } = &refusal else { panic!("{word}: {refusal}") };
        assert_eq!(tensor, name);
        assert!(why.contains(word), "{word}: {why}");
    }
}

#[test]
fn descriptions_that_do_not_fit_are_refused() {
    fn describe(bundle: &mut Bundle, name: &str, key: &str, value: Value) {
        bundle.descriptions.get_mut(name).unwrap()["_data"][key] = value;
    }
    type Edit = fn(&mut Bundle);
    let cases: [(&str, Edit); 10] = [
        ("no multiple of group 48", |b| describe(b, INT4, "block_size", json!([1, 48]))),
        ("no multiple of group 0", |b| describe(b, INT8, "block_size", json!([1, 0]))),
        ("_weight_qdata` is U8[6, 64]", |b| describe(b, INT4, "shape", json!([6, 64]))),
        ("`shape`", |b| describe(b, INT4, "shape", json!([6, 128, 1]))),
        ("`block_size`", |b| describe(b, INT8, "block_size", json!([1, -1]))),
        ("no `target_dtype`", |b| describe(b, INT8, "target_dtype", json!(null))),
        ("_weight_scale` is BF16[6, 4]", |b| {
            b.tensor(&part_name(INT4, "scale")).shape.reverse();
        }),
        ("no tensor `layers.0.mlp.up_proj._weight_zero_point`", |b| {
            b.tensors.retain(|tensor| tensor.name != part_name(INT4, "zero_point"));
        }),
        ("no tensor of this name", |b| b.tensors.retain(|tensor| tensor.name != NORM)),
        ("no part `scale`", |b| {
            let parts = json!(["qdata", "zero_point"]);
            b.descriptions.get_mut(INT8).unwrap()["_tensor_data_names"] = parts;
        }),
    ];
    for (word, edit) in cases {
        let refusal = Bundle::edited(edit).unwrap_err();
        let Refusal::Description { why, .. } = &refusal else { panic!("{word}: {refusal}") };
        assert!(why.contains(word), "{word}: {why}");
    }
}

#[test]
fn metadata_that_are_not_what_they_should_be() {
    let with_names = |names: &str| {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "config.json", config().to_string());
        let header = json!({"__metadata__": {"tensor_names": names, "b.weight": "Int4Tensor"}});
        write(dir.path(), "model.safetensors", raw_safetensors(&header.to_string(), 0));
        Checkpoint::open(dir.path()).unwrap_err().to_string()
    };
    assert!(with_names("norm.weight").contains("`tensor_names` list no names"));
    assert!(with_names("[\"a.weight\"]").contains("do not describe it"));
    assert!(with_names("[\"b.weight\"]").contains("describes the weight `b.weight` wrongly"));
}

/// A part that no description mentions would change the model.
#[test]
fn tensors_that_are_not_described_do_not_get_lost() {
    let name = part_name(INT4, "act_pre_scale");
    let add = |bundle: &mut Bundle| bundle.tensors.push(Tensor::random(&name, &[128]));
    let checkpoint = Bundle::edited(add).unwrap();
    let known = [INT4, INT8, EMBED, NORM].into();
    assert_eq!(checkpoint.unused(&known).collect::<Vec<_>>(), [name.as_str()]);
}

#[test]
fn a_bundle_is_not_quantized_again() {
    let checkpoint = Bundle::edited(|_| {}).unwrap();
    let recipe = Recipe::named("default").unwrap();
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("out");
    let error = write_bundle(
        &checkpoint,
        &recipe,
        &output,
        Existing::Refuse,
        &Quantizer::Cpu,
        &Monitor::silent(),
    );
    assert!(error.unwrap_err().to_string().contains("is quantized already"));
}
