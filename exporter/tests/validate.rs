//! `gemma4-validate`: models that are whole pass, and a planted fault is found in its layer.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use gemma4_exporter::checkpoint::Checkpoint;
use gemma4_exporter::export::{Options, export};
use gemma4_exporter::output::Monitor;
use gemma4_exporter::quantize::Recipe;
use gemma4_exporter::validate::{Bound, Difference, Weights, run_traced};
use gemma4_format::Op;
use gemma4_format::ptd::Header;
use gemma4_format::pte;
use serde_json::Value;

fn ci(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../ci").join(path)
}

fn validate(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_gemma4-validate")).args(arguments).output().unwrap()
}

fn json(arguments: &[&str]) -> Value {
    let output = validate(&[arguments, &["--json"]].concat());
    let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| {
        panic!("{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    });
    let code = i32::from(report["failed"] == true);
    assert_eq!(output.status.code(), Some(code), "{report:#}");
    report
}

/// Status of each stage: `+` passed, `-` not run, `!` failed.
fn statuses(report: &Value) -> String {
    let status = |stage: &Value| match stage["status"].as_str().unwrap() {
        "passed" => '+',
        "not_run" => '-',
        "failed" => '!',
        other => panic!("{other}"),
    };
    report["stages"].as_array().unwrap().iter().map(status).collect()
}

/// The program of tiny-31b in the default recipe, in `dir`.
fn exported(dir: &Path) {
    let checkpoint = Checkpoint::open(ci("fixtures/tiny-31b")).unwrap();
    let recipe = Some(Recipe::named("default").unwrap());
    export(&checkpoint, &Options { recipe, ..Options::default() }, dir, &Monitor::silent())
        .unwrap();
}

/// Changes bytes of a part of a weight in the files of `dir`, and the program's digest with them.
fn tamper(dir: &Path, weight: &str, part: usize, change: impl Fn(&mut [u8])) {
    let (program_path, data_path) = (dir.join("model.pte"), dir.join("model.ptd"));
    let mut data = fs::read(&data_path).unwrap();
    let mut loaded = pte::decode(&fs::read(&program_path).unwrap()).unwrap().pte;
    let length = data.len() as u64;
    let size = Header::size(length, *data.first_chunk().unwrap()).unwrap() as usize;
    let header = Header::parse(&data[..size], length);
    let weight = loaded.program.weights.iter_mut().find(|w| w.name == weight).unwrap();
    let ranges = header.unwrap().locate(weight).unwrap();
    let bytes = |(start, end): (u64, u64)| start as usize..end as usize;
    change(&mut data[bytes(ranges[part])]);
    let mut hasher = blake3::Hasher::new();
    ranges.iter().for_each(|range| {
        hasher.update(&data[bytes(*range)]);
    });
    weight.digest = *hasher.finalize().as_bytes();
    fs::write(&data_path, data).unwrap();
    fs::write(&program_path, pte::encode(&loaded).unwrap()).unwrap();
}

const DENSE: [&str; 2] = ["--model-dir", "../ci/fixtures/tiny-31b"];

#[test]
fn whole_models_pass_every_stage_that_can_run() {
    let bundle = ["--prequantized", "../ci/models/tiny-chat-int4"];
    for (arguments, expected) in [
        ([&DENSE[..], &["--recipe", "default"]].concat(), "+++++-"),
        ([&DENSE[..], &["--recipe", "torchao-sensitive"]].concat(), "+++++-"),
        (DENSE.to_vec(), "+-+++-"),
        (bundle.to_vec(), "-++++-"),
    ] {
        let report = json(&arguments);
        assert_eq!(statuses(&report), expected, "{report:#}");
        let stages = report["stages"].as_array().unwrap();
        assert_eq!(stages[3]["top"].as_array().unwrap().len(), 5);
        assert!(stages[3]["compared"]["kl"].as_f64().unwrap() < 1e-6);
        assert!(stages[3]["compared"]["hidden"]["layers.7"].as_f64().unwrap() < 1e-4);
        assert!(stages[3]["seconds"].as_f64().unwrap() > 0.0);
        assert!(stages[3]["peak_memory"].as_u64().unwrap() > 1 << 20);
    }
}

#[test]
fn the_sources_of_others_pass() {
    let Some(fixtures) = std::env::var_os("GEMMA4_FIXTURES").map(PathBuf::from) else {
        eprintln!("not run: the_sources_of_others_pass needs GEMMA4_FIXTURES");
        return;
    };
    for (flag, path, expected) in [
        ("--gguf", "gguf/tiny-31b-F16.gguf", "+-++--"),
        ("--gguf", "gguf/tiny-31b-Q4_K_M.gguf", "-++++-"),
        ("--prequantized", "ckpt/tiny-31b-torchao-default", "-++++-"),
        ("--prequantized", "ckpt/tiny-31b-torchao-sensitive", "-++++-"),
        ("--model-dir", "ckpt/tiny-chat", "+-+++-"),
    ] {
        let report = json(&[flag, fixtures.join(path).to_str().unwrap()]);
        assert_eq!(statuses(&report), expected, "{report:#}");
    }
}

#[test]
fn a_fault_in_the_written_files_is_found_in_its_layer() {
    type Change = fn(&mut [u8]);
    let scalar: Change = |bytes| bytes[1] ^= 1;
    let code: Change = |bytes| bytes[1000] ^= 0x08;
    let scale: Change = |bytes| bytes[201] ^= 1;
    for (weight, part, change, layer) in [
        ("layers.3.layer_scalar", 0, scalar, "layers.3"),
        ("layers.5.mlp.down_proj.weight", 0, code, "layers.5"),
        ("layers.0.self_attn.q_proj.weight", 1, scale, "layers.0"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        exported(dir.path());
        tamper(dir.path(), weight, part, change);
        let program = dir.path().to_str().unwrap();
        let report = json(&[&DENSE[..], &["--recipe", "default", "--program", program]].concat());
        assert_eq!(statuses(&report), "+++!--", "{weight}: {report:#}");
        let why = report["stages"][3]["why"].as_str().unwrap();
        assert!(why.contains(&format!("first to differ is `{layer}`")), "{weight}: {why}");
    }
}

#[test]
fn files_that_are_damaged_or_of_another_recipe_fail() {
    let dir = tempfile::tempdir().unwrap();
    exported(dir.path());
    let program = dir.path().to_str().unwrap();
    let report = json(&[&DENSE[..], &["--recipe", "hqq", "--program", program]].concat());
    assert_eq!(statuses(&report), "+++!--", "{report:#}");
    let data = dir.path().join("model.ptd");
    let mut bytes = fs::read(&data).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&data, bytes).unwrap();
    let report = json(&[&DENSE[..], &["--recipe", "default", "--program", program]].concat());
    assert_eq!(statuses(&report), "+++!--", "{report:#}");
    assert!(report["stages"][3]["why"].as_str().unwrap().contains("corrupted"), "{report:#}");
}

/// A node that was traced wrongly: another base of the rotary embedding.
#[test]
fn a_fault_in_the_graph_is_found_in_its_layer() {
    let dir = tempfile::tempdir().unwrap();
    exported(dir.path());
    let bytes = fs::read(dir.path().join("model.pte")).unwrap();
    let mut program = pte::decode(&bytes).unwrap().pte.program;
    let checkpoint = Checkpoint::open(ci("fixtures/tiny-31b")).unwrap();
    let recipe = Recipe::named("default").unwrap();
    let weights = Weights::new(&checkpoint, Some(&recipe)).unwrap();
    let tokens = [2, 5, 700, 41, 9];
    let mut run = |change: Option<usize>| {
        let prefill = program.methods.iter_mut().find(|m| m.name == "prefill").unwrap();
        let ropes = prefill.nodes.iter_mut().filter_map(|node| match &mut node.op {
            Op::Rope { base, .. } => Some(base),
            _ => None,
        });
        if let Some(at) = change {
            *ropes.into_iter().nth(at).unwrap() *= 2.0;
        }
        run_traced(&program, &weights, &tokens, &Monitor::silent()).unwrap()
    };
    let right = run(None);
    // Each layer turns its queries, then its keys.
    let wrong = run(Some(2 * 4 + 1));
    let bound = Bound { divergence: 1e-4, logit: 1e-3, hidden: 1e-4 };
    let why = Difference::between(&right, &wrong).parting(&bound).unwrap();
    assert!(why.contains("first to differ is `layers.4`"), "{why}");
}

#[test]
fn quantization_beyond_its_bound_fails_and_ends_the_validation() {
    let report = json(&[&DENSE[..], &["--recipe", "default", "--max-kl", "0.001"]].concat());
    assert_eq!(statuses(&report), "+!----", "{report:#}");
    let output = validate(&[&DENSE[..], &["--recipe", "default", "--max-kl", "0.001"]].concat());
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("FAILED: logits differ by"), "{text}");
    assert!(text.ends_with("failed at stage 2\n"), "{text}");
}

#[test]
fn wrong_usage_is_named() {
    for (arguments, word) in [
        (&["--ids", "2,99999"][..], "token 99999 is outside the vocabulary of 2048"),
        (&["--recipe", "best"], "recipes are: default"),
        (&["--prequantized", "x"], "cannot be used with"),
    ] {
        let output = validate(&[&DENSE[..], arguments].concat());
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(word), "{said}");
    }
}
