//! Bundles: what is written is read back, the same bytes every time, and nothing is lost.

use std::fs;
use std::path::Path;

use crate::support::*;
use gemma4_exporter::Error;
use gemma4_exporter::checkpoint::{Checkpoint, Layout, Refusal};
use gemma4_exporter::output::{Interrupt, Item, Monitor, persist_all, write_weights};
use gemma4_exporter::quantize::{Existing, Quantizer, Recipe, TensorReport, write_bundle};
use gemma4_exporter::source::ModelSource;
use gemma4_format::ptd::Header;
use gemma4_format::{Encoding, Weight};
use safetensors::Dtype;

fn recipe() -> Recipe {
    Recipe::named("default").unwrap()
}

/// A checkpoint with its text files in `dir/name`.
fn source(dir: &Path, name: &str) -> Checkpoint {
    let dir = dir.join(name);
    write_checkpoint(&dir, &config(), &language_model());
    write(&dir, "tokenizer.json", "{\"model\": 1}");
    write(&dir, "chat_template.jinja", "{{ messages }}");
    write(&dir, "generation_config.json", "{}");
    write(&dir, "README.md", "not copied");
    Checkpoint::open(dir).unwrap()
}

fn quantize(source: &Checkpoint, output: &Path) -> Result<Vec<TensorReport>, Error> {
    write_bundle(source, &recipe(), output, Existing::Refuse, &Quantizer::Cpu, &Monitor::silent())
}

fn listing(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_bundle_is_read_back() {
    let dir = tempfile::tempdir().unwrap();
    let source = source(dir.path(), "hf");
    let output = dir.path().join("deep/er/out");
    let reports = quantize(&source, &output).unwrap();
    let bundle = Checkpoint::open(&output).unwrap();

    assert_eq!(bundle.layout(), Layout::Bundle);
    assert!(bundle.names().eq(source.names()));
    assert_eq!(bundle.config_json(), source.config_json());
    assert_eq!(bundle.tokenizer_json().unwrap(), source.tokenizer_json().unwrap());
    assert_eq!(bundle.chat_template().unwrap(), source.chat_template().unwrap());
    let provenance = bundle.provenance().unwrap();
    assert_eq!(
        (provenance.recipe.as_str(), provenance.source.as_str()),
        ("default", source.identity())
    );
    assert_eq!(
        listing(&output),
        [
            "chat_template.jinja",
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "quantization.json",
            "tokenizer.json"
        ]
    );

    for report in &reports {
        let name = report.name.as_str();
        let weight = bundle.weight(name).unwrap();
        assert_eq!(weight.encoding.describe(), report.encoding);
        let rows = u64::from(weight.dims.iter().rev().skip(1).product::<u32>());
        let before = source.read_rows_f32(name, 0..rows).unwrap();
        let after = bundle.read_rows_f32(name, 0..rows).unwrap();
        let worst = before.iter().zip(&after).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        match report.max_error {
            None => assert_eq!(before, after, "{name}"),
            Some(error) => {
                assert_eq!(worst, error, "{name}");
                // Codes step by 2/15 or 2/255 of a range of 2. Rounding loses half a step; scale
                // and reciprocal in bf16 lose the more the larger the code.
                let (step, lost) = match name {
                    "embed_tokens.weight" => (2.0 / 255.0, 1.0),
                    _ => (2.0 / 15.0, 0.6),
                };
                assert!(worst > 0.0 && worst < step * lost, "{name}: {worst}");
            }
        }
    }
    let order: Vec<_> = reports.iter().map(|report| report.name.as_str()).collect();
    assert_eq!((order[0], order[order.len() - 1]), ("embed_tokens.weight", "norm.weight"));
    assert!(order[1].starts_with("layers.0.") && order[5].starts_with("layers.1."));
}

#[test]
fn layers_come_in_order_of_number() {
    let dir = tempfile::tempdir().unwrap();
    let tensors: Vec<_> =
        [10, 2, 1].map(|n| Tensor::random(&format!("model.layers.{n}.layer_scalar"), &[1])).into();
    write_checkpoint(&dir.path().join("hf"), &config(), &tensors);
    let source = Checkpoint::open(dir.path().join("hf")).unwrap();
    let reports = quantize(&source, &dir.path().join("out")).unwrap();
    let order: Vec<_> = reports.iter().map(|r| r.name.as_str()).collect();
    assert_eq!(order, ["layers.1.layer_scalar", "layers.2.layer_scalar", "layers.10.layer_scalar"]);
}

#[test]
fn equal_checkpoints_give_equal_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let mut written = Vec::new();
    for (name, threads) in [("one", 1), ("two", 3)] {
        let source = source(dir.path(), name);
        let output = dir.path().join(format!("{name}-out"));
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| quantize(&source, &output)).unwrap();
        let files = listing(&output);
        let bytes: Vec<_> = files.iter().map(|f| fs::read(output.join(f)).unwrap()).collect();
        written.push((files, bytes));
    }
    assert_eq!(written[0], written[1]);
}

#[test]
fn digests_are_those_of_the_parts() {
    let dir = tempfile::tempdir().unwrap();
    let source = source(dir.path(), "hf");
    for recipe in [None, Some(recipe())] {
        let items = Item::all(&source, source.names(), recipe.as_ref()).unwrap();
        let target = dir.path().join("model.ptd");
        let written =
            write_weights(&source, &items, &target, &Quantizer::Cpu, &Monitor::silent()).unwrap();
        let (digests, length, digest) = (written.digests, written.length, written.header);
        assert!(!target.exists());
        persist_all([written.file]).unwrap();

        let bytes = fs::read(&target).unwrap();
        assert_eq!(bytes.len() as u64, length);
        let size = Header::size(length, bytes[..8].try_into().unwrap()).unwrap() as usize;
        let header = Header::parse(&bytes[..size], length).unwrap();
        header.check(&digest, length).unwrap();
        for (item, digest) in items.iter().zip(digests) {
            let (name, dims, encoding) = (item.name.clone(), item.dims.clone(), item.encoding);
            let weight = Weight { name, dims, encoding, digest };
            let mut hasher = blake3::Hasher::new();
            for (start, end) in header.locate(&weight).unwrap() {
                hasher.update(&bytes[start as usize..end as usize]);
            }
            assert_eq!(*hasher.finalize().as_bytes(), digest, "{}", weight.name);
        }
        for (start, end) in header.pads() {
            assert!(bytes[*start as usize..*end as usize].iter().all(|b| *b == 0));
        }
        fs::remove_file(&target).unwrap();
    }
}

#[test]
fn a_bundle_is_copied_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    let first = source(dir.path(), "hf");
    quantize(&first, &dir.path().join("out")).unwrap();
    let bundle = Checkpoint::open(dir.path().join("out")).unwrap();
    let name = ["layers.0.mlp.up_proj.weight"];
    let items = Item::all(&bundle, name, Some(&recipe())).unwrap();
    assert!(matches!(items[0].encoding, Encoding::Quantized { bits: 4, .. }));
    let copy =
        write_weights(&bundle, &items, &dir.path().join("c"), &Quantizer::Cpu, &Monitor::silent())
            .unwrap();
    let items = Item::all(&first, name, Some(&recipe())).unwrap();
    let made =
        write_weights(&first, &items, &dir.path().join("m"), &Quantizer::Cpu, &Monitor::silent())
            .unwrap();
    assert_eq!(copy.digests, made.digests);

    let again = quantize(&bundle, &dir.path().join("again"));
    let Error::Checkpoint { refusal, .. } = again.unwrap_err() else { panic!("wrong error") };
    assert_eq!(*refusal, Refusal::AlreadyQuantized);
}

#[test]
fn descriptions_that_do_not_fit() {
    let dir = tempfile::tempdir().unwrap();
    quantize(&source(dir.path(), "hf"), &dir.path().join("out")).unwrap();
    let path = dir.path().join("out/model.safetensors");
    let bytes = fs::read(&path).unwrap();
    for (from, to) in [
        ("\"dims\\\":[96,64]", "\"dims\\\":[64,96]"),
        ("\"bits\\\":8,\\\"group\\\":64", "\"bits\\\":4,\\\"group\\\":64"),
        ("\"embed_tokens.weight\"", "\"embed_tokens.weighs\""),
        ("\"Symmetric\\\"", "\"Asymmetri\\\""),
    ] {
        let at = bytes.windows(from.len()).position(|w| w == from.as_bytes()).unwrap();
        let mut spoiled = bytes.clone();
        spoiled[at..at + to.len()].copy_from_slice(to.as_bytes());
        fs::write(&path, spoiled).unwrap();
        let error = Checkpoint::open(dir.path().join("out")).unwrap_err();
        let Error::Checkpoint { refusal, .. } = error else { panic!("{from}: {error}") };
        assert!(matches!(*refusal, Refusal::Description { .. }), "{from}: {refusal:?}");
    }
}

/// The error of quantizing a checkpoint with one more tensor; nothing may be left behind.
fn refused(tensor: Tensor) -> String {
    let dir = tempfile::tempdir().unwrap();
    let tensors: Vec<_> = language_model().into_iter().chain([tensor]).collect();
    write_checkpoint(&dir.path().join("hf"), &config(), &tensors);
    let source = Checkpoint::open(dir.path().join("hf")).unwrap();
    let error = quantize(&source, &dir.path().join("out")).unwrap_err();
    assert_eq!(listing(dir.path()), ["hf"]);
    error.to_string()
}

#[test]
fn weights_that_cannot_be_quantized() {
    let name = "model.language_model.layers.1.self_attn.q_proj.weight";
    let error = refused(Tensor::random(name, &[4, 48]));
    assert!(error.contains("`layers.1.self_attn.q_proj.weight`"), "{error}");
    assert!(error.contains("48 numbers, which is no multiple of the group size 32"), "{error}");
    let error = refused(Tensor::random(name, &[2, 4, 32]));
    assert!(error.contains("its dims are [2, 4, 32]"), "{error}");
    let mut values = [0.5; 128];
    for bad in [f32::NAN, f32::INFINITY] {
        values[64 + 7] = bad;
        let error = refused(Tensor::bf16(name, &[2, 64], values));
        assert!(error.contains(&format!("row 1, column 7 is {bad}")), "{error}");
    }
    let large: Vec<u8> =
        [f32::MAX, -f32::MAX].repeat(16).iter().flat_map(|v| v.to_le_bytes()).collect();
    let tensor = Tensor { name: name.into(), dtype: Dtype::F32, shape: vec![1, 32], bytes: large };
    assert!(refused(tensor).contains("row 0 has numbers too large"));
    let error = refused(Tensor::zeros(name, Dtype::I32, &[4, 8]));
    assert!(error.contains("I32[4, 8]"), "{error}");
    let error = refused(Tensor::random("model.video_tower.x", &[4]));
    assert!(error.contains("`video_tower.x`"), "{error}");
}

#[test]
fn only_bundles_are_replaced_and_only_when_asked() {
    let dir = tempfile::tempdir().unwrap();
    let source = source(dir.path(), "hf");
    let output = dir.path().join("out");
    fs::create_dir(&output).unwrap();
    quantize(&source, &output).unwrap();
    write(&output, "config.json", "changed");

    let write = |existing, monitor: &Monitor| {
        write_bundle(&source, &recipe(), &output, existing, &Quantizer::Cpu, monitor)
    };
    let error = write(Existing::Refuse, &Monitor::silent()).unwrap_err();
    assert!(matches!(error, Error::OutputNotEmpty { .. }), "{error}");

    let stop = Interrupt::default();
    stop.set();
    let error = write(Existing::Replace, &Monitor::new(false, stop)).unwrap_err();
    assert_eq!((error.exit_code(), error.to_string().as_str()), (130, "interrupted"));
    assert_eq!(fs::read(output.join("config.json")).unwrap(), b"changed");

    write(Existing::Replace, &Monitor::silent()).unwrap();
    assert_eq!(fs::read_to_string(output.join("config.json")).unwrap(), source.config_json());
    assert_eq!(listing(dir.path()), ["hf", "out"]);

    crate::support::write(&output, "thesis.tex", "mine");
    let error = write(Existing::Replace, &Monitor::silent()).unwrap_err();
    assert!(error.to_string().contains("`thesis.tex`"), "{error}");
    assert!(output.join("thesis.tex").exists());
}

#[test]
fn the_checkpoint_is_never_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let source = source(dir.path(), "hf");
    for output in [dir.path().to_owned(), dir.path().join("hf"), dir.path().join("hf/../hf")] {
        let error = write_bundle(
            &source,
            &recipe(),
            &output,
            Existing::Replace,
            &Quantizer::Cpu,
            &Monitor::silent(),
        );
        assert!(matches!(error, Err(Error::OutputIsSource { .. })), "{}", output.display());
    }
}

#[test]
fn places_that_cannot_be_written_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let source = source(dir.path(), "hf");
    write(dir.path(), "file", "");
    let error = quantize(&source, &dir.path().join("file")).unwrap_err().to_string();
    assert!(error.contains("/file`"), "{error}");
    let error = quantize(&source, &dir.path().join("file/out")).unwrap_err().to_string();
    assert!(error.contains("/file"), "{error}");
}

#[test]
fn a_symmetric_and_a_zero_weight_survive() {
    let dir = tempfile::tempdir().unwrap();
    let tensors = [
        Tensor::zeros("model.embed_tokens.weight", Dtype::BF16, &[3, 32]),
        Tensor::zeros("model.layers.0.mlp.up_proj.weight", Dtype::BF16, &[3, 96]),
    ];
    write_checkpoint(&dir.path().join("hf"), &config(), &tensors);
    let source = Checkpoint::open(dir.path().join("hf")).unwrap();
    let reports = quantize(&source, &dir.path().join("out")).unwrap();
    assert!(reports.iter().all(|r| r.snr_db.is_none() && r.max_error == Some(0.0)));
    let bundle = Checkpoint::open(dir.path().join("out")).unwrap();
    for name in bundle.names() {
        assert!(bundle.read_rows_f32(name, 0..3).unwrap().iter().all(|v| *v == 0.0), "{name}");
    }
}

#[test]
fn text_files_that_are_placeholders_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let source = source(dir.path(), "hf");
    write(&dir.path().join("hf"), "tokenizer.json", "version https://git-lfs.github.com/spec/v1\n");
    let error = quantize(&source, &dir.path().join("out")).unwrap_err().to_string();
    assert!(error.contains("Git LFS pointer instead of `tokenizer.json`"), "{error}");
    assert_eq!(listing(dir.path()), ["hf"]);
}

#[test]
fn a_tied_head_gets_codes_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = Recipe::named("torchao-default").unwrap();
    let quantize = |source: &Checkpoint, to: &str| {
        let output = dir.path().join(to);
        write_bundle(
            source,
            &recipe,
            &output,
            Existing::Refuse,
            &Quantizer::Cpu,
            &Monitor::silent(),
        )
        .unwrap();
        Checkpoint::open(output).unwrap()
    };
    let bits = |bundle: &Checkpoint, name: &str| match bundle.weight(name).unwrap().encoding {
        Encoding::Quantized { bits, .. } => bits,
        Encoding::Dense(_) => 16,
    };
    let tied = quantize(&source(dir.path(), "tied"), "a");
    assert_eq!((bits(&tied, "embed_tokens.weight"), bits(&tied, "lm_head.weight")), (8, 4));
    let head = tied.read_rows_f32("lm_head.weight", 0..96).unwrap();
    for (head, embedding) in
        head.iter().zip(tied.read_rows_f32("embed_tokens.weight", 0..96).unwrap())
    {
        assert!((head - embedding).abs() < 0.1, "{head} {embedding}");
    }

    let mut tensors = language_model();
    tensors.push(Tensor::zeros("lm_head.weight", Dtype::BF16, &[96, 64]));
    write_checkpoint(&dir.path().join("untied"), &config(), &tensors);
    let untied = quantize(&Checkpoint::open(dir.path().join("untied")).unwrap(), "b");
    assert_eq!(untied.read_rows_f32("lm_head.weight", 0..96).unwrap(), [0.0; 96 * 64]);
}
