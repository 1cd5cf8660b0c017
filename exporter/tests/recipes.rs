//! Recipes of a user's own, from their file through both commands to logits.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;

use gemma4_exporter::checkpoint::Checkpoint;
use gemma4_exporter::model::Config;
use gemma4_exporter::synthetic::{TINY_CONFIG, write_checkpoint};
use gemma4_exporter::tiny::reference;
use gemma4_format::Encoding;
use gemma4_runtime::cpu::Cpu;
use gemma4_runtime::{LoadedProgram, Session, SessionOptions};
use serde_json::Value;

/// A checkpoint in `dir/hf` whose rows have groups of 128.
fn checkpoint(dir: &Path) -> String {
    let mut config: Value = serde_json::from_str(TINY_CONFIG).unwrap();
    for (key, value) in [
        ("hidden_size", 128),
        ("intermediate_size", 256),
        ("head_dim", 32),
        ("global_head_dim", 64),
    ] {
        config[key] = value.into();
    }
    let config = config.to_string();
    write_checkpoint(&config, 5, &dir.join("hf")).unwrap();
    config
}

fn run(command: &str, dir: &Path, arguments: &[&str]) -> Output {
    let path = Path::new(env!("CARGO_BIN_EXE_gemma4-export")).with_file_name(command);
    Command::new(path).current_dir(dir).args(arguments).output().unwrap()
}

fn done(output: &Output) {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Largest difference between the logits of the CPU and candle's on the dequantized weights.
fn worst_logit(config: &str, program: &Arc<LoadedProgram>) -> f32 {
    let config = Config::parse(config).unwrap();
    let tokens: Vec<u32> = (0..40).map(|i| (i * 37 + 11) % config.vocab_size).collect();
    let expected = reference(&config, program, 40).unwrap().run(&tokens, 0).unwrap().logits;
    let device = Cpu::new(Arc::clone(program)).unwrap();
    let mut session = Session::new(&device, SessionOptions::default()).unwrap();
    let mut worst = 0.0f32;
    for (token, expected) in tokens.iter().zip(expected.to_vec2::<f32>().unwrap()) {
        session.decode(*token).unwrap();
        for (a, b) in session.logits().unwrap().iter().zip(expected) {
            worst = worst.max((a - b).abs());
        }
    }
    worst
}

fn bits_and_group(checkpoint: &Checkpoint, name: &str) -> (u8, u32) {
    match checkpoint.weight(name).unwrap().encoding {
        Encoding::Quantized { bits, group, .. } => (bits, group),
        Encoding::Dense(_) => (16, 0),
    }
}

#[test]
fn every_size_of_groups_and_heads_runs() {
    let dir = tempfile::tempdir().unwrap();
    let config = checkpoint(dir.path());
    for (at, (method, bits, group, head_bits, head_group)) in [
        ("min-max", 4, 64, 4, "32"),
        ("hqq", 4, 128, 6, "64"),
        ("min-max", 6, 32, 6, "'row'"),
        ("min-max", 8, 128, 8, "'row'"),
    ]
    .into_iter()
    .enumerate()
    {
        let text = format!(
            "untie_head = true\n\
             [[rules]]\ntensors = 'lm_head.weight'\nmethod = 'min-max'\nbits = {head_bits}\n\
             group = {head_group}\n\
             [[rules]]\ntensors = 'layers.*_proj.weight'\nlayers = '1'\nmethod = '{method}'\n\
             bits = {bits}\ngroup = {group}\n"
        );
        fs::write(dir.path().join("mine.toml"), text).unwrap();
        let bundle = format!("bundle-{at}");
        let arguments = ["--model-dir", "hf", "--output", &bundle, "--recipe", "mine.toml"];
        done(&run("gemma4-quantize", dir.path(), &arguments));
        let quantized = Checkpoint::open(dir.path().join(&bundle)).unwrap();
        assert_eq!(quantized.provenance().unwrap().recipe, "mine");
        let head_group = head_group.parse().unwrap_or(128);
        assert_eq!(bits_and_group(&quantized, "lm_head.weight"), (head_bits, head_group));
        assert_eq!(bits_and_group(&quantized, "layers.1.mlp.up_proj.weight"), (bits, group));
        assert_eq!(bits_and_group(&quantized, "layers.0.mlp.up_proj.weight").0, 16);

        // The same weights on the way to a program.
        for (flags, out) in [
            (&["--prequantized", &bundle][..], "a"),
            (&["--model-dir", "hf", "--recipe", "mine.toml"], "b"),
        ] {
            done(&run("gemma4-export", dir.path(), &[flags, &["--output-dir", out]].concat()));
        }
        let files = |which: &str| {
            let at = |name: &str| dir.path().join(which).join(name);
            LoadedProgram::open(&at("model.pte"), &at("model.ptd"), &|_, _| {}).unwrap()
        };
        let (a, b) = (files("a"), files("b"));
        assert_eq!(a.program().data_header, b.program().data_header);
        let digests = |program: &LoadedProgram| {
            program.program().weights.iter().map(|w| w.digest).collect::<Vec<_>>()
        };
        assert_eq!(digests(&a), digests(&b));
        let worst = worst_logit(&config, &Arc::new(a));
        assert!(worst <= 1e-3, "{method} {bits} {group}: off by {worst}");
    }
}

#[test]
fn more_bits_lose_less() {
    let dir = tempfile::tempdir().unwrap();
    checkpoint(dir.path());
    let mut ratios = Vec::new();
    for bits in [4, 6, 8] {
        let text = format!(
            "[[rules]]\ntensors = 'embed_tokens.weight'\nmethod = 'min-max'\nbits = {bits}\n\
             group = 32\n"
        );
        fs::write(dir.path().join("mine.toml"), text).unwrap();
        let out = format!("out-{bits}");
        let arguments = ["--model-dir", "hf", "--output", &out, "--recipe", "mine.toml"];
        done(&run(
            "gemma4-quantize",
            dir.path(),
            &[&arguments[..], &["--report", "r.json"]].concat(),
        ));
        let report = fs::read(dir.path().join("r.json")).unwrap();
        let report: Value = serde_json::from_slice(&report).unwrap();
        ratios.push(report["weights"][0]["snr_db"].as_f64().unwrap());
    }
    // A bit halves the step: 6 dB.
    for (more, less) in ratios[1..].iter().zip(&ratios) {
        assert!((9.0..15.0).contains(&(more - less)), "{ratios:?}");
    }
}

#[test]
fn a_built_in_recipe_that_is_printed_is_the_same_recipe() {
    let dir = tempfile::tempdir().unwrap();
    checkpoint(dir.path());
    let printed = run("gemma4-quantize", dir.path(), &["--print-recipe", "torchao-sensitive"]);
    done(&printed);
    fs::write(dir.path().join("copy.toml"), &printed.stdout).unwrap();
    for (recipe, out) in [("torchao-sensitive", "a"), ("copy.toml", "b")] {
        let arguments = ["--model-dir", "hf", "--output", out, "--recipe", recipe];
        done(&run("gemma4-quantize", dir.path(), &arguments));
    }
    for file in ["model.safetensors", "quantization.json"] {
        let read = |which: &str| fs::read(dir.path().join(which).join(file)).unwrap();
        assert!(read("a") == read("b"), "{file}");
    }
}

/// What a misspelt rule was for would be kept as it is, without a word.
#[test]
fn rules_for_no_weight_are_noted() {
    let dir = tempfile::tempdir().unwrap();
    checkpoint(dir.path());
    let rule = |tensors: &str| format!("[[rules]]\ntensors = '{tensors}'\nmethod = 'keep'\n");
    let text = [rule("layers.*.up_porj.weight"), rule("lm_head.weight"), rule("*")].concat();
    fs::write(dir.path().join("mine.toml"), text).unwrap();
    let arguments = ["--model-dir", "hf", "--output", "out", "--recipe", "mine.toml"];
    let said = String::from_utf8(run("gemma4-quantize", dir.path(), &arguments).stderr).unwrap();
    let note = "note: the recipe has a rule for `layers.*.up_porj.weight`, and no weight is called";
    assert!(said.contains(note) && said.matches("note: the recipe").count() == 1, "{said}");
}

#[test]
fn files_that_are_wrong_or_not_there_are_named() {
    let dir = tempfile::tempdir().unwrap();
    checkpoint(dir.path());
    fs::write(dir.path().join("bad.toml"), "[[rules]]\ntensors = 'x'\nmethod = 'gptq'\n").unwrap();
    let quantize = ["--model-dir", "hf", "--output", "out", "--recipe"];
    let export = ["--model-dir", "hf", "--output-dir", "out", "--recipe"];
    for (command, arguments) in [("gemma4-quantize", quantize), ("gemma4-export", export)] {
        for (recipe, code, wanted) in [
            ("bad.toml", 1, "error: recipe `bad.toml`, line 3: `method` is "),
            ("none.toml", 1, "error: cannot read `none.toml`"),
            ("best", 2, "recipes are: default"),
        ] {
            let output = run(command, dir.path(), &[&arguments[..], &[recipe]].concat());
            let said = String::from_utf8(output.stderr).unwrap();
            assert_eq!(output.status.code(), Some(code), "{said}");
            assert!(said.contains(wanted), "{said}");
        }
    }
}
