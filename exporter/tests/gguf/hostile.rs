//! Files that are refused: each with the file and the key or tensor, none with a panic.

use gemma4_exporter::gguf::{Gguf, Refusal, tokenizer_json};
use gemma4_exporter::source::ModelSource;
use proptest::prelude::*;

use crate::support::{File, Tensor, bools, f32, i32s, model, text, u32, write};

fn refusal(bytes: &[u8]) -> Refusal {
    let (_dir, path) = write(bytes);
    match Gguf::open(&path).unwrap_err() {
        gemma4_exporter::Error::Gguf { refusal, .. } => *refusal,
        other => panic!("{other}"),
    }
}

/// What is said of the model after a change.
fn changed(change: impl FnOnce(&mut File)) -> String {
    let mut file = model();
    change(&mut file);
    refusal(&file.bytes()).to_string()
}

#[test]
fn other_bytes_are_refused() {
    assert_eq!(refusal(b"GGML and so on"), Refusal::NotGguf);
    assert_eq!(refusal(b"version https://git-lfs"), Refusal::LfsPointer);
    assert_eq!(refusal(b"GGUF\0\0\0\x03 and so on"), Refusal::BigEndian);
    assert_eq!(refusal(b"GGUF\x01\0\0\0 and so on"), Refusal::Version(1));
    assert!(matches!(refusal(b""), Refusal::Truncated { .. }));
    let (_dir, path) = write(b"");
    let error = Gguf::open(path.with_extension("not-there")).unwrap_err().to_string();
    assert!(error.contains("model.not-there"), "{error}");
}

#[test]
fn every_truncation_is_an_error() {
    let bytes = model().bytes();
    let header = model().header().len();
    let (_dir, path) = write(&bytes);
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    for length in (0..header + 64).rev().chain([bytes.len() - 1]) {
        // The sizes go down, but for the last.
        if length == bytes.len() - 1 {
            std::fs::write(&path, &bytes[..length]).unwrap();
        } else {
            file.set_len(length as u64).unwrap();
        }
        assert!(Gguf::open(&path).is_err(), "{length} bytes");
    }
    let Refusal::Truncated { what, .. } = refusal(&bytes[..bytes.len() - 1]) else { panic!() };
    assert_eq!(what, "the tensor `blk.1.layer_output_scale.weight`");
}

#[test]
fn counts_and_lengths_are_checked_before_anything_is_allocated() {
    let huge = u64::MAX.to_le_bytes();
    let header = model().header();
    for at in [8, 16, 24] {
        for value in [u64::MAX, 1 << 62, 1 << 40, 1 << 28] {
            let mut bytes = model().bytes();
            bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
            let refusal = refusal(&bytes);
            let expected = matches!(refusal, Refusal::Truncated { .. } | Refusal::Malformed { .. });
            assert!(expected, "{refusal}");
        }
    }
    for kind in [0u32, 8, 12] {
        let value = [9u32.to_le_bytes().as_slice(), &kind.to_le_bytes(), &huge].concat();
        let said = changed(|file| file.set("x", value));
        assert!(said.contains("is truncated: the key `x` needs"), "{said}");
    }
    let said = changed(|file| file.set("x", [&8u32.to_le_bytes()[..], &huge].concat()));
    assert!(said.contains("is truncated: the key `x` needs"), "{said}");
    // Arrays of arrays, deep or not, and unknown types.
    for kind in [9u32, 13, 77] {
        let value = [9u32, kind, 1, 0].into_iter().flat_map(u32::to_le_bytes).collect();
        let said = changed(|file| file.set("x", value));
        assert_eq!(said, format!("is malformed: the key `x` has a value of type {kind}"));
    }
    // A sparse file may be long: the header is bounded.
    let (_dir, path) = write(&header);
    let mut value = header.clone();
    value.truncate(24);
    value[16..24].copy_from_slice(&1u64.to_le_bytes());
    value.extend([1, 0, 0, 0, 0, 0, 0, 0, b'x', 8, 0, 0, 0]);
    value.extend((1u64 << 39).to_le_bytes());
    std::fs::write(&path, value).unwrap();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(1 << 40).unwrap();
    let error = Gguf::open(&path).unwrap_err().to_string();
    assert!(error.contains("the key `x` makes a header above 256 MiB"), "{error}");
}

#[test]
fn tensors_that_can_not_be_are_refused() {
    let name = "blk.0.attn_q.weight";
    let tensor = |change: fn(&mut Tensor)| changed(|file| change(file.tensor(name)));
    for (said, wanted) in [
        (tensor(|t| t.dims = vec![]), "has 0 dimensions"),
        (tensor(|t| t.dims = vec![1; 5]), "has 5 dimensions"),
        (tensor(|t| t.dims = vec![256, 0]), "has a dimension of 0"),
        (tensor(|t| t.dims = vec![1 << 33, 1]), "has a dimension of 8589934592"),
        (tensor(|t| t.dims = vec![1 << 31; 4]), "has a dimension of"),
        (tensor(|t| t.dims = vec![1 << 31, 1 << 31]), "`blk.0.attn_q.weight` is too large"),
        (tensor(|t| t.dims = vec![1 << 31, 1 << 30]), "needs 9223372036854775808 bytes"),
        (tensor(|t| t.kind = 10), "as Q2_K, which is not supported; take a file of another"),
        (tensor(|t| t.kind = 16), "as IQ2_XXS"),
        (tensor(|t| t.kind = 39), "as MXFP4"),
        (tensor(|t| t.kind = 34), "as TQ1_0"),
        (tensor(|t| t.kind = 4000), "as a type that this build does not know"),
        (
            tensor(|t| {
                t.kind = 12;
                t.dims = vec![128, 256];
            }),
            "has rows of 128 numbers, no multiple of 256",
        ),
        (tensor(|t| t.name = "blk.0.attn_k.weight".to_owned()), "a second time"),
        (tensor(|t| t.name = "blk.00.attn_q.weight".to_owned()), "`blk.00.attn_q.weight`, which"),
        (tensor(|t| t.name = "blk.2.attn_q.weight".to_owned()), "`blk.2.attn_q.weight`, which"),
        (tensor(|t| t.name = "norm.weight".to_owned()), "`norm.weight`, which this model does not"),
    ] {
        assert!(said.contains(wanted), "{said}");
    }
    let bytes = model().bytes();
    let header = model().header();
    // The last tensor's offset ends the header.
    for (offset, wanted) in [(32u64, "overlaps"), (1, "no multiple of 32"), (1 << 63, "truncated")]
    {
        let mut bytes = bytes.clone();
        bytes[header.len() - 8..header.len()].copy_from_slice(&offset.to_le_bytes());
        let said = refusal(&bytes).to_string();
        assert!(said.contains(wanted) && said.contains("blk.1.layer_output_scale"), "{said}");
    }
}

#[test]
fn keys_that_can_not_be_are_refused() {
    let key = |key: &str, value: Vec<u8>| changed(|file| file.set(key, value));
    for (said, wanted) in [
        (key("general.architecture", text("llama")), "architecture `llama`"),
        (key("general.architecture", u32(1)), "it is no string"),
        (key("general.alignment", u32(0)), "0 is no power of two"),
        (key("general.alignment", u32(48)), "48 is no power of two"),
        (key("gemma4.block_count", u32(0)), "0 layers"),
        (key("gemma4.block_count", u32(1 << 30)), "1073741824 layers"),
        (key("gemma4.block_count", u32(3)), "it has 2 entries, not 3"),
        (key("gemma4.expert_count", u32(8)), "has mixture-of-experts blocks, as in 26B-A4B (`gem"),
        (
            key("gemma4.embedding_length_per_layer_input", u32(256)),
            "has per-layer embeddings, as in E2B and E4B",
        ),
        (key("gemma4.attention.shared_kv_layers", u32(4)), "layers that share keys and values"),
        (key("gemma4.rope.scaling.type", text("yarn")), "`yarn` is not supported"),
        (key("gemma4.feed_forward_length", i32s(&[4, 8])), "layers with 4 and with 8"),
        (key("gemma4.attention.head_count_kv", i32s(&[2, -1])), "an entry that is no u32"),
        (
            key("gemma4.attention.sliding_window_pattern", bools(&[true, true])),
            "the last layer is a sliding one",
        ),
        (key("gemma4.attention.value_length", u32(32)), "32, where keys have 64"),
        (key("gemma4.rope.dimension_count_swa", u32(16)), "16, where keys have 32"),
        (key("gemma4.rope.freq_base", f32(f32::NAN)), "it is no finite float32"),
        (key("tokenizer.ggml.bos_token_id", u32(64)), "64 is outside a vocabulary of 64"),
        (
            changed(|file| file.keys.push(("gemma4.block_count".to_owned(), u32(9)))),
            "stands twice, with two values",
        ),
        (
            changed(|file| file.keys.retain(|(key, _)| key != "gemma4.context_length")),
            "lacks the key `gemma4.context_length`",
        ),
        (
            changed(|file| file.tensor("rope_freqs.weight").bytes[..4].fill(0)),
            "it has 0, where pairs have 1 or, unrotated, 1e30",
        ),
        (
            changed(|file| file.tensors.retain(|tensor| tensor.name != "token_embd.weight")),
            "lacks the tensor `token_embd.weight`",
        ),
    ] {
        assert!(said.contains(wanted), "{said}");
    }
    // The same thing twice is nothing wrong.
    let mut file = model();
    file.keys.push(("gemma4.block_count".to_owned(), u32(2)));
    let (_dir, path) = file.write();
    Gguf::open(path).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

    /// Whatever a header says, opening ends in a model or in an error.
    #[test]
    fn no_change_of_bytes_makes_a_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4)
    ) {
        let mut bytes = model().bytes();
        let header = model().header().len();
        for (at, value) in changes {
            bytes[at.index(header)] = value;
        }
        let (_dir, path) = write(&bytes);
        let _ = tokenizer_json(&path);
        if let Ok(gguf) = Gguf::open(&path) {
            let _ = gemma4_exporter::model::Config::parse(gguf.config_json());
        }
    }
}
