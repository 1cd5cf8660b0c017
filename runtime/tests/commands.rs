//! The commands as a user meets them.

mod common;

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::process::{Command, Output};

use common::{Config, Files, Model};
use serde_json::Value;

const BENCH: &str = env!("CARGO_BIN_EXE_gemma4-bench");
const EVAL: &str = env!("CARGO_BIN_EXE_gemma4-eval");
const INSPECT: &str = env!("CARGO_BIN_EXE_gemma4-inspect");
const RUN: &str = env!("CARGO_BIN_EXE_gemma4-run");

fn files() -> Files {
    Model::new(&Config::default()).write()
}

fn command(program: &str, files: &Files, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.current_dir(files.directory.path()).args(arguments);
    command
}

fn refused(done: &Output, code: i32) -> String {
    let text = String::from_utf8(done.stderr.clone()).expect("UTF-8");
    assert_eq!(done.status.code(), Some(code), "{text}");
    text
}

#[test]
fn a_cause_is_said_once() {
    let files = files();
    let done = command(INSPECT, &files, &["absent.pte"]).output().expect("runs");
    let expected = "error: cannot open `absent.pte`: No such file or directory (os error 2)\n";
    assert_eq!(refused(&done, 1), expected);
}

#[test]
fn only_the_expected_program_runs() {
    let files = files();
    let told = command(INSPECT, &files, &["model.pte", "--json"]).output().expect("runs");
    let json: Value = serde_json::from_slice(&told.stdout).expect("JSON");
    let right = json["id"].as_str().expect("an id");
    let wrong = right.replace(&right[..1], if right.starts_with('0') { "1" } else { "0" });
    let paths = ["--model_path", "model.pte", "--data_path", "model.ptd", "--device", "cpu"];
    let logits = ["logits", "--ids", "1,2", "--out", "logits"];
    let bench = ["-p", "4", "-n", "2", "-r", "1"];
    let call = |program, rest: &[&str], id| {
        let arguments = [rest, &paths, &["--expect_program", id]].concat();
        command(program, &files, &arguments).output().expect("runs")
    };
    for (program, rest) in [(EVAL, &logits[..]), (BENCH, &bench), (RUN, &["--prompt", "a"])] {
        let text = refused(&call(program, rest, &wrong), 1);
        assert!(text.contains(right) && text.contains(&wrong), "{text}");
        assert!(refused(&call(program, rest, "12ab"), 2).contains("64 hexadecimal digits"));
        // This program has no tokenizer, so gemma4-run would not get further.
        if program != RUN {
            let done = call(program, rest, right);
            assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        }
    }
}

#[test]
fn a_full_stderr_does_not_change_the_exit_code() {
    let files = files();
    let full = File::options().write(true).open("/dev/full").expect("a device of every Linux");
    let done = command(INSPECT, &files, &["absent.pte"]).stderr(full).status().expect("runs");
    assert_eq!(done.code(), Some(1));
}

#[test]
fn logits_are_written_through_a_link() {
    let files = files();
    let (link, target) =
        (files.directory.path().join("link"), files.directory.path().join("target"));
    symlink(&target, &link).expect("a link");
    let arguments = ["logits", "--ids", "1,2", "--out", "link", "--device", "cpu"];
    let mut eval = command(EVAL, &files, &arguments);
    eval.args(["--model_path", "model.pte", "--data_path", "model.ptd"]);
    let done = eval.output().expect("runs");
    assert_eq!(done.status.code(), Some(0), "{}", String::from_utf8_lossy(&done.stderr));
    assert!(fs::symlink_metadata(&link).expect("there").is_symlink());
    let written = fs::read(&target).expect("written");
    assert!(safetensors::SafeTensors::deserialize(&written).is_ok());
}

#[test]
fn activations_of_8_bits_are_others() {
    let files = files();
    let logits = |rest: &[&str]| {
        let base = ["logits", "--ids", "1,2,3", "--out", "out", "--device", "cpu"];
        let paths = ["--model_path", "model.pte", "--data_path", "model.ptd"];
        command(EVAL, &files, &[&base[..], &paths, rest].concat()).output().expect("runs")
    };
    let written = |rest: &[&str]| {
        let done = logits(rest);
        assert_eq!(done.status.code(), Some(0), "{}", String::from_utf8_lossy(&done.stderr));
        fs::read(files.directory.path().join("out")).expect("written")
    };
    let default = written(&[]);
    assert!(default == written(&["--cpu_activations", "float32"]));
    assert!(default != written(&["--cpu_activations", "int8"]));
    let text = refused(&logits(&["--cpu_activations", "int4"]), 2);
    assert!(text.contains("float32, int8"), "{text}");
}

#[test]
fn measurements_of_nothing_are_wrong_usage() {
    let files = files();
    for flag in ["-r", "-p"] {
        let paths = ["--model_path", "model.pte", "--data_path", "model.ptd", flag, "0"];
        let done = command(BENCH, &files, &paths).output().expect("runs");
        assert!(refused(&done, 2).contains(flag));
    }
}

#[test]
fn a_bench_has_the_wall_of_every_row() {
    let files = files();
    let paths = ["--model_path", "model.pte", "--data_path", "model.ptd", "--device", "cpu"];
    let mut bench = command(BENCH, &files, &paths);
    let done = bench.args(["-p", "8", "-n", "4", "-r", "1", "-o", "json"]).output().expect("runs");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let json: Value = serde_json::from_slice(&done.stdout).expect("JSON");
    let number = |value: &Value| value.as_f64().expect("a number");
    let speed =
        [&json["device_bytes_per_second"], &json["device_operations_per_second"]].map(number);
    assert!(speed[0] > 1e8 && speed[1] > 1e8, "{speed:?}");
    let rows = json["results"].as_array().expect("rows");
    assert_eq!(rows.len(), 2);
    for row in rows {
        let (tokens, wall) = (number(&row["tokens"]), &row["roofline"]);
        let least = number(&row["bytes"]) / speed[0];
        let least = least.max(number(&row["operations"]) / speed[1]);
        assert!((number(&wall["tokens_per_second"]) * least / tokens - 1.0).abs() < 1e-6, "{row}");
        let reached = number(&row["tokens_per_second"]) * least / tokens;
        assert!((number(&wall["reached"]) / reached - 1.0).abs() < 1e-6, "{row}");
    }
}

#[test]
fn kernels_are_timed_on_a_gpu_alone() {
    let files = files();
    let paths = ["--model_path", "model.pte", "--data_path", "model.ptd", "--device", "cpu"];
    let done = command(BENCH, &files, &paths).args(["-p", "8", "-n", "4", "--profile"]).output();
    assert!(refused(&done.expect("runs"), 2).contains("--profile is for a GPU"));
}

#[test]
fn a_bad_tokenizer_file_is_named() {
    let files = files();
    fs::write(files.directory.path().join("other.json"), "").expect("written");
    let paths = ["--model_path", "model.pte", "--data_path", "model.ptd", "--prompt", "a"];
    let mut run = command(RUN, &files, &paths);
    let done = run.args(["--tokenizer_path", "other.json"]).output().expect("runs");
    let text = refused(&done, 1);
    assert!(text.starts_with("error: `other.json`: "), "{text}");
}

#[test]
fn steps_of_several_rows_are_timed() {
    let files = files();
    let base = ["--model_path", "model.pte", "--data_path", "model.ptd", "--device", "cpu"];
    let few = ["-p", "4", "-n", "4", "-d", "0,30", "-r", "1", "--rows"];
    let bench = |rest: &[&str]| {
        command(BENCH, &files, &[&base[..], &few, rest].concat()).output().expect("runs")
    };
    let done = bench(&["1,3,8", "-o", "json"]);
    assert_eq!(done.status.code(), Some(0), "{}", String::from_utf8_lossy(&done.stderr));
    let json: serde_json::Value = serde_json::from_slice(&done.stdout).expect("JSON");
    let results = json["results"].as_array().expect("results");
    let named = |name: &str| {
        let rows = results.iter().filter(|r| r["test"] == name);
        rows.map(|r| (r["depth"].as_u64(), r["time_of_one_row"].as_f64())).collect::<Vec<_>>()
    };
    assert_eq!(named("verify 1"), [(Some(0), Some(1.0)), (Some(30), Some(1.0))]);
    for name in ["verify 3", "verify 8"] {
        assert!(named(name).iter().all(|(_, times)| times.is_some_and(|x| x > 0.0)), "{name}");
    }
    assert_eq!(named("decode 4"), [(Some(0), None), (Some(30), None)]);
    // Without steps of one row there is nothing to compare with.
    let done = bench(&["2"]);
    let text = String::from_utf8(done.stdout).expect("UTF-8");
    let line = text.lines().find(|line| line.starts_with("| verify 2 |")).expect("a line");
    assert!(line.ends_with("| – |"), "{line}");
    let text = refused(&bench(&["1,9"]), 2);
    assert!(text.contains("--rows 9") && text.contains("at most 8"), "{text}");
}

#[test]
fn room_for_no_session_is_wrong_usage() {
    let files = files();
    let arguments = ["--model_path", "model.pte", "--data_path", "model.ptd", "--prompt", "Hi"];
    let run = |sessions: &str| {
        let flags = [&arguments[..], &["--max_sessions", sessions]].concat();
        command(RUN, &files, &flags).output().expect("runs")
    };
    for sessions in ["0", "many"] {
        assert!(refused(&run(sessions), 2).contains("--max_sessions"), "{sessions}");
    }
}
