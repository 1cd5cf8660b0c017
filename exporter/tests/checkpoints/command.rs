//! The command `gemma4-quantize` as a user meets it.

use std::fs;
use std::os::unix::fs::{FileTypeExt, symlink};
use std::os::unix::net::UnixListener;
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

/// A whole config: the command refuses models that could not be exported afterwards.
fn tiny_config() -> serde_json::Value {
    serde_json::from_str(gemma4_exporter::synthetic::TINY_CONFIG).unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Where there is no driver, and where there is no such GPU.
#[test]
fn a_gpu_that_is_not_there_is_an_error_and_auto_says_what_it_takes() {
    let dir = tempfile::tempdir().unwrap();
    write_checkpoint(&dir.path().join("hf"), &tiny_config(), &language_model());
    let on =
        |device| run(dir.path(), &["--model-dir", "hf", "--output", "out", "--device", device]);
    let done = on("cuda:GPU-ffffffff-ffff");
    assert_eq!(done.status.code(), Some(3), "{}", text(&done.stderr));
    assert!(!dir.path().join("out").exists());
    let done = on("gpu");
    assert_eq!(done.status.code(), Some(2));
    assert!(text(&done.stderr).contains("a device is auto, cpu, cuda"), "{}", text(&done.stderr));
    let done = on("auto");
    assert_eq!(done.status.code(), Some(0), "{}", text(&done.stderr));
    let said = text(&done.stderr);
    assert!(said.starts_with("note: quantizing on "), "{said}");
    fs::remove_dir_all(dir.path().join("out")).unwrap();
    assert!(!text(&on("cpu").stderr).contains("note:"));
}

#[test]
fn it_writes_a_bundle_and_a_report() {
    let dir = tempfile::tempdir().unwrap();
    write_checkpoint(&dir.path().join("hf"), &tiny_config(), &language_model());
    let arguments =
        ["--model-dir", "hf", "--output", "out", "--report", "r.json", "--threads", "2"];
    let done = run(dir.path(), &arguments);
    assert_eq!(done.status.code(), Some(0), "{}", text(&done.stderr));
    assert_eq!(text(&done.stdout), "");
    let summary = text(&done.stderr);
    assert!(!summary.contains("layers.1.mlp.up_proj.weight"), "{summary}");
    assert!(summary.contains("5 weights quantized, 5 kept"), "{summary}");
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
    let classes = report["classes"].as_array().unwrap();
    let names: Vec<_> = classes.iter().map(|class| class["class"].as_str().unwrap()).collect();
    assert_eq!(names, ["up", "down", "embedding", "other"]);
    let losses = |key: &str, end: &str| -> Vec<f64> {
        let weights = report["weights"].as_array().unwrap().iter();
        let members = weights.filter(|w| w["name"].as_str().unwrap().ends_with(end));
        members.map(|w| w[key].as_f64().unwrap()).collect()
    };
    assert_eq!(classes[0]["weights"], 2);
    let snr = classes[0]["snr_db"].as_f64().unwrap();
    let each = losses("snr_db", "up_proj.weight");
    assert!(snr > each[0].min(each[1]) && snr < each[0].max(each[1]), "{snr} of {each:?}");
    let worst = losses("max_error", "up_proj.weight").into_iter().fold(0.0, f64::max);
    assert_eq!(classes[0]["max_error"].as_f64().unwrap(), worst);
    assert_eq!(classes[3]["max_error"], serde_json::Value::Null);

    let verbose = run(dir.path(), &[&arguments[..], &["--overwrite", "--verbose"]].concat());
    let table = text(&verbose.stderr);
    assert!(table.contains("layers.1.mlp.up_proj.weight  "), "{table}");
}

#[test]
fn errors_are_one_sentence_and_exit_codes_tell_kinds_apart() {
    let dir = tempfile::tempdir().unwrap();
    write_checkpoint(&dir.path().join("hf"), &tiny_config(), &language_model());
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

#[test]
fn models_that_could_not_be_exported_are_refused_before_the_work() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = tiny_config();
    config["enable_moe_block"] = true.into();
    write_checkpoint(&dir.path().join("hf"), &config, &language_model());
    let done = run(dir.path(), &["--model-dir", "hf", "--output", "out"]);
    assert_eq!(done.status.code(), Some(1));
    assert!(text(&done.stderr).contains("mixture-of-experts"), "{}", text(&done.stderr));
    assert!(!dir.path().join("out").exists());
}

/// A file that is renamed to its place would replace a device or a link as well.
#[test]
fn only_files_are_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    write_checkpoint(&at("hf"), &tiny_config(), &language_model());
    fs::write(at("file"), "kept").unwrap();
    symlink("file", at("link")).unwrap();
    let _socket = UnixListener::bind(at("socket")).unwrap();
    for (name, what) in
        [("link", "a symbolic link"), ("socket", "a device or pipe"), ("hf", "a directory")]
    {
        let done = run(dir.path(), &["--model-dir", "hf", "--output", "out", "--report", name]);
        let said = format!("error: `{name}` is {what}, which is not overwritten");
        assert_eq!(done.status.code(), Some(1));
        assert!(text(&done.stderr).starts_with(&said), "{}", text(&done.stderr));
        assert!(!at("out").exists(), "refused before the work");
    }
    assert!(fs::symlink_metadata(at("socket")).unwrap().file_type().is_socket());
    assert!(fs::symlink_metadata(at("link")).unwrap().is_symlink());
    assert_eq!(fs::read_to_string(at("file")).unwrap(), "kept");
}
