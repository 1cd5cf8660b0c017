//! `gemma4-export` as a user meets it.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use gemma4_exporter::checkpoint::Checkpoint;
use gemma4_exporter::quantize::Recipe;
use gemma4_exporter::synthetic::{TINY_CONFIG, write_checkpoint};
use safetensors::tensor::TensorView;
use serde_json::Value;

fn ci(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../ci").join(path)
}

fn export(dir: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_gemma4-export"))
        .current_dir(dir)
        .args(arguments)
        .output()
        .unwrap()
}

/// Exports, expects an error and returns its line.
fn refused(dir: &Path, arguments: &[&str], code: i32) -> String {
    let output = export(dir, arguments);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {stderr}");
    assert!(!dir.join("out").exists(), "{arguments:?} left something behind");
    stderr
}

/// A checkpoint of two layers under `hf/`, with its config changed.
fn checkpoint(dir: &Path, change: impl FnOnce(&mut Value)) {
    let mut config: Value = serde_json::from_str(TINY_CONFIG).unwrap();
    write_checkpoint(TINY_CONFIG, 1, &dir.join("hf")).unwrap();
    change(&mut config);
    fs::write(dir.join("hf/config.json"), config.to_string()).unwrap();
}

#[test]
fn the_whole_pipeline_runs_on_a_tiny_model() {
    let dir = tempfile::tempdir().unwrap();
    let output = export(dir.path(), &["--tiny-test"]);
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(stdout.starts_with("ok: "), "{stdout}");
}

#[test]
fn the_same_export_gives_the_same_bytes_from_any_directory() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = ci("models/tiny-chat-int4");
    let copy = dir.path().join("a copy");
    fs::create_dir(&copy).unwrap();
    for entry in fs::read_dir(&bundle).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), copy.join(entry.file_name())).unwrap();
    }
    for (from, to) in [(bundle.to_str().unwrap(), "one"), ("a copy", "two")] {
        let output = export(dir.path(), &["--prequantized", from, "--output-dir", to]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    for file in ["model.pte", "model.ptd"] {
        let read = |which: &str| fs::read(dir.path().join(which).join(file)).unwrap();
        assert!(read("one") == read("two"), "{file}");
    }
}

#[test]
fn impossible_flags_are_named() {
    let dir = tempfile::tempdir().unwrap();
    checkpoint(dir.path(), |_| {});
    let base = ["--model-dir", "hf", "--output-dir", "out"];
    for (flag, value, code, word) in [
        ("--max-seq-len", "257", 2, "257 is not between 1 and the model's 256 positions"),
        ("--max-seq-len", "0", 2, "--max-seq-len"),
        ("--max-prefill-chunk", "0", 2, "--max-prefill-chunk"),
        ("--max-prefill-chunk", "300", 2, "not between 1 and 256"),
        ("--recipe", "best", 2, "recipes are: default"),
        ("--chat-template", "none.jinja", 1, "none.jinja"),
    ] {
        let message = refused(dir.path(), &[&base[..], &[flag, value]].concat(), code);
        assert!(message.contains(word), "{flag} {value}: {message}");
    }
    refused(dir.path(), &["--output-dir", "out"], 2);
    refused(dir.path(), &["--model-dir", "hf", "--prequantized", "hf", "--output-dir", "out"], 2);
    let flags = ["--prequantized", "hf", "--output-dir", "out", "--device", "cpu"];
    assert!(refused(dir.path(), &flags, 2).contains("--device"));
    let message = refused(dir.path(), &["--prequantized", "hf", "--output-dir", "out"], 2);
    assert!(message.contains("--model-dir"), "{message}");
}

#[test]
fn other_family_members_are_refused_by_the_name_of_the_feature() {
    let dir = tempfile::tempdir().unwrap();
    for (config, word) in
        [("tiny-26b-a4b.json", "mixture-of-experts"), ("tiny-e2b.json", "per-layer embeddings")]
    {
        checkpoint(dir.path(), |_| {});
        fs::copy(ci("fixtures/configs").join(config), dir.path().join("hf/config.json")).unwrap();
        let message = refused(dir.path(), &["--model-dir", "hf", "--output-dir", "out"], 1);
        assert!(message.contains(word), "{config}: {message}");
        fs::remove_dir_all(dir.path().join("hf")).unwrap();
    }
}

#[test]
fn configs_and_weights_that_disagree_name_the_tensor() {
    for (key, value, word) in [
        ("num_hidden_layers", Value::from(3), "`layer_types` has 2 entries for 3 layers"),
        ("hidden_size", 128.into(), "embed_tokens.weight"),
        ("intermediate_size", 256.into(), "layers.0.mlp.gate_proj.weight"),
        ("vocab_size", 511.into(), "embed_tokens.weight"),
        ("num_attention_heads", 3.into(), "do not divide"),
        ("hidden_activation", "silu".into(), "silu"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        checkpoint(dir.path(), |config| config[key] = value.clone());
        let message = refused(dir.path(), &["--model-dir", "hf", "--output-dir", "out"], 1);
        assert!(message.contains(word), "{key} = {value}: {message}");
    }
    let dir = tempfile::tempdir().unwrap();
    checkpoint(dir.path(), |config| {
        config["num_hidden_layers"] = 3.into();
        config["layer_types"] =
            serde_json::json!(["sliding_attention", "full_attention", "full_attention"]);
    });
    let message = refused(dir.path(), &["--model-dir", "hf", "--output-dir", "out"], 1);
    assert!(message.contains("layers.2."), "{message}");
}

#[test]
fn a_config_saved_again_by_transformers_is_the_same_model() {
    let dir = tempfile::tempdir().unwrap();
    let hf = dir.path().join("hf");
    fs::create_dir(&hf).unwrap();
    for entry in fs::read_dir(ci("fixtures/tiny-31b")).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), hf.join(entry.file_name())).unwrap();
    }
    fs::copy(ci("fixtures/configs/tiny-31b-resaved.json"), hf.join("config.json")).unwrap();
    let original = ci("fixtures/tiny-31b");
    for (from, to) in [(original.to_str().unwrap(), "original"), ("hf", "resaved")] {
        let output = export(dir.path(), &["--model-dir", from, "--output-dir", to]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let program = |which: &str| {
        let bytes = fs::read(dir.path().join(which).join("model.pte")).unwrap();
        let mut program = gemma4_format::pte::decode(&bytes).unwrap().pte.program;
        program.source = gemma4_format::Source::default();
        program
    };
    let (original, resaved) = (program("original"), program("resaved"));
    assert_eq!(original.to_string(), resaved.to_string());
    assert_eq!(original.text.stop_tokens, [1, 50, 106], "the union of all files");
    assert_eq!(original.data_header, resaved.data_header);
}

/// A dense model under the names and with the metadata of torchao.
#[test]
fn a_torchao_bundle_is_prequantized() {
    let dir = tempfile::tempdir().unwrap();
    checkpoint(dir.path(), |_| {});
    let dense = Checkpoint::open(dir.path().join("hf")).unwrap();
    let names: Vec<&str> = dense.names().collect();
    let mut metadata: HashMap<String, String> = names
        .iter()
        .map(|name| ((*name).to_owned(), r#"{"_type": "Tensor"}"#.to_owned()))
        .collect();
    metadata.insert("tensor_names".to_owned(), serde_json::json!(names).to_string());
    let tensors: Vec<(&str, Vec<usize>, Vec<u8>)> = names
        .iter()
        .map(|name| {
            let weight = dense.weight(name).unwrap();
            let mut bytes = vec![0; weight.encoding.bytes(&weight.dims).unwrap() as usize];
            dense.read_part(name, 0, 0, &mut bytes).unwrap();
            (*name, weight.dims.iter().map(|d| *d as usize).collect(), bytes)
        })
        .collect();
    let views = tensors.iter().map(|(name, shape, bytes)| {
        (*name, TensorView::new(safetensors::Dtype::BF16, shape.clone(), bytes).unwrap())
    });
    let bytes = safetensors::serialize(views, Some(metadata)).unwrap();
    fs::create_dir(dir.path().join("torchao")).unwrap();
    fs::write(dir.path().join("torchao/model.safetensors"), bytes).unwrap();
    fs::copy(dir.path().join("hf/config.json"), dir.path().join("torchao/config.json")).unwrap();

    let message = refused(dir.path(), &["--model-dir", "torchao", "--output-dir", "out"], 2);
    assert!(message.contains("--prequantized"), "{message}");
    for (flag, from, to) in [("--prequantized", "torchao", "a"), ("--model-dir", "hf", "b")] {
        let output = export(dir.path(), &[flag, from, "--output-dir", to]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let data = |which: &str| fs::read(dir.path().join(which).join("model.ptd")).unwrap();
    assert!(data("a") == data("b"));
}

#[test]
fn every_recipe_gives_a_program_with_and_without_data() {
    let dir = tempfile::tempdir().unwrap();
    checkpoint(dir.path(), |_| {});
    for recipe in Recipe::names() {
        let mut programs = Vec::new();
        for source in [&["--model-dir", "hf"][..], &["--random", "hf/config.json", "--no-data"]] {
            let arguments = [source, &["--output-dir", "x", "--recipe", recipe]].concat();
            let output = export(dir.path(), &arguments);
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            let bytes = fs::read(dir.path().join("x/model.pte")).unwrap();
            let program = gemma4_format::pte::decode(&bytes).unwrap().pte.program;
            assert_eq!(program.source.recipe, recipe);
            let weights = program.weights.into_iter().map(|w| (w.name, w.dims, w.encoding));
            programs.push(weights.collect::<Vec<_>>());
        }
        assert_eq!(programs[0], programs[1], "{recipe}");
        let untied = programs[0].iter().any(|(name, ..)| name == "lm_head.weight");
        assert_eq!(untied, recipe.starts_with("torchao"), "{recipe}");
    }
}

#[test]
fn an_export_that_fails_leaves_the_old_files() {
    let dir = tempfile::tempdir().unwrap();
    checkpoint(dir.path(), |_| {});
    let arguments = ["--model-dir", "hf", "--output-dir", "out"];
    assert!(export(dir.path(), &arguments).status.success());
    let read = || fs::read(dir.path().join("out/model.ptd")).unwrap();
    let before = read();
    let shard = fs::read_dir(dir.path().join("hf"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| path.extension().is_some_and(|e| e == "safetensors"))
        .unwrap();
    let bytes = fs::read(&shard).unwrap();
    fs::write(&shard, &bytes[..bytes.len() / 2]).unwrap();
    let output = export(dir.path(), &arguments);
    assert_eq!(output.status.code(), Some(1));
    assert!(read() == before);
    assert_eq!(fs::read_dir(dir.path().join("out")).unwrap().count(), 2, "no temporary file");
}
