//! Values of every block type against gguf-py's (`data/make_blocks.py`).

use gemma4_exporter::export::{Options, export};
use gemma4_exporter::gguf::Gguf;
use gemma4_exporter::output::Monitor;
use gemma4_exporter::source::ModelSource;
use gemma4_format::encoding::{QuantizedBytes, decode_row};
use gemma4_runtime::LoadedProgram;
use safetensors::SafeTensors;

use crate::support::{data, model, values};

/// ggml's name and code of a type, and the tensor of the model that has it here.
const TYPES: [(&str, u32, &str, &str); 8] = [
    ("Q4_0", 2, "blk.0.ffn_up.weight", "layers.0.mlp.up_proj.weight"),
    ("Q4_1", 3, "blk.0.ffn_gate.weight", "layers.0.mlp.gate_proj.weight"),
    ("Q5_0", 6, "blk.1.ffn_up.weight", "layers.1.mlp.up_proj.weight"),
    ("Q5_1", 7, "blk.1.ffn_gate.weight", "layers.1.mlp.gate_proj.weight"),
    ("Q8_0", 8, "blk.0.ffn_up.weight", "layers.0.mlp.up_proj.weight"),
    ("Q4_K", 12, "blk.0.ffn_gate.weight", "layers.0.mlp.gate_proj.weight"),
    ("Q5_K", 13, "blk.1.ffn_up.weight", "layers.1.mlp.up_proj.weight"),
    ("Q6_K", 14, "blk.1.ffn_gate.weight", "layers.1.mlp.gate_proj.weight"),
];

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// The model with four of the types, and the expected values of those by canonical name.
fn mixed(types: &[(&str, u32, &str, &'static str)]) -> (Gguf, Vec<(&'static str, Vec<f32>)>) {
    let bytes = std::fs::read(data("blocks.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let mut file = model();
    let mut expected = Vec::new();
    for (name, kind, ggml, canonical) in types {
        let tensor = file.tensor(ggml);
        tensor.kind = *kind;
        tensor.bytes = tensors.tensor(&format!("{name}.blocks")).unwrap().data().to_vec();
        let values = tensors.tensor(&format!("{name}.values")).unwrap();
        let values = values.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        expected.push((*canonical, values));
    }
    let (_dir, path) = file.write();
    (Gguf::open(path).unwrap(), expected)
}

#[test]
fn values_are_those_of_gguf_py_bit_for_bit() {
    for types in [&TYPES[..4], &TYPES[4..]] {
        let (gguf, expected) = mixed(types);
        for (name, wanted) in expected {
            let found = values(&gguf, name);
            let encoding = gguf.weight(name).unwrap().encoding.describe();
            assert_eq!(bits(&found), bits(&wanted), "{name} as {encoding}");
        }
    }
}

#[test]
fn exported_weights_have_the_same_values() {
    for types in [&TYPES[..4], &TYPES[4..]] {
        let (gguf, expected) = mixed(types);
        let dir = tempfile::tempdir().unwrap();
        let files = export(&gguf, &Options::default(), dir.path(), &Monitor::silent()).unwrap();
        let program = LoadedProgram::open(&files.program, &files.data, &|_, _| {}).unwrap();
        let weights = &program.program().weights;
        for (name, wanted) in expected {
            let id = weights.iter().position(|weight| weight.name == name).unwrap();
            let parts = program.weights().parts(id as u32);
            let bytes = QuantizedBytes::from_parts(weights[id].encoding, &parts).unwrap();
            let mut found = vec![0.0; 256];
            for (row, wanted) in wanted.chunks_exact(256).enumerate() {
                decode_row(weights[id].encoding, bytes, row, &mut found);
                assert_eq!(bits(&found), bits(wanted), "{name}, row {row}");
            }
        }
    }
}

#[test]
fn a_part_may_be_read_from_any_byte_on() {
    for types in [&TYPES[..4], &TYPES[4..]] {
        let (gguf, expected) = mixed(types);
        for (name, _) in expected {
            let weight = gguf.weight(name).unwrap();
            for (index, part) in
                weight.encoding.parts(name, &weight.dims).unwrap().iter().enumerate()
            {
                let mut whole = vec![0; part.bytes() as usize];
                gguf.read_part(name, index, 0, &mut whole).unwrap();
                for (start, end) in [(0, 1), (1, 2), (3, whole.len()), (7, whole.len() - 1)] {
                    let mut piece = vec![0; end - start];
                    gguf.read_part(name, index, start as u64, &mut piece).unwrap();
                    assert_eq!(piece, whole[start..end], "{name}, part {index}, {start}..{end}");
                }
            }
        }
    }
}
