//! The command `gemma4-quantize` as a user meets it.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use crate::support::*;

fn run(dir: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_gemma4-quantize"))
        .current_dir(dir)
        .args(arguments)
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn it_writes_a_bundle_and_a_report() {
    let dir = tempfile::tempdir().unwrap();
    write_checkpoint(&dir.path().join("hf"), &config(), &language_model());
    let arguments =
        ["--model-dir", "hf", "--output", "out", "--report", "r.json", "--threads", "2"];
    let done = run(dir.path(), &arguments);
    assert_eq!(done.status.code(), Some(0), "{}", text(&done.stderr));
    assert_eq!(text(&done.stdout), "");
    let table = text(&done.stderr);
    assert!(table.contains("layers.1.mlp.up_proj.weight"), "{table}");
    assert!(table.contains("5 weights quantized, 5 kept"), "{table}");
    let report = fs::read(dir.path().join("r.json")).unwrap();
    let report: serde_json::Value = serde_json::from_slice(&report).unwrap();
    assert_eq!(report["recipe"], "default");
    assert_eq!(report["weights"].as_array().unwrap().len(), language_model().len());
    let embed = &report["weights"][0];
    assert_eq!(
        (&embed["name"], &embed["bits_per_weight"]),
        (&"embed_tokens.weight".into(), &8.25.into())
    );
    assert!(embed["snr_db"].as_f64().unwrap() > 40.0);
    assert_eq!(report["weights"][1]["snr_db"], serde_json::Value::Null);
}

#[test]
fn errors_are_one_sentence_and_exit_codes_tell_kinds_apart() {
    let dir = tempfile::tempdir().unwrap();
    write_checkpoint(&dir.path().join("hf"), &config(), &language_model());
    for (arguments, code, message) in [
        (vec!["--model-dir", "nowhere", "--output", "out"], 1, "error: `nowhere` does not exist\n"),
        (
            vec!["--model-dir", "hf", "--output", "."],
            1,
            "error: output directory `.` holds the checkpoint itself; choose another\n",
        ),
        (
            vec!["--model-dir", "hf", "--output", "out", "--recipe", "best"],
            2,
            "recipes are: default",
        ),
        (vec!["--model-dir", "hf", "--output", "out", "--threads", "0"], 2, "--threads"),
        (vec!["--model-dir", "hf"], 2, "--output"),
    ] {
        let done = run(dir.path(), &arguments);
        let stderr = text(&done.stderr);
        assert_eq!(done.status.code(), Some(code), "{arguments:?}: {stderr}");
        assert!(stderr.contains(message), "{arguments:?}: {stderr}");
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left behind");
}
