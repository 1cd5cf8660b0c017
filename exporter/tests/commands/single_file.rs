//! All commands in one file.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output};

use super::{exported, text};

const GEMMA4: &str = env!("CARGO_BIN_EXE_gemma4");

fn france(mut command: Command) -> Output {
    command.arg("--model_path").arg(exported().join("model.pte"));
    command.arg("--data_path").arg(exported().join("model.ptd"));
    let prompt = ["--prompt", "What is the capital of France?", "--temperature", "0"];
    command.args(prompt).output().unwrap()
}

#[test]
fn it_answers_to_its_names() {
    let dir = tempfile::tempdir().unwrap();
    let link = dir.path().join("gemma4-run");
    symlink(GEMMA4, &link).unwrap();
    let mut by_argument = Command::new(GEMMA4);
    by_argument.arg("run");
    for command in [Command::new(&link), by_argument] {
        assert_eq!(text(&france(command).stdout), "The capital of France is Paris.\n");
    }
    for name in ["export", "quantize", "run", "inspect", "eval", "bench"] {
        let output = Command::new(GEMMA4).args([name, "--help"]).output().unwrap();
        let help = text(&output.stdout);
        assert!(help.contains(&format!("Usage: gemma4-{name}")), "{name}: {help}");
    }
    let help = Command::new(GEMMA4).arg("--help").output().unwrap();
    assert!(text(&help.stdout).contains("quantize"));
    for arguments in [&[][..], &["walk"]] {
        let output = Command::new(GEMMA4).args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output.stderr).contains("gemma4 --help"));
    }
}

#[test]
fn completions_and_manuals_are_written() {
    let dir = tempfile::tempdir().unwrap();
    let output = Command::new(GEMMA4).arg("write-documents").arg(dir.path()).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let read = |path: &str| fs::read_to_string(dir.path().join(path)).unwrap();
    for path in [
        "share/bash-completion/completions/gemma4-run",
        "share/zsh/site-functions/_gemma4-run",
        "share/fish/vendor_completions.d/gemma4-run.fish",
    ] {
        assert!(read(path).contains("max_new_tokens"), "{path}");
    }
    assert!(read("share/man/man1/gemma4-run.1").contains("max_new_tokens"));
    assert!(read("share/man/man1/gemma4-eval-nll.1").contains("stride"));
    assert!(Path::new(&dir.path().join("share/man/man1/gemma4-export.1")).exists());
}
