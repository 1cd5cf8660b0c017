//! What an open checkpoint tells and reads.

use std::collections::BTreeSet;
use std::fs;

use crate::support::*;
use gemma4_exporter::checkpoint::{Checkpoint, Layout};
use gemma4_exporter::source::ModelSource;
use gemma4_format::{DType, Encoding};
use safetensors::Dtype;
use serde_json::json;

#[test]
fn names_lose_their_prefix_and_towers_are_skipped() {
    let dir = tempfile::tempdir().unwrap();
    let mut tensors = language_model();
    for tower in ["vision_tower", "embed_vision", "audio_tower", "embed_audio"] {
        tensors.push(Tensor::zeros(&format!("model.{tower}.x"), Dtype::I64, &[]));
    }
    write_checkpoint(dir.path(), &config(), &tensors);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.layout(), Layout::HuggingFace);
    assert_eq!(checkpoint.names().count(), language_model().len());
    let weight = checkpoint.weight("layers.1.mlp.up_proj.weight").unwrap();
    assert_eq!(weight.dims, [128, 64]);
    assert_eq!(weight.encoding, Encoding::Dense(DType::BF16));
    let known: BTreeSet<&str> = checkpoint.names().filter(|n| *n != "norm.weight").collect();
    assert_eq!(checkpoint.unused(&known).collect::<Vec<_>>(), ["norm.weight"]);
}

#[test]
fn a_text_only_checkpoint_has_the_same_names() {
    let dir = tempfile::tempdir().unwrap();
    let tensors: Vec<Tensor> = language_model()
        .into_iter()
        .map(|t| Tensor { name: t.name.replace("model.language_model.", "model."), ..t })
        .chain([Tensor::random("lm_head.weight", &[96, 64])])
        .collect();
    let config = json!({"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text"});
    write_checkpoint(dir.path(), &config, &tensors);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    for name in ["embed_tokens.weight", "norm.weight", "layers.0.layer_scalar", "lm_head.weight"] {
        assert!(checkpoint.contains(name), "{name}");
    }
}

#[test]
fn parts_and_rows_are_what_was_written() {
    let dir = tempfile::tempdir().unwrap();
    let tensors = language_model();
    write_shards(dir.path(), &[tensors[..3].to_vec(), tensors[3..].to_vec()]);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    for tensor in &tensors {
        let name = tensor.name.strip_prefix("model.language_model.").unwrap();
        let mut bytes = vec![0; tensor.bytes.len() - 2];
        checkpoint.read_part(name, 0, 2, &mut bytes).unwrap();
        assert_eq!(bytes, tensor.bytes[2..], "{name}");
    }
    let embed = &tensors[0];
    let rows = checkpoint.read_rows_f32("embed_tokens.weight", 90..96).unwrap();
    let expected: Vec<f32> =
        (90 * 64..96 * 64).map(|at| DType::BF16.read(&embed.bytes, at)).collect();
    assert_eq!(rows, expected);
}

#[test]
fn float_types_are_read_alike() {
    let dir = tempfile::tempdir().unwrap();
    let values = [0.5f32, -2.0, 0.0, 1.25];
    let f16: Vec<u8> = values.iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect();
    let f32: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let shape = vec![2, 2];
    let tensors = [
        Tensor::bf16("model.a.weight", &shape, values),
        Tensor {
            name: "model.b.weight".into(),
            dtype: Dtype::F16,
            shape: shape.clone(),
            bytes: f16,
        },
        Tensor { name: "model.c.weight".into(), dtype: Dtype::F32, shape, bytes: f32 },
    ];
    write_checkpoint(dir.path(), &config(), &tensors);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    for name in ["a.weight", "b.weight", "c.weight"] {
        assert_eq!(checkpoint.read_rows_f32(name, 0..2).unwrap(), values, "{name}");
    }
}

#[test]
fn the_chat_template_is_found_in_each_of_its_places() {
    let dir = tempfile::tempdir().unwrap();
    write_checkpoint(dir.path(), &config(), &language_model());
    let open = || Checkpoint::open(dir.path()).unwrap();
    assert_eq!(open().chat_template().unwrap(), None);
    write(dir.path(), "tokenizer_config.json", json!({"bos_token": "<bos>"}).to_string());
    assert_eq!(open().chat_template().unwrap(), None);
    write(dir.path(), "tokenizer_config.json", json!({"chat_template": "one"}).to_string());
    assert_eq!(open().chat_template().unwrap().unwrap(), "one");
    let named = |a: &str, b: &str| {
        json!({"chat_template": [
            {"name": a, "template": "first"}, {"name": b, "template": "second"}
        ]})
    };
    write(dir.path(), "tokenizer_config.json", named("tool_use", "default").to_string());
    assert_eq!(open().chat_template().unwrap().unwrap(), "second");
    write(dir.path(), "tokenizer_config.json", named("tool_use", "rag").to_string());
    let error = open().chat_template().unwrap_err().to_string();
    assert!(error.contains("tool_use, rag"), "{error}");
    write(dir.path(), "chat_template.jinja", "file");
    assert_eq!(open().chat_template().unwrap().unwrap(), "file");
}

#[test]
fn identity_is_that_of_the_contents() {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let identity =
        |dir: &tempfile::TempDir| Checkpoint::open(dir.path()).unwrap().identity().to_owned();
    write_checkpoint(a.path(), &config(), &language_model());
    write_checkpoint(b.path(), &config(), &language_model());
    assert_eq!(identity(&a), identity(&b));
    assert_eq!(identity(&a).len(), 64);
    let mut other = config();
    other["text_config"]["rms_norm_eps"] = json!(1e-5);
    write(b.path(), "config.json", other.to_string());
    assert_ne!(identity(&a), identity(&b));
    write_checkpoint(b.path(), &config(), &language_model()[1..]);
    assert_ne!(identity(&a), identity(&b));
}

#[test]
fn a_bf16_checkpoint_from_quantization_aware_training_is_accepted() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config();
    config["quantization_config"] = json!({"group_size": 32});
    write_checkpoint(dir.path(), &config, &language_model());
    Checkpoint::open(dir.path()).unwrap();
}

#[test]
fn an_index_that_names_the_single_file_is_accepted() {
    let dir = tempfile::tempdir().unwrap();
    write_checkpoint(dir.path(), &config(), &language_model());
    let index = json!({"weight_map": {"model.language_model.norm.weight": "model.safetensors"}});
    write(dir.path(), "model.safetensors.index.json", index.to_string());
    Checkpoint::open(dir.path()).unwrap();
}

#[test]
fn a_read_only_directory_is_enough() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    write_checkpoint(dir.path(), &config(), &language_model());
    let mode = |mode| fs::set_permissions(dir.path(), fs::Permissions::from_mode(mode)).unwrap();
    mode(0o555);
    let opened = Checkpoint::open(dir.path());
    mode(0o755);
    opened.unwrap();
}

#[test]
fn the_fixtures_open() {
    let Some(fixtures) = crate::support::fixtures("the_fixtures_open") else { return };
    for (name, weights) in [("tiny-31b", 112), ("tiny-chat", 168)] {
        let checkpoint = Checkpoint::open(fixtures.join("ckpt").join(name)).unwrap();
        assert_eq!(checkpoint.names().count(), weights, "{name}");
        checkpoint.require(checkpoint.names()).unwrap();
        assert!(checkpoint.tokenizer_json().unwrap().is_some());
        assert!(checkpoint.chat_template().unwrap().is_some());
    }
}
