//! Min-max quantization gives the numbers that torchao gives, to the last bit; HQQ loses less.

use std::collections::BTreeMap;
use std::path::Path;

use crate::support::{Tensor, config, write_checkpoint};
use gemma4_exporter::checkpoint::Checkpoint;
use gemma4_exporter::output::Monitor;
use gemma4_exporter::quantize::{Existing, Quantizer, Recipe, write_bundle};
use gemma4_exporter::source::ModelSource;
use gemma4_format::{DType, Encoding};
use safetensors::SafeTensors;

/// The bytes of one part of a weight of a bundle.
fn part(bundle: &Checkpoint, name: &str, index: usize) -> Vec<u8> {
    let weight = bundle.weight(name).unwrap();
    let parts = weight.encoding.parts(name, &weight.dims).unwrap();
    let mut bytes = vec![0; parts[index].bytes() as usize];
    bundle.read_part(name, index, 0, &mut bytes).unwrap();
    bytes
}

/// torchao keeps INT8 codes signed.
fn unsigned(codes: &[u8]) -> Vec<u8> {
    codes.iter().map(|code| code.wrapping_add(128)).collect()
}

/// Packs whole bf16 zero points of rows of `groups` into nibbles.
fn nibbles(zeros: &[u8], groups: usize) -> Vec<u8> {
    let values: Vec<u8> = (0..zeros.len() / 2)
        .map(|at| {
            let value = DType::BF16.read(zeros, at);
            assert!(value.fract() == 0.0 && (0.0..=15.0).contains(&value));
            value as u8
        })
        .collect();
    let pack = |pair: &[u8]| pair[0] | pair.get(1).copied().unwrap_or(0) << 4;
    values.chunks(groups).flat_map(|row| row.chunks(2).map(pack)).collect()
}

fn quantize(source: &Path, output: &Path, recipe: &Recipe) -> Checkpoint {
    let source = Checkpoint::open(source).unwrap();
    write_bundle(&source, recipe, output, Existing::Refuse, &Quantizer::Cpu, &Monitor::silent())
        .unwrap();
    Checkpoint::open(output).unwrap()
}

#[test]
fn an_excerpt_has_the_same_codes_scales_and_zero_points() {
    let bytes = include_bytes!("data/torchao-min-max.safetensors");
    let truth = SafeTensors::deserialize(bytes).unwrap();
    let data = |name: &str| truth.tensor(name).unwrap().data();
    let source = |from: &str, name: &str| {
        let view = truth.tensor(from).unwrap();
        let (dtype, shape, bytes) = (view.dtype(), view.shape().to_vec(), view.data().to_vec());
        Tensor { name: name.to_owned(), dtype, shape, bytes }
    };
    let dir = tempfile::tempdir().unwrap();
    let tensors = [
        source("embed.source", "model.embed_tokens.weight"),
        source("proj.source", "model.layers.0.mlp.up_proj.weight"),
    ];
    write_checkpoint(&dir.path().join("hf"), &config(), &tensors);
    let recipe = Recipe::named("default").unwrap();
    let bundle = quantize(&dir.path().join("hf"), &dir.path().join("out"), &recipe);

    let embed = "embed_tokens.weight";
    assert_eq!(part(&bundle, embed, 0), unsigned(data("embed.codes")));
    assert_eq!(part(&bundle, embed, 1), data("embed.scales"));
    let proj = "layers.0.mlp.up_proj.weight";
    assert_eq!(part(&bundle, proj, 0), data("proj.codes"));
    assert_eq!(part(&bundle, proj, 1), data("proj.scales"));
    assert_eq!(part(&bundle, proj, 2), nibbles(data("proj.zeros"), 256 / 32));
}

/// The transposed scales or zero points of torchao's INT4, `[groups, rows]`, as `[rows, groups]`.
fn transposed(bytes: &[u8], groups: usize) -> Vec<u8> {
    let rows = bytes.len() / 2 / groups;
    let at = |row: usize, group: usize| (group * rows + row) * 2;
    (0..rows)
        .flat_map(|row| (0..groups).flat_map(move |group| [at(row, group), at(row, group) + 1]))
        .map(|byte| bytes[byte])
        .collect()
}

#[test]
fn a_whole_checkpoint_has_the_same_codes_scales_and_zero_points() {
    let Some(fixtures) = crate::support::fixtures("a_whole_checkpoint_has_the_same_codes") else {
        return;
    };
    let bytes = std::fs::read(fixtures.join("ckpt/tiny-31b-torchao-default/model.safetensors"));
    let bytes = bytes.unwrap();
    let truth = SafeTensors::deserialize(&bytes).unwrap();
    let stored: BTreeMap<String, &[u8]> =
        truth.iter().map(|(name, view)| (name.to_owned(), view.data())).collect();
    let dir = tempfile::tempdir().unwrap();
    let source = fixtures.join("ckpt/tiny-31b");
    let recipe = Recipe::named("torchao-default").unwrap();
    let bundle = quantize(&source, &dir.path().join("out"), &recipe);
    let read = Checkpoint::open(fixtures.join("ckpt/tiny-31b-torchao-default")).unwrap();

    let mut compared = 0;
    for name in bundle.names() {
        let (module, leaf) = name.rsplit_once('.').unwrap();
        let their = |part: &str| stored[&format!("{module}._{leaf}_{part}")];
        let k = *bundle.weight(name).unwrap().dims.last().unwrap() as usize;
        if name == "embed_tokens.weight" {
            assert_eq!(part(&bundle, name, 0), unsigned(their("qdata")), "{name}");
            assert_eq!(part(&bundle, name, 1), their("scale"), "{name}");
        } else if name == "lm_head.weight" || name.ends_with("_proj.weight") {
            assert_eq!(part(&bundle, name, 0), their("qdata"), "{name}");
            assert_eq!(part(&bundle, name, 1), transposed(their("scale"), k / 32), "{name}");
            let zeros = nibbles(&transposed(their("zero_point"), k / 32), k / 32);
            assert_eq!(part(&bundle, name, 2), zeros, "{name}");
        } else {
            assert_eq!(part(&bundle, name, 0), stored[name], "{name}");
        }
        compared += 1;
        // Read as a bundle, theirs is ours.
        assert_eq!(read.weight(name).unwrap(), bundle.weight(name).unwrap(), "{name}");
        let parts = bundle.weight(name).unwrap().encoding;
        let parts = parts.parts(name, &bundle.weight(name).unwrap().dims).unwrap().len();
        (0..parts).for_each(|at| assert!(part(&read, name, at) == part(&bundle, name, at)));
    }
    assert_eq!(compared, 113, "all weights that torchao's bundle has");
}

/// INT8 parts to the last bit. Where both search zero points, ours lose less.
#[test]
fn the_sensitive_recipe_has_the_same_int8_and_better_int4() {
    let Some(fixtures) = crate::support::fixtures("the_sensitive_recipe_has_the_same_int8") else {
        return;
    };
    let source = Checkpoint::open(fixtures.join("ckpt/tiny-31b")).unwrap();
    let theirs = Checkpoint::open(fixtures.join("ckpt/tiny-31b-torchao-sensitive")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let recipe = Recipe::named("torchao-sensitive").unwrap();
    let ours = quantize(source.dir(), &dir.path().join("out"), &recipe);
    assert!(ours.names().eq(theirs.names()));
    let (mut int4, mut int8) = (0, 0);
    for name in ours.names() {
        let (weight, wanted) = (ours.weight(name).unwrap(), theirs.weight(name).unwrap());
        assert_eq!(weight, wanted, "{name}");
        let rows = weight.dims[..weight.dims.len() - 1].iter().map(|d| u64::from(*d)).product();
        let read = |checkpoint: &Checkpoint, name| checkpoint.read_rows_f32(name, 0..rows).unwrap();
        let (our, their) = (read(&ours, name), read(&theirs, name));
        if !matches!(weight.encoding, Encoding::Quantized { bits: 4, .. }) {
            int8 += usize::from(matches!(weight.encoding, Encoding::Quantized { .. }));
            assert!(our == their, "{name}");
            continue;
        }
        let dense = if name == "lm_head.weight" { "embed_tokens.weight" } else { name };
        let dense = read(&source, dense);
        let noise = |values: Vec<f32>| -> f64 {
            dense.iter().zip(values).map(|(a, b)| f64::from(a - b).powi(2)).sum()
        };
        let (our, their) = (noise(our), noise(their));
        assert!(our <= their, "{name}: {:.2} dB worse", 10.0 * (our / their).log10());
        int4 += 1;
    }
    // The embedding, and 4 edge layers of which one has no V.
    assert_eq!((int4, int8), (1 + 54 - 7, 1 + 7));
}
