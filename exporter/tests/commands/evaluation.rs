//! `gemma4-eval`: likelihoods, divergences, golden data.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;

use super::{command, exported, text};

const TEXT: &str = "In the beginning God created the heaven and the earth. And the earth was \
                    without form, and void; and darkness was upon the face of the deep.";

fn eval(kind: &str, arguments: &[&str]) -> Output {
    let mut command = command("gemma4-eval");
    command.arg(kind);
    command.arg("--model_path").arg(exported().join("model.pte"));
    command.arg("--data_path").arg(exported().join("model.ptd"));
    command.args(arguments).output().unwrap()
}

fn report(output: &Output) -> Value {
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// −log softmax(logits)[id] in float64.
fn nll(logits: &[f32], id: u32) -> f64 {
    let total: f64 = logits.iter().map(|x| f64::from(*x).exp()).sum();
    total.ln() - f64::from(logits[id as usize])
}

/// Rows of logits of `gemma4-eval logits`, and its bytes.
fn logits(directory: &Path, ids: &[u32]) -> (Vec<Vec<f32>>, Vec<u8>) {
    let out = directory.join("logits.safetensors");
    let list: Vec<String> = ids.iter().map(ToString::to_string).collect();
    let output = eval("logits", &["--ids", &list.join(","), "--out", out.to_str().unwrap()]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let bytes = fs::read(&out).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let numbers = tensors.tensor("logits").unwrap();
    let rows = numbers.data().chunks_exact(4 * 4096).map(|row| {
        row.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    });
    (rows.collect(), bytes.clone())
}

fn ids_of(text: &str) -> Vec<u32> {
    let tokenizer =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../ci/models/tiny-chat-int4/tokenizer.json");
    let bytes = fs::read(tokenizer).unwrap();
    let tokenizer = gemma4_runtime::text::Tokenizer::from_bytes(&bytes).unwrap();
    tokenizer.encode_raw(text, None).unwrap()
}

#[test]
fn perplexity_is_that_of_the_logits() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("text");
    fs::write(&file, TEXT).unwrap();
    let file = file.to_str().unwrap();
    let ids = ids_of(TEXT);

    let whole = report(&eval("nll", &["--text", file]));
    let input = [&[2][..], &ids].concat();
    let (rows, _) = logits(dir.path(), &input);
    let expected: f64 = rows.iter().zip(&ids).map(|(row, id)| nll(row, *id)).sum();
    assert_eq!(whole["tokens"].as_u64(), Some(ids.len() as u64));
    let near = |found: &Value, expected: f64| {
        let found = found.as_f64().unwrap();
        assert!((found - expected).abs() < 1e-6 * expected, "{found} is not {expected}");
    };
    near(&whole["nll"], expected);
    near(&whole["perplexity"], (expected / ids.len() as f64).exp());
    near(&whole["bits_per_byte"], expected / 2f64.ln() / TEXT.len() as f64);

    // Overlapping windows: each token is predicted in the first window that it is in.
    let (window, stride) = (16, 4);
    let strided = report(&eval("nll", &["--text", file, "--window", "16", "--stride", "4"]));
    let (mut expected, mut done) = (0.0, 0);
    for start in (0..).step_by(stride) {
        let end = ids.len().min(start + window - 1);
        let input = [&[2][..], &ids[start..end]].concat();
        let (rows, _) = logits(dir.path(), &input);
        for at in done..end {
            expected += nll(&rows[at - start], ids[at]);
        }
        done = end;
        if end == ids.len() {
            break;
        }
    }
    near(&strided["nll"], expected);
    assert_eq!(strided["tokens"], whole["tokens"]);
    let templated = report(&eval("nll", &["--text", file, "--templated"]));
    assert!(templated["tokens"] == whole["tokens"] && templated["nll"] != whole["nll"]);
    for wrong in [["--window", "1"], ["--window", "99999"], ["--stride", "0"]] {
        let output = eval("nll", &[&["--text", file][..], &wrong].concat());
        assert_eq!(output.status.code(), Some(2), "{wrong:?}");
    }
}

#[test]
fn divergence_from_oneself_is_zero_and_from_a_flattened_self_known() {
    let dir = tempfile::tempdir().unwrap();
    let ids = [&[2][..], &ids_of(TEXT)].concat();
    let (rows, bytes) = logits(dir.path(), &ids);
    let file = dir.path().join("reference.safetensors");
    let reference = file.to_str().unwrap();
    fs::write(&file, &bytes).unwrap();
    let same = report(&eval("kl", &["--reference", reference]));
    assert_eq!((same["max_kl"].as_f64(), same["top1_agreement"].as_f64()), (Some(0.0), Some(1.0)));
    assert_eq!(same["rows"].as_u64(), Some(ids.len() as u64));

    let halved: Vec<f32> = rows.iter().flatten().map(|x| x / 2.0).collect();
    let halved: Vec<u8> = halved.iter().flat_map(|x| x.to_le_bytes()).collect();
    let view = TensorView::new(Dtype::F32, vec![rows.len(), 4096], &halved).unwrap();
    fs::write(&file, safetensors::serialize([("logits", view)], None).unwrap()).unwrap();
    let list: Vec<String> = ids.iter().map(ToString::to_string).collect();
    let list = list.join(",");
    let flat = report(&eval("kl", &["--reference", reference, "--ids", &list]));
    let kl = |row: &Vec<f32>| -> f64 {
        let half: Vec<f32> = row.iter().map(|x| x / 2.0).collect();
        (0..4096).map(|id| (-nll(&half, id)).exp() * (nll(row, id) - nll(&half, id))).sum()
    };
    let expected = rows.iter().map(kl).sum::<f64>() / rows.len() as f64;
    let found = flat["mean_kl"].as_f64().unwrap();
    assert!((found - expected).abs() < 1e-6 * expected, "{found} is not {expected}");
    let without = eval("kl", &["--reference", reference]);
    assert_eq!(without.status.code(), Some(2));
    assert!(text(&without.stderr).contains("--ids"));
}

/// The small checkpoint against what Hugging Face transformers computes for it.
#[test]
fn golden_data_are_met() {
    let dir = tempfile::tempdir().unwrap();
    let ci = Path::new(env!("CARGO_MANIFEST_DIR")).join("../ci/fixtures");
    let status = Command::new(env!("CARGO_BIN_EXE_gemma4-export"))
        .arg("--model-dir")
        .arg(ci.join("tiny-31b"))
        .arg("--output-dir")
        .arg(dir.path().join("out"))
        .status();
    assert!(status.unwrap().success());
    let golden = |most: &str| {
        command("gemma4-eval")
            .arg("golden")
            .arg("--model_path")
            .arg(dir.path().join("out/model.pte"))
            .arg("--data_path")
            .arg(dir.path().join("out/model.ptd"))
            .args(["--max_error", most])
            .arg(ci.join("golden/tiny-31b"))
            .output()
            .unwrap()
    };
    let output = golden("1e-3");
    let found = report(&output);
    let prompts = found["prompts"].as_object().unwrap();
    assert!(prompts.len() >= 3, "{found}");
    for (name, prompt) in prompts {
        assert_eq!(prompt["top1_agreement"], 1.0, "{name}");
        assert!(prompt["max_kl"].as_f64().unwrap() < 1e-6, "{name}: {prompt}");
        let greedy = &prompt["greedy"];
        assert_eq!(greedy["agreed_decisive"], greedy["decisive_steps"], "{name}");
    }
    assert_eq!(golden("1e-9").status.code(), Some(1));
}
