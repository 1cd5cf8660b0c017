//! `gemma4-quantize` and `gemma4-export`, ended at any moment and started again.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use gemma4_exporter::synthetic::{TINY_CONFIG, write_checkpoint};
use serde_json::Value;

/// A directory with a checkpoint in `hf` of which one thread makes a bundle in about two seconds,
/// and that bundle, made in one go, in `whole`.
struct Scene {
    dir: tempfile::TempDir,
}

impl Scene {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut config: Value = serde_json::from_str(TINY_CONFIG).unwrap();
        for (key, value) in
            [("hidden_size", 256), ("intermediate_size", 1024), ("num_hidden_layers", 8)]
        {
            config[key] = value.into();
        }
        let kinds = ["sliding_attention", "full_attention"];
        config["layer_types"] = kinds.iter().cycle().take(8).copied().collect::<Vec<_>>().into();
        write_checkpoint(&config.to_string(), 3, &dir.path().join("hf")).unwrap();
        let scene = Self { dir };
        assert!(scene.run("whole", "hqq").status.success());
        scene
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn command(&self, output: &str, recipe: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gemma4-quantize"));
        command.current_dir(self.dir.path()).stderr(Stdio::piped());
        command.args(["--model-dir", "hf", "--output", output, "--recipe", recipe]);
        command.args(["--threads", "1", "--device", "cpu"]);
        command
    }

    fn run(&self, output: &str, recipe: &str) -> Output {
        self.command(output, recipe).output().unwrap()
    }

    /// Starts a run of the recipe `hqq` and waits until it has finished some weights.
    fn started(&self) -> Child {
        let mut child = self.command("out", "hqq").spawn().unwrap();
        while self.finished() < 12 {
            assert!(child.try_wait().unwrap().is_none(), "it ended before it could be killed");
            std::thread::sleep(Duration::from_millis(1));
        }
        child
    }

    /// Weights that the journal of `out` lists.
    fn finished(&self) -> usize {
        let journal = fs::read_to_string(self.at(".out.partial/journal")).unwrap_or_default();
        journal.lines().count().saturating_sub(1)
    }

    fn listing(&self) -> Vec<String> {
        let entries = fs::read_dir(self.dir.path()).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn assert_whole(&self) {
        assert_same(&self.at("out"), &self.at("whole"));
        assert_eq!(self.listing(), ["hf", "out", "whole"], "nothing is left");
    }
}

fn assert_same(a: &Path, b: &Path) {
    let names = |dir: &Path| {
        let mut names: Vec<_> =
            fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(names(a), names(b));
    for name in names(a) {
        assert!(fs::read(a.join(&name)).unwrap() == fs::read(b.join(&name)).unwrap(), "{name:?}");
    }
}

fn kill(child: &mut Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

fn said(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn killed_at_any_moment_it_continues_to_the_same_bytes() {
    let scene = Scene::new();
    let started = Instant::now();
    assert!(scene.run("again", "hqq").status.success());
    let whole = started.elapsed();
    fs::remove_dir_all(scene.at("again")).unwrap();
    let mut moment = 0u32;
    for kills in 0..60 {
        let before = scene.finished();
        let mut child = scene.command("out", "hqq").spawn().unwrap();
        // Moments spread over the start of the process and what a layer or two take.
        moment = (moment * 5 + 7) % 131;
        std::thread::sleep(whole * moment / (4 * 131));
        if child.try_wait().unwrap().is_some() {
            assert!(kills > 2, "it ended too soon to test anything");
            break;
        }
        kill(&mut child);
        if scene.at("out").exists() {
            break;
        }
        assert!(scene.finished() >= before, "nothing finished is done again");
        assert!(scene.listing().len() <= 3, "one leftover at most: {:?}", scene.listing());
    }
    if !scene.at("out").exists() {
        let done = scene.finished();
        let output = scene.run("out", "hqq");
        let continuing = format!("note: continuing an earlier run: {done} of ");
        assert!(done > 0 && said(&output).contains(&continuing), "{}", said(&output));
    }
    // A kill after the last rename leaves the empty journal to the next run of the same name.
    let _ = fs::remove_dir_all(scene.at(".out.partial"));
    scene.assert_whole();
}

#[test]
fn another_job_starts_over_and_says_why() {
    let scene = Scene::new();
    let assert_over = |why: &str| {
        let output = scene.run("out", "hqq");
        let wanted = format!("note: what `.out.partial` holds was made {why}; starting over");
        assert!(said(&output).contains(&wanted), "{}", said(&output));
        scene.assert_whole();
        fs::remove_dir_all(scene.at("out")).unwrap();
    };
    kill(&mut scene.started());
    let shard = scene.at("hf/model-00001-of-00001.safetensors");
    fs::write(&shard, fs::read(&shard).unwrap()).unwrap();
    assert_over("from a checkpoint that has changed since");

    kill(&mut scene.started());
    let journal = scene.at(".out.partial/journal");
    let text = fs::read_to_string(&journal).unwrap().replacen("gemma4-quantize ", "", 1);
    fs::write(&journal, text).unwrap();
    assert_over("by another version");

    kill(&mut scene.started());
    let output = scene.run("out", "torchao-default");
    assert!(said(&output).contains("was made by another recipe; starting over"));
    assert!(scene.run("other", "torchao-default").status.success());
    assert_same(&scene.at("out"), &scene.at("other"));
}

#[test]
fn finished_weights_that_were_damaged_are_made_again() {
    let scene = Scene::new();
    kill(&mut scene.started());
    let weights = scene.at(".out.partial/bundle/model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    // In the embedding, the first weight: nothing behind it is trusted.
    bytes[200_000] ^= 1;
    fs::write(&weights, bytes).unwrap();
    let output = scene.run("out", "hqq");
    assert!(!said(&output).contains("continuing"), "{}", said(&output));
    scene.assert_whole();
}

#[test]
fn an_interrupt_says_what_stays() {
    let scene = Scene::new();
    let child = scene.started();
    let id = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &id]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", said(&output));
    let keeps = format!("note: `.out.partial` keeps the {} weights", scene.finished());
    assert!(said(&output).contains(&keeps), "{}", said(&output));
    assert!(said(&output).ends_with("error: interrupted\n"), "{}", said(&output));
    assert!(said(&scene.run("out", "hqq")).contains("continuing an earlier run"));
    scene.assert_whole();
}

#[test]
fn two_processes_never_write_one_bundle() {
    let scene = Scene::new();
    let mut child = scene.started();
    let id = child.id().to_string();
    assert!(Command::new("kill").args(["-STOP", &id]).status().unwrap().success());
    let output = scene.run("out", "hqq");
    assert_eq!(output.status.code(), Some(1));
    let busy = "error: `.out.partial` is being written by another process; wait for its end\n";
    assert_eq!(said(&output), busy);
    assert!(Command::new("kill").args(["-CONT", &id]).status().unwrap().success());
    assert!(child.wait().unwrap().success());
    scene.assert_whole();
}

/// Ended between its two renames, a run that replaces a bundle has moved the old one away.
#[test]
fn the_bundle_that_was_to_be_replaced_comes_back() {
    let scene = Scene::new();
    fs::create_dir(scene.at(".out.partial")).unwrap();
    fs::rename(scene.at("whole"), scene.at(".out.partial/replaced")).unwrap();
    let output = scene.run("out", "hqq");
    assert!(said(&output).contains("output directory `out` is not empty"), "{}", said(&output));
    assert!(scene.at("out/model.safetensors").exists());
    assert_eq!(scene.listing(), ["hf", "out"]);
}

/// Ended after its two renames, it has not removed the old bundle.
#[test]
fn a_bundle_that_was_replaced_is_in_nobodys_way() {
    let scene = Scene::new();
    assert!(scene.run("out", "default").status.success());
    fs::create_dir(scene.at(".out.partial")).unwrap();
    assert!(scene.run(".out.partial/replaced", "default").status.success());
    let output = scene.command("out", "hqq").arg("--overwrite").output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    scene.assert_whole();
}

#[test]
fn a_killed_export_leaves_whole_files_or_none() {
    let scene = Scene::new();
    let export = |to: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gemma4-export"));
        command.current_dir(scene.dir.path()).stderr(Stdio::null());
        command.args(["--model-dir", "hf", "--recipe", "hqq", "--output-dir", to]);
        command
    };
    assert!(export("expected").status().unwrap().success());
    for round in 0..12 {
        let mut child = export("program").spawn().unwrap();
        std::thread::sleep(Duration::from_millis(3 + 29 * round));
        kill(&mut child);
        let names = fs::read_dir(scene.at("program")).into_iter().flatten();
        for name in names.map(|entry| entry.unwrap().file_name()) {
            let written = scene.at("program").join(&name);
            match name.to_str().unwrap() {
                "model.pte" | "model.ptd" => {
                    let expected = fs::read(scene.at("expected").join(&name)).unwrap();
                    assert!(fs::read(written).unwrap() == expected, "{name:?}");
                }
                partial => assert!([".model.pte.partial", ".model.ptd.partial"].contains(&partial)),
            }
        }
    }
    assert!(export("program").status().unwrap().success());
    assert_same(&scene.at("program"), &scene.at("expected"));
}
