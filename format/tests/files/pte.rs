//! The program container: round trip, and every way in which bytes can be wrong.

use super::common;

use gemma4_format::pte::{self, MAGIC};
use gemma4_format::{Error, Method, Op, Operand, ValueType};

fn encoded() -> Vec<u8> {
    pte::encode(&common::pte()).unwrap()
}

#[test]
fn round_trip_gives_the_same_bytes() {
    let bytes = encoded();
    let loaded = pte::decode(&bytes).unwrap();
    assert_eq!(loaded.pte.program.to_string(), common::program().to_string());
    assert_eq!(loaded.pte.tokenizer, b"{}");
    assert_eq!(loaded.pte.chat_template, "{{ messages }}");
    assert_eq!(pte::encode(&loaded.pte).unwrap(), bytes);
}

#[test]
fn every_truncation_is_refused() {
    let bytes = encoded();
    for length in 0..bytes.len() {
        assert!(pte::decode(&bytes[..length]).is_err(), "accepted {length} bytes");
    }
    let error = pte::decode(&bytes[..bytes.len() - 1]).unwrap_err();
    assert!(matches!(error, Error::Truncated { .. }), "{error}");
}

#[test]
fn trailing_bytes_are_refused() {
    let mut bytes = encoded();
    bytes.push(0);
    assert!(matches!(pte::decode(&bytes), Err(Error::Trailing { extra: 1 })));
}

#[test]
fn every_single_bit_flip_is_refused() {
    let mut bytes = encoded();
    for bit in 0..bytes.len() * 8 {
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert!(pte::decode(&bytes).is_err(), "accepted with bit {bit} flipped");
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
}

#[test]
fn other_versions_and_features_are_named() {
    let flipped = |at: usize, value: u8| {
        let mut bytes = encoded();
        bytes[at] = value;
        pte::decode(&bytes).unwrap_err().to_string()
    };
    assert!(flipped(8, 9).contains("format version 9.0"));
    assert!(flipped(10, 77).contains(&format!("format version {}.77", pte::MAJOR)));
    assert!(flipped(20, 1).contains("features"));
}

#[test]
fn other_kinds_of_files_are_recognised() {
    let cases: [(&[u8], &str); 6] = [
        (b"", "empty"),
        (b"GGUF\x03\0\0\0 and so on", "GGUF"),
        (b"\x1c\0\0\0ET12 and so on", "ExecuTorch program"),
        (b"\x1c\0\0\0FT01 and so on", "ExecuTorch data"),
        (b"\x40\0\0\0\0\0\0\0{\"a\":1}", "safetensors"),
        (b"PK\x03\x04 and so on", "zip"),
    ];
    for (bytes, word) in cases {
        let error = pte::decode(bytes).unwrap_err().to_string();
        assert!(error.contains(word), "{error:?} does not say {word:?}");
    }
}

/// Files whose checksums are right and whose contents are hostile: what a forger would write.
#[test]
fn forged_programs_are_refused() {
    type Change<'a> = &'a dyn Fn(&mut gemma4_format::Program);
    let forge = |change: Change<'_>| {
        let mut program = common::program();
        change(&mut program);
        let mut pte = common::pte();
        pte.program = program;
        pte::encode(&pte).expect_err("accepted a forged program").to_string()
    };
    let cases: [(Change<'_>, &str); 23] = [
        (&|p| p.methods[0].nodes[0].args[1] = Operand::Weight(99), "does not exist"),
        (&|p| p.methods[0].nodes[3].args[0] = Operand::Value(99), "does not exist"),
        (&|p| p.methods[0].nodes[3].args[0] = Operand::Value(9), "does not exist"),
        (&|p| p.methods[1].nodes[5].args[1] = Operand::Value(3), "must read the input"),
        (&|p| p.methods[1].nodes[0].args[0] = Operand::Value(3), "must read the input"),
        (&|p| p.methods[0].nodes[4].op = Op::SplitHeads { heads: 0 }, "0 heads"),
        (&|p| p.methods[0].nodes[2].op = Op::RmsNorm { eps: f32::NAN }, "eps"),
        (&|p| p.methods[1].max_rows = 17, "too short"),
        (&|p| p.methods[1].max_rows = 1 << 30, "rows a call"),
        (&|p| p.methods[0].outputs[0].value = 77, "is no value"),
        (&|p| p.methods[0].inputs[0].fact.dtype = ValueType::F32, "does not take"),
        (&|p| p.weights[1].name = "k_proj.weight".to_owned(), "stands twice"),
        (&|p| p.weights[0].dims = vec![u32::MAX, u32::MAX], "too large"),
        (&|p| p.max_context = u32::MAX, "context"),
        (&|p| p.text.stop_tokens = vec![96], "outside the vocabulary"),
        (&|p| p.methods.truncate(1), "no `prefill`"),
        (&|p| p.methods.extend(vec![p.methods[0].clone(); 62]), "there are 65"),
        (&|p| p.methods[0].inputs = vec![p.methods[0].inputs[0].clone(); 65], "65 inputs"),
        (&|p| p.methods[1].nodes = vec![p.methods[1].nodes[0].clone(); 16_385], "16385 nodes"),
        // A ring of 16 rows under a window of 8.
        (&|p| p.methods[2].max_rows = 10, "too short"),
        (
            &|p| p.methods[2] = Method { name: "verify".to_owned(), ..p.methods[1].clone() },
            "6 inputs instead of 2",
        ),
        (&|p| p.methods[2].outputs[1].value -= 2, "no output `logits: f32[T, 96]`"),
        (&|p| p.methods[1].name = "verify".to_owned(), "stands twice"),
    ];
    for (i, (change, word)) in cases.iter().enumerate() {
        let error = forge(change);
        assert!(error.contains(word), "case {i}: {error:?} does not say {word:?}");
    }
}

#[test]
fn a_hostile_length_allocates_nothing() {
    // A program section that claims 2^60 weights, with honest checksums around it.
    let mut section = vec![0u8; 6];
    section.extend([253, 0, 0, 0, 0, 0, 0, 0, 16]);
    let bytes = container(&section);
    assert!(matches!(pte::decode(&bytes), Err(Error::Malformed { .. })));
}

/// Wraps a program section in a container whose checksums agree.
fn container(section: &[u8]) -> Vec<u8> {
    let sections: [(u32, &[u8]); 3] = [(1, section), (2, b""), (3, b"")];
    let mut table = Vec::new();
    let mut offset = 64 + 3 * 56;
    for (kind, bytes) in sections {
        table.extend(kind.to_le_bytes());
        table.extend(0u32.to_le_bytes());
        table.extend((offset as u64).to_le_bytes());
        table.extend((bytes.len() as u64).to_le_bytes());
        table.extend(blake3::hash(bytes).as_bytes());
        offset += bytes.len();
    }
    let mut file = MAGIC.to_vec();
    file.extend(pte::MAJOR.to_le_bytes());
    file.extend(pte::MINOR.to_le_bytes());
    file.extend(3u32.to_le_bytes());
    file.extend(pte::FEATURES.to_le_bytes());
    file.extend((offset as u64).to_le_bytes());
    let id = *blake3::Hasher::new().update(&file).update(&table).finalize().as_bytes();
    file.extend(id);
    file.extend(table);
    file.extend(section);
    file
}
