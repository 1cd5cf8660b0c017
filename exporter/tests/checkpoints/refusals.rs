//! Every way in which a checkpoint can be unusable has its own sentence.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use crate::support::*;
use gemma4_exporter::Error;
use gemma4_exporter::checkpoint::{Checkpoint, Refusal};
use safetensors::Dtype;
use serde_json::json;

fn refusal(path: &Path) -> Refusal {
    match Checkpoint::open(path) {
        Err(Error::Checkpoint { refusal, path: named }) => {
            assert_eq!(named, path);
            *refusal
        }
        other => panic!("not refused: {other:?}"),
    }
}

/// Makes a good checkpoint, spoils it, and returns how it is refused.
fn spoiled(spoil: impl FnOnce(&Path)) -> Refusal {
    let dir = tempfile::tempdir().unwrap();
    write_checkpoint(dir.path(), &config(), &language_model());
    Checkpoint::open(dir.path()).unwrap();
    spoil(dir.path());
    refusal(dir.path())
}

/// The same with three shards.
fn spoiled_shards(spoil: impl FnOnce(&Path)) -> Refusal {
    let dir = tempfile::tempdir().unwrap();
    let shards: Vec<_> = language_model().chunks(4).map(<[Tensor]>::to_vec).collect();
    write_shards(dir.path(), &shards);
    Checkpoint::open(dir.path()).unwrap();
    spoil(dir.path());
    refusal(dir.path())
}

fn with_tensors(extra: impl IntoIterator<Item = Tensor>) -> Refusal {
    spoiled(|dir| {
        let tensors: Vec<_> = language_model().into_iter().chain(extra).collect();
        write_checkpoint(dir, &config(), &tensors);
    })
}

#[test]
fn what_is_no_checkpoint_directory() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(refusal(&dir.path().join("nowhere")), Refusal::Absent);
    write(dir.path(), "model.gguf", b"GGUF");
    assert_eq!(refusal(&dir.path().join("model.gguf")), Refusal::Gguf);
    assert_eq!(refusal(dir.path()), Refusal::Gguf);
    write(dir.path(), "model.safetensors", safetensors(&language_model()));
    assert_eq!(refusal(&dir.path().join("model.safetensors")), Refusal::File);
    let empty = tempfile::tempdir().unwrap();
    assert_eq!(refusal(empty.path()), Refusal::NoConfig);
    fs::create_dir(empty.path().join("snapshots")).unwrap();
    fs::create_dir(empty.path().join("refs")).unwrap();
    assert_eq!(refusal(empty.path()), Refusal::Cache);
}

#[test]
fn an_adapter() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "adapter_config.json", "{}");
    write(dir.path(), "adapter_model.safetensors", safetensors(&language_model()));
    assert_eq!(refusal(dir.path()), Refusal::Adapter);
    assert_eq!(spoiled(|dir| write(dir, "adapter_config.json", "{}")), Refusal::Adapter);
}

#[test]
fn no_weights_in_safetensors() {
    let without = |name: &'static str| {
        spoiled(|dir| {
            fs::remove_file(dir.join("model.safetensors")).unwrap();
            if !name.is_empty() {
                write(dir, name, "");
            }
        })
    };
    assert_eq!(without(""), Refusal::NoWeights);
    let file = "pytorch_model-00001-of-00002.bin";
    assert_eq!(without(file), Refusal::PyTorch { file: file.to_owned() });
    assert_eq!(without("gemma.gguf"), Refusal::Gguf);
    let shard = "model-00001-of-00002.safetensors";
    assert_eq!(without(shard), Refusal::NoIndex { shard: shard.to_owned() });
}

#[test]
fn a_config_that_is_no_config() {
    for text in ["", "{", "[1, 2", "\u{0}"] {
        let refusal = spoiled(|dir| write(dir, "config.json", text));
        assert!(matches!(&refusal, Refusal::Text { file, .. } if file == "config.json"), "{text}");
    }
    let refusal = spoiled(|dir| write(dir, "config.json", b"\xff\xfe"));
    assert!(matches!(refusal, Refusal::Text { .. }));
}

#[test]
fn other_models() {
    for (config, found) in [
        (
            json!({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}),
            "a model of type `llama` (LlamaForCausalLM)",
        ),
        (
            json!({"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}),
            "a model of type `gemma3` (Gemma3ForConditionalGeneration)",
        ),
        (
            json!({"model_type": "gemma4", "architectures": ["Gemma4ForSequenceClassification"]}),
            "a model of type `gemma4` (Gemma4ForSequenceClassification)",
        ),
        (json!({}), "a model without a `model_type`"),
        (json!([1]), "a model without a `model_type`"),
        (json!({"model_type": 4}), "a model without a `model_type`"),
    ] {
        let refusal = spoiled(|dir| write(dir, "config.json", config.to_string()));
        assert_eq!(refusal, Refusal::Architecture { found: found.to_owned() });
    }
}

#[test]
fn weights_quantized_by_others() {
    for (method, dtype) in [
        ("awq", Dtype::I32),
        ("gptq", Dtype::I32),
        ("compressed-tensors", Dtype::I8),
        ("bitsandbytes", Dtype::U8),
        ("fp8", Dtype::F8_E4M3),
    ] {
        for place in ["quantization_config", "text_config"] {
            let refusal = spoiled(|dir| {
                let mut config = config();
                let entry = json!({"quant_method": method});
                match place {
                    "text_config" => config[place]["quantization_config"] = entry,
                    _ => config[place] = entry,
                }
                let mut tensors = language_model();
                let name = tensors[4].name.clone();
                tensors[4] = Tensor::zeros(&name, dtype, &[4, 8]);
                write_checkpoint(dir, &config, &tensors);
            });
            assert!(
                matches!(&refusal, Refusal::Quantized { method: m, .. } if m == method),
                "{method}: {refusal:?}"
            );
        }
    }
}

#[test]
fn bundles_of_the_future() {
    let file = || "model.safetensors".to_owned();
    let with_metadata = |key: &str, value: &str| {
        let header = json!({"__metadata__": {key: value}}).to_string();
        spoiled(|dir| write(dir, "model.safetensors", raw_safetensors(&header, 0)))
    };
    let found = "2".to_owned();
    assert_eq!(with_metadata("gemma4.layout", "2"), Refusal::Layout { file: file(), found });
}

#[test]
fn missing_shards() {
    let file = "model-00002-of-00003.safetensors";
    let refusal = spoiled_shards(|dir| fs::remove_file(dir.join(file)).unwrap());
    assert_eq!(refusal, Refusal::MissingShards { file: file.to_owned(), missing: 1, total: 3 });
}

#[test]
fn an_index_that_does_not_fit() {
    let spoil_index = |edit: fn(&mut serde_json::Value)| {
        spoiled_shards(|dir| {
            let path = dir.join("model.safetensors.index.json");
            let mut index = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
            edit(&mut index);
            fs::write(path, index.to_string()).unwrap();
        })
    };
    let refusal = spoil_index(|index| index["weight_map"] = json!({}));
    assert_eq!(refusal, Refusal::NoWeights);
    let refusal = spoil_index(|index| *index = json!({"weight_map": 1}));
    assert!(matches!(refusal, Refusal::Text { .. }));
    let refusal = spoil_index(|index| {
        index["weight_map"]["model.language_model.layers.7.layer_scalar"] =
            json!("model-00001-of-00003.safetensors");
    });
    assert_eq!(
        refusal,
        Refusal::StaleIndex {
            tensor: "model.language_model.layers.7.layer_scalar".to_owned(),
            file: "model-00001-of-00003.safetensors".to_owned(),
            absent: 1,
            total: language_model().len() + 1,
        }
    );
    for file in ["../model-00001-of-00003.safetensors", "/etc/passwd", "..", "a/b", ""] {
        let refusal = spoiled_shards(|dir| {
            let index = json!({"weight_map": {"x": file}});
            write(dir, "model.safetensors.index.json", index.to_string());
        });
        assert_eq!(refusal, Refusal::ShardName { file: file.to_owned() });
    }
}

#[test]
fn two_sets_of_weights() {
    let refusal =
        spoiled_shards(|dir| write(dir, "model.safetensors", safetensors(&language_model())));
    assert_eq!(refusal, Refusal::TwoSets);
}

#[test]
fn a_tensor_that_stands_twice() {
    let name = "model.language_model.norm.weight";
    let other = with_tensors([Tensor::random("model.norm.weight", &[64])]);
    let file = || "model.safetensors".to_owned();
    let twice = |first, second| Refusal::Duplicate { tensor: "norm.weight".into(), first, second };
    assert_eq!(other, twice(file(), file()));

    let in_two_shards = spoiled_shards(|dir| {
        let tensors = language_model();
        let mut second = tensors[4..].to_vec();
        second.push(tensors[1].clone());
        write_shards(dir, &[tensors[..4].to_vec(), second]);
    });
    let shard = |at| format!("model-{at:05}-of-00002.safetensors");
    assert_eq!(in_two_shards, twice(shard(1), shard(2)));

    let entry = r#"{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}"#;
    let header = format!("{{\"{name}\":{entry},\"{name}\":{entry}}}");
    let in_one_header = spoiled(|dir| write(dir, "model.safetensors", raw_safetensors(&header, 2)));
    assert_eq!(
        in_one_header,
        Refusal::Duplicate { tensor: name.to_owned(), first: file(), second: file() }
    );
}

#[test]
fn placeholders_of_git() {
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n";
    for file in ["model.safetensors", "config.json", "generation_config.json"] {
        let refusal = spoiled(|dir| write(dir, file, pointer));
        assert_eq!(refusal, Refusal::LfsPointer { file: file.to_owned() });
    }
}

#[test]
fn every_length_but_the_right_one() {
    let whole = safetensors(&language_model());
    let dir = tempfile::tempdir().unwrap();
    write_checkpoint(dir.path(), &config(), &language_model());
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    for length in (0..header + 8).step_by(7).chain([header - 1, header, whole.len() - 1]) {
        write(dir.path(), "model.safetensors", &whole[..length]);
        match refusal(dir.path()) {
            Refusal::Truncated { need, have, .. } => {
                assert!(have == length as u64 && need > have, "{length}");
            }
            other => panic!("{length}: {other:?}"),
        }
    }
    write(dir.path(), "model.safetensors", [whole, vec![0; 3]].concat());
    let file = "model.safetensors".to_owned();
    assert_eq!(refusal(dir.path()), Refusal::Trailing { file, extra: 3 });
}

#[test]
fn hostile_headers() {
    let huge = u64::MAX;
    for (header, data) in [
        ("".to_owned(), 0),
        ("[]".to_owned(), 0),
        ("{\"a\":1}".to_owned(), 0),
        (r#"{"a":{"dtype":"BF16","shape":[3],"data_offsets":[0,4]}}"#.to_owned(), 4),
        (r#"{"a":{"dtype":"BF16","shape":[1],"data_offsets":[2,4]}}"#.to_owned(), 4),
        (r#"{"a":{"dtype":"BF16","shape":[1],"data_offsets":[2,0]}}"#.to_owned(), 4),
        (r#"{"a":{"dtype":"Q9","shape":[1],"data_offsets":[0,2]}}"#.to_owned(), 2),
        (format!(r#"{{"a":{{"dtype":"U8","shape":[{huge}],"data_offsets":[0,{huge}]}}}}"#), 0),
        (format!(r#"{{"a":{{"dtype":"BF16","shape":[{huge},{huge}],"data_offsets":[0,2]}}}}"#), 2),
    ] {
        let refusal = spoiled(|dir| {
            write(dir, "model.safetensors", raw_safetensors(&header, data));
        });
        assert!(matches!(refusal, Refusal::NotSafetensors { .. }), "{header}: {refusal:?}");
    }
    let refusal = spoiled(|dir| write(dir, "model.safetensors", [0xff; 64]));
    assert!(matches!(refusal, Refusal::NotSafetensors { .. }));
    let refusal =
        spoiled(|dir| write(dir, "model.safetensors", [b"GGUF".as_slice(), &[0; 60]].concat()));
    assert!(matches!(refusal, Refusal::NotSafetensors { why, .. } if why.contains("GGUF")));
}

#[test]
fn flipped_bits_of_a_header_never_panic() {
    let dir = tempfile::tempdir().unwrap();
    let tensors = &language_model()[..2];
    write_checkpoint(dir.path(), &config(), tensors);
    let mut bytes = safetensors(tensors);
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    for bit in 0..header * 8 {
        bytes[bit / 8] ^= 1 << (bit % 8);
        write(dir.path(), "model.safetensors", &bytes);
        // Many flips only rename a tensor, which shows when the model asks for its weights.
        if let Ok(checkpoint) = Checkpoint::open(dir.path()) {
            for name in checkpoint.names() {
                let _ = checkpoint.weight(name);
            }
        }
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
}

#[test]
fn directories_in_the_place_of_files() {
    for name in ["model.safetensors", "config.json"] {
        let dir = tempfile::tempdir().unwrap();
        write_checkpoint(dir.path(), &config(), &language_model());
        fs::remove_file(dir.path().join(name)).unwrap();
        fs::create_dir(dir.path().join(name)).unwrap();
        let error = Checkpoint::open(dir.path()).unwrap_err();
        assert!(matches!(&error, Error::Io { path, .. } if path.ends_with(name)), "{error}");
    }
}

#[test]
fn weights_that_are_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let mut tensors = language_model();
    tensors.push(Tensor::zeros("model.language_model.layers.0.scale", Dtype::F64, &[1]));
    tensors.push(Tensor::zeros("model.language_model.layers.1.scale", Dtype::BF16, &[]));
    write_checkpoint(dir.path(), &config(), &tensors);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let refusal = |error: Error| match error {
        Error::Checkpoint { refusal, .. } => *refusal,
        other => panic!("{other}"),
    };

    let missing = checkpoint.require(["norm.weight", "q", "embed_tokens.weight", "r"]);
    assert_eq!(
        refusal(missing.unwrap_err()),
        Refusal::MissingTensors { tensor: "q".to_owned(), missing: 2, total: 4 }
    );
    for (name, dtype, shape) in
        [("layers.0.scale", "F64", vec![1]), ("layers.1.scale", "BF16", vec![])]
    {
        let unusable = Refusal::Unusable {
            tensor: name.to_owned(),
            dtype: dtype.to_owned(),
            shape,
            file: "model.safetensors".to_owned(),
        };
        assert_eq!(refusal(checkpoint.require([name]).unwrap_err()), unusable);
        assert_eq!(refusal(checkpoint.weight(name).unwrap_err()), unusable);
    }
    let known: BTreeSet<&str> = checkpoint.names().filter(|n| !n.ends_with("scale")).collect();
    assert_eq!(
        refusal(checkpoint.refuse_unused(&known).unwrap_err()),
        Refusal::UnknownTensors { tensor: "layers.0.scale".to_owned(), count: 2 }
    );
}
