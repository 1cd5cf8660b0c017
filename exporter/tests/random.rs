//! `gemma4-export --random` writes models of any size.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;

use gemma4_exporter::quantize::Recipe;
use gemma4_exporter::synthetic::TINY_CONFIG;
use gemma4_runtime::cpu::Cpu;
use gemma4_runtime::{LoadedProgram, Session, SessionOptions};
use serde_json::Value;

/// Exports the tiny config, with changes, into a directory of that name.
fn export(dir: &Path, to: &str, change: impl FnOnce(&mut Value), arguments: &[&str]) {
    let mut config: Value = serde_json::from_str(TINY_CONFIG).expect("JSON");
    change(&mut config);
    fs::write(dir.join("config.json"), config.to_string()).expect("written");
    let output = command(dir, &[&["--output-dir", to], arguments].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn command(dir: &Path, arguments: &[&str]) -> Output {
    // RLIMIT_DATA counts all memory that is not a file's, in kilobytes.
    Command::new("sh")
        .args(["-c", "ulimit -d 150000 && exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_gemma4-export")])
        .args(["--random", "config.json"])
        .args(arguments)
        .current_dir(dir)
        .output()
        .expect("runs")
}

fn read(dir: &Path, which: &str, file: &str) -> Vec<u8> {
    fs::read(dir.join(which).join(file)).expect("readable")
}

#[test]
fn a_seed_gives_the_same_files_and_another_seed_others() {
    let dir = tempfile::tempdir().expect("a directory");
    for (to, seed) in [("a", "5"), ("b", "5"), ("c", "6")] {
        export(dir.path(), to, |_| {}, &["--seed", seed, "--recipe", "default"]);
    }
    for file in ["model.pte", "model.ptd"] {
        assert!(read(dir.path(), "a", file) == read(dir.path(), "b", file), "{file}");
        assert!(read(dir.path(), "a", file) != read(dir.path(), "c", file), "{file}");
    }
}

#[test]
fn random_models_of_every_recipe_run_with_usual_logits() {
    let dir = tempfile::tempdir().expect("a directory");
    let recipes = Recipe::names().map(|name| vec!["--recipe", name]);
    for arguments in recipes.chain([Vec::new()]) {
        export(dir.path(), "out", |_| {}, &arguments);
        let file = |name: &str| dir.path().join("out").join(name);
        let program = LoadedProgram::map(&file("model.pte"), &file("model.ptd")).expect("opens");
        program.verify_data(&|_, _| {}).expect("the digests are those of the weights");
        let cpu = Cpu::new(Arc::new(program)).expect("a device");
        let mut session = Session::new(&cpu, SessionOptions::default()).expect("small");
        session.prefill(&(1..40).collect::<Vec<u32>>()).expect("fits");
        let logits = session.logits().expect("after a call");
        let square = logits.iter().map(|x| x * x).sum::<f32>() / logits.len() as f32;
        assert!(logits.iter().all(|x| x.is_finite()), "{arguments:?}");
        assert!((0.1..10.0).contains(&square.sqrt()), "{arguments:?}: {square}");
    }
}

#[test]
fn memory_does_not_grow_with_the_model() {
    let dir = tempfile::tempdir().expect("a directory");
    // An embedding of 256 MiB, where the command may take 150 MB.
    export(dir.path(), "out", |config| config["vocab_size"] = (1 << 21).into(), &[]);
    let length = fs::metadata(dir.path().join("out/model.ptd")).expect("written").len();
    assert!(length > 256 << 20, "{length}");
}

#[test]
fn without_data_only_the_program_is_written() {
    let dir = tempfile::tempdir().expect("a directory");
    export(dir.path(), "out", |_| {}, &["--no-data"]);
    let entries = fs::read_dir(dir.path().join("out")).expect("a directory");
    let names: Vec<_> = entries.map(|entry| entry.expect("readable").file_name()).collect();
    assert_eq!(names, ["model.pte"]);
    let output = command(dir.path(), &["--output-dir", "other", "--seed", "x"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(!dir.path().join("other").exists());
}

#[test]
fn a_program_without_data_is_that_of_the_data_of_its_seed() {
    let dir = tempfile::tempdir().expect("a directory");
    let recipe = ["--seed", "9", "--recipe", "default"];
    export(dir.path(), "whole", |_| {}, &recipe);
    export(dir.path(), "program", |_| {}, &[&recipe[..], &["--no-data"]].concat());
    assert!(read(dir.path(), "whole", "model.pte") == read(dir.path(), "program", "model.pte"));
}
