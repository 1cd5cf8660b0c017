//! `gemma4-export --gguf` as a user meets it.

use std::process::{Command, Output};

use crate::support::{model, text};

fn run(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_gemma4-export")).args(arguments).output().unwrap()
}

#[test]
fn a_file_becomes_a_program() {
    let (dir, path) = model().write();
    let out = dir.path().join("out");
    let arguments = ["--gguf", path.to_str().unwrap(), "--output-dir", out.to_str().unwrap()];
    let done = run(&arguments);
    assert_eq!(done.status.code(), Some(0), "{}", String::from_utf8_lossy(&done.stderr));
    assert!(out.join("model.pte").exists() && out.join("model.ptd").exists());
    let twice = run(&[&arguments[..], &["--recipe", "default"]].concat());
    assert_eq!(twice.status.code(), Some(2));
}

#[test]
fn a_refusal_is_one_sentence_with_the_file() {
    let mut file = model();
    file.set("general.architecture", text("llama"));
    let (_dir, path) = file.write();
    let path = path.to_str().unwrap();
    let done = run(&["--gguf", path, "--output-dir", "nowhere"]);
    assert_eq!(done.status.code(), Some(1));
    assert_eq!(
        String::from_utf8(done.stderr).unwrap(),
        format!(
            "error: `{path}` is a model of architecture `llama`; this exporter reads `gemma4`\n"
        )
    );
}
