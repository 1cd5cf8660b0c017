//! The commands that run a program, as a user meets them, on the bundled model.

mod chat;
mod evaluation;
mod scripts;
mod single_file;

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use serde_json::Value;

/// A command of the runtime, which cargo builds beside those of this package when it tests the
/// whole workspace.
fn command(name: &str) -> Command {
    let path = Path::new(env!("CARGO_BIN_EXE_gemma4-export")).with_file_name(name);
    assert!(path.exists(), "{} is missing: test the whole workspace", path.display());
    Command::new(path)
}

/// The bundled model, exported once.
fn exported() -> &'static Path {
    static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();
    DIRECTORY.get_or_init(|| {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("commands");
        let bundle = Path::new(env!("CARGO_MANIFEST_DIR")).join("../ci/models/tiny-chat-int4");
        let status = Command::new(env!("CARGO_BIN_EXE_gemma4-export"))
            .args(["--prequantized", bundle.to_str().unwrap(), "--output-dir"])
            .arg(&dir)
            .status();
        assert!(status.unwrap().success());
        dir
    })
}

fn with_files(name: &str) -> Command {
    let mut command = command(name);
    command.arg("--model_path").arg(exported().join("model.pte"));
    command.arg("--data_path").arg(exported().join("model.ptd"));
    command
}

fn run(arguments: &[&str]) -> Output {
    with_files("gemma4-run").args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn answer(arguments: &[&str]) -> String {
    let output = run(arguments);
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn it_answers_and_only_the_answer_goes_to_stdout() {
    let output = run(&["--prompt", "What is the capital of France?", "--temperature", "0"]);
    assert_eq!(text(&output.stdout), "The capital of France is Paris.\n");
    let report = text(&output.stderr);
    for word in ["load:", "prompt: 25 tokens", "time to first token", "finish reason stop"] {
        assert!(report.contains(word), "{word}: {report}");
    }
    let quiet = run(&["--prompt", "What is the capital of France?", "--temperature=0", "-q"]);
    assert_eq!((text(&quiet.stdout), text(&quiet.stderr)), (text(&output.stdout), String::new()));
}

#[test]
fn flags_may_be_written_with_hyphens_and_prompts_come_from_files() {
    let dir = tempfile::tempdir().unwrap();
    let prompt = dir.path().join("a prompt.txt");
    fs::write(&prompt, "What is the capital of France?").unwrap();
    let stats = dir.path().join("stats.json");
    let output = command("gemma4-run")
        .arg("--model-path")
        .arg(exported().join("model.pte"))
        .arg("--data-path")
        .arg(exported().join("model.ptd"))
        .arg("--prompt-file")
        .arg(&prompt)
        .args(["--temperature", "0", "--max-new-tokens", "3", "--max-context", "64"])
        .arg("--stats-json")
        .arg(&stats)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let stats: Value = serde_json::from_slice(&fs::read(&stats).unwrap()).unwrap();
    assert_eq!(stats["generated_tokens"], 3);
    assert_eq!(stats["context"], 64);
    assert_eq!(stats["finish_reason"], "length");
    assert!(stats["time_to_first_token_seconds"].as_f64().unwrap() > 0.0);
    assert!(stats["seed"].is_null(), "nothing is drawn at temperature 0");
}

#[test]
fn equal_seeds_give_equal_answers_and_others_do_not() {
    let draw = |seed: &str| {
        let arguments = ["--prompt", "In the beginning", "--raw_prompt", "--seed", seed];
        answer(&[&arguments[..], &["--max_new_tokens", "40"]].concat())
    };
    assert_eq!(draw("7"), draw("7"));
    assert_ne!(draw("7"), draw("8"));
}

#[test]
fn a_generation_ends_with_the_context() {
    let prompt = ["--prompt", "In the beginning", "--raw_prompt", "--temperature", "0"];
    let output = run(&[&prompt[..], &["--max_context", "40"]].concat());
    assert_eq!(output.status.code(), Some(0));
    assert!(text(&output.stderr).contains("finish reason length"), "{}", text(&output.stderr));
}

#[test]
fn errors_are_one_line_and_exit_codes_tell_kinds_apart() {
    let long = "word ".repeat(600);
    let cases: [(&[&str], i32, &str); 11] = [
        (&["--prompt", &long, "--max_context", "100"], 1, "the context holds 100"),
        (&["--prompt", "x", "--max_context", "0"], 2, "between 1 and the exported maximum"),
        (&["--prompt", "x", "--max_context", "99999"], 2, "99999"),
        (&["--prompt", "x", "--temperature=-1"], 2, "temperature"),
        (&["--prompt", "x", "--top_p", "0"], 2, "top_p"),
        // Whether there is no GPU or no code for it depends on the machine.
        (&["--prompt", "x", "--device", "cuda"], 3, "error: "),
        (
            &["--prompt", "x", "--device", "cuda", "--cpu_activations", "int8"],
            3,
            "activations of 8 bits are for the CPU",
        ),
        (&["--prompt", "x", "--device", "tpu"], 2, "a device is"),
        (&["--prompt", "x", "--prompt_file", "y"], 2, "cannot be used with"),
        (&["--prompt_file", "nowhere.txt"], 1, "nowhere.txt"),
        (&[], 2, "--prompt"),
    ];
    for (arguments, code, word) in cases {
        let output = run(arguments);
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {message}");
        assert!(message.contains(word), "{arguments:?}: {message}");
        assert!(message.starts_with("error: "), "{message}");
        if code != 2 {
            assert_eq!(message.lines().count(), 1, "{message}");
        }
    }
}

#[test]
fn swapped_and_damaged_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let [pte, ptd] = ["model.pte", "model.ptd"].map(|name| exported().join(name));
    let start = |pte: &Path, ptd: &Path| {
        let output = command("gemma4-run")
            .arg("--model_path")
            .arg(pte)
            .arg("--data_path")
            .arg(ptd)
            .args(["--prompt", "x"])
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(1));
        text(&output.stderr)
    };
    assert!(start(&ptd, &pte).contains("safetensors"));
    assert!(start(&dir.path().join("none.pte"), &ptd).contains("none.pte"));
    let damaged = dir.path().join("damaged.ptd");
    let mut bytes = fs::read(&ptd).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    fs::write(&damaged, &bytes).unwrap();
    let message = start(&pte, &damaged);
    assert!(message.contains("damaged.ptd") && message.contains("corrupted"), "{message}");
    let inspect = command("gemma4-inspect").arg(&pte).arg("--verify").arg(&damaged).output();
    let inspect = inspect.unwrap();
    assert_eq!(inspect.status.code(), Some(1));
    assert!(text(&inspect.stderr).contains("corrupted"), "{}", text(&inspect.stderr));
}

/// Starts a generation that does not end by itself, and reads until something was printed.
fn long_generation() -> Child {
    let arguments = ["--prompt", "In the beginning", "--raw_prompt", "--temperature", "0"];
    let mut child = with_files("gemma4-run")
        .args(arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0];
    child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    child
}

#[test]
fn ctrl_c_ends_the_generation_and_prints_the_report() {
    let child = long_generation();
    let id = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &id]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    let report = text(&output.stderr);
    assert!(report.contains("finish reason interrupted"), "{report}");
}

#[test]
fn a_closed_pipe_ends_quietly() {
    let mut child = long_generation();
    drop(child.stdout.take());
    for _ in 0..600 {
        if child.try_wait().unwrap().is_some() {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    child.kill().unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), String::new()));
}

#[test]
fn inspect_tells_what_is_in_a_program() {
    let pte = exported().join("model.pte");
    let output = command("gemma4-inspect").arg(&pte).arg("--json").output().unwrap();
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["stop_tokens"], serde_json::json!([1, 106]));
    assert_eq!(json["source"]["recipe"], "default");
    assert_eq!(json["sampling"]["top_k"], 64);
    assert_eq!(json["methods"][0]["name"], "decode");
    let rows: Vec<&str> =
        json["buffers"].as_array().unwrap().iter().map(|b| b["rows"].as_str().unwrap()).collect();
    assert_eq!(rows.iter().filter(|rows| **rows == "S").count(), 4, "two full layers");
    assert_eq!(rows.iter().filter(|rows| **rows == "min(640, S)").count(), 20);
    let graph = command("gemma4-inspect").arg(&pte).arg("--graph").output().unwrap();
    assert!(text(&graph.stdout).contains("decode(T <= 1) {"));
}

#[test]
fn eval_writes_a_row_for_each_id_after_the_prefill() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("logits.safetensors");
    let eval = |prefill: &str| {
        command("gemma4-eval")
            .arg("logits")
            .arg("--model_path")
            .arg(exported().join("model.pte"))
            .arg("--data_path")
            .arg(exported().join("model.ptd"))
            .args(["--ids", "2,1494,494,3061,641", "--prefill", prefill, "--out"])
            .arg(&out)
            .output()
            .unwrap()
    };
    let output = eval("3");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let bytes = fs::read(&out).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(tensors.tensor("logits").unwrap().shape(), [3, 4096]);
    for prefill in ["0", "6"] {
        assert_eq!(eval(prefill).status.code(), Some(2), "--prefill {prefill}");
    }
}
